"""One guarded run in this process: what no worker is needed to see."""

import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from celery import Celery
from celery._state import _task_stack
from celery.exceptions import Retry, SoftTimeLimitExceeded

from celery_setnx import (
    LockLost,
    LockTimeout,
    LockUnavailable,
    SetnxError,
    SetnxLock,
    SingletonTask,
    current_lock,
    is_skipped,
)
from celery_setnx.call.back import ComesBack, Dropped
from celery_setnx.call.message import Call
from celery_setnx.lock import held, verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import park
from celery_setnx.lock.marks import Mark, done_by, mark_all
from celery_setnx.lock.names import record_name
from celery_setnx.lock.record import task_token
from celery_setnx.options import Rate
from celery_setnx.run import give_back
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.run import run as guarded
from celery_setnx.signals import lock_acquired, lock_lost, lock_released
from tests.conftest import LOCK_DB
from tests.harness import age, raising, wait_until

KEY = "setnx:{guarded}"


@pytest.fixture
def task(server, locks) -> Iterator[Any]:
    """A task with a call on its request stack, as a worker has it."""
    app = Celery("guarding", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.setnx_url = server.url(1)

    @app.task(base=SingletonTask, shared=False, name="guarded", singleton={"key": (), "hold_on_retry": True})
    def guarded() -> None: ...

    task = app.tasks["guarded"]
    call = {"args": [], "kwargs": {}, "retries": 0, "called_directly": False, "delivery_info": {}}
    task.push_request(id=f"Call-{uuid.uuid4().hex}", **call)
    yield task
    task.pop_request()


def run_of(task: Any, **options: Any) -> Attempt:
    if options:
        call = Call(task.name, task.request.id, options=options)
        vars(task.request).update(call.as_headers())
    return Attempt(task, task._guard, task.request, (), {})


def execute(task: Any, body: Any) -> Any:
    return guarded(run_of(task), body)


def test_forked_child_leaves_its_parents_lock_alone(task, locks):
    """A body that forks: the child's way out through the guard releases nothing."""

    def body() -> str:
        child = os.fork()
        if child == 0:
            return "child"
        os.waitpid(child, 0)
        assert not SetnxLock(locks, KEY).acquire().acquired
        return "parent"

    if execute(task, body) == "child":
        os._exit(0)
    assert SetnxLock(locks, KEY).acquire().acquired


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        (lambda now: None, 0),
        (lambda now: 5000, 5000),
        (lambda now: 0, 0),
        (lambda now: now + timedelta(seconds=5000), 5000),
        (lambda now: now.replace(tzinfo=None) + timedelta(seconds=5000), 5000),
        (lambda now: now - timedelta(seconds=5000), 0),
    ],
)
def test_lock_is_held_until_the_retry_and_its_queue_lease(task, locks, when, seconds):
    """hold_on_retry: from now to the retry's time, however it is given, plus queue_lease."""
    with pytest.raises(Retry):
        execute(task, raising(Retry(when=when(datetime.now(timezone.utc)))))
    outcome = SetnxLock(locks, KEY).acquire()
    assert outcome.holder.state == "held_for_retry"
    assert outcome.remaining_s == pytest.approx(3600 + seconds, abs=200)


@pytest.fixture
def redelivered(task) -> Any:
    """The task, with a call that was delivered once before."""
    task.request.delivery_info = {"redelivered": True}
    task.backend.persistent = True
    return task


@pytest.mark.parametrize("chord", [None, {"task": "body"}], ids=["alone", "member"])
def test_repeated_delivery_of_a_finished_call_is_dropped(redelivered, locks, chord):
    """A redelivered message whose result says SUCCESS does not run again, and disturbs nothing.

    Nor is it counted again for a chord by a backend that has a counter.
    """
    redelivered.backend.mark_as_done(redelivered.request.id, "result")
    redelivered.request.chord = chord
    with pytest.raises(Dropped):
        execute(redelivered, lambda: pytest.fail("the body ran"))
    assert SetnxLock(locks, KEY).acquire().acquired


def test_dropped_delivery_has_no_traceback_below_its_task(redelivered):
    """It is no error; Celery writes out whatever traceback there is."""
    redelivered.backend.mark_as_done(redelivered.request.id, "result")
    with pytest.raises(Dropped) as caught:
        redelivered()
    assert caught.traceback[-1].path.name == "task.py"


