"""The app of docker-compose.yml: the demo's app, a job for beat, and what the health checks look at."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from celery.signals import after_task_publish, beat_init, heartbeat_sent

from celery_setnx import SingletonTask
from examples.demo_app import HISTORY, app, client, record, recorded

ALIVE = Path("/tmp/alive")
PERIOD_S, BODY_S = 1.0, 1.5
KEPT_ENTRIES = 10_000

app.conf.update(
    broker_transport_options={},  # the broker is ours alone, and not always a Redis
    setnx_same_host=True,  # the default: each container is a host of its own
    beat_schedule={
        "poll": {
            "task": "examples.compose.app.poll",
            "schedule": PERIOD_S,
            "options": {"expires": 10 * PERIOD_S, "ignore_result": True},
        }
    },
)


@app.task(base=SingletonTask, singleton={"key": (), "lease": 3})
def poll() -> None:
    """Sent by beat before the one before has ended: that call is skipped."""
    client.ltrim(HISTORY, -KEPT_ENTRIES, -1)
    with recorded(job="poll"):
        time.sleep(BODY_S)


@app.task(bind=True, ignore_result=True)
def crash(self: Any) -> None:
    """kill -9 of the worker. Its container ends with it, so nothing there can tidy up."""
    # Killed before it has acknowledged this message, the worker gets it once more when it is back.
    if not self.request.delivery_info["redelivered"]:
        os.kill(os.getppid(), signal.SIGKILL)


def touch(**_details: Any) -> None:
    ALIVE.touch()


heartbeat_sent.connect(touch)


@beat_init.connect
def touch_when_sent(**_details: Any) -> None:
    after_task_publish.connect(touch)


class TakeOvers(logging.Handler):
    """Passes on what the log says of a take-over: the demo cannot read the logs of other containers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "took over" in record.msg

    def emit(self, entry: logging.LogRecord) -> None:
        with suppress(redis.RedisError):  # a log line must not fail its task
            record("log", worker=f"celery@{socket.gethostname()}", text=entry.getMessage())


logging.getLogger("celery_setnx").addHandler(TakeOvers())
