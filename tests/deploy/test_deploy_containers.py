"""docker-compose.yml for real: `python -m pytest tests/deploy`, with a Docker engine."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from tests.containers import go_on, stand_still
from tests.deploy.stack import LEASE_S, PATIENCE_S, Logs, health_of
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
BODY = ("start", "end")


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
def test_restarted_container_lets_its_body_end(stack, scene):
    """`restart`: the body ends in the soft shutdown, its lock is given back, and whoever waits runs next."""
    first, second = scene.settle("alpha", "start"), scene.settle("beta", "conflict")
    alpha, since = stack.containers()["alpha"], time.time()
    with ThreadPoolExecutor() as threads:
        restart = threads.submit(stack.run, "restart", "alpha")
        wait_until(lambda: b"Initiating Soft Shutdown" in alpha.logs(since=since), "a soft shutdown")
        assert not scene.seen("start", second)
        scene.open(1)
        wait_until(lambda: scene.seen("start", second), "the second's turn")
        assert restart.result().returncode == 0
    scene.open(2)
    third = scene.settle("alpha", "end")  # the restarted worker works
    calls, ran = [first, second, third], [each for each in scene.history.entries if each["what"] in BODY]
    bodies = [(each["what"], each["task_id"]) for each in ran if each["task_id"] in calls]
    assert bodies == [(what, call) for call in calls for what in BODY]
    assert scene.seen("lost", first) == scene.seen("taken_over", second) == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_holder_that_is_cut_off_is_told_and_harms_nobody(stack, scene, failovers):
    """Its container loses its network: another takes over, and keeps the lock when the first is back."""
    app, name = Celery(broker=stack.redis_url()), uuid.uuid4().hex
    with stack.stranded("here") as here, stack.stranded("there") as there:
        journal = Logs(here.container, there.container)
        first = journal.reached("start", app.send_task("stranded", [name], queue="here"))
        second = journal.reached("conflict", app.send_task("stranded", [name], queue="there"))
        with here.cut_off():
            cut = time.monotonic()
            (after,) = journal.wait_for("start", task_id=second.id)
            failovers.append(after["at"] - cut)
            journal.wait_for("told", task_id=first.id)
            journal.wait_for("lost", task_id=first.id)
        here.go_on()
        journal.wait_for("postrun", task_id=first.id, state="FAILURE")
        assert b"was not released" not in here.container.logs()  # it reached the server, which said no
        now = scene.holder(after["key"])
        assert (now.task_id, now.fence) == (second.id, after["fence"])
        wait_until(lambda: scene.holder(after["key"]).deadline > now.deadline, "a renewal of the second's")
        there.go_on()
        journal.wait_for("postrun", task_id=second.id, state="SUCCESS")
        assert journal.entries(what="lost", task_id=second.id) == []
        assert sorted(journal.words(first.id)) == ["lost", "postrun", "start", "told"]
        (start,) = journal.entries(what="start", task_id=first.id)
        (taken,) = journal.entries(what="taken_over")
        assert (taken["task_id"], taken["holder"]) == (second.id, first.id)
        assert (after["key"], after["fence"] > start["fence"]) == (start["key"], True)


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_lock_outlives_a_broker_that_stands_still(stack, scene):
    """The broker stands still for longer than the lease: the lock is elsewhere, and is renewed."""
    call = scene.settle("alpha", "start")
    (acquired,) = scene.seen("acquired", call)
    before = scene.holder(acquired["key"])
    rabbitmq = stack.containers()["rabbitmq"]
    stand_still(rabbitmq)
    try:
        wait_until(
            lambda: scene.holder(acquired["key"]).deadline > before.deadline + LEASE_S + 1, "its renewals"
        )
    finally:
        go_on(rabbitmq)
    assert scene.holder(acquired["key"]).token == before.token
    scene.open(1)
    wait_until(lambda: scene.seen("released", call), "its end")
    assert scene.seen("lost", call) == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_worker_that_stands_still_becomes_unhealthy(stack):
    """The health check is about the worker, not about its container."""
    container = stack.containers()["beta"]
    stand_still(container)
    try:
        wait_until(lambda: health_of(stack.containers()["beta"]) == "unhealthy", "beta is unhealthy", 60)
    finally:
        go_on(container)
        wait_until(lambda: health_of(stack.containers()["beta"]) == "healthy", "beta is healthy again", 60)
