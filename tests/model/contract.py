"""What holds of each answer of a script by itself, whatever came before: the script's contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.model import changes, edits, grants, holders, leaving, looks, turns
from tests.model.layout import CALLS, LINE, MARK, PERMITS, laid_out, pair, read_back
from tests.model.line import waiter, waiting
from tests.model.lock import Call
from tests.model.permits import at, permit_in, said_of
from tests.model.rules import is_stale, rule_of, word_of
from tests.model.store import MS, NOT_A_STRING, NUMBER, Record, Store, seconds, task_of, up
from tests.model.terms import of_key, terms_of
from tests.simulation.scripts import Script
from tests.simulation.server import COMMANDS, Entry, Reply, Server, ServerError

KNOWN_WORDS = {
    "acquire": "acquired again resumed taken_over held paced paused stale line more FOREIGNRECORD",
    "renew": "renewed repaired gone lost",
    "release": "released resting repaired held_for_retry gone lost",
    "hold": "held_for_retry released resting handed failed gone lost",
    "park": "new parked handed stale taken crowded more",
    "leave": "left stale more",
    "serve": "handed taken_over held empty more FOREIGNRECORD",
    "free": "released repaired gone lost more",
    "look": "more",  # or the time, and then what a call would be told
    "mark": "marked queued running done WRONGTYPE",
    "if_same": "done changed",
    "forget": "freed lost WRONGTYPE",
    "hold_back": "paused stands lost WRONGTYPE",
    "change_terms": "WRONGTYPE",  # or the time
}
"""What each script may answer first; ERR would be an error of its own."""

REFUSES = (
    *(
        "held",
        "stale",
        "line",
        "more",
        "lost",
        "queued",
        "running",
        "done",
        "changed",
        "taken",
        "again",
    ),
)
WRITES = [name for name, (_, writes, *_) in COMMANDS.items() if writes]
NOT_TOLD = ("-", "0", "0", "0", "0", "1", "0", "0")
"""What an acquire has no words for, as its call has not waited, and has plain terms."""
ALLOWED_ON_FULL = (
    *("renew", "release", "hold", "park", "leave", "serve", "free", "if_same", "forget"),
    *("change_terms", "hold_back"),
)
"""What a server allows whose memory is full: none of these grants a lock."""


@dataclass(frozen=True)
class Played:
    """What became of a call: the keys at that millisecond, and the reply or an error."""

    keys: dict[bytes, Entry]
    now_ms: int
    reply: Reply
    error: str = ""

    @property
    def word(self) -> str:
        """What the script answers first."""
        if self.error:
            return self.error.split()[0]
        reply = self.reply.split()[0] if isinstance(self.reply, bytes) else self.reply[0]
        return reply.decode() if isinstance(reply, bytes) else str(reply)

    @cached_property
    def words(self) -> list[Any]:
        """All that it answers, as text."""
        words = self.reply.split(b" ") if isinstance(self.reply, bytes) else self.reply
        return [
            word.decode() if isinstance(word, bytes) else None if word is None else str(word)
            for word in words
        ]

    @cached_property
    def after(self) -> Store:
        """What the keys hold."""
        return read_back(self.keys, self.now_ms)


class Refusing(Server):
    """A server that forbids one command, as an ACL may."""

    forbidden = b""

    def run(self, *words: bytes) -> Reply:
        """As a server, but for that."""
        if words[0] == self.forbidden:
            raise ServerError("NOPERM this user has no permissions to run the command")
        return super().run(*words)


def played(script: Script, call: Call, *, is_full: bool = False, forbidden: bytes = b"") -> Played:
    """What the script makes of a call."""
    server = Refusing(laid_out(call.store, call.now // MS), call.now)
    server.is_full, server.forbidden = is_full, forbidden
    told = call.told[:5] if call.name == "acquire" and call.told[5:] == NOT_TOLD else call.told
    try:
        reply = script.run(server, call.keys, tuple(word.encode() for word in told))
    except ServerError as error:
        return Played(server.keys, call.now // MS, None, str(error))
    return Played(server.keys, call.now // MS, reply)


Clause = Callable[[Script, Call, Played], bool]


def ends_by_no_error(script: Script, call: Call, found: Played) -> bool:
    """A script answers by one of its words, be the keys what they may."""
    says_the_time = call.name in ("look", "change_terms") and not found.error
    return says_the_time or found.word in KNOWN_WORDS[call.name].split()


def changes_nothing_if_refused(script: Script, call: Call, found: Played) -> bool:
    """A refusal leaves what the keys hold as it is, but for a place in line to ask again.

    What is known of the permits, and a failed run's record, are written all the same.
    """
    lingers = call.name == "acquire" and call.told[7] != "0"
    if found.word not in REFUSES or (lingers and found.word == "held") or call.name in ("serve", "forget"):
        return True
    if call.name == "if_same" and found.word == "done":  # which is no refusal there
        return True
    return _held(found.keys) == _held(dict(laid_out(call.store, call.now // MS)))


def _held(keys: dict[bytes, Entry]) -> dict[bytes, Any]:
    return {name: entry.value for name, entry in keys.items() if name != PERMITS}


def expires(script: Script, call: Call, found: Played) -> bool:
    """Every key that a script has written expires, and not before what it stands for."""
    before = dict(laid_out(call.store, call.now // MS))
    for name, entry in found.keys.items():
        if entry != before.get(name) and entry.expiry is None:
            return False
    after, told, now_ms = found.after, call.told, found.now_ms
    for number in range(1 + len(after.others)):
        old, new = at(call.store, number), at(after, number)
        record = new.record
        if not isinstance(record, Record) or record == old.record or call.name == "forget":
            continue
        if record.deadline:
            keep = {"acquire": 2, "renew": 2, "hold": 2, "release": 2, "serve": 2}.get(call.name)
            expiry = up(record.deadline, MS) + int(told[keep]) if keep else new.record_expiry
            if (new.value, new.expiry, new.record_expiry) != (seconds(record.deadline), expiry, expiry):
                return False
            lasts = after.known is None or now_ms + after.known.lease + 1 >= (expiry or 0)
            asks_soon = call.name == "serve" or found.word in grants.PUT_OFF
            if number and not lasts and not asks_soon:  # those say how many permits there are
                return False
        elif call.name in ("release", "serve", "free"):
            remember = int(told[1] if call.name == "free" else told[2])
            if (new.value, new.record_expiry) != (None, now_ms + remember):
                return False
    return all(_lasts(call, before, found, *each) for each in _promised(call, found))


def _promised(call: Call, found: Played) -> Iterator[tuple[bytes, int, bool]]:
    """Which keys are to last for how long (ms) from now; exactly, or at least."""
    told, word = call.told, found.word
    if word == "marked" or (call.name == "if_same" and word == "done" and told[1]):
        yield call.keys[2 if call.name == "mark" else 0], int(told[1]), False
    elif call.name in ("park", "leave") and word in ("new", "parked", "handed", "left"):
        if call.name == "leave" and told[8]:
            return
        remember = int(told[5 if call.name == "park" else 3])
        yield call.keys[4], remember, True
        if call.name == "park":
            yield from ((name, remember, False) for name in (LINE, CALLS, PERMITS))
    elif call.name == "acquire" and word in grants.GRANTED and int(told[6]) and len(call.keys) > 5:
        yield call.keys[5], int(told[6]), True
    elif call.name == "release" and word in ("released", "resting", "repaired"):
        was_released = at(call.store, edits.number_of(call)).holder.state != "running"
        if told[3] != "0" and not was_released and task_of(told[0])[0] is not None:
            yield MARK, int(told[3]), False


def _lasts(
    call: Call, before: dict[bytes, Entry], found: Played, name: bytes, ms: int, exactly: bool
) -> bool:
    entry, due = found.keys.get(name), call.now // MS + ms
    if entry is None:
        return name in (LINE, CALLS, PERMITS)
    old = before.get(name)
    if name == MARK and call.name == "release" and old is not None:
        return entry == old
    least = due if exactly or old is None or old.expiry is None else max(due, old.expiry)
    return entry.expiry == least if exactly or name == MARK else (entry.expiry or 0) >= least


def tells_what_it_found(script: Script, call: Call, found: Played) -> bool:
    """The reply says the time, and the lock's value, record and whatever else was there."""
    if found.error or found.word == "more":
        return True
    check = _TELLS.get(call.name)
    return check is None or check(call, found.word, found.words, found.after)


