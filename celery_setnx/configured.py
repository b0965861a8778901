"""Tells whether an app's settings have changed: asked before anything made from them is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from celery import Celery

_KNOWN = "_setnx_configured"
# The variables that we read, and those that Celery does for a setting that we read.
_VARIABLES = (
    *("CELERY_SETNX_URL", "CELERY_RESULT_BACKEND", "AWS_DEFAULT_REGION"),
    *("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"),
)
_ENCODED = tuple(map(os.environ.encodekey, _VARIABLES))
_WORDS = ("setnx", "broker", "redis", "result_backend")
"""The name of a setting that we read has one of them, however it is spelled."""


Made = TypeVar("Made")


class _Known(NamedTuple):
    """How the settings were when somebody last asked, and where to look whether they are so still."""

    layers: list[Any]  # as `app.conf` has them, the nearest first
    size: int  # how many they are
    live: list[Any]  # mappings that may change,
    kept: list[Any]  # and what was in them
    objects: list[tuple[Any, list[str]]]  # layers that are no mappings, and names of ours in them,
    values: list[Any]  # and what these were
    state: list[Any]


def configured(app: Celery) -> list[Any]:
    """The settings that we read, as they are: one object for as long as nothing of them changes.

    Seen is a new value, by whatever name and in whichever layer, a change inside of a mapping, and what a
    command line does to the environment. It costs a microsecond, and is asked several times with each call.
    """
    conf = app.conf
    known: _Known | None = app.__dict__.get(_KNOWN)
    if known is not None and known.layers is conf.maps and _is_as_it_was(known):
        return known.state
    new = _look(conf)
    if known is None:
        return app.__dict__.setdefault(_KNOWN, new).state  # type: ignore[no-any-return]
    if _are_same(new.state, known.state):  # it was a setting that we do not read
        new = new._replace(state=known.state)
    app.__dict__[_KNOWN] = new
    return new.state


def until_changed(app: Celery, name: str, make: Callable[[], Made]) -> Made:
    """What is made of settings, kept by the app under a name; made anew when they have changed."""
    state = configured(app)
    known = app.__dict__.get(name)
    if known is None or known[0] is not state:
        known = app.__dict__[name] = state, make()
    return cast("Made", known[1])


def _is_as_it_was(known: _Known) -> bool:
    try:
        return (
            len(known.layers) == known.size
            and known.live == known.kept
            and _variables() == known.state[0]
            and (not known.objects or _of_objects(known.objects) == known.values)
        )
    except Exception:  # noqa: BLE001 - a thing of the user's that cannot be compared
        return False


def _look(conf: Any) -> _Known:
    """The settings as they are now, with copies of the mappings of ours, in which something may change."""
    if not isinstance(conf.maps[0], dict):  # nobody has asked for a setting yet
        conf.finalize()
    layers, size = conf.maps, len(conf.maps)
    *own, defaults = layers
    mappings = [each for each in own if isinstance(each, dict)]
    copies = [
        {name: _kept(value) if _is_ours(name) else value for name, value in each.copy().items()}
        for each in mappings
    ]
    objects = [(each, _ours(each)) for each in own if not isinstance(each, dict)]
    values = [_kept(value) for value in _of_objects(objects)]
    within = [defaults[name] for name in _ours(defaults) if isinstance(defaults[name], dict)]
    state = [_variables(), *({n: value for n, value in each.items() if _is_ours(n)} for each in copies)]
    kept = list(map(_kept, within))
    state += ([_kept(layer.get(name)) for layer, names in objects for name in names], kept)
    return _Known(layers, size, [*mappings, *within], [*copies, *kept], objects, values, state)


def _of_objects(objects: list[tuple[Any, list[str]]]) -> list[Any]:
    """The values of ours in layers that are no mappings; and how many there are, for new ones."""
    seen: list[Any] = []
    for layer, names in objects:
        seen += map(layer.get, names)
        seen.append(len(getattr(getattr(layer, "obj", layer), "__dict__", ())))
    return seen


def _ours(layer: Any) -> list[str]:
    return [name for name in list(layer) if _is_ours(name)]


def _is_ours(name: Any) -> bool:
    return any(word in str(name).lower() for word in _WORDS)


def _kept(value: Any) -> Any:
    """A copy of mappings and lists, in which the other values are the same."""
    if isinstance(value, Mapping):
        return {name: _kept(item) for name, item in value.items()}
    return list(map(_kept, value)) if isinstance(value, list) else value


def _variables() -> list[Any]:
    """The values of the variables, from where `os.environ` has them: it takes ten times as long itself."""
    kept = getattr(os.environ, "_data", None)
    return list(map(os.environ.get, _VARIABLES)) if kept is None else list(map(kept.get, _ENCODED))


def _are_same(one: list[Any], other: list[Any]) -> bool:
    try:
        return one == other
    except Exception:  # noqa: BLE001 - a thing of the user's that cannot be compared
        return False
