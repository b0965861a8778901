"""RabbitMQ as the broker: classic queues, and quorum queues with native delayed delivery."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import celery
import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError

from celery_setnx import LockTimeout, SingletonTask, is_skipped, superseded_by
from celery_setnx.call.delay import hop_s
from celery_setnx.connection import client_for
from celery_setnx.doctor.broker import courier_findings
from celery_setnx.exceptions import FanOutFailed
from celery_setnx.lock.names import line_names
from celery_setnx.terms import Whose
from examples.embedded import EmbeddedServer
from tests.conftest import LOCK_DB
from tests.harness import Journal, settle_marks, wait_until
from tests.pausing import KEYS, Load, Operator, pause_under_load
from tests.topologies.conftest import APP
from tests.topologies.contract import each_key_runs_once
from tests.topologies.rabbitmq import RabbitMQ

QUEUE_LEASE_S = 3600
RETRY = {"on_conflict": "retry", "retry_delay": 1, "retry_delay_max": 1}
WAIT = {"on_conflict": "wait"}
LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True}
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",  # Celery does not delay natively over direct exchanges
    "task_create_missing_queue_type": "quorum",
    "task_create_missing_queue_exchange_type": "topic",
    "worker_detect_quorum_queues": True,
    "broker_native_delayed_delivery_queue_type": "quorum",
}
DIRECT = {"task_default_queue_type": "quorum", "task_create_missing_queue_type": "quorum"}
KINDS: dict[str, dict[str, Any]] = {"classic": {}, "quorum": QUORUM, "direct": DIRECT}
in_both_kinds = pytest.mark.parametrize("kind", ["classic", "quorum"], indirect=True)

pytestmark = [
    pytest.mark.skipif(celery.VERSION < (5, 5), reason="quorum queues need Celery 5.5"),
    pytest.mark.timeout(400),  # a killed broker boots for more than a minute on a busy machine
]


@pytest.fixture(scope="module")
def settings_of(rabbitmq, server) -> Iterator[Callable[..., dict[str, Any]]]:
    """The settings of an app with queues of its own, of a kind."""
    queues: list[str] = []

    def settings_of(kind: str, **conf: Any) -> dict[str, Any]:
        queues.append(f"{kind}-{uuid.uuid4().hex[:8]}")
        return {
            "broker_url": rabbitmq.url,
            "broker_transport_options": {"confirm_publish": True},
            "setnx_url": server.url(LOCK_DB),
            "task_default_queue": queues[-1],
            **KINDS[kind],
            **conf,
        }

    yield settings_of
    for queue in queues:
        rabbitmq.delete(queue)
        rabbitmq.delete(other(queue))


@pytest.fixture(scope="module", params=["quorum"])
def kind(request) -> str:
    """Of the queues. Classic ones have tests where Celery or the broker makes something else of them."""
    return str(request.param)


@pytest.fixture
def settings(settings_of, kind) -> Any:
    """Of an app of the test's own."""
    return settings_of(kind)


@pytest.fixture(scope="module")
def shared(settings_of, kind, module_worker) -> Any:
    """The settings of an app whose worker serves two queues for this whole module."""
    settings = settings_of(kind)
    queue = settings["task_default_queue"]
    module_worker(APP, concurrency=4, queues=f"{queue},{other(queue)}", conf=settings)
    return settings


@pytest.fixture
def tasks(tasks_of, shared, locks) -> Any:
    """The tasks of the shared worker; no lock is held."""
    return tasks_of(**shared)


@pytest.fixture
def own_broker(rabbitmq) -> Iterator[RabbitMQ]:
    """A broker that the test may kill, freeze and configure; afterwards it is there again."""
    if not rabbitmq.is_own:
        pytest.skip("the broker is not ours: AMQP_URL names it")
    yield rabbitmq
    if not rabbitmq.answers():
        rabbitmq.start()


def other(queue: str) -> str:
    """The second queue of an app."""
    return f"{queue}-other"


