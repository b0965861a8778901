"""The test kit: eager calls that take their locks, busy locks, crashed holders, time that passes."""

import logging
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery, Task, chain, current_app
from celery.backends.base import DisabledBackend
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Retry
from kombu.asynchronous import set_event_loop

from celery_setnx import (
    AlreadyRunning,
    LockLost,
    LockTimeout,
    LockUnavailable,
    OptionError,
    SetnxError,
    SetnxLock,
    SingletonTask,
    UnkeyableCall,
    is_skipped,
    singleton,
    superseded_by,
)
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.marks import Mark, mark_all
from celery_setnx.lock.names import done_name, permit_names, permits_name, starts_name
from celery_setnx.run.sweep import workers_here
from celery_setnx.signals import lock_acquired, lock_conflict, lock_taken_over
from celery_setnx.terms import NewTerm, Whose, set_term
from celery_setnx.testing import (
    Held,
    assert_released,
    clear,
    crash,
    guarded,
    hold,
    locks_on,
    pass_time,
    paused,
    singleton_disabled,
)
from tests.harness import is_parked, lock_keys, wait_until

NOWHERE = "redis://127.0.0.1:1/0"


def made(url: str, **conf: Any) -> Celery:
    """An app on an in-memory broker; only the locks are in Redis. All such brokers of a process are one."""
    app = Celery("kit", broker="memory://", set_as_current=False)
    app.conf.update(
        result_backend="cache+memory://",
        setnx_url=url,
        setnx_defaults={"lease": 600},
        task_default_queue=uuid.uuid4().hex,
        broker_transport_options={"polling_interval": 0.01},
        **conf,
    )

    def work(self: Task, name: str, *_rest: Any) -> Any:
        return [name, self.lock and self.lock.fence]

    def whole(self: Task, then: Any = None) -> Any:
        return then and then()

    def plain(name: str) -> str:
        return name

    def save(self: Task, name: str, version: str = "") -> str:
        app.saved.append(version)
        if version == "later":
            raise self.retry(countdown=600)
        return version

    app.saved = []
    ours = {"base": SingletonTask, "bind": True, "shared": False}
    quiet = {"debounce": 60, "debounce_max": 100}
    app.task(**ours, name="save", singleton={"key": "name", **quiet})(save)
    app.task(**ours, name="work", singleton={"key": "name"})(work)
    app.task(**ours, name="whole", singleton={"key": (), "lease": 7})(whole)
    app.task(shared=False, name="plain")(plain)
    app.task(shared=False, name="decorated")(singleton(key="name", on_conflict="raise")(plain))
    return app


@pytest.fixture
def app(server, locks) -> Iterator[Celery]:
    """The app of most tests, its lock database empty."""
    app = made(server.url(1))
    yield app
    app.close()


@pytest.fixture
def running(server) -> Iterator[Celery]:
    """An app with a worker in a thread of this process, which has no other meanwhile: Celery's state is one.

    To end one worker ends all, and each, as it ends, cancels what the others have in their timers.
    """
    app = made(server.url(1))
    task_of(app, name="waiting", on_conflict="wait")
    task_of(app, name="paced", rate="1/m", limit=3)
    with start_worker(app, perform_ping_check=False):
        yield app
    app.close()


@pytest.fixture
def work(app) -> Any:
    return app.tasks["work"]


@pytest.fixture
def whole(app) -> Any:
    return app.tasks["whole"]


def task_of(app: Celery, name: str = "", **options: Any) -> Any:
    """A further task of the app, with these options, that counts its runs."""
    runs: list[Any] = []

    @app.task(base=SingletonTask, shared=False, name=name or f"extra{len(app.tasks)}", singleton=options)
    def extra(name: str = "a") -> int:
        runs.append(name)
        return len(runs)

    extra.runs = runs
    return extra


def got(result: Any) -> Any:
    """What a call ends with; a result in memory is asked for, every half a second if nothing is said."""
    return result.get(timeout=60, interval=0.01)


OF = {
    "call": lambda task: (task, "a"),
    "task": lambda task: (task,),
    "app": lambda task: (task.app,),
}
"""Whose time passes: that of one call, of its task, or of all."""


@pytest.mark.parametrize("dedupe", [None, "until_started", "until_done"])
def test_eager_call_needs_no_server(dedupe):
    """task_always_eager, .apply() and a direct call ask no Redis, with dedupe neither, and have no lock."""
    app = made(NOWHERE, task_always_eager=True)
    for ours, result in ((app.tasks["work"], ["a", None]), (app.tasks["decorated"], "a")):
        assert ours("a") == ours.apply(["a"]).get() == ours.delay("a").get() == result
    task = task_of(app, dedupe=dedupe)
    result = task.delay("a")
    assert (result.get(), result.deduplicated) == (1, False)
    assert task.apply(["a"]).get() == 2
    assert task.apply_async(["a"], singleton={"lease": 5}).deduplicated is False


