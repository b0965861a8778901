"""Binding a task: options are settled, bad ones refused, before anything runs."""

import asyncio
import functools
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, shared_task
from celery.worker.request import Request

from celery_setnx import (
    AlreadyRunning,
    LockTimeout,
    OptionError,
    SingletonTask,
    UnkeyableCall,
    check,
    current_lock,
    send_task,
    singleton,
)
from celery_setnx.arguments import Arguments
from celery_setnx.doctor.trial import LockServerCheck
from celery_setnx.request import SingletonRequest
from celery_setnx.testing import assert_released, guarded, hold

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


def start_worker_of(app: Celery) -> None:
    """What a worker of the app does first with its tasks; its lock server does not answer."""
    LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


def options_of(task: Any) -> Any:
    return task.app.tasks[task.name]._guard.options


class OwnRequest(Request):  # type: ignore[misc]
    """Not derived from ours: nobody frees what a revoked call or a dead child leaves behind."""


class BesideOurs(SingletonRequest, OwnRequest):
    """Another library's Request, with ours before it."""


class Batching(Task):  # type: ignore[misc]
    """As celery-batches has it: a Strategy that hands the pool a function of its own."""

    abstract = True

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Any:
        return consumer.pool.apply_async


class Starting(Task):  # type: ignore[misc]
    """The same by another hook."""

    abstract = True

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        return consumer.pool.apply_async


class Counting(Task):  # type: ignore[misc]
    """Goes Celery's own way in the end."""

    abstract = True

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        return super().start_strategy(app, consumer, **options)


class Awaiting(Task):  # type: ignore[misc]
    """Runs the coroutine, below our `__call__` and so under the lock."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(super().__call__(*args, **kwargs))


class Locked(Task):  # type: ignore[misc]
    """Another library's, with an attribute of the same name."""

    abstract = True
    singleton = None


def of(*bases: type, **attributes: Any) -> type:
    """An abstract SingletonTask that is also these."""
    return type("Mixed", (*bases, SingletonTask), {"abstract": True, **attributes})


BOTH = type("Both", (SingletonTask, Awaiting), {"abstract": True})


async def awaitable(a: Any = 1, b: Any = 2) -> str:
    """A body that somebody must await."""
    return "awaited"


async def stream(a: Any = 1, b: Any = 2) -> Any:
    yield a


def generator(a: Any = 1, b: Any = 2) -> Any:
    yield a


@functools.wraps(awaitable)
def awaiting(*args: Any, **kwargs: Any) -> Any:
    """What runs the coroutine is an ordinary function, whatever it wraps."""
    return asyncio.run(awaitable(*args, **kwargs))


