"""What must be true of every step, and of every state that can be reached."""

from collections.abc import Callable
from typing import Any

from tests.model.clients import RETENTION_MS, Call, Counted, Ours, is_dead
from tests.model.explorer import DEAD, INSIDE, TICK, Client, Event, Result, State, World, caused_by, grant_in
from tests.model.lock import Lock
from tests.model.permits import at, highest_in, permit_in, permits_of
from tests.model.store import MS, NUMBER, Mark, Permit, Record, Store, purge, seconds, task_of

EXECUTES = INSIDE | {"sent", "answered", "leaving"}  # sent: the reply of its acquire was lost


def exclusion(world: World, before: State, event: Event, after: State) -> bool:
    """No client enters, or goes on, beside as many others as may, whose leases are honoured."""
    if event.actor is None:
        return True
    me, now = after.clients[event.actor], after.now
    if me.at not in INSIDE:
        return True
    if now >= me.until and before.clients[event.actor].at in INSIDE:
        return True
    others = [
        other.at in INSIDE and now < other.until
        for index, other in enumerate(after.clients)
        if index != event.actor
    ]
    return sum(others) < world.limit


@caused_by("acquire")
def one_taker(world: World, before: State, event: Event, after: State) -> bool:
    """A dead holder is taken over from by exactly one."""
    if event.reply[0] != "taken_over" or not event.reply[5]:
        return True
    return grant_in(event.reply[5]) not in before.buried


def entry_kept(world: World, before: State, event: Event, after: State) -> bool:
    """Nobody changes what Redis says of a valid holder, except the holder (and who proves it dead)."""
    if before.store is after.store or event.actor is None or world.programs[event.actor].foreign:
        return True
    return all(_entry_kept(world, before, event, after, number) for number in range(world.limit))


def _entry_kept(world: World, before: State, event: Event, after: State, number: int) -> bool:
    old, new = at(before.store, number), at(after.store, number)
    if old.value is None or (old.value, old.record) == (new.value, new.record):
        return True
    record = old.holder
    if after.now >= record.deadline:
        return number > 0 or not _is_valid_foreigners(old.value, world, before)
    if record.token == event.token:
        return True
    task, retries = task_of(record.token)
    own, attempt = task_of(event.token)
    if record.state == "running":
        return is_dead(record.token, before, world)
    if record.state == "held_for_retry":
        return (own == task and attempt > retries) or (event.what, event.token) == ("free", task)
    return own == task


def _is_valid_foreigners(value: str, world: World, state: State) -> bool:
    return any(
        program.foreign
        and client.at == "inside"
        and state.now < client.until
        and value == seconds(client.until)
        for program, client in zip(world.programs, state.clients)
    )


@caused_by("release", "free")
def no_stale_release(world: World, before: State, event: Event, after: State) -> bool:
    """A release never frees another's lock."""
    return all(
        _not_stale(event, after, at(before.store, number), at(after.store, number))
        for number in range(world.limit)
    )


def _not_stale(event: Event, after: State, old: Store, new: Store) -> bool:
    if (old.value, old.record) == (new.value, new.record):
        return True
    record = old.holder
    if event.what == "free":
        return record.state == "held_for_retry" and event.token == task_of(record.token)[0]
    ours = old.value in (None, seconds(record.deadline)) or after.now < record.deadline
    return record.token == event.token and ours


@caused_by("release")
def no_release_lost(world: World, before: State, event: Event, after: State) -> bool:
    """A release inside the lease frees the lock, or lets it rest, or holds it for the retry."""
    return all(
        _frees(event, after, at(before.store, number), at(after.store, number))
        for number in range(world.limit)
    )


def _frees(event: Event, after: State, old: Store, new: Store) -> bool:
    record = old.holder
    if old.value is None or not NUMBER.fullmatch(old.value):
        return True
    is_held = record.state in ("running", "failed") and after.now < record.deadline
    if record.token != event.token or not is_held:
        return True
    return new.value is None or new.holder.state == event.reply[0]


@caused_by("renew", "release")
def no_false_loss(world: World, before: State, event: Event, after: State) -> bool:
    """A holder is never told inside its lease that the lock is lost."""
    if event.reply[0] not in ("lost", "gone"):
        return True
    for number in range(world.limit):
        old = at(before.store, number)
        if old.holder.token == event.token and after.now < old.holder.deadline and old.value is not None:
            return False
    return True


@caused_by("acquire")
def fences_rise(world: World, before: State, event: Event, after: State) -> bool:
    """Every grant has a larger fence than all before it; a resumed or resent one has its own again."""
    if event.reply[0] in ("held", "paced"):
        return True
    fence = int(event.reply[2])
    if world.has_terms:  # they rise for each permit
        known = at(before.store, permit_in(event.reply)).holder.fence
        return fence == known if event.reply[0] in ("again", "resumed") else fence > known
    return fence == before.fence if event.reply[0] in ("again", "resumed") else fence > before.fence


