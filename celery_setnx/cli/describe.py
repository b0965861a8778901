"""What was seen of a lock, as JSON rows, table cells and sentences; and whether a call would run now.

Nothing here asks a server: what is said is what `celery_setnx.lock.look` has seen.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from celery_setnx.lock.live import LiveTerm, live_terms_of
from celery_setnx.lock.look import Sighting
from celery_setnx.lock.names import permit_names
from celery_setnx.lock.newest import Newest
from celery_setnx.lock.process import fate_of
from celery_setnx.lock.record import Holder
from celery_setnx.lock.takeover import TakeOver
from celery_setnx.options import Options
from celery_setnx.wording import resume, shortened, titled

_SHOWN = 3  # holders that `why` names
_IN_TABLE = 24  # characters of what a key was made of

COLUMNS = ("TASK", "STATE", "AGE", "DEADLINE", "PROCESS", "WAITING", "TASK ID", "WORKER", "KEY")
MARK_COLUMNS = ("TASK", "DUE", "SUPERSEDED", "LAPSES", "QUEUED TASK ID", "KEY")
DONE_COLUMNS = ("TASK", "COUNTS", "TASK ID", "KEY")

_ON_CONFLICT = {
    "skip": "would be skipped: it succeeds without running",
    "retry": "would come back after {first}, and then after up to {options.retry_delay_max:g} s each time",
    "wait": "would wait in line, at place {place}",
    "join": "would wait in line, and get the holder's result",
    "raise": "would fail with AlreadyRunning",
}


def row(sighting: Sighting) -> dict[str, Any]:
    """A lock as plain JSON values, under the names that docs/cli.md promises."""
    found = {**_row_of_holder(sighting), "state": _state(sighting)}
    found["held"] = len(sighting.holders)
    found["limit"] = sighting.limit
    found["holders"] = list(map(_row_of_permit, sighting.of_each())) if sighting.has_several else None
    found["rate"] = [sighting.terms.starts, sighting.terms.period_s] if sighting.terms.starts else None
    found["starts"] = sighting.started if sighting.asked.starts else None
    found["next_start_s"] = rounded(_next_start_s(sighting))
    return found


def _row_of_permit(sighting: Sighting) -> dict[str, Any]:
    """Who holds one of several permits; without what is the lock's."""
    found = _row_of_holder(sighting)
    for name in ("key", "about", "scope", "waiting"):
        del found[name]
    return {"permit": sighting.holder and sighting.holder.permit, **found}


def _row_of_holder(sighting: Sighting) -> dict[str, Any]:
    holder = sighting.holder
    info: Mapping[str, Any] = holder.info if holder else {}
    return {
        "key": sighting.key,
        "task": sighting.task,
        "about": sighting.about,
        "scope": sighting.scope,
        "state": holder.state if holder else "free",
        "stale": sighting.is_stale,
        "task_id": info.get("task_id"),
        "worker": info.get("worker"),
        "host": info.get("host"),
        "pid": holder and holder.pid,
        "process": sighting.process,
        "fence": holder.fence if holder else None,
        "since": holder.since if holder else None,
        "age_s": rounded(sighting.age_s),
        "deadline": holder.deadline if holder else None,
        "remaining_s": rounded(sighting.remaining_s),
        "waiting": sighting.waiting,
        "value": holder.value if holder else None,
    }


def mark_row(sighting: Sighting) -> dict[str, Any]:
    """A mark as plain JSON values, under the names that docs/cli.md promises."""
    return {
        "key": sighting.key,
        "task": sighting.scope,
        "task_id": sighting.queued,
        "lapses_in_s": rounded(sighting.queued_for_s),
        **_newest(sighting),
    }


def _newest(sighting: Sighting) -> dict[str, Any]:
    """What the JSON says of a call that replaces older ones; null of a mark."""
    newest = sighting.newest
    return {
        "due_in_s": rounded(newest.due_in_s) if newest else None,
        "superseded": newest.superseded if newest else None,
    }


def done_row(sighting: Sighting) -> dict[str, Any]:
    """A success that counts as plain JSON values, under the names that docs/cli.md promises."""
    return {
        "key": sighting.key,
        "task": sighting.scope,
        "task_id": sighting.done_by,
        "counts_for_s": rounded(sighting.done_counts_for_s),
    }