UNRUN = {"async": awaitable, "stream": stream, "generator": generator}
JOIN = {"on_conflict": "join"}
IGNORED = r"on_conflict='join' and ignore_result.*use on_conflict='wait'"
REFUSED = [
    ({"leese": 1}, {}, "tasks.t has an unknown option 'leese'; did you mean 'lease'"),
    ({"lease": 0}, {}, "lease of tasks.t must be more than 0 seconds"),
    (
        {"key": "nobody"},
        {},
        r"key of tasks.t names 'nobody', which is not a parameter of tasks.t\(a=1, b=2\)",
    ),
    ({"key": ["a", "nobody"]}, {}, "names 'nobody'"),
    ({"key": "bb"}, {}, r"names 'bb', .* tasks.t\(a=1, b=2\); did you mean key='b'\?$"),
    ({"key": ["a", "bb"]}, {}, r"names 'bb', .*; did you mean 'b'\?$"),
    ({"key": "a.id"}, {}, r"names 'a.id', .*; did you mean key='{a.id}'\?$"),
    ({"key": "bb.id.0"}, {}, r"did you mean key='{b.id.0}'\?$"),
    ({"key": "a, b"}, {}, r"names 'a, b', .*; did you mean key=\['a', 'b'\]\?$"),
    ({"key": "a,b.id"}, {}, r"did you mean key='{a},{b.id}'\?$"),
    ({"key": "{bb.id}"}, {}, r"names 'bb', .*; did you mean 'b'\?$"),
    ({"key": "a.__class__"}, {}, "use a parameter's name, a template in braces"),
    ({"key": "a[0]"}, {}, "use a parameter's name, a template in braces"),
    ({"key": ""}, {}, "use a parameter's name, a template in braces"),
    ({"key": [7]}, {}, "names 7, which is not a parameter"),
    ({"key": "x:{a"}, {}, "key template 'x:{a' of tasks.t is broken"),
    ({"key": "x:{nobody}"}, {}, "names 'nobody'"),
    ({"on_conflict": "waits"}, {}, "on_conflict of tasks.t must be one of .*; did you mean 'wait'"),
    # Whoever joins ends with a result that must be stored, whatever setting says that it is not.
    (JOIN, {"ignore_result": True}, IGNORED),
    (JOIN, {"conf": {"task_ignore_result": True}}, IGNORED),
    # A skipped call would fail where its result is stored.
    ({"skip_result": object()}, {}, "skip_result of tasks.t cannot be stored as a result .EncodeError: "),
    ({"skip_result": print}, {}, "skip_result of tasks.t cannot be stored .* would fail; use text, a"),
    ({"skip_result": print}, {"conf": {"result_serializer": "yaml"}}, "with result_serializer='yaml'"),
    ({}, {"name": "odd{name}"}, "give it a scope"),  # braces mark the cluster slot
    # Its worker would look after nothing that a call leaves behind.
    ({}, {"Request": OwnRequest}, "has its own Request .*OwnRequest.*; derive it from SingletonRequest"),
    ({}, {"Request": "celery.worker.request:Request"}, "its own Request .celery.worker.request:Request"),
    # Nobody would lock.
    ({}, {"base": of(Batching)}, "has its own Strategy .*Batching.Strategy.* without their lock"),
    ({}, {"Strategy": "celery.worker.strategy:hybrid_to_proto2"}, "its own Strategy"),
    *(({}, {"function": function}, "tasks.t is an? (async def|generator)") for function in UNRUN.values()),
    ({}, {"function": awaitable, "pydantic": True}, "is an async def"),
    # Nobody would read them, and nothing would be locked.
    ({"key": "a"}, {"base": Task}, "has singleton={'key': 'a'}, but is no SingletonTask: .* add base=Single"),
    ({}, {"on_conflict": "wait", "key": "a"}, r"write singleton={'key': 'a', 'on_conflict': 'wait'}"),
    ({"key": "a"}, {"dedupe": "until_done"}, "has dedupe outside of singleton={...}, where it has no effect"),
    ({}, {"base": of(on_conflict=print)}, "has on_conflict outside of"),
    ({}, {"conf": {"setnx_ulr": NOWHERE}}, "there is no setting 'setnx_ulr'; did you mean 'setnx_url'"),
]


@pytest.mark.parametrize(("options", "task", "message"), REFUSED)
def test_bad_task_is_refused_when_bound(app, options, task, message):
    """A bad option, or a name without a scope: workers do not start, and each call raises it."""
    app.conf.result_backend = NOWHERE
    app.guarded(singleton=options, **task)
    with pytest.raises(OptionError, match=message):
        check(app)


FINE = [
    {"Request": SingletonRequest},
    {"Request": BesideOurs},
    {"Request": "celery_setnx.request:SingletonRequest"},
    {"Strategy": "celery.worker.strategy:default"},
    {"base": of(Counting)},
    {"function": awaiting},
    # The base class that stands below ours runs the coroutine.
    {"base": BOTH, "function": awaitable},
    # Celery's own, and what a task may have for itself.
    {"rate_limit": "5/s", "max_retries": 3, "default_retry_delay": 5},
    {"key": "a", "lease": 5, "once": {}, "unique_on": "a"},
    {"base": of(type("Deduping", (Task,), {"abstract": True, "dedupe": True}))},  # which reads that itself
    *({"base": of(dedupe=code)} for code in (nothing, property(nothing), functools.cached_property(nothing))),
    # Only a mapping of nothing but our options, that no base class knows, can be meant for us alone.
    {"base": Locked, "singleton": {"key": "a"}},
    *({"base": Task, "singleton": their} for their in (True, {"key": "a", "ttl": 5}, {})),
    {"base": Task, "on_conflict": "wait"},
    # What is skipped is stored, where the serializer is known, or never.
    {"singleton": {"skip_result": {"a": [1, None]}}},
    *(
        {"singleton": {"skip_result": object()}, "conf": {"result_serializer": serializer}}
        for serializer in ("pickle", "one of the workers")
    ),
    {"singleton": {"skip_result": object()}, "ignore_result": True},
]


