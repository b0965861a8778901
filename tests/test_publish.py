"""Publishing one call: what is sent, what is a duplicate, and how long its mark lasts. No worker."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from billiard.exceptions import WorkerLostError
from celery import Celery, Signature, uuid
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import TaskRevokedError
from celery.schedules import schedule
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from celery_setnx import DuplicateTask, LockRefused, OptionError, SetnxLock, SingletonTask, log, signals
from celery_setnx.call import ended
from celery_setnx.lock.marks import GRACE_S, Mark, mark_all
from celery_setnx.lock.names import mark_name
from celery_setnx.lock.record import task_token
from celery_setnx.lock.verbs import IF_SAME
from celery_setnx.testing import pass_time
from tests import markapp_publishers
from tests.conftest import LOCK_DB
from tests.harness import lock_keys, raising, server_us, settle_marks, wait_until

BROKER_DB = 5
NOWHERE = "redis://127.0.0.1:1/0"
FORKS = multiprocessing.get_context("forkserver")

Apps = Callable[..., Celery]


@pytest.fixture(scope="module")
def apps(server) -> Apps:
    """Makes apps with the tasks of these tests."""

    def make(**conf: Any) -> Celery:
        app = Celery("publishing", backend="cache+memory://", set_as_current=False)
        app.conf.update(broker_url=server.url(BROKER_DB), setnx_url=server.url(LOCK_DB), setnx_prefix="t")
        app.conf.update(conf)

        def task(task: str, expires: float | None = None, **singleton: Any) -> None:
            options = {"base": SingletonTask, "shared": False, "expires": expires, "singleton": singleton}

            @app.task(name=task, **options)
            def work(name: str, more: int = 0) -> str:
                return name

        task("started", key="name", dedupe="until_started")
        task("done", key="name", dedupe="until_done")
        task("always", key="name")
        task("expiring", expires=50, key="name", dedupe="until_started")
        return app

    return make


@pytest.fixture
def broker(server) -> Iterator[redis.Redis]:
    """The empty broker."""
    with redis.Redis.from_url(server.url(BROKER_DB), decode_responses=True) as client:
        client.flushdb()
        yield client


@pytest.fixture
def app(apps, locks, broker) -> Celery:
    """The app, with clean databases."""
    return apps()


@pytest.fixture
def started(app) -> Any:
    return app.tasks["started"]


@pytest.fixture
def queued(broker) -> Callable[[], list[str]]:
    """Ids of the messages in the queue, the newest first."""

    def ids() -> list[str]:
        return [json.loads(message)["headers"]["id"] for message in broker.lrange("celery", 0, -1)]

    return ids


@pytest.fixture
def seen() -> Iterator[Any]:
    """Call it with a function that makes an entry of each signal, by default of each call that is sent."""
    with ExitStack() as stack:

        def collect(look: Callable[..., Any], signal: Any = before_task_publish) -> list[Any]:
            found: list[Any] = []

            def receiver(**details: Any) -> None:
                found.append(look(**details))

            signal.connect(receiver, weak=False)
            stack.callback(signal.disconnect, receiver)
            return found

        yield collect


def mark_of(task: Any, *args: Any) -> str:
    return mark_name(task.lock_key(*args))


def hold(locks: redis.Redis, task: Any, task_id: str, *args: Any) -> Any:
    """The lock of a running task."""
    lock = SetnxLock(locks, task.lock_key(*args), info={"task_id": task_id})
    held = lock.acquire(token=task_token(task_id, 0, "ab")).lock
    assert held is not None
    return held


@pytest.mark.parametrize("name", ["started", "done"])
def test_second_call_with_one_key_is_the_first(app, queued, name):
    """The first is sent; the second gets its result, and says so. What is no part of the key is no matter."""
    delay = app.tasks[name].delay
    results = [delay("a"), delay("a"), delay("b"), delay("a", more=1), delay(name="b")]
    assert [result.deduplicated for result in results] == [False, True, False, True, True]
    a, b = results[0].id, results[2].id
    assert [result.id for result in results] == [a, a, b, a, b]
    assert queued() == [b, a]


def test_call_without_dedupe_says_that_it_is_none(app, queued, locks):
    """Without the option every call is sent, leaves no mark, and is no duplicate; one call may opt in."""
    always = app.tasks["always"]
    assert [always.delay("a").deduplicated for _time in range(2)] == [False, False]
    assert len(queued()) == 2
    assert not lock_keys(locks)
    results = [always.apply_async(["a"], singleton={"dedupe": "until_started"}) for _time in range(2)]
    assert [result.deduplicated for result in results] == [False, True]
    assert len(queued()) == 3


@pytest.mark.parametrize(
    ("name", "options", "sent"),
    [("done", {}, 0), ("started", {}, 1), ("started", {"dedupe": "until_done"}, 0)],
    ids=["done", "started", "done-by-the-call"],
)
def test_running_call_counts_with_until_done(app, locks, queued, name, options, sent):
    """Then the call that runs is the call; with until_started one may wait beside it. A call's mode wins."""
    task = app.tasks[name]
    hold(locks, task, "runs", "a")
    results = [task.apply_async(["a"], singleton=options) for _time in range(2)]
    assert [result.deduplicated for result in results] == [not sent, True]
    assert queued() == [result.id for result in results][:sent]
    assert results[1].id == (results[0].id if sent else "runs")