def wait_for_waiters(task: Any, name: str, count: int) -> None:
    """Until so many calls are parked in the line of a name, and their couriers sent."""
    _line, calls = line_names(task.lock_key(name))

    def are_there() -> bool:
        known = client_for(task.app).hvals(calls)
        return (
            len([call for call in known if not call.startswith(b"@")]) == count
        )  # who lingers is not parked

    wait_until(are_there, f"{count} in line")


def one_at_a_time(journal: Journal, name: str, bodies: int) -> None:
    """So many bodies of a name have run, and each ended before the next began."""
    turns = [(e["what"], e["task_id"]) for e in journal.entries(name=name) if e["what"] in ("start", "end")]
    assert turns == [(what, task_id) for _, task_id in turns[::2] for what in ("start", "end")]
    assert len(turns) == 2 * bodies


def test_calls_of_one_key_run_one_at_a_time(tasks, journal):
    """Four calls at once: the lock keeps them apart, and each ends with its own result."""
    results = [tasks.load.delay("a", 0.1) for _ in range(4)]
    assert [result.get(timeout=60) for result in results] == ["a"] * 4
    one_at_a_time(journal, "a", 4)


@in_both_kinds
@pytest.mark.parametrize("policy", [RETRY, WAIT], ids=["retry", "wait"])
def test_call_that_waited_is_unchanged(tasks, shared, journal, gates, name, policy):
    """Headers, priority, expiry, limits, shadow, key, route, and its own retries are not used up."""
    queue = other(shared["task_default_queue"])
    expires = datetime.now(timezone.utc) + timedelta(minutes=5)
    options = {"time_limit": 100, "soft_time_limit": 90, "expires": expires, "queue": queue}
    options |= {"headers": {"tenant": "acme"}, "priority": 5, "shadow": "alias", "singleton": policy}
    first = journal.reached("start", tasks.tell.apply_async([name], **options))
    second = tasks.tell.apply_async([name], **options)
    if policy is RETRY:
        journal.wait_for("conflict", 2, task_id=second.id)
    else:
        wait_for_waiters(tasks.tell, name, 1)
    gates(name, 2)
    told, waited = first.get(timeout=60), second.get(timeout=60)
    assert (told["retries"], told["priority"], told["tenant"], told["queue"]) == (0, 5, "acme", queue)
    assert waited == told


def test_call_waits_again_and_again(tasks, journal, gates, name):
    """A wait of 3 s takes two of the delaying queues, and the next wait the same two. No worker holds it."""
    first = journal.reached("start", tasks.paced.delay(name))
    second = journal.reached("conflict", tasks.paced.delay(name), 2)
    nodes = tasks.paced.app.control.inspect(timeout=5).scheduled()
    assert nodes
    assert second.id not in [each["request"]["id"] for held in nodes.values() for each in held]
    gates(name, 2)
    assert [first.get(timeout=60), second.get(timeout=60)] == [name] * 2


@pytest.mark.parametrize("hold", [False, True], ids=["released", "held"])
def test_retry_of_its_own(tasks, journal, hold):
    """Between its attempts another call runs; with hold_on_retry it is skipped."""
    result = tasks.again.apply_async(["a", 1, 6], singleton={"hold_on_retry": hold})
    journal.wait_for("released", task_id=result.id)
    rival = tasks.again.delay("a", 0).get(timeout=60)
    ended = journal.entries(what="postrun", task_id=result.id)
    assert [entry["state"] for entry in ended] in (["RETRY"], [])  # its second attempt is still to come
    assert is_skipped(rival) == hold
    assert result.get(timeout=60) == 1
    one_at_a_time(journal, "a", 2 if hold else 3)


