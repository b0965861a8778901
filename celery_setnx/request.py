"""The worker parent's side of a delivery: its nonce, and the locks that its end leaves behind."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from celery.worker.request import Request

from celery_setnx.conflict import HEADER, NONCE
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock import SetnxLock, task_token
from celery_setnx.process import has_ended
from celery_setnx.signals import lock_released

logger = logging.getLogger("celery_setnx")


class SingletonRequest(Request):  # type: ignore[misc]
    """A delivery of a `SingletonTask` in the worker's parent process.

    A nonce makes the token of every delivery its own, because a broker may deliver one message, and so one
    task id, twice. It travels to the child in a copy of the message's properties, which no retry inherits.
    """

    _watching = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        properties = self._request_dict.get("properties") or {}
        self._request_dict["properties"] = {**properties, NONCE: uuid.uuid4().hex}

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Without `return_ok` the child has died, or is about to."""
        if not return_ok:
            self._watch_child()
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """After a hard time limit the child is about to die."""
        if not soft:
            self._watch_child()
        return super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """Revoked with terminate: the child may be about to die."""
        result = super().terminate(pool, signal)
        self._watch_child()
        return result

    def cancel(self, pool: Any, signal: Any = None, **kwargs: Any) -> Any:
        """Cold shutdown or a lost connection: the child may be about to die."""
        result = super().cancel(pool, signal, **kwargs)
        self._watch_child()
        return result

    def revoked(self) -> bool:
        """A retry that was revoked or has expired will not resume the lock that is held for it."""
        known = self._already_revoked
        revoked = bool(super().revoked())
        if revoked and not known and self._guard is not None and self._request_dict.get("retries"):
            _in_thread(self._free_held)
        return revoked

    def _watch_child(self) -> None:
        if self._watching or self._guard is None or self.worker_pid in (None, os.getpid()):
            return
        self._watching = True
        _in_thread(self._free_when_dead)

    def _free_when_dead(self) -> None:
        """Free the child's lock once its end is proved; if it is not, the lease ends the lock."""
        give_up = time.monotonic() + self._options.lease
        pause = 0.01
        while not has_ended(self.worker_pid):
            if time.monotonic() > give_up:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)
        token = task_token(
            self.id, self._request_dict.get("retries"), self._request_dict["properties"][NONCE]
        )
        self._free(lambda lock: lock.free_dead(token), f"died with its process {self.worker_pid}")

    def _free_held(self) -> None:
        self._free(lambda lock: lock.free_held(self.id), "was revoked or has expired before its retry")

    def _free(self, free: Callable[[SetnxLock], bool], why: str) -> None:
        lock = self._guard.lock(self._header, self.args, self.kwargs)
        call = f"{self.task.name}[{self.id}]"
        try:
            freed = free(lock)
        except SetnxError as error:
            logger.warning("%s %s, and its lock was not freed: %s", call, why, error)
            return
        if freed:
            logger.warning("%s %s; its lock %s is freed.", call, why, lock.name)
            lock_released.send(sender=self.task, task_id=self.id, key=lock.name, fence=None, outcome="freed")

    @property
    def _guard(self) -> Any:
        return getattr(self.task, "_guard", None)

    @property
    def _header(self) -> dict[str, Any]:
        return self._request_dict.get(HEADER) or {}

    @property
    def _options(self) -> Any:
        return self._guard.options_of(self._header.get("options") or {})


def _in_thread(function: Callable[[], None]) -> None:
    """The parent's event loop must wait neither for a child's end nor for Redis."""
    threading.Thread(target=function, name="celery_setnx-free", daemon=True).start()
