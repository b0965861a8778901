"""What a program gives and what its worker gets have one key, whatever serializer and arguments."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import uuid
from collections import OrderedDict, UserString, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.utils.functional import SimpleLazyObject, lazystr
from django.utils.safestring import SafeString
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kombu.exceptions import DecodeError, EncodeError
from kombu.serialization import dumps, loads, register, register_pickle, unregister
from pydantic import BaseModel

from celery_setnx import SingletonTask
from celery_setnx.arguments import Arguments, copied
from celery_setnx.exceptions import UnkeyableCall
from celery_setnx.keys import KeyFunction, canonical

register_pickle()


class Instant(datetime):
    """As pendulum's: arithmetic returns its like, which a plain datetime is not compared with."""

    def __sub__(self, other: Any) -> Any:
        raise TypeError("no plain datetime, please")

    __rsub__ = __sub__

    def replace(self, *args: Any, **kwargs: Any) -> Any:
        return Instant(2000, 1, 1)


class Stamp(datetime):
    """As pandas': it counts nanoseconds."""

    nanosecond = 7

    def isoformat(self, *args: Any, **kwargs: Any) -> str:
        return super().isoformat() + "007"


class Length(timedelta):
    def __floordiv__(self, other: Any) -> Any:
        raise TypeError("no plain timedelta, please")


class Day(date):
    def isoformat(self) -> str:
        return "a day"


Colour = enum.Enum("Colour", {"RED": "red"})
Level = enum.IntEnum("Level", {"LOW": 1})
Word = enum.Enum("Word", {"YES": "yes"}, type=str)
Access = enum.Flag("Access", "READ WRITE")
Bits = enum.IntFlag("Bits", "ONE")
Point = namedtuple("Point", "x y")


class Half(float):
    """As numpy.float64: a float by descent, with words of its own."""

    def __repr__(self) -> str:
        return "half"


class Scalar:
    """As numpy's: no number by descent."""

    shape: tuple[int, ...] = ()

    def __init__(self, value: Any) -> None:
        self.value = value
        self.dtype = Type(type(value).__name__[0])

    def item(self) -> Any:
        return self.value


@dataclasses.dataclass(frozen=True)
class Type:
    kind: str


@dataclasses.dataclass
class Document:
    path: str
    size: int = 0


class Model(BaseModel):
    id: int
    at: datetime | None = None


class Reduced:
    def __json__(self) -> Any:
        return {"id": 7, "at": datetime(2026, 1, 2)}


class Refusing:
    """Whatever is asked of it, it raises."""

    def __json__(self) -> Any:
        raise LookupError("no")

    def __reduce__(self) -> Any:
        raise LookupError("no")


NESTED: list[Any] = []
for _depth in range(2000):
    NESTED = [NESTED]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
