"""Where Celery meets the lock: the `SingletonTask` base class and the `@singleton` decorator."""

from __future__ import annotations

import functools
import inspect
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar, cast

from celery import Celery, Task, current_task
from celery._state import connect_on_app_finalize
from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from celery.local import Proxy
from celery.states import SUCCESS
from celery.utils.dispatch import Signal
from celery.utils.time import maybe_make_aware

from celery_setnx.conflict import (
    HEADER,
    NONCE,
    Conflict,
    backoff,
    come_back,
    has_met_itself,
    resolve,
    waited,
)
from celery_setnx.connection import check_at_worker_start, client_for
from celery_setnx.exceptions import (
    AlreadyRunning,
    LockTimeout,
    LockUnavailable,
    OptionError,
    SetnxError,
)
from celery_setnx.keeper import keeper_for_process
from celery_setnx.keys import KeyFunction, key_name
from celery_setnx.lock import HeldLock, Holder, Outcome, SetnxLock, task_token
from celery_setnx.options import Options, check_name, checked, merged, plain, settings
from celery_setnx.process import identity, is_surely_dead
from celery_setnx.signals import lock_acquired, lock_lost, lock_released, lock_taken_over

logger = logging.getLogger("celery_setnx")

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS_ATTRIBUTE = "__singleton__"


