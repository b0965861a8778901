"""docker-compose.yml for real: `python -m pytest tests/compose`, with a Docker engine."""

import re
import uuid

import pytest
import redis
from celery import Celery

from examples.demo import History
from tests.compose.stack import PATIENCE_S, health_of
from tests.harness import wait_until

pytestmark = pytest.mark.timeout(PATIENCE_S)

SERVICES = {
    "redis": ["alpha", "beat", "beta", "redis"],
    "rabbitmq": ["alpha", "beat", "beta", "flower", "rabbitmq", "redis"],
}
CLAIMS = [
    "one key: one container runs, the other skips",
    "the skipped call names the other container",
    "another key runs meanwhile",
    "beat's job never overlaps",
    "a call that comes too early is skipped",
    "kill -9: the lock holds until the lease ends",
    "then another worker takes it over, and runs",
    "the dead holder is named",
    "the killed container comes back",
    "every key left in Redis has a TTL",
]
SETTLE, LEASE_S = "examples.demo_app.settle", 3
# What the worker's own child of `docker-init` is told.
SIGNAL = """
import os, signal
[worker] = open("/proc/1/task/1/children").read().split()
os.kill(int(worker), signal.{})
"""


def test_up_waits_until_every_service_is_healthy(stack, broker):
    """After `up --wait` exactly the services of the profile run, all healthy."""
    containers = stack.containers()
    health = {service: health_of(container) for service, container in containers.items()}
    states = {service: container.attrs["State"] for service, container in containers.items()}
    assert health == dict.fromkeys(SERVICES[broker], "healthy"), states  # with what each check printed


def test_containers_run_nothing_as_root(stack, broker):
    """No process of any container has the user id 0."""

    def as_root() -> list[str]:
        users = {
            service: {uid for uid, _pid in container.top(ps_args="-eo uid,pid")["Processes"]}
            for service, container in stack.containers().items()
        }
        return [service for service, uids in users.items() if not uids or "0" in uids]

    # A health check is root's for a moment, until the engine has given it the container's user.
    wait_until(lambda: not as_root(), "nobody is root")


def test_demo_passes_every_check(stack, broker):
    """`run --rm demo` ends with 0, and ticks every claim; alpha's container dies and is started again, once.

    BROKER_URL decides where messages go; the locks are in Redis all the same.
    """
    before = stack.containers()["alpha"].attrs["RestartCount"]
    demo = stack.run("run", "--rm", "-T", "demo")
    ticked = [line.split("✓")[1] for line in demo.stdout.splitlines() if "✓" in line]
    assert demo.returncode == 0, demo.stdout
    assert [claim for claim, line in zip(CLAIMS, ticked, strict=True) if claim not in line] == [], demo.stdout
    scheme = {"redis": "redis", "rabbitmq": "amqp"}[broker]
    lines = [line.split() for line in demo.stdout.splitlines()]
    where = {words[0]: words[1] for words in lines if len(words) == 2}
    assert (where["locks"], where["broker"].split(":")[0]) == ("redis://redis:6379/0", scheme)
    assert stack.containers()["alpha"].attrs["RestartCount"] == before + 1, demo.stdout


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_flower_sees_both_workers(stack):
    """Flower's own page names alpha and beta."""
    page = "from urllib.request import urlopen; print(urlopen('http://localhost:5555/workers?json=1').read())"

    def named() -> bool:
        text = stack.containers()["flower"].exec_run(["python", "-c", page]).output.decode()
        return "celery@alpha" in text and "celery@beta" in text

    assert wait_until(named, "both workers on Flower's page")


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_killed_container_is_succeeded_by_the_other(stack):
    """`docker kill` of the holder's container: the other one takes over after the lease, and names it."""
    url = stack.redis_url()
    app = Celery(broker=url)
    key = uuid.uuid4().hex
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.delete("demo:history")
        history = History(client, "demo:history")

        def seen(what: str, task_id: str) -> list[dict[str, object]]:
            history.read()
            return history.of(what, task_id=task_id)

        first = app.send_task(SETTLE, [key], queue="alpha").id
        wait_until(lambda: seen("start", first), "the task runs on alpha")
        stack.containers()["alpha"].kill("SIGKILL")
        try:
            killed_at = float(client.time()[0])
            second = app.send_task(SETTLE, [key], queue="beta").id
            [start] = wait_until(lambda: seen("start", second), "the task runs on beta")
            client.rpush("demo:gate:settle", "open")
            wait_until(lambda: seen("released", second), "beta has released the lock")
            log = stack.run("logs", "beta").stdout
        finally:
            stack.up("--no-build")
    assert start["worker"] == "celery@beta"
    assert start["at"] - killed_at <= LEASE_S + 10
    assert re.search(rf"settle\[{second}\] took over.*settle\[{first}\] on celery@alpha", log), log


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_worker_that_stands_still_becomes_unhealthy(stack):
    """The health check is about the worker, not about its container."""
    container = stack.containers()["beta"]
    assert container.exec_run(["python", "-c", SIGNAL.format("SIGSTOP")]).exit_code == 0
    try:
        wait_until(lambda: health_of(stack.containers()["beta"]) == "unhealthy", "beta is unhealthy", 60)
    finally:
        container.exec_run(["python", "-c", SIGNAL.format("SIGCONT")])
        wait_until(lambda: health_of(stack.containers()["beta"]) == "healthy", "beta is healthy again", 60)