@pytest.mark.parametrize("task", FINE)
def test_task_that_may_be_meant_so_is_bound(app, task):
    """Nothing is refused that works, or that may be another's."""
    app.guarded(**task)
    check(app)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"singleton": {"skip_result": object()}}, r"skip_result of tasks\.t cannot be stored"),
        ({"singleton": JOIN, "ignore_result": True}, "on_conflict='join' and ignore_result"),
    ],
    ids=["skip_result", "join"],
)
def test_options_of_one_call_are_held_to_the_same_rules(app, options, message):
    """They would travel in the message."""
    with pytest.raises(OptionError, match=message):
        app.guarded().apply_async((1,), **options)


def test_coroutine_that_a_base_class_runs_has_its_lock(app, server, locks):
    """As that class stands below ours: the lock is given back when it has run."""
    app.conf.setnx_url = server.url(1)
    held: list[Any] = []

    async def body(a: Any) -> str:
        await asyncio.sleep(0)
        held.append(current_lock())
        return "awaited"

    task = app.guarded(body, base=BOTH)
    app.finalize()
    with guarded(app):
        assert task.apply([1]).get() == "awaited"
    assert [lock.key for lock in held] == [task.lock_key(1)]
    assert_released(app)


def test_binding_imports_no_request():
    """Who only publishes does not pay for it, and has no receivers of a worker's signals."""
    code = (
        "import sys, celery, celery_setnx\n"
        "app = celery.Celery('lean', broker='memory://', set_as_current=False)\n"
        "def body(): pass\n"
        "app.task(name='lean', base=celery_setnx.SingletonTask)(body)\n"
        "app.finalize()\n"
        "print(app.tasks['lean'].Request, 'celery_setnx.request' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "celery_setnx.request:SingletonRequest False\n", found.stderr


def test_coroutine_that_a_body_returns_fails_the_task(app, server):
    """A decorator that only hands on what an `async def` gives cannot be told from one that runs it."""
    app.conf.setnx_url = server.url(1)
    handed_on = functools.wraps(awaitable)(lambda *args: awaitable(*args))
    tasks = [app.guarded(handed_on, name="own"), app.task(singleton(handed_on), shared=False, name="other")]
    app.finalize()
    with guarded(app):
        for task in tasks:
            with pytest.raises(OptionError, match=f"{task.name} returns a coroutine"):
                task.apply(throw=True)


@pytest.mark.parametrize("task", [{"singleton": {"key": "a"}}, {"decorated": {"dedupe": "until_done"}}])
def test_task_that_comes_after_its_app_was_finalized_stops_the_worker(app, task):
    """Celery binds such a task at once, and looks at no other."""
    app.guarded(name="sound")
    app.finalize()
    if "decorated" in task:
        app.decorated(**task["decorated"])
    else:
        app.guarded(base=Task, **task)
    with pytest.raises(OptionError, match="add base=SingletonTask"):
        start_worker_of(app)


@pytest.mark.parametrize("published", ["one", "many", "by name"])
def test_options_of_a_call_outside_of_singleton_are_refused(app, published):
    """Celery would send them as properties of the message, which nobody reads."""
    task = app.guarded()
    publish = {"one": task.apply_async, "many": task.fan_out, "by name": partial(send_task, app, task.name)}
    with pytest.raises(
        OptionError, match=r"a call of tasks.t has key, dedupe .* write singleton={'key': 'a', 'd"
    ):
        publish[published]([], dedupe="until_done", key="a")


@pytest.mark.parametrize("run", [awaitable, staticmethod(functools.partial(awaitable, b=3))])
def test_class_whose_run_must_be_awaited_is_refused(app, run):
    """As a function is."""
    with pytest.raises(OptionError, match="is an async def"):
        app.register_task(of(run=run, name="tasks.t")()).delay()


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
        check(both)


def test_decorator_above_the_task_explains_the_order(app):
    """@singleton on top of @app.task would guard nothing."""
    task = app.task(shared=False)(nothing)
    bound = app.tasks[task.name]
    for decorator, found in ((singleton(lease=1), task), (singleton, task), (singleton, bound)):
        with pytest.raises(OptionError, match="put it below"):
            decorator(found)


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: singleton(leese=1)(nothing), "did you mean 'lease'"),
        (lambda: singleton(5), "guards a task's function, not 5"),
        *((partial(singleton(key="a"), each), r"is an? (async def|generator)") for each in UNRUN.values()),
    ],
    ids=["option", "function", *UNRUN],
)
def test_decorator_refuses_what_it_cannot_guard_at_once(decorate, message):
    """A typo, or what has not run when it returns, is reported at the line that has it."""
    with pytest.raises(OptionError, match=message):
        decorate()


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
        # Its body is called with other arguments, and outside of any call.
        *[({}, {"base": base}, "has its own (start_s|S)trategy") for base in (Batching, Starting)],
        ({"rate": "10/m"}, {}, "a rate with on_conflict='auto' of .* add base=SingletonTask"),  # which waits
        # autoretry_for would retry our error
        *[(options, task, "add base=SingletonTask") for options in MAY_RAISE for task in MATCHING],
    ],
)
def test_decorated_function_is_refused_what_needs_the_base_class(app, options, task, message):
    """When the app is finalized, not on the first run; the message says what to add."""
    app.conf.result_backend = NOWHERE
    app.decorated(task=task, **options)
    with pytest.raises(OptionError, match=message):
        check(app)


