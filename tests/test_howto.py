"""The tutorial and the how-to pages: every command as it is printed, and what they claim of real workers."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from celery.result import AsyncResult

from celery_setnx import FanOutFailed
from examples.embedded import EmbeddedServer
from tests.docs.pages import DOCS, Block, blocks
from tests.harness import DEADLINE_S, Worker, wait_until
from tests.versions.conditions import LOSES_RESULTS

PAGE_DB = 14
NOWHERE = "redis://127.0.0.1:1/0"
# With a wheel the tutorial's virtual environment is made as printed; else the suite's own plays its part.
WHEEL = os.environ.get("TUTORIAL_WHEEL")
INSTALLS = ("python3 -m venv", ". .venv/bin/activate", "pip install")
# What differs from run to run, the longest first: a list's columns are as wide as what is in them.
VARIES = (
    (r"\[\d{4}-\d\d-\d\d [\d:,]+: (\w+)/[\w-]+\]", r"[\1]"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( UTC)?", "TIME"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"value '?\d{10}'?", "value UNIX"),
    (r"celery@[\w.-]+", "WORKER"),
    (r"by \S+ on [\w.-]+?\.? (?=It was)", "by USER. "),
    (r"pid \d+", "pid PID"),
    (r"redis://\S+", "URL"),
    (r"(Redis|Valkey) \d[\d.]*", "SERVER"),
    (r"\d[\d.]* (ms|s|min|h)\b( \d+ (s|min)\b)?", "SPAN"),
    (r"succeeded in [\d.e-]+s", "succeeded in SPAN"),
    (r"ahead of", "behind"),
    (r"\(integer\) ", ""),
    (r"[ \t]+", " "),
)


def alike(text: str) -> list[str]:
    """Lines without what differs from run to run."""
    for pattern, word in VARIES:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().splitlines()]


class Reader:
    """Who follows a page: writes its files, runs its commands, and compares what they say."""

    def __init__(self, directory: Path, server: EmbeddedServer) -> None:
        self.directory = directory
        self.log = directory / "worker.log"
        self.worker: subprocess.Popen[bytes] | None = None
        self.said = ""
        self.ran: list[str] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SETNX_TEST")},
            "REDIS_URL": server.url(PAGE_DB),
            "PATH": f"{_tools(directory / 'tools')}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        if WHEEL:
            self.environment["PIP_FIND_LINKS"] = str(Path(WHEEL).resolve().parent)

    def read(self, page: str) -> None:
        """Do what the page says, from top to bottom."""
        for block in blocks((DOCS / f"{page}.md").read_text()):
            where = f"{page}.md, line {block.line}"
            if block.language == "python":
                self._write(block, where)
            elif block.language == "sh":
                self.said = ""
                for command in block.text.splitlines():
                    self.run(command, where)
            elif block.language == "text" and "worker's log" in block.before:
                self._compare_log(block, where)
            elif block.language == "text":
                self._compare(block, where)

    def stop(self) -> None:
        """End what still runs."""
        if self.worker is not None and self.worker.poll() is None:
            os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()

    def log_text(self) -> str:
        """All that the worker has logged since it was started last."""
        return self.log.read_text(errors="replace")

    def _write(self, block: Block, where: str) -> None:
        name = re.fullmatch(r"(Add to )?`(\w+\.py)`:", block.before)
        assert name is not None, f"{where}: a file without a name; the line before is {block.before!r}"
        path = self.directory / name[2]
        before = path.read_text() + "\n\n" if name[1] else ""
        path.write_text(before + block.text)

    def run(self, command: str, where: str = "beside the page") -> None:
        """Run one command line; a worker is left running."""
        self.ran.append(command)
        if command.startswith(INSTALLS) and not WHEEL:
            return
        if " worker " in command:
            self._start(command)
            return
        if command.startswith(". "):
            self.environment["PATH"] = f"{self.directory}/.venv/bin:{self.environment['PATH']}"
        said, code = self._ask(command)
        self.said += said
        assert code == 0, f"{where}: {command} ended with {code}:\n{said}"
        if command.startswith("kill ") and self.worker is not None:
            self.worker.wait(60)

    def _ask(self, command: str) -> tuple[str, int]:
        """What a command says, and its exit code."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        return done.stdout, done.returncode

    def _start(self, command: str) -> None:
        """A worker, in a terminal of its own."""
        assert self.worker is None or self.worker.poll() is not None, "one worker at a time"
        with self.log.open("wb") as log:
            self.worker = worker = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def is_ready() -> bool:
            assert worker.poll() is None, f"the worker ended with {worker.returncode}:\n{self.log_text()}"
            return " ready." in self.log_text()

        wait_until(is_ready, f"worker ready: {self.log}", 60)

    def _compare(self, block: Block, where: str) -> None:
        """What the block before has said. A command that only looks is asked again until it sees it."""
        wanted, command = alike(block.text), self.ran[-1]
        if " setnx list" not in command:
            assert alike(self.said) == wanted, f"{where}: {command} said:\n{self.said}"
            return
        wait_until(lambda: alike(self.said) == wanted or self._look(command), f"{where}: {command}: {wanted}")

    def _look(self, command: str) -> None:
        self.said, _code = self._ask(command)

    def _compare_log(self, block: Block, where: str) -> None:
        """The worker has logged these lines, in any order, between others."""
        wanted = set(alike(block.text))

        def missing() -> set[str]:
            return wanted - set(alike(self.log_text()))

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not missing(), f"{where}: the worker's log")
        assert not missing(), f"{where}: the log has no such lines:\n{self.log_text()}"


