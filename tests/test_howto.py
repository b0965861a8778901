"""The recipes for fan-outs, pending calls and web requests: what they claim of real workers."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import pytest
import redis
from celery.result import AsyncResult

from celery_setnx import DuplicateTask, FanOutFailed, LockUnavailable
from tests.harness import DEADLINE_S, settle_marks, wait_until
from tests.versions.conditions import LOSES_RESULTS

NOWHERE = "redis://127.0.0.1:1/0"
GIVES_UP = {"max_retries": 1, "interval_start": 0}
NO_BROKER = {
    "broker_url": NOWHERE,
    "broker_transport_options": {"socket_connect_timeout": 1},
    "task_publish_retry_policy": GIVES_UP,
}


@pytest.fixture
def pages(server, locks, journal) -> ModuleType:
    """The pages' tasks. Nothing is queued, and no table has a row."""
    from tests import howtoapp

    with redis.Redis.from_url(server.url(howtoapp.BROKER_DB)) as broker:
        broker.delete("howto", "bulk", "parked")
    howtoapp.control.delete("howto:accounts", "howto:search")
    return howtoapp


@pytest.fixture(scope="module")
def started(module_worker) -> None:
    """The worker of the pages' tasks, once a test has asked for it."""
    module_worker("tests.howtoapp", concurrency=3, queues="howto")


@pytest.fixture
def working(pages, started) -> ModuleType:
    """The pages' tasks, and a worker that runs them."""
    return pages


def test_every_block_is_run(pages):
    """Blocks that define nothing are run by a test of their recipe; there is none for other recipes."""
    assert [recipe for recipe in pages.RECIPES if pages.rest(recipe)] == ["fan-out", "one-pending"]


def test_fan_out_says_what_the_page_shows(pages, capsys):
    """The counts, as printed; no worker has run anything yet."""
    names = pages.defined("fan-out", pages.make_app())
    said = []
    for block in pages.rest("fan-out"):
        pages.execute("fan-out", block, names)
        said.append(capsys.readouterr().out)
    shown = [block.text for block in pages.blocks_of("fan-out") if block.language == "text"]
    assert [text for text in said if text] == shown


def test_fan_out_on_a_dead_broker_says_how_far_it_came(pages, capsys):
    """`FanOutFailed`, with the counts that the page prints; afterwards the same calls are sent."""
    names = pages.defined("fan-out", pages.make_app(**NO_BROKER))
    with pytest.raises(FanOutFailed) as failed:
        names["refresh_all"]()
    assert capsys.readouterr().out.startswith("0 sent, ")
    assert failed.value.uncertain + failed.value.not_sent == len(pages.TOUCHED)
    names = pages.defined("fan-out", pages.make_app())
    assert names["refresh_all"]() == len(set(pages.TOUCHED))


def test_collected_changes_are_one_call(pages, locks):
    """With a countdown the call is queued for so much longer, and further changes are duplicates."""
    names = pages.defined("one-pending", pages.make_app())
    for block in pages.rest("one-pending"):
        locks.flushdb()  # each block begins anew
        pages.execute("one-pending", block, names)
    settle_marks(names["reindex"].app)
    assert locks.pttl(f"{names['reindex'].lock_key(7)}:queued") > 3_600_000
    assert names["save"](7, "somewhere else").deduplicated


def test_fan_out_from_a_task_runs_each_account_once(working, journal):
    """What `refresh_all` returns is how many calls it has queued; each runs once."""
    assert working.NAMES["fan-out"]["refresh_all"].delay().get(timeout=DEADLINE_S) == 3
    runs = journal.wait_for("run", 3, task="fan_out.refresh")
    assert sorted(run["args"] for run in runs) == [[n, "nightly"] for n in sorted(set(working.TOUCHED))]


def test_change_during_a_run_is_seen_by_one_more_run(working, journal, gates):
    """Fifty changes after the run has read: one call is pending, and it reads the last of them."""
    save, account = working.NAMES["one-pending"]["save"], "gated"
    first = save(account, 0)
    journal.wait_for("read", row=account, value=0)
    later = [save(account, change) for change in range(1, 51)]
    assert [call.deduplicated for call in later] == [False] + [True] * 49
    assert {call.id for call in later} == {later[0].id} != {first.id}
    for _run in range(2):
        gates(account)
    later[0].get(timeout=DEADLINE_S)
    assert working.Table("search").all() == {account: 50}
    assert [entry["value"] for entry in journal.entries(what="read", row=account)] == [0, 50]


