"""What ends in a worker's parent, without a worker."""

import math
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery

from celery_setnx import SetnxLock, SingletonTask
from celery_setnx import request as request_module
from celery_setnx.call.message import Call
from celery_setnx.call.wake import lines_of, place_of
from celery_setnx.connection import client_for, quick_client_for
from celery_setnx.lock.line import SOON_S, leave, note_due, park
from celery_setnx.lock.marks import Mark, done_by, free_all, mark_all
from celery_setnx.lock.names import starts_name
from celery_setnx.lock.record import ORIGINAL, task_token
from celery_setnx.lock.verbs import Caller, serve
from celery_setnx.run import cleanup as cleanup_module
from celery_setnx.run import sweep as sweep_module
from celery_setnx.run.cleanup import Cleanup, cleanup_of_process
from celery_setnx.run.sweep import Sweep
from tests.conftest import LOCK_DB
from tests.delivered import Delivered, info_of
from tests.harness import due_set, raising, wait_until

MANY = 3000


class Delivery:
    """A request whose child has ended."""

    def __init__(self, free: Any) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        self.worker_pid = child.pid
        self.free_dead = free


@pytest.fixture
def marked(locks, proxy) -> Any:
    """An app whose way to its locks fails on demand, and many calls that it has marked."""
    app = Celery("ends", set_as_current=False)
    app.conf.setnx_url = proxy.url(LOCK_DB)
    calls = [Call("t", f"id-{n}", key=f"t:{{t:{n:032x}}}", marked=True, has_header=True) for n in range(MANY)]
    marks = [Mark(call.key, call.task_id) for call in calls]
    mark_all(client_for(app), marks, dedupe="until_started", lease=600)
    names = [mark.name for mark in marks]
    yield app, calls, lambda: locks.exists(*names)
    client_for(app).close()


def test_trouble_with_one_dead_child_does_not_end_the_watch(caplog):
    """An error while one lock is freed is logged, and the next child's death is noticed all the same."""
    cleanup, freed = Cleanup(), threading.Event()
    first = Delivery(raising(ZeroDivisionError))
    cleanup.watch(first)
    wait_until(lambda: "was not freed" in caplog.text, "the trouble is logged")
    second = Delivery(freed.set)
    cleanup.watch(second)
    assert freed.wait(10)


def test_retry_of_which_nothing_can_be_asked_is_no_others_business(caplog):
    """A callable key may raise anything: it is said once, and the next one is freed."""
    cleanup, freed = Cleanup(), threading.Event()
    odd, other = (Delivery(None) for _ in range(2))
    odd.free_held, other.free_held = raising(ZeroDivisionError), lambda at_last: freed.set() or True
    for each in (odd, other):
        each.call = Call("t", "id-1", key="t:{t}")
        cleanup.free_retry(each)
    assert freed.wait(10)
    wait_until(lambda: not cleanup._retries, "neither is looked at again")
    assert caplog.text.count("was not freed") == 1


@pytest.mark.parametrize(
    ("headers", "named"),
    [({"task": "bill", "id": "b1"}, "bill[b1]"), (5, "no task that can be read")],
)
def test_message_that_is_thrown_away_is_named_if_its_mark_is_not_freed(monkeypatch, caplog, headers, named):
    """Nothing that it says is raised into the worker's loop."""
    monkeypatch.setattr(Cleanup, "forget", raising(ZeroDivisionError))
    request_module._free_rejected(SimpleNamespace(app=None), SimpleNamespace(headers=headers))
    assert f"A message of {named} was thrown away; its mark and its place lapse" in caplog.text


def test_call_whose_key_no_server_can_have_is_no_others_business(marked, caplog):
    """It is named, and lapses; the batch that it was in is freed."""
    app, calls, marks_left = marked
    cleanup, odd = Cleanup(), Call("t", "odd", key="t:{\ud800}", marked=True, has_header=True)
    for call in [*calls[:5], odd, *calls[5:]]:
        cleanup.forget(app, call)
    wait_until(lambda: marks_left() == 0, "the others are freed")
    wait_until(lambda: "t[odd] has ended; its lock" in caplog.text, "it is named")


def test_thread_that_cannot_start_is_started_later(monkeypatch, marked, caplog):
    """There are no more processes for now: the worker's parent goes on, and nothing is forgotten."""
    app, calls, marks_left = marked
    cleanup = Cleanup()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        cleanup.forget(app, calls[0])
    assert "can't start new thread" in caplog.text
    cleanup.forget(app, calls[1])
    wait_until(lambda: marks_left() == MANY - 2, "both are freed")


