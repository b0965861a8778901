"""A message that is delivered again after its attempt has ended, where no result tells that. Real workers."""

import importlib
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry

from celery_setnx import LockTimeout, SetnxLock, SingletonTask, is_skipped
from celery_setnx.call.back import ComesBack, Dropped, Message, Waits
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.lock.names import mark_name
from celery_setnx.lock.receipt import has_receipt, write_receipt
from celery_setnx.lock.record import task_token
from celery_setnx.run import attempt as attempt_module
from celery_setnx.run.receipt import Receipts, receipt_of, receipts_of
from celery_setnx.testing import hold
from tests.conftest import LOCK_DB
from tests.delivered import Delivered
from tests.harness import Journal, Worker, raising, wait_until
from tests.stage import messages, redeliver, settle, unacknowledged

pytestmark = pytest.mark.timeout(120)

POLICIES = ["skips", "waits", "retries", "daily", "several", "paced"]


@pytest.fixture(scope="module")
def module(module_worker) -> Worker:
    """A worker that runs the tasks."""
    return module_worker("tests.againapp", concurrency=3)


@pytest.fixture
def tasks(module, locks, journal) -> Any:
    """The app's module, with clean databases."""
    return importlib.import_module("tests.againapp")


@pytest.fixture
def broker(server, tasks) -> Iterator[redis.Redis]:
    """A client of the app's broker."""
    with redis.Redis.from_url(server.url(tasks.BROKER_DB), decode_responses=True) as client:
        yield client


@pytest.fixture
def settled(broker, name) -> Callable[[], None]:
    """Waits until all of the test's own messages are acknowledged.

    A courier that an earlier test has left may bring its call back, as the tests empty the lock server. And
    on a busy machine a second delivery may park, before the next start may be.
    """
    return lambda: settle(lambda: messages(broker, [name], ["celery"]))


@pytest.fixture
def twice(module, broker, journal) -> Callable[..., Any]:
    """Waits until a call's message is delivered a second time while its body runs."""

    def twice(result: Any) -> Any:
        journal.reached("start", result)
        redeliver(broker, unacknowledged(broker, "celery", result.id))
        text = f"[{result.id}] waits for another delivery of the same call"
        wait_until(lambda: text in module.log_text(), f"{text} in {module.log}")
        return result

    return twice


def starts(journal: Journal, result: Any) -> list[int]:
    """The attempts of a call whose bodies have started."""
    return [entry["retries"] for entry in journal.entries(what="start", task_id=result.id)]


@pytest.mark.parametrize("policy", POLICIES)
def test_call_that_was_delivered_twice_runs_once(tasks, module, journal, gates, twice, settled, name, policy):
    """The second delivery waits for the first, and is dropped after it; what follows is sent once."""
    task = getattr(tasks, policy)
    result = twice(task.apply_async([name], link=tasks.after.s()))
    gates(name, 9)
    module.wait_for_log(f"[{result.id}]: this message is dropped: it has ended before")
    settled()
    assert starts(journal, result) == [0]
    assert len(journal.wait_for("after")) == 1


def test_attempt_that_was_retried_runs_once_though_it_was_delivered_twice(
    tasks, module, journal, gates, twice, settled, name
):
    """Its second delivery is dropped, and its retry is not: also where the lock is held for that."""
    for task in (tasks.skips, tasks.holds):
        result = twice(task.delay(name, "retried"))
        gates(name)
        journal.wait_for("start", 2, task_id=result.id)
        gates(name)
        module.wait_for_log(f"[{result.id}]: this message is dropped: it has ended before")
        settled()
        assert starts(journal, result) == [0, 1]


def test_call_that_failed_runs_again_if_it_was_delivered_twice(tasks, journal, gates, twice, settled, name):
    """A failure is no end that is noted, as a stored one is none."""
    result = twice(tasks.skips.delay(name, "failing"))
    gates(name, 2)
    journal.wait_for("end", 2, task_id=result.id)
    settled()


