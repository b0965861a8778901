"""A scenario: an operator, and bodies, set and end live terms of a key and its task while its calls run."""

from __future__ import annotations

import random
from math import inf
from typing import Any, NamedTuple

from celery import Celery

from celery_setnx import is_skipped
from celery_setnx.exceptions import LockLost, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import PASSED_OVER
from celery_setnx.lock.live import LiveTerm, live_terms_of, pause_in
from celery_setnx.lock.names import line_names, live_terms_name, permits_name, terms_name
from celery_setnx.lock.record import Holder
from celery_setnx.terms import NewTerm, Whose, end_term, set_term
from tests.simulation.calls import LATE, LINE_STANDS_S, TASKS, TROUBLE_S, Calls, played
from tests.simulation.checker import Life
from tests.simulation.publisher import Publisher
from tests.simulation.scheduler import US, Process, World
from tests.simulation.substitutes import sleep

READ_S = 2.5
"""Seconds within which a worker knows a task's terms: it reads them every two, and commands take a while."""
ROUSED_S = 3.0
"""Seconds within which a line goes on that a term has kept: a sweep, and what its commands take."""
ASKS_S = 33.0
"""Seconds within which a retry in a pause asks again: 30, the way of its message, and a free child."""
LOOK_US = US // 4
OPERATED_S = 15.0
POLICIES = (
    *("waits", "waits_late", "skips", "retries", "retries_early", "queued"),
    *("holds", "few", "paced", "slow"),
)
OPERATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: TASKS[name] for name in POLICIES},
    "autos": ({}, LATE),
    "raises": ({"on_conflict": "raise"}, {}),
    "patient": ({"hold_on_retry": True, "on_conflict": "retry"}, LATE),
}
MAY_BE_SKIPPED = ("skips", "autos", "queued")


class Standing(NamedTuple):
    """The live terms that lie in Redis from a moment on."""

    since_us: int
    of_key: list[LiveTerm]
    of_task: list[LiveTerm]

    def paused_till(self, *, of_task: bool) -> int:
        """When the pause ends, in us; 0: there is none."""
        pause = pause_in(self.of_task if of_task else self.of_key)
        return _us(pause.until) if pause else 0

    def value(self, name: str, now_us: int, *, of_task: bool = True) -> str:
        """The limit, or the rate, that counts now; nothing: the task's own."""
        for terms in (self.of_key, self.of_task if of_task else []):
            for term in terms:
                if term.name == name and _us(term.until) > now_us:
                    return term.value
        return ""


class LivePublisher(Publisher):
    """Goes on for as long as there is an operator."""

    scene: LiveCalls

    def run(self) -> None:
        """As every publisher."""
        super().run()
        while self.world.now_us < self.scene.operated_until_us:
            sleep(self.random.choice((0.2, 1.0, 3.0)) * self.random.random())
            self.try_to_send([self.drawn()])


class Operator:
    """Sets and ends live terms at random, and ends most of them when he goes."""

    def __init__(self, scene: LiveCalls) -> None:
        self.scene, self.world, self.random = scene, scene.world, scene.draw
        self.whose = (Whose(key=scene.key), Whose(scope=scene.task))
        self.lasts_s = self.random.choice(((1.0, 9.0, 20.0),) * 4 + ((9.0, 150.0),))
        self.names = self.random.choice(
            (("pause",), ("pause",), ("pause", "limit", "rate"), ("limit", "rate"))
        )

    def run(self) -> None:
        """A thread of a process of its own."""
        app, rng, known = self.scene.take_app(), self.random, set[tuple[Whose, str]]()
        while self.world.now_us < self.scene.operated_until_us:
            sleep(rng.choice((0.2, 3.0, 6.0)) * rng.random())
            term = rng.choice(self.whose), rng.choice(self.names)
            is_end = term in known and rng.random() < 0.7
            known ^= {term} if is_end or term not in known else set()
            self.change(app, *term, is_end=is_end)
        if "pause" in self.names and rng.random() < 0.5:
            self.pause_in_silence(app, rng.choice(self.whose))
        sleep(rng.choice((0.0, 3.0, 30.0)) * rng.random())
        for whose in self.whose if rng.random() < 0.7 else ():  # else they end by themselves
            for name in ("pause", "limit", "rate"):
                self.change(app, whose, name, is_end=True)

    def pause_in_silence(self, app: Celery, whose: Whose) -> None:
        """The last calls come; then none has the line looked at but whoever ends the pause."""
        self.change(app, whose, "pause", for_s=60.0)
        sleep(12.0)
        self.change(app, whose, "pause", is_end=True)

    def change(
        self, app: Celery, whose: Whose, name: Any, *, is_end: bool = False, for_s: float = 0.0
    ) -> None:
        """Set a term, or end it; one of which Redis may not have heard is left at that."""
        rng, options = self.random, OPERATED[self.scene.task][0]
        values = {
            "pause": ("-",),
            "limit": (1, 3) if options.get("limit", 1) > 1 else (1,),
            "rate": ((1, 1), (1, 4), (3, 2)),
        }
        drawn_s, value = rng.choice(self.lasts_s) * rng.random() + 0.001, rng.choice(values[name])
        for_s = for_s or drawn_s
        try:
            if is_end:
                end_term(app, whose, name, by="ana")
            else:
                set_term(app, whose, NewTerm(name, for_s, value, by="ana"))
        except SetnxError as error:
            self.world.note("is not told", error)
        else:
            self.world.note(
                "lifts" if is_end else "sets", name, str(whose), *(() if is_end else (value, for_s))
            )


