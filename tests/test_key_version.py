"""setnx_key_version: two releases with two key formats, side by side on one Redis, in real processes.

Format 2 exists in `tests.upgradeapp` alone. The old worker, and this process, know format 1 only; the pinned
and the unpinned worker are of the newer release. The unpinned one shows that these tests can fail.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery

from celery_setnx import OptionError, is_skipped, send_task
from celery_setnx.doctor import examine
from celery_setnx.keys import FORMATS
from celery_setnx.options import settings
from tests.harness import Journal, Worker

NOWHERE = "upgrade-nowhere"
WORK = "tests.upgradeapp.work"

# Each worker's queue, and what makes its process an old or a new release.
RELEASES = {
    "old": {},
    "pinned": {"SETNX_TEST_FORMAT_2": "yes", "SETNX_TEST_KEY_VERSION": "1"},
    "unpinned": {"SETNX_TEST_FORMAT_2": "yes"},
}


@pytest.fixture(scope="module", autouse=True)
def workers(server, logs) -> Iterator[dict[str, Worker]]:
    """A worker of each release, on the queue of that name."""

    def start(release: str) -> Worker:
        environment = {"SETNX_TEST_FORMAT_2": "", "SETNX_TEST_KEY_VERSION": "", **RELEASES[release]}
        return Worker(logs, "tests.upgradeapp", queues=release, environment=environment)

    with ThreadPoolExecutor() as pool:
        started = dict(zip(RELEASES, pool.map(start, RELEASES)))
        yield started
        list(pool.map(Worker.stop, started.values()))


@pytest.fixture
def upgrade(server, locks, journal) -> Iterator[Any]:
    """The module of tasks in this process, which is of the old release; a queue without a consumer."""
    from tests import upgradeapp

    assert sorted(FORMATS) == [1]
    with redis.Redis.from_url(server.url(0)) as broker:
        broker.delete(NOWHERE)
        yield upgradeapp
        broker.delete(NOWHERE)


@pytest.fixture
def stranger(upgrade) -> Celery:
    """An app without the tasks' code: what it sends with Celery's own send_task has no header."""
    app = Celery("stranger", set_as_current=False)
    app.conf.update(upgrade.CONF)
    return app


def keys_of(journal: Journal, result: Any) -> list[str]:
    """The key of each attempt of a task, in order."""
    return [entry["key"] for entry in journal.entries(what="start", task_id=result.id)]


def published_by(stranger: Celery, release: str, task: str, **kwargs: Any) -> tuple[str, bool]:
    """Publish from within a worker of a release: the call's id, and whether it was a duplicate."""
    relay = stranger.send_task("tests.upgradeapp.relay", (task, kwargs, NOWHERE), queue=release)
    task_id, deduplicated = relay.get(timeout=10)
    return task_id, deduplicated


@pytest.mark.parametrize(("first_on", "second_on"), [("old", "pinned"), ("pinned", "old")])
def test_headerless_calls_exclude_each_other_across_releases(stranger, journal, gates, first_on, second_on):
    """With the old format pinned, both workers compute one key for a message without a header."""
    name = f"gated-{first_on}-{second_on}"
    first = stranger.send_task(WORK, (name,), queue=first_on)
    journal.wait_for("start", task_id=first.id)
    second = stranger.send_task(WORK, (name, "other reason"), queue=second_on)
    assert is_skipped(second.get(timeout=10))
    assert second.get()["holder"]["task_id"] == first.id
    gates(name)
    assert first.get(timeout=10) == name


def test_headerless_call_has_another_key_on_an_unpinned_worker(stranger, upgrade, journal, gates):
    """What the pin is for: without it the two releases run the same call side by side."""
    first = stranger.send_task(WORK, ("gated-apart",), queue="old")
    journal.wait_for("start", task_id=first.id)
    second = stranger.send_task(WORK, ("gated-apart",), queue="unpinned")
    journal.wait_for("start", task_id=second.id)
    assert keys_of(journal, first) == [upgrade.work.lock_key("gated-apart")] != keys_of(journal, second)
    gates("gated-apart")
    gates("gated-apart")
    assert (first.get(timeout=10), second.get(timeout=10)) == ("gated-apart", "gated-apart")


def test_duplicate_of_an_old_producers_call_is_recognised_by_a_pinned_one(stranger, upgrade):
    """The newer release finds the mark that the older one has left."""
    first = upgrade.work.apply_async(("n",), queue=NOWHERE)
    assert published_by(stranger, "pinned", WORK, name="n") == (first.id, True)


def test_duplicate_of_a_pinned_producers_call_is_recognised_by_an_old_one(stranger, upgrade):
    """The older release finds the mark that the newer one has left."""
    task_id, deduplicated = published_by(stranger, "pinned", WORK, name="n")
    second = upgrade.work.apply_async(("n",), queue=NOWHERE)
    assert (deduplicated, second.deduplicated, second.id) == (False, True, task_id)


def test_duplicate_is_not_recognised_by_an_unpinned_producer(stranger, upgrade):
    """What the pin is for: without it each release has a mark of its own."""
    first = upgrade.work.apply_async(("n",), queue=NOWHERE)
    task_id, deduplicated = published_by(stranger, "unpinned", WORK, name="n")
    assert not deduplicated
    assert task_id != first.id


