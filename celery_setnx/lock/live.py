"""Live terms: what an operator, or a body, has said of a key or a task, and until when. Redis only."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from celery_setnx.lock.names import live_terms_name, scope_and_digest, terms_name
from celery_setnx.lock.record import US, Holder, clock
from celery_setnx.lock.scripts import REDIS_ERRORS, Script
from celery_setnx.lock.verbs import Permit
from celery_setnx.lock.wire import ask
from celery_setnx.wording import shortened, source

CHANGE, HOLD_BACK = Script("change_terms"), Script("hold_back")

Name = Literal["pause", "limit", "rate"]

_LINE = re.compile(r"(pause|limit|rate) (\d{1,17}) (\S+)(?: (.*))?")
_BECAUSE = 300  # characters of a reason
_JSON = json.JSONEncoder(separators=(",", ":"))


class LiveTerm(NamedTuple):
    """A term that an operator, or a body, has set: it counts above the task's own, and ends by itself.

    Attributes:
        name: `pause`, `limit` or `rate`.
        until: When it ends: the server's clock, in Unix seconds.
        value: How many calls may hold the lock at a time (`2`), or how many may start (`10/60000000`: within
            so many microseconds); `-` of a pause.
        because: The reason that was given. Defaults to nothing.
        by: Who has set it. Defaults to nothing.
        since: When it was set (Unix seconds). Defaults to 0: it is not known.
    """

    name: Name
    until: float
    value: str = "-"
    because: str = ""
    by: str = ""
    since: float = 0.0

    def remaining_s(self, server_time: float) -> float:
        """Seconds for which it counts still."""
        return max(0.0, self.until - server_time)

    @property
    def what(self) -> str:
        """What it means, in words."""
        if self.name == "pause":
            return "paused"
        if self.name == "limit":
            return f"limited to {self.value} at a time"
        count, _, period_us = self.value.partition("/")
        return f"limited to {count} starts in {int(period_us) / US:.12g} s"

    @property
    def source(self) -> str:
        """By whom, and why, as far as that is known, to be put behind what it means."""
        return source(self.by, self.because)

    def told(self) -> str:
        """In a sentence: what, until when, by whom and why."""
        return f"{self.what} until {clock(self.until)}{self.source}."


class NewTerm(NamedTuple):
    """A live term that is to be set.

    Attributes:
        name: `pause`: no call starts. `limit`: so many run at a time. `rate`: so many start in a period.
        for_s: Seconds for which it counts; a year at most. The server's clock ends it.
        value: How many may run, or start, as in the options `limit` and `rate`. Defaults to that of a pause.
        because: Why, for whoever asks. Defaults to nothing.
        by: Who sets it, for the log and for whoever asks. Defaults to nothing.
    """

    name: Name
    for_s: float
    value: Any = "-"
    because: str = ""
    by: str = ""


def live_terms_of(text: str | None, server_time: float = 0.0) -> list[LiveTerm]:
    """The live terms that a text has, without those that are over; see lua/terms.lua."""
    found = []
    for line in (text or "").split("\n"):
        if (told := _LINE.fullmatch(line)) and int(told[2]) > server_time * US:
            found.append(LiveTerm(told[1], int(told[2]) / US, told[3], **_details(told[4])))  # type: ignore[arg-type]
    return found


def pause_in(terms: Iterable[LiveTerm]) -> LiveTerm | None:
    """The pause among them that ends last; None if there is none."""
    pauses = (term for term in terms if term.name == "pause")
    return max(pauses, key=attrgetter("until"), default=None)


def paused(key: str, of_key: str, of_task: str, until: float, now: float) -> Holder:
    """What stands in the place of a holder while a pause lets no call start: of the key or of its task."""
    own, tasks = (pause_in(live_terms_of(text, now)) for text in (of_key, of_task))
    told = pause_in(filter(None, (own, tasks))) or LiveTerm("pause", until)
    whose = {"scope": scope_and_digest(key)[0]} if told is tasks else {"key": key}
    who = {name: text for name, text in (("because", told.because), ("by", told.by)) if text}
    return Holder("", until, 0, "paused", told.since or None, who | whose)


def _details(text: str | None) -> dict[str, Any]:
    try:
        told = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(told, Mapping):
        return {}
    found: dict[str, Any] = {
        name: told[name] for name in ("because", "by") if isinstance(told.get(name), str)
    }
    since = told.get("since")
    return {**found, "since": since} if isinstance(since, (int, float)) else found


class Change(NamedTuple):
    """What was changed of the live terms of a key, or of a task.

    Attributes:
        server_time: The server's clock (Unix seconds).
        before: Those before.
        after: Those from now on.
    """

    server_time: float
    before: list[LiveTerm]
    after: list[LiveTerm]


def change_key_terms(client: Any, key: str, term: NewTerm) -> Change:
    """Set one live term of a key; with 0 seconds it ends."""
    return _changed(client, terms_name(key), "", term)


def change_task_terms(client: Any, prefix: str, scope: str, term: NewTerm) -> Change:
    """Set one live term of all keys of a scope; with 0 seconds it ends."""
    return _changed(client, live_terms_name(prefix), scope, term)


def _changed(client: Any, key: str, scope: str, term: NewTerm) -> Change:
    """lua/change_terms.lua."""
    told = {"because": _briefly(term.because), "by": term.by, "since": round(time.time(), 3)}
    text = f"{term.value} {_JSON.encode({name: each for name, each in told.items() if each})}"
    now_us, before, after = CHANGE(client, (key,), scope, term.name, round(term.for_s * US), text)
    now = int(now_us) / US
    return Change(now, live_terms_of(before, now), live_terms_of(after, now))


def live_terms_of_tasks(client: Any, prefix: str) -> dict[str, str]:
    """The live terms of all tasks, by scope; none where another program has a value of another type.

    Raises redis-py's errors.
    """
    name = live_terms_name(prefix)
    try:
        found = ask(client, ("HGETALL", name))
    except REDIS_ERRORS as error:
        if str(error).startswith("WRONGTYPE"):
            return {}
        raise
    pairs = list(found.items()) if isinstance(found, dict) else list(zip(found[::2], found[1::2]))
    return {_text(scope): _text(text) for scope, text in pairs}


def hold_back(permit: Permit, *, for_s: float, told: Mapping[str, Any]) -> tuple[str, float]:
    """lua/hold_back.lua: its word, and for how many seconds no call of the key starts."""
    lock, number, token = permit
    keys = (*lock.keys_of(number)[:2], terms_name(lock.name))
    about = _JSON.encode({**told, "because": _briefly(told.get("because", ""))})
    word, now_us, until_us = HOLD_BACK(lock.client, keys, token, round(for_s * US), about)
    return word, max(0, int(until_us) - int(now_us)) / US


def _briefly(because: object) -> str:
    """A reason, short enough to travel with each delivery: a body may give its partner's whole answer."""
    return shortened(str(because), _BECAUSE)


def _text(word: Any) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)