def test_changes_by_many_at_once_are_all_seen(working, journal):
    """Whatever meets whatever, in the end the index is what the accounts are."""
    save = working.NAMES["one-pending"]["save"]

    def change(writer: int) -> None:
        for number in range(40):
            save(f"account {writer % 2}", f"{writer}.{number}")

    with ThreadPoolExecutor(4) as writers:
        list(writers.map(change, range(4)))
    accounts, search = working.Table("accounts"), working.Table("search")
    wait_until(lambda: search.all() == accounts.all(), "an index that is up to date")
    assert len(accounts.all()) == 2
    assert len(journal.entries(what="run", task="one_pending.reindex")) <= 160


def test_flask_answers_with_the_task_that_is_under_way(working, journal, gates):
    """Queued or running, a second request gets the first one's id; afterwards there is a new one."""
    names = working.NAMES["web"]
    client, report = names["web"].test_client(), names["report"]
    assert report.locked("gated-1") is None
    first = client.post("/reports/gated-1")
    assert (first.status_code, first.json["duplicate"]) == (202, False)
    task = first.json["task"]
    journal.wait_for("run", task_id=task)
    assert client.post("/reports/gated-1").json == {"task": task, "duplicate": True}
    with pytest.raises(DuplicateTask) as refused:
        report.apply_async(["gated-1"], singleton={"on_duplicate": "raise"})
    assert (refused.value.task_id, refused.value.state) == (task, "running")
    holder = report.locked("gated-1")
    assert (holder.task_id, holder.state) == (task, "running")
    assert abs(holder.since - time.time()) < 60
    gates("gated-1")
    assert AsyncResult(task, app=working.app).get(timeout=DEADLINE_S) == "the report of gated-1"
    wait_until(lambda: report.locked("gated-1") is None, "the release")
    again = client.post("/reports/gated-1")
    assert (again.status_code, again.json["task"] != task) == (202, True)
    gates("gated-1")
    AsyncResult(again.json["task"], app=working.app).get(timeout=DEADLINE_S)


def test_flask_says_try_again_later_without_a_server(pages):
    """Neither broker nor lock server answers: 503, and nothing hangs."""
    names = pages.defined("web", pages.make_app(**NO_BROKER, setnx_url=NOWHERE))
    assert names["web"].test_client().post("/reports/1").status_code == 503
    with pytest.raises(LockUnavailable):
        names["report"].locked("1")


def test_result_backend_that_is_down_is_met_when_publishing(pages):
    """Celery's own error, unless the result is ignored; the mark of a call that failed is free again."""
    no_retries = {"retry_policy": GIVES_UP}
    app = pages.make_app(result_backend=NOWHERE, result_backend_transport_options=no_retries)
    names = pages.defined("web", app)
    if not LOSES_RESULTS:  # Celery 5.7 or later
        assert names["web"].test_client().post("/reports/1").status_code == 500
    result = names["report"].apply_async(["1"], ignore_result=True)
    assert not result.deduplicated


async def posted(api: Any, path: str) -> tuple[int, Any]:
    """What an ASGI application answers to a POST: status and JSON."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://web") as client:
        answer = await client.post(path)
    return answer.status_code, answer.json()


def test_fastapi_answers_with_the_task_that_is_queued(working, journal, gates):
    """An async endpoint publishes from a thread; two users share a report."""
    api = working.NAMES["web"]["api"]
    status, first = asyncio.run(posted(api, "/users/bob/reports/gated-2"))
    assert (status, first["duplicate"]) == (202, False)
    status, other = asyncio.run(posted(api, "/users/ada/reports/gated-2"))
    assert (status, other) == (202, {"task": first["task"], "duplicate": True})
    gates("gated-2")
    AsyncResult(first["task"], app=working.app).get(timeout=DEADLINE_S)
    assert len(journal.entries(what="run", task="web.report")) == 1


def test_requests_that_come_together_share_one_run(working, journal, gates):
    """Single flight: five requests, one run, five answers; a later request makes a new run."""
    web, totals = working.NAMES["web"]["web"], working.NAMES["web"]["totals"]

    def ask(_request: int = 0) -> tuple[int, Any]:
        answer = web.test_client().get("/totals/gated-3")
        return answer.status_code, answer.json

    with ThreadPoolExecutor(5) as requests:
        first = requests.submit(ask)
        journal.wait_for("run", task="web.totals")
        others = requests.map(ask, range(4))
        wait_until(lambda: (holder := totals.locked("gated-3")) and holder.waiting == 4, "four who wait")
        gates("gated-3")
        answers = [first.result(), *others]
    assert answers == [(200, {"month": "gated-3", "total": 42})] * 5
    assert len(journal.entries(what="run", task="web.totals")) == 1
    gates("gated-3")
    assert ask()[0] == 200
    assert len(journal.entries(what="run", task="web.totals")) == 2
