"""What the doctor finds: each misconfiguration is really made, on a server of the test's own."""

import ast
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

import celery_setnx
from celery_setnx import LockForbidden, SetnxLock, SingletonTask
from celery_setnx.beat import _recall
from celery_setnx.connection import client_for
from celery_setnx.doctor import holes as known_holes
from celery_setnx.doctor import server as doctor
from celery_setnx.doctor.acl import acl_lines
from celery_setnx.doctor.app import Finding
from celery_setnx.doctor.server import clock_of, examine
from celery_setnx.doctor.trial import trial_name
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.marks import Mark, free_all, mark_all
from celery_setnx.lock.newest import Debounce, Reservation, Wanted, replace_all, reserve_all
from celery_setnx.lock.record import Terms
from celery_setnx.testing import pass_time
from examples.embedded import EmbeddedServer
from tests.conftest import LOCK_DB
from tests.docs.pages import DOCS, table
from tests.harness import age, lock_keys, wait_until
from tests.test_connection import NEEDED
from tests.topologies.servers import Sentinels

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

LUA = Path(celery_setnx.__file__).parent / "lock/lua"
LEVELS = ["ok", "note", "warning", "error"]


WORK = {"task": "examined.work", "task_id": "t-1", "host": "elsewhere", "pid": 7, "worker": "w@elsewhere"}
"""What the record of a holder on another host says."""


def app_on(url: str, **conf: Any) -> Celery:
    """A healthy app whose locks are there."""
    app = Celery("examined", set_as_current=False, broker="redis://localhost:1/0")
    app.conf.update(setnx_url=url, **conf)

    @app.task(base=SingletonTask, name="examined.work", shared=False)
    def work(number: int) -> None: ...

    return app


def findings(app: Celery, subject: str) -> list[Finding]:
    return [found for found in examine(app) if found.subject == subject]


def finding(app: Celery, subject: str, level: str, **words: str) -> Finding:
    """The one finding of this subject, at this level, with these patterns in its `what`, `why` or `do`."""
    (found,) = findings(app, subject)
    assert found.level == level
    for name, pattern in words.items():
        assert re.search(pattern, getattr(found, name))
    return found


def levels(app: Celery) -> dict[str, str]:
    """The worst level of each subject."""
    worst: dict[str, str] = {}
    for found in examine(app):
        worst[found.subject] = max(worst.get(found.subject, "ok"), found.level, key=LEVELS.index)
    return worst


@pytest.fixture
def app(server, locks) -> Celery:
    """An app whose locks are in the test's clean database."""
    return app_on(server.url(LOCK_DB))


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of the module's own."""
    with EmbeddedServer(**{"repl-diskless-sync-delay": "0"}) as server:
        yield server


@pytest.fixture
def configured(own) -> Iterator[Any]:
    """Configures that server until the test has ended; the app whose locks are there."""
    before: dict[str, str] = {}
    with redis.Redis.from_url(own.url(), decode_responses=True) as client:

        def configured(**options: Any) -> Celery:
            for name, value in options.items():
                before.update({**client.config_get(name), **before})
                client.config_set(name, value)
            return app_on(own.url())

        yield configured
        for name, value in before.items():
            client.config_set(name, value)


@pytest.fixture
def replica(own) -> Iterator[EmbeddedServer]:
    """A replica of that server, in step with it."""
    with EmbeddedServer() as replica, redis.Redis.from_url(replica.url()) as client:
        client.replicaof("127.0.0.1", own.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "replica in step")
        yield replica


