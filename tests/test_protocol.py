"""docs/protocol.md: true of the code, and enough for a program that shares none of it."""

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_setnx import Holder, LockLost, LockRefused, SetnxLock, SingletonTask, keys
from celery_setnx.beat import _recall
from celery_setnx.lock import names
from celery_setnx.lock.line import LineEntry, note_lines, successor_of
from celery_setnx.lock.live import NewTerm, change_key_terms, change_task_terms
from celery_setnx.lock.newest import AT_ONCE, Wanted, reserve_all
from celery_setnx.lock.receipt import write_receipt
from celery_setnx.lock.takeover import TakeOver, note_take_over
from celery_setnx.testing import _age
from tests.bounds import bound
from tests.docs.pages import DOCS, blocks, sections, table
from tests.harness import wait_until
from tests.protocol import client
from tests.protocol.client import ClassicClient, Producer, Server, beside, digest

LOCK_DB = 1
LONG_S = 600  # nothing expires because the machine is slow
MINUTE_MS = 60_000
PROTOCOL = (DOCS / "protocol.md").read_text()
VALUES = {
    "date": date, "datetime": datetime, "Decimal": Decimal, "time": time, "timedelta": timedelta,
    "timezone": timezone, "UUID": UUID,
}  # fmt: skip


def rows(page: str, *head: str) -> list[list[str]]:
    """The rows of the table with this head; code cells without their backticks."""
    return [[re.sub(r"^`(.*)`$", r"\1", cell) for cell in row] for row in table(page, *head)]


# The pages


def test_client_shares_no_code_with_the_package():
    """All that the client of these tests can do, the page has told it."""
    tree = ast.parse(Path(client.__file__).read_text())
    nodes = list(ast.walk(tree))
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert "socket" in imported
    assert not [name for name in imported if re.match(r"celery|redis|kombu|tests", name)]


# Names


CALLS = rows(PROTOCOL, "`key`", "call", "chosen value")
FORMS = rows(PROTOCOL, "value", "canonical form")


def settle(account_id: Any, reason: str = "") -> None:
    """The task of the page's examples."""


@pytest.mark.parametrize(("key", "call", "chosen"), CALLS)
def test_example_of_a_chosen_value(key, call, chosen):
    """The package's digest of a call is the client's digest of the value that the page shows."""
    function = keys.KeyFunction(eval(key), inspect.signature(settle), "proj.settle")
    assert function.digest(eval(call), {}) == digest(client.canonical(eval(chosen)))


@pytest.mark.parametrize(("value", "form"), FORMS)
def test_example_of_a_canonical_form(value, form):
    """A value has the bytes of the page, and the same digest in the package and in the client."""
    made = eval(value, dict(VALUES))
    assert keys.canonical(made) == form.encode() == client.canonical(made)
    assert keys.digest(made) == digest(form.encode())


@pytest.mark.parametrize("form", ["l1:i7;", None])
def test_name_of_a_lock_is_the_same_in_package_and_client(form):
    """With a digest, and without one for a lock of the whole task."""
    hexed = digest(form.encode()) if form else ""
    name = names.key_name("staging", "account", hexed)
    assert client.lock_name("staging", "account", form.encode() if form else None) == name
    assert name == (f"staging:{{account:{hexed}}}" if form else "staging:{account}")


def test_examples_cover_every_kind_of_value():
    """Each row of the page's grammar has an example."""
    letters = {form[0] for _value, form in FORMS}
    assert letters == set("ntfidsblmSuANDTPc")
    assert len(CALLS) == 5


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


# Keys


@pytest.mark.parametrize("name", ["lock.foo", "a{b}c", "{a}", "t:{x:1}", "a{}{b}", "x{y", "a}b", ""])
def test_other_keys_of_a_lock_share_its_slot(name):
    """With a tag a suffix, without one a tag around the name; and some names are refused."""
    if name in ("a{}{b}", "a}b", ""):
        with pytest.raises(ValueError, match="a lock cannot be named"):
            names.record_name(name)
        return
    assert names.record_name(name) == beside(name, ":holder")
    assert names.permit_names(name, 0) == (name, beside(name, ":holder"))
    assert names.permit_names(name, 12) == (beside(name, "#12"), beside(name, "#12:holder"))
    assert names.mark_name(name) == beside(name, ":queued")
    assert key_slot(beside(name, "#12:holder").encode()) == key_slot(name.encode())


