"""Redis as broker, without a lock of ours: what docs/redis-broker.md says of Celery and kombu."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
import redis
from celery import Celery
from kombu.transport.redis import Channel

from examples.embedded import EmbeddedServer
from tests.harness import Worker, redelivery, wait_until

pytestmark = pytest.mark.slow

ENDS = (5, 7) <= celery.VERSION < (5, 8)
"""Whether a worker may end with its broker: Celery 5.7.0's does, 5.6.3's does not."""


@pytest.fixture
def broker() -> Iterator[EmbeddedServer]:
    """A server that is a broker, and may be stopped."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def asked(broker) -> Iterator[redis.Redis]:
    """A client of the broker."""
    with redis.Redis.from_url(broker.url(), decode_responses=True) as client:
        yield client


@pytest.fixture
def app(broker) -> Celery:
    """Who publishes."""
    return Celery("publisher", broker=broker.url(), backend=broker.url(), set_as_current=False)


@pytest.fixture
def start(broker, start_worker) -> Callable[..., Worker]:
    """Starts a plain worker of one process."""

    def start(conf: dict[str, Any] | None = None) -> Worker:
        environment = {"PLAIN_URL": broker.url()}
        return start_worker("tests.plainapp", concurrency=1, conf=conf, environment=environment)

    return start


def started(asked: redis.Redis, task_id: str, times: int = 1) -> int:
    """The process of the last body of a task, once it has started so often."""

    def pids() -> list[int]:
        entries = [json.loads(entry) for entry in asked.lrange("started", 0, -1)]
        return [pid for of_task, pid in entries if of_task == task_id]

    return wait_until(lambda: len(pids()) >= times and pids(), f"{times} x start of {task_id}")[-1]


def in_redis(asked: redis.Redis) -> tuple[int, int]:
    """How many messages are in the queue, and how many with workers."""
    return asked.llen("celery"), asked.hlen("unacked")


def grow_old(asked: redis.Redis) -> None:
    """Have the visibility timeout of every message that a worker has be over."""
    asked.zadd("unacked_index", dict.fromkeys(asked.zrange("unacked_index", 0, -1), 1))


def ends_with_its_broker(broker, asked, app, worker: Worker, held: str) -> bool:
    """Whether a worker that has such messages ends as its broker goes, or tries to connect again."""
    if held == "prefetched":
        started(asked, app.send_task("plain.early").id)
    options = {"countdown": 600} if held == "delayed" else {}
    count = 0 if held == "nothing" else 3
    for _ in range(count):
        app.send_task("plain.late" if held == "late" else "plain.early", **options)
    known = count + (held == "prefetched")
    wait_until(lambda: worker.log_text().count(" received") >= known, "it knows them")
    wait_until(lambda: in_redis(asked) == (0, count), "it has acknowledged no other")
    broker.stop()
    either = re.compile("(Unrecoverable error: AttributeError)|Trying again in")
    said = wait_until(lambda: either.search(worker.log_text()), f"it ends, or tries again: {worker.log}")
    return said[1] is not None


@pytest.mark.parametrize("held", ["nothing", "delayed", "prefetched", "late"])
def test_worker_that_holds_messages_when_its_broker_goes(broker, asked, app, start, held):
    """Celery 5.7: it ends, but now and then, for it matters which of its connections it finds cut first."""
    may_end = ENDS and held != "nothing"
    for _ in range(10 if may_end else 1):
        worker = start()
        if ends := ends_with_its_broker(broker, asked, app, worker, held):
            break
        worker.kill()
        broker.restart()
    assert ends == may_end
    if ends and held == "delayed":
        assert wait_until(lambda: worker.process.poll(), "the worker ends") == 1


def test_message_acknowledged_early_is_lost_with_its_worker(asked, app, start):
    """It is nowhere any more."""
    worker = start()
    started(asked, app.send_task("plain.early").id)
    wait_until(lambda: in_redis(asked) == (0, 0), "the message is acknowledged")
    worker.kill()
    assert in_redis(asked) == (0, 0)


def test_message_acknowledged_late_stays_with_its_dead_worker(asked, app, start):
    """In `unacked`, until another worker finds that it is older than the visibility timeout."""
    worker = start()
    call = app.send_task("plain.late")
    started(asked, call.id)
    worker.kill()
    assert in_redis(asked) == (0, 1)
    grow_old(asked)
    start({"broker_transport_options": redelivery(1)})
    started(asked, call.id, 2)


def test_run_that_was_killed_is_delivered_again_only_if_it_is_rejected(asked, app, start):
    """A pool process is killed: with acks_late alone the call has failed, and its message is acknowledged."""
    start()
    failed = app.send_task("plain.late")
    os.kill(started(asked, failed.id), signal.SIGKILL)
    wait_until(lambda: failed.state == "FAILURE", "the call has failed")
    wait_until(lambda: in_redis(asked) == (0, 0), "its message is acknowledged")
    again = app.send_task("plain.rejected")
    os.kill(started(asked, again.id), signal.SIGKILL)
    started(asked, again.id, 2)


@pytest.mark.parametrize("behind", ["a countdown", "another body"])
def test_message_that_waits_in_a_worker_beyond_the_visibility_timeout_is_delivered_twice(
    asked, app, start, behind
):
    """Two workers have it then: prefetched behind a body, or with a countdown that is not over."""
    impatient = {"broker_transport_options": redelivery(1)}
    first = start(impatient)
    if behind == "a countdown":
        call = app.send_task("plain.early", countdown=600)
    else:
        started(asked, app.send_task("plain.early").id)
        call = app.send_task("plain.early")
    first.wait_for_log(f"[{call.id}] received")
    grow_old(asked)
    second = start(impatient)
    wait_until(
        lambda: f"{first.log_text()}{second.log_text()}".count(f"[{call.id}] received") > 1,
        f"a second delivery: {first.log}, {second.log}",
    )


def test_mutex_of_a_worker_that_died_as_it_looked_stops_redelivery(asked, app):
    """Nobody looks for as long as it lasts: five minutes, unless `unacked_mutex_expire` says otherwise."""
    assert Channel.unacked_mutex_expire == 300
    app.conf.broker_transport_options = {"visibility_timeout": 1, "unacked_restore_interval": 1}
    app.send_task("plain.late")
    with app.connection_for_read() as taking, app.connection_for_read() as looking:
        consumer = taking.SimpleQueue("celery")
        consumer.get(timeout=10)
        grow_old(asked)
        asked.set("unacked_mutex", "of the dead", ex=300)
        looking.default_channel.qos.restore_visible(interval=1)
        assert in_redis(asked) == (0, 1)
        asked.delete("unacked_mutex")
        looking.default_channel.qos.restore_visible(interval=1)
        assert in_redis(asked) == (1, 0)
