"""The offline checker: what a history says of the lock's promises."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tests.soak.history import Record, Report, Span, entitled, most_at_a_time, of_kind, overlaps, paused

SLACK_S = 1.0
POLL_S = 0.1
# A renewal may have been executed twice, once unseen, a moment later than its reply says.
_UNSEEN_US = 20_000
_INFINITY = float("inf")


@dataclass
class _Life:
    """All that is known of one attempt to hold a lock."""

    token: str
    lock: str = ""
    pid: int = 0
    lease_s: float = 0.0
    direct: bool = False
    since: int = 0  # when the server granted it; 0 if it never did
    fence: int = 0
    granted: Any = None
    start: Any = None
    end: Any = None
    releases: list[Record] = field(default_factory=list)
    renewals: list[Record] = field(default_factory=list)
    named_by: list[str] = field(default_factory=list)
    killed: Any = None

    @property
    def unseen(self) -> bool:
        """Whether the take-over with which it began may have been told to nobody."""
        if self.granted is None or self.granted["word"] == "again":
            return True
        # Asked again when the lease of a first grant may have been over, whose reply was lost.
        return bool(self.since - self.granted["began_us"] > self.lease_s * 1e6)

    def entitled(self) -> list[Span]:
        """When it might rely on the lock: until its end, its death or its deadline, whichever came first."""
        if self.start is None:
            return []
        ended = self.end["t"] if self.end else _INFINITY
        killed = self.killed["before"] if self.killed else _INFINITY
        return entitled(self.start["t"], self.start["until"], self.renewals, min(ended, killed))


def check(
    records: Sequence[Record],
    *,
    final: bool = True,
    awaited: bool = True,
    limit: int = 1,
    rate: tuple[int, float] | None = None,
) -> Report:
    """Everything that the history shows; if it is not final, what may still come is not missed.

    `awaited` says that somebody always waits for each lock, so that a take-over must come in time; `limit`,
    how many may hold a lock at a time, each under a permit that is checked as a lock of its own; `rate`, how
    many may start within how many seconds.
    """
    report = Report()
    lives = _lives(records, report)
    _count(records, lives, report)
    by_lock: dict[str, list[_Life]] = defaultdict(list)
    for life in lives.values():
        by_lock[life.lock].append(life)
    _check_crowds(lives, limit, report)
    if rate is not None:
        _check_pace(lives, rate, report)
    for lock, of_lock in sorted(by_lock.items()):
        for ms, one, other in overlaps({life.token: life.entitled() for life in of_lock}):
            report.broken(f"{lock}: {one} and {other} overlap by {ms:.3f} ms")
        acquired = sorted((life for life in of_lock if life.since), key=lambda life: life.since)
        _check_fences(lock, acquired, report)
        _check_take_overs(lock, acquired, lives, report)
        _check_releases(acquired, report)
        _check_kills(acquired, records, report, final, awaited)
    for life in lives.values():
        _check_words(life, report)
    return report


def _lives(records: Sequence[Record], report: Report) -> dict[str, _Life]:
    lives: dict[str, _Life] = {}
    kills = {record["victim"]: record for record in of_kind(records, "kill")}
    for record in records:
        kind, token = record["kind"], record.get("token")
        if kind in ("crash", "stuck", "endless"):
            report.broken(f"{kind}: {json.dumps(record)}")
        if token is None:
            continue
        life = lives.setdefault(token, _Life(token))
        if kind == "try":
            life.lock, life.pid, life.killed = record["lock"], record["pid"], kills.get(record["uid"])
            life.lease_s, life.direct = record["lease"], record["direct"]
        elif kind == "granted":
            life.granted, life.since, life.fence = record, record["since"], record["fence"]
            life.lock = record["lock"]
        elif kind in ("start", "end"):
            setattr(life, kind, record)
        elif kind == "renewed" and life.end is None:
            life.renewals.append(record)
        elif kind == "renew_failed":
            if "OOM" in record["error"] or "OutOfMemory" in record["error"]:
                report.broken(f"a full server refused a renewal: {record}")
            life.renewals.append({**record, "word": "renewed", "deadline": None, "began": 0.0, "until": 0.0})
        elif kind == "release":
            life.releases.append(record)
    for record in of_kind(records, "granted"):
        victim = record["victim"]
        if not victim:
            continue
        life = lives.get(victim["token"])
        if life is None:
            report.broken(f"a take-over names somebody unknown: {record}")
            continue
        if life.since != victim["since"]:
            # Granted once before, unseen: the reply was lost, and the lease over when it was asked again.
            earlier = f"{life.token}@{victim['since']}"
            if earlier not in lives:
                lives[earlier] = replace(
                    life, token=earlier, since=victim["since"], fence=victim["fence"], granted=None,
                    lock=record["lock"],
                    start=None, end=None, releases=[], renewals=[], named_by=[],
                )  # fmt: skip
            life = lives[earlier]
        victim["token"] = life.token
        life.named_by.append(record["token"])
    return lives


def _count(records: Sequence[Record], lives: dict[str, _Life], report: Report) -> None:
    kinds = Counter(record["kind"] for record in records)
    holders = [life for life in lives.values() if life.killed and life.start and not life.end]
    unseen = [life for life in lives.values() if life.since and life.unseen]
    report.counts |= {
        "sections": kinds["start"],
        "kills": kinds["kill"],
        "kills of a holder": len(holders),
        "stops": kinds["stop"],
        "connection faults": sum(record["struck"] for record in of_kind(records, "proxy")),
        "script flushes": kinds["flush"],
        "times without memory": kinds["full"],
        "records dropped while free": kinds["forgot"],
        "refused for their pace": kinds["paced"],
        "take-overs": sum(len(life.named_by) for life in lives.values()),
        "acquired unseen, or answered again": len(unseen),
        "renewals": kinds["renewed"],
        "losses noticed": kinds["lost"],
        "unavailable": kinds["unavailable"] + kinds["renew_failed"] + kinds["release_failed"],
    }


def _check_crowds(lives: dict[str, _Life], limit: int, report: Report) -> None:
    """No more than so many rely on one lock at a time, whatever permits they say they have."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for life in lives.values():
        by_name[life.lock.partition("#")[0]] += life.entitled()
    for name, spans in by_name.items():
        most = most_at_a_time(spans)
        if most > limit:
            report.broken(f"{name}: {most} relied on it at a time, of {limit}")