def test_lock_that_is_held_for_a_retry_which_has_run_is_free(task, locks):
    """The lock server came back with older data: the other call's result tells that it has ended."""
    other = uuid.uuid4().hex
    SetnxLock(locks, KEY, line=True).acquire(token=task_token(other, 0, "ab")).lock.hold(3600)
    task.backend.persistent = True
    task.backend.mark_as_retry(other, ValueError())
    assert is_skipped(execute(task, lambda: pytest.fail("the body ran")))
    task.backend.mark_as_done(other, "result")
    assert execute(task, lambda: "ran") == "ran"


def test_permit_that_is_held_for_a_retry_which_has_run_is_free(task, locks, monkeypatch):
    """One whose deadline is the first stands in the way as one that has been held for longest does."""
    monkeypatch.setattr(task._guard, "options", replace(task._guard.options, limit=2))
    other = uuid.uuid4().hex
    SetnxLock(locks, KEY, line=True, limit=2, lease=600).acquire()
    SetnxLock(locks, KEY, line=True, limit=2).acquire(token=task_token(other, 0, "ab")).lock.hold(60)
    task.backend.persistent = True
    task.backend.mark_as_done(other, "result")
    assert execute(task, lambda: "ran") == "ran"


def test_call_that_nobody_asked_is_no_duplicate_of_one_that_has_run(task, locks, monkeypatch):
    """Its worker asks, as a publisher does: the mark is older data, and this call is the one queued."""
    monkeypatch.setattr(task._guard, "options", replace(task._guard.options, dedupe="until_started"))
    task.backend.persistent = True
    SetnxLock(locks, KEY).acquire()
    other = Mark(KEY, uuid.uuid4().hex)
    mark_all(locks, [other], dedupe="until_started", lease=600)
    run = run_of(task)
    run._mark()
    assert run.facts.is_queued
    task.backend.mark_as_done(other.task_id, "result")
    run._mark()
    assert not run.facts.is_queued
    assert locks.get(other.name) == task.request.id


@pytest.mark.parametrize(("task_id", "runs"), [("", False), ("nightly", True)], ids=["random", "its user's"])
def test_call_that_is_woken_after_it_has_ended_is_dropped(task, task_id, runs):
    """The lock server came back with older data, in which it waits. A user's own id may be given again."""
    task.backend.persistent = True
    task.request.id = task_id or uuid.uuid4().hex
    vars(task.request).update(Call(task.name, task.request.id, key=KEY, copy="x1", since=1.0).as_headers())
    task.backend.mark_as_done(task.request.id, "result")
    if runs:
        assert execute(task, lambda: "ran") == "ran"
        return
    with pytest.raises(Dropped):
        execute(task, lambda: pytest.fail("the body ran"))


def test_call_is_no_delivery_of_another_with_its_task_id_to_which_the_lock_was_handed(task, locks):
    """Taken for one, it would be dropped when that one's result is stored."""
    task.request.id = "nightly"
    waits, runs = (Call(task.name, "nightly", key=KEY, call_id=call_id) for call_id in "ab")
    lock = SetnxLock(locks, KEY, line=True)
    held = lock.acquire(token=task_token("first", 0, "ab")).lock
    park(locks, waits.place(600), copy="x1", since=1.0, call="1")
    held.release()
    assert [turn.heir.task_id for turn in lock.turns] == ["nightly"]
    vars(task.request).update(runs.as_headers())
    skipped = execute(task, lambda: pytest.fail("the body ran"))
    assert is_skipped(skipped)
    assert skipped["holder"]["task_id"] == "nightly"


@pytest.mark.parametrize("policy", ["skip", "raise", "retry", "wait"])
def test_repeated_delivery_of_a_finished_call_is_dropped_whatever_its_pace(
    redelivered, locks, monkeypatch, policy
):
    """Its own first start is all that the pace allows. By its policy it would end once more, and what follows
    would be sent twice; or it would wait for its pace to find out.
    """
    options = replace(redelivered._guard.options, rate=Rate(1, 600.0), on_conflict=policy)
    monkeypatch.setattr(redelivered._guard, "options", options)
    assert execute(redelivered, lambda: "result") == "result"
    redelivered.backend.mark_as_done(redelivered.request.id, "result")
    with pytest.raises(Dropped, match="succeeded before"):
        execute(redelivered, lambda: pytest.fail("the body ran"))