@caused_by("mark", "if_same", "release")
def one_queued(world: World, before: State, event: Event, after: State) -> bool:
    """Of the calls whose marks have not lapsed at most one is queued (until_done: or running)."""
    queued = running = 0
    for program, client in zip(world.programs, after.clients):
        queued += after.now < client.marked_until
        running += getattr(program, "until_done", False) and client.at in INSIDE and after.now < client.until
    return queued <= 1 and (event.what != "mark" or event.reply[0] != "marked" or not running)


def mark_lasts(world: World, before: State, event: Event, after: State) -> bool:
    """A mark is there for as long as its call was told, until the call starts or gives it back."""
    mark, now = after.store.mark, after.now
    for program, client in zip(world.programs, after.clients):
        if client.marked_until > now and (mark is None or mark.task_id != getattr(program, "task", None)):
            return False
    return True


@caused_by("mark")
def no_ghost(world: World, before: State, event: Event, after: State) -> bool:
    """No call is dropped in favour of one that is neither queued nor running (or died so).

    A call that was marked and never sent counts for as long as its grace lease.
    """
    if event.reply[0] not in ("queued", "running"):
        return True
    for program, client in zip(world.programs, before.clients):
        if not isinstance(program, Ours) or program.task != event.reply[1]:
            continue
        if client == DEAD:
            return True
        if event.reply[0] == "queued":
            return isinstance(program, Call) and program.is_queued(client, before.now)
        return before.store.holder.state == "held_for_retry" or client.at in EXECUTES
    return False


def others_mark_kept(world: World, before: State, event: Event, after: State) -> bool:
    """Only the call that a mark names deletes or replaces it."""
    mark = before.store.mark
    if mark is None or event.actor is None or mark == after.store.mark:
        return True
    return task_of(event.token)[0] == mark.task_id or event.token == mark.task_id


@caused_by("inside")
def no_second_body(world: World, before: State, event: Event, after: State) -> bool:
    """No body begins while another's success counts: noted, and neither taken back nor lost."""
    if event.actor is None or before.clients[event.actor].at in INSIDE:
        return True
    others = enumerate(after.clients)
    return not any(index != event.actor and _counts(client, after.now) for index, client in others)


def _counts(client: Client, now: int) -> bool:
    return client.at in ("storing", "done") and now < client.counts_until


def success_lasts(world: World, before: State, event: Event, after: State) -> bool:
    """What says that a call has succeeded is there for as long as that counts, and no longer."""
    note, now = after.store.done, after.now
    counting = {
        p.task for p, c in zip(world.programs, after.clients) if isinstance(p, Ours) and _counts(c, now)
    }
    if note is None:
        return not counting
    windows = [p.window for p in world.programs if isinstance(p, Counted)]
    return note.expiry is not None and note.expiry <= (now + max(windows)) // MS


@caused_by("mark", "skipped")
def no_ghost_success(world: World, before: State, event: Event, after: State) -> bool:
    """No call is dropped in favour of one that has failed, unless that cannot be known yet."""
    if event.what == "mark" and event.reply[0] != "done":
        return True
    note = before.store.done
    for program, client in zip(world.programs, before.clients):
        if isinstance(program, Counted) and note is not None and _is_of(note, program.task):
            # A key lives to the end of its last millisecond.
            counts = client.counts_until >= before.now and client.at in ("leaving", "late", "storing", "done")
            return counts or client == DEAD or client.at == "failing"
    return False


def failure_frees(world: World, before: State, event: Event, after: State) -> bool:
    """A call that has failed after its release, or has died, counts no more once that is seen."""
    note = after.store.done
    for program, client in zip(world.programs, after.clients):
        task = getattr(program, "task", None)
        if client.at == "forgotten":
            task = getattr(world.programs[getattr(program, "child", -1)], "task", None)
        elif client.at not in ("failed", "taken_back"):
            continue
        if note is not None and _is_of(note, task):
            return False
    return True


def _is_of(success: Mark, task: str | None) -> bool:
    return task_of(success.task_id)[0] == task


@caused_by("forget_done")
def others_success_kept(world: World, before: State, event: Event, after: State) -> bool:
    """Only the call that has succeeded takes that back."""
    note = before.store.done
    return note == after.store.done or (note is not None and _is_of(note, task_of(event.token)[0]))


@caused_by("acquire")
def one_each(world: World, before: State, event: Event, after: State) -> bool:
    """No token has two permits, and no task."""
    owners = []
    for permit in permits_of(after.store, world.limit):
        record = permit.record
        if permit.value is not None and isinstance(record, Record) and after.now < record.deadline:
            owners.append(task_of(record.token)[0])
    return len(set(owners)) == len(owners)


@caused_by("acquire")
def beyond_drains(world: World, before: State, event: Event, after: State) -> bool:
    """A permit beyond a client's limit, which was lowered, is had by its own task only."""
    number = permit_in(event.reply)
    if event.reply[0] in ("held", "more", "paced") or event.actor is None:
        return True
    record = at(before.store, number).holder
    own = task_of(record.token)[0] == task_of(event.token)[0]
    return own or number < getattr(world.programs[event.actor], "limit", 1)