def _tools(directory: Path) -> Path:
    """A redis-cli for machines that have none: it sends its words to the server, and prints the reply."""
    directory.mkdir()
    if shutil.which("redis-cli") is None:
        tool = directory / "redis-cli"
        tool.write_text(
            f"#!{sys.executable}\n"
            "import sys, redis\n"
            "flag, url, *words = sys.argv[1:]\n"
            "assert flag == '-u'\n"
            "client = redis.Redis.from_url(url, decode_responses=True)\n"
            "client.response_callbacks.clear()\n"
            "reply = client.execute_command(*words)\n"
            "print(*reply if isinstance(reply, list) else [reply], sep='\\n')\n"
        )
        tool.chmod(0o755)
    return directory


@pytest.fixture
def reader(server, tmp_path) -> Iterator[Reader]:
    """Who follows a page, on an empty server, from an empty directory."""
    yield from reading(server, tmp_path)


@pytest.fixture(scope="module")
def shop(server, tmp_path_factory) -> Iterator[Reader]:
    """Who has followed the page of the operator's lock; its worker still runs."""
    for reader in reading(server, tmp_path_factory.mktemp("shop")):
        reader.read("operators-lock")
        yield reader


def reading(server: EmbeddedServer, directory: Path) -> Iterator[Reader]:
    """A reader, until the test has ended."""
    with redis.Redis.from_url(server.url(PAGE_DB)) as client:
        client.flushdb()
        reader = Reader(directory, server)
        yield reader
        reader.stop()
        client.flushdb()


@pytest.fixture
def asked(server) -> Iterator[redis.Redis]:
    """A client of the page's server."""
    with redis.Redis.from_url(server.url(PAGE_DB), decode_responses=True) as client:
        yield client


def commands_of(page: str) -> list[str]:
    """All command lines of a page."""
    text = (DOCS / f"{page}.md").read_text()
    return [line for block in blocks(text) if block.language == "sh" for line in block.text.splitlines()]


# The pages with files and commands


@pytest.mark.timeout(400)  # with the wheel it makes an environment of its own
def test_tutorial_goes_as_printed(reader):
    """From an empty directory to a deduplicated fan-out: every file, every command, every answer."""
    reader.read("tutorial")
    assert reader.ran == commands_of("tutorial")


def test_operators_lock_goes_as_printed(shop):
    """Every command, every answer."""
    assert shop.ran[: len(commands_of("operators-lock"))] == commands_of("operators-lock")


def test_operators_lock_that_is_forgotten_is_taken_over(shop, asked):
    """By a call that waits for it, and the log says so."""
    assert asked.set("setnx:{ledger}", int(asked.time()[0]) + 1, nx=True)
    shop.run("celery -A shop call shop.bill --args '[\"2026-11-23\"]'")
    wait_until(lambda: "billed 2026-11-23" in shop.log_text(), f"the bill in {shop.log}")
    took_over = r"WARNING.* shop\.bill\[.*\] took over setnx:\{ledger\} from a foreign client .*: it ended \d"
    wait_until(lambda: re.search(took_over, shop.log_text()), f"{took_over} in {shop.log}")


def test_operators_lock_of_a_keyed_task_is_for_one_key(shop, asked):
    """`setnx:{shop.sync}` locks nothing; the name that `show` says locks one customer."""
    shop.run("celery -A shop setnx show shop.sync 42")
    shown = re.search(r"^key +(\S+)$", shop.said, re.MULTILINE)
    assert shown is not None
    until = int(asked.time()[0]) + 600
    assert asked.set("setnx:{shop.sync}", until, nx=True)
    assert asked.set(shown[1], until, nx=True)
    for customer in (42, 43):
        shop.run(f"celery -A shop call shop.sync --args '[{customer}]'")
    wait_until(lambda: "'synced 43'" in shop.log_text(), f"customer 43 in {shop.log}")
    wait_until(lambda: f"{shown[1]} is held by a foreign client" in shop.log_text(), "customer 42's skip")
    assert "'synced 42'" not in shop.log_text()