@pytest.mark.parametrize(("broker", "runs"), [("memory", False), ("sqs", True)])
def test_call_that_may_have_begun_runs_after_its_max_wait(task, monkeypatch, broker, runs):
    """A broker that does not flag what it delivers again: it waited, ran, and its worker died."""
    monkeypatch.setattr("celery_setnx.call.back.broker_scheme", lambda app: broker)
    task.acks_late, since = True, time.time() - 60
    call = Call(task.name, task.request.id, key=KEY, options={"max_wait": 5}, since=since)
    vars(task.request).update(call.as_headers())
    if runs:
        assert execute(task, lambda: "ran") == "ran"
    else:
        with pytest.raises(LockTimeout, match="came free too late"):
            execute(task, lambda: pytest.fail("the body ran"))


@pytest.mark.parametrize("backend", ["persistent", "not persistent", "failing"])
def test_repeated_delivery_of_an_unknown_call_runs(redelivered, backend, monkeypatch, caplog):
    """Without a result that says SUCCESS it runs again, after the first; a backend may fail to say."""
    redelivered.backend.persistent = backend != "not persistent"
    if backend == "failing":
        monkeypatch.setattr(redelivered.backend, "get_task_meta", raising(OSError("gone")))
    assert execute(redelivered, lambda: "ran") == "ran"
    assert ("its stored result cannot be read (gone)" in caplog.text) == (backend == "failing")


@pytest.mark.parametrize("backend", ["disabled://", "rpc://"])
def test_repeated_delivery_without_stored_results_is_no_trouble(redelivered, backend, caplog):
    """Where no results are stored, or others cannot read them: it runs again, and nothing is warned of."""
    redelivered.app.conf.result_backend = backend
    redelivered.backend = redelivered.app._get_backend()
    assert execute(redelivered, lambda: "ran") == "ran"
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize(("marked_by", "told"), [(None, False), ("t-2", True)], ids=["gone", "another's"])
def test_repeated_delivery_whose_mark_is_gone_has_not_lapsed(redelivered, locks, caplog, marked_by, told):
    """Its first start has ended the mark; one of another call was set since, which is told."""
    if marked_by:
        mark_all(locks, [Mark(KEY, marked_by)], dedupe="until_started", lease=60)
    call = Call(redelivered.name, redelivered.request.id, key=KEY, marked=True)
    vars(redelivered.request).update(call.as_headers())
    run = Attempt(redelivered, redelivered._guard, redelivered.request, (), {})
    assert guarded(run, lambda: "ran") == "ran"
    assert ("started after its mark" in caplog.text) == told


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        (lambda locks: locks.delete(KEY), "] lost its lock setnx:{guarded}: it was gone when the task ended"),
        (lambda locks: locks.getset(KEY, 1), "a classic client had overwritten setnx:{guarded}"),
    ],
    ids=["vanished", "overwritten"],
)
def test_what_became_of_the_lock_is_told_at_the_end_at_the_latest(task, locks, caplog, meanwhile, told):
    """A lock that vanished, or that a classic loser overwrote: the result stands, and the lock is free."""
    assert execute(task, lambda: meanwhile(locks) and "done") == "done"
    assert told in caplog.text
    assert not locks.exists(KEY)


def in_thread(ask: Callable[[], Any]) -> Any:
    """What another thread is answered."""
    with ThreadPoolExecutor(1, "of_the_body") as executor:
        return executor.submit(ask).result()


@pytest.mark.parametrize("asks", ["self.lock", "current_lock()"])
def test_thread_of_a_body_that_asks_for_the_lock_is_warned(task, caplog, asks):
    """It has none there; the log says so once a call, and what to do. The body has it."""
    ask = {"self.lock": lambda: task.lock, "current_lock()": current_lock}[asks]

    def body() -> Any:
        assert [in_thread(ask), in_thread(ask)] == [None, None]
        return task.lock.fence

    assert execute(task, body)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"guarded[{task.request.id}] runs, and thread of_the_body_0 asked for")
    assert "Pass it the lock of the body, lock = self.lock" in said


def test_other_thread_that_asks_for_a_lock_is_not_warned(task, caplog):
    """While no body runs, or if the thread has a call of its own."""

    def call_of_its_own() -> Any:
        _task_stack.push(task)
        try:
            return task.lock
        finally:
            _task_stack.pop()

    assert in_thread(lambda: task.lock) is None
    assert execute(task, lambda: in_thread(call_of_its_own)) is None
    assert "thread" not in caplog.text


