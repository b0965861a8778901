"""The options: parsed, validated, merged. Frozen once made; nothing here talks to Redis."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from inspect import ismodule
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from celery import Celery

from celery_setnx.address import SCHEMES
from celery_setnx.configured import until_changed
from celery_setnx.exceptions import OptionError
from celery_setnx.keys import KeyOption
from celery_setnx.lock.lock import DAY_S, LONGEST_PERIOD_S, MOST_PERMITS, MOST_STARTS
from celery_setnx.lock.record import Terms

ConflictPolicy = Literal["auto", "skip", "retry", "wait", "join", "raise"]
RedisErrorPolicy = Literal["retry", "run", "raise"]
DedupeMode = Literal["until_started", "until_done"]
DuplicatePolicy = Literal["return", "raise", "replace"]
CONFLICT_POLICIES, REDIS_ERROR_POLICIES = get_args(ConflictPolicy), get_args(RedisErrorPolicy)
DEDUPE_MODES, DUPLICATE_POLICIES = get_args(DedupeMode), get_args(DuplicatePolicy)


class _Unset:
    """Stands for `skip_result` left alone, because None is a result."""

    def __repr__(self) -> str:
        return "a JSON dict naming the holder"


UNSET = _Unset()


class Rate(NamedTuple):
    """How many calls of a key may start within any period.

    Attributes:
        starts: How many, 1 to 1,000.
        period_s: The period, in seconds.
    """

    starts: int
    period_s: float


@dataclass(frozen=True)
class Options:
    """How one task is guarded. Durations are seconds, given as int, float or timedelta.

    Attributes:
        key: What makes two calls the same; see `celery_setnx.keys.KeyFunction`. Defaults to all arguments.
        scope: The name the key lives under; tasks with the same scope and key exclude each other.
            Defaults to the task's name.
        limit: How many calls of a key may run at a time, 1 to 100, each under a permit of its own. It is the
            task's, not a single call's. Defaults to 1.
        rate: How many calls of a key may start within any period: `"10/m"` (`s`, `m`, `h` or `d`), or a pair
            of their number, 1 to 1,000, and seconds or a timedelta. It is the task's, not a single call's.
            Defaults to none: as soon as a permit is free.
        on_conflict: At run time, the lock held by another: `"skip"`, `"retry"` (comes back after a while),
            `"wait"` (is woken when its turn has come, first come first served), `"join"` (waits, and ends
            with the holder's result), `"raise"`, `"auto"` (a task with a `rate` or `dedupe="until_started"`
            waits, a step of a workflow retries, any other call skips) or a callable taking a `Conflict`.
            Defaults to `"auto"`.
        skip_result: What a skipped task returns. Defaults to a JSON dict naming the holder.
        lease: Seconds after which a holder that stopped renewing may be taken over. Renewed every third
            of it while the task runs. Defaults to 30.
        at_least_for: The lock rests until this long after its acquisition. Defaults to 0.
        at_most_for: Renewal stops after this long. Defaults to never.
        retry_delay: First wait before a task that retries comes back; doubled each time, with jitter.
            Defaults to 1.
        retry_delay_max: Longest such wait. Defaults to 60.
        max_wait: After this long a task that waits or retries fails with `LockTimeout`. Defaults to never.
        dedupe: At publish time: `"until_started"` (at most one call queued) or `"until_done"` (at most one
            queued or running). Defaults to none.
        dedupe_for: With `dedupe="until_done"`: seconds for which a call that has succeeded makes duplicates
            of its like. It is the task's, not a single call's. Defaults to none: while it is queued or runs.
        on_duplicate: What a call that is a duplicate gets: `"return"`, the `AsyncResult` of the other call,
            `.deduplicated`; `"raise"`, `DuplicateTask`; or what a callable taking a `Duplicate` returns. Or
            `"replace"`: the newest call of a key runs, and older ones that have not begun are skipped.
            Defaults to `"return"`.
        debounce: Seconds without a further call of a key after which the newest one runs. It implies
            `on_duplicate="replace"` and `dedupe="until_started"`. Defaults to none.
        debounce_max: Seconds after the first call of a key that waits, after which the newest one runs
            however many follow. Defaults to 60.
        debounce_leading: Whether the first call of a key that was quiet runs at once. Defaults to False.
        queue_lease: How long a mark lasts beyond the time at which its call may start, and a lock beyond the
            time of the retry that it is held for. Defaults to 3600.
        hold_on_retry: Keep the lock while the task waits for its own retry. Defaults to False.
        on_redis_error: At run time, Redis unreachable: `"retry"`, `"run"` unguarded, or `"raise"`.
            Defaults to `"retry"`.
    """

    key: KeyOption = None
    scope: str | None = None
    limit: int = 1
    rate: Rate | None = None
    on_conflict: str | Callable[[Any], Any] = "auto"
    skip_result: Any = UNSET
    lease: float = 30.0
    at_least_for: float = 0.0
    at_most_for: float | None = None
    retry_delay: float = 1.0
    retry_delay_max: float = 60.0
    max_wait: float | None = None
    dedupe: str | None = None
    dedupe_for: float | None = None
    on_duplicate: str | Callable[..., Any] = "return"
    debounce: float | None = None
    debounce_max: float = 60.0
    debounce_leading: bool = False
    queue_lease: float = 3600.0
    hold_on_retry: bool = False
    on_redis_error: str = "retry"

    @property
    def terms(self) -> Terms:
        """How many calls of a key may run at a time, and start within a period."""
        return Terms(self.limit, *(self.rate or ()))

    @property
    def asks(self) -> str:
        """What makes duplicates at publish time: the mode of `dedupe`, or `dedupe_for`."""
        return "dedupe_for" if self.dedupe_for else str(self.dedupe)

    @property
    def replaces(self) -> bool:
        """Whether the newest call of a key replaces those before it."""
        return self.on_duplicate == "replace"

    @property
    def drops_equal(self) -> bool:
        """Whether a call that equals the newest is its duplicate: with `debounce` its time starts anew."""
        return self.replaces and self.debounce is None

    @cached_property
    def may_wait(self) -> bool:
        """Whether a call may wait in line: `wait`, `join`, a callable's choice, or what `auto` comes to."""
        auto = self.on_conflict == "auto" and (self.rate or self.dedupe == "until_started")
        return bool(auto) or callable(self.on_conflict) or self.on_conflict in ("wait", "join")


