"""Fan-out: what becomes of many calls, in batches, against real brokers, dying ones, and real workers.

`BOUNDS` scales the big ones: 5,000 calls of 50 names, or all 100,000 of 1,000.
"""

import base64
import json
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import EncodeError, OperationalError
from pydantic import create_model

from celery_setnx import SingletonTask
from celery_setnx.call import fanout
from celery_setnx.exceptions import FanOutFailed, LockRefused, OptionError, UnkeyableCall
from celery_setnx.lock import marks, verbs
from celery_setnx.testing import pass_time
from examples.embedded import EmbeddedServer
from tests.bounds import bound
from tests.fanoutapp import BODIES, BROKER_DB, GATE, LOCK_DB, PARKED, QUEUE, STARTED, make_app, make_tasks
from tests.harness import Worker, settle_marks, wait_until
from tests.proxy import Proxy
from tests.versions.conditions import BATCHES, needs_batches, needs_dumped_models
from tests.versions.conditions import needs_ignore_result_of_a_call as needs_ignore_result

pytestmark = pytest.mark.slow

CALLS = bound(5_000, full=100_000)
KEYS = CALLS // 100
ROOT = Path(__file__).parents[1]
FOREVER = 10**9
HELD = 4  # processes of the worker
PRIORITY = "\x06\x16"
WINDOW_S = fanout._WINDOW_S


@pytest.fixture
def broker(server) -> Iterator[redis.Redis]:
    """A client of the broker's database, without messages, counted bodies and open gates."""
    with redis.Redis.from_url(server.url(BROKER_DB), decode_responses=True) as client:
        for pattern in (f"{QUEUE}*", f"{PARKED}*", BODIES, STARTED, f"{GATE}:*"):
            client.delete("none", *client.scan_iter(pattern))
        yield client


@pytest.fixture
def fan(server, locks, broker) -> Iterator[SimpleNamespace]:
    """The tasks of an app of this process."""
    with made(server.url(BROKER_DB), server.url(LOCK_DB)) as tasks:
        yield tasks


@pytest.fixture(autouse=True)
def full_windows(monkeypatch) -> None:
    """A window is sent when it is full, however slow the machine is; its age plays no part."""
    monkeypatch.setattr(fanout, "_WINDOW_S", 600.0)


@pytest.fixture(params=[pytest.param("batches", marks=needs_batches), "singly"])
def sending(request, monkeypatch) -> str:
    """Messages are collected in batches, or sent one by one as by kombu before 5.7."""
    if request.param == "singly":
        monkeypatch.setattr(fanout, "_buffers", lambda producer: False)
    return str(request.param)


@pytest.fixture(scope="module")
def fan_worker(module_worker) -> Worker:
    """A worker of the queue of this module."""
    return module_worker("tests.fanoutapp", concurrency=HELD, queues=QUEUE)


