"""Seeded flaws of the package, by name: a process that makes one of them its own must be found out."""

import inspect
import textwrap
import time
from hashlib import sha1
from typing import Any

from celery_setnx import connection as connection_module
from celery_setnx import request as request_module
from celery_setnx.call import wake as wake_module
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.lock import held as held_module
from celery_setnx.lock import keeper as keeper_module
from celery_setnx.lock import line as line_module
from celery_setnx.lock import lock as lock_module
from celery_setnx.lock import scripts as scripts_module
from celery_setnx.lock import verbs as verbs_module
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import Keeper
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.run import attempt as attempt_module
from celery_setnx.run import courier as courier_module
from celery_setnx.run import park as park_module
from celery_setnx.run.sweep import Sweep

_FREE_IF_OURS = "if p.token ~= token then return {'lost', now, value, false, p.since or false} end"
_HELD = "if p.kind == 'held' then return 'held' end"
_DEADLINE = "deadline = tonumber(deadline or 0)"
_EXPIRE = "redis.call('PEXPIREAT', p.lock, expiry)"
_CLOCK = "local time = redis.call('TIME')"

SCRIPTS: dict[str, tuple[str, str, str]] = {
    # Acquire never finds the lock taken.
    "no_lock": ("acquire", _HELD, _HELD.replace("return 'held'", "return 'acquired'")),
    # Release deletes the lock, whoever holds it.
    "plain_del": (
        "release",
        _FREE_IF_OURS,
        "if p.token ~= token then redis.call('DEL', KEYS[1]) return {'released', now, value} end",
    ),
    # A lock is taken over 10 ms before its deadline.
    "take_over_10_ms_early": ("acquire", _DEADLINE, f"{_DEADLINE} - 10000"),
    # Renew begins with a command that a full server denies.
    "greedy_renewal": ("renew", _EXPIRE, f"redis.call('GETSET', p.lock, value)\n{_EXPIRE}"),
    # The fence is the server's clock, so it falls when the clock goes back.
    "clock_fence": ("acquire", "before < now and since or int(before + 1)", "since"),
    # A line that was looked at is forgotten.
    "forgotten_line": ("settle", "if within == '' and not is_changed then", "if true then"),
    # A message that has started its call does not start it again when it is delivered again.
    "claimed_once": ("acquire", "begun_by ~= '' and begun_by ~= copy", "begun_by ~= ''"),
}  # fmt: skip
"""What is wrong with a script: its verb, what stands there once, and what stands there instead."""


def _nothing(*_arguments: Any) -> None:
    """In place of what is left out."""


ATTRIBUTES: dict[str, list[tuple[Any, str, Any]]] = {
    # The thread that renews is dead.
    "no_renewal": [(Keeper, "_turn", _nothing)],
    # A script that the server has forgotten is not sent again.
    "no_resend": [(scripts_module, "NoScriptError", type("Never", (Exception,), {}))],
    # The local deadline is ignored: what was granted once counts for ever.
    "no_deadline": [
        (lock_module, "local_deadline", lambda *_arguments: 1e12),
        (held_module, "local_deadline", lambda *_arguments: 1e12),
        (HeldLock, "ensure", _nothing),
    ],
    # Couriers come, do nothing, and do not come again.
    "no_courier": [(courier_module, "_visit", _nothing)],
    # No worker looks at any line, nor notices that Redis has lost its data.
    "no_sweep": [(Sweep, "sweep", _nothing)],
    # All data of Redis look the same.
    "epoch_unnoticed": [(line_module, "_new_epoch", lambda: 1)],
    # That a call has begun is remembered no longer than that it waits.
    "short_ticket": [(attempt_module, "BEGUN_S", 7200.0)],
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


def _script(verb: str) -> Any:
    """A verb's script."""
    return getattr(line_module if verb == "settle" else verbs_module, verb.upper())


def _set_text(script: Any, text: str) -> None:
    script.text, script.sha = text, sha1(text.encode()).hexdigest()


def one_permit_more() -> None:
    """A process knows of a limit that is higher by one."""
    init = _put(SetnxLock, "__init__", lambda *of, limit, **rest: init(*of, limit=limit + 1, **rest))


def one_start_more() -> None:
    """A process knows of a rate that is higher by one start."""
    init = _put(
        SetnxLock, "__init__", lambda *of, rate, **rest: init(*of, rate=(rate[0] + 1, rate[1]), **rest)
    )


def no_deadline_check() -> None:
    """Acquire does not ask whether the lease was over before the reply came."""
    source = textwrap.dedent(inspect.getsource(SetnxLock._now_held))
    namespace = dict(vars(lock_module))
    exec(_replace(source, "if after >= until:", "if False:"), namespace)
    _put(SetnxLock, "_now_held", namespace["_now_held"])


def client_clock() -> None:
    """The worker's clock decides, not the server's."""
    script = verbs_module.ACQUIRE
    template = script.text
    _replace(template, _CLOCK, "")

    def by_own_clock(*arguments: Any, **options: Any) -> list[Any]:
        _set_text(script, template.replace(_CLOCK, f"local time = {{'{time.time():.0f}', '0'}}"))
        return acquire(*arguments, **options)

    acquire = _put(verbs_module, "acquire", by_own_clock)


def renewal_gives_up() -> None:
    """The first error ends all renewing of the process, and the client sends nothing twice."""
    retry = _put(connection_module, "Retry", lambda backoff, _times: retry(backoff, 0))

    def once(*locks_and_client: Any) -> Any:
        errors = renew_all(*locks_and_client)
        if any(errors):
            time.sleep(1e6)
        return errors

    renew_all = _put(keeper_module, "renew_all", once)


def serve_without_wake() -> None:
    """Whoever serves a line wakes nobody; whoever releases a lock does."""
    wake = _put(wake_module, "wake", _nothing)

    def wake_all(app: Any, task: str, lock: SetnxLock) -> None:
        while lock.heirs:
            wake(app, lock.heirs.pop(0), lock.name)

    for module in (attempt_module, request_module):
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


def join_first() -> None:
    """A call ends with the result of the first of its key that was ever joined."""

    def first(task: Any, holder: Any, call: Any) -> Any:
        now = joined(task, holder, call)
        if now is None:
            return None
        key = f"first:{task.request.args[0]}"
        return client_for(task.app).set(key, now, nx=True, ex=60, get=True) or now

    joined = _put(attempt_module, "joined_by", first)


def seed(name: str) -> None:
    """Give this process the flaw of that name.

    Raises:
        RuntimeError: The flaw does not apply to the package any more.
    """
    if name in ATTRIBUTES:
        for owner, attribute, instead in ATTRIBUTES[name]:
            _put(owner, attribute, instead)
    elif name not in SCRIPTS:
        globals()[name]()
    else:
        verb, old, new = SCRIPTS[name]
        script = _script(verb)
        _set_text(script, _replace(script.text, old, new))
