"""What comes in a message or in a line is read, whatever it is, or counts as nothing said: fuzzed."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed

from celery_setnx import SingletonTask
from celery_setnx.arguments import Arguments
from celery_setnx.call.back import Message
from celery_setnx.call.message import HEADER, Call, attempt_of, id_of, retries_of
from celery_setnx.lock.names import ticket_name
from celery_setnx.options import LONGEST_S, NAMES
from celery_setnx.run.courier import ParkedCall
from celery_setnx.run.sweep import CourierRequest
from tests.bounds import bound
from tests.test_message import FULL, headers_of

DEEP: Any = []  # deeper than any Python goes
for _ in range(200_000):
    DEEP = [DEEP]

ODD = st.sampled_from(
    [
        *(None, True, False, -1, -0.0, 0, 2.0, 2**63, -(2**63), 10**400, 10**5000, -(10**5000)),
        *(float("nan"), float("inf"), float("-inf"), 1e300, 5e-324),
        *(
            "",
            "\ud800",
            "a\nb",
            "a|1|ff",
            "}{",
            "x" * 200_000,
            b"\xff",
            b"",
            [],
            {},
            DEEP,
            {"a": DEEP},
            set(),
        ),
    ]
)
ANY = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
HEADERS = {**FULL.as_headers()[HEADER], "unasked": True}
fuzzed = settings(deadline=None, max_examples=bound(80, full=1000))


def changed(told: dict[str, Any]) -> Any:
    """What is told, some of it anything, or missing, and more beside it."""
    some = st.fixed_dictionaries({}, optional=dict.fromkeys(told, ANY))
    more = st.dictionaries(st.text(max_size=9), ANY, max_size=2)
    gone = st.sets(st.sampled_from(sorted(told)), max_size=2)
    return st.tuples(some, more, gone).map(
        lambda parts: {n: v for n, v in {**told, **parts[0], **parts[1]}.items() if n not in parts[2]}
    )


def assert_usable(call: Call) -> None:
    """It says the same when it is written and read again, and keys, places and lines can be made of it."""
    written = {"id": call.task_id, **attempts(call.attempt), **call.as_headers()}
    again = Call.of(call.task, json.loads(json.dumps(written)))
    assert again == call._replace(has_header=call.key != "" or again.has_header)
    str(call).encode()
    place = call.place(60.0)
    assert 0 <= place.attempt < 2**53
    ticket_name("k", place.task_id, place.call_id).encode()
    assert "\n" not in call.task_id
    assert call.waited_s(1e9) >= 0


def attempts(attempt: int) -> dict[str, int]:
    return {"retries": attempt % 10**6, "replaced_task_nesting": attempt // 10**6}


@pytest.fixture(scope="module")
def app() -> Celery:
    app = Celery("parsing", broker="memory://", set_as_current=False)
    app.conf.setnx_url = "redis://127.0.0.1:1/0"

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"key": "a"})
    def t(a: Any = 1, b: Any = 2) -> None: ...

    app.finalize()
    return app


@fuzzed
@given(header=ANY | changed(HEADERS))
def test_header_of_any_kind_is_read_or_counts_as_none(header):
    """In the worker's parent it would end the worker, at every start again."""
    call = Call.of("t", {"id": "id-1", "retries": 1, HEADER: header})
    assert (call.task, call.task_id, call.attempt) == ("t", "id-1", 1)
    if not call.has_header:
        assert call == Call("t", "id-1", 1)
    else:
        assert_usable(call._replace(options={}))
    Call.before("t", {"task_id": "id-1", "headers": {HEADER: header}})


@fuzzed
@given(
    message=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("id", "retries", "replaced_task_nesting", "delivery_info", "is_eager"), ANY),
    )
)
def test_message_of_any_kind_is_a_call(message):
    """Ids that keys cannot have, retries that are no number, a delivery that is no mapping."""
    message.pop("is_eager", None)
    assert_usable(Call.of("t", message))


