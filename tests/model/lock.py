"""The verbs of the lock as pure functions of what Redis holds and of the time. Units as in the scripts.

Each says what the script of its name says, word for word; tests/test_differential.py holds them to it. Each
decision that a seeded mutant turns around is a method of its own.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

SECOND = 1_000_000
MS = 1_000
NUMBER = re.compile(r"[0-9]+\.?[0-9]*")
NOT_A_STRING = "(not a string)"
FOREIGNRECORD = ("FOREIGNRECORD",)
WRONGTYPE = ("WRONGTYPE",)
_TASK_TOKEN = re.compile(r"(.*)\|([0-9]+)\|[0-9a-fA-F]+", re.DOTALL)


class Record(NamedTuple):
    """What the record says of a holder; times in microseconds."""

    token: str
    deadline: int
    fence: int
    state: str
    since: int
    info: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


class Mark(NamedTuple):
    """A queued call: its task id, and the millisecond at which the key expires (None: never).

    The task id is NOT_A_STRING if a foreign program made a list of the key.
    """

    task_id: str
    expiry: int | None


class Store(NamedTuple):
    """The keys of one lock. Expiries in milliseconds; None: the key has no TTL.

    `record` is text if a foreign program wrote it.
    """

    value: str | None = None
    expiry: int | None = None
    record: Record | str | None = None
    record_expiry: int | None = None
    mark: Mark | None = None


def purge(store: Store, now: int) -> Store:
    """What is left of the keys at a time."""
    value, expiry, record, record_expiry, mark = store
    now_ms = now // MS
    if expiry is not None and now_ms > expiry:
        value = expiry = None
    if record_expiry is not None and now_ms > record_expiry:
        record = record_expiry = None
    if mark is not None and mark.expiry is not None and now_ms > mark.expiry:
        mark = None
    return Store(value, expiry, record, record_expiry, mark)


def up(number: int, unit: int) -> int:
    """How many units cover a number."""
    return -(-number // unit)


def seconds(deadline: int) -> str:
    """A deadline as a value of the lock: the Unix second that is surely past it."""
    return str(up(deadline, SECOND))


@cache
def task_of(token: str) -> tuple[str | None, int]:
    """The task id and retry count in a token; (None, 0) if it is no task's."""
    match = _TASK_TOKEN.fullmatch(token)
    return (match[1], int(match[2])) if match else (None, 0)


