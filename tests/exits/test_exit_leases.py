"""The lease is renewed while the body runs, in every pool, whatever the body does to its process."""

import redis

from celery_setnx import SetnxLock
from tests.exits import every_pool
from tests.harness import Journal

LEASES = 2.5


def assert_held_until(journal: Journal, locks: redis.Redis, key: str, what: str, task_id: str) -> None:
    """Rivals are told held for as long as the journal lacks the entry, and there are some."""
    told = 0
    while not journal.entries(what=what, task_id=task_id):
        outcome = SetnxLock(locks, key).acquire()
        if outcome.acquired:
            assert journal.entries(what=what, task_id=task_id), "a rival got the lock of a running body"
            break
        told += 1
    assert told > 10


@every_pool
def test_lease_is_renewed_while_pure_python_computes(tasks, pool, journal, gates, locks, name, hold):
    """Two and a half leases without a yield: the keeper is a real thread also where threads are greenlets."""
    held = hold(tasks.computing, pool, name, LEASES * tasks.LEASE_S)
    gates(name)
    assert_held_until(journal, locks, held.key, "computed", held.result.id)
    assert held.result.get(timeout=10) == name
    assert journal.entries(what="lost") == []
    assert journal.entries(what="released")[0]["outcome"] == "released"


@every_pool
def test_lease_is_renewed_while_a_fork_of_the_process_lives(tasks, pool, journal, gates, locks, name, hold):
    """The parent's lock stays its own, and a lock that the fork takes is renewed by the fork's own keeper."""
    held = hold(tasks.forking, pool, name)
    gates(name)
    assert_held_until(journal, locks, held.key, "forked", held.result.id)
    assert held.result.get(timeout=10) == 0
    assert journal.entries(what="lost") == []
    assert journal.entries(what="released")[0]["outcome"] == "released"