# The pages whose tasks run in `tests.howtoapp`


@pytest.fixture
def pages(server, locks, journal) -> Iterator[ModuleType]:
    """The pages' tasks. Nothing is queued, and no table has a row."""
    from tests import howtoapp

    with redis.Redis.from_url(server.url(howtoapp.BROKER_DB)) as broker:
        broker.delete("howto", "bulk", "parked")
        howtoapp.control.delete("howto:accounts", "howto:search")
        yield howtoapp


@pytest.fixture(scope="module")
def started(server, logs) -> Iterator[list[Worker]]:
    """The worker of the pages' tasks, once a test has asked for it."""
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture
def working(pages, started, logs) -> ModuleType:
    """The pages' tasks, and a worker that runs them."""
    if not started:
        started.append(Worker(logs, "tests.howtoapp", concurrency=3, queues="howto"))
    return pages


def said_by(page: str, block: Block, names: dict[str, Any]) -> str:
    """What a block prints."""
    from tests.howtoapp import execute

    with contextlib.redirect_stdout(io.StringIO()) as out:
        execute(page, block, names)
    return out.getvalue()


def shown_by(page: str) -> list[str]:
    """The blocks of output of a page."""
    return [block.text for block in blocks((DOCS / f"{page}.md").read_text()) if block.language == "text"]


def test_every_block_is_run(pages):
    """Blocks that define nothing are run by a test of their page; there is none for other pages."""
    assert [page for page in pages.PAGES if pages.rest(page)] == ["fan-out", "one-pending"]


def test_fan_out_says_what_the_page_shows(pages):
    """The counts, and what became of each call, as printed; no worker has run anything yet."""
    names = pages.defined("fan-out", pages.make_app(task_default_queue="parked"))
    said = [text for block in pages.rest("fan-out") if (text := said_by("fan-out", block, names))]
    assert said == shown_by("fan-out")


def test_fan_out_on_a_dead_broker_says_how_far_it_came(pages):
    """`FanOutFailed`, with the counts that the page prints; afterwards the same calls are sent."""
    nowhere = pages.make_app(
        NOWHERE,
        broker_transport_options={"socket_connect_timeout": 1},
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0},
    )
    names = pages.defined("fan-out", nowhere)
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(FanOutFailed) as failed:
        names["refresh_touched"]()
    assert out.getvalue().startswith("0 sent, ")
    assert failed.value.uncertain + failed.value.not_sent == len(pages.TOUCHED)
    names = pages.defined("fan-out", pages.make_app(task_default_queue="parked"))
    assert names["refresh_touched"]().accepted == len(set(pages.TOUCHED))


def test_collected_changes_are_one_call(pages, locks):
    """With a countdown the call is queued for so much longer, and further changes are duplicates."""
    names = pages.defined("one-pending", pages.make_app(task_default_queue="parked"))
    reindex = names["reindex"]
    for block in pages.rest("one-pending"):
        locks.flushdb()  # each block begins anew
        pages.execute("one-pending", block, names)
    assert locks.pttl(f"{reindex.lock_key(7)}:queued") > 3_600_000
    assert names["save"](7, "somewhere else").deduplicated


def test_fan_out_from_a_task_runs_each_account_once(working, journal):
    """What `refresh_all` returns is how many calls it has queued; each runs once."""
    assert working.NAMES["fan-out"]["refresh_all"].delay().get(timeout=DEADLINE_S) == 3
    journal.wait_for("run", 3, task="fan_out.refresh")
    runs = journal.entries(what="run", task="fan_out.refresh")
    assert sorted(run["args"] for run in runs) == [[n, "nightly"] for n in sorted(set(working.TOUCHED))]


def test_change_during_a_run_is_seen_by_one_more_run(working, journal, gates):
    """Fifty changes after the run has read: one call is pending, and it reads the last of them."""
    save, account = working.NAMES["one-pending"]["save"], "gated"
    first = save(account, 0)
    journal.wait_for("read", row=account, value="0")
    later = [save(account, change) for change in range(1, 51)]
    assert [call.deduplicated for call in later] == [False] + [True] * 49
    assert {call.id for call in later} == {later[0].id} != {first.id}
    for _run in range(2):
        gates(account)
    later[0].get(timeout=DEADLINE_S)
    assert working.Table("search").all() == {account: 50}
    assert [entry["value"] for entry in journal.entries(what="read", row=account)] == ["0", "50"]