def _tells_acquire(call: Call, word: str, reply: list[Any], after: Store) -> bool:
    has_line = len(call.keys) > 2
    if len(reply) < 5:
        number = permit_in(reply)
        old, new = at(call.store, number), at(after, number)
        nothing = not has_line or not (call.store.mark or waiting(call.store))
        told = [str(call.now), str(new.holder.fence), *([str(number)] if number else [])]
        return old.value is None and nothing and reply[1:] == told
    number = permit_in(reply)
    old, new = at(call.store, number), at(after, number)
    mark = call.store.mark.task_id if has_line and call.store.mark else None
    mark = {"paced": terms_of(call).counts, "paused": of_key(call.store) or ""}.get(word, mark)
    waits = str(len(waiting(call.store))) if has_line else "0"
    if (int(reply[3]), reply[6], str(reply[7])) != (call.now, mark, waits):
        return False
    if word == "stale":
        return True
    if word in grants.PUT_OFF:
        return (
            reply[5] in (None, said_of(old, call.now), said_of(new, call.now))
            and int(reply[2]) == old.holder.fence
            and int(reply[1]) > call.now
        )
    until = old.holder.deadline
    if word == "line":
        record = f"\n0\n0\nhanded\n{call.now}\n{grants.caller_of(call).first}"
        return (int(reply[1]), int(reply[2]), *reply[4:6]) == (until, old.holder.fence, None, record)
    if word in grants.GRANTED:
        until = new.holder.deadline
        fence = new.holder.fence
    else:
        fence = old.holder.fence
    if word == "held" and int(reply[1]) <= call.now and NUMBER.fullmatch(old.value or ""):
        return False
    is_foreign = word == "held" and (not NUMBER.fullmatch(old.value or "") or call.now >= until)
    told = (reply[4], reply[5], int(reply[2]))
    return told == (old.value, said_of(old, call.now), fence) and (is_foreign or int(reply[1]) == until)


