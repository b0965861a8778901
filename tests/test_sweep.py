"""What a worker's sweep does, without the worker: each round is a call."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from celery_setnx import LockRefused, LockUnavailable, SetnxLock, SingletonTask
from celery_setnx.call import wake
from celery_setnx.call.back import Message
from celery_setnx.call.broker import broker_of
from celery_setnx.call.message import Call
from celery_setnx.call.wake import lines_of
from celery_setnx.configured import configured
from celery_setnx.connection import client_for
from celery_setnx.lock.line import LineEntry, claim, note_due, park, rouse, who_waits
from celery_setnx.lock.live import NewTerm, change_task_terms
from celery_setnx.lock.names import end_name, key_name, line_names
from celery_setnx.lock.record import ORIGINAL, ServeReply
from celery_setnx.lock.scripts import replies_to
from celery_setnx.run import courier, revoked, sweep
from celery_setnx.run.courier import ParkedCall
from celery_setnx.run.looks import SweepReport
from celery_setnx.run.revoked import RevokedLately
from celery_setnx.run.sweep import Sweep
from examples.embedded import EmbeddedServer
from tests.harness import due_set, end_looks, server_us, wait_until


class Courier:
    """A courier that a worker holds."""

    def __init__(self, order: ParkedCall) -> None:
        self.parked = order
        self.may_be_woken = order.call.task != "gone"
        self.is_stamped = True


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server that no worker of another test uses: its commands are counted."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def app(alone, server, locks) -> Celery:
    """An app with two guarded tasks, one of which has a rate."""
    app = Celery("swept", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"lease": 60})
    def t() -> None: ...

    @app.task(base=SingletonTask, shared=False, name="paced", singleton={"rate": (5, 60)})
    def paced() -> None: ...

    app.finalize()
    return app


@pytest.fixture
def swept(app, monkeypatch) -> Iterator[Sweep]:
    """The sweep of a worker of the app, whose thread has not been started; whom it wakes is noted."""
    step = Sweep(SimpleNamespace(app=app))
    step._client, step._state = client_for(app), configured(app)
    step.woken = []
    monkeypatch.setattr(wake, "wake", lambda app, heir, key: step.woken.append(heir and heir.task_id))
    yield step
    end_looks(step)


def wait(locks: Any, key: str, task_id: str = "id-1") -> None:
    """A call is in the line of a lock that nobody has."""
    park(locks, LineEntry(key, task_id, 0, 600), copy=ORIGINAL, since=10.0, call="c")


def packed(app: Celery, call: Call, args: Any = (), *, broker: str | None = None) -> str:
    """What a call is woken with that came from the app's broker, or from another."""
    headers = {"task": call.task, "id": call.task_id}
    message = Message(
        headers, {}, "celery", (args, {}, {}), "application/json", broker=broker or broker_of(app)
    )
    return message.packed(app, call)


def due(app: Celery, locks: Any, key: str, task: str = "t") -> None:
    """It is time to look at the line of a lock."""
    note_due(locks, lines_of(app), task, key, within=0)


def test_only_lines_of_tasks_that_the_worker_has_are_swept(app, locks, swept):
    """The others are for another worker, which can send their calls."""
    for task in ("t", "unknown"):
        wait(locks, key_name("t", task, ""), task)
        due(app, locks, key_name("t", task, ""), task)
    assert swept.sweep(app).lines == 1
    assert swept.woken == ["t"]
    assert locks.zscore(due_set(app, "unknown"), key_name("t", "unknown", "")) is not None


def test_sweep_costs_the_same_whatever_lines_of_other_tasks_are_due(app, locks, swept):
    """Those of a task whose workers are all down held up everybody: for 100,000 the server stood still."""

    def commands() -> dict[str, int]:
        locks.config_resetstat()
        swept.sweep(app)
        found = locks.info("commandstats")
        return {name: told["calls"] for name, told in found.items() if "_z" in name}

    swept._unswept._next = float("inf")
    before = commands()
    names = [key_name("t", "unknown", f"{number:032x}") for number in range(3000)]
    locks.zadd(due_set(app, "unknown"), dict.fromkeys(names, 1_000_000))
    locks.expire(due_set(app, "unknown"), 60)
    assert commands() == before == {}


