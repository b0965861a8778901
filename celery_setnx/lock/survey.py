"""What locks, marks, lines and successes there are, found by SCAN and looked at many at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import redis

from celery_setnx.lock.live import live_terms_of_tasks
from celery_setnx.lock.look import Sighting, look_at_each
from celery_setnx.lock.names import permit_names, scope_and_digest, starts_name
from celery_setnx.lock.record import UNKNOWN, US, Terms
from celery_setnx.lock.scripts import reply_to
from celery_setnx.lock.verbs import IfSame, if_this_is_same

BATCH = 1000
"""Locks that are looked at in one round trip, and names that one SCAN looks at."""

COMMANDS = (
    *("SCAN", "EVAL", "EVALSHA", "TIME", "GET", "MGET", "EXISTS", "PTTL"),
    *("ZCOUNT", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANGEBYSCORE"),
)
"""What a user who looks at locks must be allowed to do."""

BEAT = "celery.beat:"
"""What the scope of a beat's lead begins with: a lock that is held for as long as the beat lives."""

_GLOB = re.compile(r"([\\*?\[\]^-])")
_BESIDE = re.compile(r"(.*{.+})(|:queued|:newest|:line|:starts|:terms|#([1-9]\d?))", re.DOTALL)


def survey(client: Any, prefix: str, *, marks: bool = True) -> Iterator[Sighting]:
    """Every lock, line and mark under a prefix, and every key with noted starts or live terms, by key.

    The names are collected first, so one that comes meanwhile may be missing, and one that goes is left out.
    What a release leaves behind for a minute is no lock. Locks that the user has named (`SetnxLock`) are
    elsewhere. Raises redis-py's errors of SCAN, and ours of the looks.
    """
    counts: dict[str, int] = {}
    for name in client.scan_iter(match=f"{escaped(prefix)}:{{*", count=BATCH):
        found = _BESIDE.fullmatch(_text(name))
        if found and (marks or found[2] not in (":queued", ":newest")):
            counts[found[1]] = max(counts.get(found[1], 1), 1 + int(found[3] or 0))
    live = live_terms_of_tasks(client, prefix)
    of_task = partial(_terms_at, live) if live else _unknown
    for seen in _each(client, sorted(counts.items()), of_task):
        if seen.is_lock or seen.live or seen.queued is not None or seen.last_start is not None:
            yield seen


def successes(client: Any, prefix: str) -> Iterator[Sighting]:
    """Every key under a prefix with a call whose success counts, as `survey` finds locks."""
    yield from (seen for seen in _with(client, prefix, ":done") if seen.done is not None)


def overridden(client: Any, prefix: str) -> Iterator[Sighting]:
    """Every key under a prefix with live terms of its own, as `survey` finds locks."""
    yield from (seen for seen in _with(client, prefix, ":terms") if seen.live)


def _with(client: Any, prefix: str, beside: str) -> Iterator[Sighting]:
    """What there is of each key that has this beside its lock."""
    names = {_text(name) for name in client.scan_iter(match=f"{escaped(prefix)}:{{*}}{beside}", count=BATCH)}
    return _each(client, sorted((name.removesuffix(beside), 1) for name in names))


def drop(client: redis.Redis, seen: Sighting) -> bool:
    """Delete the lock of the holder that was seen, and its record, if they are still what was seen."""
    holder = seen.holder
    if holder is None:
        return False
    names, values = permit_names(seen.key, holder.permit), tuple(each or "" for each in holder.raw)
    return if_this_is_same(client, IfSame(names, values))


def forget_starts(client: redis.Redis, seen: Sighting) -> int:
    """Forget the starts that were seen, so that they count no more: how many. Later ones count."""
    if seen.last_start is None:
        return 0
    last_us = str(round(seen.last_start * US))
    return int(reply_to(client, "ZREMRANGEBYSCORE", starts_name(seen.key), "-inf", last_us))


def _unknown(_key: str) -> Terms:
    return UNKNOWN


def _terms_at(live: Mapping[str, str], key: str) -> Terms:
    """The live terms of the task whose lock this is."""
    return UNKNOWN._replace(live=live.get(scope_and_digest(key)[0], ""))


def _each(
    client: Any, locks: Sequence[tuple[str, int]], terms: Callable[[str], Terms] = _unknown
) -> Iterator[Sighting]:
    """What there is of each lock, a batch at a time."""
    left = iter(locks)
    while batch := list(islice(left, BATCH)):
        for seen in look_at_each(client, batch, terms):
            if not isinstance(seen, Sighting):
                raise seen
            yield seen


def escaped(text: str) -> str:
    """A text that a pattern of SCAN takes as it stands."""
    return _GLOB.sub(r"\\\1", text)


def _text(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item