class Lock:
    """The verbs. Every one takes the keys and the time, and gives back the new keys and the reply."""

    def is_past(self, now: int, deadline: int) -> bool:
        """Whether a deadline has passed."""
        return now >= deadline

    def next_fence(self, previous: int, now: int) -> int:
        """The fence of a new holder."""
        return max(previous + 1, now)

    def value_of(self, deadline: int) -> str:
        """The lock's value for a deadline."""
        return seconds(deadline)

    def record_decides(self, store: Store, now: int) -> bool:
        """Rule 5: an unexpired record of ours outweighs a value that a classic loser overwrote."""
        record = store.record
        return isinstance(record, Record) and not self.is_past(now, record.deadline)

    def proves_death(self, record: Record, dead: str) -> bool:
        """Whether the token of a process that was proved dead opens this lock."""
        return dead != "" and record.state == "running" and record.token == dead

    def passes_rest(self, record: Record, token: str) -> bool:
        """Whether a lock rests, and rests for others only: not for the task whose token this is."""
        task, _ = task_of(token)
        return record.state == "resting" and task is not None and task_of(record.token)[0] == task

    def resumes(self, record: Record, token: str) -> bool:
        """Whether a token is that of the attempt for which a lock is held."""
        task, retries = task_of(token)
        return (
            record.state == "held_for_retry"
            and task is not None
            and task == task_of(record.token)[0]
            and retries > task_of(record.token)[1]
        )

    def acquire(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        lease: int,
        retention: int,
        info: str = "",
        dead: str = "",
        marks: bool = False,
    ) -> tuple[Store, tuple[Any, ...]]:
        """lua/acquire.lua; `marks`: whether it is given the mark's key."""
        record = store.record
        if isinstance(record, str):
            return store, FOREIGNRECORD
        found = record or Record("", 0, 0, "", 0)
        old = store.value
        text = None if record is None else str(record)
        mark = None
        if marks and store.mark is not None and store.mark.task_id != NOT_A_STRING:
            mark = store.mark.task_id

        def held(until: float) -> tuple[Store, tuple[Any, ...]]:
            return store, ("held", f"{until:.0f}", str(found.fence), str(now), old, text, mark)

        word, fence = "acquired", self.next_fence(found.fence, now)
        if old is not None:
            if not NUMBER.fullmatch(old):
                return held(0)
            recorded = found.deadline > 0 and old == self.value_of(found.deadline)
            own_rest = False
            if self.record_decides(store, now):
                if found.token == token and found.state == "running":
                    return store, ("again", str(found.deadline), str(found.fence), str(now), old, text, mark)
                if self.proves_death(found, dead):
                    word = "taken_over"
                elif self.resumes(found, token):
                    word, fence = "resumed", found.fence
                else:
                    own_rest = self.passes_rest(found, token)
                    if not own_rest:
                        return held(found.deadline)
            elif not recorded:
                until = (min(float(old), 1e11) + 1) * SECOND
                if now < until:
                    return held(until)
            died = not recorded or (found.state != "resting" and found.token != token)
            if died and not own_rest and word == "acquired":
                word = "taken_over"
        deadline = now + lease
        expiry = up(deadline, MS) + retention
        after = store._replace(
            value=self.value_of(deadline),
            expiry=expiry,
            record=Record(token, deadline, fence, "running", now, info),
            record_expiry=expiry,
        )
        if mark is not None and self.ends_mark(mark, token):
            after = after._replace(mark=None)
        return after, (word, str(deadline), str(fence), str(now), old, text, mark)

    def ends_mark(self, mark: str, token: str) -> bool:
        """Whether a mark is that of the task that starts."""
        return mark == task_of(token)[0]

    def renew(
        self, store: Store, now: int, *, token: str, lease: int, retention: int
    ) -> tuple[Store, tuple[Any, ...]]:
        """lua/renew.lua."""
        value, record = store.value, store.record
        if not isinstance(record, Record) or record.token != token or record.state != "running":
            return store, ("lost", "0", str(now), value)
        if value is None:
            return store, ("gone", "0", str(now), None)
        if not self.may_still_renew(store, now) or not NUMBER.fullmatch(value):
            return store, ("lost", str(record.deadline), str(now), value)
        deadline = now + lease
        expiry = up(deadline, MS) + retention
        word = "renewed" if value == self.value_of(record.deadline) else "repaired"
        after = store._replace(
            value=self.value_of(deadline),
            expiry=expiry,
            record=record._replace(deadline=deadline),
            record_expiry=expiry,
        )
        return after, (word, str(deadline), str(now), value)

    def may_still_renew(self, store: Store, now: int) -> bool:
        """Whether the deadline of a lock of ours may be moved."""
        return self.record_decides(store, now)

    def release(
        self, store: Store, now: int, *, token: str, rest_until: int = 0, remember: int, again: int = 0
    ) -> tuple[Store, tuple[Any, ...]]:
        """lua/release.lua; `again`: the milliseconds for which it marks the key."""
        value, record = store.value, store.record
        if not isinstance(record, Record) or record.token != token:
            return store, ("lost", str(now), value)
        if record.state != "running":
            return store, (record.state, str(now), value)
        word = "gone"
        if value is not None:
            ours = value == self.value_of(record.deadline)
            repaired = not ours and self.record_decides(store, now) and NUMBER.fullmatch(value)
            if not ours and not repaired:
                return store, ("lost", str(now), value)
            if rest_until > now:
                expiry = up(rest_until, MS) + remember
                after = store._replace(
                    value=self.value_of(rest_until),
                    expiry=expiry,
                    record=record._replace(deadline=rest_until, state="resting"),
                    record_expiry=expiry,
                )
                return self.marked_again(after, now, token, again), ("resting", str(now), value)
            word = "repaired" if repaired else "released"
        after = store._replace(
            value=None,
            expiry=None,
            record=record._replace(deadline=0, state=word),
            record_expiry=now // MS + remember,
        )
        return self.marked_again(after, now, token, again), (word, str(now), value)

    def marked_again(self, store: Store, now: int, token: str, again: int) -> Store:
        """The keys of a lock that was released: its task has sent its retry, and is queued again."""
        task_id = task_of(token)[0]
        if again <= 0 or task_id is None or store.mark is not None:
            return store
        return store._replace(mark=self.mark_of(task_id, now, again))

    def hold(
        self, store: Store, now: int, *, token: str, until: int, retention: int, remember: int
    ) -> tuple[Store, tuple[Any, ...]]:
        """lua/hold.lua, which is given the time until then."""
        freed, reply = self.release(store, now, token=token, remember=remember)
        if reply[0] not in ("released", "repaired") or freed is store:
            return store, reply
        record = store.record
        assert isinstance(record, Record)
        expiry = up(until, MS) + retention
        after = store._replace(
            value=self.value_of(until),
            expiry=expiry,
            record=record._replace(deadline=until, state="held_for_retry"),
            record_expiry=expiry,
        )
        return after, ("held_for_retry", *reply[1:])

    def free(self, store: Store, now: int, *, task_id: str, remember: int) -> tuple[Store, tuple[Any, ...]]:
        """lua/free.lua."""
        record = store.record
        if not isinstance(record, Record) or record.state != "held_for_retry":
            return store, ("lost", str(now), store.value)
        if task_of(record.token)[0] != task_id:
            return store, ("lost", str(now), store.value)
        running = store._replace(record=record._replace(state="running"))
        after, reply = self.release(running, now, token=record.token, remember=remember)
        return (store if after is running else after), reply

    def mark(
        self, store: Store, now: int, *, task_id: str, lease: int, dedupe: str
    ) -> tuple[Store, tuple[Any, ...]]:
        """lua/mark.lua."""
        mark, record = store.mark, store.record
        if mark is not None and mark.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if mark is not None and not self.may_mark(mark, task_id):
            return store, ("queued", mark.task_id, str(now), None, None)
        if dedupe == "until_done" and self.executes_a_task(store, now):
            assert isinstance(record, Record)
            return store, ("running", task_of(record.token)[0], str(now), store.value, str(record))
        after = store._replace(mark=self.longer(mark, self.mark_of(task_id, now, lease)))
        return after, ("marked", task_id, str(now), None, None)

    def may_mark(self, mark: Mark, task_id: str) -> bool:
        """Whether a mark is the caller's own: the call was sent again."""
        return mark.task_id == task_id

    def executes_a_task(self, store: Store, now: int) -> bool:
        """Whether a task of ours runs, or its lock is held for its retry; a foreign lock is none."""
        record = store.record
        return (
            store.value is not None
            and isinstance(record, Record)
            and record.state in ("running", "held_for_retry")
            and task_of(record.token)[0] is not None
            and not self.is_past(now, record.deadline)
        )

    def mark_of(self, task_id: str, now: int, lease: int) -> Mark:
        """A mark that expires with its lease."""
        return Mark(task_id, now // MS + lease)

    def extend(self, store: Store, now: int, *, task_id: str, lease: int) -> tuple[Store, tuple[Any, ...]]:
        """lua/extend.lua."""
        if store.mark is not None and store.mark.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if not self.may_extend(store.mark, task_id):
            return store, ("lost",)
        holder = store.mark.task_id if store.mark else task_id
        return store._replace(mark=self.longer(store.mark, self.mark_of(holder, now, lease))), ("extended",)

    def longer(self, mark: Mark | None, new: Mark) -> Mark:
        """A mark that is set again: never to last for less than it does."""
        if mark is None or mark.task_id != new.task_id or mark.expiry is None or new.expiry is None:
            return new
        return mark if mark.expiry >= new.expiry else new

    def may_extend(self, mark: Mark | None, task_id: str) -> bool:
        """Whether a mark is there still, and the task's own."""
        return mark is not None and mark.task_id == task_id

    def unmark(self, store: Store, now: int, *, task_id: str) -> tuple[Store, tuple[Any, ...]]:
        """lua/unmark.lua."""
        if store.mark is not None and store.mark.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if store.mark is None or not self.may_unmark(store.mark, task_id):
            return store, ("lost",)
        return store._replace(mark=None), ("freed",)

    def may_unmark(self, mark: Mark, task_id: str) -> bool:
        """Whether a mark is the task's own."""
        return mark.task_id == task_id

    def look(self, store: Store, now: int) -> tuple[Store, tuple[Any, ...]]:
        """lua/look.lua."""
        return store, (str(now), store.value, None if store.record is None else str(store.record))
