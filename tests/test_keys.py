"""Keys: what is the same call, what is not, and that producer and worker agree."""

import enum
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import chain, combinations
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kombu.serialization import dumps, loads, register_pickle
from pydantic import BaseModel
from redis.crc import key_slot

from celery_setnx.exceptions import OptionError, UnkeyableCall
from celery_setnx.keys import KeyFunction, canonical, digest
from celery_setnx.lock.names import key_name, record_name

register_pickle()


CET = timezone(timedelta(hours=1))


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class User(BaseModel):
    id: int
    name: str = "x"


class Reduced:
    """Has kombu's own hook for JSON."""

    def __json__(self) -> dict[str, Any]:
        return {"id": 7, "at": datetime(2026, 1, 2)}


def call(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> None:
    """The signature under test."""


def key(option: Any = None, function: Callable[..., Any] = call, **checks: Any) -> Callable[..., str]:
    made = KeyFunction(option, inspect.signature(function), "proj.call", **checks)
    return lambda *args, **kwargs: made.digest(args, kwargs)


def sent(value: Any, serializer: str) -> Any:
    """What a worker gets of a value."""
    content_type, encoding, data = dumps(value, serializer=serializer)
    return loads(data, content_type, encoding, accept=[content_type])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]), ({1: "a"}, {"1": "a"}), (OrderedDict(a=1), {"a": 1}),
        ({"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 2, "x": 1}, "a": 1}),
        ({True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}),
        (Colour.RED, "red"), (Level.LOW, 1), (1.0, 1), (-0.0, 0),
        ({Colour.RED: 1, Level.LOW: 2}, {"red": 1, "1": 2}),
        (Decimal("1.10"), Decimal("1.1")), (Decimal("0E+5"), Decimal("0")), (Decimal("1E+2"), Decimal("100")),
        ({1, 2, 3}, frozenset([3, 2, 1])), (bytearray(b"x"), b"x"),
        (datetime(2026, 1, 1, 12, tzinfo=timezone.utc), datetime(2026, 1, 1, 13, tzinfo=CET)),
        (User(id=1), {"id": 1, "name": "x"}),
        (Reduced(), {"at": datetime(2026, 1, 2), "id": 7}),
    ],
)  # fmt: skip
def test_canonical_form_forgets_what_serializers_forget(one, other):
    """Equal for the user, whatever form a message gives it."""
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"), (1.5, "1.5"), (1, True), (0, False), (None, "None"), (None, "null"), ("a", b"a"),
        (UUID(int=1), str(UUID(int=1))), ("x_b-y", "x"), ("\ud800", "?"), (float("nan"), float("inf")),
        (Decimal("1"), 1), (Decimal("NaN"), Decimal("Infinity")), (Decimal("-1"), Decimal("1")),
        (date(2026, 1, 1), datetime(2026, 1, 1)), (time(1), time(1, tzinfo=timezone.utc)), ("s1:a", ["a"]),
        (datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)), (timedelta(1), 86400),
        (["a", "b"], ["ab"]), (["a", ["b"]], [["a"], "b"]), (["a", "b", ["c"]], ["a", ["b"], "c"]),
        ([], {}), ([], set()), ({"a": "b"}, [["a", "b"]]), ({"a": {"b": 1}}, {"a": {}, "b": 1}),
    ],
)  # fmt: skip
def test_canonical_form_keeps_types_apart(one, other):
    """Look-alikes and crafted concatenations are different keys."""
    assert canonical(one) != canonical(other)


def test_positional_keyword_and_default_are_one_call():
    """However the arguments are given, the call is the same; what would run together as text is not."""
    same = {key()(1), key()(1, 2), key()(a=1), key()(a=1, b=2), key()(1, b=2, c=3), key()(1, c=3)}
    assert len(same) == 1
    different = [key()("x_b-y", "z"), key()("x", "y_b-z"), key()("x", "y", "z"), key()("x", "y", z="z")]
    assert len(set(different)) == len(different)


def placed(a: Any, /, b: Any, *, c: Any, d: Any = 4) -> None:
    """A signature of all kinds but those that catch."""


