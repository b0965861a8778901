"""What a command line asks about: the app, its lock server, a task, the key of a call, and what is found.

Errors are click's: one line each, and an exit code that scripts can tell apart.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
from celery import Celery, Task

from celery_setnx.address import masked
from celery_setnx.arguments import Arguments
from celery_setnx.call.guard import Guard, guard_of
from celery_setnx.call.live import live_terms_at, read_live_terms
from celery_setnx.call.marking import debounce_of
from celery_setnx.connection import client_for, lock_url
from celery_setnx.exceptions import (
    LockForbidden,
    LockRefused,
    LockUnavailable,
    OptionError,
    SetnxError,
    UnkeyableCall,
)
from celery_setnx.lock.look import WAITERS, Sighting, look
from celery_setnx.lock.process import is_surely_dead
from celery_setnx.lock.record import UNKNOWN
from celery_setnx.lock.scripts import REDIS_ERRORS, is_without_right, translated
from celery_setnx.lock.survey import COMMANDS, successes, survey
from celery_setnx.options import settings_of
from celery_setnx.task import import_tasks
from celery_setnx.wording import sentence, titled

_PERMIT = re.compile(r"(.+)#(\d|[1-9]\d)", re.DOTALL)


class NoRedis(click.ClickException):
    """Redis does not answer, or refuses."""

    exit_code = 3


class Asked(NamedTuple):
    """What a command line asks about, and what there is of it.

    Attributes:
        sighting: What there is.
        about: What the key was made of, if a call was named.
        instead: If there is nothing: what there is of the call whose texts are numbers, or of the opposite.
    """

    sighting: Sighting
    about: str = ""
    instead: str = ""


def imported(app: Celery) -> Celery:
    """The app, with the modules of its tasks imported, as a worker does."""
    try:
        import_tasks(app)
    except SetnxError:
        raise
    except Exception as error:
        raise click.ClickException(
            f"the tasks of {app.main or 'the app'} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return app


def loaded(app: Celery) -> Celery:
    """The app, with its tasks imported and their options settled."""
    imported(app).finalize()
    app.tasks.values()
    return app


def told(app: Celery, error: Exception) -> click.ClickException | None:
    """An error of ours, or of Redis, as one line and an exit code; None if it is another's."""
    if isinstance(error, SetnxError) and not isinstance(error, (LockRefused, LockUnavailable)):
        text = " ".join(str(error).split())
        if app.main == "default":
            text = f"{sentence(text)} No app was given: use celery -A app setnx ..."
        return click.ClickException(text)
    known = translated(prefix(app), error) if isinstance(error, REDIS_ERRORS) else error
    if not isinstance(known, (LockRefused, LockUnavailable)):
        return None
    text = f"{server(app)}: {sentence(known.reason)}"
    if isinstance(known, LockForbidden) and is_without_right(known):
        text += f" celery setnx needs {', '.join(COMMANDS)} on {prefix(app)}:*."
    else:
        text = f"{text} {known.remedy}".rstrip()
    return NoRedis(text)


def server(app: Celery) -> str:
    """The lock server, and the setting that names it."""
    url, setting = lock_url(app)
    return f"{masked(url)} ({setting})"


def prefix(app: Celery) -> str:
    """What the keys of the app begin with."""
    return settings_of(app).prefix


def look_at(app: Celery, key: str, guard: Guard | None = None) -> Sighting:
    """What there is of a lock; and what a call of a guard's task would be told of it, if one is given."""
    asked: dict[str, Any] = {"waiters": WAITERS}
    client = client_for(app)
    read_live_terms(app, client)
    if guard is not None:
        options = guard.options
        asked |= {
            "terms": options.terms._replace(live=live_terms_at(app, key)),
            "dedupe": options.asks if options.dedupe else "",
        }
        if options.replaces:  # what an equal call is, only a publisher knows
            asked["dedupe"] = debounce_of(options)
    elif live := live_terms_at(app, key):
        asked["terms"] = UNKNOWN._replace(live=live)
    try:
        seen = look(client, key, **asked)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = seen.permit_holder
    if guard is None or not guard.settings.same_host or not found or seen.word != "held":
        return seen
    # As a worker on this host does (`SetnxLock.acquire_at_death`).
    is_dead = found.state == "running" and is_surely_dead(found.info)
    return look(client, key, dead=found.token, **asked) if is_dead else seen


def sight(
    app: Celery, target: str, arguments: tuple[str, ...], args_json: str | None, kwargs_json: str | None
) -> Asked:
    """What there is of the lock that a command line names, by its key, or by a task and its arguments."""
    if target in app.tasks:
        return sight_call(app, app.tasks[target], arguments, args_json, kwargs_json)
    if arguments or args_json or kwargs_json:
        raise click.UsageError(
            f"{target} is a key, so it takes no ARGS" if "{" in target else unknown(app, target)
        )
    sighting = look_at(app, target)
    is_whole = "{" in target and target.endswith("}")
    if is_whole or sighting.holders or sighting.left:
        return Asked(sighting)
    if "{" in target:
        raise click.UsageError(
            f"{target} is not a whole key, and no lock has that name: copy the key from "
            "`celery setnx list --json`; it ends with a brace"
        )
    raise click.UsageError(f"{unknown(app, target)} No lock has that name either.")