@pytest.mark.parametrize("dedupe", ["until_started", "until_done"])
def test_call_is_marked_through_its_countdown(tasks, locks, journal, gates, name, dedupe):
    """For the queue lease beyond the countdown; equal calls are duplicates until the start, or the end."""
    options = {"countdown": 2, "singleton": {"dedupe": dedupe}}
    began = time.monotonic()
    first = tasks.once.apply_async([name], **options)
    mark = f"{tasks.once.lock_key(name)}:queued"
    settle_marks(tasks.once.app)
    left_s = locks.pttl(mark) / 1000
    assert QUEUE_LEASE_S + 1.9 - (time.monotonic() - began) < left_s <= QUEUE_LEASE_S + 2
    again = tasks.once.apply_async([name], **options)
    assert (again.deduplicated, again.id) == (True, first.id)
    journal.wait_for("start", task_id=first.id)
    assert not locks.exists(mark)
    if dedupe == "until_done":  # by then its lock says so
        assert tasks.once.delay(name).deduplicated
    gates(name, 2)
    assert first.get(timeout=60) == name
    assert not locks.exists(mark)
    afterwards = tasks.once.delay(name)
    assert not afterwards.deduplicated
    assert afterwards.get(timeout=60) == name


def test_revoked_call_frees_its_mark(tasks, locks, journal, name):
    """When its countdown is over, and without running."""
    result = tasks.once.apply_async([name], countdown=5)
    assert locks.exists(f"{tasks.once.lock_key(name)}:queued")
    result.revoke()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=60)
    wait_until(lambda: not locks.exists(f"{tasks.once.lock_key(name)}:queued"), "no mark")
    assert journal.entries(what="start", task_id=result.id) == []


def test_canvas_of_one_key_comes_to_its_end(tasks, journal):
    """A chord of a chain and a task, and its body, all of one key: every step runs, one after the other."""
    step = tasks.load.si("a", 0.3)
    assert chord([chain(step, step), step], step).apply_async().get(timeout=60) == "a"
    one_at_a_time(journal, "a", 4)


@pytest.mark.clock
def test_waiting_calls_run_in_order_and_are_woken_at_once(tasks, journal, gates, name):
    """Four wait: first come, first served, each within less than the shortest delay of this broker."""
    calls = [tasks.work.apply_async([name], singleton={"lease": 60})]
    journal.wait_for("start", task_id=calls[0].id)
    for number in range(1, 5):
        calls.append(tasks.work.apply_async([name], singleton={"lease": 60, **WAIT}))
        wait_for_waiters(tasks.work, name, number)
    gates(name, len(calls))
    assert [call.get(timeout=60) for call in calls] == [name] * 5
    one_at_a_time(journal, name, 5)
    starts, ends = journal.entries(what="start", name=name), journal.entries(what="end", name=name)
    assert [start["task_id"] for start in starts] == [call.id for call in calls]
    hand_overs = [start["at"] - end["at"] for start, end in zip(starts[1:], ends)]
    assert max(hand_overs) < 1, hand_overs


def test_pause_under_load_starts_nothing_and_loses_nothing(work_with, settings, locks, journal, note):
    """Two workers, a key of each call's and then the whole task; what waits goes on at once, in its order."""
    both = [work_with(**settings, looks_after_s=30) for _ in range(2)]
    task, operator = both[0].load, Operator(both[0].app, *(tasks.worker for tasks in both))
    for whose in [Whose(key=task.lock_key(key)) for key in KEYS], [Whose(scope=task.name)]:
        load = Load(task, journal)
        try:
            told = pause_under_load(load, operator, whose)
        finally:
            load.stop()
            operator.resume_all()
        note(f"RabbitMQ: the first start after the end of {len(whose)} pauses: {told}")


@in_both_kinds
def test_courier_of_a_waiting_call_comes_to_its_queue_again_and_again(
    work_with, settings, locks, journal, gates, name
):
    """A worker that serves no other queue: whenever Redis loses the line, a courier puts the call back."""
    queue = other(settings["task_default_queue"])
    tasks = work_with(queues=queue, courier_waits_s=(1.0, 1.0), **settings)
    soon = {"lease": 20}
    first = journal.reached("start", tasks.tell.apply_async([name], queue=queue, singleton=soon))
    second = tasks.tell.apply_async([name], queue=queue, singleton={**soon, **WAIT})
    for _ in range(3):
        wait_for_waiters(tasks.tell, name, 1)
        locks.delete(*line_names(tasks.tell.lock_key(name)))
    wait_for_waiters(tasks.tell, name, 1)
    gates(name, 2)
    assert [call.get(timeout=60)["queue"] for call in (first, second)] == [queue] * 2
    one_at_a_time(journal, name, 2)


