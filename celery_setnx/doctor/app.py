"""What is wrong with an app's settings and its tasks' options, besides what binding refuses. No server."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from string import Formatter
from typing import Any, Literal

from celery import Celery, Task
from celery._state import _announce_app_finalized
from celery.local import maybe_evaluate
from celery.utils.imports import symbol_by_name

from celery_setnx.call.back import visibility_timeout_s
from celery_setnx.call.guard import guard_of
from celery_setnx.connection import SOCKET_TIMEOUT_S
from celery_setnx.exceptions import OptionError, SetnxError
from celery_setnx.options import Options, settings

Level = Literal["ok", "warning", "error"]

_LONG_LEASE_S = 600.0
_SHORT_LEASE_S = 2 * SOCKET_TIMEOUT_S  # a renewal begins after a third; one lost reply takes a timeout
_REQUEST = "celery_setnx.request:SingletonRequest"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `ok`, `warning`, or `error`: locks do not hold, or a task cannot work.
        subject: What was looked at; docs/doctor.md lists all.
        what: What was found.
        why: Why it matters. Defaults to nothing.
        do: What to do. Defaults to nothing.
    """

    level: Level
    subject: str
    what: str
    why: str = ""
    do: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain JSON values."""
        return asdict(self)


ok, warn, fail = (partial(Finding, level) for level in ("ok", "warning", "error"))


def check(app: Celery) -> list[Finding]:
    """Check the app's settings and the options of its tasks, without a server.

    Binds every task, and so also finds those whose options are refused: all of them, not only the first.

    Args:
        app: The app, with its tasks imported, and better not finalized: that would raise the first refusal.
    """
    found = _bind(app)
    guarded = guarded_tasks(app)
    if not guarded and not found:
        found.append(
            warn(
                "tasks",
                "The app has no guarded task.",
                "None has base=SingletonTask or @singleton, or their modules are not imported.",
                "Name them in the app's imports or include, or call app.autodiscover_tasks().",
            )
        )
    for task, guard in guarded:
        found += [finding for rule in _RULES if (finding := rule(app, task, guard))]
    found += [*_app_findings(app, guarded), *_scope_findings(guarded)]
    if guarded and not found:
        found.append(ok("tasks", f"Guarded tasks: {len(guarded)}; their options go together."))
    return found


def refused(error: SetnxError) -> Finding:
    """The finding for options that were refused, when a module was imported or a task was bound."""
    return fail(
        "options", sentence(error), "Celery does not start with it.", "Change it as the message says."
    )


def sentence(error: Exception) -> str:
    """An error's message, with a full stop."""
    return f"{str(error).removesuffix('.')}."


def _bind(app: Celery) -> list[Finding]:
    """Bind every task; the refusals. Celery itself stops at the first one."""
    refusals: dict[str, Finding] = {}
    try:
        settings(app.conf)
    except OptionError as error:
        refusals[str(error)] = refused(error)
    while True:
        try:
            app.finalize()
            if refusals:  # what comes after the task that was refused
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Celery's own tasks are announced again, too
                    _announce_app_finalized(app)
                while app._pending:
                    maybe_evaluate(app._pending.popleft())
            return list(refusals.values())
        except SetnxError as error:
            if str(error) in refusals:
                return list(refusals.values())
            refusals[str(error)] = refused(error)


def guarded_tasks(app: Celery) -> list[tuple[Task, Any]]:
    """The app's guarded tasks and their guards, by name."""
    found = []
    for _name, task in sorted(app.tasks.items()):
        guard = guard_of(task)
        if guard is not None:
            found.append((task, guard))
    return found


def _join_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    try:
        guard.check_backend(guard.options)
    except OptionError as error:
        return fail("join", sentence(error), "Workers of this app do not start.")
    return None


def _request_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    if not hasattr(type(task), "_calls_run"):  # a decorated function, under another base class
        return None
    if issubclass(symbol_by_name(task.Request), symbol_by_name(_REQUEST)):
        return None
    return warn(
        "request",
        f"{task.name} has a Request of its own, which is no celery_setnx.request.SingletonRequest.",
        "Then the worker frees neither the lock of a child that died nor the mark of a revoked call.",
        "Derive it from SingletonRequest.",
    )


def _lease_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    lease = guard.options.lease
    if lease < _SHORT_LEASE_S:
        return warn(
            "lease",
            f"{task.name} has a lease of {lease:g} s.",
            f"A renewal whose reply is lost takes {SOCKET_TIMEOUT_S:g} s more, and comes too late.",
            f"Use {_SHORT_LEASE_S:g} s or more; 30 is the default.",
        )
    if lease > _LONG_LEASE_S:
        return warn(
            "lease",
            f"{task.name} has a lease of {lease:g} s.",
            "When its worker's host dies, its key stays locked for that long.",
            "It is renewed while the task runs and need not be as long as a run: leave it at 30 s.",
        )
    return None


def _limit_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    at_most_for, limit = guard.options.at_most_for, _limit_s(app, task)
    if at_most_for is None or not limit or limit <= at_most_for + guard.options.lease:
        return None
    return warn(
        "at_most_for",
        f"{task.name} may run for {limit:g} s; its lock is renewed for {at_most_for:g} s (at_most_for).",
        "After that another may run beside it.",
        "Set the task's time_limit to at_most_for or less.",
    )


def _redelivery_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    visibility_s, limit = visibility_timeout_s(app), _limit_s(app, task)
    if not visibility_s or not task.acks_late or not limit or limit <= visibility_s:
        return None
    again = (
        "runs again after the first" if _forgets_results(app, task) else "is dropped if the first succeeds"
    )
    return warn(
        "visibility",
        f"{task.name} has acks_late and may run for {limit:g} s, but the broker delivers its message again "
        f"after {visibility_s:g} s.",
        f"The second delivery waits for the first, and {again}.",
        "Raise broker_transport_options visibility_timeout above the time limit.",
    )


