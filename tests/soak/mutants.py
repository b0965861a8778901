"""Seeded mutants of the lock: each one has a flaw that the soak must find."""

import inspect
import textwrap
import time
from hashlib import sha1
from types import SimpleNamespace
from typing import Any

import redis

from celery_setnx import lock as lock_module
from celery_setnx.exceptions import LockLost
from celery_setnx.lock import SetnxLock
from tests.soak.holder import LockMaker

_US = "tonumber(time[2])"


def _replace(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"the mutant expects exactly one {old!r}"
    return text.replace(old, new)


def _mutate_script(verb: str, old: str, new: str) -> None:
    script = getattr(lock_module, f"_{verb.upper()}")
    script.text = _replace(script.text, old, new)
    script.sha = sha1(script.text.encode()).hexdigest()


def none() -> LockMaker:
    """The lock as it is."""
    return SetnxLock


def plain_del() -> LockMaker:
    """Release deletes the lock whoever holds it."""
    _mutate_script(
        "release",
        "if h_token ~= token then return {'lost', now, value} end",
        "if h_token ~= token then redis.call('DEL', KEYS[1]) return {'released', now, value} end",
    )
    return SetnxLock


def incr_fence() -> LockMaker:
    """The fence counts up from the last record, so it starts again when the record is lost."""
    _mutate_script("acquire", "math.max(h_fence + 1, now)", "h_fence + 1")
    return SetnxLock


def no_deadline_check() -> LockMaker:
    """Acquire does not ask whether the lease was over before the reply came."""
    source = textwrap.dedent(inspect.getsource(SetnxLock._now_held))
    namespace = dict(vars(lock_module))
    exec(_replace(source, "if after >= held._valid_until:", "if False:"), namespace)

    class Unchecked(SetnxLock):
        _now_held = namespace["_now_held"]

    return Unchecked


def floored_milliseconds() -> LockMaker:
    """The server's time is cut off at whole milliseconds."""
    for verb in ("acquire", "renew", "release"):
        _mutate_script(verb, _US, "math.floor(tonumber(time[2]) / 1000) * 1000")
    return SetnxLock


def getset_first() -> LockMaker:
    """Renew begins with a command that a full server denies."""
    first = "redis.call('PEXPIREAT', KEYS[1], expiry)"
    _mutate_script("renew", first, f"redis.call('GETSET', KEYS[1], value)\n{first}")
    return SetnxLock


def reviving_renewal() -> LockMaker:
    """Renew brings an expired lease back to life if nobody has taken it over yet."""
    _mutate_script("renew", "if now >= tonumber(h_deadline) then return answer('lost', h_deadline) end", "")
    return SetnxLock


def careless_renewal() -> LockMaker:
    """Renew does not look whose record it extends."""
    _mutate_script(
        "renew",
        "if h_token ~= token or state ~= 'running' then return answer('lost', '0') end",
        "if state ~= 'running' then return answer('lost', '0') end",
    )
    return SetnxLock


def early_take_over() -> LockMaker:
    """A lock is taken over 10 ms before its deadline."""
    _mutate_script("acquire", "if now < h_deadline then", "if now < h_deadline - 10000 then")
    return SetnxLock


def classic_recipe() -> LockMaker:
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
