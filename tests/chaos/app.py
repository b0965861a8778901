"""The app that chaos workers run: bodies, signals and renewals write to the history.

`CHAOS_HISTORY` is its file, `CHAOS_FLAW` what is wrong with the worker, `CHAOS_RELEASE` may be `later`, and
`CHAOS_SWEEP_S` says how often it sweeps; `Worker(conf=...)` has its settings.
"""

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from celery import Celery, Task
from celery.signals import task_failure, task_postrun, task_received, task_revoked, task_unknown

from celery_setnx import LockLost, SetnxLock, SingletonTask, current_lock, is_skipped, signals
from celery_setnx.call.message import Call
from celery_setnx.doctor import trial as trial_module
from celery_setnx.run import acquire, sweep
from tests.harness import CONF
from tests.soak import flaws
from tests.soak.history import History, note_renewals

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
_history = History(_path, os.getpid()) if "CHAOS_HISTORY" in os.environ else None
_lives = itertools.count()


def note(kind: str, **details: Any) -> None:
    if _history is not None:
        _history.note(kind, pid=os.getpid(), **details)


def order_to_end(history: Path, tid: str) -> Path:
    """The file that ends a body before its time, as soon as it is there."""
    return history.with_name(f"end {quote(tid, safe='')}")


def body(task: Any, name: str, seconds: float, deaf: bool) -> str:
    """Be alive for a while, asking the lock before every step, as a careful task does; the life's id."""
    lock = current_lock()
    life = f"{os.getpid()}.{next(_lives)}"
    order = order_to_end(_path, task.request.id)
    ensured, why = None, "ended by an exception"
    if deaf:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        now = time.monotonic()
        give_up = now + seconds
        # Written while the lock is surely held, so that the true life is longer than the recorded one.
        note(
            "start", tid=task.request.id, life=life, name=name_of(task, name), fence=lock and lock.fence,
            lease=lock.lease_s if lock else 0.0, until=now + lock.remaining_s() if lock else now,
            worker=task.request.hostname, retries=task.request.retries,
        )  # fmt: skip
        while now < give_up and not order.exists():
            if lock is not None:
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
        note("end", tid=task.request.id, life=life, name=name_of(task, name), ensured=ensured, why=why)
    return life


def name_of(task: Any, name: str) -> str:
    """What the history calls the key; there are two of a name if a release has changed what it is made of."""
    return f"{name}@{task.lock.key[-7:-1]}" if task.name == "rekeyed" else name


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
    return Call.of(task.name, vars(task.request)).redelivered


@app.task(base=Keyed, bind=True)
def work(self: Any, name: str, seconds: float, deaf: bool = False) -> str:
    """The message is acknowledged before the body runs, which is Celery's default."""
    return body(self, name, seconds, deaf)


@app.task(base=Keyed, bind=True, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, name: str, seconds: float, deaf: bool = False) -> str:
    """The message is acknowledged afterwards; a second delivery is short."""
    return body(self, name, 0.05 if came_again(self) else seconds, deaf)


@app.task(base=Keyed, bind=True, singleton={"hold_on_retry": True, "queue_lease": 60})
def held(self: Any, name: str, seconds: float, deaf: bool = False) -> str:
    """It keeps its lock while it waits for its second attempt."""
    result = body(self, name, seconds, deaf)
    if not self.request.retries:
        note("holds", tid=self.request.id, fence=self.lock and self.lock.fence)
        raise self.retry(countdown=1.0)
    return result


@app.task(base=Keyed, bind=True, singleton={"dedupe": "until_started"})
def queued(self: Any, name: str, seconds: float, deaf: bool = False) -> str:
    """Of those that wait to start one is enough."""
    return body(self, name, seconds, deaf)


class Changed(Keyed):
    """What becomes of calls is said by the task, and not by them, so that a deploy changes it."""

    abstract = True
    singleton = {"on_conflict": "wait", "lease": 1.0}


def changed(self: Any, name: str, seconds: float, deaf: bool = False) -> str:
    """As the first release has it."""
    return body(self, name, 0.05 if came_again(self) else seconds, deaf)


def shorter(self: Any, name: str, seconds: float) -> str:
    """As a later release has it, with a parameter less."""
    return changed(self, name, seconds)


def _of_release(later: bool) -> None:
    """Have the tasks that a release changes."""

    def add(
        name: str, function: Any = changed, base: Any = Changed, late: bool = False, **options: Any
    ) -> None:
        acks = {"acks_late": late, "reject_on_worker_lost": late}
        app.task(function, name=name, base=base, bind=True, singleton=options, **acks)

    add("shorter", shorter if later else changed, late=True)
    add("renamed_since" if later else "renamed")
    add("rekeyed", late=True, key=["name", "deaf"] if later else "name")
    add("eased", **({"lease": 2.0, "on_conflict": "retry"} if later else {"dedupe": "until_started"}))
    add("freed", base=Task if later else Changed)


_of_release(os.environ.get("CHAOS_RELEASE") == "later")


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


@task_unknown.connect
def note_unknown(name: str, id: str, **_details: Any) -> None:
    note("failed", tid=id, error="NotRegistered", text=name)


@task_revoked.connect
def note_revoked(request: Any, **_details: Any) -> None:
    note("revoked", tid=request.id)


def _die_before_waking(order: Path) -> None:
    """Whoever has handed a lock over dies before it sends the wake-up, once a file says so."""
    go_on = acquire.let_others_start

    def dies(app: Celery, task: str, lock: SetnxLock) -> None:
        if lock.heirs and order.exists():
            whole_worker = order.read_text() == "worker"
            order.unlink()
            os.killpg(0, signal.SIGKILL) if whole_worker else os.kill(os.getpid(), signal.SIGKILL)
        go_on(app, task, lock)

    acquire.let_others_start = dies


if os.environ.get("CHAOS_FLAW"):
    # A flaw of the lease must not be hidden by what frees a dead holder's lock sooner.
    app.conf.setnx_same_host = False
    # Nor found before the first task: it is the scenario's to find.
    trial_module.LockServerCheck.start = lambda *_arguments: None
    flaws.seed(os.environ["CHAOS_FLAW"])
note_renewals(note)
sweep.SWEEP_S = float(os.environ.get("CHAOS_SWEEP_S", sweep.SWEEP_S))
if "CHAOS_DIES_BEFORE_WAKING" in os.environ:
    _die_before_waking(Path(os.environ["CHAOS_DIES_BEFORE_WAKING"]))