def cells(sighting: Sighting) -> list[str]:
    """A lock as the cells of a table, one for each of `COLUMNS`."""
    state, waiting = _state(sighting), str(sighting.waiting or "-")
    permits = of_permits(sighting, " ")
    if state in ("paced", "paused"):  # that is in the way, and no holder
        next_start = f"in {span(_next_start_s(sighting))}"
        return [_title(sighting), f"{state}{permits}", "-", next_start, "-", waiting, "-", "-", sighting.key]
    holder = sighting.holder
    task_id, process = str((holder and holder.task_id) or "-"), sighting.process or "-"
    return [
        *(_title(sighting), f"{state}{permits}", span(sighting.age_s), _deadline(sighting), process, waiting),
        *(task_id, _where(holder), sighting.key),
    ]


def _title(sighting: Sighting) -> str:
    """A lock's task and what its key was made of, as there is room in a table; `show` has all of it."""
    return titled(sighting.task, shortened(sighting.about, _IN_TABLE))


def _state(sighting: Sighting) -> str:
    """The state of a lock in one word: its holder's, unless only its pace or a pause keeps calls out."""
    if (sighting.is_paced or sighting.is_paused) and not _is_trouble(sighting):
        return sighting.word
    return sighting.holder.state if sighting.holder else "free"


def _next_start_s(sighting: Sighting) -> float | None:
    """Seconds until the next call may start; None if its pace allows it now, or it has none."""
    next_start = sighting.next_start
    return None if next_start is None else next_start - sighting.server_time


def of_starts(sighting: Sighting) -> str:
    """How many starts count of how many there may be, and when the next may be; nothing without a pace."""
    if not sighting.asked.starts:
        return ""
    next_start_s = _next_start_s(sighting)
    then = "" if next_start_s is None else f"; the next is allowed in {span(next_start_s)}"
    return f"{sighting.started} of {sighting.asked.pace}{then}"


def of_permits(sighting: Sighting, before: str = "") -> str:
    """How many permits are held of how many: "3/5"; of a limit that was lowered "3/3 +2". Nothing of one."""
    if not sighting.has_several:
        return ""
    within = len(sighting.within.holders)
    beyond = len(sighting.holders) - within
    return f"{before}{within}/{sighting.asked.limit}" + (f" +{beyond}" if beyond else "")


def style(sighting: Sighting) -> dict[str, Any]:
    """How a lock's row looks: red if its holder will not come back, or never ends; dim if nobody runs."""
    if _is_trouble(sighting):
        return {"fg": "red"}
    return {} if _state(sighting) in ("running", "foreign") else {"dim": True}


def worst_first(sighting: Sighting) -> tuple[bool, int, float]:
    """The order in which to look at locks: trouble, then who keeps many waiting, then the oldest."""
    return not _is_trouble(sighting), -sighting.waiting, -(sighting.age_s or 0.0)


def mark_cells(sighting: Sighting) -> list[str]:
    """A mark as the cells of a table, one for each of `MARK_COLUMNS`."""
    newest, lapses = sighting.newest, f"in {span(sighting.queued_for_s)}"
    due, superseded = (_due(newest), str(newest.superseded)) if newest else ("-", "-")
    return [sighting.scope, due, superseded, lapses, str(sighting.queued), sighting.key]


def _due(newest: Newest) -> str:
    """When a call that replaces older ones may start, or since when it may."""
    due_in_s = newest.due_in_s
    if due_in_s is None:
        return "-"
    return f"in {span(due_in_s)}" if due_in_s > 0 else f"{span(-due_in_s)} ago"


def done_cells(sighting: Sighting) -> list[str]:
    """A success that counts as the cells of a table, one for each of `DONE_COLUMNS`."""
    counts = f"for {span(sighting.done_counts_for_s)}"
    return [sighting.scope, counts, str(sighting.done_by), sighting.key]


class Shape(NamedTuple):
    """How one kind of thing is listed: its name, and each as JSON, as cells, and in which style."""

    name: str
    row: Callable[[Any], dict[str, Any]]
    columns: Sequence[str]
    cells: Callable[[Any], list[str]]
    style: Callable[[Any], dict[str, Any]]


