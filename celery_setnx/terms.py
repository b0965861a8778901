"""Live terms, from Python: what an operator says of a key or a task, above its own options, for a while."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from celery import Celery

from celery_setnx.byhand import let_others_go_on, told_as_ours
from celery_setnx.call.guard import Guard, guard_of
from celery_setnx.call.wake import lines_of
from celery_setnx.connection import client_for
from celery_setnx.exceptions import OptionError
from celery_setnx.lock.line import rouse
from celery_setnx.lock.live import (
    Change,
    LiveTerm,
    Name,
    NewTerm,
    change_key_terms,
    change_task_terms,
    live_terms_of,
    live_terms_of_tasks,
)
from celery_setnx.lock.look import look as look_at
from celery_setnx.lock.names import scope_and_digest
from celery_setnx.lock.record import US
from celery_setnx.lock.survey import overridden
from celery_setnx.log import Log, fields
from celery_setnx.options import checked, settings_of

__all__ = ["LiveTerm", "NewTerm", "Whose", "end_term", "live_terms", "set_term"]

logger = Log("celery_setnx")

SHORTEST_S, LONGEST_S = 0.001, 366 * 86_400.0


class Whose(NamedTuple):
    """Whose live terms: those of one key, or those of all keys of a scope.

    Attributes:
        key: The lock's Redis key. Defaults to nothing: of a scope.
        scope: The scope, which is the task's name unless tasks share one. Defaults to nothing: of a key.
    """

    key: str = ""
    scope: str = ""

    def __str__(self) -> str:
        return self.key or f"all calls of {self.scope}"


def set_term(app: Celery, whose: Whose, term: NewTerm) -> Change:
    """Set a live term, which counts above the task's own and ends by itself.

    A key's counts from the reply on, a scope's within two seconds. Nothing that runs is stopped. Leaves a
    WARNING in the log.

    Args:
        app: The app whose tasks they are.
        whose: Of a key, or of all keys of a scope.
        term: What is to count, and for how long; its value may be what the options `limit` and `rate` take.

    Returns:
        What was changed.

    Raises:
        OptionError: The task cannot have such terms, they would last for more than a year, or the key is no
            lock of a task.
        LockUnavailable: Redis did not answer; it may be changed all the same.
        LockRefused: Redis refuses a command.
    """
    if not SHORTEST_S <= term.for_s <= LONGEST_S:
        raise OptionError(f"a live term lasts a millisecond at least, a year at most, not {term.for_s:g} s")
    if whose.key and not (whose.key.startswith(f"{settings_of(app).prefix}:{{") and whose.key.endswith("}")):
        raise OptionError(f"{whose.key!r} is no name of a lock of this app's tasks: nobody would heed it")
    change = _changed(app, whose, term._replace(value=_value_of(app, whose, term)))
    now = next(each for each in change.after if each.name == term.name)
    logger.warning("%s: %s", whose, now.told(), extra=fields("by_hand", key=whose.key))
    return change


def end_term(app: Celery, whose: Whose, name: Name, *, by: str) -> Change:
    """End a live term: the task's own counts again, and calls that wait go on.

    Args:
        app: The app whose tasks they are.
        whose: Of a key, or of all keys of a scope.
        name: `pause`, `limit` or `rate`.
        by: Who does it, for the log.

    Returns:
        What was changed: nothing, if there was no such term.

    Raises:
        LockUnavailable: Redis did not answer; it may be changed all the same.
        LockRefused: Redis refuses a command.
    """
    change = _changed(app, whose, NewTerm(name, 0.0))
    ended = next((each for each in change.before if each.name == name), None)
    if ended is not None:
        logger.warning(
            "%s: no longer %s; ended by %s.", whose, ended.what, by, extra=fields("by_hand", key=whose.key)
        )
    return change


def live_terms(app: Celery) -> dict[Whose, list[LiveTerm]]:
    """All live terms, of scopes and of keys. Reads by SCAN.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    client, prefix, now = client_for(app), settings_of(app).prefix, time.time()
    with told_as_ours(f"{prefix}:terms"):
        texts = live_terms_of_tasks(client, prefix)
        found = {Whose(scope=scope): live_terms_of(text, now) for scope, text in sorted(texts.items())}
        for seen in overridden(client, prefix):
            found[Whose(key=seen.key)] = list(seen.live)
    return {whose: terms for whose, terms in found.items() if terms}


def _changed(app: Celery, whose: Whose, term: NewTerm) -> Change:
    client = client_for(app)
    if whose.scope:  # workers see it when they sweep; but those that start later have seen nothing change
        prefix = settings_of(app).prefix
        change = change_task_terms(client, prefix, whose.scope, term)
        tasks = [name for name in app.tasks if not name.startswith("celery.")]
        rouse(client, lines_of(app), tasks, prefix, whose.scope)
        return change
    change = change_key_terms(client, whose.key, term)
    let_others_go_on(app, look_at(client, whose.key))
    return change


def _value_of(app: Celery, whose: Whose, term: NewTerm) -> str:
    """The value as scripts have it; OptionError if a task of the scope cannot have it."""
    if term.name == "pause":
        return "-"
    scope = whose.scope or scope_and_digest(whose.key)[0]
    value = checked(f"live terms of {scope}", {term.name: term.value})[term.name]
    if term.name == "rate":
        return f"{value[0]}/{round(value[1] * US)}"
    guards = [
        guard for task in app.tasks.values() if (guard := guard_of(task)) and guard.scope_of({}) == scope
    ]
    for guard in guards if value > 1 else []:
        if reason := _one_at_a_time(guard):
            raise OptionError(
                f"{guard.task} has {reason}: no two of its calls may run at a time, so its limit is 1"
            )
    return str(value)


def _one_at_a_time(guard: Guard) -> str:
    """The option by which no two calls of a task may run at a time; nothing if they may."""
    options: Any = guard.options
    alone = {"limit": (1,), "on_conflict": ("join",), "dedupe": ("until_done",)}
    found = [name for name, values in alone.items() if getattr(options, name) in values]
    return f"{found[0]}={getattr(options, found[0])!r}" if found else ""
