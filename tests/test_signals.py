"""The signals: what the table of docs/monitoring.md says of them, and what is sent."""

import ast
import re
from pathlib import Path

import pytest
from celery.utils.dispatch import Signal

import celery_setnx
from celery_setnx import signals
from tests.harness import Journal, wait_until
from tests.test_logging import scenes, watched

__all__ = ["scenes", "watched"]  # fixtures

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
    for entry in journal.entries(what="signal", task_id=call.id):
        assert set(entry["given"]) == set(SIGNALS[entry["signal"]].providing_args)
        assert entry["key"] == scenes.key
        assert entry["sender"].startswith("tests.watchapp.")


def test_duplicate_is_told_by_its_publisher(scenes, journal):
    """In the process that publishes, with the id of the task that is queued."""
    call = scenes.duplicate()
    (entry,) = journal.wait_for("signal", signal="call_deduplicated")
    assert set(entry["given"]) == set(signals.call_deduplicated.providing_args)
    assert (entry["task_id"], entry["key"], entry["state"]) == (call.id, scenes.key, "queued")


def test_fan_out_tells_every_duplicate(scenes, journal):
    """Those of its own window, and those of a call that was queued before; with one line for all."""
    from tests import watchapp

    scenes.duplicate()
    journal.wait_for("signal", signal="call_deduplicated")
    counts = watchapp.marked.fan_out(
        [(scenes._name,), ("a",), ("a",), ("b",), ("a",)], countdown=60, expires=30
    )
    assert (counts.accepted, counts.duplicates) == (2, 3)
    told = journal.wait_for("signal", signal="call_deduplicated", count=4)[1:]
    assert sorted(entry["key"] for entry in told) == sorted(
        [scenes.key, watchapp.marked.lock_key("a"), watchapp.marked.lock_key("a")]
    )


def test_acquired_says_how_long_the_call_has_waited(scenes, journal):
    """Nothing for the first; for one that came back, since its first conflict."""
    holder, second = scenes.conflict("retry")
    journal.wait_for("signal", count=2, signal="lock_conflict", task_id=second.id)
    scenes.end(holder)
    scenes.end(second)
    (first,) = journal.wait_for("signal", signal="lock_acquired", task_id=holder.id)
    (later,) = journal.wait_for("signal", signal="lock_acquired", task_id=second.id)
    (released,) = journal.wait_for("signal", signal="lock_released", task_id=holder.id)
    assert first["waited_s"] == 0.0
    assert 0.05 < later["waited_s"] < 20
    assert 0.05 < released["held_s"] < 20


def test_woken_and_acquired_say_the_same_of_a_wait_in_line(scenes, journal):
    """Since the call met the held lock first."""
    call = scenes.wait()
    (woken,) = journal.wait_for("signal", signal="lock_woken", task_id=call.id)
    (acquired,) = journal.wait_for("signal", signal="lock_acquired", task_id=call.id)
    assert acquired["waited_s"] == woken["waited_s"] > 0


def test_freed_lock_has_no_fence_and_no_time(scenes, journal):
    """The parent that frees it for a dead process knows neither."""
    call = scenes.free()
    (entry,) = journal.wait_for("signal", signal="lock_released", task_id=call.id)
    assert (entry["outcome"], entry["fence"], entry["held_s"]) == ("freed", None, None)
