"""The simulated Redis against a real one: random commands, and the scripts in the calls that the model makes.

The real one is the tests' server, Valkey 9; in the CI `tests.versions` runs this on Redis 7.0 too. Both agree
with the simulated one, which refuses what they do not agree on. `SEED=...` replays the commands of a failure.
"""

import io
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha1
from itertools import chain
from typing import Any, NamedTuple

import pytest

from examples.embedded import EmbeddedServer
from tests.bounds import bound
from tests.model.asked import odd_calls
from tests.model.contract import KNOWN_WORDS
from tests.model.dues import Schedule
from tests.model.explorer import explore
from tests.model.injected import EPOCH, SECOND, plain_texts, set_clock, texts
from tests.model.layout import LOCK, RECORD, laid_out
from tests.model.newest import Replacing
from tests.protocol import client
from tests.protocol.client import packed, reply_in
from tests.simulation.scripts import script
from tests.simulation.server import COMMANDS, MS, Entry, Server, ServerError

COMMAND_CASES = bound(350, full=1_000, deep=50_000)  # each of 30 commands
SCRIPT_CASES = bound(1_000, full=3_000, deep=20_000)  # of each script
ONE_SEED = [int(os.environ["SEED"])] if "SEED" in os.environ else []
REAL, PLAIN = texts(), plain_texts()
SEES = """
local seen = {}
for _, key in ipairs(KEYS) do
  local kind, held = redis.call('TYPE', key).ok, {}
  if kind == 'string' then held = {redis.call('GET', key)}
  elseif kind == 'list' then held = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'zset' then held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'hash' then held = redis.call('HGETALL', key) end
  if kind ~= 'none' then
    seen[#seen + 1] = {key, kind, redis.call('PEXPIRETIME', key), redis.call('PTTL', key), held}
  end
end
return {redis.call('TIME'), seen}
"""
SEES_SHA = sha1(SEES.encode()).hexdigest()


@pytest.fixture(scope="module")
def real() -> Iterator[client.Server]:
    """A connection to a server of these tests' own: its memory is full at times."""
    with EmbeddedServer() as server, client.Server(server.port, 0) as connection:
        for text in (*REAL.values(), SEES):
            connection.ask("SCRIPT", "LOAD", text)
        yield connection


def replies(real: client.Server, commands: list[bytes]) -> list[Any]:
    """What the server replies to commands that are sent at once."""
    stream = io.BytesIO(real.sent(b"".join(commands) + packed("ECHO", "<end>"), b"$5\r\n<end>\r\n"))
    return [reply_in(stream) for _ in commands]


def simulated(run: Callable[[], Any]) -> Any:
    """A reply, or the error's first word."""
    try:
        return run()
    except ServerError as error:
        return ServerError(str(error).split()[0])


