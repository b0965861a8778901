"""docs/protocol.md and docs/keys.md: true of the code, and enough for a client that shares none of it."""

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_setnx import SetnxLock, SingletonTask, is_skipped, keys
from celery_setnx.call.wake import lines_of
from celery_setnx.lock import names
from celery_setnx.lock.record import Holder
from celery_setnx.testing import _age
from tests.bounds import bound
from tests.docs.pages import DOCS, ROOT, sections, table
from tests.harness import wait_until
from tests.model.contract import KNOWN_WORDS
from tests.protocol import client
from tests.protocol.client import (
    ClassicClient,
    FullClient,
    Producer,
    Record,
    Server,
    ServerError,
    Sweeper,
    digest,
    due_names,
    lines_name,
)

LOCK_DB = 1
LONG_S = 600  # nothing expires because the machine is slow
LONG_US = LONG_S * 1_000_000
PROTOCOL, KEYS = ((DOCS / f"{page}.md").read_text() for page in ("protocol", "keys"))
VERBS = sections(sections(PROTOCOL)["Calling a script"], 3)
SCRIPTS = {path.stem: path.read_text() for path in sorted(client.LUA.glob("*.lua")) if path.stem != "permits"}
NOT_ANSWERED = {"string", "table", "number"}  # names of Lua's types
WORDLESS = {"look", "recall", "due", "sweep", "instead"}  # verbs that answer no word
VALUES = {
    "date": date, "datetime": datetime, "Decimal": Decimal, "time": time, "timedelta": timedelta,
    "timezone": timezone, "UUID": UUID,
}  # fmt: skip


def rows(page: str, *head: str) -> list[list[str]]:
    """The rows of the table with this head; code cells without their backticks."""
    return [[re.sub(r"^`(.*)`$", r"\1", cell) for cell in row] for row in table(page, *head)]


def described(verb: str) -> dict[str, dict[int, str]]:
    """The names that docs/protocol.md gives to what a script takes, by number."""
    (keys,) = re.findall(r"(?m)^KEYS: ([^.]+)\.", VERBS[verb])
    found = {
        "KEYS": re.findall(r"(\d+) ([a-z]+)", keys),
        "ARGV": re.findall(r"(?m)^\| ARGV (\d+) \| ([^|]+?) \|", VERBS[verb]),
    }
    return {kind: {int(number): name for number, name in names} for kind, names in found.items()}


def declared(text: str) -> dict[str, dict[int, str]]:
    """The names that a script's own head gives to what it takes."""
    head = text.split("-- Returns")[0]
    keys, _, arguments = head.partition("-- ARGV")
    found = {
        "KEYS": re.findall(r"(?<![\w.])(\d+) ([a-z]+)", keys.partition("-- KEYS")[2]),
        "ARGV": re.findall(r"(?m)^(?:--)?\s+(\d+)(?:\.\.\.)? ([a-z ]+?)(?:\s{2,}|$)", arguments),
    }
    return {kind: {int(number): name for number, name in names} for kind, names in found.items()}


def of_other_permits(text: str, pattern: str) -> list[int]:
    """From which of its KEYS on a script is told of the other permits, if it is."""
    return [int(number) for number in re.findall(pattern, text)]


def words_of(text: str) -> set[str]:
    """The words in a script's code: those that it answers, and the states that it knows."""
    code = re.sub(r"--.*", "", text)
    return set(re.findall(r"'([a-z_]+)(?: ')?'?", code)) - NOT_ANSWERED


def answers_of(text: str) -> set[str]:
    """The words in a script's code that stand where an answer does."""
    code = re.sub(r"--.*", "", text)
    return set(re.findall(r"(?:answer\(|\{|word = |return |and |or )'([a-z_]+)'", code))


# The pages


def test_client_shares_no_code_with_the_package():
    """What the client of these tests can do, the two pages have told it."""
    tree = ast.parse(Path(client.__file__).read_text())
    nodes = list(ast.walk(tree))
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert "socket" in imported
    assert not [name for name in imported if re.match(r"celery|redis|kombu|tests", name)]


@pytest.mark.parametrize("verb", SCRIPTS)
def test_every_script_is_described_with_all_that_it_takes(verb):
    """Numbers and names of KEYS and ARGV are those of the script's head, and the code uses no others.

    A verb that is gone leaves the page too.
    """
    assert VERBS.keys() == SCRIPTS.keys()
    found = described(verb)
    assert found == declared(SCRIPTS[verb])
    code = re.sub(r"--.*", "", SCRIPTS[verb])
    others = of_other_permits(VERBS[verb], r"From (\d+) on the other permits")
    assert others == of_other_permits(SCRIPTS[verb].split("-- Returns")[0], r"(\d+)\.\.\. the other")
    for kind, named in found.items():
        assert list(named) == list(range(1, len(named) + 1))
        known = {*named, *others} if kind == "KEYS" else {*named}
        assert {int(number) for number in re.findall(rf"{kind}\[(\d+)\]", code)} <= known
    assert not others or others == [len(found["KEYS"]) + 1]


