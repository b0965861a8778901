"""django-structlog beside ours."""

import subprocess
import sys
from collections.abc import Callable

from tests.ecosystem.play import QUEUE, Play
from tests.harness import Journal, Worker

APP = "tests.ecosystem.structlogapp"


def visited(request_id: str, url: str) -> str:
    """What the site says to a request with this id, in a process of its own."""
    visit = f"import sys; from {APP} import visit; visit(*sys.argv[1:])"
    command = [sys.executable, "-c", visit, request_id, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_structlog_names_the_request_of_a_call_that_waited(
    start_worker: Callable[..., Worker], play: Play, journal: Journal
):
    """Every line of its runs has the id of the request that published it, and none has the holder's."""
    start_worker(APP, queues=QUEUE)
    held = visited("first", f"/{play.name}/{play.name}")
    journal.wait_for("start", task_id=held)
    waited = visited("second", f"/{play.name}/")
    play.leaves_its_slot(waited)
    play.let_go(held, waited)
    for task_id, request_id, starts in ((held, "first", 1), (waited, "second", 2)):
        journal.wait_for("log", event="task_succeeded", task_id=task_id)
        lines = journal.entries(what="log", task_id=task_id)
        assert {line["request_id"] for line in lines if line["event"] != "task_enqueued"} == {request_id}
        assert [line["event"] for line in lines].count("task_started") == starts
    sent = journal.wait_for("log", 2, event="task_enqueued", child_task_id=waited)
    assert {line["request_id"] for line in sent} == {"second", None}  # by the site, and out of the line
