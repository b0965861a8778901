"""Commands past the client's layers: a connection is one exchange's alone, and ends with its trouble."""

import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from packaging.version import Version
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from celery_setnx import SetnxLock
from celery_setnx.lock.held import renew_all
from celery_setnx.lock.names import record_name
from celery_setnx.lock.scripts import Script
from celery_setnx.lock.wire import ask, ask_many, tell
from examples.embedded import EmbeddedServer
from tests import forks
from tests.harness import raising, wait_until
from tests.proxy import Proxy

ECHO = ("EVAL", "return ARGV[1]", "0")
REFUSED = ("EVAL", "return redis.error_reply('NO')", "0")


@pytest.fixture
def own() -> Iterator[EmbeddedServer]:
    """A server on which nobody else has connections."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def client(own) -> Iterator[redis.Redis]:
    """A client that sends a command once more."""
    with redis.Redis(port=own.port, retry=Retry(NoBackoff(), 1)) as client:
        yield client


def echo(client: redis.Redis, word: object) -> bool:
    """Whether the client is answered what it asks."""
    return bool(ask(client, (*ECHO, str(word))) == str(word).encode())


@pytest.fixture
def admin(own) -> Iterator[redis.Redis]:
    """Another client, which looks at the first one's connections."""
    with redis.Redis(port=own.port, single_connection_client=True) as admin:
        yield admin


def others(admin: redis.Redis) -> int:
    """How many connections the server has that run scripts."""
    return sum(each["cmd"] == "eval" for each in admin.client_list())


def test_one_connection_serves_one_thread(client, admin):
    """Whatever is asked, and whatever the server has against it."""
    for number in range(20):
        assert echo(client, number)
        with pytest.raises(ResponseError):
            ask(client, REFUSED)
    assert others(admin) == 1
    assert not client.connection_pool._available_connections, "the client's own pool is not used"


def test_many_commands_have_each_their_reply_or_error(client):
    """In order, and an error is none of the others' business."""
    replies = ask_many(client, [(*ECHO, "a"), REFUSED, (*ECHO, "b")])
    assert (replies[0], replies[2]) == (b"a", b"b")
    assert isinstance(replies[1], ResponseError)
    assert echo(client, "c")


def test_threads_never_get_each_others_replies(client, admin):
    """A connection is one exchange's alone; afterwards it is the next one's."""
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda number: echo(client, number), range(4000)))
    assert 1 <= others(admin) <= 8


class Interrupt(BaseException):
    """Comes from a signal, as a time limit does."""


class Tracing(redis.Redis):
    """A client of somebody's own."""

    def execute_command(self, *command: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), command[0]]
        return super().execute_command(*command, **options)


def blocking(port: int) -> redis.Redis:
    """A client of another kind of pool."""
    return redis.Redis(connection_pool=redis.BlockingConnectionPool(port=port))


