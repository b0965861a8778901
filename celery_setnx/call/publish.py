"""Publishing one call: its header, its mark, and what a duplicate gets. Many at once: see `fanout`.

A call is deduplicated only if Celery gave it no task id: retries, lock waits, `replace()`, chain steps and
members of groups and chords carry one, somebody waits for them, and they must never be dropped. Nor must a
callback, which carries its parent's result and id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Celery, uuid

from celery_setnx.arguments import Arguments, copied
from celery_setnx.call.away import Error
from celery_setnx.call.back import without_deaths
from celery_setnx.call.binding import refuse_misplaced_in_call
from celery_setnx.call.ended import free_ended
from celery_setnx.call.guard import Guard, is_singleton
from celery_setnx.call.later import is_published_at_once
from celery_setnx.call.marking import Found, Marking, mark_lease_s, marking_of, refuse_times
from celery_setnx.call.message import Call, RunningCall, attempt_of, id_of
from celery_setnx.call.switches import runs_plainly
from celery_setnx.exceptions import (
    DuplicateTask,
    OptionError,
    UnkeyableCall,
)
from celery_setnx.lock.marks import Mark
from celery_setnx.lock.names import mark_name
from celery_setnx.lock.newest import Reservation
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields
from celery_setnx.options import OF_THE_TASK, Options, SingletonOptions, checked
from celery_setnx.signals import call_deduplicated

logger = Log("celery_setnx")

Send = Callable[..., Any]
"""Publishes for real: called with args, kwargs and the options of `celery.Task.apply_async`."""

# What Celery gives a call that another call, or its own past, has begun. An error about a callback would fail
# the parent, which has succeeded.
AWAITED = ("parent_id", "group_id", "chord", "chain", "retries")  # and a task id
# With these a call hides its arguments from logs. Its retries hide them too, though Celery forgets to say so.
HIDES_ARGUMENTS = frozenset(("argsrepr", "kwargsrepr"))
# Catch-alls by names that no task gives its own parameters.
_ANY_ARGUMENTS = inspect.Signature(
    [
        inspect.Parameter("_positional_", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("_by_keyword_", inspect.Parameter.VAR_KEYWORD),
    ]
)


@dataclass(frozen=True)
class Duplicate:
    """A call that was not published, as an `on_duplicate` callable sees it.

    `apply_async` returns what the callable returns.

    Attributes:
        task: Name of the task.
        key: The lock's Redis key.
        task_id: Id of the earlier call.
        state: `queued`, `running` or `done`.
        holder: The holder's record if the earlier call runs; else None.
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
        result: The `AsyncResult` of the earlier call; its `deduplicated` is True.
        about: What the key was made of, such as `account_id=7`; empty if that is not to be shown.
    """

    task: str
    key: str
    task_id: str
    state: str
    holder: Holder | None
    args: Any
    kwargs: Any
    result: Any
    about: str = ""

    def fail(self) -> Any:
        """Refuse the call.

        Raises:
            DuplicateTask: Always.
        """
        raise DuplicateTask(self.task, self.key, self.task_id, self.state, self.about)


def publish(
    guard: Guard,
    send: Send,
    arguments: tuple[Any, Any],
    call: Mapping[str, Any] | None,
    options: dict[str, Any],
    task: Any = None,
) -> Any:
    """Publish a call, its finished key in a header, unless it is a duplicate.

    `arguments` are positional and by name, `call` are options of this call alone, `options` those of
    `celery.Task.apply_async`; without its `task` pydantic models are none.
    """
    refuse_misplaced_in_call(options, guard.task)
    at_once = is_published_at_once(send, guard.app)
    if not at_once:  # what it has then is what it has now, as its key has it
        arguments = (copied(arguments[0]), copied(arguments[1]))
    given_id, expires = options.get("task_id"), getattr(task, "expires", None)
    given = _given(guard, arguments, options.get("serializer"), task)
    told = _told(guard, given, call, options, task)
    settled = _settled(guard, told, call, options)
    # Callbacks cannot be handed to the other call: this one is queued beside it, and its run is guarded.
    has_callbacks = options.get("link") or options.get("link_error")
    is_asked = settled.dedupe is not None and not given_id and may_be_duplicate(guard.app, options)
    if not is_asked or (settled.replaces and has_callbacks):
        return _noted(send(*arguments, **options), deduplicated=False)
    digests = [guard.digest_of_all(given) if settled.drops_equal else ""]
    with _marking(guard, settled, told, options, expires, at_once=at_once) as marking:
        ((told, marked),) = marking.take([told], digests)
        if marked is not None and not has_callbacks and _is_of_ended(guard, told.key, marked):
            ((told, marked),) = marking.take([told], digests)
        if marked is not None and marked.is_duplicate and not has_callbacks:
            return _deduplicated(guard, settled, told, marked, arguments, options.get("ignore_result"))
        told, delay = marking.delayed(told, marked)
        options["headers"] |= told.as_headers()
        result = send(*arguments, **{**options, **delay})
        marking.sent.append(told)
    return _noted(result, deduplicated=False)


def _marking(
    guard: Guard, settled: Options, told: Call, options: Mapping[str, Any], expires: Any, *, at_once: bool
) -> Marking:
    """How a call is marked, unless it would replace others though it is put off, or may expire."""
    if settled.replaces:
        refuse_times(guard, options, expires)
    lease = mark_lease_s(guard.app, settled, options, expires)
    complain = partial(_complain, told, settled.replaces)
    return marking_of(settled)(guard, settled, lease, at_once=at_once, complain=complain)


def _is_of_ended(guard: Guard, key: str, marked: Found) -> bool:
    """Whether what makes it a duplicate is a call that has ended: then that is older data, and is freed."""
    if not marked.is_duplicate:
        return False
    state = marked.holder.state if marked.holder is not None else marked.state
    generation = marked.generation if isinstance(marked, Reservation) else 0
    return free_ended(guard.app, guard.task, Mark(key, marked.task_id, generation), state)


def send_task(
    app: Celery,
    name: str,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    singleton: SingletonOptions | None = None,
    **options: Any,
) -> Any:
    """Publish a call of a task by its name, without duplicates; for publishers without the task's code.

    `app.send_task` and `celery call` also work, and the run is guarded; but they do not check whether the
    same call is queued already. (With `until_started` such a call checks when it finds the lock held: at most
    one waits, the others are skipped.) The task must be guarded where it runs. Otherwise it runs without a
    lock, and its mark ends when a worker that imports the package takes it, or lapses.

    Args:
        app: The app, with the same `setnx_url` and `setnx_prefix` as the workers.
        name: Name of the task.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        singleton: Options of this call. The task's own are not known here: give the same `key` as the task,
            and pass the arguments that it names by keyword.
        options: Further options of `celery.Celery.send_task`.

    Returns:
        An `AsyncResult`. If its `deduplicated` is True, it is the earlier call's.

    Raises:
        OptionError: No key is given, or an option is unknown, malformed or cannot travel.
        UnkeyableCall: The key names an argument that is not given by keyword.
        DuplicateTask: The call is a duplicate, and `on_duplicate="raise"`.

    Example:
        >>> send_task(app, "shop.settle", kwargs={"account_id": 7},   # doctest: +SKIP
        ...           singleton={"key": "account_id", "dedupe": "until_started"})
    """
    known = app.tasks.get(name)
    if is_singleton(known) or getattr(known, "_refusal", None):
        return known.apply_async(args, kwargs, singleton=singleton, **options)
    if known is not None:  # as its delay() does: the key is of what arrives
        options["serializer"] = options.get("serializer") or known.serializer
    layer = checked(f"a call of {name}", singleton or {})
    if layer.get("key") is None:
        raise OptionError(
            f"send_task of {name} does not know the task's parameters; give it the task's key option: "
            'singleton={"key": ...}'
        )
    # What is the task's stands below the call's own, with what it may need beside it.
    of_the_task = {option: layer[option] for option in (OF_THE_TASK | {"dedupe"}) & layer.keys()}
    layer = {option: value for option, value in layer.items() if option not in OF_THE_TASK}
    guard = Guard(app, name, _ANY_ARGUMENTS, [of_the_task])

    def send(args: Any, kwargs: Any, **options: Any) -> Any:
        return app.send_task(name, args, kwargs, **options)

    try:
        return publish(guard, send, (args, kwargs), layer, options)
    except UnkeyableCall as error:
        reason = f"{error.reason}. Without the task's code only arguments given by keyword have names"
        raise UnkeyableCall(name, f"{reason}: send_task(..., kwargs={{...}})") from None


def _given(guard: Guard, arguments: tuple[Any, Any], serializer: str | None, task: Any) -> Arguments:
    """The arguments of a call, which have yet to travel."""
    args, kwargs = arguments
    if task is None:
        return Arguments(args or (), kwargs or {}, serializer or guard.app.conf.task_serializer)
    return Arguments.given_to(task, args, kwargs, serializer)


def _told(
    guard: Guard, given: Arguments, call: Mapping[str, Any] | None, options: dict[str, Any], task: Any
) -> Call:
    """The call, which has its task id and its header from now on."""
    options["task_id"] = options.get("task_id") or uuid()
    attempt = attempt_of(options.get("retries"), options.get("replaced_task_nesting"))
    new = Call(guard.task, id_of(options["task_id"]), attempt)
    running = RunningCall.of(task, new)
    before = Call.before(guard.task, options)
    if running is not None:  # which knows its key, whatever its message said
        before = running.call if before is None else before._replace(key=running.call.key)
    hides = HIDES_ARGUMENTS & options.keys() or (not before.about if before else options.get("retries"))
    told = guard.call(new, given, call, before, shown=not hides)
    if running is not None:
        running.retry = told
    options["headers"] = {**without_deaths(options.get("headers")), **told.as_headers()}
    return told


def _settled(guard: Guard, told: Call, call: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Options:
    """The options of a call, also those that do not travel."""
    settled = guard.options_of({**told.options, **(call or {})})
    if settled.on_conflict == "join" and options.get("ignore_result"):
        raise OptionError(
            f"a call of {guard.task} has on_conflict='join' and ignore_result: there is no result to share"
        )
    return settled


def may_be_duplicate(app: Celery, options: Mapping[str, Any]) -> bool:
    """True if nobody waits for this call, which was given no task id: it may be dropped for its like."""
    if app.conf.task_always_eager or runs_plainly(app):
        return False
    return not any(options.get(name) for name in AWAITED)


def refuse_unseen(guard: Guard, publisher: str, task_id: str | None, options: Mapping[str, Any]) -> None:
    """Refuse to publish a call that has not come by our `apply_async`, if something of it would be lost.

    What comes by ours has a task id and a header. Of another a worker computes the key, and takes the lock:
    only what acts at publish time is lost.
    """
    if Call.before(guard.task, {**options, "task_id": task_id}) is not None:
        return
    refuse_misplaced_in_call(options, guard.task)
    lost = "its singleton={...}" if options.get("singleton") else None
    if guard.options.dedupe and task_id is None and may_be_duplicate(guard.app, options):
        lost = lost or f"dedupe={guard.options.dedupe!r}"
    if lost is not None:
        raise OptionError(
            f"{publisher} publishes a call of {guard.task} by Celery's Task.apply_async, not by "
            f"SingletonTask's, so {lost} would have no effect: call super().apply_async(...) instead"
        )


def _deduplicated(
    guard: Guard,
    settled: Options,
    told: Call,
    marked: Found,
    arguments: tuple[Any, Any],
    ignored: bool | None,
) -> Any:
    task = guard.app._tasks.get(guard.task)
    _tell_duplicate(task or guard.task, told, marked)
    result = task.AsyncResult(marked.task_id) if task else guard.app.AsyncResult(marked.task_id)
    # As of a call that was sent: get() must not wait for a result that nobody stores.
    result.ignored = getattr(task, "ignore_result", False) if ignored is None else ignored
    duplicate = Duplicate(
        task=guard.task,
        key=told.key,
        task_id=marked.task_id,
        state=marked.state,
        holder=marked.holder,
        args=arguments[0],
        kwargs=arguments[1],
        result=_noted(result, deduplicated=True),
        about=told.about,
    )
    if callable(settled.on_duplicate):
        return settled.on_duplicate(duplicate)
    return duplicate.fail() if settled.on_duplicate == "raise" else duplicate.result


def _tell_duplicate(sender: Any, told: Call, marked: Found) -> None:
    logger.info(
        "A call of %s is not published: the same call %s already, as task %s (key %s%s).",
        told.title,
        "has succeeded" if marked.state == "done" else f"is {marked.state}",
        marked.task_id,
        told.key,
        f", held by {marked.holder}" if marked.holder else "",
        extra=fields("duplicate", told),
    )
    call_deduplicated.send(
        sender=sender, task_id=marked.task_id, key=told.key, about=told.about, state=marked.state
    )


def _noted(result: Any, *, deduplicated: bool) -> Any:
    with suppress(AttributeError, TypeError, ValueError):  # another class may return what it likes, or None
        result.deduplicated = deduplicated
    return result


def _complain(told: Call, replaces: bool, error: Error, what: str) -> None:
    """The call's own fate stands; its mark, if it has one, lapses after the grace lease."""
    if not what:
        text = "A call of %s is published without a check for duplicates; its run takes the lock. %s"
        if replaces:
            text = "A call of %s is published as the newest by this host's clock; its run takes the lock. %s"
        logger.warning(text, told.task, error.brief, extra=fields(of=told))
        return
    if replaces:
        text = "%s %s, but replaces no older call of %s before a worker has received it. %s"
        logger.warning(text, told, what, told.key, error, extra=fields(of=told))
        return
    text = "%s %s, but its mark %s stays as it is, and lapses by itself. %s"
    logger.warning(text, told, what, mark_name(told.key), error, extra=fields(of=told))