def test_lines_of_all_tasks_are_in_sixteen_slots_at_most():
    """One script each in a cluster, for any number of tasks; elsewhere one for all."""
    tasks = [f"proj.task{number}" for number in range(1000)]
    for in_cluster, most in (True, 16), (False, 1):
        found = [names.due_names("t:lines:0", task, in_cluster=in_cluster) for task in tasks]
        assert len({epoch for _, epoch in found}) == most
        assert all(key_slot(name.encode()) == key_slot(epoch.encode()) for name, epoch in found)


KINDS = {"sorted set": "zset", "hash": "hash"}
LOCK = r"[^:{}]+:\{[^{}]+\}"


def pattern_of(shown: str) -> str:
    """The keys of a name with `<words>` in it."""
    parts = re.split(r"(<[^>]+>)", shown)
    parts[::2] = map(re.escape, parts[::2])
    return "".join(LOCK if part == "<lock>" else re.sub("^<.*>$", "[^:{}]*", part) for part in parts)


def patterns() -> dict[str, str]:
    """The patterns of the keys in the page's table, with their types as Redis names them."""
    return {
        pattern_of(shown): KINDS.get(holds.partition(":")[0], "string")
        for cell, holds, _ttl in table(PROTOCOL, "key", "holds", "TTL")
        for shown in re.findall(r"`([^`]+)`", cell)
    }


def test_every_key_is_in_the_table_and_the_table_has_no_other(stage, parked, locks):
    """One call runs, two wait, one is queued; a lock has permits, a pace, a success, and was taken over."""
    first, waiting = stage.held(), stage.parked()
    foreign = stage.tasks.app.send_task(stage.task.name, (stage.key,))
    stage.journal.reached("postrun", stage.journal.reached("waiting", foreign))
    stage.tasks.pending.apply_async([f"{stage.key}-queued"], queue="parked")
    name = "t:{proj.sync:0}"
    lock = SetnxLock(locks, name, line=True, limit=3, rate=(9, 60))
    lock.acquire(token="5f1c0a|0|ab").lock.release(done_for=60)
    assert [lock.acquire().acquired for _ in range(2)] == [True, True]
    successor_of(locks, LineEntry(name, "joiner", 0, 60), of="dead")
    note_take_over(locks, name, TakeOver(1.0, "heir", {}), 60)
    write_receipt(locks, names.receipt_name("t", "proj.sync", "5f1c0a", "", 0), 60)
    note_lines(locks, "t", "memory://")
    reserve_all(locks, [Wanted(name, "5f1c0a", "")], debounce=AT_ONCE, lease=60, remember=60)
    change_key_terms(locks, name, NewTerm("pause", 60.0))
    change_task_terms(locks, "t", "proj.sync", NewTerm("pause", 60.0))
    _recall(locks, entries="t:{celery.beat:proj}:entries", seen=[("nightly", 0)])

    found = {key: locks.type(key) for key in locks.scan_iter()}
    told = patterns()
    unknown = {
        key: kind
        for key, kind in found.items()
        if kind != "none" and not any(re.fullmatch(one, key) and told[one] == kind for one in told)
    }
    assert unknown == {}
    assert [one for one in told if not any(re.fullmatch(one, key) for key in found)] == []
    stage.open()
    stage.have_run([first, waiting, foreign])


def test_lock_of_one_permit_without_a_rate_has_two_keys(locks, name):
    """The lock and its record."""
    SetnxLock(locks, name).acquire()
    assert {key for key in locks.scan_iter() if name in key} == {name, beside(name, ":holder")}


# The value and the record


@pytest.fixture(params=["lock.foo", "t:{proj.settle:0}"])
def name(request) -> str:
    """A lock of one's own name, and one with a tag."""
    return str(request.param)


@pytest.fixture
def second(locks) -> int:
    """A Unix second that lies well ahead."""
    return int(locks.time()[0]) + LONG_S


def overwrite(locks: redis.Redis, name: str, value: object) -> None:
    """Write the value of a lock, as another program does."""
    locks.set(name, str(value), ex=LONG_S)


