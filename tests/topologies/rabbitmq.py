"""A RabbitMQ in a container, which dies with the test process; or the one that AMQP_URL names."""

import os
import subprocess
import sys
import uuid
from typing import Any

import docker
from kombu import Connection

from tests.containers import stand_still
from tests.harness import wait_until
from tests.topologies.servers import HOST, free_port

IMAGE = os.environ.get("RABBITMQ_IMAGE", "rabbitmq:3")
# After how long a delayed call that a broker was killed with is sent on again; by default 180 s.
ONWARDS_AGAIN = "-rabbit dead_letter_worker_publisher_confirm_timeout 5000"
BOOT_S = 180

# The end of standard input is the test process's end, even by kill -9.
_SUPERVISOR = """
import sys, docker
sys.stdin.read()
try:
    docker.from_env().containers.get(sys.argv[1]).remove(force=True, v=True)
except docker.errors.NotFound:
    pass
"""

_ALL_ARE_LED = """
lists:all(
    fun(Q) -> ra_leaderboard:lookup_leader(element(1, amqqueue:get_pid(Q))) =/= undefined end,
    rabbit_amqqueue:list_by_type(rabbit_quorum_queue)).
"""


class RabbitMQ:
    """One broker. Its port and what it has stored outlast its kill.

    Raises:
        docker.errors.DockerException: Neither AMQP_URL nor a container engine is there.
    """

    def __init__(self) -> None:
        given = os.environ.get("AMQP_URL")
        self.is_own = given is None
        self.url = given or f"amqp://guest:guest@{HOST}:{free_port()}//"
        self._container: Any = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._is_frozen = False
        if self.is_own:
            self._create()
        self.wait_until_ready()

    def _create(self) -> None:
        client, name = docker.from_env(), f"setnx-rabbitmq-{uuid.uuid4().hex[:12]}"
        self._supervisor = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._container = client.containers.run(
                IMAGE,
                name=name,
                hostname="rabbit",  # the data is stored under it
                environment={"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ONWARDS_AGAIN},
                ports={"5672/tcp": (HOST, self.port)},
                detach=True,
            )
        except BaseException:
            self.stop()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(Connection(self.url).port)

    def stop(self) -> None:
        """Remove it, and all that it has stored."""
        if self._supervisor is not None:
            self._supervisor.communicate()
            self._supervisor = None

    def start(self) -> None:
        """Start it again after a kill, and wait until it answers."""
        self._container.start()
        self.wait_until_ready()
        wait_until(
            lambda: self._ctl("eval", _ALL_ARE_LED) == b"true\n", "leaders of all quorum queues", BOOT_S
        )

    def kill(self) -> None:
        """kill -9."""
        if not self._is_frozen:  # else that was done before
            self._write_down()
        self._container.kill()
        self._container.wait()
        self._is_frozen = False

    def _write_down(self) -> None:
        """Write down all that was declared: a quorum queue that was not has no leader after a kill (3.10)."""
        self._ctl("eval", "[dets:sync(Table) || Table <- dets:all()].")

    def freeze(self) -> None:
        """It keeps its connections, and reads and answers nothing. A kill ends that, too."""
        self._write_down()
        stand_still(self._container)
        self._is_frozen = True
        assert not self.answers()

    def _ctl(self, *command: str) -> bytes:
        ended, output = self._container.exec_run(["rabbitmqctl", "-q", *command])
        assert ended == 0, output
        return bytes(output)

    def wait_until_ready(self) -> None:
        """Wait until it takes connections."""
        wait_until(self.answers, f"an answer of {self.url}", BOOT_S)

    def answers(self) -> bool:
        """True if it takes connections."""
        try:
            with self.connection() as connection:
                connection.connect()
                return True
        except Exception:  # whatever a half-started broker makes of the handshake
            return False

    def connection(self) -> Connection:
        """A connection of one's own."""
        return Connection(self.url, connect_timeout=2)

    def messages(self, queue: str) -> int:
        """How many messages of a queue nobody has been given yet."""
        with self.connection() as connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)

    def queues(self) -> str:
        """The queues, and how many messages of each are ready, and are with a consumer."""
        return self._ctl("list_queues", "name", "messages_ready", "messages_unacknowledged", "state").decode()

    def delaying(self, queue: str) -> list[str]:
        """The queues in which couriers for another one wait."""
        listed = self._ctl("list_queues", "name").decode().splitlines()
        return [name for name in listed if name.startswith(f"{queue}.setnx-")]

    def delete(self, queue: str) -> None:
        """Delete a queue and the exchange of its name."""
        with self.connection() as connection:
            connection.default_channel.queue_delete(queue)
            connection.default_channel.exchange_delete(queue)

    def limit(self, user: str, *, may_not_write: str = "-", may_not_configure: str = "-") -> str:
        """The URL of a user who may do all but publish to one exchange, or declare some queues.

        For a server of our own.
        """
        rights = [f"^(?!{may_not_configure}$).*", f"^(?!{may_not_write}$).*", ".*"]
        self._ctl("add_user", user, "pw")
        self._ctl("set_permissions", user, *rights)
        return self.url.replace("guest:guest", f"{user}:pw")
