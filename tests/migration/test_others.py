"""Where others are ahead of us, and what people use without a package for unique tasks: docs/compared.md."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis_lock
from celery import Celery
from celery.app.trace import build_tracer
from celery_heimdall import HeimdallTask, RateLimit
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton, clear_locks

from celery_setnx import SingletonTask, is_skipped
from celery_setnx.testing import guarded, pass_time
from tests.harness import wait_until
from tests.migration.deploy import shop_url


@pytest.fixture
def app(shop) -> Celery:
    """An app on the shop's empty database, with a worker of nobody's."""
    url = shop_url()
    app = Celery("others", broker=url, backend=url, set_as_current=False)
    app.conf.setnx_url = app.conf.singleton_backend_url = url
    return app


def task_of(app: Celery, base: type, **options: Any) -> Any:
    """A task that does nothing, under one kind of lock; its options are named after that."""

    def settle(account_id: int) -> int:
        return account_id

    return app.task(settle, name=f"shop.{base.__name__}", base=base, shared=False, **options)


def queued(shop: redis.Redis) -> int:
    """How many messages are in the queue."""
    return int(shop.llen("celery"))


def run_next(app: Celery, task: Any) -> str:
    """What a worker's run of the oldest message ends with: its state."""
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=10)
        message.ack()
    (args, kwargs, _embed), task_id = message.payload, message.headers["id"]
    request = {"id": task_id, "args": args, "kwargs": kwargs, "is_eager": False}
    request |= {"delivery_info": {"routing_key": "celery"}, "called_directly": False}
    build_tracer(task.name, task, app=app)(task_id, args, kwargs, request)
    return str(app.AsyncResult(task_id).state)


def test_heimdall_limits_the_rate_of_all_workers(app, shop):
    """Two a minute: the third call comes back to the queue. So does ours, or it waits in line."""
    theirs = task_of(app, HeimdallTask, heimdall={"rate_limit": RateLimit((2, 60)), "key": "h"})
    for account_id in range(3):
        theirs.delay(account_id)
    assert [run_next(app, theirs) for _ in range(3)] == ["SUCCESS", "SUCCESS", "RETRY"]
    assert queued(shop) == 1

    ours = task_of(app, SingletonTask, singleton={"key": (), "rate": (2, 60), "on_conflict": "skip"})
    with guarded(app):
        assert [is_skipped(ours.apply((account_id,)).get()) for account_id in range(3)] == [
            False,
            False,
            True,
        ]


def test_heimdall_makes_a_rate_of_the_arguments(app, shop):
    """A callable: here account 1 may start one call a minute, and account 2 two."""
    rate = RateLimit(lambda args: (args[0], 60))
    theirs = task_of(app, HeimdallTask, heimdall={"rate_limit": rate})
    accounts = (1, 1, 2, 2, 2)
    for account_id in accounts:
        theirs.delay(account_id)
    states = [run_next(app, theirs) for _ in accounts]
    assert states == ["SUCCESS", "RETRY", "SUCCESS", "SUCCESS", "RETRY"]


def test_counter_of_heimdall_forgets_starts_that_are_younger_than_its_period(app, shop):
    """It begins anew a period after its first call, so three start within a moment. Ours slides: two."""
    theirs = task_of(app, HeimdallTask, heimdall={"rate_limit": RateLimit((2, 60)), "key": "h"})
    for account_id in range(4):
        theirs.delay(account_id)
    assert run_next(app, theirs) == "SUCCESS"
    (counter,) = [key for key in shop.scan_iter() if 0 < shop.ttl(key) <= 60]
    assert run_next(app, theirs) == "SUCCESS"  # by now 59 s have passed since the first
    shop.pexpire(counter, 1)
    wait_until(lambda: not shop.exists(counter), "a minute since the first is over")
    assert [run_next(app, theirs) for _ in range(2)] == ["SUCCESS", "SUCCESS"]

    ours = task_of(app, SingletonTask, singleton={"key": (), "rate": (2, 60), "on_conflict": "skip"})
    with guarded(app):
        assert ours.apply((1,)).get() == 1
        pass_time(59, ours, 1)
        assert ours.apply((2,)).get() == 2
        pass_time(1, ours, 1)
        assert [is_skipped(ours.apply((account_id,)).get()) for account_id in (3, 4)] == [False, True]


def test_heimdall_publishes_nothing_until_the_period_is_over(app, shop):
    """`unique_wait_for_expiry`: also when the run is done. Ours is published, and skipped when it starts."""
    options = {"unique": True, "unique_wait_for_expiry": True, "unique_lock_blocking": False}
    theirs = task_of(app, HeimdallTask, heimdall=options)
    done = theirs.delay(7)
    assert run_next(app, theirs) == "SUCCESS"
    assert theirs.delay(7).id == done.id
    assert queued(shop) == 0

    ours = task_of(app, SingletonTask, singleton={"at_least_for": 3600, "dedupe": "until_done"})
    with guarded(app):
        assert ours.apply((7,)).get() == 7
        assert not ours.delay(7).deduplicated
        assert queued(shop) == 1
        assert is_skipped(ours.apply((7,)).get())
        pass_time(3600, ours, 7)
        assert ours.apply((7,)).get() == 7


def test_once_locks_without_redis(app, shop, tmp_path):
    """In a file; no key of it is in Redis."""
    app.conf.ONCE = {"backend": "celery_once.backends.File", "settings": {"location": str(tmp_path)}}
    app.conf.ONCE["settings"]["default_timeout"] = 60
    task = task_of(app, QueueOnce)
    task.delay(7)
    with pytest.raises(AlreadyQueued):
        task.delay(7)
    assert list(shop.scan_iter("qo_*")) == []


def test_clear_locks_of_singleton_frees_those_of_the_living(app, shop):
    """It asks nobody who holds them: the call is published a second time, while the first is queued."""
    task = task_of(app, Singleton)
    first = task.delay(7)
    assert task.delay(7).id == first.id
    clear_locks(app)
    assert task.delay(7).id != first.id
    assert queued(shop) == 2


@pytest.mark.clock
def test_redis_lock_renews_itself(shop):
    """python-redis-lock with `auto_renewal` is held for longer than its `expire`."""
    lock = redis_lock.Lock(shop, "report", expire=6, auto_renewal=True)
    assert lock.acquire(blocking=False)
    ends = time.monotonic() + 7  # it renews after 4
    wait_until(lambda: time.monotonic() > ends, "more than its time to live")
    assert not redis_lock.Lock(shop, "report", expire=6).acquire(blocking=False)
    lock.release()


@pytest.fixture
def redbeat(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    """A beat with RedBeat's scheduler, and its defaults."""
    (tmp_path / "proj.py").write_text(
        "import os\nfrom celery import Celery\n"
        "app = Celery('proj', broker=os.environ['SHOP_URL'])\n"
        "app.conf.redbeat_redis_url = os.environ['SHOP_URL']\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "proj", "beat", "-S", "redbeat.RedBeatScheduler"]
    process = subprocess.Popen(
        [*command, "--pidfile="], cwd=tmp_path, env={**os.environ, "SHOP_URL": shop_url()}
    )
    yield process
    process.kill()
    process.wait()


def test_redbeat_that_is_killed_keeps_its_lock_for_25_minutes(shop, redbeat):
    """Unless `redbeat_lock_timeout` says otherwise: five times beat's longest pause, 300 s by default."""
    wait_until(lambda: shop.exists("redbeat::lock"), "the lock of the beat that ticks")
    redbeat.send_signal(signal.SIGKILL)
    redbeat.wait()
    assert 1_400_000 < shop.pttl("redbeat::lock") <= 1_500_000