def test_worker_of_many_idle_tasks_asks_for_many_at_once(app, locks, swept):
    """Sets that are not there cost next to nothing: with 300 tasks the others' locks need not wait for it."""

    def idle() -> None: ...

    for number in range(300):
        app.task(base=SingletonTask, shared=False, name=f"idle{number}")(idle)
    key = app.tasks["idle7"].lock_key()
    wait(locks, key)
    due(app, locks, key, "idle7")
    locks.config_resetstat()
    assert swept.sweep(app).lines == 1
    found = locks.info("commandstats")
    assert found["cmdstat_exists"]["calls"] < 25
    assert found["cmdstat_zrangebyscore"]["calls"] < 25
    assert swept.woken == ["id-1"]


def test_lines_of_no_task_are_always_found_last(app, locks):
    """A task with hundreds of lines that are due again and again would hold up those behind it."""
    for task in ("t", "paced"):
        for number in range(100):
            due(app, locks, key_name("t", task, f"{number:032x}"), task)

    def first() -> str:
        for name in due_set(app, "t"), due_set(app, "paced"):
            locks.zadd(name, dict.fromkeys(locks.zrange(name, 0, -1), 1_000_000))
        return claim(locks, lines_of(app), ["t", "paced"], ["paced"]).lines[0][0]

    assert {first() for _ in range(100)} == {"t", "paced"}


def test_server_that_forbids_to_expire_keys_is_left_without_lines(app, locks, limited):
    """Nothing is noted that would stay for ever."""
    client = redis.Redis.from_url(limited("~*", "+@all", "-pexpire"), decode_responses=True)
    with pytest.raises(LockRefused, match=r"(?i)pexpire"):
        note_due(client, lines_of(app), "t", "t:{t}", within=0.0)
    assert not locks.exists(due_set(app, "t"))
    client.close()


def test_line_that_cannot_be_served_stops_no_other(app, locks, swept, foreign_keys):
    """Another program's record is in the place of one's lock: that line is looked at again, like all."""
    bad, good = key_name("t", "t", "0" * 32), key_name("t", "t", "1" * 32)
    locks.set(f"{bad}:holder", "theirs")
    foreign_keys.add(f"{bad}:holder")
    for key in (bad, good):
        wait(locks, key)
        due(app, locks, key)
    swept.sweep(app)
    assert swept.woken == ["id-1"]
    assert locks.zcard(due_set(app, "t")) == 2


@pytest.mark.parametrize(("told_s", "noted_s"), [(0.5, 10.0), (10.0, 0.5), (None, 0.5)])
def test_line_is_due_when_the_first_of_two_says(app, locks, swept, monkeypatch, told_s, noted_s):
    """Its sweeper, or a call that has noted it meanwhile; the sweeper comes for it then, and not earlier."""
    key = key_name("t", "paced", "")

    def served(*_args: Any, **_options: Any) -> ServeReply:
        note_due(locks, lines_of(app), "paced", key, within=noted_s)
        return ServeReply(None, None, told_s)

    monkeypatch.setattr(sweep, "let_the_line_go_on", served)
    due(app, locks, key, "paced")
    before = server_us(locks)
    found = swept.sweep(app)
    at = locks.zscore(due_set(app, "paced"), key)
    left_s, at_most_s = ((at - now) / 1e6 for now in (server_us(locks), before))
    assert left_s <= 0.5
    assert left_s - 0.001 <= found.next_s <= at_most_s + 0.001


def test_one_worker_looks_at_a_line_that_is_due_soon(app, locks):
    """The one that has noted it, until another notes a sooner time; and who asks for a timed task."""
    key, lines = key_name("t", "t", ""), lines_of(app)
    assert note_due(locks, lines, "t", key, within=1).look_in_s == 1.0
    assert note_due(locks, lines, "t", key, within=1.5).look_in_s is None
    assert note_due(locks, lines, "t", key, within=0.3).look_in_s == 0.3
    assert claim(locks, lines, ["t"]).next_s is None
    assert claim(locks, lines, ["t"], ["t"]).next_s == pytest.approx(0.3, abs=0.3)


def test_more_lines_than_one_round_takes_are_known_to_be_more(app, locks, swept):
    """After an outage of all workers there may be thousands: no pause is made between rounds."""
    for number in range(150):
        key = key_name("t", "t", f"{number:032x}")
        wait(locks, key, f"id-{number}")
        due(app, locks, key)
    assert [swept.sweep(app).are_more for _ in range(2)] == [True, False]
    # Some twice, where a round takes as long as a lock is kept for whom it wakes.
    assert set(swept.woken) == {f"id-{number}" for number in range(150)}