def test_sound_server_has_no_findings_but_fine_ones(configured, monkeypatch):
    """A persistent server without eviction: every subject is looked at, and nothing is wrong."""
    monkeypatch.setattr(known_holes, "HOLES", ())  # the tests' own server may be of any version
    found = levels(configured(appendonly="yes"))
    assert set(found.values()) == {"ok"}
    assert set(found) == {
        *("connection", "server", "eviction", "persistence", "replication", "clock"),
        *("permissions", "locks", "tasks"),
    }


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p@ss:w/rd@host:1/0", "redis://:**@host:1/0"),
        ("sentinel://u:one@a:1;sentinel://u:two@b:2", "sentinel://u:**@a:1;sentinel://u:**@b:2"),
        ("redis+cluster://:one@a;:two@b", "redis+cluster://:**@a;:**@b"),
        ("rediss://host:6379/0?password=open&ssl_cert_reqs=none", "rediss://host:6379/0?password=**&ssl_cert_reqs=none"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)  # fmt: skip
def test_url_is_shown_without_its_passwords(url, shown):
    """Whatever the URL looks like."""
    assert doctor.masked(url) == shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:{}@127.0.0.1:1/0", "{} (setnx_url) does not answer"),
        ("redis+cluster://:{}@127.0.0.1:1", "{} (setnx_url) does not answer"),
        ("memcached://host", ""),
        ("redis://host:port/0", ""),
    ],
)
def test_server_that_cannot_be_asked_is_an_error_and_the_tasks_are_checked_all_the_same(url, said):
    """Unreachable, or no URL of a Redis: no traceback, no password, and what needs no server follows."""
    found = list(examine(app_on(url.format("s3cret"))))
    assert [(f.level, f.subject) for f in found] == [("error", "connection"), ("ok", "tasks")]
    assert said.format(url.format("**")) in found[0].what


def test_broker_on_the_same_database_is_told(server, locks):
    """No warning: it is the default; but FLUSHDB would free every lock."""
    app = app_on(server.url(LOCK_DB))
    assert not findings(app, "broker")
    app.conf.broker_url = server.url(LOCK_DB)
    finding(app, "broker", "note")


OCTOBER, FEBRUARY, MAY = "CVE-2025-49844", "CVE-2025-67733", "CVE-2026-23631"


HOLES = {  # in which versions they are open, by how a server names its product; () if none is
    "redis_version": {
        (OCTOBER,): "0 6.2.19",  # nothing before 7.0 ever had the hole of May
        (OCTOBER, MAY): "7.0.15 7.2.10 7.4.5 8.0.3 8.2.1",  # no release of the branch 7.0 closes them
        (MAY,): "7.2.11 7.4.8 8.0.6 8.2.5 8.4.2 8.6.2",
        (): "6.2.20 7.2.14 7.4.9 8.2.6 8.2.6-v1 8.4.3 8.6.3 10.0.0",
    },
    "valkey_version": {
        (OCTOBER, FEBRUARY, MAY): "7.2.10 8.1.3",
        (FEBRUARY, MAY): "7.2.11 8.0.6 9.0.1",
        (MAY,): "7.2.12",
        (): "7.2.13 8.0.9 8.1.7 9.0.4 9.1.2",
    },
}


@pytest.mark.parametrize(
    ("product", "version", "holes"),
    [
        (product, version, list(holes))
        for product, known in HOLES.items()
        for holes, versions in known.items()
        for version in versions.split()
    ],
)
def test_server_whose_lua_has_known_holes_is_a_warning(product, version, holes):
    """By the release that closes them in its branch."""
    found = list(doctor._holes("The lock server", {"redis_version": "7.2.4", product: version}))
    assert {one.level for one in found} <= {"warning"}
    assert [re.search(r"CVE-\d+-\d+", one.what)[0] for one in found] == holes  # type: ignore[index]
    assert all(".." not in " ".join(one.as_dict().values()) for one in found)