def test_scripts_that_stand_behind_another_are_named():
    """Those that use what permits.lua defines: on the page, and in the client."""
    (named,) = re.findall(r"the text of (`acquire`[^.]+), which choose", PROTOCOL)
    of_permits = {verb for verb, text in SCRIPTS.items() if "permit_for(" in text}
    assert {*re.findall(r"`(\w+)`", named)} == of_permits == {*client.OF_PERMITS}


@pytest.mark.parametrize("verb", SCRIPTS)
def test_every_word_of_a_script_is_described(verb):
    """What a script may answer stands in its section; the states that it tells apart stand in the page."""
    said = set(re.findall(r"`([a-z_]+)[` ]", VERBS[verb]))
    page = set(re.findall(r"`([a-z_]+)[` ]", PROTOCOL))
    answered = {word for word in KNOWN_WORDS.get(verb, "").split() if word.islower() and verb not in WORDLESS}
    answered |= answers_of(SCRIPTS[verb])
    assert answered <= said
    assert answered or verb in WORDLESS
    assert words_of(SCRIPTS[verb]) <= page


def test_keys_beside_a_lock_have_the_names_of_the_page():
    """The suffixes of the page are those of the code."""
    lock = "setnx:{proj.settle:0}"
    made = {
        names.record_name(lock), names.mark_name(lock), *names.line_names(lock), names.take_over_name(lock),
        names.ticket_name(lock, "<task id>"), names.ticket_name(lock, "<task id>", "<call id>"),
        names.instead_name(lock, "<task id>"), names.permits_name(lock), names.done_name(lock),
        names.starts_name(lock),
        *(name.replace("#7", "#<number>") for name in names.permit_names(lock, 7)),
    }  # fmt: skip
    cells = [cells[0] for cells in rows(PROTOCOL, "key", "type", "holds", "TTL")]
    suffixes = [re.findall(r"`([:#][^`]+)`", cell) for cell in cells]
    named = {lock + suffix[0] for suffix in suffixes if suffix}
    named |= {lock + "".join(suffix) for suffix in suffixes if len(suffix) > 1}
    assert named == made


def test_lines_of_a_broker_have_the_name_of_the_page():
    """Its URL tells them apart, and who logs in there does not."""
    app = Celery("lines", broker="redis://ann:secret@host", set_as_current=False)
    app.conf.update(setnx_prefix="t")
    assert lines_name("t", "redis://host:6379/0") == lines_of(app)
    for task, in_cluster in product(("proj.settle", "proj.other", "ü"), (False, True)):
        found = names.due_names(lines_of(app), task, in_cluster=in_cluster)
        assert due_names(lines_of(app), task, in_cluster=in_cluster) == found


def test_lines_of_all_tasks_are_in_sixteen_slots_at_most():
    """One script each in a cluster, for any number of tasks; elsewhere one for all."""
    tasks = [f"proj.task{number}" for number in range(1000)]
    for in_cluster, most in (True, 16), (False, 1):
        found = [names.due_names("t:lines:0", task, in_cluster=in_cluster) for task in tasks]
        assert len({epoch for _, epoch in found}) == most
        assert all(key_slot(name.encode()) == key_slot(epoch.encode()) for name, epoch in found)


@pytest.mark.parametrize("name", ["lock.foo", "a{b}c", "{a}", "t:{x:1}", "a{}{b}", "x{y"])
def test_record_of_a_lock_that_the_user_has_named(name):
    """With a tag a suffix, without one a tag around the name; likewise its permits."""
    try:
        expected = names.record_name(name)
    except ValueError:
        assert "}" in name, "the page says which names are refused"
    else:
        assert client.record_name(name) == expected
        for number in (0, 1, 12):
            assert client.permit_names(name, number) == names.permit_names(name, number)


@pytest.mark.parametrize("page", ["recipe", "guarantees", "protocol", "keys"])
def test_every_test_that_a_page_names_is_there(page):
    """What a page calls its proof can be run."""
    text = (DOCS / f"{page}.md").read_text()
    there = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert {name for name in named if f"def {name}(" not in there} == set()
    assert all((ROOT / name).is_file() for name in re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert named or "`tests/" in text


def test_every_counterexample_is_on_the_page_of_the_recipe():
    """No flaw that is tested is missing there."""
    tested = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/test_counterexamples.py").read_text(), re.M))
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "recipe.md").read_text()))
    assert tested - named == set()


