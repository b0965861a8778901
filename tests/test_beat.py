"""The hot-standby scheduler in one process, on a real server; the deaths of real beats are in tests/beat."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import BaseSchedule, crontab, schedstate, schedule

from celery_setnx import LockRefused, OptionError, SetnxLock, signals
from celery_setnx.beat import HotStandbyScheduler, _lateness, _recall, _tick
from celery_setnx.lock.process import identity
from tests import forks
from tests.harness import server_us, wait_until

pytestmark = pytest.mark.slow

LOCK = "t:{celery.beat:clock}"
ENTRIES = f"{LOCK}:entries"
DAY_S = 86_400


class Recording(Scheduler):
    """Remembers what it would have sent, and that it was closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[str] = []
        self.before_sending: Callable[[], object] = list
        super().__init__(*args, **kwargs)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        self.before_sending()
        self.sent.append(entry.name)

    def close(self) -> None:
        self.sent.append("closed")
        super().close()


def until(scheduler: Any, condition: Callable[[], object]) -> None:
    """Let it tick until then."""
    wait_until(lambda: scheduler.tick() is not None and condition(), f"more of {scheduler.sent}")


def ticks(scheduler: Any, times: int) -> list[str]:
    """What it has sent after so many ticks."""
    for _ in range(times):
        scheduler.tick()
    return list(scheduler.sent)


def remembered(locks: redis.Redis, entry: str) -> list[int]:
    """Last run (us), runs, missed."""
    return [int(number) for number in str(locks.hget(ENTRIES, entry)).split()]


def remember(locks: redis.Redis, entry: str, *numbers: int) -> None:
    locks.hset(ENTRIES, entry, " ".join(map(str, numbers)))
    locks.expire(ENTRIES, 60)


@pytest.fixture
def beat(server, locks) -> Iterator[Callable[..., Any]]:
    """Makes schedulers, each of an app of its own as in a process of its own."""
    made: list[Any] = []

    def beat(entries: dict[str, Any] | None = None, *, lazy: bool = False, **conf: Any) -> Any:
        app = Celery("clock", broker="memory://", set_as_current=False)
        defaults = {"setnx_url": server.url(1), "setnx_prefix": "t", "setnx_beat_lease": 2}
        scheduler = f"{__name__}:Recording"
        app.conf.update({**defaults, "setnx_beat_scheduler": scheduler, "result_expires": None, **conf})
        app.conf.beat_schedule = {
            name: entry if isinstance(entry, dict) else {"task": name, "schedule": entry}
            for name, entry in (entries or {}).items()
        }
        made.append(HotStandbyScheduler(app, lazy=lazy))
        return made[-1]

    yield beat
    for scheduler in made:
        scheduler.close()


def overdue(every_s: float, late_s: float, **entry: Any) -> dict[str, Any]:
    """An entry that was due so long ago."""
    last = datetime.now(timezone.utc) - timedelta(seconds=every_s + late_s)
    return {"task": "t", "schedule": every_s, "last_run_at": last, **entry}


def test_one_of_two_schedulers_sends(beat):
    """Both look all the time; the standby sends nothing, and says who leads."""
    leader, standby = beat({"a": 0.05}), beat({"a": 0.05})

    def both_tick() -> bool:
        leader.tick()
        standby.tick()
        return len(leader.sent) > 2

    wait_until(both_tick, "ticks")
    assert standby.sent == []
    assert standby._said.startswith("Stands by; the leader is celery beat[clock] on beat@")