@pytest.mark.parametrize("prefix", ["setnx", "sh*p[a]", "shop-eu"])
def test_acl_lines_allow_what_is_needed_and_no_other_key(limited, locks, prefix):
    """The first one what tasks and beats need; the other what operators do, too."""
    app = app_on(limited(), setnx_prefix=prefix)
    tasks, comment, operators = acl_lines(app)
    assert comment.startswith("#")
    locks.execute_command(*tasks.split())
    client, own = client_for(app), f"{prefix}:{{beat}}"
    assert _recall(client, entries=f"{own}:entries", seen=[("a", 1)])
    assert levels(app)["permissions"] == "ok"
    assert findings(app, "commands")
    with pytest.raises(redis.ResponseError, match=r"(?i)permission|no access"):
        client.get("shopa:{elsewhere}")
    locks.execute_command(*operators.split())
    assert levels(app)["permissions"] == "ok"
    assert not findings(app, "commands")
    assert [found.level for found in findings(app, "server")] == ["ok"]


def test_acl_lines_name_a_user_where_the_url_has_none(server):
    """With a password to be replaced; another's would be added to a user who has one."""
    line, *_more = acl_lines(app_on(server.url(0)))
    assert line.startswith("ACL SETUSER celery_setnx on >PASSWORD ~setnx:* +eval ")
    assert "+select" not in line
    line, *_more = acl_lines(app_on("redis+cluster://bob:pw@localhost", setnx_prefix="shop"))
    assert line.startswith("ACL SETUSER bob ~shop:* ~setnx:brokers +eval ")
    assert line.endswith(" +cluster|slots +command")


class Provider(redis.CredentialProvider):
    """One that logs in as Eve."""

    def get_credentials(self) -> tuple[str, str]:
        return "eve", "pw"


class Nameless(redis.CredentialProvider):
    """One that has a password alone."""

    def get_credentials(self) -> tuple[str]:
        return ("pw",)


UNNAMED = "celery_setnx on >PASSWORD"
OF_SENTINELS = {"username": "bob", "master_name": "m", "sentinel_kwargs": {"username": "of_sentinels"}}


@pytest.mark.parametrize(
    ("settings", "user"),
    [
        ({"setnx_url": "redis://h", "setnx_transport_options": {"username": "bob", "password": "pw"}}, "bob"),
        ({"setnx_url": "redis://ann:pw@h", "setnx_transport_options": {"username": "bob"}}, "ann"),
        ({"setnx_url": "sentinel://h", "setnx_transport_options": OF_SENTINELS}, "bob"),
        ({"setnx_url": "redis://h", "setnx_transport_options": {"credential_provider": Provider}}, "eve"),
        ({"setnx_url": "redis://h", "setnx_transport_options": {"credential_provider": Nameless}}, UNNAMED),
        ({"result_backend": "redis://h", "redis_username": "bob", "redis_password": "pw"}, "bob"),
        ({"result_backend": "redis://h", "result_backend_transport_options": {"username": "bob"}}, "bob"),
        ({"broker_url": "redis://h", "broker_transport_options": {"username": "bob"}}, "bob"),
        (
            {"broker_url": "h", "broker_transport": "redis", "broker_user": "bob", "broker_password": "pw"},
            "bob",
        ),
    ],
)
def test_acl_lines_name_the_user_who_logs_in(settings, user):
    """Whichever setting names it, as for the client that the locks have."""
    app = Celery("named", set_as_current=False)
    app.conf.update(settings)
    line, _comment, more = acl_lines(app)
    assert line.startswith(f"ACL SETUSER {user} ~")
    assert more.startswith(f"ACL SETUSER {user.split()[0]} +")


def test_acl_lines_name_every_command_of_the_scripts():
    """Those of the test kit's own are for tests."""
    line, *_more = acl_lines(app_on("redis://localhost"))
    texts = [path.read_text() for path in LUA.glob("*.lua") if path.name != "age.lua"]
    called = {name.lower() for text in texts for name in re.findall(r"redis\.p?call\('(\w+)'", text)}
    assert called - {rule[1:] for rule in line.split()} == set()


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"redis_version": "6.0.16"}, "error"),
        ({"redis_version": "6.2.0"}, "ok"),
        ({"redis_version": "7.2.4", "valkey_version": "7.0.1"}, "error"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "ok"),
    ],
)
def test_server_that_is_too_old_is_an_error(facts, level):
    """Redis before 6.2, Valkey before 7.2."""
    assert doctor._version("The lock server", facts).level == level


