"""Every error at every command: never acquired when in doubt, a documented exception, nothing left behind."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_setnx import lock as lock_module
from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable, SetnxError
from celery_setnx.keeper import Keeper
from celery_setnx.lock import HeldLock, Outcome, SetnxLock, renew_all
from examples.embedded import EmbeddedServer
from tests.harness import wait_until
from tests.proxy import Action, Proxy
from tests.versions.conditions import needs_pipelines_sent_again

NAME = "lock.errors"
RECORD = "{lock.errors}:holder"
VERBS = ("acquire", "take_over", "renew", "release", "rest")
LOST_REPLIES: tuple[Action, ...] = ("cut_before", "cut_after", "drop_reply")
NEEDED_BY = {
    "acquire": {"evalsha", "time", "get", "set"},
    "take_over": {"evalsha", "time", "get", "set", "getset", "pexpireat"},
    "renew": {"evalsha", "time", "get", "pexpireat", "set"},
    "release": {"evalsha", "get", "del", "set"},
    "rest": {"evalsha", "time", "get", "pexpireat", "set"},
}
COMMANDS = sorted(set.union(*NEEDED_BY.values()))
SCRIPT_OF = {
    "acquire": lock_module._ACQUIRE,
    "take_over": lock_module._ACQUIRE,
    "renew": lock_module._RENEW,
    "release": lock_module._RELEASE,
    "rest": lock_module._RELEASE,
}


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
    with redis.Redis.from_url(own.url(), decode_responses=True) as client:
        client.flushall()
        yield client
        endless = {key for key in client.scan_iter() if client.pttl(key) == -1}
        assert endless <= foreign_keys, f"keys without a TTL: {endless - foreign_keys}"


@pytest.fixture
def proxy(own) -> Iterator[Proxy]:
    """A way to that server whose connections fail on demand."""
    with Proxy(own.port) as proxy:
        yield proxy


@pytest.fixture
def resending(proxy) -> Iterator[redis.Redis]:
    """A client by way of the proxy that sends again after a lost reply, as redis-py does by default."""
    # redis-py before 6 sends again after the errors that are named, and after no others.
    named = {"retry": Retry(NoBackoff(), 3), "retry_on_error": [redis.ConnectionError, redis.TimeoutError]}
    with redis.Redis.from_url(proxy.url(), **named, socket_timeout=5) as client:
        client.ping()
        yield client


@pytest.fixture
def giving_up(proxy) -> Iterator[redis.Redis]:
    """A client by way of the proxy that never sends again, and does not wait long."""
    with redis.Redis.from_url(proxy.url(), retry=Retry(NoBackoff(), 0), socket_timeout=1) as client:
        client.ping()
        yield client


class Attempt:
    """One verb, prepared while all is well, to be tried when it is not."""

    def __init__(self, verb: str, client: redis.Redis, lease: float = 30.0) -> None:
        self.verb = verb
        self.held: HeldLock | None = None
        self.setnx = SetnxLock(client, NAME, lease=lease, info={"task_id": "t"})
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

    def succeeded(self, result: Any) -> bool:
        """Whether the result is what the verb answers when all is well."""
        if self.held is None:
            return isinstance(result, Outcome) and result.acquired
        return bool(result == {"renew": None, "release": "released", "rest": "resting"}[self.verb])


def _set(client: redis.Redis, **options: object) -> None:
    for name, value in options.items():
        client.config_set(name.replace("_", "-"), value)


@contextmanager
def _full(client: redis.Redis) -> Iterator[None]:
    _set(client, maxmemory_policy="noeviction", maxmemory=1)
    try:
        yield
    finally:
        _set(client, maxmemory=0)


@contextmanager
def _replica(client: redis.Redis) -> Iterator[None]:
    client.replicaof("127.0.0.1", 1)
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@contextmanager
def _stale_replica(client: redis.Redis) -> Iterator[None]:
    _set(client, replica_serve_stale_data="no")
    try:
        with _replica(client):
            yield
    finally:
        _set(client, replica_serve_stale_data="yes")


@contextmanager
def _too_few_replicas(client: redis.Redis) -> Iterator[None]:
    _set(client, min_replicas_to_write=1)
    try:
        yield
    finally:
        _set(client, min_replicas_to_write=0)


@contextmanager
def _failed_dump(client: redis.Redis) -> Iterator[None]:
    _set(client, save="3600 1", stop_writes_on_bgsave_error="yes")
    if client.info("persistence")["rdb_last_bgsave_status"] != "err":
        Path(client.config_get("dir")["dir"]).rmdir()
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a failed dump")
    try:
        yield
    finally:
        _set(client, save="", stop_writes_on_bgsave_error="no")


@contextmanager
def _busy(client: redis.Redis) -> Iterator[None]:
    _set(client, busy_reply_threshold=10)

    def run_for_ever() -> None:
        port = client.get_connection_kwargs()["port"]
        with redis.Redis(port=port, socket_timeout=30) as other, pytest.raises(redis.ResponseError):
            other.eval("while true do end", 0)

    script = threading.Thread(target=run_for_ever)
    script.start()

    def is_busy() -> bool:
        try:
            client.ping()
        except redis.ResponseError:
            return True
        return False

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


Trouble = Callable[[redis.Redis], AbstractContextManager[None]]
TROUBLES: dict[str, Trouble] = {
    "READONLY": _replica,
    "MASTERDOWN": _stale_replica,
    "NOREPLICAS": _too_few_replicas,
    "MISCONF": _failed_dump,
    "BUSY": _busy,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_verb_on_an_ailing_server_is_unavailable_and_works_once_it_recovers(own, admin, trouble, verb):
    """An error that passes by itself is LockUnavailable, changes nothing, and is over when it is over."""
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        before = admin.get(NAME), admin.get(RECORD)
        with TROUBLES[trouble](admin), pytest.raises(LockUnavailable):
            attempt()
        assert (admin.get(NAME), admin.get(RECORD)) == before
        assert attempt.succeeded(attempt())


@pytest.mark.parametrize("verb", ["acquire", "take_over"])
def test_acquire_on_a_full_server_is_unavailable(own, admin, verb):
    """A server without memory gives nobody a lock."""
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        with _full(admin), pytest.raises(LockUnavailable):
            attempt()
        assert attempt.succeeded(attempt())


@pytest.mark.parametrize("verb", ["renew", "release", "rest"])
def test_held_lock_is_served_by_a_full_server(own, admin, verb):
    """Who holds a lock can renew it and give it back although the server has no memory left."""
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        with _full(admin):
            assert attempt.succeeded(attempt())


def test_keeper_on_a_full_server_holds_the_lock_for_many_leases(own, admin):
    """Heartbeats survive a full server."""
    lost: list[str] = []
    with redis.Redis.from_url(own.url()) as client:
        held = SetnxLock(client, NAME, lease=3.0).acquire().lock
        assert held is not None
        keeper = Keeper(time.monotonic)
        keeper.watch(held, lambda _held, reason: lost.append(reason))
        with _full(admin):
            first = admin.get(RECORD)
            wait_until(lambda: int(admin.get(NAME)) > held._since_us / 1e6 + 9, "two leases of renewals")
            assert admin.get(RECORD) != first
        held.ensure()
        assert not lost
        assert keeper.forget(held)
        assert held.release() == "released"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "reply",
    [
        "-LOADING Redis is loading the dataset in memory",
        "-TRYAGAIN Multiple keys request during rehashing of slot",
        "-CLUSTERDOWN The cluster is down",
        "-ERR max number of clients reached",
    ],
)
def test_reply_that_a_healthy_server_never_gives_is_unavailable(admin, proxy, giving_up, reply, verb):
    """A server that is not ready yet decides nothing."""
    attempt = Attempt(verb, giving_up)
    with (
        proxy.fault("answer", containing=b"EVALSHA", reply=f"{reply}\r\n".encode()),
        pytest.raises(LockUnavailable),
    ):
        attempt()
    assert attempt.succeeded(attempt())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("command", COMMANDS)
def test_verb_without_a_permission_that_it_needs_is_refused(own, admin, command, verb):
    """A missing permission is LockRefused and never a lock; what a verb does not need is not asked for."""
    _permit(admin)
    with redis.Redis.from_url(own.url(), username="limited", password="any") as client:
        attempt = Attempt(verb, client)
        _permit(admin, f"-{command}")
        if command not in NEEDED_BY[verb]:
            assert attempt.succeeded(attempt())
            return
        with pytest.raises(LockRefused) as caught:
            attempt()
        assert command in str(caught.value).lower()
        _permit(admin)
        if attempt.held is not None:
            # Once the lock is deleted it is free, whatever was to be written after.
            cut_off = verb == "release" and command in ("pexpire", "set")
            result = attempt()
            assert result == "gone" if cut_off else attempt.succeeded(result)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_without_eval_is_refused_once_its_script_is_forgotten(own, admin, verb):
    """EVALSHA alone does not do: after SCRIPT FLUSH the text must be sent."""
    _permit(admin)
    with redis.Redis.from_url(own.url(), username="limited", password="any") as client:
        attempt = Attempt(verb, client)
        _permit(admin, "-eval")
        admin.script_flush()
        with pytest.raises(LockRefused, match="EVAL"):
            attempt()


@pytest.mark.parametrize("name", ["lock.BUSY", "lock.MUSHROOM", "lock.LOADING"])
def test_refusal_of_a_lock_named_like_an_error_is_still_a_refusal(own, admin, name):
    """What a server says of good and bad is its first word, not the name of a key in its message."""
    admin.set(f"{{{name}}}:holder", "not a record", px=60_000)
    with redis.Redis.from_url(own.url()) as client, pytest.raises(LockRefused):
        SetnxLock(client, name).acquire()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["list", "hash"])
def test_record_of_another_type_is_refused(own, admin, kind, verb, foreign_keys):
    """A record that is no string belongs to another program: refused before anything is written."""
    foreign_keys.add(RECORD)
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        admin.delete(RECORD)
        if kind == "list":
            admin.rpush(RECORD, "theirs")
        else:
            admin.hset(RECORD, "its", "theirs")
        before = admin.get(NAME)
        with pytest.raises(LockRefused, match="WRONGTYPE"):
            attempt()
        assert admin.get(NAME) == before
        assert admin.type(RECORD) == kind


@pytest.mark.parametrize("verb", ["acquire", "take_over"])
def test_lock_of_another_type_is_held_by_a_foreigner(own, admin, verb, foreign_keys):
    """A lock key that is a list was put there by somebody else: held, and never overwritten."""
    foreign_keys.add(NAME)
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        admin.delete(NAME)
        admin.rpush(NAME, "theirs")
        outcome = attempt()
        assert not outcome.acquired
        assert outcome.holder.state == "foreign"
        assert admin.lrange(NAME, 0, -1) == ["theirs"]


@pytest.mark.parametrize("verb", ["renew", "release", "rest"])
def test_held_lock_that_became_a_list_is_lost_and_left_alone(own, admin, verb, foreign_keys):
    """Whoever put a list in the place of our lock keeps it, and we are told so."""
    foreign_keys.add(NAME)
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        admin.delete(NAME)
        admin.rpush(NAME, "theirs")
        if verb == "renew":
            with pytest.raises(LockLost):
                attempt()
        else:
            assert attempt() == "lost"
        assert admin.lrange(NAME, 0, -1) == ["theirs"]


GARBAGE_RECORDS = {
    "empty": "",
    "words": "not a record",
    "bytes": b"\xff\xfe\x00",
    "cut short": "tok\n1\n2\nrunning\n",
    "no info": "tok\n1\n2\nrunning\n3",
    "info is no JSON": "tok\n1\n2\nrunning\n3\n{broken",
    "info is a list": "tok\n1\n2\nrunning\n3\n[1]",
    "info is bytes": b"tok\n1\n2\nrunning\n3\n\xff\xfe",
    "since is a word": "tok\n1\n2\nrunning\nlong ago\n{}",
    "endless deadline": "tok\n" + "9" * 400 + "\n2\nrunning\n3\n{}",
}


@pytest.mark.parametrize("value", [None, "1"], ids=["free", "expired"])
@pytest.mark.parametrize("garbage", GARBAGE_RECORDS)
def test_acquire_with_garbage_in_the_record_is_refused_or_decided(own, admin, garbage, value):
    """A record that nobody of ours has written ends in an outcome or in LockRefused, in nothing else."""
    admin.set(RECORD, GARBAGE_RECORDS[garbage], px=60_000)
    if value is not None:
        admin.set(NAME, value, px=60_000)
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt("acquire", client)
        try:
            outcome = attempt()
        except LockRefused:
            assert admin.get(NAME) == value
        else:
            str(outcome.holder), str(outcome.taken_over_from)
            assert outcome.acquired == (outcome.lock is not None)
            assert outcome.acquired
            assert admin.get(RECORD).startswith("own\n")


@pytest.mark.parametrize("verb", ["renew", "release", "rest"])
def test_held_lock_with_garbage_in_the_record_is_lost(own, admin, verb):
    """Without our token in the record nothing says that the lock is ours, so it is left alone."""
    with redis.Redis.from_url(own.url()) as client:
        attempt = Attempt(verb, client)
        admin.set(RECORD, "not a record", px=60_000)
        before = admin.get(NAME)
        if verb == "renew":
            with pytest.raises(LockLost):
                attempt()
        else:
            assert attempt() == "lost"
        assert (admin.get(NAME), admin.get(RECORD)) == (before, "not a record")


@pytest.mark.parametrize(
    "value",
    ["", "abc", "-5", "1e9", " 12", "1.2.3", "9" * 400, "٣", b"\xff\xfe"],
    ids=["empty", "word", "negative", "exponent", "space", "dots", "endless", "arabic", "bytes"],
)
def test_acquire_of_a_lock_whose_value_is_no_time_is_held(own, admin, value, foreign_keys):
    """A value that is no Unix second belongs to somebody else: held, and never overwritten."""
    foreign_keys.add(NAME)
    admin.set(NAME, value)
    with redis.Redis.from_url(own.url()) as client:
        outcome = SetnxLock(client, NAME).acquire()
    assert not outcome.acquired
    assert outcome.holder is not None
    assert outcome.holder.state == "foreign"
    str(outcome.holder)
    expected = value if isinstance(value, bytes) else value.encode()
    with redis.Redis.from_url(own.url()) as raw:
        assert raw.get(NAME) == expected


@pytest.mark.parametrize("verb", VERBS)
def test_verb_after_two_script_flushes_works(own, admin, verb):
    """A script that is forgotten again and again is sent again and again."""
    with redis.Redis.from_url(own.url()) as client:
        admin.script_flush()
        attempt = Attempt(verb, client)
        admin.script_flush()
        assert attempt.succeeded(attempt())


@pytest.mark.parametrize("verb", VERBS)
def test_script_flush_between_the_refusal_and_the_resend_does_no_harm(admin, proxy, resending, verb):
    """NOSCRIPT twice in a row: what follows the refusal carries the text, so it cannot be refused again."""
    attempt = Attempt(verb, resending)
    admin.script_flush()
    with proxy.fault("delay", containing=b"\r\nEVAL\r\n", seconds=0.1) as delay:
        flusher = threading.Thread(
            target=lambda: (wait_until(lambda: delay.struck, "the resend"), admin.script_flush())
        )
        flusher.start()
        assert attempt.succeeded(attempt())
        flusher.join()


def test_renew_all_sends_each_forgotten_script_again(own, admin):
    """In a pipeline each NOSCRIPT is answered for itself, and no lock is left unrenewed."""
    with redis.Redis.from_url(own.url()) as client:
        held = [SetnxLock(client, f"lock.{number}", lease=5).acquire().lock for number in range(5)]
        deadlines = [admin.get(f"{{lock.{number}}}:holder") for number in range(5)]
        admin.script_flush()
        assert renew_all([one for one in held if one is not None]) == [None] * 5
        renewed = [admin.get(f"{{lock.{number}}}:holder") for number in range(5)]
        assert all(new != old for new, old in zip(renewed, deadlines))


@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=needs_pipelines_sent_again if verb == "renew" else ()) for verb in VERBS],
)
@pytest.mark.parametrize("action", LOST_REPLIES)
def test_lost_reply_is_answered_rightly_when_sent_again(admin, proxy, resending, action, verb):
    """Whether or not the first sending was executed, the second gives the answer that the first gave."""
    attempt = Attempt(verb, resending)
    with proxy.fault(action, containing=SCRIPT_OF[verb].sha.encode()):
        result = attempt()
    assert attempt.succeeded(result)
    if attempt.held is None:
        token, _deadline, fence, state, *_rest = admin.get(RECORD).split("\n")
        assert (token, fence, state) == (result.lock.token, str(result.lock.fence), "running")
        assert result.lock.release() == "released"
    elif verb == "renew":
        assert attempt.held.release() == "released"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("action", [*LOST_REPLIES, "stall", "stall_reply"])
def test_lost_reply_that_is_not_sent_again_is_unavailable(admin, proxy, giving_up, action, verb):
    """Without an answer nobody has a lock, nobody has lost one, and a second call sets it right."""
    attempt = Attempt(verb, giving_up)
    with proxy.fault(action, containing=SCRIPT_OF[verb].sha.encode()), pytest.raises(LockUnavailable):
        attempt()
    if attempt.held is not None:
        attempt.held.ensure()
    assert attempt.succeeded(attempt())


@pytest.mark.parametrize("verb", ["acquire", "take_over"])
def test_lock_that_was_acquired_unseen_ends_with_its_lease(own, admin, proxy, giving_up, verb):
    """A grant whose reply was lost blocks others for one lease, not for longer."""
    attempt = Attempt(verb, giving_up, lease=3)
    with proxy.fault("drop_reply", containing=SCRIPT_OF[verb].sha.encode()), pytest.raises(LockUnavailable):
        attempt()
    rival = SetnxLock(admin, NAME, lease=5)
    assert not rival.acquire().acquired
    outcome = rival.acquire(wait=10)
    assert outcome.acquired
    assert outcome.taken_over_from is not None
    assert outcome.taken_over_from.token == "own"


@pytest.mark.parametrize("verb", ["acquire", "take_over"])
def test_reply_that_comes_after_the_lease_is_no_lock(admin, proxy, resending, verb):
    """A lock that was granted too long ago is given back, not used."""
    attempt = Attempt(verb, resending, lease=0.2)
    with (
        proxy.fault("delay_reply", containing=SCRIPT_OF[verb].sha.encode(), seconds=0.3),
        pytest.raises(LockUnavailable, match="longer than the lease"),
    ):
        attempt()
    assert admin.get(NAME) is None


def test_renewal_without_answers_is_no_loss_until_the_local_deadline(admin, proxy, giving_up):
    """A black hole between us and the server: ours until our own clock says otherwise, then lost."""
    held = SetnxLock(giving_up, NAME, lease=4).acquire().lock
    assert held is not None
    with proxy.black_hole():
        with pytest.raises(LockUnavailable):
            held.renew()
        held.ensure()
        wait_until(lambda: held.remaining_s() == 0, "the local deadline")
        assert admin.get(RECORD).split("\n")[0] == held.token
        with pytest.raises(LockLost):
            held.ensure()


def test_keeper_without_answers_reports_the_loss_once(admin, proxy, giving_up):
    """The body is told when the lease has ended unrenewed, exactly once, although no reply ever came."""
    lost: list[str] = []
    held = SetnxLock(giving_up, NAME, lease=3).acquire().lock
    assert held is not None
    keeper = Keeper(time.monotonic)
    with proxy.black_hole():
        keeper.watch(held, lambda _held, reason: lost.append(reason))
        wait_until(lambda: lost, "the loss")
    assert len(lost) == 1
    assert not keeper.forget(held)
    with pytest.raises(LockLost):
        held.ensure()


@pytest.mark.parametrize("verb", ["acquire", "renew"])
def test_keeper_after_a_slow_reply_renews_before_the_deadline(admin, proxy, resending, verb):
    """A reply that took three quarters of the lease costs one renewal's time, not the lock."""
    lost: list[str] = []
    keeper = Keeper(time.monotonic)
    Attempt("renew", resending)()  # from now on the server knows both scripts
    admin.delete(NAME, RECORD)
    slow = {"containing": SCRIPT_OF[verb].sha.encode(), "seconds": 2.25}
    if verb == "acquire":
        proxy.arm("delay_reply", **slow)
    held = SetnxLock(resending, NAME, lease=3.0).acquire().lock
    assert held is not None
    if verb == "renew":
        proxy.arm("delay_reply", **slow)
    keeper.watch(held, lambda _held, reason: lost.append(reason))
    wait_until(lambda: lost or int(admin.get(NAME)) > held._since_us / 1e6 + 9, "two leases of renewals")
    assert not lost
    assert keeper.forget(held)
    assert held.release() == "released"