class SingletonTask(Task):  # type: ignore[misc]
    """A task that runs at most once at a time per key.

    Use it as `@app.task(base=SingletonTask)`. Calls from a worker are guarded, however they were sent;
    direct calls, `.apply()` and eager mode are not.

    Attributes:
        singleton: Options of the task, or of a base class for its tasks; see `Options`. A subclass's
            options are laid over its parents'.

    Example:
        >>> @app.task(base=SingletonTask, singleton={"key": "user_id"})   # doctest: +SKIP
        ... def rebuild(user_id, reason): ...
    """

    abstract = True
    Request = "celery_setnx.request:SingletonRequest"
    singleton: Mapping[str, Any] = {}
    _guard: _Guard | None = None
    _calls_run = True

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Settle the options when Celery binds the task.

        Raises:
            OptionError: An option is unknown, malformed, or cannot be combined with another.
        """
        bound = super().bind(app)
        name = cls.name or app.gen_task_name(cls.__name__, cls.__module__)
        if name.startswith("celery."):  # Celery's own, when SingletonTask is the app's task class
            return bound
        layers = [vars(base)["singleton"] for base in reversed(cls.__mro__) if "singleton" in vars(base)]
        decorated = getattr(cls.run, _OPTIONS_ATTRIBUTE, None)
        if decorated is not None:
            if vars(cls).get("singleton"):
                raise OptionError(f"{name} has both @singleton(...) and singleton={{...}}; keep one of them")
            layers.append(decorated)
        cls._calls_run = _next_call(cls) is vars(Task)["__call__"]
        cls._guard = _Guard(app, name, _signature(cls), layers)
        if AlreadyRunning not in cls.throws:
            cls.throws = (*cls.throws, AlreadyRunning)  # LockTimeout is one
        return bound

    @property
    def lock(self) -> HeldLock | None:
        """The lock that the running call holds: its `fence`, `ensure()`, `remaining_s()`.

        None where a call is not guarded: direct, eager, or under `on_redis_error="run"`.
        """
        return _lock_of(self)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *positional: Any,
        singleton: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Publish a call, its finished key in a header. Takes what `celery.Task.apply_async` takes.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            positional: Further positional arguments of `celery.Task.apply_async`.
            singleton: Options for this call alone. Defaults to none.
            options: Further options of `celery.Task.apply_async`.

        Raises:
            OptionError: An option of this call is unknown, malformed or cannot travel.
            UnkeyableCall: The call's key cannot be computed.
        """
        if self._guard is not None:
            final_args, final_kwargs = args, kwargs
            dump = getattr(self, "_dump_pydantic_arguments", None)
            if dump is not None and options.get("serializer", self.serializer) != "pickle":
                final_args, final_kwargs = dump(args, kwargs)
            headers = dict(options.get("headers") or {})
            headers[HEADER] = self._guard.header(final_args, final_kwargs, singleton, headers.get(HEADER))
            options["headers"] = headers
        return super().apply_async(args, kwargs, *positional, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock if a worker calls; plainly if the program does."""
        request = self.request_stack.top
        if self._guard is None or not _is_from_worker(request) or request._protected:
            return super().__call__(*args, **kwargs)
        run = _Run(self, self._guard, args, kwargs)
        if not self._calls_run:
            return run.guard(lambda: super(SingletonTask, self).__call__(*args, **kwargs))
        request._protected = 1  # as Celery's own __call__ does in a worker: the request is used up
        return run.guard(lambda: self.run(*args, **kwargs))


def singleton(function: Function | None = None, /, **options: Any) -> Any:
    """Guard a task's function, or give a `SingletonTask` its options. Goes below `@app.task`.

    With `base=SingletonTask` it only supplies the options. With another base class it guards the function
    itself: lock, renewal, skip, retry and raise; what needs the base class is refused.

    Args:
        function: The task's function, when used without parentheses.
        options: See `Options`.

    Raises:
        OptionError: An option is unknown or malformed, needs the base class, or the decorator stands
            above `@app.task`.

    Example:
        >>> @app.task   # doctest: +SKIP
        ... @singleton(key="account_id")
        ... def settle(account_id): ...
    """
    if function is None:
        return functools.partial(_decorated, options=options)
    return _decorated(function, options=options)


def current_lock() -> HeldLock | None:
    """The lock that the running task holds, or None where no guarded task runs."""
    task = current_task._get_current_object() if current_task else None
    return None if task is None else _lock_of(task)


class _Guard:
    """What binding settles of a task: its options, its key function, where its locks live."""

    def __init__(
        self, app: Celery, task: str, signature: inspect.Signature, layers: list[Mapping[str, Any]]
    ) -> None:
        self.app = app
        self.task = task
        self.signature = signature
        self.settings = settings(app.conf)
        self.layers = [self.settings.defaults, *layers]
        self.options = merged(task, *self.layers)
        self.key_function = KeyFunction(self.options.key, signature, task)
        check_name(f"scope of {task}", self.options.scope or task)
        check_at_worker_start(app)

    def header(
        self,
        args: Any,
        kwargs: Any,
        call: Mapping[str, Any] | None,
        inherited: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """The header of a call: its finished key, its own options, and what a retry brings along."""
        travelling = dict((inherited or {}).get("options") or {})
        if call:
            travelling.update(plain(f"a call of {self.task}", call))
        header: dict[str, Any] = {"key": self.key(args or (), kwargs or {}, travelling)}
        if travelling:
            header["options"] = travelling
        if inherited and "wait" in inherited:
            header["wait"] = inherited["wait"]
        return header

    def key(self, args: Any, kwargs: Mapping[str, Any], call: Mapping[str, Any]) -> str:
        """The Redis key of a call's lock."""
        options, function = self.options, self.key_function
        if call:
            options = self.options_of(call)
            if "key" in call:
                function = KeyFunction(options.key, self.signature, self.task)
        scope = options.scope or self.task
        return key_name(self.settings.prefix, scope, function.digest(args, kwargs))

    def options_of(self, call: Mapping[str, Any]) -> Options:
        """The options of one call."""
        return merged(f"a call of {self.task}", *self.layers, call) if call else self.options

    def lock(
        self,
        header: Mapping[str, Any],
        args: Any,
        kwargs: Mapping[str, Any],
        info: Mapping[str, Any] | None = None,
    ) -> SetnxLock:
        """The lock of a call: named by its header, or computed where a message has none."""
        call = header.get("options") or {}
        return SetnxLock(
            client_for(self.app),
            header.get("key") or self.key(args, kwargs, call),
            lease=self.options_of(call).lease,
            retention=self.settings.retention,
            info=info,
        )


class _Run:
    """One guarded run of a task's body: acquire, run, release."""

    def __init__(self, task: Task, guard: _Guard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = task.request
        header = (request.headers or {}).get(HEADER) or {}
        self.task = task
        self.request = request
        self.options = guard.options_of(header.get("options") or {})
        self.same_host = guard.settings.same_host
        self.lock = guard.lock(
            header,
            args,
            kwargs,
            {**identity(), "task": task.name, "task_id": request.id, "worker": request.hostname},
        )
        self.keeper = keeper_for_process(self.lock.clock)

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"

    def guard(self, body: Callable[[], Any]) -> Any:
        """The body's result, or what becomes of the conflict."""
        held = None
        hold_for = None
        try:
            outcome = self._acquire()
            if outcome is None:
                return body()
            held = outcome.lock
            if held is not None:
                self._begin(held, outcome)
                return body()
        except Retry as retry:
            if held is not None and self.options.hold_on_retry:
                hold_for = self._seconds_until(retry.when) + self.options.queue_lease
            raise
        finally:
            if held is not None:
                self._end(held, hold_for)
        return resolve(self._conflict(outcome))

    def _acquire(self) -> Outcome | None:
        """The outcome, or None if Redis is unreachable and the body is to run all the same."""
        nonce = (self.request.properties or {}).get(NONCE) or uuid.uuid4().hex
        token = task_token(self.request.id, self.request.retries, nonce)
        give_up = self.lock.clock() + self.lock.lease_s
        pause = 0.05
        while True:
            try:
                outcome = self.lock.acquire(token=token)
                holder = outcome.holder
                if holder is not None and self.same_host and is_surely_dead(holder.info):
                    # The script compares the dead token, so that nobody else's lock is meant.
                    outcome = self.lock.acquire(token=token, dead=holder.token)
                return outcome
            except LockUnavailable as error:
                if self.options.on_redis_error == "run":
                    logger.warning("%s runs unguarded (on_redis_error='run'). %s", self, error)
                    return None
                if self.options.on_redis_error == "raise":
                    raise
                if self.lock.clock() >= give_up:
                    now = time.time()  # the server's clock cannot be asked, and this only paces
                    waits, waited_s = waited(self.request, now)
                    come_back(self.task, backoff(self.options, waits), waits, now - waited_s, str(error))
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0, self.lock.lease_s / 4)

    def _begin(self, held: HeldLock, outcome: Outcome) -> None:
        self.request.setnx_lock = held
        self.keeper.watch(held, self._lost, self.options.at_most_for)
        if outcome.taken_over_from is not None:
            self._report_take_over(held, outcome.taken_over_from, outcome.server_time)
        self._send(lock_acquired, held)
        if self._has_succeeded_before():
            logger.info("%s has succeeded before, and was delivered again; this delivery is dropped.", self)
            raise Ignore("it has succeeded before")

    def _report_take_over(self, held: HeldLock, dead: Holder, server_time: float) -> None:
        ended_s = server_time - (dead.deadline or server_time)
        if ended_s >= 0:
            why = (
                f"its lease ended {ended_s:.1f} s ago and was not renewed. "
                "That process died, or stood still for longer than its lease."
            )
        else:
            why = "its process on this host is dead."
        logger.warning("%s took over %s from %s: %s", self, held.key, dead, why)
        self._send(lock_taken_over, held, holder=dead)

    def _has_succeeded_before(self) -> bool:
        """True if this is another delivery of a call whose result is known. Release never means done."""
        redelivered = (self.request.delivery_info or {}).get("redelivered") or has_met_itself(self.request)
        if not redelivered or not self.task.backend.persistent:
            return False
        try:
            return bool(self.task.backend.get_task_meta(self.request.id)["status"] == SUCCESS)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, it does not know
            logger.warning("%s was delivered again, and runs: its result is not known (%s).", self, error)
            return False

    def _end(self, held: HeldLock, hold_for: float | None) -> None:
        """Forget, then release: a renewal that comes after the release could only do harm."""
        watched = self.keeper.forget(held)
        try:
            if hold_for is not None:
                word = held.hold(hold_for)
            else:
                word = held.release(at_least_for=self.options.at_least_for)
        except SetnxError as error:
            # The body's own result or exception stands.
            logger.warning(
                "%s has ended, but its lock was not released: %s The lease of %g s ends it.",
                self,
                error,
                held.lease_s,
            )
            return
        if word in ("gone", "lost"):
            if watched:
                self._lost(held, f"it was {word} when the task ended")
            return
        if word == "repaired":
            logger.warning("%s: a classic client had overwritten %s while we held it.", self, held.key)
        self._send(lock_released, held, outcome=word)

    def _seconds_until(self, when: Any) -> float:
        """Of a Retry: seconds, or the time itself."""
        if isinstance(when, datetime):
            when = (maybe_make_aware(when, self.task.app.timezone) - self.task.app.now()).total_seconds()
        return max(0.0, float(when or 0.0))

    def _lost(self, held: HeldLock, reason: str) -> None:
        logger.warning(
            "%s lost its lock %s: %s. Its body runs on, and another may run beside it.",
            self,
            held.key,
            reason,
        )
        self._send(lock_lost, held, reason=reason)

    def _conflict(self, outcome: Outcome) -> Conflict:
        waits, waited_s = waited(self.request, outcome.server_time)
        return Conflict(
            task=self.task,
            key=self.lock.name,
            holder=cast("Holder", outcome.holder),
            remaining_s=outcome.remaining_s,
            options=self.options,
            waits=waits,
            waited_s=waited_s,
            server_time=outcome.server_time,
        )

    def _send(self, signal: Signal, held: HeldLock, **details: Any) -> None:
        signal.send(sender=self.task, task_id=self.request.id, key=held.key, fence=held.fence, **details)


def _decorated(function: Any, *, options: Mapping[str, Any]) -> Any:
    if issubclass(type(function), (Proxy, Task)):
        raise OptionError(
            "@singleton stands above @app.task and would guard nothing; put it below:\n"
            "    @app.task(...)\n    @singleton(...)\n    def your_task(...): ..."
        )
    if not callable(function):
        raise OptionError(f"@singleton guards a task's function, not {function!r}")
    where = f"@singleton on {function.__qualname__}"
    own = checked(where, options)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        task = current_task._get_current_object() if current_task else None
        if (
            task is None
            or isinstance(task, SingletonTask)
            or not _is_from_worker(task.request)
            or _lock_of(task) is not None
            or not _is_body_of(task, guarded)
        ):
            return function(*args, **kwargs)
        own_args = args[1:] if _is_bound(type(task)) else args
        run = _Run(task, _guard_of(task), own_args, kwargs)
        return run.guard(lambda: function(*args, **kwargs))

    setattr(guarded, _OPTIONS_ATTRIBUTE, own)
    return guarded


def _guard_of(task: Task) -> _Guard:
    """The guard of a decorated function under a base class that is not ours; made once per task."""
    guard: _Guard | None = vars(task).get("_setnx_guard")
    if guard is None:
        options = getattr(task.run, _OPTIONS_ATTRIBUTE)
        guard = _Guard(task.app, task.name, _signature(type(task)), [options])
        if guard.options.hold_on_retry:
            raise OptionError(f"hold_on_retry of {task.name} needs the base class: add base=SingletonTask")
        _refuse_autoretried_raise(task, guard.options)
        if AlreadyRunning not in task.throws:
            task.throws = (*task.throws, AlreadyRunning)
        task._setnx_guard = guard
    return guard


def _refuse_autoretried_raise(task: Task, options: Options) -> None:
    """Inside the function an error of ours would meet the task's own autoretry_for first."""
    raises = options.on_conflict == "raise" or options.max_wait is not None
    retried = tuple(getattr(task, "autoretry_for", ()))
    spared = tuple(getattr(task, "dont_autoretry_for", ()))
    if raises and issubclass(LockTimeout, retried) and not issubclass(AlreadyRunning, spared):
        raise OptionError(
            f"{task.name} has @singleton with on_conflict='raise' or max_wait, and an autoretry_for that "
            "would retry the error; add base=SingletonTask, or put celery_setnx.AlreadyRunning into "
            "dont_autoretry_for"
        )


class _DecoratedTasks:
    """Celery evaluates this when all tasks of an app exist: bad options then stop the app, not a run."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def __maybe_evaluate__(self) -> None:
        for task in list(self._app._tasks.values()):
            if not isinstance(task, SingletonTask) and hasattr(task.run, _OPTIONS_ATTRIBUTE):
                _guard_of(task)


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def _settle_decorated_tasks(app: Celery) -> None:
    app._pending.append(_DecoratedTasks(app))


def _is_from_worker(request: Context | None) -> bool:
    return request is not None and not request.called_directly and not request.is_eager


def _lock_of(task: Task) -> HeldLock | None:
    return getattr(task.request, "setnx_lock", None)


def _is_body_of(task: Task, function: Callable[..., Any]) -> bool:
    """True if the function is what the task runs, below whatever wraps it; False for a mere call of it."""
    run: Any = task.run
    while run is not None:
        if getattr(run, "__func__", run) is function:
            return True
        run = getattr(run, "__wrapped__", None)
    return False


def _is_bound(task_class: type[Task]) -> bool:
    return not isinstance(inspect.getattr_static(task_class, "run"), staticmethod)


def _signature(task_class: type[Task]) -> inspect.Signature:
    """The signature of a task's function as callers see it, without a bound self."""
    run = inspect.getattr_static(task_class, "run")
    signature = inspect.signature(getattr(run, "__func__", run))
    if not _is_bound(task_class):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _next_call(task_class: type[Task]) -> Any:
    """The `__call__` that follows ours, after a check that those before it lead to ours.

    Raises:
        OptionError: A subclass's `__call__` runs the body without asking us.
    """
    mro = task_class.__mro__
    own = mro.index(SingletonTask)
    for base in mro[:own]:
        code = getattr(vars(base).get("__call__"), "__code__", None)
        if code is not None and "__call__" not in code.co_names:
            raise OptionError(
                f"{base.__qualname__}.__call__ does not call super().__call__(), so its tasks would run "
                "without their lock"
            )
    return next(vars(base)["__call__"] for base in mro[own + 1 :] if "__call__" in vars(base))