def test_lua_of_the_recipes_page_is_that_of_the_scripts():
    """Each line that the page quotes stands in a script."""
    quoted = re.findall(r"^```lua\n(.*?)^```", (DOCS / "recipe.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = {line.strip() for text in SCRIPTS.values() for line in text.splitlines()}
    assert quoted
    assert {line.strip() for block in quoted for line in block.splitlines()} <= lines


# Names


CALLS = rows(KEYS, "`key`", "call", "chosen", "canonical form", "digest")
FORMS = rows(KEYS, "value", "canonical form", "digest")
NAMES = rows(KEYS, "prefix", "scope", "canonical form", "name")


def settle(account_id: Any, reason: str = "") -> None:
    """The task of the page's examples."""


@pytest.mark.parametrize(("key", "call", "chosen", "form", "hexed"), CALLS)
def test_example_of_what_is_chosen(key, call, chosen, form, hexed):
    """Key option and call come to the digest of the page, in the package and in the client."""
    function = keys.KeyFunction(eval(key), inspect.signature(settle), "proj.settle")
    assert function.digest(eval(call), {}) == hexed
    assert client.canonical(eval(chosen)) == form.encode()
    assert digest(form.encode()) == hexed


@pytest.mark.parametrize(("value", "form", "hexed"), FORMS)
def test_example_of_a_canonical_form(value, form, hexed):
    """A value comes to the bytes and the digest of the page, in the package and in the client."""
    made = eval(value, dict(VALUES))
    assert keys.canonical(made) == form.encode() == client.canonical(made)
    assert keys.digest(made) == hexed == digest(form.encode())


@pytest.mark.parametrize(("prefix", "scope", "form", "name"), NAMES)
def test_example_of_a_name(prefix, scope, form, name):
    """Prefix, scope and digest come to the name of the page."""
    assert client.lock_name(prefix, scope, form.encode() if form else None) == name
    assert names.key_name(prefix, scope, digest(form.encode()) if form else "") == name


def test_examples_cover_every_kind_of_value():
    """Each row of the page's grammar has an example."""
    letters = {form[0] for _value, form, _digest in FORMS}
    assert letters == set("ntfidsblmSuANDTPc")
    assert len(CALLS) > 5
    assert len(NAMES) > 3


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.binary()
    | st.uuids() | st.datetimes() | st.datetimes(timezones=st.just(timezone(timedelta(minutes=-90))))
    | st.dates() | st.times() | st.timedeltas() | st.decimals(allow_nan=False)
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.text() | st.integers())
        | st.dictionaries(st.integers() | st.booleans() | st.none(), inner, max_size=1)
    ),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None, max_examples=bound(40, full=100))
@given(ANYTHING)
def test_client_and_package_agree_on_every_value(value):
    """The page's grammar is the code's."""
    assert client.canonical(value) == keys.canonical(value)
    assert digest(client.canonical(value)) == keys.digest(value)


# Locks


@pytest.fixture
def wire(server, locks) -> Iterator[Callable[[], Server]]:
    """Connections of the client to the lock database."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Server(server.port, LOCK_DB))


def assert_taken_over_past_the_lease(locks: redis.Redis, name: str, takes_over: Callable[[], bool]) -> None:
    """Fail unless a lock that has just been taken for LONG_S is taken over past its lease, and no sooner."""
    _age(locks, lock=name, by_s=LONG_S - 60)
    assert not takes_over(), "a minute before the end"
    _age(locks, lock=name, by_s=63)
    assert takes_over()


@pytest.fixture(params=["lock.foo", "t:{proj.settle:0}"])
def name(request) -> str:
    """A lock of one's own name, and one with a tag."""
    return str(request.param)


def test_full_client_and_ours_exclude_each_other(wire, locks, name):
    """Whoever comes second is refused, and reads by whom and for how long."""
    holder = FullClient(wire(), name, info={"task": "cleanup.sh", "pid": 7})
    assert holder.acquire() == "acquired"
    outcome = SetnxLock(locks, name).acquire()
    found = outcome.holder
    assert isinstance(found, Holder)
    assert (found.state, found.token, found.fence) == ("running", holder.token, holder.fence)
    assert found.info == {"task": "cleanup.sh", "pid": 7}
    assert outcome.remaining_s is not None
    assert 0 < outcome.remaining_s <= 30
    assert holder.release() == "released"
    held = SetnxLock(locks, name, info={"task": "proj.settle"}).acquire().lock
    rival = FullClient(wire(), name)
    assert rival.acquire() == "held"
    value, record = rival.seen()
    assert record is not None
    assert (record.token, record.fence, record.state) == (held.token, held.fence, "running")
    assert record.info == '{"task":"proj.settle"}'
    assert value == str(math.ceil(record.deadline_us / 1e6))
    assert rival.deadline_us == record.deadline_us
    assert rival.release() == "lost"
    assert held.release() == "released"
    assert rival.acquire() == "acquired"
    assert rival.fence > held.fence


