"""Lines that workers are to look at: random schedules of due.lua, sweep.lua and settle.lua, step by step."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.model.lock import TEXTS
from tests.model.store import MS, SECOND
from tests.simulation.scripts import script
from tests.simulation.server import Entry, Server, ServerError

TASKS = ("", "a", "b|b")
ENTRIES = ("lock.foo", "{lock.foo}")
EPOCH_KEY = b"lines"
REMEMBERS_MS = (30_000, 60_001, 3_600_000)
START = 3_000_000_000 * SECOND
STEPS = 60

Sets = dict[str, dict[str, int]]
"""By task, when (us) to look at which line."""


class Claim(NamedTuple):
    """A line that a worker looks at, and until when it alone does."""

    task: str
    entry: str
    until: str


class Schedule:
    """One server, and who notes, claims and settles; `broken` is what does not hold, '' if all does."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.server = Server(now=START + self.draw.randrange(10 * SECOND))
        self.claims = [Claim("a", ENTRIES[0], "7")]
        self.calls: list[tuple[Any, ...]] = []  # with what was there before

    def broken(self) -> str:
        """Play it."""
        for _ in range(STEPS):
            self._time_passes()
            step = self.draw.choice((self._note, self._note, self._sweep, self._sweep, self._settle))
            self.server.is_full = self.draw.random() < 0.2
            try:
                broken = step()
            except ServerError as error:
                broken = str(error)
            if broken:
                return f"{step.__name__[1:]}: {broken}"
            self.server.is_full = False
        return ""

    def _time_passes(self) -> None:
        moments = [at for known in self._sets().values() for at in known.values()]
        moments += [at + REMEMBERS_MS[0] * MS for at in moments]
        draw, now = self.draw, self.server.now
        if moments and draw.random() < 0.5:
            later = draw.choice(moments) + draw.choice((-1, 0, 0, 1))
        else:
            later = now + draw.randrange(4 * SECOND)
        self.server.now = min(max(now, later), now + 40 * SECOND)

    def _sets(self) -> Sets:
        found: Sets = {task: {} for task in TASKS}
        for name, entry in self.server.state:
            if name.startswith(b"lines:"):
                found[name[6:].decode()] = {line.decode(): int(at) for at, line in entry.value}
        return found

    def _ran(self, verb: str, keys: list[bytes], *told: object) -> list[Any]:
        asked = tuple(keys), tuple(str(word).encode() for word in told)
        self.calls.append((verb, self.server.state, self.server.now, *asked, self.server.is_full))
        reply = script(TEXTS[verb]).run(self.server, *asked)
        return [word.decode() if isinstance(word, bytes) else word for word in reply]

    def _about_the_data(self) -> tuple[int, int]:
        return self.draw.choice(REMEMBERS_MS), self.draw.randrange(1, 2**48)

    def _lasts(self, name: bytes, remember: int) -> bool:
        entry: Entry | None = dict(self.server.state).get(name)
        return entry is None or entry.expiry == self.server.now // MS + remember

    def _knows_its_data(self, told: str, new: int, before: dict[bytes, Entry]) -> bool:
        """The data have the epoch that they had, or the new one if they had none."""
        known = before.get(EPOCH_KEY)
        return told == (known.value.decode() if known else str(new))

    def _note(self) -> str:
        """It is looked at as soon as is said; of a line that is known no time stays as it was."""
        before, keys, now = self._sets(), dict(self.server.state), self.server.now
        task, entry = self.draw.choice(TASKS), self.draw.choice(ENTRIES)
        within, (remember, epoch) = self.draw.choice((0, 1, SECOND, 30 * SECOND)), self._about_the_data()
        name = f"lines:{task}".encode()
        told, look = self._ran("due", [name, EPOCH_KEY], entry, within, remember, epoch)
        kept = {line: at for line, at in before[task].items() if at > now - remember * MS}
        known = kept.get(entry)
        due = now + within if known is None else min(now + within, known - 1)
        if look != (str(within) if known is None or now + within < known else ""):
            return "who is to come"
        if self._sets() != {**before, task: {**kept, entry: due}}:
            return "when to look"
        if not (self._lasts(name, remember) and self._lasts(EPOCH_KEY, remember)):
            return "how long it is remembered"
        return "" if self._knows_its_data(told, epoch, keys) else "which data these are"

    def _sweep(self) -> str:
        """What is due is claimed, and nothing else; of paced tasks it is said when the next is due."""
        before, keys, now = self._sets(), dict(self.server.state), self.server.now
        tasks = [task for task in TASKS if self.draw.random() < 0.7]
        paced = [number for number in range(1, len(tasks) + 1) if self.draw.random() < 0.5]
        interval, (remember, epoch) = self.draw.choice((0, 2 * SECOND)), self._about_the_data()
        names = [f"lines:{task}".encode() for task in tasks]
        told, until, next_due, *found = self._ran(
            "sweep", [EPOCH_KEY, *names], interval, remember, epoch, *paced
        )
        claimed = [
            Claim(tasks[int(number) - 1], entry, until) for number, entry in zip(found[::2], found[1::2])
        ]
        due = [
            Claim(t, entry, str(now + interval))
            for t in tasks
            for entry, at in before[t].items()
            if at <= now
        ]
        if sorted(claimed) != sorted(due):
            return "what is claimed"
        after = {task: dict(known) for task, known in before.items()}
        for claim in due:
            after[claim.task][claim.entry] = now + interval
        if self._sets() != after:
            return "until when it is claimed"
        soon = [at for n in paced for at in before[tasks[n - 1]].values() if now < at <= now + interval]
        if next_due != (str(min(soon) - now) if soon else ""):
            return "when the next is due"
        if not all(self._lasts(f"lines:{claim.task}".encode(), remember) for claim in due):
            return "how long it is remembered"
        self.claims += claimed
        is_known = self._knows_its_data(told, epoch, keys) and self._lasts(EPOCH_KEY, remember)
        return "" if is_known else "which data these are"

    def _settle(self) -> str:
        """A line is forgotten if nobody has noted it since it was claimed; else the earlier time counts."""
        before, now = self._sets(), self.server.now
        claim = self.draw.choice(self.claims[-4:])
        within = self.draw.choice(("", "", 0, SECOND, 30 * SECOND))
        word, left = self._ran("settle", [f"lines:{claim.task}".encode()], claim.entry, claim.until, within)
        known = before[claim.task].get(claim.entry)
        is_changed = known is None or str(known) != claim.until
        after = {task: dict(lines) for task, lines in before.items()}
        due = known if within == "" else now + int(within)
        if known is None or (within == "" and not is_changed):
            after[claim.task].pop(claim.entry, None)
            due = None
        elif is_changed and due is not None:
            due = min(due, known)
        if due is not None:
            after[claim.task][claim.entry] = due
        if self._sets() != after:
            return "when to look again"
        told = "" if due is None else str(max(0, due - now))
        right = word == ("changed" if is_changed else "settled") and left == told
        return "" if right else "what is said of it"