Duration = float | timedelta


class SingletonOptions(TypedDict, total=False):
    """The options as they are written, for editors and type checkers; `Options` says what they mean."""

    key: KeyOption
    scope: str | None
    limit: int
    rate: str | tuple[int, Duration] | None
    on_conflict: ConflictPolicy | Callable[[Any], Any]
    skip_result: Any
    lease: Duration
    at_least_for: Duration
    at_most_for: Duration | None
    retry_delay: Duration
    retry_delay_max: Duration
    max_wait: Duration | None
    dedupe: DedupeMode | None
    dedupe_for: Duration | None
    on_duplicate: DuplicatePolicy | Callable[[Any], Any]
    debounce: Duration | None
    debounce_max: Duration
    debounce_leading: bool
    queue_lease: Duration
    hold_on_retry: bool
    on_redis_error: RedisErrorPolicy


NAMES = tuple(option.name for option in fields(Options))
# It acts when a call is published, so its message need not carry it. Key, scope, dedupe and queue_lease do
# travel: the call's own retry computes its key again, and the worker marks it as queued.
PUBLISH_ONLY = frozenset({"on_duplicate"})
OF_THE_TASK = frozenset({"limit", "rate", "dedupe_for"})
"""What all calls of a task have in common: the calls of a key must agree on it."""
_LEASE = (
    "lease (30 s is enough, because a running task renews it). To end a lock during a run use at_most_for; "
    "to limit how long a queued call counts, queue_lease; how long a call waits, max_wait"
)
OF_OTHERS: Mapping[str, str] = {
    **dict.fromkeys(("keys", "unique_on", "unique_key", "lock_key"), "key"),
    **dict.fromkeys(("timeout", "default_timeout", "ttl", "expires", "expiry", "lock_expiry"), _LEASE),
    **dict.fromkeys(("lock_timeout", "lock_ttl", "unique_timeout"), _LEASE),
    **dict.fromkeys(("raise_on_duplicate", "unique_raises"), "on_duplicate='raise' ('return' for False)"),
    "graceful": "on_duplicate='return', the default ('raise' for False)",
    "unlock_before_run": "dedupe='until_started'",
    "unique": "dedupe='until_done'",
    "blocking": "on_conflict='wait'",
    "blocking_timeout": "max_wait",
    "rate_limit": "rate, such as '10/m'",
    "concurrency": "limit",
}
"""What celery-once, celery-singleton, celery-heimdall and redis-py call an option, and what it is here."""