@pytest.mark.parametrize("kind", ["quorum", "direct"], indirect=True)
def test_waiting_calls_take_nothing_of_a_workers_prefetch(work_with, settings, journal, gates, name):
    """Ten wait, on a worker that prefetches eight: their couriers are in the broker, and others run.

    The prefetch of quorum queues is static, and Celery delays nothing natively over a direct exchange.
    """
    tasks = work_with(worker_prefetch_multiplier=4, **settings)
    results = [journal.reached("start", tasks.work.delay(name))]
    for number in range(1, 11):
        results.append(tasks.work.apply_async([name], singleton=WAIT))
        wait_for_waiters(tasks.work, name, number)
    assert tasks.work.delay("other").get(timeout=60) == "other"
    gates(name, len(results))
    assert [result.get(timeout=60) for result in results] == [name] * 11
    one_at_a_time(journal, name, 11)


def test_waiting_call_fails_at_its_max_wait_or_expiry(tasks, journal, gates, name):
    """Though its courier comes later; those behind it move up."""
    first = journal.reached("start", tasks.work.delay(name))
    fails = tasks.work.apply_async([name], singleton={**WAIT, "max_wait": 3})
    expires = tasks.work.apply_async([name], singleton=WAIT, expires=3)
    waits = tasks.work.apply_async([name], singleton=WAIT)
    with pytest.raises(LockTimeout):
        fails.get(timeout=30)
    with pytest.raises(TaskRevokedError):
        expires.get(timeout=30)
    wait_for_waiters(tasks.work, name, 1)
    gates(name, 2)
    assert [result.get(timeout=60) for result in (first, waits)] == [name] * 2


@in_both_kinds
def test_couriers_come_also_where_the_broker_refuses_their_queue(
    work_with, settings, own_broker, locks, journal, gates, name
):
    """A user may declare no other queues: they are delayed messages then, and nothing else is harmed."""
    queue = settings["task_default_queue"]
    own = {"may_not_configure": rf"{queue}\.setnx-.*"}
    conf = {**settings, "broker_url": own_broker.limit(f"bound-{queue}", **own)}
    tasks = work_with(**conf)
    soon = {"lease": 20, "retry_delay": 0.1, "retry_delay_max": 0.1}  # so often the app has couriers come
    first = journal.reached("start", tasks.work.apply_async([name], singleton=soon))
    second = tasks.work.apply_async([name], singleton={**soon, **WAIT})
    wait_for_waiters(tasks.work, name, 1)
    assert own_broker.delaying(queue) == []
    assert "the broker, which refuses the queue" in tasks.worker.log_text()
    locks.delete(*line_names(tasks.work.lock_key(name)))
    wait_for_waiters(tasks.work, name, 1)
    gates(name, 2)
    assert [call.get(timeout=60) for call in (first, second)] == [name] * 2


@in_both_kinds
def test_couriers_outlast_their_broker_and_their_queue_is_declared_anew(
    work_with, settings, own_broker, locks, journal, gates, name
):
    """kill -9 of the broker: they come all the same. A queue that was unused for too long is there again."""
    queue = settings["task_default_queue"]
    tasks = work_with(courier_waits_s=(20.0, 20.0), **settings)
    first = journal.reached("start", tasks.work.apply_async([name], singleton={"lease": 60}))
    second = tasks.work.apply_async([name], singleton=WAIT)
    wait_for_waiters(tasks.work, name, 1)
    (waits,) = own_broker.delaying(queue)
    own_broker.kill()
    locks.delete(*line_names(tasks.work.lock_key(name)))
    own_broker.start()
    wait_for_waiters(tasks.work, name, 1)
    own_broker.delete(waits)
    third = tasks.work.apply_async([name], singleton=WAIT)
    wait_for_waiters(tasks.work, name, 2)
    assert own_broker.delaying(queue) == [waits]
    gates(name, 6)  # a call whose message was not acknowledged comes again
    assert [call.get(timeout=120) for call in (first, second, third)] == [name] * 3


