"""On which terms a script is asked: a task's own, and live ones, which count above them until they end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.model.layout import STARTS, TERMS
from tests.model.lock import Call
from tests.model.permits import highest_in, limit_of, terms_in
from tests.model.store import NOT_A_STRING, SECOND, Store

PLACES = {"acquire": 10, "leave": 7, "look": 0, "park": 6, "release": 6, "serve": 7}
"""Where each script is told the own terms, and the task's live ones behind them."""

PAUSE_LOOKED_AT = 30 * SECOND
"""After so long at most a paused line is looked at: the pause may have been ended."""

PAUSE_KEEPS = 600 * SECOND
"""For how long a lock is held on for a retry that a pause delays."""

_LINE = re.compile(r"(pause|limit|rate) ([0-9]{1,17}) (\S+)")
_VALUES = {"pause": ".*", "limit": "[1-9][0-9]?|100", "rate": "(?=.{,22}$)[1-9][0-9]{0,3}/[1-9][0-9]*"}


class Terms(NamedTuple):
    """`own`: without live ones, as they are noted. `counts`: what counts now. `paused`: until when no call
    may start (us); 0 if one may.
    """

    own: str
    counts: str
    paused: int = 0


def terms_of(call: Call) -> Terms:
    """The terms of a call: a limit or rate of the key counts above its task's, of two pauses the longer."""
    place = PLACES.get(call.name, len(call.told))
    own, _, of_task = (*call.told, "1")[min(place, len(call.told))].partition("\n")
    own = terms_in(call.store) if own == "0" else own
    limit, _, rate = own.partition(":")
    live = [*live_in(of_task, call.now), *live_in(_text_of_key(call), call.now)]
    values = {"limit": limit, "rate": rate} | {name: value for name, _, value in live}
    paused = max((until for name, until, _ in live if name == "pause"), default=0)
    return Terms(own, values["limit"] + (values["rate"] and f":{values['rate']}"), paused)


def live_in(text: str, now: int) -> Iterator[tuple[str, int, str]]:
    """Name, end and value of each term that is not over. Nothing else counts, be it written as it may."""
    for line in text.split("\n"):
        if (found := _LINE.match(line)) and now < int(found[2]) and re.fullmatch(_VALUES[found[1]], found[3]):
            yield found[1], int(found[2]), found[3]


def of_key(store: Store) -> str | None:
    """The text with the key's live terms, if there is one."""
    return None if store.terms is None or store.terms.task_id == NOT_A_STRING else store.terms.task_id


def _text_of_key(call: Call) -> str:
    return (TERMS in call.keys and of_key(call.store)) or ""


def looked_at(start: int, paused: int, now: int) -> int:
    """When to look at a line whose next call may start then."""
    return min(start, now + PAUSE_LOOKED_AT) if paused else start


def permits_needed(call: Call) -> int:
    """Of how many permits a script must be told: of all in use, and of as many as there may be."""
    return max(min(highest_in(call.store)[0], 100), limit_of(terms_of(call).counts))


def needs_starts(call: Call) -> bool:
    """Whether an acquire must be told of the starts, and is not."""
    return call.name == "acquire" and STARTS not in call.keys and terms_of(call).counts != "1"