@pytest.mark.parametrize(
    ("process", "says"),
    [
        ({}, "this very process, to which an answer of Redis was lost. Its lease ends the lead."),
        (
            {"boot": "another", "start": 0},
            "most likely this one, before it was started again. Its lease ends",
        ),
        ({"host": "other"}, ""),
    ],
    ids=["itself", "its former self", "another"],
)
def test_standby_says_when_it_stands_by_for_itself(beat, locks, process, says):
    """Nobody is to look for another beat where there is none."""
    standby = beat({"a": 60})
    info = {**identity(), **process, "task": "celery beat", "task_id": "clock", "worker": "beat@here"}
    assert SetnxLock(locks, standby._lock.name, lease=600, info=info).acquire().acquired
    standby.tick()
    leader, _, more = standby._said.partition(" UTC")
    assert leader.startswith("Stands by; the leader is celery beat[clock] on beat@here")
    assert more.startswith(f": {says}" if says else ".")


def test_closing_the_leader_lets_another_lead_at_once(beat, locks):
    """Its lock is given back, not left to its lease. Closing twice, as on SIGTERM, is harmless."""
    leader, standby = beat({"a": 0.05}, setnx_beat_lease=60), beat({"a": 0.05}, setnx_beat_lease=60)
    leader.tick()
    leader.close()
    assert SetnxLock(locks, LOCK).holder() is None
    until(standby, lambda: standby.sent)
    leader.close()
    assert standby._leads()


def test_leader_that_hangs_loses_the_lead(beat):
    """Nothing but its own loop renews it: one that is stuck in its broker keeps no other from sending."""
    leader, standby = beat({"a": 0.05}, setnx_beat_lease=1), beat({"a": 0.05}, setnx_beat_lease=1)
    until(leader, lambda: leader.sent)
    sent = len(leader.sent)
    until(standby, lambda: standby.sent)
    leader.tick()
    assert len(leader.sent) == sent


class Dying:
    """Does something when it is forgotten, as an AsyncResult tells its backend."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


SIGNAL_AMID = {"swallowed": (Dying, ["a", "closed"]), "raised": (lambda act: act(), ["closed"])}


@pytest.mark.parametrize(("how", "sent"), SIGNAL_AMID.values(), ids=SIGNAL_AMID)
def test_signal_amid_a_send_ends_the_loop(beat, locks, capfd, how, sent):
    """Though Python swallows what a `__del__` raises: nothing is closed under it, and no tick begins."""
    leader = beat({"a": overdue(3600, 5)}, setnx_beat_lease=600)

    def handler() -> None:  # as Celery's handler of SIGTERM and SIGINT
        leader.close()
        raise SystemExit

    leader.before_sending = lambda: how(handler)
    with pytest.raises(SystemExit):
        for _ in range(2):
            leader.tick()
    leader.close()
    assert leader.sent == sent
    assert SetnxLock(locks, LOCK).holder() is None
    err = capfd.readouterr().err  # a Celery that logs there may tell of the late tick
    assert [word for word in ("Exception ignored", "Traceback") if word in err] == []


def test_tick_is_noted_with_the_number_of_runs(beat, locks):
    """The entry's last run in Redis is the one that the scheduler goes on with, on the server's clock."""
    leader = beat({"a": 0.05})
    until(leader, lambda: len(leader.sent) == 3)
    run, runs, missed = remembered(locks, "a")
    assert (runs, missed) == (3, 0)
    assert 0 <= server_us(locks) - run < 5_000_000
    last = leader.schedule["a"].last_run_at
    assert (last - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1) == run


def test_new_leader_goes_on_where_the_dead_one_ended(beat):
    """Its own last runs are older; what has been sent is not sent again."""
    dead, new = beat({"a": overdue(3600, 5)}), beat({"a": overdue(3600, 5)})
    assert ticks(dead, 1) == ["a"]
    dead.close()
    assert ticks(new, 5) == []
    assert new.schedule["a"].last_run_at == dead.schedule["a"].last_run_at
    assert new.schedule["a"].total_run_count == 1


def test_entry_that_ran_meanwhile_is_not_sent_and_says_so(beat, locks, caplog):
    """The note in Redis is newer than the run because of which the entry is due."""
    leader = beat({"a": overdue(3600, 5)})
    assert leader._takes_the_lead()
    now = server_us(locks)
    remember(locks, "a", now, 7, 0)
    assert ticks(leader, 3) == []
    assert remembered(locks, "a") == [now, 7, 0]
    assert caplog.text.count("beat: a is not sent again: it was sent at ") == 1


def test_leader_whose_redis_forgets_goes_on_from_its_own_last_runs(beat, locks):
    """It leads again, and Redis knows from it when the entries ran."""
    leader = beat({"a": overdue(3600, 5)}, setnx_beat_lease=1)
    leader.tick()
    noted = remembered(locks, "a")
    locks.flushdb()
    until(leader, lambda: locks.exists(ENTRIES))
    assert remembered(locks, "a")[0] == noted[0]
    assert ticks(leader, 1) == ["a"]


def test_entries_of_one_leader_are_unknown_to_the_other(beat):
    """Each leader sends what its own schedule has; a shared entry goes on."""
    one, two = beat({"both": 0.05, "one": 0.05}), beat({"both": 0.05, "two": 0.05})
    until(one, lambda: {"both", "one"} <= {*one.sent})
    one.close()
    until(two, lambda: {"both", "two"} <= {*two.sent})
    assert two.schedule["both"].total_run_count > two.schedule["two"].total_run_count
    assert "one" not in two.sent


def test_entry_that_comes_back_after_its_removal_begins_anew(beat, locks):
    """As in Celery's own schedule file: a leader that does not have it forgets it."""
    before = beat({"a": overdue(DAY_S, 5)})
    before.tick()
    before.close()
    without = beat({"b": 1})
    without.tick()
    without.close()
    assert locks.hkeys(ENTRIES) == ["b"]
    again = beat({"a": DAY_S})
    assert ticks(again, 1) == []
    assert abs(remembered(locks, "a")[0] - server_us(locks)) < 5_000_000


