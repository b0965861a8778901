"""celery_setnx: a Celery task that runs at most once at a time per key.

The lock is Redis's SETNX lock, made safe: it is renewed while the task runs, taken over with GETSET when
its holder dies, and never touched by anyone else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_setnx.call.fanout import CallOutcome, FanOut
    from celery_setnx.call.publish import Duplicate, send_task
    from celery_setnx.exceptions import (
        AlreadyRunning,
        DuplicateTask,
        FanOutFailed,
        LockForbidden,
        LockLost,
        LockRefused,
        LockTimeout,
        LockUnavailable,
        OptionError,
        SetnxError,
        UnkeyableCall,
    )
    from celery_setnx.lock.held import HeldLock
    from celery_setnx.lock.lock import SetnxLock
    from celery_setnx.lock.outcome import Outcome
    from celery_setnx.lock.record import Holder
    from celery_setnx.options import SingletonOptions
    from celery_setnx.run.conflict import Conflict, is_skipped, superseded_by
    from celery_setnx.task import SingletonTask, check, current_lock, singleton

__version__ = "1.0.0"

# Imported when first asked for: every `celery` command and every pytest run meets the entry points.
_HOMES = {
    "run.conflict": ("Conflict", "is_skipped", "superseded_by"),
    "exceptions": (
        "AlreadyRunning",
        "DuplicateTask",
        "FanOutFailed",
        "LockForbidden",
        "LockLost",
        "LockRefused",
        "LockTimeout",
        "LockUnavailable",
        "OptionError",
        "SetnxError",
        "UnkeyableCall",
    ),
    "call.fanout": ("CallOutcome", "FanOut"),
    "lock.held": ("HeldLock",),
    "lock.lock": ("SetnxLock",),
    "lock.outcome": ("Outcome",),
    "options": ("SingletonOptions",),
    "lock.record": ("Holder",),
    "call.publish": ("Duplicate", "send_task"),
    "task": ("SingletonTask", "check", "current_lock", "singleton"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AlreadyRunning",
    "CallOutcome",
    "Conflict",
    "Duplicate",
    "DuplicateTask",
    "FanOut",
    "FanOutFailed",
    "HeldLock",
    "Holder",
    "LockForbidden",
    "LockLost",
    "LockRefused",
    "LockTimeout",
    "LockUnavailable",
    "OptionError",
    "Outcome",
    "SetnxError",
    "SetnxLock",
    "SingletonOptions",
    "SingletonTask",
    "UnkeyableCall",
    "check",
    "current_lock",
    "is_skipped",
    "send_task",
    "singleton",
    "superseded_by",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