def test_full_client_keeps_its_lock_by_renewing_and_notices_its_loss(wire, locks, name):
    """Each renewal moves the deadline, and the client's own; after `gone` the next fence is larger."""
    holder = FullClient(wire(), name)
    holder.acquire()
    until, deadline = holder.relies_until, holder.deadline_us
    assert holder.renew() == "renewed"
    assert holder.relies_until > until
    assert holder.deadline_us > deadline
    assert SetnxLock(locks, name).holder().deadline == holder.deadline_us / 1e6
    assert holder.holds()
    locks.delete(name)
    assert holder.renew() == "gone"
    assert not holder.holds()
    assert SetnxLock(locks, name).acquire().lock.fence > holder.fence


def test_script_that_is_sent_again_does_nothing_twice(wire, locks, name):
    """Each sent twice, as after a lost reply: the answers are those of the page, and a fence is the same."""
    holder = FullClient(wire(), name)
    pair, run = holder.keys, holder.server.run

    def twice(verb: str, keys: tuple[str, ...], *arguments: Any) -> list[str]:
        return [run(verb, keys, *arguments)[0] for _ in range(2)]

    assert holder.acquire("5f1c0a|0|ab") == "acquired"
    fence = holder.fence
    assert holder.acquire("5f1c0a|0|ab") == "again"
    assert holder.fence == fence
    lease, retention = holder.lease_us, client.RETENTION_MS
    assert twice("hold", pair, holder.token, lease, retention) == ["held_for_retry"] * 2
    assert [holder.release(), holder.release()] == ["held_for_retry"] * 2
    permits = names.permits_name(name)
    assert twice("free", (*pair, permits), "5f1c0a", client.REMEMBER_MS) == ["released", "lost"]
    assert holder.acquire() == "acquired"
    assert [holder.release(), holder.release()] == ["released"] * 2
    assert holder.acquire() == "acquired"
    assert twice("drop", pair, locks.get(name), locks.get(pair[1])) == ["dropped", "changed"]
    producer = Producer(holder.server, name)
    assert [producer.mark("a", "until_started") for _ in range(2)] == [("marked", "a")] * 2
    assert [producer.sent("a") for _ in range(2)] == ["extended"] * 2
    assert [producer.not_sent("a") for _ in range(2)] == ["freed", "lost"]


LINE = "t:{proj.settle:0}"
LINE_KEYS = tuple(LINE + suffix for suffix in ("", ":holder", ":line", ":calls"))


@pytest.fixture
def sweeper(wire) -> Sweeper:
    """Who can send calls of `proj.settle`."""
    return Sweeper(wire(), lines_name("t", "memory://"), ("proj.settle",))


@pytest.fixture
def park(sweeper) -> Callable[..., list[Any]]:
    """Let a task wait in line since a time: what park answers."""

    def park(task_id: str, since_us: int, copy: str = "-") -> list[Any]:
        names = (*LINE_KEYS, f"{LINE}:ticket:{task_id}", f"{LINE}:permits")
        arguments = (task_id, 0, copy, since_us, f"call of {task_id}", LONG_S * 1000, 0)
        return sweeper.server.run_of_permits("park", LINE, names, *arguments)

    return park


@pytest.fixture
def left(wire, park) -> FullClient:
    """Who has left a free lock to two who wait in line: "first" and "second"."""
    holder = FullClient(wire(), LINE, is_task_lock=True)
    assert holder.acquire() == "acquired"
    park("first", 1)
    park("second", 2)
    assert holder.release() == "released"
    return holder


def test_call_that_waits_is_in_the_keys_of_the_page(wire, locks, park):
    """Its place by the time since which it waits, the message that wakes it, and its ticket."""
    holder = FullClient(wire(), LINE, is_task_lock=True)
    holder.acquire()
    value, record = (locks.get(key) for key in holder.keys)
    assert park("second", 2)[0] == "new"
    word, _now, *found = park("first", 1)
    assert (word, *found) == ("new", value, record, "1")
    assert park("second", 3, copy="")[::4] == ["parked", "2"], "its courier changes nothing"
    assert locks.hgetall(f"{LINE}:calls") == {"first": "0|1|call of first", "second": "0|2|call of second"}
    assert locks.zrange(f"{LINE}:line", 0, -1, withscores=True) == [("first", 1), ("second", 2)]
    assert locks.get(f"{LINE}:ticket:first") == "0||0"


def test_line_beside_a_free_lock_is_passed_by_no_newcomer(wire, locks, left):
    """It is told so; and so is a publisher whose key is queued there."""
    newcomer = FullClient(wire(), LINE, is_task_lock=True)
    assert newcomer.acquire() == "line"
    locks.set(f"{LINE}:queued", "first", px=LONG_S * 1000)
    assert Producer(wire(), LINE).mark("third", "until_started") == ("stalled", "first")
    newcomer.is_task_lock = False
    assert newcomer.acquire() == "acquired", "who does not name the line does not see it"


