"""Brokers and result backends that are no Redis: the locks are in Redis, and the promises hold.

The broker filesystem; the broker sqlalchemy, here on a PostgreSQL; the backends file, database and rpc.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_setnx import is_skipped
from tests.ecosystem.postgres import Postgres
from tests.harness import Journal, is_parked, wait_until

APP = "tests.ecosystem.transportapp"
LASTING = ["filesystem-file", "sqlalchemy-database"]
"""Whose results any process can read."""


@pytest.fixture(scope="module")
def sql_url() -> Iterator[str]:
    """A database of its own, as SQLAlchemy names it."""
    with Postgres() as postgres:
        yield postgres.url()


def filesystem(directory: Any) -> dict[str, Any]:
    """Settings for a broker and a backend in directories."""
    made = {name: directory / name for name in ("messages", "control", "results")}
    for path in made.values():
        path.mkdir()
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(made["messages"]),
            "data_folder_out": str(made["messages"]),
            "control_folder": str(made["control"]),
            "polling_interval": 0.1,
        },
        "result_backend": f"file://{made['results']}",
    }


@pytest.fixture(scope="module", params=[*LASTING, "redis-rpc"])
def transport(request, server, tmp_path_factory, module_worker) -> SimpleNamespace:
    """The tasks, with the settings of this broker and backend; a worker of theirs runs."""
    conf: dict[str, Any]
    if request.param == "filesystem-file":
        conf = filesystem(tmp_path_factory.mktemp("transport"))
    elif request.param == "sqlalchemy-database":
        url = request.getfixturevalue("sql_url")
        broker = {"broker_url": f"sqla+{url}", "broker_transport_options": {}}  # they go to SQLAlchemy
        conf = {**broker, "result_backend": f"db+{url}"}
    else:
        conf = {"result_backend": "rpc://", "task_default_queue": "rpc-calls"}
    module_worker(APP, conf=conf, queues=conf.get("task_default_queue", "celery"))
    from tests.ecosystem import transportapp

    return transportapp.define(transportapp.make_app("transports", **conf))


class Calls:
    """Calls of one key that is no other test's."""

    def __init__(self, tasks: SimpleNamespace, journal: Journal, locks: Any, key: str) -> None:
        self.tasks, self.key = tasks, key
        self._journal, self._locks = journal, locks

    def held(self, task: Any) -> Any:
        """A call whose body waits at its gate."""
        return self._journal.reached("start", task.delay(self.key, self.key))

    def parked(self, task: Any) -> Any:
        """A call that waits in line, out of its pool slot."""
        result, key = task.delay(self.key), task.lock_key(self.key)
        wait_until(lambda: is_parked(self._locks, key, result.id), f"{result.id} waits")
        return result

    def begun(self) -> list[str]:
        """Ids of the calls whose bodies have begun, in order."""
        return [entry["task_id"] for entry in self._journal.entries(what="start")]


@pytest.fixture
def calls(transport, journal, gates, locks, name) -> Iterator[Calls]:
    """Calls of this test's key; what is left at a gate goes on."""
    yield Calls(transport, journal, locks, name)
    gates(name, 1 + journal.unended())


def test_equal_call_is_skipped_and_its_sender_is_told(calls, gates):
    """While the first runs; the result names it. After its end the next one runs."""
    first = calls.held(calls.tasks.skip)
    skipped = calls.tasks.skip.delay(calls.key).get(timeout=60)
    assert is_skipped(skipped)
    assert skipped["holder"]["task_id"] == first.id
    gates(calls.key)
    assert first.get(timeout=60) == [calls.key, calls.key]
    wait_until(lambda: calls.tasks.skip.locked(calls.key) is None, "the lock is free")
    again = calls.tasks.skip.delay(calls.key)
    assert again.get(timeout=60) == [calls.key, ""]
    assert calls.begun() == [first.id, again.id]


def test_waiting_calls_are_woken_and_run_once_in_order(calls, gates):
    """Their results arrive; the lock and the line are gone."""
    first = calls.held(calls.tasks.wait)
    waiting = [calls.parked(calls.tasks.wait) for _ in range(3)]
    assert calls.begun() == [first.id]
    gates(calls.key)
    assert [result.get(timeout=60) for result in waiting] == [[calls.key, ""]] * 3
    assert calls.begun() == [first.id, *(result.id for result in waiting)]


@pytest.mark.parametrize("transport", LASTING, indirect=True)
def test_joining_call_ends_with_the_result_of_the_run(calls, gates):
    """Another process reads it than the one that stored it; a worker refuses rpc (tests/test_binding.py)."""
    first = calls.held(calls.tasks.join)
    joining = calls.parked(calls.tasks.join)
    gates(calls.key)
    assert joining.get(timeout=60) == first.get(timeout=60) == [calls.key, calls.key]
    assert calls.begun() == [first.id]
