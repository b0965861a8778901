"""Random schedules of operations on one lock, played on the model: what a server is to answer to each."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.injected import EPOCH, SECOND, set_clock
from tests.model.line import AWAY, waiter, waiting
from tests.model.permits import at, limit_of
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    Calls,
    Line,
    Mark,
    Record,
    Starts,
    Store,
    purge,
    task_of,
)
from tests.twin import lines
from tests.twin.line import with_call, with_place, without_call, without_ticket
from tests.twin.lines import Lines
from tests.twin.lock import Lock
from tests.twin.pace import MOST_STARTS, Pace

LOCK, RECORD, MARK = "lock.foo", "{lock.foo}:holder", "{lock.foo}:queued"
DONE, STARTS = "{lock.foo}:done", "{lock.foo}:starts"
LINE, CALLS, LINES_EPOCH = "{lock.foo}:line", "{lock.foo}:calls", "{lock.foo}:lines"
OPERATIONS = 40
TOKENS = ("one", "a|0|1f", "a|0|2F", "a|1|3a", "a|1|3b", "b|b|0|4", "|0|5")
TASK_IDS = ("", "a", "b|b")
LINES = {task: f"{LINES_EPOCH}:{task}" for task in TASK_IDS}
TICKETS = {task: f"{{lock.foo}}:ticket:{task}" for task in TASK_IDS}
PAIR, WAITING = (LOCK, RECORD), (LINE, CALLS)
PERMITS, NO_TICKET = "{lock.foo}:permits", "{lock.foo}:ticket:nobody"
PAIRS = (PAIR, *((f"{{lock.foo}}#{number}", f"{{lock.foo}}#{number}:holder") for number in (1, 2)))
OTHERS = tuple(name for pair in PAIRS[1:] for name in pair)
KEYS = (
    *PAIR,
    MARK,
    *WAITING,
    LINES_EPOCH,
    *LINES.values(),
    *TICKETS.values(),
    PERMITS,
    *OTHERS,
    DONE,
    STARTS,
)
CROWD = {f"gone{number}": number for number in range(11)}  # calls that wanted to ask again, and have not
SWEPT = (("a", "lock.foo"), ("a", "{lock.foo}"), ("b|b", "lock.foo"), ("", "lock.foo"))
COPIES = ("-", "x1", "y2")
LEASES = (1, 1_500, 100_000, SECOND, 1_234_567, 3 * SECOND)
HOUR, LONG = 3_600 * SECOND, 4_000 * SECOND
RETENTIONS = (0, 1, 1_000, 86_400_000)
REMEMBER_MS = 60_000
MARK_LEASES_MS = (30_000, 60_001, 3_600_000)  # long: the server counts them by its own clock
PERIODS = (1_234, SECOND, 3 * SECOND, 10 * SECOND)
HAND_OVERS = (1, 150_000, SECOND, 2_345_678)
BARE = {"copy": "-", "remember": 0, "linger": 0, "since": 0, "attempt": 0}  # of a call that has not waited
GARBAGE = ("", "free", "-1", "1e9", " 7", "7 ", "1.2.3", ".5", "0x10", "\n", "1\n", "9" * 30, "9" * 400)
VERBS = (
    "acquire " * 6 + "renew " * 5 + "release " * 5 + "hold " * 3 + "free " * 2 + "look " + "mark " * 5
    + "extend " * 2 + "unmark " * 2 + "forget " * 2 + "park " * 5 + "leave " * 2 + "advance " * 9
    + "foreign " * 4 + "serve " * 4 + "due " * 2 + "sweep " * 2 + "settle "
).split()  # fmt: skip
# What is rare in a state, or ends it at once, comes more often in it.
WHEN_HELD = ("free", "foreign", "acquire", "acquire", "advance") * 6
WHEN_HANDED = (
    "release",
    "hold",
    "park",
    "leave",
    "acquire",
    "acquire",
    "foreign",
    "serve",
    "serve",
    "advance",
) * 3
WHEN_ORPHANED = ("acquire", "acquire", "acquire", "leave", "unmark", "serve") * 4
WHEN_ONE_LINGERS = ("advance", "release", "serve", "acquire") * 5
WHEN_CLAIMED = ("settle",) * 12
WHEN_AT_A_SECOND = ("mark",) * 30
WHEN_ONE_IS_AWAY = ("advance", "advance", "serve", "serve", "look", "acquire", "release") * 3
FOREIGN = (
    "getset",
    "getset",
    "setnx",
    "setnx",
    "del",
    "garbage",
    "list",
    "record",
    "mark",
    "done",
    "starts",
    "line",
    "crowd",
)

SEES = f"""
local seen = {{}}
for _, key in ipairs(KEYS) do
  local kind, content = redis.call('TYPE', key).ok, '{NOT_A_STRING}'
  if kind == 'string' then
    content = redis.call('GET', key)
  elseif kind == 'zset' then
    content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for i = 2, #content, 2 do content[i] = string.format('%.0f', content[i]) end
    content = table.concat(content, ' ')
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


