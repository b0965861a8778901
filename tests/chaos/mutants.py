"""Seeded flaws: a worker started with `CHAOS_MUTANT` has one, and its scenario must find it."""

import sys
import time
from collections.abc import Callable
from hashlib import sha1
from typing import Any

from celery import Celery, Task

from celery_setnx import connection as connection_module
from celery_setnx import keeper as keeper_module
from celery_setnx import lock as lock_module
from celery_setnx import request as request_module
from celery_setnx import run as run_module
from celery_setnx import scripts as scripts_module
from celery_setnx import trial as trial_module
from celery_setnx import waiting as waiting_module
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.keeper import Keeper
from celery_setnx.lock import HeldLock, Holder, SetnxLock


def _replace(verb: str, *changes: tuple[str, str]) -> None:
    script = getattr(lock_module, f"_{verb.upper()}")
    for old, new in changes:
        if script.text.count(old) != 1:
            raise RuntimeError(f"the mutant of {verb} expects exactly one {old!r}")
        script.text = script.text.replace(old, new)
    script.sha = sha1(script.text.encode()).hexdigest()


def no_lock() -> None:
    """Acquire never finds the lock taken."""
    _replace("acquire", ("'SET', KEYS[1], value, 'NX',", "'SET', KEYS[1], value,"))


def plain_del() -> None:
    """Release deletes the lock, whoever holds it."""
    _replace(
        "release",
        (
            "if h_token ~= token then return {'lost', now, value} end",
            "if h_token ~= token then redis.call('DEL', KEYS[1]) return {'released', now, value} end",
        ),
    )


def early_take_over() -> None:
    """A lock is taken over as soon as a tenth of its lease is over."""
    _replace("acquire", ("if now < h_deadline then", "if now < h_deadline - 0.9 * lease then"))


def no_take_over() -> None:
    """A lock that is not released is held for ever."""
    _replace("acquire", ("if now < h_deadline then", "if h_deadline > 0 then"))


def no_renewal() -> None:
    """The thread that renews is dead."""
    Keeper._run = lambda _self: None  # type: ignore[method-assign]


def no_resend() -> None:
    """A script that the server has forgotten is not sent again."""
    scripts_module.NoScriptError = type("Never", (Exception,), {})  # type: ignore[misc]


def greedy_renewal() -> None:
    """Renew begins with a command that a full server denies."""
    first = "redis.call('PEXPIREAT', KEYS[1], expiry)"
    _replace("renew", (first, f"redis.call('GETSET', KEYS[1], value)\n{first}"))


def no_deadline() -> None:
    """The local deadline is ignored: what was granted once counts for ever."""
    SetnxLock._valid_until = lambda *_arguments: 1e12  # type: ignore[method-assign]
    HeldLock.ensure = lambda _self: None  # type: ignore[method-assign]


def counting_fence() -> None:
    """The fence counts up from the last record, so it starts again when the data are lost."""
    _replace("acquire", ("math.max(h_fence + 1, now)", "h_fence + 1"))


def clock_fence() -> None:
    """The fence is the server's clock, so it falls when the clock goes back."""
    _replace("acquire", ("math.max(h_fence + 1, now)", "now"))


def client_clock() -> None:
    """The worker's clock decides, not the server's."""
    acquire = lock_module._acquire
    time_of_server = "local time = redis.call('TIME')"
    template = lock_module._ACQUIRE.text

    def by_own_clock(*arguments: Any, **options: Any) -> list[Any]:
        script = lock_module._ACQUIRE
        script.text = template.replace(time_of_server, f"local time = {{'{time.time():.0f}', '0'}}")
        script.sha = sha1(script.text.encode()).hexdigest()
        return acquire(*arguments, **options)

    if template.count(time_of_server) != 1:
        raise RuntimeError(f"the mutant of acquire expects exactly one {time_of_server!r}")
    lock_module._acquire = by_own_clock


def no_release_on_error() -> None:
    """The lock is released only if the body returns."""
    release = HeldLock.release

    def only_on_success(held: HeldLock, **options: Any) -> Any:
        if sys.exc_info()[0] is not None:
            raise LockUnavailable(held.key, "the body has failed")
        return release(held, **options)

    HeldLock.release = only_on_success  # type: ignore[method-assign]


def no_hold() -> None:
    """A lock that is to be held for the retry is released."""
    HeldLock.hold = lambda held, _seconds: held.release()  # type: ignore[method-assign]


def renewal_gives_up() -> None:
    """The first error ends all renewing of the process, and the client sends nothing twice."""
    renew_all, retry = keeper_module.renew_all, connection_module.Retry
    connection_module.Retry = lambda backoff, _times: retry(backoff, 0)  # type: ignore[misc,assignment]

    def once(*locks_and_client: Any) -> Any:
        errors = renew_all(*locks_and_client)
        if any(errors):
            time.sleep(1e6)
        return errors

    keeper_module.renew_all = once


def no_wake() -> None:
    """Whoever hands a lock over sends no wake-up; couriers do."""
    for module in (run_module, request_module):
        module.wake = lambda *_arguments: None  # type: ignore[attr-defined]


def no_courier() -> None:
    """Couriers come, do nothing, and do not come again; wake-ups are sent."""
    waiting_module._visit = lambda *_arguments: None


def lost_wake() -> None:
    """A wake-up that is not sent is sent by nobody."""
    no_wake()
    no_courier()


def no_ticket() -> None:
    """Every message of a call starts it, whichever has started it before."""
    _replace(
        "acquire", ("if later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then", "if false then")
    )


def claimed_once() -> None:
    """A message that has started its call does not start it again when it is delivered again."""
    _replace("acquire", ("t_copy ~= '' and t_copy ~= copy then", "t_copy ~= '' then"))


def join_first() -> None:
    """A call ends with the result of the first of its key that was ever joined."""
    joined = waiting_module._joined

    def first(task: Task, holder: Holder, wait: Any) -> Any:
        now = joined(task, holder, wait)
        if now is None:
            return None
        key = f"first:{task.request.args[0]}"
        return client_for(task.app).set(key, now, nx=True, ex=60, get=True) or now

    waiting_module._joined = first


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__: mutant
    for mutant in (
        no_lock, plain_del, early_take_over, no_take_over, no_renewal, no_resend, greedy_renewal, no_deadline,
        counting_fence, clock_fence, client_clock, no_release_on_error, no_hold, renewal_gives_up,
        no_wake, no_courier, lost_wake, no_ticket, claimed_once, join_first,
    )
}  # fmt: skip


def apply(name: str, app: Celery) -> None:
    """Give this process the flaw of that name; none if it is empty."""
    if name:
        # A flaw of the lease must not be hidden by what frees a dead holder's lock sooner.
        app.conf.setnx_same_host = False
        # Nor found before the first task: it is the scenario's to find.
        trial_module.LockServerCheck.start = lambda *_arguments: None  # type: ignore[method-assign]
        MUTANTS[name]()