def test_memory_that_is_nearly_full_is_a_warning(configured, own):
    """A full server grants no lock."""
    with redis.Redis.from_url(own.url()) as client:
        used = client.info("memory")["used_memory"]
    assert not findings(configured(maxmemory=int(used * 1.5)), "memory")
    finding(configured(maxmemory=int(used * 1.04)), "memory", "warning")


def test_server_with_hardly_room_for_more_clients_is_a_warning(configured, own):
    """Processes that connect later are refused, and cannot lock."""
    assert not findings(configured(), "clients")
    with ExitStack() as stack:
        for _ in range(180):  # more than nine tenths with its own; earlier tests may have left a few
            client = redis.Redis.from_url(own.url(), single_connection_client=True)
            stack.enter_context(client).ping()
        words = {"what": "of at most 200 connections", "do": "Raise maxclients"}
        finding(configured(maxclients=200), "clients", "warning", **words)


@pytest.mark.parametrize(
    ("options", "subject", "level", "said"),
    [
        # A server evicts where it has a maxmemory; without one it cannot happen now.
        ({"maxmemory": "0"}, "eviction", "warning", "maxmemory-policy volatile-lru"),
        ({"maxmemory": "50mb"}, "eviction", "error", "maxmemory-policy volatile-lru"),
        # Locks that a restart forgets are free while their holders run.
        ({"appendonly": "no", "save": ""}, "persistence", "warning", "forgets all locks"),
        ({"appendonly": "no", "save": "60 1"}, "persistence", "warning", "since its last snapshot"),
        ({"appendonly": "yes", "appendfsync": "no"}, "persistence", "warning", "appendfsync no"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "persistence", "ok", "appendfsync everysec"),
        ({"appendonly": "yes", "appendfsync": "always"}, "persistence", "ok", "appendfsync always"),
    ],
)
def test_server_that_forgets_locks_is_told(configured, options, subject, level, said):
    """What it drops when its memory is full, and what a restart forgets."""
    found = finding(configured(**{"maxmemory-policy": "volatile-lru", **options}), subject, level)
    assert said in found.what + found.why


def test_replica_is_an_error(own, replica):
    """Locks are acquired on the master; and the trial says what the replica says."""
    app = app_on(replica.url())
    finding(app, "replication", "error", what=rf"a replica of 127\.0\.0\.1:{own.port}")
    finding(app, "permissions", "error", what="(?i)READONLY")


def test_master_whose_writes_wait_for_no_replica_is_a_warning(configured, replica):
    """A failover can lose the last locks; min-replicas-to-write makes it less likely."""
    finding(configured(), "replication", "warning", what="min-replicas-to-write 0")
    finding(configured(**{"min-replicas-to-write": 1}), "replication", "note")


@pytest.mark.parametrize(
    ("apart_s", "level"), [(0.0, "ok"), (0.9, "ok"), (-5.0, "warning"), (5.0, "warning")]
)
def test_clock_that_is_far_off_is_a_warning(locks, apart_s, level):
    """More than a second, whichever is ahead; what a round trip could explain is no difference."""
    round_trip_s, ahead_s = clock_of(locks, lambda: time.time() - apart_s)
    assert abs(ahead_s - apart_s) <= round_trip_s / 2 + 0.001
    found = doctor._clock("The lock server", round_trip_s, ahead_s)
    assert found.level == level
    assert ("ahead of" if ahead_s > 0 else "behind") in found.what
    assert doctor._clock("The lock server", 4.0, 2.5).level == "ok"


ANSWERS = r"answers in \d+\.\d\d ms: redis://limited:\*\*@127\.0\.0\.1:.*\(setnx_url\)"
FORBIDDEN = r"'{0}'|\([a-z ]*{0}|{0} is forbidden|'eval"


