"""Every error at every command: never acquired when in doubt, a documented exception, nothing left behind."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_setnx.connection import LateCluster
from celery_setnx.exceptions import LockForbidden, LockLost, LockRefused, LockUnavailable, SetnxError
from celery_setnx.lock import verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.outcome import Outcome
from examples.embedded import EmbeddedServer
from tests.conftest import LOCK_DB, emptied
from tests.harness import age, wait_until
from tests.proxy import Proxy
from tests.versions.conditions import needs_pipelines_sent_again, needs_slots_asked_first

NAME, RECORD = "lock.errors", "{lock.errors}:holder"
ACQUIRING, HOLDING = ("acquire", "take_over"), ("renew", "release", "rest")
VERBS = (*ACQUIRING, *HOLDING)
LOST_REPLIES = ("cut_before", "cut_after", "drop_reply")
NEEDED_BY = {
    "acquire": {"eval", "evalsha", "time", "mget", "exists", "set"},
    "take_over": {"eval", "evalsha", "time", "mget", "set", "getset", "pexpireat"},
    "renew": {"eval", "evalsha", "time", "mget", "pexpireat", "set"},
    "release": {"eval", "evalsha", "time", "mget", "del", "set"},
    "rest": {"eval", "evalsha", "time", "mget", "pexpireat", "set"},
}
COMMANDS = sorted(set.union(*NEEDED_BY.values()))
SCRIPT_OF = dict.fromkeys(ACQUIRING, verbs.ACQUIRE) | {
    "renew": verbs.RENEW,
    "release": verbs.RELEASE,
    "rest": verbs.RELEASE,
}
each_verb = pytest.mark.parametrize("verb", VERBS)
acquiring = pytest.mark.parametrize("verb", ACQUIRING)
holding = pytest.mark.parametrize("verb", HOLDING)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Iterator[EmbeddedServer]:
    """A server whose configuration the tests of this module may break."""
    directory = tmp_path_factory.mktemp("dumps") / "gone"
    directory.mkdir()
    with EmbeddedServer(dir=str(directory)) as server:
        yield server


@pytest.fixture
def admin(own, foreign_keys) -> Iterator[redis.Redis]:
    """An unharmed client of that server, empty at first; afterwards every key of ours must have a TTL."""
    with redis.Redis.from_url(own.url(LOCK_DB), decode_responses=True) as client:
        yield from emptied(client, foreign_keys)


@pytest.fixture
def client(own, admin) -> Iterator[redis.Redis]:
    """A client of that server as an app has it."""
    with redis.Redis.from_url(own.url(LOCK_DB)) as client:
        yield client


@pytest.fixture
def proxy(own) -> Iterator[Proxy]:
    """A way to that server whose connections fail on demand."""
    with Proxy(own.port) as proxy:
        yield proxy


class Attempt:
    """One verb, prepared while all is well, to be tried when it is not."""

    def __init__(self, verb: str, client: redis.Redis, **options: Any) -> None:
        self.verb = verb
        self.held: HeldLock | None = None
        self.setnx = SetnxLock(client, NAME, info={"task_id": "t"}, **options)
        client.script_load(SCRIPT_OF[verb].text)  # else the first reply is that it is not known
        if verb == "take_over":
            client.set(NAME, "1", px=60_000)
            client.set(RECORD, "dead\n1000000\n5\nrunning\n900000\n{}", px=60_000)
        elif verb != "acquire":
            self.held = self.setnx.acquire().lock

    def __call__(self) -> Any:
        if self.held is None:
            return self.setnx.acquire(token="own")
        if self.verb == "renew":
            return self.held.renew()
        return self.held.release(at_least_for=20 if self.verb == "rest" else 0)

    def succeeds(self) -> bool:
        """Whether the result is what the verb answers when all is well."""
        return self.is_success(self())

    def is_success(self, result: Any) -> bool:
        if self.held is None:
            return isinstance(result, Outcome) and result.acquired
        return bool(result == {"renew": None, "release": "released", "rest": "resting"}[self.verb])

    def is_lost(self) -> bool:
        """Whether the verb of a holder says that its lock is another's."""
        if self.verb != "renew":
            return bool(self() == "lost")
        with pytest.raises(LockLost):
            self()
        return True