SPARED = ({"autoretry_for": (ValueError,)}, {**MATCHING[0], "dont_autoretry_for": (AlreadyRunning,)})
PACED = [{"rate": "10/m", "on_conflict": policy} for policy in ("skip", "retry", "raise")]


@pytest.mark.parametrize(
    ("options", "task"),
    [*((options, {}) for options in PACED), *(({"on_conflict": "raise"}, task) for task in SPARED)],
)
def test_decorated_function_may_have_what_needs_no_base_class(app, options, task):
    """A rate that nobody waits for; an autoretry that does not match, or spares our error."""
    app.decorated(task=task, **options)
    check(app)


def test_callable_of_a_decorated_function_cannot_wait(app, server):
    """Only a conflict shows what it decides: it fails then, and says what to add."""
    app.conf.setnx_url = server.url(1)
    task = app.decorated(on_conflict=lambda conflict: conflict.wait())
    app.finalize()
    refused = pytest.raises(OptionError, match=r"conflict.wait\(\) of")
    with guarded(app), hold(app.tasks["tasks.t"], 1), refused:
        task.apply([1], throw=True)


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
        start_worker_of(app)


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
    assert guard.key(Arguments((1,), {}), {}) == guard.key(Arguments((), {"a": 1, "b": 5}), {})
    with pytest.raises(UnkeyableCall):
        guard.key(Arguments((), {}), {})


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


def test_bound_task_may_take_its_self_among_any_arguments(app):
    """A decorator without functools.wraps, under bind=True."""

    @app.task(base=SingletonTask, bind=True, shared=False)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert wrapper.lock_key(1) != wrapper.lock_key(2)


def test_decorator_may_take_what_the_function_does_not(app):
    """Celery asks what the decorator takes; @singleton, which takes anything, is no such decorator."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("started_at", None)
            return function(*args, **kwargs)

        return wrapper

    def settle(self: Task, account_id: int) -> None: ...

    options = {"base": SingletonTask, "bind": True, "shared": False}
    inner = app.task(timed(singleton(key="account_id")(settle)), name="inner", **options)
    outer = app.task(singleton(key="account_id")(timed(settle)), name="outer", **options)
    bare = app.task(singleton(key="account_id")(settle), name="bare", **options)
    for task in (inner, outer):
        assert task.lock_key(7, started_at=1.0) == task.lock_key(7)
    with pytest.raises(UnkeyableCall, match="unexpected keyword argument 'started_at'"):
        bare.lock_key(7, started_at=1.0)
