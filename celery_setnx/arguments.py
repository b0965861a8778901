"""The arguments of a call on their way: what its serializer makes of them, and copies that nobody changes.

A key is made of what the worker gets, so that a call has one key wherever that is computed. How a value
becomes bytes is said in `keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import dumps, loads, registry

# What every serializer keeps as it is, and nobody can change.
_SCALARS = frozenset((str, int, float, bool, type(None)))
_TEXT = frozenset((str,))
# Modules of serializers that do no more to plain values than a canonical form forgets: JSON, pickle, msgpack,
# and what Celery signs. PyYAML, and a serializer of one's own, are asked each time.
_FAITHFUL = frozenset(("kombu.utils.json", "kombu.serialization", "celery.security.serialization"))


class Arguments(NamedTuple):
    """The arguments of a call; `serializer` is that of the message which they have yet to travel in.

    None if they have: they are a worker's.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    serializer: str | None = None

    @classmethod
    def given_to(cls, task: Any, args: Any, kwargs: Any, serializer: str | None = None) -> Arguments:
        """The arguments of a task's call in this program; pydantic models are dumped, as Celery does it."""
        serializer = serializer or task.serializer or "json"
        args, kwargs = args or (), kwargs or {}
        dump = getattr(task, "_dump_pydantic_arguments", None)
        if dump is not None and serializer != "pickle":
            args, kwargs = dump(args, kwargs)
        return cls(args, kwargs, serializer)


def delivered(values: list[Any], serializer: str | None, *, exactly: bool = False) -> list[Any]:
    """The values as the worker gets them; `exactly`, if not only their canonical form is to be the same.

    They are what they were if they cannot be sent, for which Celery has an error of its own, or if only a
    worker can read what was sent. A value that can be read only once is a TypeError.
    """
    try:
        if not values or (_is_faithful(serializer) and _are_plain(values, exactly)):
            return values
        if not _has_iterator(values):
            content_type, encoding, body = dumps((values, {}, {}), serializer)  # type: ignore[no-untyped-call]
            accept = [content_type]
            return list(loads(body, content_type, encoding, accept=accept)[0])  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever a value or its serializer raises
        pass_on_time_limit(error)
        return values
    raise TypeError("an iterator can be read only once, and its message needs it; pass a list")


def are_kept(values: Iterable[Any], serializer: str) -> bool:
    """True if it is seen at a glance that the worker gets these values."""
    return _SCALARS.issuperset(map(type, values)) and _is_faithful(serializer)


def copied(value: Any) -> Any:
    """The value, or a copy of what may change; the value itself where there can be none."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        if _SCALARS.issuperset(map(type, value.values())):
            return value.copy()
        return {name: copied(item) for name, item in value.items()}
    if kind is list or kind is tuple:
        return kind(value if _SCALARS.issuperset(map(type, value)) else map(copied, value))
    try:
        return deepcopy(value)
    except Exception as error:  # noqa: BLE001 - whatever its own code raises
        pass_on_time_limit(error)
        return value


def _are_plain(values: Iterable[Any], exactly: bool) -> bool:
    """True if these are texts, numbers, booleans, None, lists, tuples and mappings, and of no subclass.

    `exactly`: also no tuples, and no mappings with other names than texts.
    """
    return _SCALARS.issuperset(map(type, values)) or all(_is_plain(value, exactly) for value in values)


def _is_plain(value: Any, exactly: bool) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        # Two names as below are how kombu's JSON says a value of another type.
        is_typed = len(value) == 2 and "__type__" in value
        names = _TEXT if exactly else _SCALARS
        return not is_typed and names.issuperset(map(type, value)) and _are_plain(value.values(), exactly)
    return (kind is list or (kind is tuple and not exactly)) and _are_plain(value, exactly)


def _is_faithful(serializer: str | None) -> bool:
    codec = registry._encoders.get(serializer or "json")
    if codec is None:
        return True  # nothing can be sent with it
    decoder = registry._decoders.get(codec.content_type)
    return (
        getattr(codec.encoder, "__module__", None) in _FAITHFUL
        and getattr(decoder, "__module__", None) in _FAITHFUL
    )


def _has_iterator(value: Any) -> bool:
    if hasattr(type(value), "__next__"):
        return True
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        return False
    return any(map(_has_iterator, value))


def pass_on_time_limit(error: BaseException | None) -> None:
    """A soft time limit is meant for the body that publishes; kombu hides it in an error of its own."""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded):
            raise error
        error = error.__cause__ or error.__context__