@contextmanager
def _with(client: redis.Redis, **settings: object) -> Iterator[None]:
    """A server with these settings, for the length of a block."""
    names = [name.replace("_", "-") for name in settings]
    before = client.config_get(*names) if names else {}
    for name, value in zip(names, settings.values()):
        client.config_set(name, value)
    try:
        yield
    finally:
        for name in names:
            client.config_set(name, before[name])


@contextmanager
def _replica(client: redis.Redis, **settings: str) -> Iterator[None]:
    with _with(client, **settings):
        client.replicaof("127.0.0.1", 1)
        try:
            yield
        finally:
            client.replicaof("NO", "ONE")


@contextmanager
def _failed_dump(client: redis.Redis) -> Iterator[None]:
    def has_failed() -> bool:
        return bool(client.info("persistence")["rdb_last_bgsave_status"] == "err")

    with _with(client, save="3600 1", stop_writes_on_bgsave_error="yes"):
        if not has_failed():
            Path(client.config_get("dir")["dir"]).rmdir()
            client.bgsave()
            wait_until(has_failed, "a failed dump")
        yield


@contextmanager
def _busy(client: redis.Redis) -> Iterator[None]:
    def run_for_ever() -> None:
        port = client.get_connection_kwargs()["port"]
        with redis.Redis(port=port, socket_timeout=60) as other, pytest.raises(redis.ResponseError):
            other.eval("while true do end", 0)

    def is_busy() -> bool:
        try:
            client.ping()
        except redis.ResponseError:
            return True
        return False

    client.config_set("busy-reply-threshold", 10)
    script = threading.Thread(target=run_for_ever)
    script.start()
    wait_until(is_busy, "a busy server")
    try:
        yield
    finally:
        client.script_kill()
        script.join()


def _permit(client: redis.Redis, *rules: str) -> None:
    """Let the user `limited` do everything but what the rules take away; open connections obey at once."""
    commands = ["+@all", *rules]
    client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=commands)


@pytest.fixture
def limited(own, admin) -> Iterator[redis.Redis]:
    """A client as that user, who may do everything yet."""
    _permit(admin)
    with redis.Redis.from_url(own.url(LOCK_DB), username="limited", password="any") as client:
        yield client


TROUBLES = {
    "READONLY": _replica,
    "MASTERDOWN": lambda client: _replica(client, replica_serve_stale_data="no"),
    "NOREPLICAS": lambda client: _with(client, min_replicas_to_write=1),
    "MISCONF": _failed_dump,
    "BUSY": _busy,
}
NOT_READY = {
    "LOADING": "Redis is loading the dataset in memory",
    "TRYAGAIN": "Multiple keys request during rehashing of slot",
    "CLUSTERDOWN": "The cluster is down",
    "ERR": "max number of clients reached",
}
"""What a healthy server never says: the proxy says it for it."""


@each_verb
@pytest.mark.parametrize("trouble", [*TROUBLES, *NOT_READY])
def test_verb_on_an_ailing_server_is_unavailable_and_works_once_it_recovers(admin, proxy, far, trouble, verb):
    """An error that passes by itself is LockUnavailable, changes nothing, and is over when it is over."""
    attempt = Attempt(verb, far())
    before = admin.mget(NAME, RECORD)
    if trouble in TROUBLES:
        ailing = TROUBLES[trouble](admin)
    else:
        reply = f"-{trouble} {NOT_READY[trouble]}\r\n".encode()
        ailing = proxy.fault("answer", containing=b"EVALSHA", reply=reply)
    with ailing, pytest.raises(LockUnavailable):
        attempt()
    assert admin.mget(NAME, RECORD) == before
    assert attempt.succeeds()