_RATE = re.compile(r"(\d{1,6})/([smhd])", re.ASCII)
_PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
LONGEST_S = 3660 * DAY_S
"""Ten years, the longest duration: with it, times in microseconds are exact numbers in Lua."""

SHORTEST_S = 0.001
"""A millisecond, the shortest duration that servers know."""

_DURATIONS = {
    "lease": "positive",
    "at_least_for": "not negative",
    "at_most_for": "positive or None",
    "retry_delay": "positive",
    "retry_delay_max": "positive",
    "max_wait": "not negative or None",
    "dedupe_for": "positive or None",
    "debounce": "positive or None",
    "debounce_max": "positive",
    "queue_lease": "positive",
}


_DEBOUNCED = {"dedupe": "until_started", "on_duplicate": "replace"}  # what `debounce` implies


def merged(where: str, *layers: Mapping[str, Any]) -> Options:
    """Options from layers of plain mappings, the farthest first and the nearest last."""
    values: dict[str, Any] = {}
    nearer: dict[str, Any] = {}  # than the debounce, or beside it: what it implies counts over farther layers
    for layer in layers:
        given = checked(where, layer)
        nearer = given if "debounce" in given else {**nearer, **given}
        values.update(given)
    if values.get("debounce") is not None:
        values |= {name: nearer.get(name, value) for name, value in _DEBOUNCED.items()}
    options = Options(**values)
    _check_together(where, options)
    return options