@pytest.fixture(scope="module")
def mortal() -> Iterator[EmbeddedServer]:
    """A broker that the tests of this module may kill."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def proxy(mortal) -> Iterator[Proxy]:
    """The way to the mortal broker."""
    with Proxy(mortal.port) as proxy:
        yield proxy


@pytest.fixture
def frail(server, locks, mortal, proxy) -> Iterator[SimpleNamespace]:
    """The tasks of an app whose broker, empty now, may die; its locks are safe. With a client."""
    with (
        made(proxy.url(), server.url(LOCK_DB)) as tasks,
        redis.Redis.from_url(mortal.url(), decode_responses=True) as tasks.broker,
    ):
        tasks.broker.flushall()
        yield tasks


@contextmanager
def made(broker: str, locks: str, **settings: Any) -> Iterator[SimpleNamespace]:
    """The tasks of an app of its own, closed afterwards."""
    app = make_app(broker, locks, **settings)
    try:
        yield make_tasks(app)
    finally:
        app.close()


def names_to(count: int) -> list[tuple[str]]:
    return [(f"k{number}",) for number in range(count)]


def queued(broker: redis.Redis, queue: str = PARKED) -> list[dict[str, Any]]:
    """The messages of a queue, the oldest first, with decoded bodies."""
    messages = [json.loads(message) for message in reversed(broker.lrange(queue, 0, -1))]
    for message in messages:
        message["body"] = json.loads(base64.b64decode(message["body"]))
    return messages


def queued_names(broker: redis.Redis) -> list[Any]:
    return [message["body"][0][0] for message in queued(broker)]


def marks_left(locks: redis.Redis) -> set[str]:
    return set(locks.scan_iter("*:queued"))


def leases(locks: redis.Redis) -> list[int]:
    """What is left of all marks, in ms, asked at once."""
    with locks.pipeline() as pipeline:
        for name in marks_left(locks):
            pipeline.pttl(name)
        return pipeline.execute()


def mark_of(task: Any, *args: Any) -> str:
    return f"{task.lock_key(*args)}:queued"


def counted(result: Any) -> tuple[int, int, int]:
    return result.accepted, result.duplicates, result.failed


def told(task: Any, calls: Any, **options: Any) -> tuple[tuple[int, int, int], list[Any]]:
    """What a fan-out counts, and what it tells of each call."""
    outcomes: list[Any] = []
    result = task.fan_out(calls, each=outcomes.append, **options)
    return counted(result), outcomes


def warnings(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == level]


def failure(fan_out: Callable[[], Any]) -> FanOutFailed:
    with pytest.raises(FanOutFailed) as caught:
        fan_out()
    return caught.value


def every(error: FanOutFailed) -> int:
    return error.accepted + error.duplicates + error.failed + error.uncertain + error.not_sent


def publishers(server: EmbeddedServer, *specs: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Processes that publish all at once, as `tests.fanoutapp.main` says."""
    places = {"broker": server.url(BROKER_DB), "locks": server.url(LOCK_DB)}
    command = [sys.executable, "-m", "tests.fanoutapp"]
    orders = [[*command, json.dumps({**places, **spec})] for spec in specs]
    started = [subprocess.Popen(order, cwd=ROOT, stdout=subprocess.PIPE, text=True) for order in orders]
    with redis.Redis.from_url(server.url(LOCK_DB)) as locks:
        locks.rpush("start", *["go"] * len(specs))
        locks.expire("start", 60)
    return started


def ended(publisher: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, _ = publisher.communicate(timeout=bound(100, full=600))
    finally:
        publisher.kill()  # else it goes on publishing beside the tests that follow
    assert publisher.returncode == 0
    return dict(json.loads(output))


# What becomes of the calls


def test_each_is_told_what_became_of_every_call(fan, broker, locks, sending):
    """Accepted with its own id, duplicate with the id of the queued task, failed with its error.

    Of equal calls in a window the first is sent and marked, and the others are its duplicates.
    """
    first = fan.once.delay("old").id
    calls = [("a", 1), ("old",), (), ("b", object()), ("a", 2), {"name": "a"}, ("c",)]
    counts, outcomes = told(fan.once, calls)
    assert (counts, len(outcomes)) == ((2, 3, 2), 7)
    assert queued_names(broker) == ["old", "a", "c"]
    ids = {m["body"][0][0]: m["headers"]["id"] for m in queued(broker)}
    assert {o.index: (o.state, o.task_id, type(o.error)) for o in outcomes} == {
        0: ("accepted", ids["a"], type(None)),
        1: ("duplicate", first, type(None)),
        2: ("failed", None, UnkeyableCall),
        3: ("failed", None, EncodeError),
        4: ("duplicate", ids["a"], type(None)),
        5: ("duplicate", ids["a"], type(None)),
        6: ("accepted", ids["c"], type(None)),
    }
    assert {locks.get(name) for name in marks_left(locks)} == {first, ids["a"], ids["c"]}


def test_calls_may_be_tuples_lists_mappings_and_signatures(fan, broker):
    """Each is sent as apply_async would; of a signature the arguments count."""
    signature = fan.once.signature(("d", 4), {"more": 5}, queue="elsewhere", countdown=9)
    calls = [("a", 1), ["b", 2], {"name": "c", "more": 3}, signature, fan.once.si("e")]
    assert counted(fan.once.fan_out(calls)) == (5, 0, 0)
    args = [["a", 1], ["b", 2], [], ["d", 4], ["e"]]
    kwargs = [{}, {}, {"name": "c", "more": 3}, {"more": 5}, {}]
    assert [message["body"][:2] for message in queued(broker)] == [[*both] for both in zip(args, kwargs)]


def test_calls_of_a_task_without_dedupe_are_sent_where_no_lock_server_is_known():
    """As its `delay` is: there is no mark to be taken, kept or freed."""
    app = Celery("publishing", broker="memory://", set_as_current=False)

    def greet(name: str) -> None: ...

    task = app.task(base=SingletonTask, shared=False)(greet)
    assert not task.delay("a").deduplicated
    assert counted(task.fan_out(names_to(2))) == (2, 0, 0)


@pytest.mark.parametrize("kind", [list, dict])
def test_call_is_sent_as_it_was_drawn_to_its_depth(fan, broker, sending, kind):
    """A call, or what is in it, that the iterable changes and uses again: each has its own key and state."""

    def calls() -> Iterator[Any]:
        order = {"lines": [0]}
        row: Any = [order, 0] if kind is list else {"name": order, "more": 0}
        for number in range(4):
            order["lines"][0] = number
            row["more" if kind is dict else 1] = number
            yield row

    assert counted(fan.once.fan_out(calls())) == (4, 0, 0)
    sent = [[*args, *kwargs.values()] for args, kwargs, _ in (each["body"] for each in queued(broker))]
    assert sent == [[{"lines": [number]}, number] for number in range(4)]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        *[(wrong, TypeError) for wrong in ("text", b"bytes", 7, None, {"a"}, {1: 2}, {"nobody": 1}, [])],
        pytest.param(object(), TypeError, id="object"),
        pytest.param(lambda fan: fan.free.si("b"), TypeError, id="another-task"),
        pytest.param(lambda fan: fan.once.si("c") | fan.once.si("d"), TypeError, id="chain"),
        pytest.param((ENDLESS,), Exception, id="its-key-raises"),  # RecursionError, or our own
        pytest.param((object(),), UnkeyableCall, id="no-key"),
    ],
    ids=repr,
)
def test_wrong_call_fails_alone(fan, broker, caplog, wrong, error):
    """What cannot be called with, or has no key, is not sent; the others go on.

    One log line has the number of failures, the task, and the first error.
    """
    call = wrong(fan) if callable(wrong) else wrong
    result = fan.once.fan_out([call, ("a",), call, ("b",)])
    assert (counted(result), result.total) == ((2, 0, 2), 4)
    assert isinstance(result.first_error, error)
    assert queued_names(broker) == ["a", "b"]
    (line,) = warnings(caplog, "ERROR")
    assert line.startswith(f"2 of 4 calls of fan.once could not be sent. The first: {result.first_error}")


