"""What a task has, or the settings, that nobody reads, and that may be meant for us: warnings of `check`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery, Task

from celery_setnx.call.binding import PLAIN_WORDS, is_code, is_known, is_options
from celery_setnx.options import NAMES, OF_OTHERS, SETTINGS, spelled, unknown_settings

# What celery-once and celery-singleton read of a task, and where that is said here.
_LEFT_OVER = {
    "once": "celery-once",
    "unique_on": "celery-singleton",
    "raise_on_duplicate": "celery-singleton",
    "lock_expiry": "celery-singleton",
}


def unread_of_task(task: Task, *, is_guarded: bool) -> Iterator[tuple[str, str]]:
    """What nobody reads of a task, and what to do, in words."""
    kind = type(task)
    for name, value in _own(kind):
        if name in _LEFT_OVER:
            yield (
                f"{name}={value!r}",
                f"Remove it.{_here(name, value)} See docs/moving.md#{_LEFT_OVER[name]}.",
            )
        elif is_options(value) and _is_like(name, "singleton"):
            yield f"{name}={value!r}", "Write singleton={...}."
        elif name in (PLAIN_WORDS if is_guarded else set(NAMES) - set(PLAIN_WORDS)):
            base = "" if is_guarded else "base=SingletonTask, "
            yield (
                f"{name}={value!r}",
                f"If this is meant as an option, write {base}singleton={{{name!r}: ...}}.",
            )
    options = getattr(kind, "singleton", None)
    is_own = "singleton" in vars(kind) and not is_known(kind, "singleton") and options not in ({}, None)
    if not is_guarded and is_own != is_options(options):  # with both it is refused
        yield f"singleton={options!r}", "If these are meant as options, add base=SingletonTask."


def unread_settings(app: Celery) -> Iterator[tuple[str, str]]:
    """Settings that nobody reads, and that only begin as ours do; and what to do."""
    for written, plainly_meant in unknown_settings(app.conf, app.namespace):
        option = written.lower().rpartition("setnx_")[2]
        if plainly_meant is None and option in NAMES:
            defaults = (
                spelled("setnx_defaults", app.namespace) if written != written.lower() else "setnx_defaults"
            )
            yield (
                written,
                f"If this is meant as an option of all tasks, write {defaults}={{{option!r}: ...}}.",
            )
        elif plainly_meant is None:
            yield written, f"The settings are {', '.join(SETTINGS)}; if it is yours, rename it."


def _own(kind: type[Task]) -> Iterator[tuple[str, Any]]:
    """What a task has of its own, and no base class knows. Methods of a class are not meant as options."""
    decorated = "_decorated" in vars(kind)
    for name, value in vars(kind).items():
        if value is not None and (decorated or not is_code(value)) and not is_known(kind, name):
            yield name, value


def _here(name: str, value: Any) -> str:
    """What others' options are here."""
    names = [name] if name != "once" else list(value) if isinstance(value, Mapping) else []
    return "".join(f" Instead of {each} use {OF_OTHERS[each]}." for each in names if each in OF_OTHERS)


def _is_like(name: str, other: str) -> bool:
    return name != other and bool(difflib.get_close_matches(name, [other], cutoff=0.7))
