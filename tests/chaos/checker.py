"""The offline checker: what the history of one scenario says of the promises."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from celery_setnx.run.sweep import SWEEP_S
from tests.chaos.history import Record, Report, Span, entitled, most_at_a_time, of_kind, overlaps, paused

# A machine may be so late beyond what is promised: what nobody does comes never, or after minutes.
SLACK_S = 5.0
FINAL = ("done", "failed")
FAULTS = ("kill", "excuse", "epoch", "gap", "emptied")
WAITS = ("wait", "join")
_INFINITY = float("inf")
# A worker acknowledges what its child has accepted before its body has lived for so long.
_ACKNOWLEDGED_S = 0.5


@dataclass
class Life:
    """One body: its start is written after the acquisition, its end before the release."""

    id: str
    tid: str
    name: str
    pid: int
    worker: str
    fence: int
    retries: int
    lease: float
    start: float
    until: float
    renewals: list[Record] = field(default_factory=list)
    end: Record | None = None
    kill: Record | None = None
    lost: Record | None = None
    released: Record | None = None
    died_releasing: bool = False
    excused: bool = False
    epochs: list[Record] = field(default_factory=list)
    bare: Record | None = None  # what is known of one whose lock is a bare one

    @property
    def lock(self) -> str:
        """Its lock; of several permits, the one that they are of."""
        return self.name.partition("#")[0]

    @property
    def last(self) -> float:
        """The last moment at which it surely lived."""
        if self.end is not None:
            return float(self.end["t"])
        return max(self.start, self.kill["before"] if self.kill else _INFINITY)

    @property
    def ran_out(self) -> bool:
        """Whether its lease ended before a renewal came: a matter of time."""
        return self.lost is not None and "ended before it was renewed" in self.lost["reason"]

    @property
    def harmed(self) -> bool:
        """Whether a fault has touched it."""
        return bool(self.excused or self.epochs or self.kill or self.died_releasing)

    def spans(self) -> list[Span]:
        """When nobody else may live: all its life, or what its deadlines cover if it could not renew."""
        last = min(self.last, *(epoch["since"] for epoch in self.epochs), _INFINITY)
        if self.excused:
            return entitled(self.start, self.until, self.renewals, last)
        return [(self.start, last)] if self.start < last else []

    def __str__(self) -> str:
        return f"{self.tid} (fence {self.fence}, pid {self.pid}, life {self.id})"


class Seen(NamedTuple):
    """What there is of one scenario: its tasks, what happened to them, the faults, the bodies in order."""

    sent: dict[str, Record]
    own: list[Record]
    faults: list[Record]
    lives: list[Life]

    def of_name(self, name: str) -> list[Life]:
        """The bodies of a key."""
        return [life for life in self.lives if life.name == name]


def check(records: Sequence[Record], scenario: str, *, final: bool = True) -> Report:
    """All that the history shows of a scenario; if it is not final, what may still come is not missed."""
    report = Report()
    sent = {r["tid"]: r for r in of_kind(records, "sent") if r["scenario"] == scenario}
    faults = of_kind(records, *FAULTS)
    own = [r for r in records if r.get("tid") in sent]
    seen = Seen(sent, own, faults, sorted(_lives(own, faults), key=lambda life: life.start))
    report.counts |= {"tasks": len(sent), "bodies": len(seen.lives)}
    for of_name in (seen.of_name(name) for name in {life.name for life in seen.lives}):
        by_id = {life.id: life for life in of_name}
        for ms, one, other in overlaps({life.id: life.spans() for life in of_name}):
            report.broken(f"overlap of {ms:.1f} ms: {by_id[one]} and {by_id[other]}")
        _check_fences(of_name, report)
        _check_ensured(of_name, report)
        _check_recovery(of_name, seen, report, final)
        _measure_hand_over(of_name, own, report)
    _check_bare(seen, report)
    _check_take_overs(seen, report)
    _check_joined(seen, report)
    _check_run_once(seen, report)
    _check_deduplicated(seen, report)
    if final:
        for life in seen.lives:
            _check_end(life, report)
        _check_tasks(seen, report)
    return report


def is_lost(of_task: Sequence[Record], faults: Iterable[Record]) -> bool:
    """Whether Celery documents the loss: the message was with a broker that was emptied, as one that had
    neither begun nor waited in line; or in a worker that was killed.
    """
    if not of_task:
        return False
    kept = min((record["t"] for record in of_kind(of_task, "start", "waiting")), default=_INFINITY)
    sent = of_kind(of_task, "sent")
    for emptied in of_kind(list(faults), "emptied"):
        if sent and sent[0]["t"] < emptied["t"] < kept:
            return True
    # What is acknowledged late comes back.
    if any(record.get("late") for record in of_task):
        return False
    # What waits in line has a courier until it has its lock.
    if any(record["kind"] == "waiting" for record in of_kind(of_task, "waiting", "acquired")[-1:]):
        return False
    workers = {record.get("worker") for record in of_kind(of_task, "sent", "received")[-1:]}
    last = of_task[-1]["t"]
    return any(fault.get("victim_worker") in workers and fault["t"] > last - 0.5 for fault in faults)


def _lives(own: Sequence[Record], faults: Sequence[Record]) -> list[Life]:
    lives: dict[str, Life] = {}
    by_lock: dict[tuple[str, int], Life] = {}
    for record in own:
        kind = record["kind"]
        if kind == "start":
            life = Life(
                record["life"], record["tid"], record["name"], record["pid"], record["worker"],
                record["fence"], record["retries"], record["lease"], record["t"], record["until"],
            )  # fmt: skip
            if "direct" in record:  # whose lease is so short that it may be missed at any time
                life.bare, life.excused = record, True
            lives[life.id] = by_lock[life.tid, life.fence] = life
        elif kind == "end" and record["life"] in lives:
            lives[record["life"]].end = record
        elif kind in ("renewed", "lost", "released"):
            held = by_lock.get((record["tid"], record["fence"]))
            if held is None:
                continue
            if kind == "renewed" and held.end is None:
                held.renewals.append(record)
            elif kind != "renewed":
                setattr(held, kind, record)
    for life in lives.values():
        _blame(life, faults)
    return list(lives.values())


def _blame(life: Life, faults: Sequence[Record]) -> None:
    """Find the faults that this life has felt."""
    for fault in faults:
        kind = fault["kind"]
        if kind == "kill" and life.start <= fault["t"] and life.end is None and life.kill is None:
            if _hits(fault, life):
                life.kill = fault
        elif kind == "kill" and life.end is not None and not life.released and _hits(fault, life):
            life.died_releasing = life.start <= fault["t"] and fault["before"] - life.end["t"] < 0.5
        elif kind == "gap":
            if fault["life"] == life.id and _meet(life, fault["since"], fault["t"]):
                life.excused = True
        elif kind == "excuse":
            whom = (fault["of_worker"], fault["of_pid"])
            if whom in (("", 0), (life.worker, 0), ("", life.pid)) and _meet(
                life, fault["since"], fault["until"]
            ):
                life.excused = True
        elif kind == "epoch" and life.start < fault["until"] and life.last > fault["since"]:
            life.epochs.append(fault)


def _hits(fault: Record, life: Life) -> bool:
    return bool(fault.get("victim_pid") == life.pid or fault.get("victim_worker") == life.worker)


def _meet(life: Life, since: float, until: float) -> bool:
    """Whether a disturbance fell into a life; a missed renewal shows up to a lease later."""
    return since <= life.last and until + life.lease >= life.start


def _check_fences(lives: list[Life], report: Report) -> None:
    """Fences strictly rise, in the order of the bodies that were entitled when they began."""
    entitled = [life for life in lives if life.start < life.until or not life.excused]
    for older, newer in pairwise(entitled):
        if newer.fence <= older.fence:
            report.broken(f"the fence does not rise: {older}, then {newer}")


def _check_ensured(lives: list[Life], report: Report) -> None:
    """`ensure()` and `release()` never say yes to a body once a later holder has begun."""
    for life in lives:
        if life.end is None or life.epochs:
            continue
        later = min((other.start for other in lives if other.fence > life.fence), default=_INFINITY)
        if later < (life.end["ensured"] or 0.0):
            report.broken(f"{life} was told that it holds the lock beside a later holder")
        word = life.released["reason"] if life.released else ""
        if later < life.end["t"] and word in ("released", "repaired", "resting"):
            report.broken(f"{life} was told {word}, but a later holder had the lock")
        if "gone" in (word, *(renewal["word"] for renewal in life.renewals)):
            report.broken(f"the lock of {life} was gone")


def _check_recovery(lives: list[Life], seen: Seen, report: Report, final: bool) -> None:
    """A dead holder's key runs again within its lease, and a sweep if its heirs wait in line."""
    for number, life in enumerate(lives):
        if life.kill is None or life.lost is not None or not life.kill.get("heirs"):
            continue
        killed = life.kill["before"]
        later = [other for other in lives[number + 1 :] if other.start > killed]
        if not later:
            if final and not life.bare:  # the crowd's driver has each bare lock in the end
                report.broken(f"nobody ran after {life} was killed")
            continue
        if life.bare and later[0] is not lives[number + 1]:
            continue  # it had lost its lock before
        took = later[0].start - killed
        report.recovery_s.append(took)
        pauses = [(r["since"], r["until"]) for r in of_kind(seen.faults, "excuse") if not r["of_worker"]]
        within_s = life.lease + SLACK_S + (SWEEP_S if life.kill["heirs"] in WAITS else 0.0)
        if took - paused(pauses, killed, later[0].start) > within_s:
            report.late.append(f"the key ran again only {took:.2f} s after {life} was killed")