OSLO = ZoneInfo("Europe/Oslo")
WHEN = datetime(2026, 3, 29, 1, 30, 0, 5, tzinfo=OSLO)
PASSED: dict[str, Any] = {
    "instant": Instant(2026, 1, 2, 3, tzinfo=timezone.utc),
    "instant without a zone": Instant(2026, 1, 2, 3),
    "stamp": Stamp(2026, 1, 2, 3, tzinfo=timezone.utc),
    "length": Length(hours=2),
    "day": Day(2026, 1, 2),
    "zoned": WHEN,
    "zoned, folded": datetime(2026, 10, 25, 2, 30, tzinfo=OSLO, fold=1),
    "first": datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
    "last": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
    "odd zone": datetime(2026, 1, 2, tzinfo=timezone(timedelta(seconds=3661, microseconds=5))),
    "time": time(1, 2, tzinfo=timezone.utc),
    "zoned time": time(1, 2, tzinfo=OSLO),
    "duration": timedelta(days=-1, microseconds=1),
    "enum": Colour.RED,
    "int enum": Level.LOW,
    "text enum": Word.YES,
    "flag": Access.READ | Access.WRITE,
    "int flag": Bits.ONE,
    "mapping by enum": {Word.YES: 1, Level.LOW: 2},
    "decimal": Decimal("1.10"),
    "no number": Decimal("sNaN"),
    "float": Half(0.5),
    "whole float": Half(2.0),
    "nan": float("nan"),
    "inf": float("-inf"),
    "minus zero": -0.0,
    "small": 5e-324,
    "large": 1.7e308,
    "huge": 10**400,
    "too huge": 1 << 20_000,
    "fraction": Fraction(1, 3),
    "complex": 1j,
    "scalar": Scalar(7),
    "scalar float": Scalar(0.5),
    "scalar flag": Scalar(True),
    "scalar of objects": Scalar(object()),
    "path": PurePosixPath("/a"),
    "uuid": uuid.UUID(int=5),
    "bytes": b"\xff\x00",
    "bytearray": bytearray(b"abc"),
    "view": memoryview(b"abc"),
    "dataclass": Document("/a"),
    "model": Model(id=1, at=WHEN),
    "reduced": Reduced(),
    "refusing": Refusing(),
    "object": object(),
    "class": Document,
    "function": canonical,
    "lazy text": lazystr("käse"),
    "lazy object": SimpleLazyObject(lambda: "text"),
    "lazy failure": SimpleLazyObject(lambda: 1 / 0),
    "safe text": SafeString("<b>"),
    "user text": UserString("text"),
    "surrogates": "\ud83d\ude00 \ud800",
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, a=[1]),
    "named": Point(1, {"y": 2}),
    "deque": deque([1, 2]),
    "range": range(3),
    "set": {3, 1, 2},
    "frozen": frozenset("a"),
    "mapping by number": {1: "a", 1.5: "b", None: "c", False: "d"},
    "mapping of two that are one": {1: "a", "1": "b"},
    "mapping by tuple": {(1, 2): "a"},
    "mapping by day": {date(2026, 1, 2): "a"},
    "JSON of a type": {"__type__": "date", "__value__": "2026-01-02"},
    "JSON of no type": {"__type__": "nothing", "__value__": 1},
    "text like a time": "2026-01-02T03:04:05",
    "text like yaml": ["null", "yes", "1e3", "0o7", "2026-01-02", "~", "\r\n\x85", " a ", "=", "<<"],
    "nested": NESTED,
    "itself": ITSELF,
    "mixed": [{"a": (1, [WHEN, {"b": uuid.UUID(int=1)}])}, Decimal(2)],
}


