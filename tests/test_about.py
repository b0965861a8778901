"""A person can read a key: what it was made of stands beside it, wherever a call or a holder is named."""

import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
import redis
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from pydantic import BaseModel

from celery_setnx import AlreadyRunning, DuplicateTask, SingletonTask
from celery_setnx.call.message import HEADER
from celery_setnx.keys import KeyFunction
from celery_setnx.lock.record import Holder
from tests.conftest import LOCK_DB

BROKER_DB = 5


class Colour(Enum):
    RED = "red"


def of_all(account: Any, at: Any = None, *rest: Any, more: Any = 1, **others: Any) -> None: ...


def described(key: Any, *args: Any, **kwargs: Any) -> str:
    return KeyFunction(key, inspect.signature(of_all), "t").digest_and_about(args, kwargs)[1]


@pytest.mark.parametrize(
    ("key", "given", "about"),
    [
        ("account", (7,), "account=7"),
        ("account", ("7",), "account='7'"),
        (["account", "more"], (7,), "account=7, more=1"),
        (("account",), (UUID(int=7),), "account=00000000-0000-0000-0000-000000000007"),
        (None, (Colour.RED, date(2026, 1, 2)), "account='red', at=2026-01-02, rest=(), more=1, others={}"),
        ("user:{account.id}", ({"id": 7},), "user:7"),
        ("{account}-{more}", ("a",), "a-1"),
        ("{account}/{at}.", (Decimal("1.10"), Colour.RED), "1.10/red."),
        ("account", ("a\n\x1b[31mb",), r"account='a\n\x1b[31mb'"),
        ("{account}", ("a\n\x1b[31mb",), r"a\n\x1b[31mb"),
        ((), (7,), ""),
        ([], (7,), ""),
        (lambda account, *_rest, **_named: account, (7,), ""),
        ("{{x}}{account}-{{y}}", (7,), "{x}7-{y}"),
    ],
)
def test_description_is_what_the_key_names_and_what_the_call_gives(key, given, about):
    """Names and values; of a template the text. Nothing for a callable, or the whole task."""
    assert described(key, *given) == about


@pytest.mark.parametrize(
    "value", ["x" * 1000, ["x" * 50] * 1000, {"x" * 200: 1}, 10**200, list(range(10**5))]
)
@pytest.mark.parametrize("key", ["account", None, "{account}"])
def test_description_has_80_characters_at_most(key, value):
    """However much a call gives."""
    about = described(key, value)
    assert len(about) <= 80
    assert about.startswith("account=" if key != "{account}" else ("x", "[", "{", "1"))


def test_description_of_a_call_that_does_not_fit_is_empty():
    """Which is published where the task does not check its arguments."""
    made = KeyFunction("account", inspect.signature(of_all), "t", typing=False)
    assert made.digest_and_about((), {"at": 1})[1] == ""


class Wordless(date):
    """Has a canonical form, and no words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Set(BaseModel):
    """Before CPython 3.12 `reprlib` goes by the bare name of a class."""


Set.__name__ = "set"


class Failing(BaseModel):
    """Whose words raise what they are told."""

    error: Any = None

    def model_dump(self, **_options: Any) -> Any:
        return {}

    def __repr__(self) -> str:
        raise self.error


@pytest.mark.parametrize("value", [Wordless(2026, 1, 1), Failing(error=RuntimeError("no words"))])
@pytest.mark.parametrize("key", ["account", "{account}", None])
def test_description_of_what_has_no_words_is_empty(key, value):
    """It is for people; no call fails for it."""
    assert described(key, value) == ""


def test_description_of_a_class_with_a_builtins_name_is_no_error():
    """Whatever it says."""
    assert len(described("account", Set())) <= 80


def test_time_limit_that_strikes_in_a_description_is_not_swallowed():
    """A body that publishes ends, as it should."""
    with pytest.raises(SoftTimeLimitExceeded):
        described("account", Failing(error=SoftTimeLimitExceeded()))


class Counting:
    """Counts how often its id is asked for, which may be a query."""

    asked = 0

    @property
    def id(self) -> int:
        self.asked += 1
        return 7


def test_what_a_key_is_made_of_is_asked_for_once():
    """The digest and the description are of the same answer."""
    account = Counting()
    assert described("{account.id}", account) == "7"
    assert account.asked == 1


@pytest.fixture
def shop(server, locks) -> Callable[..., Any]:
    """Makes a task that is published to a broker which nobody consumes; told what is the app's."""

    def make(key: Any = "account_id", **conf: Any) -> Any:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            broker_url=server.url(BROKER_DB), setnx_url=server.url(LOCK_DB), setnx_prefix="t", **conf
        )
        options: Any = {"key": key, "dedupe": "until_started", "on_duplicate": "raise"}

        @app.task(base=SingletonTask, name="shop.settle", shared=False, singleton=options)
        def settle(account_id: int, reason: str = "") -> None: ...

        return settle

    return make


@pytest.fixture
def published(server) -> Iterator[Callable[[], dict[str, Any]]]:
    """What the header of the newest message says of its call."""
    with redis.Redis.from_url(server.url(BROKER_DB), decode_responses=True) as broker:
        broker.flushdb()
        yield lambda: json.loads(broker.lindex("celery", 0))["headers"][HEADER]


