"""What a task may not be, because its lock would not hold or nobody would read its options.

Refused when the task is bound, or when its app is finalized. What may be meant otherwise is a warning of
`check` (see `doctor.unread`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import AsyncGeneratorType, CoroutineType
from typing import Any

from celery import Task, _state
from celery.utils.imports import symbol_by_name

from celery_setnx.call.outermost import is_celerys_own
from celery_setnx.exceptions import OptionError
from celery_setnx.options import NAMES

REQUEST = "celery_setnx.request:SingletonRequest"
"""Only a name: to import it connects a worker's signals, and costs those who only publish."""

_STRATEGY = "celery.worker.strategy:default"
# Options with names that a task may well have for itself.
PLAIN_WORDS = ("key", "scope", "lease", "retry_delay", "retry_delay_max", "max_wait", "on_duplicate")
_OURS_ALONE = frozenset(NAMES) - frozenset(PLAIN_WORDS)


def refuse_own_request(task: type[Task], name: str) -> None:
    """Refuse a Request that does not look after our calls. Its default is compared by name."""
    if task.Request == REQUEST or issubclass(symbol_by_name(task.Request), symbol_by_name(REQUEST)):
        return
    raise OptionError(
        f"{name} has its own Request ({_shown(task.Request)}), which is not a "
        "celery_setnx.request.SingletonRequest: a worker could not free the marks of revoked calls, or the "
        "lock of a dead child process; derive it from SingletonRequest"
    )


def refuse_own_strategy(task: type[Task], name: str) -> None:
    """Refuse a task whose messages do not go Celery's own way to the pool."""
    if task.Strategy != _STRATEGY and symbol_by_name(task.Strategy) is not symbol_by_name(_STRATEGY):
        raise OptionError(_batching(name, f"its own Strategy ({_shown(task.Strategy)})"))


def refuse_own_start_strategy(task: type[Task], name: str) -> None:
    """Refuse it where nobody would see whether that leads to Celery's own (see `refuse_other_way`)."""
    if not is_celerys_own(task, "start_strategy"):
        found = f"its own start_strategy ({_shown(task.start_strategy)})"
        raise OptionError(f"{_batching(name, found)}. If it calls Celery's own, add base=SingletonTask")


def refuse_other_way(following: Callable[..., Any], task: Any, args: Any, kwargs: Any) -> Any:
    """Have a worker start a task's strategy, and refuse it unless that was Celery's own.

    Which makes a class of requests for the task, and nobody else does.
    """
    requests = symbol_by_name(task.Request)
    before = requests.__subclasses__()
    handler = following(*args, **kwargs)
    if all(each in before for each in requests.__subclasses__()):
        found = f"its own start_strategy ({_shown(following)})"
        raise OptionError(_batching(task.name, found))
    return handler


def _batching(name: str, found: str) -> str:
    return (
        f"{name} has {found}: its calls do not take Celery's usual way to the pool, as with celery-batches, "
        "so they would run without their lock. Lock in the body with SetnxLock, or publish calls of another, "
        "guarded task from it"
    )


def loops_over(task: Task) -> str:
    """Name of the task whose bodies a running `map` or `starmap` calls; empty if it is none of those."""
    if task.name not in ("celery.map", "celery.starmap"):
        return ""
    looped = {"task": next(iter(task.request.args or ()), None), **(task.request.kwargs or {})}["task"]
    return str(looped.get("task")) if isinstance(looped, Mapping) else ""


def loop_refused(what: str, name: str) -> OptionError:
    """What becomes of Celery's `map`, `starmap` and `chunks` of a guarded task."""
    return OptionError(
        f"{what} of {name} is refused: Celery runs its bodies as plain functions in one message, without "
        "their lock. Publish one call each: with fan_out(...), or as a group of signatures if you need the "
        "results"
    )


def refuse_unrun(function: Any, name: str) -> None:
    """Refuse a function whose body has not run when it returns: its lock would be given back before."""
    function = _below_wrappers(function)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise OptionError(_unawaited(name, "is an async def"))
    if inspect.isgeneratorfunction(function):
        raise OptionError(
            f"{name} is a generator function: Celery only calls it, so its body never runs; make it an "
            "ordinary function"
        )


def has_run(name: str, result: Any) -> Any:
    """What a body returned; a coroutine has not begun, and would run without the lock, if at all."""
    if isinstance(result, (CoroutineType, AsyncGeneratorType)):
        if isinstance(result, CoroutineType):
            result.close()
        raise OptionError(_unawaited(name, "returns a coroutine"))
    return result


