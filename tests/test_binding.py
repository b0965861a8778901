"""Binding a task: options are settled, bad ones refused, before anything runs."""

import functools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, shared_task

from celery_setnx import AlreadyRunning, LockTimeout, OptionError, SingletonTask, UnkeyableCall, singleton
from celery_setnx.doctor.trial import LockServerCheck

NOWHERE = "redis://localhost:1/0"


def nothing(a: Any = 1, b: Any = 2) -> None:
    """A body."""


class App(Celery):
    """An app of its own, whose tasks are bound when it is finalized."""

    def __init__(self, **options: Any) -> None:
        super().__init__("binding", set_as_current=False, broker=NOWHERE, **options)

    def guarded(self, function: Callable[..., Any] = nothing, *, conf: Any = (), **options: Any) -> Any:
        """Declare a SingletonTask named `tasks.t`, in an app with these settings."""
        self.conf.update(conf)
        return self.task(**{"shared": False, "base": SingletonTask, "name": "tasks.t", **options})(function)

    def decorated(self, function: Callable[..., Any] = nothing, *, task: Any = None, **options: Any) -> Any:
        """Declare a task with @singleton of these options."""
        copied = functools.wraps(function)(lambda *args: function(*args))
        return self.task(**{"shared": False, "name": "tasks.t", **(task or {})})(singleton(**options)(copied))


@pytest.fixture
def app() -> App:
    return App()


def options_of(task: Any) -> Any:
    return task.app.tasks[task.name]._guard.options