def shape_of(*, done: bool, queued: bool) -> Shape:
    """How locks are listed, or marks, or successes that count."""
    if done:
        return Shape("done call", done_row, DONE_COLUMNS, done_cells, _plain)
    if queued:
        return Shape("mark", mark_row, MARK_COLUMNS, mark_cells, _plain)
    return Shape("lock", row, COLUMNS, cells, style)


def _plain(_one: Any) -> dict[str, Any]:
    return {}


def all_of(sighting: Sighting, taken_over: TakeOver | None) -> dict[str, Any]:
    """All that is known of one lock, as JSON has it."""
    holder, last = sighting.holder, sighting.last_holder
    found, holders = row(sighting), sighting.holders
    details = found["holders"]
    return {
        **found,
        "token": holder and holder.token,
        "last_holder": last and last.as_dict(),
        "last_take_over": taken_over and asdict(taken_over),
        "mark": sighting.queued,
        "mark_lapses_in_s": rounded(sighting.queued_for_s),
        **_newest(sighting),
        **_done(sighting),
        "line": [{**asdict(waiter), "age_s": rounded(waiter.age_s)} for waiter in sighting.waiters],
        "holders": details and [{**one, "token": holder.token} for one, holder in zip(details, holders)],
    }


def page(details: Mapping[str, Any], sighting: Sighting, about: str = "") -> Iterator[str]:
    """The lines that `celery setnx show` prints of a lock; `about`: what was asked about."""
    holder, last = sighting.holder, details["last_holder"]
    yield f"key       {sighting.key}"
    yield f"task      {titled(sighting.task, sighting.about or about)}"
    yield f"scope     {sighting.scope}"
    if holder is None:
        yield f"state     {_state(sighting)}"
        if last is not None:
            yield f"last      {last['description']}, fence {last['fence']}"
    elif not sighting.has_several:
        yield from _page_of(sighting, holder)
    if sighting.has_several:
        yield f"permits   {of_permits(sighting)} held"
        for one in sighting.of_each():
            number = one.holder.permit if one.holder else 0
            yield f"permit {number}" + (", beyond the limit" if number >= sighting.asked.limit else "")
            yield from (f"  {line}" for line in _page_of(one, one.holder))
    if starts := of_starts(sighting):
        yield f"starts    {starts}"
    for whose, term in _live(sighting):
        yield f"terms     its {whose} is {term.told()}"
    take_over = details["last_take_over"]
    if take_over is not None:
        ago = span(sighting.server_time - take_over["at"])
        yield f"taken     over {ago} ago by {take_over['by']}"
        yield f"          from {take_over['holder'].get('description')}"
    mark = f"queued as {sighting.mark}, lapses in {span(sighting.mark_ends_s)}" if sighting.mark else "-"
    yield f"mark      {mark}"
    if sighting.newest:
        yield f"newest    {_of_newest(sighting.newest)}"
    if details["done"]:
        yield f"done      as {details['done']}; duplicates for {span(details['done_counts_for_s'])} more"
    yield f"waiting   {sighting.waiting or '-'}"
    for waiter in details["line"]:
        yield f"          {waiter['place']}. {waiter['task_id']}, for {span(waiter['age_s'])}"


def _of_newest(newest: Newest) -> str:
    """What `show` says of a call that replaces older ones."""
    due = f", due {_due(newest)}" if newest.due_in_s is not None else ""
    superseded = f"{many(newest.superseded, 'older call')} superseded"
    return f"queued as {newest.task_id}{due}; {superseded}; lapses in {span(newest.lapses_in_s)}"


def _page_of(sighting: Sighting, holder: Holder | None) -> Iterator[str]:
    """The lines about who holds a lock, or one of its permits."""
    if holder is None:
        return
    yield f"state     {holder.state}" + (", its deadline has passed" if sighting.is_stale else "")
    yield f"holder    {holder}"
    yield f"process   {fate(sighting)}"
    yield f"token     {holder.token or '-'}"
    yield f"fence     {holder.fence or '-'}"
    yield f"age       {span(sighting.age_s)}"
    yield f"deadline  {until(sighting)}"
    yield f"value     {holder.value if holder.value.isdecimal() else repr(holder.value)}"


def _done(sighting: Sighting) -> dict[str, Any]:
    """What the JSON of one lock says of a success that counts."""
    return {"done": sighting.done_by, "done_counts_for_s": rounded(sighting.done_counts_for_s)}


