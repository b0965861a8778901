"""What is wrong with an app's settings and its tasks' options, besides what binding refuses. No server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from string import Formatter
from typing import Any, Literal

from celery import Celery, Task

from celery_setnx.address import scheme_of
from celery_setnx.call.back import result_tells, results_kept_s, visibility_timeout_s
from celery_setnx.call.guard import Guard, guard_of
from celery_setnx.call.marking import refuse_long_debounce, refuse_times
from celery_setnx.call.queues import is_fanout, is_reached, own_queue
from celery_setnx.connection import backend_url, new_client
from celery_setnx.doctor.unread import unread_of_task, unread_settings
from celery_setnx.exceptions import OptionError, SetnxError
from celery_setnx.lock.record import Terms
from celery_setnx.options import Options, settings_of
from celery_setnx.task import SingletonTask, refusals
from celery_setnx.wording import sentence

_LONG_LEASE_S = 600.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `ok`, `note` (fine, and there is something to do), `warning`, or `error`: locks do not hold,
            or a task cannot work.
        subject: What was looked at; docs/cli.md lists all.
        what: What was found.
        why: Why it matters. Defaults to nothing.
        do: What to do. Defaults to nothing.
    """

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    what: str
    why: str = ""
    do: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain JSON values."""
        return asdict(self)


ok, note, warn, fail = (partial(Finding, level) for level in ("ok", "note", "warning", "error"))


def check(app: Celery) -> list[Finding]:
    """Check the app's settings and the options of its tasks, without a server.

    Binds every task, and so also finds those whose options are refused: all of them, not only the first.

    Args:
        app: The app, with its tasks imported.
    """
    found = check_tasks(app)
    return [*_lock_server_findings(app), *found]


def check_tasks(app: Celery) -> list[Finding]:
    """What `check` finds, but for the settings of the lock server."""
    found = _bind(app)
    found += _unread_findings(app)
    guarded = guarded_tasks(app)
    for task, guard in guarded:
        found += _task_findings(app, task, guard)
        found += _newest_findings(app, task, guard)
        found += _queue_findings(app, task)
        found += _redelivery_findings(app, task, guard)
        found += _end_findings(task)
        found += _waiting_findings(task, guard)
        found += _done_findings(app, task, guard)
        found += _rate_findings(task, guard)
    if guarded and app.conf.task_always_eager:
        found.append(
            warn(
                "eager",
                "task_always_eager is on.",
                "Calls run in the caller's process, without a lock.",
                "Turn it off outside tests.",
            )
        )
    found += _scope_findings(guarded)
    found += _limit_findings(guarded)
    found += _rates_findings(guarded)
    if guarded:
        return found or [ok("tasks", f"Guarded tasks: {len(guarded)}; their options fit together.")]
    return found or [
        warn(
            "tasks",
            "The app has no guarded task.",
            "No task has base=SingletonTask or @singleton, or their modules are not imported.",
            "Add the modules to the app's imports or include, or call app.autodiscover_tasks().",
        )
    ]


def refused(error: SetnxError) -> Finding:
    """The finding for options that were refused, when a module was imported or a task was bound."""
    return fail(
        "options",
        sentence(error),
        "Workers of this app do not start, and each call of the task raises this error.",
        "Do as the message says.",
    )


def _bind(app: Celery) -> list[Finding]:
    """Bind every task; the refusals."""
    app.finalize()
    return list({str(refusal): refused(refusal) for refusal in refusals(app)}.values())


def guarded_tasks(app: Celery) -> list[tuple[Task, Guard]]:
    """The app's guarded tasks and their guards, by name."""
    return [(task, guard) for task in _tasks(app) if (guard := guard_of(task))]


def _lock_server_findings(app: Celery) -> Iterator[Finding]:
    """Settings that lead to no lock server, where one is needed. Nothing connects."""
    if not guarded_tasks(app):
        return
    try:
        new_client(app)
    except (OptionError, ValueError) as error:
        yield fail("connection", sentence(error), "Without a lock server no guarded task can run.")


