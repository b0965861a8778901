"""Beat on any number of hosts: one leads and ticks, the others stand by, and take over when it dies.

Leading is a `SetnxLock` that is renewed. Before an entry is sent, a script notes its run in Redis: only for
the leader, and only if it has not run since the run because of which it is due. So a due time is met at most
once, whatever stops, wakes or dies, and a new leader knows what the old one has sent.
"""

from __future__ import annotations

import heapq
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from datetime import datetime, timedelta, timezone
from itertools import chain
from types import FrameType
from typing import Any

from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.utils.time import maybe_make_aware
from redis.connection import HiredisRespSerializer

from celery_setnx.call.publish import send_task
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.lock import DAY_S, SetnxLock
from celery_setnx.lock.names import record_name
from celery_setnx.lock.process import identity
from celery_setnx.lock.record import Holder
from celery_setnx.lock.scripts import Script
from celery_setnx.lock.survey import BEAT
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import settings_of
from celery_setnx.signals import tick_late
from celery_setnx.wording import sentence

logger = Log("celery_setnx.beat")

LATE_S = 1.0
"""Ticks that are later than this, in seconds, are logged and counted."""

_POLL_S = 1.0
_AGAIN_S = 0.5
_REMEMBER_MS = int(400 * DAY_S * 1000)  # an entry that is due once a year is not forgotten
_MISSED_AT_MOST = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_US = timedelta(microseconds=1)
_ENDING = (signal.SIGTERM, signal.SIGINT)
_PACK = HiredisRespSerializer.pack.__code__

_at_work: ContextVar[HotStandby | None] = ContextVar("_at_work", default=None)
"""The scheduler of which a tick goes on, or was interrupted by the signal whose handler asks."""

_TICK, _RECALL = Script("tick"), Script("recall")


def HotStandbyScheduler(app: Celery, *args: Any, **kwargs: Any) -> Scheduler:
    """The scheduler for `celery beat -S celery_setnx.beat:HotStandbyScheduler`, on any number of hosts.

    It is the class that the setting `setnx_beat_scheduler` names, made a `HotStandby`. Defaults to
    `celery.beat:PersistentScheduler`. The arguments are that class's own.

    Raises:
        OptionError: A setting is malformed, or none names a Redis for locks.
    """
    aliases = dict(load_extension_class_names("celery.beat_schedulers"))
    inner: Any = symbol_by_name(settings_of(app).beat_scheduler, aliases=aliases)
    scheduler_class = type("HotStandbyScheduler", (HotStandby, inner), {"__doc__": HotStandby.__doc__})
    making = vars(app).setdefault("_setnx_beats_in_making", [])
    if making:
        raise SystemExit  # a signal's handler asks for a scheduler, to close it, while the first one is made
    swallowed: list[bool] = []
    with _noted_exits(lambda: swallowed.append(True)):
        try:
            making.append(scheduler_class)
            scheduler = scheduler_class(app, *args, **kwargs)
        finally:
            making.clear()
    if swallowed:
        raise SystemExit
    return scheduler


