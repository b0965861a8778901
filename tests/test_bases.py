"""What stands between a task and its lock: base classes that know nothing of it, and loops of Celery's."""

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from unittest.mock import MagicMock

import pytest
from celery import Celery, Task, group
from celery.canvas import chunks, xmap, xstarmap
from celery.exceptions import Ignore, Retry
from celery.states import FAILURE

from celery_setnx import OptionError, SingletonTask, current_lock, is_skipped, singleton
from celery_setnx.call.message import HEADER
from celery_setnx.testing import assert_released, guarded, hold, singleton_disabled
from tests.harness import raising

pytestmark = pytest.mark.usefixtures("locks")


@pytest.fixture(scope="module")
def worker(server, module_worker) -> Any:
    return module_worker("tests.baseapp", concurrency=2, queues="bases")


@pytest.fixture
def bases(worker) -> Any:
    """The tasks that the worker runs."""
    from tests import baseapp

    return baseapp


KINDS = """
named named-behind of-the-app decorated property mixin classy another annotated patched twice
"""


@pytest.mark.parametrize("kind", KINDS.split())
def test_call_of_a_base_class_is_under_its_lock(bases, journal, gates, name, kind):
    """Whatever its `__call__` calls by name: it is entered under the lock, and by no call that is skipped."""
    task = bases.tasks[kind]
    first = journal.reached("start", task.delay(name))
    (started,) = journal.entries(what="start", task_id=first.id)
    assert started["key"] == task.lock_key(name)
    second = task.delay(name)
    assert is_skipped(second.get(timeout=60))
    gates(name, 2)
    assert first.get(timeout=60) == name
    assert {entry["task_id"] for entry in journal.entries(what="entered")} == {first.id}
    assert_released(task, within=30)


