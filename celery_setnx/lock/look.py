"""What there is of a lock, and what a call would be told: lua/look.lua, asked of one lock or of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.live import LiveTerm, live_terms_of, pause_in
from celery_setnx.lock.names import names_to_look_at, other_permits, scope_and_digest
from celery_setnx.lock.newest import AT_ONCE, Debounce, Newest, newest_of
from celery_setnx.lock.process import fate_of
from celery_setnx.lock.record import (
    PLAIN,
    UNKNOWN,
    US,
    Holder,
    Terms,
    Waiter,
    holder_of,
    parse_terms,
    task_of,
)
from celery_setnx.lock.scripts import Script, texts_of

WAITERS = 100
"""Of how many of those who wait a look tells at most."""

LOOK = Script("look", raw=True)
_HEAD, _EACH = 21, 4  # words of its reply: before what it tells of each permit, and of each


class Sighting(NamedTuple):
    """What was seen of one lock, at one moment.

    Attributes:
        key: The lock's Redis key.
        server_time: The server's clock (Unix seconds).
        word: What a call would be told: `acquired`, `taken_over` (a holder that has died), `held`, `paced`
            (its pace allows no start), `paused` (live terms allow none), `line` (it is free for those who
            wait) or `refused` (the record is another program's).
        permit: Number of the permit that it would be told of.
        next_start: When the next call may start (server time); None if neither pace nor pause is in the way.
        started: How many starts count now, those among them that are about to come: a permit is handed to
            them. Without a pace: how many are noted.
        last_start: When a call has started last (server time); None if that is not known.
        duplicate: Why a call would not be published, if it was asked: `queued`, `running` or `done`.
        original: Id of the task whose duplicate it would be.
        terms: On which terms newcomers have it, but for live ones; one at a time, as often as you like, if no
            client that knows of others has used it lately.
        asked: The terms that a call has, live ones included: those of `word`, `next_start` and `started`.
        waiting: How many tasks wait in line.
        mark: Id of the task that is queued with this key; None if none is.
        mark_ends_s: Seconds until the mark lapses; None if there is none.
        done: Token of the run that has succeeded and counts for its `dedupe_for`; None if none does.
        done_counts_for_s: Seconds for which it counts still; None if there is none.
        newest: What is known of the newest call, which replaces the others; None if nothing is.
        live: The live terms of the key.
        waits_s: Seconds for which a call that is published now waits for newer ones, if it was asked.
        permits: How many permits it has, or had before its limit was lowered.
        holders: Who has its permits, or had them until their deadlines, by number.
        left: Who had the other permits: known for a minute after a release, and if somebody has deleted the
            lock itself, for as long as its record lasts.
        waiters: Who waits in line, the first hundred, if it was asked.
    """

    key: str
    server_time: float = 0.0
    word: str = "acquired"
    permit: int = 0
    next_start: float | None = None
    started: int = 0
    last_start: float | None = None
    duplicate: str | None = None
    original: str | None = None
    terms: Terms = PLAIN
    asked: Terms = PLAIN
    waiting: int = 0
    mark: str | None = None
    mark_ends_s: float | None = None
    done: str | None = None
    done_counts_for_s: float | None = None
    newest: Newest | None = None
    live: tuple[LiveTerm, ...] = ()
    waits_s: float = 0.0
    permits: int = 1
    holders: tuple[Holder, ...] = ()
    left: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()

    @property
    def scope(self) -> str:
        """The name the key lives under: the task's, unless tasks share one."""
        return scope_and_digest(self.key)[0]

    @property
    def digest(self) -> str:
        """The digest of the call's key; empty for the lock of a whole task."""
        return scope_and_digest(self.key)[1]

    @property
    def limit(self) -> int:
        """How many permits there are for newcomers."""
        return self.terms.limit

    @property
    def holder(self) -> Holder | None:
        """Who has the lock, or had it until its deadline: see `is_stale`. None if it is free.

        Of several who needs a look first: one that will not come back, one whose lock never ends, or else the
        one that has held for longest.
        """
        if len(self.holders) < 2:
            return self.holders[0] if self.holders else None

        def order(holder: Holder) -> tuple[int, float]:
            died = holder.state == "running" and fate_of(holder.info) == "dead"
            if holder.has_ended(self.server_time):
                return 0, holder.since or 0.0
            return 1 if died else 2 if holder.deadline is None else 3, holder.since or 0.0

        return min(self.holders, key=order, default=None)

    @property
    def last_holder(self) -> Holder | None:
        """Who had a lock that is free now, if that is known. Of several who acquired it last."""
        if self.holders:
            return None
        return max(self.left, key=lambda holder: holder.since or 0.0, default=None)

    @property
    def permit_holder(self) -> Holder | None:
        """Who has the permit that a call would be told of, or had it until its deadline."""
        return next((holder for holder in self.holders if holder.permit == self.permit), None)

    @property
    def has_several(self) -> bool:
        """True if it has more than one permit, or had until its limit was lowered."""
        return self.limit > 1 or self.permits > 1

    @property
    def name(self) -> str:
        """What its holder has: the lock by its key, or one of several permits, as `KEY#3`."""
        return f"{self.key}#{self.holder.permit}" if self.holder and self.has_several else self.key

    @property
    def task(self) -> str:
        """The task that the record names; the scope, where none does."""
        return str((self.holder and self.holder.task) or self.scope)

    @property
    def about(self) -> str:
        """What the key was made of, as the record says it; empty where none does."""
        said = (holder.about for holder in (self.holder, *self.holders) if holder)
        return next(filter(None, said), "")

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the holder's deadline, negative once it has passed; None if there is none."""
        deadline = self.holder.deadline if self.holder else None
        return None if deadline is None else deadline - self.server_time

    @property
    def age_s(self) -> float | None:
        """Seconds since the holder acquired the lock; None if that is not known."""
        since = self.holder.since if self.holder else None
        return None if since is None else max(0.0, self.server_time - since)

    @property
    def is_stale(self) -> bool:
        """True if a deadline has passed and the lock is still there: the next call takes it over."""
        return self.holder is not None and self.holder.has_ended(self.server_time)

    @property
    def process(self) -> Literal["alive", "dead", "unknown"] | None:
        """What is known from here of the process that runs under the lock; None if nobody does."""
        return fate_of(self.holder.info) if self.holder and self.holder.state == "running" else None

    @property
    def is_abandoned(self) -> bool:
        """True if a holder will not come back: it is stale, or who runs under it is surely dead."""
        return self.is_stale or self.process == "dead"

    @property
    def living(self) -> list[Holder]:
        """Who holds its permits and keeps others out, by number: those whose deadlines have not passed."""
        return [holder for holder in self.holders if not holder.has_ended(self.server_time)]

    @property
    def longest(self) -> Holder | None:
        """Who has held it for longest of those who keep out who asks; None while a permit is free."""
        living = self.living
        if sum(holder.permit < self.asked.limit for holder in living) < self.asked.limit:
            return None
        return min(living, key=lambda holder: holder.since or 0.0)

    @property
    def within(self) -> Sighting:
        """The same lock without the permits beyond the limit of who asks."""
        return self._replace(holders=tuple(one for one in self.holders if one.permit < self.asked.limit))

    def of_each(self) -> Iterator[Sighting]:
        """The same lock as each of its holders has it."""
        if len(self.holders) < 2:
            yield from (self,) if self.holders else ()
            return
        for holder in self.holders:
            yield self._replace(holders=(holder,))

    @property
    def is_lock(self) -> bool:
        """True if somebody has it or waits for it, or its pace or its own pause counts; else it is a mark."""
        return bool(self.holders) or self.waiting > 0 or self.is_paced or pause_in(self.live) is not None

    @property
    def is_paced(self) -> bool:
        """True if a permit is free, and its pace allows no start."""
        return self.word == "paced"

    @property
    def is_paused(self) -> bool:
        """True if a permit is free, and a pause allows no start."""
        return self.word == "paused"

    @property
    def pause(self) -> LiveTerm | None:
        """The pause that lets no call start, of its key or its task; None if none is known here."""
        return pause_in([*self.live, *live_terms_of(self.asked.live, self.server_time)])

    @property
    def queued(self) -> str | None:
        """Id of the task that is queued with this key, or is the newest that is; None if none is."""
        return self.newest.task_id if self.newest else self.mark

    @property
    def queued_for_s(self) -> float | None:
        """Seconds until that is known no longer; None if none is queued."""
        return self.newest.lapses_in_s if self.newest else self.mark_ends_s

    @property
    def done_by(self) -> str | None:
        """Id of the task that has succeeded and counts; None if none has."""
        return self.done and (task_of(self.done) or self.done)


def look(
    client: Any,
    key: str,
    *,
    terms: Terms | None = None,
    dedupe: str | Debounce = "",
    dead: str = "",
    waiters: int = 0,
) -> Sighting:
    """What there is of one lock now; a free one has no holder.

    Args:
        client: A Redis client.
        key: The lock's Redis key.
        terms: Those of the call that would be told `word`. Defaults to those of who has asked last.
        dedupe: What makes duplicates of it at publish time: `until_started`, `until_done` or `dedupe_for`;
            or, of a call that replaces older ones, how long it waits. Defaults to nothing: it is not asked.
        dead: The token of a holder whose process is proved dead. Defaults to none.
        waiters: Of how many of those who wait it tells. Defaults to 0.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
        ValueError: There can be no lock of this name.
    """
    count = max(1, terms.limit) if terms else 1
    asked = terms or UNKNOWN
    (seen,) = look_at_each(client, [(key, count)], lambda _key: asked, dedupe, dead, waiters)
    if not isinstance(seen, Sighting):
        raise seen
    return seen


def look_at_each(
    client: Any,
    locks: Sequence[tuple[str, int]],
    terms: Callable[[str], Terms],
    dedupe: str | Debounce = "",
    dead: str = "",
    waiters: int = 0,
) -> list[Sighting | LockUnavailable | LockRefused]:
    """As `look`, of many locks in one round trip: by key, and how many permits they have at least.

    One round trip more, if some have more than is said. In the place of a lock that cannot be read, why.
    """
    asks, debounce = ("", dedupe) if isinstance(dedupe, Debounce) else (dedupe, AT_ONCE)
    told = asks, dead, waiters, *debounce.as_argv()
    of_each = {key: terms(key) for key, _ in locks}
    found: dict[str, Any] = {}
    counts = dict(locks)
    while counts:
        calls = [
            ((*names_to_look_at(key), *other_permits(key, count)), (of_each[key], *told))
            for key, count in counts.items()
        ]
        replies = LOOK.many(client, calls)
        found.update(zip(counts, replies))
        asked = zip(counts, replies)
        counts = {
            key: int(reply[1])
            for key, reply in asked
            if isinstance(reply, list) and reply[0] in ("more", b"more")
        }
    return [_sighting(key, found[key], of_each[key].live) for key, _ in locks]


def _sighting(key: str, reply: Any, live_of_task: str) -> Sighting | LockUnavailable | LockRefused:
    if not isinstance(reply, list):
        return reply  # type: ignore[no-any-return]
    now_us, word, permit, next_us, duplicate, original, noted, started, *rest = texts_of(reply[:_HEAD])
    last_us, waiting, mark, mark_ms, done, done_ms, newest, newest_ms, *rest = rest
    live, counting, waits_us, count, told = rest
    end, now, terms = _HEAD + told * _EACH, now_us / US, parse_terms(noted)
    holders = _holders(reply[_HEAD:end])
    return Sighting(
        key=key,
        server_time=now,
        word=word,
        permit=permit,
        next_start=next_us / US if next_us else None,
        started=started,
        last_start=last_us / US if last_us else None,
        duplicate=duplicate,
        original=original,
        terms=terms,
        asked=parse_terms(counting)._replace(live=live_of_task),
        waiting=waiting,
        mark=mark,
        mark_ends_s=max(0, mark_ms) / 1000 if mark is not None else None,
        done=done,
        done_counts_for_s=max(0, done_ms) / 1000 if done is not None else None,
        newest=newest_of(newest, now, max(0, newest_ms) / 1000),
        live=tuple(live_terms_of(live, now)),
        waits_s=waits_us / US,
        permits=count,
        holders=tuple(holder for holder in holders if holder.raw[0] is not None),
        left=tuple(holder for holder in holders if holder.raw[0] is None),
        waiters=_waiters(texts_of(reply[end:]), now),
    )


def _holders(reply: list[Any]) -> list[Holder]:
    """Who has a permit, or has left a record: number, value, record, and the one beside a foreign value."""
    found = []
    for at in range(0, len(reply), _EACH):
        number, value, record, _ = texts_of(reply[at : at + _EACH])
        its = 3 if record.startswith("\n") else 2  # a foreign one has no token
        holder = holder_of(value, record, number, (reply[at + 1], reply[at + its]))
        found += [holder] if holder else []
    return found


def _waiters(line: list[Any], now: float) -> tuple[Waiter, ...]:
    """Who waits: each task, and since when (us)."""
    places = enumerate(zip(line[::2], line[1::2]), 1)
    return tuple(
        Waiter(task_id, place, float(since_us) / US, max(0.0, now - float(since_us) / US))
        for place, (task_id, since_us) in places
    )