@pytest.mark.parametrize(
    ("rules", "subject", "level", "said"),
    [
        # Which server, from which setting, without its password, and how fast.
        ([], "connection", "ok", ANSWERS),
        # The server's own words.
        ([">other", "<pw"], "connection", "error", "invalid username-password pair"),
        # Each command was really tried, those of a take-over and of a line included.
        (["-getset"], "permissions", "error", FORBIDDEN.format("getset")),
        (["-zrevrange"], "permissions", "error", FORBIDDEN.format("zrevrange")),
        (["-zrange"], "permissions", "error", FORBIDDEN.format("zrange")),
        (["-pexpireat"], "permissions", "error", FORBIDDEN.format("pexpireat")),
        (["-evalsha", "-eval"], "permissions", "error", FORBIDDEN.format("evalsha")),
        # A user who may not touch our prefix cannot lock.
        (["resetkeys", "~other:*"], "permissions", "error", "permissions to access"),
        # Who may not touch further permits cannot lock either, though the app's limits may all be one.
        (["resetkeys", "~*}", "~*}:*", "~*:lines:*"], "permissions", "error", "permissions to access"),
        # What would not help is not asked for.
        ([">other", "<pw"], "connection", "error", r"refuses us: [^.]*\.$"),
        # As on a hosted server: no crash, and what INFO tells is told.
        (["-config"], "persistence", "warning", ""),
        (["-config"], "replication", "ok", ""),
    ],
)
def test_what_a_user_may_not_do_is_named(limited, rules, subject, level, said):
    """Whatever is forbidden, the rest is examined."""
    found = finding(app_on(limited("~*", "+@all", *rules)), subject, level, what=f"(?i){said}")
    assert "pw" not in found.what


def test_least_user_can_lock_and_what_is_not_known_is_said(limited):
    """INFO, CONFIG and SCAN are not among what a task needs."""
    found = levels(app_on(limited("~*", "+select", *[f"+{name}" for name in NEEDED])))
    warned = {"server": "warning", "commands": "warning"}
    assert found == {**dict.fromkeys(["connection", "clock", "permissions", "tasks"], "ok"), **warned}


def test_clock_that_is_not_known_has_no_finding(limited):
    """Where TIME is forbidden; the trial says why."""
    found = levels(app_on(limited("~*", "+@all", "-time")))
    assert (found["connection"], found["permissions"], "clock" in found) == ("ok", "error", False)


def test_expired_locks_are_a_warning_that_names_the_dead_holder(app, locks):
    """A holder has died; the oldest is shown."""
    SetnxLock(locks, "setnx:{examined.work:aa}", lease=30, info=WORK).acquire()
    pass_time(31, app)
    SetnxLock(locks, "setnx:{examined.work:bb}", lease=60).acquire()
    held, expired = findings(app, "locks")
    assert (held.level, held.what) == ("ok", "Locks held: 1; calls that wait in line: 0.")
    assert expired.level == "warning"
    assert "Locks that expired unreleased: 1;" in expired.what
    assert "setnx:{examined.work:aa} of examined.work[t-1] on w@elsewhere" in expired.what


def test_run_that_may_hang_is_a_note_that_says_how_to_stop_it(app, locks):
    """An hour is long; the lead of a beat is held for as long as the beat lives."""
    for key, task_id, older_s in (("aa", "t-1", 0), ("bb", "t-2", 60)):
        name, info = f"setnx:{{examined.work:{key}}}", {**WORK, "task_id": task_id}
        SetnxLock(locks, name, lease=9000, info=info).acquire()
        age(locks, name, older_s)
    SetnxLock(locks, "setnx:{celery.beat:examined}", lease=9000, info=WORK).acquire()
    assert [found.level for found in findings(app, "locks")] == ["ok"]
    pass_time(3600, app)
    _held, old = findings(app, "locks")
    assert old.level == "note"
    assert "or more: 2; the oldest is setnx:{examined.work:bb} of examined.work[t-2]" in old.what
    assert "celery -A APP control terminate KILL t-2" in old.do