@pytest.fixture
def app(server) -> Iterator[Celery]:
    """An app on an in-memory broker, whose locks are in Redis."""
    app = Celery("bases", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.setnx_url = server.url(1)
    yield app
    app.close()


def settle(account: int, why: str = "") -> Any:
    """A body, which says under which lock it ran."""
    lock = current_lock()
    return lock and lock.key


def declare(app: Celery, *bases: type, **options: Any) -> Any:
    base = type("Base", (*bases, SingletonTask), {"abstract": True})
    singleton = {"key": "account", **options.pop("singleton", {})}
    return app.task(base=base, name="settle", shared=False, singleton=singleton, **options)(settle)


class Refused(Task):  # type: ignore[misc]
    """Its `__call__` must not be entered."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("entered")


class Changing(Task):  # type: ignore[misc]
    """Changes what its bodies get, and what they return."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [Task.__call__(self, 8, **kwargs)]


def test_call_that_is_skipped_enters_no_call_of_a_base_class(app):
    """Its result is not what the base class would make of it."""
    task = declare(app, Refused)
    with guarded(app), hold(task, 7):
        assert is_skipped(task.apply([7]).get())


@pytest.fixture
def hooked(app) -> tuple[Any, list[str]]:
    """A task whose body raises what it is given, or returns it; and which of its hooks have been called."""
    told: list[str] = []

    def noting(hook: str) -> Any:
        def note(self: Any, *_details: Any) -> None:
            told.append(f"{hook} locked" if self.lock and not self.lock.lost else hook)
            if hook == "before_start" and "unready" in self.request.args:
                raise ZeroDivisionError

        return note

    def body(account: int, end: Any = None) -> Any:
        told.append("body")
        if isinstance(end, Exception):
            raise end
        return end

    hooks = ("before_start", "on_success", "on_failure", "on_retry", "after_return")
    base = type("Base", (SingletonTask,), {"abstract": True, **{hook: noting(hook) for hook in hooks}})
    return app.task(base=base, name="hooked", shared=False, singleton={"key": "account"})(body), told


@pytest.mark.parametrize(
    ("end", "after"),
    [
        ("done", ["on_success", "after_return"]),
        (ZeroDivisionError(), ["on_failure", "after_return"]),
        (Retry(), ["on_retry"]),
        (Ignore(), []),
    ],
    ids=["success", "failure", "retry", "ignored"],
)
def test_hooks_of_a_call_that_runs_are_celerys(app, hooked, end, after):
    """`before_start` is called under the lock."""
    task, told = hooked
    with guarded(app):
        task.apply([7, end])
    assert [hook.removesuffix(" locked") for hook in told] == ["before_start", "body", *after]
    assert told[0] == "before_start locked"


def test_failing_before_start_fails_its_call_and_gives_the_lock_back(app, hooked):
    """As in Celery, the hooks for failures are called."""
    task, told = hooked
    with guarded(app):
        assert task.apply([7, "unready"]).state == FAILURE
    assert [hook.removesuffix(" locked") for hook in told] == ["before_start", "on_failure", "after_return"]
    assert_released(app)


@pytest.mark.parametrize(
    ("policy", "hooks"), [("skip", []), ("retry", []), ("wait", []), ("raise", ["on_failure"])]
)
def test_hooks_are_not_called_for_a_call_whose_body_does_not_begin(app, hooked, policy, hooks):
    """But for `on_failure` of a call that fails for its lock."""
    task, told = hooked
    task.singleton = {"key": "account", "on_conflict": policy}
    with guarded(app), hold(task, 7):
        task.apply([7])
    assert told == hooks


def test_hooks_are_not_called_for_a_call_without_a_key(app, hooked):
    """Nobody knows its lock: it fails before that is asked for."""
    task, told = hooked
    task.singleton = {"key": raising(ValueError)}
    with guarded(app):
        assert task.apply([7]).state == FAILURE
    assert told == ["on_failure"]


@pytest.fixture
def request_of(hooked) -> Iterator[Any]:
    """Has the hooked task called by one request, whatever is on it."""
    task, _told = hooked

    def push(**more: Any) -> None:
        task.push_request(id="id-1", args=[7], kwargs={}, is_eager=True, called_directly=False, **more)

    yield push
    task.pop_request()


@pytest.mark.parametrize("before", ["skipped", "ran"])
def test_request_that_is_used_again_has_nothing_of_the_delivery_before(app, hooked, request_of, before):
    """Neither its lock, nor that its body did not begin: a call that is not guarded has its hooks."""
    task, told = hooked
    request_of()
    with guarded(app):
        if before == "ran":
            assert task(7, "done") == "done"
        else:
            with hold(task, 7):
                assert is_skipped(task(7, "done"))
    told.clear()
    with singleton_disabled(app):
        assert task(7, "done") == "done"
        assert task.lock is None
        task.on_success("done", "id-1", [7], {})
    assert told == ["body", "on_success"]


def test_header_by_the_name_of_what_is_ours_is_a_header(app, hooked, request_of):
    """As of a client that sends on all that its own request has: the call is guarded, and has its hooks."""
    task, told = hooked
    ours = ("_setnx_run", "_setnx_running", "_setnx_start", "_setnx_no_body", "_setnx_said", "setnx_lock")
    request_of(**dict.fromkeys(ours, True))
    assert task.lock is None
    with guarded(app):
        with hold(task, 7):
            assert is_skipped(task(7, "done"))
        assert task(7, "done") == "done"
        task.on_success("done", "id-1", [7], {})
        assert task.apply_async([8], task_id="id-1", retries=1, queue="bases-on").id == "id-1"
    assert told == ["body", "on_success locked"]
    assert_released(app)


def test_body_gets_the_arguments_that_before_start_has_changed(app):
    """As in Celery, where the hook is given the objects that are unpacked for the body."""

    def unwrap(self: Any, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["tenant"] = kwargs.pop("wrapped")["tenant"]

    def body(account: int, **kwargs: Any) -> Any:
        return account, kwargs

    base = type("Base", (SingletonTask,), {"abstract": True, "before_start": unwrap})
    task = app.task(base=base, name="unwraps", shared=False, singleton={"key": "account"})(body)
    plain = app.task(base=type("P", (Task,), {"before_start": unwrap}), name="plain", shared=False)(body)
    with guarded(app):
        for each in (plain, task):
            assert each.apply([7], {"wrapped": {"tenant": "x"}}).get() == (7, {"tenant": "x"})


def test_call_that_a_base_class_gets_later_is_under_the_lock_too(app):
    """Libraries patch classes at any time, also after the tasks are bound."""
    base = type("Base", (SingletonTask,), {"abstract": True})
    task = app.task(base=base, name="settle", shared=False, singleton={"key": "account"})(settle)
    with guarded(app):
        assert task.apply([7]).get() == task.lock_key(7)
        base.__call__ = lambda self, *args, **kwargs: [current_lock().key, self.run(*args, **kwargs)]
        assert task.apply([7]).get() == [task.lock_key(7)] * 2
        base.__call__ = Refused.__call__
        with hold(task, 7):
            assert is_skipped(task.apply([7]).get())
    assert_released(app)


def test_key_is_that_of_the_message(app):
    """And not of the arguments that a base class makes of it."""
    task = declare(app, Changing)
    with guarded(app):
        with hold(task, 8):
            assert len(task.apply([7]).get()) == 1
        with hold(task, 7):
            assert is_skipped(task.apply([7]).get())
    assert_released(app)


def test_direct_calls_are_plain(app):
    """Of a program, of another task's body, of one's own, and by `super().run()`."""

    class Deep(SingletonTask):
        name = "deep"
        singleton = {"key": "depth", "on_conflict": "raise"}

        def run(self, depth: int) -> Any:
            held = current_lock()
            return [held and held.key, self(depth - 1) is not None if depth else None, settled(7)]

    class Deeper(Deep):
        name = "deeper"

        def run(self, depth: int) -> Any:
            return super().run(depth)

    settled, deep, deeper = declare(app), app.register_task(Deep()), app.register_task(Deeper())
    assert deep(1) == deeper(1) == [None, True, None]
    with guarded(app):
        for task in (deep, deeper):
            assert task.apply([1]).get() == [task.lock_key(1), True, None]
    assert_released(app)


def test_second_body_of_a_request_has_a_lock_of_its_own(app):
    """Whatever calls it again: what stands before the guard, or a decorator above @singleton."""
    task = declare(app)
    app.finalize()
    kind = type(app.tasks["settle"])
    call = kind.__call__
    kind.__call__ = lambda self, *args: [call(self, *args), current_lock() and "lost", call(self, *args)]

    def twice(function: Any) -> Any:
        def both(account: int) -> Any:
            return [function(account), function(account)]

        both.__wrapped__ = function
        return both

    plain = app.task(name="plain", shared=False)(twice(singleton(key="account")(settle)))
    with guarded(app):
        first, _, second = task.apply([7]).get()
        assert (first, second) == (task.lock_key(7),) * 2
        assert len(set(plain.apply([7]).get())) == 1
    assert_released(app)


def test_function_that_a_decorator_hides_is_refused(app):
    """Without functools.wraps nobody can tell that it is the task's: it would run without its lock."""

    def hiding(function: Any) -> Any:
        return lambda account: function(account)

    def run(account: int) -> Any:
        return hidden(account)

    hidden = hiding(singleton(key="account")(settle))
    task = app.task(name="plain", shared=False)(run)
    assert task(7) is None
    with guarded(app), pytest.raises(OptionError, match=r"settle guards nothing.* needs functools\.wraps"):
        task.apply([7], throw=True)


# Loops of Celery's


@pytest.fixture
def looped(app) -> dict[str, Any]:
    """Tasks whose bodies Celery may call in a loop."""
    by_function = app.task(name="by_function", shared=False)(singleton(key="account")(settle))

    class Plainly(Task):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    def run(account: int) -> str:
        return "plain"

    hooked = app.task(name="hooked", base=Plainly, shared=False)(singleton(key="account")(settle))
    plain = app.task(name="plain", shared=False)(run)
    return {"ours": declare(app), "function": by_function, "hooked": hooked, "plain": plain}


@pytest.mark.parametrize("loop", ["map", "starmap", "chunks"])
def test_loop_over_a_guarded_task_is_refused_where_it_is_made(looped, loop):
    """Its bodies would run without a lock, and nobody would say so."""
    arguments = ([(7,), (7,)], 2) if loop == "chunks" else ([(7,), (7,)],)
    with pytest.raises(OptionError, match=rf"{loop} of settle is refused.*fan_out\(\.\.\.\), or as a group"):
        getattr(looped["ours"], loop)(*arguments)


LOOPS = {"map": xmap, "starmap": xstarmap, "chunks": functools.partial(chunks, n=2)}


@pytest.mark.parametrize("kind", ["ours", "function", "hooked"])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_over_a_guarded_task_is_refused_where_it_runs(app, looped, kind, loop):
    """A canvas may be made of a signature, or elsewhere by a task's name."""
    task = looped[kind]
    for made in (task.s(), app.signature(task.name)):
        canvas = LOOPS[loop](made, [7, 7] if loop == "map" else [(7,), (7,)], app=app)
        runs = canvas.group() if loop == "chunks" else group(canvas, app=app)
        with guarded(app), pytest.raises(OptionError, match=rf"map of {task.name} is refused"):
            runs.apply(throw=True).get()


def test_loop_over_a_plain_task_runs(app, looped):
    """Also if its bodies call a guarded one as a function."""

    def calls(account: int) -> Any:
        return [looped["ours"](account), looped["function"](account)]

    calling = app.task(name="calling", shared=False)(calls)
    with guarded(app):
        assert looped["plain"].map([7, 7]).apply(throw=True).get() == ["plain"] * 2
        assert calling.map([7]).apply(throw=True).get() == [[None, None]]


def test_loop_of_a_program_is_plain(app, looped):
    """An eager one takes no locks, as no eager call does."""
    assert xmap(looped["ours"].s(), [7], app=app).apply(throw=True).get() == [None]


# Publishing past ours


class Past(Task):  # type: ignore[misc]
    """Publishes by the name of Celery's class."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        return Task.apply_async(self, *args, **options)


class Behind(Past):
    """The same, behind ours."""

    abstract = True
    seen: list[Any] = []

    def apply_async(self, *args: Any, **options: Any) -> Any:
        self.seen.append(options["headers"])
        return super().apply_async(*args, **options)


DEDUPES = {"dedupe": "until_done"}
OF_ONE_CALL = {"singleton": {"lease": 5}}


@pytest.mark.parametrize(
    ("singleton", "options", "lost"),
    [
        (
            DEDUPES,
            {},
            "Past.apply_async publishes a call of settle .*dedupe='until_done' would have no effect",
        ),
        (DEDUPES, OF_ONE_CALL, "its singleton={...} would have no effect"),
        ({}, OF_ONE_CALL, "its singleton={...} would have no effect"),
        ({}, {"dedupe": "until_done"}, "write singleton={'dedupe': 'until_done'}"),
    ],
)
def test_call_that_is_published_past_ours_is_refused_if_something_is_lost(app, singleton, options, lost):
    """By a base class that knows of no lock: nothing would say that it is no duplicate."""
    with pytest.raises(OptionError, match=lost):
        declare(app, Past, singleton=singleton).apply_async([7], **options)


@pytest.mark.parametrize(
    ("singleton", "options"),
    [({}, {}), (DEDUPES, {"task_id": "given"}), (DEDUPES, {"group_id": "group"}), (DEDUPES, {"retries": 1})],
)
def test_call_that_is_published_past_ours_is_sent_if_nothing_is_lost(app, singleton, options):
    """A worker computes its key, and takes its lock; a member of a workflow is no duplicate."""
    assert declare(app, Past, singleton=singleton).apply_async([7], **options).id


def test_publisher_of_celerys_that_has_other_variables_is_no_error(app):
    """Another release may name its parameters otherwise: the worker computes the key."""

    def apply_async(self: Any) -> Any:
        return self._get_exec_options()

    another = FunctionType(apply_async.__code__, {"__name__": Task.__module__})
    assert "queue" in another(declare(app, Past))


def test_call_that_ours_has_seen_may_go_any_way(app):
    """A base class behind ours may publish as it likes."""
    base = type("Base", (SingletonTask, Behind), {"abstract": True, "seen": []})
    task = app.task(base=base, name="settle", shared=False, singleton=DEDUPES | {"key": "account"})(settle)
    assert not task.delay(7).deduplicated
    assert task.delay(7).deduplicated
    assert [headers[HEADER]["key"] for headers in base.seen] == [task.lock_key(7)]


# Another way to the pool


class Counting(Task):  # type: ignore[misc]
    """Ends in Celery's own, by a way that no code of it shows."""

    abstract = True

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        return as_celery(self, app, consumer)


def as_celery(task: Any, app: Any, consumer: Any) -> Any:
    return Task.start_strategy(task, app, consumer)


class Batching(Task):  # type: ignore[misc]
    """Hands calls to the pool in a way of its own, whatever its code names."""

    abstract = True

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        return consumer.pool.apply_async or super().start_strategy(app, consumer)


def test_worker_refuses_a_strategy_that_is_not_celerys_own(app):
    """When it starts the strategy: what that does is seen, and not guessed of its code."""
    consumer = MagicMock(app=app)
    app.finalize()
    assert callable(declare(app, Counting).start_strategy(app, consumer))
    base = type("Base", (Batching, SingletonTask), {"abstract": True})
    batching = app.task(base=base, name="batching", shared=False)(settle)
    with pytest.raises(OptionError, match=r"batching has its own start_strategy .*Batching\.start_strategy"):
        batching.start_strategy(app, consumer)