def assert_taken_over_past_the_lease(locks: redis.Redis, name: str, takes_over: Callable[[], bool]) -> None:
    """Fail unless a lock that has just been taken for LONG_S is taken over past its lease, and no sooner."""
    _age(locks, lock=name, by_s=LONG_S - 60)
    assert not takes_over(), "a minute before the end"
    _age(locks, lock=name, by_s=63)
    assert takes_over()


def test_value_is_the_second_of_the_deadline_rounded_up(locks, name):
    """Also after a renewal."""
    held = SetnxLock(locks, name).acquire().lock
    for _ in range(2):
        deadline_us = int(locks.get(beside(name, ":holder")).split("\n")[1])
        assert locks.get(name) == str(math.ceil(deadline_us / 1e6))
        held.renew()


def test_number_beside_an_unexpired_record_is_ours(locks, name):
    """Whichever it is: the record decides, and the release says that the value was overwritten."""
    held = SetnxLock(locks, name, lease=LONG_S).acquire().lock
    overwrite(locks, name, 12)
    assert SetnxLock(locks, name).acquire().holder.token == held.token
    assert held.release() == "repaired"


def test_number_that_equals_a_deadline_that_has_passed_is_ours(locks, name):
    """Who takes it over is told whose it was."""
    dead = SetnxLock(locks, name, lease=LONG_S).acquire().lock
    _age(locks, lock=name, by_s=LONG_S + 1)
    assert SetnxLock(locks, name).acquire().taken_over_from.token == dead.token


def test_other_number_beside_a_deadline_that_has_passed_is_foreign(locks, name, second):
    """The record is an old holder's."""
    SetnxLock(locks, name, lease=LONG_S).acquire()
    _age(locks, lock=name, by_s=LONG_S + 1)
    overwrite(locks, name, second)
    assert SetnxLock(locks, name).acquire().holder.state == "foreign"


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_foreign_number_holds_the_lock_for_one_second_longer(locks, name, second, fraction):
    """Its fraction counts."""
    overwrite(locks, name, second + fraction if fraction else second)
    assert SetnxLock(locks, name).acquire().holder.deadline == second + fraction + 1
    assert_taken_over_past_the_lease(locks, name, lambda: SetnxLock(locks, name).acquire().acquired)


def test_number_counts_as_the_largest_at_most(locks, name, second):
    """Milliseconds hold the lock until the year 5138."""
    overwrite(locks, name, second * 1000)
    assert SetnxLock(locks, name).acquire().holder.deadline == 100_000_000_001


@pytest.mark.parametrize("value", ["maintenance", "", "-5", "1e9", ".5", "0x1", "1 "])
def test_value_that_is_no_number_never_ends_and_stays(locks, name, value):
    """It is foreign."""
    overwrite(locks, name, value)
    holder = SetnxLock(locks, name).acquire().holder
    assert (holder.state, holder.deadline) == ("foreign", None)
    assert locks.get(name) == value


def test_key_of_another_type_never_ends_and_stays(locks, name):
    """A list."""
    locks.rpush(name, "5")
    locks.expire(name, LONG_S)
    holder = SetnxLock(locks, name).acquire().holder
    assert (holder.state, holder.deadline) == ("foreign", None)
    assert locks.lrange(name, 0, -1) == ["5"]


def test_record_has_the_six_lines_of_the_page(locks, name):
    """Token, deadline, fence, state, since, and what the holder says of itself."""
    held = SetnxLock(locks, name, lease=LONG_S, info={"task": "proj.settle"}).acquire().lock
    said = [re.match(r"\w+", content)[0] for _line, content in table(PROTOCOL, "line", "content")][:6]
    assert said == ["token", "deadline", "fence", "state", "since", "holder"]
    token, deadline, fence, state, since, info = locks.get(beside(name, ":holder")).split("\n")
    assert (token, int(fence), state) == (held.token, held.fence, "running")
    assert int(deadline) - int(since) == LONG_S * 1_000_000
    assert json.loads(info) == {"task": "proj.settle"}


