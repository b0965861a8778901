"""Where Celery meets the lock: the `SingletonTask` base class and the `@singleton` decorator."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from celery import Celery, Task, current_task
from celery._state import _task_stack, connect_on_app_finalize
from celery.app.annotations import resolve_all
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded
from celery.local import Proxy
from celery.signals import import_modules

from celery_setnx.arguments import Arguments
from celery_setnx.call.arrived import keep_arrived
from celery_setnx.call.back import ComesBack, Dropped, Waits
from celery_setnx.call.binding import (
    REQUEST,
    has_run,
    loop_refused,
    loops_over,
    refuse_forgotten_base,
    refuse_misplaced,
    refuse_named_base,
    refuse_other_way,
    refuse_own_request,
    refuse_own_start_strategy,
    refuse_own_strategy,
    refuse_unrun,
)
from celery_setnx.call.fanout import CallOutcome, FanningOut, FanOut
from celery_setnx.call.guard import DECORATED, Guard, decorated
from celery_setnx.call.marking import refuse_long_debounce
from celery_setnx.call.message import Call, RunningCall
from celery_setnx.call.outermost import is_celerys_own, is_from_celery, stand_outermost
from celery_setnx.call.publish import publish, refuse_unseen
from celery_setnx.call.switches import EAGER_GUARDED, runs_plainly
from celery_setnx.configured import configured
from celery_setnx.exceptions import AlreadyRunning, LockTimeout, OptionError
from celery_setnx.keys import signature_of
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields
from celery_setnx.options import Options, SingletonOptions, checked, settings_of
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.courier import add_courier
from celery_setnx.run.run import is_running, lock_of, run, warn_of_thread
from celery_setnx.run.started import track_bodies

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = Log("celery_setnx")

_REFUSAL = "_setnx_refusal"
"""The attribute of an app that says what was refused of its settings, and with them all its guarded tasks."""

_IMPORTED = "_setnx_imported"
"""The attribute of an app whose tasks somebody has had imported."""

_LEFT_BEHIND = ("setnx_lock", "_setnx_running", "_setnx_no_body", "_setnx_said")
"""What a delivery leaves on its request. Another may have that request, or a message made of it."""

Function = TypeVar("Function", bound=Callable[..., Any])


class _Settled(NamedTuple):
    """What a task's options come to: a guard, or why they are refused; neither of a task of Celery's own."""

    state: list[Any]  # of the settings
    sources: list[Any]  # what they were settled from, besides
    guard: Guard | None
    refusal: str | None


class SingletonTask(Task):  # type: ignore[misc]
    """A task that runs at most once at a time per key.

    Use it as `@app.task(base=SingletonTask)`. Workers guard every call, however it was sent. Direct calls,
    `.apply()` and eager mode take no lock, unless a test asks for it (see `celery_setnx.testing`).

    Attributes:
        singleton: Options of the task, or of a base class for its tasks; see `Options`. A subclass's options
            override its parents'.

    Example:
        >>> @app.task(base=SingletonTask, singleton={"key": "user_id"})   # doctest: +SKIP
        ... def rebuild(user_id, reason): ...
    """

    abstract = True
    Request = REQUEST
    singleton: SingletonOptions = {}
    _guard: Guard | None = None
    _refusal: str | None = None
    _annotated: tuple[Any, ...] = ()  # options that `task_annotations` has for it
    _settled_as: _Settled | None = None

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Settle the options when Celery binds the task.

        Options that are refused are no error here, which would stop other tasks of the app too, half of them
        bound: each use of this task raises it, and workers do not start (see `check`).
        """
        bound = super().bind(app)
        cls._settle(app)
        return bound

    @classmethod
    def annotate(cls) -> None:
        """Options in `task_annotations` are laid over the task's, where Celery puts them in their place."""
        own: Any = vars(cls).get("singleton")
        super().annotate()
        found = resolve_all(cls._app.annotations, cls)
        cls._annotated = tuple(each["singleton"] for each in found if "singleton" in each)
        if cls._annotated and own is None:
            del cls.singleton
        elif cls._annotated:
            cls.singleton = own

    @classmethod
    def _settle(cls, app: Celery) -> _Settled:
        """Settle the options as they are now, and stand before whatever `__call__` the task has."""
        state, sources, names = configured(app), _sources(cls), _names_of(cls, app)
        name = names[0]
        if name.startswith("celery."):  # Celery's own, when SingletonTask is the app's task class
            cls._settled_as = settled = _Settled(state, sources, None, None)
            return settled
        stand_outermost(cls, "__call__", _in_its_lock)
        for hook, around in _HOOKS.items():
            if not is_celerys_own(cls, hook):  # which does nothing, and which Celery never calls then
                stand_outermost(cls, hook, around)
        if not is_celerys_own(cls, "start_strategy"):
            stand_outermost(cls, "start_strategy", refuse_other_way)
        keep_arrived(cls)
        track_bodies(cls)
        _prepare(app)
        app.steps["consumer"].add("celery_setnx.request:UnreadableMessages")
        if AlreadyRunning not in cls.throws:
            cls.throws = (*cls.throws, AlreadyRunning)  # LockTimeout is one
        guard, refusal = _settled_or_refused(name, lambda: _guard_of_class(cls, app, names))
        if refusal is not None and refusal not in (cls._refusal, vars(app).get(_REFUSAL)):
            logger.error(
                "%s is refused, and so is each of its calls: %s", name, refusal, extra=fields(task=name)
            )
        cls._guard, cls._refusal = guard, refusal
        # At last, and at once: another thread may publish just now.
        cls._settled_as = settled = _Settled(state, sources, guard, refusal)
        return settled

    def _settled(self) -> Guard | None:
        """The guard by the options as they are now; None of a task of Celery's own."""
        app, cls = self._get_app(), type(self)
        settled = cls._settled_as
        if settled is None or settled.state is not configured(app) or settled.sources != _layers(cls):
            settled = cls._settle(app)
        if settled.refusal is not None:
            raise OptionError(settled.refusal)
        return settled.guard

    def __setattr__(self, name: str, value: Any) -> None:
        """Options that a task is given later are its class's: they are honoured, or refused here."""
        if name != "singleton":
            super().__setattr__(name, value)
            return
        cls: Any = type(self)
        if "_singleton_before" not in vars(cls):
            cls._singleton_before = vars(cls).get("singleton")
        cls.singleton = value
        if self.__bound__:
            self._settled()

    def __delattr__(self, name: str) -> None:
        """Options that a task was given go, and those are there again that its class had before."""
        cls: Any = type(self)
        if name != "singleton" or "_singleton_before" not in vars(cls):
            super().__delattr__(name)
            return
        before = cls._singleton_before
        del cls._singleton_before, cls.singleton
        if before is not None:
            cls.singleton = before

    @property
    def lock(self) -> HeldLock | None:
        """The lock that the running call holds, with its `fence`, `ensure()` and `remaining_s()`.

        None if the call is not guarded: a direct or eager call, or `on_redis_error="run"`. If your body may
        run like that, check first: `fence = self.lock.fence if self.lock else None`. In a test,
        `celery_setnx.testing.guarded` makes `.apply()` take the lock. None, with a warning, in threads that
        the body starts: pass them the lock.
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
        """Publish a call, unless it is a duplicate (with `dedupe`).

        Takes what `celery.Task.apply_async` takes, and options for this call alone. A call with a `task_id`,
        `link` or `link_error` is never dropped as a duplicate.

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
            The call's `AsyncResult`. If its `deduplicated` is True, this call was not published, and the
            result is that of the earlier call.

        Raises:
            OptionError: An option of this call is unknown, malformed or cannot travel.
            UnkeyableCall: The call's key cannot be computed.
            DuplicateTask: The call is a duplicate, and `on_duplicate="raise"`.
            LockRefused: Redis refuses to mark the key.
        """
        options.update(task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow)
        guard = self._settled()
        if guard is None:
            return super().apply_async(args, kwargs, **options)
        return publish(guard, super().apply_async, (args, kwargs), singleton, options, self)

    def _get_exec_options(self) -> Any:
        """Celery's `apply_async` asks for these, whoever has called it: also who calls it by name, past ours.

        Nothing else in it tells of the call. Its caller's variables do: they are its parameters.
        """
        if self._refusal is not None:
            raise OptionError(self._refusal)
        guard, caller = self._guard, sys._getframe(1)
        is_celerys = caller.f_globals.get("__name__") == Task.__module__
        if guard is not None and is_celerys and caller.f_code.co_name == "apply_async":
            of_call, mro = caller.f_locals, type(self).__mro__
            own = [base for base in mro[: mro.index(SingletonTask)] if "apply_async" in vars(base)]
            publisher = f"{own[0].__qualname__}.apply_async" if own else "somebody"
            refuse_unseen(guard, publisher, of_call.get("task_id"), of_call.get("options") or {})
        return super()._get_exec_options()

    def map(self, it: Any) -> Any:
        """Refused with OptionError: its bodies would run without a lock. Use `fan_out`, or a group."""
        self._refuse_loop("map")
        return super().map(it)

    def starmap(self, it: Any) -> Any:
        """Refused, as `map` is."""
        self._refuse_loop("starmap")
        return super().starmap(it)

    def chunks(self, it: Any, n: int) -> Any:
        """Refused, as `map` is."""
        self._refuse_loop("chunks")
        return super().chunks(it, n)

    def _refuse_loop(self, what: str) -> None:
        if self._settled() is not None:
            raise loop_refused(what, self.name)

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

        The calls are drawn from the iterable as needed, and sent in batches: a million take no more memory
        than some thousands. Equal calls of one batch are sent once. Later ones are duplicates while that call
        is queued (or running), as with `apply_async`.

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
            How many calls were accepted, were duplicates, and failed with errors of their own.

        Raises:
            FanOutFailed: The broker took no more, Redis refuses to mark a key, or the iterable or a callback
                raised. It says how many calls were sent and were not; the error itself is its cause.
            OptionError: An option is unknown, malformed, or not allowed in a fan-out.
        """
        if self._settled() is None:
            raise OptionError(f"fan_out of {self.name} is refused: it is Celery's own task, and not guarded")
        fanning = FanningOut(self, super().apply_async, singleton, options)
        return fanning.run(calls, batch_size, each, progress)

    def lock_key(self, *args: Any, **kwargs: Any) -> str:
        """The Redis key of the lock for a call with these arguments; only those that `key` names are needed.

        Raises:
            UnkeyableCall: The key cannot be computed.
        """
        return str(self._lock(args, kwargs).name)

    def locked(self, *args: Any, **kwargs: Any) -> Holder | None:
        """The holder of the lock for a call with these arguments, and who waits for it; None if it is free.

        Only the arguments that `key` names are needed. The answer may be outdated at once: to act on it,
        publish the call, and let the lock decide.

        Raises:
            UnkeyableCall: The key cannot be computed.
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self._lock(args, kwargs).holder_and_waiters()

    def holders(self, *args: Any, **kwargs: Any) -> list[Holder]:
        """The holders of the permits for a call with these arguments, at most `limit` of them.

        Raises:
            UnkeyableCall: The arguments have no key.
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self._lock(args, kwargs).holders()

    def _lock(self, args: Any, kwargs: Any) -> SetnxLock:
        guard = self._settled()
        if guard is None:
            raise OptionError(f"{self.name} is Celery's own task, and has no lock")
        arguments = Arguments.given_to(self, args, kwargs)
        return guard.lock(Call(self.name, "", key=guard.asked(arguments)[0]), arguments)


