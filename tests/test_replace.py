"""The newest call of a key replaces those before it: publishing it, and what workers do."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group, uuid
from celery.beat import Scheduler
from celery.schedules import schedule
from kombu.exceptions import OperationalError

from celery_setnx import (
    OptionError,
    SingletonTask,
    check,
    doctor,
    is_skipped,
    send_task,
    singleton,
    superseded_by,
)
from celery_setnx.call import marking
from celery_setnx.doctor.trial import LockServerCheck
from celery_setnx.lock.look import look
from celery_setnx.lock.names import mark_name, newest_name
from tests.conftest import LOCK_DB
from tests.harness import age, lock_keys, raising, settle_marks, wait_until
from tests.stage import redeliver, revoke, unacknowledged

BROKER_DB = 5
NOWHERE = "redis://127.0.0.1:1/0"
REPLACE = {"key": "name", "dedupe": "until_started", "on_duplicate": "replace"}


@pytest.fixture(scope="module")
def apps(server) -> Callable[..., Celery]:
    """Makes apps with the tasks of these tests."""

    def make(**conf: Any) -> Celery:
        app = Celery("replacing", backend="cache+memory://", set_as_current=False)
        app.conf.update(broker_url=server.url(BROKER_DB), setnx_url=server.url(LOCK_DB), setnx_prefix="t")
        app.conf.update(conf)

        def task(task: str, expires: float | None = None, **singleton: Any) -> None:
            options = {"base": SingletonTask, "shared": False, "expires": expires, "singleton": singleton}

            @app.task(name=task, **options)
            def work(name: str, version: int = 0) -> str:
                return name

        task("save", **REPLACE)
        task("expiring", expires=50, **REPLACE)
        task("typed", key="name", debounce=5)
        task("leading", key="name", debounce=5, debounce_leading=True)
        task("started", key="name", dedupe="until_started")
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
def save(app) -> Any:
    return app.tasks["save"]


@pytest.fixture
def queued(broker) -> Callable[[], list[dict[str, Any]]]:
    """The headers of the messages in the queue, the oldest first."""

    def headers() -> list[dict[str, Any]]:
        return [json.loads(message)["headers"] for message in reversed(broker.lrange("celery", 0, -1))]

    return headers


def generations(headers: list[dict[str, Any]]) -> list[int]:
    """What messages say; 0 of one that says nothing."""
    return [each.get("singleton", {}).get("generation", 0) for each in headers]


def newest(locks: redis.Redis, task: Any, *args: Any) -> Any:
    """What is known of the newest call, once its publisher has been heard."""
    settle_marks(task.app)
    return look(locks, task.lock_key(*args)).newest


# Publishing: who takes part.


def test_each_call_is_sent_and_is_the_newest(locks, save, queued):
    """With a larger generation than those before it, each of its key."""
    results = [save.delay("a", version) for version in range(3)]
    assert not any(result.deduplicated for result in results)
    first, second, third = generations(queued())
    assert 0 < first < second < third
    found = newest(locks, save, "a")
    assert (found.task_id, found.generation, found.superseded) == (results[2].id, third, 2)


def test_call_that_equals_the_newest_is_a_duplicate(save, queued):
    """In all its arguments, by name or not; what is the same by its key alone is newer."""
    first = save.delay("a", 1)
    settle_marks(save.app)
    second = save.apply_async(kwargs={"name": "a", "version": 1})
    assert (second.deduplicated, second.id) == (True, first.id)
    assert not save.delay("a", 2).deduplicated
    assert not save.delay("a", 1).deduplicated
    assert len(queued()) == 3


def test_other_keys_are_left_alone(locks, save):
    """Each key has its own newest call."""
    a, b = save.delay("a", 1), save.delay("b", 1)
    assert [newest(locks, save, name).task_id for name in "ab"] == [a.id, b.id]


def test_duplicate_of_a_call_that_has_ended_is_sent(locks, save, queued):
    """A lock server with older data says that it is queued: its stored result says otherwise."""
    save.backend.persistent = True
    first = save.delay("a", 1)
    settle_marks(save.app)
    save.backend.store_result(first.id, 1, "SUCCESS")
    second = save.delay("a", 1)
    assert (second.deduplicated, second.id != first.id) == (False, True)
    assert newest(locks, save, "a").task_id == second.id


def by_beat(app: Celery) -> None:
    entry = Scheduler.Entry("tick", "save", schedule=schedule(60), args=("a", 1), app=app)
    Scheduler(app, lazy=True).apply_async(entry, advance=False)


def by_strangers(app: Celery) -> None:
    stranger = Celery("stranger", backend="cache+memory://", set_as_current=False)
    stranger.conf.update(app.conf.changes)
    send_task(stranger, "save", kwargs={"name": "a", "version": 1}, singleton=REPLACE)


TAKES_PART = {
    "delay": lambda app: app.tasks["save"].delay("a", 1),
    "apply_async": lambda app: app.tasks["save"].apply_async(["a"], {"version": 1}, shadow="other"),
    "signature": lambda app: app.tasks["save"].s("a", 1).delay(),
    "beat": by_beat,
    "send_task": by_strangers,
    "fan_out": lambda app: app.tasks["save"].fan_out([("a", 1)]),
    "by-one-call": lambda app: app.tasks["started"].apply_async(["a"], singleton={"on_duplicate": "replace"}),
    "debounced-by-one-call": lambda app: app.tasks["started"].apply_async(["a"], singleton={"debounce": 5}),
}
TAKES_NO_PART = {
    "task_id": lambda save: save.apply_async(["a", 1], task_id=uuid()),
    "link": lambda save: save.apply_async(["a", 1], link=save.si("b", 1)),
    "link_error": lambda save: save.apply_async(["a", 1], link_error=save.si("b", 1)),
    "chain": lambda save: chain(save.si("a", 1), save.si("a", 2)).apply_async(),
    "group": lambda save: group(save.si("a", 1), save.si("a", 2)).apply_async(),
    "chord": lambda save: chord([save.si("a", 1)], save.si("a", 2)).apply_async(),
    "by-name": lambda save: save.app.send_task("save", ["a", 1]),
    "own-retry": lambda save: save.apply_async(["a", 1], task_id=uuid(), retries=1, countdown=5),
}


@pytest.mark.parametrize("way", TAKES_PART)
def test_call_has_a_generation_whichever_way_it_is_published(locks, app, queued, way):
    """And is the newest once it is sent."""
    TAKES_PART[way](app)
    (headers,) = queued()
    (generation,) = generations([headers])
    assert generation > 0
    assert newest(locks, app.tasks[headers["task"]], "a").task_id == headers["id"]


@pytest.mark.parametrize("way", TAKES_NO_PART)
def test_call_that_somebody_waits_for_takes_no_part(locks, apps, broker, queued, server, way):
    """It neither replaces nor is replaced: its message has no generation, and nothing is known of it."""
    save = apps(result_backend=server.url(BROKER_DB)).tasks["save"]
    TAKES_NO_PART[way](save)
    assert queued()
    assert set(generations(queued())) == {0}
    assert not locks.exists(newest_name(save.lock_key("a")))


def test_eager_call_takes_no_part(locks, apps):
    """It runs at once, in its caller."""
    save = apps(task_always_eager=True).tasks["save"]
    assert save.delay("a", 1).get() == "a"
    assert save.apply(["a", 2]).get() == "a"
    assert not locks.exists(newest_name(save.lock_key("a")))


def test_one_call_that_replaces_leaves_the_mark_of_others(locks, app):
    """A task without the option has marks: a call with it stands beside them."""
    started = app.tasks["started"]
    first = started.delay("a")
    replaces = started.apply_async(["a"], singleton={"on_duplicate": "replace"})
    assert not replaces.deduplicated
    settle_marks(app)
    assert locks.get(mark_name(started.lock_key("a"))) == first.id
    assert newest(locks, started, "a").task_id == replaces.id


# Publishing: what is refused.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("countdown", {"countdown": 5}),
        ("eta", {"eta": "2100-01-01T00:00:00+00:00"}),
        ("expires", {"expires": 5}),
        ("expires", {"expires": 0}),
    ],
)
@pytest.mark.parametrize("task", ["save", "typed"])
def test_call_that_is_put_off_or_expires_is_refused(locks, app, queued, task, name, options):
    """It would replace older calls, and not run for a while, or ever."""
    with pytest.raises(OptionError, match=f"has {name}, and on_duplicate='replace'.*leave out {name}"):
        app.tasks[task].apply_async(["a"], **options)
    with pytest.raises(OptionError, match=f"has {name}"):
        app.tasks[task].fan_out([("a",)], **options)
    assert queued() == []
    assert not lock_keys(locks)


def test_task_whose_calls_expire_is_refused_at_publish(locks, app, queued):
    """As if each call said so."""
    with pytest.raises(OptionError, match="a call of expiring has expires"):
        app.tasks["expiring"].delay("a")
    assert queued() == []


@pytest.mark.parametrize("options", [{"countdown": 0}, {"eta": None}, {"expires": None}])
def test_call_that_is_not_put_off_is_sent(app, queued, options):
    """What says nothing is refused by nobody."""
    app.tasks["save"].apply_async(["a"], **options)
    assert len(queued()) == 1


def test_other_base_class_is_refused(alone, apps, locks):
    """Celery's own apply_async would reserve no generation: workers do not start."""
    app = apps()

    @app.task(name="decorated", shared=False)
    @singleton(**REPLACE)
    def decorated(name: str) -> None: ...

    with pytest.raises(OptionError, match="dedupe of decorated needs the base class: add base=SingletonTask"):
        check(app)


