"""The lines of one broker that workers sweep: lua/due.lua, sweep.lua and settle.lua as pure functions."""

from typing import Any, NamedTuple

from tests.model.store import MS


class Lines(NamedTuple):
    """When (us) to look at which line of which task, in order; the data's epoch; how long (ms) they last."""

    due: tuple[tuple[str, int, str], ...] = ()
    leases: tuple[tuple[str, int], ...] = ()
    epoch: str | None = None
    epoch_lease: int = -1

    def at(self, task: str, entry: str) -> int | None:
        """When to look at a line."""
        return next((moment for of, moment, other in self.due if (of, other) == (task, entry)), None)

    def of(self, task: str) -> list[tuple[int, str]]:
        """The set of a task."""
        return [(moment, entry) for of, moment, entry in self.due if of == task]

    def lasting(self, task: str, lease: int) -> "Lines":
        """When a task's set is to last for so long from now on."""
        return self._replace(leases=tuple(({**dict(self.leases), task: lease}).items()))


Answer = tuple[Lines, tuple[Any, ...]]


def noted(lines: Lines, task: str, entry: str, moment: int | None) -> Lines:
    """The sets when it is time to look at a line; None: never."""
    due = [known for known in lines.due if (known[0], known[2]) != (task, entry)]
    due += [] if moment is None else [(task, moment, entry)]
    return lines._replace(due=tuple(sorted(due)))


def with_epoch(lines: Lines, epoch: int, remember: int) -> Lines:
    """The sets of data that have an epoch."""
    return lines._replace(epoch=lines.epoch or str(epoch), epoch_lease=remember)


def due(lines: Lines, now: int, *, task: str, entry: str, within: int, remember: int, epoch: int) -> Answer:
    """lua/due.lua."""
    lost = now - remember * MS
    young = tuple(known for known in lines.due if known[0] != task or known[1] > lost)
    lines = lines._replace(due=young)
    known = lines.at(task, entry)
    moment = now + within if known is None else min(now + within, known - 1)
    lines = with_epoch(noted(lines, task, entry, moment).lasting(task, remember), epoch, remember)
    return lines, (lines.epoch,)


def sweep(
    lines: Lines,
    now: int,
    *,
    interval: int,
    remember: int,
    epoch: int,
    paced: tuple[int, ...],
    tasks: tuple[str, ...],
) -> Answer:
    """lua/sweep.lua; `paced`: the numbers of those of the tasks that have a rate."""
    lines, found, soon = with_epoch(lines, epoch, remember), [], []
    for number, task in enumerate(tasks, 1):
        known = lines.of(task)
        soon += [at for at, _ in known if number in paced and now < at <= now + interval]
        claimed = [entry for at, entry in known if at <= now]
        for entry in claimed:
            lines = noted(lines, task, entry, now + interval).lasting(task, remember)
            found += [str(number), entry]
    next_due = str(min(soon) - now) if soon else ""
    return lines, (lines.epoch, str(now + interval), next_due, *found)


def settle(lines: Lines, now: int, *, task: str, entry: str, claimed: str, within: int | None) -> Answer:
    """lua/settle.lua."""
    known = lines.at(task, entry)
    is_changed = str(known) != claimed
    if known is None:
        return lines, ("changed", "")
    if within is None and not is_changed:
        return noted(lines, task, entry, None), ("settled", "")
    told = known if within is None else now + within
    due_us = min(told, known) if is_changed else told
    answer = ("changed" if is_changed else "settled", str(max(0, due_us - now)))
    return noted(lines, task, entry, due_us), answer