def test_keeper_whose_listener_raises_still_renews_the_other_locks(own, admin):
    """One lock's loss, and a listener that fails over it, cost no other lock."""
    lost: list[str] = []

    def raising(_held: HeldLock, _reason: str) -> None:
        lost.append("first")
        raise RuntimeError("a listener's own error")

    keeper = Keeper(time.monotonic)
    with redis.Redis.from_url(own.url()) as client:
        first = SetnxLock(client, "lock.first", lease=3).acquire().lock
        second = SetnxLock(client, "lock.second", lease=3).acquire().lock
        assert first is not None
        assert second is not None
        keeper.watch(first, raising)
        keeper.watch(second, lambda _held, _reason: lost.append("second"))
        admin.delete("lock.first")
        wait_until(lambda: lost, "the loss of the first lock")
        record = "{lock.second}:holder"
        renewed = admin.get(record)
        wait_until(lambda: "second" in lost or admin.get(record) != renewed, "the next renewal")
        assert lost == ["first"]
        assert keeper.forget(second)


@pytest.mark.parametrize("verb", VERBS)
def test_server_that_is_gone_is_unavailable(verb):
    """Connection refused is LockUnavailable for every verb."""
    never = Retry(NoBackoff(), 0)
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), retry=never) as client:
        attempt = Attempt(verb, client)
        server.stop()
        with pytest.raises(LockUnavailable):
            attempt()


def test_wrong_password_is_an_error_of_ours(own, admin):
    """A server that does not let us in gives no lock, and no error but the documented ones."""
    with (
        redis.Redis.from_url(own.url(), username="nobody", password="wrong") as client,
        pytest.raises(SetnxError),
    ):
        SetnxLock(client, NAME).acquire()