@fuzzed
@given(options=st.dictionaries(st.sampled_from([*NAMES, "colour"]) | st.text(max_size=5), ANY, max_size=4))
def test_options_of_any_kind_are_taken_or_dropped(app, options):
    """And the call that is left has a lock, a key, and can be sent back."""
    guard = app.tasks["t"]._guard
    call = guard.fitting(FULL._replace(options=options, key=""))
    lock = guard.lock(call, Arguments((1,), {}))
    lock.name.encode()
    assert 0 < lock.lease_s <= LONGEST_S
    guard.key(Arguments((), {"a": 3}), call.options)
    if call.options:
        assert json.loads(json.dumps(call.as_headers(), default=str))


PACKED = {
    "headers": headers_of(FULL, expires="2024-05-06T00:00:00+00:00"),
    "properties": {"correlation_id": "id-1", "priority": 3},
    "route": {"exchange": "", "routing_key": "q"},
    "content_type": "application/json",
    "encoding": "utf-8",
    "body": json.dumps([[1], {}, {"chain": None}]),
}


def as_text(told: Any) -> str:
    """As JSON, where it can be had."""
    try:
        return json.dumps(told)
    except (TypeError, ValueError, RecursionError):
        return "[" * 100_000


@fuzzed
@given(
    text=st.text()
    | changed(PACKED).map(as_text)
    | changed(PACKED["headers"]).map(lambda headers: as_text({**PACKED, "headers": headers}))
    | changed(HEADERS).map(lambda said: as_text({**PACKED, "headers": {**PACKED["headers"], HEADER: said}}))
)
def test_entry_of_a_line_is_a_call_or_a_value_error(app, text):
    """Who can write to the lock server can have written anything there."""
    try:
        call, message = Message.unpacked(app, text)
    except (ValueError, ContentDisallowed):
        return
    assert_usable(call._replace(options={}))
    message.send(app, call.as_copy())


ORDER = ParkedCall(FULL, "message", 1e9, 30.0, 3600.0, 7200.0, "epoch").as_kwargs()["parked"]


@fuzzed
@given(told=ANY | changed(ORDER) | changed(HEADERS).map(lambda h: {**ORDER, "call": {HEADER: h}}))
def test_order_of_a_courier_is_one_or_a_value_error(app, told):
    """Also where the worker's parent holds the courier, and looks after its call."""
    try:
        order = ParkedCall.of(told)
    except ValueError:
        return
    assert_usable(order.call._replace(options={}))
    assert 0 <= order.pace(1e9) <= 600
    place = order.place(app)
    assert 0 < place.remember * 1000 < 2**53
    assert order.as_kwargs()["key"] == order.call.key
    assert isinstance(order.epoch + order.message, str)


@pytest.mark.parametrize("kwargs", [{"parked": "x"}, {"parked": {"call": 5}}, ["parked"], {"parked": ORDER}])
def test_courier_of_any_kind_ends_no_worker(app, kwargs):
    """The worker's parent reads what it is told."""
    task = app.tasks["celery_setnx.courier"]
    headers = {"id": "c", "task": task.name, "retries": 0}
    message = SimpleNamespace(headers=headers, body="", properties={}, delivery_info={}, payload=None)
    request = CourierRequest(
        message, app=app, task=task, body=([], kwargs, {}), headers=headers, decoded=True
    )
    assert hasattr(request, "parked") == (kwargs == {"parked": ORDER})


@pytest.mark.parametrize(
    ("given_id", "read"),
    [
        *(("id-1", "id-1"), (5, "5"), (2.5, "2.5"), (UUID(int=5), str(UUID(int=5)))),
        *(("ü" * 1000, "ü" * 1000), ("a|1|ff", "a|1|ff")),
    ],
    ids=["text", "number", "fraction", "uuid", "long", "bars"],
)
def test_id_is_as_it_is_where_keys_can_have_it(given_id, read):
    """A text, a number or a UUID."""
    assert id_of(given_id) == read