def test_record_of_a_released_lock_stays_for_a_minute(locks, name):
    """Its deadline is 0, and the lock's own key is gone."""
    SetnxLock(locks, name).acquire().lock.release()
    assert locks.get(beside(name, ":holder")).split("\n")[1:4:2] == ["0", "released"]
    assert MINUTE_MS - 10_000 < locks.pttl(beside(name, ":holder")) <= MINUTE_MS
    assert not locks.exists(name)


def test_states_of_the_page_are_those_of_the_code():
    """Those of a holder whose record is ours, and those of a lock that was released."""
    (text,) = re.findall(r"state: (.*?)since:", Holder.__doc__ or "", re.DOTALL)
    cells = " ".join(row[0] for row in table(PROTOCOL, "state", "the lock is"))
    held = set(re.findall(r"`(\w+)`", text)) - {"foreign", "paced", "paused"}
    assert set(re.findall(r"`(\w+)`", cells)) == held | {"released", "repaired", "gone"}


def test_lock_in_a_state_of_a_later_release_is_held(locks, name, second):
    """Until its deadline, and then it is taken over."""
    overwrite(locks, name, second)
    record = f"t\n{second * 1_000_000}\n7\nunheard_of\n1\n{{}}"
    overwrite(locks, beside(name, ":holder"), record)
    assert SetnxLock(locks, name).acquire().holder.deadline == second
    assert_taken_over_past_the_lease(locks, name, lambda: SetnxLock(locks, name).acquire().acquired)


def test_other_text_in_place_of_a_record_is_refused(locks, name):
    """With an error that names the key."""
    overwrite(locks, beside(name, ":holder"), "hello")
    with pytest.raises(LockRefused, match=re.escape(beside(name, ":holder"))):
        SetnxLock(locks, name).acquire()


def test_terms_and_starts_are_texts_of_the_page(locks, name):
    """How many permits may have keys, and the terms; each start by its time."""
    lock = SetnxLock(locks, name, limit=5, rate=(50, 2))
    fences = [lock.acquire().lock.fence for _ in range(2)]
    assert locks.get(beside(name, ":permits")) == "5 5:50/2000000"
    starts = [f"{fence}#{number}#{fence}" for number, fence in enumerate(fences)]
    assert locks.zrange(beside(name, ":starts"), 0, -1, withscores=True) == list(zip(starts, fences))
    assert locks.exists(name, beside(name, "#1"), beside(name, "#1:holder")) == 3
    plain = SetnxLock(locks, "plain", limit=5)
    plain.acquire()
    assert locks.get("{plain}:permits") == "5 5"


# A classic client


