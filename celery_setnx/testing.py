"""A kit for tests of apps with guarded tasks: busy locks, crashed holders, time that passes.

Without it direct calls, `.apply()` and `task_always_eager` ask no server. What is switched here is switched
for all threads of this process, and in no other one.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import redis
from celery import Celery, Task

from celery_setnx.call.live import read_live_terms
from celery_setnx.call.switches import DISABLED, EAGER_GUARDED
from celery_setnx.call.wake import give_turns, lines_of
from celery_setnx.connection import client_for
from celery_setnx.exceptions import AlreadyRunning, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import keeper_for_process
from celery_setnx.lock.live import change_key_terms, change_task_terms
from celery_setnx.lock.lock import DAY_S, SetnxLock
from celery_setnx.lock.look import WAITERS, Sighting, look
from celery_setnx.lock.names import (
    done_name,
    line_names,
    live_terms_name,
    mark_name,
    newest_name,
    permits_name,
    record_name,
    scope_and_digest,
    starts_name,
)
from celery_setnx.lock.newest import latest_of
from celery_setnx.lock.process import identity
from celery_setnx.lock.record import task_token
from celery_setnx.lock.scripts import PermitScript, value_of
from celery_setnx.lock.survey import escaped, successes, survey
from celery_setnx.log import Log, fields
from celery_setnx.options import settings_of
from celery_setnx.run.passage import pass_for_held
from celery_setnx.task import guard_for, lock_for
from celery_setnx.terms import NewTerm, Whose, end_term, live_terms, set_term

__all__ = [
    "Held",
    "assert_released",
    "clear",
    "crash",
    "guarded",
    "hold",
    "locks_on",
    "pass_time",
    "paused",
    "singleton_disabled",
]

logger = Log("celery_setnx")

_POLL_S = 0.02
_ELSEWHERE = "elsewhere"
_AGE = PermitScript("age")


@contextmanager
def guarded(app: Celery) -> Iterator[None]:
    """Guard `.apply()` and `task_always_eager` of an app too: they take the lock on its lock server.

    Also a decorator. An eager call has no message that could come back or wait in line, so a conflict ends
    it: `skip` with the `skip_result`, `raise` in state FAILURE with `AlreadyRunning`; `retry`, `wait` and
    `join` in state RETRY, without a second try (past `max_wait` with `LockTimeout`). Nothing is a duplicate.
    A task's own retry runs at once, with the lock released and acquired anew, also with `hold_on_retry`.

    Raises:
        OptionError: No setting of the app names a Redis.
        LockUnavailable: It does not answer.

    Example:
        >>> with guarded(app), hold(settle, 7):   # doctest: +SKIP
        ...     assert is_skipped(settle.apply([7]).get())
    """
    app = _app_of(app)
    SetnxLock(client_for(app), f"{settings_of(app).prefix}:{{testing}}").holder()
    with EAGER_GUARDED.on(app):
        yield


@contextmanager
def singleton_disabled(app: Celery | None = None) -> Iterator[None]:
    """Run bodies of an app plainly, by default of all apps: no lock, no mark, no server. Also a decorator.

    For tests of a task's body with a worker in this process (`celery.contrib.testing`), or that publish
    without a Redis. `self.lock` is None. Keys are computed all the same, so that a call which has none fails.

    Example:
        >>> with singleton_disabled(), start_worker(app):   # doctest: +SKIP
        ...     assert settle.delay(7).get() == "settled"
    """
    with DISABLED.on(None if app is None else _app_of(app)):
        yield


@contextmanager
def locks_on(app: Celery, url: str) -> Iterator[None]:
    """Have the app's locks on the server at `url`, as in `setnx_url`, for a while. No worker may run yet.

    Example:
        >>> @pytest.fixture   # doctest: +SKIP
        ... def setnx_app(setnx_server):
        ...     with locks_on(app, setnx_server):
        ...         yield app
    """
    app = _app_of(app)
    before = app.conf.get("setnx_url"), app.__dict__.pop("_setnx_clients", {})
    elsewhere = os.environ.pop("CELERY_SETNX_URL", None)  # it would win
    app.conf.setnx_url = url
    try:
        yield
    finally:
        for known in app.__dict__.pop("_setnx_clients", {}).values():
            known.client.close()
        app.conf.setnx_url, app.__dict__["_setnx_clients"] = before
        if elsewhere is not None:
            os.environ["CELERY_SETNX_URL"] = elsewhere


class Held:
    """A lock that somebody else holds, as `hold` makes them.

    Attributes:
        task: The task whose lock it is.
        task_id: Id of the call that has it; there is no such call.
        key: The lock's Redis key.
        fence: Its fence.
        permit: Which of the lock's permits it is; the first is 0.
        lives: Whether the holder renews its lease; False after `crash` and `release`.
    """

    def __init__(self, task: Task, task_id: str, lock: SetnxLock, held: HeldLock) -> None:
        self.task = task
        self.task_id = task_id
        self.key = held.key
        self.fence = held.fence
        self.permit = held.permit
        self.lives = True
        self._lock, self._held = lock, held
        _LIVING[held.token] = self
        keeper_for_process(lock.clock).watch(held, _warn_of_loss)

    def __repr__(self) -> str:
        return f"<Held {self.key} by {self.task_id}, which {'lives' if self.lives else 'is gone'}>"

    def release(self) -> None:
        """Give the lock back, as a task that ends; the first who waits in line is woken. Once is enough."""
        if self.lives:
            self._end()
            self._held.release()
            give_turns(self.task.app, self.task.name, self._lock)

    def _end(self) -> None:
        self.lives = False
        del _LIVING[self._held.token]
        keeper_for_process(self._lock.clock).forget(self._held)


_LIVING: dict[str, Held] = {}  # by token


@contextmanager
def hold(task: Task, *args: Any, **kwargs: Any) -> Iterator[Held]:
    """Have somebody else hold the lock of a call: a living holder in another place, which renews its lease.

    Of a task with a `limit` each holder takes one permit, up to that many at a time. Of a task with a `rate`
    each is a start, which counts after its release too (see `pass_time`).

    Args:
        task: A `SingletonTask`, or a task with `@singleton`.
        args, kwargs: The arguments of the call whose lock it is.

    Returns:
        The holder; its lock is released in the end, unless it has crashed.

    Raises:
        AlreadyRunning: The lock is held already, with all its permits; or its pace allows no start.
        TypeError: This is no task.
        OptionError: The task has no lock.
        UnkeyableCall: The key cannot be computed.
        LockUnavailable: Redis did not answer.

    Example:
        >>> with hold(settle, 7) as held:   # doctest: +SKIP
        ...     assert settle.locked(7).task_id == held.task_id
    """
    lock, task_id = lock_for(task, args, kwargs), f"held-by-a-test-{uuid.uuid4().hex[:12]}"
    # Another place, which no proof of death can reach.
    lock.info = {"task": task.name, "task_id": task_id, "worker": f"another@{_ELSEWHERE}", "host": _ELSEWHERE}
    outcome = lock.acquire(token=task_token(task_id, 0, uuid.uuid4().hex))
    if outcome.lock is None:
        holder = outcome.holder.as_dict() if outcome.holder else {}
        raise AlreadyRunning(task.name, lock.name, holder, outcome.remaining_s, outcome.limit)
    held = Held(task, task_id, lock, outcome.lock)
    try:
        yield held
    finally:
        held.release()


@contextmanager
def paused(task: Task, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Have an operator pause a task for a while, or the key of one call; see `celery setnx pause`.

    Workers of this process know it at once, others within two seconds.

    Args:
        task: A `SingletonTask`, or a task with `@singleton`.
        args, kwargs: The arguments of the call; without any, all calls of the task's scope.

    Raises:
        TypeError: This is no task.
        OptionError: The task has no lock.
        UnkeyableCall: The key cannot be computed.
        LockUnavailable: Redis did not answer.

    Example:
        >>> with guarded(app), paused(settle, 7):   # doctest: +SKIP
        ...     assert is_skipped(settle.apply([7]).get())
    """
    app = _app_of(task)
    whose = Whose(scope=guard_for(task).scope_of({}))
    if args or kwargs:
        whose = Whose(key=lock_for(task, args, kwargs).name)
    set_term(app, whose, NewTerm("pause", DAY_S, because="a test", by="celery_setnx.testing"))
    read_live_terms(app, client_for(app))
    try:
        yield
    finally:
        end_term(app, whose, "pause", by="celery_setnx.testing")
        read_live_terms(app, client_for(app))