def test_late_tick_is_logged_signalled_and_counted(beat, locks, caplog):
    """Four due times were passed: one is sent, three are missed, and not made up for."""
    heard: list[dict[str, Any]] = []

    def hear(sender: Any, **details: Any) -> None:
        heard.append({"sender": sender, **details})

    signals.tick_late.connect(hear)
    leader = beat({"a": overdue(10, 35)})
    assert ticks(leader, 5) == ["a"]
    assert remembered(locks, "a")[1:] == [1, 3]
    (told,) = heard
    assert (told["sender"], told["entry"], told["missed"]) == (leader, "a", 3)
    assert 35 <= told["late_s"] < 40
    assert f"beat: a is sent {told['late_s']:.1f} s late" in caplog.text
    assert "3 further due times were missed." in caplog.text


def test_leader_without_redis_sends_nothing_until_it_leads_again(beat, proxy, locks, caplog):
    """What is due while Redis is away fires once, when the script has noted it.

    An outage is a line of the log, not one for each entry and try.
    """
    leader = beat(dict.fromkeys("abc", 0.2), setnx_url=proxy.url(1))
    until(leader, lambda: {*leader.sent} == {*"abc"})
    with proxy.fault("cut_before", times=10_000):
        sent = len(leader.sent)
        until(leader, lambda: "No longer leads" in caplog.text)
        assert len(ticks(leader, 1)) == sent
    assert 1 <= caplog.text.count("beat: Leads, but ") <= 3
    until(leader, lambda: len(leader.sent) > sent)
    assert [remembered(locks, name)[1] for name in "abc"] == [leader.sent.count(name) for name in "abc"]


@pytest.mark.parametrize("times", [1, 2], ids=["resent by the client", "asked again by the scheduler"])
def test_tick_whose_reply_is_lost_is_sent_once(beat, proxy, locks, times):
    """The same run is noted again, so it is neither lost nor counted twice."""
    leader = beat({"a": overdue(3600, 5)}, setnx_url=proxy.url(1))
    assert leader._takes_the_lead()
    leader._note(ScheduleEntry("warm", "t", schedule=schedule(1), app=leader.app))  # the script is loaded
    with proxy.fault("drop_reply", containing=ENTRIES.encode(), answered=b"ticked", times=times):
        until(leader, lambda: leader.sent)
    assert ticks(leader, 3) == ["a"]
    assert remembered(locks, "a")[1] == 1


