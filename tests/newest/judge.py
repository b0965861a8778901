"""What a run has shown, by its journal and its results: what was broken, what was counted and measured."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tests.chaos.history import Record, of_kind

SLACK_S = 0.1
"""By how much a body may begin before its call is due: clocks are two here, and they are rounded."""


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        broken: Each violation, in words.
        counts: How often what happened.
        figures: Seconds: what was measured, by name.
    """

    broken: list[str]
    counts: dict[str, int]
    figures: dict[str, list[float]]


class Journal:
    """The calls and the bodies of a run.

    Args:
        records: The journal.
        results: What each call ended with, by its id: `(state, result)`.
    """

    def __init__(self, records: Sequence[Record], results: Mapping[str, tuple[str, Any]]) -> None:
        self.records, self.results = records, results
        self.calls = {record["id"]: record for record in of_kind(records, "reserved")}
        self.sent = {record["id"]: record["t"] for record in of_kind(records, "sent")}
        self.received: dict[str, float] = {}
        for record in of_kind(records, "received"):
            self.received.setdefault(record["id"], record["t"])
        self.bodies: dict[str, list[Record]] = defaultdict(list)
        for body in of_kind(records, "begin"):
            self.bodies[body["key"]].append(body)
        self.of_key: dict[str, list[Record]] = defaultdict(list)
        for call in self.calls.values():
            self.of_key[call["key"]].append(call)

    @property
    def lost(self) -> list[str]:
        """Calls that were sent, and that no worker has received: a killed one had read them only just."""
        return [name for name in self.sent if name not in self.received]


def judged(
    records: Sequence[Record],
    results: Mapping[str, tuple[str, Any]],
    quiet_s: float = 0.0,
    most_s: float = 0.0,
) -> Verdict:
    """All that a run has shown; `quiet_s` is its debounce, `most_s` its bound."""
    journal = Journal(records, results)
    broken = [*_fell(journal), *_older_at_last(journal), *_misnumbered(journal), *_ill_ended(journal)]
    if quiet_s:
        broken += _early(journal, quiet_s, most_s)
    return Verdict(broken, _counts(journal), _figures(journal, quiet_s, most_s) if quiet_s else {})


def _fell(journal: Journal) -> Iterator[str]:
    """An older call's body that began after a newer one's."""
    for key, bodies in journal.bodies.items():
        for before, after in pairwise(bodies):
            for what in ("generation", "fence"):
                if after[what] < before[what]:
                    yield f"{key}: the {what} fell from {before[what]} to {after[what]} ({after['id']})"


def _older_at_last(journal: Journal) -> Iterator[str]:
    """A key whose last body is not that of its newest settled call, or of a newer one.

    Nothing is promised of a key whose newest call the broker has lost: it has replaced those before it.
    """
    lost = journal.lost
    for key, calls in journal.of_key.items():
        settled = [call for call in calls if call["id"] in journal.sent]
        newest = max(settled, key=lambda call: call["generation"], default=None)
        last = journal.bodies[key][-1]["generation"] if journal.bodies[key] else 0
        if newest and newest["id"] not in lost and last < newest["generation"]:
            yield f"{key}: its last body has generation {last}, and {newest} was sent"


def _misnumbered(journal: Journal) -> Iterator[str]:
    """A call whose publishing began after another's had returned, and that counts as the older one."""
    for key, calls in journal.of_key.items():
        moments = [(call["began"], 0, call) for call in calls]
        moments += [(journal.sent[call["id"]], 1, call) for call in calls if call["id"] in journal.sent]
        newest = 0
        for _, is_sent, call in sorted(moments, key=lambda moment: moment[:2]):
            if is_sent:
                newest = max(newest, call["generation"])
            elif call["generation"] <= newest:
                yield f"{key}: {call} was published after generation {newest}"