def test_changes_by_many_at_once_are_all_seen(working, journal):
    """Whatever meets whatever, in the end the index is what the accounts are."""
    save = working.NAMES["one-pending"]["save"]

    def change(writer: int) -> None:
        for number in range(40):
            save(f"account {writer % 2}", f"{writer}.{number}")

    writers = [threading.Thread(target=change, args=[writer]) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    accounts, search = working.Table("accounts"), working.Table("search")
    wait_until(lambda: search.all() == accounts.all(), "an index that is up to date")
    assert len(accounts.all()) == 2
    assert len(journal.entries(what="run", task="one_pending.reindex")) <= 160


def test_flask_answers_with_the_task_that_is_under_way(working, journal, gates):
    """Queued or running, a second request gets the first one's id; afterwards there is a new one."""
    client = working.NAMES["web"]["web"].test_client()
    assert client.get("/reports/gated-1").json == {"running": False}
    first = client.post("/reports/gated-1")
    assert (first.status_code, first.json["duplicate"]) == (202, False)
    task = first.json["task"]
    journal.wait_for("run", task_id=task)
    assert client.post("/reports/gated-1").json == {"task": task, "duplicate": True}
    refused = client.post("/reports/gated-1/strictly")
    assert (refused.status_code, refused.json["task"]) == (409, task)
    status = client.get("/reports/gated-1").json
    assert (status["running"], status["task"]) == (True, task)
    assert abs(status["since"] - time.time()) < 60
    gates("gated-1")
    wait_until(lambda: client.get(f"/tasks/{task}").json["state"] == "SUCCESS", "the report")
    assert client.get(f"/tasks/{task}").json["result"] == "the report of gated-1"
    wait_until(lambda: client.get("/reports/gated-1").json == {"running": False}, "the release")
    again = client.post("/reports/gated-1/strictly")
    assert (again.status_code, again.json["task"] != task) == (202, True)
    gates("gated-1")
    AsyncResult(again.json["task"], app=working.app).get(timeout=DEADLINE_S)


def test_flask_says_try_again_later_without_a_server(pages):
    """Neither broker nor lock server answers: 503, and nothing hangs."""
    app = pages.make_app(
        NOWHERE,
        setnx_url=NOWHERE,
        broker_transport_options={"socket_connect_timeout": 1},
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0},
    )
    client = pages.defined("web", app)["web"].test_client()
    assert client.post("/reports/1").status_code == 503
    assert client.get("/reports/1").status_code == 503


def test_result_backend_that_is_down_is_met_when_publishing(pages):
    """Celery's own error, unless the result is ignored; the mark of a call that failed is free again."""
    app = pages.make_app(
        locks=NOWHERE,
        setnx_url=f"{pages.URL}/{pages.LOCK_DB}",
        task_default_queue="parked",
        result_backend_transport_options={"retry_policy": {"max_retries": 1, "interval_start": 0}},
    )
    names = pages.defined("web", app)
    if not LOSES_RESULTS:  # Celery 5.7 or later
        assert names["web"].test_client().post("/reports/1").status_code == 500
    result = names["report"].apply_async(["1"], ignore_result=True)
    assert not result.deduplicated


async def posted(api: Any, path: str) -> tuple[int, Any]:
    """What an ASGI application answers to a POST: status and JSON."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""}
    await api({**scope, "headers": [], "client": None, "server": None}, receive, send)
    return sent[0]["status"], json.loads(b"".join(message["body"] for message in sent[1:]))


def test_fastapi_answers_with_the_task_that_is_queued(working, journal, gates):
    """From the thread pool and from an async endpoint alike."""
    api = working.NAMES["web"]["api"]
    status, first = asyncio.run(posted(api, "/reports/gated-2"))
    assert (status, first["duplicate"]) == (202, False)
    status, other = asyncio.run(posted(api, "/users/ada/reports/gated-2"))
    assert (status, other) == (202, {"task": first["task"], "duplicate": True})
    gates("gated-2")
    AsyncResult(first["task"], app=working.app).get(timeout=DEADLINE_S)
    assert len(journal.entries(what="run", task="web.report")) == 1


def test_requests_that_come_together_share_one_run(working, journal, gates):
    """Single flight: five requests, one run, five answers; a later request makes a new run."""
    web, answers = working.NAMES["web"]["web"], []

    def ask() -> None:
        answers.append(web.test_client().get("/totals/gated-3"))

    requests = [threading.Thread(target=ask) for _request in range(5)]
    requests[0].start()
    journal.wait_for("run", task="web.totals")
    for request in requests[1:]:
        request.start()
    totals = working.NAMES["web"]["totals"]
    wait_until(lambda: (holder := totals.locked("gated-3")) and holder.waiting == 4, "four who wait")
    gates("gated-3")
    for request in requests:
        request.join(DEADLINE_S)
    assert [(answer.status_code, answer.json) for answer in answers] == [
        (200, {"month": "gated-3", "total": 42})
    ] * 5
    assert len(journal.entries(what="run", task="web.totals")) == 1
    gates("gated-3")
    assert web.test_client().get("/totals/gated-3").status_code == 200
    assert len(journal.entries(what="run", task="web.totals")) == 2
