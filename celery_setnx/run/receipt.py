"""Receipts: what tells a message that is delivered again that its attempt has ended, where no result does.

A release is no end: Celery sends links, the chain's next step and the result after the body. So a worker's
parent writes the receipt, once Celery has reported the end, and before it acknowledges the message.
"""

from __future__ import annotations

import time
from contextlib import suppress

from celery import Celery, Task

from celery_setnx.call.back import result_tells, tells_redelivery, visibility_timeout_s
from celery_setnx.call.guard import Guard
from celery_setnx.call.message import Call
from celery_setnx.connection import quick_client_for
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.forks import between_forks
from celery_setnx.lock.names import receipt_name
from celery_setnx.lock.receipt import write_receipt
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")

_SILENCE_S = 10.0


def receipt_of(guard: Guard, call: Call) -> str | None:
    """The name of an attempt's receipt; None if nothing tells its call from a later one with its task id."""
    if not call.call_id and call.shares_id:
        return None
    return receipt_name(guard.settings.prefix, call.task, call.task_id, call.call_id, call.attempt)


def needs_receipt(task: Task, *, ignores_result: bool, has_succeeded: bool, held_s: float) -> bool:
    """Whether an attempt that has ended may be delivered again, and nothing else tells that it has ended.

    `held_s`: seconds from the receipt of its message to its acknowledgement.
    """
    app, limit_s = task.app, visibility_timeout_s(task.app)
    if limit_s and held_s > limit_s / 2:  # it may have been delivered again already
        return True
    if not task.acks_late:
        return False
    return not (has_succeeded and tells_redelivery(app) and result_tells(task, ignores_result=ignores_result))


class Receipts:
    """Writes the receipts of a worker's parent, which must not wait for a server that is away."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._silent_until, self._fails = 0.0, False

    def write(self, call: Call, name: str, keep_s: float) -> None:
        """Note that an attempt has ended; for some seconds after a failure nothing is tried."""
        if time.monotonic() < self._silent_until:
            return
        try:
            with between_forks:
                write_receipt(quick_client_for(self._app), name, keep_s)
            self._fails = False
        except LockUnavailable as error:
            self._silent_until = time.monotonic() + _SILENCE_S
            if not self._fails:  # it is said once
                until = f"Until it answers, no receipt is written; it is tried every {_SILENCE_S:g} s."
                self._complain(call, f"{error} {until}")
            self._fails = True
        except Exception as error:  # noqa: BLE001 - the worker's event loop must go on
            self._complain(call, repr(error))

    def _complain(self, call: Call, why: str) -> None:
        text = "The receipt of %s was not written. If its message is delivered again, the call runs again. %s"
        with suppress(Exception):  # whatever a handler of the app's raises
            logger.warning(text, call, why, extra=fields(of=call))


def receipts_of(app: Celery) -> Receipts:
    """Those of the app's worker in this process."""
    receipts: Receipts = app.__dict__.setdefault("_setnx_receipts", Receipts(app))
    return receipts
