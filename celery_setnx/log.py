"""Our log: a line that cannot be logged stops nothing, whoever's filter or handler it is that raises.

A line of ours often stands between two steps that belong together, as before a release or a wake-up, or in a
thread that nobody else looks after.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery._state import get_current_task

from celery_setnx.wording import printable, quoted

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_SAY_AGAIN_S = 60.0
_KINDS = 100
_of_thread = threading.local()
_say_again_at: dict[str, float] = {}


def fields(event: str = "trouble", of: object = None, **more: str | None) -> dict[str, str | None]:
    """What a record says beside its sentence: the event, and the task, task id, key and `about` of a call.

    `of` is a call or a holder; `more` goes before what that says. Each name begins with `setnx_`, because the
    bare ones are others': structlog has the sentence under `event`, Celery's formatter writes a `task_id`.
    """
    said = {name: more.get(name) or getattr(of, name, None) for name in ("task", "task_id", "key", "about")}
    return {"setnx_event": event, **{f"setnx_{name}": _text(value) for name, value in said.items()}}


def _text(value: object) -> str | None:
    return printable(value) if value and isinstance(value, str) else None


class Log(_Adapter):
    """A logger that raises nothing but the time limit of the task in which it is struck.

    What cannot be logged is printed on the standard error stream, with the reason. Each record has `fields`.
    An error is quoted with its full stop: a template has none behind it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log it; or have it logged, if this thread must not wait for a handler (see `hand_lines_to`)."""
        if not self.isEnabledFor(level):
            return
        args = tuple(map(quoted, args))
        kwargs.setdefault("extra", fields())
        hand_over = getattr(_of_thread, "hand_over", None)
        if hand_over is None:
            self._write(level, msg, args, kwargs)
        else:
            if kwargs.get("exc_info") is True:
                kwargs["exc_info"] = sys.exc_info()
            hand_over(partial(self._write, level, msg, args, kwargs))

    def _write(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.logger.log(level, msg, *args, stacklevel=3, **kwargs)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a filter, a handler or a factory of records raises
            with suppress(OSError, ValueError, TypeError, AttributeError):  # nor can it be printed
                self._print(level, str(msg) % args if args else str(msg), error)

    def _print(self, level: int, text: str, error: Exception) -> None:
        """Past `sys.stderr`, which Celery's workers lead to the log."""
        because = f"{type(error).__name__}: {error}"
        line = f"{self.name}: {logging.getLevelName(level)}: {text} (it could not be logged: {because})"
        print(printable(line), file=sys.__stderr__, flush=True)


class _SaidAlready(logging.Filter):
    """Leaves out Celery's line "succeeded" of a call whose end a line of ours has said."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that line alone: no other of Celery's has a return value."""
        task = get_current_task() if isinstance(record.args, dict) and "return_value" in record.args else None
        return not (task and getattr(task.request, _SAID, False))


_SAID = "_setnx_said"
_logger = Log("celery_setnx")
logging.getLogger("celery.app.trace").addFilter(_SaidAlready())


def say_alone(request: Any) -> None:
    """Have Celery not say that a running call has succeeded, if we have said that it is skipped: at INFO."""
    setattr(request, _SAID, _logger.isEnabledFor(logging.INFO))


def hand_lines_to(hand_over: Callable[[Callable[[], None]], Any]) -> None:
    """From now on have this thread's lines logged by another: a handler may hang, as on a log server."""
    _of_thread.hand_over = hand_over


def say_loudly(error: Exception) -> None:
    """Log an error of ours that somebody must mend: at once, and every minute for as long as it is met."""
    if not getattr(error, "remedy", ""):
        return
    now, kind = time.monotonic(), str(getattr(error, "reason", "")).partition("; it is asked again")[0]
    if now < _say_again_at.get(kind, now):
        return
    if len(_say_again_at) >= _KINDS:
        _say_again_at.clear()
    _say_again_at[kind] = now + _SAY_AGAIN_S
    text = "%s This is logged once a minute until it is fixed."
    _logger.error(text, error, extra=fields(key=getattr(error, "key", None)))
