"""The app of the canvas tests: the same tasks once for each `dedupe` mode, all of a mode with one key."""

import time
from types import SimpleNamespace
from typing import Any

from celery import Celery, chain, chord, current_task, group, signature

from celery_setnx import SingletonTask, current_lock, signals
from tests.workerapp import URL, control, journal, record
from tests.workerapp import app as workerapp

MODES = ("until_started", "until_done")

BROKER_DB = 9
LATER = "later"
"""A queue that nobody consumes, until a test lets the worker do so."""

# A broker of its own: the other workers of a test run do not know these tasks.
app = Celery("canvasapp", broker=f"{URL}/{BROKER_DB}", backend=f"{URL}/{BROKER_DB}", set_as_current=False)
app.conf.update(
    setnx_url=workerapp.conf["setnx_url"],
    setnx_prefix="t",
    broker_connection_retry_on_startup=True,
    broker_transport_options={"polling_interval": 0.1},
    worker_prefetch_multiplier=1,
    result_expires=600,
)


def record_ours(word: str) -> Any:
    """A receiver that journals what becomes of this app's own calls."""
    write = record(word)

    def receiver(sender: Any, **details: Any) -> None:
        if getattr(sender, "app", None) is app:
            write(sender, **details)

    return receiver


signals.call_deduplicated.connect(record_ours("deduplicated"), weak=False)
signals.uniqueness_lapsed.connect(record_ours("lapsed"), weak=False)


def turn(gate: str = "") -> None:
    """Journal the start, wait until the gate opens if one is named, journal the end."""
    request, lock = current_task.request, current_lock()
    about = {"task_id": request.id, "key": lock and lock.key, "task": current_task.name}
    journal.write("start", at=time.monotonic(), retries=request.retries, **about)
    if gate:
        control.blpop([f"gate:{gate}"], timeout=30)
    time.sleep(0.01)  # a body must take time to be in the way
    journal.write("end", at=time.monotonic(), **about)


@app.task(name="canvas.note")
def note(*what: Any) -> Any:
    """A callback without a lock."""
    journal.write("note", arguments=list(what))
    return what[-1] if what else None


@app.task(name="canvas.total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="canvas.replaced", bind=True)
def replaced(self: Any, by: Any) -> Any:
    """A task without a lock that another takes the place of."""
    return self.replace(signature(by, app=app))


def tasks_of(mode: str) -> SimpleNamespace:
    """The dedupe tasks of one mode; `name` is their key."""

    def task(function: Any, **options: Any) -> Any:
        singleton = {
            "key": "name",
            "scope": f"canvas.{mode}",
            "dedupe": mode,
            "lease": 5,
            "retry_delay": 0.05,
            "retry_delay_max": 0.1,
            **options.pop("singleton", {}),
        }
        name = f"canvas.{mode}.{function.__name__}"
        options = {"bind": True, "max_retries": 5, **options}
        return app.task(base=SingletonTask, name=name, singleton=singleton, **options)(function)

    def step(self: Any, x: int = 0, name: str = "same", *, failures: int = 0, gate: str = "") -> int:
        """Retries itself `failures` times, then adds one."""
        turn(gate)
        if self.request.retries < failures:
            raise self.retry(countdown=0)
        return x + 1

    def autoretried(self: Any, x: int = 0, name: str = "same", *, failures: int = 0) -> int:
        turn()
        if self.request.retries < failures:
            raise ConnectionError(name)
        return x + 1

    def failing(self: Any, name: str = "same") -> None:
        turn()
        raise ZeroDivisionError(name)

    def mourn(request: Any, exc: Any, traceback: Any) -> None:
        turn()

    def collect(self: Any, results: Any, name: str = "same") -> Any:
        turn()
        return results

    def replacing(self: Any, by: Any, name: str = "same") -> Any:
        turn()
        return self.replace(signature(by, app=app))

    def repeating(self: Any, depth: int, name: str = "same") -> Any:
        """Publishes itself from inside its own body, `depth` times."""
        turn()
        if not depth:
            return "done"
        again = self.delay(depth - 1, name)
        return {"id": again.id, "deduplicated": again.deduplicated}

    def starting(self: Any, gate: str = "", name: str = "same") -> list[str]:
        """Publishes workflows of its own key from inside its own body; their ids."""
        step = app.tasks[f"canvas.{mode}.step"]
        turn()
        steps = chain(step.s(0), step.s(), step.s()).delay()
        members = group(step.si(n) for n in range(3)).delay()
        numbers = chord([step.si(n) for n in range(3)], total.s()).delay()
        turn(gate)
        return [steps.id, numbers.id, *(member.id for member in members)]

    return SimpleNamespace(
        mode=mode,
        step=task(step),
        autoretried=task(
            autoretried, autoretry_for=(ConnectionError,), retry_kwargs={"max_retries": 5, "countdown": 0}
        ),
        failing=task(failing),
        mourn=task(mourn, bind=False, singleton={"key": ()}),
        collect=task(collect),
        replacing=task(replacing),
        repeating=task(repeating),
        starting=task(starting),
    )


OF = {mode: tasks_of(mode) for mode in MODES}
