"""The note that a take-over leaves beside its lock, for who looks at it later. It decides nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from celery_setnx.lock.names import take_over_name
from celery_setnx.lock.scripts import reply_to


@dataclass(frozen=True)
class TakeOver:
    """The last time that a lock was taken over.

    Attributes:
        at: Server time (Unix seconds).
        by: The call that took it over, or the first in line, to which it was handed.
        holder: The dead holder's record, as `Holder.as_dict` has it.
    """

    at: float
    by: str
    holder: Mapping[str, Any]


def note_take_over(client: Any, key: str, take_over: TakeOver, keep_s: float) -> None:
    """Leave a note of a take-over, for who looks at the lock later. It is news, and decides nothing."""
    if keep_s >= 0.001:
        note = json.dumps(asdict(take_over))
        reply_to(client, "SET", take_over_name(key), note, "PX", str(int(keep_s * 1000)))


def last_take_over(client: Any, key: str) -> TakeOver | None:
    """The last take-over of a lock; None if there was none within the retention."""
    note = client.get(take_over_name(key))
    try:
        return None if note is None else TakeOver(**json.loads(note))
    except (ValueError, TypeError):  # another program's words, or a newer version's
        return None
