"""Where Celery meets the lock: the `SingletonTask` base class and the `@singleton` decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery import Celery, Task, current_task
from celery._state import connect_on_app_finalize
from celery.app.task import Context
from celery.local import Proxy

from celery_setnx.arguments import Arguments
from celery_setnx.call.arrived import keep_arrived
from celery_setnx.call.binding import (
    REQUEST,
    has_run,
    leads_on,
    refuse_forgotten_base,
    refuse_misplaced,
    refuse_own_request,
    refuse_own_strategy,
    refuse_unrun,
)
from celery_setnx.call.fanout import CallOutcome, FanningOut, FanOut
from celery_setnx.call.guard import DECORATED, Guard
from celery_setnx.call.message import Call
from celery_setnx.call.publish import publish
from celery_setnx.call.switches import DISABLED, EAGER_GUARDED
from celery_setnx.exceptions import AlreadyRunning, LockTimeout, OptionError
from celery_setnx.keys import signature_of
from celery_setnx.lock.lock import HeldLock, SetnxLock
from celery_setnx.lock.record import Holder
from celery_setnx.options import Options, SingletonOptions, checked, refuse_unknown_settings
from celery_setnx.run.courier import add_courier
from celery_setnx.run.run import Run, lock_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Function = TypeVar("Function", bound=Callable[..., Any])


class SingletonTask(Task):  # type: ignore[misc]
    """A task that runs at most once at a time per key.

    Use it as `@app.task(base=SingletonTask)`. Calls from a worker are guarded, however they were sent;
    direct calls, `.apply()` and eager mode are not, unless a test asks for it (see `celery_setnx.testing`).

    Attributes:
        singleton: Options of the task, or of a base class for its tasks; see `Options`. A subclass's
            options are laid over its parents'.

    Example:
        >>> @app.task(base=SingletonTask, singleton={"key": "user_id"})   # doctest: +SKIP
        ... def rebuild(user_id, reason): ...
    """

    abstract = True
    Request = REQUEST
    singleton: SingletonOptions = {}
    _guard: Guard | None = None
    _calls_run = True

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Settle the options when Celery binds the task; what cannot be combined is an OptionError."""
        bound = super().bind(app)
        name = cls.name or app.gen_task_name(cls.__name__, cls.__module__)
        if name.startswith("celery."):  # Celery's own, when SingletonTask is the app's task class
            return bound
        layers = [vars(base)["singleton"] for base in reversed(cls.__mro__) if "singleton" in vars(base)]
        decorated = getattr(cls.run, DECORATED, None)
        if decorated is not None:
            if vars(cls).get("singleton"):
                raise OptionError(f"{name} has both @singleton(...) and singleton={{...}}; keep one of them")
            layers.append(decorated)
        cls._calls_run = _next_call(cls) is vars(Task)["__call__"]
        refuse_own_request(cls, name)
        refuse_own_strategy(cls, name)
        refuse_misplaced(cls, name)
        if cls._calls_run:  # else a base class may run the coroutine, under the lock
            refuse_unrun(inspect.getattr_static(cls, "run"), name)
        cls._guard = _new_guard(app, cls, name, layers)
        keep_arrived(cls)
        _prepare(app)
        app.steps["consumer"].add("celery_setnx.request:UnreadableMessages")
        if AlreadyRunning not in cls.throws:
            cls.throws = (*cls.throws, AlreadyRunning)  # LockTimeout is one
        return bound

    @property
    def lock(self) -> HeldLock | None:
        """The lock that the running call holds, with its `fence`, `ensure()` and `remaining_s()`.

        None where a call is not guarded: direct, eager, or under `on_redis_error="run"`. A body that is also
        called like that asks first: `fence = self.lock.fence if self.lock else None`. In a test,
        `celery_setnx.testing.guarded` has `.apply()` take the lock.
        """
        return lock_of(self)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        singleton: SingletonOptions | None = None,
        **options: Any,
    ) -> Any:
        """Publish a call, its finished key in a header, unless it is a duplicate (with `dedupe`).

        Takes what `celery.Task.apply_async` takes, and options for this call alone. Only a call without a
        `task_id` is ever dropped as a duplicate; one with `link` or `link_error` is published all the same.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            task_id: As in Celery.
            producer: As in Celery.
            link: As in Celery.
            link_error: As in Celery.
            shadow: As in Celery.
            singleton: Options for this call alone. Defaults to none.
            options: Further options of `celery.Task.apply_async`.

        Returns:
            The call's `AsyncResult`; or, if its `deduplicated` is True, that of the call which is queued or
            running, and this one was not published.

        Raises:
            OptionError: An option of this call is unknown, malformed or cannot travel.
            UnkeyableCall: The call's key cannot be computed.
            DuplicateTask: The call is a duplicate, and `on_duplicate="raise"`.
            LockRefused: Redis refuses to mark the key.
        """
        options.update(task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow)
        if self._guard is None:
            return super().apply_async(args, kwargs, **options)
        return publish(self._guard, super().apply_async, (args, kwargs), singleton, options, self)

    def fan_out(
        self,
        calls: Iterable[Any],
        *,
        singleton: SingletonOptions | None = None,
        batch_size: int = 1000,
        each: Callable[[CallOutcome], Any] | None = None,
        progress: Callable[[FanOut], Any] | None = None,
        **options: Any,
    ) -> FanOut:
        """Publish many calls, several times as fast as one by one, each key once (with `dedupe`).

        The calls are drawn from the iterable as they are needed, and sent in batches: a million take no more
        memory than some thousands. Equal calls that are drawn before the first of them is sent are one call;
        later ones are duplicates while it is queued (or running), as if each had been published by itself.

        Args:
            calls: For each call a tuple or list of positional arguments, a mapping of keyword arguments, or a
                signature of this task, of which the arguments count.
            singleton: Options for these calls. Defaults to none.
            batch_size: How many distinct calls are sent at a time. Defaults to 1000.
            each: Called with the `CallOutcome` of every call; `outcomes.append` collects them. Defaults to
                nothing.
            progress: Called after every batch with the counts so far. Defaults to nothing.
            options: Options of `celery.Task.apply_async` for all calls, such as `queue` or `countdown`.

        Returns:
            How many calls were accepted, were duplicates, and failed for their own sake.

        Raises:
            FanOutFailed: The broker took no more, Redis refuses to mark a key, or the iterable or a callback
                raised: how many calls were sent and were not. The error itself is its cause.
            OptionError: An option is unknown, malformed, or nothing that a fan-out takes.
        """
        if self._guard is None:
            raise OptionError(f"fan_out of {self.name}: it is a task of Celery's own, and is not guarded")
        fanning = FanningOut(self, super().apply_async, singleton, options)
        return fanning.run(calls, batch_size, each, progress)

    def lock_key(self, *args: Any, **kwargs: Any) -> str:
        """The Redis key of the lock of a call with these arguments.

        Raises:
            UnkeyableCall: The key cannot be computed.
        """
        return str(self._lock(args, kwargs).name)

    def locked(self, *args: Any, **kwargs: Any) -> Holder | None:
        """Who holds the lock of a call with these arguments now, and who waits for it; None if nobody does.

        A glance, true when it was taken: to act on it, publish the call, and let the lock decide.

        Raises:
            UnkeyableCall: The key cannot be computed.
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self._lock(args, kwargs).holder_and_waiters()

    def holders(self, *args: Any, **kwargs: Any) -> list[Holder]:
        """Who holds the permits of a call with these arguments now: as many as run, `limit` of them at most.

        Raises:
            UnkeyableCall: The arguments have no key.
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self._lock(args, kwargs).holders()

    def _lock(self, args: Any, kwargs: Any) -> SetnxLock:
        if self._guard is None:
            raise OptionError(f"{self.name} is a task of Celery's own, and has no lock")
        return self._guard.lock(Call(self.name, ""), Arguments.given_to(self, args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock if a worker calls; plainly if the program does."""
        request = self.request_stack.top
        guard = self._guard
        if guard is None or not _is_guarded(guard.app, request) or request._protected:
            return super().__call__(*args, **kwargs)
        run = Run(self, guard, request, args, kwargs)
        if not self._calls_run:
            body: Callable[..., Any] = super().__call__
        else:
            body, request._protected = self.run, 1  # as Celery's own __call__: the request is used up
        return run.execute(lambda: has_run(self.name, body(*args, **kwargs)))


@overload
def singleton(function: Function, /) -> Function: ...
@overload
def singleton(**options: Unpack[SingletonOptions]) -> Callable[[Function], Function]: ...
def singleton(function: Any = None, /, **options: Any) -> Any:
    """Guard a task's function, or give a `SingletonTask` its options. Goes below `@app.task`.

    With `base=SingletonTask` it only supplies the options. With another base class it guards the function
    itself: lock, renewal, skip, retry and raise; what needs the base class is refused.

    Args:
        function: The task's function, when used without parentheses.
        options: See `Options`.

    Raises:
        OptionError: An option is unknown or malformed, needs the base class, the decorator stands above
            `@app.task`, or the function is an `async def` or a generator.

    Example:
        >>> @app.task   # doctest: +SKIP
        ... @singleton(key="account_id")
        ... def settle(account_id): ...
    """
    if function is None:
        return partial(_decorated, options=options)
    return _decorated(function, options=options)


def current_lock() -> HeldLock | None:
    """The lock that the running task holds, or None where no guarded task runs."""
    task = current_task._get_current_object() if current_task else None
    return None if task is None else lock_of(task)


def lock_for(task: Task, args: Any, kwargs: Any) -> SetnxLock:
    """The lock of a call with these arguments, of a `SingletonTask` or of a task with `@singleton`."""
    if not isinstance(task, Task):
        raise TypeError(f"expected a task that is guarded, and the arguments of a call, not {task!r}")
    if isinstance(task, SingletonTask):
        return task._lock(args, kwargs)
    return guard_for(task).lock(Call(task.name, ""), Arguments.given_to(task, args, kwargs))


def guard_for(task: Task) -> Guard:
    """The guard of a `SingletonTask`, or of a task with `@singleton`."""
    if isinstance(task, SingletonTask) and task._guard is not None:
        return task._guard
    if isinstance(task, SingletonTask) or not hasattr(task.run, DECORATED):
        raise OptionError(f"{task.name} has no lock: it is no SingletonTask of yours, and has no @singleton")
    return _guard_of(task)


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
    refuse_unrun(function, function.__qualname__)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        task = current_task._get_current_object() if current_task else None
        if (
            task is None
            or isinstance(task, SingletonTask)
            or not _is_guarded(task.app, task.request)
            or lock_of(task) is not None
            or not _is_body_of(task, guarded)
        ):
            return function(*args, **kwargs)
        own_args = args[1:] if _is_bound(type(task)) else args
        run = Run(task, _guard_of(task), task.request, own_args, kwargs)
        return run.execute(lambda: has_run(task.name, function(*args, **kwargs)))

    setattr(guarded, DECORATED, own)
    return guarded


def _guard_of(task: Task) -> Guard:
    """The guard of a decorated function under a base class that is not ours; made once per task."""
    guard: Guard | None = vars(task).get("_setnx_guard")
    if guard is None:
        refuse_own_strategy(type(task), task.name)
        refuse_misplaced(type(task), task.name)
        guard = _new_guard(task.app, type(task), task.name, [getattr(task.run, DECORATED)])
        _prepare(task.app)
        needy = [name for name in ("hold_on_retry", "dedupe") if getattr(guard.options, name)]
        if guard.options.on_conflict in ("wait", "join"):
            needy.append(f"on_conflict={guard.options.on_conflict!r}")
        for name in needy:
            raise OptionError(f"{name} of {task.name} needs the base class: add base=SingletonTask")
        _refuse_autoretried_raise(task, guard.options)
        if AlreadyRunning not in task.throws:
            task.throws = (*task.throws, AlreadyRunning)
        task._setnx_guard = guard
    return guard


def _new_guard(app: Celery, task: type[Task], name: str, layers: list[Mapping[str, Any]]) -> Guard:
    signature, ignores_result, typing = _signature(task), bool(task.ignore_result), bool(task.typing)
    return Guard(app, name, signature, layers, ignores_result=ignores_result, typing=typing)


def _prepare(app: Celery) -> None:
    """Have the workers of an app look after its lines, and try its lock server when they start."""
    add_courier(app)
    app.steps["worker"].add("celery_setnx.doctor.trial:LockServerCheck")
    app.steps["consumer"].add("celery_setnx.request:OriginOfMessages")


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


def refusals(app: Celery) -> Iterator[OptionError]:
    """Settle the names of the settings, and the tasks that no bind has settled: what is refused of them."""
    settlers: list[Callable[[], Any]] = [partial(refuse_unknown_settings, app.conf, app.namespace)]
    for task in app._tasks.values():
        if isinstance(task, SingletonTask):
            if task._guard is None:  # Celery's own; or refused before, and whoever was told has gone on
                settlers.append(partial(task.bind, app))
        elif hasattr(task.run, DECORATED):
            settlers.append(partial(_settle_decorated, task))
        else:
            settlers.append(partial(refuse_forgotten_base, type(task), task.name))
    for settle in settlers:
        try:
            settle()
        except OptionError as error:
            yield error


def _settle_decorated(task: Task) -> None:
    """Not while it runs: its requests are kept elsewhere from now on."""
    if "_setnx_guard" not in vars(task):
        keep_arrived(task)
    _guard_of(task)


class _OtherTasks:
    """Celery evaluates this when all tasks of an app exist: bad options then stop the app, not a run."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def __maybe_evaluate__(self) -> None:
        for error in refusals(self._app):
            raise error


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def _settle_at_the_end(app: Celery) -> None:
    app._pending.append(_OtherTasks(app))


def _is_guarded(app: Celery, request: Context | None) -> bool:
    """True if a worker calls; also eagerly, and not even then, as a test may say."""
    if request is None or request.called_directly or DISABLED.is_on(app):
        return False
    return not request.is_eager or EAGER_GUARDED.is_on(app)


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
    signature = signature_of(getattr(run, "__func__", run))
    if not _is_bound(task_class):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _next_call(task_class: type[Task]) -> Any:
    """The `__call__` that follows ours, after a check that those before it lead to ours."""
    mro = task_class.__mro__
    own = mro.index(SingletonTask)
    for base in mro[:own]:
        if not leads_on(vars(base).get("__call__"), "__call__"):
            raise OptionError(
                f"{base.__qualname__}.__call__ does not call super().__call__(), so its tasks would run "
                "without their lock"
            )
    return next(vars(base)["__call__"] for base in mro[own + 1 :] if "__call__" in vars(base))