def crash(held: Held) -> None:
    """Kill a holder: it renews no more, and its lock stays until the lease has ended (see `pass_time`).

    Example:
        >>> with hold(settle, 7) as held:   # doctest: +SKIP
        ...     crash(held)
        ...     pass_time(60, held)
        ...     assert settle.apply([7]).get() == "settled"   # it took the lock over
    """
    if not isinstance(held, Held):
        raise TypeError(f"expected a holder, as `with hold(...) as held` gives it, not {held!r}")
    if held.lives:
        held._end()


def pass_time(seconds: float | timedelta, what: Held | Task | Celery, *args: Any, **kwargs: Any) -> None:
    """Let time pass for locks without waiting: they, their marks, those who wait in line, their starts
    (`rate`), and what counts as done (`dedupe_for`) grow older; debounced calls come due, and live terms end,
    sooner.

    A holder of `hold` that lives renews meanwhile, and keeps its lock. Any other is taken for one that stood
    still: past its lease the next call takes the lock over, and its own next renewal tells it so.

    A debounced call that is due then starts within a second, in a worker of this process
    (`celery.contrib.testing`), whether that runs already or starts later. Clocks stay: a worker in another
    process starts it in its own time, as does one that has it wait in RabbitMQ, and no other eta or countdown
    is reached sooner.

    Args:
        seconds: How much time (or a timedelta).
        what: A holder; a task, with the arguments of a call; or a task without any, or an app: all its locks.
        args, kwargs: The arguments of the call.

    Raises:
        ValueError: A negative time.
        LockUnavailable: Redis did not answer.

    Example:
        >>> pass_time(3600, settle, 7)   # the mark of a queued call lapses   # doctest: +SKIP
    """
    by_s = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
    if by_s < 0:
        raise ValueError(f"time passes forwards: {seconds!r} is negative")
    app = _app_of(what.task if isinstance(what, Held) else what)
    client = client_for(app)
    if isinstance(what, Held):
        keys = [what.key]
    elif args or kwargs:
        keys = [lock_for(what, args, kwargs).name]
    else:
        keys = sorted(_keys(client, what))
    _age_terms(app, what, keys, by_s)
    due = list(client.scan_iter(match=f"{escaped(lines_of(app))}:{{*}}:*", count=1000))
    for key in keys:
        _pass(app, client, key, by_s, due)


