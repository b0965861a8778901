"""Live terms from the command line: set, ended and listed; and which workers know of them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator

import click
from celery import Celery

from celery_setnx.call.guard import guard_of
from celery_setnx.call.live import live_terms_at
from celery_setnx.cli.asked import prefix, sight, the_guard_of, unknown
from celery_setnx.cli.byhand import set_up_logging, user
from celery_setnx.cli.describe import many, span
from celery_setnx.cli.screen import say
from celery_setnx.lock.live import Name, live_terms_of
from celery_setnx.lock.lock import DAY_S
from celery_setnx.lock.names import scope_and_digest
from celery_setnx.lock.record import clock
from celery_setnx.terms import NewTerm, Whose, end_term, live_terms, set_term
from celery_setnx.wording import resume

_ANSWER_S = 1.0  # for which workers are asked what they know


def whose_of(
    app: Celery, target: str, arguments: tuple[str, ...], args_json: str | None, kwargs: str | None
) -> Whose:
    """Whose terms a command line names: a key's, a call's, or, by a task alone, those of all its keys."""
    if target in app.tasks and not (arguments or args_json or kwargs):
        return Whose(scope=the_guard_of(app.tasks[target]).scope_of({}))
    if target not in app.tasks and "{" not in target:
        if not any(guard.scope_of({}) == target for guard in map(guard_of, app.tasks.values()) if guard):
            raise click.UsageError(unknown(app, target))
        return Whose(scope=target)
    return Whose(key=sight(app, target, arguments, args_json, kwargs).sighting.key)


def change(
    app: Celery, whose: Whose, name: Name, value: str, *, for_s: float | None, because: str | None
) -> None:
    """Set a live term, or end it, with `own` as its value; and say what that means."""
    set_up_logging(app)
    if value != "own":
        number = int(value) if name == "limit" and value.isdecimal() else value
        lasts = DAY_S if for_s is None else for_s
        done = set_term(app, whose, NewTerm(name, lasts, number, because or "", user()))
        now = next(each for each in done.after if each.name == name)
        left_s = now.remaining_s(done.server_time)
        say(f"{whose}: {now.what} until {clock(now.until)}, for {span(left_s)}.")
    elif for_s is not None or because is not None:
        raise click.UsageError("`own` ends it now: give no --for and no --because")
    else:
        _end(app, whose, name)
    for line in _workers(app, at_once=bool(whose.key)) if whose.scope or value != "own" else ():
        say(f"  {line}")


def _end(app: Celery, whose: Whose, name: Name) -> None:
    done = end_term(app, whose, name, by=user())
    ended = next((each for each in done.before if each.name == name), None)
    if ended is None:
        what = "pause" if name == "pause" else f"live {name}"
        say(f"Nothing has changed: no {what} of {whose}.", *_of_its_task(app, whose, name), err=True)
        raise click.exceptions.Exit(1)
    say(f"{whose}: no longer {ended.what}.")


def _of_its_task(app: Celery, whose: Whose, name: Name) -> list[str]:
    """What ends such a term of a key's task, if it has one: a command in a line of its own, to be copied."""
    terms = live_terms_of(live_terms_at(app, whose.key), time.time()) if whose.key else ()
    if not any(term.name == name for term in terms):
        return []
    scope = scope_and_digest(whose.key)[0]
    ends = resume(scope) if name == "pause" else f"celery -A APP setnx {name} {shlex.quote(scope)} own"
    return ["Its task has one. To end that:", f"  {ends}"]


def listed(app: Celery, *, as_json: bool) -> None:
    """Print all live terms."""
    now = time.time()
    found = [(whose, term) for whose, terms in live_terms(app).items() for term in terms]
    if as_json:
        rows = [
            {**whose._asdict(), **term._asdict(), "ends_in_s": round(term.remaining_s(now), 3)}
            for whose, term in found
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for whose, term in found:
        left = span(term.remaining_s(now))
        say(f"{whose.key or whose.scope}: {term.what} for {left} more{term.source}.")
    count = many(len(found), "live term") if found else "No live terms"
    say(f"{count} under {prefix(app)}.", err=True)


def _workers(app: Celery, *, at_once: bool) -> Iterator[str]:
    """Which workers know of live terms, as far as they answer; `at_once`: only which do not."""
    try:
        replies = app.control.broadcast("setnx_terms", reply=True, timeout=_ANSWER_S) or []
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        yield f"It is not known which workers heed this: {type(error).__name__}."
        return
    told = {name: reply for each in replies for name, reply in each.items()}
    deaf = sorted(name for name, reply in told.items() if "scopes" not in (reply or {}))
    if deaf:
        what = "knows no live terms, and does" if len(deaf) == 1 else "know no live terms, and do"
        yield f"{many(len(deaf), 'worker')} {what} not heed this: {', '.join(deaf)}."
    if at_once:
        return
    heed = len(told) - len(deaf)
    if heed:
        yield f"{many(heed, 'worker')} will heed it within two seconds."
    elif not deaf:
        yield "No worker has answered. Those that run heed it within two seconds."