def is_same(found: Any, expected: Any, slack: int = 0) -> bool:
    """Whether two replies are; errors by their code, and integers that tell a time within the slack."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, ServerError):
        return isinstance(found, client.ServerError) and str(found).split()[0] == str(expected)
    if slack and isinstance(found, int) and isinstance(expected, int):
        return found == expected or (min(found, expected) >= 0 and abs(found - expected) <= slack)
    return found == expected


def elapsed_ms(began: list[bytes], ended: list[bytes]) -> int:
    """How far TTLs may be off; no more than one step of the clock if it stands still in a transaction."""
    return (micros(ended) - micros(began)) // MS + 1


def micros(time: list[bytes]) -> int:
    """A reply to TIME."""
    return int(time[0]) * SECOND + int(time[1])


def contents(entry: Entry, server: Server, name: bytes) -> list[bytes]:
    """What SEES says that a key holds."""
    if entry.kind == "string":
        return [entry.value]
    if entry.kind == "zset":
        return list(server.run(b"ZRANGE", name, b"0", b"-1", b"WITHSCORES"))
    return [word for pair in entry.value for word in pair] if entry.kind == "hash" else list(entry.value)


def key_differences(server: Server, seen: list[Any], slack: int) -> Iterator[str]:
    """In what the keys of the real server differ; a TTL is right by the test's clock or by the server's."""
    expected = {name: entry for name, entry in server.keys.items() if (name, entry) in server.state}
    for name, kind, expires, left, held in seen:
        entry = expected.pop(name, None)
        if entry is None:
            yield f"{name!r} is there: {held}"
            continue
        if kind == b"hash":
            held = [word for pair in sorted(zip(held[::2], held[1::2])) for word in pair]
        wanted = contents(entry, server, name)
        if (kind.decode(), held) != (entry.kind, wanted):
            yield f"{name!r} is {kind!r} {held}, not {entry.kind} {wanted}"
        if entry.expiry is None or expires < 0:
            is_right = (entry.expiry is None) == (expires < 0)
        else:
            is_right = expires == entry.expiry or abs(left - (entry.expiry - server.now // MS)) <= slack
        if not is_right:
            yield f"{name!r} expires at {expires}, in {left} ms, not at {entry.expiry}"
    for name, entry in expected.items():
        if entry.expiry is None or entry.expiry - server.now // MS > slack:  # else its time may have come
            yield f"{name!r} is not there: {entry}"


# Random commands

NAMES = {kind: [f"{kind}{number}".encode() for number in "12"] for kind in ("string", "list", "hash", "zset")}
EVERY_NAME = [name for names in NAMES.values() for name in names] + [b"none"]
WORDS = (b"a", b"b", b"", b"5", b"text of some length", b"\x00\xff\r\n")
LEAST, MOST = b"-9223372036854775808", b"9223372036854775807"
INTEGERS = (b"0", b"1", b"-1", b"2", b"-2", b"3", b"-9", b"100", MOST, LEAST)
BAD_INTEGERS = (b"", b" 1", b"1 ", b"+1", b"01", b"-0", b"1.0", b"1e1", b"0x1", b"x", b"9223372036854775808")
TIMES = (b"60000", b"60001", b"1000000", b"3000000000001", b"4000000000000", b"1", b"0", b"-1", b"-60000")
SCORES = (b"0", b"1", b"2", b"-3", b"2.5", b"-0.5", b"1e3", b"+4", b"4000000000000000", b"7000000000000001")
BAD_SCORES = (b"x", b"nan", b"1_0", b"1 ", b"5(", b"((5", b"1.2.3", b"--1")
INFINITE = (b"inf", b"+inf", b"-inf", b"INF", b"Infinity")
# n: a name, N: more of them, w: a word, W: more of them, i: an integer, t: a time, s: a score, b: two bounds;
# P: more pairs of a score and a word, F: of words; S, R, L: options of SET, of ranges, and of those by score.
SHAPES = {
    verb: shape
    for shape, verbs in {
        "": "TIME",
        "n": "TYPE PTTL PEXPIRETIME PERSIST GET HGETALL HKEYS ZCARD",
        "nN": "DEL EXISTS MGET",
        "nt": "PEXPIRE PEXPIREAT",
        "nw": "SETNX GETSET HGET ZSCORE ZRANK",
        "nww": "HSETNX",
        "nwS": "SET",
        "nwW": "RPUSH HDEL ZREM",
        "nwwF": "HSET",
        "nswP": "ZADD",
        "nb": "ZREMRANGEBYSCORE ZCOUNT",
        "nbL": "ZRANGEBYSCORE ZREVRANGEBYSCORE",
        "niiR": "ZRANGE ZREVRANGE",
    }.items()
    for verb in verbs.split()
}
KINDS = {"GET": "string", "SET": "string", "RPUSH": "list"}


def some_command(chance: random.Random) -> list[bytes]:
    """A command, mostly of a key of its own kind; seldom with a word too many or too few."""
    choose, often = chance.choice, chance.random
    verb = choose([*sorted(SHAPES), *["ZADD"] * 4, "HSET", "RPUSH"])
    kind = KINDS.get(verb) or {"H": "hash", "Z": "zset", "S": "string", "G": "string"}.get(verb[0])
    many = range(choose((0, 0, 0, 1, 2)))

    def number(good: tuple[bytes, ...], bad: tuple[bytes, ...]) -> bytes:
        return choose(good if often() < 0.95 else bad)

    def integer() -> bytes:
        return number(INTEGERS, BAD_INTEGERS)

    def score() -> bytes:
        return number(SCORES + INFINITE, BAD_SCORES)

    def bounds() -> list[bytes]:
        if often() < 0.5:
            return [b"+inf", b"-inf"] if "REV" in verb else [b"-inf", b"+inf"]
        return [(b"(" if often() < 0.3 else b"") + score() for _ in "lh"]

    def options(letter: str) -> list[bytes]:
        times = [choose((b"PX", b"px", b"PXAT")), number(TIMES, BAD_INTEGERS)]
        known = {"S": [[b"NX"], [b"KEEPTTL"], times], "R": [[b"WITHSCORES"]]}
        known["L"] = [*known["R"], [b"LIMIT", integer(), integer()]]
        some = [option for option in known[letter] if often() < 0.4]
        some += [choose(([b"keepttl"], [b"LIMIT", b"0", b"1"], [b"PX"], [b"x"]))] if often() < 0.06 else []
        chance.shuffle(some)
        return [word for option in some for word in option]

    parts: dict[str, Callable[[], list[bytes]]] = {
        "n": lambda: [choose(NAMES[kind] if kind and often() < 0.85 else EVERY_NAME)],
        "N": lambda: [choose(EVERY_NAME) for _ in many],
        "w": lambda: [choose(WORDS)],
        "W": lambda: [choose(WORDS) for _ in many],
        "i": lambda: [integer()],
        "t": lambda: [number(TIMES, BAD_INTEGERS + (LEAST, MOST)[: 1 + (verb == "PEXPIRE")])],
        "s": lambda: [score()],
        "b": bounds,
        "P": lambda: [word for _ in many for word in (score(), choose(WORDS))],
        "F": lambda: [choose(WORDS) for _ in many for _ in "ft"],
        **{letter: lambda letter=letter: options(letter) for letter in "SRL"},
    }
    words = [verb.encode(), *(word for letter in SHAPES[verb] for word in parts[letter]())]
    change = often()
    return words[:-1] if change < 0.02 and words[1:] else [*words, b"x"] if change < 0.03 else words


def commands_of(seed: int) -> list[list[bytes]]:
    """The commands of a case; CONFIG fills the memory, or makes room."""
    chance = random.Random(seed)
    full = b"CONFIG SET maxmemory %d"
    toggles = [(full % (number % 2)).split() for number in range(4)] if chance.random() < 0.3 else []
    found = [some_command(chance) for _ in range(30)]
    for toggle in toggles[1:3]:
        found.insert(chance.randrange(10) + 10 * toggles.index(toggle), toggle)
    return [[b"CONFIG", b"SET", b"maxmemory", b"0"], [b"FLUSHDB"], [b"TIME"], *found, *toggles[:1]]


def test_every_command_answers_as_a_real_server_does(real):
    """Replies as bytes, errors by their codes; afterwards all keys, what they hold, and TTLs."""
    assert {name.encode() for name in SHAPES} == set(COMMANDS)
    sees = packed("EVALSHA", SEES_SHA, len(EVERY_NAME), *EVERY_NAME)
    met = Counter()
    for seed in ONE_SEED or range(COMMAND_CASES):
        commands = commands_of(seed)
        *found, (ended, seen) = replies(real, [*(packed(*words) for words in commands), sees])
        server = Server(now=micros(found[2]))
        slack = elapsed_ms(found[2], ended)
        history = []
        for words, reply in zip(commands[3:], found[3:]):
            if words[0] == b"CONFIG":
                server.is_full = words[3] == b"1"
                continue
            expected = simulated(partial(server.run, *words))
            met[words[0].decode(), isinstance(expected, ServerError)] += 1
            history.append(f"{words} -> {reply!r}")
            if words[0] in (b"HGETALL", b"HKEYS") and isinstance(reply, list):
                reply, expected = sorted(reply), sorted(expected)
            tells_time = words[0] in (b"PTTL", b"PEXPIRETIME", b"TIME")
            if words[0] == b"TIME" and not isinstance(reply, client.ServerError):
                reply, expected, tells_time = micros(reply) // MS, micros(expected) // MS, True
            if not is_same(reply, expected, slack if tells_time else 0):
                pytest.fail(f"SEED={seed}: not {expected!r}:\n" + "\n".join(history))
        if found := list(key_differences(server, seen, slack)):
            pytest.fail(f"SEED={seed}: {found}:\n" + "\n".join(history))
    if not ONE_SEED:
        assert {name for name, _ in met} == set(SHAPES)
        assert {name for name, failed in met if not failed} == set(SHAPES)


# Whole scripts


class Asked(NamedTuple):
    """A call of a script, and what was there before."""

    verb: str
    before: tuple[tuple[bytes, Entry], ...]
    now: int
    keys: tuple[bytes, ...]
    told: tuple[bytes, ...]
    is_full: bool = False

    def sent(self) -> list[bytes]:
        """What a real server is sent: its memory is empty before, and the clock stands still meanwhile."""
        sha = sha1(REAL[self.verb].encode()).hexdigest()
        names = sorted({*self.keys, *dict(self.before)})
        full = [("CONFIG", "SET", "maxmemory", most) if self.is_full else ("PING",) for most in (1, 0)]
        commands = [
            *(("TIME",), ("FLUSHDB",), *set_clock(self.now)),
            *(words for name, entry in self.before for words in self._laid_out(name, entry)),
            *(full[0], ("EVALSHA", sha, len(self.keys), *self.keys, *self.told), full[1]),
            ("EVALSHA", SEES_SHA, len(names), *names),
        ]
        return [packed(*words) for words in commands]

    def _laid_out(self, name: bytes, entry: Entry) -> Iterator[tuple[Any, ...]]:
        pairs = entry.kind in ("hash", "zset")
        words = [word for pair in entry.value for word in pair] if pairs else entry.value
        if entry.kind == "zset":
            words = [b"%d" % word if isinstance(word, float) else word for word in words]
        verb = {"string": "SET", "hash": "HSET", "zset": "ZADD", "list": "RPUSH"}[entry.kind]
        yield (verb, name, words) if entry.kind == "string" else (verb, name, *words)
        if entry.expiry is not None:
            yield (
                ("PEXPIREAT", name, entry.expiry)
                if is_of_the_clock(name)
                else ("PEXPIRE", name, entry.expiry - self.now // MS)
            )

    def played(self) -> tuple[Any, Server]:
        """The simulated reply, or error, and the keys afterwards."""
        server = Server(self.before, self.now)
        server.is_full = self.is_full
        reply = simulated(lambda: script(PLAIN[self.verb]).run(server, self.keys, self.told))
        return reply, Server(server.keys.items(), server.now)

    def differences(self, played: tuple[Any, Server], found: list[Any]) -> list[str]:
        """How the real server's replies differ from what was played."""
        (began, *_), (ended, seen) = found, found[-1]
        expected, server = played
        reply, elapsed = found[-3], elapsed_ms(began, ended)
        for place in (
            (11, 13, 15) if self.verb == "look" and len(expected) > 2 else ()
        ):  # TTLs go on meanwhile
            if 0 <= expected[place] - reply[place] <= elapsed:
                reply[place] = expected[place]
        wrong = [] if is_same(reply, expected) else [f"it answers {reply!r}, not {expected!r}"]
        return [*wrong, *key_differences(server, seen, elapsed)]