def debounced(task: Any, *args: Any, quiet_s: float, **options: Any) -> Any:
    """A call that waits for newer ones."""
    return task.apply_async(args, singleton={"debounce": quiet_s, "debounce_max": 600.0}, **options)


def hops(broker: RabbitMQ, queue: str) -> dict[str, int]:
    """How many messages wait for another queue, by their delaying queues."""
    return {name: broker.messages(name) for name in broker.delaying(queue)}


@in_both_kinds
def test_debounced_call_is_unchanged(tasks, shared, journal):
    """It comes back to a queue of another name, by several hops; it starts after its time, and not before."""
    queue = other(shared["task_default_queue"])
    options = {"headers": {"tenant": "acme"}, "priority": 5, "shadow": "alias", "queue": queue}
    options |= {"time_limit": 100, "soft_time_limit": 90}
    plain = tasks.tell.apply_async(["a"], **options).get(timeout=60)
    published = time.time()
    result = debounced(tasks.tell, "a", quiet_s=2.7, **options)
    assert result.get(timeout=60) == plain
    (start,) = journal.entries(what="start", task_id=result.id)
    assert start["time"] - published >= 2.7
    assert (plain["priority"], plain["tenant"], plain["queue"]) == (5, "acme", queue)


@pytest.mark.clock
@pytest.mark.parametrize("quiet_s", [0.3, 1.0, 5.0])
def test_debounced_call_starts_soon_after_its_time(tasks, journal, quiet_s):
    """The last hop takes up to a quarter of a second too long."""
    published = time.time()
    result = debounced(tasks.work, "a", quiet_s=quiet_s)
    (start,) = journal.wait_for("start", task_id=result.id)
    assert quiet_s <= start["time"] - published < quiet_s + 1.5


def test_debounced_call_replaces_those_that_wait_in_the_broker(tasks, journal):
    """Of ten the newest runs; the others end by its id."""
    *older, newest = (debounced(tasks.work, "a", version, quiet_s=3.0) for version in range(10))
    assert newest.get(timeout=60) == "a"
    assert [superseded_by(each.get(timeout=60)) for each in older] == [newest.id] * 9
    one_at_a_time(journal, "a", 1)


@pytest.mark.parametrize("kind", ["quorum", "direct"], indirect=True)
def test_debounced_calls_take_nothing_of_a_workers_prefetch(work_with, settings, own_broker, journal):
    """Fifty wait, on a worker that prefetches one: it goes on with other work, and Celery delays none."""
    queue = settings["task_default_queue"]
    tasks = work_with(concurrency=1, worker_prefetch_multiplier=1, **settings)
    for number in range(50):
        debounced(tasks.work, f"quiet-{number}", quiet_s=300.0)
    wait_until(
        lambda: sum(hops(own_broker, queue).values()) == 50, lambda: f"50 in {hops(own_broker, queue)}"
    )
    (used,) = (name for name, count in hops(own_broker, queue).items() if count)
    assert used.startswith(f"{queue}.setnx-{hop_s(299):g}s-")
    assert tasks.work.delay("other").get(timeout=60) == "other"
    assert {entry["name"] for entry in journal.entries(what="start")} == {"other"}


@in_both_kinds
def test_debounced_calls_run_also_where_the_broker_refuses_their_queues(
    work_with, settings, own_broker, journal
):
    """By a countdown, and the doctor says what to allow."""
    queue = settings["task_default_queue"]
    own = {"may_not_configure": rf"{queue}\.setnx-.*"}
    conf = {**settings, "broker_url": own_broker.limit(f"quiet-{queue}", **own)}
    tasks = work_with(**conf)
    published = time.time()
    result = debounced(tasks.work, "a", quiet_s=3.0)
    assert result.get(timeout=60) == "a"
    (start,) = journal.entries(what="start", task_id=result.id)
    assert start["time"] - published >= 3.0
    assert own_broker.delaying(queue) == []
    assert "Debounced calls wait in workers instead of the broker" in tasks.worker.log_text()

    @tasks.app.task(base=SingletonTask, name="quiet", shared=False, singleton={"debounce": 3})
    def quiet() -> None: ...

    (found,) = (each for each in courier_findings(tasks.app) if each.subject == "debounce")
    assert (found.level, f"let the user quiet-{queue} configure and read" in found.do) == ("error", True)