def _ill_ended(journal: Journal) -> Iterator[str]:
    """A call that did not end, or ended as it should not."""
    begun = {body["id"] for bodies in journal.bodies.values() for body in bodies}
    for name in journal.received:
        call, (state, result) = journal.calls[name], journal.results.get(name, ("no result", None))
        if state == "SUCCESS" and isinstance(result, dict):
            newer = journal.calls.get(result.get("superseded_by", ""))
            if not newer or newer["key"] != call["key"] or newer["generation"] <= call["generation"]:
                yield f"{call} was skipped for no newer call: {result}, {newer}"
        elif state != "SUCCESS" or result != call["version"] or name not in begun:
            yield f"{call} ended with {state}: {result}"
    killed = sum(record["how"] == "worker" for record in of_kind(journal.records, "kill"))
    if len(journal.lost) > killed:
        yield f"{len(journal.lost)} calls were never received, with {killed} killed workers: {journal.lost}"


def _starts(journal: Journal, key: str) -> Iterator[tuple[Record, float]]:
    """Each start of a newer call, and since when one was sent that waited for it."""
    started, since = 0, 0.0
    for body in journal.bodies[key]:
        if body["generation"] > started:
            waiting = [
                max(journal.sent[call["id"]], since)
                for call in journal.of_key[key]
                if call["id"] in journal.sent and call["generation"] > started
            ]
            yield body, min(waiting, default=body["t"])
            started, since = body["generation"], body["t"]


def _early(journal: Journal, quiet_s: float, most_s: float) -> Iterator[str]:
    """A body that began before its call was due, whichever of those before it was the first that waited."""
    for key, bodies in journal.bodies.items():
        for body in bodies:
            call = journal.calls[body["id"]]
            before = [one["generation"] for one in bodies if one["t"] < call["began"]]
            waiting = [one for one in journal.of_key[key] if one["generation"] > max(before, default=0)]
            first = min(one["began"] for one in (*waiting, call))
            due = min(call["began"] + quiet_s, first + most_s)
            if body["t"] < due - SLACK_S:
                yield f"{key}: {body} began {due - body['t']:.3f} s before it was due"


def _figures(journal: Journal, quiet_s: float, most_s: float) -> dict[str, list[float]]:
    """Delays, apart for starts before which a process was killed: a message of its comes again later."""
    kills = [record["t"] for record in of_kind(journal.records, "kill")]
    found: dict[str, list[float]] = defaultdict(list)
    for key in journal.bodies:
        starts = list(_starts(journal, key))
        found["bodies of a key"].append(len(starts))
        for body, first in starts:
            began, received = journal.calls[body["id"]]["began"], journal.received[body["id"]]
            due = min(began + quiet_s, max(began, first + most_s))
            met = ", a process was killed meanwhile" if any(first < at < body["t"] for at in kills) else ""
            found[f"from the call to its body{met}"].append(body["t"] - began)
            found[f"past debounce_max{met}"].append(max(0.0, body["t"] - first - most_s))
            found[f"past its time, in the queue{met}"].append(max(0.0, received - due))
            found[f"past its time, with a worker{met}"].append(max(0.0, body["t"] - max(due, received)))
    return found


def _counts(journal: Journal) -> dict[str, int]:
    told = Counter(record["how"] for record in of_kind(journal.records, "kill"))
    received = of_kind(journal.records, "received")
    return {
        "calls": len(journal.calls),
        "keys": len(journal.of_key),
        "bodies": sum(map(len, journal.bodies.values())),
        "superseded": sum(isinstance(result, dict) for _, result in journal.results.values()),
        "killed publishers": told["publisher"],
        "killed workers": told["worker"],
        "killed bodies": told["body"],
        "redeliveries": sum(record["again"] for record in received),
        "copies put into the broker": len(of_kind(journal.records, "copied")),
        "lost by the broker": len(journal.lost),
        "reserved, and not sent": sum(name not in journal.sent for name in journal.calls),
    }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Of many figures: how many, the median, 95 % and the largest."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else [*seconds] * 19
    of = {"median": statistics.median(seconds), "95 %": cuts[-1], "most": max(seconds)}
    return {"count": len(seconds), **{name: round(value, 3) for name, value in of.items()}}
