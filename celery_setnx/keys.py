"""From a call's arguments to the name of its lock: binding, canonical form, digest. Pure; no Redis, no app.

Two calls are the same when their keys are, on the producer (before serialization) and on the worker (after
it) alike. So the canonical form forgets what serializers forget (tuple or list, int or text as the key of
a mapping, an Enum or its value) and keeps every type that they keep.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from hashlib import blake2b
from reprlib import Repr
from string import Formatter
from typing import Any
from uuid import UUID

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json as kombu_json

from celery_setnx.arguments import are_kept, delivered
from celery_setnx.exceptions import OptionError, UnkeyableCall
from celery_setnx.wording import ABOUT, about

Args = Sequence[Any]
KeyOption = Any
"""What `key=` accepts: None, a name or template, a list of names, `()`, or a callable."""

_WHOLE_TASK = object()
_FORMAT = b"celery_setnx:1"  # goes into every digest: keys of two formats are never equal
_US = timedelta(microseconds=1)
_MIN, _MIN_UTC = datetime.min, datetime.min.replace(tzinfo=timezone.utc)
_ADVICE = "pass its id or its text instead, or choose what counts with key="


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """A function's signature; its annotations, which may name what only type checkers import, stay texts.

    It is that of the function beneath all decorators, unless `follow_wrapped` is False.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        texts = Format.STRING
        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=texts)
    return inspect.signature(function, follow_wrapped=follow_wrapped)