def _check_end(life: Life, report: Report) -> None:
    """A body that ends releases its lock; one that is not kept from renewing does not lose it."""
    if life.end is None and life.kill is None:
        report.broken(f"{life} vanished")
    if life.lost is not None and not life.excused and not life.epochs:
        lost = f"{life} lost its lock: {life.lost['reason']}"
        report.late.append(lost) if life.ran_out else report.broken(lost)
    if life.end and life.end["why"] == "lost" and life.lost is None:
        report.broken(f"{life} was told that its lock is lost, but no signal was sent")
    if life.end is not None and not life.harmed and not life.released and life.lost is None:
        report.broken(f"{life} ended and released nothing")
    for epoch in life.epochs:
        told_by = epoch["until"] + life.lease + SLACK_S
        if life.last > told_by and life.last < _INFINITY and (life.lost is None or life.lost["t"] > told_by):
            report.broken(f"{life} was not told that its lock was gone")


def _check_bare(seen: Seen, report: Report) -> None:
    """What is known of bare locks only: a lease that was over at the reply, a limit, a pace."""
    by_lock: dict[str, list[Life]] = defaultdict(list)
    for life in seen.lives:
        if life.bare is None:
            continue
        by_lock[life.lock].append(life)
        if life.bare["replied_at"] >= life.until:
            report.broken(f"{life} was let in although its lease was over before the reply")
        until = life.until
        for renewal in life.renewals:
            if renewal["word"] == "lost" and renewal["t"] < until:
                report.broken(f"{life} was told lost before its deadline")
            until = renewal["until"]
        if life.released and life.released["reason"] == "lost" and life.released["t"] < until:
            report.broken(f"{life} was told lost before its deadline")
    for lock, lives in by_lock.items():
        terms = lives[0].bare or {}
        most = most_at_a_time(span for life in lives for span in life.spans())
        if most > terms["limit"]:
            report.broken(f"{lock}: {most} relied on it at a time, of {terms['limit']}")
        count, period_s = terms["rate"] or (len(lives), 0.0)
        since = sorted(life.bare["since"] for life in lives if life.bare)
        for first, later in zip(since, since[count:]):
            if later - first < round(period_s * 1e6):
                report.broken(f"{lock}: more than {count} started in {(later - first) / 1e6:.6f} s")


