"""What the journal of a soak says: bodies, kills and calls, and what no lock should let happen. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Record, of_kind, overlaps

VIOLATIONS = {
    "overlap": "a body began while another body of its key was alive",
    "twice": "the body of a call was completed twice",
    "refused_by_dead": "a killed call was delivered again, and skipped although no body of its key was alive",
    "lost": "an accepted call was neither completed nor skipped nor failed, and the broker has it no longer",
    "stuck": "a key's holder was killed, its calls were published, and no body began in time",
}
# What is skipped is told of a moment after the lock was asked; a body's notes lie within its lock's time.
_SKIP_MARGIN_S = 1.0
_FOREVER = float("inf")


@dataclass
class Body:
    """One run of a call's body; it ends with its note, or at the latest moment before its kill."""

    call: str
    key: str
    pid: int
    begin: float
    last: float = _FOREVER
    kill: Record | None = None

    def __str__(self) -> str:
        how = f"killed ({self.kill['how']})" if self.kill else "ended"
        return f"{self.key} {self.call} pid {self.pid}: {self.begin:.3f} to {self.last:.3f}, {how}"


@dataclass
class Verdict:
    """What was counted, and what was found, in words.

    Attributes:
        counts: Bodies, kills, calls published and refused, calls skipped, each violation.
        gaps_s: For each kill the seconds from the end of the key's last body to the next beginning.
        found: Each violation with the bodies that it is about.
    """

    counts: dict[str, int] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    found: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in VIOLATIONS})

    def as_json(self) -> dict[str, Any]:
        """The counts and the gaps, as plain values."""
        gaps = sorted(self.gaps_s) or [0.0]
        counted = self.counts | {name: len(found) for name, found in self.found.items()}
        return counted | {"gap_median_s": round(statistics.median(gaps), 2), "gap_max_s": round(gaps[-1], 2)}


def check(records: Sequence[Record], stuck_s: float) -> Verdict:
    """The verdict on a soak.

    Args:
        records: The journal, in the order in which it was written.
        stuck_s: After how many seconds a key without a body is stuck.
    """
    lives, verdict = bodies(records), Verdict()
    by_key: dict[str, list[Body]] = defaultdict(list)
    for life in lives:
        by_key[life.key].append(life)
    answers = {record["call"] for record in of_kind(records, "end", "skip", "failed", "queued")}
    sent = [record["call"] for record in of_kind(records, "sent")]
    for own in by_key.values():
        verdict.found["overlap"] += _overlaps(own)
        own.sort(key=lambda life: life.begin)
    for key, own in by_key.items():
        calls = [record["t"] for record in of_kind(records, "sent", "refused") if record["key"] == key]
        for killed in (life for life in own if life.kill):
            gap = _gap(killed, own, calls, stuck_s)
            if gap is not None:
                verdict.gaps_s.append(gap)
                if gap > stuck_s:
                    verdict.found["stuck"].append(f"for {gap:.1f} s after {killed}")
    ends = [record["call"] for record in of_kind(records, "end")]
    verdict.found["twice"] = [call for call in dict.fromkeys(ends) if ends.count(call) > 1]
    verdict.found["lost"] = [call for call in sent if call not in answers]
    verdict.found["refused_by_dead"] = list(_refused_by_dead(records, lives, set(ends)))
    verdict.counts = {
        "kills": sum(life.kill is not None for life in lives),
        "kills_of_workers": sum(life.kill is not None and life.kill["how"] == "worker" for life in lives),
        "bodies": len(lives),
        "published": len(sent),
        "refused": len(of_kind(records, "refused")),
        "skipped": len(of_kind(records, "skip")),
        "failed": len(of_kind(records, "failed")),
        "still_queued": len(of_kind(records, "queued")),
    }
    return verdict


def bodies(records: Sequence[Record]) -> list[Body]:
    """All runs of bodies. A kill that met no body, because that had just ended, is none."""
    found: list[Body] = []
    running: dict[int, Body] = {}
    for record in records:
        if record["kind"] == "begin":
            running[record["pid"]] = Body(record["call"], record["key"], record["pid"], record["t"])
            found.append(running[record["pid"]])
        elif record["kind"] == "end":
            running.pop(record["pid"]).last = record["t"]
        elif record["kind"] == "kill" and (killed := running.pop(record["pid"], None)):
            killed.kill, killed.last = record, max(killed.begin, record["before"])
    return found


def _overlaps(own: list[Body]) -> Iterator[str]:
    spans = {str(life): [(life.begin, life.last)] for life in own}
    return (f"{ms:.0f} ms: {one} | {other}" for ms, one, other in overlaps(spans))


def _gap(killed: Body, own: list[Body], calls: list[float], stuck_s: float) -> float | None:
    """Seconds without a body after a kill; None if the key was not called for that long, or is still in use.

    Whoever runs beside the killed one keeps the key from the others, and is no stuck lock.
    """
    later = [life.begin for life in own if life.begin > killed.last]
    begin = later[0] if later else max(calls, default=0.0)
    free_at = max(life.last for life in own if life.begin <= killed.last)
    gap = begin - free_at
    if not later and gap <= stuck_s:
        return None
    if gap > stuck_s and not any(free_at < at < free_at + stuck_s for at in calls):
        return None
    return max(0.0, gap)


def _refused_by_dead(records: Sequence[Record], lives: list[Body], ended: Collection[str]) -> Iterator[str]:
    killed = {life.call: life for life in lives if life.kill}
    for skip in of_kind(records, "skip"):
        own = killed.get(skip["call"])
        if own is None or own.begin > skip["t"] or skip["call"] in ended:
            continue
        since, until = max(own.last, skip["t"] - _SKIP_MARGIN_S), skip["t"] + _SKIP_MARGIN_S
        rivals = (life for life in lives if life.key == own.key and life.call != own.call)
        if not any(life.begin < until and life.last > since for life in rivals):
            yield f"skipped at {skip['t']:.3f} after {own}"