def test_service_hands_the_lock_to_the_first_in_line(sweeper, left):
    """The answer, and the record until the first comes."""
    served = sweeper.serve(LINE, token="service")
    assert (served.word, served.value, served.heir, served.call) == ("handed", None, "first", "call of first")
    assert served.next_us == served.now_us + 10_000_000
    _value, record = left.seen()
    assert record == Record("service", served.next_us, left.fence, "handed", served.now_us, "first")
    assert sweeper.serve(LINE).next_us == served.next_us, "nobody else is handed it by then"
    assert left.acquire() == "held"


def test_call_that_is_woken_late_passes_the_one_that_the_lock_is_handed_to(sweeper, locks, park, left):
    """That one has its place again, and no second wake-up; the ticket says what began, how often in vain."""
    sweeper.serve(LINE)
    assert sweeper.serve(LINE, away="first").heir == "second"
    names = (*LINE_KEYS, f"{LINE}:queued", f"{LINE}:ticket:first", f"{LINE}:permits")
    copy = ("c0ffee", LONG_S * 1000, 0, 0, 0)
    arguments = ("first|0|ab", LONG_US, client.RETENTION_MS, "{}", "", *copy)
    assert sweeper.server.run("acquire", names, *arguments)[0] == "acquired"
    assert locks.get(f"{LINE}:ticket:first") == "0|c0ffee|1"
    assert locks.hgetall(f"{LINE}:calls") == {"second": "0+|2|call of second"}
    assert locks.zrange(f"{LINE}:line", 0, -1, withscores=True) == [("second", 2)]
    assert park("first", 1, copy="")[0] == "stale"
    served = sweeper.serve(LINE, dead="first|0|ab")
    assert (served.word, served.heir, served.call) == ("taken_over", "second", None)


def test_call_that_leaves_passes_on_what_is_handed_to_it(sweeper, locks, left):
    """By a service that says it is away."""

    def leave(task_id: str) -> list[Any]:
        names = (*LINE_KEYS, f"{LINE}:ticket:{task_id}", f"{LINE}:permits")
        return sweeper.server.run("leave", names, task_id, 0, "c0ffee", LONG_S * 1000)

    assert leave("second") == ["left"]
    sweeper.serve(LINE)
    assert leave("first") == ["handed"]
    assert sweeper.serve(LINE, away="first").word == "empty"
    assert not locks.exists(LINE, f"{LINE}:line", f"{LINE}:calls")


@pytest.mark.clock
def test_line_that_is_due_is_claimed_by_one_who_has_the_task(wire, locks, sweeper):
    """By one at a time; what has changed since is not settled."""
    name, epoch_name = due_names(sweeper.lines, "proj.settle")
    epoch = sweeper.note("proj.settle", LINE, 60_000_000)
    assert sweeper.claim() == (epoch, [])
    assert sweeper.note("proj.settle", LINE, 0) == epoch
    stranger, twin = (Sweeper(wire(), sweeper.lines, (task,)) for task in ("proj.other", "proj.settle"))
    assert stranger.claim() == (epoch, [])
    assert sweeper.claim() == (epoch, [("proj.settle", LINE)])
    assert twin.claim() == (epoch, [])
    assert locks.zscore(name, LINE) == int(sweeper.claimed)
    assert locks.get(epoch_name) == epoch
    sweeper.note("proj.settle", LINE, 0)
    assert sweeper.settle("proj.settle", LINE, 60_000_000) == "changed"
    wait_until(lambda: sweeper.claim()[1], "it is due")
    assert sweeper.settle("proj.settle", LINE, 60_000_000) == "settled"
    assert sweeper.claim() == (epoch, [])


def test_first_who_asks_runs_instead(wire):
    """Of all who wait for the result of a task that has died."""
    connection = wire()
    for task_id in ("second", "third"):
        assert connection.run("instead", (f"{LINE}:instead:first",), task_id, 60_000) == ["second"]


def test_lock_in_a_state_of_a_later_release_is_held(wire, locks, name):
    """What nobody knows is held until its deadline, and then taken over."""
    connection = wire()
    deadline = connection.time() + LONG_US
    record = f"t\n{deadline}\n7\nunheard_of\n1\n{{}}"
    locks.set(name, math.ceil(deadline / 1e6), px=LONG_US)
    locks.set(names.record_name(name), record, px=LONG_US)
    rival = FullClient(connection, name)
    assert rival.acquire() == "held"
    assert rival.deadline_us == deadline
    assert_taken_over_past_the_lease(locks, name, lambda: rival.acquire() == "taken_over")