def _is_enabled(app: Celery) -> bool:
    try:
        return settings_of(app).enabled
    except OptionError:  # which is found elsewhere
        return True


def _unread_findings(app: Celery) -> Iterator[Finding]:
    """What nobody reads, and may be meant for us; and that nothing is guarded at all."""
    if not _is_enabled(app):
        yield warn(
            "enabled",
            "setnx_enabled is False: every task runs without its lock, and no call is a duplicate.",
            "Calls that wait in line still have their turns.",
            "To guard them again, remove the setting and restart the workers.",
        )
    for written, do in unread_settings(app):
        yield warn("unread", f"The setting {written} has no effect.", do=do)
    for task in _tasks(app):
        is_guarded = guard_of(task) is not None
        is_refused = isinstance(task, SingletonTask) and not is_guarded
        for what, do in () if is_refused else unread_of_task(task, is_guarded=is_guarded):
            yield warn("unread", f"{task.name} has {what}, which has no effect.", do=do)


def _tasks(app: Celery) -> list[Task]:
    """The app's tasks by name, but for Celery's own."""
    return [task for name, task in sorted(app.tasks.items()) if not name.startswith("celery.")]


def _task_findings(app: Celery, task: Task, guard: Guard) -> Iterator[Finding]:
    """A task that stops its worker, and times that do not fit its lock."""
    lease, at_most_for, run_s = guard.options.lease, guard.options.at_most_for, _run_limit_s(app, task)
    try:
        guard.check_backend(guard.options)
    except OptionError as error:
        yield fail("join", sentence(error), "Workers of this app do not start.")
    if next(iter(guard.signature.parameters), None) == "self":
        yield warn(
            "bind",
            f"{task.name} has a first parameter self, but no bind=True.",
            "So callers must pass self, and it is a part of the key.",
            "Add bind=True, or rename the parameter.",
        )
    timeout_s = guard.settings.timeout
    if lease < 2 * timeout_s:  # a renewal begins after a third; one lost reply takes a timeout
        yield warn(
            "lease",
            f"{task.name} has a lease of {lease:g} s.",
            f"If one reply of Redis is lost, the renewal takes {timeout_s:g} s (setnx_timeout) longer and "
            "may come too late: the lock is lost while the task runs.",
            f"Use {2 * timeout_s:g} s or more; 30 is the default.",
        )
    if lease > _LONG_LEASE_S:
        yield warn(
            "lease",
            f"{task.name} has a lease of {lease:g} s.",
            "When its worker's host dies, its key stays locked for that long.",
            "The lease is renewed while the task runs, and need not be as long as a run: leave it at 30 s.",
        )
    if at_most_for is not None and run_s > at_most_for + lease:
        yield warn(
            "at_most_for",
            f"{task.name} may run for {run_s:g} s; its lock is renewed for {at_most_for:g} s (at_most_for).",
            "After that a second call may run at the same time.",
            "Set the task's time_limit to at_most_for or less.",
        )


def _newest_findings(app: Celery, task: Task, guard: Guard) -> Iterator[Finding]:
    """Times that a call may not have which replaces those before it."""
    try:
        refuse_long_debounce(app, task.name, guard.options)
    except OptionError as error:
        yield fail("debounce", sentence(error), "Workers of this app do not start.")
    if not guard.options.replaces:
        return
    try:
        refuse_times(guard, {}, task.expires)
    except OptionError as error:
        yield fail("debounce", sentence(error), "Each call is refused when it is published.")
    entries = app.conf.beat_schedule
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        told = entry if isinstance(entry, Mapping) else {}
        try:
            refuse_times(guard, told.get("options") or {} if told.get("task") == task.name else {})
        except OptionError as error:
            yield fail("debounce", f"In beat_schedule {name!r}: {sentence(error)}", "Beat cannot send it.")


