"""How live terms are changed: the clauses of the contracts of change_terms.lua and hold_back.lua."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.model.edits import before, number_of
from tests.model.lock import Call
from tests.model.permits import at
from tests.model.store import MS, NOT_A_STRING, NUMBER, Calls, Mark, Store, up
from tests.model.terms import live_in, of_key
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played

_LINE = re.compile(r"([a-z]+) ([0-9]{1,17}) (.*)")


def changed(text: str, now: int, name: str, until: int, rest: str) -> tuple[str, int]:
    """The terms that are not over, and the new one in place of that of its name; and when the last ends."""
    found = [found for line in text.split("\n") if (found := _LINE.fullmatch(line))]
    kept = [(each[0], int(each[2])) for each in found if each[1] != name and now < int(each[2])]
    kept += [(f"{name} {until} {rest}", until)] if until else []
    return "\n".join(line for line, _ in kept), max((end for _, end in kept), default=0)


def changes_one_term(script: Script, call: Call, found: Played) -> bool:
    """One of a key's terms, or a task's, is set or ends; those that are over go, and others stay as they are.

    The reply says the time, and the text before and after.
    """
    if call.name != "change_terms":
        return True
    scope, name, lasts, rest = call.told
    text = dict(call.store.scopes.fields).get(scope, "") if scope else of_key(call.store) or ""
    if not scope and call.store.terms and call.store.terms.task_id == NOT_A_STRING:
        return found.word == "WRONGTYPE" and found.after == before(call)
    after, last = changed(text, call.now, name, int(lasts) and call.now + int(lasts), rest)
    store = _with_scope if scope else _with_terms
    return found.words == [str(call.now), text, after] and found.after == store(call, after, last)


def _with_terms(call: Call, text: str, last: int) -> Store:
    """The keys with this text of a key's live terms: it lasts until the last of them has ended."""
    expiry = call.now // MS + up(last - call.now, MS) + 1
    return before(call)._replace(terms=Mark(text, expiry) if text else None)


def _with_scope(call: Call, text: str, last: int) -> Store:
    """The keys with this text of a task's live terms: all of these last for as long at least."""
    store, scope = before(call), call.told[0]
    fields = {**dict(store.scopes.fields), scope: text}
    if not text:
        del fields[scope]
    ordered = tuple(sorted(fields.items(), key=lambda each: each[0].encode()))
    lease = max(store.scopes.lease, up(last - call.now, MS) + 1 if text else 0)
    return store._replace(scopes=Calls(ordered, lease) if ordered else Calls())


def holds_back_who_has_the_lock(script: Script, call: Call, found: Played) -> bool:
    """Who runs with the lock may pause its key, and ends no pause sooner that stands."""
    if call.name != "hold_back":
        return True
    token, lasts, told = call.told
    permit, till = at(call.store, number_of(call)), call.now + int(lasts)
    is_live = bool(NUMBER.fullmatch(permit.value or "")) and call.now < permit.holder.deadline
    if not is_live or (permit.holder.token, permit.holder.state) != (token, "running"):
        return found.words == ["lost", str(call.now), "0"] and found.after == before(call)
    if call.store.terms and call.store.terms.task_id == NOT_A_STRING:
        return found.word == "WRONGTYPE" and found.after == before(call)
    text = of_key(call.store) or ""
    stands = max((until for name, until, _ in live_in(text, call.now) if name == "pause"), default=0)
    if stands >= till:
        return found.words == ["stands", str(call.now), str(stands)] and found.after == before(call)
    after = _with_terms(call, *changed(text, call.now, "pause", till, f"- {told}"))
    return found.words == ["paused", str(call.now), str(till)] and found.after == after


CLAUSES = (changes_one_term, holds_back_who_has_the_lock)
