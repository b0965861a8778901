"""The log: one line for each event, with task, id and key, and the holder where there is one."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import celery_setnx
from tests.harness import Worker, wait_until

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


def lines_about(worker: Worker, call: str, key: str) -> list[tuple[str, str]]:
    """Level and text of each line of ours that names a call and its key; of Celery's, those that say why."""
    found = [(m["level"], m["text"]) for m in LINE.finditer(worker.log_text())]
    ours = [(level, text) for level, text in found if key in text and f"[{call}]" in text]
    return [(level, text) for level, text in ours if not re.match(r"Task \S+ succeeded in", text)]


WORK, MARKED = "tests.watchapp.work", "tests.watchapp.marked"
COMES_BACK = "Task {call} retry: {key} is held by {holder}; comes back in {s} s (wait %s)"
SCENES = {
    "skip": [("INFO", "Skipped {call}: {key} is held by {holder}.")],
    "retry": [("INFO", COMES_BACK % 1), ("INFO", COMES_BACK % 2)],
    "wait": [
        ("INFO", "{call} waits in line, at place 1: {key} is held by {holder}."),
        ("INFO", "{call} has its turn: it waited {s} s for {key}."),
    ],
    "take_over": [
        (
            "WARNING",
            "{call} took over {key} from tests.watchapp.work[dead] on gone@host (pid 7), running since "
            "{when}: its lease ended {s} s ago and was not renewed. That process died, or stood still for "
            "longer than its lease.",
        )
    ],
    "lose": [
        (
            "WARNING",
            "{call} lost its lock {key}: its key has vanished from Redis (deleted, evicted, or the data was "
            "lost). Its body runs on, and another may run beside it; lock.ensure() tells the body.",
        )
    ],
    "lapse": [
        (
            "WARNING",
            "{call} was the only one queued when it was published, but its mark was gone when it started: "
            "another call of {key} may have been published meanwhile. It runs under its lock.",
        )
    ],
    "free": [("WARNING", "{call} died with its process {pid}; its lock {key} is freed.")],
}
PATTERNS = {
    "holder": rf"{re.escape(WORK)}\[[-0-9a-f]{{36}}\] on w\d+@test \(pid \d+\), running since .{{19}} UTC",
    "when": r".{19} UTC",
    "s": r"\d+\.\d",
    "pid": r"\d+",
}


def pattern(text: str, call: str, key: str) -> str:
    """What a line must look like, of which SCENES gives the words."""
    pieces = re.split(r"\{(\w+)\}", text)
    known = {**PATTERNS, "call": re.escape(call), "key": re.escape(key)}
    return "".join(known[piece] if odd % 2 else re.escape(piece) for odd, piece in enumerate(pieces))


@pytest.mark.parametrize("scene", SCENES)
def test_each_event_is_one_line_with_task_id_key_and_holder(watched, scenes, scene):
    """INFO for what a policy does, WARNING for what nobody asked for; nothing twice."""
    call = getattr(scenes, scene)()
    name = MARKED if scene == "lapse" else WORK
    expected = SCENES[scene]

    def found() -> list[tuple[str, str]]:
        lines = lines_about(watched, call.id, scenes.key)
        lines = lines[: len(expected)] if scene == "retry" else lines  # it may come back any number of times
        return lines if len(lines) >= len(expected) else []

    lines = wait_until(found, f"{len(expected)} lines of {scene} in {watched.log}")
    assert [level for level, _ in lines] == [level for level, _ in expected]
    for (_, text), (_, words) in zip(lines, expected):
        assert re.fullmatch(pattern(words, f"{name}[{call.id}]", scenes.key), text), text


def test_call_that_fails_is_told_by_celery_alone(watched, scenes):
    """Its error names task, key and holder, and is expected: INFO, no traceback."""
    call = scenes.fail()
    ((level, text),) = wait_until(lambda: lines_about(watched, call.id, scenes.key), "the error")
    assert level == "INFO"
    assert text.startswith(f"Task {WORK}[{call.id}] raised expected: AlreadyRunning(")
    assert re.search(PATTERNS["holder"], text)


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_duplicate_is_one_line_of_its_publisher(apart, caplog, level, lines):
    """Naming the task that is queued already; the level of the logger `celery_setnx` rules all lines."""
    caplog.set_level(level, logger="celery_setnx")
    scenes = apart("celery")
    call = scenes.duplicate()
    assert [record.message for record in caplog.records if record.name.startswith("celery_setnx")] == [
        f"A call of {MARKED} is not published: the same call is queued already, as task {call.id} "
        f"(key {scenes.key})."
    ][:lines]


def test_fan_out_is_one_line_for_all_its_duplicates(apart, caplog):
    """A million duplicates are no million lines."""
    from tests import watchapp

    watchapp.marked.fan_out([(str(n % 2),) for n in range(10)], queue="nowhere")
    assert [m for m in caplog.messages if MARKED in m] == [
        f"8 of 10 calls of {MARKED} are not published: the same calls are queued or running already."
    ]


def test_all_modules_log_to_one_logger():
    """The logger `celery_setnx`, or one below it."""
    package = Path(celery_setnx.__file__).parent
    for path in package.rglob("*.py"):
        names = set(re.findall(r"getLogger\((.*?)\)", path.read_text()))
        assert all(name.startswith('"celery_setnx') for name in names), path.name
