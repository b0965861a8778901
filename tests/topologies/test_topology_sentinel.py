"""Locks on the master that Sentinels name."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_setnx import LockRefused, LockUnavailable
from celery_setnx.connection import client_for
from tests.topologies.contract import each_key_runs_once, lock_lives_and_ends, runs_under_its_lock


@pytest.fixture
def settings(sentinels) -> dict[str, Any]:
    """Locks on the Sentinels' master."""
    return {"setnx_url": sentinels.url(), "setnx_transport_options": sentinels.transport_options}


@pytest.fixture
def locks(sentinels) -> Iterator[redis.Redis]:
    """A client of the empty master; afterwards every key of ours must have a TTL."""
    with sentinels.master().client() as client:
        client.flushall()
        yield client
        assert not [key for key in client.scan_iter("t:*") if client.pttl(key) == -1]


def test_tasks_are_locked_on_the_master(work_with, settings, locks, journal, gates, name):
    """setnx_url=sentinel://...: locked, looked at, deduplicated, renewed, released."""
    runs_under_its_lock(work_with(**settings), journal, gates, name, locks.exists)


def test_fan_out_over_sentinels_sends_each_key_once(work_with, settings, locks, journal):
    """60 calls of 20 keys: 20 bodies, and no mark is left."""
    each_key_runs_once(work_with(**settings), journal, 20)


@pytest.mark.parametrize("backend", [2, None], ids=["result_backend", "broker_url"])
def test_sentinels_of_celery_itself_hold_the_locks(
    work_with, sentinels, locks, journal, gates, name, backend
):
    """Those of the result backend's database, else of the broker's, with Celery's own transport options."""
    options = sentinels.transport_options
    conf = {"broker_url": sentinels.url(), "broker_transport_options": options}
    stores = sentinels.url(backend) if backend else "cache+memory://"
    conf |= {"result_backend": stores, "result_backend_transport_options": options}
    tasks = work_with(**conf)
    result = tasks.once.delay(name)
    (start,) = journal.wait_for("start", task_id=result.id)
    with sentinels.master().client(db=backend or 0) as where:
        assert where.exists(start["key"]) == 1
    assert tasks.once.delay(name).deduplicated
    gates(name)
    journal.wait_for("postrun", task_id=result.id, state="SUCCESS")
    if backend:
        assert result.get(timeout=60) == name


def test_providers_of_credentials_log_in_to_sentinels_and_master(sentinels, locks):
    """No setting has a password: neither the data's nor the Sentinels'."""
    urls = [f"sentinel://127.0.0.1:{sentinel.port}" for sentinel in sentinels.sentinels]
    options = {
        "master_name": sentinels.NAME,
        "credential_provider": "tests.test_login.DataProvider",
        "sentinel_kwargs": {"credential_provider": "tests.test_login.SentinelProvider"},
    }
    for setting, beside in (
        ("setnx_url", "setnx_transport_options"),
        ("broker_url", "broker_transport_options"),
        ("result_backend", "result_backend_transport_options"),
    ):
        app = Celery("passwordless", set_as_current=False)
        app.conf.update({setting: ";".join(urls), beside: options})
        lock_lives_and_ends(client_for(app))


@pytest.mark.clock
@pytest.mark.parametrize(("how", "within_s"), [("kill", 5), ("freeze", 10)])
def test_one_dead_sentinel_of_three_is_no_problem(
    work_with, settings, sentinels, locks, journal, how, within_s
):
    """The first of the URL is dead, or stands still: the next one is asked, within seconds."""
    dead = sentinels.sentinels[0]
    getattr(dead, how)()
    try:
        tasks = work_with(**settings)
        began = time.monotonic()
        result = tasks.once.delay("a")
        assert result.get(timeout=60) == "a"
        assert time.monotonic() - began < within_s
        journal.wait_for("released", outcome="released")
    finally:
        dead.recover()
        sentinels.wait_until_whole()


@pytest.mark.parametrize(
    ("login", "wrong", "error", "message"),
    [
        ({}, {"master_name": "nobody"}, LockUnavailable, "No master found for 'nobody'"),
        (
            {},
            {"sentinel_kwargs": {"password": "wrong"}},
            LockUnavailable,
            "No master found|invalid username-password",
        ),
        ({}, {"sentinel_kwargs": {}}, LockUnavailable, "No master found|Authentication required"),
        ({"password": None}, {}, LockRefused, "AuthenticationError"),
    ],
)
def test_wrong_name_or_password_is_an_error_that_says_so(tasks_of, sentinels, login, wrong, error, message):
    """No master of that name, a Sentinel that lets nobody in, a master without the password of the URL."""
    options = {**sentinels.transport_options, **wrong}
    tasks = tasks_of(setnx_url=sentinels.url(**login), setnx_transport_options=options)
    with pytest.raises(error, match=message):
        tasks.work.locked("a")


def test_sentinels_may_be_named_by_one_url(tasks_of, sentinels, locks):
    """sentinel://host;host;host/db, the scheme and the password once."""
    first, *others = [f"127.0.0.1:{sentinel.port}" for sentinel in sentinels.sentinels]
    url = ";".join([f"sentinel://:{sentinels.PASSWORD}@{first}", *others]) + "/0"
    tasks = tasks_of(setnx_url=url, setnx_transport_options=sentinels.transport_options)
    assert tasks.work.locked("a") is None


def test_lock_lives_and_ends_on_the_master(client, locks):
    """acquire, held, renew, hold, look, resume, take over, release."""
    lock_lives_and_ends(client)