def in_words(value: Any) -> Any:
    """A `default` for JSON such as many projects have: texts and mappings of what JSON has not."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (uuid.UUID, PurePosixPath, Decimal, Fraction, timedelta)):
        return str(value)
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)  # type: ignore[arg-type]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (set, frozenset, deque, range)):
        return sorted(value)
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(type(value).__name__)


def with_times(pairs: dict[str, Any]) -> dict[str, Any]:
    """An `object_hook` that takes texts like times for times."""
    for name, value in pairs.items():
        if isinstance(value, str):
            try:
                pairs[name] = datetime.fromisoformat(value)
            except ValueError:
                continue
    return pairs


def plain_json(value: Any) -> str:
    return json.dumps(value, default=in_words)


OWN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "words": (plain_json, json.loads),
    "exact": (plain_json, lambda text: json.loads(text, parse_float=Decimal)),
    "times": (plain_json, lambda text: json.loads(text, object_hook=with_times)),
    "one way": (plain_json, lambda text: 1 / 0),
}
SERIALIZERS = ["json", "pickle", "msgpack", "yaml", *OWN]
READABLE = [name for name in SERIALIZERS if name != "one way"]


@pytest.fixture(autouse=True, scope="module")
def _own() -> Iterator[None]:
    for name, (encode, decode) in OWN.items():
        register(name, encode, decode, content_type=f"application/x-{name.replace(' ', '-')}")
    yield
    for name in OWN:
        unregister(name)


def sent(value: Any, serializer: str) -> Any:
    """What a worker gets of a value; EncodeError if it cannot be sent, DecodeError if it cannot be read."""
    content_type, encoding, data = dumps(([value], {}, {}), serializer=serializer)
    return loads(data, content_type, encoding, accept=[content_type])[0][0]


def call(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None:
    """The signature under test."""


def key(option: Any, **typing: bool) -> KeyFunction:
    return KeyFunction(option, inspect.signature(call), "proj.call", **typing)


def assert_one_key(made: KeyFunction, value: Any, serializer: str) -> str:
    """The program's key is the worker's, or it is told what to pass instead; what came of it."""
    refused = ""
    try:
        before = made.digest([value], {}, serializer)
    except UnkeyableCall as error:
        refused = str(error)
    if refused:
        assert "pass " in refused
        return "refused"
    try:
        got = sent(value, serializer)
    except EncodeError:
        return "not sent"  # and Celery says why
    except DecodeError:
        return "not read"  # nor by a worker of plain Celery
    assert made.digest([got], {}) == before
    return "sent"


@pytest.mark.parametrize("serializer", READABLE)
@pytest.mark.parametrize("what", PASSED)
def test_program_and_worker_have_one_key_for_what_people_pass(what, serializer):
    """Or the program is told what to pass instead; no other error, and never two keys."""
    for option in (None, "a", "x:{a}", lambda a, *_rest, **_named: a):
        assert_one_key(key(option), PASSED[what], serializer)


UNPRINTABLE = ("nested", "itself", "lazy failure", "too huge")
KEPT = st.sampled_from([value for what, value in PASSED.items() if what not in UNPRINTABLE])
VALUES = st.recursive(
    KEPT | st.text() | st.integers() | st.floats() | st.datetimes() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("serializer", READABLE)
@hypothesis_settings(deadline=None, max_examples=60)
@given(value=VALUES)
def test_program_and_worker_have_one_key_for_mixtures(serializer, value):
    """The same of lists and mappings of them."""
    assert_one_key(key(None), value, serializer)


HAVE_A_KEY = {
    "json": "instant, stamp, zoned, nan, float, huge, surrogates, lazy text, safe text, int enum, "
    "JSON of a type",
    "pickle": "instant, zoned, scalar, scalar float, length, day, model, enum",
    "words": "instant, stamp, zoned, path, dataclass, model, set",
    "times": "instant, text like a time",
    "exact": "nan, float",
}


@pytest.mark.parametrize(
    ("what", "serializer"),
    [(what, name) for name, all_of in HAVE_A_KEY.items() for what in all_of.split(", ")],
)
def test_what_celery_sends_has_a_key(what, serializer):
    """These at least are keyed, and not refused."""
    assert assert_one_key(key("a"), PASSED[what], serializer) == "sent"


KEYLESS = ["object", "dataclass", "path", "nested", "itself", "stamp", "too huge", "deque"]


@pytest.mark.parametrize("what", KEYLESS)
def test_object_without_a_key_is_refused_with_advice(what):
    """By name and type, and with what to do: pickle sends these, but nothing says when two are the same."""
    said = r"proj\.call: argument 'a' of type \w+: .*; pass its id or .* key="
    with pytest.raises(UnkeyableCall, match=said):
        key("a").digest([PASSED[what]], {}, "pickle")


@pytest.mark.parametrize(("value", "serializer"), [(7, "one way"), (WHEN, "nobody's")])
def test_call_whose_message_cannot_be_read_here_is_keyed_as_it_is(value, serializer):
    """Only a worker can decrypt it; or the serializer is unknown, which is Celery's to refuse."""
    assert key("a").digest([value], {}, serializer) == key("a").digest([value], {})


def test_only_what_the_key_needs_is_asked_of_the_serializer():
    """Not what it leaves out, which may be large, or be used up by being read."""
    used = iter([1, 2])
    for made in (key("a"), key("x:{a}"), key(["c", "a"]), key("z")):
        made.digest([WHEN], {"b": used, "z": 1}, "words")
    assert list(used) == [1, 2]
    with pytest.raises(UnkeyableCall, match=r"can be read only once.*pass a list"):
        key("b").digest([WHEN, [iter([1])]], {}, "words")


@pytest.mark.parametrize("option", ["rest", "more", "z", "c", lambda *args, **kwargs: [args, kwargs]])
def test_arguments_that_a_parameter_catches_are_asked_too(option):
    made = key(option)
    args, kwargs = [1, 2, WHEN], {"c": WHEN, "z": WHEN}
    assert made.digest(args, kwargs, "words") == made.digest(sent(args, "words"), sent(kwargs, "words"))
    assert made.digest(args, kwargs, "words") != made.digest(args, kwargs)