def test_unserializable_call_fails_alone_and_frees_its_mark(fan, broker, locks, sending):
    """It has a key and no message: at any place of a batch it is left out, and may be sent again at once.

    An equal call, of the same name, that can be sent is sent.
    """
    bad = object()
    calls = [("bad0", bad), ("a", bad), ("a", 1), ("bad1", {1, bad}), ("b",), ("bad2", bad)]
    assert counted(fan.once.fan_out(calls, batch_size=3)) == (2, 0, 4)
    assert queued_names(broker) == ["a", "b"]
    assert marks_left(locks) == {mark_of(fan.once, "a"), mark_of(fan.once, "b")}
    assert counted(fan.once.fan_out([("bad0", 1), ("bad1",), ("bad2",)])) == (3, 0, 0)


def test_without_dedupe_every_call_is_sent(fan, broker, locks, sending):
    """Equal calls too; each has its key in the header, and nothing is marked."""
    assert counted(fan.free.fan_out([("a",), ("b",), ("a",)] * 5, batch_size=4)) == (15, 0, 0)
    assert queued_names(broker) == ["a", "b", "a"] * 5
    keys = {message["headers"]["singleton"]["key"] for message in queued(broker)}
    assert keys == {fan.free.lock_key("a"), fan.free.lock_key("b")}
    assert marks_left(locks) == set()


def test_dedupe_may_be_chosen_for_one_fan_out(fan, broker, locks):
    """`singleton=` is that of apply_async: it travels with every call."""
    result = fan.free.fan_out([("a",), ("a",), ("b",)], singleton={"dedupe": "until_done", "scope": "own"})
    assert counted(result) == (2, 1, 0)
    assert {m["headers"]["singleton"]["options"]["dedupe"] for m in queued(broker)} == {"until_done"}
    assert len(marks_left(locks)) == 2
    assert all(name.startswith("t:{own:") for name in marks_left(locks))