def test_disabled_app_needs_no_server():
    """Publishing marks nothing, and calls nothing a duplicate; a worker in this process runs the body."""
    app = made(NOWHERE)
    task = task_of(app, dedupe="until_done")
    with singleton_disabled(app):
        assert [task.delay("a").deduplicated for _time in range(2)] == [False, False]
        assert task.fan_out([("a",), ("a",)]).accepted == 2
        app.conf.setnx_url = None
        with start_worker(app, perform_ping_check=False):
            assert got(app.tasks["work"].delay("a")) == ["a", None]
    app.close()


def test_disabled_app_publishes_duplicates(app, locks):
    """Where there is a server it is not asked."""
    task = task_of(app, dedupe="until_done")
    task.delay("a")
    keys = lock_keys(locks)
    with singleton_disabled():
        assert task.delay("a").deduplicated is False
        task.delay("b")
    assert task.delay("a").deduplicated is True
    assert lock_keys(locks) == keys


def test_switches_are_for_the_app_that_they_name(app, work):
    """Neither does disabling one app stop the guarding of another, nor is a third one guarded."""
    other = made(NOWHERE)
    with singleton_disabled(other), guarded(app), hold(work, "a"):
        assert is_skipped(work.apply(["a"]).get())
    with guarded(app):
        assert other.tasks["work"].apply(["a"]).get() == ["a", None]


def test_switches_are_decorators_too(app, work):
    """The whole function has guarded eager calls, or runs without locks."""

    @guarded(app)
    def test() -> Any:
        with hold(work, "a"):
            return work.apply(["a"]).get()

    assert is_skipped(test())
    assert singleton_disabled(app)(test)() == ["a", None]


def test_guarded_eager_call_takes_its_lock(app, work):
    """The body has a lock with a fence, and gives it back. A proxy of the app will do to guard it."""
    app.set_current()
    with guarded(current_app), hold(work, "a"):
        assert is_skipped(work.apply(["a"]).get())
    with guarded(app):
        name, fence = work.apply(["a"]).get()
        assert (name, fence > 0) == ("a", True)
        assert_released(app)
    assert work.apply(["a"]).get() == ["a", None]


def test_guarded_always_eager_call_takes_its_lock(app, work):
    """The same under task_always_eager, with the options of the call; a direct call is never guarded."""
    app.conf.task_always_eager = True
    with guarded(app), hold(work, "a"):
        assert is_skipped(work.delay("a").get())
        result = work.apply_async(["a"], singleton={"on_conflict": "raise"})
        assert work("a") == ["a", None]
    assert (result.state, type(result.result)) == ("FAILURE", AlreadyRunning)


def test_guarded_decorated_call_takes_its_lock(app):
    """@singleton under Celery's own base class is guarded as well."""
    decorated = app.tasks["decorated"]
    with guarded(app), hold(decorated, "a") as held:
        assert decorated.apply(["b"]).get() == "b"
        with pytest.raises(AlreadyRunning, match=held.task_id):
            decorated.apply(["a"]).get()


@pytest.mark.parametrize(
    ("options", "state", "error"),
    [
        *(({"on_conflict": policy}, "RETRY", Retry) for policy in ("retry", "wait", "join")),
        ({"on_conflict": lambda conflict: conflict.retry()}, "RETRY", Retry),
        ({"on_conflict": lambda conflict: conflict.wait()}, "RETRY", Retry),
        ({"on_conflict": "raise"}, "FAILURE", AlreadyRunning),
        ({"on_conflict": "wait", "max_wait": 0}, "FAILURE", LockTimeout),  # it allows no wait at all
    ],
)
def test_guarded_eager_conflict_ends_the_call(app, options, state, error):
    """Nothing is published, tried again or left in line; with throw=True Celery raises what ends the call."""
    task = task_of(app, **options)
    with guarded(app), hold(task, "a") as held:
        result = task.apply(["a"])
        with pytest.raises(error, match="does not come back" if error is Retry else None):
            task.apply(["a"], throw=True)
        assert (result.state, type(result.result), task.runs) == (state, error, [])
        assert held.task_id in str(result.result)
        with app.connection() as connection:
            assert connection.SimpleQueue(app.conf.task_default_queue).qsize() == 0
    assert_released(app)


def test_guarded_eager_join_needs_no_result_backend(app):
    """It would be refused in a worker; here its result is nobody's."""
    app.conf.result_backend = None
    task = task_of(app, on_conflict="join")
    assert isinstance(app.backend, DisabledBackend)
    with guarded(app), hold(task, "a"):
        assert task.apply(["a"]).state == "RETRY"
        assert task.apply(["b"]).get() == 1


@pytest.mark.parametrize("dedupe", ["until_started", "until_done"])
def test_guarded_eager_call_knows_no_queue(app, locks, dedupe):
    """A queued call makes it no duplicate; it marks nothing, and leaves but the record of its release."""
    task = task_of(app, dedupe=dedupe, on_conflict="retry")
    task.delay("a")
    app.conf.task_always_eager = True
    with guarded(app), hold(task, "a"):
        assert [task.apply(["a"]).state, task.delay("a").state] == ["RETRY", "RETRY"]
    clear(app)
    with guarded(app):
        assert [task.apply(["a"]).state, task.delay("a").state] == ["SUCCESS", "SUCCESS"]
    assert lock_keys(locks) == {f"{task.lock_key('a')}:holder"}


