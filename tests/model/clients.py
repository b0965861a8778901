"""What clients do: tasks of ours, those who clean up after them, and the classic recipe."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tests.model.explorer import DEAD, DONE, TICK, Client, Move, Program, State, World
from tests.model.permits import at, highest_in, permit_in
from tests.model.store import MS, SECOND, Answer, Start, Store, task_of

RETENTION_MS = 1_000
REMEMBER_MS = 1_000


@dataclass(eq=False)
class Ours(Program):
    """One delivery of a task: acquire, renew, leave, release; with retries, the attempts after it."""

    marks = False  # whether its acquire is given the key of its mark, which ends with its start

    task: str  # two programs with the same one are two deliveries of one task
    _: KW_ONLY
    lease: int = 3  # in ticks, like all durations here
    tries: int = 2  # of a held lock
    beats: int = 0  # how often the lease may be renewed
    at_least_for: int = 0  # how long after its acquisition the lock rests
    retries: int = 0  # attempts that follow the first
    hold: int = 0  # how long the lock is held for the next attempt; 0: it is released
    proof: bool = False  # the holder's process may be proved dead
    slow_send: bool = False  # time may pass between the send and the server
    limit: int = 1  # how many permits it knows of
    starts: int = 0  # how many may start within a period; 0: any number
    period: int = 0  # how long that is
    bodiless: bool = False  # it may give its lock back before its body

    def __post_init__(self) -> None:
        self.lease *= TICK
        self.at_least_for *= TICK
        self.hold *= TICK
        self.period *= TICK
        self.terms = f"{self.limit}:{self.starts}/{self.period}" if self.starts else str(self.limit)

    def begin(self) -> Client:
        """Idle, with all its tries."""
        return Client("idle", tries=self.tries, beats=self.beats)

    def token(self, me: Client, index: int) -> str:
        """A token that is new for every delivery and attempt."""
        return f"{self.task}|{me.attempt}|{index:x}"

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Its possible next moves."""
        return getattr(self, f"_when_{me.at}")(me, index, state, world)  # type: ignore[no-any-return]

    def acquire(self, me: Client, index: int, state: State, world: World) -> Answer:
        """What the server does with its acquire."""
        asked: dict[str, Any] = {
            "token": self.token(me, index),
            "lease": self.lease,
            "retention": RETENTION_MS,
        }
        if world.has_terms:  # asked again with more permits, if more are in use
            highest = highest_in(state.store)[0]
            count = 0 if self.terms == "1" and highest == 1 else max(self.limit, highest)
            asked |= {"terms": self.terms, "count": count}
            return world.run("acquire", state, **asked, dead=me.dead, line=True)
        return world.run("acquire", state, **asked, dead=me.dead, line=self.marks)

    def release(self, me: Client, index: int, state: State, world: World, **again: int) -> Answer:
        """What the server does with its release, or when it holds the lock for its retry."""
        token = self.token(me, index)
        again |= {"permit": me.permit} if me.permit else {}
        if self.hold and me.attempt < self.retries:
            again.pop("again", None)
            return world.run("hold", state, token=token, lease=self.hold, retention=RETENTION_MS, **again)
        rest_until = me.since + self.at_least_for if self.at_least_for else 0
        return world.run("release", state, token=token, rest_until=rest_until, remember=REMEMBER_MS, **again)

    def may_enter(self, me: Client, now: int) -> bool:
        """Whether the lease is still ahead when the reply is read."""
        return now < me.until

    def after_conflict(self, me: Client) -> Client:
        """Idle before the next try, or done."""
        if me.tries == 1:
            return DONE
        return Client("idle", tries=me.tries - 1, beats=me.beats, attempt=me.attempt)

    def after_release(self, me: Client) -> Client:
        """Done, or idle before the next attempt."""
        if me.attempt < self.retries:
            return Client("idle", tries=self.tries, beats=self.beats, attempt=me.attempt + 1)
        return DONE

    def _when_idle(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        sent = me._replace(at="sent", sent=state.now)
        if self.slow_send:
            yield Move(sent, state.store)
        else:
            yield from self._when_sent(sent, index, state, world)

    def _when_sent(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.acquire(me, index, state, world)
        token, word = self.token(me, index), reply[0]
        if word in ("held", "paced"):
            record = at(state.store, permit_in(reply)).holder
            if self.proof and record.state == "running" and word == "held":
                answered = me._replace(at="answered", word=word, seen=record.token, dead="")
            else:
                answered = self.after_conflict(me)
        else:
            until = me.sent + int(reply[1]) - state.now
            since = state.now if self.at_least_for and word != "again" else me.since
            if self.at_least_for and word == "again":
                since = at(store, permit_in(reply)).holder.since
            answered = me._replace(at="answered", word=word, until=until, since=since, seen="", dead="")
            answered = answered._replace(permit=permit_in(reply))
            if self.starts:
                record = at(store, answered.permit).holder
                answered = answered._replace(granted=world.lock.start_of(record, answered.permit))
        yield from self.answers(me, answered, state, store, "acquire", token, reply)

    def answers(
        self, me: Client, answered: Client, state: State, store: Store, verb: str, token: str, reply: Any
    ) -> Iterator[Move]:
        """The reply of a verb arrives, or, if it changed something, is lost: the command is sent again."""
        yield Move(answered, store, verb, token, reply)
        if store is not state.store:
            yield Move(me, store, verb, token, reply, True)

    def _when_answered(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        if me.word == "held":
            if me.seen and is_dead(me.seen, state, world):
                yield Move(me._replace(at="idle", sent=0, word="", seen="", dead=me.seen), state.store)
            yield Move(self.after_conflict(me), state.store)
        elif self.may_enter(me, state.now):
            yield Move(me._replace(at="inside", sent=0, word="", tries=0, granted=(0, 0, 0)), state.store)
            if self.bodiless:
                yield Move(self._without_body(me), state.store)
        else:
            yield Move(self._without_body(me), state.store)

    def _without_body(self, me: Client) -> Client:
        """Nothing has begun: what has started is taken back, and the lock released."""
        leaving = self._leaving(me)
        return leaving._replace(at="taking_back", granted=me.granted) if me.granted[0] else leaving

    def _when_taking_back(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = world.run("take_back", state, start=self.its_start(me, state.store))
        yield from self.answers(
            me, self._leaving(me), state, store, "take_back", self.token(me, index), reply
        )

    def its_start(self, me: Client, store: Store) -> Start:
        """Which start it takes back."""
        return me.granted

    def _when_inside(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield Move(self._leaving(me), state.store)
        if me.beats:
            renewing = me._replace(at="renewing", beats=me.beats - 1, sent=state.now)
            if self.slow_send:
                yield Move(renewing, state.store)
            else:
                yield from self._when_renewing(renewing, index, state, world)

    def _when_renewing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        token = self.token(me, index)
        asked: dict[str, Any] = {"token": token, "lease": self.lease, "retention": RETENTION_MS}
        store, reply = world.run("renew", state, **asked, **({"permit": me.permit} if me.permit else {}))
        renewed = me._replace(at="renewed", word=reply[0])
        yield from self.answers(me, renewed, state, store, "renew", token, reply)

    def _when_renewed(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        if me.word in ("renewed", "repaired"):
            yield Move(me._replace(at="inside", until=me.sent + self.lease, sent=0, word=""), state.store)
        else:
            yield Move(self._leaving(me), state.store)

    def _when_leaving(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.release(me, index, state, world)
        token, after = self.token(me, index), self.after_release(me)
        yield from self.answers(me, after, state, store, "release", token, reply)

    def _leaving(self, me: Client) -> Client:
        return Client("leaving", attempt=me.attempt, since=me.since, until=me.until, permit=me.permit)


@dataclass(eq=False)
class Freed(Program):
    """The one who frees a lock that was held for a retry which will not come: revoked or expired."""

    task: str

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Free it once, at any time."""
        more = {"count": max(world.limit, highest_in(state.store)[0])} if world.has_terms else {}
        store, reply = world.run("free", state, task_id=self.task, remember=REMEMBER_MS, **more)
        yield Move(DONE, store, "free", self.task, reply)


@dataclass(eq=False)
class LateCopy(Program):
    """A copy of a client's acquire or release that the network delivers a second time, at any moment."""

    verb: str
    of: int

    def begin(self) -> Client:
        """Not yet delivered."""
        return Client("copied")

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Be delivered, once the client is past its first send."""
        sender = world.programs[self.of]
        assert isinstance(sender, Ours)
        if state.clients[self.of].at == "idle" or (self.verb == "release" and state.clients[self.of] != DONE):
            return
        run = sender.acquire if self.verb == "acquire" else sender.release
        store, reply = run(Client(), self.of, state, world)
        yield Move(DONE, store, self.verb, sender.token(Client(), self.of), reply)


@dataclass(eq=False)
class Parent(Program):
    """A worker parent: once its child is surely dead it releases the child's lock, by the child's token."""

    child: int

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Wait for the death, then release; time may pass between the two."""
        child = world.programs[self.child]
        assert isinstance(child, Ours)
        if me.at == "idle":
            if state.clients[self.child] == DEAD:
                yield Move(Client("knows"), state.store)
            return
        token = child.token(Client(), self.child)
        about = {"token": token, "rest_until": 0, "remember": REMEMBER_MS}
        for permit in range(world.limit):
            store, reply = world.run("release", state, **about, **({"permit": permit} if permit else {}))
            if reply[0] != "lost":
                break
        yield Move(DONE, store, "release", token, reply)


@dataclass(eq=False)
class Call(Ours):
    """A call with `dedupe`: marked, sent, queued, run when a worker has time, perhaps retried.

    Its publisher and its worker are two processes: the mark may be extended at any time after the send, even
    when the call is over, or never. A publisher that dies is one that makes no further move.
    """

    marks = True

    _: KW_ONLY
    until_done: bool  # at most one queued or running; otherwise `until_started`, at most one queued
    queue_lease: int  # how long its mark lasts once its message is sent
    grace: int = 1  # how long its mark lasts until then
    publishes: int = 2  # how often a duplicate is published again
    skips: bool = False  # a held lock ends it; otherwise it comes back later
    countdown: int = 0  # how long its retry is put off

    def __post_init__(self) -> None:
        super().__post_init__()
        self.again = (self.queue_lease + self.countdown) * TICK
        self.queue_lease *= TICK
        self.grace *= TICK
        self.dedupe = "until_done" if self.until_done else "until_started"

    def begin(self) -> Client:
        """Not yet published."""
        return Client("idle", tries=self.publishes)

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """What its worker does next, or before that its publisher (or whoever has sent it back)."""
        if not me.extends:
            yield from super().moves(me, index, state, world)
            return
        yield self._extended(me, state, world)
        if me.at == "over":
            return
        for move in super().moves(me._replace(extends=False), index, state, world):
            if move.client is DONE:
                yield move._replace(client=Client("over", extends=True))
            else:
                yield move._replace(client=move.client._replace(extends=True))

    def is_queued(self, me: Client, now: int) -> bool:
        """Whether its message is really on its way, or may be for all that Redis can know yet."""
        if me.at in ("queued", "sent"):
            return True
        if me.at == "leaving":
            return me.attempt < self.retries  # its retry was sent from inside its body
        if me.at == "answered":
            return me.word == "held"
        # Not sent yet, or about to give the mark back; a key lives to the end of its last millisecond.
        return me.at in ("idle", "marked", "freeing") and now <= me.marked_until

    def release(self, me: Client, index: int, state: State, world: World, **_: int) -> Answer:
        """Release; on a retry with `until_done` the mark comes back."""
        again = {"again": self.again // MS} if self._marks_again(me) else {}
        return super().release(me, index, state, world, **again)

    def after_conflict(self, me: Client) -> Client:
        """Sent back, and its mark is to be extended; or about to free its mark."""
        if self.skips:
            return Client("freeing", marked_until=me.marked_until)
        return self._queued(me)._replace(extends=True)

    def after_release(self, me: Client) -> Client:
        """Done, or queued again."""
        if me.attempt >= self.retries:
            return DONE
        return self._queued(Client(attempt=me.attempt + 1))

    def mark(self, state: State, world: World) -> Answer:
        """What the server does with its mark."""
        return world.run("mark", state, task_id=self.task, lease=self.grace // MS, dedupe=self.dedupe)

    def _extended(self, me: Client, state: State, world: World) -> Move:
        store, reply = world.run("if_same", state, task_id=self.task, lease=self.queue_lease // MS)
        after = DONE if me.at == "over" else me._replace(extends=False)
        if reply[0] == "done" and after is not DONE:
            after = after._replace(marked_until=max(me.marked_until, state.now + self.queue_lease))
        return Move(after, store, "if_same", self.task, reply)

    def _when_idle(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.mark(state, world)
        if reply[0] != "marked":
            tries = me.tries - 1
            yield Move(Client("idle", tries=tries) if tries else DONE, store, "mark", self.task, reply)
            return
        until = state.now + self.grace
        yield Move(Client("marked", marked_until=until), store, "mark", self.task, reply)
        yield Move(me._replace(marked_until=until), store, "mark", self.task, reply, True)

    def _when_marked(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield Move(self._queued(me)._replace(extends=True), state.store)
        yield Move(me._replace(at="freeing"), state.store)  # the broker refuses it

    def _when_freeing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = world.run("if_same", state, task_id=self.task)
        yield from self.answers(Client("freeing"), DONE, state, store, "if_same", self.task, reply)

    def _when_queued(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        return self._when_sent(me._replace(at="sent", sent=state.now), index, state, world)

    def _when_sent(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in super()._when_sent(me, index, state, world):
            started = move.reply[0] != "held"
            yield move._replace(client=move.client._replace(marked_until=0)) if started else move

    def _when_leaving(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in super()._when_leaving(me, index, state, world):
            # What it is promised, whether or not the release did so: its retry is queued from now on.
            released = move.store.value != state.store.value or move.store.record != state.store.record
            if released and self._marks_again(me) and state.store.mark is None:
                until = state.now + self.again
                yield move._replace(client=move.client._replace(marked_until=until))
            elif me.marked_until and move.client.at != "leaving":  # the reply of the first was lost
                yield move._replace(client=move.client._replace(marked_until=me.marked_until))
            else:
                yield move

    def _marks_again(self, me: Client) -> bool:
        return self.until_done and not self.hold and me.attempt < self.retries

    def _queued(self, me: Client) -> Client:
        return Client("queued", attempt=me.attempt, beats=self.beats, marked_until=me.marked_until)


@dataclass(eq=False)
class Counted(Call):
    """A call whose success counts for a while (`dedupe_for`): the release notes it, and it is taken back if
    the call fails after that. Under its lock it asks once more whether another has succeeded.
    """

    _: KW_ONLY
    window: int  # how long a success counts
    is_bare: bool = False  # nobody asks when it is published
    is_late: bool = False  # its release may come after its failure was seen
    until_done: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window *= TICK
        self.dedupe = "dedupe_for"

    def has_succeeded(self, me: Client) -> bool:
        """Whether the release notes a success."""
        return me.word == "well"

    def release(self, me: Client, index: int, state: State, world: World, **_: int) -> Answer:
        """Release, and note the success."""
        done = {"done_for": self.window // MS} if self.has_succeeded(me) else {}
        return Ours.release(self, me, index, state, world, **done)

    def _when_idle(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        if self.is_bare:
            yield Move(self._queued(me), state.store)
        else:
            yield from super()._when_idle(me, index, state, world)

    def _when_answered(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in super()._when_answered(me, index, state, world):
            if move.client.at == "inside" and self.sees_another(state):
                yield Move(self._leaving(me), state.store, "skipped", self.task)
            else:
                yield move

    def sees_another(self, state: State) -> bool:
        """Whether another's success counts: asked under the lock."""
        return state.store.done is not None and task_of(state.store.done.task_id)[0] != self.task

    def _when_inside(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in super()._when_inside(me, index, state, world):
            yield move  # an exception
            if move.client.at == "leaving":
                yield move._replace(client=move.client._replace(word="well"))

    def _when_leaving(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.release(me, index, state, world)
        if me.word == "well" and store != state.store and reply[0] in ("released", "resting", "repaired"):
            me = me._replace(counts_until=state.now + self.window)
        after = Client("storing", counts_until=me.counts_until) if me.word == "well" else DONE
        yield from self.answers(me, after, state, store, "release", self.token(me, index), reply)
        if self.is_late and me.word == "well":  # tried again later, by a thread that knows of no result
            yield Move(me._replace(at="late"), state.store)

    def _when_late(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in self._when_leaving(me._replace(at="leaving"), index, state, world):
            if move.client.at == "storing":
                yield move._replace(client=Client("failing"))
        store, reply = world.run("forget_done", state, token=self.token(me, index))
        taken_back = me._replace(at="taken_back", counts_until=0)
        yield Move(taken_back, store, "forget_done", self.token(me, index), reply)

    def _when_taken_back(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.release(me, index, state, world)
        yield from self.answers(me, Client("failed"), state, store, "release", self.token(me, index), reply)

    def _when_storing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield Move(Client("done", counts_until=me.counts_until), state.store)
        yield Move(Client("failing"), state.store)  # its result cannot be stored

    def _when_failing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        token = self.token(me, index)
        store, reply = world.run("forget_done", state, token=token)
        yield from self.answers(me, Client("failed"), state, store, "forget_done", token, reply)

    def _when_failed(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield from ()


@dataclass(eq=False)
class ParentOfCounted(Parent):
    """A worker parent whose dead child may have succeeded: what it has noted is taken back."""

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Wait for the death, release, and take the success back."""
        child = world.programs[self.child]
        assert isinstance(child, Counted)
        if me.at == "forgetting":
            token = child.token(Client(), self.child)
            store, reply = world.run("forget_done", state, token=token)
            yield Move(Client("forgotten"), store, "forget_done", token, reply)
        elif me.at != "forgotten":
            for move in super().moves(me, index, state, world):
                yield move._replace(client=Client("forgetting")) if move.client is DONE else move


@dataclass(eq=False)
class Classic(Program):
    """The recipe of the Redis documentation, on its own clock (which is right here)."""

    foreign = True

    timeout: int  # whole seconds; it writes now + timeout + 1
    tries: int = 1  # how often it starts over
    strict: bool = True  # takes over after the value's second, as most do; the documentation says within it
    pauses: bool = False  # time may pass between its clock reading and its verdict

    def __post_init__(self) -> None:
        self.prompt = frozenset() if self.pauses else frozenset({"setnx", "get", "getset"})

    def begin(self) -> Client:
        """Idle, with all its tries."""
        return Client("idle", tries=self.tries)

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Clock, SETNX, GET, GETSET, verdict; then DEL, if its lease is still valid."""
        store, now = state.store, state.now
        value = me.sent + self.timeout + 1
        if me.at == "idle":
            yield Move(me._replace(at="setnx", sent=now // SECOND), store)
        elif me.at == "setnx":
            if store.value is None:
                yield Move(self._inside(value), store._replace(value=str(value), expiry=None), "setnx")
            else:
                yield Move(me._replace(at="get"), store, "setnx")
        elif me.at == "get":
            expired = store.value is not None and self._is_past(int(store.value), me.sent)
            yield Move(me._replace(at="getset") if expired else self._again(me), store, "get")
        elif me.at == "getset":
            won = store.value is None or self._is_past(int(store.value), me.sent)
            after = store._replace(value=str(value), expiry=None)
            yield Move(self._inside(value) if won else self._again(me), after, "getset")
        elif now < me.until:
            yield Move(DONE, store._replace(value=None, expiry=None), "del")
        else:
            yield Move(DONE, store)

    def _is_past(self, value: int, second: int) -> bool:
        return value < second if self.strict else value <= second

    def _inside(self, value: int) -> Client:
        return Client("inside", until=value * SECOND)

    def _again(self, me: Client) -> Client:
        return Client("idle", tries=me.tries - 1) if me.tries > 1 else DONE


def is_dead(token: str, state: State, world: World) -> bool:
    """Whether the process behind a token was killed: what a rival on the same host can prove."""
    index = int(token.rsplit("|", 1)[1], 16)
    return state.clients[index] == DEAD