def test_full_client_takes_over_from_ours(wire, locks, name):
    """Past its deadline the lock changes hands; the dead one is named, and touches nothing any more."""
    dead = SetnxLock(locks, name, lease=LONG_S, info={"pid": 7}).acquire().lock
    heir = FullClient(wire(), name)
    assert heir.acquire() == "held"
    assert_taken_over_past_the_lease(locks, name, lambda: heir.acquire() == "taken_over")
    assert heir.dead is not None
    assert (heir.dead.token, heir.dead.info) == (dead.token, '{"pid":7}')
    assert heir.fence > dead.fence
    assert dead.release() == "lost"
    assert heir.renew() == "renewed"


def test_full_client_is_taken_over_by_ours(wire, locks, name):
    """A client that does not renew stops relying on the lock before ours takes it over, and is told."""
    now = 0.0
    dead = FullClient(wire(), name, lease_us=LONG_US, info={"task": "cleanup.sh"}, clock=lambda: now)
    dead.acquire()
    assert dead.holds()
    now = LONG_S - 5
    _age(locks, lock=name, by_s=LONG_S - 60)
    assert not dead.holds(), "a hundredth of its lease before the end"
    assert not SetnxLock(locks, name).acquire().acquired, "a minute before the end"
    _age(locks, lock=name, by_s=60)
    outcome = SetnxLock(locks, name).acquire()
    assert outcome.taken_over_from is not None
    assert outcome.taken_over_from.token == dead.token
    assert dead.renew() == "lost"
    assert dead.release() == "lost"
    outcome.lock.renew()


def test_reply_that_is_later_than_the_lease_is_not_acquired(wire, locks, name):
    """A client that stood still gives the lock back."""
    clock = iter([0.0, 100.0])
    late = FullClient(wire(), name, clock=lambda: next(clock))
    assert late.acquire() == "held"
    assert SetnxLock(locks, name).acquire().acquired


def test_full_clients_and_ours_share_the_permits_of_a_lock(wire, locks, name):
    """As many as the limit hold it, each under a permit of its own, and renew and release that one."""
    first, third, fourth = (FullClient(wire(), name, limit=3) for _ in range(3))
    assert first.acquire() == "acquired"
    second = SetnxLock(locks, name, limit=3).acquire().lock
    assert third.acquire() == "acquired"
    assert [first.permit, second.permit, third.permit] == [0, 1, 2]
    assert fourth.acquire() == "held"
    assert fourth.deadline_us == first.deadline_us, "the first that ends"
    assert locks.get(names.permits_name(name)) == "3 3"
    assert third.renew() == "renewed"
    assert [holder.token for holder in SetnxLock(locks, name, limit=3).holders()] == [
        first.token, second.token, third.token,
    ]  # fmt: skip
    assert second.release() == "released"
    assert fourth.acquire() == "acquired"
    assert fourth.permit == 1
    assert fourth.fence > second.fence
    assert FullClient(wire(), name, limit=2).acquire() == "held", "it asks again, by the names of all three"
    assert [first.release(), third.release(), fourth.release()] == ["released"] * 3
    assert SetnxLock(locks, name, limit=3).holders() == []


MINUTE_US = 60_000_000


def test_full_clients_and_ours_share_the_pace_of_a_lock(wire, locks, name):
    """All starts count, whoever's they are; a client that was refused knows when the next may be."""
    first, third = (FullClient(wire(), name, rate=(2, MINUTE_US)) for _ in range(2))
    assert [first.acquire(), first.release()] == ["acquired", "released"]
    second = SetnxLock(locks, name, rate=(2, 60)).acquire()
    assert second.lock.release() == "released"
    assert third.acquire() == "paced"
    assert third.deadline_us == first.fence + MINUTE_US
    outcome = SetnxLock(locks, name, rate=(2, 60)).acquire()
    assert outcome.paced
    assert 0 < outcome.remaining_s <= 60
    fences = [first.fence, second.lock.fence]
    assert locks.zrange(names.starts_name(name), 0, -1) == [f"{fence}#0#{fence}" for fence in fences]
    assert locks.get(names.permits_name(name)) == "1 1:2/60000000"
    assert locks.pttl(names.starts_name(name)) > 60_000
    _age(locks, lock=name, by_s=60)
    assert third.acquire() == "acquired"


def test_start_that_is_taken_back_counts_no_more(wire, locks, name):
    """It is as if it had never been."""
    paced = [FullClient(wire(), name, rate=(1, MINUTE_US)) for _ in range(2)]
    assert paced[0].acquire() == "acquired"
    assert paced[0].take_start_back() == 1
    assert paced[0].release() == "released"
    assert paced[1].acquire() == "acquired"
    assert paced[1].release() == "released"
    assert paced[0].acquire() == "paced"