def _queue_findings(app: Celery, task: Task) -> Iterator[Finding]:
    """A queue that gets a copy of what others get too, as far as the app's routes say. Nothing connects."""
    try:
        queue = own_queue(app, task.name, (), {})
        is_copied, is_reached_alone = is_fanout(app, queue), is_reached(app, queue)
    except Exception:  # noqa: BLE001 - a router of the app's own, which wants the arguments
        return
    if is_copied:
        alone = "A copy that finds the lock held comes back to its own worker, and runs later or is dropped."
        lost = "On this broker a copy cannot wait: it is dropped, or fails if another call has the lock."
        yield warn(
            "queue",
            f"{task.name} is sent to {queue}, a queue of a fanout exchange (Broadcast).",
            f"Each worker gets a copy, and all copies have one key. {alone if is_reached_alone else lost}",
            "Route it to another queue.",
        )


def _redelivery_findings(app: Celery, task: Task, guard: Guard) -> Iterator[Finding]:
    """Times beyond those after which the broker delivers again what is not acknowledged."""
    options, run_s, visibility_s = guard.options, _run_limit_s(app, task), visibility_timeout_s(app)
    if not visibility_s:
        return
    again = f"the broker delivers again after {visibility_s:g} s."
    if task.acks_late and run_s > visibility_s:
        second = "is dropped if the first succeeds" if _ends_are_told(task) else "runs after the first"
        yield warn(
            "visibility",
            f"{task.name} has acks_late and may run for {run_s:g} s; {again}",
            f"The second delivery waits for the first, and {second}.",
            "Set visibility_timeout in broker_transport_options to more than the time limit.",
        )
    if (task.default_retry_delay or 0) > visibility_s:
        yield warn(
            "visibility",
            f"{task.name} has a default_retry_delay of {task.default_retry_delay:g} s; {again}",
            "A retry is delivered several times before it is due. The first delivery runs; the others "
            + ("are dropped if it succeeds." if _ends_are_told(task) else "run after it."),
            "Raise visibility_timeout in broker_transport_options, or retry sooner.",
        )
    elif (longest_s := options.retry_delay_max) > visibility_s / 4 and _is_set(guard, "retry_delay_max"):
        yield warn(
            "visibility",
            f"{task.name} has a retry_delay_max of {longest_s:g} s; it is cut to {visibility_s / 4:g} s.",
            "A message that is delayed for longer than the broker's visibility timeout is delivered twice.",
            "Lower retry_delay_max, or raise visibility_timeout in broker_transport_options.",
        )
    if options.dedupe and options.queue_lease < visibility_s:
        yield warn(
            "queue_lease",
            f"{task.name} has a queue_lease of {options.queue_lease:g} s; {again}",
            "When a worker dies, its calls come back only after that; their marks have lapsed by then.",
            "Set queue_lease to the visibility timeout or more.",
        )


def _end_findings(task: Task) -> Iterator[Finding]:
    """A task of which nothing tells a second delivery that the first has succeeded."""
    if task.acks_late and not _ends_are_told(task):
        yield warn(
            "redelivery",
            f"{task.name} has acks_late, but no stored result and no base=SingletonTask.",
            "When its message is redelivered, the worker cannot tell that it has succeeded: it runs twice.",
            "Add base=SingletonTask, or store its results for longer than the visibility timeout.",
        )


def findings_at_start(app: Celery) -> Iterator[Finding]:
    """What a worker says when it starts: what nobody reads, and which tasks are copied or may run twice."""
    yield from _unread_findings(app)
    for task, _guard in guarded_tasks(app):
        yield from _queue_findings(app, task)
        yield from _end_findings(task)


def _ends_are_told(task: Task) -> bool:
    """Whether a second delivery learns that the first has succeeded: by a receipt, or by its result."""
    return isinstance(task, SingletonTask) or result_tells(task, ignores_result=bool(task.ignore_result))