def test_call_that_does_not_fit_is_asked_too():
    """typing=False, and a key that is made of all that the call gives."""
    made, text = (
        KeyFunction(None, inspect.signature(lambda a: None), "proj.call", typing=False),
        WHEN.isoformat(),
    )
    assert made.digest([WHEN, 1], {"z": WHEN}, "words") == made.digest([text, 1], {"z": text})


def test_default_is_the_same_for_program_and_worker():
    """It travels in no message."""
    made = KeyFunction(None, inspect.signature(lambda a, at=WHEN: None), "proj.call")
    assert made.digest([1], {}, "words") == made.digest([1], {})


def test_time_limit_that_strikes_while_a_key_is_made_ends_the_body():
    """It is no error of the value's; kombu would hide it."""

    class Slow:
        def __json__(self) -> Any:
            raise SoftTimeLimitExceeded

    for option in ("a", "{a.b}", lambda a, *_rest, **_named: canonical(a)):
        with pytest.raises(SoftTimeLimitExceeded):
            key(option).digest([Slow()], {}, "json")


def test_template_says_what_an_attribute_raises():
    class Angry:
        @property
        def id(self) -> Any:
            raise LookupError("the row is gone")

    with pytest.raises(UnkeyableCall, match=r"\{a\.id\}.*LookupError: the row is gone"):
        key("{a.id}").digest([Angry()], {})


@pytest.fixture
def task() -> Any:
    app = Celery("delivering", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url="redis://127.0.0.1:1/0", task_serializer="words")

    @app.task(base=SingletonTask, shared=False, name="delivered", singleton={"key": "a"})
    def delivered(a: Any) -> None: ...

    return app.tasks["delivered"]


def test_task_has_the_key_that_its_serializer_makes(task):
    """`lock_key` and a call's own serializer."""
    assert task.lock_key(WHEN) == task.lock_key(WHEN.isoformat())
    given = Arguments.given_to(task, [WHEN], None, "json")
    assert task._guard.key(given, {}) != task.lock_key(WHEN)


def test_what_cannot_be_sent_raises_what_celery_raises(task):
    """Its argument is not the key's: Celery has its own words."""
    with pytest.raises(EncodeError):
        task.apply_async([WHEN], serializer="msgpack")


@pytest.mark.parametrize("what", PASSED)
def test_copy_is_equal(what):
    """Or the thing itself, where there can be none."""
    value = PASSED[what]
    if what in ("itself", "nested"):
        with pytest.raises(RecursionError):
            copied(value)
        return
    made, given = copied([value, {"a": (value,)}]), [value, {"a": (value,)}]
    assert made is not given
    if type(value).__eq__ is not object.__eq__ and "nan" not in what and "lazy" not in what:
        assert made == given


def test_copy_does_not_change_with_what_was_copied():
    value = {"a": [{"b": [1]}, (Document("x"), [2])]}
    made = copied(value)
    value["a"][0]["b"].append(0)  # type: ignore[call-overload]
    value["a"][1][0].path = "y"  # type: ignore[union-attr]
    value["a"][1][1].clear()  # type: ignore[union-attr]
    assert made == {"a": [{"b": [1]}, (Document("x"), [2])]}


def test_key_of_the_whole_task_asks_no_serializer():
    """Nor does one that names what a call leaves out."""
    asked: list[Any] = []
    register("asked", asked.append, asked.append, content_type="application/x-asked")
    try:
        key(()).digest([WHEN], {}, "asked")
        key("c").digest([WHEN], {}, "asked")
    finally:
        unregister("asked")
    assert asked == []


@pytest.mark.parametrize(
    ("key", "value"),
    [(lambda value: f"{value}", (1, 2)), (lambda value: str(value), {1: 2}), ("m:{value.1}", {1: 2})],
    ids=["tuple", "mapping", "template"],
)
def test_callables_and_templates_see_in_the_program_what_they_see_in_the_worker(key, value):
    """JSON makes a list of a tuple, and texts of a mapping's numbers; a text that is made of them tells."""
    function = KeyFunction(key, inspect.signature(lambda value: None), "t")
    (got,) = json.loads(json.dumps([value]))
    assert function.digest((value,), {}, "json") == function.digest((got,), {})