def test_lost_data_is_noticed_and_calls_of_couriers_here_are_put_back(app, locks, swept, monkeypatch, caplog):
    """Half a lease later, once; one that cannot be understood stops no other."""
    now = [0.0]
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: now[0]))
    key = app.tasks["t"].lock_key()
    holder = SetnxLock(locks, key, line=True, lease=600)
    holder.acquire()
    sent = []
    monkeypatch.setattr(courier, "send_again", lambda app, order: sent.append(order.call.task_id))
    waiting: Any = [("id-1", "t", "?"), ("id-2", "gone", 10.0), ("id-3", "t", 10.0)]
    calls = [Call(task, task_id, key=key, since=since) for task_id, task, since in waiting]
    requests = [
        Courier(ParkedCall(call, packed(app, call), None, 60.0, 60.0, 600.0, "before")) for call in calls
    ]
    monkeypatch.setattr(sweep, "_couriers_here", lambda _app: requests)
    swept.sweep(app)
    assert sent == ["id-2"]  # of a task that is not known here: to be thrown away
    assert locks.zrange(line_names(key)[0], 0, -1) == ["id-2"]
    now[0] = 30.0
    swept.sweep(app)
    assert locks.zrange(line_names(key)[0], 0, -1) == ["id-2", "id-3"]
    assert "t[id-1] is left to its courier" in caplog.text
    locks.zrem(line_names(key)[0], "id-3")
    swept.sweep(app)
    assert locks.zrange(line_names(key)[0], 0, -1) == ["id-2"]
    assert sent == ["id-2"]


def test_outage_of_the_lock_server_is_said_once(app, swept, monkeypatch, caplog):
    """And not every two seconds."""
    rounds = iter([int, int, int, swept._stopped.set])
    monkeypatch.setattr(sweep, "SWEEP_S", 0.0)
    monkeypatch.setattr(swept._roused, "wait", lambda _seconds: next(rounds)())
    swept._client = client_for(app_without_server())
    while swept._turn(app):
        pass
    assert caplog.text.count("Lines are not swept, so waiting calls may be late") == 1


def test_terms_of_tasks_that_may_not_be_read_are_said_once(app, swept, limited, caplog):
    """An operator would take a task for paused that is not."""
    app.conf.setnx_url = limited("~*", "+@all", "-hgetall")
    swept._client = client_for(app)
    for _ in range(2):
        swept._read_terms(app)
    assert caplog.text.count("A pause of a task is not heeded here") == 1


def test_lines_of_a_task_that_is_slowed_down_are_looked_at_to_the_moment(app, locks, swept):
    """As of one with a rate of its own: at 5/s, half of the starts would come with the sweeps."""
    assert not swept._is_timed("t")
    change_task_terms(locks, "t", "t", NewTerm("rate", 600, "5/1000000"))
    swept._read_terms(app)
    assert swept._is_timed("t")


def test_worker_that_starts_in_a_pause_has_no_line_looked_at(app, locks, swept):
    """Nothing has changed for those that wait; when it has, they are looked at."""
    wait(locks, key := key_name("t", "t", ""))
    note_due(locks, lines_of(app), "t", key, within=600.0)
    change_task_terms(locks, "t", "t", NewTerm("pause", 600))
    swept._read_terms(app, changes=False)
    swept._read_terms(app)
    assert claim(locks, lines_of(app), ["t"]).lines == []
    change_task_terms(locks, "t", "t", NewTerm("pause", 0))
    swept._read_terms(app)
    assert claim(locks, lines_of(app), ["t"]).lines == [("t", key)]


def test_all_lines_of_a_scope_are_looked_at_when_its_terms_change(app, locks, swept):
    """However many there are, and whoever else shares the task: those of other scopes are not due."""
    keys = {
        scope: [key_name("t", scope, f"{number:x}") for number in range(1500)] for scope in ("t", "other")
    }
    lines = due_set(app, "t")
    later = locks.time()[0] * 1e6 + 600e6
    locks.zadd(lines, {key: later for of in keys.values() for key in of})
    locks.expire(lines, 600)
    rouse(locks, lines_of(app), ["t", "none"], "t", "t")
    assert sorted(locks.zrangebyscore(lines, 0, later - 1)) == sorted(keys["t"])


def test_lines_of_living_nodes_are_served_though_another_is_away(app, locks, swept, monkeypatch, caplog):
    """And that one's outage is said."""
    key = key_name("t", "t", "")
    wait(locks, key)
    due(app, locks, key)
    error = LockUnavailable("t:lines:0:{7}", "TimeoutError")
    monkeypatch.setattr(sweep, "claim", lambda *args: claim(*args)._replace(error=error))
    swept._wait_s = 0.0
    assert swept._turn(app)
    assert swept.woken == ["id-1"]
    assert "Lines are not swept, so waiting calls may be late" in caplog.text
    assert swept._look(app).error is error  # which ends no timed look


