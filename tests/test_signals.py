"""Signals and log lines: what the table of docs/monitoring.md says of them, and what is told of each call."""

import ast
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.utils.dispatch import Signal

import celery_setnx
from celery_setnx import signals
from tests.docs.pages import DOCS, table
from tests.harness import Journal, Worker, wait_until

SIGNALS = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}
COMMON = {"task_id", "key", "about"}
PACKAGE = Path(celery_setnx.__file__).parent
LINE = re.compile(r"^\[\S+ \S+ (?P<level>[A-Z]+)/[^\]]+\] (?P<text>.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def watched(module_worker) -> Iterator[Worker]:
    """A worker of `tests.watchapp` whose events are on."""
    worker = module_worker("tests.watchapp", arguments=("-E",))
    yield worker
    worker.stop()


@pytest.fixture
def apart(server, locks, journal, gates) -> Any:
    """What may happen to a call, in the workers of a queue."""
    from tests import watchapp

    return lambda queue: watchapp.Scenes(locks, gates, queue)


@pytest.fixture
def scenes(watched, apart) -> Any:
    """What may happen to a call of that worker."""
    return apart("celery")


def lines_about(worker: Worker, call: str, key: str) -> list[str]:
    """Level and text of each line that names a call and its key, ours or Celery's."""
    found = [m for m in LINE.finditer(worker.log_text()) if key in m["text"] and f"[{call}]" in m["text"]]
    return [f"{m['level']} {m['text']}" for m in found]


def sent(journal: Journal, task_id: str) -> list[str]:
    """The signals about one task, in order."""
    return [entry["signal"] for entry in journal.entries(what="signal", task_id=task_id)]


def documented() -> dict[str, set[str]]:
    """The signals of the table, with their arguments; it leaves out those that all but `tick_late` have."""
    rows = table((DOCS / "monitoring.md").read_text(), "signal", "when", "arguments")
    own = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[-1])) for row in rows}
    return {name: own[name] | (set() if name == "tick_late" else COMMON) for name in own}


def test_every_signal_stands_in_the_table_with_its_arguments():
    """The table is complete and true."""
    assert documented() == {name: set(signal.providing_args) for name, signal in SIGNALS.items()}


