"""Random schedules of operations on one lock, played on the model: what a server is to answer to each."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.injected import EPOCH, SECOND, set_clock
from tests.model.line import first_in_line, without_call
from tests.model.lock import Lock
from tests.model.store import MS, NOT_A_STRING, NUMBER, Calls, Line, Mark, Record, Store, purge, task_of

LOCK, RECORD, MARK = "lock.foo", "{lock.foo}:holder", "{lock.foo}:queued"
LINE, CALLS = "{lock.foo}:line", "{lock.foo}:calls"
OPERATIONS = 40
TOKENS = ("one", "a|0|1f", "a|0|2F", "a|1|3a", "a|1|3b", "b|b|0|4", "|0|5")
TASK_IDS = ("", "a", "b|b")
TICKETS = {task: f"{{lock.foo}}:ticket:{task}" for task in TASK_IDS}
PAIR, WAITING = (LOCK, RECORD), (LINE, CALLS)
KEYS = (*PAIR, MARK, *WAITING, *TICKETS.values())
COPIES = ("-", "x1", "y2")
LEASES = (1, 1_500, 100_000, SECOND, 1_234_567, 3 * SECOND)
RETENTIONS = (0, 1, 1_000, 86_400_000)
REMEMBER_MS = 60_000
MARK_LEASES_MS = (30_000, 60_001, 3_600_000)  # long: the server counts them by its own clock
HAND_OVERS = (1, 150_000, SECOND, 2_345_678)
WATCHES = (0, 1, SECOND, 100 * SECOND)
GARBAGE = ("", "free", "-1", "1e9", " 7", "7 ", "1.2.3", ".5", "0x10", "\n", "1\n", "9" * 30, "9" * 400)
VERBS = (
    "acquire " * 6 + "renew " * 5 + "release " * 5 + "hold " * 3 + "free " * 2 + "look " + "mark " * 5
    + "extend " * 2 + "unmark " * 2 + "park " * 5 + "leave " * 2 + "advance " * 9 + "foreign " * 4
).split()  # fmt: skip
# What is rare in a state, or ends it at once, comes more often in it.
WHEN_HELD = ("free", "foreign", "acquire") * 6
WHEN_HANDED = ("release", "hold", "park", "leave", "acquire", "acquire", "foreign") * 3
WHEN_ORPHANED = ("acquire", "acquire", "acquire", "leave", "unmark") * 4
WHEN_ONE_LINGERS = ("advance", "release", "release") * 5
FOREIGN = ("getset", "getset", "setnx", "setnx", "del", "garbage", "list", "record", "mark", "line")

SEES = f"""
local seen = {{}}
for _, key in ipairs(KEYS) do
  local kind, content = redis.call('TYPE', key).ok, '{NOT_A_STRING}'
  if kind == 'string' then
    content = redis.call('GET', key)
  elseif kind == 'zset' then
    content = table.concat(redis.call('ZRANGE', key, 0, -1, 'WITHSCORES'), ' ')
  elseif kind == 'hash' then
    local found, fields = redis.call('HGETALL', key), {{}}
    for i = 1, #found, 2 do fields[#fields + 1] = found[i] .. '=' .. found[i + 1] end
    table.sort(fields)
    content = table.concat(fields, ' ')
  end
  if kind ~= 'none' then
    local expiry = redis.call('PEXPIRETIME', key)
    if expiry > 0 and expiry < {EPOCH // MS} then expiry = 'in ' .. redis.call('PTTL', key) end
    seen[#seen + 1] = key .. ' ' .. content .. ' ' .. expiry
  end
end
return table.concat(seen, '\\n')
"""


def sight_of(store: Store, now: int) -> str:
    """What SEES is to say of the keys: an expiry that the server counts by its own clock as what is left."""
    value, expiry, record, record_expiry, mark, line, calls, tickets = store
    released = isinstance(record, Record) and record.deadline == 0
    found: list[tuple[str, object, object]] = [
        (LOCK, value, expiry),
        (RECORD, record, f"in {REMEMBER_MS}" if released else record_expiry),
        (MARK, mark and mark.task_id, mark and mark.expiry and f"in {mark.expiry - now // MS}"),
        (LINE, " ".join(f"{task} {since}" for since, task in line.places) or None, f"in {line.lease}"),
        (CALLS, " ".join(sorted(map("=".join, calls.fields))) or None, f"in {calls.lease}"),
        *((TICKETS[task], ticket.text, f"in {ticket.lease}") for task, ticket in tickets),
    ]
    return "\n".join(
        f"{key} {content} {-1 if expiry is None else expiry}"
        for key, content, expiry in found
        if content is not None
    )


class Step(NamedTuple):
    """One operation: what is sent, what the model replies (None: no verb), and what the keys are then."""

    what: str
    commands: list[tuple[Any, ...]]
    reply: tuple[Any, ...] | None
    sight: str

    @property
    def label(self) -> str:
        """The verb and its answer."""
        if self.reply is None:
            return "clock, foreigners"
        verb = self.what.split()[0]
        if verb == "look":
            waiters = "waiters" if self.reply[3] != "0" else "found"
            return "look: nothing" if self.reply[1:] == (None, None, "0") else f"look: {waiters}"
        return f"{verb}: {self.reply[0]}"


class Case:
    """A schedule, played on the model while it is made up; for a script's SHA stands its verb's place."""

    def __init__(self, seed: int, shas: dict[str, str]) -> None:
        self.random = random.Random(seed)
        self.shas = shas
        self.model = Lock()
        self.store = Store()
        self.now = EPOCH + self.random.randrange(10 * SECOND)
        self.last = TOKENS[0]

    def steps(self) -> Iterator[Step]:
        """The operations, each with the state that the model expects after it."""
        yield self.plain("start", [("DEL", *KEYS), *set_clock(self.now)])
        for _ in range(OPERATIONS):
            verbs = VERBS
            if self.state == "held_for_retry":
                verbs = [*verbs, *WHEN_HELD]
            elif self.state == "handed":
                verbs = [*verbs, *WHEN_HANDED]
            if self.is_orphaned:
                verbs = [*verbs, *WHEN_ORPHANED]
            if any(call.startswith("@") for _, call in self.store.calls.fields):
                verbs = [*verbs, *WHEN_ONE_LINGERS]
            yield getattr(self, self.random.choice(verbs))()

    @property
    def state(self) -> str:
        """The record's state."""
        return self.store.holder.state

    @property
    def is_orphaned(self) -> bool:
        """Whether calls wait, or a lock was kept for one, and the lock itself is gone."""
        return self.store.value is None and (self.state == "handed" or bool(self.store.calls.fields))

    def acquire(self) -> Step:
        """A new token, or the last one sent again."""
        choose = self.random.choice
        sent = {"token": self.token(), "lease": choose(LEASES), "retention": choose(RETENTIONS)}
        sent["info"] = choose(("{}", '{"pid":7}', "two\nlines"))
        sent["dead"] = self.token() if self.random.random() < 0.2 else ""
        task = task_of(sent["token"])[0]
        self.last, keys = sent["token"], PAIR
        if self.random.random() < 0.9 or self.state == "handed":
            keys += (*WAITING, MARK) if task is None else (*WAITING, MARK, TICKETS[task])
        says_nothing = 0.4 if self.state == "handed" else 0.15  # of a call that has not waited, and will not
        if self.random.random() >= says_nothing:
            sent["copy"], sent["remember"] = choose(COPIES), choose((0, 0, 0, 0, 0, *MARK_LEASES_MS))
            sent["linger"] = choose((0, 1, 20_000, 9 * SECOND)) if LINE in keys and task else 0
            sent["since"] = choose((0, self.now - self.random.randrange(3) * SECOND))
            sent["attempt"] = choose((0, 0, 1))
        return self.script("acquire", keys, **sent)

    def renew(self) -> Step:
        """By the holder or by anybody else."""
        return self.script("renew", PAIR, **self.leased())

    def hold(self) -> Step:
        """By the holder, for its retry, or by anybody else."""
        return self.script("hold", PAIR, **self.leased())

    def leased(self) -> dict[str, Any]:
        """Arguments with which a holder keeps its lock."""
        lease, retention = self.random.choice(LEASES), self.random.choice(RETENTIONS)
        return {"token": self.token(), "lease": lease, "retention": retention}

    def release(self) -> Step:
        """By the holder, once or twice, with or without a rest or a retry, or by anybody else."""
        choose, now = self.random.choice, self.now
        keys = choose((PAIR, PAIR + WAITING, *[(*PAIR, *WAITING, MARK)] * 5))
        if self.state == "handed":
            keys = PAIR + WAITING  # as it was handed with them
        return self.script(
            "release",
            keys,
            token=self.token(),
            rest_until=choose((0, 0, now, now + 1, now + 2 * SECOND, now - SECOND)),
            remember=REMEMBER_MS,
            again=choose((0, *MARK_LEASES_MS)) if MARK in keys else 0,
            hand_over=choose(HAND_OVERS),
        )

    def free(self) -> Step:
        """On behalf of a task whose retry will not come."""
        holder = task_of(self.store.holder.token)[0] or ""
        task_id = self.random.choice((holder, holder, *TASK_IDS))
        return self.script("free", PAIR, task_id=task_id, remember=REMEMBER_MS)

    def look(self) -> Step:
        """By anybody."""
        return self.script("look", (*PAIR, LINE) if self.random.random() < 0.8 else PAIR)

    def park(self) -> Step:
        """By a call that met the held lock, or by its courier."""
        choose = self.random.choice
        return self.waits(
            "park",
            copy=choose(("", *COPIES)),
            since=self.now - self.random.randrange(3) * SECOND,
            call=choose(("call", "call again")),
            remember=choose(MARK_LEASES_MS),
            watch=choose(WATCHES),
        )

    def leave(self) -> Step:
        """By a message that will not run, or by one of a call that has begun."""
        copy, remember = self.random.choice(COPIES), self.random.choice(MARK_LEASES_MS)
        return self.waits("leave", copy=copy, remember=remember)

    def waits(self, verb: str, **sent: Any) -> Step:
        """By some task; often the one for which the lock is kept."""
        heir = [self.store.holder.info] * 3 if self.state == "handed" else []
        task, attempt = self.random.choice((*heir, "a", "b|b")), self.random.choice((0, 0, 1))
        return self.script(verb, (*PAIR, *WAITING, TICKETS[task]), task=task, attempt=attempt, **sent)

    def mark(self) -> Step:
        """By the publisher of a new call, or of one that is marked or runs."""
        lease = self.random.choice(MARK_LEASES_MS)
        dedupe = self.random.choice(("until_started", "until_done", "until_done"))
        return self.script("mark", (*PAIR, MARK), task_id=self.task_id(), lease=lease, dedupe=dedupe)

    def extend(self) -> Step:
        """By the mark's publisher, or by anybody else."""
        lease = self.random.choice((0, *MARK_LEASES_MS))
        return self.script("extend", (MARK,), task_id=self.task_id(), lease=lease)

    def unmark(self) -> Step:
        """By the mark's publisher, or by anybody else."""
        return self.script("unmark", (MARK,), task_id=self.task_id())

    def advance(self) -> Step:
        """The clock, by a random amount or exactly to a boundary; what expires by then is deleted."""
        before, began, value = self.store, self.now, self.store.value
        moments = [self.now + self.random.randrange(4 * SECOND), self.now + self.random.randrange(2_000)]
        if isinstance(before.record, Record):
            moments += [before.record.deadline] * 2
        if value is not None and NUMBER.fullmatch(value) and float(value) < 9e9:
            moments += [int(float(value) * SECOND), int((float(value) + 1) * SECOND)]
        moments += [ms * MS for ms in (before.expiry, before.record_expiry) if ms is not None]
        moments += [int(call[1:]) for _, call in before.calls.fields if call.startswith("@")] * 8
        moment = self.random.choice(moments) + self.random.choice((-1, 0, 0, 1))
        self.now = min(max(self.now, moment), self.now + 100 * SECOND)
        mark = before.mark
        if mark is not None and mark.expiry is not None:
            # The server counts a mark's lease by a clock of its own, on which no time passes here.
            mark = mark._replace(expiry=mark.expiry + self.now // MS - began // MS)
        self.store = purge(before._replace(mark=mark), self.now)
        expired = [LOCK] * (before.value != self.store.value)
        expired += [RECORD] * (before.record != self.store.record)
        deleted = [("DEL", *expired)] if expired else []
        return self.plain(f"clock {self.now}", [*set_clock(self.now), *deleted])

    def foreign(self) -> Step:
        """What other programs do to the keys."""
        choose, store, rarely = self.random.choice, self.store, self.random.random() < 0.3
        second = str(self.now // SECOND + choose((-3, -2, -1, 0, 1, 2, 3)))
        number = choose((second, second, f"{second}.5", f"{second}.", f"00{second}", "0"))
        what = choose(FOREIGN)
        if what == "getset" and store.value != NOT_A_STRING:
            changed, commands = {"value": number, "expiry": None}, [("GETSET", LOCK, number)]
        elif what == "setnx":
            changed = {"value": number, "expiry": None} if store.value is None else {}
            commands = [("SETNX", LOCK, number)]
        elif what == "garbage":
            text = choose(GARBAGE)
            changed, commands = {"value": text, "expiry": None}, [("SET", LOCK, text)]
        elif what == "list" and rarely:
            changed = {"value": NOT_A_STRING, "expiry": None}
            commands = [("DEL", LOCK), ("RPUSH", LOCK, "x")]
        elif what == "record" and rarely:
            text = choose(("", "nobody", "a\n1\n2", "a\n1\n2\nRUNNING\n"))
            changed, commands = {"record": text, "record_expiry": None}, [("SET", RECORD, text)]
        elif what == "mark" and rarely:
            changed, commands = {"mark": Mark(NOT_A_STRING, None)}, [("DEL", MARK), ("RPUSH", MARK, "x")]
        elif what == "line" and rarely:
            changed = {"line": Line(), "calls": Calls(), "tickets": ()}
            commands = [("DEL", *WAITING, *TICKETS.values())]
        elif what == "line" and (first := first_in_line(store)) is not None:
            changed, commands = {"calls": without_call(store, first).calls}, [("HDEL", CALLS, first)]
        else:
            lock_alone = [[LOCK]] * (10 if self.state == "handed" else 2)
            gone = choose((*lock_alone, [LOCK, RECORD], [RECORD], [MARK]))
            changed, commands = {}, [("DEL", *gone)]
            if LOCK in gone:
                changed |= {"value": None, "expiry": None}
            if RECORD in gone:
                changed |= {"record": None, "record_expiry": None}
            if MARK in gone:
                changed |= {"mark": None}
        self.store = store._replace(**changed)
        return self.plain(f"foreign {commands}", commands)

    def token(self) -> str:
        """Mostly the holder's or the last sender's."""
        record = self.store.holder
        holder = record.token if record.state else self.last
        task, retries = task_of(holder)
        if task is not None and record.state == "held_for_retry":
            self.last = f"{task}|{retries + 1}|9f"
        known = [holder, holder]
        if record.state == "handed":
            known += [f"{record.info}|{self.random.choice((0, 1))}|9e"] * 3
        if record.state == "handed" or self.is_orphaned:
            known += [f"{task}|{self.random.choice((0, 1))}|9d" for task, _ in self.store.tickets] * 2
        return self.random.choice((*known, self.last, self.random.choice(TOKENS)))

    def task_id(self) -> str:
        """Mostly the marked task's or the holder's."""
        mark, holder = self.store.mark, task_of(self.store.holder.token)[0]
        known = [mark.task_id] * 4 if mark is not None and mark.task_id != NOT_A_STRING else []
        return self.random.choice((holder or "", task_of(self.last)[0] or "", *known, *TASK_IDS))

    def script(self, verb: str, keys: tuple[str, ...], **sent: Any) -> Step:
        """A call of a script."""
        command = ("EVALSHA", self.shas[verb], len(keys), *keys, *sent.values())
        what = f"{verb} {tuple(sent.values())}"
        if verb in ("acquire", "release", "look"):
            sent["line"] = LINE in keys
        self.store, reply = getattr(self.model, verb)(self.store, self.now, **sent)
        return Step(what, [command], reply, sight_of(self.store, self.now))

    def plain(self, what: str, commands: list[tuple[Any, ...]]) -> Step:
        """Commands that are no script."""
        return Step(what, commands, None, sight_of(self.store, self.now))
