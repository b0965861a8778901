"""What a message says of a call: what is taken, what is ignored, and who may read it."""

import ast
import logging
import re
from typing import Any

import pytest

from celery_setnx.call.message import HEADER, Call, attempt_of
from celery_setnx.lock.record import ORIGINAL
from tests.test_layout import MODULES

FULL = Call(
    "t",
    "id-1",
    1,
    key="setnx:{t:0}",
    call_id="c0ffee",
    options={"lease": 5.0},
    marked="again",
    copy="abc",
    waits=2,
    since=1_700_000_000.25,
    again=True,
    join="id-0",
    asked=3,
    about="account_id=7",
    has_header=True,
)
SHORT = Call("t", "id-1", key="setnx:{t}", has_header=True)


def headers_of(call: Call, **more: Any) -> dict[str, Any]:
    """A message's headers."""
    retries = call.attempt
    return {"task": call.task, "id": call.task_id, "retries": retries, **call.as_headers(), **more}


@pytest.mark.parametrize("call", [FULL, SHORT], ids=["full", "short"])
def test_call_is_read_as_it_was_written(call):
    """One method writes, one constructor reads."""
    assert Call.of("t", headers_of(call)) == call


def test_header_says_no_more_than_it_must():
    """What is as it is by default costs no bytes."""
    assert SHORT.as_headers() == {HEADER: {"task": "t", "id": "id-1", "attempt": 0, "key": "setnx:{t}"}}


def test_unknown_fields_are_ignored(caplog):
    """A newer release may say more."""
    headers = headers_of(SHORT)
    headers[HEADER]["colour"] = "blue"
    assert Call.of("t", headers) == SHORT
    assert not caplog.records


@pytest.mark.parametrize(
    ("said", "about"),
    [(None, ""), (7, ""), (["x"], ""), ("a\n\ud800", r"a\n\ud800"), ("x" * 10**6, "x" * 79 + "…")],
)
def test_words_about_a_key_are_taken_as_far_as_they_can_be_read(said, about, caplog):
    """They decide nothing: whatever they are, the rest of the header counts."""
    headers = headers_of(FULL)
    headers[HEADER]["about"] = said
    assert Call.of("t", headers) == FULL._replace(about=about)
    assert not caplog.records


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("setnx:{settle:wait}", "it is no mapping"),
        (5, "it is no mapping"),
        ([], "it is no mapping"),
        ({"key": 5}, "its 'key' is 5"),
        ({"key": "a}b"}, "no record beside it would share its cluster slot"),
        ({"key": ""}, "a lock cannot be named ''"),
        ({"options": "lease"}, "its 'options' is 'lease'"),
        ({"waits": "2"}, "its 'waits' is '2'"),
        ({"waits": -1}, "its 'waits' is -1"),
        ({"since": float("nan")}, "its 'since' is nan"),
        ({"since": 1e300}, "its 'since' is 1e[+]300"),
        ({"copy": ["x"]}, "its 'copy' is"),
        ({"copy": "", "key": "k"}, "its 'copy' is ''"),
        ({"copy": "x"}, "it names no 'key'"),
        ({"marked": True}, "it names no 'key'"),
        ({"attempt": "0"}, "its 'attempt' is '0'"),
        ({"attempt": None}, "its 'attempt' is None"),
        ({"task": "other"}, "its 'task' is 'other'"),
        ({"id": "id-2"}, "its 'id' is 'id-2'"),
        ({"id": None}, "its 'id' is None"),
    ],
)
def test_header_that_is_malformed_or_anothers_counts_as_none(header, said, caplog):
    """The call runs as one without a header, and the worker says why."""
    caplog.set_level(logging.WARNING)
    if isinstance(header, dict):
        header = {"task": "t", "id": "id-1", "attempt": 0, **header}
    call = Call.of("t", {"id": "id-1", "retries": 0, HEADER: header})
    assert call == Call("t", "id-1")
    assert not call.has_header
    (record,) = caplog.records
    assert "The header 'singleton' of t[id-1] is ignored: " in record.getMessage()
    assert record.getMessage().endswith(". Its key is computed from its arguments.")
    assert re.search(said, record.getMessage())