def _waiting_findings(task: Task, guard: Guard) -> Iterator[Finding]:
    """Options that do nothing, and calls that cannot wait in line."""
    useless = [f"{name} ({why})" for name, why in _useless(task, guard.options) if _is_set(guard, name)]
    if useless:
        yield warn(
            "useless",
            f"{task.name} has options without effect: {', '.join(useless)}.",
            "They matter only to calls that set the other options in apply_async(singleton=...).",
            "Remove them, or set the options that they need.",
        )
    if task.serializer == "pickle" and guard.options.may_wait and not callable(guard.options.on_conflict):
        yield warn(
            "pickle",
            f"{task.name} may wait in line, and its calls are pickled.",
            "A line in Redis holds no pickles, because they could run code. A call that finds the lock held "
            "polls instead, as with on_conflict='retry'.",
            "Use another serializer, or on_conflict='retry'.",
        )


def _done_findings(app: Celery, task: Task, guard: Guard) -> Iterator[Finding]:
    """A result that is gone while its call still makes duplicates: that result is what they get."""
    dedupe_for, kept_s = guard.options.dedupe_for, results_kept_s(app)
    if dedupe_for is None:
        return
    counts = f"{task.name} makes duplicates for {dedupe_for:g} s (dedupe_for)"
    if task.ignore_result or scheme_of(backend_url(app)) in ("", "disabled"):
        yield note(
            "dedupe_for",
            f"{counts}, and its results are not stored.",
            "A duplicate gets the first call's id, but no result.",
            "If you need the result, store it.",
        )
    elif kept_s and kept_s < dedupe_for:
        yield warn(
            "dedupe_for",
            f"{counts}; results are kept for {kept_s:g} s (result_expires).",
            "A duplicate gets the first call's result. When that has expired, it stays PENDING for ever.",
            "Set result_expires to dedupe_for or more.",
        )


def _useless(task: Task, options: Options) -> Iterator[tuple[str, str]]:
    """Options that do nothing beside the others, and why."""
    policy = options.on_conflict
    if policy == "auto" and options.rate:
        policy = "wait"
    if policy in ("skip", "raise"):
        yield "max_wait", f"on_conflict={policy!r} does not wait"
    may_skip = options.dedupe == "until_started" or options.dedupe_for  # what nobody asked when it was sent
    if policy in ("retry", "wait", "join", "raise") and not may_skip:
        yield "skip_result", f"on_conflict={policy!r} does not skip"
    if not options.replaces:
        yield "debounce_max", "without debounce or on_duplicate='replace' no call waits for a newer one"
    if not options.dedupe:
        yield "on_duplicate", "without dedupe there is no duplicate"
        if not options.hold_on_retry and policy not in ("wait", "join") and not callable(policy):
            yield "queue_lease", "without dedupe there is no mark"
    if options.hold_on_retry and task.max_retries == 0:
        yield "hold_on_retry", "max_retries=0: it never retries"


def _limit_findings(guarded: list[tuple[Task, Guard]]) -> Iterator[Finding]:
    """Tasks that share a scope, under different limits."""
    for scope, terms, told in _differing(guarded, lambda terms: f"limit {terms.limit}"):
        yield warn(
            "limit",
            f"Tasks share the scope {scope!r} under different limits: {told}.",
            "They share the permits of a key, but each uses its own limit: up to "
            f"{max(each.limit for each in terms)} run at a time, and a call with a lower limit waits for the "
            "first permits.",
            "Give them the same limit, or scopes of their own.",
        )


def _rates_findings(guarded: list[tuple[Task, Guard]]) -> Iterator[Finding]:
    """Tasks that share a scope, under different rates."""

    def words(terms: Terms) -> str:
        return f"rate {terms.pace}" if terms.starts else "no rate"

    for scope, _, told in _differing(guarded, words):
        yield warn(
            "rate",
            f"Tasks share the scope {scope!r} under different rates: {told}.",
            "They share the starts of a key, but each call uses its own rate: a call without a rate starts "
            "at once, and is not counted.",
            "Give them the same rate, or scopes of their own.",
        )