@pytest.fixture
def too_quiet(apps) -> Iterator[Celery]:
    """An app with a debounce of more than a quarter of the broker's visibility timeout."""
    app = apps(broker_transport_options={"visibility_timeout": 19})
    yield app
    app.close()


def test_check_refuses_a_debounce_near_the_visibility_timeout(too_quiet, locks):
    """The broker would deliver the call a second time while it waits."""
    found = [each for each in doctor.check(too_quiet) if each.subject == "debounce"]
    assert {each.level for each in found} == {"error"}
    said = "debounce of typed is 5 s, and the broker delivers again after 19 s (visibility_timeout)"
    assert any(said in each.what for each in found)


def test_worker_does_not_start_with_a_debounce_near_the_visibility_timeout(too_quiet, locks):
    """Before it takes a call."""
    with pytest.raises(OptionError, match=r"make it 4\.75 s or less"):
        LockServerCheck(SimpleNamespace(app=too_quiet)).start(SimpleNamespace(app=too_quiet))


# Publishing: what fails.


def test_call_has_a_generation_by_this_hosts_clock_without_redis(apps, broker, queued, caplog):
    """It is sent, newer than those before it, and that is told."""
    save = apps(setnx_url=NOWHERE).tasks["save"]
    before = time.time() * 1e6
    results = [save.delay("a", version) for version in range(2)]
    first, second = generations(queued())
    assert before - 1 <= first < second <= time.time() * 1e6 + 1
    assert not any(result.deduplicated for result in results)
    assert "is published as the newest by this host's clock; its run takes the lock." in caplog.text