@pytest.mark.parametrize(
    ("option", "function", "misfit", "fit"),
    [
        ("b", placed, {"args": [1, 2, 3]}, {"args": [1, 2], "kwargs": {"c": 3}}),
        ("c", placed, {"kwargs": {"c": 3}}, {"args": [1, 2], "kwargs": {"c": 3}}),
        ("d", placed, {}, {"args": [1, 2], "kwargs": {"c": 3}}),
        (["a", "c"], placed, {"args": [1], "kwargs": {"c": 3}}, {"args": [1, 2], "kwargs": {"c": 3}}),
        ("x:{b.id}", placed, {"kwargs": {"b": {"id": 7}}}, {"args": [1, {"id": 7}], "kwargs": {"c": 3}}),
        ("more", call, {"kwargs": {"b": 1, "x": 5}}, {"args": [1], "kwargs": {"x": 5}}),
        ("x", call, {"kwargs": {"x": 5}}, {"args": [1], "kwargs": {"x": 5}}),
        ("a", call, {"args": [1, 2, 3], "kwargs": {"a": 4}}, {"args": [1]}),
        ("rest", call, {"args": [1, 2, 3], "kwargs": {"a": 4}}, {"args": [0, 0, 3]}),
        ((), placed, {}, {"args": [1, 2], "kwargs": {"c": 3}}),
        (lambda a, *_rest, **_named: a, placed, {"args": [1]}, {"args": [1, 2], "kwargs": {"c": 3}}),
    ],
)
def test_call_that_does_not_fit_has_the_key_of_one_that_does(option, function, misfit, fit):
    """If it gives what the key names, and nobody checks its arguments."""
    made = key(option, function, typing=False)

    def of(given: Any) -> str:
        return made(*given.get("args", ()), **given.get("kwargs", {}))

    assert of(misfit) == of(fit)


@pytest.mark.parametrize("option", [None, "a", "{a.id}", ["a", "b"], lambda a, **_: a, lambda **_: None])
def test_call_that_does_not_fit_and_names_no_key_is_keyed_by_all_that_it_gives(option):
    """By place and by name are two things then, as no signature says that they are one."""
    made = key(option, lambda a, b: None, typing=False)
    keys = [made(), made(b=1), made(b=2), made(b=1, c=1), made(c=1, b=1)]
    assert len(set(keys)) == 4
    assert keys[3] == keys[4]


def wrapper(*args: Any, **kwargs: Any) -> None:
    """A decorator's function, which takes what it adds or takes away."""


@pytest.mark.parametrize("option", ["a", ["b", "a"], "{a}", (), lambda a, b=2, **_: [a, b]])
def test_call_that_only_its_decorator_takes_has_the_key_that_it_names(option):
    """Sentry sends a time with each call, which a decorator takes away: Celery asks what that takes."""
    made = key(option, lambda a, b=2: None, wrapper=inspect.signature(wrapper))
    assert made(1, __start_time=5) == made(a=1, b=2, __start_time=6) == made(1)


@pytest.mark.parametrize(
    ("option", "given"), [(None, {"a": 1, "time": 5}), ("a", {"b": 1, "time": 5}), (None, {"a": 1})]
)
def test_call_that_only_its_decorator_takes_needs_a_key_that_it_gives(option, given):
    """Of what else it gives nobody knows whether it counts."""
    made = key(option, lambda a, b: None, wrapper=inspect.signature(wrapper))
    with pytest.raises(UnkeyableCall, match=r"name what counts with key="):
        made(**given)


def test_call_that_its_decorator_does_not_take_either_has_no_key():
    made = key("a", lambda a: None, wrapper=inspect.signature(lambda a, time=0: None))
    with pytest.raises(UnkeyableCall, match="unexpected keyword argument 'tme'"):
        made(1, tme=5)


def test_every_way_to_give_arguments_is_bound_as_python_binds_it():
    """All calls of one to three parameters, right and wrong, beside `inspect.Signature.bind`."""
    signature = inspect.signature(lambda a, b, c=3: None)
    made = KeyFunction(None, signature, "proj.call")
    seen = set()
    for args in [(), (1,), (1, 2), (1, 2, 9), (1, 2, 9, 4)]:
        for names in chain.from_iterable(combinations("abcd", count) for count in range(5)):
            kwargs = {name: ord(name) for name in reversed(names)}
            try:
                expected = signature.bind(*args, **kwargs)
            except TypeError as error:
                with pytest.raises(UnkeyableCall, match=re.escape(str(error))):
                    made.digest(args, kwargs)
                seen.add("refused")
            else:
                expected.apply_defaults()
                assert made.digest(args, kwargs) == digest(list(expected.arguments.items()))
                seen.add("bound")
    assert seen == {"refused", "bound"}