@pytest.mark.parametrize("options", [{}, {"hold_on_retry": True}, {"dedupe": "until_done"}])
def test_guarded_eager_retry_of_its_own_runs_at_once(app, options):
    """Celery runs it within .apply(); it acquires the lock anew, and leaves nothing behind."""
    fences = []

    @app.task(base=SingletonTask, bind=True, shared=False, name="flaky", singleton=options)
    def flaky(self: Task) -> int:
        fences.append(self.lock.fence)
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return int(self.request.retries)

    with guarded(app):
        assert flaky.apply().get() == 2
        assert fences == sorted(set(fences))
        with pytest.raises(Retry):
            flaky.apply(throw=True)
        assert_released(app)


def test_guarded_eager_replacement_runs_under_its_own_lock(app):
    """Celery runs it within the body that it replaces: it does not wait for itself."""

    @app.task(base=SingletonTask, bind=True, shared=False, name="replacing", singleton={"key": ()})
    def replacing(self: Task, times: int) -> Any:
        return self.replace(replacing.si(times - 1)) if times else "done"

    with guarded(app):
        assert replacing.apply([2]).get() == "done"
        assert_released(app)


def test_guarded_eager_chain_has_single_calls(app, work):
    """Celery tells an eager step of no chain: it is skipped where a worker's would come back."""
    with guarded(app), hold(work, "a"):
        assert is_skipped(chain(work.si("a"), app.tasks["plain"].si("b")).apply().parent.get())


def test_guarded_eager_call_sends_the_signals_of_a_worker(app, work):
    """Receivers of an app can be tested eagerly."""
    seen = []

    def receiver(signal: Any, sender: Any, **details: Any) -> None:
        seen.append((signal.name, details["key"]))

    for signal in (lock_acquired, lock_taken_over):
        signal.connect(receiver)
    with guarded(app), hold(work, "a") as held:
        crash(held)
        pass_time(600, held)
        work.apply(["a"])
    assert seen == [("lock_taken_over", held.key), ("lock_acquired", held.key)]


def test_held_lock_is_busy_for_a_worker(running, locks):
    """Somebody else has it, whose death nobody can prove here; where locks are disabled bodies just run."""
    work = running.tasks["work"]
    with hold(work, "a") as held:
        for is_disabled in (False, True, False):
            with singleton_disabled() if is_disabled else nullcontext():
                result = got(work.delay("a"))
            if is_disabled:
                assert result == ["a", None]
            else:
                assert result["holder"]["task_id"] == held.task_id
                assert (result["holder"]["worker"], result["key"]) == ("another@elsewhere", held.key)
        assert got(work.delay("b"))[0] == "b"


def test_held_lock_is_that_of_the_call_and_is_released_once(work):
    """The handle says which lock it is, whose, and its fence. Two cannot hold it.

    Released by hand, it is left alone at the end: another may have it by then.
    """
    with hold(work, name="a") as held:
        assert isinstance(held, Held)  # public, to annotate with
        holder = work.locked("a")
        assert (held.key, held.task_id, held.fence) == (work.lock_key("a"), holder.task_id, holder.fence)
        assert held.lives
        assert held.task_id in repr(held)
        with pytest.raises(AlreadyRunning, match=held.task_id), hold(work, "a"):
            pytest.fail("two holders")
        held.release()
        assert not held.lives
        with hold(work, "a") as second:
            held.release()
            assert work.locked("a").task_id == second.task_id
    assert not second.lives
    assert work.locked("a") is None


def test_hold_takes_a_permit_each(app):
    """As many as the limit, each with a number; and when one is given back, the next holder has it."""
    task = task_of(app, limit=3)
    with hold(task, "a") as first, hold(task, "a") as second, hold(task, "a") as third:
        assert [held.permit for held in (first, second, third)] == [0, 1, 2]
        ids = [held.task_id for held in (first, second, third)]
        assert [holder.task_id for holder in task.holders("a")] == ids
        with pytest.raises(AlreadyRunning, match=first.task_id), hold(task, "a"):
            pytest.fail("four holders of three permits")
        second.release()
        with hold(task, "a") as fourth, guarded(app):
            assert fourth.permit == 1
            assert is_skipped(task.apply(["a"]).get())
        with guarded(app):
            assert task.apply(["a"]).get() == 1
    assert_released(app)