@pytest.mark.parametrize(("name", "rests"), [("started", False), ("done", False), ("done", True)])
def test_lock_of_nobody_who_runs_is_no_duplicate(app, locks, foreign_keys, name, rests):
    """A lock set by hand keeps nobody from publishing, nor does a run that is over, and only rests."""
    task = app.tasks[name]
    if rests:
        assert hold(locks, task, "ran", "a").release(at_least_for=30) == "resting"
    else:
        foreign_keys.add(task.lock_key("a"))
        locks.setnx(task.lock_key("a"), "99999999999")
    assert not task.delay("a").deduplicated


DIED = WorkerLostError("gone")
ENDS = [("SUCCESS", None), ("FAILURE", ValueError()), ("REVOKED", TaskRevokedError())]
GOES_ON = [("STARTED", None), ("RETRY", ValueError()), ("FAILURE", DIED), ("PENDING", None)]


@pytest.fixture
def older(app, locks) -> Callable[..., Any]:
    """Has the lock server say of a call, which has a result, that it is queued, or waits for its retry."""

    def note(what: str, state: str, result: Any = None, task_id: str = "") -> tuple[Any, str]:
        task, task_id = app.tasks["done" if what == "held" else "started"], task_id or uuid()
        key = task.lock_key("a")
        task.backend.persistent = True
        task.backend.store_result(task_id, result, state)
        if what == "held":
            held = SetnxLock(locks, key, line=True, limit=2).acquire(token=task_token(task_id, 0, "ab")).lock
            held.hold(3600)
        else:
            mark_all(locks, [Mark(key, task_id)], dedupe="until_started", lease=3600)
        return task, task_id

    return note


@pytest.mark.parametrize("what", ["queued", "held"])
@pytest.mark.parametrize(("state", "result"), ENDS)
def test_call_that_has_ended_makes_no_duplicates_whatever_older_data_say(
    older, locks, queued, caplog, what, state, result
):
    """The lock server came back with a snapshot, in which it is still to come: its result tells."""
    task, task_id = older(what, state, result)
    sent = task.delay("a")
    assert (sent.deduplicated, queued()) == (False, [sent.id])
    assert locks.get(mark_name(task.lock_key("a"))) == sent.id
    assert task.locked("a") is None
    assert f"by task {task_id}, which has ended. Redis may have come back" in caplog.text


@pytest.mark.parametrize("what", ["queued", "held"])
@pytest.mark.parametrize(
    ("state", "result", "given"), [*((*each, "") for each in GOES_ON), ("SUCCESS", None, "nightly")]
)
def test_call_that_may_be_to_come_makes_duplicates(older, queued, what, state, result, given):
    """Of one whose process has died its retry may be on its way.

    The result of an id that a user has given may be that of an earlier call.
    """
    task, task_id = older(what, state, result, given)
    sent = task.delay("a")
    assert (sent.deduplicated, sent.id, queued()) == (True, task_id, [])


def test_result_that_cannot_be_read_leaves_the_duplicate(older, queued, monkeypatch):
    """Its backend is away: nobody knows better than the lock server."""
    task, task_id = older("queued", "SUCCESS")
    monkeypatch.setattr(type(task.backend), "get_task_meta", raising(OSError))
    assert (task.delay("a").id, queued()) == (task_id, [])