def test_call_travels_with_what_its_key_was_made_of(shop, published):
    """Also with a key of its own, and by a fan-out."""
    settle = shop()
    settle.delay(7, "x")
    assert published()["about"] == "account_id=7"
    settle.apply_async([7, "x"], singleton={"key": ["account_id", "reason"]})
    assert published()["about"] == "account_id=7, reason='x'"
    settle.fan_out([(8, "x")])
    assert published()["about"] == "account_id=8"


@pytest.mark.parametrize("hides", [{"argsrepr": "(...)"}, {"kwargsrepr": "{...}"}])
def test_call_that_hides_its_arguments_hides_them_here(shop, published, hides):
    """Celery's own way to keep them out of logs, of one call and of a fan-out; its retries keep it."""
    settle = shop()
    first = settle.apply_async([7], **hides)
    headers = {HEADER: published()}
    assert "about" not in headers[HEADER]
    settle.apply_async([9], task_id=first.id, retries=1, headers=headers)
    assert (published()["attempt"], published().get("about")) == (1, None)
    settle.fan_out([(8,)], **hides)
    assert "about" not in published()


def test_retry_that_hides_its_arguments_hides_them_here(shop, published):
    """Though the attempt before has shown its own."""
    settle = shop()
    first = settle.apply_async([7])
    headers = {HEADER: published()}
    settle.apply_async([9], task_id=first.id, retries=1, headers=headers, argsrepr="(...)")
    assert (published()["attempt"], published().get("about")) == (1, None)


def test_retry_says_what_its_own_key_was_made_of(shop, published):
    """Where its call has said it."""
    settle = shop()
    first = settle.apply_async([7])
    headers = {HEADER: published()}
    settle.apply_async([9], task_id=first.id, retries=1, headers=headers)
    assert (published()["attempt"], published()["about"]) == (1, "account_id=9")


def test_app_may_show_no_arguments(shop, published):
    """`setnx_show_arguments=False`: the key's digest is all that is said."""
    shop(setnx_show_arguments=False).delay(7)
    assert "about" not in published()


def test_duplicate_is_named_by_what_its_key_was_made_of(shop, published, caplog):
    """In the error and in the log; the error pickles."""
    settle = shop()
    settle.delay(7)
    with pytest.raises(DuplicateTask, match=r"^A call of shop\.settle\(account_id=7\) was not") as raised:
        settle.delay(7)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.about, str(again)) == ("account_id=7", str(raised.value))
    assert "A call of shop.settle(account_id=7) is not published" in caplog.text


def test_holder_is_named_by_what_its_key_was_made_of():
    """Whatever else a record says; of another program's words only text is taken."""
    record = Holder("id-1|0|n", 1e9, 1, "running", 1e9, {"task": "t", "task_id": "id-1", "about": "a='\n'"})
    assert str(record).startswith(r"t(a='\n')[id-1], running since")
    assert record.as_dict()["about"] == r"a='\n'"
    odd = Holder("id-1|0|n", 1e9, 1, "running", 1e9, {"task": "t", "task_id": "id-1", "about": {"a": 1}})
    assert odd.about == ""
    odd = Holder("id-1|0|n", 1e9, 1, "running", 1e9, {"task": "t", "about": "\ud800" + "x" * 1000})
    assert len(odd.about) == 80
    assert odd.about.isprintable()
    nothing = Holder("id-1|0|n", 1e9, 1, "running", 1e9, {"task": "t", "task_id": "id-1", "about": None})
    assert (nothing.about, str(nothing)[:7]) == ("", "t[id-1]")


def test_worker_names_call_and_holder_in_log_result_and_error(tasks, worker, holding, name):
    """The record tells those who meet it; the header tells the log of the call itself."""
    with holding(tasks.work, name, singleton={"lease": 600}) as first:
        said = f"tests.workerapp.work(name={name!r})"
        skipped = tasks.work.apply_async([name], singleton={"on_conflict": "skip"})
        told = skipped.get(timeout=60)
        assert (told["about"], told["holder"]["task_id"]) == (f"name={name!r}", first.id)
        key = tasks.work.lock_key(name)
        worker.wait_for_log(f"Skipped {said}[{skipped.id}]: {key} is held by {said}[{first.id}] on ")
        failed = tasks.work.apply_async([name], singleton={"on_conflict": "raise"})
        with pytest.raises(AlreadyRunning) as raised:
            failed.get(timeout=60)
        assert f" is held by {said}[{first.id}] on " in str(raised.value)


def test_waiting_call_says_it_when_it_is_woken(stage, worker):
    """It comes back with all that its message has said."""
    stage.held()
    waits = stage.parked("x")
    said = f"work(name={stage.key!r})[{waits.id}]"
    worker.wait_for_log(f"{said} waits in line")
    stage.open()
    stage.have_run([waits])
    worker.wait_for_log(f"{said} has its lock")


def test_call_by_name_alone_says_nothing(tasks, worker, holding, name):
    """Its message has no header of ours; what it may have hidden is not known."""
    with holding(tasks.work, name, singleton={"lease": 600}):
        bare = tasks.app.send_task("tests.workerapp.work", [name])
        assert bare.get(timeout=60)["task"] == "tests.workerapp.work"
        worker.wait_for_log(f"Skipped tests.workerapp.work[{bare.id}]: ")