@needs_slots_asked_first
@pytest.mark.parametrize(
    ("said", "error", "do"),
    [
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", LockUnavailable, ""),
        ("LOADING Redis is loading the dataset in memory", LockUnavailable, ""),
        ("MASTERDOWN Link with MASTER is down", LockUnavailable, ""),
        ("NOPERM User limited has no permissions to run the 'cluster|slots' command", LockForbidden, "Grant"),
        ("ERR This instance has cluster support disabled", LockForbidden, "and only for a cluster"),
        ("ERR unknown command 'CLUSTER', with args beginning with: 'SLOTS'", LockRefused, "too old"),
    ],
)
def test_server_that_names_no_slots_is_taken_at_its_word(admin, proxy, said, error, do):
    """redis-py says of each of them that cluster mode is not enabled."""
    late = LateCluster(partial(redis.RedisCluster, host="127.0.0.1", port=proxy.port))
    answering = proxy.fault("answer", containing=b"CLUSTER", reply=f"-{said}\r\n".encode())
    with answering, pytest.raises(error) as caught:
        SetnxLock(late, NAME).acquire()
    told, remedy = str(caught.value), caught.value.remedy
    assert (type(caught.value), bool(remedy)) == (error, bool(do))
    assert said.partition(" ")[2] in told
    assert "Cluster mode" not in told
    assert do in remedy


@each_verb
def test_full_server_gives_no_lock_and_serves_whoever_holds_one(client, admin, verb):
    """Without memory nobody acquires; a held lock can be renewed and given back all the same."""
    attempt = Attempt(verb, client)
    full = _with(admin, maxmemory_policy="noeviction", maxmemory=1)
    with full, pytest.raises(LockUnavailable) if verb in ACQUIRING else nullcontext():
        assert attempt.succeeds()
    assert verb in HOLDING or attempt.succeeds()


@each_verb
@pytest.mark.parametrize("command", COMMANDS)
def test_verb_without_a_permission_that_it_needs_is_refused(admin, limited, command, verb):
    """A missing permission is LockRefused and never a lock; what a verb does not need is not asked for."""
    attempt = Attempt(verb, limited)
    _permit(admin, f"-{command}")
    if command == "eval":
        admin.script_flush()  # now the text must be sent
    if command not in NEEDED_BY[verb]:
        assert attempt.succeeds()
        return
    with pytest.raises(LockRefused) as caught:
        attempt()
    assert command in str(caught.value).lower()
    _permit(admin)
    if attempt.held is not None:
        # Once the lock is deleted it is free, whatever was to be written after.
        result = attempt()
        assert result == "gone" if (verb, command) == ("release", "set") else attempt.is_success(result)


@pytest.mark.parametrize("name", ["lock.BUSY", "lock.MUSHROOM", "lock.LOADING"])
def test_refusal_of_a_lock_named_like_an_error_is_still_a_refusal(client, admin, name):
    """What a server says of good and bad is its first word, not the name of a key in its message."""
    admin.set(f"{{{name}}}:holder", "not a record", px=60_000)
    with pytest.raises(LockRefused):
        SetnxLock(client, name).acquire()


@acquiring
@pytest.mark.parametrize("kind", ["list", "hash"])
def test_record_of_another_type_is_refused(client, admin, kind, verb, foreign_keys):
    """A record that is no string belongs to another program: refused before anything is written."""
    foreign_keys.add(RECORD)
    attempt = Attempt(verb, client)
    admin.delete(RECORD)
    (admin.rpush if kind == "list" else admin.hset)(RECORD, "its", "theirs")
    before = admin.get(NAME)
    with pytest.raises(LockRefused, match="FOREIGNRECORD"):
        attempt()
    assert admin.get(NAME) == before
    assert admin.type(RECORD) == kind


@holding
@pytest.mark.parametrize("damage", ["list", "text", "record"])
def test_held_lock_that_is_no_longer_ours_is_lost_and_left_alone(client, admin, damage, verb, foreign_keys):
    """Whoever put a list or a text in the place of our lock or its record keeps it, and we are told so."""
    foreign_keys.add(NAME)
    attempt = Attempt(verb, client)
    if damage == "list":
        admin.delete(NAME)
        admin.rpush(NAME, "theirs")
    elif damage == "text":
        admin.set(NAME, "maintenance")
    else:
        admin.set(RECORD, "not a record", px=60_000)
    before = admin.dump(NAME), admin.get(RECORD)
    assert attempt.is_lost()
    assert (admin.dump(NAME), admin.get(RECORD)) == before
    assert damage != "text" or verb != "renew" or "'maintenance'" in str(attempt.held.lost)