def _check_take_overs(seen: Seen, report: Report) -> None:
    """A take-over names the one who held the lock last, and who is dead or was kept from renewing."""
    taken: set[tuple[str, int]] = set()
    woken = {record["tid"] for record in of_kind(seen.own, "woken")}
    for record in of_kind(seen.own, "taken_over"):
        name, victim = record.get("name") or seen.sent[record["tid"]]["name"], record["victim"]
        what = f"{record['tid']} took {name} over from {victim}"
        if (name, victim["fence"]) in taken:
            report.broken(f"{what}, as another did")
        taken.add((name, victim["fence"]))
        dead = [life for life in seen.of_name(name) if life.fence == victim["fence"]]
        if not dead:
            # It may have been granted to one who died, or never heard of it, before its body began.
            if seen.sent.get(victim["tid"], {}).get("name") != name.partition("#")[0]:
                report.broken(f"{what}, who never held it")
            continue
        life = dead[0]
        if (life.tid, life.pid, life.worker) != (victim["tid"], victim["pid"], victim["worker"]):
            report.broken(f"{what}, but it was {life}")
        # Whoever hands the lock to another knows no fence; and may tell of it when one woken before has it.
        between = [other for other in seen.of_name(name) if other.fence > life.fence]
        if record.get("fence") is None:
            between = [other for other in between if other.tid not in woken]
        if any(other.tid != record["tid"] and other.start < record["t"] for other in between):
            report.broken(f"{what}, who was not the last")
        if not (life.kill or life.excused or life.epochs or life.ran_out):
            report.broken(f"{what}, who was alive and well")
        elif life.released and life.released["reason"] != "lost" and life.kill is None:
            report.broken(f"{what}, who had released it")


