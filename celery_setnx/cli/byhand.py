"""Locks and marks released by hand: shown, asked about, and dropped if they are still what was shown."""

from __future__ import annotations

import getpass
import logging
import os
import socket
from typing import Any

import click
from celery import Celery

from celery_setnx.call.wake import let_the_line_go_on
from celery_setnx.cli.asked import also_under, find, look_at, prefix, unknown
from celery_setnx.cli.describe import fate, many, until
from celery_setnx.cli.screen import say
from celery_setnx.connection import client_for
from celery_setnx.lock.marks import Mark, free_all
from celery_setnx.lock.record import Holder
from celery_setnx.lock.survey import Sighting, drop
from celery_setnx.signals import lock_released

logger = logging.getLogger("celery_setnx")

_BATCH = 1000


class NotReleased(click.ClickException):
    """Nothing was released, and why."""

    def show(self, file: Any = None) -> None:
        """Print it; it is an answer, and no error."""
        say(self.message, err=True)


def release_lock(app: Celery, sighting: Sighting, *, yes: bool, force: bool) -> None:
    """Show a lock, ask, and drop it if it is still what was shown."""
    key, holder = sighting.key, sighting.holder
    if holder is None:
        marked = f" A call is queued, as {sighting.mark}: see release --queued." if sighting.mark else ""
        raise NotReleased(f"Nothing to release: {key} is free.{marked}")
    if not key.startswith(f"{prefix(app)}:{{") and sighting.raw[1] is None:
        raise click.UsageError(f"{key} is no lock of this app's tasks, and has no record beside it.")
    say(f"{key} is held by {holder}.", f"  {until(sighting)}", f"  {fate(holder)}")
    if not (force or sighting.is_abandoned):
        raise NotReleased("Not released: it is not known to be abandoned. --force releases it all the same.")
    if not yes and not click.confirm("Release it?"):
        raise NotReleased("Not released.")
    if not drop(client_for(app), sighting):
        raise NotReleased(f"Not released: {key} has changed meanwhile, or is no text. Look again.")
    say(f"Released {key}.")
    _after_drop(app, sighting, holder)


def _after_drop(app: Celery, sighting: Sighting, holder: Holder) -> None:
    """Leave a trace of a lock that was dropped, and let the line go on."""
    key, task = sighting.key, app.tasks.get(sighting.task)
    _note(app, "%s was released by hand, by %s. It was held by %s.", key, _user(), holder)
    lock_released.send(
        sender=task or app,
        task_id=holder.task_id,
        key=key,
        fence=holder.fence,
        outcome="by_hand",
        held_s=None,
    )
    if look_at(app, key).waiting:  # else a call that comes just now would meet us
        let_the_line_go_on(app, sighting.task, key)
        say("Others wait in line; the first has its turn.")


def free_marks(app: Celery, task: str, *, yes: bool) -> None:
    """Show how many marks a task has, ask, and free those that are still what was shown."""
    shown = list(find(app, task, stale=False, queued=True))
    if not shown:
        hint = "" if task in app.tasks else f" {unknown(app, task)}"
        raise NotReleased(f"Nothing to free: no call of {task} is marked as queued.{hint}")
    are = "is" if len(shown) == 1 else "are"
    say(f"{many(len(shown), 'call')} of {task} {are} marked as queued, such as {shown[0].mark}.")
    say("  A call that is queued after all runs all the same; it may only be published twice.")
    others = also_under(app, task)
    if others:
        say(f"  {', '.join(others)} share its scope: calls of theirs are among them.")
    if not yes and not click.confirm("Free the marks?"):
        raise NotReleased("Not freed.")
    marks = [Mark(sighting.key, str(sighting.mark)) for sighting in shown]
    for start in range(0, len(marks), _BATCH):
        error = free_all(client_for(app), marks[start : start + _BATCH])
        if error is not None:
            raise error
    _note(app, "%d marks of %s were freed by hand, by %s.", len(marks), task, _user())
    say(f"Freed {many(len(marks), 'mark')} of {task}.")


def _note(app: Celery, text: str, *details: Any) -> None:
    """Leave a log line where the app logs to."""
    if not logger.hasHandlers():
        app.log.setup_logging_subsystem(loglevel=logging.WARNING)
    logger.warning(text, *details)


def _user() -> str:
    host = socket.gethostname()
    try:
        return f"{getpass.getuser()} on {host}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()} on {host}"