def test_lines_are_swept_though_replies_are_slow(app, locks, swept, proxy, monkeypatch):
    """A sweep that times out waits longer the next time, and gives up soon again when replies are fast."""
    monkeypatch.setattr(sweep, "_TIMEOUT_S", 0.05)
    swept._timeout_s, swept._state = 0.05, []
    app.conf.setnx_url = proxy.url(1)
    key = key_name("t", "t", "")
    wait(locks, key)
    due(app, locks, key)

    def turn() -> Any:
        swept._wait_s = 0.0
        return swept._turn(app)

    with proxy.fault("delay_reply", seconds=0.12, times=1000):
        wait_until(lambda: turn() and swept.woken == ["id-1"], "the line goes on")
    wait_until(lambda: turn() and swept._timeout_s == 0.05, "it gives up soon again")


def test_couriers_are_looked_after_though_lines_are_always_due(app, swept, monkeypatch):
    """The line of a paced task may be due every moment: what else there is to do is done as ever."""
    now, usual_at = [0.0], []

    def wait(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 20:
            swept._stopped.set()

    def one_line(_app: Celery, *, is_early: bool = False, **_more: Any) -> SweepReport:
        usual_at.extend([] if is_early else [now[0]])
        return SweepReport(lines=1, next_s=0.05)

    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(swept._roused, "wait", wait)
    monkeypatch.setattr(swept, "sweep", one_line)
    while swept._turn(app):
        pass
    assert 10 <= len(usual_at) <= 13
    assert all(1.5 < later - sooner < 2.1 for sooner, later in pairwise(usual_at))


def app_without_server() -> Celery:
    app = Celery("nowhere", broker="memory://", set_as_current=False)
    app.conf.setnx_url = "redis://127.0.0.1:1/0"
    return app


@pytest.mark.parametrize("odd", [None, True, "\ud800", 7])
def test_odd_id_among_the_revoked_stops_no_line(app, locks, swept, monkeypatch, odd):
    """Whoever may revoke may name anything, and a message without an id that has expired is revoked too."""
    monkeypatch.setattr(revoked, "revoked_tasks", {odd})
    key = app.tasks["t"].lock_key()
    wait(locks, key)
    due(app, locks, key)
    swept.sweep(app)
    assert swept.woken == ["id-1"]


def test_sweep_goes_where_the_settings_say_though_they_have_come_late(app, swept, monkeypatch):
    """It has a client of its own, and reads the lines by the prefix of now."""
    before = swept._client
    monkeypatch.setattr(swept._roused, "wait", lambda _seconds: False)
    assert swept._turn(app)
    assert swept._client is before
    app.conf.setnx_url = app.conf.setnx_url.replace("/1", "/2")
    assert swept._turn(app)
    assert swept._client.connection_pool.connection_kwargs["db"] == 2


class Revoked(set[str]):
    """The revoked ids of a worker, which counts how often they are gathered."""

    gathered = 0

    def __iter__(self) -> Iterator[str]:
        self.gathered += 1
        return super().__iter__()


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time of those who ask about revoked calls."""
    now = [100.0]
    monkeypatch.setattr(revoked, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def ended(monkeypatch) -> list[str]:
    """The ids of the calls whose waiting a sweep ends."""
    ended: list[str] = []
    monkeypatch.setattr(sweep, "end_wait", lambda _app, _key, task_id, _client: ended.append(task_id))
    return ended


def test_revoked_calls_are_gathered_once_for_all_lines(app, locks, swept, monkeypatch, now, ended):
    """There may be thousands of them, and hundreds of lines."""
    told = Revoked({"id-1"})
    monkeypatch.setattr(revoked, "revoked_tasks", told)
    for digit in "01":
        key = key_name("t", "t", digit * 32)
        wait(locks, key)
        due(app, locks, key)
    assert swept.sweep(app).lines == 2
    assert (told.gathered, ended) == (1, ["id-1"] * 2)


@pytest.mark.parametrize(("waiting", "asks"), [(3, {"zcount": 1, "zrange": 1}), (0, {"zcount": 1})])
def test_revoked_calls_cost_the_server_what_waits_in_the_line(
    app, locks, swept, monkeypatch, ended, waiting, asks
):
    """And not a question for each id: a worker keeps 50,000 of them."""
    key = app.tasks["t"].lock_key()
    told = {f"revoked-{number}" for number in range(10_000)}
    monkeypatch.setattr(revoked, "revoked_tasks", told)
    for number in range(waiting):
        wait(locks, key, f"revoked-{number}" if number else "another")
    locks.config_resetstat()
    before = bytes_to(locks)
    assert set(who_waits(swept._client, key, told)) == {f"revoked-{number}" for number in range(1, waiting)}
    found = locks.info("commandstats")
    assert {name: found[f"cmdstat_{name}"]["calls"] for name in asks} == asks
    assert not {"cmdstat_hget", "cmdstat_hmget"} & found.keys()
    due(app, locks, key)
    assert swept.sweep(app).lines == 1
    assert set(ended) == {f"revoked-{number}" for number in range(1, waiting)}
    assert bytes_to(locks) - before < 60_000  # with all scripts; it was a megabyte


def bytes_to(locks: Any) -> int:
    """Bytes that clients have sent to the server."""
    return int(locks.info("stats")["total_net_input_bytes"])


def test_one_revoked_call_costs_one_question_however_long_the_line_is(locks, monkeypatch):
    """Nobody reads a line of thousands for it."""
    asked: list[list[str]] = []

    def noted(client: redis.Redis, commands: list[tuple[str, ...]]) -> list[Any]:
        asked.append([command for command, *_ in commands])
        return replies_to(client, commands)

    monkeypatch.setattr("celery_setnx.lock.line.replies_to", noted)
    line, calls = line_names("t:{t}")
    names = [f"id-{number}" for number in range(3000)]
    locks.zadd(line, dict.fromkeys(names, 10))
    locks.hset(calls, mapping=dict.fromkeys(names, "0|10|c"))
    for name in (line, calls):
        locks.expire(name, 60)
    assert who_waits(locks, "t:{t}", {"id-2999", "gone"}) == ["id-2999"]
    assert set(who_waits(locks, "t:{t}", {*names[::2], "gone"})) == set(names[::2])
    assert asked == [["HGET"] * 2, ["ZRANGE"] * 3]


def test_line_that_is_looked_at_ten_times_a_second_is_asked_about_revoked_calls_every_two(
    app, locks, swept, monkeypatch, now, ended
):
    """One that was revoked meanwhile ends in the next round, and every other line is asked in its own."""
    told = Revoked({"id-1"})
    monkeypatch.setattr(revoked, "revoked_tasks", told)
    key = app.tasks["paced"].lock_key()
    SetnxLock(locks, key, line=True, lease=600).acquire()
    for number in (1, 2, 3):
        wait(locks, key, f"id-{number}")
    found = []
    for number in range(40):
        now[0] = 100.0 + number / 10
        if number == 5:
            told.add("id-2")
        due(app, locks, key, "paced")
        swept._look(app)
        found += [(number, task_id) for task_id in ended]
        ended.clear()
    assert sorted(found) == [(0, "id-1"), (20, "id-1"), (20, "id-2")]
    assert told.gathered == 2


@pytest.mark.parametrize("task", ["t", "paced"])
def test_lines_in_which_nobody_waits_leave_nothing_behind(app, locks, swept, monkeypatch, now, task):
    """Neither on the server nor in the worker, which may see 100,000 keys."""
    monkeypatch.setattr(revoked, "revoked_tasks", {"id-1"})
    keys = [key_name("t", task, f"{number:032x}") for number in range(250)]
    for key in keys:
        due(app, locks, key, task)
        due(app, locks, end_name(key, "id-2"), task)
    while (swept._look(app) if task == "paced" else swept.sweep(app)).lines:
        pass
    assert not locks.exists(due_set(app, task))
    assert swept._left_by_looks == {}
    now[0] += 2
    swept._revoked.to_ask("another")
    assert swept._revoked._asked == {"another"}


def test_lines_are_forgotten_that_were_asked_about_revoked_calls(monkeypatch, now):
    """A worker may see 100,000 keys in an hour; and none is known where nothing is revoked."""
    told = {"id-1"}
    monkeypatch.setattr(revoked, "revoked_tasks", told)
    lately, known = RevokedLately(), []
    for number in range(100_000):
        now[0] += 0.01
        lately.to_ask(f"t:{{t:{number:032x}}}")
        known.append(len(lately._asked))
    assert 0 < max(known) <= 201
    assert known[-1] == 0