def test_lost_lead_is_found_by_the_note_itself(beat, locks):
    """A leader whose record is another's sends nothing, whatever it believes."""
    leader = beat({"a": overdue(3600, 5)})
    assert leader._takes_the_lead()
    token = leader._leads_by.token
    assert SetnxLock(locks, LOCK).acquire(dead=token).acquired
    assert ticks(leader, 1) == []
    assert not leader._leads()


def test_lock_set_by_hand_pauses_all_beats(beat, locks, foreign_keys):
    """SETNX of a future time keeps beats that do not lead yet from leading, until it is deleted."""
    foreign_keys.add(LOCK)
    locks.setnx(LOCK, server_us(locks) // 1_000_000 + 600)
    paused = beat({"a": overdue(3600, 5)})
    assert ticks(paused, 3) == []
    assert "a foreign client" in paused._said
    locks.delete(LOCK)
    until(paused, lambda: paused.sent)


def test_refused_command_ends_the_scheduler(limited, beat):
    """Not a standby for ever: LockRefused names what is missing."""
    with pytest.raises(LockRefused, match="evalsha"):
        beat({"a": 1}, setnx_url=limited("~*", "+@all", "-evalsha")).tick()


@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "one that stands by"])
@pytest.mark.parametrize("reply", ["NOAUTH Authentication required.", "NOPERM no 'evalsha'", "ERR broken"])
def test_refused_command_is_waited_out(beat, proxy, locks, foreign_keys, reply, leads):
    """A password that was rotated, a permission that was taken: all beats would end at once."""
    scheduler = beat({"a": 1}, setnx_url=proxy.url(1), setnx_beat_lease=60)
    if not leads:
        foreign_keys.add(LOCK)
        locks.setnx(LOCK, server_us(locks) // 1_000_000 + 600)
    until(scheduler, lambda: scheduler.sent or "a foreign client" in scheduler._said)
    sent = len(scheduler.sent)
    held = scheduler._leads_by
    if held is not None:
        held.lease_s *= 10  # as late as this, it is renewed at every tick
    with proxy.fault("answer", containing=b"EVALSHA", reply=f"-{reply}\r\n".encode(), times=3) as fault:
        until(scheduler, lambda: fault.struck == 3)
        assert len(scheduler.sent) == sent
    assert ("sends nothing" if leads else "nobody can lead") in scheduler._said
    locks.delete(*([] if leads else [LOCK]), "t:no such key")
    until(scheduler, lambda: len(scheduler.sent) > sent)


def test_lead_that_could_not_be_begun_is_given_back(beat, proxy, locks):
    """Else nobody leads for a lease, and the process itself stands by for its own lock."""
    leader = beat({"a": 1}, setnx_url=proxy.url(1), setnx_beat_lease=60)
    with proxy.fault("cut_before", containing=ENTRIES.encode(), times=4):
        leader.tick()
    leader.tick()
    assert leader._leads()


@pytest.mark.parametrize("days", [-1, 1])
def test_server_clock_rules_while_a_scheduler_leads(beat, locks, monkeypatch, days):
    """The app's now() is the server's time for the leader, and the host's for a standby.

    A new entry was first seen now, by the server's clock: it is not due at once.
    """
    elsewhen = datetime.now(timezone.utc) + timedelta(days=days)
    monkeypatch.setattr(Celery, "now", lambda _app: elsewhen)
    leader, standby = beat({"a": 3600}), beat({"a": 3600})
    assert ticks(leader, 3) == ticks(standby, 1) == []
    assert abs(leader.app.now().timestamp() - server_us(locks) / 1e6) < 5
    assert standby.app.now() == elsewhen
    assert abs(remembered(locks, "a")[0] - server_us(locks)) < 5_000_000


def test_lazy_scheduler_only_answers_for_its_name(beat):
    """As the banner of `celery beat` asks; the app's clock stays its own."""
    lazy = beat({"a": 1}, lazy=True)
    assert (type(lazy).__name__, lazy.info) == ("HotStandbyScheduler", "")
    assert "now" not in vars(lazy.app)


@pytest.mark.parametrize("lease", [0, -1, "soon"])
def test_malformed_lease_is_refused(beat, lease):
    """When beat starts, not when its leader dies."""
    with pytest.raises(OptionError, match="setnx_beat_lease"):
        beat({"a": 1}, setnx_beat_lease=lease)


def test_entry_with_singleton_options_is_deduplicated_by_name(beat, server):
    """A beat that has not imported the task is told its key, so a queued call is not published again."""
    options = {"queue": f"q{uuid.uuid4().hex}", "singleton": {"key": (), "dedupe": "until_started"}}
    leader = beat(setnx_beat_scheduler="celery.beat:Scheduler")
    results = [leader.send_task("unknown", **options) for _ in range(2)]
    assert [result.deduplicated for result in results] == [False, True]
    assert results[0].id == results[1].id


def entry_of(every: Any, last: datetime) -> ScheduleEntry:
    app = Celery("late", set_as_current=False)
    return ScheduleEntry("a", "t", last_run_at=last, schedule=every, app=app)


class Whenever(BaseSchedule):
    """A schedule of one's own, without remaining_estimate()."""

    def is_due(self, _last: datetime) -> tuple[bool, Any]:
        return schedstate(True, 1)


@pytest.mark.parametrize(
    ("every", "seconds_ago", "late_from", "late_to", "further"),
    [
        (10.0, 45, 35, 36, {3}),
        (crontab(), 300, 180, 300, {3, 4}),
        (Whenever(), 300, 0, 0, {0}),  # it is sent all the same
    ],
    ids=["interval", "every minute", "not known"],
)
def test_lateness_counts_further_due_times(every, seconds_ago, late_from, late_to, further):
    """Of an interval of 10 s, 45 s after its last run: 35 s late, 3 more have passed."""
    now = datetime.now(timezone.utc)
    late_s, missed = _lateness(entry_of(every, now - timedelta(seconds=seconds_ago)), now)
    assert late_from <= late_s <= late_to
    assert missed in further
    assert not isinstance(every, crontab) or missed == int(late_s // 60)


@pytest.mark.parametrize("every", [crontab(minute="*/5"), crontab(minute="30")], ids=["5 min", "hour"])
def test_missed_times_are_never_negative_where_an_hour_comes_twice(every, monkeypatch):
    """In the hour after summer time the wall clock is behind the last run's."""
    zone = ZoneInfo("Europe/Berlin")
    app = Celery("late", set_as_current=False)
    app.conf.timezone = zone.key
    begin = datetime(2025, 10, 25, 22, 0, tzinfo=timezone.utc)
    moments = [begin + timedelta(minutes=7 * number) for number in range(60)]
    for last, now in itertools.combinations(moments, 2):
        monkeypatch.setattr(app, "now", lambda now=now: now.astimezone(zone))
        entry = ScheduleEntry("a", "t", last_run_at=last.astimezone(zone), schedule=every, app=app)
        assert _lateness(entry, app.now())[1] >= 0, (last, now)


def race(locks: redis.Redis, key: str, order: tuple[str, ...]) -> list[tuple[int, int]]:
    """(run before, run) of all that two leaders send whose steps come in this order."""
    frozen = SetnxLock(locks, key).acquire().lock
    entries, sent = f"{key}:entries", []
    due = server_us(locks)
    assert _recall(locks, entries=entries, seen=[("a", due)]) == [f"{due} 0 0"]

    def send(held: Any, before: int, run: int) -> None:
        if _tick(held, entries=entries, entry="a", before=before, run=run, missed=0)[0] == "ticked":
            sent.append((before, run))

    def steps_of_the_frozen() -> Iterator[None]:
        yield send(frozen, due, due + 5)
        yield send(frozen, due, due + 5)  # the client resends it
        yield send(frozen, due + 5, due + 10)

    def steps_of_the_follower() -> Iterator[None]:
        follower = SetnxLock(locks, key).acquire(dead=frozen.token).lock
        yield
        last = int(_recall(locks, entries=entries, seen=[("a", 1)])[0].split()[0])
        yield
        yield send(follower, last, last + 7)
        yield send(follower, last + 7, last + 14)

    steps = {"A": steps_of_the_frozen(), "B": steps_of_the_follower()}
    for who in order:
        next(steps[who])
    return sent


def test_schedule_goes_on_though_the_servers_memory_is_full(own_locks):
    """A leader keeps its lead then, and its entries are known already; or there are few."""
    held, entries = SetnxLock(own_locks, "t:{full}").acquire().lock, "t:{full}:entries"
    _recall(own_locks, entries=entries, seen=[("a", 5)])
    own_locks.config_set("maxmemory", 1)
    told = _tick(held, entries=entries, entry="a", before=5, run=9, missed=0)
    found = _recall(own_locks, entries=entries, seen=[("a", 1), ("b", 7)])
    assert (told, found) == (["ticked", "9", "1"], ["9 1 0", "7 0 0"])


def test_server_that_forbids_to_expire_keys_is_left_without_entries(locks, limited):
    """Nothing is remembered that would stay for ever."""
    client = redis.Redis.from_url(limited("~*", "+@all", "-pexpire"), decode_responses=True)
    held, entries = SetnxLock(client, "t:{forbidden}").acquire().lock, "t:{forbidden}:entries"
    with pytest.raises(LockRefused, match=r"(?i)pexpire"):
        _recall(client, entries=entries, seen=[("a", 5)])
    with pytest.raises(LockRefused, match=r"(?i)pexpire"):
        _tick(held, entries=entries, entry="a", before=5, run=9, missed=0)
    assert not locks.exists(entries)
    client.close()


def test_no_interleaving_of_two_leaders_meets_a_due_time_twice(locks):
    """The frozen leader's ticks, resent ones too, among the steps of the one that takes over from it."""
    for number, order in enumerate(sorted({*itertools.permutations("AAABBBB")})):
        sent = race(locks, f"t:{{race:{number}}}", order)
        # A leader sends once for each run, however often its script was sent.
        assert len({before for before, _run in sent}) == len({*sent}) >= 2, (order, sent)
        assert sent == sorted(sent), (order, sent)


def test_real_beat_ticks_by_the_settings_of_its_app(server, locks, tmp_path):
    """`celery beat -S celery_setnx.beat:HotStandbyScheduler` leads, sends, and gives the lead back."""
    queue = f"q{uuid.uuid4().hex}"
    (tmp_path / "clockapp.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('clock', broker={server.url(0)!r})\n"
        f"app.conf.update(setnx_url={server.url(1)!r}, setnx_prefix='t', task_default_queue={queue!r},\n"
        "    beat_schedule={'a': {'task': 'unknown', 'schedule': 0.5}})\n"
    )
    command = ["beat", "-S", "celery_setnx.beat:HotStandbyScheduler", "-s", "entries", "--pidfile="]
    process = forks.start(tmp_path, forks.celery, "-A", "clockapp", *command, "-l", "INFO")
    with redis.Redis.from_url(server.url(0)) as broker:
        try:
            wait_until(lambda: broker.llen(queue) >= 2, "two messages")
            assert str(SetnxLock(locks, LOCK).holder()).startswith("celery beat[clock] on beat@")
            process.terminate()
            code, log = forks.end(process, tmp_path)
        finally:
            process.kill()
            broker.delete(queue)
    assert code == 0
    assert f"beat: Leads now ({LOCK})." in log
    assert "Traceback" not in log
    assert SetnxLock(locks, LOCK).holder() is None
