"""A message that a worker's parent has read, without a worker."""

import os
import time
import uuid
from types import SimpleNamespace
from typing import Any

import redis
from billiard.einfo import ExceptionInfo
from celery.worker.request import create_request_cls

from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.lock.receipt import has_receipt
from celery_setnx.request import SingletonRequest
from celery_setnx.run.receipt import receipt_of


def info_of(error: BaseException) -> ExceptionInfo:
    """An error as the pool tells of it."""
    try:
        raise error
    except BaseException:
        return ExceptionInfo()


class Delivered:
    """A message that a worker's parent has read, and what becomes of it."""

    def __init__(self, task: Any, *, held_s: float = 0.0, call: Call | None = None) -> None:
        task_id, headers = (call.task_id, call.as_headers()) if call else (uuid.uuid4().hex, {})
        told = task.app.amqp.as_task_v2(task_id, task.name)
        told.headers.update(headers)
        about = {"properties": {}, "delivery_info": {}, "content_type": "", "content_encoding": ""}
        message = SimpleNamespace(headers=told.headers, payload=told.body, body=told.body, **about)
        pool = SimpleNamespace(apply_async=None)
        ends = dict.fromkeys(("on_ack", "on_reject"), self._acknowledge)
        made = create_request_cls(SingletonRequest, task, pool, "here", None, app=task.app)
        self.request = made(message, app=task.app, task=task, hostname="here", **ends)
        self.request._received_at -= held_s
        self.receipts: list[bool] = []  # whether there was one, when it was acknowledged
        self.locks: redis.Redis = client_for(task.app)

    @property
    def name(self) -> str:
        """That of its receipt."""
        return str(receipt_of(self.request.task._guard, self.request.call))

    def _acknowledge(self, *_args: Any) -> None:
        self.receipts.append(has_receipt(self.locks, self.name))

    def ends(self, error: BaseException | None = None) -> None:
        """A child has run it, and says so."""
        failed = None if error is None else info_of(error)
        self.request.on_accepted(os.getpid(), time.monotonic())
        self.request.on_success((0, "result", 0.1) if failed is None else (1, failed, 0.1))