def sight_of(store: Store, swept: Lines, now: int) -> str:
    """What SEES is to say of the keys: an expiry that the server counts by its own clock as what is left."""
    value, expiry, record, record_expiry, mark, line, calls, tickets, others, known, done, starts = store
    leases = dict(swept.leases)
    dues = {task: " ".join(f"{name} {moment}" for moment, name in swept.of(task)) for task in LINES}
    found: list[tuple[str, object, object]] = [
        (LOCK, value, expiry),
        (RECORD, record, _expires(record, record_expiry)),
        (MARK, mark and mark.task_id, mark and mark.expiry and f"in {mark.expiry - now // MS}"),
        (LINE, " ".join(f"{task} {since}" for since, task in line.places) or None, _left(line.lease)),
        (CALLS, " ".join(sorted(map("=".join, calls.fields))) or None, _left(calls.lease)),
        (LINES_EPOCH, swept.epoch, _left(swept.epoch_lease)),
        *((LINES[task], due or None, _left(leases.get(task, -1))) for task, due in dues.items()),
        *((TICKETS[task], ticket.text, f"in {ticket.lease}") for task, ticket in tickets),
        (PERMITS, known and known.text, known and f"in {known.lease}"),
    ]
    for (name, record_name), permit in zip(PAIRS[1:], others):
        found.append((name, permit.value, permit.expiry))
        found.append((record_name, permit.record, _expires(permit.record, permit.record_expiry)))
    found.append((DONE, done and done.task_id, done and done.expiry and f"in {done.expiry - now // MS}"))
    times = " ".join(f"{at}#{number}#{fence} {at}" for at, number, fence in starts.times)
    found.append((STARTS, times or None, starts.expiry and f"in {starts.expiry - now // MS}"))
    return "\n".join(
        f"{key} {content} {-1 if expiry is None else expiry}"
        for key, content, expiry in found
        if content is not None
    )


def _expires(record: object, expiry: int | None) -> object:
    released = isinstance(record, Record) and record.deadline == 0
    return f"in {REMEMBER_MS}" if released else expiry


def _left(lease: int) -> str:
    return f"in {lease}" if lease >= 0 else "-1"


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
            waiters = "waiters" if self.reply[1] != "0" else "found"
            return "look: nothing" if self.reply[1:] == ("0", "1", None, None) else f"look: {waiters}"
        if verb == "due":
            return "due: noted"
        if verb == "sweep":
            return f"sweep: {'claimed' if self.reply[3:] else 'nothing'}"
        return f"{verb}: {self.reply[0]}"


