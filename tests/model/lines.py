"""The lines of one broker that workers sweep: lua/due.lua, sweep.lua and settle.lua as pure functions."""

from typing import Any, NamedTuple

from tests.model.store import MS


class Lines(NamedTuple):
    """When (us) to look at which line, in order; the data's epoch; the milliseconds for which it is to last.

    An entry has the name of a task and, in a second row, that of the lock for which its calls wait.
    """

    due: tuple[tuple[int, str], ...] = ()
    epoch: int | None = None
    lease: int = -1

    def at(self, entry: str) -> int | None:
        """When to look at a line."""
        return next((moment for moment, other in self.due if other == entry), None)


Answer = tuple[Lines, tuple[Any, ...]]


def noted(lines: Lines, entry: str, moment: int | None) -> Lines:
    """The set when it is time to look at a line; None: never."""
    due = [known for known in lines.due if known[1] != entry]
    due += [] if moment is None else [(moment, entry)]
    return lines._replace(due=tuple(sorted(due)))


def due(lines: Lines, now: int, *, entry: str, within: int, remember: int, epoch: int) -> Answer:
    """lua/due.lua."""
    known = lines.at(entry)
    moment = now + within if known is None else min(now + within, known - 1)
    epoch = epoch if lines.epoch is None else lines.epoch
    return noted(lines, entry, moment)._replace(epoch=epoch, lease=remember), (str(epoch),)


def sweep(
    lines: Lines, now: int, *, interval: int, remember: int, epoch: int, paced: int, tasks: tuple[str, ...]
) -> Answer:
    """lua/sweep.lua; `paced`: how many of the tasks have a rate, the first of them."""
    epoch = epoch if lines.epoch is None else lines.epoch
    kept = [(moment, entry) for moment, entry in lines.due if moment > now - remember * MS]
    found = [entry for moment, entry in kept if moment <= now and entry.split("\n")[0] in tasks][:100]
    soon = [due for due in kept if now < due[0] <= now + interval and due[1].split("\n")[0] in tasks[:paced]]
    next_due = str(soon[0][0] - now) if soon else ""
    lines = Lines(tuple(kept), epoch, remember)
    for entry in found:
        lines = noted(lines, entry, now + interval)
    return lines, (str(epoch), str(now + interval), next_due, *found)


def settle(lines: Lines, now: int, *, entry: str, claimed: str, within: int | None) -> Answer:
    """lua/settle.lua."""
    known = lines.at(entry)
    is_changed = str(known) != claimed
    if known is None:
        return lines, ("changed", "")
    if within is None and not is_changed:
        return noted(lines, entry, None), ("settled", "")
    told = known if within is None else now + within
    due_us = min(told, known) if is_changed else told
    answer = ("changed" if is_changed else "settled", str(max(0, due_us - now)))
    return noted(lines, entry, due_us), answer