def test_key_name_is_a_parameter_never_a_constant():
    """`key="a"` means the argument a, also one that only **more catches; any other text is refused."""
    assert key("a")(1, 5) == key("a")(1, 6) != key("a")(2, 5)
    assert key("z")(1, z=1) != key("z")(1, z=2)
    with pytest.raises(OptionError, match=r"names 'constant', which is not a parameter of proj.call\(a\)"):
        key("constant", lambda a: None)
    with pytest.raises(OptionError, match=r"names 'x.id', .*; did you mean key='{x.id}'\?"):
        key("x.id", lambda **more: None)


def test_key_of_a_list_covers_typed_values_in_order():
    """`key=["a", "b"]`: both values, neither their names nor their text."""
    assert key(["a", "b"])(1, 2, c=9) == key(["a", "b"])(1, 2) != key(["a", "b"])(2, 1)
    assert key("a")(1) == key(["b"])(9, 1)
    assert key(["a", "b"])("1", 2) != key(["a", "b"])(1, 2)


def test_template_covers_typed_values_not_text():
    """The joined text of two calls may be the same; their keys are not."""
    template = "{a}:{b}"
    assert key(template)("x", "y:z") != key(template)("x:y", "z")
    assert key("u:{a}")(1) != key("u:{a}")("1")
    assert key("u:{a}")(1) != key("v:{a}")(1)


def test_template_dots_try_item_then_attribute():
    """`{a.id}` finds the id of a mapping, or of a model; a step of digits is an index of a list."""
    assert key("{a.id}")({"id": 5}) == key("{a.id}")(User(id=5))
    assert key("{a.items}")({"items": 1}) == key("{a.items}")({"items": 1.0})
    assert key("{a.1}")([7, 8]) == key("{a.1}")([9, 8]) != key("{a.1}")([7, 9])


BROKEN = [
    *("{a", "a}", "{}", "{0}", "{a!r}", "{a:>3}", "{_a}", "{a.__class__}", "{a[0]}", "{a.}", "{nobody}"),
    *("{{a}}", 5, 1.5, b"a", {"a": 1}),  # a key option is one of the five documented forms
]


@pytest.mark.parametrize("option", BROKEN)
def test_broken_template_is_refused_when_bound(option):
    """Formats, conversions, private names, unknown fields, and what is no key at all."""
    with pytest.raises(OptionError):
        key(option, lambda a: None)


def test_callable_gets_the_calls_arguments_with_defaults():
    """A key function sees the call as the task does."""
    made = key(lambda a, b, *rest, c, **more: (a, b, rest, c, more))
    assert made(1) == made(1, 2, c=3) != made(1, 3)


@pytest.mark.parametrize("option", [(), []])
def test_empty_key_is_one_lock_for_the_whole_task(option):
    """No digest: the name of the lock can be typed."""
    assert key(option)(1) == key(option)(2, 3) == ""
    assert key_name("setnx", "proj.call", "") == "setnx:{proj.call}"


@pytest.mark.parametrize(
    ("option", "args", "message"),
    [
        (None, (1, object()), r"proj\.call: argument 'b' of type object: .*key="),
        # it would lose an entry on its way to the worker
        (None, ({1: "a", "1": "b"},), "two keys of a mapping are one in JSON"),
        (None, (), r"missing a required argument: 'a'; its signature is \(a, b=2, \*rest, c=3, \*\*more\)"),
        ("z", (1,), "needs argument 'z'"),
        ("{a.id}", (5,), "neither an item nor an attribute 'id' in a int"),
        (lambda *a, **k: None, (1,), "a call of proj"),
        (lambda *a, **k: 1 / 0, (1,), "a call of proj"),
        (lambda *a, **k: object(), (1,), "a call of proj"),
    ],
)
def test_call_without_a_key_is_refused(option, args, message):
    """The error names task, argument and type, and says what to do."""
    with pytest.raises(UnkeyableCall, match=message) as caught:
        key(option)(*args)
    assert isinstance(caught.value, TypeError)