def _pass(app: Celery, client: Any, key: str, by_s: float, due: list[Any]) -> None:
    """Let time pass for one lock; `due` are the sets that tell workers when to look at which line."""
    latest = latest_of(value_of(client, newest_name(key)))
    living = [token for token, held in list(_LIVING.items()) if held.key == key]
    _age(client, lock=key, by_s=by_s, living=living, starts=True)
    if latest:
        pass_for_held(app, key, by_s, latest)
    for name in due:
        for entry, _ in client.zscan_iter(name, match=f"{escaped(key)}*"):  # and ends
            client.zincrby(name, -by_s * 1e6, entry)  # workers look at it sooner


def _age_terms(app: Celery, what: Any, keys: Collection[str], by_s: float) -> None:
    """Let the live terms of keys, and those of their scopes, end sooner."""
    client, prefix = client_for(app), settings_of(app).prefix
    scopes = {scope_and_digest(key)[0] for key in keys}
    if isinstance(what, Task):
        scopes.add(guard_for(what).scope_of({}))
    for whose, terms in live_terms(app).items():
        for term in terms if isinstance(what, Celery) or whose.key in keys or whose.scope in scopes else ():
            left_s = max(0.0, term.remaining_s(time.time()) - by_s)
            sooner = NewTerm(term.name, left_s, term.value, term.because, term.by)
            if whose.key:
                change_key_terms(client, whose.key, sooner)
            else:
                change_task_terms(client, prefix, whose.scope, sooner)
    read_live_terms(app, client)


def assert_released(what: Task | Celery, *args: Any, within: float = 0.0, **kwargs: Any) -> None:
    """Fail if a lock is held, a key marked, or a call in line: every task has ended, and left nothing behind.

    A lock whose holder crashed counts too, but one that rests (`at_least_for`) does not, nor do starts
    (`rate`), nor does a call that has succeeded, and makes duplicates (`dedupe_for`).

    Args:
        what: An app: all its locks; a task without any arguments: all of its scope; with them: that call's.
        args, kwargs: The arguments of the call.
        within: Seconds for which it is asked again, because a worker may not have ended yet. Defaults to 0.

    Raises:
        AssertionError: Something is left; the message names each lock with its holders, mark and waiters.
        redis.RedisError: Redis did not answer.

    Example:
        >>> assert_released(app, within=5)   # doctest: +SKIP
    """
    client = client_for(_app_of(what))
    give_up = time.monotonic() + within
    while left := _left(client, what, args, kwargs):
        if time.monotonic() >= give_up:
            raise AssertionError(_told(left, what, within))
        time.sleep(_POLL_S)