NO_IDS = {
    "none": None,
    "empty": "",
    "list": ["id-1"],
    "mapping": {"id": 1},
    "bytes": b"id-1",
    "huge": 10**5000,
}


@pytest.mark.parametrize("given_id", NO_IDS.values(), ids=NO_IDS)
def test_id_of_another_kind_is_none(given_id):
    """How deep a list can be written depends on the stack: a worker's parent and its child would disagree."""
    assert id_of(given_id) == ""


@pytest.mark.parametrize("given_id", ["a\nb", "\ud800", "x" * 1001], ids=["break", "surrogate", "long"])
def test_id_that_keys_cannot_have_has_a_digest(given_id):
    """Two of them are two."""
    assert len(id_of(given_id)) == 32
    assert id_of(given_id) == id_of(given_id) != id_of(given_id + "x")


@pytest.mark.parametrize("given_id", ["a\nb", "x" * 1001], ids=["break", "long"])
def test_header_of_a_call_with_such_an_id_is_its_own(app, given_id):
    """Also when its retry is published."""
    task = app.tasks["t"]
    sent = task.apply_async((1,), task_id=given_id, queue="ids")
    assert sent.id == given_id
    with app.connection_for_read() as connection, connection.SimpleQueue("ids") as messages:
        headers = messages.get_nowait().headers
        call = Call.of("t", headers)
        task.apply_async((1,), task_id=given_id, queue="ids", retries=1, headers=call.as_headers())
        retry = Call.of("t", messages.get_nowait().headers)
    assert call.has_header
    assert (retry.attempt, retry.call_id) == (1, call.call_id)


def test_retry_of_a_call_of_a_fan_out_has_the_ticket_of_that_call(app):
    """What is late of the first attempt, as its leaving the line, is stale then."""
    task = app.tasks["t"]
    task.fan_out([(1,)], queue="ids")
    with app.connection_for_read() as connection, connection.SimpleQueue("ids") as messages:
        headers = messages.get_nowait().headers
        own = {HEADER: headers[HEADER]}
        task.apply_async((1,), task_id=headers["id"], queue="ids", retries=1, headers=own)
        retry = Call.of("t", messages.get_nowait().headers)
    assert retry.place(1.0) == replace(Call.of("t", headers).place(1.0), attempt=1)


def test_call_that_is_sent_again_as_the_same_attempt_is_another_call(app):
    """As the first retry of a client that counts from -1: a ticket of the call before would drop it."""
    task = app.tasks["t"]
    before = Call("t", "id-1", 0, key="setnx:{t}", call_id="c0ffee", has_header=True)
    task.apply_async((1,), task_id="id-1", queue="ids", retries=0, headers=before.as_headers())
    with app.connection_for_read() as connection, connection.SimpleQueue("ids") as messages:
        again = Call.of("t", messages.get_nowait().headers)
    assert again.call_id not in ("", before.call_id)


@pytest.mark.parametrize(
    ("retries", "read"),
    [(3, 3), (2.0, 2), (True, 1), (-1, 0), ("2", 0), (None, 0), (float("nan"), 0), (10**400, 0), (2.5, 0)],
)
def test_retries_of_other_clients_are_a_number_that_can_be_parked(retries, read):
    """What is negative, or no whole number, was parked and could never be sent."""
    assert retries_of(retries) == read
    assert attempt_of(retries, retries) == 1_000_001 * read


def test_header_that_cannot_be_read_is_said_once_and_shortly(caplog):
    """Its value may be of a million characters."""
    caplog.set_level(logging.WARNING)
    header = {"task": "t", "id": "id-1", "attempt": 0, "waits": "x" * 10**6}
    assert not Call.of("t", {"id": "id-1", HEADER: header}).has_header
    (record,) = caplog.records
    assert len(record.getMessage()) < 300