def answer(runs: bool, because: Sequence[str], sighting: Sighting) -> dict[str, Any]:
    """A verdict as plain JSON values, and the lock that it is about."""
    return {
        "runs": runs,
        "reason": because[0],
        "details": list(because[1:]),
        **row(sighting),
        "mark": sighting.queued,
        "mark_lapses_in_s": rounded(sighting.queued_for_s),
        **_newest(sighting),
        **_done(sighting),
    }


def verdict(options: Options, sighting: Sighting, named: Sequence[str] = ()) -> tuple[bool, list[str]]:
    """Whether a call would run now that is told this, and why, the main reason first.

    `named` are the words by which the command line names the call.
    """
    own = sighting.within
    if sighting.duplicate:
        runs, reasons = False, _as_duplicate(options, own)
    elif options.debounce is not None and sighting.waits_s:
        runs, reasons = False, _as_debounced(options, own)
    else:
        runs, reasons = _as_call(options, own)
    changed = [f"Its {whose} is {term.told()}" for whose, term in _live(sighting) if term.name != "pause"]
    ends = _ends_pause(sighting, named) if sighting.pause else []
    return runs, [*reasons, *_replaced(options, sighting), *changed, *_deploy(sighting, options), *ends]


def _live(sighting: Sighting) -> Iterator[tuple[str, LiveTerm]]:
    """The live terms that count, and whether they are the key's or its task's."""
    of_key = {term.name: term for term in sighting.live}
    of_task = {term.name: term for term in live_terms_of(sighting.asked.live, sighting.server_time)}
    for name, term in {**of_task, **of_key}.items():
        if name != "pause":
            yield "key" if name in of_key else "task", term
    if pause := sighting.pause:
        yield "key" if pause in sighting.live else "task", pause


def _ends_pause(sighting: Sighting, named: Sequence[str]) -> list[str]:
    """The command that ends a pause, in a line of its own, to be copied."""
    whose = named if sighting.pause in sighting.live else (sighting.scope,)
    return ["To end the pause:", f"  {resume(*whose)}"]


def _as_debounced(options: Options, sighting: Sighting) -> list[str]:
    """How long a call would wait for newer ones, and what it would meet after that."""
    pending_s = sighting.newest.pending_s if sighting.newest else None
    most_s = max(0.0, options.debounce_max - (pending_s or 0.0))
    _, (lock, *more) = _as_call(options, sighting, "If that is still so when it is due, it")
    return [
        f"a new call would wait {span(sighting.waits_s)} for newer ones (debounce={options.debounce:g}).",
        f"However many follow, the newest is due in {span(most_s)} at the latest "
        f"(debounce_max={options.debounce_max:g}).",
        f"{lock[0].upper()}{lock[1:]}",
        *more,
    ]


def _replaced(options: Options, sighting: Sighting) -> list[str]:
    """Which queued call a new one would replace, and when that one is due."""
    newest = sighting.newest
    if newest is None or not options.replaces:
        return []
    place, due_in_s = _place_of_older(options, sighting), newest.due_in_s
    if place and newest.parked_as == newest.task_id:
        state = f"waits in line, at place {place}"
    elif due_in_s is None:
        state = "is queued"
    elif due_in_s > 0:
        state = f"is queued, and due in {span(due_in_s)}"
    else:
        state = f"is queued, and has been due for {span(-due_in_s)}"
    unless = ", unless it need not wait (debounce_leading)" if options.debounce_leading else ""
    lines = [f"{newest.task_id} {state}; a new call would replace it{unless}."]
    if options.debounce is None:
        lines.append(
            f"An equal call would not be published: its caller would get the result of {newest.task_id}."
        )
    if newest.superseded:
        lines.append(f"Superseded since the last start: {many(newest.superseded, 'older call')}.")
    return lines


def _place_of_older(options: Options, sighting: Sighting) -> int | None:
    """The place in line of an older call, which a new one would have instead; None if none waits."""
    parked_as = sighting.newest.parked_as if sighting.newest and options.replaces else ""
    places = (waiter.place for waiter in sighting.waiters if waiter.task_id == parked_as)
    return next(places, None) if parked_as else None