@pytest.fixture
def guarded(server, locks) -> Iterator[Callable[..., Any]]:
    """Declares a guarded task, of an app whose broker delivers again after ten minutes."""
    app = Celery("receipts", broker=server.url(0), backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")
    app.conf.broker_transport_options = {"visibility_timeout": 600}

    def body() -> bool:
        return True

    def guarded(**options: Any) -> Any:
        conf = options.pop("conf", {})
        app.conf.update(conf)
        return app.task(body, base=SingletonTask, name="guarded", shared=False, **options)

    yield guarded
    client_for(app).close()
    app.close()


LATE = {"acks_late": True}
UNTOLD = {"acks_late": True, "ignore_result": True}


@pytest.mark.parametrize(
    ("options", "held_s", "error", "is_written"),
    [
        ({}, 0, None, False),
        (UNTOLD, 0, None, True),
        (LATE, 0, None, False),
        (LATE, 301, None, True),
        ({}, 301, None, True),
        ({"ignore_result": True}, 299, None, False),
        ({**LATE, "conf": {"result_backend": None}}, 0, None, True),
        ({**LATE, "conf": {"result_backend": "rpc://"}}, 0, None, True),
        ({**LATE, "conf": {"result_expires": 599}}, 0, None, True),
        ({**LATE, "conf": {"result_expires": timedelta(minutes=10)}}, 0, None, False),
        ({**LATE, "conf": {"result_expires": None}}, 0, None, False),
        ({**LATE, "conf": {"broker_url": "sqs://"}}, 0, None, True),
        ({**UNTOLD, "conf": {"broker_url": "amqp://"}}, 0, None, True),
        ({**LATE, "conf": {"broker_url": "amqp://"}}, 9999, None, False),
        (LATE, 0, Retry(), True),
        (UNTOLD, 0, Ignore(), True),
        (UNTOLD, 999, ValueError(), False),
        (UNTOLD, 999, Reject(), False),
        (UNTOLD, 999, ComesBack(), False),
        (UNTOLD, 999, Waits("", 1.0), False),
        (UNTOLD, 999, Dropped(), False),
    ],
)
def test_receipt_is_written_before_the_acknowledgement_where_nothing_else_tells(
    guarded, locks, options, held_s, error, is_written
):
    """If no result is stored that tells of a success, or the broker may have delivered it again already."""
    delivered = Delivered(guarded(**options), held_s=held_s)
    delivered.ends(error)
    assert delivered.receipts[-1:] == ([is_written] if options.get("acks_late") else [False])
    assert locks.exists(delivered.name) == is_written


def test_receipt_lasts_for_the_queue_lease_and_the_visibility_timeout(guarded, locks):
    """It has a TTL, as all keys have, and nothing in it."""
    delivered = Delivered(guarded(**UNTOLD, singleton={"queue_lease": 60}), held_s=0)
    delivered.ends()
    assert 650_000 < locks.pttl(delivered.name) <= 660_000
    assert locks.get(delivered.name) == ""


def test_call_that_is_told_from_no_other_has_no_receipt(guarded, locks):
    """Sent by its name under an id of the caller's own: another one with that id may be a new call."""
    task = guarded(**UNTOLD)
    assert receipt_of(task._guard, Call("guarded", "nightly")) is None
    assert receipt_of(task._guard, Call("guarded", "nightly", call_id="c")) == "t:receipt:guarded:nightly:c:0"
    assert receipt_of(task._guard, Call("guarded", str(uuid.uuid4()), attempt=2)).endswith("::2")


def test_lock_server_that_stands_still_holds_the_parent_up_once(guarded, proxy, caplog):
    """It waits for a moment, says so, and does not try again with each call; then it does."""
    task = guarded(**UNTOLD, conf={"setnx_url": proxy.url(LOCK_DB)})
    with proxy.black_hole():
        began = time.monotonic()
        for _ in range(50):
            Receipts.write(receipts_of(task.app), Call("guarded", "id-1"), "t:receipt:1", 60)
        assert time.monotonic() - began < 20
    assert caplog.text.count("was not written") == 1
    receipts_of(task.app)._silent_until = 0.0
    receipts_of(task.app).write(Call("guarded", "id-1"), "t:receipt:1", 60)
    assert has_receipt(client_for(task.app), "t:receipt:1")


def test_message_that_makes_no_key_disturbs_no_other_receipt(guarded, locks, caplog):
    """What cannot be sent to a server is one call's trouble, and is said."""
    task = guarded(**UNTOLD)
    receipts_of(task.app).write(Call("guarded", "\ud800"), "t:receipt:\ud800", 60)
    receipts_of(task.app).write(Call("guarded", "id-1"), "t:receipt:1", 60)
    assert "was not written" in caplog.text
    assert locks.exists("t:receipt:1")


@pytest.fixture
def again(guarded, request) -> Iterator[Callable[..., bool]]:
    """Whether the body of a call runs, of which the broker flags the message as delivered before."""
    task = guarded(**UNTOLD, singleton=getattr(request, "param", {}))
    task.push_request(id=str(uuid.uuid4()), args=[], kwargs={}, called_directly=False, retries=0)
    vars(task.request)["delivery_info"] = {"redelivered": True}

    def runs(**said: Any) -> bool:
        vars(task.request).update(Call("guarded", task.request.id, **said).as_headers())
        vars(task.request).update(retries=said.get("attempt", 0), _protected=0)
        try:
            return bool(task())
        except Dropped:
            return False

    runs.task = task
    yield runs
    task.pop_request()


def written(task: Any, call: Call) -> None:
    """Write the receipt of a call's attempt."""
    write_receipt(client_for(task.app), receipt_of(task._guard, call), 60)


def test_receipt_drops_its_own_attempt_and_nothing_else(again):
    """Not a retry, nor a call that was given the same task id, nor what the broker does not flag."""
    task = again.task
    written(task, Call("guarded", task.request.id, call_id="c"))
    assert again(call_id="c", attempt=1)
    assert again(call_id="d")
    assert again()
    assert not again(call_id="c")
    vars(task.request)["delivery_info"] = {"redelivered": False}
    assert again(call_id="c")


def test_receipt_is_asked_for_before_a_policy_ends_the_call_once_more(again):
    """Another call has the lock by now: a skip would send what follows a second time."""
    task = again.task
    written(task, Call("guarded", task.request.id, call_id="c"))
    with hold(task):
        assert not again(call_id="c")


UNTIL_DONE = {"dedupe": "until_done", "queue_lease": 60}


def marked(task: Any) -> str:
    """The key's mark: that of the retry, or of the call."""
    client, name = client_for(task.app), mark_name(task.lock_key())
    client.set(name, task.request.id, ex=7200)
    return name


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("again", [UNTIL_DONE], indirect=True)
def test_delivery_that_is_dropped_leaves_the_mark_of_its_retry(again, locks, held):
    """For as long as the attempt that has ended has said: its retry is due in an hour."""
    task = again.task
    written(task, Call("guarded", task.request.id, call_id="c"))
    mark = marked(task)
    with hold(task) if held else nullcontext():
        assert not again(call_id="c", key=task.lock_key(), marked=True)
    assert locks.get(mark) == task.request.id
    assert 7100 < locks.ttl(mark) <= 7200


@pytest.mark.parametrize("again", [UNTIL_DONE], indirect=True)
def test_mark_of_a_second_delivery_ends_when_its_body_begins_or_will_not(again, locks, monkeypatch):
    """Nothing has ended: it is its own."""
    task, mark = again.task, marked(again.task)
    found: list[Any] = []
    monkeypatch.setattr(attempt_module, "let_go", lambda request: found.append(locks.get(mark)))
    assert again(call_id="c", key=task.lock_key(), marked=True)
    assert found == [None]
    marked(task)
    with hold(task):
        assert is_skipped(task())
    assert locks.get(mark) is None


@pytest.mark.parametrize("again", [{**UNTIL_DONE, "max_wait": 1}], indirect=True)
def test_mark_that_a_second_delivery_keeps_under_its_lock_ends_or_lasts_with_it(again, locks, monkeypatch):
    """It looks once more, and its mark lasts until then; or it fails before its body, and has none."""
    mark, said = marked(again.task), {"call_id": "c", "key": again.task.lock_key()}
    locks.expire(mark, 5)
    monkeypatch.setattr(Message, "send", lambda self, app, call, countdown: None)
    with pytest.raises(Waits):
        again(**said, marked=True, waits=1)
    assert 55 < locks.ttl(mark) <= 61
    monkeypatch.setattr(attempt_module, "store_started", raising(LockTimeout("t", "k", {})))
    with pytest.raises(LockTimeout):
        again(**said, marked=True)
    assert locks.get(mark) is None


def rests(task: Any) -> SetnxLock:
    """The lock, which the call's first attempt has given back, to rest."""
    lock = SetnxLock(client_for(task.app), task.lock_key(), line=True)
    held = lock.acquire(token=task_token(task.request.id, 0, "1f")).lock
    assert held.release(at_least_for=600) == "resting"
    return lock


def test_delivery_that_is_dropped_lets_the_lock_rest(again):
    """at_least_for is kept; but the attempt's retry need not wait for that."""
    task = again.task
    written(task, Call("guarded", task.request.id, call_id="c"))
    lock = rests(task)
    assert not again(call_id="c")
    assert lock.holder().state == "resting"
    assert again(call_id="c", attempt=1)


def test_broker_that_flags_nothing_has_every_late_call_ask(again, monkeypatch):
    """As SQS."""
    task = again.task
    vars(task.request)["delivery_info"] = {"redelivered": False}
    written(task, Call("guarded", task.request.id, call_id="c"))
    monkeypatch.setattr("celery_setnx.call.back.broker_scheme", lambda app: "sqs")
    assert not again(call_id="c")
    task.acks_late = False
    assert again(call_id="c")


def test_second_delivery_that_finds_no_end_looks_once_more_before_it_runs(again, monkeypatch):
    """The first may have given its lock back a moment ago, and its links be on their way."""
    sent: list[Call] = []
    monkeypatch.setattr(Message, "send", lambda self, app, call, countdown: sent.append(call))
    with pytest.raises(Waits):
        again(call_id="c", waits=1)
    (call,) = sent
    assert (call.asked, call.again) == (1, True)
    assert again(call_id="c", waits=2, asked=1)


HOLDS = {"hold_on_retry": True, "queue_lease": 60}


@pytest.mark.parametrize("again", [HOLDS], indirect=True)
def test_second_delivery_leaves_the_lock_that_is_held_for_its_retry(again, monkeypatch):
    """It waits for an end to be told, and is dropped then; the retry goes on under the same fence."""
    task = again.task
    lock = SetnxLock(client_for(task.app), task.lock_key(), line=True)
    held = lock.acquire(token=task_token(task.request.id, 0, "1f")).lock
    held.hold(600)
    sent: list[Call] = []
    monkeypatch.setattr(Message, "send", lambda self, app, call, countdown: sent.append(call))
    with pytest.raises(Waits):
        again(call_id="c")
    written(task, Call("guarded", task.request.id, call_id="c"))
    assert not again(call_id="c", waits=1)
    assert (lock.holder().state, lock.holder().fence) == ("held_for_retry", held.fence)
    assert [call.waits for call in sent] == [1]
    assert again(call_id="c", attempt=1, waits=1)
    assert task.request.setnx_lock.fence == held.fence


@pytest.mark.parametrize("again", [HOLDS, {}], ids=["held", "early"], indirect=True)
def test_retry_that_has_waited_for_its_attempt_before_runs_at_once(again, monkeypatch):
    """Given back to look once more, a held lock would be anybody's; of an early message there is no other."""
    task = again.task
    task.acks_late = bool(task._guard.options.hold_on_retry)
    monkeypatch.setattr(Message, "send", raising(AssertionError("it comes back")))
    assert again(call_id="c", attempt=1, waits=1)


def test_call_that_is_replayed_under_its_random_id_is_a_second_delivery_to_sqs(again, monkeypatch):
    """Sent by no program of ours, it has nothing else that tells it from the first."""
    task = again.task
    written(task, Call("guarded", task.request.id))
    vars(task.request)["delivery_info"] = {"redelivered": False}
    vars(task.request).pop("singleton", None)
    assert task()
    monkeypatch.setattr("celery_setnx.call.back.broker_scheme", lambda app: "sqs")
    with pytest.raises(Dropped):
        task()


def test_call_published_anew_under_its_id_is_another(guarded):
    """Also with the headers that it has come with; its retry stays the one that it was."""
    guard = guarded()._guard
    first = guard.call(Call("guarded", "id-1"), ((), {}), None, None, shown=False)
    retry = guard.call(Call("guarded", "id-1", 1), ((), {}), None, first, shown=False)
    anew = guard.call(Call("guarded", "id-1"), ((), {}), None, first, shown=False)
    restarted = guard.call(Call("guarded", "id-1"), ((), {}), None, retry, shown=False)
    assert retry.call_id == first.call_id
    assert len({first.call_id, anew.call_id, restarted.call_id}) == 3
