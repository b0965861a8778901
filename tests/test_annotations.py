"""Annotations that only type checkers can read: on CPython 3.14 and later nobody evaluates them.

This file has no `from __future__ import annotations`, which would make texts of them.
"""

import inspect
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_setnx import SingletonTask, singleton
from celery_setnx.task import guard_for, lock_for

if TYPE_CHECKING:
    from decimal import Decimal as Known

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once there")


@pytest.fixture
def app(alone) -> Celery:
    app = Celery("annotated", broker="memory://", set_as_current=False)
    app.conf.setnx_url = "redis://127.0.0.1:1/0"
    return app


def in_front(function: Any) -> Any:
    """A decorator of a project's own."""

    @wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def make(app: Celery, how: str) -> Any:
    if how == "base":

        @app.task(base=SingletonTask, singleton={"key": "a"})
        def pay(a: Known, b: "Known | None" = None) -> Known: ...

    elif how == "bound":

        @app.task(bind=True, base=SingletonTask, singleton={"key": "a"}, name=f"{__name__}.pay")
        def pay(self: Known, a: Known, *rest: Known, **more: Known) -> Known: ...

    elif how == "template":

        @app.task(base=SingletonTask, singleton={"key": "x:{a}"}, autoretry_for=(OSError,))
        def pay(a: Known[int], *, b: Known = 1) -> Known: ...

    elif how == "callable":

        def key(a: Known) -> Known:
            return [a]

        @app.task(base=SingletonTask, singleton={"key": key})
        def pay(a: Known) -> Known: ...

    elif how == "decorated":

        @app.task
        @singleton(key="a")
        def pay(a: Known) -> Known: ...

    else:

        @app.task(base=SingletonTask, singleton={"key": "a"})
        @in_front
        def pay(a: Known) -> Known: ...

    app.finalize()
    return app.tasks[f"{__name__}.pay"]


@pytest.mark.parametrize("how", ["base", "bound", "template", "callable", "decorated", "wrapped"])
def test_annotation_that_cannot_be_evaluated_is_no_matter(app, how):
    """The app starts, and calls have keys."""
    task = make(app, how)
    assert guard_for(task)
    assert lock_for(task, (7,), {}).name == lock_for(task, (), {"a": 7}).name


def test_class_of_a_task_may_have_such_annotations_too(app):
    """On its attributes, and on `run`."""

    class Pay(SingletonTask):
        name = "pay"
        singleton = {"key": "a"}
        partner: Known

        def run(self, a: Known) -> Known: ...

    app.register_task(Pay())
    app.finalize()
    assert app.tasks["pay"].lock_key(7) == app.tasks["pay"].lock_key(a=7)


def test_message_about_a_signature_has_no_annotations(app):
    """They are left out of what is said of a call that does not fit."""
    with pytest.raises(TypeError, match=r"its signature is \(a, b=None\)"):
        make(app, "base").lock_key(1, 2, 3)


def test_such_annotations_are_what_these_tests_are_about():
    """They raise where they are asked for."""

    def pay(a: Known) -> None: ...

    with pytest.raises(NameError):
        inspect.signature(pay)