def _as_duplicate(options: Options, sighting: Sighting) -> list[str]:
    """Why a call would not be published."""
    original = str(sighting.original)
    how = {
        "queued": f"is already queued, as {original}",
        "running": f"is already running, as {original}",
        "done": f"has succeeded, as {original}",
    }[str(sighting.duplicate)]
    lapses = f"Its mark lapses in {span(sighting.mark_ends_s)}, or when it starts."
    marked = [lapses] if sighting.duplicate == "queued" else []
    lasts = f"for {span(sighting.done_counts_for_s)} more " if sighting.duplicate == "done" else ""
    because = f"the same call {how}; {lasts}a new one would not be published."
    return [because, _duplicate(options, original), *marked, *_who(options, sighting)]


def _as_call(options: Options, sighting: Sighting, call: str = "A call now") -> tuple[bool, list[str]]:
    """Whether a call would have the lock now, or a permit, by what it would be told."""
    word, found, who = sighting.word, sighting.permit_holder, _who(options, sighting)
    in_line, limit = _in_line_first(options, sighting), sighting.asked.limit
    if word == "paced":
        return False, _paced(options, sighting, call)
    if word == "paused":
        return False, _paused(options, sighting, call)
    if word == "refused":
        record = permit_names(sighting.key, sighting.permit)[1]
        because = f"another program has written {record}: each call fails with LockRefused."
        return False, [because, "If nobody needs that key, delete it.", *who]
    if word == "held":
        reasons = [_held(sighting), *who, _on_conflict(options, sighting, call)]
        if sighting.pause:
            reasons.append(f"A pause lets no call start either: {_of_pause(sighting)}")
        elif sighting.next_start is not None:
            reasons.append(f"Its rate allows no start either: {of_starts(sighting)}.")
        return False, reasons
    holder, lock = ("the holder", "lock") if limit == 1 else ("a holder", "permit")
    if found is None and sighting.holders:
        because = f"a permit is free ({len(sighting.holders)} of {limit} held)."
        return word != "line", [because, *(in_line or who)]
    if found is None:
        return word != "line", ["its lock is free.", *in_line]
    if word == "line":
        ended = "'s lease ended" if found.has_ended(sighting.server_time) else " is dead"
        return False, [f"{holder}{ended}; the first call in line takes over its {lock}.", *in_line]
    if not found.has_ended(sighting.server_time):
        return True, [_dead(limit, found), *who, "Workers on other hosts wait until its lease ends."]
    late = span(sighting.server_time - (found.deadline or 0.0))
    return True, [f"{holder}'s lease ended {late} ago; the call takes over its {lock}.", *who]


def _in_line_first(options: Options, sighting: Sighting) -> list[str]:
    """How many calls have their turn before any other."""
    before = _place(options, sighting) - 1
    come = "comes" if before == 1 else "come"
    return [f"{many(before, 'call')} in line {come} first."] if before else []


def _in_line_before(options: Options, sighting: Sighting) -> list[str]:
    """How many calls have their turn before a new one."""
    before = _place(options, sighting) - 1
    return [f"{many(before, 'call')} in line before it."] if before else []


def _place(options: Options, sighting: Sighting) -> int:
    """The place in line that a new call would have."""
    return _place_of_older(options, sighting) or sighting.waiting + 1


def _paced(options: Options, sighting: Sighting, call: str) -> list[str]:
    """Why a call would not run that could have the lock, or a permit."""
    next_start_s, starts = _next_start_s(sighting), f"{sighting.started} of {sighting.asked.pace}"
    return [
        f"its rate allows the next start in {span(next_start_s)} (starts: {starts}).",
        *_in_line_before(options, sighting),
        _on_conflict(options, sighting, call, next_start_s),
    ]


def _paused(options: Options, sighting: Sighting, call: str) -> list[str]:
    """Why a call would not run that could have the lock, or a permit, but for a pause."""
    waits_alone = options.on_conflict == "auto" and not options.may_wait
    return [
        _of_pause(sighting),
        *_in_line_before(options, sighting),
        _alone(sighting, call) if waits_alone else _on_conflict(options, sighting, call),
    ]


