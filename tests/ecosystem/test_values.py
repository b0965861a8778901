"""Values of libraries that people pass to tasks: numpy, pandas, pendulum, arrow. No worker, no server."""

from __future__ import annotations

import inspect
from datetime import datetime, timedelta, timezone
from typing import Any

import arrow
import attrs
import numpy as np
import pandas as pd
import pendulum
import pytest
from kombu.serialization import register_pickle

from celery_setnx.exceptions import UnkeyableCall
from celery_setnx.keys import KeyFunction
from tests import test_delivered
from tests.test_delivered import SERIALIZERS, assert_one_key

register_pickle()
_own = test_delivered._own


@attrs.define
class Order:
    id: int


NANOSECONDS = pd.Timestamp(1_767_322_800_000_000_001, unit="ns")
VALUES: dict[str, Any] = {
    "pendulum": pendulum.datetime(2026, 1, 2, tz="Europe/Oslo"),
    "pendulum, naive": pendulum.naive(2026, 1, 2),
    "pendulum, now": pendulum.now(),
    "pendulum's date": pendulum.date(2026, 1, 2),
    "pendulum's time": pendulum.time(1, 2, 3),
    "pendulum's duration": pendulum.duration(months=1, days=-3, seconds=5),
    "pendulum's interval": pendulum.datetime(2026, 1, 2) - pendulum.datetime(2025, 1, 2),
    "arrow": arrow.get(2026, 1, 2),
    "timestamp": pd.Timestamp("2026-01-02", tz="Europe/Oslo"),
    "timestamp of a frame": pd.Timestamp("2026-01-02").as_unit("ns"),
    "timestamp with nanoseconds": NANOSECONDS,
    "no timestamp": pd.NaT,
    "pandas' duration": pd.Timedelta(hours=1),
    "period": pd.Period("2026-01"),
    "nothing": pd.NA,
    "frame": pd.DataFrame({"a": [1]}),
    "series": pd.Series([1, 2]),
    "attrs": Order(7),
    "array": np.arange(3),
    "matrix": np.eye(2),
    "array of none": np.array(7),
    "structure": np.zeros(1, dtype=[("a", int)])[0],
    **{
        f"numpy.{made.dtype}": made
        for made in [
            *(np.int8(-1), np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1)),
            *(np.longdouble(0.1), np.bool_(1), np.str_("a"), np.bytes_(b"a"), np.complex64(1)),
            *(
                np.datetime64("2026-01-02"),
                np.datetime64(1, "ns"),
                np.timedelta64(1, "ns"),
                np.float64("nan"),
            ),
        ]
    },
}


def call(a: Any) -> None:
    """The signature under test."""


def key(option: Any) -> KeyFunction:
    return KeyFunction(option, inspect.signature(call), "proj.call")


@pytest.mark.parametrize("serializer", [name for name in SERIALIZERS if name != "one way"])
@pytest.mark.parametrize("what", VALUES)
def test_program_and_worker_have_one_key(what, serializer):
    """Or the program is told what to pass instead; no other error, and never two keys."""
    for value in (VALUES[what], {"a": [VALUES[what]]}):
        for option in (None, "a", "x:{a}", lambda a: a):
            assert_one_key(key(option), value, serializer)


@pytest.mark.parametrize(
    ("what", "serializer"),
    [
        *[
            (what, name)
            for what in VALUES
            if "pendulum" in what and what[8:10] != "'s"
            for name in ("json", "pickle")
        ],
        *[(f"pendulum's {what}", "json") for what in ("date", "time")],
        *[(f"pendulum's {what}", "pickle") for what in ("date", "time", "duration", "interval")],
        *[("timestamp", "json"), ("timestamp of a frame", "json"), ("timestamp with nanoseconds", "json")],
        *[("timestamp", "pickle"), ("timestamp of a frame", "pickle"), ("pandas' duration", "pickle")],
        *[
            (f"numpy.{kind}", "pickle")
            for kind in ("int8", "uint64", "float16", "float32", "float64", "bool")
        ],
        *[("numpy.float64", "json"), ("numpy.<U1", "json"), ("array of none", "pickle")],
    ],
)
def test_what_celery_sends_has_a_key(what, serializer):
    assert assert_one_key(key("a"), VALUES[what], serializer) == "sent"


@pytest.mark.parametrize("value", [pendulum.datetime(2026, 1, 2), pd.Timestamp("2026-01-02", tz="UTC")])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_instant_is_that_of_a_plain_datetime(value, serializer):
    """Whoever publishes: one key."""
    plain = datetime(2026, 1, 2, 5, 30, tzinfo=timezone(timedelta(hours=5.5)))
    assert key("a").digest([value], {}, serializer) == key("a").digest([plain], {}, serializer)


@pytest.mark.parametrize(
    "what", ["arrow", "array", "frame", "attrs", "timestamp with nanoseconds", "no timestamp"]
)
def test_pickle_of_what_has_no_key_is_refused_with_advice(what):
    with pytest.raises(UnkeyableCall, match=r"argument 'a' of type \w+: .*pass its id or its text instead"):
        key("a").digest([VALUES[what]], {}, "pickle")
