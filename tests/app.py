"""What every app of the tests is made of: its settings, its journal, its gates.

A worker's environment says the rest: `SETNX_TEST_URL` is the server of the tests, `SETNX_TEST_CONF` has
settings in JSON that go over those of the app (`Worker(conf=...)` sets it).
"""

import json
import os
from collections.abc import Callable
from typing import Any

import celery
import redis
from celery import Celery, current_task
from celery.result import AsyncResult
from celery.signals import task_postrun, task_retry, task_revoked

from celery_setnx import current_lock, signals
from celery_setnx.call import wake
from celery_setnx.call.wake import COURIER
from celery_setnx.run import courier
from tests.harness import CONF, GATE_S, Journal

BROKER_DB, LOCK_DB = 0, 1
URL = os.environ["SETNX_TEST_URL"]

if celery.VERSION < (5, 7) and hasattr(AsyncResult, "__del__"):
    del AsyncResult.__del__  # a garbage collection may wait for what its own thread holds (README)

control = redis.Redis.from_url(f"{URL}/0", socket_timeout=None)
journal = Journal(control)


def _pace(order: courier.ParkedCall, server_time: float, pace: Any = courier.ParkedCall.pace) -> float:
    """A courier comes soon if its call says so (see `tests.stage.SOON`), and not in ten minutes."""
    return min(pace(order, server_time), order.call.options.get("retry_delay_max", 600))


courier.ParkedCall.pace = _pace
wake._LOOK_S = 2.0  # instead of half a minute


def make_app(
    name: str, broker_db: int = BROKER_DB, *, of: Callable[..., Celery] = Celery, **conf: Any
) -> Celery:
    """An app on the server of the tests, with the settings of this process's environment.

    It is not the current app: one that has shared tasks calls `set_current`. A library's own class of apps
    is given by `of`.
    """
    app = of(name, set_as_current=False)
    app.conf.update(
        broker_url=f"{URL}/{broker_db}",
        result_backend=f"{URL}/{broker_db}",
        setnx_url=f"{URL}/{LOCK_DB}",
        setnx_prefix="t",
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": 3600},
        worker_prefetch_multiplier=1,
        result_expires=600,
    )
    app.conf.update({**conf, **json.loads(os.environ.get(CONF, "{}"))})
    return app


def wait_for_gate(name: str) -> None:
    """Wait until a test opens the gate of this name, or has ended (see `leave_open` in conftest.py)."""
    control.blpop([f"gate:{name}", f"left:{name}"], timeout=GATE_S)


def body(name: str = "") -> str:
    """Journal the start; if the name begins with `gated`, wait until its gate opens; journal the end."""
    request, lock = current_task.request, current_lock()
    about = {
        "task": current_task.name,
        "task_id": request.id,
        "retries": request.retries,
        "name": name,
        "key": lock and lock.key,
        "fence": lock and lock.fence,
    }
    journal.write("start", **about)
    if name.startswith("gated"):
        wait_for_gate(name)
    journal.write("end", **about)
    return name


def record(word: str) -> Any:
    """A receiver that journals a signal, with what JSON can say of it."""

    def receiver(sender: Any, task_id: str, **details: Any) -> None:
        shown = {k: v for k, v in details.items() if isinstance(v, (str, int, float))}
        holder = details.get("holder")
        if holder is not None:
            shown["holder"] = holder.as_dict()
        writes_to = journal.apart() if word == "lost" else journal  # a loss is told by the keeper's thread
        writes_to.write(word, task_id=task_id, **shown)

    return receiver


SIGNALS = {
    name: getattr(signals, f"lock_{name}")
    for name in ("acquired", "conflict", "waiting", "woken", "taken_over", "released", "lost")
}
SIGNALS |= {"deduplicated": signals.call_deduplicated, "superseded": signals.call_superseded}
SIGNALS |= {"lapsed": signals.uniqueness_lapsed}
for _word, _signal in SIGNALS.items():
    _signal.connect(record(_word), weak=False)


@task_retry.connect
def journal_retry(request: Any, **_details: Any) -> None:
    journal.write("retry", task_id=request.id, retries=request.retries)


@task_postrun.connect
def journal_postrun(sender: Any, task_id: str, state: str, **_details: Any) -> None:
    if sender.name != COURIER:
        journal.write("postrun", task_id=task_id, state=state)


@task_revoked.connect
def journal_revoked(request: Any, expired: bool, **_details: Any) -> None:
    journal.write("revoked", task_id=request.id, expired=expired)
