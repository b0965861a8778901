"""The world of one seed: simulated processes, their threads as greenlets, one clock, and what goes wrong.

Nothing here knows Redis or Celery. A thread gives way by `sleep` or `wait`; the world resumes whoever's time
comes first. All that is random comes from the seed, so a seed has one history.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

US = 1_000_000
START_US = 1_700_000_000 * US
FIRST_PID = 1000


class Thread:
    """One thread of control. `turn` counts its resumptions: what was to wake it in an earlier turn is not."""

    def __init__(self, process: Process, ident: int, name: str, run: Callable[[], Any]) -> None:
        self.process, self.ident, self.name = process, ident, name
        self.turn = 0
        self.locals: dict[int, dict[str, Any]] = {}
        self.greenlet = greenlet(run, process.world.hub)

    @property
    def is_over(self) -> bool:
        """Whether it will never go on."""
        return self.process.is_dead or self.greenlet.dead


class Process:
    """A group of threads that die together; `state` is its copy of what the package keeps per process."""

    def __init__(self, world: World, pid: int, name: str) -> None:
        self.world, self.pid, self.name = world, pid, name
        self.is_dead = False
        self.frozen_until = 0
        self.hindered_at: list[int] = []  # when something was in the way of its commands
        self.state: list[Any] = []
        self.skew_us = round(world.random.uniform(-5, 5) * US)  # of its wall clock

    def was_hindered(self, since_us: int) -> bool:
        """Whether something was in the way of its commands since then."""
        return any(at >= since_us for at in self.hindered_at)

    def __str__(self) -> str:
        return self.name


class World:
    """One seed. What goes wrong until `calm_at_us`, and how often, is drawn for each world anew."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.hub = seed, random.Random(seed), getcurrent()
        self.now_us = self.began_us = START_US
        self.calm_at_us = START_US
        self._chances: dict[str, float] = {}
        self.processes: list[Process] = []
        self.threads: list[Thread] = []
        self.history: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.current: Thread | None = None
        self.server: Any = None
        self.is_over = False
        self.on_switch: Callable[[Process], None] = lambda _process: None
        self.on_death: Callable[[Process], None] = lambda _process: None
        self._events: list[tuple[int, int, Thread | None, int, Callable[[], Any] | None]] = []
        self._order, self._idents = count(), count(1)

    @property
    def process(self) -> Process:
        """Whose turn it is."""
        assert self.current is not None
        return self.current.process

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self.now_us >= self.calm_at_us

    def note(self, what: str, *words: Any, key: str = "") -> None:
        """Write a line of history; one of no key is of all."""
        thread = self.current
        who = f"{thread.process}/{thread.name}" if thread else "world"
        self.history.append((self.now_us, who, key, what, *words))

    def broken(self, text: str) -> None:
        """A promise was not kept."""
        self.note("VIOLATION", text)
        self.violations.append(text)

    def process_of(self, name: str) -> Process:
        """A new process."""
        process = Process(self, FIRST_PID + len(self.processes), name)
        self.processes.append(process)
        return process

    def has_died(self, pid: int) -> bool:
        """Whether this is the id of a process that has died."""
        number = pid - FIRST_PID
        return 0 <= number < len(self.processes) and self.processes[number].is_dead

    def spawn(self, process: Process, run: Callable[[], Any], name: str, *, after_us: int = 0) -> Thread:
        """A new thread, which begins soon."""

        def body() -> None:
            try:
                run()
            except GreenletExit:
                raise
            except BaseException as error:
                self.broken(f"{process}/{name} ended by {error!r}")

        thread = Thread(process, next(self._idents), name, body)
        self.threads.append(thread)
        self._push(self.now_us + after_us + self.random.randrange(200), thread)
        return thread

    def at(self, when_us: int, do: Callable[[], Any]) -> None:
        """Have something done by nobody, as by a network or a server."""
        heapq.heappush(self._events, (when_us, next(self._order), None, 0, do))

    def sleep(self, seconds: float) -> None:
        """The thread that runs goes on after so many seconds, at the earliest."""
        self._push(self.now_us + max(round(seconds * US), 0) + self.random.randrange(50), self.current)
        self._give_way()

    def wait(self, waiters: list[Thread], timeout: float | None = None) -> bool:
        """The thread that runs goes on when it is notified: whether it was, or the time is over."""
        me = self.current
        assert me is not None
        waiters.append(me)
        if timeout is not None:
            self._push(self.now_us + max(round(timeout * US), 0) + self.random.randrange(50), me)
        self._give_way()
        if me in waiters:
            waiters.remove(me)
            return False
        return True

    def notify(self, waiters: list[Thread], most: int) -> None:
        """Let some go on who wait, in any order; whoever died as it waited is no more among them."""
        waiters[:] = [each for each in waiters if not each.is_over]
        for _ in range(min(most, len(waiters))):
            chosen = waiters.pop(self.random.randrange(len(waiters)))
            self._push(self.now_us + self.random.randrange(300), chosen)

    def kill(self, process: Process) -> None:
        """A process dies: no thread of it is resumed, or collected before the seed ends."""
        if not process.is_dead:
            self.note("dies", process.name)
            process.is_dead = True
            self.on_death(process)
            if self.current is not None and self.current.process is process:
                self._give_way()

    def freeze(self, process: Process, seconds: float) -> None:
        """A process has no turn for so long."""
        self.note("is frozen", process.name, round(seconds, 3))
        process.frozen_until = min(self.now_us + round(seconds * US), self.calm_at_us)
        process.hindered_at += [self.now_us, process.frozen_until] * 9

    def go_wrong(self, what: str, chance: float) -> bool:
        """Whether something of a kind does, now; each seed has some kinds only, and more or less of them."""
        if self.is_calm:
            return False
        if what not in self._chances:
            self._chances[what] = chance * self.random.choice((0, 0, 0.3, 1, 3))
        return self.random.random() < self._chances[what]

    def run(self, until_us: int) -> None:
        """Let all go on until a time, or until there is nothing to do."""
        events = self._events
        while events and events[0][0] <= until_us:
            when, _, thread, turn, do = heapq.heappop(events)
            self.now_us = max(self.now_us, when)
            if thread is None:
                assert do is not None
                do()
            elif turn == thread.turn and not thread.is_over:
                if thread.process.frozen_until > self.now_us:
                    self._push(thread.process.frozen_until + self.random.randrange(100), thread)
                    continue
                thread.turn += 1
                self.on_switch(thread.process)
                self.current = thread
                thread.greenlet.switch()
                self.current = None

    def close(self) -> None:
        """Unwind what is left: whatever a `finally` asks for is refused."""
        self.is_over = True
        for thread in self.threads:
            if thread.greenlet and not thread.greenlet.dead:
                self.current = thread
                self.on_switch(thread.process)
                thread.greenlet.throw()
        self.current = None

    def _push(self, when_us: int, thread: Thread | None) -> None:
        assert thread is not None
        heapq.heappush(self._events, (when_us, next(self._order), thread, thread.turn, None))

    def _give_way(self) -> None:
        if self.is_over:
            raise GreenletExit
        assert self.current is not None
        self.hub.switch()
        if self.is_over:
            raise GreenletExit