def test_every_place_that_sends_a_signal_gives_its_arguments():
    """Each `signal.send(...)` of the package names exactly what the signal provides."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "send":
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
        ("supersede", ["call_superseded"]),
        ("supersede_in_line", ["lock_conflict", "lock_waiting", "call_superseded"]),
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


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_duplicate_is_told_by_its_publisher(apart, journal, caplog, level, lines):
    """In the process that publishes, with the id of the task that is queued: by a signal and in one line.

    The level of the logger `celery_setnx` rules all lines.
    """
    caplog.set_level(level, logger="celery_setnx")
    scenes = apart("celery")
    call = scenes.duplicate()
    (entry,) = journal.wait_for("signal", signal="call_deduplicated")
    assert set(entry["given"]) == set(signals.call_deduplicated.providing_args)
    assert (entry["task_id"], entry["key"], entry["state"]) == (call.id, scenes.key, "queued")
    assert [record.message for record in caplog.records if record.name.startswith("celery_setnx")] == [
        f"A call of {MARKED}({scenes.about}) is not published: the same call is queued already, as task "
        f"{call.id} (key {scenes.key})."
    ][:lines]


def test_fan_out_tells_every_duplicate_in_one_line(apart, journal, caplog):
    """A signal for those of its own window, and those of a call that was queued before; one line for all."""
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
    assert [m for m in caplog.messages if f"calls of {MARKED}" in m] == [
        f"3 of 5 calls of {MARKED} are not published: the same calls are queued or running already."
    ]


ABOUT_ONE = re.compile(r"^(self|order|key|plain|before)$|\b(call|key|task_id)$")
EVENT = re.compile(r'\bfields\(\s*"(\w+)"')
WORK, MARKED, NEWEST = (f"tests.watchapp.{name}" for name in ("work", "marked", "newest"))
TASK_OF = {"lapse": MARKED, "supersede": NEWEST, "supersede_in_line": NEWEST}
"""The task of a scene, if it is not `work`."""
COMES_BACK = "INFO Task {celerys} retry: {key} is held by {holder}; tries again in {s} s (wait %s)"
SCENES = {
    "skip": "INFO Skipped {call}: {key} is held by {holder}.",
    "retry": f"{COMES_BACK % 1}\n{COMES_BACK % 2}",
    "wait": (
        "INFO {call} waits in line, at place 1: {key} is held by {holder}.\n"
        "INFO {call} has its lock {key} after waiting {s} s."
    ),
    "take_over": (
        "WARNING {call} took over {key} from tests.watchapp.work[dead] on gone@host (pid 7), running since "
        "{when}: its lease ended {s} s ago without a renewal or a release. The process died, hung, or could "
        "not reach Redis."
    ),
    "lose": (
        "WARNING {call} lost its lock {key}: its key has vanished from Redis (deleted, evicted, or the data "
        "was lost). The body runs on, and another call may run at the same time. To stop the body, call "
        "lock.ensure() in it."
    ),
    "lapse": (
        "WARNING {call} started after its mark was gone: a duplicate may be queued (key {key}). Each runs "
        "under its lock. If calls wait in the queue for longer than queue_lease, make that longer."
    ),
    "supersede": "INFO Skipped {call}: a newer call has replaced it, task {id} (key {key}).",
    "supersede_in_line": (
        "INFO {call} waits in line, at place 1: {key} is held by {holder}.\n"
        "INFO Skipped {call}: a newer call has replaced it, task {id} (key {key})."
    ),
    "fail": "INFO Task {celerys} raised expected: AlreadyRunning({any}{holder}{any}",
    "free": "WARNING {call} died with its process {pid}; its lock {key} is freed.",
}
PATTERNS = {
    "holder": (
        r"tests\.watchapp\.(?:work|newest)\(name='gated-\d+'\)\[[-0-9a-f]{36}\] on w\d+@test \(pid \d+\), "
        r"running since .{19} UTC"
    ),
    "when": r".{19} UTC",
    "s": r"\d+\.\d",
    "any": ".*",
    "id": "[-0-9a-f]{36}",
    "pid": r"\d+",
}


def pattern(text: str, **of_call: str) -> str:
    """What a line must look like, of which SCENES gives the words."""
    pieces = re.split(r"\{(\w+)\}", text)
    known = {**PATTERNS, **{name: re.escape(said) for name, said in of_call.items()}}
    return "".join(known[piece] if odd % 2 else re.escape(piece) for odd, piece in enumerate(pieces))


@pytest.mark.parametrize("scene", SCENES)
def test_each_event_is_one_line_with_task_id_key_and_holder(watched, scenes, scene):
    """INFO for what a policy does, WARNING for what nobody asked for; nothing twice, and no traceback."""
    call = getattr(scenes, scene)()
    name = TASK_OF.get(scene, WORK)
    expected = SCENES[scene].splitlines()

    def found() -> list[str]:
        lines = lines_about(watched, call.id, scenes.key)
        lines = lines[: len(expected)] if scene == "retry" else lines  # it may come back any number of times
        return lines if len(lines) >= len(expected) else []

    lines = wait_until(found, f"{len(expected)} lines of {scene} in {watched.log}")
    assert len(lines) == len(expected)
    named = {"call": f"{name}({scenes.about})[{call.id}]", "celerys": f"{name}[{call.id}]"}
    for line, words in zip(lines, expected):
        assert re.fullmatch(pattern(words, **named, key=scenes.key), line), line


def test_every_event_of_a_record_stands_in_the_table():
    """Those that the package names, and the one of all other lines."""
    rows = table((DOCS / "monitoring.md").read_text(), "`setnx_event`", "when")
    named = {name for path in PACKAGE.rglob("*.py") for name in EVENT.findall(path.read_text())}
    assert {event.strip("`") for event, *_rest in rows} == named | {"trouble"}


def test_every_line_about_a_call_or_a_key_has_its_fields():
    """Whatever a line says in words of a call, a task's id or a lock's key."""
    bare = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_line = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
            if is_line and "extra" not in [keyword.arg for keyword in node.keywords]:
                said = [ast.unparse(argument) for argument in node.args]
                bare += [f"{path.name}:{node.lineno}" for each in said if ABOUT_ONE.search(each)]
    assert bare == []


def test_all_modules_log_to_one_logger():
    """The logger `celery_setnx`, or one below it, by what raises nothing."""
    for path in PACKAGE.rglob("*.py"):
        names = set(re.findall(r"(?:getLogger|\bLog)\((.*?)\)", path.read_text()))
        assert path.name == "log.py" or all(name.startswith('"celery_setnx') for name in names), path.name
