"""A Redis Cluster that has one primary, with a replica: all that asks its servers reads the reply of one."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from rich.console import ConsoleDimensions

from celery_setnx import SetnxLock
from celery_setnx.cli import _picture
from celery_setnx.connection import client_for
from celery_setnx.doctor.server import examine
from celery_setnx.doctor.trial import LockServerCheck
from celery_setnx.lock.scripts import reply_of_each
from celery_setnx.testing import clear, locks_on
from tests.test_cli import ask, ask_json
from tests.topologies.servers import Cluster

SYNC = "tests.cliapp.sync"
EVICTING = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
KEEPING = {"maxmemory": "0", "maxmemory-policy": "noeviction"}


@pytest.fixture(scope="module")
def lone(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster of one primary and one replica."""
    with Cluster(tmp_path_factory.mktemp("lone"), masters=1, replicas=1) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture
def app(lone, server) -> Iterator[Any]:
    """The command line's app, with its locks on the empty cluster."""
    from tests import cliapp

    lone.nodes[0].ask("FLUSHALL")
    with locks_on(cliapp.app, f"redis+cluster://127.0.0.1:{lone.nodes[0].port}"):
        yield cliapp.app


@pytest.fixture
def held(app) -> Any:
    """The key of a lock that is held."""
    key = app.tasks[SYNC].lock_key("a")
    lock = SetnxLock(client_for(app), key, lease=60, info={"task": SYNC})
    assert lock.acquire().acquired
    return lock.name


def check_start(app: Any) -> None:
    """What a worker does when it starts."""
    LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


def test_worker_starts_on_a_lone_primary(app, caplog):
    """It tries its locks, and has nothing to say."""
    check_start(app)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_worker_start_warns_of_a_lone_primary_that_evicts(app, lone, caplog):
    """What the one node says of its memory is read."""
    try:
        for name, value in EVICTING.items():
            lone.nodes[0].ask("CONFIG", "SET", name, value)
        check_start(app)
    finally:
        for name, value in KEEPING.items():
            lone.nodes[0].ask("CONFIG", "SET", name, value)
    assert "The lock server evicts keys" in caplog.text


def test_why_list_and_show_tell_of_a_lone_primary(held):
    """Each command names the lock that is held there."""
    assert [row["key"] for row in ask_json("list")] == [held]
    assert held in ask("list", ends=0).output
    assert held in ask("show", held, ends=0).output
    assert "held" in ask("why", SYNC, "a").output


def test_watch_shows_a_lone_primary(app, held):
    """Its table has the lock."""
    assert "1 lock" in _picture(app, None, ConsoleDimensions(200, 20)).plain


def test_release_by_hand_on_a_lone_primary(app, held):
    """The lock that was seen is dropped."""
    ask("release", held, "--yes", "--force", ends=0)
    assert client_for(app).get(held) is None


def test_doctor_examines_a_lone_primary_and_leaves_out_its_replica(app, lone):
    """One server, one state of the cluster, one trial; nothing is wrong but that it logs nothing."""
    found = list(examine(app))
    named = [one.what for one in found if one.subject == "connection"]
    assert len(named) == 1
    assert f"Node 127.0.0.1:{lone.nodes[0].port} answers" in named[0]
    assert [one.level for one in found if one.subject in ("cluster", "permissions", "locks")] == ["ok"] * 3
    assert {one.subject for one in found if one.level == "error"} == set()


def test_tests_of_users_clean_a_lone_primary(app, held):
    """The test kit deletes what is there."""
    assert clear(app) >= 1
    assert ask_json("list") == []


@pytest.mark.parametrize("command", [("TIME",), ("INFO", "memory"), ("DBSIZE",)])
def test_reply_of_each_server_is_its_own(app, cluster, server, command):
    """One of a server, one of a lone primary, three of three: each what that server says."""
    with locks_on(app, cluster.url()):
        of_three = reply_of_each(client_for(app), *command)
    of_one = reply_of_each(client_for(app), *command)
    with redis.Redis.from_url(server.url(1)) as single:
        (alone,) = reply_of_each(single, *command)
    assert (len(of_three), len(of_one)) == (3, 1)
    assert {type(reply) for reply in (*of_three, *of_one)} == {type(alone)}


def test_worker_starts_though_a_primary_is_down(app, cluster, caplog):
    """It has warned at most; a list that would be without its locks is an error, and no traceback."""
    with locks_on(app, cluster.url()):
        cluster.nodes[2].kill()
        try:
            check_start(app)
            ask("list", ends=3)
        finally:
            cluster.nodes[2].start()
            cluster.wait_until_whole()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