def test_calls_that_wait_for_their_pace_are_counted(app, locks):
    """Nothing is wrong with them; they are told from those that wait for a holder."""
    for key, rate in (("aa", (1, 60.0)), ("bb", None)):
        held = SetnxLock(locks, f"setnx:{{examined.work:{key}}}", rate=rate).acquire().lock
        place = LineEntry(
            f"setnx:{{examined.work:{key}}}", "t-1", 0, remember=60, terms=Terms(1, *(rate or ()))
        )
        park(locks, place, since=1.0, call="")
        if rate:
            held.release()
    (told,) = findings(app, "locks")
    assert told.what == "Locks held: 1; calls that wait in line: 2, 1 of them for their pace."


def test_permits_are_looked_at_one_by_one(app, locks, foreign_keys):
    """Each is held, or has expired, or never ends; what is named can be released by that name."""
    key = "setnx:{examined.work:aa}"
    SetnxLock(locks, key, limit=4).acquire()
    pass_time(31, app)
    locks.set(f"{key}#3", "mine")
    foreign_keys.add(f"{key}#3")
    for lease in (30, 60):  # the first takes over what has expired
        SetnxLock(locks, key, limit=4, lease=lease).acquire()
    pass_time(31, app)
    held, expired = findings(app, "locks")
    assert held.what == "Locks held: 1; calls that wait in line: 0."
    assert f"Locks that expired unreleased: 1; the first was {key}#0 of " in expired.what
    foreign = finding(app, "foreign", "error", what="value 'mine'")
    assert shlex.split(foreign.do.partition(": ")[2]) == ["celery", "setnx", "release", "--force", f"{key}#3"]
    locks.persist(f"{key}#1:holder")
    foreign_keys.add(f"{key}#1:holder")
    finding(app, "ttl", "warning", what=f"{key}#1:holder")


def test_marks_are_counted_and_how_to_free_them_is_said(app, locks):
    """What a purge leaves behind cannot be told from what is queued."""
    mark_all(
        locks, [Mark(f"setnx:{{a:{n}}}", f"t-{n}") for n in range(3)], dedupe="until_started", lease=9000
    )
    found = finding(app, "marks", "note", do="release --queued --task")
    assert re.match(r"Calls marked as queued: 3; the last mark lapses in 1(50|49) min\.", found.what)


def test_newest_calls_that_are_queued_are_counted_as_marks(app, locks):
    """As long as they have not started."""
    wanted = [Wanted(f"setnx:{{a:{n}}}", f"t-{n}", "") for n in range(3)]
    reserved = reserve_all(locks, wanted, debounce=Debounce(), lease=3600, remember=9000)
    sent = [one for one in reserved if isinstance(one, Reservation)]
    assert replace_all(locks, sent, 9000) == [None] * 3
    assert free_all(locks, [Mark(sent[0].key, "t-0", sent[0].generation)]) is None
    found = finding(app, "marks", "note", do="release --queued --task")
    assert re.match(r"Calls marked as queued: 2; the last mark lapses in 1(50|49) min\.", found.what)


@pytest.mark.parametrize("name", ["setnx:{examined.work}", "setnx:{a'; touch /tmp/owned; '}"])
def test_lock_that_never_ends_is_an_error(app, locks, foreign_keys, name):
    """A foreign value that is no time; but SETNX by hand, as the recipe has it, says when it ends.

    The advice can be pasted into a shell: whoever names a key there runs nothing here.
    """
    foreign_keys.add(name)
    locks.set(name, int(time.time()) + 600)
    assert not findings(app, "foreign")
    assert not findings(app, "ttl")
    locks.set(name, "mine")
    advice = finding(app, "foreign", "error", what="value 'mine'").do
    assert shlex.split(advice.partition(": ")[2]) == ["celery", "setnx", "release", "--force", name]