def _tells_release(call: Call, word: str, reply: list[Any], after: Store) -> bool:
    number = edits.number_of(call)
    old, new = at(call.store, number), at(after, number)
    if len(reply) == 1:
        return word == "released" and old.holder.state in ("running", "failed")
    if (reply[1] is not None and int(reply[1]) != call.now) or reply[2] != old.value:
        return False
    if word == "lost" and old.holder.token != call.told[0]:
        return reply[3] is None and reply[4] == (None if old.holder.state == "" else str(old.holder.since))
    heir = new.holder.info if new.holder.state == "handed" else None
    if len(reply) < 4 or word == "resting":
        return heir is None or word == "resting" or call.name == "hold" or not call.told[4]
    if len(call.keys) < 4:
        return reply[3:5] == [None, None]
    known = waiter(call.store, heir)
    return (reply[3], reply[4]) == (heir, known.call if known is not None and not known.comes else None)


def _tells_renew(call: Call, word: str, reply: list[Any], after: Store) -> bool:
    number = edits.number_of(call)
    old, new = at(call.store, number), at(after, number)
    is_its_own = (old.holder.token, old.holder.state) == (call.told[0], "running") and old.value is not None
    until = new.holder.deadline if is_its_own else 0
    return (int(reply[1]), int(reply[2]), reply[3]) == (until, call.now, old.value)


def _tells_free(call: Call, word: str, reply: list[Any], after: Store) -> bool:
    permits = (at(call.store, number) for number in range(1 + len(call.store.others)))
    its = [permit.value for permit in permits if _is_held_for(permit, call.told[0])]
    return int(reply[1]) == call.now and reply[2] in (its or [None])


def _tells_mark(call: Call, word: str, reply: list[Any], after: Store) -> bool:
    if word == "WRONGTYPE":
        return True
    whose = {"marked": call.told[0], "queued": call.store.mark and call.store.mark.task_id}
    return int(reply[2]) == call.now and reply[1] == whose.get(word, reply[1])


_TELLS: dict[str, Callable[[Call, str, list[Any], Store], bool]] = {
    "acquire": _tells_acquire,
    "release": _tells_release,
    "free": _tells_free,
    "hold": _tells_release,
    "renew": _tells_renew,
    "mark": _tells_mark,
}


def answers_by_the_rules(script: Script, call: Call, found: Played) -> bool:
    """Whose a lock, a mark or a place is, and since when, decides what is answered."""
    if call.name == "look" or found.error:
        return True
    number = edits.number_of(call)
    if "#" in call.verb and call.name == "free":
        owned = [
            n for n in range(1 + len(call.store.others)) if _is_held_for(at(call.store, n), call.told[0])
        ]
        if len(owned) != 1 or at(call.store, owned[0]).value is None:
            return True
        number = owned[0]
    word = word_of(call, number)
    if call.name == "acquire" and word is None:
        stale = len(call.keys) > 5 and is_stale(call, call.told[9], *call.told[5:7])
        return stale == (found.word == "stale") and found.word != "more"
    return word in (None, found.word)


def _is_held_for(store: Store, task: str) -> bool:
    return store.holder.state == "held_for_retry" and task_of(store.holder.token)[0] == task