RECORDS = {
    "setnx:{proj.call:00ff}": "setnx:{proj.call:00ff}:holder",
    "lock.foo": "{lock.foo}:holder",
    "a{tag}b": "a{tag}b:holder",
    "a{b": "{a{b}:holder",
}


@pytest.mark.parametrize("name", RECORDS)
def test_record_shares_the_cluster_slot_of_its_lock(name):
    """By the tag of scope and digest; a name without a tag becomes the tag of its record."""
    assert key_name("setnx", "proj.call", "00ff") in RECORDS
    assert record_name(name) == RECORDS[name]
    assert key_slot(name.encode()) == key_slot(RECORDS[name].encode())


@pytest.mark.parametrize("name", ["a{}b", "a}b", "{}x", "}", "a{}{b}", ""])
def test_lock_name_without_a_sibling_in_its_slot_is_refused(name):
    """No record could live beside such a lock in a cluster."""
    with pytest.raises(ValueError, match="cannot be named"):
        record_name(name)


def test_digest_is_pinned():
    """The key format: if this changes, the digest's personalization must."""
    assert digest([["a", 1], ["b", "x"]]) == "5058e4c6a49b839f7de6aacd1d558973"


def test_registered_json_type_is_keyed_by_its_json():
    """A type known to kombu's JSON alone is what its message says."""
    from kombu.utils.json import register_type

    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    register_type(Money, "money", lambda m: m.cents, Money)
    assert canonical(Money(5)) == canonical(Money(5)) != canonical(Money(6))
    assert canonical(sent(Money(5), "json")) == canonical(Money(5))


PLAIN = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text() | st.floats(allow_nan=False)
ZONES = st.sampled_from([timezone.utc, timezone(timedelta(hours=5, minutes=30))])
TIMES = st.dates() | st.times() | st.datetimes() | st.datetimes(timezones=ZONES)
JSON_SCALARS = PLAIN | st.floats() | st.integers() | st.binary() | st.uuids() | st.decimals() | TIMES
YAML_TIMES = st.dates(min_value=date(1000, 1, 1)) | st.datetimes(min_value=datetime(1000, 1, 1))
YAML_TEXT = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]))
YAML_PLAIN = st.none() | st.booleans() | st.integers() | YAML_TEXT | st.floats(allow_nan=False)
YAML_SCALARS = YAML_PLAIN | st.binary() | YAML_TIMES


def nested(scalars: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
        return lists | st.dictionaries(keys, inner, max_size=4)

    return st.recursive(scalars, around, max_leaves=12)


MESSAGES = {
    "json": nested(JSON_SCALARS, st.text() | st.integers()),
    "pickle": nested(JSON_SCALARS | st.frozensets(st.integers()), st.text() | st.integers() | st.binary()),
    "msgpack": nested(PLAIN | st.binary(), st.text()),
    "yaml": nested(YAML_SCALARS, st.text("abc") | st.integers()),
}


@pytest.mark.parametrize("serializer", MESSAGES)
@hypothesis_settings(deadline=None)
@given(data=st.data())
def test_producer_and_worker_compute_the_same_key(serializer, data):
    """A value before serialization and after it has one canonical form."""
    value = data.draw(MESSAGES[serializer])
    try:
        before = canonical(value)
    except ValueError:  # {1: .., "1": ..}: refused before it is sent
        return
    assert canonical(sent(value, serializer)) == before


@hypothesis_settings(deadline=None)
@given(st.lists(nested(JSON_SCALARS, st.text()), min_size=2, max_size=2))
def test_canonical_forms_are_equal_only_for_equal_values(pair):
    """No two values that JSON tells apart share a canonical form."""
    one, other = pair
    if canonical(one) == canonical(other):
        assert canonical([one, one]) == canonical([other, other])
        assert repr(_normal(one)) == repr(_normal(other))


def _normal(value: Any) -> Any:
    """What the canonical form forgets, forgotten in Python."""
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    if isinstance(value, dict):
        return sorted((name, repr(_normal(item))) for name, item in value.items())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value.is_finite():
        sign, digits, exponent = value.as_tuple()
        text = "".join(map(str, digits)).lstrip("0")
        zeros = len(text) - len(text.rstrip("0"))
        return ("decimal", sign if text else 0, text.rstrip("0"), exponent + zeros if text else 0)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return ("instant", value - datetime(1970, 1, 1, tzinfo=timezone.utc))
    return value