@needs_dumped_models
def test_pydantic_models_are_keyed_as_the_worker_sees_them(fan, broker):
    """A model, and what it is dumped to, are the same call; so are fan_out's and delay's."""
    User = create_model("User", id=(int, ...))

    def handle(user: User) -> None: ...

    options = {"key": "user", "dedupe": "until_started"}
    task = fan.app.task(base=SingletonTask, shared=False, pydantic=True, singleton=options)(handle)
    first = task.delay(User(id=1))
    counts, outcomes = told(task, [(User(id=1),), ({"id": 1},), (User(id=2),)])
    assert (counts, {o.index for o in outcomes if o.task_id == first.id}) == ((1, 2, 0), {0, 1})
    assert [message["body"][0] for message in queued(broker)] == [[{"id": 1}], [{"id": 2}]]


def test_eager_fan_out_runs_every_call(server, broker):
    """With task_always_eager nothing is marked and nothing is sent: every call runs where it is."""
    with made(server.url(BROKER_DB), server.url(LOCK_DB), task_always_eager=True) as eager:
        assert counted(eager.once.fan_out([("a",), ("a",), ("b",)])) == (3, 0, 0)
    assert broker.hgetall(BODIES) == {"a": "2", "b": "1"}
    assert queued(broker) == []


# Options


OF_ONE_CALL = ["task_id", "group_id", "chord", "chain", "retries", "link", "link_error", "producer", "shadow"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({option: "x"}, f"does not accept {option}") for option in OF_ONE_CALL],
        *[({option: ()}, None) for option in ("args", "kwargs", "publisher")],
        ({"connection": None}, None),
        *[
            ({"batch_size": size}, "must be a whole number of 1 or more")
            for size in (0, -1, 1.5, True, "10", None)
        ],
        *[({"singleton": {name: 0}}, None) for name in ("dedup", "dedupe", "queue_lease")],
        pytest.param({"singleton": {"on_conflict": lambda conflict: None}}, None, id="a-callable"),
    ],
    ids=str,
)
def test_option_that_a_fan_out_cannot_honour_is_refused(fan, options, message):
    """Of a single call, unknown, malformed, or not able to travel: refused once, before anything is drawn."""

    def never() -> Iterator[Any]:
        raise AssertionError("drawn")
        yield

    with pytest.raises(OptionError, match=message):
        fan.once.fan_out(never(), **options)


def test_options_apply_to_all_calls(fan, broker, sending):
    """Queue, headers, priority, time limits, eta and expiry stand in every message."""
    before = datetime.now(timezone.utc)
    options = {"headers": {"tenant": "acme"}, "time_limit": 50, "soft_time_limit": 40}
    options |= {"queue": "parked-elsewhere", "priority": 3, "countdown": 60, "expires": 300}
    assert counted(fan.once.fan_out(names_to(5), batch_size=2, **options)) == (5, 0, 0)
    after = datetime.now(timezone.utc)
    messages = queued(broker, f"parked-elsewhere{PRIORITY}3")
    assert len(messages) == 5
    for message in messages:
        headers = message["headers"]
        assert (headers["tenant"], headers["timelimit"]) == ("acme", [50, 40])
        assert headers["ignore_result"] is False
        assert before <= datetime.fromisoformat(headers["eta"]) - timedelta(seconds=60) <= after
        assert headers["expires"] is not None
        assert message["properties"]["priority"] == 3


@pytest.mark.parametrize(
    ("options", "lease"),
    [
        ({}, 3600),
        ({"countdown": 600}, 4200),
        ("of-the-task", 100),
        ({"expires": 100}, 100),
        ({"countdown": 60, "expires": 90}, 90),
        ({"singleton": {"queue_lease": 8}}, 8),  # shorter than marks are taken for at first
        ({"retry": True}, 3600),
        ({"retry": False}, 3600),
    ],
    ids=str,
)
def test_marks_last_for_the_queue_lease(fan, locks, monkeypatch, options, lease):
    """Beyond the countdown, and not past the expiry, which the task may have: as with a single call."""
    if options == "of-the-task":
        monkeypatch.setattr(fan.once, "expires", lease)
        options = {}
    began = time.monotonic()
    assert counted(fan.once.fan_out(names_to(5), batch_size=2, **options)) == (5, 0, 0)
    settle_marks(fan.once.app)
    left = leases(locks)
    passed = time.monotonic() - began
    assert len(left) == 5
    assert (lease - passed - 1) * 1000 < min(left) <= max(left) <= lease * 1000


# At the worker


