"""What `celery setnx` sees on a Redis Cluster."""

import time
from typing import Any

from celery_setnx.keys import digest
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.look import look
from celery_setnx.lock.marks import Mark, mark_all
from celery_setnx.lock.names import done_name, key_name
from celery_setnx.lock.survey import drop, successes, survey
from celery_setnx.lock.verbs import IfSame, if_same

LOCKS = 300


def hold(client: Any, number: int) -> str:
    """The key of a lock that is held."""
    key = key_name("t", "app.sync", digest([number]))
    assert SetnxLock(client, key, lease=60, info={"task": "app.sync"}).acquire().acquired
    return key


def test_survey_asks_every_primary(client, cluster):
    """Each lock once, with its mark and its line, wherever its slot is."""
    keys = [hold(client, number) for number in range(LOCKS)]
    assert len({cluster.owner(cluster.slot(key)).port for key in keys}) == 3
    mark_all(client, [Mark(key, "queued") for key in keys[:30]], dedupe="until_started", lease=60)
    for key in keys[20:40]:
        park(client, LineEntry(key, "waits", 0, 60), since=time.time(), call="")
    seen = {sighting.key: sighting for sighting in survey(client, "t")}
    assert sorted(seen) == sorted(keys)
    assert {key for key in keys if seen[key].mark == "queued"} == set(keys[:30])
    assert {key for key in keys if seen[key].waiting == 1} == set(keys[20:40])
    assert not any(sighting.is_stale for sighting in seen.values())
    assert [waiter.task_id for waiter in look(client, keys[20], waiters=9).waiters] == ["waits"]


def test_survey_follows_a_slot_that_has_moved(client, cluster):
    """A client that knows the old places only finds all locks."""
    keys = [hold(client, number) for number in range(LOCKS)]
    slot = cluster.slot(keys[0])
    target = next(node for node in cluster.nodes if node is not cluster.owner(slot))
    cluster.move(slot, target)
    assert sorted(sighting.key for sighting in survey(client, "t")) == sorted(keys)
    assert look(client, keys[0]).holder is not None


def test_survey_of_several_permits_on_a_cluster(client, cluster):
    """They are in the slot of their lock; one is dropped as it was seen."""
    keys = [key_name("t", "app.sync", digest([number])) for number in range(30)]
    assert len({cluster.owner(cluster.slot(key)).port for key in keys}) == 3
    for key in keys:
        for _ in range(3):
            assert SetnxLock(client, key, limit=4, info={"task": "app.sync"}).acquire().acquired
    for seen in survey(client, "t"):
        assert ([holder.permit for holder in seen.holders], seen.limit) == ([0, 1, 2], 4)
        assert all(drop(client, one) for one in list(seen.of_each())[:2])
    found = {seen.key: [holder.permit for holder in seen.holders] for seen in survey(client, "t")}
    assert found == {key: [2] for key in keys}


def test_drop_on_a_cluster(client):
    """Lock and record share a slot, and go together."""
    key = hold(client, 7)
    seen = look(client, key)
    assert drop(client, seen)
    assert not drop(client, seen)
    assert list(survey(client, "t")) == []


def test_successes_on_a_cluster(client, cluster):
    """Found on every primary, once; and they are forgotten there."""
    keys = [key_name("t", "app.daily", digest([number])) for number in range(30)]
    assert len({cluster.owner(cluster.slot(key)).port for key in keys}) == 3
    for key in keys:
        held = SetnxLock(client, key, line=True).acquire(token=f"of-{key}|0|ab").lock
        assert held is not None
        held.release(done_for=60)
    found = list(successes(client, "t"))
    assert [(success.key, success.done_by) for success in found] == [
        (key, f"of-{key}") for key in sorted(keys)
    ]
    assert all(0 < success.done_counts_for_s <= 60 for success in found)
    forgotten = [(keys[0], f"of-{keys[0]}|0|ab"), (keys[1], "another|0|ab")]
    assert if_same(client, [IfSame((done_name(key),), (run,)) for key, run in forgotten]) == [True, False]
    assert [look(client, key).done is None for key in keys[:2]] == [True, False]