def test_call_that_never_waits_leaves_no_ticket(locks, marked):
    """A redelivered one that fails has no place to leave; one that may wait has."""
    app, calls, marks_left = marked
    cleanup, first, second = Cleanup(), *(call._replace(again=True) for call in calls[:2])
    cleanup.forget(app, first)
    cleanup.forget(app, second, may_wait=True)
    wait_until(lambda: marks_left() == MANY - 2, "both are freed")
    assert len(list(locks.scan_iter("t:{t:*:ticket:*"))) == 1


def threads() -> int:
    """How many threads free what ended calls leave behind."""
    return sum(thread.name == "celery_setnx-cleanup" for thread in threading.enumerate())


def test_marks_of_many_ended_calls_are_freed_by_one_thread_many_at_a_time(monkeypatch, marked):
    """3,000 calls that expire at once cost one thread, and some round trips."""
    app, calls, marks_left = marked
    before, batches = threads(), []

    def counted(client: Any, marks: list[Mark]) -> Any:
        if client is client_for(app):  # the threads of other tests may be at work
            batches.append(len(marks))
        return free_all(client, marks)

    monkeypatch.setattr(cleanup_module, "free_all", counted)
    cleanup = Cleanup()
    for call in calls:
        cleanup.forget(app, call)
    wait_until(lambda: not marks_left(), "all marks are freed")
    assert threads() == before + 1
    assert sum(batches) == MANY
    assert len(batches) < MANY / 100


def test_marks_wait_for_a_server_that_stands_still_and_that_is_said_once(proxy, marked, caplog):
    """They are freed when it goes on; meanwhile there is one thread, and one line in the log."""
    app, calls, marks_left = marked
    before = threads()
    cleanup = Cleanup()
    with proxy.black_hole():
        for call in calls:
            cleanup.forget(app, call)
        wait_until(lambda: "their marks are not freed" in caplog.text, "the outage is logged")
        assert threads() == before + 1
    wait_until(lambda: not marks_left(), "all marks are freed")
    assert caplog.text.count("their marks are not freed") == 1


def test_no_more_than_so_many_ended_calls_are_kept(monkeypatch, proxy, marked, caplog):
    """The marks of more lapse by themselves, which is said of each."""
    monkeypatch.setattr(cleanup_module, "AT_MOST", 10)
    app, calls, marks_left = marked
    cleanup = Cleanup()
    with proxy.black_hole():
        for call in calls[:12]:
            cleanup.forget(app, call)
        wait_until(lambda: "10 calls have ended" in caplog.text, "they are not freed")
        cleanup.forget(app, calls[12])
    refused = [f"t[{call.task_id}] has ended, and its mark" in caplog.text for call in calls[9:13]]
    assert refused == [False, True, True, True]
    wait_until(lambda: marks_left() == MANY - 10, "those that were kept are freed")