class LiveCalls(Calls):
    """One seed of it: every second one is calm from its beginning, and held to the moment."""

    tasks, of_app = OPERATED, {**TASKS, **OPERATED}
    made: list[Celery] = []
    publisher = LivePublisher

    def __init__(self, seed: int, task: str = "") -> None:
        self.draw = random.Random(f"{seed} operator")
        self.is_quiet = seed % 2 == 0
        self.trouble_s = 0.0 if self.is_quiet else TROUBLE_S
        self.stood = [Standing(0, [], [])]
        self.texts: tuple[bytes, ...] = (b"", b"")
        self.handed_us: dict[str, int] = {}  # by task: when it was first handed the permit that it has
        self.kept_out_us: dict[str, int] = {}  # when a retry whose lock is held for it has met a pause
        self.met_us: dict[str, int] = {}  # when a call has met a conflict, for the last time
        self.starts_us: dict[int, int] = {}  # of bodies, and when their calls were received
        self.operators = 0
        super().__init__(seed, task)
        world = self.world
        self.names = [name.encode() for name in (terms_name(self.key), live_terms_name("setnx"))]
        self.permits = permits_name(self.key).encode()
        self.line = line_names(self.key)[0].encode()
        options = OPERATED[self.task][0]
        self.limit, self.rate = options.get("limit", 1), options.get("rate")
        self.own_rate = (self.rate[0], self.rate[1] * US) if self.rate else (0, 0)
        self.operated_until_us = world.now_us + round(OPERATED_S * US)
        self.holds_back = self.draw.choice((0.0, 0.0, 0.2))
        self.broker.has_operator = True
        self.server.after, self.server.on_script = self.after_command, self.on_script
        if self.is_quiet:
            self.broker._unheard_ends = 0
        self.operate()

    @property
    def is_slow(self) -> bool:
        """Calls may have to wait until the last term has ended."""
        return True

    def operate(self) -> None:
        """An operator comes, or one in the stead of one that has died."""
        self.operators += 1
        self.operator = self.world.process_of(f"operator-{self.operators}")
        self.world.spawn(self.operator, lambda: Operator(self).run(), "operator")

    def on_death(self, process: Process) -> None:
        """As every process."""
        super().on_death(process)
        if process is self.operator:
            self.world.at(self.world.now_us + US, self.operate)

    def after_command(self) -> None:
        """See which terms lie in Redis, and that nothing else has changed by them."""
        self.checker._check_keys()
        keys, now_us = self.server.data.keys, self.world.now_us
        of_key, of_tasks = (keys.get(name) for name in self.names)
        texts = (
            of_key.value if of_key else b"",
            dict(of_tasks.value if of_tasks else ()).get(self.task.encode(), b""),
        )
        if texts != self.texts:
            self.texts = texts
            self.stood.append(Standing(now_us, *(live_terms_of(text.decode()) for text in texts)))
        if permits := keys.get(self.permits):
            own = f"{self.limit}:{self.rate[0]}/{self.rate[1] * US}" if self.rate else f"{self.limit}"
            if permits.value.decode().partition(" ")[2] != own:
                self.world.broken(
                    f"{permits.value.decode()!r} stands beside {self.key}, and its own terms are {own}"
                )
        line = keys.get(self.line)
        if self.is_quiet and line and line.value[-1][0] >= PASSED_OVER:
            self.world.broken(f"{line.value[-1][1].decode()} is passed over, and nobody has died")

    def on_script(self, verb: str, arguments: Any, reply: Any) -> None:
        """See who is handed a permit, and who holds calls back."""
        if verb == "hold_back" and reply[0] == b"paused":
            token, till_us = arguments[0].decode(), int(reply[2])
            if token not in self.checker.holders(self.key):
                self.world.broken(f"{token} holds calls back, and has no lock")
            if till_us < self.stood[-1].paused_till(of_task=False) > self.world.now_us:
                self.world.broken(f"{token} has ended a pause sooner")
        if verb not in ("release", "serve", "leave"):
            return
        for _token, _deadline, _fence, state, since, *info in self.checker._records(self.key):
            if state == "handed":
                self.handed_us[info[0]] = int(since)

    def works(self, task: Any) -> None:
        """A body may hold calls of its key back."""
        if self.draw.random() >= self.holds_back or not task.lock:
            return
        try:
            task.lock.hold_back(self.draw.choice((0.5, 4.0)) * self.draw.random() + 0.001)
        except (LockLost, SetnxError) as error:
            self.world.note("holds nobody back", error)

    def has_lock(self, task: Any, held: HeldLock, limit: int, rate: tuple[int, float] | None) -> Life:
        """A body has a lock: no pause was in its way, and limit and rate were those in force."""
        request, at_us = task.request, held._since_us
        worker, received_us = request.properties["received"]
        process = next(each.process for each in reversed(self.workers) if each.name == worker)
        read_us = received_us - round(READ_S * US)
        if process.was_hindered(read_us - round(READ_S * US)):  # it may know what was so at any time before
            read_us = 0
        if not self.server.epoch:
            self.check_pause(request.id, at_us, read_us, received_us)
        if request.id not in self.began:
            self.check_limit(request.id, held, read_us)
        self.check_rate(held, received_us, is_known=read_us > 0)
        self.comes(request.id)
        most = max(
            [
                limit,
                *(
                    int(each.value)
                    for standing in self.stood
                    for terms in standing[1:]
                    for each in terms
                    if each.name == "limit"
                ),
            ]
        )
        self.checker.goes_on(self.key)
        return super().has_lock(task, held, most, None)

    def between(self, first_us: int, last_us: int) -> list[Standing]:
        """What stood at some moment of a time."""
        later = [standing for standing in self.stood if first_us < standing.since_us <= last_us]
        before = [standing for standing in self.stood if standing.since_us <= first_us]
        return [*before[-1:], *later]

    def check_pause(self, task_id: str, at_us: int, read_us: int, received_us: int) -> None:
        """No call starts in a pause that its lock, or its worker, knew of."""
        now = self.between(at_us - 1, at_us)
        if all(standing.paused_till(of_task=False) > at_us for standing in now):
            self.world.broken(f"{task_id} starts in a pause of its key")
        known = self.between(read_us, received_us) + now
        if all(standing.paused_till(of_task=True) > at_us for standing in known):
            self.world.broken(f"{task_id} starts in a pause of its task, which its worker knew of")

    def check_limit(self, task_id: str, held: HeldLock, read_us: int) -> None:
        """A call has no permit beyond the limit in force when it got it."""
        got_us = min(held._since_us, self.handed_us.get(task_id, inf))
        of_task = {standing.value("limit", int(got_us)) for standing in self.between(read_us, held._since_us)}
        limits = set[str]()
        for standing in self.between(int(got_us) - 1, held._since_us):
            of_key = standing.value("limit", int(got_us), of_task=False)
            limits |= {of_key} if of_key else of_task
        most = max(int(limit or self.limit) for limit in limits)
        if held.permit >= most:
            self.world.broken(f"{task_id} has permit {held.permit}, and the limit is {most}")

    def check_rate(self, held: HeldLock, received_us: int, *, is_known: bool) -> None:
        """No more calls start than the rate in force allows, since it was known."""
        at_us = held._since_us
        self.starts_us[at_us] = received_us
        terms = {
            (each.value("rate", at_us, of_task=False), each.value("rate", at_us))
            for each in self.between(at_us - 1, at_us)
        }
        (of_key, live), *others = terms
        count, period_us = _rate_of(live) if live else self.own_rate
        if others or not count or not (of_key or is_known):
            return
        # Of the key, or of its task, whichever it is: the other may have said the same before.
        part = {"of_task": []} if of_key else {"of_key": []} if live else {}
        stood = [each._replace(**part) for each in self.stood]
        since_us = max(_rated_since(stood, live, at_us), *self.server.lost_at, 0)
        if not of_key:
            since_us += round(READ_S * US)
        later = (at for at, received in self.starts_us.items() if (at if of_key else received) > since_us)
        if (found := sum(at_us - period_us < at <= at_us for at in later)) > count:
            self.world.broken(f"{held.token} is start {found} in {period_us / US} s, and the rate is {count}")

    def meets(self, request: Any, holder: Holder) -> None:
        """A call meets a conflict, or a pause."""
        super().meets(request, holder)
        self.comes(request.id)
        self.met_us[request.id] = self.world.now_us
        comes_back = request.retries and OPERATED[self.task][0].get("hold_on_retry")  # others stand in line
        if comes_back and holder.state in ("paused", "held_for_retry"):
            self.kept_out_us[request.id] = self.world.now_us

    def comes(self, task_id: str) -> None:
        """A retry that has met a pause comes again soon."""
        since_us = self.kept_out_us.pop(task_id, None)
        if self.is_quiet and since_us is not None and self.world.now_us - since_us > ASKS_S * US:
            self.world.broken(
                f"{task_id} was away for {(self.world.now_us - since_us) / US:.1f} s in a pause"
            )

    def note_ends(self, left: list[str]) -> None:
        """What has become of each: none was skipped that was to run."""
        super().note_ends(left)
        app = self.take_app()
        for task_id in self.sent:
            result = app.AsyncResult(task_id).result
            if not is_skipped(result) or task_id in self.broker.discarded or self.server.epoch:
                continue
            if self.task not in MAY_BE_SKIPPED:
                self.world.broken(f"{task_id} was skipped, and was to wait")
            state = result.get("holder", {}).get("state")
            if task_id in self.began and state == "paused":
                self.world.broken(f"{task_id} was skipped in a pause, and has begun")
            is_last = not left and all(at_us < self.met_us[task_id] for at_us in self.starts_us)
            if self.task == "autos" and state == "paused" and is_last and not self.broker.discarded:
                self.world.broken(f"{task_id} was skipped in a pause, and none has run after it")

    def watch(self) -> None:
        """Look at the line, again and again."""
        world, standing = self.world, self.stood[-1]
        till = max(standing.paused_till(of_task=False), standing.paused_till(of_task=True))
        limit = int(standing.value("limit", world.now_us) or self.limit)
        live = standing.value("rate", world.now_us)
        count, period_us = _rate_of(live) if live else self.own_rate
        rate = (count, period_us / US) if count else None
        most_s = ROUSED_S if self.is_quiet else LINE_STANDS_S
        self.checker.watch(self.key, limit, rate, most_s, is_paused=till > world.now_us)
        world.at(world.now_us + LOOK_US, self.watch)


def _us(seconds: float) -> int:
    return round(seconds * US)


def _rated_since(stood: list[Standing], rate: str, until_us: int) -> int:
    """Since when this live rate has counted; nothing: the task's own."""
    for standing in reversed(stood):
        first_us = standing.since_us
        if first_us >= until_us:
            continue
        if standing.value("rate", until_us - 1) != rate:
            return until_us
        if standing.value("rate", first_us) != rate:  # another has ended by itself
            ends = {_us(term.until) for terms in standing[1:] for term in terms if term.name == "rate"}
            return max(end for end in ends if end < until_us)
        until_us = first_us
    return 0


def _rate_of(value: str) -> tuple[int, int]:
    """How many may start, in so many us."""
    count, _, period_us = value.partition("/")
    return int(count), int(period_us)


def play(seed: int, task: str = "") -> World:
    """One seed; of one task, if it is named."""
    return played(LiveCalls, seed, task)