class Case:
    """A schedule, played on the model while it is made up; for a script's SHA stands its verb's place."""

    def __init__(self, seed: int, shas: dict[str, str]) -> None:
        self.random = random.Random(seed)
        self.shas = shas
        self.model = Lock()
        self.store = Store()
        self.lines = Lines()
        self.claimed: tuple[str, str, str] | None = None
        self.now = EPOCH + self.random.randrange(10 * SECOND)
        self.last = TOKENS[0]
        self.has_several = self.random.random() < 0.5
        self.is_paced = self.has_several and self.random.random() < 0.6
        self.focus = 0

    @property
    def seen(self) -> Store:
        """The keys, of the permit that the operation is about."""
        return at(self.store, self.focus)

    @property
    def pair(self) -> tuple[str, str]:
        """The keys of that permit."""
        return PAIRS[self.focus]

    def terms(self, *limits: int) -> str:
        """How many permits there are, and how many starts within what time."""
        choose, limit = self.random.choice, self.random.choice(limits)
        is_paced = limit and self.is_paced and self.random.random() < 0.8
        return f"{limit}:{choose((1, 1, 2, 3))}/{choose(PERIODS)}" if is_paced else str(limit)

    def several(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """The keys of permits beside the first that a script is told of, and how many it knows then."""
        count = self.random.choice((1, 2, 3, 3)) if self.has_several else 1
        return OTHERS[: 2 * (count - 1)], {"count": count} if count > 1 else {}

    def steps(self) -> Iterator[Step]:
        """The operations, each with the state that the model expects after it."""
        yield self.plain("start", [("DEL", *KEYS), *set_clock(self.now)])
        for _ in range(OPERATIONS):
            self.focus = self.random.randrange(3) if self.has_several else 0
            verbs = VERBS
            if self.state == "held_for_retry":
                verbs = [*verbs, *WHEN_HELD]
            elif self.state == "handed":
                verbs = [*verbs, *WHEN_HANDED]
            if self.is_orphaned:
                verbs = [*verbs, *WHEN_ORPHANED]
            if any(call.startswith("@") for _, call in self.store.calls.fields):
                verbs = [*verbs, *WHEN_ONE_LINGERS]
            if self.claimed:
                verbs = [*verbs, *WHEN_CLAIMED]
            if self.store.mark is not None and str(self.now // SECOND) in self.values:
                verbs = [*verbs, *WHEN_AT_A_SECOND]
            if any(since >= AWAY for since, _ in self.store.line.places):
                verbs = [*verbs, *WHEN_ONE_IS_AWAY]
            yield getattr(self, self.random.choice(verbs))()

    @property
    def state(self) -> str:
        """The record's state."""
        return self.seen.holder.state

    @property
    def values(self) -> list[str | None]:
        """What the locks of permits beside the first say, if it is that second exactly."""
        return [] if self.now % SECOND else [permit.value for permit in self.store.others]

    @property
    def is_orphaned(self) -> bool:
        """Whether calls wait, or a lock was kept for one, and the lock itself is gone."""
        return self.seen.value is None and (self.state == "handed" or bool(self.store.calls.fields))

    def acquire(self) -> Step:
        """A new token, or the last one sent again."""
        if self.is_paced and self.state in ("held_for_retry", "handed") and self.random.random() < 0.4:
            return self.comes_back()
        choose = self.random.choice
        sent = {"token": self.token(), "lease": choose(LEASES), "retention": choose(RETENTIONS)}
        if self.state == "handed" and self.random.random() < 0.1:
            sent["lease"] = LONG
        sent["info"] = choose(("{}", '{"pid":7}', "two\nlines"))
        sent["dead"] = self.token() if self.random.random() < 0.2 else ""
        task = task_of(sent["token"])[0]
        self.last, keys = sent["token"], PAIR
        if self.random.random() < 0.9 or self.state == "handed":
            keys += (*WAITING, MARK, NO_TICKET if task is None else TICKETS[task], PERMITS)
        says_nothing = 0.4 if self.state == "handed" else 0.15  # of a call that has not waited, and will not
        if self.random.random() >= says_nothing:
            sent["copy"], sent["remember"] = choose(COPIES), choose((0, 0, 0, 0, 0, *MARK_LEASES_MS))
            sent["remember"] = sent["remember"] if task is not None else 0
            sent["linger"] = choose((0, 1, 20_000, 9 * SECOND)) if LINE in keys and task else 0
            sent["since"] = choose((0, self.now - self.random.randrange(3) * SECOND))
            sent["attempt"] = choose((0, 0, 1))
        in_full = {**sent, **{name: sent.get(name, value) for name, value in BARE.items()}, "terms": "1"}
        if LINE in keys and task is not None and self.now // 13 % 4 == 3:
            sent = in_full = {**in_full, "second": "0", "shared": "1"}
        if self.has_several and LINE in keys:
            sent = {**in_full, "terms": self.terms(1, 2, 3)}
            more = OTHERS[: 2 * choose((limit_of(sent["terms"]) - 1, 2))]
            if more or ":" in sent["terms"]:
                keys, sent["count"] = (*keys, STARTS, *more), 1 + len(more) // 2
        return self.by_one_of_several("acquire", keys, task, **sent)

    def comes_back(self) -> Step:
        """The call for which a permit is kept, at a pace; or another that waits."""
        choose, record = self.random.choice, self.seen.holder
        task, retries = task_of(record.token)
        if record.state == "handed":
            task = choose((record.info, record.info, *[waiter for waiter, _ in self.store.tickets]))
        if task not in TASK_IDS:
            task = "a"
        ticket = dict(self.store.tickets).get(task)
        sent = {"token": f"{task}|{retries + 1}|9f", "lease": choose(LEASES), "retention": choose(RETENTIONS)}
        sent |= {"info": "{}", "dead": "", **BARE}
        sent["copy"] = (ticket and ticket.begun_by) or choose(("-", "x1"))
        sent["attempt"] = ticket.attempt if ticket else 0
        sent["terms"] = f"{choose((2, 3))}:1/{choose(PERIODS)}"
        keys = (*PAIR, *WAITING, MARK, TICKETS[task], PERMITS, STARTS, *OTHERS)
        return self.script("acquire", keys, **sent, count=3)

    def renew(self) -> Step:
        """By the holder or by anybody else."""
        return self.script("renew", self.pair + (PERMITS,) * (self.focus > 0), **self.leased())

    def hold(self) -> Step:
        """By the holder, for its retry, or by anybody else."""
        sent = self.leased()
        if self.is_paced and self.random.random() < 0.4:
            sent["lease"] = self.random.choice((LONG, HOUR + 2 * SECOND))
        return self.script("hold", self.pair + (PERMITS,) * (self.focus > 0), **sent)

    def leased(self) -> dict[str, Any]:
        """Arguments with which a holder keeps its lock."""
        lease, retention = self.random.choice(LEASES), self.random.choice(RETENTIONS)
        return {"token": self.token(), "lease": lease, "retention": retention}

    def release(self) -> Step:
        """By the holder, once or twice, with or without a rest or a retry, or by anybody else."""
        choose, now = self.random.choice, self.now
        keys = choose((self.pair, self.pair + WAITING, *[(*self.pair, *WAITING, MARK)] * 5))
        leaves_line = (self.focus or self.is_paced) and self.random.random() < 0.2
        if self.state == "handed":
            keys = self.pair + WAITING  # as it was handed with them
        done_for = choose((0, *MARK_LEASES_MS)) if MARK in keys else 0
        if (self.focus or done_for) and MARK in keys:
            keys += (PERMITS,)
        if PERMITS in keys and (done_for or choose((False, True))):
            keys += (DONE,)
        return self.script(
            "release",
            keys,
            token=self.token(),
            rest_until=choose((0, 0, now, now + 1, now + 2 * SECOND, now - SECOND)),
            remember=REMEMBER_MS,
            again=choose((0, *MARK_LEASES_MS)) if MARK in keys else 0,
            hand_over="" if leaves_line else choose(HAND_OVERS),
            done_for=done_for,
        )

    def free(self) -> Step:
        """On behalf of a task whose retry will not come."""
        holder = task_of(self.seen.holder.token)[0] or ""
        task_id = self.random.choice((holder, holder, *TASK_IDS))
        more, count = self.several()
        return self.script("free", (*PAIR, PERMITS, *more), task_id=task_id, remember=REMEMBER_MS, **count)

    def look(self) -> Step:
        """By anybody."""
        if self.random.random() < 0.2:
            return self.script("look", PAIR)
        more, count = self.several()
        return self.script("look", (*PAIR, LINE, PERMITS, *more), **count)

    def park(self) -> Step:
        """By a call that met the held lock, or by its courier."""
        choose = self.random.choice
        return self.waits(
            "park",
            copy=choose(("", *COPIES)),
            since=self.now - self.random.randrange(3) * SECOND,
            call=choose(("call", "call again")),
            remember=choose(MARK_LEASES_MS),
            terms=self.terms(0, 1, 2, 3) if self.has_several else choose("01"),
            shared=self.shared(),
        )

    def serve(self) -> Step:
        """By anybody, once or twice."""
        choose, holder = self.random.choice, self.seen.holder
        more, count = self.several()
        terms = "01"[self.now // 7 % 2]
        if self.has_several and (more or choose((False, True))):
            more, count, terms = (STARTS, *more), {"count": 1, **count}, self.terms(0, 0, 1, 2, 3)
        return self.script(
            "serve",
            (*PAIR, *WAITING, PERMITS, *more),
            token=choose((f"served{self.random.randrange(9)}", holder.token or "served")),
            hand_over=choose(HAND_OVERS),
            remember=REMEMBER_MS,
            lease=choose((*LEASES, LONG)),
            dead=self.token() if self.random.random() < 0.2 else "",
            away=choose(("", "", holder.info, "a")),
            unsent=choose(("", "", "unsent")),
            terms=terms,
            **count,
        )

    def due(self) -> Step:
        """By a call that is about to wait, or by its courier."""
        within = self.random.choice((0, 1, SECOND, 30 * SECOND))
        task, entry = self.random.choice(SWEPT)
        keys = (LINES[task], LINES_EPOCH)
        return self.swept("due", keys, task=task, entry=entry, within=within, **self.of_lines())

    def sweep(self) -> Step:
        """By a worker."""
        tasks = tuple(task for task in TASK_IDS if self.random.random() < 0.7)
        interval = self.random.choice((0, 2 * SECOND))
        paced = tuple(number for number in range(1, len(tasks) + 1) if self.random.random() < 0.5)
        keys = (LINES_EPOCH, *map(LINES.__getitem__, tasks))
        step = self.swept("sweep", keys, interval=interval, **self.of_lines(), paced=paced, tasks=tasks)
        _, until, _, *found = step.reply or ()
        if found:
            number, entry = self.random.choice(list(zip(found[::2], found[1::2])))
            self.claimed = tasks[int(number) - 1], entry, until
        return step

    def settle(self) -> Step:
        """By a worker that has served a line."""
        (task, entry, claimed), self.claimed = self.claimed or (*SWEPT[0], "7"), None
        task, entry = self.random.choice((*[(task, entry)] * 3, SWEPT[0]))
        within = self.random.choice((None, None, 0, SECOND, 30 * SECOND))
        return self.swept("settle", (LINES[task],), task=task, entry=entry, claimed=claimed, within=within)

    def of_lines(self) -> dict[str, int]:
        """How long the set is to last, and an epoch for it."""
        return {"remember": self.random.choice(MARK_LEASES_MS), "epoch": self.random.randrange(1, 2**48)}

    def swept(self, verb: str, keys: tuple[str, ...], **sent: Any) -> Step:
        """A call of a script of the lines."""
        self.lines, reply = getattr(lines, verb)(self.lines, self.now, **sent)
        paced = sent.pop("paced", ())
        told = ["" if value is None else value for name, value in sent.items() if not name.startswith("task")]
        arguments = [*told, *paced]
        command = ("EVALSHA", self.shas[verb], len(keys), *keys, *arguments)
        return Step(f"{verb} {arguments}", [command], reply, self.sight)

    def leave(self) -> Step:
        """By a message that will not run, or by one of a call that has begun."""
        copy, remember = self.random.choice(COPIES), self.random.choice(MARK_LEASES_MS)
        return self.waits("leave", copy=copy, remember=remember, shared=self.shared())

    def shared(self) -> str:
        """Whether other calls may have the task id."""
        return "0001"[self.now // 7 % 4]

    def waits(self, verb: str, **sent: Any) -> Step:
        """By some task; often the one for which the lock is kept."""
        heir = [self.seen.holder.info] * 3 if self.state == "handed" else []
        task, attempt = self.random.choice((*heir, "a", "b|b")), self.random.choice((0, 0, 1))
        more, count = self.several()
        keys = (*PAIR, *WAITING, TICKETS[task], PERMITS, *more)
        return self.by_one_of_several(verb, keys, task, task=task, attempt=attempt, **sent, **count)

    def by_one_of_several(self, verb: str, keys: tuple[str, ...], of: str | None, **sent: Any) -> Step:
        """Of a task whose id may be shared: then often by another call with that id, which has no ticket."""
        before = []
        if of is not None and sent.get("shared") == "1" and self.now // 28 % 2:
            self.store = without_ticket(self.store, of)
            before = [("DEL", TICKETS[of])]
        step = self.script(verb, keys, **sent)
        return step._replace(commands=before + step.commands)

    def mark(self) -> Step:
        """By the publisher of a new call, or of one that is marked or runs."""
        lease = self.random.choice(MARK_LEASES_MS)
        dedupe = self.random.choice(("until_started", "until_done", "dedupe_for", "dedupe_for"))
        more, count = self.several()
        keys = (*PAIR, MARK, LINE, DONE, *more[::2])
        return self.script("mark", keys, task_id=self.task_id(), lease=lease, dedupe=dedupe, **count)

    def extend(self) -> Step:
        """By the mark's publisher, or by anybody else."""
        lease = self.random.choice((0, *MARK_LEASES_MS))
        return self.script("extend", (MARK,), task_id=self.task_id(), lease=lease)

    def unmark(self) -> Step:
        """By the mark's publisher, by hand, or by anybody else."""
        if self.store.done is not None and self.random.random() < 0.3:
            return self.script("unmark", (DONE,), task_id=self.token())
        return self.script("unmark", (MARK,), task_id=self.task_id())

    def forget(self) -> Step:
        """By a worker whose task has failed after all, or by anybody else."""
        more, count = self.several()
        return self.script("forget", (DONE, RECORD, *more[1::2]), token=self.token(), **count)

    def advance(self) -> Step:
        """The clock, by a random amount or exactly to a boundary; what expires by then is deleted."""
        before, began, value = self.seen, self.now, self.seen.value
        moments = [self.now + self.random.randrange(4 * SECOND), self.now + self.random.randrange(2_000)]
        if isinstance(before.record, Record):
            moments += [before.record.deadline] * 2
        if value is not None and NUMBER.fullmatch(value) and float(value) < 9e9:
            moments += [int(float(value) * SECOND), int((float(value) + 1) * SECOND)]
        moments += [ms * MS for ms in (before.expiry, before.record_expiry) if ms is not None]
        moments += [int(call[1:]) for _, call in before.calls.fields if call.startswith("@")] * 8
        moments += [until - AWAY for until, _ in before.line.places if until >= AWAY] * 4
        for period in PERIODS:
            moments += [
                at + period - ahead for at, *_ in before.starts.times[-3:] for ahead in (0, Pace.ahead)
            ]
        for _, moment, _ in self.lines.due[:1]:
            moments += [moment, moment + MARK_LEASES_MS[0] * MS]
        moment = self.random.choice(moments) + self.random.choice((-1, 0, 0, 1))
        self.now = min(max(self.now, moment), self.now + 100 * SECOND)
        # The server counts a mark's lease by a clock of its own, on which no time passes here.
        passed = self.now // MS - began // MS
        mark, done = (
            of and of._replace(expiry=None if of.expiry is None else of.expiry + passed)
            for of in (before.mark, before.done)
        )
        before, (times, expiry) = self.store, self.store.starts
        starts = Starts(times, None if expiry is None else expiry + passed)
        self.store = purge(before._replace(mark=mark, done=done, starts=starts), self.now)
        expired = []
        for number, (name, record) in enumerate(PAIRS):
            was, left = at(before, number), at(self.store, number)
            expired += [name] * (was.value != left.value) + [record] * (was.record != left.record)
        deleted = [("DEL", *expired)] if expired else []
        return self.plain(f"clock {self.now}", [*set_clock(self.now), *deleted])

    def foreign(self) -> Step:
        """What other programs do to the keys."""
        choose, store, rarely = self.random.choice, self.seen, self.random.random() < 0.3
        name, record = self.pair
        second = str(self.now // SECOND + choose((-3, -2, -1, 0, 1, 2, 3)))
        number = choose((second, second, f"{second}.5", f"{second}.", f"00{second}", "0"))
        kept = self.focus and self.state == "handed" and self.random.random() < 0.3
        what = "list" if kept else choose(FOREIGN)
        rarely |= bool(kept)
        if what == "getset" and store.value != NOT_A_STRING:
            changed, commands = {"value": number, "expiry": None}, [("GETSET", name, number)]
        elif what == "setnx":
            changed = {"value": number, "expiry": None} if store.value is None else {}
            commands = [("SETNX", name, number)]
        elif what == "garbage":
            text = choose(GARBAGE)
            changed, commands = {"value": text, "expiry": None}, [("SET", name, text)]
        elif what == "list" and rarely:
            changed = {"value": NOT_A_STRING, "expiry": None}
            commands = [("DEL", name), ("RPUSH", name, "x")]
        elif what == "record" and rarely:
            text = choose(("", "nobody", "a\n1\n2", "a\n1\n2\nRUNNING\n"))
            changed, commands = {"record": text, "record_expiry": None}, [("SET", record, text)]
        elif what == "mark" and rarely:
            changed, commands = {"mark": Mark(NOT_A_STRING, None)}, [("DEL", MARK), ("RPUSH", MARK, "x")]
        elif what == "done" and rarely:
            changed, commands = {"done": Mark(NOT_A_STRING, None)}, [("DEL", DONE), ("RPUSH", DONE, "x")]
        elif what == "starts" and (rarely or self.is_paced) and (known := waiter(store, store.holder.info)):
            call = str(known._replace(comes=True))  # as when it was overtaken
            changed = {"calls": with_call(store, store.holder.info, call, -1).calls}
            commands = [("HSET", CALLS, store.holder.info, call)]
        elif what == "starts" and self.is_paced and self.random.random() < 0.1:
            changed, commands = self.many_starts()
        elif what == "starts" and self.is_paced:  # the clock was later once
            start = (self.now + choose((-1, 0, 1, 1, SECOND)), choose((0, 1, 2)), choose((0, 1)))
            times = tuple(sorted({*store.starts.times, start}))
            changed = {"starts": store.starts._replace(times=times)}
            commands = [("ZADD", STARTS, start[0], "#".join(map(str, start)))]
        elif what == "line" and rarely:
            changed = {"line": Line(), "calls": Calls(), "tickets": ()}
            commands = [("DEL", *WAITING, *TICKETS.values())]
        elif what == "line" and (line := waiting(store)) and line[0] not in CROWD:
            changed, commands = {"calls": without_call(store, line[0]).calls}, [("HDEL", CALLS, line[0])]
        elif what == "crowd" and rarely:
            changed, commands = self.crowd()
        else:
            lock_alone = [[name]] * (10 if self.state == "handed" else 2)
            gone = choose((*lock_alone, [name, record], [record], [MARK], [DONE], [STARTS]))
            changed, commands = {}, [("DEL", *gone)]
            if name in gone:
                changed |= {"value": None, "expiry": None}
            if record in gone:
                changed |= {"record": None, "record_expiry": None}
            if MARK in gone:
                changed |= {"mark": None}
            if STARTS in gone:
                changed |= {"starts": Starts()}
            if DONE in gone:
                changed |= {"done": None}
        self.store = at(store._replace(**changed), self.focus)
        return self.plain(f"foreign {commands}", commands)

    def crowd(self) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """Many calls in line that have not asked again, before all others."""
        store, past = self.store, f"@{self.now}"
        for task, since in CROWD.items():
            store = with_place(with_call(store, task, past, 0), task, since, 0)
        line, calls = store.line._replace(lease=REMEMBER_MS), store.calls._replace(lease=REMEMBER_MS)
        places = [item for task, since in CROWD.items() for item in (since, task)]
        fields = [item for task in CROWD for item in (task, past)]
        expires = [("PEXPIRE", key, REMEMBER_MS) for key in WAITING]
        commands = [("ZADD", LINE, *places), ("HSET", CALLS, *fields), *expires]
        return {"line": line, "calls": calls}, commands

    def many_starts(self) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """More than are kept, and none that counts in any period of PERIODS."""
        times = [(self.now - 20 * SECOND - place, 0, 1) for place in range(MOST_STARTS + 5)]
        known = tuple(sorted({*self.store.starts.times, *times}))
        items = [item for start in times for item in (start[0], "#".join(map(str, start)))]
        commands = [("ZADD", STARTS, *items), ("PEXPIRE", STARTS, REMEMBER_MS)]
        return {"starts": Starts(known, self.now // MS + REMEMBER_MS)}, commands

    @property
    def sight(self) -> str:
        """What the keys are."""
        return sight_of(self.store, self.lines, self.now)

    def token(self) -> str:
        """Mostly the holder's or the last sender's."""
        record = self.seen.holder
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
        mark, holder = self.store.mark, task_of(self.seen.holder.token)[0]
        known = [mark.task_id] * 4 if mark is not None and mark.task_id != NOT_A_STRING else []
        done = self.store.done
        if done is not None and done.task_id != NOT_A_STRING:
            known += [task_of(done.task_id)[0] or done.task_id] * 2
        return self.random.choice((holder or "", task_of(self.last)[0] or "", *known, *TASK_IDS))

    def script(self, verb: str, keys: tuple[str, ...], **sent: Any) -> Step:
        """A call of a script."""
        told = [value for name, value in sent.items() if name != "count"]
        is_several = f"{verb}#" in self.shas and (OTHERS[0] in keys or STARTS in keys)
        several = f"{verb}#" if is_several else verb
        command = ("EVALSHA", self.shas[several], len(keys), *keys, *told)
        what = f"{verb} {keys[0]} {tuple(sent.values())}"
        sent.pop("second", None)  # of which the model knows nothing
        if verb in ("renew", "release", "hold"):
            sent["permit"] = self.focus
        if verb in ("acquire", "release", "look"):
            sent["line"] = LINE in keys
        if verb == "release":
            sent["with_permits"] = PERMITS in keys
        what_it_is = "forget_by_hand" if keys == (DONE,) else {"forget": "forget_done"}.get(verb, verb)
        self.store, reply = getattr(self.model, what_it_is)(self.store, self.now, **sent)
        return Step(what, [command], reply, self.sight)

    def plain(self, what: str, commands: list[tuple[Any, ...]]) -> Step:
        """Commands that are no script."""
        return Step(what, commands, None, self.sight)