def test_key_without_a_ttl_is_a_warning(app, locks, foreign_keys):
    """Ours all have one."""
    SetnxLock(locks, "setnx:{examined.work}").acquire()
    assert not findings(app, "ttl")
    locks.persist("setnx:{examined.work}:holder")
    foreign_keys.add("setnx:{examined.work}:holder")
    finding(app, "ttl", "warning", what=r"setnx:{examined\.work}:holder")


def test_other_prefixes_are_not_looked_at(server, locks, foreign_keys):
    """A prefix is no pattern."""
    locks.set("ab:{work}:holder", "theirs")
    foreign_keys.add("ab:{work}:holder")
    assert not findings(app_on(server.url(LOCK_DB), setnx_prefix="a*"), "ttl")
    assert findings(app_on(server.url(LOCK_DB), setnx_prefix="ab"), "ttl")


def test_findings_come_as_they_are_known_and_nothing_is_left(app, locks):
    """The server's own words, before any lock is tried; no key of its own stays."""
    found = examine(app)
    assert next(found).subject == "connection"
    assert {one.subject for one in found} > {"permissions", "locks"}
    assert lock_keys(locks) == set()


@pytest.mark.parametrize("command", ["getset", "zadd", "hset", "pexpireat"])
def test_failed_trial_is_cleaned_up_and_not_reported(limited, locks, command):
    """It is refused in the middle: what it had written is deleted, and counts as nobody's lock or mark."""
    app = app_on(limited("~*", "+@all", f"-{command}"))
    finding(app, "permissions", "error", what=f"(?i){command}")
    (held,) = findings(app, "locks")
    assert held.what == "Locks held: 0; calls that wait in line: 0."
    assert not findings(app, "marks")
    assert lock_keys(locks) == set()


def test_trial_of_another_is_not_reported(app, locks):
    """A worker that starts just now, or was killed when it tried."""
    name = trial_name("setnx")
    SetnxLock(locks, name, lease=30).acquire()
    pass_time(31, app)
    mark_all(locks, [Mark(name, "check")], dedupe="until_started", lease=60)
    (held,) = findings(app, "locks")
    assert held.what == "Locks held: 0; calls that wait in line: 0."
    assert not findings(app, "marks")


@pytest.mark.parametrize(
    ("url", "do"),
    [
        ("redis://nobody:wrong@127.0.0.1:{}/1", "Check the user and the password"),
        ("redis://127.0.0.1:{}/199", "the server must have the database"),
        ("redis+cluster://127.0.0.1:{}", "and only for a cluster"),
    ],
)
def test_server_that_does_not_let_us_in_has_the_remedy_that_fits(server, url, do):
    """The URL is wrong, and the server is not down."""
    found = finding(app_on(url.format(server.port)), "connection", "error", what="refuses us", do=do)
    assert "Grant" not in found.do


def test_finding_that_has_something_to_do_is_more_than_ok(configured, replica, locks):
    """Fine with nothing to do is ok; fine with an advice is a note."""
    app = configured(**{"appendonly": "yes", "min-replicas-to-write": 1})
    app.conf.broker_url = app.conf.setnx_url
    app.tasks["examined.work"].acks_late = True
    for found in examine(app):
        assert (found.level == "ok") == (not found.do), found
    assert {found.subject for found in examine(app) if found.level == "note"} == {
        *("broker", "replication", "visibility")
    }


def test_node_of_a_cluster_is_no_single_server(cluster):
    """A lock whose slot is another node's waits for whoever mends the URL, and is not lost as an error."""
    client = client_for(app_on(f"redis://127.0.0.1:{cluster.nodes[0].port}/0"))
    refused = []
    for number in range(20):  # some of them are elsewhere
        try:
            SetnxLock(client, f"lock.{{{number}}}", lease=1).acquire()
        except LockForbidden as error:
            refused.append(error)
    assert refused
    assert {error.remedy for error in refused} == {refused[0].remedy}
    assert "redis+cluster:// for a cluster" in refused[0].remedy


