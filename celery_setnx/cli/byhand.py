"""Locks, marks, starts and successes, by hand: shown, asked about, and dropped if they are what was shown."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from celery import Celery

from celery_setnx.byhand import let_others_go_on, release_each
from celery_setnx.cli.asked import also_under, find, find_done, prefix, unknown
from celery_setnx.cli.describe import fate, many, of_permits, of_starts, span, until
from celery_setnx.cli.screen import say
from celery_setnx.connection import client_for
from celery_setnx.lock.look import Sighting
from celery_setnx.lock.marks import Mark, free_each
from celery_setnx.lock.names import done_name
from celery_setnx.lock.survey import BATCH, forget_starts
from celery_setnx.lock.verbs import IfSame, if_same
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")
T = TypeVar("T")

_NOT_KNOWN = "Not released: its holder may still be running. Stop it first, or use --force."
_FOREIGN = "Not released: another program has set it, and may still need it. To release it, use --force."
_NONE_KNOWN = (
    "Not released: all holders may still be running. Stop them first, or use --force, which releases them "
    "all. To release one of them, name it: {}."
)


class NotReleased(click.ClickException):
    """Nothing was released, and why: an answer, and no error."""

    label = ""

    def show(self, file: Any = None) -> None:
        """Print it, as it is: it is escaped, and fits."""
        click.echo(self.message, err=True)


def release_lock(
    app: Celery,
    sighting: Sighting,
    *,
    yes: bool,
    force: bool,
    permit: int | None = None,
    instead: str = "",
) -> None:
    """Show who has a lock, or one permit of it, ask, and drop what is still what was shown.

    Of several holders those are dropped that will not come back; by force, all.
    """
    shown = [one for one in sighting.of_each() if permit is None or _number(one) == permit]
    if not shown:
        raise _nothing_to_release(app, sighting, permit, instead)
    if not sighting.key.startswith(f"{prefix(app)}:{{") and not _has_record(sighting):
        raise click.UsageError(f"{sighting.key} is not a lock of this app's tasks, and has no record.")
    in_short = sighting.has_several and permit is None
    if in_short:
        say(f"{sighting.key}: {of_permits(sighting)} permits are held.")
    for one in shown:
        what = f"Permit {_number(one)}" if in_short else one.name
        say(f"{what} is held by {one.holder}.", f"  {until(one)}", f"  {fate(one)}")
    chosen = shown if force else [one for one in shown if one.is_abandoned]
    if not chosen:
        not_known = _FOREIGN if shown[0].holder and shown[0].holder.state == "foreign" else _NOT_KNOWN
        raise NotReleased(not_known if len(shown) == 1 else _NONE_KNOWN.format(shown[0].name))
    which = "it" if len(shown) == 1 else "all of them" if len(chosen) == len(shown) else _listed(chosen)
    _ask(f"Release {which}?", "Not released.", yes=yes)
    set_up_logging(app)
    released, goes_on = release_each(app, chosen, by=user(), renewed=force)
    for one in released:
        say(f"Released {one.name}.")
    if released and goes_on:
        say("Calls wait in line; the first of them is next.")
    names = [one.name for one in released]
    for one in chosen:
        if one.name not in names:
            raise NotReleased(f"Not released: {one.name} has changed since, or is not text. Look again.")


def _nothing_to_release(app: Celery, sighting: Sighting, permit: int | None, instead: str) -> NotReleased:
    """That nobody has a lock, and what else there is of its key."""
    more = f" A call is queued, as {sighting.queued}: see release --queued." if sighting.queued else ""
    if sighting.done_by:
        more += f" A call has succeeded, as {sighting.done_by}, and makes duplicates: see release --done."
    if sighting.is_paced:
        more += f" Its rate allows no start ({of_starts(sighting)}): see release --starts."
    if sighting.is_paused:
        more += " A pause lets no call start: see why."
    more += f" {instead}" if instead else ""
    name = sighting.key if permit is None else f"{sighting.key}#{permit}"
    return NotReleased(f"Nothing to release: {name} is free.{more}")


def _has_record(sighting: Sighting) -> bool:
    return any(holder.token for holder in (*sighting.holders, *sighting.left))


def _number(sighting: Sighting) -> int:
    return sighting.holder.permit if sighting.holder else 0


def _listed(held: Sequence[Sighting]) -> str:
    """Some permits, in words."""
    numbers = [str(_number(one)) for one in held]
    return f"permit{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def free_marks(app: Celery, task: str, *, yes: bool) -> None:
    """Show how many marks a task has, ask, and free those that are still what was shown."""
    shown = list(find(app, task, stale=False, queued=True))
    if not shown:
        hint = "" if task in app.tasks else f" {unknown(app, task)}"
        raise NotReleased(f"Nothing to free: no call of {task} is marked as queued.{hint}")
    are = "is" if len(shown) == 1 else "are"
    say(f"{many(len(shown), 'call')} of {task} {are} marked as queued, such as {shown[0].queued}.")
    say("  A call that is still queued runs all the same, but may be published a second time.")
    _say_who_shares(app, task)
    _ask("Free the marks?", "Not freed.", yes=yes)
    marks = [mark for one in shown for mark in _marks(one)]
    count = _counted(marks, lambda some: free_each(client_for(app), some))
    freed = _noted(app, count, "mark", task, "freed")
    say(f"Freed {freed} of {task}.")


def _marks(sighting: Sighting) -> list[Mark]:
    """What says that a call is queued: the newest one, which then counts as started, and the mark."""
    key, newest = sighting.key, sighting.newest
    found = [Mark(key, newest.task_id, newest.generation)] if newest else []
    return [*found, Mark(key, sighting.mark)] if sighting.mark else found


def forget_done_of(app: Celery, task: str, *, yes: bool) -> None:
    """Show how many calls of a task have succeeded and count, ask, and forget those that still do."""
    shown = list(find_done(app, task))
    if not shown:
        hint = "" if task in app.tasks else f" {unknown(app, task)}"
        raise NotReleased(f"Nothing to forget: no call of {task} counts as done.{hint}")
    are = "counts" if len(shown) == 1 else "count"
    say(f"{many(len(shown), 'call')} of {task} {are} as done, such as {shown[0].done_by}.")
    _say_who_shares(app, task)
    count = _forgotten(app, shown, yes=yes)
    forgotten = _noted(app, count, "done call", task, "forgotten")
    say(f"Forgot {forgotten} of {task}.")


def forget_done_call(app: Celery, shown: Sighting, *, yes: bool) -> None:
    """Show which call of a key has succeeded and counts, ask, and forget it if it still does."""
    key = shown.key
    if shown.done is None:
        raise NotReleased(f"Nothing to forget: no call of {key} counts as done.")
    counts = f"equal calls are duplicates for {span(shown.done_counts_for_s)} more"
    say(f"{key}: a call has succeeded, as {shown.done_by}; {counts}.")
    if not _forgotten(app, [shown], yes=yes):
        raise NotReleased(f"Not forgotten: {key} has changed since it was shown. Look again.")
    set_up_logging(app)
    text = "%s, done as %s, was forgotten by hand, by %s."
    logger.warning(text, key, shown.done_by, user(), extra=fields(task=shown.task, key=key))
    say(f"Forgot {shown.done_by}.")


def forget_starts_of(app: Celery, sighting: Sighting, *, yes: bool) -> None:
    """Show how many starts of a key count, ask, and forget those that were shown: the next may be at once."""
    key = sighting.key
    if sighting.last_start is None:
        raise NotReleased(f"Nothing to forget: no start of {key} is noted.")
    say(f"Starts of {key}: {of_starts(sighting) or sighting.started}.")
    say("  If you forget them, as many calls as the rate allows may start at once.")
    _ask("Forget them?", "Not forgotten.", yes=yes)
    forgotten = _noted(app, forget_starts(client_for(app), sighting), "start", key, "forgotten")
    say(f"Forgot {forgotten}.")
    if let_others_go_on(app, sighting):
        say("Calls wait in line; as many as the rate allows are next.")


def _forgotten(app: Celery, shown: Sequence[Sighting], *, yes: bool) -> int:
    """Ask, and forget what is still what was shown: how many."""
    which = "it" if len(shown) == 1 else "them"
    say(f"  If you forget {which}, the next call is published, and runs.")
    _ask(f"Forget {which}?", "Not forgotten.", yes=yes)
    return _dropped(app, [IfSame((done_name(one.key),), (str(one.done),)) for one in shown])


def _ask(question: str, refused: str, *, yes: bool) -> None:
    if not yes and not click.confirm(question):
        raise NotReleased(refused)


def _dropped(app: Celery, shown: Sequence[IfSame]) -> int:
    """Delete what is still what was shown: how many."""
    return _counted(shown, lambda some: if_same(client_for(app), some))


def _counted(shown: Sequence[T], drop: Callable[[Sequence[T]], Sequence[bool | Exception]]) -> int:
    """Drop things, a batch at a time: how many were still what was shown."""
    count = 0
    for start in range(0, len(shown), BATCH):
        for is_dropped in drop(shown[start : start + BATCH]):
            if isinstance(is_dropped, Exception):
                raise is_dropped
            count += is_dropped
    return count


def _say_who_shares(app: Celery, task: str) -> None:
    """Say whose calls are shown as well, if other tasks share the scope."""
    others = also_under(app, task)
    if others:
        say(f"  {', '.join(others)} share its scope, so their calls are included.")


def _noted(app: Celery, count: int, what: str, of: str, done: str) -> str:
    """Leave a log line of what was freed or forgotten: how many, in words."""
    set_up_logging(app)
    were = "was" if count == 1 else "were"
    logger.warning("%s of %s %s %s by hand, by %s.", many(count, what), of, were, done, user())
    return many(count, what)


def set_up_logging(app: Celery) -> None:
    """Have log lines go where the app's go."""
    if not logger.hasHandlers():
        app.log.setup_logging_subsystem(loglevel=logging.WARNING)


def user() -> str:
    """Who is at the command line."""
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()} on {host}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()} on {host}"
