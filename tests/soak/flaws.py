"""Seeded flaws of the package, by name: a process that makes one of them its own must be found out."""

import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from hashlib import sha1
from types import SimpleNamespace
from typing import Any

import redis
from celery.signals import task_received, task_unknown

from celery_setnx import connection as connection_module
from celery_setnx import request as request_module
from celery_setnx.call import wake as wake_module
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockLost, LockUnavailable
from celery_setnx.lock import keeper as keeper_module
from celery_setnx.lock import line as line_module
from celery_setnx.lock import lock as lock_module
from celery_setnx.lock import scripts as scripts_module
from celery_setnx.lock.keeper import Keeper
from celery_setnx.lock.lock import HeldLock, SetnxLock
from celery_setnx.lock.scripts import PermitScript
from celery_setnx.run import acquire as acquire_module
from celery_setnx.run import courier as courier_module
from celery_setnx.run import join as join_module
from celery_setnx.run import park as park_module
from celery_setnx.run.sweep import Sweep

_FREE_IF_OURS = "if h_token ~= token then return lost() end"
_ALIVE = "\n  if now < h_deadline then"
_LATER_COPY = "t_copy ~= '' and t_copy ~= copy then"
_FENCE = "math.max(h_fence + 1, now)"
_RENEW_IF_OURS = "if h_token ~= token or state ~= 'running' then return answer('lost', '0') end"
_EXPIRE = "redis.call('PEXPIREAT', KEYS[1], expiry)"
_US = "tonumber(time[2])"
_CLOCK = "local time = redis.call('TIME')"

SCRIPTS: dict[str, tuple[str, str, str]] = {
    # Acquire never finds the lock taken.
    "no_lock": ("acquire", "'SET', KEYS[1], value, 'NX',", "'SET', KEYS[1], value,"),
    # Release deletes the lock, whoever holds it.
    "plain_del": (
        "release",
        _FREE_IF_OURS,
        "if h_token ~= token then redis.call('DEL', KEYS[1]) return {'released', now, value} end",
    ),
    # A lock is taken over as soon as a tenth of its lease is over; 10 ms before its deadline; never.
    "early_take_over": ("acquire", _ALIVE, "\n  if now < h_deadline - 0.9 * lease then"),
    "take_over_10_ms_early": ("acquire", _ALIVE, "\n  if now < h_deadline - 10000 then"),
    "no_take_over": ("acquire", _ALIVE, "\n  if h_deadline > 0 then"),
    # Renew begins with a command that a full server denies.
    "greedy_renewal": ("renew", _EXPIRE, f"redis.call('GETSET', KEYS[1], value)\n{_EXPIRE}"),
    # Renew brings an expired lease back to life if nobody has taken it over yet.
    "reviving_renewal": (
        "renew", "if now >= tonumber(h_deadline) then return answer('lost', h_deadline) end", "",
    ),
    # Renew does not look whose record it extends.
    "careless_renewal": (
        "renew", _RENEW_IF_OURS, "if state ~= 'running' then return answer('lost', '0') end",
    ),
    # The fence counts up from the last record, so it starts again when the data or the record are lost.
    "counting_fence": ("acquire", _FENCE, "h_fence + 1"),
    # The fence is the server's clock, so it falls when the clock goes back.
    "clock_fence": ("acquire", _FENCE, "now"),
    # The server's time is cut off at whole milliseconds.
    "floored_milliseconds": ("acquire renew release", _US, f"math.floor({_US} / 1000) * 1000"),
    # Every message of a call starts it, whichever has started it before.
    "no_ticket": ("acquire", f"if later > 0 or later == 0 and {_LATER_COPY}", "if false then"),
    # A line that was looked at is forgotten.
    "forgotten_line": ("settle", "if within == '' and not is_changed then", "if true then"),
    # A call to which the lock was handed in vain is the first in line again at once.
    "no_passing_over": ("serve", "h_since = int(4000000000000000 + now +", "local _ = int(now +"),
    # Whoever finds a line beside a lock that nobody has waits behind it.
    "line_is_held": ("acquire", "return answer('line',", "return answer('held',"),
    # A message that has started its call does not start it again when it is delivered again.
    "claimed_once": ("acquire", _LATER_COPY, "t_copy ~= '' then"),
}  # fmt: skip
"""What is wrong with a script: its verb, what stands there once, and what stands there instead."""


def _nothing(*_arguments: Any) -> None:
    """In place of what is left out."""