def test_hold_is_a_start_of_a_task_with_a_rate(app, locks):
    """As many as the pace allows; one that is released counts still, until the window has passed."""
    task = task_of(app, limit=3, rate=(2, 60))
    with hold(task, "a") as first, hold(task, "a"):
        paced = r"may not start yet: .* held back by its pace of 2 in 60 s until .*, for \d+\.\d s more\."
        with pytest.raises(AlreadyRunning, match=paced) as refused, hold(task, "a"):
            pytest.fail("three starts of two")
        assert refused.value.holder["state"] == "paced"
        assert 50 < refused.value.remaining_s <= 60
        first.release()
        with guarded(app):
            assert task.apply(["a"]).state == "RETRY"
            assert task.apply(["b"]).get() == 1
    assert_released(app)


@pytest.mark.parametrize("policy", ["skip", "retry", "raise"])
def test_refusal_by_a_pace_names_the_pace_and_no_holder(app, caplog, policy):
    """In the log, in the state and in the error, whatever the limit; the signal's holder is in no task."""
    task, met = task_of(app, limit=3, rate="1/m", on_conflict=policy), []
    hear = lock_conflict.connect(lambda **about: met.append(about), weak=False)
    with guarded(app), caplog.at_level(logging.INFO):
        task.apply(["a"])
        refused = task.apply(["a"])
    lock_conflict.disconnect(hear)
    told = {"skip": caplog.text, "retry": str(refused.result), "raise": str(refused.result)}[policy]
    assert f"{task.lock_key('a')} is held back by its pace of 1 in 60 s until 20" in told
    (about,) = met
    assert (about["policy"], about["holder"].state, about["holder"].task_id) == (policy, "paced", None)
    assert about["holder"].info == {"pace": "1 in 60 s"}
    assert 50 < about["remaining_s"] <= 60


def test_call_that_waits_for_its_pace_starts_when_time_has_passed(running, caplog):
    """A worker looks at its line as soon as it is due; whoever reads why it waits is told the pace."""
    task = running.tasks["paced"]
    clear(running)
    told = f"waits in line, at place 1: {task.lock_key('a')} is held back by its pace of 1 in 60 s until"
    with caplog.at_level(logging.INFO, "celery_setnx"):
        assert got(task.delay("a")) == 1
        waiting = task.delay("a")
        wait_until(lambda: told in caplog.text, told)
    pass_time(60, task, "a")
    assert got(waiting) == 2
    assert_released(task, within=10)
    clear(running)


@pytest.mark.parametrize("of", ["holder", *OF])
def test_starts_count_no_more_when_time_has_passed(app, locks, of):
    """Those of the locks that are meant, also where nobody holds one, and `:permits` has lapsed."""
    task = task_of(app, limit=2, rate=(2, 60))
    with hold(task, "a") as held, guarded(app):
        assert task.apply(["a"]).get() == 1
        assert task.apply(["b"]).get() == 2
        if of != "holder":
            held.release()
            locks.delete(permits_name(held.key))
        what = (held,) if of == "holder" else OF[of](task)
        pass_time(30, *what)
        assert task.apply(["a"]).state == "RETRY"
        pass_time(30, *what)
        assert task.apply(["a"]).get() == 3
        before = locks.zrange(starts_name(task.lock_key("b")), 0, -1, withscores=True)
        pass_time(60, task, "a")
        assert locks.zrange(starts_name(task.lock_key("b")), 0, -1, withscores=True) == before


def test_starts_are_no_leftover_and_are_cleared(app, locks):
    """Of ended calls nothing else is there; a test that follows begins with a new window."""
    task = task_of(app, rate="1/d", on_conflict="skip")
    with guarded(app):
        assert task.apply(["a"]).get() == 1
        assert_released(app)
        assert_released(task, "a")
        assert locks.exists(starts_name(task.lock_key("a")))
        assert is_skipped(task.apply(["a"]).get())
        assert clear(app) == 3  # the record, what is known of the permits, the starts
        assert not lock_keys(locks)
        assert task.apply(["a"]).get() == 2


@pytest.mark.clock  # a lease is renewed while it really runs
def test_held_lock_is_renewed(app):
    """A test may take longer than the lease."""
    task = task_of(app, lease=1.5)
    with hold(task, "a"):
        deadline = task.locked("a").deadline
        wait_until(lambda: task.locked("a").deadline > deadline + 1.5, "a renewal past the first lease")


def test_held_lock_wakes_who_waits_when_released(running, locks):
    """It ends as a task does."""
    task = running.tasks["waiting"]
    with hold(task, "a"):
        result = task.delay("a")
        wait_until(lambda: is_parked(locks, task.lock_key("a"), result.id), "the call is parked")
        assert task.runs == []
    assert got(result) == 1


@pytest.mark.parametrize("name", ["plain", "celery.accumulate", "work"])
def test_holding_needs_a_lock(app, name):
    """A plain task has none, and neither has a call that cannot be keyed."""
    error, message = (UnkeyableCall, "'name'") if name == "work" else (OptionError, f"{name} has no lock")
    with pytest.raises(error, match=message), hold(app.tasks[name], *["a"] * (name != "work")):
        pytest.fail("no lock")


def test_loss_of_a_held_lock_is_told(app, locks, caplog):
    """A test that deletes keys under its own holder is warned."""
    with hold(task_of(app, lease=1.5), "a") as held:
        locks.delete(held.key)
        wait_until(lambda: "hold(), was lost" in caplog.text, "the warning")
        assert held.key in caplog.text


