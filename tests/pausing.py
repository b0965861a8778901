"""An operator of the tests, who pauses, resumes, and knows who has read it; and a load in the pause."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import Event
from typing import Any, NamedTuple

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_setnx import AlreadyRunning, is_skipped
from celery_setnx.connection import client_for
from celery_setnx.lock.line import PASSED_OVER
from celery_setnx.lock.names import line_names
from celery_setnx.terms import NewTerm, Whose, end_term, live_terms, set_term
from tests.harness import Journal, Worker, due_set, server_us, wait_until

BECAUSE, BY = "partner down", "ana"
HEEDED_S = (
    5.0  # 2 s, for which a process goes by what it was told, and time for a start that was decided by then
)
KEYS = ("a", "b", "c")
ALL_WAIT = KEYS[-1]
"""A key whose calls all wait: none that comes back by itself has its line go on."""
POLICIES = ("wait", "retry", "skip", "raise")
WAITS = {"lease": 60}  # and no courier comes soon (see `tests.app`)
OPTIONS = {**WAITS, "retry_delay": 0.2, "retry_delay_max": 1.0}


class Operator:
    """Somebody who pauses and resumes keys and tasks of an app."""

    def __init__(self, app: Celery, *workers: Worker) -> None:
        self.app, self.workers = app, workers
        self._changed_at = 0.0

    def pause(self, whose: Whose) -> float:
        """Pause it: the server's time (Unix seconds) of the reply."""
        change = set_term(self.app, whose, NewTerm("pause", 600.0, because=BECAUSE, by=BY))
        self._changed_at = time.monotonic()
        return change.server_time

    def resume(self, whose: Whose) -> float:
        """End the pause: the server's time (Unix seconds) of the reply."""
        change = end_term(self.app, whose, "pause", by=BY)
        self._changed_at = time.monotonic()
        return change.server_time

    def is_known(self, scope: str, known: bool = True) -> None:
        """Wait until all workers, and their processes, know, or know no more, that a scope has live terms."""
        for worker in self.workers:
            wait_until(lambda: (scope in self.scopes(worker)) == known, f"{worker.name} has read")  # noqa: B023
        wait_until(lambda: time.monotonic() > self._changed_at + HEEDED_S, "its processes go by it")

    def scopes(self, worker: Worker) -> list[str]:
        """The scopes whose live terms a worker knows."""
        told = {"destination": [worker.node], "limit": 1, "timeout": 30}
        replies: list[dict[str, Any]] = self.app.control.broadcast("setnx_terms", reply=True, **told)
        return [scope for reply in replies for scope in reply[worker.node]["scopes"]]

    def resume_all(self) -> None:
        """Leave no live terms."""
        for whose, terms in live_terms(self.app).items():
            for term in terms:
                end_term(self.app, whose, term.name, by=BY)


class Sent(NamedTuple):
    """A call of the load."""

    key: str
    policy: str
    result: AsyncResult


