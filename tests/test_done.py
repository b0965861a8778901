"""dedupe_for: a call that has succeeded makes duplicates of its like for a while. Real workers."""

import importlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery.exceptions import WorkerLostError

from celery_setnx import DuplicateTask, OptionError, SingletonTask, check, is_skipped, send_task
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.names import done_name, mark_name
from celery_setnx.lock.record import task_of, task_token
from celery_setnx.lock.verbs import Caller
from celery_setnx.testing import guarded, locks_on
from tests.harness import DEADLINE_S, Journal, Worker, wait_until
from tests.stage import Parked, wait_for_ends

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def module(module_worker) -> Worker:
    """A worker that runs the tasks."""
    return module_worker("tests.doneapp", concurrency=2)


@pytest.fixture
def tasks(module, locks, journal) -> Any:
    """The app's module, with clean databases."""
    return importlib.import_module("tests.doneapp")


@pytest.fixture
def parked(server, tasks) -> Iterator[Parked]:
    """The queue of the app's broker that no worker consumes, empty."""
    with redis.Redis.from_url(server.url(tasks.BROKER_DB), decode_responses=True) as client:
        yield Parked(client)


@pytest.fixture
def name() -> str:
    """The test's own key."""
    return uuid.uuid4().hex


@pytest.fixture
def counts(tasks, locks) -> Callable[..., str | None]:
    """The id of the call whose success counts for a name."""

    def id_of(name: str, task: Any = tasks.daily) -> str | None:
        token = locks.get(done_name(task.lock_key(name)))
        return token and task_of(token)

    return id_of


def settle(name: str) -> str:
    """A task's function."""
    return name


def runs(journal: Journal, name: str) -> list[str]:
    """Ids of the calls of a name whose bodies have started, in order."""
    return [entry["task_id"] for entry in journal.entries(what="start", name=name)]


def test_success_makes_duplicates(tasks, name, journal, locks, counts):
    """They are not published, and their callers get the first call's result; for as long as it is said."""
    first = tasks.daily.delay(name)
    assert first.get(timeout=30) == name
    again = tasks.daily.delay(name)
    assert (again.id, again.deduplicated, again.get(timeout=30)) == (first.id, True, name)
    assert counts(name) == first.id
    assert 3_500_000 < locks.pttl(done_name(tasks.daily.lock_key(name))) <= 3_600_000
    (told,) = journal.entries(what="deduplicated", key=tasks.daily.lock_key(name))
    assert (told["task_id"], told["state"]) == (first.id, "done")
    assert runs(journal, name) == [first.id]
    assert not tasks.daily.delay(f"{name}-other").deduplicated


def test_without_it_success_makes_no_duplicates(tasks, name, counts):
    """until_done alone ends with the run."""
    assert tasks.plain_until_done.delay(name).get(timeout=30) == name
    assert counts(name, tasks.plain_until_done) is None
    assert not tasks.plain_until_done.delay(name).deduplicated


@pytest.mark.parametrize("ends", ["failing", "ignored"])
def test_what_does_not_succeed_does_not_count(tasks, name, journal, counts, ends):
    """A failure, or a call that is ignored, frees the key at once."""
    first = tasks.daily.delay(name, ends)
    journal.reached("postrun", first)
    assert counts(name) is None
    second = tasks.daily.delay(name)
    assert (second.deduplicated, second.get(timeout=30)) == (False, name)


def test_retry_does_not_count_and_its_success_does(tasks, name, journal, parked, counts):
    """Between its attempts the call makes duplicates as one that is queued."""
    first = journal.reached("released", tasks.daily.delay(name, "retried"))
    assert counts(name) is None
    assert tasks.daily.delay(name).id == first.id
    parked.move()
    assert first.get(timeout=30) == name
    assert counts(name) == first.id


def test_result_that_cannot_be_stored_does_not_count(tasks, name, counts):
    """The lock was released before Celery found that out; the success is taken back."""
    with pytest.raises(Exception, match="Unwritable"):
        tasks.daily.delay(name, "unwritable").get(timeout=30)
    wait_until(lambda: counts(name) is None, "it counts no more")
    assert not tasks.daily.delay(name).deduplicated