def _of_pause(sighting: Sighting) -> str:
    """Whose pause lets no call start, for how long, by whom and why."""
    pause = sighting.pause
    whose = "key" if pause in sighting.live else "task"
    left_s = pause.remaining_s(sighting.server_time) if pause else _next_start_s(sighting)
    return f"its {whose} is paused for {span(left_s)} more{pause.source if pause else ''}."


def _alone(sighting: Sighting, call: str) -> str:
    """What becomes of a call in a pause that `auto` would skip else."""
    if sighting.waiting:
        return f"{call} would be skipped, as another of its key waits (on_conflict='auto')."
    return f"{call} would wait in line; others would be skipped (on_conflict='auto')."


def _held(sighting: Sighting) -> str:
    """That others hold it; of several permits how many, and when the first ends."""
    found, limit = sighting.permit_holder, sighting.asked.limit
    if limit == 1:
        return "its lock is held."
    deadline = found.deadline if found else None
    left = None if deadline is None else deadline - sighting.server_time
    ends = "none of them ever ends" if left is None else f"the first lease ends in {span(left)}"
    return f"{len(sighting.holders)} of {limit} permits are held; {ends}."


def _dead(limit: int, holder: Holder) -> str:
    """That a holder is dead, and who may see that."""
    if limit == 1:
        return "its holder is dead; a worker on this host takes over the lock at once."
    return f"the holder of permit {holder.permit} is dead; a worker on this host takes it over at once."


def fate(sighting: Sighting) -> str:
    """What can be known from here of the holder's process, as a sentence."""
    holder = sighting.holder
    pid, host = (holder.pid, holder.info.get("host")) if holder else (None, None)
    if holder is not None and holder.state in ("resting", "held_for_retry", "handed"):
        return "No body runs under it."
    if holder is None or pid is None:
        return "Its process is not known."
    found = fate_of(holder.info)
    if found == "unknown":
        dead = "" if sighting.is_stale else " If it is dead, the lock is free when its lease ends."
        return f"Its process is pid {pid} on {host}, which cannot be checked from this host.{dead}"
    return f"Its process, pid {pid} on this host, is {found}."


def until(sighting: Sighting) -> str:
    """Until when a lock is held, as a sentence."""
    holder, remaining_s = sighting.holder, sighting.remaining_s
    if holder is None:
        return "It is free."
    if remaining_s is None:
        return "It never ends by itself, because its value is not a time."
    if remaining_s <= 0:
        return f"Its deadline passed {span(-remaining_s)} ago."
    left = span(remaining_s)
    return {
        "running": f"Its lease ends in {left}, unless the holder renews it.",
        "resting": f"Its task has ended; the lock is kept for {left} more (at_least_for).",
        "held_for_retry": f"It is kept for the task's own retry, for {left} at most.",
        "handed": f"It is kept for the first call in line, for {left} at most.",
        "failed": f"Its task has failed, and is giving the lock back; it is free in {left} at the latest.",
    }.get(holder.state, f"It ends in {left}.")


def span(seconds: float | None) -> str:
    """A duration in at most two units; "-" if there is none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    words: list[str] = []
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, unit)
        if count or words:
            words.append(f"{count} {name}")
    return " ".join(words[:2])


def many(count: int, what: str) -> str:
    """A number of things, as "1 lock", "2 locks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def rounded(seconds: float | None) -> float | None:
    """Seconds to the millisecond."""
    return None if seconds is None else round(seconds, 3)


def _is_trouble(sighting: Sighting) -> bool:
    return sighting.is_abandoned or (sighting.holder is not None and sighting.remaining_s is None)


def _deadline(sighting: Sighting) -> str:
    remaining_s = sighting.remaining_s
    if remaining_s is None:
        return "never" if sighting.holder else "-"
    return f"in {span(remaining_s)}" if remaining_s > 0 else f"{span(-remaining_s)} ago"


def _where(holder: Holder | None) -> str:
    info = holder.info if holder else {}
    where = info.get("worker") or info.get("host")
    return f"{where} (pid {holder and holder.pid})" if where else "-"