GARBAGE_RECORDS = {
    "empty": "",
    "words": "not a record",
    "bytes": b"\xff\xfe\x00",
    "cut short": "tok\n1\n2\nrunning\n",
    "no info": "tok\n1\n2\nrunning\n3",
    "info is not JSON": "tok\n1\n2\nrunning\n3\n{broken",
    "info is a list": "tok\n1\n2\nrunning\n3\n[1]",
    "info is bytes": b"tok\n1\n2\nrunning\n3\n\xff\xfe",
    "since is a word": "tok\n1\n2\nrunning\nlong ago\n{}",
    "endless deadline": "tok\n" + "9" * 400 + "\n2\nrunning\n3\n{}",
}


@pytest.mark.parametrize("value", [None, "1"], ids=["free", "expired"])
@pytest.mark.parametrize("garbage", GARBAGE_RECORDS)
def test_acquire_with_garbage_in_the_record_is_refused_or_decided(client, admin, garbage, value):
    """A record that nobody of ours has written ends in an outcome or in LockRefused, in nothing else."""
    admin.set(RECORD, GARBAGE_RECORDS[garbage], px=60_000)
    if value is not None:
        admin.set(NAME, value, px=60_000)
    try:
        outcome = Attempt("acquire", client)()
    except LockRefused:
        assert admin.get(NAME) == value
    else:
        str(outcome.holder), str(outcome.taken_over_from)
        assert outcome.acquired
        assert admin.get(RECORD).startswith("own\n")


NO_TIMES = ["", "maintenance", "-5", "1e9", "0x10", " 12", "12 ", "1.2.3", "9" * 400, "٣", b"\xff\xfe"]


@acquiring
@pytest.mark.parametrize("value", [*NO_TIMES, ["theirs"]], ids=lambda value: repr(value)[:9])
def test_lock_whose_value_is_no_time_is_held_by_a_foreigner(client, admin, value, verb, foreign_keys):
    """What is no Unix second, or a list, is somebody else's: held without an end, and never overwritten."""
    foreign_keys.add(NAME)
    attempt = Attempt(verb, client)
    if isinstance(value, list):
        admin.delete(NAME)
        admin.rpush(NAME, *value)
    else:
        admin.set(NAME, value)
    before = admin.dump(NAME)
    outcome = attempt()
    assert (outcome.acquired, outcome.holder.state) == (False, "foreign")
    assert (outcome.remaining_s is None) == (value != NO_TIMES[8])  # that one ends, if not soon
    assert ("(not a string)" in str(outcome.holder)) == isinstance(value, list)
    assert admin.dump(NAME) == before


@each_verb
def test_script_that_is_forgotten_again_and_again_is_sent_again(admin, proxy, far, verb):
    """NOSCRIPT twice in a row: what follows the refusal carries the text, so it cannot be refused again."""
    admin.script_flush()
    attempt = Attempt(verb, far(sends_again=3))
    admin.script_flush()
    with proxy.fault("delay", containing=b"\r\nEVAL\r\n", meanwhile=admin.script_flush):
        assert attempt.succeeds()


@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=needs_pipelines_sent_again if verb == "renew" else ()) for verb in VERBS],
)
@pytest.mark.parametrize("action", LOST_REPLIES)
def test_lost_reply_is_answered_rightly_when_sent_again(admin, proxy, far, action, verb):
    """Whether or not the first sending was executed, the second gives the answer that the first gave."""
    attempt = Attempt(verb, far(sends_again=3))
    with proxy.fault(action, containing=SCRIPT_OF[verb].sha.encode()):
        result = attempt()
    assert attempt.is_success(result)
    if attempt.held is None:
        token, _deadline, fence, state, *_rest = admin.get(RECORD).split("\n")
        assert (token, fence, state) == (result.lock.token, str(result.lock.fence), "running")
        assert result.lock.release() == "released"
    elif verb == "renew":
        assert attempt.held.release() == "released"