@pytest.fixture
def waiting(server, locks) -> Iterator[Any]:
    """A task whose calls wait in line, and that is told of its failures."""
    app = Celery("waiting", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")

    def body() -> None: ...

    options = {"key": (), "on_conflict": "wait", "dedupe": "until_started"}
    yield app.task(body, base=SingletonTask, name="waiting", shared=False, singleton=options)
    client_for(app).close()
    app.close()


def marked_run(task: Any, call: Call) -> tuple[Any, Callable[[], bool]]:
    """The request of a marked call that runs in a child, and whether its mark is there still at the end."""
    client, mark = client_for(task.app), Mark(call.key, call.task_id)
    mark_all(client, [mark], dedupe="until_started", lease=600)
    request = Delivered(task, call=call).request
    request.worker_pid = 1

    def keeps_mark() -> bool:
        cleanup = cleanup_of_process()
        wait_until(lambda: not (cleanup._ended or cleanup._at_work), "what it leaves behind is freed")
        return bool(client.exists(mark.name))

    return request, keeps_mark


def killed(task: Any, call: Call) -> tuple[str, bool]:
    """The state of a call whose process has died, and whether its mark is there still."""
    request, keeps_mark = marked_run(task, call)
    request.free_dead()
    request.on_failure(info_of(WorkerLostError("gone")))
    has_mark = keeps_mark()
    return task.AsyncResult(call.task_id).state, has_mark


DIED = [
    ("-", "", ("PENDING", True)),  # it was parked
    ("-", "x1", ("PENDING", True)),  # and has been woken since
    ("x1", "", ("PENDING", True)),  # woken in vain, it was parked again
    ("-", None, ("FAILURE", False)),  # it has never waited
    ("x1", "x1", ("FAILURE", False)),  # it had its turn
]


@pytest.mark.parametrize(("copy", "begun_by", "found"), DIED)
def test_call_whose_process_died_just_after_it_was_parked_waits_on(waiting, caplog, copy, begun_by, found):
    """It has not failed, and its mark stays: it is woken when its turn has come, or was already."""
    call = Call(
        "waiting", f"id-{copy}-{begun_by}", key="t:{waiting}", copy=copy, marked=True, has_header=True
    )
    if begun_by is not None:
        client, place = client_for(waiting.app), call.place(600)
        park(client, place, copy=copy, since=1.0, call="message")
        if begun_by:
            leave(client, place, copy=begun_by)
    assert killed(waiting, call) == found
    assert ("still waits in line: the process" in caplog.text) == (found[0] == "PENDING")


@pytest.mark.parametrize("begun", [False, True], ids=["parked", "woken since"])
def test_call_without_a_header_whose_process_died_parked_waits_on(waiting, locks, caplog, begun):
    """As beat publishes a task that it has not imported: its key is that of its arguments."""
    delivered = Delivered(waiting)
    call = delivered.request.call._replace(key=waiting.lock_key())
    assert not delivered.request.call.has_header
    park(client_for(waiting.app), call.place(600), copy=call.copy, since=1.0, call="message")
    if begun:
        leave(client_for(waiting.app), call.place(600), copy="x1")
    delivered.request.worker_pid = 1
    delivered.request.free_dead()
    delivered.request.on_failure(info_of(WorkerLostError("gone")))
    assert waiting.AsyncResult(call.task_id).state == "PENDING"
    assert "still waits in line: the process" in caplog.text
    assert bool(locks.zscore(f"{call.key}:line", call.task_id)) != begun


def test_call_without_a_header_that_died_before_it_waited_has_failed(waiting):
    """Nothing says that it goes on."""
    delivered = Delivered(waiting)
    delivered.request.on_failure(info_of(WorkerLostError("gone")))
    assert waiting.AsyncResult(delivered.request.id).state == "FAILURE"


@pytest.mark.parametrize("kill", ["terminate", "cancel"])
def test_death_may_be_seen_before_celery_says_what_it_means(waiting, kill):
    """A call that is revoked with its child will not come back, and one that is cancelled will, though
    Celery says so after the kill, and for other deaths the task's options say the opposite.
    """
    waiting.acks_late, waiting.reject_on_worker_lost = True, kill == "terminate"
    call = Call("waiting", f"id-{kill}", key="t:{waiting}", marked=True, has_header=True)
    request, keeps_mark = marked_run(waiting, call)
    request.time_start = 1.0
    pool = SimpleNamespace(terminate_job=lambda _pid, _signal: request.free_dead())
    getattr(request, kill)(pool)
    request.on_failure(info_of(Terminated(9)))
    comes_back = kill == "cancel"
    assert keeps_mark() == comes_back
    assert (leave(client_for(waiting.app), call.place(600), copy=call.copy).word != "stale") == comes_back


@pytest.mark.parametrize(("most", "keeps"), [(0, False), (1, True), (None, True)])
def test_call_that_celery_retries_after_its_process_died_keeps_its_mark(waiting, most, keeps):
    """As often as it may be retried: it is published again, and by then the dead have left nothing else."""
    waiting.retry_on_worker_lost, waiting.max_retries = True, most
    call = Call("waiting", f"id-{most}", key="t:{waiting}", marked=True, has_header=True)
    request, keeps_mark = marked_run(waiting, call)
    request.free_dead()
    assert keeps_mark() == keeps


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_call_that_has_failed_with_its_process_does_not_run_later(waiting, policy):
    """It may have been sent again just before: told as failed, it starts nothing more. Its retry may run."""
    waiting.singleton = {"key": (), "on_conflict": policy}
    call = Call("waiting", "id-1", key="t:{waiting}", has_header=True)
    assert killed(waiting, call)[0] == "FAILURE"
    again, retry = call._replace(waits=1), call._replace(attempt=1)
    for which, is_stale in ((again, True), (retry, False)):
        lock, caller = SetnxLock(client_for(waiting.app), call.key, line=True), Caller("", which.attempt)
        outcome = lock.acquire(token=task_token("id-1", which.attempt, "1f"), caller=caller)
        assert outcome.stale == is_stale


def test_call_that_died_with_its_turn_has_failed(waiting, locks):
    """It was woken, and is in no line: no other message of it is on its way."""
    call = Call("waiting", "id-1", key="t:{waiting}", copy="x1", marked=True, has_header=True)
    park(client_for(waiting.app), call.place(600), copy="x1", since=1.0, call="message")
    locks.zrem("t:{waiting}:line", "id-1")
    assert killed(waiting, call)[0] == "FAILURE"


def test_child_that_dies_while_redis_is_away_has_failed(waiting, proxy, caplog):
    """Nothing tells that it waits, and the worker's event loop does not wait for that."""
    waiting.app.conf.setnx_url = proxy.url(LOCK_DB)
    call = Call("waiting", "id-1", key="t:{waiting}", has_header=True)
    with proxy.black_hole():
        Delivered(waiting, call=call).request.on_failure(info_of(WorkerLostError("gone")))
    assert waiting.AsyncResult("id-1").state == "FAILURE"
    assert "whether it still waits in line is not known" in caplog.text


def test_event_loop_asks_for_a_revoked_call_by_its_quick_client(waiting, monkeypatch):
    """It waits for no server that is away; what it asks is whether another message has started the call."""
    asked = []

    def leaving(client: Any, *given: Any, **options: Any) -> str:
        asked.append(client)
        return leave(client, *given, **options)

    monkeypatch.setattr(request_module, "leave", leaving)
    monkeypatch.setattr(request_module, "revoked_tasks", {"id-1"})
    call = Call("waiting", "id-1", key="t:{waiting}", copy="x1", has_header=True)
    client, place = client_for(waiting.app), call.place(600)
    park(client, place, copy="x1", since=1.0, call="message")
    leave(client, place, copy="x2")  # which has begun
    assert Delivered(waiting, call=call).request.revoked()
    assert asked == [quick_client_for(waiting.app)]


ENDS = [("SUCCESS", None, "id"), ("FAILURE", None, None), ("SUCCESS", "nightly", None)]


@pytest.mark.parametrize(("state", "own_id", "counts"), ENDS, ids=["stored", "failed", "an id of its own"])
def test_success_of_a_dead_process_is_taken_back_unless_its_result_is_known(
    locks, server, state, own_id, counts
):
    """It died after it had stored that: in on_success, say. An id of its user's may have another's result."""
    app = Celery("known", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")

    def body() -> None: ...

    options = {"key": (), "dedupe": "until_done", "dedupe_for": 600}
    task = app.task(body, base=SingletonTask, name="known", shared=False, singleton=options)
    task.backend = app.backend  # which another thread asks, too
    task.backend.persistent = True
    call = Call("known", own_id or uuid.uuid4().hex, key="t:{known}", has_header=True)
    task.backend.store_result(call.task_id, None, state)
    request = Delivered(task, call=call).request
    held = SetnxLock(locks, call.key, line=True).acquire(token=request._token).lock
    held.release(done_for=600)
    request.worker_pid = 1
    request.free_dead()
    cleanup = cleanup_of_process()
    wait_until(lambda: not (cleanup._ended or cleanup._at_work), "what it leaves behind is freed")
    assert done_by(locks, call.key) == (counts and call.task_id)
    client_for(app).close()
    app.close()


def test_success_is_taken_back_though_redis_was_away_for_longer_than_the_lease(locks, proxy, caplog):
    """Its process died after the release, and the lock needs nobody any more: the success does."""
    app = Celery("daily", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=proxy.url(LOCK_DB), setnx_prefix="t", setnx_timeout=0.1)

    def body() -> None: ...

    options = {"key": (), "lease": 0.1, "dedupe": "until_done", "dedupe_for": 600}
    task = app.task(body, base=SingletonTask, name="daily", shared=False, singleton=options)
    call = Call("daily", "id-1", key="t:{daily}", has_header=True)
    request = Delivered(task, call=call).request
    held = SetnxLock(locks, call.key, line=True).acquire(token=request._token).lock
    held.release(done_for=600)
    request.worker_pid = 1
    caplog.set_level("INFO")
    with proxy.black_hole():
        request.free_dead()
        wait_until(lambda: "It is not tried again" in caplog.text, "the lock is given up")
        assert done_by(locks, call.key) == "id-1"
    wait_until(lambda: done_by(locks, call.key) is None, "it counts no more")
    client_for(app).close()
    app.close()


class Looks:
    """A worker of the process that sweeps: what its looks would find, each time one is asked for."""

    def __init__(self, monkeypatch: Any, look: Any) -> None:
        self.looks: list[Any] = []
        self._look = look
        monkeypatch.setattr(sweep_module, "_sweeping", {self})

    def ensure(self) -> None:
        """It sweeps."""

    def looks_of(self, _app: Celery) -> list[Any]:
        return [self]

    def soon(self) -> None:
        self.looks.append(self._look())

    def within(self, seconds: float | None) -> None:
        if seconds is not None and seconds < SOON_S:
            self.soon()


@pytest.fixture
def paced(server, clock) -> Any:
    """A task of which two may run at a time, and each start counts for long."""
    app = Celery("paced", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")

    def body() -> None: ...

    options = {"key": (), "limit": 2, "rate": (2, 60)}
    yield app.task(body, base=SingletonTask, name="paced", shared=False, singleton=options)
    client_for(app).close()
    app.close()


def waits(paced: Any, locks: Any, task_id: str = "waits") -> Call:
    """A call in the line of the task's lock."""
    call = Call("paced", task_id, key=paced.lock_key(), copy="x1", has_header=True)
    park(locks, place_of(paced.app, call, 600), copy=ORIGINAL, since=1.0, call="message")
    return call


def is_noted(paced: Any, locks: Any) -> bool:
    """Whether it is known when to look at the line."""
    return locks.zscore(due_set(paced.app, "paced"), paced.lock_key()) is not None


@pytest.mark.parametrize("started_s", [59, 30], ids=["of its permit", "that it had noted"])
def test_death_asks_for_a_look_at_the_next_start(paced, locks, clock, monkeypatch, started_s):
    """Once the permit is freed and the line is noted as due: else that is found with the next sweep only."""
    swept = Looks(monkeypatch, lambda: (len(paced.holders()), is_noted(paced, locks)))
    request = Delivered(paced).request
    guard = paced._guard
    for token in (request._token, "another|0|0a"):
        lock = guard.lock(request.call, request._arguments)
        assert lock.acquire(token=token).acquired
    ago = clock.now - started_s * 1_000_000
    locks.delete(starts_name(lock.name))
    locks.zadd(starts_name(lock.name), {f"{ago + n}#{n}#1": ago + n for n in (0, 1)})
    locks.expire(starts_name(lock.name), 60)
    waits(paced, locks)
    request.worker_pid = 1
    request.free_dead()
    assert is_noted(paced, locks)
    assert set(swept.looks) == {(1, True)}


def test_end_of_a_call_with_a_rest_of_its_own_asks_when_its_line_is_due(waiting, clock, monkeypatch):
    """And from then on a look is told when lines of its task are due: others may rest, too."""
    step = Sweep(SimpleNamespace(app=waiting.app))
    step._client, step._thread = client_for(waiting.app), SimpleNamespace(runs=True)
    step._looks._thread = SimpleNamespace(runs=True)
    monkeypatch.setattr(sweep_module, "_sweeping", {step})
    note_due(step._client, lines_of(waiting.app), "waiting", waiting.lock_key(), within=1)
    for options, left_s in (({}, math.inf), ({"at_least_for": 1}, 0.0)):
        call = Call("waiting", "id-1", key="t:{waiting}", options=options, has_header=True)
        Delivered(waiting, call=call).ends()
        assert step._looks._left_s() == left_s
        assert (step.sweep(waiting.app, is_early=True).next_s is None) == (left_s > 0)


def test_retry_that_will_not_come_asks_for_a_look(paced, locks, monkeypatch):
    """Its permit is free from now on."""
    swept = Looks(monkeypatch, lambda: (len(paced.holders()), is_noted(paced, locks)))
    request = Delivered(paced).request
    for token in (request._token, "another|0|0a"):
        held = paced._guard.lock(request.call, request._arguments).acquire(token=token).lock
        if token == request._token:
            held.hold(600)
    waits(paced, locks)
    request.free_held()
    assert swept.looks == [(1, True)]


def test_call_that_leaves_its_line_with_its_turn_asks_for_a_look(paced, locks, clock, monkeypatch):
    """The permit that was kept for it may go to the next in a second, and not before."""
    swept = Looks(monkeypatch, lambda: is_noted(paced, locks))
    lock = paced._guard.lock(Delivered(paced).request.call, Delivered(paced).request._arguments)
    first, _second = waits(paced, locks, "id-1"), waits(paced, locks, "id-2")
    assert serve(lock, knows_terms=True).heir.task_id == "id-1"
    ago = clock.now - 59_000_000
    locks.zadd(starts_name(lock.name), {f"{ago + n}#{n}#1": ago + n for n in (1, 2)})
    locks.expire(starts_name(lock.name), 60)
    cleanup = Cleanup()
    cleanup.forget(paced.app, first, may_wait=True)
    wait_until(lambda: swept.looks, "a look is asked for")
    assert swept.looks == [True]