@pytest.mark.parametrize(
    ("task", "options", "state"),
    [
        ("once", {}, "SUCCESS"),
        ("once", {"ignore_result": True}, "PENDING"),
        ("silent", {}, "PENDING"),
        pytest.param("silent", {"ignore_result": False}, "SUCCESS", marks=needs_ignore_result),
    ],
)
def test_result_is_ignored_as_the_task_or_the_option_says(fan, fan_worker, task, options, state):
    """The nearest wins, as with apply_async; the first of a batch is no exception.

    A result can be fetched, though nothing subscribes to it when its call is sent.
    """
    calls = [(f"k{n}", n) for n in range(5)]
    _, outcomes = told(getattr(fan, task), calls, queue=QUEUE, batch_size=2, **options)
    for call, outcome in zip(calls, outcomes, strict=True):
        fan_worker.wait_for_log(f"fan.{task}[{outcome.task_id}] succeeded")
        result = fan.app.AsyncResult(outcome.task_id)
        assert result.state == state
        assert state == "PENDING" or result.get(timeout=60) == [*call]


def test_task_may_fan_out(fan, broker, fan_worker):
    """Its calls know their parent; it does not keep them all as its children."""
    parent = fan.spread.apply_async([30], queue=QUEUE)
    assert parent.get(timeout=60) == [30, 0, 0]
    assert not parent.children
    assert {message["headers"]["parent_id"] for message in queued(broker)} == {parent.id}