def _differing(
    guarded: list[tuple[Task, Guard]], words: Callable[[Terms], str]
) -> Iterator[tuple[str, list[Terms], str]]:
    """The scopes of tasks whose terms differ in words, with those terms, and what each task has."""
    scopes: dict[str, dict[str, Terms]] = {}
    for task, guard in guarded:
        scopes.setdefault(guard.scope_of({}), {})[task.name] = guard.options.terms
    for scope, of_task in scopes.items():
        told = {name: words(terms) for name, terms in of_task.items()}
        if len(set(told.values())) > 1:
            yield scope, list(of_task.values()), ", ".join(f"{name} ({has})" for name, has in told.items())


def _rate_findings(task: Task, guard: Guard) -> Iterator[Finding]:
    """A rate that cannot be reached, or that a call cannot wait for; and another of Celery's own."""
    options, terms = guard.options, guard.options.terms
    if not terms.starts:
        return
    at_least_for = options.at_least_for
    most = terms.limit * ceil(terms.period_s / at_least_for) if at_least_for else terms.starts
    if most < terms.starts:
        yield warn(
            "rate",
            f"{task.name} has a rate of {terms.pace}, and at_least_for={at_least_for:g}.",
            f"Each permit is kept that long, so at most {most} calls start in {terms.period_s:.12g} s, and "
            "the rate has no effect.",
            "Remove the rate, lower at_least_for, or raise the limit.",
        )
    if (max_wait := options.max_wait) is not None and _waits(options) and max_wait < terms.period_s:
        yield note(
            "rate",
            f"{task.name} has a rate of {terms.pace}, and a max_wait of {max_wait:g} s.",
            f"The next start may be {terms.period_s:.12g} s after the last one: a call that waits for more "
            f"than {max_wait:g} s fails with LockTimeout.",
            "If such calls should not fail, set max_wait to the period or more.",
        )
    if task.rate_limit:
        yield note(
            "rate",
            f"{task.name} has a rate of {terms.pace}, and Celery's rate_limit of {task.rate_limit}.",
            "The rate is per key, across all workers. rate_limit is per worker, for all keys together, and "
            "delays calls before they ask for their lock.",
            "Remove rate_limit, unless you want to slow down each worker as well.",
        )


def _waits(options: Options) -> bool:
    """True if a call that its pace keeps out comes later."""
    return options.on_conflict in ("auto", "retry", "wait", "join")


def _scope_findings(guarded: list[tuple[Task, Guard]]) -> Iterator[Finding]:
    """Tasks that share a scope, and whose keys can never be equal."""
    shapes: dict[str, dict[str, Any]] = {}
    for task, guard in guarded:
        if guard.options.scope and (shape := _shape(guard)):
            shapes.setdefault(guard.options.scope, {})[task.name] = shape
    for scope, of_task in shapes.items():
        if len(set(of_task.values())) > 1:
            yield warn(
                "scope",
                f"{', '.join(of_task)} share the scope {scope!r}, but their keys are made of different "
                "things.",
                "Their keys are never equal, so these tasks do not exclude each other.",
                "Give them the same key option: a parameter that all of them have, or key=().",
            )


def _shape(guard: Guard) -> tuple[Any, ...] | None:
    """What a key is made of: two keys of different shapes are never equal. None if that is not known."""
    key = guard.options.key
    if key is None:
        return ("all", *guard.signature.parameters)
    if callable(key):
        return None
    if isinstance(key, str) and "{" in key:
        return ("template", *(literal for literal, *_field in Formatter().parse(key)))
    return ("names", 1 if isinstance(key, str) else len(key))


def _is_set(guard: Guard, name: str) -> bool:
    """True if the task itself sets the option: the app's and a base class's are for many tasks."""
    return name in guard.layers[-1]


def _run_limit_s(app: Celery, task: Task) -> float:
    """Seconds after which Celery ends a run; 0 for never."""
    conf = app.conf
    limits = (task.time_limit or conf.task_time_limit, task.soft_time_limit or conf.task_soft_time_limit)
    return float(min(filter(None, limits), default=0.0))