@pytest.fixture
def wire(server, locks) -> Iterator[Callable[[], Server]]:
    """Connections of the client to the lock database."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Server(server.port, LOCK_DB))


def test_classic_client_and_ours_exclude_each_other(wire, locks, foreign_keys, name):
    """Four commands suffice, in both directions."""
    foreign_keys.add(name)
    classic = ClassicClient(wire(), name)
    assert classic.acquire()
    outcome = SetnxLock(locks, name).acquire()
    assert outcome.holder.state == "foreign"
    assert outcome.holder.deadline == classic.until + 1
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


def test_classic_client_takes_over_from_ours_which_is_told(wire, locks, foreign_keys, name):
    """Past the deadline; a holder that only stood still finds its lock lost, and touches nothing any more."""
    foreign_keys.add(name)
    frozen = SetnxLock(locks, name, lease=LONG_S).acquire().lock
    heir = ClassicClient(wire(), name, timeout_s=LONG_S)
    assert not heir.acquire()
    assert_taken_over_past_the_lease(locks, name, heir.acquire)
    with pytest.raises(LockLost):
        frozen.renew()
    assert frozen.release() == "lost"
    assert locks.get(name) == str(heir.until)


def test_ours_takes_over_from_a_classic_client_that_has_died(wire, locks, name):
    """One second past the value, by GETSET; from then on the key has a TTL."""
    dead = ClassicClient(wire(), name, timeout_s=LONG_S)
    assert dead.acquire()
    assert_taken_over_past_the_lease(locks, name, lambda: SetnxLock(locks, name).acquire().acquired)
    assert locks.pttl(name) > 0


def test_rate_neither_counts_nor_delays_a_classic_client(wire, locks, foreign_keys, name):
    """It starts where ours may not, and leaves no start."""
    foreign_keys.add(name)
    lock = SetnxLock(locks, name, rate=(1, LONG_S))
    lock.acquire().lock.release()
    assert lock.acquire().paced
    assert ClassicClient(wire(), name).acquire()
    assert locks.zcard(beside(name, ":starts")) == 1


def lock_of_work(name: str) -> str:
    """The lock of a call of `tests.workerapp.work`, from the page alone: its key is the argument `name`."""
    return client.lock_name("t", "tests.workerapp.work", client.canonical([name]))


def test_classic_client_excludes_a_task(tasks, wire, holding, foreign_keys):
    """And is excluded while a body runs."""
    foreign_keys.add(lock_of_work("gated-n"))
    classic = ClassicClient(wire(), lock_of_work("gated-n"))
    assert classic.acquire()
    assert tasks.work.delay("gated-n").get(timeout=60)["holder"]["state"] == "foreign"
    classic.release()
    with holding(tasks.work, "gated-n"):
        assert not classic.acquire()


def test_record_of_a_task_is_like_that_of_the_page(tasks, locks, holding):
    """The forms of its lines, and what a task says of itself."""
    (example,) = (
        each.text for each in blocks(sections(PROTOCOL, 3)["The record"]) if each.language == "text"
    )
    with holding(tasks.work, "gated-n") as result:
        record = locks.get(f"{lock_of_work('gated-n')}:holder")
    form = r"[0-9a-f-]{36}\|0\|[0-9a-f]{12}\n\d{16}\n\d{16}\nrunning\n\d{16}\n(\{.*\})\n?"
    shown, real = (re.fullmatch(form, text) for text in (example, record))
    assert record.startswith(f"{result.id}|0|")
    assert json.loads(shown[1]).keys() == json.loads(real[1]).keys()


# Messages


def test_mark_of_a_foreign_producer_ends_when_its_call_starts(tasks, wire, locks, server):
    """A call published with the page's header runs under the named lock, and its mark is gone."""
    key, task_id = lock_of_work("n"), "5f1c0a"
    producer = Producer(wire(), key)
    assert producer.mark(task_id)
    assert not producer.mark("another"), "a call is queued already"
    stranger = Celery(broker=server.url(0), backend=server.url(0), set_as_current=False)
    name = "tests.workerapp.work"
    headers = {"singleton": producer.header(name, task_id)}
    result = stranger.send_task(name, ("n",), task_id=task_id, headers=headers)
    assert result.get(timeout=60) == "n"
    assert producer.mark("another")
    producer.not_sent(task_id)
    assert locks.get(f"{key}:queued") == "another", "it is not its own"
    producer.not_sent("another")
    assert not locks.exists(f"{key}:queued")


def test_call_of_a_foreign_producer_may_wait_in_line(stage, wire, locks, server):
    """Its key is that of its arguments."""
    task = stage.tasks.work
    first, key, task_id = stage.held(), task.lock_key(stage.key), f"chosen-{stage.key}"
    producer = Producer(wire(), key)
    assert producer.mark(task_id)
    stranger = Celery(broker=server.url(0), backend=server.url(0), set_as_current=False)
    headers = {"singleton": producer.header(task.name, task_id)}
    result = stranger.send_task(task.name, (stage.key,), task_id=task_id, headers=headers)
    wait_until(lambda: locks.zscore(f"{key}:line", task_id), "it stands in line")
    stage.open()
    stage.have_run([first, result])


def test_marks_of_ours_and_of_a_foreign_producer_make_duplicates_of_each_others_calls(server, wire, locks):
    """A call that one language has queued the other does not queue again."""
    app = Celery("protocol", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), task_default_queue="protocol-nowhere")

    @app.task(
        name="proj.queued", shared=False, base=SingletonTask, singleton={"key": "n", "dedupe": "until_done"}
    )
    def queued(n: int) -> None: ...

    theirs = client.lock_name("setnx", "proj.queued", client.canonical([7]))
    assert queued.lock_key(7) == theirs
    assert Producer(wire(), theirs).mark("5f1c0a")
    duplicate = queued.delay(7)
    assert (duplicate.deduplicated, duplicate.id) == (True, "5f1c0a")
    queued.delay(8)
    assert not Producer(wire(), queued.lock_key(8)).mark("5f1c0a")
