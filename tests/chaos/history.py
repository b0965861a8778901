"""A history: one line per record, appended by one write, in one file for all processes; and what it shows."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from celery_setnx.lock.held import HeldLock

Record = dict[str, Any]
Span = tuple[float, float]

_MAX_LINE = 4096


class History:
    """Appends records of a process; `CLOCK_MONOTONIC` is the same for every process of one host."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, kind: str, **details: Any) -> None:
        """Append one record; `t` is the monotonic time unless it is given."""
        record = {"kind": kind, "t": time.monotonic(), **details}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        assert len(line) < _MAX_LINE, line
        assert os.write(self._file, line) == len(line)


def note_renewals(note: Callable[..., None]) -> None:
    """Have every answer to a renewal of this process written down."""
    renewed = HeldLock._renewed

    def noted(held: HeldLock, before: float, reply: Sequence[Any]) -> None:
        renewed(held, before, reply)
        note(
            "renewed", token=held.token, tid=held.token.partition("|")[0], fence=held.fence, word=reply[0],
            deadline=int(reply[1] or 0), now=int(reply[2] or 0), began=before, until=held._valid_until,
        )  # fmt: skip

    HeldLock._renewed = noted


@dataclass
class Report:
    """What was counted and measured, and what was broken."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    recovery_s: list[float] = field(default_factory=list)
    hand_over_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    def broken(self, what: str) -> None:
        """Write a violation down."""
        self.violations.append(what)


def entitled(start: float, until: float, renewals: Iterable[Record], last: float) -> list[Span]:
    """When a holder might rely on its lock: up to its deadline, as renewals moved it, but not past `last`."""
    spans = [[start, until]]
    for renewal in renewals:
        if renewal["word"] not in ("renewed", "repaired"):
            break
        if renewal["began"] > spans[-1][1]:
            spans.append([renewal["t"], renewal["until"]])
        else:
            spans[-1][1] = max(spans[-1][1], renewal["until"])
    return [(begin, min(end, last)) for begin, end in spans if begin < min(end, last)]


def overlaps(spans: dict[str, list[Span]]) -> Iterator[tuple[float, str, str]]:
    """Where two holders are entitled at the same time: milliseconds, and who."""
    last_end, last = 0.0, ""
    for begin, end, who in sorted((begin, end, who) for who, own in spans.items() for begin, end in own):
        if begin < last_end and who != last:
            yield (min(end, last_end) - begin) * 1000, who, last
        if end > last_end:
            last_end, last = end, who


def most_at_a_time(spans: Iterable[Span]) -> int:
    """How many holders are entitled at the same time, at most."""
    moments = sorted((moment, change) for begin, end in spans for moment, change in ((begin, 1), (end, -1)))
    return max(accumulate(change for _, change in moments), default=0)


def paused(pauses: Iterable[Span], begin: float, end: float) -> float:
    """For how much of an interval a pause is to blame."""
    return sum(max(0.0, min(end, till) - max(begin, since)) for since, till in pauses)


def of_kind(records: Sequence[Record], *kinds: str) -> list[Record]:
    """The records of these kinds."""
    return [record for record in records if record["kind"] in kinds]
