"""celery_setnx: a Celery task that runs at most once at a time per key.

The lock is Redis's SETNX lock, made safe: it is renewed while the task runs, taken over with GETSET when
its holder dies, and never touched by anyone else.
"""

from celery_setnx.conflict import Conflict, is_skipped
from celery_setnx.exceptions import (
    AlreadyRunning,
    DuplicateTask,
    FanOutFailed,
    LockLost,
    LockRefused,
    LockTimeout,
    LockUnavailable,
    OptionError,
    SetnxError,
    UnkeyableCall,
)
from celery_setnx.fanout import CallOutcome, FanOut
from celery_setnx.lock import HeldLock, Holder, Outcome, SetnxLock
from celery_setnx.publish import Duplicate, send_task
from celery_setnx.task import SingletonTask, current_lock, singleton

__version__ = "0.1.0"

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
    "LockLost",
    "LockRefused",
    "LockTimeout",
    "LockUnavailable",
    "OptionError",
    "Outcome",
    "SetnxError",
    "SetnxLock",
    "SingletonTask",
    "UnkeyableCall",
    "current_lock",
    "is_skipped",
    "send_task",
    "singleton",
]