def test_header_without_what_names_its_call_counts_as_none():
    """As a producer's that hands on the headers of its own request."""
    assert not Call.of("t", {"id": "id-1", HEADER: {"key": "setnx:{t}"}}).has_header


@pytest.mark.parametrize("retries", [0, 2])
def test_header_of_another_attempt_gives_options_and_call_id(retries):
    """Celery hands a retry the headers of the attempt before: its key, its mark and its waiting are over."""
    assert Call.of("t", headers_of(FULL, retries=retries)) == Call(
        "t", "id-1", retries, call_id="c0ffee", options={"lease": 5.0}, has_header=True
    )


def test_header_below_a_header_of_a_tracer_is_not_read():
    """Tracers copy all headers of a request into one header of their message."""
    nested = {"headers": {**FULL.as_headers(), "traceparent": "00-1-2-01"}}
    assert Call.of("t", {"id": "id-1", "retries": 1, **nested}) == Call("t", "id-1", 1)
    assert Call.of("t", headers_of(SHORT, **nested)) == SHORT


def test_eager_call_keeps_its_headers_apart():
    """It has no message."""
    assert Call.of("t", {"id": "id-1", "is_eager": True, "headers": SHORT.as_headers()}) == SHORT


@pytest.mark.parametrize("flagged", [False, True])
def test_flag_of_the_broker_makes_a_call_one_that_was_delivered_before(flagged):
    """Of a call without a header too; and it stays one when it comes back by another message."""
    info = {"delivery_info": {"redelivered": flagged}}
    assert Call.of("t", {"id": "id-1", **info}).again is flagged
    assert Call.of("t", headers_of(SHORT, **info)).again is flagged
    assert Call.of("t", headers_of(FULL, **info)).again


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"task_id": "id-1"}, FULL),
        ({"task_id": "id-2"}, None),
        ({}, None),
        ({"task_id": "id-1", "headers": {}}, None),
        ({"task_id": "id-1", "headers": {HEADER: "nonsense"}}, None),
        ({"task_id": "id-1", "headers": {HEADER: {"key": "setnx:{t}"}}}, None),
    ],
    ids=["its own", "another's", "a new one's", "none", "malformed", "unnamed"],
)
def test_attempt_before_is_known_by_the_header_of_the_same_call(options, expected):
    """Headers of a request that are handed on to another call say nothing of that one."""
    assert Call.before("t", {"headers": FULL.as_headers(), **options}) == expected


def test_attempt_before_of_another_task_is_none():
    """`replace()` gives its id to another task."""
    assert Call.before("u", {"task_id": "id-1", "headers": FULL.as_headers()}) is None


def test_copies_are_told_apart():
    """Only one of a call's messages may start it."""
    copies = {SHORT.as_copy().copy for _ in range(100)}
    assert len(copies) == 100
    assert ORIGINAL not in copies


def test_waiting_time_is_the_servers():
    """A call that no server has told the time has not waited."""
    assert FULL.waited_s(1_700_000_007.75) == 7.5
    assert FULL.waited_s(1.0) == 0.0
    assert SHORT.waited_s(1_700_000_000.0) == 0.0


@pytest.mark.parametrize(
    ("retries", "replaced", "attempt"),
    [(None, None, 0), (2, 0, 2), (0, 1, 1_000_000), (3, 2, 2_000_003), ("x", [], 0)],
)
def test_attempt_grows_with_retries_and_replacements(retries, replaced, attempt):
    """Whatever the message says."""
    assert attempt_of(retries, replaced) == attempt


def test_only_one_module_names_the_fields_of_the_header():
    """Others have a `Call`, with attributes. What a courier is told is a message of its own."""
    own = {"call_id", "marked", "copy", "waits", "asked", "attempt"}
    for name, tree in MODULES.items():
        read = {
            node.slice.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        } | {
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "setdefault")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        }
        assert name == "call.message" or not read & own, f"{name} reads {read & own}"
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "HEADER" not in names or name in ("call.message", "call.back", "request"), name
