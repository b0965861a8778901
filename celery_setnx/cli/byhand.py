"""Locks, marks, starts and successes, by hand: shown, asked about, and dropped if they are what was shown."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import click
from celery import Celery

from celery_setnx.byhand import drop_of_holder, let_others_go_on, tell
from celery_setnx.cli.asked import also_under, find, find_done, prefix, unknown
from celery_setnx.cli.describe import fate, many, of_permits, of_starts, span, until
from celery_setnx.cli.screen import say
from celery_setnx.connection import client_for
from celery_setnx.lock.look import Sighting
from celery_setnx.lock.marks import Mark, forget_each, free_all
from celery_setnx.lock.survey import drop, forget_starts
from celery_setnx.log import Log

logger = Log("celery_setnx")

_BATCH = 1000
_NOT_KNOWN = "Not released: its holder may still be running. Stop it first, or use --force."
_NONE_KNOWN = (
    "Not released: all holders may still be running. Stop them first, or use --force, which releases all; "
    "one alone if it is named, such as {}."
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
        raise click.UsageError(f"{sighting.key} is no lock of this app's tasks, and has no record beside it.")
    in_short = sighting.has_several and permit is None
    if in_short:
        say(f"Of {sighting.key} {of_permits(sighting)} permits are held.")
    for one in shown:
        what = f"Permit {_number(one)}" if in_short else one.name
        say(f"{what} is held by {one.holder}.", f"  {until(one)}", f"  {fate(one.holder)}")
    chosen = shown if force else [one for one in shown if one.is_abandoned]
    if not chosen:
        raise NotReleased(_NOT_KNOWN if len(shown) == 1 else _NONE_KNOWN.format(shown[0].name))
    which = "it" if len(shown) == 1 else "all of them" if len(chosen) == len(shown) else _listed(chosen)
    if not yes and not click.confirm(f"Release {which}?"):
        raise NotReleased("Not released.")
    dropped = [one for one in chosen if _dropped(app, one, force=force)]
    for one in dropped:
        say(f"Released {one.name}.")
    if dropped:
        _after_drop(app, sighting, dropped)
    for one in chosen:
        if one not in dropped:
            raise NotReleased(f"Not released: {one.name} has changed meanwhile, or is no text. Look again.")


def _nothing_to_release(app: Celery, sighting: Sighting, permit: int | None, instead: str) -> NotReleased:
    """That nobody has a lock, and what else there is of its key."""
    more = f" A call is queued, as {sighting.mark}: see release --queued." if sighting.mark else ""
    if sighting.done_by:
        more += f" A call has succeeded and counts, as {sighting.done_by}: see release --done."
    if sighting.is_paced:
        more += f" Its pace allows no start ({of_starts(sighting)}): see release --starts."
    more += f" {instead}" if instead else ""
    name = sighting.key if permit is None else f"{sighting.key}#{permit}"
    return NotReleased(f"Nothing to release: {name} is free.{more}")


def _dropped(app: Celery, seen: Sighting, *, force: bool) -> bool:
    """Delete a lock: by force whatever its holder does, as `byhand.release`; else if nobody renewed it."""
    return drop_of_holder(app, seen) is not None if force else drop(client_for(app), seen)


def _after_drop(app: Celery, sighting: Sighting, dropped: Sequence[Sighting]) -> None:
    """Leave a trace of what was dropped, and let the line go on."""
    _set_up_logging(app)
    for one in dropped:
        tell(app, one, _user())
    if let_others_go_on(app, sighting):
        say("Others wait in line; the first has its turn.")


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
    say(f"{many(len(shown), 'call')} of {task} {are} marked as queued, such as {shown[0].mark}.")
    say("  A call that is queued after all runs all the same; it may only be published twice.")
    _say_who_shares(app, task)
    if not yes and not click.confirm("Free the marks?"):
        raise NotReleased("Not freed.")
    marks = [Mark(sighting.key, str(sighting.mark)) for sighting in shown]
    for start in range(0, len(marks), _BATCH):
        error = free_all(client_for(app), marks[start : start + _BATCH])
        if error is not None:
            raise error
    freed = many(len(marks), "mark")
    _note(app, "%s of %s %s freed by hand, by %s.", freed, task, _were(len(marks)), _user())
    say(f"Freed {freed} of {task}.")


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
    forgotten = many(count, "done call")
    _note(app, "%s of %s %s forgotten by hand, by %s.", forgotten, task, _were(count), _user())
    say(f"Forgot {forgotten} of {task}.")


def forget_done_call(app: Celery, shown: Sighting, *, yes: bool) -> None:
    """Show which call of a key has succeeded and counts, ask, and forget it if it still does."""
    key = shown.key
    if shown.done is None:
        raise NotReleased(f"Nothing to forget: no call of {key} counts as done.")
    counts = f"counts for {span(shown.done_counts_for_s)} more"
    say(f"The call of {key} has succeeded, as {shown.done_by}, and {counts}.")
    if not _forgotten(app, [shown], yes=yes):
        raise NotReleased(f"Not forgotten: {key} has changed meanwhile. Look again.")
    _note(app, "%s, done as %s, was forgotten by hand, by %s.", key, shown.done_by, _user())
    say(f"Forgot {shown.done_by}.")


def forget_starts_of(app: Celery, sighting: Sighting, *, yes: bool) -> None:
    """Show how many starts of a key count, ask, and forget those that were shown: the next may be at once."""
    key = sighting.key
    if sighting.last_start is None:
        raise NotReleased(f"Nothing to forget: no start of {key} is noted.")
    say(f"Starts of {key}: {of_starts(sighting) or sighting.started}.")
    say("  Without them as many calls may start at once as in a new window.")
    if not yes and not click.confirm("Forget them?"):
        raise NotReleased("Not forgotten.")
    count = forget_starts(client_for(app), sighting)
    forgotten = many(count, "start")
    _note(app, "%s of %s %s forgotten by hand, by %s.", forgotten, key, _were(count), _user())
    say(f"Forgot {forgotten}.")
    if let_others_go_on(app, sighting):
        say("Others wait in line; as many as may start have their turn.")


def _forgotten(app: Celery, shown: Sequence[Sighting], *, yes: bool) -> int:
    """Ask, and forget what is still what was shown: how many."""
    which = "it" if len(shown) == 1 else "them"
    say(f"  Without {which} the next call is published, and runs.")
    if not yes and not click.confirm(f"Forget {which}?"):
        raise NotReleased("Not forgotten.")
    count = 0
    for start in range(0, len(shown), _BATCH):
        batch = [(one.key, str(one.done)) for one in shown[start : start + _BATCH]]
        for forgotten in forget_each(client_for(app), batch):
            if isinstance(forgotten, Exception):
                raise forgotten
            count += forgotten
    return count


def _say_who_shares(app: Celery, task: str) -> None:
    """Say whose calls are shown as well, if other tasks share the scope."""
    others = also_under(app, task)
    if others:
        say(f"  {', '.join(others)} share its scope: calls of theirs are among them.")


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _note(app: Celery, text: str, *details: Any) -> None:
    """Leave a log line where the app logs to."""
    _set_up_logging(app)
    logger.warning(text, *details)


def _set_up_logging(app: Celery) -> None:
    """Have log lines go where the app's go."""
    if not logger.hasHandlers():
        app.log.setup_logging_subsystem(loglevel=logging.WARNING)


def _user() -> str:
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()} on {host}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()} on {host}"