def checked(where: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of options with durations in seconds."""
    if not isinstance(layer, Mapping):
        raise OptionError(f"the options of {where} must be a mapping of names to values, not {layer!r}")
    return {name: _value(where, name, value) for name, value in layer.items()}


def plain(where: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one call that travel in its message."""
    values = checked(where, layer)
    for name, value in values.items():
        if callable(value) and name not in PUBLISH_ONLY:
            cause = "is a callable, which cannot travel in a message; give it to the task"
            raise OptionError(f"option {name!r} of {where} {cause}")
        if name in OF_THE_TASK:
            raise OptionError(
                f"option {name!r} of {where} is the same for all calls of the task; give it to the task"
            )
    return {name: value for name, value in values.items() if name not in PUBLISH_ONLY}


@dataclass(frozen=True)
class Settings:
    """The app's settings, from `setnx_*` in its configuration.

    Attributes:
        enabled: Whether tasks are guarded, and calls deduplicated; else all run plainly. Defaults to True.
        prefix: First part of every key of ours; give each environment its own. Defaults to `setnx`, behind
            the `global_keyprefix` by which Celery keeps apps apart.
        defaults: Options for all tasks of the app. Defaults to none.
        broker: The name of the broker, the same for all its workers. Defaults to one that its URLs make.
        retention: Seconds that an unreleased record outlives its deadline. Defaults to a day.
        same_host: Whether a holder on this host whose process is proved dead is taken over at once.
            Defaults to True.
        show_arguments: Whether calls that are published say what their key was made of. Defaults to True.
        timeout: Seconds for which a command waits for the lock server, twice at most. Defaults to 2.
        beat_scheduler: The class that `celery_setnx.beat:HotStandbyScheduler` makes stand by. Defaults to
            `celery.beat:PersistentScheduler`.
        beat_lease: Seconds for which a beat that died may keep the lead. Defaults to 10.
    """

    enabled: bool
    prefix: str
    broker: str | None
    defaults: Mapping[str, Any]
    retention: float
    same_host: bool
    show_arguments: bool
    timeout: float
    beat_scheduler: str
    beat_lease: float


SETTINGS = ("setnx_url", "setnx_transport_options", *(f"setnx_{field.name}" for field in fields(Settings)))
FROM_ENVIRONMENT = ("CELERY_SETNX_URL",)
_CLOSE = 0.85  # how like a name of ours a name must be that is surely one, misspelt


def refuse_unknown_settings(conf: Any, namespace: str | None) -> None:
    """Refuse a setting that is surely one of ours, misspelt or in a spelling that Celery does not read."""
    for written, meant in unknown_settings(conf, namespace):
        if meant is not None:
            raise OptionError(f"there is no setting {written!r}; did you mean {meant!r}?")


def refuse_unread_environment(conf: Any, namespace: str | None = None) -> None:
    """Refuse a variable that is named as a setting of ours, or nearly, and gives nobody its value."""
    for variable in sorted(os.environ):
        name = variable.lower().removeprefix("celery_")
        if not name.startswith("setnx_") or variable in FROM_ENVIRONMENT or not os.environ.get(variable):
            continue
        for meant in difflib.get_close_matches(name, SETTINGS, n=1, cutoff=_CLOSE):
            if conf.get(meant) is None:
                known = f", or rename the variable to CELERY_{meant.upper()}" if meant == "setnx_url" else ""
                raise OptionError(
                    f"the environment variable {variable} is not read: set {spelled(meant, namespace)} in "
                    f"the app's configuration{known}"
                )


def spelled(name: str, namespace: str | None) -> str:
    """The name of a setting behind the namespace of `config_from_object`, in its case."""
    if not namespace:
        return name
    prefix = f"{namespace.rstrip('_')}_"
    return f"{prefix}{name}".upper() if prefix.isupper() else f"{prefix}{name}".lower()


def unknown_settings(conf: Any, namespace: str | None) -> Iterator[tuple[str, str | None]]:
    """Settings that are named as ours are, and that nobody reads; and which of ours is meant, if it is plain.

    Celery reads our names in lower case; with the namespace of `config_from_object`, also behind it and in
    its case. What is spelled otherwise is nothing to it, unless the right name is given too.
    """
    prefix = f"{namespace.rstrip('_')}_" if namespace else ""
    for written in list(conf):
        name = written.lower().removeprefix(prefix.lower()).removeprefix("celery_")
        if not name.startswith("setnx_"):
            continue
        is_plain, spaced = written == name, f"{prefix}{name}"
        is_read = is_plain or (prefix and written == (spaced.upper() if prefix.isupper() else spaced.lower()))
        if name in SETTINGS and (is_read or conf.get(name) is not None):
            continue
        if callable(conf[written]) or ismodule(conf[written]):  # a name that a module of settings imports
            continue
        close = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=_CLOSE)
        if close and prefix and not is_plain:
            close = [spelled(close[0], namespace)]
        if close or is_read:
            yield written, close[0] if close else None


def settings_of(app: Celery) -> Settings:
    """The app's `setnx_*` settings as they are now; read anew where they have changed."""

    def read() -> Settings:
        refuse_unknown_settings(app.conf, app.namespace)
        refuse_unread_environment(app.conf, app.namespace)
        return settings(app.conf)

    return until_changed(app, "_setnx_settings", read)


def settings(conf: Any) -> Settings:
    """Read and validate the app's `setnx_*` settings, but for `setnx_url`."""
    prefix = conf.get("setnx_prefix") or f"{_key_prefix(conf)}setnx"
    check_name("setnx_prefix", prefix)
    retention = conf.get("setnx_retention", DAY_S)
    return Settings(
        enabled=_flag("setnx_enabled", conf.get("setnx_enabled", True)),
        prefix=prefix,
        broker=_broker(conf.get("setnx_broker")),
        defaults=checked("setnx_defaults", conf.get("setnx_defaults") or {}),
        retention=duration_s("the app", "setnx_retention", retention, "positive"),
        same_host=_flag("setnx_same_host", conf.get("setnx_same_host", True)),
        show_arguments=_flag("setnx_show_arguments", conf.get("setnx_show_arguments", True)),
        timeout=timeout_s(conf),
        beat_scheduler=conf.get("setnx_beat_scheduler") or "celery.beat:PersistentScheduler",
        beat_lease=duration_s("the app", "setnx_beat_lease", conf.get("setnx_beat_lease", 10.0), "positive"),
    )