def test_service_hands_out_no_more_than_the_starts_that_are_left(sweeper, wire, park):
    """By the terms of whoever asked last; and says when one more may start."""
    holders = [FullClient(wire(), LINE, is_task_lock=True, limit=3, rate=(3, MINUTE_US)) for _ in range(2)]
    assert [holder.acquire() for holder in holders] == ["acquired"] * 2
    for since, task_id in enumerate(("first", "second", "third"), 1):
        park(task_id, since)
    served = sweeper.serve(LINE)
    assert (served.word, served.heir) == ("handed", "first")
    assert [holder.release() for holder in holders] == ["released"] * 2
    served = sweeper.serve(LINE)
    assert (served.word, served.heir) == ("empty", None)
    assert served.now_us < served.next_us <= holders[0].fence + MINUTE_US


@pytest.mark.clock
def test_sweep_says_when_the_next_line_is_due_that_is_paced(sweeper):
    """And of no other task, whose lines may wait for the next sweep."""
    sweeper.tasks, sweeper.paced = ("proj.other", "proj.settle"), (2,)
    sweeper.note("proj.other", "t:{proj.other:0}", 1_900_000)
    assert sweeper.claim()[1] == []
    assert sweeper.next_us is None
    sweeper.note("proj.settle", LINE, 1_900_000)
    assert sweeper.claim()[1] in ([], [("proj.other", "t:{proj.other:0}")])
    assert sweeper.next_us is not None
    assert 0 < sweeper.next_us <= 1_900_000


def test_text_in_place_of_a_record_is_refused(wire, locks, name):
    """The one error of a script's own."""
    locks.set(names.record_name(name), "hello", px=60_000)
    with pytest.raises(ServerError, match=r"^FOREIGNRECORD"):
        FullClient(wire(), name).acquire()


def test_classic_client_and_ours_exclude_each_other(wire, locks, foreign_keys, name):
    """Four commands suffice, in both directions."""
    foreign_keys.add(name)
    classic = ClassicClient(wire(), name)
    assert classic.acquire()
    outcome = SetnxLock(locks, name).acquire()
    assert outcome.holder.state == "foreign"
    assert outcome.holder.deadline == classic.until + 1
    assert FullClient(wire(), name).acquire() == "held"
    classic.release()
    held = SetnxLock(locks, name).acquire().lock
    assert not classic.acquire()
    assert held.release() == "released"
    assert classic.acquire()


def test_classic_client_may_give_its_lock_a_ttl(wire, locks, name):
    """SET NX EX instead of SETNX: held, and gone by itself."""
    connection = wire()
    second = connection.time() // 1_000_000 + 11
    assert connection.ask("SET", name, second, "NX", "EX", 11) == b"OK"
    assert not SetnxLock(locks, name).acquire().acquired
    locks.pexpire(name, 1)
    assert SetnxLock(locks, name).acquire(wait=10).acquired


def test_classic_client_takes_over_from_a_full_one_and_back(wire, locks, foreign_keys, name):
    """A dead holder of either kind is no reason to wait for ever."""
    foreign_keys.add(name)
    dead = FullClient(wire(), name, lease_us=LONG_US)
    dead.acquire()
    heir = ClassicClient(wire(), name, timeout_s=LONG_S)
    assert not heir.acquire()
    assert_taken_over_past_the_lease(locks, name, heir.acquire)
    assert dead.renew() == "lost"
    back = FullClient(wire(), name)
    assert back.acquire() == "held"
    assert back.deadline_us == (heir.until + 1) * 1_000_000
    assert_taken_over_past_the_lease(locks, name, lambda: back.acquire() == "taken_over")
    assert locks.pttl(name) > 0


# Tasks


def lock_of_work(name: str) -> str:
    """The lock of a call of `tests.workerapp.work`, from the page alone: its key is the argument `name`."""
    return client.lock_name("t", "tests.workerapp.work", client.canonical([name]))


def test_full_client_excludes_a_task(tasks, wire, locks, server):
    """A name that is computed from arguments is that of the task's lock: a call is skipped, or waits.

    The client wakes nobody: it says that the line is due, and a worker hands the lock on.
    """
    lock = lock_of_work("n")
    holder = FullClient(wire(), lock, is_task_lock=True, info={"task": "cleanup.sh"})
    assert holder.acquire() == "acquired"
    skipped = tasks.work.delay("n").get(timeout=60)
    assert is_skipped(skipped)
    assert skipped["holder"]["task"] == "cleanup.sh"
    waits = tasks.work.apply_async(("n",), singleton={"on_conflict": "wait"})
    is_parked = re.compile(r"0\|\d+\|{").match
    wait_until(lambda: is_parked(locks.hget(f"{lock}:calls", waits.id) or ""), "the call waits in line")
    assert holder.release() == "released"
    lines = Sweeper(wire(), lines_name("t", f"redis://localhost:{server.port}/0"), ())
    lines.note("tests.workerapp.work", lock, 0)
    assert waits.get(timeout=20) == "n", "sooner than the line is due by itself"


