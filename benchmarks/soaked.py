"""What the journal of a soak says: bodies, kills, calls, and the violations. Pure.

- overlap: a body began while another body of its key was alive.
- twice: the body of a call was completed twice.
- skipped: a killed call was delivered again, and skipped although no body of its key was alive.
- lost: an accepted call was not completed, skipped or failed, and the broker no longer has it.
- stuck: a body was killed, its key was called, and for too long no body of the key began.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Record, of_kind, overlaps

VIOLATIONS = {
    "overlap": "two at once",
    "twice": "ran twice",
    "skipped": "skipped",
    "lost": "lost",
    "stuck": "stuck",
}
"""Each violation, and its title in the table."""
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
    """What was found.

    Attributes:
        found: Each violation, in words.
        counts: Bodies, kills, and records by kind.
        gaps_s: For each kill the seconds from the end of the key's last body to the next beginning.
    """

    found: dict[str, list[str]]
    counts: dict[str, int]
    gaps_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        gaps_s = self.gaps_s or [0.0]
        gaps = {"gap_median_s": round(statistics.median(gaps_s), 2), "gap_max_s": round(max(gaps_s), 2)}
        violations = {name: len(found) for name, found in self.found.items()}
        return {**self.counts, **gaps, "violations": violations}


def check(records: Sequence[Record], stuck_s: float) -> Verdict:
    """The verdict on a soak.

    Args:
        records: The journal, in the order in which it was written.
        stuck_s: After how many seconds a key without a body is stuck.
    """
    lives, kinds = bodies(records), Counter(record["kind"] for record in records)
    killed = [life for life in lives if life.kill]
    workers = sum(life.kill["how"] == "worker" for life in killed if life.kill)
    counts = {"kills": len(killed), "kills_of_workers": workers, "bodies": len(lives)}
    counts |= {kind: kinds[kind] for kind in ("sent", "refused", "skip", "failed", "queued")}
    verdict = Verdict({name: [] for name in VIOLATIONS}, counts)
    by_key: dict[str, list[Body]] = defaultdict(list)
    for life in lives:
        by_key[life.key].append(life)
    for key, own in by_key.items():
        verdict.found["overlap"] += _overlaps(own)
        own.sort(key=lambda life: life.begin)
        calls = [record["t"] for record in of_kind(records, "sent", "refused") if record["key"] == key]
        gaps = [(_gap(life, own, calls, stuck_s), life) for life in own if life.kill]
        verdict.gaps_s += [gap for gap, _ in gaps if gap is not None]
        verdict.found["stuck"] += [
            f"for {gap:.1f} s after {life}" for gap, life in gaps if (gap or 0) > stuck_s
        ]
    ends = Counter(record["call"] for record in of_kind(records, "end"))
    answers = {record["call"] for record in of_kind(records, "end", "skip", "failed", "queued")}
    verdict.found["twice"] += [call for call, times in ends.items() if times > 1]
    verdict.found["lost"] += [r["call"] for r in of_kind(records, "sent") if r["call"] not in answers]
    verdict.found["skipped"] += _skipped_for_the_dead(records, lives, ends)
    return verdict


def table(results: Mapping[str, Any]) -> str:
    """Results as Markdown: violations per 1,000 kills."""
    lines = [("per 1,000 kills", *VIOLATIONS.values()), ("---",) * (1 + len(VIOLATIONS))]
    for way, found in results.items():
        counts = (found["violations"][name] for name in VIOLATIONS)
        lines.append((way, *(f"{count * 1000 / max(1, found['kills']):.0f}" for count in counts)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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


def _skipped_for_the_dead(
    records: Sequence[Record], lives: list[Body], ended: Mapping[str, int]
) -> Iterator[str]:
    killed = {life.call: life for life in lives if life.kill}
    for skip in of_kind(records, "skip"):
        own = killed.get(skip["call"])
        if own is None or own.begin > skip["t"] or skip["call"] in ended:
            continue
        since, until = max(own.last, skip["t"] - _SKIP_MARGIN_S), skip["t"] + _SKIP_MARGIN_S
        rivals = (life for life in lives if life.key == own.key)
        if not any(life.begin < until and life.last > since for life in rivals):
            yield f"skipped at {skip['t']:.3f} after {own}"