@pytest.mark.parametrize("release", ["pinned", "unpinned"])
def test_run_on_a_newer_worker_is_a_duplicate_for_an_old_producer(upgrade, stranger, journal, gates, release):
    """until_done: the record is found under the key with which the call was published."""
    name = f"gated-{release}"
    first = upgrade.work.apply_async((name,), queue=release)
    journal.wait_for("start", task_id=first.id)
    second = upgrade.work.apply_async((name,), queue=NOWHERE)
    assert (second.deduplicated, second.id) == (True, first.id)
    gates(name)
    assert first.get(timeout=10) == name


@pytest.mark.parametrize("release", ["old", "pinned", "unpinned"])
def test_doctor_finds_the_locks_of_an_unpinned_worker(stranger, journal, gates, release):
    """A process with another format than the doctor's holds a lock."""
    name = f"gated-doctor-{release}"
    call = stranger.send_task(WORK, (name,), queue=release)
    journal.wait_for("start", task_id=call.id)
    found = [finding.what for finding in examine(stranger) if finding.subject == "key_version"]
    gates(name)
    assert call.get(timeout=10) == name
    assert [call.id in what for what in found] == ([True] if release == "unpinned" else [])


@pytest.mark.parametrize("release", ["old", "pinned", "unpinned"])
def test_message_with_a_header_keeps_an_old_producers_key(upgrade, journal, release):
    """Whichever release runs the call, its lock is the one that its producer named."""
    result = upgrade.work.apply_async(("n",), queue=release)
    result.get(timeout=10)
    assert keys_of(journal, result) == [upgrade.work.lock_key("n")]


def test_mark_of_an_old_producers_call_ends_on_a_newer_worker(upgrade, locks):
    """Even an unpinned worker gives the mark up that the call was published with."""
    upgrade.work.apply_async(("n",), queue="unpinned").get(timeout=10)
    assert not [*locks.scan_iter("*:queued")]


def test_message_with_a_header_keeps_a_newer_producers_key_on_an_old_worker(upgrade, stranger, journal):
    """An old worker locks a key of a format that it does not know."""
    relay = stranger.send_task("tests.upgradeapp.relay", (WORK, {"name": "n"}, "old"), queue="unpinned")
    task_id, _ = relay.get(timeout=10)
    result = stranger.AsyncResult(task_id)
    assert result.get(timeout=10) == "n"
    (key,) = keys_of(journal, result)
    assert key.startswith("t:{tests.upgradeapp.work:")
    assert key != upgrade.work.lock_key("n")


@pytest.mark.parametrize("release", ["old", "pinned"])
def test_retry_stays_on_the_pinned_key(upgrade, journal, release):
    """A worker computes the key of a retry again, in the format that it is told to use."""
    result = upgrade.retrying.apply_async(("n",), queue=release)
    assert result.get(timeout=10) == 1
    assert keys_of(journal, result) == [upgrade.retrying.lock_key("n")] * 2


def test_retry_leaves_its_key_on_an_unpinned_worker(upgrade, journal):
    """What the pin is for: without it the second attempt has another lock than the first."""
    result = upgrade.retrying.apply_async(("n",), queue="unpinned")
    assert result.get(timeout=10) == 1
    first, second = keys_of(journal, result)
    assert first == upgrade.retrying.lock_key("n") != second


def test_headerless_retry_stays_on_the_pinned_key(stranger, upgrade, journal):
    """The key computed for a message without a header is that of its retry, too."""
    result = stranger.send_task("tests.upgradeapp.retrying", ("n",), queue="pinned")
    assert result.get(timeout=10) == 1
    assert keys_of(journal, result) == [upgrade.retrying.lock_key("n")] * 2


def test_whole_task_lock_is_the_same_in_every_format(stranger, upgrade):
    """A key without arguments has no format: not even an unpinned release has another one."""
    first = upgrade.whole.apply_async(("n",), queue=NOWHERE)
    assert published_by(stranger, "unpinned", "tests.upgradeapp.whole", name="m") == (first.id, True)


def test_worker_with_an_unknown_key_version_does_not_start(logs):
    """An old release that is told to use format 2 says which ones it knows."""
    with pytest.raises(AssertionError, match="setnx_key_version must be one of 1, not 2"):
        Worker(logs, "tests.upgradeapp", environment={"SETNX_TEST_KEY_VERSION": "2"})


def test_send_task_with_an_unknown_key_version_is_refused(stranger):
    """A producer without the tasks' code learns it at its first call."""
    stranger.conf.setnx_key_version = 2
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, not 2"):
        send_task(stranger, WORK, kwargs={"name": "n"}, singleton={"key": "name"}, queue=NOWHERE)


def test_newer_release_may_be_told_either_format(monkeypatch):
    """The latest is the default; each known one can be chosen; the message lists them."""
    monkeypatch.setitem(FORMATS, 2, bytes)
    chosen = [settings({"setnx_key_version": version}).key_version for version in (None, 1, 2)]
    assert chosen == [2, 1, 2]
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, 2, not 3"):
        settings({"setnx_key_version": 3})


@pytest.mark.parametrize(
    "version",
    [
        "1",
        0,
        "",
        True,
        [1],
    ],
)
def test_key_version_that_is_no_known_number_is_refused(version):
    """A pin that does not pin must not pass for one."""
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, not"):
        settings({"setnx_key_version": version})