def test_full_client_is_excluded_by_a_task(tasks, wire, holding):
    """While a body runs, and renews its lease, the client is refused, and reads who it is."""
    rival = FullClient(wire(), lock_of_work("gated-n"), is_task_lock=True)
    with holding(tasks.work, "gated-n") as result:
        assert rival.acquire() == "held"
        first = rival.deadline_us
        wait_until(lambda: rival.acquire() == "held" and rival.deadline_us > first, "renewed by the worker")
        _value, record = rival.seen()
        assert isinstance(record, Record)
        assert record.token.startswith(f"{result.id}|0|")
        assert '"task":"tests.workerapp.work"' in record.info
    assert rival.acquire() == "acquired"


def test_classic_client_excludes_a_task(tasks, wire, holding, foreign_keys):
    """Without any script."""
    foreign_keys.add(lock_of_work("gated-n"))
    classic = ClassicClient(wire(), lock_of_work("gated-n"))
    assert classic.acquire()
    assert tasks.work.delay("gated-n").get(timeout=60)["holder"]["state"] == "foreign"
    classic.release()
    with holding(tasks.work, "gated-n"):
        assert not classic.acquire()


def test_mark_of_a_foreign_producer_ends_when_its_call_starts(tasks, wire, locks, server):
    """A call published with the page's header runs under the named lock, and its mark is gone."""
    key, task_id = lock_of_work("n"), "5f1c0a"
    producer = Producer(wire(), key)
    assert producer.mark(task_id, "until_started") == ("marked", task_id)
    assert producer.mark("another", "until_started") == ("queued", task_id)
    stranger = Celery(broker=server.url(0), backend=server.url(0), set_as_current=False)
    name = "tests.workerapp.work"
    headers = {"singleton": producer.header(name, task_id)}
    result = stranger.send_task(name, ("other",), task_id=task_id, headers=headers)
    assert result.get(timeout=60) == "other"
    assert producer.sent(task_id) == "lost", "it has started"
    assert producer.mark("another", "until_started") == ("marked", "another")
    assert producer.not_sent("another") == "freed"
    assert not locks.exists(f"{key}:queued")


@pytest.fixture
def published(server) -> Callable[..., Any]:
    """Makes a task whose calls nobody runs."""
    app = Celery("protocol", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), task_default_queue="protocol-nowhere")

    def made(**options: Any) -> Any:
        def queued(n: int) -> None: ...

        guarded = {"base": SingletonTask, "singleton": {"key": "n", "dedupe": "until_done", **options}}
        return app.task(name="proj.queued", shared=False, **guarded)(queued)

    return made


KEY_OF_7 = client.lock_name("setnx", "proj.queued", client.canonical([7]))


def test_marks_of_ours_and_of_a_foreign_producer_make_duplicates_of_each_others_calls(published, wire):
    """What one language has queued the other does not queue again."""
    queued = published()
    assert queued.lock_key(7) == KEY_OF_7
    producer = Producer(wire(), KEY_OF_7)
    assert producer.mark("5f1c0a", "until_done") == ("marked", "5f1c0a")
    assert producer.sent("5f1c0a") == "extended"
    theirs = queued.delay(7)
    assert (theirs.deduplicated, theirs.id) == (True, "5f1c0a")
    ours = queued.delay(8)
    producer = Producer(wire(), queued.lock_key(8))
    assert producer.mark("5f1c0a", "until_done") == ("queued", ours.id)
    assert producer.not_sent("5f1c0a") == "lost"


def test_success_of_a_foreign_client_makes_duplicates_of_our_calls_and_back(published, wire, locks):
    """For as long as it says; `done` keeps a foreign producer from sending, until it is taken back."""
    daily = published(dedupe_for=3600)
    holder, producer = FullClient(wire(), KEY_OF_7, is_task_lock=True), Producer(wire(), KEY_OF_7)
    assert holder.acquire("5f1c0a|0|ab") == "acquired"
    assert holder.release(done_for_ms=3_600_000) == "released"
    assert 0 < locks.pttl(f"{KEY_OF_7}:done") <= 3_600_000
    theirs = daily.delay(7)
    assert (theirs.deduplicated, theirs.id) == (True, "5f1c0a")
    assert producer.mark("another", "dedupe_for") == ("done", "5f1c0a")
    assert producer.mark("another", "until_done") == ("marked", "another"), "it does not ask for that"
    assert producer.not_sent("another") == "freed"
    assert producer.failed_after_all("5f1c0a|0|ac") == "lost", "another delivery, which has had no lock"
    assert producer.failed_after_all("5f1c0a|0|ab") == "freed"
    assert not daily.delay(7).deduplicated