@pytest.mark.timeout(bound(300, full=900))
def test_calls_of_few_names_run_once_each(fan, broker, locks, fan_worker):
    """All calls while real processes run their bodies: exactly one body per name.

    A body runs until all calls of its name are settled, and until then every other call of it is a duplicate,
    of the queued or, though its mark is gone, of the running one.
    """
    every_name = [f"k{number}" for number in range(KEYS)]
    shuffled = random.Random(1)
    batch_size = max(1, KEYS // 100)

    first = [(name,) for name in every_name for _ in range(50)]
    shuffled.shuffle(first)
    counts, outcomes = told(fan.gated, first, queue=QUEUE, batch_size=batch_size)
    assert counts == (KEYS, 49 * KEYS, 0)
    holders = {first[o.index][0]: o.task_id for o in outcomes if o.state == "accepted"}
    assert all(o.task_id == holders[first[o.index][0]] for o in outcomes)

    # The rest comes in blocks of names, in the queue's order: their bodies end while others are published.
    wait_until(lambda: broker.scard(STARTED) == HELD, "every process of the worker is busy")
    in_order = list(holders)
    second: list[tuple[str]] = []
    for place in range(0, KEYS, max(1, KEYS // 10)):
        block = [(name,) for name in in_order[place : place + max(1, KEYS // 10)] for _ in range(50)]
        shuffled.shuffle(block)
        second += block
    unsettled = Counter(name for (name,) in second)

    def settled(outcome: Any) -> None:
        (name,) = second[outcome.index]
        assert (outcome.state, outcome.task_id) == ("duplicate", holders[name])
        unsettled[name] -= 1
        if not unsettled[name]:
            broker.rpush(f"{GATE}:{name}", "open")

    result = fan.gated.fan_out(second, queue=QUEUE, batch_size=batch_size, each=settled)
    assert counted(result) == (0, 50 * KEYS, 0)

    for name, task_id in holders.items():
        assert fan.app.AsyncResult(task_id).get(timeout=60) == name
    assert broker.hgetall(BODIES) == dict.fromkeys(every_name, "1")
    assert marks_left(locks) == set()
    assert not any(fan.gated.locked(name) for name in every_name[:10])


# Streams


@pytest.mark.parametrize(
    ("calls", "expected"),
    [([], []), ([*names_to(7), *names_to(7), ()], [(3, 3, 1), (6, 6, 1), (7, 7, 1)])],
    ids=["no-calls", "calls"],
)
def test_progress_is_told_after_every_batch(fan, calls, expected):
    """The counts so far, the last time with all calls of the iterable; an empty one is no error."""
    seen: list[tuple[int, int, int]] = []
    result = fan.once.fan_out(calls, batch_size=3, progress=lambda counts: seen.append(counted(counts)))
    assert seen == expected
    assert counted(result) == (seen[-1] if seen else (0, 0, 0))


@pytest.mark.parametrize(("names", "window", "calls"), [(FOREVER, 100, 1000), (1, 1000, 5000)])
def test_iterable_is_drawn_as_it_is_needed(fan, names, window, calls):
    """At most ten batches of distinct calls are drawn ahead, or a hundred times the calls of one."""
    drawn = 0
    ahead: list[int] = []
    settled = [0]

    class Enough(Exception):
        pass

    def endless() -> Iterator[tuple[int]]:
        nonlocal drawn
        while True:
            drawn += 1
            yield (drawn % names,)

    def progress(counts: Any) -> None:
        ahead.append(drawn - settled[-1])
        settled.append(counts.total)
        if counts.total >= calls:
            raise Enough

    error = failure(lambda: fan.once.fan_out(endless(), batch_size=10, progress=progress))
    assert isinstance(error.__cause__, Enough)
    assert error.accepted + error.duplicates == drawn == calls
    assert max(ahead) == window


def test_slow_iterable_does_not_keep_its_calls_waiting(fan, broker, monkeypatch):
    """A window that is not full is sent when it is a second old and the next call comes."""
    monkeypatch.setattr(fanout, "_WINDOW_S", WINDOW_S)
    began = time.monotonic()
    sent_after: list[float] = []

    def slow() -> Iterator[tuple[str]]:
        while not broker.llen(PARKED):
            assert time.monotonic() - began < 20
            yield ("a",)
        sent_after.append(time.monotonic() - began)
        yield ("b",)

    result = fan.once.fan_out(slow(), batch_size=1_000_000)
    assert result.accepted == 2
    assert sent_after[0] >= 1.0


@pytest.mark.timeout(900)
def test_many_calls_take_no_more_memory(server, locks, broker):
    """Of thousands of calls, sent or duplicates, nothing is kept: no object for every tenth of them."""
    calls = max(10_000, CALLS)
    (process,) = publishers(server, {"calls": calls, "keys": calls // 2, "batch_size": 100})
    counts = ended(process)
    assert counts["accepted"] + counts["duplicates"] == calls
    assert counts["accepted"] == broker.llen(PARKED) > calls // 3
    assert counts["grown"] < 5
    assert min(leases(locks)) > 0
    locks.delete(*marks_left(locks))  # one by one, as after other tests, they would take long


def test_publishers_at_once_queue_every_call_once(server, locks, broker):
    """Four processes fan out the same calls in another order: each is queued once, by one of them."""
    specs = [{"calls": 1000, "seed": seed, "batch_size": 20} for seed in range(4)]
    counts = [ended(process) for process in publishers(server, *specs)]
    assert sum(c["accepted"] for c in counts) == 1000
    assert sum(c["duplicates"] for c in counts) == 3000
    assert sorted(queued_names(broker)) == list(range(1000))
    assert len(marks_left(locks)) == 1000


# What ends it early


def test_iterable_that_raises_ends_the_fan_out(fan, broker, locks, sending):
    """What was drawn and not sent is counted, has no mark, and is sent by a second run."""

    def broken() -> Iterator[Any]:
        yield from [*names_to(100), *names_to(5), (), ("k100",), ("k101",)]
        raise LookupError("no more rows")

    error = failure(lambda: fan.once.fan_out(broken(), batch_size=10))
    assert isinstance(error.__cause__, LookupError)
    assert (error.accepted, error.duplicates, error.failed, error.uncertain) == (100, 0, 1, 0)
    assert error.not_sent == 7
    assert len(queued(broker)) == len(marks_left(locks)) == 100
    assert (
        "100 calls were sent, 0 were duplicates, 1 failed with errors of their own, 7 were not sent"
        in str(error)
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert counted(fan.once.fan_out(names_to(102))) == (2, 100, 0)


def test_interrupt_is_no_failure(fan, broker, locks):
    """Ctrl-C comes through as it is; the queue and the marks agree."""

    def interrupted() -> Iterator[Any]:
        yield from names_to(150)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fan.once.fan_out(interrupted(), batch_size=10)
    assert len(queued(broker)) == len(marks_left(locks)) == 100


BROKEN_AT = [0, 1, 10, 19, 20, 21, 30, 39, 49]


@pytest.mark.parametrize("passed", BROKEN_AT)
def test_broker_that_dies_between_messages_leaves_exact_counts(frail, proxy, locks, sending, passed):
    """Cut off after so many messages: all is counted, and a second run sends what was not sent."""
    calls = [*names_to(50), *names_to(50)]
    fault = proxy.arm("cut_before", containing=b"LPUSH", skip=passed, times=FOREVER)
    error = failure(lambda: frail.once.fan_out(calls, batch_size=20))
    proxy.disarm(fault)

    assert every(error) == 100
    assert isinstance(error.__cause__, (OperationalError, fanout.BatchPublishError))
    assert error.duplicates == error.accepted
    arrived = queued_names(frail.broker)
    assert len(arrived) == len(set(arrived))
    assert error.accepted <= len(arrived) <= error.accepted + error.uncertain // 2
    if sending == "singly" or passed in (0, 20):
        assert (error.accepted, error.uncertain) == (passed, 2)  # the message on its way, and its equal
    else:
        on_their_way = 19 if passed < 40 else 9
        assert (error.accepted, error.uncertain) == (passed // 20 * 20 + 1, on_their_way * 2)
    marked = {locks.get(name) for name in marks_left(locks)}
    assert len(marked) == error.accepted
    assert marked <= {message["headers"]["id"] for message in queued(frail.broker)}

    assert counted(frail.once.fan_out(calls, batch_size=20)) == (50 - error.accepted, 50 + error.accepted, 0)
    names = Counter(queued_names(frail.broker))
    assert len(names) == 50
    assert sum(names.values()) == 50 + len(arrived) - error.accepted


@pytest.mark.parametrize(
    ("sending", "passed", "accepted", "uncertain"),
    [
        pytest.param("batches", 30, 21, 19, marks=needs_batches, id="rest-of-a-batch"),
        pytest.param("batches", 20, 20, 1, id="first-of-a-batch"),
        pytest.param("singly", 30, 30, 1, id="singly"),
    ],
    indirect=["sending"],
)
def test_message_whose_reply_is_lost_is_uncertain(frail, proxy, locks, sending, passed, accepted, uncertain):
    """The broker has taken it, or its whole batch, and nobody said so; its call is free again."""
    with proxy.fault("drop_reply", containing=b"LPUSH", skip=passed, times=FOREVER):
        error = failure(lambda: frail.once.fan_out(names_to(50), batch_size=20))
    assert isinstance(error.__cause__, (OperationalError, fanout.BatchPublishError))
    fate = (error.accepted, error.uncertain, error.not_sent)
    assert fate == (accepted, uncertain, 50 - accepted - uncertain)
    assert f"{uncertain} were on their way and may have arrived" in str(error)
    assert passed + 1 <= len(set(queued_names(frail.broker))) <= accepted + uncertain
    assert len(marks_left(locks)) == accepted


@needs_batches
def test_failed_call_of_an_uncertain_batch_is_counted_once(frail, proxy):
    """It was left out of the batch, so its fate is known."""
    calls = [*names_to(5), ("bad", object()), ("bad",), ("k5",)]
    with proxy.fault("cut_before", containing=b"LPUSH", skip=3, times=FOREVER):
        error = failure(lambda: frail.once.fan_out(calls))
    assert (error.accepted, error.failed, error.uncertain, error.not_sent) == (1, 1, 6, 0)


def test_connection_that_was_cut_comes_back(frail, proxy, sending):
    """A connection that dies between batches is no end: the first message of a batch is sent again."""
    result = frail.once.fan_out(names_to(50), batch_size=10, progress=lambda _counts: proxy.cut())
    assert counted(result) == (50, 0, 0)
    assert queued_names(frail.broker) == [name for (name,) in names_to(50)]


def test_broker_that_is_killed_ends_the_fan_out(frail, mortal, locks):
    """kill -9 after the second batch; when it is back, a second run sends what was not sent."""

    def kill(counts: Any) -> None:
        if counts.accepted == 20:
            mortal.stop()

    try:
        error = failure(lambda: frail.once.fan_out(names_to(50), batch_size=10, progress=kill))
        assert isinstance(error.__cause__, OperationalError)
        assert (error.accepted, error.uncertain, error.not_sent) == (20, 1, 29)
        assert len(marks_left(locks)) == 20
    finally:
        mortal.start(mortal.port)
    assert counted(frail.once.fan_out(names_to(50))) == (30, 20, 0)
    assert queued_names(frail.broker) == [f"k{number}" for number in range(20, 50)]


def test_publisher_that_is_killed_leaves_marks_for_the_grace_only(server, locks, frail, proxy):
    """kill -9 amid the second batch: its marks lapse, those of the first stay, and the rest can be sent."""
    fault = proxy.arm("stall", containing=b"LPUSH", skip=30, times=FOREVER)
    (process,) = publishers(server, {"broker": proxy.url(), "calls": 50, "batch_size": 20})
    wait_until(lambda: fault.struck, "the second batch is on its way")
    left = leases(locks)
    process.kill()
    process.communicate()
    proxy.disarm(fault)
    assert sum(lease > 10_000 for lease in left) == 20 < len(left)
    pass_time(10, frail.once)
    assert len(marks_left(locks)) == 20
    assert 21 <= len(queued(frail.broker)) <= 30
    assert counted(frail.once.fan_out([(number,) for number in range(50)])) == (30, 20, 0)
    assert set(queued_names(frail.broker)) == set(range(50))


# The lock server


@pytest.mark.parametrize("marked", [0, 10])
def test_lock_server_that_is_down_or_dies_does_not_end_a_fan_out(server, broker, locks, caplog, marked):
    """What was marked stays marked; the rest is sent unmarked, with one warning for all batches.

    Equal calls of a window are one all the same.
    """
    with Proxy(server.port) as proxy, made(server.url(BROKER_DB), proxy.url(LOCK_DB)) as tasks:
        if marked:
            proxy.arm("cut_before", containing=marks.MARK.sha.encode(), skip=marked, times=FOREVER)
        else:
            proxy.close()
        assert counted(tasks.once.fan_out([*names_to(30), *names_to(5)], batch_size=10)) == (30, 5, 0)
    assert queued_names(broker) == [name for (name,) in names_to(30)]
    is_marked = ["marked" in message["headers"]["singleton"] for message in queued(broker)]
    assert is_marked == [True] * marked + [False] * (30 - marked)
    assert len(marks_left(locks)) == marked
    (warning,) = warnings(caplog)
    assert "The fan-out of fan.once continues" in warning


@pytest.mark.parametrize("action", ["cut_before", "drop_reply"])
def test_marks_that_cannot_be_extended_lapse_by_themselves(server, broker, locks, caplog, action):
    """The calls are sent and counted, with one warning; no mark is without its lease."""
    with Proxy(server.port) as proxy, made(server.url(BROKER_DB), proxy.url(LOCK_DB)) as tasks:
        proxy.arm(action, containing=verbs.IF_SAME.sha.encode(), times=FOREVER)
        assert counted(tasks.once.fan_out(names_to(30), batch_size=10)) == (30, 0, 0)
    assert len(queued(broker)) == 30
    left = leases(locks)
    assert len(left) == 30
    assert 0 < min(left) <= max(left) <= (10_000 if action == "cut_before" else 3_600_000)
    assert len(warnings(caplog)) == 1


def test_lock_server_that_refuses_is_told_as_it_is(fan, broker, locks):
    """It is the cause of the error that says what was sent: nothing, so nothing is marked."""
    foreign = mark_of(fan.once, "k5")
    locks.rpush(foreign, "a foreign key where the mark belongs")
    locks.expire(foreign, 60)
    error = failure(lambda: fan.once.fan_out(names_to(10)))
    assert isinstance(error.__cause__, LockRefused)
    assert (error.accepted, error.not_sent) == (0, 10)
    assert queued(broker) == []
    assert marks_left(locks) == {foreign}


# Callbacks and options that raise


@pytest.mark.parametrize(
    ("state", "accepted"), [("accepted", 10), ("duplicate", 0), ("failed", 1 if BATCHES else 5)]
)
def test_each_that_raises_ends_the_fan_out_with_exact_counts(fan, broker, locks, state, accepted):
    """Queue, counts and marks agree, whatever the callback does amid a batch."""
    fan.once.delay("old")
    calls = names_to(10)
    if state != "accepted":
        calls[5:5] = [("old",), ("bad", object())]

    def each(outcome: Any) -> None:
        if outcome.state == state:
            raise LookupError(state)

    error = failure(lambda: fan.once.fan_out(calls, each=each))
    assert isinstance(error.__cause__, LookupError)
    assert every(error) == len(calls)
    assert len(queued(broker)) == len(marks_left(locks)) == 1 + accepted
    assert error.accepted == accepted


def test_eta_that_cannot_be_read_is_told_before_anything_is_sent(fan, broker):
    """Celery passes a text on as it is; the lease of the mark needs to know what it means."""
    with pytest.raises((FanOutFailed, ValueError)):
        fan.once.fan_out(names_to(5), eta="tomorrow")
    assert queued(broker) == []