def test_call_that_is_not_sent_replaces_nobody(locks, save, monkeypatch):
    """Its generation is reserved, and no more."""
    first = save.delay("a", 1)
    settle_marks(save.app)
    monkeypatch.setattr(save.app.amqp, "send_task_message", raising(OperationalError("away")))
    with pytest.raises(OperationalError):
        save.delay("a", 2)
    assert newest(locks, save, "a").task_id == first.id


def test_equal_call_is_sent_after_one_that_may_not_have_been_sent(save, queued, monkeypatch):
    """A, then B fails: whether B was sent is not known, so A is sent again."""
    save.delay("a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(save.app.amqp, "send_task_message", raising(OperationalError("away")))
        with pytest.raises(OperationalError):
            save.delay("a", 2)
    assert not save.delay("a", 1).deduplicated
    assert len(queued()) == 2


# Fan-out.


def test_last_call_of_a_window_wins(locks, save, queued, broker):
    """The earlier ones of its key count as duplicates of it."""
    told: list[Any] = []
    counts = save.fan_out([("a", 1), ("a", 2), ("b", 1), ("a", 3)], each=told.append)
    assert (counts.accepted, counts.duplicates, counts.failed) == (2, 2, 0)
    assert [each["argsrepr"] for each in queued()] == ["('a', 3)", "('b', 1)"]
    states = {outcome.index: (outcome.state, outcome.task_id) for outcome in told}
    a, b = (each["id"] for each in queued())
    assert states == {3: ("accepted", a), 2: ("accepted", b), 0: ("duplicate", a), 1: ("duplicate", a)}
    assert [newest(locks, save, name).task_id for name in "ab"] == [a, b]


def test_fan_out_replaces_calls_before_it(locks, save, queued):
    """Unless one equals the newest."""
    single = save.delay("a", 1)
    settle_marks(save.app)
    assert save.fan_out([("a", 1)]).duplicates == 1
    assert save.fan_out([("a", 2)]).accepted == 1
    assert newest(locks, save, "a").task_id != single.id


def test_earlier_call_is_sent_in_place_of_a_last_one_that_cannot_be(save, queued):
    """What cannot be serialized fails alone."""
    counts = save.fan_out([("a", 1), ("a", 2), ("a", {1, 2})])
    assert (counts.accepted, counts.duplicates, counts.failed) == (1, 1, 1)
    assert [each["argsrepr"] for each in queued()] == ["('a', 2)"]


# Debounce, at the publisher.


def seconds_off(headers: dict[str, Any]) -> float:
    """In how many seconds a message may start; 0 of one that is not put off."""
    if not headers["eta"]:
        return 0.0
    return (datetime.fromisoformat(headers["eta"]) - datetime.now(timezone.utc)).total_seconds()


@pytest.mark.parametrize("way", ["delay", "fan_out"])
def test_debounced_call_is_sent_with_a_countdown(app, queued, way):
    """An equal one too: the quiet time starts anew."""
    typed = app.tasks["typed"]
    for _time in range(2):
        typed.delay("a", 1) if way == "delay" else typed.fan_out([("a", 1)])
    assert [seconds_off(each) for each in queued()] == [pytest.approx(5, abs=2)] * 2


def test_countdown_shrinks_to_what_is_left_of_the_longest_time(app, queued, locks):
    """A key that is published for ever runs all the same."""
    typed = app.tasks["typed"]
    typed.delay("a", 1)
    settle_marks(app)
    age(locks, typed.lock_key("a"), 61)
    typed.delay("a", 2)
    assert queued()[1]["eta"] is None


def test_first_call_of_a_quiet_key_is_sent_at_once(app, queued):
    """And says so; the next one waits."""
    leading = app.tasks["leading"]
    leading.delay("a", 1)
    leading.delay("a", 2)
    first, second = queued()
    assert (first["eta"], first["singleton"]["leads"]) == (None, True)
    assert seconds_off(second) > 0
    assert "leads" not in second["singleton"]


def test_debounced_call_waits_in_the_broker_where_that_can_be(app, queued, monkeypatch):
    """On AMQP its message says until when, and has no eta: its worker has it wait in queues."""
    monkeypatch.setattr(marking, "waits_in_broker", lambda app: True)
    before = time.time()
    app.tasks["typed"].delay("a", 1)
    (headers,) = queued()
    assert headers["eta"] is None
    assert before + 4 < headers["singleton"]["due"] < time.time() + 6


def test_debounced_call_has_a_plain_countdown_without_redis(apps, broker, queued):
    """It waits all the same."""
    apps(setnx_url=NOWHERE).tasks["typed"].delay("a", 1)
    assert seconds_off(queued()[0]) == pytest.approx(5, abs=2)


# Workers.


@pytest.fixture
def saves(tasks) -> Any:
    """The tasks that the worker runs, with clean databases."""
    from tests import newestapp

    return newestapp


def queue_up(task: Any, name: str, *versions: int) -> list[Any]:
    """Calls in a queue that no worker reads, in this order."""
    results = [task.apply_async([name, version], queue="parked") for version in versions]
    settle_marks(task.app)
    return results


def is_superseded(result: Any, by: Any) -> bool:
    """Whether a call has ended as one that a newer one has replaced."""
    ended = result.get(timeout=60)
    return is_skipped(ended) and superseded_by(ended) == by.id


def test_last_of_five_saves_runs(saves, journal, parked, name):
    """The others end as skipped, and name it; no body of theirs has started."""
    name = name[6:]
    *older, last = queue_up(saves.save, name, *range(5))
    for _message in range(5):
        parked.move()
    assert last.get(timeout=60) == 4
    assert all(is_superseded(result, last) for result in older)
    assert [entry["task_id"] for entry in journal.entries(what="start")] == [last.id]
    for result in older:
        journal.wait_for("postrun", task_id=result.id)
        assert journal.words(result.id) == ["superseded", "postrun"]
    assert {entry["superseded_by"] for entry in journal.entries(what="superseded")} == {last.id}


def test_waiting_call_ends_when_a_newer_one_waits(saves, journal, gates, name):
    """Whoever waits for its result need not wait for the run: the newer one has its place in line."""
    key = name[6:]
    first = journal.reached("start", saves.save.delay(key, 1, name))
    older = journal.reached("postrun", saves.save.delay(key, 2))
    newer = journal.reached("waiting", saves.save.delay(key, 3))
    assert is_superseded(older, newer)
    assert not first.ready()
    (waits,) = journal.entries(what="waiting", task_id=newer.id)
    assert waits["place"] == 1
    gates(name)
    assert (first.get(timeout=60), newer.get(timeout=60)) == (1, 3)
    journal.wait_for("postrun", count=2, task_id=newer.id)
    assert "woken" in journal.words(newer.id)
    wait_until(lambda: journal.words(older.id)[-2:] == ["superseded", "postrun"], "its end")


def test_older_message_that_comes_after_a_newer_start_is_superseded(saves, journal, parked, name):
    """Whatever priorities and redeliveries do to the order."""
    name = name[6:]
    older, newer = queue_up(saves.save, name, 1, 2)
    messages: list[dict[str, Any]] = []
    late = json.loads(journal._client.rpop("parked"))
    parked.move(messages.append)
    assert newer.get(timeout=60) == 2
    late["properties"]["delivery_info"]["routing_key"] = "celery"
    parked.send(late)
    assert is_superseded(older, newer)


def test_retry_is_superseded_by_a_newer_call(saves, journal, parked, locks, name):
    """It has the generation of its first attempt."""
    name = name[6:]
    first = journal.reached("released", saves.flaky.delay(name, 1))
    (retry,) = [json.loads(text)["headers"]["singleton"] for text in journal._client.lrange("parked", 0, -1)]
    assert retry["generation"] > 0
    second = saves.flaky.apply_async([name, 2], queue="parked")
    settle_marks(saves.app)
    parked.move()
    assert is_superseded(first, second)


def test_retry_of_the_newest_call_runs(saves, journal, parked, name):
    """It replaces nobody anew, and nobody replaces it."""
    name = name[6:]
    result = journal.reached("released", saves.flaky.delay(name, 1))
    parked.move()
    assert result.get(timeout=60) == 1
    assert len(journal.entries(what="start", task_id=result.id)) == 2


def test_lock_held_for_a_superseded_retry_is_given_back(saves, journal, parked, locks, name):
    """The newer call has waited for it, and runs."""
    name = name[6:]
    first = saves.holding.delay(name, 1)
    wait_until(lambda: len(parked), "its retry")
    second = saves.holding.delay(name, 2)
    journal.wait_for("waiting", task_id=second.id)
    settle_marks(saves.app)
    parked.move()
    assert is_superseded(first, second)
    journal.wait_for("start", task_id=second.id)


def test_revoked_newest_call_counts_as_started(saves, journal, parked, locks, worker, name):
    """The older one does not run in its stead, and an equal call is no duplicate of it."""
    name = name[6:]
    older, last = queue_up(saves.save, name, 1, 2)
    revoke(saves.app, last, worker)
    parked.move()
    parked.move()
    assert is_superseded(older, last)
    wait_until(lambda: look(locks, saves.save.lock_key(name)).newest is None, "its end is noted")
    equal = saves.save.delay(name, 2)
    assert (equal.deduplicated, equal.get(timeout=60)) == (False, 2)


def test_call_that_comes_back_from_its_dead_worker_runs(saves, journal, gates, start_worker, name):
    """kill -9 in its body, acknowledged late: its own start does not supersede it."""
    doomed = start_worker(concurrency=1, queues="doomed", conf={"include": ["tests.newestapp"]})
    result = journal.reached("start", saves.late.apply_async([name, 1, name], queue="doomed"))
    doomed.kill()
    redeliver(journal._client, unacknowledged(journal._client, "doomed"), to="celery")
    journal.wait_for("start", count=2, task_id=result.id)
    gates(name, 2)
    assert result.get(timeout=60) == 1


def test_redelivered_call_is_superseded_by_one_that_took_over(saves, journal, gates, start_worker, name):
    """Its worker has died, and a newer call has run meanwhile."""
    doomed = start_worker(concurrency=1, queues="doomed", conf={"include": ["tests.newestapp"]})
    key = name[6:]
    older = journal.reached("start", saves.late.apply_async([key, 1, name], queue="doomed"))
    doomed.kill()
    newer = saves.late.delay(key, 2)
    assert newer.get(timeout=60) == 2
    redeliver(journal._client, unacknowledged(journal._client, "doomed"), to="celery")
    assert is_superseded(older, newer)
    assert len(journal.entries(what="start", task_id=older.id)) == 1


def test_superseded_call_has_the_skip_result_of_its_task(saves, parked, name):
    """As any call that is skipped."""
    older, last = queue_up(saves.telling, name[6:], 1, 2)
    parked.move()
    parked.move()
    assert (older.get(timeout=60), last.get(timeout=60)) == ("older", 2)


def test_call_by_name_runs_beside_the_newest(saves, journal, parked, name):
    """Its message has no header: it is not superseded, and supersedes nobody."""
    name = name[6:]
    (newest_call,) = queue_up(saves.save, name, 1)
    assert saves.app.send_task(saves.save.name, [name, 2]).get(timeout=60) == 2
    parked.move()
    assert newest_call.get(timeout=60) == 1


def test_message_that_comes_twice_while_its_call_runs_waits_for_itself(saves, journal, gates, parked, name):
    """Its own start is no newer one."""
    result = saves.save.apply_async([name, 1, name], queue="parked")
    copies: list[dict[str, Any]] = []
    parked.move(lambda message: copies.append(json.loads(json.dumps(message))))
    journal.wait_for("start", task_id=result.id)
    copies[0]["headers"]["redelivered"] = True
    copies[0]["properties"]["delivery_info"]["redelivered"] = True
    parked.send(copies[0])
    journal.wait_for("conflict", task_id=result.id)
    gates(name, 2)
    assert result.get(timeout=60) == 1
    assert journal.entries(what="superseded") == []


def test_last_of_a_burst_runs_once_it_is_quiet(saves, journal, name):
    """Debounced on a broker with countdowns: one body, with the newest arguments."""
    *older, last = [saves.typed.delay(name[6:], version) for version in range(4)]
    assert last.get(timeout=60) == 3
    assert all(is_superseded(result, last) for result in older)
    assert [entry["task_id"] for entry in journal.entries(what="start")] == [last.id]
