"""The verbs of the lock as pure functions of what Redis holds and of the time. Units as in the scripts.

Each says what the script of its name says, word for word; tests/test_differential.py holds them to it. Each
decision that a seeded mutant turns around is a method of its own. What is about waiting is in line.py.
"""

import math
import re
from typing import Any, NamedTuple

from tests.model.line import waiter, waiting
from tests.model.permits import at, highest_in, limit_of, permits_of
from tests.model.store import (
    LINGERS_MS,
    MS,
    NOBODY,
    NOT_A_STRING,
    NUMBER,
    SECOND,
    Answer,
    Mark,
    Record,
    Start,
    Store,
    Ticket,
    seconds,
    task_of,
    up,
)
from tests.twin.line import FOREIGNRECORD, Waiting, with_call, with_place, without_call, without_place
from tests.twin.permits import Choice, Fits, choose, extras, lasting, noted

WRONGTYPE = ("WRONGTYPE",)


class Asked(NamedTuple):
    """What an acquire is told."""

    token: str
    lease: int
    retention: int
    info: str
    dead: str
    copy: str
    remember: int
    linger: int
    since: int
    attempt: int


class Lock(Waiting):
    """The verbs. Every one takes the keys and the time, and gives back the new keys and the reply."""

    def is_past(self, now: int, deadline: int) -> bool:
        """Whether a deadline has passed."""
        return now >= deadline

    def next_fence(self, previous: int, now: int) -> int:
        """The fence of a new holder."""
        return max(previous + 1, now)

    def value_of(self, deadline: int) -> str:
        """The lock's value for a deadline."""
        return seconds(deadline)

    def record_decides(self, store: Store, now: int) -> bool:
        """Rule 5: an unexpired record of ours outweighs a value that a classic loser overwrote."""
        return not self.is_past(now, store.holder.deadline)

    def proves_death(self, record: Record, dead: str) -> bool:
        """Whether the token of a process that was proved dead opens this lock."""
        return dead != "" and record.state == "running" and record.token == dead

    def passes_rest(self, record: Record, token: str) -> bool:
        """Whether a lock rests, and rests for others only: not for the task whose token this is."""
        task, _ = task_of(token)
        return record.state == "resting" and task is not None and task_of(record.token)[0] == task

    def resumes(self, record: Record, token: str) -> bool:
        """Whether a token is that of the attempt for which a lock is held."""
        task, retries = task_of(token)
        return (
            record.state == "held_for_retry"
            and task is not None
            and task == task_of(record.token)[0]
            and retries > task_of(record.token)[1]
        )

    def acquire(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        lease: int,
        retention: int,
        info: str = "",
        dead: str = "",
        copy: str = "-",
        remember: int = 0,
        linger: int = 0,
        since: int = 0,
        attempt: int = 0,
        terms: str = "1",
        shared: str = "0",
        line: bool = False,
        count: int = 0,
    ) -> Answer:
        """lua/acquire.lua; `line`: whether it has a task's lock's keys; `count`: of how many permits, 0 if it
        is the script that knows of one only.
        """
        mark = None
        if line and store.mark is not None and store.mark.task_id != NOT_A_STRING:
            mark = store.mark.task_id
        task, _ = task_of(token)
        ticket = dict(store.tickets).get(task) if line and task is not None else None
        waiters = str(len(waiting(store)) if line else 0)
        woken = self.is_woken(ticket, copy)
        highest = highest_in(store)[0]
        if line and highest > max(count, 1):
            return store, ("more", str(highest))
        waits = ticket is not None and (ticket.attempt, ticket.begun_by) == (attempt, "")
        is_late = waits and copy == "-" and remember == 0
        if ticket is not None and (is_late or self.is_stale(ticket, attempt, copy)):
            return store, ("stale", "0", "0", str(now), None, None, mark, waiters)
        asked = Asked(token, lease, retention, info, dead, copy, remember, linger, since, attempt)
        is_anothers = line and shared == "1" and task is not None and self.is_anothers(store, task, ticket)
        in_line = None if is_anothers else task
        about = line, mark, ticket, woken, in_line
        if count == 0:
            return self._acquire_one(store, now, asked, *about)
        limit = limit_of(terms)
        passes = not line or self.may_pass(store, in_line, None, woken=woken)

        def fits(record: Record, live: bool) -> int | None:
            if record.state == "handed":
                return 2 if self.is_for(record.info, in_line) else 6 if live and woken else None
            if self.is_own(record, token) and (live or (passes and self.takes_its_own_over())):
                return 1 if live and record.state != "resting" else 3
            return 5 if live and self.proves_death(record, dead) else None

        choice = self.choose(store, now, count, limit, fits)
        ms = up(lease, MS) + retention if choice.rank < 9 else 0
        store = at(noted(store, max(limit, choice.top, choice.number + 1), terms, ms), choice.number)
        if isinstance(store.record, str):
            return at(store, choice.number), FOREIGNRECORD
        after, till = self.paced_for(store, terms, choice, asked, woken, now)
        if till:
            value, text = None, None if store.record is None else str(store.record)
            if choice.rank <= 3 and task is not None and task_of(store.holder.token)[0] == task:
                if choice.rank == 1 and store.holder.state == "held_for_retry":
                    after = self.held_longer(after, till, now, retention)
                    text = str(after.record)
                value = after.value
            reply = ("paced", str(till), str(store.holder.fence), str(now), value, text, mark, waiters)
        else:
            after, reply = self._acquire_one(after, now, asked, *about)
            if reply[0] in ("acquired", "resumed", "taken_over"):
                after = self.start_noted(after, terms, self.start_of(after.holder, choice.number), now)
        return at(after, choice.number), (*reply, *extras(choice))

    def paced_for(
        self, store: Store, terms: str, choice: Choice, asked: Asked, woken: bool, now: int
    ) -> tuple[Store, int]:
        """When a call may start under the permit that was chosen for it; 0 if it may now, or may not have it.

        Refused, it gives back what it was handed. Woken late, it takes another's start.
        """
        record, others = store.holder, choice.handed
        is_again = self.asks_again(record, asked.token) or self.is_redelivered(record, asked.dead)
        if choice.rank == 9 or (choice.rank == 1 and not is_again):
            return store, 0
        if self.is_kept_start(record, now):
            others -= 1
        elif woken and self.takes_anothers_start():
            others = max(others - 1, 0)
        till = self.paced_till(store, terms, others, now)
        if till:
            store = self.starts_kept(store, terms, now)
        gives_back = choice.rank == 2 and self.paced_till(store, terms, others, now, self.ahead)
        return (self.handed_back(store, now) if gives_back else store), till

    def is_redelivered(self, record: Record, dead: str) -> bool:
        """Whether the death of a permit's holder is proved: what asks for its own then is another start."""
        return record.state == "running" and record.token == dead

    def takes_anothers_start(self) -> bool:
        """Whether a call that was woken late starts in the place of one to which a permit is handed."""
        return True

    def is_kept_start(self, record: Record, now: int) -> bool:
        """Whether a start is kept for who takes this permit, with the permit."""
        return record.state == "handed" and not self.is_past(now, record.deadline)

    def asks_again(self, record: Record, token: str) -> bool:
        """Whether a permit is held for a retry, and it is that one which asks."""
        held = re.search(r"\|(\d+)\|[0-9a-fA-F]+$", record.token)
        if record.state != "held_for_retry" or held is None or task_of(token)[0] is None:
            return False
        return task_of(token)[1] > int(held[1])

    def take_back(self, store: Store, now: int, *, start: Start) -> Answer:
        """The command by which an acquisition without a body counts as no start."""
        return self.start_taken_back(store, start), ("taken_back" if start in store.starts.times else "gone",)

    def takes_its_own_over(self) -> bool:
        """Whether a task whose permit has lapsed takes that one, and none that is free."""
        return True

    def is_own(self, record: Record, token: str) -> bool:
        """Whether a permit is this token's, or another's of the same task."""
        task, _ = task_of(token)
        return record.token == token or (task is not None and task_of(record.token)[0] == task)

    def choose(self, store: Store, now: int, count: int, limit: int, fits: Fits) -> Choice:
        """The permit that a verb is about."""
        return choose(store, now, count, limit, fits)

    def _acquire_one(
        self,
        store: Store,
        now: int,
        asked: Asked,
        line: bool,
        mark: str | None,
        ticket: Ticket | None,
        woken: bool,
        in_line: str | None,
    ) -> Answer:
        """Acquire, as if there were one permit only."""
        token, lease, retention, info, dead, copy, remember, linger, since, attempt = asked
        record = store.record
        if isinstance(record, str):
            return store, FOREIGNRECORD
        found, old = store.holder, store.value
        text = None if record is None else str(record)
        task, _ = task_of(token)
        heir = self.heir_of(record)
        waiters = str(len(waiting(store)) if line else 0)

        def answer(word: str, until: float = found.deadline) -> tuple[Any, ...]:
            return (word, f"{until:.0f}", str(found.fence), str(now), old, text, mark, waiters)

        def held(until: float) -> Answer:
            if linger <= 0 or task is None or not self.may_ask(store, task):
                return store, answer("held", until)
            asks = self.asking(store, task, now + linger)
            return with_place(asks, task, since or now, LINGERS_MS), answer("held", until)

        barred = line and not self.may_pass(store, in_line, heir, woken=woken)
        word, fence = "acquired", self.next_fence(found.fence, now)
        if old is None and barred:
            return store, answer("line")
        if old is not None:
            if not NUMBER.fullmatch(old):
                return held(0)
            recorded = found.deadline > 0 and old == self.value_of(found.deadline)
            let_in = heir is not None  # its deadline has passed, or it is for this task
            if self.record_decides(store, now):
                if found.token == token and found.state == "running":
                    return store, answer("again")
                if self.proves_death(found, dead):
                    word = "taken_over"
                elif self.resumes(found, token):
                    word, fence = "resumed", found.fence
                else:
                    let_in = self.is_for(heir, in_line) or self.passes_rest(found, token)
                    let_in = let_in or (heir is not None and woken)
                    if not let_in:
                        return held(found.deadline)
            elif not recorded:
                until = (min(float(old), 1e11) + 1) * SECOND
                if now < until:
                    return held(until)
                let_in = False
            if barred and (word == "taken_over" or self.is_past(now, found.deadline)):
                return store, answer("line")
            died = not recorded or (found.state != "resting" and found.token != token)
            if died and not let_in and word == "acquired":
                word = "taken_over"
        deadline = now + lease
        after = self.kept(store, Record(token, deadline, fence, "running", now, info), retention)
        if mark is not None and self.ends_mark(mark, token):
            after = after._replace(mark=None)
        if line and heir is not None and in_line != heir:
            if self.is_past(now, found.deadline):
                after = self.passed_over(after, heir, now, lease)
            else:
                after = self.overtaken(after, heir)
            after = self.lasts_as_calls(after)
        if line and task is not None:
            vain = "0"
            if in_line is not None and (ticket is not None or in_line == heir or waiters != "0"):
                vain = self.vain_of(after, in_line, ticket, attempt)
                after = without_call(without_place(after, in_line), in_line)
            after = self.begun(after, task, f"{attempt}|{copy}|{vain}", ticket, remember)
        return after, (word, str(deadline), str(fence), str(now), old, text, mark, waiters)

    def may_ask(self, store: Store, task: str) -> bool:
        """Whether a task may stand in line to ask again: not one that was woken, which has its place."""
        return waiter(store, task) is None

    def asking(self, store: Store, task: str, until: int) -> Store:
        """The keys when a task asks again by itself."""
        return with_call(store, task, f"@{until}", LINGERS_MS)

    def ends_mark(self, mark: str, token: str) -> bool:
        """Whether a mark is that of the task that starts."""
        return mark == task_of(token)[0]

    def renew(
        self, store: Store, now: int, *, token: str, lease: int, retention: int, permit: int = 0
    ) -> Answer:
        """lua/renew.lua."""
        after, reply = self._renew_one(at(store, permit), now, token, lease, retention)
        after = at(after, permit)
        moved = permit and reply[0] in ("renewed", "repaired")
        return (lasting(after, lease, retention) if moved else after), reply

    def _renew_one(self, store: Store, now: int, token: str, lease: int, retention: int) -> Answer:
        value, record = store.value, store.holder
        if record.token != token or record.state != "running":
            return store, ("lost", "0", str(now), value)
        if value is None:
            return store, ("gone", "0", str(now), None)
        if not self.may_still_renew(store, now) or not NUMBER.fullmatch(value):
            return store, ("lost", str(record.deadline), str(now), value)
        deadline = now + lease
        word = "renewed" if value == self.value_of(record.deadline) else "repaired"
        after = self.kept(store, record._replace(deadline=deadline), retention)
        return after, (word, str(deadline), str(now), value)

    def may_still_renew(self, store: Store, now: int) -> bool:
        """Whether the deadline of a lock of ours may be moved."""
        return self.record_decides(store, now)

    def release(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        rest_until: int = 0,
        remember: int,
        again: int = 0,
        hand_over: int | str = 0,
        done_for: int = 0,
        line: bool = False,
        permit: int = 0,
        with_permits: bool = False,
    ) -> Answer:
        """lua/release.lua; `again`: the milliseconds for which it marks the key; `done_for`: for which it
        notes the success; `line`: as for acquire. The reply ends with whether there is no more to be told:
        then the script says the word alone.
        """
        about = token, rest_until, remember, again, hand_over
        before = at(store, permit)
        after, reply = self._release_one(before, now, *about, line=line)
        keeps = with_permits and after.record != before.record and after.holder.deadline > 0
        if keeps:
            after = lasting(after, after.holder.deadline - now, remember)
        may_count = self.may_count(before.holder)
        if done_for > 0 and after.record != before.record and may_count:
            after = self.succeeded(after, now, token, done_for, reply[0])
        return at(after, permit), reply

    def may_count(self, record: Record) -> bool:
        """Whether the run of a lock that is given back has not failed meanwhile."""
        return record.state != "failed"

    def succeeded(self, store: Store, now: int, token: str, done_for: int, word: str) -> Store:
        """The keys when the task of a lock that was released had succeeded: noted if it was surely alone."""
        if task_of(token)[0] is None or word not in ("released", "resting", "repaired"):
            return store
        return store._replace(done=self.mark_of(token, now, done_for))

    def _release_one(
        self,
        store: Store,
        now: int,
        token: str,
        rest_until: int,
        remember: int,
        again: int,
        hand_over: int | str,
        *,
        line: bool,
    ) -> Answer:
        value, record = store.value, store.holder

        def answer(word: str, heir: str | None = None) -> tuple[Any, ...]:
            call = self.wakes(store, heir)
            if call is None and heir in dict(store.calls.fields):
                heir = None  # it asks by itself, or its wake-up is on its way
            return word, str(now), value, heir, call

        if record.token != token:
            since = None if record is NOBODY else str(record.since)
            return store, ("lost", str(now), value, None, since, False)
        if record.state not in ("running", "failed"):
            handed = record.state == "handed"  # answered as the first time
            word = "released" if handed else record.state
            return store, (*answer(word, self.heir_of(record)), False)
        heir, lingers, gone = self.next_in_line(store, now) if line and hand_over != "" else (None, 0, ())
        if lingers:
            hand_over = lingers - now + 50_000
        word = "gone"
        if value is not None:
            ours = value == self.value_of(record.deadline)
            repaired = not ours and self.record_decides(store, now) and NUMBER.fullmatch(value)
            if not ours and not repaired:
                return store, (*answer("lost"), False)
            word = "repaired" if repaired else "released"
        if value is not None and rest_until > now:
            word = "resting"
            after = self.kept(store, record._replace(deadline=rest_until, state="resting"), remember)
        elif heir is not None:
            after = self.handed(store, record, now, heir, int(hand_over), remember)
        else:
            after = self.nobodys(store, record._replace(state=word), now, remember)
        for task in gone:
            after = without_call(without_place(after, task), task)
        leaves_line = line and hand_over == "" and bool(after.line.places)
        is_all = word == "released" and heir is None and not leaves_line
        return self.marked_again(after, now, token, again), (*answer(word, heir), is_all)

    def kept(self, store: Store, record: Record, retention: int) -> Store:
        """The keys of a lock that stays closed until its record's deadline."""
        expiry = up(record.deadline, MS) + retention
        value = self.value_of(record.deadline)
        return store._replace(value=value, expiry=expiry, record=record, record_expiry=expiry)

    def marked_again(self, store: Store, now: int, token: str, again: int) -> Store:
        """The keys of a lock that was released: its task has sent its retry, and is queued again."""
        task_id = task_of(token)[0]
        if again <= 0 or task_id is None or store.mark is not None:
            return store
        return store._replace(mark=self.mark_of(task_id, now, again))

    def hold(
        self, store: Store, now: int, *, token: str, lease: int, retention: int, permit: int = 0
    ) -> Answer:
        """lua/hold.lua."""
        after, reply = self._hold_one(at(store, permit), now, token, lease, retention)
        after = at(after, permit)
        held = permit and after != store and reply[0] == "held_for_retry"
        return (lasting(after, lease, retention) if held else after), reply

    def _hold_one(self, store: Store, now: int, token: str, lease: int, retention: int) -> Answer:
        if store.holder.token == token and store.holder.state in ("handed", "failed"):
            return store, (store.holder.state, str(now), store.value)
        freed, reply = self.release(store, now, token=token, remember=0)
        if reply[0] not in ("released", "repaired") or freed is store:
            return store, reply[:5] if reply[0] == "lost" and store.holder.token != token else reply[:3]
        record = store.holder._replace(deadline=now + lease, state="held_for_retry")
        return self.kept(store, record, retention), ("held_for_retry", *reply[1:3])

    def free(self, store: Store, now: int, *, task_id: str, remember: int, count: int = 1) -> Answer:
        """lua/free.lua."""
        highest = highest_in(store)[0]
        if highest > count:
            return store, ("more", str(highest))
        if count > 1:

            def fits(record: Record, live: bool) -> int | None:
                return 1 if (record.state, task_of(record.token)[0]) == ("held_for_retry", task_id) else None

            number = self.choose(store, now, count, 1, fits).number
            after, reply = self._free_one(at(store, number), now, task_id, remember)
            return at(after, number), reply
        return self._free_one(store, now, task_id, remember)

    def _free_one(self, store: Store, now: int, task_id: str, remember: int) -> Answer:
        record = store.holder
        if record.state != "held_for_retry" or task_of(record.token)[0] != task_id:
            return store, ("lost", str(now), store.value)
        running = store._replace(record=record._replace(state="running"))
        after, reply = self.release(running, now, token=record.token, remember=remember)
        return (store if after is running else after), reply[:3]

    def mark(
        self, store: Store, now: int, *, task_id: str, lease: int, dedupe: str, count: int = 1
    ) -> Answer:
        """lua/mark.lua."""
        mark, record = store.mark, store.holder
        if mark is not None and mark.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if mark is not None and not self.may_mark(mark, task_id):
            # Whether calls wait in line for a lock that nobody living has.
            idle = store.value is None or self.is_past(now, record.deadline)
            for other in permits_of(store, count)[1:]:
                idle = idle or other.value is None or now >= _number_in(other.value) * SECOND
            stalled = bool(store.line.places) and idle
            return store, ("stalled" if stalled else "queued", mark.task_id, str(now), None, None)
        if dedupe != "until_started" and self.executes_a_task(store, now):
            return store, ("running", task_of(record.token)[0], str(now), store.value, str(record))
        done = store.done if dedupe == "dedupe_for" else None
        if done is not None and done.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if done is not None:
            of = task_of(done.task_id)[0]
            done = done if of is None else done._replace(task_id=of)
            if not self.may_mark(done, task_id):
                return store, ("done", done.task_id, str(now), None, None)
        after = store._replace(mark=self.longer(mark, self.mark_of(task_id, now, lease)))
        return after, ("marked", task_id, str(now), None, None)

    def may_mark(self, mark: Mark, task_id: str) -> bool:
        """Whether a mark is the caller's own: the call was sent again."""
        return mark.task_id == task_id

    def executes_a_task(self, store: Store, now: int) -> bool:
        """Whether a task of ours runs, or its lock is held for its retry; a foreign lock is none."""
        record = store.holder
        return (
            store.value is not None
            and record.state in ("running", "held_for_retry")
            and task_of(record.token)[0] is not None
            and not self.is_past(now, record.deadline)
        )

    def mark_of(self, task_id: str, now: int, lease: int) -> Mark:
        """A mark that expires with its lease."""
        return Mark(task_id, now // MS + lease)

    def extend(self, store: Store, now: int, *, task_id: str, lease: int) -> Answer:
        """lua/extend.lua."""
        if store.mark is not None and store.mark.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if not self.may_extend(store.mark, task_id):
            return store, ("lost",)
        holder = store.mark.task_id if store.mark else task_id
        return store._replace(mark=self.longer(store.mark, self.mark_of(holder, now, lease))), ("extended",)

    def longer(self, mark: Mark | None, new: Mark) -> Mark:
        """A mark that is set again: never to last for less than it does."""
        if mark is None or mark.task_id != new.task_id or mark.expiry is None or new.expiry is None:
            return new
        return mark if mark.expiry >= new.expiry else new

    def may_extend(self, mark: Mark | None, task_id: str) -> bool:
        """Whether a mark is there still, and the task's own."""
        return mark is not None and mark.task_id == task_id

    def unmark(self, store: Store, now: int, *, task_id: str) -> Answer:
        """lua/unmark.lua."""
        return self._unset(store, "mark", task_id)

    def forget_by_hand(self, store: Store, now: int, *, task_id: str) -> Answer:
        """lua/unmark.lua, of the note that a task has succeeded."""
        return self._unset(store, "done", task_id)

    def forget_done(self, store: Store, now: int, *, token: str, count: int = 1) -> Answer:
        """lua/forget.lua."""
        done = store.done
        if done is not None and done.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        began = succeeded = 0
        for number in range(count):
            permit = at(store, number)
            if done is not None and permit.holder.token == done.task_id:
                succeeded = permit.holder.since
            if permit.holder.token != token:
                continue
            began = permit.holder.since
            if permit.holder.state == "running":
                failed = permit.record._replace(state=self.state_of_failed())
                store = at(permit._replace(record=failed), number)
        is_earlier = done is not None and self.is_of_same_task(done, token) and began > succeeded
        if done is None or not (is_earlier or self.is_success_of(done, token)):
            return store, ("lost",)
        return store._replace(done=None), ("freed",)

    def is_success_of(self, done: Mark, token: str) -> bool:
        """Whether a success is that of a run."""
        return done.task_id == token

    def is_of_same_task(self, done: Mark, token: str) -> bool:
        """Whether a success is that of a token's task."""
        task, _ = task_of(token)
        return task is not None and task_of(done.task_id)[0] == task

    def state_of_failed(self) -> str:
        """The state of a record whose run has failed before it gives its lock back."""
        return "failed"

    def _unset(self, store: Store, name: str, task_id: str) -> Answer:
        of: Mark | None = getattr(store, name)
        if of is not None and of.task_id == NOT_A_STRING:
            return store, WRONGTYPE
        if of is None or not self.may_unmark(of, task_id):
            return store, ("lost",)
        return store._replace(**{name: None}), ("freed",)

    def may_unmark(self, mark: Mark, task_id: str) -> bool:
        """Whether a mark is the task's own."""
        return mark.task_id == task_id

    def look(self, store: Store, now: int, *, line: bool = False, count: int = 1) -> Answer:
        """lua/look.lua; `line`: as for acquire."""
        if line and highest_in(store)[0] > count:
            return store, ("more", str(highest_in(store)[0]))
        found: list[str | None] = []
        for permit in permits_of(store, count):
            found += [permit.value, None if permit.record is None else str(permit.record)]
        order = waiting(store) if line else []
        places = {task: str(since) for since, task in store.line.places}
        waiters = [text for task in order[:100] for text in (task, places[task])]
        return store, (str(now), str(len(order)), str(count), *found, *waiters)


def _number_in(text: str) -> float:
    """What Lua takes a text for, be it a foreign program's; infinite if it is no number."""
    if re.fullmatch(r"\s*-?0x[0-9a-f]+\s*", text):
        return int(text, 16)
    is_number = re.fullmatch(r"\s*-?(\d+\.?\d*|\.\d+)(e\d+)?\s*", text)
    return float(text) if is_number else math.inf
