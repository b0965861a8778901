"""Tells whether an app's settings have changed: asked before anything made from them is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class _Known(NamedTuple):
    """How the settings were when somebody last asked."""

    glance: list[Any]
    names: list[list[str] | None]
    state: list[Any]


def configured(app: Celery) -> list[Any]:
    """The settings that we read, as they are: one object for as long as nothing of them changes.

    Seen is a new value, by whatever name and in whichever layer, a change inside of a mapping, and what a
    command line does to the environment. Two microseconds: it is asked several times with each call.
    """
    conf = app.conf
    if not isinstance(conf.maps[0], dict):  # nobody has asked for a setting yet
        conf.finalize()
    known: _Known | None = app.__dict__.get(_KNOWN)
    if known is None:
        return app.__dict__.setdefault(_KNOWN, _look(conf)).state  # type: ignore[no-any-return]
    if not _are_same(_glance(conf, known.names), known.glance):
        new = _look(conf)
        if _are_same(new.state, known.state):  # it was a setting that we do not read
            new = new._replace(state=known.state)
        known = app.__dict__[_KNOWN] = new
    return known.state


def _glance(conf: Any, names: list[list[str] | None]) -> list[Any]:
    """The layers of the settings: a mapping whole, of anything else the values that have these names."""
    seen: list[Any] = [len(conf.maps), _variables()]
    for layer, named in zip(conf.maps, names):
        if named is None:
            seen += (list(layer), list(layer.values()))
        else:
            of_object = getattr(getattr(layer, "obj", layer), "__dict__", ())
            seen += (list(map(layer.get, named)), len(of_object))
    return seen


def _look(conf: Any) -> _Known:
    """The same, with copies of the mappings of ours, in which something may change."""
    *layers, defaults = conf.maps
    names: list[list[str] | None] = [None if isinstance(each, dict) else _ours(each) for each in layers]
    names.append([name for name in _ours(defaults) if isinstance(defaults[name], (Mapping, list))])
    glance = _glance(conf, names)
    state: list[Any] = [glance[1]]
    for place, named in enumerate(names):
        at = 2 + 2 * place + (named is None)
        given = glance[at - 1] if named is None else named
        glance[at] = [_kept(each) if _is_ours(name) else each for name, each in zip(given, glance[at])]
        state.append({name: each for name, each in zip(given, glance[at]) if _is_ours(name)})
    return _Known(glance, names, state)


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
