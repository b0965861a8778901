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

from celery_setnx.wording import printable

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_SAY_AGAIN_S = 60.0
_KINDS = 100
_of_thread = threading.local()
_say_again_at: dict[str, float] = {}


class Log(_Adapter):
    """A logger that raises nothing but the time limit of the task in which it is struck.

    What cannot be logged is printed on the standard error stream, with the reason.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log it; or have it logged, if this thread must not wait for a handler (see `hand_lines_to`)."""
        if not self.isEnabledFor(level):
            return
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


_logger = Log("celery_setnx")


def hand_lines_to(hand_over: Callable[[Callable[[], None]], Any]) -> None:
    """From now on have this thread's lines logged by another: a handler may hang, as on a log server."""
    _of_thread.hand_over = hand_over


def say_loudly(error: Exception) -> None:
    """Log an error of ours that somebody must mend: at once, and every minute for as long as it is met."""
    if not getattr(error, "remedy", ""):
        return
    now, kind = time.monotonic(), str(getattr(error, "reason", ""))
    if now < _say_again_at.get(kind, now):
        return
    if len(_say_again_at) >= _KINDS:
        _say_again_at.clear()
    _say_again_at[kind] = now + _SAY_AGAIN_S
    _logger.error("%s This is said once a minute until it is mended.", error)