def _who(options: Options, sighting: Sighting) -> list[str]:
    """Who is in the way, since when, until when, and whether that process lives."""
    holder = sighting.holder
    if holder is None:
        return []
    line = _in_line_before(options, sighting)
    if sighting.asked.limit > 1:
        each = sorted(sighting.of_each(), key=_ends)
        more = len(each) - _SHOWN
        others = [f"{many(more, 'more holder')}: see celery setnx show."] if more > 0 else []
        stop = _stop("one", "ID") if any(map(_may_be_stopped, each)) else []
        return [*map(_who_in_short, each[:_SHOWN]), *others, *stop, *line]
    since = f" ({span(sighting.age_s)} ago)" if sighting.age_s is not None else ""
    stop = _stop("it", str(holder.task_id)) if _may_be_stopped(sighting) else []
    ends = [] if sighting.remaining_s is None else [until(sighting)]  # the holder's own words say it
    return [f"Held by {holder}{since}.", *ends, fate(sighting), *stop, *line]


def _may_be_stopped(sighting: Sighting) -> bool:
    """Whether a body runs under the lock, as far as is known here."""
    is_known = sighting.holder is not None and sighting.holder.task_id is not None
    return is_known and sighting.process in ("alive", "unknown") and not sighting.is_stale


def _stop(which: str, task_id: str) -> list[str]:
    """How to end a body that hangs: the command in a line of its own, to be copied."""
    return [
        f"If {which} hangs, stop it; its prefork worker then frees the lock:",
        f"  celery -A APP control terminate KILL {shlex.quote(task_id)}",
    ]


def _who_in_short(sighting: Sighting) -> str:
    """Who has one of several permits, until when, and whether that process lives."""
    holder, remaining_s = sighting.holder, sighting.remaining_s
    number = holder and holder.permit
    if remaining_s is None:
        ends = "never ends"
    else:
        ends = f"ends in {span(remaining_s)}" if remaining_s > 0 else f"ended {span(-remaining_s)} ago"
    lives = f", its process is {sighting.process}" if sighting.process else ""
    return f"Permit {number}: {holder}; {ends}{lives}."


def _ends(sighting: Sighting) -> float:
    """The order in which holders end, if nobody renews."""
    return float("inf") if sighting.remaining_s is None else sighting.remaining_s


def _deploy(sighting: Sighting, options: Options) -> Iterator[str]:
    """That others use the lock under another limit or rate, and what that comes to."""
    limit, terms, others, counts = options.limit, options.terms, sighting.terms, sighting.asked.limit
    beyond = len(sighting.holders) - len(sighting.within.holders)
    if beyond:
        yield f"Held beyond the limit of {counts}: {many(beyond, 'permit')}. They block no call."
    if not (sighting.holders or sighting.waiting or sighting.last_start):
        return
    if others.limit != limit:
        yield (
            f"This app's limit is {limit}, but the last client of the lock had {others.limit}: a deploy is "
            "under way, or tasks share the scope with different limits."
        )
    if others[1:] != terms[1:]:
        own, other = (of.pace if of.starts else "none" for of in (terms, others))
        yield (
            f"This app's rate is {own}, but the last client of the lock had {other}: a deploy is under way, "
            "or tasks share the scope with different rates."
        )


def _duplicate(options: Options, task_id: str) -> str:
    """What publishing a duplicate comes to."""
    if callable(options.on_duplicate):
        return f"Its on_duplicate, {_name(options.on_duplicate)}, decides what the caller gets."
    if options.on_duplicate == "raise":
        return "The caller would get DuplicateTask (on_duplicate='raise')."
    return f"The caller would get the result of {task_id} (on_duplicate='return')."


def _on_conflict(options: Options, sighting: Sighting, call: str, in_s: float | None = None) -> str:
    """What becomes of a call that meets this lock; `in_s`: seconds until the next start, if it is paced."""
    policy = options.on_conflict
    if callable(policy):
        return f"{call} would do what its on_conflict decides: {_name(policy)}."
    also = ""
    if policy == "auto" and options.may_wait:
        policy = "wait"
    elif policy == "auto":
        policy, also = "skip", "; if a chain, chord or link needs its result, it would come back later"
    if options.max_wait is not None and policy in ("retry", "wait", "join"):
        also = f"; after {options.max_wait:g} s it fails with LockTimeout"
    first = f"{options.retry_delay:g} s" if options.retry_delay >= (in_s or 0.0) else span(in_s)
    text = _ON_CONFLICT[policy].format(options=options, place=_place(options, sighting), first=first)
    return f"{call} {text}{also} (on_conflict={options.on_conflict!r})."


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
