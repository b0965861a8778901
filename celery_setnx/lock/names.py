"""The names of the keys in Redis: those beside a lock, in its cluster slot, and the sets of due lines."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

_SCOPE_AND_DIGEST = re.compile(r"(.+):([0-9a-f]{32})", re.DOTALL)


def key_name(prefix: str, scope: str, key_digest: str) -> str:
    """A lock's Redis key: `<prefix>:{<scope>:<digest>}`, or `<prefix>:{<scope>}` for a whole task."""
    return f"{prefix}:{{{scope}:{key_digest}}}" if key_digest else f"{prefix}:{{{scope}}}"


def scope_and_digest(lock_name: str) -> tuple[str, str]:
    """The scope in a lock's Redis key, and the digest; that is empty for a whole task."""
    inner = lock_name[lock_name.find("{") + 1 : -1] if lock_name.endswith("}") else lock_name
    match = _SCOPE_AND_DIGEST.fullmatch(inner)
    return (match[1], match[2]) if match else (inner, "")


@lru_cache(maxsize=100)  # each call asks for half a dozen names beside its lock
def tagged(lock_name: str) -> str:
    """What the names beside a lock begin with, in its cluster slot; ValueError if there can be none."""
    start = lock_name.find("{")
    end = lock_name.find("}", start + 1)
    if start >= 0 and end > start + 1:
        return lock_name
    if "}" in lock_name or not lock_name:
        raise ValueError(
            f"a lock cannot be named {lock_name!r}: no record beside it would share its cluster slot; "
            "name it without '}', or with one whole {tag}"
        )
    return f"{{{lock_name}}}"


def record_name(lock_name: str) -> str:
    """The name of a lock's record, in the same cluster slot; ValueError if no name beside this one can be."""
    return f"{tagged(lock_name)}:holder"


def permit_names(lock_name: str, number: int) -> tuple[str, str]:
    """The names of a permit and of its record; the lock itself is number 0."""
    name = f"{tagged(lock_name)}#{number}" if number else lock_name
    return name, record_name(name)


def other_permits(lock_name: str, count: int) -> tuple[str, ...]:
    """The names of all permits beside the first, and of their records, as scripts take them."""
    if count == 1:
        return ()
    tag = tagged(lock_name)
    return tuple(f"{tag}#{number}{what}" for number in range(1, count) for what in ("", ":holder"))


def permits_name(lock_name: str) -> str:
    """The name of what is known of a lock's permits: how many are in use, and how many there are."""
    return f"{tagged(lock_name)}:permits"


def terms_name(lock_name: str) -> str:
    """The name of the live terms of a key, beside its lock, in the same slot."""
    return f"{tagged(lock_name)}:terms"


def live_terms_name(prefix: str) -> str:
    """The name of the live terms of all tasks, by their scopes. It is in no lock's slot."""
    return f"{prefix}:terms"


def starts_name(lock_name: str) -> str:
    """The name of the set of starts beside a lock whose starts are paced, in the same slot."""
    return f"{tagged(lock_name)}:starts"


def mark_name(lock_name: str) -> str:
    """The name of the mark beside a task's lock, in the same cluster slot."""
    return f"{tagged(lock_name)}:queued"


def newest_name(lock_name: str) -> str:
    """The name of what is known of the newest call of a key, which replaces the others, in the same slot."""
    return f"{tagged(lock_name)}:newest"


def done_name(lock_name: str) -> str:
    """The name of the note which call with this key has succeeded last, in the same slot."""
    return f"{tagged(lock_name)}:done"


def line_names(lock_name: str) -> tuple[str, str]:
    """The names of the line of those who wait for a task's lock, and of their calls, in the same slot."""
    return f"{tagged(lock_name)}:line", f"{tagged(lock_name)}:calls"


def names_to_look_at(lock_name: str) -> tuple[str, ...]:
    """The names of a lock and of what stands beside it, as lua/look.lua takes them."""
    tag = tagged(lock_name)
    beside = ("holder", "line", "permits", "queued", "done", "starts", "newest", "terms")
    return (lock_name, *[f"{tag}:{what}" for what in beside])


def successor_name(lock_name: str, task_id: str) -> str:
    """The name of the key that says who runs in the stead of a task that died with the lock."""
    return f"{tagged(lock_name)}:successor:{task_id}"


KNOWN_LINES = "setnx:brokers"
"""The name of the set of all prefixes and brokers whose workers have swept lines."""


_LINES_SLOTS = 16

END = "\n"
"""What a task id begins with, among the lines, if it is the end of that call's waiting."""


def end_name(lock_name: str, task_id: str) -> str:
    """What stands among the lines, behind its task, for the end of a call's waiting."""
    return f"{lock_name}\n{END}{task_id}"


def lock_and_task_id(entry: str) -> tuple[str, str]:
    """The name of a task's lock, and the id of the call behind it that is to be sent; empty if none is."""
    end = entry.find("}\n")
    return (entry[: end + 1], entry[end + 2 :]) if end >= 0 else (entry, "")


def receipt_name(prefix: str, task: str, task_id: str, call_id: str, attempt: int) -> str:
    """The name of the receipt of an attempt that has ended. It is in no lock's slot."""
    return f"{prefix}:receipt:{task}:{task_id}:{call_id}:{attempt}"


def lines_name(prefix: str, broker: str) -> str:
    """What the names of all sets of lines begin with whose calls come from one broker, by that one's name."""
    return f"{prefix}:lines:{blake2b(broker.encode(), digest_size=8).hexdigest()}"


def due_names(lines: str, task: str, *, in_cluster: bool) -> tuple[str, str]:
    """The names of the set of a task's lines, and of the epoch, in the same slot.

    One script sees to all tasks of a slot: of a cluster they share 16, elsewhere there is one.
    """
    slot = blake2b(task.encode(), digest_size=1).digest()[0] % _LINES_SLOTS if in_cluster else 0
    epoch = f"{lines}:{{{slot}}}"
    return f"{epoch}:{task}", epoch


def take_over_name(lock_name: str) -> str:
    """The name of the note of the last take-over of a task's lock, in the same slot."""
    return f"{tagged(lock_name)}:taken_over"


def ticket_name(lock_name: str, task_id: str, call_id: str = "") -> str:
    """The name of the ticket of a call that waits for its lock, in the same slot."""
    return (
        f"{tagged(lock_name)}:ticket:{task_id}:{call_id}"
        if call_id
        else f"{tagged(lock_name)}:ticket:{task_id}"
    )