def test_debounced_call_outlasts_its_broker(work_with, settings, own_broker, journal):
    """kill -9 of the broker while it waits there: it runs all the same, once."""
    queue = settings["task_default_queue"]
    tasks = work_with(**settings, **LATE)
    result = debounced(tasks.work, "a", quiet_s=40.0)
    wait_until(lambda: sum(hops(own_broker, queue).values()) == 1, "a call that waits")
    own_broker.kill()
    own_broker.start()
    wait_until(result.ready, lambda: f"its end: {own_broker.queues()}", 120)
    assert result.get() == "a"
    one_at_a_time(journal, "a", 1)


def test_debounced_call_is_delivered_again_if_its_worker_dies_on_a_hop(work_with, settings, journal):
    """With acks_late: kill -9 before it has sent the call on loses nothing."""
    tasks = work_with(concurrency=1, hangs_on_hops=True, **settings, **LATE)
    result = debounced(tasks.work, "a", quiet_s=1.0)
    journal.wait_for("hop", task_id=result.id)
    tasks.worker.kill()
    work_with(**settings, **LATE)
    assert result.get(timeout=60) == "a"
    one_at_a_time(journal, "a", 1)


def test_waiting_call_runs_after_the_death_of_its_holder(work_with, settings, locks, journal, gates, name):
    """kill -9 of the only worker; without acks_late its call is lost, and the courier wakes the other."""
    tasks = work_with(**settings)
    first = tasks.work.delay(name)
    (start,) = journal.wait_for("start", task_id=first.id)
    second = tasks.work.apply_async([name], singleton=WAIT)
    wait_for_waiters(tasks.work, name, 1)
    tasks.worker.kill()
    work_with(**settings)
    gates(name)
    assert second.get(timeout=60) == name
    (began,) = journal.entries(what="start", task_id=second.id)
    (taken,) = journal.wait_for("taken_over")
    assert (taken["task_id"], taken["holder"]["task_id"]) == (second.id, first.id)
    assert began["fence"] > start["fence"]
    assert len(journal.entries(what="start", name=name)) == 2


def test_joining_calls_end_with_the_result_of_the_first(tasks, journal, gates, name):
    """Three join one that runs: a single body, and every call has its result."""
    first = journal.reached("start", tasks.work.delay(name))
    joining = [
        tasks.work.apply_async([name, number], singleton={"on_conflict": "join"}) for number in range(3)
    ]
    wait_for_waiters(tasks.work, name, 3)
    gates(name)
    assert [call.get(timeout=60) for call in (first, *joining)] == [name] * 4
    assert [start["task_id"] for start in journal.entries(what="start", name=name)] == [first.id]
    wait_until(lambda: tasks.work.locked(name) is None, "a free lock")


def test_fan_out_sends_each_key_once(tasks, journal):
    """60 calls of 20 keys: 20 bodies, and no mark is left."""
    each_key_runs_once(tasks, journal, 20)


def test_redelivered_call_takes_over_from_its_dead_process(work_with, settings, locks, journal, gates, name):
    """kill -9 of the worker: the message is there at once, and on the same host the lock too."""
    lease_s = 120
    tasks = work_with(**settings, **LATE, setnx_same_host=True)
    result = tasks.careful.apply_async([name], singleton={"lease": lease_s})
    (start,) = journal.wait_for("start", task_id=result.id)
    tasks.worker.kill()
    work_with(**settings, **LATE, setnx_same_host=True)
    _, again = journal.wait_for("start", 2, task_id=result.id)
    assert again["at"] - start["at"] < lease_s / 2
    assert again["fence"] > start["fence"]
    (taken,) = journal.wait_for("taken_over")
    assert (taken["task_id"], taken["holder"]["task_id"]) == (result.id, result.id)
    gates(name)
    assert result.get(timeout=60) == name


