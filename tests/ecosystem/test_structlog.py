"""django-structlog beside ours."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.ecosystem.play import QUEUE, Play
from tests.harness import Journal, Worker

APP = "tests.ecosystem.structlogapp"


@pytest.fixture
def visit(server) -> Iterator[Callable[[str, str], str]]:
    """Call it with a request's id and a path: what the site says. The site is a process of its own."""
    serve = [sys.executable, "-c", f"from {APP} import serve; serve()"]
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as site:

        def visit(request_id: str, path: str) -> str:
            print(request_id, path, file=site.stdin, flush=True)
            return site.stdout.readline().strip()

        yield visit
        site.kill()


def test_structlog_names_the_request_of_a_call_that_waited(
    visit: Callable[[str, str], str], start_worker: Callable[..., Worker], play: Play, journal: Journal
):
    """Every line of its runs has the id of the request that published it, and none has the holder's."""
    start_worker(APP, queues=QUEUE)
    held = visit("first", f"/{play.name}/{play.name}")
    journal.wait_for("start", task_id=held)
    waited = visit("second", f"/{play.name}/")
    play.leaves_its_slot(waited)
    play.let_go(held, waited)
    for task_id, request_id, starts in ((held, "first", 1), (waited, "second", 2)):
        journal.wait_for("log", event="task_succeeded", task_id=task_id)
        lines = journal.entries(what="log", task_id=task_id)
        assert {line["request_id"] for line in lines if line["event"] != "task_enqueued"} == {request_id}
        assert [line["event"] for line in lines].count("task_started") == starts
    sent = journal.wait_for("log", 2, event="task_enqueued", child_task_id=waited)
    assert {line["request_id"] for line in sent} == {"second", None}  # by the site, and out of the line