def _retry_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    visibility_s = visibility_timeout_s(app)
    if visibility_s and (task.default_retry_delay or 0) > visibility_s:
        return warn(
            "visibility",
            f"{task.name} has a default_retry_delay of {task.default_retry_delay:g} s; the broker delivers "
            f"again after {visibility_s:g} s.",
            "A retry is delivered several times before it is due, and runs as often if no result is stored.",
            "Raise broker_transport_options visibility_timeout, or retry sooner.",
        )
    most = guard.options.retry_delay_max
    if visibility_s and most > visibility_s / 4 and _is_set(guard, "retry_delay_max"):
        return warn(
            "visibility",
            f"{task.name} has a retry_delay_max of {most:g} s; it is cut to {visibility_s / 4:g} s.",
            "A message that is delayed for longer than the broker's visibility timeout is delivered twice.",
            "Lower retry_delay_max, or raise broker_transport_options visibility_timeout.",
        )
    return None


def _mark_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    visibility_s, options = visibility_timeout_s(app), guard.options
    if not visibility_s or not options.dedupe or options.queue_lease >= visibility_s:
        return None
    return warn(
        "queue_lease",
        f"{task.name} has a queue_lease of {options.queue_lease:g} s; the broker delivers again after "
        f"{visibility_s:g} s.",
        "When a worker dies, its calls come back that late; by then their marks have lapsed.",
        "Set queue_lease to the visibility timeout or more.",
    )


def _useless_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    useless = [f"{name} ({why})" for name, why in _useless(task, guard.options) if _is_set(guard, name)]
    if not useless:
        return None
    return warn(
        "useless",
        f"{task.name} has options without effect: {', '.join(useless)}.",
        "They matter only to a call that brings what they need in its own apply_async(singleton=...).",
        "Remove them, or set what they go with.",
    )


def _useless(task: Task, options: Options) -> Iterator[tuple[str, str]]:
    """Options that do nothing beside the others, and why."""
    policy = options.on_conflict
    if policy in ("skip", "raise"):
        yield "max_wait", f"on_conflict={policy!r} does not wait"
    if policy in ("retry", "wait", "join", "raise") and options.dedupe != "until_started":
        yield "skip_result", f"on_conflict={policy!r} does not skip"
    if not options.dedupe:
        yield "on_duplicate", "without dedupe there is no duplicate"
        if not options.hold_on_retry and policy not in ("wait", "join") and not callable(policy):
            yield "queue_lease", "without dedupe there is no mark"
    if options.hold_on_retry and task.max_retries == 0:
        yield "hold_on_retry", "max_retries=0: it never retries"


def _pickle_finding(app: Celery, task: Task, guard: Any) -> Finding | None:
    policy = guard.options.on_conflict
    if task.serializer != "pickle" or not guard.options.may_wait or callable(policy):
        return None
    return warn(
        "pickle",
        f"{task.name} may wait in line, and its calls are pickled.",
        "A line holds no pickles, as who can write there could have code run: a call that meets a held lock "
        "polls instead, as with on_conflict='retry'.",
        "Give it another serializer, or on_conflict='retry'.",
    )


_RULES = (
    *(_join_finding, _request_finding, _lease_finding, _limit_finding),
    *(_redelivery_finding, _retry_finding, _mark_finding, _useless_finding, _pickle_finding),
)


def _app_findings(app: Celery, guarded: list[tuple[Task, Any]]) -> Iterator[Finding]:
    """What the app's own settings do to its guarded tasks."""
    if not guarded:
        return
    if app.conf.task_always_eager:
        yield warn(
            "eager",
            "task_always_eager is on.",
            "Calls run in the caller's process, and no lock is taken.",
            "Turn it off outside tests.",
        )


def _scope_findings(guarded: list[tuple[Task, Any]]) -> Iterator[Finding]:
    """Tasks that share a scope, and whose keys can never be equal."""
    shapes: dict[str, dict[str, Any]] = {}
    for task, guard in guarded:
        if guard.options.scope and (shape := _shape(guard)):
            shapes.setdefault(guard.options.scope, {})[task.name] = shape
    for scope, of_task in shapes.items():
        if len(set(of_task.values())) > 1:
            yield warn(
                "scope",
                f"{', '.join(of_task)} share the scope {scope!r}, but not what their keys are made of.",
                "Their keys are never equal, so these tasks do not exclude each other.",
                "Give them the same key option: a parameter that all of them have, or key=().",
            )


def _shape(guard: Any) -> tuple[Any, ...] | None:
    """What a key is made of: two keys of different shapes are never equal. None if that is not known."""
    key = guard.options.key
    if key is None:
        return ("all", *guard.signature.parameters)
    if callable(key):
        return None
    if isinstance(key, str):
        if "{" not in key:
            return ("names", 1)
        return ("template", *(literal for literal, *_field in Formatter().parse(key)))
    return ("names", len(key))


def _is_set(guard: Any, name: str) -> bool:
    """True if the task itself sets the option: the app's and a base class's are for many tasks."""
    return name in guard.layers[-1]


def _limit_s(app: Celery, task: Task) -> float:
    """Seconds after which Celery ends a run; 0 for never."""
    limits = (
        task.time_limit or app.conf.task_time_limit,
        task.soft_time_limit or app.conf.task_soft_time_limit,
    )
    return float(min((limit for limit in limits if limit), default=0.0))


def _forgets_results(app: Celery, task: Task) -> bool:
    return bool(task.ignore_result) or not getattr(app.backend, "persistent", False)