def timeout_s(conf: Any) -> float:
    """`setnx_timeout`: of all settings a client needs this one alone."""
    return duration_s("the app", "setnx_timeout", conf.get("setnx_timeout", 2.0), "positive")


def _key_prefix(conf: Any) -> str:
    """By what Celery keeps apps apart on the server of the locks; if by nothing, on that of the broker."""
    backend = getattr(conf, "result_backend", None) or ""
    is_elsewhere = os.environ.get("CELERY_SETNX_URL") or conf.get("setnx_url")
    is_there = not is_elsewhere and str(backend).partition("://")[0] in SCHEMES
    named = ("result_backend_transport_options",) if is_there else ()
    given = (conf.get(name) or {} for name in (*named, "broker_transport_options"))
    found = next(filter(None, (options.get("global_keyprefix") for options in given)), "")
    return re.sub(r"[{}]", "", str(found))  # braces would mark the cluster slot


def _broker(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise OptionError(f"setnx_broker must be text, the same for all workers of a broker, not {name!r}")
    return name or None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")
    return value


def is_sendable(text: str) -> bool:
    """True of a text that a server can be sent: one with half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_name(what: str, name: Any) -> None:
    """Refuse a prefix or scope that would break the key's cluster slot."""
    if not isinstance(name, str) or not name or "{" in name or "}" in name or not is_sendable(name):
        raise OptionError(
            f"{what} must be text without braces (they mark the cluster slot), not {name!r}; "
            "if the name of a task has braces, give it a scope"
        )


def _value(where: str, name: str, value: Any) -> Any:
    if name not in NAMES:
        close = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(NAMES)}."
        hint = f"use {OF_OTHERS[name]}" if name in OF_OTHERS else hint
        raise OptionError(f"{where} has an unknown option {name!r}; {hint}")
    if name in _DURATIONS and not (value is None and _DURATIONS[name].endswith("or None")):
        return duration_s(where, name, value, _DURATIONS[name])
    if name == "scope" and value is not None:
        check_name(f"scope of {where}", value)
    elif name == "on_conflict" and not callable(value):
        _one_of(where, name, value, CONFLICT_POLICIES)
    elif name == "on_redis_error":
        _one_of(where, name, value, REDIS_ERROR_POLICIES)
    elif name == "dedupe" and value is not None:
        _one_of(where, name, value, DEDUPE_MODES)
    elif name == "on_duplicate" and not callable(value):
        _one_of(where, name, value, DUPLICATE_POLICIES)
    elif name == "limit":
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= MOST_PERMITS:
            raise OptionError(f"limit of {where} must be a whole number from 1 to 100, not {value!r}")
    elif name == "rate" and value is not None:
        return _rate(where, value)
    elif name in ("hold_on_retry", "debounce_leading"):
        _flag(f"{name} of {where}", value)
    return value


def _rate(where: str, value: Any) -> Rate:
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    pair = (int(found[1]), _PERIODS[found[2]]) if found else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise OptionError(
            f"rate of {where} must be text such as '10/m' (s, m, h or d), or a pair of a number and seconds, "
            f"not {value!r}"
        )
    starts, period = pair
    if not isinstance(starts, int) or isinstance(starts, bool) or not 1 <= starts <= MOST_STARTS:
        raise OptionError(f"rate of {where} must allow 1 to {MOST_STARTS} starts, not {value!r}")
    period_s = duration_s(where, "rate", period, "positive")
    if not 0.001 <= period_s <= LONGEST_PERIOD_S:
        raise OptionError(
            f"the period of the rate of {where} must be from 1 ms to 366 days, not {period_s:g} s"
        )
    return Rate(starts, period_s)


