"""A worker whose user may do what the documentation names, and nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_setnx import LockRefused, SetnxLock
from celery_setnx.connection import client_for
from tests.test_connection import NEEDED

TO_HEED = [*NEEDED, "hgetall"]  # without the last a worker heeds no pause of a task, and says so
IN_CLUSTER = [*TO_HEED, "cluster|slots", "command"]


def rules(commands: list[str]) -> list[str]:
    """Of a user who may do just that to locks with the default prefix."""
    return ["~setnx:*", *[f"+{command}" for command in commands]]


@pytest.fixture
def settings(limited) -> dict[str, Any]:
    """Locks of a user for locks alone, under the default prefix."""
    return {"setnx_url": limited(*rules(TO_HEED), db=0), "setnx_prefix": "setnx"}


@pytest.fixture
def refused(locks) -> Callable[[], set[str]]:
    """What the server has refused to this test so far."""
    locks.acl_log_reset()
    return lambda: {entry["object"] for entry in locks.acl_log()}


def test_guarded_task_runs_with_the_needed_commands_alone(work_with, settings, refused, journal, gates, name):
    """Locked, marked, renewed and released by a user with these commands and one key pattern."""
    tasks = work_with(**settings)
    result = journal.reached("start", tasks.once.delay(name))
    assert tasks.once.locked(name).task_id == result.id
    assert tasks.once.delay(name).deduplicated
    counts = tasks.once.fan_out([(name,), ("another",)])
    assert (counts.accepted, counts.duplicates) == (1, 1)
    gates(name)
    assert result.get(timeout=60) == name
    journal.wait_for("released", 2)
    # What the client asks beyond that may be refused: its own name and version, and INFO at the start.
    assert refused() <= {"client|setinfo", "client|maint_notifications", "info"}
    assert "cannot lock" not in tasks.worker.log_text()


def test_idle_connection_is_used_again_without_further_commands(tasks_of, settings, refused):
    """After its idle time the client tries a connection before it uses it."""
    tasks = tasks_of(**settings)
    assert tasks.work.locked("a") is None
    pool = client_for(tasks.app).connection_pool
    connection = pool.get_connection()
    connection.next_health_check = 1  # as after 30 s
    pool.release(connection)
    assert tasks.work.locked("a") is None
    assert "ping" not in refused()


def test_another_database_needs_select(tasks_of, limited):
    """The error names it."""
    with pytest.raises(LockRefused, match="'select' command"):
        tasks_of(setnx_url=limited(*rules(NEEDED)), setnx_prefix="setnx").work.locked("a")


@pytest.fixture
def limit(cluster) -> Iterator[Callable[[list[str]], str]]:
    """The cluster's URL for a user who may do only that."""

    def limit(commands: list[str]) -> str:
        for node in cluster.nodes:
            node.ask("ACL", "SETUSER", "locker", "reset", "on", ">pw", *rules(commands))
        return cluster.url().replace("://", "://locker:pw@")

    yield limit
    for node in cluster.nodes:
        node.ask("ACL", "DELUSER", "locker")


def test_cluster_needs_two_commands_more(work_with, limit, journal):
    """CLUSTER SLOTS and COMMAND, with which the client finds the nodes and the keys of a command."""
    tasks = work_with(setnx_url=limit(IN_CLUSTER), setnx_prefix="setnx")
    assert tasks.once.delay("a").get(timeout=60) == "a"
    (released,) = journal.wait_for("released")
    assert released["outcome"] == "released"


@pytest.mark.parametrize("missing", ["cluster|slots", "command", "evalsha"])
def test_missing_command_of_a_cluster_is_named(tasks_of, limit, missing):
    """An error of ours that names what is missing."""
    app = tasks_of(setnx_url=limit([command for command in IN_CLUSTER if command != missing])).app
    with pytest.raises(LockRefused, match=f"(?i){missing.replace('|', '.')}"):
        SetnxLock(client_for(app), "setnx:{a}").acquire()