def _check_pace(lives: dict[str, _Life], rate: tuple[int, float], report: Report) -> None:
    """In no window of the period more than so many have started, by the server's time of each grant."""
    most, period_s = rate
    by_name: dict[str, list[int]] = defaultdict(list)
    for life in lives.values():
        if life.start is not None and life.since:
            by_name[life.lock.partition("#")[0]].append(life.since)
    for name, starts in by_name.items():
        starts.sort()
        for first, later in zip(starts, starts[most:]):
            if later - first < round(period_s * 1e6):
                report.broken(f"{name}: more than {most} started in {(later - first) / 1e6:.6f} s")


def _check_fences(lock: str, acquired: list[_Life], report: Report) -> None:
    """Fences strictly rise in the order in which the server granted the lock."""
    for older, newer in pairwise(acquired):
        if newer.fence <= older.fence:
            report.broken(
                f"{lock}: fence {newer.fence} of {newer.token} after {older.fence} of {older.token}"
            )


def _check_take_overs(lock: str, acquired: list[_Life], lives: dict[str, _Life], report: Report) -> None:
    """A take-over names the one who held the lock last, once, and not before the deadline."""
    place = {life.token: number for number, life in enumerate(acquired)}
    for life in acquired:
        if len(life.named_by) > 1:
            report.broken(f"{life.token} was taken over by each of {life.named_by}")
        victim = life.granted and life.granted["victim"]
        dead = lives.get(victim["token"]) if victim else None
        if dead is None:
            continue
        if dead.lock != lock or json.loads(victim["info"]).get("pid") != dead.pid:
            report.broken(f"{life.token} took {lock} over from {victim}, which is not {dead.pid}")
            continue
        said = life.start and (life.start["reported"], life.start["reported_pid"])
        if said and said != (dead.token.partition("@")[0], dead.pid):
            report.broken(f"{life.token} took over from {dead.token}, but says {life.start}")
        if victim["deadline"] > life.granted["now"]:
            report.broken(f"{life.token} took over from {dead.token} before its deadline")
        if place[life.token] - place[dead.token] != 1:
            report.broken(f"{life.token} took over from {dead.token}, who was not the last")