def test_next_step_that_cannot_be_sent_takes_the_success_back(tasks, name, journal, counts):
    """Celery sends what follows after the body has ended, and the lock was released."""
    first = tasks.daily.apply_async([name], link=tasks.after.s().set(serializer="none-such"))
    journal.reached("start", first)
    wait_until(lambda: first.state == "FAILURE", "it has failed")
    wait_until(lambda: counts(name) is None, "it counts no more")


def test_process_that_dies_before_it_stores_its_result_does_not_count(
    tasks, name, journal, gates, locks, counts
):
    """Its worker sees it die, and takes the success back, but not the lock, which was handed on."""
    task, gate = tasks.waiting, f"gated-{name}"
    first = journal.reached("start", task.delay(gate, "deadly"))
    waiter = SetnxLock(locks, task.lock_key(gate), line=True)
    assert waiter.acquire(token=task_token("other", 0, "a1"), caller=Caller(linger_s=60)).lock is None
    gates(gate, 1)
    with pytest.raises(WorkerLostError):
        first.get(timeout=30)
    wait_until(lambda: counts(gate, task) is None, "it counts no more")
    assert (waiter.holder().state, waiter.holder().task_id) == ("handed", "other")
    outcomes = [entry["outcome"] for entry in journal.entries(what="released", task_id=first.id)]
    assert outcomes == ["released"], "its worker does not say that it has freed the lock"


def test_release_that_comes_late_does_not_count_one_that_has_failed(
    tasks, name, journal, locks, counts, start_worker
):
    """Redis was away when its body ended: its lock is given back after its result could not be stored."""
    start_worker("tests.doneapp", queues="late", conf={"late_releases": True})
    first = tasks.daily.apply_async([name, "unwritable"], queue="late")
    journal.reached("released", first)
    wait_until(lambda: counts(name) is None, "it counts no more")
    assert not locks.exists(tasks.daily.lock_key(name))
    assert not tasks.daily.delay(name).deduplicated


def test_success_stays_though_its_process_dies_later(tasks, name, journal, counts, start_worker):
    """Its worker still knows the delivery; but that has ended, and is none of the dead process's."""
    worker = start_worker("tests.doneapp", concurrency=1, queues=name, conf={"keeps_requests": True})
    first = tasks.daily.apply_async([name], queue=name)
    assert first.get(timeout=30) == name
    (start,) = journal.entries(what="start", task_id=first.id)
    wait_for_ends(tasks.app, worker)
    os.kill(start["pid"], signal.SIGKILL)
    worker.wait_for_log("exited with")
    second = tasks.daily.apply_async([f"{name}-2", "deadly"], queue=name)
    with pytest.raises(WorkerLostError):
        second.get(timeout=30)
    wait_until(lambda: counts(f"{name}-2") is None, "the worker has looked after both of its dead")
    assert counts(name) == first.id


def test_success_that_is_stored_stays_though_its_process_dies_then(tasks, name, counts):
    """In the task's on_success, say: its result says that it has succeeded."""
    first = tasks.hooked.delay(name, "dies later")
    assert first.get(timeout=30) == name
    second = tasks.hooked.delay(f"{name}-2", "deadly")
    with pytest.raises(WorkerLostError):
        second.get(timeout=30)
    wait_until(lambda: counts(f"{name}-2", tasks.hooked) is None, "the worker has looked after both")
    assert counts(name, tasks.hooked) == first.id
    assert tasks.hooked.delay(name).id == first.id