class Load:
    """Calls of a task, of several keys and policies in turn, that are published until it is stopped."""

    def __init__(self, task: Any, journal: Journal) -> None:
        self.task, self.journal = task, journal
        self.sent: list[Sent] = []
        self._ends, self._pool = Event(), ThreadPoolExecutor(1)
        self._publishing = self._pool.submit(self._publish)

    def _publish(self) -> None:
        for each in cycle(POLICIES):
            for key in KEYS:
                policy = "wait" if key == ALL_WAIT else each
                options = {**(OPTIONS if policy == "retry" else WAITS), "on_conflict": policy}
                result = self.task.apply_async([key, 0.05], singleton=options)
                self.sent.append(Sent(key, policy, result))
                if self._ends.wait(0.02):
                    return

    def stop(self) -> None:
        """Publish no more."""
        self._ends.set()
        self._publishing.result(60)
        self._pool.shutdown()

    def starts(self, after: float = 0.0) -> list[dict[str, Any]]:
        """The starts after a moment, in order, by the server's clock (Unix seconds)."""
        found = [start for start in self.journal.entries(what="start") if start["fence"] / 1e6 > after]
        return sorted(found, key=lambda start: start["fence"])

    def met(self, policy: str) -> set[str]:
        """Ids of the calls of a policy that have met the pause."""
        of_policy = {sent.result.id for sent in self.sent if sent.policy == policy}
        conflicts = self.journal.entries(what="conflict")
        return of_policy & {each["task_id"] for each in conflicts if each["holder"]["state"] == "paused"}

    def line(self, key: str) -> list[str]:
        """Who waits in line for a key, and does not ask by itself, in order."""
        line, _calls = line_names(self.task.lock_key(key))
        waiting = client_for(self.task.app).zrange(line, 0, PASSED_OVER, byscore=True)
        parked = {sent.result.id for sent in self.sent if sent.policy == "wait"}
        return [task_id for each in waiting if (task_id := each.decode()) in parked]

    def is_at_rest(self) -> bool:
        """Whether every call has ended, waits in line, or comes back by itself."""
        ended = {
            entry["task_id"]
            for entry in self.journal.entries()
            if entry["what"] == "end" or entry.get("state") in ("SUCCESS", "FAILURE")
        }
        there = ended.union(self.met("retry"), *map(self.line, KEYS))
        return all(sent.result.id in there for sent in self.sent)

    def next_look(self) -> float:
        """When a worker would look at the first line unasked (Unix seconds of the server)."""
        app, task = self.task.app, self.task.name
        ((_entry, due_us),) = client_for(app).zrange(due_set(app, task), 0, 0, withscores=True)
        return float(due_us / 1e6)


def pause_under_load(load: Load, operator: Operator, whose: list[Whose]) -> str:
    """Nothing starts in the pause, and all that waits runs once afterwards, in its line's order.

    How soon the first one in line did, in words.
    """
    client = client_for(operator.app)
    wait_until(lambda: len(load.starts()) >= 20, "a load")
    paused_at = [operator.pause(each) for each in whose][-1]
    if whose[0].scope:
        operator.is_known(whose[0].scope)
        paused_at = server_us(client) / 1e6
    for policy in POLICIES:
        wait_until(lambda: len(load.met(policy)) >= 4, f"four of {policy} in the pause")  # noqa: B023
    for key in KEYS:
        wait_until(lambda: len(load.line(key)) >= 2, f"two in the line of {key}")  # noqa: B023
    load.stop()
    wait_until(load.is_at_rest, "all that was sent has come")
    soon = server_us(client) / 1e6 + 15
    next_look = wait_until(lambda: (at := load.next_look()) > soon and at, "no line is to be looked at soon")
    lines = {key: load.line(key) for key in KEYS}
    assert load.starts(paused_at) == []
    resumed_at, *_ = [operator.resume(each) for each in whose]
    _have_ended(load)
    later = load.starts(paused_at)
    assert resumed_at < later[0]["fence"] / 1e6
    first_at = next(start["fence"] / 1e6 for start in later if start["task_id"] in lines[ALL_WAIT])
    assert first_at < next_look  # nobody has waited for that
    for line in lines.values():
        assert [start["task_id"] for start in later if start["task_id"] in line] == line
    return f"{first_at - resumed_at:.1f} s later, {len(later)} of {len(load.sent)} calls from then on"


def _have_ended(load: Load) -> None:
    """Each as its policy says: those that wait have run once, the others not at all if they met the pause."""
    for sent in load.sent:
        has_met = sent.result.id in load.met(sent.policy)
        if sent.policy == "raise" and has_met:
            with pytest.raises(AlreadyRunning, match=f"a pause .*until .* by {BY}: {BECAUSE}") as error:
                sent.result.get(timeout=60)
            assert error.value.holder["state"] == "paused"
        elif sent.policy in ("wait", "retry"):
            assert sent.result.get(timeout=60) == sent.key
        elif sent.policy == "skip" and has_met:
            found = sent.result.get(timeout=60)
            assert is_skipped(found)
            told = [found["holder"].get(name) for name in ("state", "by", "because")]
            assert told == ["paused", BY, BECAUSE]
    count = Counter(start["task_id"] for start in load.starts())
    assert set(count.values()) == {1}
    for sent in load.sent:
        if sent.policy in ("wait", "retry"):
            assert count[sent.result.id] == 1
        elif sent.result.id in load.met(sent.policy):
            assert count[sent.result.id] == 0