def _one_of(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        names = ", ".join(map(repr, allowed))
        raise OptionError(f"{name} of {where} must be one of {names}, not {value!r}{hint}")


def duration_s(where: str, name: str, value: Any, rule: str) -> float:
    """A duration in seconds, by its rule; else OptionError."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise OptionError(f"{name} of {where} must be seconds or a timedelta, not {value!r}")
    if not (seconds > 0 if rule.startswith("positive") else seconds >= 0):
        least = "more than 0 seconds" if rule.startswith("positive") else "0 seconds or more"
        none = ", or None" if rule.endswith("or None") else ""
        raise OptionError(f"{name} of {where} must be {least}{none}, not {value!r}")
    if 0 < seconds < SHORTEST_S:
        raise OptionError(f"{name} of {where} must be at least a millisecond, not {value!r}")
    if seconds > LONGEST_S:
        raise OptionError(f"{name} of {where} must be at most ten years, not {min(seconds, 1e300):g} s")
    return float(seconds)


def seconds_of(text: str) -> float:
    """The seconds that an operator has written, as `90`, `90s`, `5m`, `1h` or `2d`; else OptionError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _PERIODS else (text, "s")
    if not number.isdecimal():
        raise OptionError(f"{text} is not a duration: write 90s, 5m, 1h or 2d")
    return float(number) * _PERIODS[unit]


def _check_together(where: str, options: Options) -> None:
    for most, least in (("retry_delay_max", "retry_delay"), ("at_most_for", "at_least_for")):
        most_s, least_s = getattr(options, most), getattr(options, least)
        if most_s is not None and most_s < least_s:
            raise OptionError(f"{most} ({most_s:g} s) of {where} is shorter than its {least} ({least_s:g} s)")
    if options.limit > 1 and (options.on_conflict == "join" or options.dedupe == "until_done"):
        other = "on_conflict='join'" if options.on_conflict == "join" else "dedupe='until_done'"
        raise OptionError(
            f"{where} has limit={options.limit} and {other}: several calls run at a time, so there is no "
            "single result to share; leave the limit at 1, or use on_conflict='wait' and "
            "dedupe='until_started'"
        )
    if options.rate and options.on_conflict == "join":
        raise OptionError(
            f"{where} has a rate and on_conflict='join': while the rate allows no start, there may be no "
            "running call to share a result; use on_conflict='wait', or drop the rate"
        )
    if options.rate and options.limit > 1 and options.hold_on_retry:
        raise OptionError(
            f"{where} has limit={options.limit}, a rate and hold_on_retry: permits held for retries would "
            "block calls that the rate allows to start; drop one of the three"
        )
    if options.dedupe_for is not None and options.dedupe != "until_done":
        raise OptionError(
            f"{where} has dedupe_for={options.dedupe_for:g} and dedupe={options.dedupe!r}: dedupe_for needs "
            "dedupe='until_done'"
        )
    if options.dedupe == "until_started" and options.on_conflict in ("skip", "join"):
        lost = "be skipped" if options.on_conflict == "skip" else "get the result of that run"
        raise OptionError(
            f"{where} has dedupe='until_started' and on_conflict={options.on_conflict!r}: a call published "
            f"during a run would {lost}, and miss what changed; use on_conflict='wait', or "
            "dedupe='until_done'"
        )
    _check_newest(where, options)


def _check_newest(where: str, options: Options) -> None:
    """Refuse what does not go with a call that replaces those before it."""
    what = "on_duplicate='replace'" if options.debounce is None else f"debounce={options.debounce:g}"
    if options.debounce is not None and not options.replaces:
        raise OptionError(
            f"{where} has {what} and on_duplicate={options.on_duplicate!r}: the newest call replaces those "
            "before it, so none is a duplicate; leave out on_duplicate"
        )
    if options.debounce is None and options.debounce_leading:
        raise OptionError(f"{where} has debounce_leading and no debounce; add debounce=, in seconds")
    if options.debounce is not None and options.debounce_max < options.debounce:
        raise OptionError(
            f"debounce_max ({options.debounce_max:g} s) of {where} is shorter than its debounce "
            f"({options.debounce:g} s)"
        )
    if not options.replaces:
        return
    if options.dedupe != "until_started":
        raise OptionError(
            f"{where} has {what} and dedupe={options.dedupe!r}: a call is replaced until it has started, so "
            "use dedupe='until_started'"
        )
    if options.limit > 1:
        raise OptionError(
            f"{where} has {what} and limit={options.limit}: an older call may end after a newer one if they "
            "run at a time; leave the limit at 1"
        )
    if options.on_conflict == "raise":
        raise OptionError(
            f"{where} has {what} and on_conflict='raise': the newest call would fail if an older one runs, "
            "and its arguments would be lost; use on_conflict='wait'"
        )