def test_crashed_holder_is_taken_over_past_its_lease(app, work):
    """Before that its lock is held; and the end of the block leaves the new holder alone."""
    with guarded(app):
        with hold(work, "a") as held:
            crash(held)
            pass_time(500, held)
            assert is_skipped(work.apply(["a"]).get())
            pass_time(100, held)
            assert work.apply(["a"]).get()[1] > held.fence
            another = hold(work, "a")
            second = another.__enter__()
        assert work.locked("a").task_id == second.task_id
        second.release()


def test_crashed_holder_is_renewed_no_more(app):
    """Its lease ends by itself as well; twice crashed is crashed."""
    task = task_of(app, lease=1.5)
    with hold(task, "a") as held:
        crash(held)
        crash(held)
        wait_until(lambda: task.locked("a") is None, "its lease ends")


def test_living_holders_keep_their_permits_while_others_age(app, locks):
    """Of several each is renewed, or not, for itself; what is known of the permits lasts as long as they."""
    task = task_of(app, limit=3, lease=600)
    with hold(task, "a") as first, hold(task, "a") as dead, hold(task, "a") as third:
        before = {holder.permit: holder for holder in task.holders("a")}
        crash(dead)
        pass_time(timedelta(hours=48), third)
        after = {holder.permit: holder for holder in task.holders("a")}
        assert set(after) == {0, 2}
        for number in after:
            assert before[number].since - after[number].since == pytest.approx(48 * 3600)
            assert after[number].deadline >= before[number].deadline
        assert not locks.exists(*permit_names(first.key, 1))
        assert locks.get(permits_name(first.key)) == "3 3"
        for held in (first, third):
            held._held.renew()
        with hold(task, "a") as fourth:
            assert fourth.permit == 1
            assert fourth.fence > dead.fence


@pytest.mark.parametrize("of", OF)
def test_crashed_holders_of_permits_are_taken_over_past_their_leases(app, of):
    """A permit at a time, from the first on; those that no client has named are found."""
    task = task_of(app, limit=12)
    with ExitStack() as stack, guarded(app):
        held = [stack.enter_context(hold(task, "a")) for _ in range(12)]
        for one in held[1::2]:
            crash(one)
        assert is_skipped(task.apply(["a"]).get())
        pass_time(600, *OF[of](task))
        assert [holder.permit for holder in task.holders("a")] == [0, 2, 4, 6, 8, 10]
        with hold(task, "a") as next_one:
            assert next_one.permit == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_lock_that_rests_has_rested_when_time_has_passed(app, limit):
    """at_least_for is tested without waiting: a permit keeps others out until then, and is nothing left."""
    task = task_of(app, limit=limit, at_least_for=3600)
    with guarded(app):
        for number in range(limit):
            assert task.apply(["a"]).get() == 1 + number
        assert_released(app)
        pass_time(3000, task, "a")
        assert is_skipped(task.apply(["a"]).get())
        pass_time(600, task, "a")
        assert task.apply(["a"]).get() == 1 + limit


def test_each_permit_that_is_left_is_told(app):
    """By number, with its holder; also where the first is free."""
    task = task_of(app, limit=3)
    with hold(task, "a") as first, hold(task, "a") as second, hold(task, "a") as third:
        first.release()
        crash(third)
        pass_time(600, task, "a")
        with pytest.raises(AssertionError) as failure:
            assert_released(task, "a")
        _heading, *left, _advice = str(failure.value).splitlines()
        for line, held, is_stale in zip(left, (second, third), (False, True), strict=True):
            assert line.startswith(
                f"  permit {held.permit} of lock {held.key}: held by {task.name}[{held.task_id}]"
            )
            assert line.endswith("it was not released") is is_stale


def test_clear_deletes_all_permits_and_refuses_if_one_runs_elsewhere(app, locks):
    """They are under the app's prefix, too."""
    task = task_of(app, limit=2)
    with hold(task, "a") as held:
        info = {"host": "production-7", "task": task.name, "task_id": "x"}
        lock = SetnxLock(locks, held.key, info=info, limit=2)
        assert lock.acquire().lock.permit == 1
        with pytest.raises(SetnxError, match="on host production-7"):
            clear(app)
        lock.release()
        assert clear(app) == 4  # lock and record, what is left of the other permit, how many there are
        assert not lock_keys(locks)


def test_body_that_stood_still_learns_it(app, whole):
    """Time passes for the lock of a running body: its next renewal says that it is lost."""

    def stand_still() -> Any:
        pass_time(60, whole)
        with hold(whole):
            return whole.lock.renew()

    with guarded(app), pytest.raises(LockLost):
        whole.apply([stand_still]).get()