def test_host_that_does_not_resolve_is_said_to_be():
    """It is an outage, as the name may be a server's that is about to start; and somebody may have to act."""
    words = {"what": "does not answer", "do": "name does not resolve"}
    finding(app_on("redis://no-such-host.invalid/0"), "connection", "error", **words)


def test_cluster_is_examined_node_by_node(cluster):
    """Every primary's facts, one trial, and the cluster's state; a node alone refuses the others' locks."""
    app = app_on(cluster.url())
    assert [found.level for found in findings(app, "cluster")] == ["ok"] * 3
    names = [re.match(r"Node (\S+) answers", found.what) for found in findings(app, "connection")]
    assert len({match[1] for match in names if match}) == 3
    finding(app, "permissions", "ok")
    finding(app, "locks", "ok")
    alone = app_on(f"redis://127.0.0.1:{cluster.nodes[0].port}")
    finding(alone, "cluster", "error")


def test_each_node_of_a_cluster_has_an_acl_of_its_own(cluster):
    """What one of them forbids is found, whichever it is."""
    for node in cluster.nodes:
        rules = ["-getset"] if node is cluster.nodes[1] else []
        node.ask("ACL", "SETUSER", "partly", "reset", "on", ">pw", "~*", "+@all", *rules)
    app = app_on(cluster.url().replace("://", "://partly:pw@"))
    finding(app, "permissions", "error", what="(?i)getset")


def test_dead_node_of_a_cluster_does_not_hide_the_others(cluster):
    """Its locks are unavailable, theirs are not; without its majority the cluster is down, and says so."""
    app = app_on(cluster.url())
    assert len(findings(app, "server")) == 3
    try:
        cluster.nodes[2].kill()
        found = findings(app, "connection")
        cluster.nodes[1].kill()
        is_down = wait_until(
            lambda: [f for f in findings(app_on(cluster.url()), "cluster") if f.level == "error"],
            "a cluster without its majority is down",
        )
    finally:
        for node in cluster.nodes[1:]:
            node.start()
        cluster.wait_until_whole()
    dead = f"Node 127.0.0.1:{cluster.nodes[2].port} of {cluster.url()} (setnx_url) does not answer"
    assert any(one.level == "error" and dead in one.what for one in found)
    assert sum(one.level == "ok" for one in found) == 2
    assert "cluster_state fail" in is_down[0].what


def test_sentinels_master_is_named(tmp_path):
    """By the address that the Sentinels tell."""
    with Sentinels(tmp_path) as sentinels:
        sentinels.start()
        app = app_on(sentinels.url(), setnx_transport_options=sentinels.transport_options)
        named = r"the Sentinels name 127\.0\.0\.1:\d+ as master of main"
        found = finding(app, "connection", "ok", what=named)
    assert sentinels.PASSWORD not in found.what


def sources() -> dict[str, list[ast.Call]]:
    """The calls in the code that make findings, by subject."""
    found: dict[str, list[ast.Call]] = {}
    for module in ("server", "app", "broker"):
        tree = ast.parse(Path(doctor.__file__).with_name(f"{module}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ok", "note", "warn", "fail"):
                found.setdefault(ast.literal_eval(node.args[0]), []).append(node)
    return found


def test_docs_tables_have_every_subject():
    """docs/cli.md is complete, and names nothing else."""
    rows = table((DOCS / "cli.md").read_text(), "subject", "what is looked at")
    assert {subject.strip("`") for subject, _looked_at in rows} == sources().keys()


def test_every_finding_that_is_not_ok_says_more_than_what_was_found():
    """Why it matters, or what to do: no page repeats that."""
    calls = [call for calls in sources().values() for call in calls if getattr(call.func, "id", "") != "ok"]
    assert [ast.unparse(call) for call in calls if len(call.args) + len(call.keywords) < 3] == []