def sight_call(
    app: Celery,
    task: Task,
    arguments: tuple[str, ...],
    args_json: str | None,
    kwargs_json: str | None,
    guard: Guard | None = None,
) -> Asked:
    """What there is of the lock of a call; if nothing, perhaps of that which was meant. See `look_at`."""
    given = args_json, kwargs_json
    key, about = key_of(task, arguments, *given)
    sighting = look_at(app, key, guard)
    if sighting.is_lock or sighting.queued:
        return Asked(sighting, about)
    otherwise = tuple(map(_otherwise, arguments))
    try:
        other_key, other_about = key_of(task, otherwise, *given)
    except click.UsageError:
        return Asked(sighting, about)
    other = look_at(app, other_key)
    if other_key == key or not (other.is_lock or other.queued):
        return Asked(sighting, about)
    has = (
        f"is held by {other.holder}" if other.holder else "is queued" if other.queued else "has calls in line"
    )
    words = " ".join(map(shlex.quote, otherwise))
    meant = titled(task.name, other_about)
    instead = f"But {meant} {has}. The number and the text are different keys. To ask about that one: {words}"
    return Asked(sighting, about, instead)


def permit_of(app: Celery, target: str) -> tuple[Sighting, int] | None:
    """The lock whose permit a command line names, as `KEY#3`, and its number; None if it names none."""
    named = None if target in app.tasks else _PERMIT.fullmatch(target)
    if named is None:
        return None
    sighting, number = look_at(app, named[1]), int(named[2])
    # Else it may be a lock of that name.
    return (sighting, number) if sighting.has_several else None


def find(
    app: Celery, task: str | None, *, stale: bool, queued: bool, older_s: float | None = None
) -> Iterator[Sighting]:
    """The locks, or the marks, that a command is about; `older_s`: that somebody has had for so long."""
    scope = _scope(app, task)
    for sighting in survey(client_for(app), prefix(app), marks=queued):
        if task is not None and sighting.scope != scope and (queued or sighting.task != task):
            continue
        if older_s is not None and not any((one.age_s or 0.0) >= older_s for one in sighting.of_each()):
            continue
        if (
            sighting.queued is not None
            if queued
            else sighting.is_lock and (sighting.is_abandoned or not stale)
        ):
            yield sighting


def find_done(app: Celery, task: str | None) -> Iterator[Sighting]:
    """The keys of a task, or of all, with a call whose success counts."""
    scope = _scope(app, task)
    for sighting in successes(client_for(app), prefix(app)):
        if task is None or sighting.scope == scope:
            yield sighting


def the_guard_of(task: Task) -> Guard:
    """The guard of a task."""
    guard, refusal = guard_of(task), getattr(task, "_refusal", None)
    if refusal is not None:
        raise OptionError(refusal)
    if guard is None:
        raise click.UsageError(f"{task.name} has no lock: it has neither base=SingletonTask nor @singleton")
    return guard


def _scope(app: Celery, task: str | None) -> str | None:
    """The scope of a task's locks; the name itself if the app has no such task (any more)."""
    guard = guard_of(app.tasks[task]) if task in app.tasks else None
    return (guard.options.scope if guard else None) or task


def also_under(app: Celery, task: str) -> list[str]:
    """The other tasks that share a task's scope."""
    guarded = (name for name, other in app.tasks.items() if guard_of(other) is not None)
    return sorted(name for name in guarded if name != task and _scope(app, name) == _scope(app, task))


def key_of(
    task: Task, arguments: tuple[str, ...], args_json: str | None, kwargs_json: str | None
) -> tuple[str, str]:
    """The Redis key of a call, as the command line names it, and what it was made of."""
    args, kwargs = _json_option("--args", args_json, list), _json_option("--kwargs", kwargs_json, dict)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _value(value)
        else:
            args.append(_value(argument))
    guard = the_guard_of(task)
    try:
        return guard.asked(Arguments.given_to(task, args, kwargs))
    except UnkeyableCall as error:
        raise click.UsageError(str(error)) from None


def _json_option(name: str, text: str | None, kind: Callable[[], Any]) -> Any:
    try:
        value = kind() if text is None else json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text} is not JSON: {error}", param_hint=name) from None
    if type(value) is not kind:
        what = "an array" if kind is list else "an object"
        raise click.BadParameter(f"{text} is not {what} in JSON", param_hint=name)
    return value


def _value(text: str) -> Any:
    """What an argument means: JSON, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _otherwise(argument: str) -> str:
    """An argument whose number is a text, or whose text is a number: what may be meant."""
    name, equals, text = argument.partition("=")
    if not (equals and name.isidentifier()):
        name, equals, text = "", "", argument
    value = _value(text)
    if isinstance(value, str):
        return f"{name}{equals}{value}"  # without quotes
    return argument if isinstance(value, (list, dict)) else f"{name}{equals}{json.dumps(text)}"


def unknown(app: Celery, name: str) -> str:
    """That the app has no such task, and which may be meant."""
    by_last = {task.rpartition(".")[2]: task for task in sorted(app.tasks)}
    last = difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1)
    close = difflib.get_close_matches(name, app.tasks, n=1) or [by_last[each] for each in last]
    hint = f"did you mean {close[0]}?" if close else "is its module imported?"
    return f"The app has no task {name}; {hint}"