def refuse_misplaced(task: type[Task], name: str) -> None:
    """Refuse options that a guarded task has beside `singleton`, where nobody reads them."""
    ours = {o for o in _OURS_ALONE if _is_given(task, o) and not _is_anothers(task, o)}
    if ours:
        found = sorted(ours | set(PLAIN_WORDS) & set(vars(task)), key=NAMES.index)
        options = {option: getattr(task, option) for option in found}
        raise OptionError(f"{_misplaced(name, options)}, or give the same to @singleton(...)")


def refuse_misplaced_in_call(options: Mapping[str, Any], name: str) -> None:
    """Refuse options of ours among those of `apply_async`: they would be properties of the message."""
    if not _OURS_ALONE.isdisjoint(options):
        found = {option: options[option] for option in NAMES if option in options}
        raise OptionError(_misplaced(f"a call of {name}", found))


def refuse_forgotten_base(task: type[Task], name: str) -> None:
    """Refuse a plain task that has options of ours."""
    options = vars(task).get("singleton")
    if (
        is_options(options)
        and not is_known(task, "singleton")
        and not name.startswith(("celery.", "celery_setnx."))
    ):
        raise OptionError(
            f"{name} has singleton={options!r}, but is no SingletonTask: its calls would run without a lock; "
            "add base=SingletonTask, or use @singleton(...) below @app.task"
        )


def refuse_named_base() -> None:
    """Refuse a base class that is given by its name: Celery derives a class from the text itself."""
    for declared in list(_state._on_app_finalizers):
        function, options = _declaration_in(declared)
        base = options.get("base")
        if isinstance(base, str) and "SingletonTask" in base:
            raise OptionError(
                f"{options.get('name') or _shown(function)} has base={base!r}, which is text, but Celery "
                "needs the class; write base=SingletonTask, and import that from celery_setnx"
            )


def is_options(value: Any) -> bool:
    """Whether this is a mapping of options of ours, and not an empty one."""
    return isinstance(value, Mapping) and bool(value) and set(value) <= set(NAMES)


def is_known(task: type[Task], attribute: str) -> bool:
    """Whether a base class of a task has an attribute too: then that is who reads it."""
    return any(attribute in vars(base) for base in task.__mro__[1:])


def is_code(value: Any) -> bool:
    """Whether an attribute of a class is a method, a property or the like."""
    return callable(value) or hasattr(value, "__get__")


def _declaration_in(declared: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function and the options of a task that `@app.task` or `@shared_task` has declared for all apps."""
    is_celerys = getattr(declared, "__module__", None) in ("celery.app", "celery.app.base")
    held = [cell.cell_contents for cell in declared.__closure__] if is_celerys else []
    options = next((value for value in held if isinstance(value, dict)), {})
    return next(filter(callable, held), None), options


def _misplaced(who: str, options: Mapping[str, Any]) -> str:
    return (
        f"{who} has {', '.join(options)} outside of singleton={{...}}, where it has no effect; "
        f"write singleton={options!r}"
    )


def _is_given(task: type[Task], option: str) -> bool:
    """A method of such a name is not meant as an option, but for `on_conflict`."""
    value = getattr(task, option, None)
    return value is not None and (option == "on_conflict" or not is_code(value))


def _is_anothers(task: type[Task], option: str) -> bool:
    """Whether a base class that is no SingletonTask has an attribute of that name, and so reads it."""
    return any(option in vars(base) for base in task.__mro__[1:] if not hasattr(base, "_guard"))


def _below_wrappers(function: Any) -> Callable[..., Any]:
    """A task's function, below what Celery puts around it; a user's own decorator may run the coroutine."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        module = str(getattr(function, "__globals__", {}).get("__name__"))
        if module.partition(".")[0] != "celery":
            break
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def _unawaited(name: str, what: str) -> str:
    return (
        f"{name} {what}: Celery does not await it, so its lock would be released before its body runs; "
        "make it an ordinary def that runs the coroutine: return asyncio.run(your_coroutine(...)), or with "
        "asgiref return async_to_sync(your_coroutine)(...)"
    )


def _shown(thing: Any) -> str:
    return thing if isinstance(thing, str) else f"{thing.__module__}.{getattr(thing, '__qualname__', thing)}"
