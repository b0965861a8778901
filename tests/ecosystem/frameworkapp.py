"""The app of a worker whose tasks run as other libraries have them: Flask, pydantic, celery-progress."""

from typing import Any

from celery import Task
from celery_progress.backend import ProgressRecorder
from flask import Flask, current_app
from pydantic import BaseModel

from celery_setnx import SingletonTask, current_lock
from tests.app import body, journal, make_app

app = make_app("frameworks")
web = Flask("shop")


class FlaskTask(Task):
    """As Flask documents it."""

    abstract = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        with web.app_context():
            return self.run(*args, **kwargs)


class SingletonFlaskTask(SingletonTask, FlaskTask):
    """Guarded, and in the context of the web application."""

    abstract = True


class FlaskSingletonTask(FlaskTask, SingletonTask):
    """The same in the other order."""

    abstract = True


class Order(BaseModel):
    """What a pydantic task is given."""

    number: int
    customer: str = "ann"


LEASE = {"lease": 600}


def render(name: str) -> str:
    """Runs in Flask's context, under its lock."""
    lock = current_lock()
    journal.write("context", flask=current_app.name, key=lock.key if lock else None)
    return body(name)


IN_CONTEXT = {"shared": False, "singleton": {"key": "name", **LEASE}}
rendered = app.task(base=SingletonFlaskTask, name="frameworks.rendered", **IN_CONTEXT)(render)
rendered_last = app.task(base=FlaskSingletonTask, name="frameworks.rendered_last", **IN_CONTEXT)(render)


@app.task(
    base=SingletonTask,
    shared=False,
    pydantic=True,
    name="frameworks.packed",
    singleton={"key": "order", **LEASE},
)
def packed(order: Order, gate: str = "") -> dict[str, Any]:
    """Takes a model; its key is the order."""
    body(gate)
    return {"type": type(order).__name__, "number": order.number, "customer": order.customer}


@app.task(
    base=SingletonTask, bind=True, shared=False, name="frameworks.counted", singleton={"key": "name", **LEASE}
)
def counted(self: Any, name: str) -> str:
    """Tells how far it has come."""
    ProgressRecorder(self).set_progress(3, 4, "nearly")
    return body(name)
