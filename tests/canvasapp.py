"""The app of the canvas tests: the same tasks once for each mode, all of a mode with one key."""

import time
from types import SimpleNamespace
from typing import Any

from celery import chain, chord, current_task, group, signature
from celery.signals import worker_init

from celery_setnx import SingletonTask, current_lock
from celery_setnx.run import courier
from tests.app import journal, make_app, wait_for_gate

MODES: dict[str, dict[str, str]] = {
    "until_started": {"dedupe": "until_started"},
    "until_done": {"dedupe": "until_done"},
    "auto": {},
    "wait": {"on_conflict": "wait"},
    "raise": {"on_conflict": "raise"},
}

BROKER_DB = 9
LATER = "later"
"""A queue that nobody consumes, until a test lets the worker do so."""

# A broker of its own: the other workers of a test run do not know these tasks.
app = make_app("canvasapp", BROKER_DB, broker_transport_options={"polling_interval": 0.1})


@worker_init.connect
def couriers_come_soon(sender: Any, **_details: Any) -> None:
    """To find that their calls have ended. Not for another app's worker, in a process of the tests."""
    if sender.app is app:
        courier.ParkedCall.pace = lambda order, server_time: 0.3


def turn(gate: str = "") -> None:
    """Journal the start, wait until the gate opens if one is named, journal the end."""
    request, lock = current_task.request, current_lock()
    about = {"task_id": request.id, "key": lock and lock.key, "task": current_task.name}
    journal.write("start", **about)
    if gate:
        wait_for_gate(gate)
    time.sleep(0.01)  # a body must take time to be in the way
    journal.write("end", **about)


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
    """The tasks of one mode; `name` is their key. `replaced` has no lock."""

    options = {"key": "name", "scope": f"canvas.{mode}", **MODES[mode]}
    options |= {"lease": 600, "retry_delay": 0.05, "retry_delay_max": 0.1}
    tasks = SimpleNamespace(mode=mode, replaced=replaced)

    def task(bind: bool = True, **more: Any) -> Any:
        def decorate(function: Any) -> None:
            name, key = function.__name__, {} if bind else {"key": ()}
            about = {"name": f"canvas.{mode}.{name}", "bind": bind, "singleton": options | key, **more}
            setattr(tasks, name, app.task(base=SingletonTask, max_retries=5, **about)(function))

        return decorate

    @task()
    def step(self: Any, x: int = 0, name: str = "same", *, failures: int = 0, gate: str = "") -> int:
        """Retries itself `failures` times, then adds one."""
        turn(gate)
        if self.request.retries < failures:
            raise self.retry(countdown=0)
        return x + 1

    @task(autoretry_for=(ConnectionError,), retry_kwargs={"max_retries": 5, "countdown": 0})
    def autoretried(self: Any, x: int = 0, name: str = "same", *, failures: int = 0) -> int:
        turn()
        if self.request.retries < failures:
            raise ConnectionError(name)
        return x + 1

    @task()
    def failing(self: Any, name: str = "same") -> None:
        turn()
        raise ZeroDivisionError(name)

    @task(bind=False)
    def mourn(request: Any, exc: Any, traceback: Any) -> None:
        turn()

    @task()
    def collect(self: Any, results: Any, name: str = "same") -> Any:
        turn()
        return results

    @task()
    def replacing(self: Any, by: Any, name: str = "same") -> Any:
        turn()
        return self.replace(signature(by, app=app))

    @task()
    def repeating(self: Any, depth: int, name: str = "same") -> Any:
        """Publishes itself from inside its own body, `depth` times."""
        turn()
        if not depth:
            return "done"
        again = self.delay(depth - 1, name)
        return {"id": again.id, "deduplicated": again.deduplicated}

    @task()
    def starting(self: Any, gate: str = "", name: str = "same") -> list[str]:
        """Publishes workflows of its own key from inside its own body; their ids."""
        step = tasks.step
        turn()
        steps = chain(step.s(0), step.s(), step.s()).delay()
        members = group(step.si(n) for n in range(3)).delay()
        numbers = chord([step.si(n) for n in range(3)], total.s()).delay()
        turn(gate)
        return [steps.id, numbers.id, *(member.id for member in members)]

    return tasks


OF = {mode: tasks_of(mode) for mode in MODES}