class CallsTheBody(SingletonTask):
    """Its `__call__` would run the body without its lock."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


JOIN = {"on_conflict": "join"}
IGNORED = r"on_conflict='join' and ignore_result.*use on_conflict='wait'"
REFUSED = [
    ({"leese": 1}, {}, "tasks.t has an unknown option 'leese'; did you mean 'lease'"),
    ({"lease": 0}, {}, "lease of tasks.t must be positive"),
    ({"key": "nobody"}, {}, r"key of tasks.t names 'nobody', which is no parameter of tasks.t\(a=1, b=2\)"),
    ({"key": ["a", "nobody"]}, {}, "names 'nobody'"),
    ({"key": "x:{a"}, {}, "key template 'x:{a' of tasks.t is broken"),
    ({"key": "x:{nobody}"}, {}, "names 'nobody'"),
    ({"on_conflict": "waits"}, {}, "on_conflict of tasks.t must be one of .*; did you mean 'wait'"),
    # Whoever joins ends with a result that must be stored, whatever setting says that it is not.
    (JOIN, {"ignore_result": True}, IGNORED),
    (JOIN, {"conf": {"task_ignore_result": True}}, IGNORED),
    ({}, {"name": "odd{name}"}, "needs a scope of its own"),  # braces mark the cluster slot
    ({}, {"base": CallsTheBody}, r"CallsTheBody.__call__ does not call super\(\).__call__"),
]


@pytest.mark.parametrize(("options", "task", "message"), REFUSED)
def test_bad_task_is_refused_when_bound(app, options, task, message):
    """An app with a bad option, a name without a scope, or a `__call__` that skips ours does not start."""
    app.conf.result_backend = NOWHERE
    app.guarded(singleton=options, **task)
    with pytest.raises(OptionError, match=message):
        app.finalize()


def test_layers_are_merged_from_app_to_task(app):
    """App defaults, base class, task: the nearest wins. Durations are seconds or timedelta."""
    app.conf.setnx_defaults = {"lease": 1, "max_wait": 1, "retry_delay_max": 99, "scope": "app"}

    class Base(SingletonTask):
        abstract = True
        singleton = {"lease": 2, "max_wait": 2}

    options = options_of(app.guarded(base=Base, singleton={"lease": timedelta(minutes=2)}))
    assert (options.lease, options.max_wait, options.retry_delay_max, options.scope) == (120, 2, 99, "app")


def test_decorator_supplies_the_options_of_a_singleton_task(app):
    """With base=SingletonTask the decorator does nothing else; two places for one truth are refused."""
    assert options_of(app.decorated(task={"base": SingletonTask}, lease=7)).lease == 7
    both = App()
    both.decorated(task={"base": SingletonTask, "singleton": {"lease": 1}}, lease=7)
    with pytest.raises(OptionError, match=r"has both @singleton\(...\) and singleton="):
        both.finalize()


def test_decorator_above_the_task_explains_the_order(app):
    """@singleton on top of @app.task would guard nothing."""
    task = app.task(shared=False)(nothing)
    bound = app.tasks[task.name]
    for decorator, found in ((singleton(lease=1), task), (singleton, task), (singleton, bound)):
        with pytest.raises(OptionError, match="put it below"):
            decorator(found)


def test_decorator_refuses_bad_options_at_once():
    """The typo is reported at the line that has it."""
    with pytest.raises(OptionError, match="did you mean 'lease'"):
        singleton(leese=1)(nothing)
    with pytest.raises(OptionError, match="guards a task's function, not 5"):
        singleton(5)


def test_decorator_works_without_parentheses(app):
    """@singleton alone means the defaults."""

    @app.task(shared=False)
    @singleton
    def t(a: int) -> int:
        """Doc."""
        return a

    assert t(5) == 5
    assert (t.__name__, t.__doc__) == ("t", "Doc.")


MATCHING = [{"autoretry_for": retried} for retried in ((Exception,), (ValueError, AlreadyRunning))]
MAY_RAISE = [{"on_conflict": "raise"}, {"on_conflict": "retry", "max_wait": 5}]


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        ({"key": "nobody"}, {}, "names 'nobody'"),
        ({"hold_on_retry": True}, {}, "add base=SingletonTask"),
        ({"on_conflict": "wait"}, {}, "on_conflict='wait' of .* add base=SingletonTask"),
        ({"on_conflict": "join"}, {}, "on_conflict='join' of .* add base=SingletonTask"),
        # autoretry_for would retry our error
        *[(options, task, "add base=SingletonTask") for options in MAY_RAISE for task in MATCHING],
    ],
)
def test_decorated_function_is_refused_what_needs_the_base_class(app, options, task, message):
    """When the app is finalized, not on the first run; the message says what to add."""
    app.conf.result_backend = NOWHERE
    app.decorated(task=task, **options)
    with pytest.raises(OptionError, match=message):
        app.finalize()


@pytest.mark.parametrize(
    "task",
    [
        {"autoretry_for": (ValueError,)},
        {"autoretry_for": (Exception,), "dont_autoretry_for": (AlreadyRunning,)},
    ],
)
def test_decorated_raise_under_another_autoretry_is_fine(app, task):
    """An autoretry that does not match, or spares our error, is no trouble."""
    app.decorated(task=task, on_conflict="raise")
    app.finalize()


ANY_WAIT = [{}, {"max_wait": 5}, {"max_wait": 0}, {"dedupe": "until_done"}]
MAY_WAIT = [
    *(("join", others, {"conf": {"result_backend": NOWHERE}}) for others in ANY_WAIT),
    # What is published during a run must run after it: with until_started it waits, and does not join.
    *(("wait", others, {"ignore_result": True}) for others in (*ANY_WAIT, {"dedupe": "until_started"})),
]


@pytest.mark.parametrize(("policy", "others", "task"), MAY_WAIT)
def test_joining_needs_a_stored_result_and_waiting_none(app, policy, others, task):
    """A call may wait in line, or join, for a while or for ever, and be the only one queued or running."""
    assert options_of(app.guarded(singleton={"on_conflict": policy, **others}, **task)).on_conflict == policy


@pytest.mark.parametrize("backend", [None, "disabled://", "rpc://"])
def test_join_without_a_lasting_result_stops_the_worker(app, backend):
    """No backend, or one whose results only the caller can read: nobody else could end with them."""
    app.conf.result_backend = backend
    app.guarded(singleton={"on_conflict": "join"})
    app.finalize()  # a producer needs no results
    with pytest.raises(OptionError, match="needs a result backend that all workers can read"):
        LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


def test_single_call_cannot_join_what_is_not_stored(app):
    """The option of one call is held to the same rule, when it is published."""
    with pytest.raises(OptionError, match="on_conflict='join' and ignore_result"):
        app.guarded().apply_async(ignore_result=True, singleton={"on_conflict": "join"})


def test_our_errors_are_expected_of_both_kinds(app):
    """AlreadyRunning and LockTimeout are in `throws`: no traceback in the log."""
    own = app.guarded(throws=(KeyError,))
    decorated = app.decorated(task={"name": "u"})
    app.finalize()
    for task in (own, decorated):
        assert issubclass(AlreadyRunning, task.throws)
        assert issubclass(LockTimeout, task.throws)
    assert issubclass(KeyError, own.throws)


def test_celerys_own_tasks_are_not_guarded():
    """SingletonTask may be the task class of the whole app."""
    app = App(task_cls=SingletonTask)
    task = app.task(shared=False)(nothing)
    app.finalize()
    assert app.tasks[task.name]._guard is not None
    assert app.tasks["celery.chord_unlock"]._guard is None


def test_signature_of_a_wrapped_function_is_followed(app):
    """functools.wraps-ed functions are keyed by the arguments of what they wrap."""

    def t(self: Any, a: int, b: int = 2) -> None: ...

    wrapped = functools.wraps(t)(lambda *args, **kwargs: t(*args, **kwargs))
    task = app.guarded(wrapped, bind=True, singleton={"key": "a"}, autoretry_for=(ValueError,))
    guard = app.tasks[task.name]._guard
    assert guard.key((1,), {}, {}) == guard.key((), {"a": 1, "b": 5}, {})
    with pytest.raises(UnkeyableCall):
        guard.key((), {}, {})


def test_shared_task_is_bound_to_every_app():
    """A shared task has the defaults of the app it runs in."""
    shared_task(base=SingletonTask, name="shared.t")(nothing)
    for lease in (5, 6):
        app = App()
        app.conf.setnx_defaults = {"lease": lease}
        app.finalize()
        assert options_of(app.tasks["shared.t"]).lease == lease


def test_publishing_an_unkeyable_call_fails_at_the_caller(app):
    """The caller learns it; nothing is sent."""
    task = app.guarded()
    with pytest.raises(UnkeyableCall, match="argument 'a' of type object"):
        task.delay(object())
    with pytest.raises(TypeError):
        task.delay(1, 2, 3)