def test_waiters_grow_older(app, work, locks):
    """Those in line have waited for longer, in the same order."""
    key = work.lock_key("a")
    with hold(work, "a") as held:
        now = work.locked("a").since
        for place, name in enumerate("xyz"):
            park(locks, LineEntry(key, name, 0, remember=500.0), since=now + place, call="c")
        pass_time(100, held)
        waiters = work.locked("a").waiters
        assert [waiter.task_id for waiter in waiters] == ["x", "y", "z"]
        assert waiters[0].since == pytest.approx(now - 100)
        assert 0 < locks.pttl(f"{key}:line") <= 400_000
        assert locks.hget(f"{key}:calls", "x") == f"0|{round(waiters[0].since * 1e6)}|c"
        clear(app)


def test_foreign_lock_grows_older(app, work, locks, foreign_keys):
    """A lock of the classic recipe is taken over when its time has passed; text in its place stays."""
    key = work.lock_key("a")
    foreign_keys.add(key)
    locks.set(key, "by hand")
    pass_time(1e6, work, "a")
    assert locks.get(key) == "by hand"
    now = int(locks.time()[0])
    locks.set(key, now + 1000)
    pass_time(50, work, "a")
    assert int(locks.get(key)) == now + 950
    pass_time(1000, work, "a")
    with guarded(app):
        assert work.apply(["a"]).get()[1] > 0


def test_what_is_forgotten_is_gone_when_time_has_passed(app, work, locks):
    """Every key ends with its TTL: a dead holder's record after the retention."""
    with hold(work, "a") as held:
        crash(held)
        ttl = locks.pttl(held.key)
        pass_time(86_000, held)
        assert ttl - 86_060_000 < locks.pttl(held.key) <= ttl - 86_000_000
        assert locks.pttl(f"{held.key}:holder") > 0
        pass_time(2000, held)
        assert not lock_keys(locks)


@pytest.mark.parametrize("of", OF)
def test_done_call_counts_no_more_when_time_has_passed(app, locks, of):
    """`dedupe_for` is tested without waiting; what counts is nothing left, and clear() deletes it."""
    task = task_of(app, dedupe="until_done", dedupe_for=3600)
    key, other = succeeded(locks, task, "a"), succeeded(locks, task_of(app), "a")
    assert_released(app)
    what = OF[of](task)
    pass_time(3000, *what)
    first = task.delay("a")
    assert (first.id, first.deduplicated) == ("first", True)
    assert 0 < locks.pttl(done_name(key)) <= 600_000
    pass_time(600, *what)
    assert not locks.exists(done_name(key))
    assert bool(locks.exists(done_name(other))) == (of != "app")
    assert not task.delay("a").deduplicated
    succeeded(locks, task, "b")
    clear(app)
    assert not lock_keys(locks)


def succeeded(locks: Any, task: Any, *args: Any) -> str:
    """The key of a call that has succeeded as "first", and counts for an hour."""
    key = str(task.lock_key(*args))
    held = SetnxLock(locks, key, line=True).acquire(token="first|0|ab").lock
    assert held is not None
    held.release(done_for=3600)
    return key


def test_done_call_ages_beside_a_holder_that_lives(app, locks):
    """Who renews its lease does not renew what another call has left."""
    task = task_of(app, dedupe="until_done", dedupe_for=3600)
    key = succeeded(locks, task, "a")
    with hold(task, "a") as held:
        pass_time(3600, held)
        assert not locks.exists(done_name(key))
        assert task.locked("a").task_id == held.task_id


@pytest.fixture(params=["memory", "redis"])
def saving(request, server, locks) -> Iterator[Celery]:
    """An app whose worker, if one is started, has a thread for its timer, or its loop does that."""
    broker = {"memory": "memory://", "redis": server.url(2)}[request.param]
    app = made(server.url(1), broker_url=broker)
    set_event_loop(None)  # Celery 5.4 gives a worker the loop of the one before, with that one's timer
    yield app
    set_event_loop(None)
    clear(app)
    app.close()


def are_held(app: Celery, results: list[Any]) -> bool:
    """Whether a worker of this process has these calls in its timer."""
    (worker,) = workers_here(app)
    entries = [waiting.entry for waiting in worker.consumer.timer.queue]
    held = {entry.args[0].id for entry in entries if entry.args and hasattr(entry.args[0], "id")}
    return {result.id for result in results} <= held


@pytest.mark.parametrize("by_s", [60, 3600])
def test_debounced_call_that_a_worker_holds_starts_when_time_has_passed(saving, by_s):
    """The newest, once, however much time has passed; those before it end, too."""
    save = saving.tasks["save"]
    with start_worker(saving, perform_ping_check=False):
        *older, newest = (save.delay("a", version) for version in "123")
        wait_until(lambda: are_held(saving, [*older, newest]), "the calls in its timer")
        pass_time(by_s, save, "a")
        assert got(newest) == "3"
        assert [superseded_by(got(each)) for each in older] == [newest.id] * 2
    assert saving.saved == ["3"]
    assert_released(save)