UNSTRUCK = {"get_connection", "release", "__del__"}
# Before redis-py 6.4 who is struck here keeps a fixed connection's lock, and waits for it ever after.
LOCKING = {"_execute_command"} if Version(redis.__version__) < Version("6.4") else set()
KINDS = [
    pytest.param(lambda port: redis.Redis(port=port), id="plain"),
    pytest.param(lambda port: redis.Redis(port=port, single_connection_client=True), id="fixed"),
    pytest.param(lambda port: redis.Redis(port=port, encoding="latin-1"), id="latin"),
    pytest.param(lambda port: Tracing(port=port), id="own"),
    pytest.param(blocking, id="blocking"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_command_that_is_no_script_is_answered_by_every_kind_of_client(own, kind):
    """It has no number of keys: a cluster's client, and any other, is asked as it stands."""
    with kind(own.port) as client:
        assert ask(client, ("GET", "nothing")) is None
        assert ask(client, ("ZREM", "nothing", "1#0")) == 0
        assert ask_many(client, [("GET", "nothing"), (*ECHO, "a")]) == [None, b"a"]


def test_interrupted_exchange_leaves_no_reply_behind(client, own):
    """The reply that was not read would be the next one's."""
    assert echo(client, "before")
    before = signal.signal(signal.SIGUSR1, raising(Interrupt))
    try:
        os.kill(own.pid, signal.SIGSTOP)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupt):
            ask(client, (*ECHO, "interrupted"))
    finally:
        os.kill(own.pid, signal.SIGCONT)
        signal.signal(signal.SIGUSR1, before)
    assert echo(client, "after")


def names_down_to(function: Callable[..., Any], frame: Any) -> Iterator[str]:
    """The functions that run, the innermost first."""
    frames = (each for each, _line in walk_stack(frame))
    inner = itertools.takewhile(lambda each: each.f_code is not function.__code__, frames)
    return (each.f_code.co_name for each in inner)


def strikes_at(point: int, act: Callable[[], object]) -> bool:
    """Whether an act has so many points (calls, lines, returns, ours and redis-py's): the last is struck.

    Not in redis-py's pool, which before redis-py 8 may keep a lock for ever, nor where Python drops what is
    raised.
    """
    left = point

    def strike(frame: Any, event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("celery_setnx", "redis"):
            return None
        is_struck = frame.f_code.co_name not in LOCKING
        is_struck = is_struck and UNSTRUCK.isdisjoint(names_down_to(strikes_at, frame))
        left -= event != "exception" and is_struck
        if left == 0:
            sys.settrace(None)
            raise Interrupt
        return strike

    before = sys.gettrace()
    sys.settrace(strike)
    try:
        act()
    except BaseException:  # not always ours: before redis-py 7 some code of redis-py fails when it is struck
        if left > 0:
            raise
    finally:
        sys.settrace(before)
    return left <= 0


def struck_everywhere(act: Callable[[], object]) -> Iterator[int]:
    """Each point of an act, which has just been struck there."""
    return itertools.takewhile(lambda point: strikes_at(point, act), itertools.count(1))


@pytest.mark.parametrize("kind", KINDS)
def test_command_struck_anywhere_leaves_no_reply_behind(own, kind):
    """Whatever an exception interrupts, the next exchange has its own reply."""
    with kind(own.port) as client:
        assert echo(client, "before")
        for point in struck_everywhere(lambda: ask(client, (*ECHO, "struck"))):
            assert echo(client, point), point
        assert point > 20


@pytest.mark.parametrize("kind", KINDS)
def test_many_commands_struck_anywhere_leave_no_reply_behind(own, kind):
    """None of theirs, and not the rest of them."""
    with kind(own.port) as client:
        many = [(*ECHO, "struck"), REFUSED, (*ECHO, "too")]
        ask_many(client, many)
        for point in struck_everywhere(lambda: ask_many(client, many)):
            words = [f"{point} {place}" for place in range(2)]
            replies = ask_many(client, [(*ECHO, word) for word in words])
            assert replies == [word.encode() for word in words], point
            assert echo(client, point), point
        assert point > 40


def test_renewal_struck_anywhere_leaves_no_reply_behind(client):
    """All locks are renewed by the next one, and none is lost."""
    locks = [SetnxLock(client, f"lock.{number}").acquire().lock for number in range(3)]
    for point in struck_everywhere(lambda: renew_all(locks)):
        assert renew_all(locks) == [None] * 3, point
        assert [lock.lost for lock in locks] == [None] * 3, point
    assert point > 100


def count(key: str) -> tuple[str, ...]:
    """A command that answers what nobody asks for."""
    return ("EVAL", "return redis.call('INCR', KEYS[1])", "1", key)


def unheard() -> None:
    """What is done about a command that has failed, where none does."""
    pytest.fail("it has not failed")


def test_reply_that_nobody_waits_for_is_not_the_next_ones(client, admin):
    """It is read before that, over the same connection: one at a time."""
    assert echo(client, "before")
    for number in range(1, 20, 2):
        assert tell(client, count("told"), unheard)
        assert not tell(client, count("told"), unheard)
        assert echo(client, number)
        assert tell(client, count("told"), unheard)
        assert ask_many(client, [(*ECHO, "a"), REFUSED, (*ECHO, "b")])[::2] == [b"a", b"b"]
        with pytest.raises(ResponseError):
            ask(client, REFUSED)
        assert admin.get("told") == b"%d" % (number + 1)
    assert others(admin) == 1


def test_command_that_was_told_and_has_failed_is_heard_of_with_the_next_ones_reply(own):
    """That it was refused, and that its reply was lost; who hears of it may ask anew."""
    heard: list[bool] = []

    def told(client: redis.Redis, command: tuple[str, ...]) -> bool:
        return tell(client, command, lambda: heard.append(echo(client, "anew")))

    with Proxy(own.port) as proxy, redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 1)) as client:
        for ask_next in (lambda: echo(client, "next"), lambda: ask_many(client, [("PING",)])):
            assert echo(client, "before")
            assert told(client, REFUSED)
            assert not heard
            assert ask_next()
            assert heard.pop()
            with proxy.fault("drop_reply", containing=b"lost"):
                assert told(client, count("lost"))
                assert ask_next()
            assert heard.pop()


