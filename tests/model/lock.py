"""The package's own scripts, as functions of what Redis holds and of the time. Units as in the scripts.

Each method says what a caller tells its script; the answer is what the simulated server makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from tests.model.injected import plain_texts
from tests.model.layout import (
    CALLS,
    DONE,
    LINE,
    LOCK,
    MARK,
    NEWEST,
    PERMITS,
    RECORD,
    STARTS,
    TERMS,
    laid_out,
    others,
    pair,
    read_back,
    ticket_name,
)
from tests.model.store import MS, Answer, Record, Start, Store, task_of
from tests.simulation.scripts import Script, script
from tests.simulation.server import Server, ServerError

TEXTS = plain_texts()


@contextmanager
def mistaken(verb: str, right: str, wrong: str) -> Iterator[None]:
    """Every lock that is made meanwhile has this mistake in a script; a `#` as in a `Call`."""
    text = TEXTS[verb]
    assert text.count(right) == 1, (verb, right)
    TEXTS[verb] = text.replace(right, wrong)
    try:
        yield
    finally:
        TEXTS[verb] = text


class Call(NamedTuple):
    """A script with a `#` if it knows of several permits; what it found, when (us), and what it was told."""

    verb: str
    store: Store
    now: int
    keys: tuple[bytes, ...]
    told: tuple[str, ...]

    @property
    def name(self) -> str:
        """The verb alone."""
        return self.verb.rstrip("#")


class Lock:
    """The verbs. Every one takes the keys and the time, and gives back the new keys and the reply.

    `calls`: of its scripts, as they were made.
    """

    def __init__(self) -> None:
        self._scripts: dict[str, Script] = {verb: script(text) for verb, text in TEXTS.items()}
        self.calls: dict[Call, None] = {}

    def _run(self, verb: str, store: Store, now: int, keys: tuple[bytes, ...], *arguments: Any) -> Answer:
        """What a script answers; the store is the same object if it has changed nothing."""
        told = tuple(map(str, arguments))
        self.calls[Call(verb, store, now, keys, told)] = None
        server = Server(laid_out(store, now // MS), now)
        try:
            reply = self._scripts[verb].run(server, keys, tuple(word.encode() for word in told))
        except ServerError as error:
            return store, (str(error).split()[0],)
        words = reply.split(b" ") if isinstance(reply, bytes) else reply
        after = read_back(server.keys, now // MS)
        return (store if after == store else after), tuple(map(_said, words))

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
        copy: str = "-",
        remember: int = 0,
        linger: int = 0,
        since: int = 0,
        attempt: int = 0,
        terms: str = "1",
        shared: str = "0",
        line: bool = False,
        count: int = 0,
    ) -> Answer:
        """lua/acquire.lua; `line`: whether it has a task's lock's keys; `count`: of how many permits, 0 if it
        is the script that knows of one only.
        """
        task = task_of(token)[0]
        keys: tuple[bytes, ...] = (LOCK, RECORD)
        if line:
            keys += (LINE, CALLS, MARK, ticket_name(task or ""), PERMITS, TERMS)
        if count:
            keys += (STARTS, *others(count))
        told = (token, lease, retention, info, dead, copy, remember, linger, since, attempt, terms, 0, shared)
        after, reply = self._run("acquire#" if count else "acquire", store, now, keys, *told)
        if reply[0] == "acquired" and len(reply) < 5:  # nothing was found: it says no more than that
            word, at, fence, *number = reply
            rest = (*number, "0") if number else ()
            reply = (word, str(now + lease), fence, at, None, None, None, "0", *rest)
        return after, reply

    def take_back(self, store: Store, now: int, *, start: Start) -> Answer:
        """The command by which an acquisition without a body counts as no start."""
        server = Server(laid_out(store, now // MS), now)
        removed = server.run(b"ZREM", STARTS, b"%d#%d#%d" % start)
        return read_back(server.keys, now // MS), ("taken_back" if removed else "gone",)

    def start_of(self, record: Record, number: int) -> Start:
        """As what the start of a permit's holder is noted."""
        return record.since, number, record.fence

    def renew(
        self, store: Store, now: int, *, token: str, lease: int, retention: int, permit: int = 0
    ) -> Answer:
        """lua/renew.lua."""
        return self._run("renew", store, now, _of_permit(permit), token, lease, retention)

    def release(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        rest_until: int = 0,
        remember: int,
        again: int = 0,
        hand_over: int | str = "",
        done_for: int = 0,
        line: bool = False,
        permit: int = 0,
        terms: str = "",
        count: int = 1,
    ) -> Answer:
        """lua/release.lua; `again`: the milliseconds for which it marks the key; `done_for`: for which it
        notes the success; `terms`: '' if they are plain. The reply ends with whether the script has said the
        word alone.
        """
        is_paced = ":" in terms or "\n" in terms
        keys = pair(permit)
        if line or again or done_for or permit:
            keys += (LINE, CALLS, TERMS, MARK)
        if permit or done_for or is_paced:
            keys += (PERMITS,)
        if done_for or is_paced:
            keys += (DONE,)
        told: tuple[object, ...] = (token, rest_until, remember, again, hand_over, done_for)
        if permit or terms:
            told += (terms or "1", permit)
        if is_paced:
            others_of = (pair(number) for number in range(count) if number != permit)
            keys += (STARTS, *chain.from_iterable(others_of))
        after, reply = self._run("release", store, now, keys, *told)
        if len(reply) == 1:
            return after, (*reply, str(now), store.value, None, None, "", True)
        return after, (*reply, *(None, None, "")[len(reply) - 3 :], False)

    def hold(
        self, store: Store, now: int, *, token: str, lease: int, retention: int, permit: int = 0
    ) -> Answer:
        """lua/hold.lua."""
        return self._run("hold", store, now, _of_permit(permit), token, lease, retention)

    def free(self, store: Store, now: int, *, task_id: str, remember: int, count: int = 1) -> Answer:
        """lua/free.lua."""
        keys = (LOCK, RECORD, PERMITS, *others(count))
        return self._run("free#" if count > 1 else "free", store, now, keys, task_id, remember)

    def mark(self, store: Store, now: int, *, task_id: str, lease: int, dedupe: str) -> Answer:
        """lua/mark.lua."""
        keys = (LOCK, RECORD, MARK, DONE)
        return self._run("mark", store, now, keys, task_id, lease, dedupe)

    def if_same(self, store: Store, now: int, *, task_id: str, lease: int | str = "") -> Answer:
        """lua/if_same.lua, of a mark: it lasts for a lease; or it is freed."""
        return self._run("if_same", store, now, (MARK,), task_id, lease)

    def forget_done(self, store: Store, now: int, *, token: str, count: int = 1) -> Answer:
        """lua/forget.lua."""
        return self._run("forget", store, now, (DONE, RECORD, *others(count)[1::2]), token)

    def serve(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        hand_over: int,
        remember: int,
        lease: int,
        dead: str = "",
        away: str = "",
        unsent: str = "",
        terms: str = "0",
        count: int = 0,
    ) -> Answer:
        """lua/serve.lua; `count`: as for acquire."""
        keys = (LOCK, RECORD, LINE, CALLS, PERMITS, STARTS, TERMS, *others(count))
        told = token, hand_over, remember, lease, dead, away, unsent, terms
        return self._run("serve#" if count else "serve", store, now, keys, *told)

    def park(
        self,
        store: Store,
        now: int,
        *,
        task: str,
        attempt: int,
        copy: str,
        since: int,
        call: str,
        remember: int,
        terms: str = "0",
        shared: str = "0",
        alone: str = "0",
        count: int = 1,
    ) -> Answer:
        """lua/park.lua."""
        keys = (LOCK, RECORD, LINE, CALLS, ticket_name(task), PERMITS, NEWEST, TERMS, *others(count))
        told = task, attempt, copy, since, call, remember, terms, shared, "0", alone
        return self._run("park#" if count > 1 else "park", store, now, keys, *told)

    def leave(
        self,
        store: Store,
        now: int,
        *,
        task: str,
        attempt: int,
        copy: str,
        remember: int,
        hand_over: int,
        lease: int | str = "",
        terms: str = "0",
        shared: str = "0",
        count: int = 1,
    ) -> Answer:
        """lua/leave.lua; `lease`: for how long it is passed over that stays."""
        keys = (LOCK, RECORD, LINE, CALLS, ticket_name(task), PERMITS, STARTS, TERMS, *others(count))
        token = f"left {task} {attempt} {copy}"
        told = task, attempt, copy, remember, shared, token, hand_over, terms, lease
        return self._run("leave#" if count > 1 else "leave", store, now, keys, *told)


def _of_permit(number: int) -> tuple[bytes, ...]:
    return (*pair(number), PERMITS) if number else pair(0)


def _said(word: Any) -> str | None:
    return word.decode() if isinstance(word, bytes) else None if word is None else str(word)