def test_debounced_call_starts_at_once_in_a_worker_that_comes_later(saving):
    """Its time has passed before its message is there; not that of a call which is published afterwards."""
    save = saving.tasks["save"]
    result = save.delay("a", "1")
    pass_time(60, save)
    with start_worker(saving, perform_ping_check=False):
        assert got(result) == "1"
        after = save.delay("a", "2")
        wait_until(lambda: are_held(saving, [after]), "a call that waits")


def test_debounced_call_grows_older_in_parts(saving):
    """A later call waits anew, and the time that has passed counts for the others."""
    save = saving.tasks["save"]
    with start_worker(saving, perform_ping_check=False):
        first = save.delay("a", "1")
        pass_time(30, saving)
        second = save.delay("a", "2")
        pass_time(30, saving)
        assert superseded_by(got(first)) == second.id
        wait_until(lambda: are_held(saving, [second]), "a call that waits")
        assert saving.saved == []
        pass_time(30, saving)
        assert got(second) == "2"


def test_time_passes_for_debounced_calls_of_its_key_alone(saving):
    """Not for those of other keys, and not for the countdown of a call that replaces none."""
    save = saving.tasks["save"]
    with start_worker(saving, perform_ping_check=False):
        other, late = save.delay("b", "1"), save.apply_async(["a", "0"], countdown=600, task_id="mine")
        result = save.delay("a", "1")
        pass_time(60, save, "a")
        assert got(result) == "1"
        assert are_held(saving, [other, late])
    assert saving.saved == ["1"]


def test_retry_of_a_debounced_call_keeps_its_countdown(saving):
    """Only the time in which a call waits for newer ones passes sooner."""
    save = saving.tasks["save"]
    with start_worker(saving, perform_ping_check=False):
        result = save.delay("a", "later")
        pass_time(60, save, "a")
        wait_until(lambda: saving.saved and are_held(saving, [result]), "its retry")
        pass_time(600, save, "a")
        other = save.delay("b", "1")
        pass_time(60, save, "b")
        assert got(other) == "1"
        assert are_held(saving, [result])
    assert saving.saved == ["later", "1"]


def test_debounced_call_that_waits_is_left(app, locks):
    """It is told as queued."""
    save = app.tasks["save"]
    result = save.delay("a", "1")
    told = f"mark {save.lock_key('a')}:newest: task {result.id} is queued"
    with pytest.raises(AssertionError, match=re.escape(told)):
        assert_released(save, "a")


@pytest.mark.parametrize("of", ["app", "task"])
def test_time_passes_for_all_locks(app, work, whole, of):
    """Of an app, or of one task."""
    with hold(work, "a") as a, hold(work, "b") as b, hold(whole) as other:
        for held in (a, b, other):
            crash(held)
        pass_time(600, app if of == "app" else work)
        assert (work.locked("a"), work.locked("b")) == (None, None)
        assert (whole.locked() is None) == (of == "app")


def test_time_passes_forwards_and_for_nothing(work, locks):
    """A negative time is refused; where there is no lock nothing happens."""
    with pytest.raises(ValueError, match="negative"):
        pass_time(-1, work, "a")
    pass_time(60, work, "a")
    assert not lock_keys(locks)


def test_what_is_left_is_told(app, work, whole, locks):
    """The message names every lock with its holder, every mark, every waiter, and what to do."""
    mark_all(locks, [Mark(work.lock_key("m"), "marked-task")], dedupe="until_started", lease=60)
    with hold(work, "a") as held, hold(whole) as dead:
        park(locks, LineEntry(held.key, "waiting-task", 0, remember=5.0), since=0.0, call="")
        crash(dead)
        pass_time(8, dead)
        with pytest.raises(AssertionError) as failure:
            assert_released(app)
        lines = str(failure.value).splitlines()
        assert lines[0] == "4 left of prefix 'setnx':"
        assert f"  lock {held.key}: held by work[{held.task_id}]" in str(failure.value)
        assert f"  line of {held.key}: task waiting-task waits at place 1" in lines
        assert f"  mark {work.lock_key('m')}:queued: task marked-task is queued" in lines
        (expired,) = [line for line in lines if dead.key in line]
        assert expired.endswith("its lease has ended, and it was not released")
        assert "within=" in lines[-1]
    clear(app)


def test_released_may_be_asked_of_one_task_or_call(app, work, whole):
    """Locks of other tasks, and of other calls, are not looked at; of anything else it is refused."""
    with hold(work, "a") as held:
        assert_released(whole)
        assert_released(work, "b")
        with pytest.raises(TypeError, match="expected a task or an app"):
            assert_released("work")  # type: ignore[arg-type]
        for call in ((), ("a",)):
            with pytest.raises(AssertionError, match="1 left of task work:") as failure:
                assert_released(work, *call)
            assert held.key in str(failure.value)


@pytest.mark.parametrize("thing", [print, "work", 7])
def test_what_is_no_task_has_no_lock_to_hold(thing):
    """The error says what was expected, and what came."""
    with pytest.raises(TypeError, match=rf"expected a task .*, not {re.escape(repr(thing))}"), hold(thing, 1):
        pytest.fail("nothing can hold it")