def pace_kept(world: World, before: State, event: Event, after: State) -> bool:
    """Within one period no more bodies begin than may; where rates differ, by the highest that any has."""
    if before.bodies == after.bodies:
        return True
    most, period = pace_of(world)
    return all(later - at >= period for at, later in zip(after.bodies, after.bodies[most:]))


def pace_of(world: World) -> tuple[int, int]:
    """How many may start within how long, as whoever may start most has it."""
    ours = [program for program in world.programs if isinstance(program, Ours) and program.starts]
    return max(program.starts for program in ours), min(program.period for program in ours)


@caused_by("acquire")
def paced_with_reason(world: World, before: State, event: Event, after: State) -> bool:
    """Nobody is refused for a pace but while as many starts count, nor for longer than they do."""
    if event.reply[0] != "paced" or event.actor is None:
        return True
    program, till = world.programs[event.actor], int(event.reply[1])
    if not isinstance(program, Ours):
        return True
    counting = [at for at, *_ in before.store.starts.times if before.now - program.period < at <= before.now]
    return len(counting) >= program.starts and till == counting[-program.starts] + program.period


@caused_by("acquire")
def held_until_it_may_start(world: World, before: State, event: Event, after: State) -> bool:
    """A permit that is held for a retry, which is refused for its pace, is its own until after that."""
    permit = at(before.store, permit_in(event.reply))
    if event.reply[0] != "paced" or not (permit.value and permit.holder.state == "held_for_retry"):
        return True
    if task_of(permit.holder.token)[0] != task_of(event.token)[0] or before.now >= permit.holder.deadline:
        return True
    return at(after.store, permit_in(event.reply)).holder.deadline > int(event.reply[1])


def starts_expire(world: World, before: State, event: Event, after: State) -> bool:
    """What is noted of starts lasts for two of the longest periods at most."""
    starts = after.store.starts
    return not starts.times or (
        starts.expiry is not None and starts.expiry <= (after.now + 2 * world.period) // MS
    )


SAFETY = (exclusion, one_taker, entry_kept, no_stale_release, no_release_lost, no_false_loss, fences_rise)
PERMITS_SAFETY = (*SAFETY, one_each, beyond_drains)
PACED = (*PERMITS_SAFETY, pace_kept, paced_with_reason, held_until_it_may_start, starts_expire)
WINDOW = (no_second_body, success_lasts, no_ghost_success, failure_frees, others_success_kept)
MARKS = (*SAFETY, one_queued, mark_lasts, no_ghost, others_mark_kept)


def slowest_acquire(lock: Lock, result: Result, bound: int) -> int:
    """In how many ticks a lone client acquires, from the worst of all reachable states; at most bound + 1."""

    def acquires(store: Store, at: int) -> bool:
        _, reply = lock.acquire(store, at, token="alone", lease=TICK, retention=RETENTION_MS)
        return bool(reply[0] != "held")

    return _slowest(acquires, result, bound)


def lost_permit(
    lock: Lock, result: Result, bound: int, limit: int, pace: str = ""
) -> tuple[Store, int] | None:
    """A reachable state so many ticks after which lone clients do not get all permits; None if none is.

    With a `pace`, that of as many starts as there are permits: no start is lost either.
    """
    known: dict[Any, bool] = {}
    for store, now in result.moments:
        later = now + bound * TICK
        left = purge(store, later)
        permits = permits_of(left, limit)
        seen = tuple((permit.value, _end_of(permit)) for permit in permits), left.starts, later
        if seen not in known:
            known[seen] = _has_all(lock, left, later, limit, f"{limit}{pace}")
        if not known[seen]:
            return store, now
    return None


def _end_of(permit: Permit) -> tuple[int, str] | None:
    return (permit.record.deadline, permit.record.state) if isinstance(permit.record, Record) else None


def _has_all(lock: Lock, store: Store, now: int, limit: int, terms: str) -> bool:
    for number in range(limit):
        asked = {"token": f"alone {number}", "lease": TICK, "retention": RETENTION_MS, "line": True}
        count = max(limit, highest_in(store)[0])
        store, reply = lock.acquire(store, now, **asked, terms=terms, count=count)
        if reply[0] in ("held", "paced"):
            return False
    return True


def slowest_publish(lock: Lock, result: Result, bound: int, *, until_done: bool) -> int:
    """In how many ticks a lone publisher is no duplicate, from the worst of all reachable states."""
    dedupe = "until_done" if until_done else "until_started"

    def marks(store: Store, at: int) -> bool:
        _, reply = lock.mark(store, at, task_id="alone", lease=TICK // MS, dedupe=dedupe)
        return bool(reply[0] == "marked")

    return _slowest(marks, result, bound)


def _slowest(succeeds: Callable[[Store, int], bool], result: Result, bound: int) -> int:
    slowest = 0
    for store, now in result.moments:
        times = (now + tick * TICK for tick in range(bound + 1))
        ticks = next((tick for tick, at in enumerate(times) if succeeds(purge(store, at), at)), bound + 1)
        slowest = max(slowest, ticks)
    return slowest