def tell_and_end(port: int, end: Callable[[], object]) -> None:
    """Tell a command, and end at once."""
    client = redis.Redis(port=port, retry=Retry(NoBackoff(), 1))
    echo(client, "before")
    assert tell(client, count("told"), unheard)
    end()


def leave_at_once() -> None:
    """As a pool's child ends."""
    os._exit(0)


@pytest.mark.parametrize("end", [leave_at_once, partial(signal.raise_signal, signal.SIGKILL)])
def test_command_told_by_whoever_ends_at_once_is_executed(tmp_path, own, admin, end):
    """However it ends: what was sent is with the server."""
    forks.ended(tmp_path, tell_and_end, own.port, end)
    wait_until(lambda: admin.get("told") == b"1", "it is executed")


def test_threads_that_tell_never_get_each_others_replies(client, admin):
    """A reply that was left unread is read by whoever has the connection next."""

    def tells_and_asks(number: int) -> bool:
        while not tell(client, count("told"), unheard):
            assert echo(client, "read")
        return echo(client, number)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(tells_and_asks, range(2000)))
    wait_until(lambda: admin.get("told") == b"2000", "all are executed")


def test_told_command_struck_anywhere_leaves_no_reply_behind(client):
    """Neither when it is sent nor when its reply is read."""

    def tell_and_ask() -> None:
        tell(client, REFUSED, lambda: None)
        ask(client, (*ECHO, "struck"))

    assert echo(client, "before")
    for point in struck_everywhere(tell_and_ask):
        assert echo(client, point), point
        assert ask_many(client, [(*ECHO, str(point))]) == [str(point).encode()]
    assert point > 40


@pytest.mark.parametrize("kind", KINDS[1:])
def test_client_of_another_kind_is_told_nothing(own, kind):
    """It has read each reply before it lets go of a connection: it is asked. So is one that sends once."""
    with kind(own.port) as client, redis.Redis(port=own.port, retry=Retry(NoBackoff(), 0)) as once:
        for each in (client, once):
            assert echo(each, "before")
            assert not tell(each, count("told"), unheard)
            assert ask(each, ("GET", "told")) is None


def test_connection_struck_while_it_is_made_is_not_used(own):
    """It might not have logged in, or be in another database."""
    with redis.Redis(port=own.port, db=3) as client:
        client.set("which", 3)

    for point in itertools.count(1):
        with redis.Redis(port=own.port, db=3) as client:
            if not strikes_at(point, lambda client=client: ask(client, ("GET", "which"))):
                break
            assert ask(client, ("GET", "which")) == b"3", point
    assert point > 100


def test_connection_that_was_closed_is_replaced(client, admin, own):
    """By CLIENT KILL, and by a restart; the idle ones led to the same server, and go with it."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: ask(client, (*ECHO, str(n))), range(400)))
    admin.client_kill_filter(_type="normal", skipme=True)
    assert echo(client, "again")
    assert others(admin) == 1
    own.restart()
    assert echo(client, "restarted")


def test_connection_that_was_closed_while_idle_costs_no_attempt(admin, own):
    """The attempt after it may fail like any other: there is one more."""
    with Proxy(own.port) as proxy, redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 1)) as client:
        assert echo(client, "before")
        admin.client_kill_filter(_type="normal", skipme=True)
        proxy.arm("drop_reply", containing=b"again")
        assert echo(client, "again")
        assert [reply.decode() for reply in ask_many(client, [(*ECHO, n) for n in "012"])] == list("012")
        admin.client_kill_filter(_type="normal", skipme=True)
        proxy.arm("drop_reply", containing=b"many")
        assert ask_many(client, [(*ECHO, "many")]) == [b"many"]


def test_client_that_sends_nothing_again_meets_no_closed_connection(own):
    """It looks before it sends, as redis-py does: what it sends once may have been received."""
    with redis.Redis(port=own.port, retry=Retry(NoBackoff(), 0)) as client:
        assert echo(client, "before")
        own.restart()
        assert echo(client, "restarted")


def test_server_that_is_gone_is_an_error_in_time(client, own):
    """redis-py's own, after one more attempt."""
    ask(client, (*ECHO, "before"))
    own.stop()
    with pytest.raises(redis.ConnectionError):
        ask(client, (*ECHO, "gone"))
    with pytest.raises(redis.ConnectionError):
        ask_many(client, [(*ECHO, "gone")] * 2)