def test_lock_that_ran_out_unseen_is_told_at_the_end(task, caplog):
    """While the keeper waits for a late reply the lease may end: ensure() says so, and so does the signal."""
    run = run_of(task)
    late = time.monotonic() + 31

    def body() -> str:
        run.lock.clock = lambda: late
        with pytest.raises(LockLost):
            task.lock.ensure()
        return "done"

    assert guarded(run, body) == "done"
    assert caplog.text.count("lost its lock setnx:{guarded}: its lease of 30 s ended") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_disturbed_release_is_repeated_once(task, monkeypatch, caplog, times):
    """An error that is none of ours and none of Redis's: the lock is given back, if late by the keeper."""
    run = run_of(task)
    release, disturbed = held.give_back, iter(range(times))

    def disturbing(*details: Any) -> Any:
        if next(disturbed, None) is not None:
            raise TypeError("an event that another has waited for")
        return release(*details)

    monkeypatch.setattr(held, "give_back", disturbing)
    assert guarded(run, lambda: "done") == "done"
    assert caplog.text.count("gives its lock setnx:{guarded} back once more") == 1
    assert ("was not released: an event" in caplog.text) == (times == 2)
    wait_until(lambda: run.lock.holder() is None, "it is given back")


@pytest.mark.parametrize("lost", ["command", "reply"])
def test_release_that_failed_is_tried_again(task, proxy, locks, caplog, monkeypatch, lost):
    """Redis is away when the body ends: the lock comes free when it is back, long before its lease ends.

    If only the reply was lost, the lock may be another's by then, and stays that.
    """
    SetnxLock(locks, "warm").acquire().lock.release()  # the server knows the script
    task.app.conf.setnx_url = proxy.url(LOCK_DB)
    run = run_of(task)
    words, release_or_hold = [], give_back._release_or_hold

    def noting(*details: Any, **options: Any) -> str:
        words.append(release_or_hold(*details, **options))
        return str(words[-1])

    monkeypatch.setattr(give_back, "_release_or_hold", noting)
    action = {"command": "cut_before", "reply": "drop_reply"}[lost]
    with proxy.fault(action, containing=verbs.RELEASE.sha.encode(), times=4):
        assert guarded(run, lambda: "done") == "done"
        assert "The release is tried again until its lease of 30 s ends it." in caplog.text
        rival = SetnxLock(locks, KEY, lease=60).acquire().lock if lost == "reply" else None
        wait_until(lambda: words, "it is given back")
    assert words == ["released"]
    assert "lost its lock" not in caplog.text
    if rival is None:
        assert run.lock.holder() is None
    else:
        rival.renew()
        rival.release()


@pytest.mark.parametrize("is_true", [False, True], ids=["after us", "beside us"])
@pytest.mark.parametrize("hold", [False, True], ids=["release", "hold"])
def test_lock_is_lost_if_another_has_had_it_beside_the_body(task, proxy, locks, monkeypatch, hold, is_true):
    """Not if it came after: the release's reply is lost, and another acquires before it is sent again."""
    script = (verbs.HOLD if hold else verbs.RELEASE).sha.encode()
    rival, warm = SetnxLock(locks, KEY, lease=60), SetnxLock(locks, "warm").acquire().lock
    assert warm.hold(1) == "held_for_retry"  # the server knows the scripts
    assert warm.release() == "held_for_retry"
    task.app.conf.setnx_url = proxy.url(LOCK_DB)
    run, sent = run_of(task), []
    token = f"{task.request.id}|1|ab" if hold else None
    monkeypatch.setattr(run, "send", lambda signal, **_details: sent.append(signal))

    def acquire() -> None:
        assert rival.acquire(token=token).acquired

    def body() -> None:
        if is_true:
            locks.delete(KEY, record_name(KEY))
            acquire()
            age(locks, KEY, 10)
        if hold:
            raise Retry(when=0)

    meanwhile = bool if is_true else acquire
    with (
        proxy.fault("drop_reply", containing=script),
        proxy.fault("delay", containing=script, skip=1, meanwhile=meanwhile),
        suppress(Retry),
    ):
        guarded(run, body)
    assert rival.release() == "released"
    assert sent == [lock_acquired, lock_lost if is_true else lock_released]