def _check_tasks(seen: Seen, report: Report) -> None:
    """Every task is done, skipped or failed, or lost with its worker; and as its policy says."""
    of_task: dict[str, list[Record]] = defaultdict(list)
    for record in seen.own:
        of_task[record["tid"]].append(record)
    disturbed = {life.tid for life in seen.lives if life.excused or life.epochs or life.ran_out}
    for tid, call in seen.sent.items():
        records = of_task[tid]
        kinds = {record["kind"] for record in records}
        errors = {record["error"] for record in records if record["kind"] == "failed"}
        skipped = any(record.get("skipped") for record in records)
        if skipped and call["policy"] != "skip":
            report.broken(f"{tid} was skipped, though its policy is {call['policy']}")
        for error in errors - {"WorkerLostError"}:
            if error == "AlreadyRunning" and call["policy"] == "raise":
                continue
            if error == call["may"] or (error == "LockLost" and tid in disturbed):
                continue
            if call["policy"] == "join" and _has_failed_beside(call, error, seen):
                continue
            text = next(r["text"] for r in records if r.get("error") == error)
            report.broken(f"{tid} failed with {error}: {text}")
        ends = [end for end in FINAL if end in kinds]
        if skipped:
            ends = ["skipped"]
        elif not ends and is_lost(records, seen.faults):
            ends = ["lost as documented"]
        if ends:
            report.counts[ends[0]] += 1
        else:
            report.broken(f"{tid} is not accounted for: {sorted(kinds)}")


def _has_failed_beside(call: Record, error: str, seen: Seen) -> bool:
    """Whether another call of the key has failed so, for which this one may have waited."""
    return any(
        record["error"] == error
        and record["t"] >= call["t"]
        and record["tid"] != call["tid"]
        and seen.sent[record["tid"]]["name"] == call["name"]
        for record in of_kind(seen.own, "failed")
    )


def _check_joined(seen: Seen, report: Report) -> None:
    """A call that joins ends with what a body of its key returned that ended after the call was sent."""
    by_id = {life.id: life for life in seen.lives}
    for record in of_kind(seen.own, "done"):
        call = seen.sent[record["tid"]]
        if call["policy"] != "join":
            continue
        life = by_id.get(record["result"])
        if life is None or life.end is None or life.end["why"] != "done":
            report.broken(f"{call['tid']} ended with {record['result']!r}, which no body returned")
        elif life.name != call["name"]:
            report.broken(f"{call['tid']} ended with the result of another key: {life}")
        elif life.end["t"] < call["t"]:
            ago_s = call["t"] - life.end["t"]
            report.broken(f"{call['tid']} was sent {ago_s:.2f} s after what it joined: {life}")


def _check_run_once(seen: Seen, report: Report) -> None:
    """However many messages a call that waits has, it runs once, and ends once."""
    runs: dict[tuple[str, int], list[Life]] = defaultdict(list)
    for life in seen.lives:
        if seen.sent[life.tid]["policy"] in WAITS:
            runs[life.tid, life.retries].append(life)
    for of_call in runs.values():
        for first, second in pairwise(of_call):
            if not _may_run_again(first, late=seen.sent[first.tid]["late"]):
                report.broken(f"run twice: {first} and {second}")
    ends = Counter(tid for tid, _ in {(r["tid"], r["t"]) for r in of_kind(seen.own, "done", "failed")})
    disturbed = {life.tid for life in seen.lives if life.harmed}
    for tid, count in ends.items():
        if count > 1 and tid not in disturbed and seen.sent[tid]["policy"] in WAITS:
            report.broken(f"{tid} ended {count} times")


def _may_run_again(life: Life, *, late: bool) -> bool:
    """Whether the server has forgotten it, or its worker died before it has acknowledged the message."""
    if life.epochs or life.excused or life.died_releasing:
        return True
    if life.end is not None and life.end["why"] == "done":
        return False
    return late or life.kill is None or life.kill["before"] - life.start < _ACKNOWLEDGED_S


def _check_deduplicated(seen: Seen, report: Report) -> None:
    """A call that was dropped as a duplicate is one of a call that begins later."""
    for record in of_kind(seen.own, "deduplicated"):
        if any(
            start["t"] < record["t"] for start in of_kind(seen.own, "start") if start["tid"] == record["tid"]
        ):
            report.broken(f"a call was dropped as a duplicate of {record['tid']}, which had begun")


def _measure_hand_over(lives: Sequence[Life], own: Sequence[Record], report: Report) -> None:
    """From the release by one who lived to the next body, which has waited in line."""
    woken = {record["tid"] for record in of_kind(own, "woken")}
    waiting = {record["tid"]: record["t"] for record in reversed(of_kind(own, "waiting"))}
    for life, heir in pairwise(lives):
        if life.harmed or heir.epochs or heir.excused or life.end is None or heir.tid not in woken:
            continue
        if waiting.get(heir.tid, _INFINITY) < life.end["t"]:
            report.hand_over_s.append(heir.start - life.end["t"])