def grants_what_is_free(script: Script, call: Call, found: Played) -> bool:
    """A lock is granted if it is nobody's, or the caller's own by one of the rules; refused only if not."""
    if call.name != "acquire" or found.error or found.word not in (*grants.GRANTED, "again", "held"):
        return True
    reply, told = found.words, call.told
    number = permit_in(reply)
    old, new = at(call.store, number), at(found.after, number)
    record, token, task = old.holder, told[0], task_of(told[0])
    rule = rule_of(call, old)
    if found.word == "held":
        return rule == "held"
    if found.word == "again":
        return rule == "again"
    fence = record.fence if found.word == "resumed" else max(record.fence + 1, call.now)
    info = Record(token, call.now + int(told[1]), fence, "running", call.now, told[3])
    word = {"resumed": "resumed", "dead": "taken_over"}.get(rule, "acquired")
    if rule == "expired":
        recorded = record.deadline > 0 and old.value == seconds(record.deadline)
        died = record.state not in ("resting", "handed") and record.token != token
        word = "taken_over" if died or not recorded else "acquired"
    mark = call.store.mark
    ends = mark is not None and mark.task_id == task[0] and told[11] != "1" and len(call.keys) > 4
    return (
        rule not in ("held", "again")
        and new.record == info
        and found.word == word
        and (found.keys.get(MARK) is None if ends else new.mark == mark)
    )


def all_or_nothing_on_full(script: Script, call: Call, found: Played) -> bool:
    """When memory is full a script does all or nothing: nothing that grants, and all that gives back."""
    full = played(script, call, is_full=True)
    if full.error.startswith("OOM"):
        refused = full.keys == dict(laid_out(call.store, call.now // MS))
        is_anothers = call.name == "forget" and call.store.done is not None  # a success that stays
        return refused and (call.name not in ALLOWED_ON_FULL or is_anothers)
    return full == found


def forbidden_leaves_no_key_for_ever(script: Script, call: Call, found: Played) -> bool:
    """Whichever command the server forbids: nothing that was not there stays for ever, and who is granted a
    lock has it.

    Where PEXPIRE is forbidden no call has come to wait.
    """
    before = dict(laid_out(call.store, call.now // MS))
    for command in WRITES:
        if command == b"PEXPIRE" and call.store.calls.fields:
            continue
        refused = played(script, call, forbidden=command)
        keys = refused.keys
        if any(entry.expiry is None and before.get(name) != entry for name, entry in keys.items()):
            return False
        is_granted = call.name == "acquire" and refused.reply is not None and refused.word in grants.GRANTED
        if is_granted and not _has(refused.after, call.told[0]):
            return False
    return True


def _has(store: Store, token: str) -> bool:
    permits = (at(store, number) for number in range(1 + len(store.others)))
    return any(permit.value is not None and permit.holder.token == token for permit in permits)


def refuses_what_is_foreign(script: Script, call: Call, found: Played) -> bool:
    """Who is told that a record or a mark is another program's has found one. Its permit is nobody's."""
    store = call.store
    if call.name == "acquire" and found.word not in ("stale", "more"):
        number = grants.choice_of(call, grants.caller_of(call)).number if "#" in call.verb else 0
        error = f"FOREIGNRECORD {pair(number)[1].decode()} is no record of celery_setnx"
        if not isinstance(at(store, number).record, str):
            return found.word != "FOREIGNRECORD"
        return found.error == error and found.after == edits.before(call)
    if found.word == "WRONGTYPE":
        texts = (store.mark, store.done, store.terms)
        return any(text is not None and text.task_id == NOT_A_STRING for text in texts)
    records = [at(store, number).record for number in range(1 + len(store.others))]
    return found.word != "FOREIGNRECORD" or any(isinstance(record, str) for record in records)


def is_the_same_again(script: Script, call: Call, found: Played) -> bool:
    """Sent again at once, as its reply was lost, a script changes no more.

    But a lock that is held for a retry is held for longer each time that this may not start yet.
    """
    if found.error or found.word in grants.PUT_OFF or call.name == "free":
        return True
    if call.name == "serve" and found.word == "empty":
        return True  # of several that were handed over in vain the next is served
    again = played(script, call._replace(store=found.after)).keys
    if any(permit.value == NOT_A_STRING for permit in edits.permits_in(call)):
        again = {**again, PERMITS: found.keys.get(PERMITS)}  # counts now, if it is looked at
        return again == {**found.keys, PERMITS: found.keys.get(PERMITS)}
    return again == found.keys


CLAUSES: tuple[Clause, ...] = (
    ends_by_no_error,
    changes_nothing_if_refused,
    expires,
    tells_what_it_found,
    answers_by_the_rules,
    refuses_what_is_foreign,
    grants_what_is_free,
    all_or_nothing_on_full,
    forbidden_leaves_no_key_for_ever,
    is_the_same_again,
    *changes.CLAUSES,
    *grants.CLAUSES,
    *holders.CLAUSES,
    *leaving.CLAUSES,
    *looks.CLAUSES,
    *turns.CLAUSES,
)


def broken_clause(script: Script, call: Call, found: Played) -> str:
    """Which clause an answer breaks, be it that nobody could read it; '' if none."""
    for holds in CLAUSES:
        try:
            if not holds(script, call, found):
                return holds.__name__
        except (AssertionError, IndexError, TypeError, ValueError):
            return holds.__name__
    return ""