def test_redelivered_call_waits_for_the_lease_of_an_unproved_death(
    work_with, settings, locks, journal, gates, name
):
    """setnx_same_host=False, as if on another host: it comes back until its dead lock's lease has ended."""
    lease_s = 6
    tasks = work_with(**settings, **LATE, setnx_same_host=False)
    result = tasks.careful.apply_async([name], singleton={"lease": lease_s, **RETRY})
    journal.wait_for("start", task_id=result.id)
    work_with(**settings, **LATE, setnx_same_host=False)  # there before the lease ends
    tasks.worker.kill()
    deadline = tasks.careful.locked(name).deadline
    journal.wait_for("conflict", task_id=result.id)
    _, again = journal.wait_for("start", 2, task_id=result.id)
    assert again["fence"] / 1e6 >= deadline  # both by the server's clock
    gates(name)
    assert result.get(timeout=60) == name


def test_outage_of_the_lock_server_spends_no_deliveries(work_with, settings, journal):
    """A call that finds no lock server is sent anew, so that a delivery limit of 1 does not matter."""
    with EmbeddedServer() as lock_server:
        queues = {settings["task_default_queue"]: quorum_queue(settings, limit=1)}
        conf = {**settings, **LATE, "task_queues": queues, "setnx_url": lock_server.url()}
        tasks = work_with(**conf)
        assert tasks.work.delay("warm").get(timeout=60) == "warm"
        lock_server.stop()
        result = tasks.work.apply_async(["a"], singleton={"lease": 0.5, **RETRY})
        journal.wait_for("retry", 3, task_id=result.id)
        lock_server.start(lock_server.port)
        assert result.get(timeout=60) == "a"


@pytest.mark.parametrize("limit", [None, 3], ids=["unlimited", "limited"])
def test_call_that_cannot_be_sent_back_is_requeued(
    work_with, settings, own_broker, locks, journal, gates, name, limit
):
    """acks_late and no way to publish: redelivered once a second; a delivery limit drops it unheard.

    One of the documented limits: with a limit the call is neither run nor failed.
    """
    queue = settings["task_default_queue"]
    user = own_broker.limit(f"user-{queue}", may_not_write=r"(celery_delayed_27|amq\.default)")
    conf = {**settings, **LATE, "task_queues": {queue: quorum_queue(settings, limit)}, "broker_url": user}
    tasks = work_with(**conf)
    first = journal.reached("start", tasks.work.delay(name))
    began = time.monotonic()
    second = tasks.work.apply_async([name], singleton=RETRY)
    if limit is None:
        journal.wait_for("conflict", 4, task_id=second.id)
        assert time.monotonic() - began >= 3
        gates(name, 2)
        assert second.get(timeout=60) == name
    else:
        journal.wait_for("conflict", limit + 1, task_id=second.id)
        gates(name, 2)
        assert first.get(timeout=60) == name
        # What is published afterwards overtakes nothing, so the lost call is not merely late.
        assert tasks.work.delay("b").get(timeout=60) == "b"
        assert len(journal.entries(what="conflict", task_id=second.id)) == limit + 1
        assert journal.entries(what="start", task_id=second.id) == []
        assert own_broker.messages(queue) == 0
        assert second.state == "PENDING"