@overload
def singleton(function: Function, /) -> Function: ...
@overload
def singleton(**options: Unpack[SingletonOptions]) -> Callable[[Function], Function]: ...
def singleton(function: Any = None, /, **options: Any) -> Any:
    """Guard a task's function, or give a `SingletonTask` its options. Goes below `@app.task`.

    With `base=SingletonTask` it only supplies the options. With another base class it guards the function
    itself, with lock, renewal, skip, retry and raise. Options that need the base class are refused.

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
    """The lock that the running task holds; None if no guarded task runs."""
    task = current_task._get_current_object() if current_task else None
    if task is None:
        warn_of_thread(None)
        return None
    return lock_of(task)


def lock_for(task: Task, args: Any, kwargs: Any) -> SetnxLock:
    """The lock of a call with these arguments, of a `SingletonTask` or of a task with `@singleton`."""
    if not isinstance(task, Task):
        raise TypeError(f"expected a task that is guarded, and the arguments of a call, not {task!r}")
    if isinstance(task, SingletonTask):
        return task._lock(args, kwargs)
    guard, arguments = guard_for(task), Arguments.given_to(task, args, kwargs)
    return guard.lock(Call(task.name, "", key=guard.asked(arguments)[0]), arguments)


def guard_for(task: Task) -> Guard:
    """The guard of a `SingletonTask`, or of a task with `@singleton`."""
    guard = task._settled() if isinstance(task, SingletonTask) else None
    if guard is not None:
        return guard
    if isinstance(task, SingletonTask) or decorated(task.run) is None:
        raise OptionError(
            f"{task.name} has no lock: add base=SingletonTask, or @singleton(...) below @app.task"
        )
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
        if task is None or isinstance(task, SingletonTask):
            return function(*args, **kwargs)
        by_worker = _is_guarded(task.app, task.request)
        if not (by_worker and _is_body_of(task, guarded)):
            _refuse_loop_over(task.app, lambda looped: _is_body_of(looped, guarded))
            if by_worker:
                _refuse_hidden(task.app, guarded)
            return function(*args, **kwargs)
        if is_running(task.request):
            return function(*args, **kwargs)
        own_args = args[1:] if _is_bound(type(task)) else args
        attempt = Attempt(task, _guard_of(task), task.request, own_args, kwargs)
        return _ended(attempt, lambda: has_run(task.name, function(*args, **kwargs)))

    setattr(guarded, DECORATED, own)
    return guarded


def _in_its_lock(following: Callable[..., Any], task: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What stands before every `__call__` of a task: the lock is taken if a worker calls, and until the last
    of them has returned. Plainly if the program calls.
    """
    request = task.request_stack.top
    if request is None or request.called_directly:
        _refuse_loop_over(task._get_app(), lambda looped: looped is task)
        return following(*args, **kwargs)
    if is_running(request):
        return following(*args, **kwargs)
    for name in _LEFT_BEHIND:
        vars(request).pop(name, None)
    guard = task._settled()
    if guard is None or not _is_guarded(guard.app, request):
        return following(*args, **kwargs)
    request._setnx_no_body = True
    attempt = Attempt(task, guard, request, args, kwargs)
    if is_from_celery(following) or is_celerys_own(type(task), "__call__"):
        following, request._protected = task.run, 1  # as Celery's own __call__: the request is used up

    def body() -> Any:
        vars(request).pop("_setnx_no_body", None)
        begin = vars(request).pop("_setnx_start", None)
        given, named = begin(args, kwargs) if isinstance(begin, partial) else (args, kwargs)
        return has_run(task.name, following(*given, **named))

    return _ended(attempt, body)


