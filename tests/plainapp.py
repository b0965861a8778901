"""Tasks without any lock: what Celery and its Redis transport do by themselves."""

import json
import os
from typing import Any

import redis
from celery import Celery

from tests.harness import CONF, GATE_S

URL = os.environ.get("PLAIN_URL", "")

app = Celery("plain", broker=URL, backend=URL, set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True, **json.loads(os.environ.get(CONF) or "{}"))


def body(self: Any) -> None:
    """Say who runs, where; then wait at the gate."""
    with redis.Redis.from_url(URL, socket_timeout=None) as client:
        client.rpush("started", json.dumps([self.request.id, os.getpid()]))
        client.blpop("gate", timeout=GATE_S)


early = app.task(body, bind=True, name="plain.early", shared=False)
late = app.task(body, bind=True, name="plain.late", acks_late=True, shared=False)
rejected = app.task(
    body, bind=True, name="plain.rejected", acks_late=True, reject_on_worker_lost=True, shared=False
)
