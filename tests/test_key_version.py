"""setnx_key_version: two releases with two key formats, side by side on one Redis, in real processes.

Format 2 exists in `tests.upgradeapp` alone. The old worker, and this process, know format 1 only; the pinned
and the unpinned worker are of the newer release. The unpinned one shows that these tests can fail.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_setnx import OptionError, is_skipped, send_task
from celery_setnx.doctor import examine
from celery_setnx.keys import FORMATS
from celery_setnx.options import settings
from tests.harness import Journal
from tests.test_send_task import APP, NOWHERE, knowing, producer

__all__ = ["knowing", "producer"]  # fixtures

WORK = f"{APP}.work"

# Each worker's queue, and what makes its process an old or a new release.
RELEASES = {
    "old": {},
    "pinned": {"knows_format_2": True, "setnx_key_version": 1},
    "unpinned": {"knows_format_2": True},
}
each_release = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture(scope="module", autouse=True)
def workers(module_worker) -> None:
    """A worker of each release, on the queue of that name."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: module_worker(APP, queues=one, conf=RELEASES[one]), RELEASES))


@pytest.fixture
def upgrade(knowing) -> Any:
    """The module of tasks in this process, which is of the old release."""
    assert sorted(FORMATS) == [1]
    return knowing


@pytest.fixture
def publish(upgrade, producer) -> Any:
    """Call it to publish with the code of a release: the call's id, and whether it was a duplicate."""

    def publish(release: str, task: str, queue: str = NOWHERE, **kwargs: Any) -> list[Any]:
        if release == "old":
            result = upgrade.app.tasks[task].apply_async((), kwargs, queue=queue)
            return [result.id, result.deduplicated]
        relay = producer.send_task(f"{APP}.relay", (task, kwargs, queue), queue=release)
        return list(relay.get(timeout=60))

    return publish


def keys_of(journal: Journal, result: Any) -> list[str]:
    """The key of each attempt of a task, in order."""
    return [entry["key"] for entry in journal.entries(what="start", task_id=result.id)]


@pytest.mark.parametrize(("first_on", "second_on"), [("old", "pinned"), ("pinned", "old")])
def test_headerless_calls_exclude_each_other_across_releases(producer, holding, first_on, second_on):
    """With the old format pinned, both workers compute one key for a message without a header."""
    name = f"gated-{first_on}-{second_on}"
    with holding(producer.signature(WORK), name, queue=first_on) as first:
        second = producer.send_task(WORK, (name, "other reason"), queue=second_on)
        assert is_skipped(second.get(timeout=60))
        assert second.get()["holder"]["task_id"] == first.id


def test_headerless_call_has_another_key_on_an_unpinned_worker(producer, upgrade, journal, gates, holding):
    """What the pin is for: without it the two releases run the same call side by side."""
    work = producer.signature(WORK)
    with holding(work, queue="old") as first, holding(work, queue="unpinned") as second:
        assert keys_of(journal, first) == [upgrade.work.lock_key("gated")] != keys_of(journal, second)
        gates("gated")  # one of them may take the gate of the other


@pytest.mark.parametrize(
    ("first_by", "second_by", "task", "is_recognised"),
    [
        ("old", "pinned", WORK, True),
        ("pinned", "old", WORK, True),
        pytest.param("old", "unpinned", WORK, False, id="what-the-pin-is-for"),
        pytest.param("old", "unpinned", f"{APP}.whole", True, id="key-without-arguments-has-no-format"),
    ],
)
def test_duplicate_is_recognised_across_releases(publish, first_by, second_by, task, is_recognised):
    """Each of two pinned releases finds the mark that the other has left; one without a pin does not."""
    first_id, deduplicated = publish(first_by, task, name="n")
    second_id, is_duplicate = publish(second_by, task, name="n" if task == WORK else "m")
    assert not deduplicated
    assert (is_duplicate, second_id == first_id) == (is_recognised, is_recognised)


@each_release
def test_doctor_finds_the_locks_of_an_unpinned_worker(producer, holding, release):
    """A process with another format than the doctor's holds a lock."""
    with holding(producer.signature(WORK), f"gated-doctor-{release}", queue=release) as call:
        found = [finding.what for finding in examine(producer) if finding.subject == "key_version"]
    assert [call.id in what for what in found] == ([True] if release == "unpinned" else [])


@each_release
def test_message_with_a_header_keeps_an_old_producers_key(upgrade, locks, journal, holding, release):
    """Whichever release runs the call, its lock is the one that its producer named, and its mark ends.

    until_done: under that key the record is found, so the next call is a duplicate.
    """
    name = f"gated-{release}"
    with holding(upgrade.work, name, queue=release) as first:
        assert keys_of(journal, first) == [upgrade.work.lock_key(name)]
        assert not [*locks.scan_iter("*:queued")]
        second = upgrade.work.apply_async((name,), queue=NOWHERE)
        assert (second.deduplicated, second.id) == (True, first.id)


def test_message_with_a_header_keeps_a_newer_producers_key_on_an_old_worker(upgrade, publish, journal):
    """An old worker locks a key of a format that it does not know."""
    task_id, _ = publish("unpinned", WORK, "old", name="n")
    result = upgrade.app.AsyncResult(task_id)
    assert result.get(timeout=60) == "n"
    (key,) = keys_of(journal, result)
    assert key.startswith(f"t:{{{WORK}:")
    assert key != upgrade.work.lock_key("n")


@pytest.mark.parametrize(
    ("sender", "release", "stays"),
    [
        ("code", "old", True),
        ("code", "pinned", True),
        ("name", "pinned", True),
        pytest.param("code", "unpinned", False, id="what-the-pin-is-for"),
    ],
)
def test_retry_stays_on_the_pinned_key(upgrade, producer, journal, sender, release, stays):
    """A worker computes the key of a retry again, in the format that it is told to use."""
    if sender == "code":
        result = upgrade.retrying.apply_async(("n",), queue=release)
    else:  # without a header
        result = producer.send_task(f"{APP}.retrying", ("n",), queue=release)
    assert result.get(timeout=60) == 1
    first, second = keys_of(journal, result)
    assert first == upgrade.retrying.lock_key("n")
    assert (second == first) == stays


def test_worker_with_an_unknown_key_version_does_not_start(start_worker):
    """An old release that is told to use format 2 says which ones it knows."""
    with pytest.raises(AssertionError, match="setnx_key_version must be one of 1, not 2"):
        start_worker(APP, conf={"setnx_key_version": 2})


def test_send_task_with_an_unknown_key_version_is_refused(producer):
    """A producer without the tasks' code learns it at its first call."""
    producer.conf.setnx_key_version = 2
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, not 2"):
        send_task(producer, WORK, kwargs={"name": "n"}, singleton={"key": "name"}, queue=NOWHERE)
    producer.conf.setnx_key_version = 1  # tasks that are shared later are bound to this app too


def test_newer_release_may_be_told_either_format(monkeypatch):
    """The latest is the default; each known one can be chosen; the message lists them."""
    monkeypatch.setitem(FORMATS, 2, bytes)
    chosen = [settings({"setnx_key_version": version}).key_version for version in (None, 1, 2)]
    assert chosen == [2, 1, 2]
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, 2, not 3"):
        settings({"setnx_key_version": 3})


@pytest.mark.parametrize("version", ["1", 0, "", True, [1]])
def test_key_version_that_is_no_known_number_is_refused(version):
    """A pin that does not pin must not pass for one."""
    with pytest.raises(OptionError, match="setnx_key_version must be one of 1, not"):
        settings({"setnx_key_version": version})
