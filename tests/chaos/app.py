"""The app that chaos workers run: bodies, signals and renewals write to the history.

`CHAOS_HISTORY` is its file, `CHAOS_FLAW` what is wrong with the worker; `Worker(conf=...)` has its settings.
"""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from celery import Celery
from celery.signals import task_failure, task_postrun, task_received

from celery_setnx import LockLost, SingletonTask, current_lock, is_skipped, signals
from celery_setnx.call.message import Call
from celery_setnx.doctor import trial as trial_module
from tests.chaos import flaws
from tests.chaos.history import History, note_renewals
from tests.harness import CONF

LEASE_S = 1.5
GAP_S = 0.25
_STEP_S = 0.01

app = Celery("chaos", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0")
app.conf.update(
    setnx_url="redis://127.0.0.1:1/0",
    setnx_prefix="chaos",
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    result_expires=600,
)
app.conf.update(json.loads(os.environ.get(CONF, "{}")))

_path = Path(os.environ.get("CHAOS_HISTORY", os.devnull))
_history = History(_path) if "CHAOS_HISTORY" in os.environ else None
_lives = itertools.count()


def note(kind: str, **details: Any) -> None:
    if _history is not None:
        _history.note(kind, pid=os.getpid(), **details)


def order_to_end(history: Path, tid: str) -> Path:
    """The file that ends a body before its time, as soon as it is there."""
    return history.with_name(f"end {quote(tid, safe='')}")


def body(task: Any, name: str, seconds: float) -> str:
    """Be alive for a while, asking the lock before every step, as a careful task does; the life's id."""
    lock = current_lock()
    assert lock is not None
    life = f"{os.getpid()}.{next(_lives)}"
    order = order_to_end(_path, task.request.id)
    ensured, why = None, "ended by an exception"
    try:
        now = time.monotonic()
        give_up = now + seconds
        # Written while the lock is surely held, so that the true life is longer than the recorded one.
        note(
            "start", tid=task.request.id, life=life, name=name, fence=lock.fence,
            lease=lock.lease_s, until=now + lock.remaining_s(),
            worker=task.request.hostname, retries=task.request.retries,
        )  # fmt: skip
        while now < give_up and not order.exists():
            lock.ensure()
            ensured = now
            time.sleep(_STEP_S)
            last, now = now, time.monotonic()
            if now - last > GAP_S:
                note("gap", life=life, since=last)
        why = "done"
    except LockLost:
        why = "lost"
        raise
    finally:
        note("end", tid=task.request.id, life=life, name=name, ensured=ensured, why=why)
    return life


class Keyed(SingletonTask):
    """All tasks of this app share one scope."""

    abstract = True
    singleton = {
        "key": "name",
        "scope": "chaos",
        "lease": LEASE_S,
        "retry_delay": 0.05,
        "retry_delay_max": 0.2,
    }


def came_again(task: Any) -> bool:
    """Whether a message was delivered before; also that of a call which has come back since."""
    return Call.of(task.name, vars(task.request)).again


@app.task(base=Keyed, bind=True)
def work(self: Any, name: str, seconds: float) -> str:
    """The message is acknowledged before the body runs, which is Celery's default."""
    return body(self, name, seconds)


@app.task(base=Keyed, bind=True, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, name: str, seconds: float) -> str:
    """The message is acknowledged afterwards; a second delivery is short."""
    return body(self, name, 0.05 if came_again(self) else seconds)


@app.task(base=Keyed, bind=True, singleton={"dedupe": "until_started"})
def queued(self: Any, name: str, seconds: float) -> str:
    """Of those that wait to start one is enough."""
    return body(self, name, seconds)


def _record(word: str) -> Any:
    def receiver(sender: Any, task_id: str, **details: Any) -> None:
        holder, victim = details.get("holder"), {}
        if holder is not None:
            victim = {name: holder.info.get(name) for name in ("pid", "worker")}
            victim |= {"fence": holder.fence, "tid": holder.task_id}
        reason = str(details.get("reason") or details.get("outcome") or "")[:200]
        note(word, tid=task_id, fence=details.get("fence"), victim=victim, reason=reason)

    return receiver


for _word in ("acquired", "conflict", "waiting", "woken", "taken_over", "released", "lost"):
    getattr(signals, f"lock_{_word}").connect(_record(_word), weak=False)


@task_received.connect
def note_received(sender: Any, request: Any, **_details: Any) -> None:
    note("received", tid=request.id, worker=str(request.hostname))


@task_postrun.connect
def note_postrun(task_id: str, state: str, retval: Any = None, **_details: Any) -> None:
    if state == "SUCCESS":
        skipped = is_skipped(retval)
        note("done", tid=task_id, skipped=skipped, result=None if skipped else retval)


@task_failure.connect
def note_failure(task_id: str, exception: BaseException, **_details: Any) -> None:
    note("failed", tid=task_id, error=type(exception).__name__, text=str(exception)[:200])


if os.environ.get("CHAOS_FLAW"):
    # A flaw of the lease must not be hidden by what frees a dead holder's lock sooner.
    app.conf.setnx_same_host = False
    # Nor found before the first task: it is the scenario's to find.
    trial_module.LockServerCheck.start = lambda *_arguments: None
    flaws.seed(os.environ["CHAOS_FLAW"])
note_renewals(note)