_NO_WAKE = [(module, "let_others_start", _nothing) for module in (acquire_module, request_module)]
_NO_SWEEP = [(Sweep, "sweep", _nothing)]

ATTRIBUTES: dict[str, list[tuple[Any, str, Any]]] = {
    # The package as it is.
    "none": [],
    # The thread that renews is dead.
    "no_renewal": [(Keeper, "_turn", _nothing)],
    # A script that the server has forgotten is not sent again.
    "no_resend": [(scripts_module, "NoScriptError", type("Never", (Exception,), {}))],
    # The local deadline is ignored: what was granted once counts for ever.
    "no_deadline": [(SetnxLock, "_valid_until", lambda *_arguments: 1e12), (HeldLock, "ensure", _nothing)],
    # A lock that is to be held for the retry is released.
    "no_hold": [(HeldLock, "hold", lambda held, _seconds: held.release())],
    # Whoever hands a lock over sends no wake-up; sweeps do, when the hand-over has ended.
    "no_wake": _NO_WAKE,
    # Couriers come, do nothing, and do not come again.
    "no_courier": [(courier_module, "_visit", _nothing)],
    # No worker looks at any line, nor notices that Redis has lost its data.
    "no_sweep": _NO_SWEEP,
    # A wake-up that is not sent is sent by nobody.
    "lost_wake": [*_NO_WAKE, *_NO_SWEEP],
    # All data of Redis look the same.
    "epoch_unnoticed": [(line_module, "_new_epoch", lambda: 1)],
    # That a call has begun is remembered no longer than that it waits.
    "short_ticket": [(acquire_module, "BEGUN_S", 7200.0)],
}
"""What is wrong with the code: where, the name, and what it stands for instead."""


