"""From a call's arguments to the name of its lock: binding, canonical form, digest. Pure; no Redis, no app.

Two calls are the same when their keys are, on the producer (before serialization) and on the worker (after
it) alike. So the canonical form forgets what serializers forget (tuple or list, int or text as the key of
a mapping, an Enum or its value) and keeps every type that they keep.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from reprlib import Repr
from string import Formatter
from typing import Any
from uuid import UUID

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json as kombu_json

from celery_setnx.exceptions import OptionError, UnkeyableCall
from celery_setnx.wording import ABOUT, about

KeyOption = Any
"""What `key=` accepts: None, a name or template, a list of names, `()`, or a callable."""

_WHOLE_TASK = object()
_FORMAT = b"celery_setnx:1"  # goes into every digest: keys of two formats are never equal
_US = timedelta(microseconds=1)


class KeyFunction:
    """How the key of one task's calls is computed: made once, when the task is bound.

    The option is None, for all bound arguments; a parameter's name; a list of names; a template such as
    `"user:{user.id}"`, where a dot tries the item first, then the attribute, and typed values count, not the
    joined text; a callable taking the call's arguments; or `()`, one lock for the whole task.
    The signature is that of the task's function, without a bound `self`. With `typing=False`, Celery's own, a
    call that does not fit it has a key all the same: it is to fail in the worker.
    """

    def __init__(
        self, key: KeyOption, signature: inspect.Signature, task: str, *, typing: bool = True
    ) -> None:
        self._signature = signature
        self._task = task
        self._key, self._typing = key, typing
        self._select = _selector(key, signature, task)
        self._parts = _parts(key) if isinstance(key, str) and "{" in key else None
        parameters = signature.parameters
        self._names = tuple(parameters)
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self._is_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

    def digest(self, args: tuple[Any, ...] | list[Any], kwargs: Mapping[str, Any]) -> str:
        """The digest of a call's key; empty for the lock of the whole task."""
        bound, chosen, _fits = self._read(args, kwargs)
        return self._digest_of(bound, chosen)

    def digest_and_about(
        self, args: tuple[Any, ...] | list[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The same, and what the key was made of, for people: `account_id=7`, in 80 characters at most.

        That is empty where it has no words: for a callable, the whole task, or a call that does not fit.
        """
        bound, chosen, fits = self._read(args, kwargs)
        return self._digest_of(bound, chosen), self._about(chosen) if fits else ""

    def _read(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[inspect.BoundArguments, Any, bool]:
        """A call's arguments, what the key chooses of them, and whether the call fits the signature."""
        try:
            bound = self._bound(args, kwargs)
        except UnkeyableCall:
            if self._typing:
                raise
            bound = self._as_far_as_it_fits(args, kwargs)
            return bound, self._chosen_of_what_does_not_fit(bound, args, kwargs), False
        return bound, self._select(bound), True

    def _digest_of(self, bound: inspect.BoundArguments, chosen: Any) -> str:
        if chosen is _WHOLE_TASK:
            return ""
        try:
            return digest(chosen)
        except (TypeError, ValueError) as error:
            raise UnkeyableCall(self._task, self._blame(bound, error)) from error

    def _about(self, chosen: Any) -> str:
        key = self._key
        if chosen is _WHOLE_TASK or callable(key):
            return ""
        try:
            if self._parts is not None:
                values = iter(chosen[1])
                return about(
                    "".join(text + (_in_text(next(values)) if path else "") for text, path in self._parts)
                )
            pairs = chosen if key is None else zip([key] if isinstance(key, str) else key, chosen)
            return about(", ".join(f"{name}={_in_words(value)}" for name, value in pairs))
        except SoftTimeLimitExceeded:
            raise  # it may strike here, in a body that publishes
        except Exception:  # noqa: BLE001 - whatever a value's own words raise: they are for people, and no call fails
            return ""

    def _as_far_as_it_fits(self, args: Any, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """What a call that does not fit the signature gives to its parameters."""
        places, named = list(args), dict(kwargs)
        arguments: dict[str, Any] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments[name], places = tuple(places), []
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments[name] = named
            elif places and parameter.kind is not parameter.KEYWORD_ONLY:
                arguments[name] = places.pop(0)
            elif name in named:
                arguments[name] = named.pop(name)
            elif name in self._defaults:
                arguments[name] = self._defaults[name]
        return inspect.BoundArguments(self._signature, arguments)

    def _chosen_of_what_does_not_fit(
        self, bound: inspect.BoundArguments, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """What the key names, if the call gives it; else all that it gives, as it gives it."""
        with suppress(UnkeyableCall):
            if callable(self._key):
                return _called(self._key, args, kwargs, self._task)
            if self._key is not None:
                return self._select(bound)
        return {"args": list(args), "kwargs": dict(kwargs)}

    def _bound(self, args: Any, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        if self._is_plain and len(args) <= len(self._names):  # as `bind` does it, in a third of the time
            arguments, named = dict(zip(self._names, args)), 0
            for name in self._names[len(args) :]:
                if name in kwargs:
                    arguments[name] = kwargs[name]
                    named += 1
                elif name in self._defaults:
                    arguments[name] = self._defaults[name]
            if len(arguments) == len(self._names) and named == len(kwargs):
                return inspect.BoundArguments(self._signature, arguments)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = ": is bind=True missing?" if self._names[:1] == ("self",) else ""
            reason = f"{error}; its signature is {_bare(self._signature)}{hint}"
            raise UnkeyableCall(self._task, reason) from error
        bound.apply_defaults()
        return bound

    def _blame(self, bound: inspect.BoundArguments, error: Exception) -> str:
        for name, value in bound.arguments.items():
            try:
                canonical(value)
            except (TypeError, ValueError) as cause:
                if str(cause) == str(error):
                    return f"argument {name!r} of type {type(value).__name__}: {cause}"
        return str(error)


class _Words(Repr):
    """Values in words, cut where they are long; what their own words raise is raised."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = ABOUT // 2

    def repr_instance(self, x: Any, level: int) -> str:
        """As reprlib does it, but that it would swallow a time limit."""
        return repr(x)[: self.maxother]


_WORDS = _Words()


def _in_words(value: Any) -> str:
    """A value's repr; of a date, a number or an id the text."""
    if isinstance(value, Enum):
        return _in_words(value.value)
    return str(value) if isinstance(value, (UUID, date, time, timedelta, Decimal)) else _WORDS.repr(value)


def _in_text(value: Any) -> str:
    """A value as a template has it: text without quotes."""
    value = value.value if isinstance(value, Enum) else value
    return value[: ABOUT + 1] if isinstance(value, str) else _in_words(value)


def digest(value: Any) -> str:
    """The 128-bit BLAKE2b digest of a value's canonical form, in hex."""
    return blake2b(canonical(value), digest_size=16, person=_FORMAT).hexdigest()


def canonical(value: Any) -> bytes:
    """A value as typed, self-delimiting bytes: equal exactly when two calls mean the same value.

    An integral float equals the int (1.0 and 1); `True` and `"1"` do not. Aware datetimes are compared as
    instants, Decimals as numbers, an Enum as its value, a list as a tuple, mappings in any order.
    """
    kind = type(value)
    if kind is str:
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if kind is int:
        return b"i%d;" % value
    if value is None:
        return b"n;"
    if kind is bool:
        return b"t;" if value else b"f;"
    return _canonical_other(value)


def _canonical_other(value: Any) -> bytes:
    if isinstance(value, Enum):
        return canonical(value.value)
    if isinstance(value, (list, tuple)):
        return _counted(b"l", [canonical(item) for item in value])
    if isinstance(value, Mapping):
        return _counted(b"m", _pairs(value))
    if isinstance(value, float):
        return canonical(int(value)) if value.is_integer() else _sized(b"d", float.__repr__(value).encode())
    if isinstance(value, str):
        return _sized(b"s", str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, int):
        return b"i%d;" % int(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _sized(b"b", bytes(value))
    if isinstance(value, AbstractSet):
        return _counted(b"S", sorted(canonical(item) for item in value))
    return _canonical_scalar(value)


def _canonical_scalar(value: Any) -> bytes:
    if isinstance(value, UUID):
        return _sized(b"u", value.bytes)
    if isinstance(value, datetime):
        offset = value.utcoffset()
        local = value.replace(tzinfo=None) - datetime.min
        return b"N%d;" % (local // _US) if offset is None else b"A%d;" % ((local - offset) // _US)
    if isinstance(value, date):
        return b"D%d;" % value.toordinal()
    if isinstance(value, time):
        return _sized(b"T", value.isoformat().encode())
    if isinstance(value, timedelta):
        return b"P%d;" % (value // _US)
    if isinstance(value, Decimal):
        return _sized(b"c", _decimal(value).encode())
    if callable(getattr(type(value), "model_dump", None)):
        return canonical(value.model_dump(mode="json"))
    if callable(getattr(type(value), "__json__", None)):
        return canonical(value.__json__())
    # Types registered with kombu.utils.json.register_type: what they become in a message.
    try:
        encoded = json.loads(kombu_json.dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        raise TypeError(
            f"a {type(value).__module__}.{type(value).__qualname__} has no canonical form; "
            "pass its id instead, or choose what counts with key="
        ) from None
    return canonical(encoded)


def _pairs(mapping: Mapping[Any, Any]) -> list[bytes]:
    pairs = {}
    for key, value in mapping.items():
        name = canonical(_json_name(key))
        if name in pairs:
            raise ValueError(f"two keys of a mapping are one in JSON: {key!r}")
        pairs[name] = name + canonical(value)
    return [pairs[name] for name in sorted(pairs)]


def _json_name(key: Any) -> Any:
    """A mapping's key as the text that JSON makes of it; other types stay what they are."""
    if isinstance(key, Enum):
        return _json_name(key.value)
    return json.dumps(key) if key is None or isinstance(key, (int, float)) else key


def _decimal(number: Decimal) -> str:
    """The shortest text of a Decimal, exact, so that 1.10 and 1.1 are the same."""
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        return str(number)
    text = "".join(map(str, digits))
    stripped = text.rstrip("0")
    if not stripped:
        return "0"
    return f"{'-' if sign else ''}{stripped.lstrip('0')}e{exponent + len(text) - len(stripped)}"


def _sized(kind: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (kind, len(data), data)


def _counted(kind: bytes, items: list[bytes]) -> bytes:
    return b"%b%d:%b" % (kind, len(items), b"".join(items))


_Selector = Callable[[inspect.BoundArguments], Any]


def _selector(key: KeyOption, signature: inspect.Signature, task: str) -> _Selector:
    if key is None:
        return lambda bound: list(bound.arguments.items())
    if isinstance(key, str) and ("{" in key or "}" in key):
        return _template(key, signature, task)
    if isinstance(key, (str, list, tuple)):
        names = [key] if isinstance(key, str) else list(key)
        for name in names:
            _known(name, signature, task)
        return lambda bound: [_argument(name, bound, task) for name in names] if names else _WHOLE_TASK
    if callable(key):
        return lambda bound: _called(key, bound.args, bound.kwargs, task)
    raise OptionError(
        f"key of {task} must be a parameter name, a list of names, a template, a callable or (), "
        f"not {key!r} of type {type(key).__name__}"
    )


def _known(name: Any, signature: inspect.Signature, task: str) -> None:
    parameters = signature.parameters
    catch_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not isinstance(name, str) or not name.isidentifier() or not (name in parameters or catch_all):
        raise OptionError(
            f"key of {task} names {name!r}, which is no parameter of {task}{_bare(signature)}; "
            "use a parameter's name, a template in braces, or () for one lock for the whole task"
        )


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """The signature without annotations, for messages."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _argument(name: str, bound: inspect.BoundArguments, task: str) -> Any:
    if name in bound.arguments:
        return bound.arguments[name]
    if name in bound.kwargs:  # caught by **kwargs
        return bound.kwargs[name]
    raise UnkeyableCall(task, f"the key needs argument {name!r}, which this call does not give")


def _template(template: str, signature: inspect.Signature, task: str) -> _Selector:
    paths: list[list[str]] = []
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise OptionError(f"key template {template!r} of {task} is broken: {error}") from None
    for _literal, path, spec, conversion in parts:
        if path is None:
            continue
        steps = path.split(".")
        if spec or conversion or not all(s.isidentifier() or s.isdigit() for s in steps):
            raise OptionError(
                f"key template {template!r} of {task} has the field {{{path}}}: expected a parameter's name, "
                "optionally followed by .item or .attribute, and no format"
            )
        if any(step.startswith("_") for step in steps):
            raise OptionError(f"key template {template!r} of {task} reaches for a private name in {{{path}}}")
        _known(steps[0], signature, task)
        paths.append(steps)
    if not paths:
        raise OptionError(f"key template {template!r} of {task} has no field")
    literals = [literal for literal, *_field in parts]
    return lambda bound: [literals, [_follow(path, bound, task) for path in paths]]


def _parts(template: str) -> list[tuple[str, str | None]]:
    """The texts of a template, each with the field that follows it, if one does."""
    return [(text, path) for text, path, *_more in Formatter().parse(template)]


def _follow(path: list[str], bound: inspect.BoundArguments, task: str) -> Any:
    value = _argument(path[0], bound, task)
    for step in path[1:]:
        try:
            value = value[int(step) if step.isdigit() and not isinstance(value, Mapping) else step]
        except (TypeError, LookupError):
            try:
                value = getattr(value, step)
            except AttributeError:
                field, kind = "{" + ".".join(path) + "}", type(value).__name__
                cause = f"the template's {field} found neither an item nor an attribute {step!r} in a {kind}"
                raise UnkeyableCall(task, cause) from None
    return value


def _called(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], task: str) -> Any:
    try:
        value = function(*args, **kwargs)
    except SoftTimeLimitExceeded:
        raise  # it is meant for the body that publishes
    except Exception as error:
        raise UnkeyableCall(task, f"its key function raised {type(error).__name__}: {error}") from error
    if value is None:
        raise UnkeyableCall(task, "its key function returned None; return what makes two calls the same")
    return value