def clear(app: Celery) -> int:
    """Delete all keys under the app's prefix, found by SCAN: locks and all beside them; returns how many.

    For a server that tests have for themselves, or an app with a prefix of its own. A task that runs on
    another host is a sign that it is neither, and nothing is deleted then.

    Raises:
        SetnxError: A task on another host holds a lock.
        redis.RedisError: Redis did not answer.
    """
    app = _app_of(app)
    client = client_for(app)
    prefix = settings_of(app).prefix
    for seen in survey(client, prefix):
        _refuse_other_hosts(seen)
    for held in list(_LIVING.values()):
        if held.key.startswith(f"{prefix}:{{") and held._lock.client is client:
            crash(held)
    for lines in client.scan_iter(match=f"{escaped(prefix)}:lines:*", count=1000):
        client.delete(lines)
    client.delete(live_terms_name(prefix))
    pattern = f"{escaped(prefix)}:{{*"
    return sum(int(client.delete(key)) for key in list(client.scan_iter(match=pattern, count=1000)))


def _refuse_other_hosts(seen: Sighting) -> None:
    for one in seen.of_each():
        holder = one.holder
        runs = holder is not None and holder.state == "running" and not one.is_stale
        if holder and runs and holder.info.get("host") not in (None, _ELSEWHERE, identity()["host"]):
            raise SetnxError(
                f"clear() deletes nothing: {seen.key} is held by {holder}, on host {holder.info['host']}. "
                "If that is a task of the tests, let it end; if not, give them a server or a prefix of their "
                "own"
            )


def _warn_of_loss(held: HeldLock, reason: str) -> None:
    logger.warning(
        "The lock %s, which a test holds by hold(), was lost: %s.",
        held.key,
        reason,
        extra=fields("lost", key=held.key),
    )


def _app_of(what: Any) -> Celery:
    """The app of a task, or the one that a proxy such as `celery.current_app` stands for."""
    if isinstance(what, Task):
        return guard_for(what).app
    if isinstance(what, Celery):
        return getattr(what, "_get_current_object", lambda: what)()
    raise TypeError(f"expected a task or an app (or, to pass time, a holder), not {what!r}")


def _keys(client: Any, what: Any) -> set[str]:
    """The locks of an app or of a task that are there, or have starts, or a call that counts as done."""
    keys = {sighting.key for sighting in _sightings(client, what, (), {})}
    scope = _scope_of(what)
    for success in successes(client, settings_of(_app_of(what)).prefix):
        if scope in (None, success.scope):
            keys.add(success.key)
    return keys


def _scope_of(what: Any) -> str | None:
    """The scope of a task's locks; None of an app."""
    guard = guard_for(what) if isinstance(what, Task) else None
    return (guard.options.scope or guard.task) if guard else None


def _sightings(client: Any, what: Any, args: Any, kwargs: Any) -> Iterator[Sighting]:
    """What there is of the locks of an app, of a task, or of a call."""
    key = lock_for(what, args, kwargs).name if args or kwargs else None
    scope = _scope_of(what)
    for sighting in survey(client, settings_of(_app_of(what)).prefix):
        if key in (None, sighting.key) and scope in (None, sighting.scope):
            yield sighting


def _left(client: Any, what: Any, args: Any, kwargs: Any) -> list[str]:
    """In words, what is left of the locks."""
    left = []
    for seen in _sightings(client, what, args, kwargs):
        for one in seen.of_each():
            if one.holder is not None and one.holder.state != "resting":
                ended = "; its lease has ended, and it was not released" if one.is_stale else ""
                permit = f"permit {one.holder.permit} of " if seen.has_several else ""
                left.append(f"{permit}lock {seen.key}: held by {one.holder}{ended}")
        if seen.queued is not None:
            mark = (newest_name if seen.newest else mark_name)(seen.key)
            left.append(f"mark {mark}: task {seen.queued} is queued")
        for waiter in look(client, seen.key, waiters=WAITERS).waiters if seen.waiting else ():
            left.append(f"line of {seen.key}: task {waiter.task_id} waits at place {waiter.place}")
    return left


def _told(left: list[str], what: Any, within: float) -> str:
    of = f"task {what.name}" if isinstance(what, Task) else f"prefix {settings_of(what).prefix!r}"
    waited = f" after {within:g} s" if within else ""
    advice = (
        "Let the tasks end first (assert_released(..., within=5) waits for a worker), release what the test "
        "holds, or clear(app) between tests."
    )
    return "\n  ".join([f"{len(left)} left of {of}{waited}:", *left, advice])


def _age(
    client: redis.Redis, *, lock: str, by_s: float, living: Collection[str] = (), starts: bool = False
) -> str:
    """Run lua/age.lua: its word."""
    names = (mark_name, permits_name, done_name, starts_name, newest_name)
    beside = (*line_names(lock), *[name(lock) for name in names])
    argv = (round(by_s * 1e6), int(starts), *living)
    return str(_AGE.of(client, lock, (lock, record_name(lock), *beside), 1, *argv)[0])
