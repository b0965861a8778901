"""A key, and a task, are paused while two workers have a load; and a partner tells them "not now"."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_setnx.terms import Whose
from tests.conftest import LOCK_DB
from tests.limitstage import worker_children
from tests.pausing import KEYS, OPTIONS, Load, Operator, pause_under_load

APP, QUEUE = "tests.topologies.app", "paused"


@pytest.fixture(scope="module")
def conf(server) -> dict[str, Any]:
    """The settings of the app: lines are looked at as seldom as in production."""
    return {"task_default_queue": QUEUE, "setnx_url": server.url(LOCK_DB), "looks_after_s": 30}


@pytest.fixture(scope="module")
def workers(module_worker, conf) -> Any:
    """Two of them."""
    return [module_worker(APP, queues=QUEUE, conf=conf) for _ in range(2)]


@pytest.fixture
def tasks(workers, conf, locks, journal) -> Any:
    """The tasks of their app, with clean databases."""
    from tests.topologies.app import make_app, make_tasks

    return make_tasks(make_app(**conf))


@pytest.fixture
def operator(tasks, workers) -> Iterator[Operator]:
    """An operator, who leaves nothing paused."""
    operator = Operator(tasks.app, *workers)
    yield operator
    operator.resume_all()


@pytest.mark.parametrize("whose", ["keys", "task"])
def test_pause_under_load_starts_nothing_and_loses_nothing(tasks, journal, operator, whose):
    """Of every policy; and what waits goes on at once, in its order."""
    keys = [Whose(key=tasks.load.lock_key(key)) for key in KEYS]
    load = Load(tasks.load, journal)
    try:
        told = pause_under_load(load, operator, keys if whose == "keys" else [Whose(scope=tasks.load.name)])
    finally:
        load.stop()
    print(f"the first start after the end of the pause of the {whose}: {told}")


def test_key_that_is_held_back_again_and_again_starts_nothing_meanwhile(tasks, workers, journal):
    """Calls of two workers, that wait or come back by themselves: every fifth is told "not now"."""
    results = []
    for number in range(20):
        args, policy = ("a", 0.0 if number % 5 else 1.0), ("wait", "retry")[number % 2]
        results.append(tasks.partner.apply_async(args, singleton={**OPTIONS, "on_conflict": policy}))
    assert [result.get(timeout=60) for result in results] == ["a"] * 20
    starts, spans = (journal.wait_for(what, count) for what, count in (("start", 20), ("held back", 4)))
    for span in spans:
        assert not [each for each in starts if span["since_us"] < each["fence"] < span["until_us"]]
    assert max(start["fence"] for start in starts) > min(span["until_us"] for span in spans)
    pools = [set(worker_children(worker)) for worker in workers]
    assert all(pool & {start["pid"] for start in starts} for pool in pools)