def test_call_that_nobody_asked_is_skipped_and_names_the_first(tasks, name, journal, counts):
    """A send_task without the package, or beat: its worker asks, under the lock."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    bare = tasks.app.send_task("daily", [name])
    result = bare.get(timeout=30)
    assert is_skipped(result)
    assert (result["task"], result["holder"]) == (
        "daily",
        {"task_id": first.id, "state": "done"},
    )
    assert runs(journal, name) == [first.id]
    assert counts(name) == first.id
    (told,) = journal.entries(what="deduplicated", key=tasks.daily.lock_key(name))
    assert (told["task_id"], told["state"]) == (first.id, "done")


def test_call_that_was_published_while_redis_was_away_is_skipped(tasks, name, journal):
    """Its message says that nobody could be asked."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    with locks_on(tasks.app, "redis://127.0.0.1:1/1"):
        unasked = tasks.daily.delay(name)
    assert not unasked.deduplicated
    assert is_skipped(unasked.get(timeout=30))
    assert runs(journal, name) == [first.id]


@pytest.mark.parametrize("policy", ["retrying", "waiting"])
def test_call_that_nobody_asked_asks_after_it_has_waited(tasks, name, journal, gates, policy):
    """It met the first while that ran: when it comes back, its message is no longer as bare as it was."""
    task, gate = getattr(tasks, policy), f"gated-{name}"
    first = journal.reached("start", task.delay(gate))
    bare = journal.reached("conflict", tasks.app.send_task(policy, [gate]))
    gates(gate, 2)
    assert first.get(timeout=30) == gate
    assert is_skipped(bare.get(timeout=30))
    assert runs(journal, gate) == [first.id]


def test_call_whose_mark_had_lapsed_when_its_like_was_published_asks(tasks, name, journal, parked, locks):
    """Two are queued, each the only one for all that its publisher could know: the second is skipped."""
    first = tasks.daily.apply_async([name], queue="parked")
    locks.delete(mark_name(tasks.daily.lock_key(name)))
    second = tasks.daily.apply_async([name], queue="parked")
    assert not second.deduplicated
    parked.move()
    assert first.get(timeout=30) == name
    parked.move()
    assert is_skipped(second.get(timeout=30))
    assert runs(journal, name) == [first.id]


def test_call_from_within_a_task_asks_where_nobody_could_be_asked(tasks, name, journal):
    """It has a parent, which does not wait for it."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    sent = tasks.starts.delay(name, "redis://127.0.0.1:1/1").get(timeout=30)
    assert is_skipped(tasks.daily.AsyncResult(sent).get(timeout=30))
    assert runs(journal, name) == [first.id]


def test_fan_out_while_redis_was_away_is_skipped(tasks, name, journal):
    """Each message says that nobody could be asked."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    with locks_on(tasks.app, "redis://127.0.0.1:1/1"):
        assert tasks.daily.fan_out([(name,)]).accepted == 1
    (told,) = journal.wait_for("deduplicated", key=tasks.daily.lock_key(name))
    assert told["task_id"] == first.id
    assert runs(journal, name) == [first.id]


def test_failure_after_the_release_is_taken_back_without_a_pool_process(
    tasks, name, counts, journal, start_worker
):
    """A result that cannot be stored, in the worker's own process."""
    start_worker("tests.doneapp", pool="threads", queues="threads")
    first = tasks.daily.apply_async([name, "unwritable"], queue="threads")
    journal.reached("released", first)
    wait_until(lambda: counts(name) is None, "it counts no more")


def test_success_whose_result_backend_is_away_does_not_count(tasks, name, counts, journal, start_worker):
    """Nobody will ever read its result."""
    away = {"result_backend": "redis://127.0.0.1:1/0", "result_backend_transport_options": {"max_retries": 0}}
    start_worker("tests.doneapp", queues="away", conf={**away, "redis_retry_on_timeout": False})
    first = tasks.daily.apply_async([name], queue="away")
    journal.reached("released", first)
    wait_until(lambda: counts(name) is None, "it counts no more")


def active(module: Worker, tasks: Any) -> set[str]:
    """Ids of the calls that the worker takes for running."""
    name = module.node
    asked = tasks.app.control.inspect([name], timeout=DEADLINE_S, limit=1)
    return {call["id"] for call in asked.active()[name]}


def test_bare_call_without_a_key_ends_as_any_failure(tasks, module):
    """Its arguments fit nothing: there is no success of it to take back, and its worker goes on."""
    sent = tasks.app.send_task("daily", kwargs={"other": 1})
    with pytest.raises(Exception, match="missing a required argument"):
        sent.get(timeout=30)
    wait_until(lambda: sent.id not in active(module, tasks), "the worker has done with it")