@pytest.mark.parametrize(("end", "word"), [("hold", "lost"), ("release", "released")])
def test_end_that_comes_after_the_lease_has_held_nothing_for_a_retry(proxy, locks, end, word):
    """Redis is away until then, and another has the lock by now: whether it was held cannot be known."""
    script = {"hold": verbs.HOLD, "release": verbs.RELEASE}[end].sha.encode()
    with redis.Redis.from_url(proxy.url(LOCK_DB)) as client:
        held, given = SetnxLock(client, KEY, lease=0.5).acquire().lock, (20,) if end == "hold" else ()
        with proxy.fault("cut_before", containing=script, times=4), pytest.raises(LockUnavailable):
            getattr(held, end)(*given)
        rival = SetnxLock(locks, KEY, lease=60)
        wait_until(lambda: rival.acquire().acquired, "its lease has ended")
        assert getattr(held, end)(*given) == word


@pytest.fixture
def counting(task, monkeypatch) -> Any:
    """The task, whose success counts for a minute."""
    options = replace(task._guard.options, dedupe="until_done", dedupe_for=60.0)
    monkeypatch.setattr(task._guard, "options", options)
    return task


@pytest.mark.parametrize(
    ("meanwhile", "counts"),
    [
        (lambda locks: None, True),
        (lambda locks: locks.delete(KEY), False),
        (lambda locks: (locks.delete(KEY, record_name(KEY)), SetnxLock(locks, KEY).acquire()), False),
        (lambda locks: locks.set(KEY, "1"), True),
    ],
    ids=["kept", "gone", "taken", "overwritten"],
)
def test_success_counts_if_the_call_was_surely_alone(counting, locks, meanwhile, counts):
    """Not if its lock was gone, or another's, when the body ended."""
    execute(counting, lambda: meanwhile(locks))
    assert done_by(locks, KEY) == (counting.request.id if counts else None)


def test_lock_that_grew_old_while_redis_was_away_is_given_back(counting, locks, monkeypatch):
    """Nobody has renewed it until Redis said whether the call is to run: it comes back, and asks again."""
    monkeypatch.setattr(HeldLock, "remaining_s", lambda held: held.lease_s / 3)
    with pytest.raises(ComesBack, match="held for too long"):
        execute(counting, lambda: pytest.fail("the body ran"))
    assert SetnxLock(locks, KEY).acquire().acquired


def test_release_is_tried_until_redis_is_back(task, proxy, locks, caplog):
    """An outage that outlasts the second try too: the process has nothing else to do, and tries on."""
    SetnxLock(locks, "warm").acquire().lock.release()  # the server knows the script
    task.app.conf.setnx_url = proxy.url(LOCK_DB)
    run = run_of(task)
    with proxy.fault("cut_before", containing=verbs.RELEASE.sha.encode(), times=10**6) as outage:
        assert guarded(run, lambda: "done") == "done"
        at_first = outage.struck
        wait_until(lambda: outage.struck > 2 * at_first, "it was tried once more, in vain")
        assert run.lock.holder() is not None
    wait_until(lambda: run.lock.holder() is None, "it is released")


def test_lock_of_a_call_that_is_gone_is_not_renewed(task, monkeypatch, caplog):
    """A soft time limit that strikes between the body's end and ours: the process renews nothing for ever."""
    run = run_of(task, lease=0.6)
    keeper, lock = run.keeper, run.lock

    def struck(_held: Any) -> None:
        raise SoftTimeLimitExceeded  # a new one: it knows the frames that it left

    monkeypatch.setattr(keeper, "forget", struck)
    with suppress(SoftTimeLimitExceeded):
        guarded(run, lambda: "done")
    assert keeper._watched
    del run
    gc.collect()  # redis-py 5.0 leaves the frames of a NOSCRIPT in a cycle
    wait_until(lambda: not keeper._watched, "the keeper has given it up")
    said = f"Task {task.request.id} has ended without releasing setnx:{{guarded}}. It is no longer renewed"
    wait_until(lambda: said in caplog.text, "another thread has said it")
    wait_until(lambda: lock.holder() is None, "its lease has ended")


def test_failing_release_keeps_the_bodys_own_error(task, monkeypatch, caplog):
    """What the task raised is what the caller sees."""
    run = run_of(task)
    monkeypatch.setattr(held, "give_back", raising(SetnxError("no")))
    with pytest.raises(ZeroDivisionError):
        guarded(run, raising(ZeroDivisionError()))
    assert "] has ended, but its lock setnx:{guarded} was not released: no" in caplog.text
    monkeypatch.undo()
    run.lock.release()
