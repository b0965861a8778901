"""Binding a task: options are settled, bad ones refused, before anything runs."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, shared_task

from celery_setnx import AlreadyRunning, LockTimeout, OptionError, SingletonTask, UnkeyableCall, singleton
from celery_setnx.trial import LockServerCheck


@pytest.fixture
def app() -> Celery:
    """An app of its own, whose tasks are bound when it is finalized."""
    app = Celery("binding", set_as_current=False, broker="redis://localhost:1/0")
    app.conf.task_always_eager = False
    return app


def options_of(task: Any) -> Any:
    return task._guard.options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leese": 1}, "tasks.t has an unknown option 'leese'; did you mean 'lease'"),
        ({"lease": 0}, "lease of tasks.t must be positive"),
        ({"key": "nobody"}, r"key of tasks.t names 'nobody', which is no parameter of tasks.t\(a, b=2\)"),
        ({"key": ["a", "nobody"]}, "names 'nobody'"),
        ({"key": "x:{a"}, "key template 'x:{a' of tasks.t is broken"),
        ({"key": "x:{nobody}"}, "names 'nobody'"),
        ({"on_conflict": "waits"}, "on_conflict of tasks.t must be one of .*; did you mean 'wait'"),
    ],
)
def test_bad_option_is_refused_when_bound(app, options, message):
    """An app with a bad option does not start."""

    @app.task(shared=False, base=SingletonTask, name="tasks.t", singleton=options)
    def t(a: int, b: int = 2) -> None: ...

    with pytest.raises(OptionError, match=message):
        app.finalize()


def test_layers_are_merged_from_app_to_task(app):
    """App defaults, base class, task: the nearest wins."""
    app.conf.setnx_defaults = {"lease": 1, "max_wait": 1, "retry_delay_max": 99}

    class Base(SingletonTask):
        abstract = True
        singleton = {"lease": 2, "max_wait": 2}

    @app.task(shared=False, base=Base, singleton={"lease": 3})
    def t() -> None: ...

    options = options_of(app.tasks[t.name])
    assert (options.lease, options.max_wait, options.retry_delay_max) == (3, 2, 99)


def test_decorator_supplies_the_options_of_a_singleton_task(app):
    """With base=SingletonTask the decorator does nothing else."""

    @app.task(shared=False, base=SingletonTask)
    @singleton(lease=7)
    def t() -> None: ...

    assert options_of(app.tasks[t.name]).lease == 7


def test_decorator_and_attribute_together_are_refused(app):
    """Two places for one truth."""

    @app.task(shared=False, base=SingletonTask, singleton={"lease": 1})
    @singleton(lease=7)
    def t() -> None: ...

    with pytest.raises(OptionError, match=r"has both @singleton\(...\) and singleton="):
        app.finalize()


def test_decorator_above_the_task_explains_the_order(app):
    """@singleton on top of @app.task would guard nothing."""

    @app.task(shared=False)
    def t() -> None: ...

    with pytest.raises(OptionError, match="put it below"):
        singleton(lease=1)(t)
    with pytest.raises(OptionError, match="put it below"):
        singleton(t)
    with pytest.raises(OptionError, match="put it below"):
        singleton(app.tasks[t.name])


def test_decorator_refuses_bad_options_at_once():
    """The typo is reported at the line that has it."""
    with pytest.raises(OptionError, match="did you mean 'lease'"):

        @singleton(leese=1)
        def t() -> None: ...

    with pytest.raises(OptionError, match="guards a task's function, not 5"):
        singleton(5)  # type: ignore[type-var]


def test_decorator_works_without_parentheses(app):
    """@singleton alone means the defaults."""

    @app.task(shared=False)
    @singleton
    def t(a: int) -> int:
        """Doc."""
        return a

    assert t(5) == 5
    assert (t.__name__, t.__doc__) == ("t", "Doc.")


def test_decorated_function_with_a_bad_key_stops_the_app(app):
    """A key that names no parameter is found when the app is finalized, not on the first run."""

    @app.task(shared=False)
    @singleton(key="nobody")
    def t(a: int) -> None: ...

    with pytest.raises(OptionError, match="names 'nobody'"):
        app.finalize()


@pytest.mark.parametrize("options", [{"on_conflict": "raise"}, {"on_conflict": "retry", "max_wait": 5}])
@pytest.mark.parametrize("retried", [(Exception,), (ValueError, AlreadyRunning)])
def test_decorated_raise_under_a_matching_autoretry_is_refused(app, options, retried):
    """autoretry_for would retry our error; the message says what to do."""

    @app.task(shared=False, autoretry_for=retried)
    @singleton(**options)
    def t() -> None: ...

    with pytest.raises(OptionError, match="add base=SingletonTask"):
        app.finalize()


def test_decorated_raise_under_another_autoretry_is_fine(app):
    """An autoretry that does not match, or spares our error, is no trouble."""

    @app.task(shared=False, autoretry_for=(ValueError,))
    @singleton(on_conflict="raise")
    def t() -> None: ...

    @app.task(shared=False, autoretry_for=(Exception,), dont_autoretry_for=(AlreadyRunning,))
    @singleton(on_conflict="raise")
    def u() -> None: ...

    app.finalize()


def test_decorated_function_cannot_hold_its_lock_for_a_retry(app):
    """What needs the base class is refused, and the message says what to add."""

    @app.task(shared=False)
    @singleton(hold_on_retry=True)
    def t() -> None: ...

    with pytest.raises(OptionError, match="add base=SingletonTask"):
        app.finalize()


@pytest.mark.parametrize("policy", ["wait", "join"])
def test_decorated_function_cannot_wait_in_line(app, policy):
    """Its delivery ends before it has run: that needs the base class."""
    app.conf.result_backend = "redis://localhost:1/0"

    @app.task(shared=False)
    @singleton(on_conflict=policy)
    def t() -> None: ...

    with pytest.raises(OptionError, match=f"on_conflict='{policy}' of .* add base=SingletonTask"):
        app.finalize()


@pytest.mark.parametrize("options", [{}, {"max_wait": 5}, {"dedupe": "until_started"}])
def test_waiting_needs_no_result(app, options):
    """A task whose result nobody wants, of an app without a result backend, may wait in line."""

    @app.task(
        shared=False, base=SingletonTask, ignore_result=True, singleton={"on_conflict": "wait", **options}
    )
    def t() -> None: ...

    assert options_of(app.tasks[t.name]).on_conflict == "wait"


@pytest.mark.parametrize("ignored_by", ["task", "app"])
def test_join_of_an_ignored_result_is_refused(app, ignored_by):
    """Whoever joins ends with a result that must be stored, whatever setting says that it is not."""
    app.conf.update(result_backend="redis://localhost:1/0", task_ignore_result=ignored_by == "app")
    ignored = {"ignore_result": True} if ignored_by == "task" else {}

    @app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "join"}, **ignored)
    def t() -> None: ...

    with pytest.raises(OptionError, match=r"on_conflict='join' and ignore_result.*use on_conflict='wait'"):
        app.finalize()


@pytest.mark.parametrize("backend", [None, "disabled://", "rpc://"])
def test_join_without_a_lasting_result_stops_the_worker(app, backend):
    """No backend, or one whose results only the caller can read: nobody else could end with them."""
    app.conf.result_backend = backend

    @app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "join"})
    def t() -> None: ...

    app.finalize()  # a producer needs no results
    with pytest.raises(OptionError, match="needs a result backend that all workers can read"):
        LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


@pytest.mark.parametrize("options", [{}, {"max_wait": 5}, {"dedupe": "until_done"}])
def test_join_of_a_stored_result_is_bound(app, options):
    """With a result backend any task may join, for as long as it likes."""
    app.conf.result_backend = "redis://localhost:1/0"

    @app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "join", **options})
    def t() -> None: ...

    assert options_of(app.tasks[t.name]).on_conflict == "join"


def test_single_call_cannot_join_what_is_not_stored(app):
    """The option of one call is held to the same rule, when it is published."""

    @app.task(shared=False, base=SingletonTask)
    def t() -> None: ...

    with pytest.raises(OptionError, match="on_conflict='join' and ignore_result"):
        app.tasks[t.name].apply_async(ignore_result=True, singleton={"on_conflict": "join"})


def test_our_errors_are_expected_of_both_kinds(app):
    """AlreadyRunning and LockTimeout are in `throws`: no traceback in the log."""

    @app.task(shared=False, base=SingletonTask, throws=(KeyError,))
    def t() -> None: ...

    @app.task(shared=False)
    @singleton
    def u() -> None: ...

    app.finalize()
    for task in (t, u):
        assert issubclass(AlreadyRunning, task.throws)
        assert issubclass(LockTimeout, task.throws)
    assert issubclass(KeyError, t.throws)


def test_subclass_call_that_skips_ours_is_refused(app):
    """A `__call__` that runs the body itself would run it without its lock."""

    class Contextual(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    @app.task(shared=False, base=Contextual)
    def t() -> None: ...

    with pytest.raises(OptionError, match=r"Contextual.__call__ does not call super\(\).__call__"):
        app.finalize()


def test_celerys_own_tasks_are_not_guarded():
    """SingletonTask may be the task class of the whole app."""
    app = Celery("all", task_cls=SingletonTask, set_as_current=False, broker="redis://localhost:1/0")

    @app.task(shared=False)
    def t() -> None: ...

    app.finalize()
    assert app.tasks[t.name]._guard is not None
    assert app.tasks["celery.chord_unlock"]._guard is None


def test_task_name_with_braces_needs_a_scope(app):
    """Braces mark the cluster slot."""

    @app.task(shared=False, base=SingletonTask, name="odd{name}")
    def t() -> None: ...

    with pytest.raises(OptionError, match="needs a scope of its own"):
        app.finalize()


def test_signature_of_a_wrapped_function_is_followed(app):
    """functools.wraps-ed functions are keyed by the arguments of what they wrap."""

    def wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapped

    @app.task(
        shared=False, base=SingletonTask, bind=True, singleton={"key": "a"}, autoretry_for=(ValueError,)
    )
    @wrapper
    def t(self: Any, a: int, b: int = 2) -> None: ...

    guard = app.tasks[t.name]._guard
    assert guard.key((1,), {}, {}) == guard.key((), {"a": 1, "b": 5}, {})
    with pytest.raises(UnkeyableCall):
        guard.key((), {}, {})


def test_shared_task_is_bound_to_every_app():
    """A shared task has the defaults of the app it runs in."""

    @shared_task(base=SingletonTask, name="shared.t")
    def t() -> None: ...

    for lease in (5, 6):
        app = Celery(f"app{lease}", set_as_current=False, broker="redis://localhost:1/0")
        app.conf.setnx_defaults = {"lease": lease}
        app.finalize()
        assert options_of(app.tasks["shared.t"]).lease == lease


def test_publishing_an_unkeyable_call_fails_at_the_caller(app):
    """The caller learns it; nothing is sent."""

    @app.task(shared=False, base=SingletonTask)
    def t(a: Any) -> None: ...

    with pytest.raises(UnkeyableCall, match="argument 'a' of type object"):
        t.delay(object())
    with pytest.raises(TypeError):
        t.delay(1, 2)


def test_direct_and_eager_calls_are_not_guarded(app):
    """No server is needed to call a task as a function, or eagerly; there is no lock then."""

    @app.task(shared=False, base=SingletonTask, bind=True, singleton={"key": "a"})
    def t(self: Task, a: int) -> Any:
        return [a, self.lock]

    assert t(1) == [1, None]
    assert t.apply([2]).get() == [2, None]
    app.conf.task_always_eager = True
    assert t.delay(3).get() == [3, None]
    assert t.apply_async([4], singleton={"lease": 5}).get() == [4, None]


def test_decorated_direct_and_eager_calls_are_not_guarded(app):
    """The same for a decorated function."""

    @app.task(shared=False)
    @singleton(key="a")
    def t(a: int) -> int:
        return a

    app.conf.task_always_eager = True
    assert (t(1), t.apply([2]).get(), t.delay(3).get()) == (1, 2, 3)