def word_of(reply: Any) -> str:
    """What a script has answered first."""
    if isinstance(reply, ServerError):
        return str(reply)
    word = reply.split()[0] if isinstance(reply, bytes) else reply[0]
    return "the time" if isinstance(word, int) else word.decode()


def is_of_the_clock(name: bytes) -> bool:
    """Whether a key ends at a moment that a script has read; others end so long after it was written."""
    return name.startswith((LOCK, RECORD))


def asked(verb: str) -> Iterator[Asked]:
    """Odd calls, so late that no server's clock is there yet; a few when memory is full."""
    draw = random.Random(1)
    for call in odd_calls(verb, SCRIPT_CASES):
        told = tuple(word.encode() for word in call.told)
        before = laid_out(call.store, call.now // MS)
        yield Asked(verb, before, call.now, call.keys, told, draw.random() < 0.15)


def asked_of_lines() -> Iterator[Asked]:
    """Calls about the lines that workers are to look at."""
    for seed in range(SCRIPT_CASES // 20):
        schedule = Schedule(seed)
        assert not schedule.broken()
        yield from (Asked(*call) for call in schedule.calls)


def asked_of_newest() -> Iterator[Asked]:
    """Calls that replace each other, some of which are equal, lead, are debounced, or are revoked."""
    draw = random.Random(1)
    for about in ({"digests": "xyx"}, {"digests": "xy", "leading": True}, {"digests": "xx", "debounce": 7}):
        world = Replacing(**about, revokes=1, bounds=1, begins=EPOCH + 9 * SECOND)
        with suppress(RuntimeError):  # there are more states
            explore(world, (), SCRIPT_CASES // 3)
        calls = random.Random(1).sample(list(world.known), min(len(world.known), SCRIPT_CASES // 5))
        yield from (Asked(*call, draw.random() < 0.15) for call in calls)


def lasting(call: Asked) -> Asked:
    """Changed so that it is all the same how far the real server's own clock goes on meanwhile.

    No key ends soon: it lasts for an hour longer. And no TTL is what a script compares it with: one of that
    length would be shorter a moment later.
    """
    soon = call.now // MS + 1_000

    def longer(name: bytes, entry: Entry) -> Entry:
        if is_of_the_clock(name) or entry.expiry is None:
            return entry
        return entry._replace(expiry=entry.expiry + (777 if entry.expiry > soon else 3_600_000))

    return call._replace(before=tuple((name, longer(name, entry)) for name, entry in call.before))


@pytest.mark.parametrize("verb", [*KNOWN_WORDS, "lines", "newest"])
def test_every_script_answers_as_on_a_real_server(real, verb):
    """On a clock of the test's own, also when memory is full; and leaves the same keys."""
    verbs = [each for each in REAL if each.rstrip("#") == verb]
    by_worlds = {"lines": asked_of_lines, "newest": asked_of_newest}
    found_calls = by_worlds[verb]() if verb in by_worlds else chain(*map(asked, verbs))
    calls = [lasting(call) for call in found_calls]
    words = set()
    for first in range(0, len(calls), 20):
        some = calls[first : first + 20]
        found = iter(replies(real, [each for call in some for each in call.sent()]))
        for call in some:
            played = call.played()
            words.add(word_of(played[0]))
            wrong = call.differences(played, [next(found) for _ in call.sent()])
            for _ in range(3):  # the real server's own clock goes on: a TTL may have met a bound
                wrong = wrong and call.differences(played, replies(real, call.sent()))
            assert not wrong, (wrong, call)
    missing = set(KNOWN_WORDS.get(verb, "").split()) - words
    assert not missing, missing


# What scripts may do, and what becomes of what they return

SAME = (
    "return {1.9, -1.9, true, false, 'x', {1, {2, 'y'}}, redis.call('SET', 'k', 5)}",
    "return {1, nil, 3}",
    "return {[1] = 'a', [3] = 'c'}",
    "return {{}, {a = 1}, {'a', {}}}",
    "return",
    "return true",
    "return -0.5",
    "return 1e15",
    "return {ok = 'fine'}",
    "return {err = 'MINE said'}",
    "return redis.error_reply('MINE said')",
    "return {redis.call('HGETALL', 'k'), redis.call('GET', 'k'), redis.call('MGET', 'k', 'k')}",
    "return {redis.call('TYPE', 'k').ok, type(redis.call('GET', 'k'))}",
    "redis.call('RPUSH', 'k', 1, 2) return {type(redis.pcall('GET', 'k')), redis.call('TYPE', 'k')}",
    "redis.call('RPUSH', 'k', 1) return redis.call('GET', 'k')",
    "redis.call('RPUSH', 'k', 1) return redis.pcall('GET', 'k')",
    "redis.call('RPUSH', 'k', 1) return redis.pcall('GET', 'k').ok == nil and redis.call('PTTL', 'k')",
    "redis.call('SET', 'k', 5.0) return redis.call('GET', 'k')",
    "redis.call('SET', 'k', 4e15 + 1) return redis.call('GET', 'k')",
    "redis.call('SET', 'k', 2^53) return redis.call('GET', 'k')",
    "redis.call('SET', 'k', -7) return redis.call('GET', 'k')",
    "return redis.call('SET', 'k', nil)",
    "return redis.call('SET', 'k', true)",
    "return redis.call('SET', 'k', {})",
    "return redis.call('SET', 'k', redis.call('GET', 'k'))",
    "return redis.call('SET', 'k')",
    "return redis.call('NOSUCH', 'k')",
    "return redis.call()",
    "return redis.pcall('NOSUCH', 'k')",
    "return unknown",
    "new = 1",
    "error('MINE said')",
    "local none = nil return none.field",
    "return tostring(2^53) .. 1e15 .. ' ' .. 1e17 .. string.format('%.0f', 4e15 + 1)",
    "return #ARGV .. ARGV[1] .. tostring(ARGV[2]) .. #KEYS .. KEYS[1]",
    "KEYS[1] = 'j' return {KEYS[1], unpack(KEYS, 2)}",
    "return redis.call('DEL', 'k') == 0 and redis.call('HSET', 'k', 'f', 1.0)",
)
REFUSED = (  # Redis and Valkey differ here, or allow what a Cluster does not
    "return redis.call('SET', 'undeclared', 1)",
    "return redis.call('GET', 'undeclared')",
    "return redis.call('EXISTS', 'k', 'undeclared')",
    "return redis.call('SET', 'k', 1e17)",
    "return redis.call('SET', 'k', 1.5)",
    "return redis.call('ZADD', 'k', 1e17, 'm') and redis.call('ZSCORE', 'k', 'm')",
    "return redis.call('ZADD', 'k', 0.1, 'm') and redis.call('ZSCORE', 'k', 'm')",
    "return redis.call('ZADD', 'k', '0x10', 'm')",
    "return redis.call('ZADD', 'k', '-0', 'm')",
    "return redis.call('ZCOUNT', 'k', ' 1', '+inf')",
)


@pytest.mark.parametrize("text", SAME)
def test_script_gets_and_gives_what_it_does_on_a_real_server(text, real):
    """Values, errors by their codes, and what it may not name."""
    *_, found = replies(real, [packed("FLUSHDB"), packed("EVAL", text, 1, "k", "arg")])
    expected = simulated(lambda: script(text).run(Server(now=EPOCH), (b"k",), (b"arg",)))
    assert is_same(found, expected), (found, expected)


@pytest.mark.parametrize("text", REFUSED)
def test_simulated_server_refuses_what_servers_do_not_agree_on(text):
    """Nobody relies on it without being told."""
    with pytest.raises(ServerError):
        script(text).run(Server(now=EPOCH), (b"k",), ())


def test_key_lives_through_the_millisecond_of_its_end(real):
    """Whenever it is asked for; its last one is met."""
    far, lasts = 4_000_000_000_000, []
    real.ask("SET", "far", "", "PXAT", far)
    asks = [packed("PTTL", name) for name in ("far", "k", "far")]
    while 0 not in lasts:
        real.ask("SET", "k", "", "PX", 3)
        server = Server([(b"k", Entry("string", b"", real.ask("PEXPIRETIME", "k")))])
        left = 0
        while left >= 0:
            before, left, after = replies(real, asks)
            if before == after:  # within one millisecond
                server.now = (far - before) * MS
                assert server.run(b"PTTL", b"k") == left
                lasts.append(left)