class KeyFunction:
    """How the key of one task's calls is computed: made once, when the task is bound.

    The option is None, for all bound arguments; a parameter's name; a list of names; a template such as
    `"user:{user.id}"`, where a dot tries the item first, then the attribute, and typed values count, not the
    joined text; a callable taking the call's arguments; or `()`, one lock for the whole task.
    The signature is that of the task's function, without a bound `self`. With `typing=False`, Celery's own, a
    call that does not fit it has a key all the same: it is to fail in the worker. So has one that the
    `wrapper` takes, a decorator around the function, if the key names what it gives.
    """

    def __init__(
        self,
        key: KeyOption,
        signature: inspect.Signature,
        task: str,
        *,
        typing: bool = True,
        wrapper: inspect.Signature | None = None,
    ) -> None:
        self._signature, self._wrapper = signature, wrapper
        self._task = task
        self._key, self._typing = key, typing
        self._select = _selector(key, signature, task)
        self._parts = _parts(key) if isinstance(key, str) and "{" in key else None
        self._sees_values = callable(key) or self._parts is not None  # itself, not only their canonical form
        parameters = signature.parameters
        self._names = tuple(parameters)
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self._is_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
        self._needs = _needs(key, parameters)
        self._places = [place for place, name in enumerate(parameters) if name in (self._needs or ())]
        self._needs_parameters = self._needs is not None and self._needs <= parameters.keys()

    def digest(self, args: Args, kwargs: Mapping[str, Any], serializer: str | None = None) -> str:
        """The digest of a call's key; empty for the lock of the whole task.

        `serializer`: that of the message which the arguments have yet to travel in. None if they have: they
        are a worker's.
        """
        bound, chosen, _fits = self._read(args, kwargs, serializer)
        return self._digest_of(bound, chosen)

    def digest_and_about(
        self, args: Args, kwargs: Mapping[str, Any], serializer: str | None = None
    ) -> tuple[str, str]:
        """The same, and what the key was made of, for people: `account_id=7`, in 80 characters at most.

        That is empty where it has no words: for a callable, the whole task, or a call that does not fit.
        """
        bound, chosen, fits = self._read(args, kwargs, serializer)
        return self._digest_of(bound, chosen), self._about(chosen) if fits else ""

    def asked(self, args: Args, kwargs: Mapping[str, Any], serializer: str | None = None) -> tuple[str, str]:
        """The same of a call that somebody only asks about: those arguments are enough that the key names."""
        bound, chosen, fits = self._read(args, kwargs, serializer, in_part=self._needs is not None)
        return self._digest_of(bound, chosen), self._about(chosen) if fits else ""

    def _read(
        self, args: Args, kwargs: Mapping[str, Any], serializer: str | None, *, in_part: bool = False
    ) -> tuple[inspect.BoundArguments, Any, bool]:
        """A call's arguments, what the key chooses of them, and whether the call fits the signature.

        `in_part`: arguments may be missing that the key does not name.
        """
        try:
            bound = self._bound(args, kwargs)
        except UnkeyableCall as misfit:
            if not self._typing or self._wrapper_takes(args, kwargs):
                if serializer is not None:  # all that it gives may be what is chosen
                    args, kwargs = self._delivered(args, kwargs, serializer, all_of_them=True)
                bound = self._as_far_as_it_fits(args, kwargs)
                return bound, self._chosen_of_what_does_not_fit(bound, args, kwargs, misfit), self._typing
            if not in_part:
                raise
            bound = self._bound(args, kwargs, in_part=True)
        if serializer is not None and not are_kept(self._needed(bound.arguments), serializer):
            got = self._delivered(args, kwargs, serializer)
            bound = bound if got[0] is args else self._bound(*got, in_part=in_part)
        return bound, self._select(bound), True

    def _needed(self, arguments: Mapping[str, Any]) -> Iterable[Any]:
        """The values that the key is made of, and maybe others."""
        needs = self._needs
        is_named = needs and self._needs_parameters and needs <= arguments.keys()
        return [arguments[name] for name in needs] if needs and is_named else arguments.values()

    def _delivered(
        self, args: Args, kwargs: Mapping[str, Any], serializer: str, *, all_of_them: bool = False
    ) -> tuple[Args, Mapping[str, Any]]:
        """The arguments, those that the key needs as a worker gets them."""
        if all_of_them or self._needs is None:
            places, names = list(range(len(args))), list(kwargs)
        else:
            places = [place for place in self._places if place < len(args)]
            names = [name for name in kwargs if name in self._needs]
        given = [*(args[place] for place in places), *(kwargs[name] for name in names)]
        try:
            got = delivered(given, serializer, exactly=self._sees_values)
        except TypeError as error:
            raise UnkeyableCall(self._task, str(error)) from None
        if got is given:
            return args, kwargs
        changed = list(args)
        for place, value in zip(places, got):
            changed[place] = value
        return changed, {**kwargs, **dict(zip(names, got[len(places) :]))}

    def _digest_of(self, bound: inspect.BoundArguments, chosen: Any) -> str:
        if chosen is _WHOLE_TASK:
            return ""
        try:
            return digest(chosen)
        except SoftTimeLimitExceeded:
            raise  # it may strike here, in a body that publishes
        except Exception as error:
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

    def _wrapper_takes(self, args: Args, kwargs: Mapping[str, Any]) -> bool:
        """Whether a decorator around the function takes the call: Celery asks no more before it sends one."""
        try:
            return self._wrapper is not None and bool(self._wrapper.bind(*args, **kwargs))
        except TypeError:
            return False

    def _chosen_of_what_does_not_fit(
        self, bound: inspect.BoundArguments, args: Any, kwargs: Mapping[str, Any], misfit: UnkeyableCall
    ) -> Any:
        """What the key names, if the call gives it; else all that it gives, as it gives it.

        A body that a decorator calls with other arguments runs: what of them counts must be named.
        """
        with suppress(UnkeyableCall):
            if callable(self._key):
                return _called(self._key, args, kwargs, self._task)
            if self._key is not None:
                return self._select(bound)
        if self._typing:
            raise UnkeyableCall(self._task, f"{misfit.reason}; name what counts with key=") from misfit
        return {"args": list(args), "kwargs": dict(kwargs)}

    def _bound(
        self, args: Any, kwargs: Mapping[str, Any], *, in_part: bool = False
    ) -> inspect.BoundArguments:
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
            bind = self._signature.bind_partial if in_part else self._signature.bind
            bound = bind(*args, **kwargs)
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
            except SoftTimeLimitExceeded:
                raise
            except Exception as cause:  # noqa: BLE001 - as when the key was made
                if _said(cause) == _said(error):
                    return f"argument {name!r} of type {type(value).__name__}: {_said(cause)}; {_ADVICE}"
        return f"{_said(error)}; {_ADVICE}"


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    return str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"


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
        return _sized(b"s", value.encode() if value.isascii() else _utf8(value))
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
        return _sized(b"s", _utf8(value))
    if isinstance(value, int):
        return b"i%d;" % int(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _sized(b"b", bytes(value))
    if isinstance(value, AbstractSet):
        return _counted(b"S", sorted(canonical(item) for item in value))
    return _canonical_scalar(value)


def _canonical_scalar(value: Any) -> bytes:
    # By the methods of the types themselves: those of a subclass may count otherwise, or return its like.
    if isinstance(value, UUID):
        return _sized(b"u", value.bytes)
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, date):
        return b"D%d;" % date.toordinal(value)
    if isinstance(value, time):
        return _sized(b"T", time.isoformat(value).encode())
    if isinstance(value, timedelta):
        return b"P%d;" % timedelta.__floordiv__(value, _US)
    if isinstance(value, Decimal):
        return _sized(b"c", _decimal(value).encode())
    return _canonical_object(value)