def test_bare_call_without_a_key_is_revoked_as_any(tasks, module, journal):
    """The worker that discards it goes on."""
    sent = tasks.app.send_task("daily", kwargs={"other": 1}, expires=-1)
    journal.reached("revoked", sent)
    assert tasks.daily.delay(sent.id).get(timeout=30) == sent.id


def test_call_for_which_something_waits_runs(tasks, name, journal):
    """A link, a step of a chain, or a caller's own task id: it is no duplicate."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    linked = tasks.daily.apply_async([name], link=tasks.after.s())
    assert linked.get(timeout=30) == name
    chained = tasks.app.send_task("daily", [name], chain=[tasks.after.s()])
    assert chained.get(timeout=30) == name
    named = tasks.daily.apply_async([name], task_id=f"own-{name}")
    assert named.get(timeout=30) == name
    assert runs(journal, name) == [first.id, linked.id, chained.id, named.id]


def test_delivery_of_the_very_call_is_no_duplicate_of_it(tasks, name, journal):
    """What is sent again under its id runs again, as without the option."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    assert tasks.app.send_task("daily", [name], task_id=first.id).id == first.id
    wait_until(lambda: runs(journal, name) == [first.id] * 2, "it runs again")


def test_eager_success_does_not_count(tasks, name, counts):
    """Its result is stored nowhere."""
    with guarded(tasks.app):
        assert tasks.daily.apply([name]).get() == name
    assert counts(name) is None


def test_fan_out_counts_them_as_duplicates(tasks, name):
    """Many at a time are asked in one round trip."""
    tasks.daily.delay(name).get(timeout=30)
    counts = tasks.daily.fan_out([(name,), (f"{name}-2",)])
    assert (counts.accepted, counts.duplicates) == (1, 1)


def test_duplicate_that_is_refused_says_that_the_other_has_succeeded(tasks, name):
    """on_duplicate='raise'."""
    first = tasks.strict.delay(name)
    first.get(timeout=30)
    with pytest.raises(DuplicateTask, match=f"the same call has succeeded already, as {first.id}") as caught:
        tasks.strict.delay(name)
    assert caught.value.state == "done"


def test_sender_without_the_tasks_code_asks_as_well(tasks, name):
    """If it says what the task says."""
    first = tasks.daily.delay(name)
    first.get(timeout=30)
    sender = importlib.import_module("tests.app").make_app("sender", tasks.BROKER_DB)
    sender.tasks.unregister("daily")  # which all apps of this process share
    options = {"key": "name", "dedupe": "until_done", "dedupe_for": 3600}
    sent = send_task(sender, "daily", kwargs={"name": name}, singleton=options)
    assert (sent.deduplicated, sent.id) == (True, first.id)
    del options["dedupe_for"]
    assert not send_task(sender, "daily", kwargs={"name": name}, singleton=options).deduplicated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dedupe_for": 5}, "dedupe_for=5 and dedupe=None"),
        ({"dedupe_for": 5, "dedupe": "until_started"}, "dedupe_for needs dedupe='until_done'"),
        ({"dedupe_for": 0, "dedupe": "until_done"}, "must be more than 0 seconds, or None"),
        ({"dedupe_for": "a day", "dedupe": "until_done"}, "must be seconds or a timedelta"),
    ],
)
def test_window_that_cannot_be_is_refused(server, options, message):
    """By the start of whatever has the task."""
    app = importlib.import_module("tests.app").make_app("refused")
    app.task(base=SingletonTask, name="refused", shared=False, singleton=options)(settle)
    with pytest.raises(OptionError, match=message):
        check(app)


def test_window_of_a_single_call_is_refused(tasks):
    """All calls of a key must agree on it."""
    with pytest.raises(OptionError, match="'dedupe_for' of a call of daily is the same for all calls"):
        tasks.daily.apply_async(["a"], singleton={"dedupe_for": 5})