def test_what_is_of_another_kind_is_refused_by_what_it_is(app, work):
    """A holder is what `with hold()` gives; an app has no call, and so no arguments."""
    for what in (work, hold(work, "a")):
        with pytest.raises(TypeError, match="expected a holder, as `with hold"):
            crash(what)
    with pytest.raises(TypeError, match=r"to pass time, a holder\), not <contextlib"):
        pass_time(1, hold(work, "a"))  # type: ignore[arg-type]
    for ask in (assert_released, partial(pass_time, 1)):
        with pytest.raises(TypeError, match=r"expected a task that is guarded, .* not <Celery"):
            ask(app, "a")


def test_released_waits_for_a_worker_to_end(app, work):
    """`within` asks again; past it the failure says how long it has waited."""
    with hold(work, "a") as held:
        with pytest.raises(AssertionError, match=r"after 0\.1 s"):
            assert_released(app, within=0.1)
        threading.Timer(0.1, held.release).start()
        assert_released(app, within=20)


@pytest.mark.parametrize(("prefix", "other"), [("setnx", "setnx-other"), ("s*", "star")])
def test_clear_deletes_all_of_its_prefix_and_ends_what_a_test_holds(server, locks, caplog, prefix, other):
    """Only keys under the app's own prefix are deleted: all of them. A prefix with a star is no pattern.

    A holder whose lock was cleared does not complain, and does not renew.
    """
    app = made(server.url(1), setnx_prefix=prefix)
    work = app.tasks["work"]
    locks.set(f"{other}:{{work}}", "1", ex=60)
    locks.set("work", "1", ex=60)
    with hold(work, "a") as held, guarded(app), caplog.at_level(logging.WARNING):
        work.apply(["b"])
        assert clear(app) == 3
        assert sorted(lock_keys(locks)) == [f"{other}:{{work}}", "work"]
        assert not held.lives
        assert work.locked("a") is None
    assert clear(app) == 0
    assert caplog.text == ""


def test_clear_refuses_where_a_task_runs_on_another_host(app, work, locks):
    """That is no server of the tests: nothing is deleted, until the holder's lease has ended."""
    info = {"host": "production-7", "task": "work", "task_id": "x"}
    lock = SetnxLock(locks, work.lock_key("a"), info=info)
    lock.acquire()
    with hold(work, "b"), pytest.raises(SetnxError, match=r"held by work\[x\].* on host production-7"):
        clear(app)
    assert work.locked("a").task_id == "x"
    pass_time(60, work, "a")
    assert clear(app) > 0


def test_locks_on_another_server(app, work, locks, server):
    """An app's locks move for a while, and come back; to guard calls without a server fails at once."""
    app.conf.setnx_url = NOWHERE
    with pytest.raises(LockUnavailable), guarded(app):
        pytest.fail("there is no server")
    with pytest.raises(LockUnavailable):
        work.locked("a")
    with locks_on(app, server.url(1)), hold(work, "a") as held:
        assert locks.exists(held.key)
    assert app.conf.setnx_url == NOWHERE
    with pytest.raises(LockUnavailable):
        work.locked("a")


def test_kit_reaches_workers_in_other_processes(tasks):
    """They meet what a test holds, and take over what has crashed."""
    with hold(tasks.work, "a") as held:
        assert tasks.work.delay("a").get(timeout=60)["holder"]["task_id"] == held.task_id
        crash(held)
        pass_time(600, held)
        assert tasks.work.delay("a").get(timeout=60) == "a"
    assert_released(tasks.app, within=20)


# Live terms


def test_paused_key_keeps_its_calls_out_until_the_pause_is_over(app, locks):
    """And no other key; time that passes ends it."""
    task = task_of(app, key="name")
    with guarded(app), paused(task, "a"):
        assert is_skipped(task.apply(["a"]).get())
        assert not is_skipped(task.apply(["b"]).get())
        pass_time(86_400, task, "a")
        assert not is_skipped(task.apply(["a"]).get())
    assert_released(app)


def test_paused_task_keeps_all_its_calls_out(app, locks):
    """Until it is resumed."""
    task = task_of(app, key="name")
    with guarded(app):
        with paused(task):
            assert is_skipped(task.apply(["a"]).get())
            pass_time(600, app)
            assert is_skipped(task.apply(["b"]).get())
            pass_time(86_400, app)
            assert not is_skipped(task.apply(["b"]).get())
        with paused(task):
            assert is_skipped(task.apply(["c"]).get())
        assert not is_skipped(task.apply(["c"]).get())


def test_refusal_names_the_limit_that_counts(app, locks):
    """An operator's, while it does."""
    task = task_of(app, limit=3, on_conflict="raise")
    set_term(app, Whose(key=task.lock_key("a")), NewTerm("limit", 600, 2))
    with guarded(app), hold(task, "a"), hold(task, "a"):
        refused = str(task.apply(["a"]).result)
    assert f"all 2 permits of {task.lock_key('a')} are held" in refused
    pass_time(600, task, "a")
    assert_released(app)