def leader(app: Celery) -> Holder | None:
    """The scheduler that leads the app's beats now, by its record; None if none does.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    return _lead(app).holder()


def _lead(app: Celery, **info: Any) -> SetnxLock:
    own = settings_of(app)
    name = f"{own.prefix}:{{{BEAT}{app.main}}}"
    return SetnxLock(client_for(app), name, lease=own.beat_lease, retention=own.retention, info=info)


class HotStandby(Scheduler):  # type: ignore[misc]
    """What makes a scheduler class one of many that stand by for each other; to be put before that class.

    Nothing is sent by a scheduler that does not lead. One that died or hangs keeps the lead for
    `setnx_beat_lease` seconds at most, 10 by default: nothing but its own loop renews it. A rival on its host
    that proves its death takes over within a second.
    A signal that is to end it may strike where its handler must not raise: in a `__del__`, in hiredis. So
    nothing is closed under a tick that goes on, and no tick begins once it is to end.
    While it leads, the app's `now()` is the lock server's time: hosts with different clocks tick alike.
    """

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        own = identity()
        self._lock = _lead(app, **own, task="celery beat", task_id=app.main, worker=f"beat@{own['host']}")
        self._same_host = settings_of(app).same_host
        self._entries = f"{self._lock.name}:entries"
        self._leads_by: HeldLock | None = None
        self._is_to_end = self._is_closed = False
        self._said = ""
        self._was_answered = False  # by the lock server, since this process began
        self._began_us = _us(Celery.now(app))
        # For each entry the run that is being noted, beside the one before: asked again, it must be the same.
        self._noting: dict[str, tuple[int, int]] = {}
        if not kwargs.get("lazy"):  # else it is asked for its name only
            app.now = self._now
        super().__init__(app, *args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As the scheduler's own while this one leads; else see whether it can."""
        with _unwrapped_exit():
            return self._undisturbed(self._turn, *args, **kwargs)  # type: ignore[no-any-return]

    def _turn(self, *args: Any, **kwargs: Any) -> float:
        if self._is_to_end:
            raise SystemExit
        third_s = self._lock.lease_s / 3
        if self._leads() or self._takes_the_lead():
            # Never so long that the lease would not be renewed.
            return min(float(super().tick(*args, **kwargs)), third_s / 2)
        return min(_POLL_S, third_s)

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """As the entry says; and if it is due, only if this is noted in Redis before it is sent."""
        due, again_s = super().is_due(entry)
        if not due or self._note(entry):
            return due, again_s
        due, again_s = super().is_due(entry)  # it may have run since, by another leader
        self._put_off(entry, _AGAIN_S if due else again_s)
        return False, _AGAIN_S

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """The entry after its run, which is the run that Redis knows."""
        successor = super().reserve(entry)
        _before, run = self._noting.pop(entry.name, (0, 0))
        if run:
            self._adopt(successor, run)
        return successor

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's own, which takes a wrapped exit for an entry that cannot be sent."""
        with _unwrapped_exit():
            return super().apply_async(*args, **kwargs)

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish a task by name, deduplicated if the entry's options have `singleton={"key": ..., ...}`."""
        if "singleton" in options:
            return send_task(self.app, name, args, kwargs, **options)
        return super().send_task(name, args, kwargs, **options)

    def sync(self) -> None:
        """As the scheduler's own."""
        self._undisturbed(super().sync)

    def close(self) -> None:
        """Close the scheduler, then let another lead at once; amid a tick, note that it is to end."""
        self._is_to_end = True
        if _at_work.get() is self:
            return  # a signal: the loop ends now, or when this tick has, and closes
        try:
            if not self._is_closed:
                self._is_closed = True  # though a second signal strikes
                super().close()
        finally:
            self._resign()

    def _undisturbed(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what the scheduler must not be closed under; an exit that may not be raised is noted."""
        context = copy_context()  # which ends with the act, wherever a signal strikes
        context.run(_at_work.set, self)
        with _noted_exits(self._note_end):
            return context.run(act, *args, **kwargs)

    def _note_end(self) -> None:
        self._is_to_end = True

    def _now(self) -> datetime:
        held = self._leads_by
        if held is None:
            return Celery.now(self.app)  # type: ignore[no-any-return]
        return datetime.fromtimestamp(held.server_time(), timezone.utc).astimezone(self.app.timezone)

    def _leads(self) -> bool:
        """Whether this one leads still. No thread renews the lead: it ends if this loop hangs."""
        held = self._leads_by
        if held is None:
            return False
        try:
            held.ensure()
            if held.remaining_s() < held.lease_s * 2 / 3:
                held.renew()
                self._said = ""
        except LockLost as error:
            self._stand_by(error.reason)
        except (LockUnavailable, LockRefused) as error:
            self._say_unavailable(error)
        return self._leads_by is not None

    def _stand_by(self, reason: str) -> None:
        self._lock.token = self._leads_by = None
        self._noting.clear()
        self._say(logging.WARNING, f"No longer leads, and stands by: {sentence(reason)}")

    def _takes_the_lead(self) -> bool:
        # Known before the server knows it: close() gives back what a signal has kept us from seeing.
        self._lock.token = token = os.urandom(16).hex()
        try:
            outcome = self._lock.acquire_at_death(same_host=self._same_host, token=token)
            self._was_answered = True
            if outcome.lock is None:
                self._lock.token = None
                self._say(
                    logging.INFO, f"Stands by; the leader is {outcome.holder}{_itself(outcome.holder)}."
                )
                return False
            self._begin(outcome.lock)
        except (LockUnavailable, LockRefused) as error:
            self._lock.token = None
            if isinstance(error, LockRefused) and not self._was_answered:
                raise  # of a beat that is started so: it says so by its end
            say_loudly(error)
            self._say(logging.WARNING, f"Stands by; nobody can lead. {error}")
            return False
        if dead := outcome.taken_over_from:
            self._say(logging.WARNING, f"Leads now: took over {self._lock.name} from {dead}.")
        else:
            self._say(logging.INFO, f"Leads now ({self._lock.name}).")
        return True

    def _begin(self, held: HeldLock) -> None:
        """Go on where the leader before has ended."""
        try:
            self._recall()
        except BaseException:
            self._resign()
            raise
        self._leads_by = held

    def _resign(self) -> None:
        if self._lock.token is not None:
            try:
                self._lock.release()
            except SetnxError as error:
                logger.warning("beat: The lead was not released; its lease ends it. %s", error)
        self._lock.token = self._leads_by = None

    def _say(self, level: int, what: str) -> None:
        """Log what has changed, once."""
        if what != self._said:
            self._said = what
            logger.log(level, "beat: %s", what, extra=fields("beat"))

    def _say_unavailable(self, error: LockUnavailable | LockRefused) -> None:
        say_loudly(error)
        self._say(
            logging.WARNING, f"Leads, but sends nothing while Redis does not answer: {sentence(error.reason)}"
        )

    def _recall(self) -> None:
        """Give the entries the last runs that Redis knows."""
        entries = list(self.schedule.values())
        seen = [(entry.name, 0 if self._is_new(entry) else _us(entry.last_run_at)) for entry in entries]
        for entry, found in zip(entries, _recall(self._lock.client, entries=self._entries, seen=seen)):
            run, runs, _missed = map(int, found.split())
            # A row of django-celery-beat is shared already; it is older only by a crash.
            if _row(entry) is None or _us(entry.last_run_at) < run:
                self._adopt(entry, run, runs)
        self._heap = None  # what is due when has changed

    def _is_new(self, entry: ScheduleEntry) -> bool:
        """True if it never ran: its last run is when this process first saw it, by this host's clock."""
        has_run = entry.total_run_count or _us(entry.last_run_at) < self._began_us
        return _row(entry) is None and not has_run

    def _adopt(self, entry: ScheduleEntry, run: int, runs: int = 0) -> None:
        moment = _EPOCH + run * _US
        for known in filter(None, (entry, _row(entry))):
            naive = known.last_run_at.tzinfo is None  # a database without time zones
            known.last_run_at = moment.replace(tzinfo=None) if naive else moment.astimezone(self.app.timezone)
            known.total_run_count = max(runs, known.total_run_count)

    def _note(self, entry: ScheduleEntry) -> bool:
        """Note in Redis that an entry runs now; False if it must not be sent."""
        held, before, now = self._leads_by, _us(entry.last_run_at), maybe_make_aware(entry.default_now())
        if held is None:
            return False
        late_s, missed = _lateness(entry, now)
        if self._noting.get(entry.name, (None, 0))[0] != before:
            self._noting[entry.name] = (before, max(_us(now), before + 1))
        run = self._noting[entry.name][1]
        told = {"entry": entry.name, "before": before, "run": run, "missed": missed}
        try:
            held.ensure()
            word, last, runs = _tick(held, entries=self._entries, **told)
        except LockLost as error:
            self._stand_by(error.reason)
            return False
        except (LockUnavailable, LockRefused) as error:
            self._say_unavailable(error)
            return False
        self._said = ""
        if word == "lost":
            self._stand_by("another leads")
        elif word == "done":
            self._adopt(entry, int(last), int(runs))
            text = "beat: %s is not sent again: it was sent at %s."
            logger.info(text, entry.name, entry.last_run_at, extra=fields("beat", task=entry.task))
        elif late_s > LATE_S:
            text = "beat: %s is sent %.1f s late; %d further due times were missed."
            logger.warning(text, entry.name, late_s, missed, extra=fields("tick_late", task=entry.task))
            tick_late.send(sender=self, entry=entry.name, late_s=late_s, missed=missed)
        return bool(word == "ticked")

    def _put_off(self, entry: ScheduleEntry, seconds: float) -> None:
        """Move the first event of the heap, so that it is not in the way of the others."""
        heap = self._heap
        if heap and heap[0].entry is entry:
            heapq.heapreplace(heap, heap[0]._replace(time=self._when(entry, seconds)))


@contextmanager
def _noted_exits(note: Callable[[], None]) -> Iterator[None]:
    """Note the exits that cannot be raised where a signal strikes meanwhile.

    Python swallows and prints what is raised in a `__del__`. And hiredis (3.5) crashes if a handler raises
    while it makes text of a number, as in many a command that is packed for the broker.
    """
    hook = sys.unraisablehook
    is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    known = {signum: signal.getsignal(signum) for signum in _ENDING if is_main}
    handlers = {int(signum): handler for signum, handler in known.items() if callable(handler)}

    def tell(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, (SystemExit, KeyboardInterrupt)):
            note()
        else:
            hook(unraisable)

    def strike(signum: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is _PACK:
            note()
        else:
            handlers[signum](signum, frame)

    sys.unraisablehook = tell
    try:
        for signum in handlers:
            signal.signal(signum, strike)
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        sys.unraisablehook = hook


@contextmanager
def _unwrapped_exit() -> Iterator[None]:
    """An exit is one, whatever it comes in: of one in a `__set_name__` Python 3.11 makes a RuntimeError."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (SystemExit, KeyboardInterrupt)):
                raise SystemExit from error
            cause = cause.__cause__ or cause.__context__
        raise


def _itself(leader: Holder | None) -> str:
    """What to say of a leader that is the very process that stands by, or was before a restart."""
    own, info = identity(), leader.info if leader else {}
    if any(info.get(name) != own[name] for name in ("host", "pid")):
        return ""
    if all(info.get(name) == value for name, value in own.items()):
        return ": this very process, to which an answer of Redis was lost. Its lease ends the lead"
    return ": most likely this one, before it was started again. Its lease ends the lead"


def _row(entry: ScheduleEntry) -> Any:
    """The entry's row in the database, with django-celery-beat."""
    return getattr(entry, "model", None)


def _us(moment: datetime) -> int:
    return (maybe_make_aware(moment) - _EPOCH) // _US  # type: ignore[no-any-return]


def _lateness(entry: ScheduleEntry, now: datetime) -> tuple[float, int]:
    """Seconds since an entry was due, and how many further due times have passed since."""
    schedule, last = entry.schedule, maybe_make_aware(entry.last_run_at)
    try:
        late_s = -schedule.remaining_estimate(last).total_seconds()
    except NotImplementedError:  # a schedule of the user's own
        return 0.0, 0
    if late_s <= LATE_S:
        return late_s, 0
    if isinstance(schedule, crontab):
        return late_s, _crontab_missed(schedule, last, now)
    every = getattr(schedule, "run_every", None)
    return late_s, int(late_s / every.total_seconds()) if every else 0


def _crontab_missed(schedule: crontab, last: datetime, now: datetime) -> int:
    for missed in range(-1, _MISSED_AT_MOST):
        begin, until_next, _now = schedule.remaining_delta(last)
        last = begin + until_next
        # By UTC: wall clocks cannot be compared in the hour that comes twice.
        if last.astimezone(timezone.utc) > now:
            return max(0, missed)
    return _MISSED_AT_MOST


def _tick(held: HeldLock, *, entries: str, entry: str, before: int, run: int, missed: int) -> list[Any]:
    """Run lua/tick.lua, with times in microseconds: [word, last run us, runs]."""
    keys = (record_name(held.key), entries)
    return _TICK(held.client, keys, held.token, entry, before, run, missed, _REMEMBER_MS)


def _recall(client: Any, *, entries: str, seen: list[tuple[str, int]]) -> list[Any]:
    """Run lua/recall.lua: what is remembered of each entry."""
    return _RECALL(client, (entries,), _REMEMBER_MS, *chain.from_iterable(seen))