def _replace(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise RuntimeError(f"the flaw expects exactly one {old!r}")
    return text.replace(old, new)


def _put(owner: Any, attribute: str, instead: Any) -> Any:
    """Have a name of the package stand for something else; what it stood for."""
    if not hasattr(owner, attribute):
        raise RuntimeError(f"the flaw expects {attribute} of {owner}")
    was = getattr(owner, attribute)
    setattr(owner, attribute, instead)
    return was


def _scripts(verb: str) -> list[Any]:
    """A verb's script; of some verbs also the one that chooses among several permits."""
    script = getattr(line_module if verb == "settle" else lock_module, f"_{verb.upper()}")
    return [script.one, script.several] if isinstance(script, PermitScript) else [script]


def _set_text(script: Any, text: str) -> None:
    script.text, script.sha = text, sha1(text.encode()).hexdigest()


def one_permit_more() -> Callable[..., SetnxLock]:
    """A process knows of a limit that is higher by one."""
    return lambda *names, limit, **options: SetnxLock(*names, limit=limit + 1, **options)


def one_start_more() -> Callable[..., SetnxLock]:
    """A process knows of a rate that is higher by one start."""

    def paced(*names: Any, rate: tuple[int, float], **options: Any) -> SetnxLock:
        return SetnxLock(*names, rate=(rate[0] + 1, rate[1]), **options)

    return paced


def no_deadline_check() -> type[SetnxLock]:
    """Acquire does not ask whether the lease was over before the reply came."""
    source = textwrap.dedent(inspect.getsource(SetnxLock._now_held))
    namespace = dict(vars(lock_module))
    exec(_replace(source, "if after >= held._valid_until:", "if False:"), namespace)
    return type("Unchecked", (SetnxLock,), {"_now_held": namespace["_now_held"]})


def client_clock() -> None:
    """The worker's clock decides, not the server's."""
    script = lock_module._ACQUIRE.one
    template = script.text
    _replace(template, _CLOCK, "")

    def by_own_clock(*arguments: Any, **options: Any) -> list[Any]:
        _set_text(script, template.replace(_CLOCK, f"local time = {{'{time.time():.0f}', '0'}}"))
        return acquire(*arguments, **options)

    acquire = _put(lock_module, "_acquire", by_own_clock)


def no_release_on_error() -> None:
    """The lock is released only if the body returns, and not later either."""
    failed = set()

    def only_on_success(held: HeldLock, **options: Any) -> Any:
        if sys.exc_info()[0] is not None:
            failed.add(held.token)
        if held.token in failed:
            raise LockUnavailable(held.key, "the body has failed")
        return release(held, **options)

    release = _put(HeldLock, "release", only_on_success)


def renewal_gives_up() -> None:
    """The first error ends all renewing of the process, and the client sends nothing twice."""
    retry = _put(connection_module, "Retry", lambda backoff, _times: retry(backoff, 0))

    def once(*locks_and_client: Any) -> Any:
        errors = renew_all(*locks_and_client)
        if any(errors):
            time.sleep(1e6)
        return errors

    renew_all = _put(keeper_module, "renew_all", once)


def no_serve() -> None:
    """Nobody who comes lets a line go on; sweeps do."""
    seed("line_is_held")
    for module in (wake_module, courier_module, join_module, park_module):
        _put(module, "let_the_line_go_on", _nothing)


def serve_without_wake() -> None:
    """Whoever serves a line wakes nobody; whoever releases a lock does."""
    wake = _put(wake_module, "wake", _nothing)

    def wake_all(app: Any, task: str, lock: SetnxLock) -> None:
        while lock.heirs:
            wake(app, lock.heirs.pop(0), lock.name)

    for module in (acquire_module, request_module):
        _put(module, "let_others_start", wake_all)


def twin_wakes() -> None:
    """Each wake-up is sent twice, and nothing tells one from the other."""
    wake = wake_module.wake
    _put(Call, "as_copy", lambda call: call._replace(copy="twin"))

    def twice(app: Any, heir: Any, key: str) -> None:
        wake(app, heir, key)
        wake(app, heir, key)

    for module in (wake_module, park_module):
        _put(module, "wake", twice)


def no_letting_go() -> None:
    """A waiting call of a task that is plain now runs, and stays in its line."""
    task_received.disconnect(request_module._let_go)


def unknown_stays() -> None:
    """A message that is thrown away leaves its call in line."""
    task_unknown.disconnect(request_module._free_rejected)


def join_first() -> None:
    """A call ends with the result of the first of its key that was ever joined."""

    def first(task: Any, holder: Any, call: Any) -> Any:
        now = joined(task, holder, call)
        if now is None:
            return None
        key = f"first:{task.request.args[0]}"
        return client_for(task.app).set(key, now, nx=True, ex=60, get=True) or now

    joined = _put(acquire_module, "joined_by", first)


def classic_recipe() -> type:
    """SETNX, GET, GETSET and DEL as in the recipe, by clients with unequal timeouts."""
    return ClassicLock


class ClassicLock:
    """The recipe, with seconds of 20 ms so that its races take less time; leases count such seconds."""

    SECOND_S = 0.02

    def __init__(self, client: redis.Redis, name: str, *, lease: float, **_options: Any) -> None:
        self.client = client
        self.name = name
        self.lease_s = lease
        self._valid_until = 0.0
        self._value = 0

    def acquire(self, wait: float, *, token: str) -> Any:
        give_up = time.monotonic() + wait
        while not self._acquire_once():
            if time.monotonic() > give_up:
                return SimpleNamespace(lock=None, holder=None, taken_over_from=None)
            # Nothing expires before the next of its seconds begins.
            time.sleep(self.SECOND_S - time.time() % self.SECOND_S)
        return SimpleNamespace(lock=self, holder=None, taken_over_from=None)

    def _acquire_once(self) -> bool:
        before, now = time.monotonic(), time.time() / self.SECOND_S
        self._value = int(now + self.lease_s / self.SECOND_S + 1)
        self._valid_until = before + self.lease_s
        if self.client.setnx(self.name, self._value):
            return True
        held_till = self.client.get(self.name)
        if held_till is None or int(now) <= int(held_till):
            return False
        old = self.client.getset(self.name, self._value)
        return old is None or int(now) > int(old)

    def ensure(self) -> None:
        if time.monotonic() >= self._valid_until:
            raise LockLost(self.name, "its time is over")

    def renew(self) -> None:
        """The recipe knows no renewal."""

    def release(self) -> None:
        if time.time() / self.SECOND_S < self._value:
            self.client.delete(self.name)


def seed(name: str) -> Callable[..., Any]:
    """Give this process the flaw of that name; the lock to use.

    Raises:
        RuntimeError: The flaw does not apply to the package any more.
    """
    if name in ATTRIBUTES:
        for owner, attribute, instead in ATTRIBUTES[name]:
            _put(owner, attribute, instead)
        return SetnxLock
    if name not in SCRIPTS:
        return globals()[name]() or SetnxLock  # type: ignore[no-any-return]
    verbs, old, new = SCRIPTS[name]
    for verb in verbs.split():
        for script in _scripts(verb):
            _set_text(script, _replace(script.text, old, new))
    return SetnxLock
