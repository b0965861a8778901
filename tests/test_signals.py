"""The signals: what the table of docs/monitoring.md says of them, and what is sent."""

import ast
import re
import time
from pathlib import Path

import pytest
from celery.utils.dispatch import Signal

import celery_setnx
from celery_setnx import signals
from tests.harness import Journal, wait_until
from tests.test_logging import apart, scenes, watched

__all__ = ["apart", "scenes", "watched"]  # fixtures

SIGNALS = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}
PACKAGE = Path(celery_setnx.__file__).parent
TABLE = Path(__file__).parent.parent / "docs" / "monitoring.md"


def sent(journal: Journal, task_id: str) -> list[str]:
    """The signals about one task, in order."""
    return [entry["signal"] for entry in journal.entries(what="signal", task_id=task_id)]


def documented() -> dict[str, set[str]]:
    """The signals of the table, with their arguments."""
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", TABLE.read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", arguments)) for name, arguments in rows if name in SIGNALS}


def test_every_signal_stands_in_the_table_with_its_arguments():
    """The table is complete and true."""
    assert documented() == {name: set(signal.providing_args) for name, signal in SIGNALS.items()}


def test_every_place_that_sends_a_signal_gives_its_arguments():
    """Each `signal.send(...)` of the package names exactly what the signal provides."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "send"
            ):
                name = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
                if name in SIGNALS:
                    found.add(name)
                    given = {keyword.arg for keyword in node.keywords} - {"sender"}
                    assert given == set(SIGNALS[name].providing_args), f"{path.name}:{node.lineno}"
    assert {"lock_conflict", "tick_late", "call_deduplicated", "lock_released"} <= found


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        ("skip", ["lock_conflict"]),
        ("retry", ["lock_conflict", "lock_conflict", "lock_acquired", "lock_released"]),
        ("wait", ["lock_conflict", "lock_waiting", "lock_woken", "lock_acquired", "lock_released"]),
        ("fail", ["lock_conflict"]),
        ("take_over", ["lock_taken_over", "lock_acquired", "lock_released"]),
        ("lose", ["lock_acquired", "lock_lost"]),
        ("lapse", ["lock_acquired", "uniqueness_lapsed", "lock_released"]),
        ("free", ["lock_acquired", "lock_released"]),
    ],
)
def test_signals_are_sent_in_order_with_exactly_their_arguments(scenes, journal, scene, expected):
    """By a real worker, with the task as sender; that every receiver fails is felt by no task."""
    call = getattr(scenes, scene)()

    def seen() -> bool:
        names = sent(journal, call.id)
        # A call that retries may come back any number of times.
        return names[-1] == expected[-1] and list(dict.fromkeys(names)) == list(dict.fromkeys(expected))

    wait_until(seen, f"{expected} in {journal.entries(what='signal', task_id=call.id)}")
    entries = journal.entries(what="signal", task_id=call.id)
    for entry in entries:
        assert set(entry["given"]) == set(SIGNALS[entry["signal"]].providing_args)
        assert entry["key"] == scenes.key
        assert entry["sender"].startswith("tests.watchapp.")
        if entry["signal"] == "lock_released":
            freed = entry["outcome"] == "freed"  # by the parent, for a dead process: it knows neither
            assert (entry["fence"] is None, entry["held_s"] is None) == (freed, freed)
    # Since the first conflict; of a wait in line, woken and acquired say the same.
    waited = {entry["waited_s"] for entry in entries if entry["signal"] in ("lock_acquired", "lock_woken")}
    assert len(waited) == ("lock_acquired" in expected)
    assert all((waited_s > 0) == ("lock_conflict" in expected) for waited_s in waited)


def test_duplicate_is_told_by_its_publisher(apart, journal):
    """In the process that publishes, with the id of the task that is queued."""
    scenes = apart("celery")
    call = scenes.duplicate()
    (entry,) = journal.wait_for("signal", signal="call_deduplicated")
    assert set(entry["given"]) == set(signals.call_deduplicated.providing_args)
    assert (entry["task_id"], entry["key"], entry["state"]) == (call.id, scenes.key, "queued")


def test_fan_out_tells_every_duplicate(apart, journal):
    """Those of its own window, and those of a call that was queued before; with one line for all."""
    from tests import watchapp

    scenes = apart("celery")
    scenes.duplicate()
    journal.wait_for("signal", signal="call_deduplicated")
    calls = [(scenes._name,), ("a",), ("a",), ("b",), ("a",)]
    counts = watchapp.marked.fan_out(calls, queue="nowhere")
    assert (counts.accepted, counts.duplicates) == (2, 3)
    told = journal.wait_for("signal", signal="call_deduplicated", count=4)[1:]
    twice = watchapp.marked.lock_key("a")
    assert sorted(entry["key"] for entry in told) == sorted([scenes.key, twice, twice])


def test_acquired_says_how_long_the_call_has_waited(scenes, journal):
    """Nothing for the first; for one that came back, since its first conflict."""
    began = time.monotonic()
    holder, second = scenes.conflict("retry")
    journal.wait_for("signal", count=2, signal="lock_conflict", task_id=second.id)
    scenes.end(holder, second)
    (first,) = journal.wait_for("signal", signal="lock_acquired", task_id=holder.id)
    (later,) = journal.wait_for("signal", signal="lock_acquired", task_id=second.id)
    (released,) = journal.wait_for("signal", signal="lock_released", task_id=holder.id)
    assert first["waited_s"] == 0.0
    assert 0.05 < later["waited_s"] < later["at"] - began
    assert 0.05 < released["held_s"] < released["at"] - began