def test_result_backend_that_keeps_a_publisher_waiting_is_left_alone_for_a_while(older, queued, monkeypatch):
    """It hangs once, for its own timeout: then it is not asked, until it may have mended."""
    now, asked = [100.0], []
    monkeypatch.setattr(ended, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task, task_id = older("queued", "SUCCESS")
    found = task.backend.get_task_meta

    def hangs(asked_id: str) -> Any:
        asked.append(asked_id)
        now[0] += 120.0
        raise OSError

    monkeypatch.setattr(task.backend, "get_task_meta", hangs)
    for _ in range(3):
        assert (task.delay("a").id, queued()) == (task_id, [])
    assert asked == [task_id]
    monkeypatch.setattr(task.backend, "get_task_meta", found)
    now[0] += 60.0
    assert not task.delay("a").deduplicated


@pytest.mark.parametrize(
    "on_duplicate", ["raise", lambda duplicate: duplicate.fail()], ids=["raise", "callable-fails"]
)
def test_raise_names_the_other_call(started, queued, on_duplicate):
    """The error says which task, key, id and state; a callable's `fail()` raises it, too."""
    first = started.delay("a")
    with pytest.raises(DuplicateTask) as caught:
        started.apply_async(["a"], singleton={"on_duplicate": on_duplicate})
    error, key = caught.value, started.lock_key("a")
    assert (error.task, error.key, error.task_id, error.state) == ("started", key, first.id, "queued")
    assert queued() == [first.id]


@pytest.mark.parametrize("name", ["started", "done"])
def test_callable_sees_the_duplicate(app, locks, name):
    """What it returns is what apply_async returns; it sees all there is, of a running call the record."""
    task, found = app.tasks[name], []
    held = hold(locks, task, "runs", "a") if name == "done" else None
    task_id = "runs" if held else task.delay("a").id
    options = {"on_duplicate": lambda duplicate: found.append(duplicate) or "mine"}
    assert task.apply_async(["a"], {"more": 2}, singleton=options) == "mine"
    (duplicate,) = found
    assert (duplicate.task, duplicate.key, duplicate.task_id) == (name, task.lock_key("a"), task_id)
    assert (duplicate.args, duplicate.kwargs) == (["a"], {"more": 2})
    assert (duplicate.result.id, duplicate.result.deduplicated) == (task_id, True)
    assert duplicate.state == ("running" if held else "queued")
    holder = duplicate.holder
    assert (holder and (holder.fence, holder.task_id)) == (held and (held.fence, "runs"))


def test_publishing_options_do_not_travel(started, broker):
    """The message says how the call is deduplicated, not what its duplicates get."""
    options = {"on_duplicate": "raise", "dedupe": "until_done", "queue_lease": 60}
    started.apply_async(["a"], singleton=options)
    (message,) = broker.lrange("celery", 0, -1)
    header = json.loads(message)["headers"]["singleton"]
    assert header["options"] == {"dedupe": "until_done", "queue_lease": 60}
    assert header["marked"] is True


def test_unknown_mode_is_refused(started, queued):
    """A misspelt mode never reaches the broker."""
    with pytest.raises(OptionError, match="did you mean 'until_done'"):
        started.apply_async(["a"], singleton={"dedupe": "until_don"})
    assert queued() == []


@pytest.mark.parametrize(
    "options",
    [
        *({"task_id": "own"}, {"retries": 1}, {"group_id": "g"}, {"chord": {"task": "total"}}),
        *({"chain": [{}]}, {"link": Signature("total")}, {"link_error": Signature("total")}),
        {"singleton": {"dedupe": None}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_awaited_call_is_never_a_duplicate(started, queued, locks, options):
    """A call that another, its own past or a callback waits for is sent unmarked; so is one that opts out."""
    first = started.delay("a")
    result = started.apply_async(["a"], **options)
    assert not result.deduplicated
    assert queued() == [result.id, first.id]
    assert locks.get(mark_of(started, "a")) == first.id


def test_plain_signature_is_deduplicated(started):
    """A signature on its own is a call like any other, with callbacks too where it is the first.

    `.apply()` and a plain call run beside the queued call.
    """
    first = started.s("a").set(link=Signature("total")).delay()
    assert [started.apply(["a"]).get(), started("a")] == ["a", "a"]
    assert started.s("a").apply_async().id == first.id
    assert started.s("a").set(singleton={"on_duplicate": lambda _: "mine"}).delay() == "mine"


def test_duplicate_is_signalled_and_logged(started, seen, caplog):
    """Both name task, key, and the queued call, the first is in neither; a failing receiver is no matter."""
    heard = seen(lambda signal, **details: details, signals.call_deduplicated)
    first = started.delay("a")
    assert (heard, caplog.messages) == ([], [])
    started.delay("a")
    key = started.lock_key("a")
    assert heard == [
        {"sender": started, "task_id": first.id, "key": key, "about": "name='a'", "state": "queued"}
    ]
    (line,) = caplog.messages
    assert all(word in line for word in ("started", key, first.id, "queued"))
    seen(lambda **_details: 1 / 0, signals.call_deduplicated)
    assert started.delay("a").id == first.id


def test_beat_entry_is_deduplicated_and_survives_a_refusal(app, queued, caplog):
    """Beat publishes without a task id: while the last call is queued, the next is not sent.

    With on_duplicate="raise" it logs the error and goes on.
    """
    entry, beat = ScheduleEntry("e", "started", schedule=schedule(1), args=("a",), app=app), Scheduler(app)
    first = beat.apply_async(entry, advance=False)
    beat.apply_entry(entry)
    assert beat.apply_async(entry, advance=False).deduplicated
    said = "was not published: the same call is queued already"
    assert said not in caplog.text
    entry.options = {"singleton": {"on_duplicate": "raise"}}
    beat.apply_entry(entry)
    assert said in caplog.text
    assert queued() == [first.id]


@pytest.mark.parametrize(("queue_lease", "grace_ms"), [(3600, 10_000), (4, 4_000)])
def test_mark_lasts_for_the_grace_lease_during_the_send(started, locks, seen, queue_lease, grace_ms):
    """A publisher that dies before its message is sent costs ten seconds at most, or the queue lease."""
    sent = seen(lambda **_details: (locks.pttl(mark_of(started, "a")), server_us(locks)))
    began_us = server_us(locks)  # its clock may be set anew while the one of this process goes on
    started.apply_async(["a"], singleton={"queue_lease": queue_lease})
    ((left_ms, at_us),) = sent
    assert grace_ms - (at_us - began_us) / 1000 - 1 <= left_ms <= grace_ms


def after(seconds: float, **to: Any) -> Callable[[datetime], Any]:
    """A time so many seconds from now; Celery takes naive ones for the app's own, UTC here."""
    return lambda now: (now + timedelta(seconds=seconds)).astimezone(**to)


@pytest.mark.parametrize(
    ("options", "seconds", "name"),
    [
        ({}, 3600, "started"),
        ({"countdown": 600}, 4200, "started"),
        ({"eta": after(600)}, 4200, "started"),
        ({"eta": after(-600)}, 3600, "started"),
        ({"eta": after(600, tz=timezone(timedelta(hours=9)))}, 4200, "started"),
        ({"eta": lambda now: (now + timedelta(seconds=600)).replace(tzinfo=None)}, 4200, "started"),
        ({"eta": lambda now: (now + timedelta(seconds=600)).isoformat()}, 4200, "started"),
        *(({"expires": seconds}, seconds, "started") for seconds in (4, 60)),
        ({"expires": after(60)}, 60, "started"),
        ({"expires": after(-5)}, 0.001, "started"),
        ({"expires": 9000}, 3600, "started"),
        ({"countdown": 600, "expires": 700}, 700, "started"),
        ({"singleton": {"queue_lease": 90}, "countdown": 600}, 690, "started"),
        ({}, 50, "expiring"),  # `expires` of the task counts as that of a call does, which may override it
        ({"expires": 20}, 20, "expiring"),
        ({"expires": None}, 3600, "expiring"),
    ],
)
def test_mark_lasts_for_the_queue_lease_after_the_send(app, locks, options, seconds, name):
    """It counts from when the call may start, whatever kind of time says so; an expired call needs none."""
    now = datetime.now(timezone.utc)
    given = {name: value(now) if callable(value) else value for name, value in options.items()}
    app.tasks[name].apply_async(["a"], **given)
    settle_marks(app)
    passed = (datetime.now(timezone.utc) - now).total_seconds()
    assert seconds - passed - 1 <= locks.pttl(mark_of(app.tasks[name], "a")) / 1000 <= seconds


@pytest.mark.parametrize(
    "retry", [{"retry": False}, {"retry_policy": {"max_retries": 1, "interval_start": 0}}], ids=["no", "once"]
)
def test_failed_send_frees_the_mark(apps, started, locks, seen, retry):
    """The broker's own error is raised, and the next call is no duplicate."""
    once = {"max_retries": 0, "socket_connect_timeout": 1}
    broken = apps(broker_url=NOWHERE, broker_transport_options=once).tasks["started"]
    marks = seen(lambda **_details: locks.get(mark_of(started, "a")))
    with pytest.raises(OperationalError):
        broken.apply_async(["a"], **retry)
    assert marks[0] is not None
    assert not locks.exists(mark_of(started, "a"))
    assert not started.delay("a").deduplicated


@pytest.mark.parametrize("interrupted", [False, True], ids=["not-serializable", "ctrl-c"])
def test_message_that_is_not_sent_frees_the_mark(started, locks, monkeypatch, interrupted):
    """Whatever keeps the message from being sent, Ctrl-C in mid-send as well: its mark is gone."""
    if interrupted:
        monkeypatch.setattr(started.app.amqp, "send_task_message", raising(KeyboardInterrupt))
    error, message = (KeyboardInterrupt, None) if interrupted else (Exception, "serializable")
    with pytest.raises(error, match=message):
        started.apply_async(["a"], {"more": object()})
    assert not locks.exists(mark_of(started, "a"))


def test_unreachable_lock_server_lets_calls_be_sent(apps, app, broker, caplog):
    """Without an answer the call is sent without a mark, its run is guarded, and one warning says so."""
    blind = apps(setnx_url=NOWHERE).tasks["started"]
    result = blind.delay("a")
    assert not result.deduplicated
    (message,) = broker.lrange("celery", 0, -1)
    header = json.loads(message)["headers"]["singleton"]
    assert "marked" not in header
    assert header["key"] == app.tasks["started"].lock_key("a")
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "A call of started is published without a check" in warning.getMessage()
    assert "its run takes the lock" in warning.getMessage()


def test_mark_whose_reply_is_lost_for_good_is_still_the_calls_own(apps, proxy, locks, queued, caplog):
    """Whether the key is marked is unknown: the call is sent, and the mark, if there is one, is its own."""
    task = apps(setnx_url=proxy.url(LOCK_DB)).tasks["started"]
    task.delay("warm")
    with proxy.fault("drop_reply", containing=mark_of(task, "a").encode(), times=9):
        result = task.delay("a")
    assert queued()[0] == result.id
    assert locks.get(mark_of(task, "a")) == result.id
    assert locks.pttl(mark_of(task, "a")) <= 10_000
    assert task.delay("a").id == result.id
    assert "is published without a check for duplicates" in caplog.text


def test_lock_server_that_dies_in_mid_send_leaves_a_short_mark(apps, proxy, locks, queued, seen, caplog):
    """The message is sent, a warning says that the mark lapses early, and nothing is raised."""
    task = apps(setnx_url=proxy.url(LOCK_DB)).tasks["started"]
    seen(lambda **_details: proxy.close())
    result = task.delay("a")
    assert queued() == [result.id]
    assert locks.pttl(mark_of(task, "a")) <= 10_000
    (warning,) = caplog.records
    assert "was sent, but its mark" in warning.getMessage()


def _is_kept(locks: redis.Redis, mark: str) -> bool:
    return locks.pttl(mark) > GRACE_S * 1000


def publish(task: Any, locks: redis.Redis, *names: str) -> None:
    """Publish calls one after another, each once the server has kept the mark of the one before."""
    for name in names:
        task.delay(name)
        wait_until(partial(_is_kept, locks, mark_of(task, name)), "its mark is kept")


def test_publisher_does_not_wait_for_the_reply_to_its_marks_extension(apps, proxy, locks):
    """The reply is held back until it has published another call; each has its mark for the queue lease."""
    task = apps(setnx_url=proxy.url(LOCK_DB)).tasks["started"]
    publish(task, locks, "once", "twice")  # from now on the server is taken to know the scripts
    has_published = Event()
    held_back = {"containing": IF_SAME.sha.encode(), "meanwhile": lambda: has_published.wait(60)}
    with proxy.fault("delay_reply", **held_back) as fault:
        task.delay("a")
        assert not has_published.is_set()
        has_published.set()
        assert not task.delay("b").deduplicated
        assert fault.struck == 1
    for name in "ab":
        wait_until(partial(_is_kept, locks, mark_of(task, name)), "its mark is kept")


def test_mark_is_extended_though_the_server_has_forgotten_the_script(apps, locks):
    """Whoever publishes but once would never read that it is unknown: the publisher waits for the reply."""
    task = apps().tasks["started"]
    for name in "abc":
        task.delay(name)
        assert locks.pttl(mark_of(task, name)) > GRACE_S * 1000
        locks.script_flush()


def test_extension_that_is_refused_is_made_with_the_next_call(apps, proxy, locks, caplog):
    """Or a warning says that the mark lapses early."""
    task = apps(setnx_url=proxy.url(LOCK_DB)).tasks["started"]
    publish(task, locks, "once", "twice")  # from now on the server is taken to know the scripts
    refused = {"containing": IF_SAME.sha.encode(), "reply": b"-READONLY a replica\r\n"}
    for name, times in (("a", 1), ("b", 2)):
        with proxy.fault("answer", **refused, times=times):
            task.delay(name)
            assert locks.pttl(mark_of(task, name)) <= GRACE_S * 1000
            publish(task, locks, f"after {name}")
    assert locks.pttl(mark_of(task, "a")) > GRACE_S * 1000
    assert locks.pttl(mark_of(task, "b")) <= GRACE_S * 1000
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "was sent, but its mark t:{started:" in warning.getMessage()


def test_mark_that_is_forbidden_is_an_outage(apps, app, limited, queued, caplog, monkeypatch):
    """The call is sent unasked, and its run is guarded; what is to be allowed is said as an error, once."""
    monkeypatch.setattr(log, "_say_again_at", {})
    url = limited("+@all", "%R~*:queued", "~*:holder", "~*}")
    task = apps(setnx_url=url).tasks["started"]
    results = [task.delay("a"), task.delay("a")]
    assert sorted(queued()) == sorted(result.id for result in results)
    assert not any(result.deduplicated for result in results)
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "Grant its user what is missing" in error
    assert caplog.text.count("is published without a check") == 2


def test_mark_of_another_type_is_refused(apps, app, queued, locks, foreign_keys):
    """That does not come right by waiting: the publisher learns it, and nothing is sent."""
    task = apps().tasks["started"]
    foreign_keys.add(mark_of(task, "a"))
    locks.rpush(mark_of(task, "a"), "another program's")
    with pytest.raises(LockRefused, match="WRONGTYPE"):
        task.delay("a")
    assert queued() == []


def test_purged_queue_leaves_marks_that_lapse(app, started, queued):
    """`celery purge` knows no marks: calls are duplicates until the queue lease is over, and no longer."""
    lost = started.delay("a")
    with app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("celery") == 1
    pass_time(3590, started, "a")
    assert started.delay("a").id == lost.id
    pass_time(10, started, "a")
    fresh = started.delay("a")
    assert not fresh.deduplicated
    assert queued() == [fresh.id]


def forked(function: Callable[..., None], *args: Any) -> Any:
    """A publisher as a process of its own, forked from one that has imported its module."""
    FORKS.set_forkserver_preload([markapp_publishers.__name__])
    publisher = FORKS.Process(target=function, args=args)
    publisher.start()
    return publisher


def test_publisher_killed_before_its_message_costs_the_grace_lease(server, locks, broker):
    """kill -9 between mark and send: duplicates of nothing for the grace lease, then the next is sent."""
    url = server.url(BROKER_DB), server.url(LOCK_DB)
    publisher = forked(markapp_publishers.publish_and_stop, *url, "a")
    task = markapp_publishers.task_of(*url)
    try:
        wait_until(lambda: _is_stopped(publisher.pid), "the publisher stands between mark and message")
        assert 0 < locks.pttl(mark_of(task, "a")) <= GRACE_S * 1000
        assert task.delay("a").deduplicated
    finally:
        publisher.kill()
        publisher.join()
    assert broker.llen("celery") == 0
    pass_time(GRACE_S, task, "a")
    fresh = task.delay("a")
    assert not fresh.deduplicated
    assert locks.get(mark_of(task, "a")) == fresh.id
    assert broker.llen("celery") == 1


def test_many_publishers_of_one_call_send_one_message(server, locks, broker, queued):
    """Eight processes publish one call two hundred times each: one message, and all get its id."""
    begin, answers = FORKS.Barrier(8), FORKS.Queue()
    arguments = (server.url(BROKER_DB), server.url(LOCK_DB), "a", 200, begin, answers)
    publishers = [forked(markapp_publishers.publish_many, *arguments) for _ in range(8)]
    found = [answers.get(timeout=60) for _publisher in publishers]
    for publisher in publishers:
        publisher.join(10)
    assert sum(sent for _ids, sent in found) == 1
    assert [ids for ids, _sent in found] == [set(queued())] * 8
    assert len(queued()) == 1


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"