def _ended(attempt: Attempt, body: Callable[[], Any]) -> Any:
    """What the attempt ends with. What is no error has no traceback: Celery would write it out for nobody."""
    try:
        return run(attempt, body)
    except (Waits, Dropped, ComesBack) as ours:
        raise ours.with_traceback(None) from None


def _as_body_begins(following: Callable[..., Any], task: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What stands before `before_start`: a call whose body does not begin has none of its task's hooks."""
    request = task.request_stack.top
    if request is None or request.called_directly:
        return following(*args, **kwargs)
    guard = task._settled()
    if guard is None or not _is_guarded(guard.app, request) or is_running(request):
        return following(*args, **kwargs)
    request._setnx_start = partial(_begin, partial(following, *args, **kwargs), *args[1:3])
    return None


def _begin(before_start: Callable[[], Any], told: Any, named: Any, *given: Any) -> tuple[Any, Any]:
    """Call the hook: the arguments that the body gets, which are the hook's if it has changed them."""

    def of_hook() -> list[Any]:
        return [*told, *named, *named.values()]

    before = of_hook()
    before_start()
    now = of_hook()
    is_changed = len(now) != len(before) or any(one is not other for one, other in zip(now, before))
    return (told, named) if is_changed else given


def _as_retry_is_sent(following: Callable[..., Any], task: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What stands before `on_retry`: if that raised, Celery would store FAILURE for a call that goes on.

    Then its mark, and the lock that is held for its retry, would be free. An eager call shows the error.
    """
    request = task.request_stack.top
    try:
        return _if_body_began(following, task, args, kwargs)
    except MemoryError:
        raise  # it ends the process
    except Exception:
        running = RunningCall.on(request)
        if running is None or request.is_eager:
            raise
        text = "on_retry of %s (key %s) has raised. Its retry is on its way all the same and keeps both lock "
        text += "and mark, and the result stays RETRY. Fix the hook."
        logger.exception(text, running, running.call.key, extra=fields(of=running.call))
        return None


def _if_body_began(following: Callable[..., Any], task: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """What stands before those hooks that end what `before_start` has begun, and before `on_success`."""
    request = task.request_stack.top
    has_begun = request is None or "_setnx_no_body" not in vars(request)  # none: a worker's parent calls
    return following(*args, **kwargs) if has_begun else None


# Not `on_failure`: a call that fails for its lock has failed.
_HOOKS = {
    "before_start": _as_body_begins,
    "on_retry": _as_retry_is_sent,
    **dict.fromkeys(("on_success", "after_return"), _if_body_began),
}


def _refuse_loop_over(app: Celery, is_it: Callable[[Task], bool]) -> None:
    """Refuse to run a body that `map` or `starmap` calls as a function; a canvas may come from anywhere."""
    for caller in _task_stack.stack[-2:]:
        looped = app._tasks.get(loops_over(caller))
        if looped is not None and _is_guarded(app, caller.request) and is_it(looped):
            raise loop_refused(caller.name.removeprefix("celery."), looped.name)


def _names_of(task: type[SingletonTask], app: Celery) -> list[str]:
    """The names of a class's tasks, one as a rule: a task may have got its name in its constructor."""
    named = sorted(each.name for each in list(app._tasks.values()) if type(each) is task)
    return named or [task.name or app.gen_task_name(task.__name__, task.__module__)]


def _sources(task: type[SingletonTask]) -> list[Any]:
    """What a task has its options from, as it is now: copies, as any of it may be changed later."""
    return [dict(layer) if isinstance(layer, Mapping) else layer for layer in _layers(task)]


def _layers(task: type[SingletonTask]) -> list[Any]:
    """The same, which is equal for as long as nothing is changed; asked with each call."""
    return [*[vars(base).get("singleton") for base in task.__mro__], task.ignore_result]


def _settled_or_refused(name: str, settle: Callable[[], Guard | None]) -> tuple[Guard | None, str | None]:
    """The guard that settling a task's options leads to, or why it is refused: whatever that has raised."""
    try:
        return settle(), None
    except OptionError as error:
        return None, str(error)
    except SoftTimeLimitExceeded:
        raise  # it may strike here, in a body that publishes
    except Exception as error:  # noqa: BLE001 - of a Request that cannot be imported, and the like
        return None, f"{name} cannot be guarded ({type(error).__name__}: {error}); fix that"


def _guard_of_class(task: type[SingletonTask], app: Celery, names: list[str]) -> Guard:
    """The guard of a task class, unless it is refused."""
    name = names[0]
    if len(names) > 1:
        raise OptionError(f"the tasks {', '.join(names)} are one class; give each a class of its own")
    layers = [vars(base)["singleton"] for base in reversed(task.__mro__) if "singleton" in vars(base)]
    by_decorator = decorated(task.run)
    if by_decorator is not None:
        if vars(task).get("singleton"):
            raise OptionError(f"{name} has both @singleton(...) and singleton={{...}}; keep one of them")
        layers.append(by_decorator)
    refuse_own_request(task, name)
    refuse_own_strategy(task, name)
    refuse_misplaced(task, name)
    if is_celerys_own(task, "__call__"):  # else a base class may run the coroutine, under the lock
        refuse_unrun(inspect.getattr_static(task, "run"), name)
    if refusal := _refusal_of_settings(app):
        raise OptionError(refusal)
    return _new_guard(app, task, name, [*layers, *task._annotated])


def _guard_of(task: Task) -> Guard:
    """The guard of a decorated function under a base class that is not ours, by the settings as they are."""
    guard: Guard | None = vars(task).get("_setnx_guard")
    if guard is None or guard.state is not configured(task.app):
        guard = _guard_of_function(task)
        _prepare(task.app)
        if AlreadyRunning not in task.throws:
            task.throws = (*task.throws, AlreadyRunning)
        task._setnx_guard = guard
    return guard


def _guard_of_function(task: Task) -> Guard:
    """The same, unless it is refused."""
    refuse_own_strategy(type(task), task.name)
    refuse_own_start_strategy(type(task), task.name)
    refuse_misplaced(type(task), task.name)
    refuse_forgotten_base(type(task), task.name)
    guard = _new_guard(task.app, type(task), task.name, [decorated(task.run) or {}])
    options = guard.options
    needy = [name for name in ("hold_on_retry", "dedupe") if getattr(options, name)]
    if options.on_conflict in ("wait", "join"):
        needy.append(f"on_conflict={options.on_conflict!r}")
    if options.on_conflict == "auto" and options.rate:  # which waits
        needy.append("a rate with on_conflict='auto'")
    for name in needy:
        raise OptionError(f"{name} of {task.name} needs the base class: add base=SingletonTask")
    _refuse_autoretried_raise(task, options)
    return guard


def _new_guard(app: Celery, task: type[Task], name: str, layers: list[Mapping[str, Any]]) -> Guard:
    signature, wrapper = _signature(task), _signature(task, follow_wrapped=False)
    checks: dict[str, Any] = {
        "typing": bool(task.typing),
        "wrapper": None if wrapper == signature else wrapper,
    }
    return Guard(app, name, signature, layers, ignores_result=bool(task.ignore_result), **checks)


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
            f"{task.name} has @singleton with on_conflict='raise' or max_wait, and its autoretry_for would "
            "retry that error; add base=SingletonTask, or add celery_setnx.AlreadyRunning to "
            "dont_autoretry_for"
        )


def check(app: Celery) -> None:
    """Refuse an app with a wrong option; call it when a process that publishes starts.

    A worker does this by itself. It imports the modules of the app's tasks, and needs no server.

    Args:
        app: The app.

    Raises:
        OptionError: A setting, or an option of a task, is refused. The message names all of them.

    Example:
        >>> check(app)   # doctest: +SKIP
    """
    import_tasks(app)
    refuse(app)


def import_tasks(app: Celery) -> None:
    """Import the modules of an app's tasks, as a worker does; once, for others hear of it, too."""
    if _IMPORTED not in vars(app) and not app.loader.worker_initialized:
        vars(app)[_IMPORTED] = True  # already: Django's checks are run by a receiver
        try:
            app.loader.import_default_modules()
        except BaseException:
            vars(app).pop(_IMPORTED, None)
            raise
    refuse_named_base()


@import_modules.connect  # type: ignore[untyped-decorator]
def _note_import(sender: Any, **_details: Any) -> None:
    if isinstance(sender, Celery):
        vars(sender)[_IMPORTED] = True


def refuse(app: Celery) -> None:
    """Refuse an app that has a wrong option, in one error for all of them."""
    app.finalize()
    found = dict.fromkeys(map(str, [*refusals(app), *_long_debounces(app)]))
    if found:
        raise OptionError("\n".join(found))


def _long_debounces(app: Celery) -> Iterator[OptionError]:
    """What the app's broker does not allow; not when a task is bound, before all settings are known."""
    for task in list(app._tasks.values()):
        guard = task._guard if isinstance(task, SingletonTask) else None
        if guard is not None:
            try:
                refuse_long_debounce(app, task.name, guard.options)
            except OptionError as error:
                yield error


def refusals(app: Celery) -> list[OptionError]:
    """Settle the names of the settings, and all tasks anew: what is refused of them. What is refused goes on
    refusing its calls.
    """
    found = _refusals_beside(app)
    for task in list(app._tasks.values()):
        if isinstance(task, SingletonTask):
            task._settle(task._get_app())
            if task._refusal is not None:
                found.append(OptionError(task._refusal))
    return found


def _refusals_beside(app: Celery) -> list[OptionError]:
    """What is refused of the names of the settings, and of tasks of other base classes."""
    text = _refusal_of_settings(app)
    found = [OptionError(text)] if text else []
    plain = [task for task in app._tasks.values() if not isinstance(task, SingletonTask)]
    found.extend(refusal for refusal in map(_refusal_of_plain, plain) if refusal is not None)
    if found:
        _prepare(app)  # so that workers do not start
    return found


def _refusal_of_settings(app: Celery) -> str:
    """What is refused of the settings; nothing if they are sound."""
    text = ""
    try:
        settings_of(app)
    except OptionError as error:
        text = str(error)
    if text and vars(app).get(_REFUSAL) != text:
        logger.error("Each call of a guarded task of %s is refused: %s", app.main or "the app", text)
    vars(app)[_REFUSAL] = text
    return text


def _refusal_of_plain(task: Task) -> OptionError | None:
    """Settle a task of another base class: its calls are refused where they are published, too."""
    vars(task).pop("_setnx_guard", None)
    if vars(task).pop("_refusal", None) is not None:
        del task.apply_async
    _guard, refusal = _settled_or_refused(task.name, partial(_guard_of_plain, task))
    if refusal is None:
        return None
    text = "%s is refused, and so is each of its calls: %s"
    logger.error(text, task.name, refusal, extra=fields(task=task.name))
    task._refusal = refusal
    task.apply_async = partial(_refuse_call, task)
    return OptionError(refusal)


def _guard_of_plain(task: Task) -> Guard | None:
    """The guard of a task of another base class, if its function is decorated; unless it is refused."""
    if decorated(task.run) is None:
        refuse_forgotten_base(type(task), task.name)
        return None
    keep_arrived(task)
    track_bodies(task)
    return _guard_of(task)


def _refuse_call(task: Task, *_args: Any, **_kwargs: Any) -> Any:
    """Stands for `apply_async` of a task of another base class that is refused."""
    raise OptionError(task._refusal)


class _OtherTasks:
    """Celery evaluates this when all tasks of an app exist. A wrong option stops no other task: what is
    refused is logged, and refuses its calls.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    def __maybe_evaluate__(self) -> None:
        _refusals_beside(self._app)  # Celery binds the others next


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def _settle_at_the_end(app: Celery) -> None:
    refuse_named_base()  # unless Celery has come to that task first: its finalizers have no order
    app._pending.append(_OtherTasks(app))


def _is_guarded(app: Celery, request: Context | None) -> bool:
    """True if a worker calls; also eagerly, as a test may say. Not if everything runs plainly."""
    if request is None or request.called_directly or runs_plainly(app):
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


def _refuse_hidden(app: Celery, function: Callable[..., Any]) -> None:
    """Refuse a function with @singleton that a worker runs, and that is the body of no task one can see."""
    if not any(_is_body_of(task, function) for task in list(app._tasks.values())):
        raise OptionError(
            f"@singleton on {function.__qualname__} guards nothing: no task is known to run this function; "
            "if there is a decorator between it and @app.task, that needs functools.wraps"
        )


def _is_bound(task_class: type[Task]) -> bool:
    return not isinstance(inspect.getattr_static(task_class, "run"), staticmethod)


def _signature(task_class: type[Task], *, follow_wrapped: bool = True) -> inspect.Signature:
    """The signature of a task's function, or of a decorator's around it, without a bound self.

    Not of `@singleton`, which takes anything.
    """
    run = inspect.getattr_static(task_class, "run")
    run = getattr(run, "__func__", run)
    while getattr(run, "__globals__", None) is globals():
        run = run.__wrapped__
    signature = signature_of(run, follow_wrapped=follow_wrapped)
    parameters = list(signature.parameters.values())
    if not _is_bound(task_class) or not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=parameters[1:])