def _canonical_object(value: Any) -> bytes:
    kind = type(value)
    if callable(getattr(kind, "model_dump", None)):
        return canonical(value.model_dump(mode="json"))
    if callable(getattr(kind, "__json__", None)):
        return canonical(value.__json__())
    if _is_number(value):
        return canonical(value.item())
    # Types registered with kombu.utils.json.register_type: what they become in a message.
    try:
        encoded = json.loads(kombu_json.dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} has no canonical form") from None
    return canonical(encoded)


def _instant(value: datetime) -> bytes:
    if getattr(value, "nanosecond", 0):
        raise ValueError("it has nanoseconds, which a datetime has not")
    if datetime.utcoffset(value) is None:
        return b"N%d;" % (datetime.__sub__(value, _MIN) // _US)
    return b"A%d;" % (datetime.__sub__(value, _MIN_UTC) // _US)


def _is_number(value: Any) -> bool:
    """True for one of numpy's, or a library's like it."""
    shape, kind = getattr(value, "shape", None), getattr(getattr(value, "dtype", None), "kind", "")
    return isinstance(shape, tuple) and not shape and isinstance(kind, str) and kind in ("b", "i", "u", "f")


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


def _utf8(text: str) -> bytes:
    """Two surrogates that JSON makes one character of are that; one alone stays."""
    try:
        return str.encode(text)
    except UnicodeEncodeError:
        units = str.encode(text, "utf-16-le", "surrogatepass")
        return units.decode("utf-16-le", "surrogatepass").encode("utf-8", "surrogatepass")


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


def _needs(key: KeyOption, parameters: Mapping[str, inspect.Parameter]) -> frozenset[str] | None:
    """Names of the arguments that the key is made of; None if all are, or those that a parameter catches."""
    if key is None or callable(key):
        return None
    if isinstance(key, str) and "{" in key:
        names = {path.partition(".")[0] for _text, path in _parts(key) if path}
    else:
        names = {key} if isinstance(key, str) else set(key)
    catching = {name for name, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return None if names & catching else frozenset(names)


_Selector = Callable[[inspect.BoundArguments], Any]


def _selector(key: KeyOption, signature: inspect.Signature, task: str) -> _Selector:
    if key is None:
        return lambda bound: list(bound.arguments.items())
    if isinstance(key, str) and ("{" in key or "}" in key):
        return _template(key, signature, task)
    if isinstance(key, (str, list, tuple)):
        names = [key] if isinstance(key, str) else list(key)
        for name in names:
            _known(name, signature, task, "key=" if name is key else "")
        return lambda bound: [_argument(name, bound, task) for name in names] if names else _WHOLE_TASK
    if callable(key):
        return lambda bound: _called(key, bound.args, bound.kwargs, task)
    raise OptionError(
        f"key of {task} must be a parameter name, a list of names, a template, a callable or (), "
        f"not {key!r} of type {type(key).__name__}"
    )


def _known(name: Any, signature: inspect.Signature, task: str, whole: str = "") -> None:
    """Refuse a name that is no parameter's. `whole`: what stands before it if it is the whole key."""
    if isinstance(name, str) and name.isidentifier() and _parameter(name, signature, cutoff=1.0):
        return
    meant = _meant(name, signature) if isinstance(name, str) and (whole or name.isidentifier()) else None
    hint = "use a parameter's name, a template in braces, or () for one lock for the whole task"
    raise OptionError(
        f"key of {task} names {name!r}, which is not a parameter of {task}{_bare(signature)}; "
        + (hint if meant is None else f"did you mean {whole}{meant!r}?")
    )


def _meant(text: str, signature: inspect.Signature) -> str | list[str] | None:
    """The key that is meant by `"user.id"`, `"a, b"` or `"acount_id"`; None if that is not plain."""
    paths = []
    for path in text.split(","):
        name, *steps = path.strip().split(".")
        parameter = _parameter(name, signature, cutoff=0.6)
        if parameter is None or any(
            step.startswith("_") or not (step.isidentifier() or step.isdecimal()) for step in steps
        ):
            return None
        paths.append(".".join([parameter, *steps]))
    if "." in "".join(paths):
        return ",".join(f"{{{path}}}" for path in paths)
    return paths if len(paths) > 1 else paths[0]


def _parameter(name: str, signature: inspect.Signature, cutoff: float) -> str | None:
    """The parameter that a name is, or nearly is; the name itself if the function takes any."""
    close = get_close_matches(name, signature.parameters, n=1, cutoff=cutoff)
    if close:
        return close[0]
    catches = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return name if catches and name.isidentifier() else None


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
                f"key template {template!r} of {task} has the field {{{path}}}: write a parameter's name, "
                "perhaps with .item or .attribute, and no format"
            )
        if any(step.startswith("_") for step in steps):
            raise OptionError(f"key template {template!r} of {task} uses a private name in {{{path}}}")
        _known(steps[0], signature, task)
        paths.append(steps)
    if not paths:
        raise OptionError(f"key template {template!r} of {task} has no field in braces")
    literals = [literal for literal, *_field in parts]
    return lambda bound: [literals, [_follow(path, bound, task) for path in paths]]


def _parts(template: str) -> list[tuple[str, str | None]]:
    """The texts of a template, each with the field that follows it, if one does."""
    return [(text, path) for text, path, *_more in Formatter().parse(template)]


def _follow(path: list[str], bound: inspect.BoundArguments, task: str) -> Any:
    value = _argument(path[0], bound, task)
    for step in path[1:]:
        try:
            value = _step(value, step)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a property raises
            field, kind = "{" + ".".join(path) + "}", type(value).__name__
            cause = f"the template's {field} found neither an item nor an attribute {step!r} in a {kind}"
            if not isinstance(error, AttributeError):
                cause = f"{cause} ({_said(error)})"
            raise UnkeyableCall(task, cause) from None
    return value


def _step(value: Any, step: str) -> Any:
    """The item of a value, or its attribute."""
    try:
        return value[int(step) if step.isdigit() and not isinstance(value, Mapping) else step]
    except (TypeError, LookupError):
        return getattr(value, step)


def _called(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], task: str) -> Any:
    try:
        value = function(*args, **kwargs)
    except SoftTimeLimitExceeded:
        raise  # it is meant for the body that publishes
    except Exception as error:
        raise UnkeyableCall(task, f"its key function raised {type(error).__name__}: {error}") from error
    if value is None:
        raise UnkeyableCall(task, "its key function returned None; return a value that equal calls share")
    return value
