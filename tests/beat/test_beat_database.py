"""Beats with django-celery-beat's DatabaseScheduler, whose tables they share."""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_setnx import SetnxLock
from celery_setnx.beat import HotStandbyScheduler
from tests.beat.beats import INTERVAL_S, LEASE_S, SLACK_S, with_tables
from tests.harness import wait_until


def now(**later: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(**later)


@pytest.fixture
def start(beats, django_tables) -> Callable[..., Any]:
    """Starts beats that read these tables."""
    return lambda count, **conf: beats.start(
        count, setnx_beat_lease=LEASE_S, **with_tables(django_tables), **conf
    )


@pytest.mark.timeout(180)
def test_kills_of_the_leader_cost_a_lease_each_and_no_tick_comes_twice(beats, start, row, report):
    """As with the default scheduler."""
    row("every")
    start(3)
    deaths = beats.end_leaders(5)
    beats.assert_each_once(INTERVAL_S)
    assert max(deaths) < LEASE_S + 1 + INTERVAL_S + SLACK_S
    report("DatabaseScheduler, other hosts, lease 3 s", beats, deaths)


def test_one_off_whose_sender_is_killed_is_not_sent_again(beats, start, row, broker):
    """The dead leader's row says that it never ran; what Redis remembers counts, and the row is disabled."""
    row("every")
    once = row("once", now(seconds=30))
    start(2)
    beats.wait_for_ticks(1)
    (tick,) = beats.wait_for_ticks(1, "once")
    wait_until(lambda: tick["id"] in str(broker.lrange("beat-nowhere", 0, -1)), "it is sent")
    leader = next(beat for beat in beats.all if beat.pid == tick["pid"])
    leader.kill()
    once.refresh_from_db()
    assert (once.enabled, once.total_run_count) == (True, 0)
    follower = beats.wait_for_leader(but=leader)
    beats.wait_for_ticks(3, pid=follower.pid)
    assert len(beats.ticks("once")) == 1
    wait_until(lambda: once.refresh_from_db() or not once.enabled, "it is disabled")


def test_changes_in_the_tables_are_picked_up(beats, start, row):
    """A row that comes is sent, one that is disabled is not, by the leader and by its follower."""
    from django.db import transaction

    every = row("every")
    start(2)
    beats.wait_for_ticks(2)
    row("new")
    beats.wait_for_ticks(2, "new")
    # As the admin does. Outside a transaction the leader sees a change before the row has it, and when it
    # saves its own part of the row (get, then save of all fields), it may put back what the row was.
    with transaction.atomic():
        every.refresh_from_db()
        every.enabled = False
        every.save()
    beats.wait_for_more(3, "new")  # the change has been seen by then
    ended = len(beats.ticks())
    leader = beats.wait_for_leader()
    leader.kill()
    beats.wait_for_leader(but=leader)
    beats.wait_for_more(2, "new")
    assert len(beats.ticks()) == ended
    beats.assert_each_once(INTERVAL_S, "new")


def recording() -> type:
    from django_celery_beat.schedulers import DatabaseScheduler

    class Recording(DatabaseScheduler):
        """Remembers what it would have sent; its database is away when it would save that."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.sent: list[str] = []
            super().__init__(*args, **kwargs)

        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            self.sent.append(entry.name)

        def sync(self) -> None: ...

    return Recording


@pytest.fixture
def scheduler(server, locks, tables) -> Iterator[Callable[[], Any]]:
    """Makes hot-standby schedulers of these tables in this process."""
    made: list[Any] = []

    def scheduler() -> Any:
        app = Celery("beats", broker="memory://", set_as_current=False)
        app.conf.update(
            setnx_url=server.url(1), setnx_prefix="t", setnx_beat_scheduler=recording(), result_expires=None
        )
        made.append(HotStandbyScheduler(app))
        return made[-1]

    yield scheduler
    for each in made:
        each.close()


def test_one_off_is_sent_once_though_its_row_is_read_again(scheduler, row, tables):
    """An admin's change after the take-over makes the new leader read the row of the dead one's one-off."""
    row("once", now(seconds=-1))
    dead, new = scheduler(), scheduler()
    wait_until(lambda: dead.tick() is not None and dead.sent, "the one-off is sent")
    assert new._lock.acquire(dead=dead._leads_by.token).lock.release() == "released"
    assert new._takes_the_lead()
    tables.PeriodicTasks.update_changed()  # another admin saves something
    for _ in range(20):
        new.tick()
    assert dead.sent == ["once"]
    assert new.sent == []


@pytest.mark.parametrize("kind", ["one-off", "interval"])
def test_row_that_could_not_be_saved_is_sent_once(scheduler, row, tables, kind):
    """Its leader reads it again, and it is due by its row; by what Redis remembers it is not."""
    row("once", **({"at": now(seconds=-1)} if kind == "one-off" else {"last_run_at": now(hours=-2)}))
    tables.IntervalSchedule.objects.update(every=3600)
    leader = scheduler()
    wait_until(lambda: leader.tick() is not None and leader.sent, "it is sent")
    tables.PeriodicTasks.update_changed()
    for _ in range(20):
        leader.tick()
    assert leader.sent == ["once"]
    assert SetnxLock(leader._lock.client, leader._lock.name).holder() is not None


def test_entry_that_is_not_sent_disturbs_no_other(scheduler, row, tables, locks, caplog):
    """One that ran meanwhile is put right by itself; what this leader has sent is not looked up again."""
    for number in range(20):
        row(f"e{number}", last_run_at=now(hours=-2))
    row("odd", last_run_at=now(hours=-1, seconds=10))
    tables.IntervalSchedule.objects.update(every=3600)
    leader = scheduler()
    wait_until(lambda: leader.tick() is not None and len(leader.sent) == 20, "all but one are sent")
    locks.hset(leader._entries, "odd", f"{round(now().timestamp() * 1e6)} 1 0")
    wait_until(
        lambda: leader.tick() is not None and "odd is not sent" in caplog.text, "it is due, and not sent"
    )
    for _ in range(50):
        leader.tick()
    assert len(leader.sent) == 20
    assert caplog.text.count("is not sent again: it was") == 1