def test_forked_child_leaves_its_parents_connections_alone(client, admin):
    """Both ask at once, over and over, and each has its own replies: one of the parent's is left unread."""
    assert echo(client, "parent")
    assert tell(client, (*ECHO, "told"), unheard)
    child = os.fork()
    right = all(echo(client, "parent" if child else "child") for _ in range(2000))
    if not child:
        os._exit(0 if right else 1)
    assert right
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    wait_until(lambda: others(admin) == 1, "the child's connection to be gone")


@pytest.mark.parametrize("options", [{"single_connection_client": True}, {"encoding": "latin-1"}, {}])
def test_client_of_another_kind_is_used_as_it_is(own, options):
    """What its author has added is still done, and its only connection stays the only one."""
    kind = redis.Redis if options else Tracing
    with kind(port=own.port, **options) as client:
        assert echo(client, "a")
        assert ask_many(client, [(*ECHO, "b"), (*ECHO, "c")]) == [b"b", b"c"]
        with SetnxLock(client, "lock.kind") as held:
            held.renew()
        assert client.client_list()[0]["id"]
        assert client.__dict__["_setnx_wire"] is None
        assert options or client.seen[:1] == ["EVAL"]


def test_scripts_that_were_forgotten_cost_three_round_trips(client, admin, monkeypatch):
    """As on a new master: one script is sent again, not every one of its calls. All locks are renewed."""
    locks = [SetnxLock(client, f"lock.{number}").acquire().lock for number in range(300)]
    assert renew_all(locks) == [None] * 300
    records = [record_name(lock.key) for lock in locks]
    before = admin.mget(records)
    admin.script_flush()
    sent: list[int] = []
    send = redis.Connection.send_packed_command

    def counting(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(len(command[0]))
        send(self, command, *args, **kwargs)

    monkeypatch.setattr(redis.Connection, "send_packed_command", counting)
    assert renew_all(locks) == [None] * 300
    assert len(sent) == 3
    assert all(new != old for new, old in zip(admin.mget(records), before))


def pack_under_signals() -> None:
    """Commands packed as redis-py does it (by hiredis, if there), until a handler has struck 1,000 times."""

    class Struck(Exception):
        pass

    def strike(_signum: int, _frame: Any) -> None:
        raise Struck

    pack = redis.Connection().pack_command
    client = SimpleNamespace(_setnx_wire=SimpleNamespace(ask=lambda command: pack(*command)))
    script = Script("look")
    sys.settrace(None)  # what measures coverage does not give its own lock back when it is struck
    signal.signal(signal.SIGALRM, strike)
    for _ in range(1_000):
        with suppress(Struck):
            signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 200e-6))
            while True:
                script(client, ("lock",), 1_234_567, 1_234_567, 1_234_567)


def test_signal_whose_handler_raises_may_strike_while_a_command_is_packed(tmp_path):
    """As a soft time limit does, and the end of a beat: the process lives on."""
    code, said = forks.ended(tmp_path, pack_under_signals)
    assert code == 0, said


def test_number_of_keys_stays_a_number_for_a_client_of_another_kind():
    """The cluster of redis-py 5.0 counts with it."""
    client = SimpleNamespace(execute_command=lambda *command: list(command))
    script = Script("look")
    assert script(client, ("a", "b"), 7, "c") == ["EVALSHA", script.sha, 2, "a", "b", "7", "c"]


def test_worker_has_one_connection_and_each_of_its_processes_one(locks, start_worker, tasks, name):
    """What `maxclients` has to allow: the parent's sweep, and whoever runs a task."""

    def connections() -> list[str]:
        return [each["cmd"] for each in locks.client_list() if each["name"] == name]

    options = {"client_name": name}
    worker = start_worker(concurrency=1, queues=name, conf={"setnx_transport_options": options})
    wait_until(lambda: "evalsha" in connections(), "the parent sweeps")
    assert len(connections()) == 1, worker.log_text()
    assert tasks.work.apply_async(("n",), queue=name).get(timeout=60) == "n"
    assert len(connections()) == 2, worker.log_text()