def quorum_queue(settings: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """The app's queue in `task_queues`, with a delivery limit."""
    queue = settings["task_default_queue"]
    arguments = {"x-queue-type": "quorum", **({} if limit is None else {"x-delivery-limit": limit})}
    return {"exchange": queue, "exchange_type": "topic", "routing_key": queue, "queue_arguments": arguments}


def test_fan_out_knows_what_a_dead_broker_has_confirmed(tasks_of, settings_of, own_broker, locks):
    """With confirms: the call that was on its way is uncertain, the rest not sent, and none is marked.

    Without: the documented limit. All were accepted, all are lost, and marked for the queue lease.
    """
    never = {"task_publish_retry_policy": {"max_retries": 0}}
    plain = tasks_of(**settings_of("classic", broker_transport_options={}, **never))
    confirmed = tasks_of(**settings_of("classic", **never))
    lost, kept = ([(f"{letter}{n}",) for n in range(5)] for letter in "pc")

    def marked(calls: Any) -> int:
        return sum(locks.exists(f"{plain.once.lock_key(name)}:queued") for (name,) in calls)

    for tasks in (plain, confirmed):
        # The connection stands, and the queue is declared.
        tasks.work.apply_async(["first"], retry_policy={"max_retries": 3})
    own_broker.freeze()
    counts = plain.once.fan_out(lost)
    sending = ThreadPoolExecutor().submit(confirmed.once.fan_out, kept)
    wait_until(lambda: marked(kept) == 5, "the marks of the second")
    own_broker.kill()
    error: Any = sending.exception(20)
    assert isinstance(error, FanOutFailed)
    own_broker.start()
    assert (error.accepted, error.uncertain, error.not_sent) == (0, 1, 4)
    assert marked(kept) == 0
    assert confirmed.once.fan_out(kept).accepted == 5
    # And the first; and the uncertain one, if the broker had read it.
    assert own_broker.messages(confirmed.app.conf.task_default_queue) in (6, 7)
    assert counts.accepted == 5
    assert own_broker.messages(plain.app.conf.task_default_queue) <= 1  # the first, if it was in time
    assert marked(lost) == 5
    for tasks in (plain, confirmed):
        tasks.app.close()


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("classic", RETRY), ("quorum", RETRY), ("quorum", WAIT)],
    indirect=["kind"],
    ids=["classic-retry", "quorum-retry", "quorum-wait"],
)
def test_broker_is_killed_while_calls_run_and_wait(
    work_with, settings, own_broker, locks, journal, gates, failovers, name, policy
):
    """The body runs on, its message is delivered again and does not run beside it; nothing is lost.

    What was sent again, and not yet acknowledged, is there twice. A call that waits for its turn runs once
    all the same; one that asks again by `retry` is two messages from then on, and may run for each.
    """
    tasks = work_with(concurrency=4, **settings, **LATE)
    at_most, policy = (2 if policy is RETRY else 1), {**policy, "lease": 10}
    running = journal.reached("start", tasks.work.apply_async([name], singleton=policy))
    waiting = [tasks.work.apply_async([name], singleton=policy) for _ in range(2)]
    later = tasks.work.apply_async(["later"], countdown=6)
    for result in waiting:
        journal.wait_for("conflict", task_id=result.id)
    met = len(journal.entries(what="conflict", task_id=running.id))
    own_broker.kill()
    began = time.monotonic()
    own_broker.start()
    after = tasks.work.delay("after")
    (start,) = journal.wait_for("start", task_id=after.id)
    failovers.append(start["at"] - began)

    def has_come_again() -> bool:
        return len(journal.entries(what="conflict", task_id=running.id)) > met

    wait_until(has_come_again, "its redelivery")
    assert len(journal.entries(what="start", name=name)) == 1
    gates(name, 6)  # three calls, each of which may run twice
    results = [running, *waiting, later, after]
    for result in results:
        wait_until(result.ready, lambda result=result: f"an end of {journal.entries(task_id=result.id)}", 120)
    assert [result.get() for result in results] == [name] * 3 + ["later", "after"]
    tasks.worker.stop()  # what runs ends, and nothing starts while it is counted
    assert journal.entries(what="lost") == []
    # A second delivery is dropped if the result says SUCCESS: it runs only if it came before that was stored.
    (stored,) = journal.wait_for("postrun", task_id=running.id, state="SUCCESS")[:1]
    _first, *again = journal.entries(what="start", task_id=running.id)
    assert [entry for entry in again if entry["at"] > stored["at"]] == []
    bodies = [len(journal.entries(what="start", task_id=result.id)) for result in waiting]
    assert all(1 <= count <= at_most for count in bodies), bodies
    one_at_a_time(journal, name, 1 + len(again) + sum(bodies))