def _check_releases(acquired: list[_Life], report: Report) -> None:
    """`released` is said only to the one who held the lock."""
    for life, successor in zip(acquired, [*acquired[1:], None]):
        for release in life.releases:
            word, now = release["word"], release["now"]
            if word in ("released", "repaired", "resting") and successor and successor.since < now:
                report.broken(f"{life.token} was told {word}, but {successor.token} held the lock")
            if word == "gone":
                report.broken(f"the lock of {life.token} was gone when it was released")
            if word == "lost" and life.direct and now < _known_deadline(life):
                report.broken(f"{life.token} was told lost before its deadline")


def _known_deadline(life: _Life) -> int:
    renewed = [r["deadline"] for r in life.renewals if r["deadline"] and r["word"] == "renewed"]
    return max([life.granted["deadline"] if life.granted else 0, *renewed])


def _check_kills(
    acquired: list[_Life], records: Sequence[Record], report: Report, final: bool, awaited: bool
) -> None:
    """Who is killed with the lock is taken over, once, by the next, and in time."""
    pauses = [(r["us"], r["us"] + int(r["seconds"] * 1e6)) for r in of_kind(records, "full", "lag")]
    for number, life in enumerate(acquired):
        # Without a start it was granted too late to be relied on, and perhaps given back in its last moment.
        if not (life.killed and life.granted and life.start) or life.end or life.releases:
            continue
        later = acquired[number + 1 :]
        if not later:
            if final:
                report.broken(f"nobody took over from {life.token}, killed as holder")
            continue
        if not life.named_by and not later[0].unseen:
            report.broken(f"{life.token} was killed as holder, but {later[0].token} does not say so")
        took_us = later[0].since - life.killed["us"]
        if took_us < 0:
            continue  # it had lost the lock before it was killed
        report.recovery_s.append(took_us / 1e6)
        paused_us = paused(pauses, life.killed["us"], later[0].since)
        if awaited and took_us - paused_us > (life.lease_s + POLL_S + SLACK_S) * 1e6:
            report.broken(f"{life.token} was taken over only {took_us / 1e6:.3f} s after its death")


def _check_words(life: _Life, report: Report) -> None:
    """What the server and the client told one holder fits together."""
    granted, start = life.granted, life.start
    if granted is None:
        return
    early_us = granted["began_us"] - granted["now"]
    if early_us > 5:  # so the local deadline is later than the real one
        report.broken(f"{life.token}: the server decided {early_us} us before it was asked")
    if start is not None and start["replied_at"] >= start["until"]:
        report.broken(f"{life.token} was let in although its lease was over before the reply")
    deadline: int | None = granted["deadline"]
    for renewal in life.renewals:
        word = renewal["word"]
        if word == "gone":
            report.broken(f"the lock of {life.token} was gone when it was renewed")
        elif word == "lost" and renewal["now"] < _known_deadline(life):
            report.broken(f"{life.token} was told lost before its deadline")
        elif word == "renewed" and renewal["deadline"] is not None and deadline is not None:
            began_us = renewal["now"] - int((renewal["t"] - renewal["began"]) * 1e6)
            if began_us > deadline + _UNSEEN_US:
                late_ms = (began_us - deadline) / 1000
                report.broken(f"{life.token} was renewed {late_ms:.0f} ms after its deadline")
        deadline = renewal["deadline"]