@each_verb
@pytest.mark.parametrize("action", [*LOST_REPLIES, "stall", "stall_reply"])
def test_lost_reply_that_is_not_sent_again_is_unavailable(admin, proxy, far, action, verb):
    """Without an answer nobody has a lock, nobody has lost one, and a second call sets it right."""
    attempt = Attempt(verb, far(socket_timeout=1 if "stall" in action else 20))
    with proxy.fault(action, containing=SCRIPT_OF[verb].sha.encode()), pytest.raises(LockUnavailable):
        attempt()
    if attempt.held is not None:
        attempt.held.ensure()
    assert attempt.succeeds()


@acquiring
def test_lock_that_was_acquired_unseen_ends_with_its_lease(client, admin, proxy, far, verb):
    """A grant whose reply was lost blocks others for one lease, not for longer."""
    attempt = Attempt(verb, far(), lease=30)
    with proxy.fault("drop_reply", containing=SCRIPT_OF[verb].sha.encode()), pytest.raises(LockUnavailable):
        attempt()
    rival = SetnxLock(client, NAME)  # of bytes, not text: whom it meets is known all the same
    assert rival.acquire().holder.token == "own"
    age(admin, NAME, 30)
    outcome = rival.acquire()
    assert (outcome.acquired, outcome.taken_over_from.token) == (True, "own")


@acquiring
def test_reply_that_comes_after_the_lease_is_no_lock(admin, client, verb):
    """A lock that was granted too long ago, as to a process that stood still, is given back, not used."""
    moments = iter([0.0])  # of the sending; then it stands still
    attempt = Attempt(verb, client, lease=10, clock=lambda: next(moments, 20.0))
    with pytest.raises(LockUnavailable, match="the reply took longer than the lease of 10 s"):
        attempt()
    assert admin.get(NAME) is None


def test_renewal_without_answers_is_no_loss_until_the_local_deadline(admin, proxy, far):
    """A black hole between us and the server: ours until our own clock says otherwise, then lost."""
    now = [0.0]
    held = SetnxLock(far(socket_timeout=1), NAME, lease=30, clock=lambda: now[0]).acquire().lock
    with proxy.black_hole():
        with pytest.raises(LockUnavailable):
            held.renew()
        held.ensure()
        now[0] = 30.0
        assert held.remaining_s() == 0
        assert admin.get(RECORD).split("\n")[0] == held.token
        with pytest.raises(LockLost):
            held.ensure()


@each_verb
def test_server_that_is_gone_is_unavailable(admin, proxy, far, verb):
    """Connection refused is LockUnavailable for every verb."""
    attempt = Attempt(verb, far())
    proxy.close()
    with pytest.raises(LockUnavailable):
        attempt()


def test_command_that_redis_7_0_forbids_in_a_script_is_named():
    """That server says in which line, and not which command."""
    acquire = verbs.ACQUIRE
    (line,) = [n for n, text in enumerate(acquire.text.splitlines(), 1) if "redis.call('GETSET'" in text]
    forbidden = "The user executing the script can't run this command or subcommand"
    said = f"{forbidden} script: e977b3, on @user_script:"
    refused = acquire._translated(NAME, redis.ResponseError(f"{said}{line}."))
    assert isinstance(refused, LockRefused)
    assert refused.reason == f"ResponseError: {said}{line}. (GETSET)"
    assert "Grant its user what is missing" in str(refused)
    caught = acquire._translated(NAME, redis.ResponseError(forbidden))
    assert "PEXPIREAT" in caught.reason


def test_wrong_password_is_an_error_of_ours(own, admin):
    """A server that does not let us in gives no lock, and no error but the documented ones."""
    with (
        redis.Redis.from_url(own.url(LOCK_DB), username="nobody", password="wrong") as client,
        pytest.raises(SetnxError),
    ):
        SetnxLock(client, NAME).acquire()
