"""A scenario: guarded calls of one key, published, run, parked, woken and swept by workers that die."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from celery.signals import task_success
from celery.states import READY_STATES, RETRY, SUCCESS
from celery.worker import state

from celery_setnx import SingletonTask
from celery_setnx.call.message import Call
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.lock import AHEAD_S
from celery_setnx.lock.record import ORIGINAL, Holder
from celery_setnx.signals import lock_conflict, lock_released
from tests.simulation import substitutes, workers
from tests.simulation.checker import Checker, Life
from tests.simulation.ended import EndedCall
from tests.simulation.publisher import SWEPT_S, Publisher
from tests.simulation.scheduler import US, Process, World
from tests.simulation.substitutes import Redis, sleep

TROUBLE_S = 8.0
LAST_S = 75.0
CALM_S = (20.0, LAST_S, 1500.0)  # when it is asked whether all calls have ended
LEASE_S = 6.0
LINE_STANDS_S = 34.0  # every line is looked at within 30 s, by a sweep every 2 s
PACE_KEPT_S = 0.1
LATE = {"acks_late": True, "reject_on_worker_lost": True}
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waits": ({"on_conflict": "wait"}, {}),
    "waits_late": ({"on_conflict": "wait"}, {**LATE, "track_started": True}),
    "joins": ({"on_conflict": "join"}, {}),
    "joins_late": ({"on_conflict": "join"}, LATE),
    "skips": ({"on_conflict": "skip"}, {}),
    "retries": ({"on_conflict": "retry", "retry_delay": 0.2, "retry_delay_max": 1.0}, LATE),
    "retries_early": ({"on_conflict": "retry", "retry_delay": 0.2, "retry_delay_max": 1.0}, {}),
    "queued": ({"dedupe": "until_started"}, LATE),
    "queued_early": ({"dedupe": "until_started"}, {}),
    "unique": ({"dedupe": "until_done"}, LATE),
    "once": ({"dedupe": "until_done", "dedupe_for": 20}, LATE),
    "once_early": ({"dedupe": "until_done", "dedupe_for": 20}, {}),
    "holds": ({"on_conflict": "wait", "hold_on_retry": True}, LATE),
    "few": ({"on_conflict": "wait", "limit": 2}, LATE),
    "paced": ({"on_conflict": "wait", "rate": (2, 1)}, {}),
    "slow": ({"on_conflict": "wait", "rate": (1, 3)}, LATE),
}
NEWEST_WINS = {"dedupe": "until_started", "on_duplicate": "replace", "debounce_max": 4}
DEBOUNCED = {"debounce": 1.5, "debounce_max": 4}
NEWEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "newest": (NEWEST_WINS, LATE),
    "newest_early": (NEWEST_WINS, {}),
    "newest_holds": ({**NEWEST_WINS, "hold_on_retry": True}, LATE),
    "newest_retries": (
        {**NEWEST_WINS, "on_conflict": "retry", "retry_delay": 0.2, "retry_delay_max": 1.0},
        LATE,
    ),
    "debounced": (DEBOUNCED, LATE),
    "leads": ({**DEBOUNCED, "debounce_leading": True}, LATE),
}
Tasks = dict[str, tuple[dict[str, Any], dict[str, Any]]]
_playing: Calls


def work(self: Any, number: int, seconds: float, what: str) -> object:
    """The body of every task."""
    return _playing.body(self, number, seconds, what)


def make_app(tasks: Tasks) -> Celery:
    """An app, for one process at a time."""
    app = Celery("simulated", broker="redis://broker/0", backend="cache+memory://", set_as_current=False)
    app.conf.update(broker_transport="tests.simulation.workers:Transport", setnx_url="redis://redis/0")
    app.conf.update(task_publish_retry=False, worker_hijack_root_logger=False)
    for name, (options, celery) in tasks.items():
        about = {"bind": True, "base": SingletonTask, "shared": False, **celery}
        app.task(name=name, singleton={"key": (), "lease": LEASE_S, **options}, **about)(work)
    app.finalize()
    return app


class Calls:
    """One seed of it."""

    tasks = of_app = TASKS  # those that it plays, and all of an app: a sweep shuffles them
    made: list[Celery] = []
    publisher: Callable[[Calls], Publisher] = Publisher
    trouble_s = TROUBLE_S

    def __init__(self, seed: int, task: str = "") -> None:
        global _playing
        _playing = self
        self.world = world = World(seed)
        substitutes.begin(world)
        self.server = Redis(world)
        self.broker = workers.begin(world)
        self.checker = Checker(world, self.server)
        self.ended = EndedCall(world, self.server, is_discarded=self.may_not_come)
        self.apps = list(self.made)
        for app in self.apps:
            app._after_fork()  # its connections, whose making draws ids
            for name in [name for name in app.__dict__ if name.startswith("_setnx")]:
                del app.__dict__[name]
        choice = world.random.choice
        self.task = choice([task] if task else list(self.tasks))
        self.key = f"setnx:{{{self.task}}}"
        self.sent: dict[str, tuple[str, int]] = {}  # what the body does, and the epoch
        self.lives: dict[tuple[str, int], list[Life]] = {}
        self.began: dict[str, int] = {}
        self.stored_us: dict[str, int] = {}  # when it was stored that a call has succeeded
        self.dropped: set[str] = set()
        self.workers: list[workers.Worker] = []
        world.calm_at_us = world.now_us + round(self.trouble_s * US)
        world.at(world.now_us, self.server.trouble)
        world.at(world.calm_at_us + round(SWEPT_S * US), self.watch)
        world.on_death = self.on_death
        self.broker.on_refused = self.on_refused
        for number in range(choice((1, 2))):
            self.start(f"worker-{number}")
        self.publishers: list[Process] = []
        self.publish()

    @property
    def mark_ends_at_start(self) -> bool:
        """Whether no call is a duplicate of one that has begun."""
        return self.task == "queued"

    @property
    def is_slow(self) -> bool:
        """Whether calls may have to wait for long, though all is well."""
        return "rate" in self.tasks[self.task][0]

    def publish(self) -> None:
        """Start a publisher, or one in the stead of one that has died."""
        self.publishers.append(self.world.process_of(f"publisher-{len(self.publishers)}"))
        self.world.spawn(self.publishers[-1], type(self).publisher(self).run, "publisher")

    def watch(self) -> None:
        """Look at the line, again and again."""
        options = self.tasks[self.task][0]
        rate, limit = options.get("rate"), options.get("limit", 1)
        # What was lost is put back half a lease later: a holder may say first that it is there still.
        kept_s = PACE_KEPT_S + (LEASE_S / 2 if self.server.epoch else 0.0)
        self.checker.watch(self.key, limit, rate, kept_s if rate else LINE_STANDS_S)
        self.world.at(self.world.now_us + (US // 20 if rate else US), self.watch)

    def take_app(self) -> Celery:
        """An app that no process has had in this world."""
        if not self.apps:
            known = self.world.random.getstate()  # what an app draws is no part of the seed
            self.made.append(make_app(self.of_app))
            self.world.random.setstate(known)
            return self.made[-1]
        return self.apps.pop()

    def start(self, name: str) -> None:
        """Start a worker, or one in the stead of one that has died."""
        count = self.world.random.choice((1, 2))
        self.workers.append(workers.Worker(self.world, name, self.take_app, count))

    def on_death(self, process: Process) -> None:
        """A worker is started anew, and so is a publisher."""
        begins: list[Callable[[], None]] = [self.publish] if process in self.publishers else []
        for worker in list(self.workers):
            worker.on_death(process)
            if worker.process is process:
                begins.append(partial(self.start, f"worker-{len(self.workers)}"))
        for begin in begins:
            self.world.at(self.world.now_us + self.world.random.randrange(3 * US), begin)

    def revoke(self, task_id: str) -> None:
        """All workers hear that a call is not to run."""
        self.world.note("is revoked", task_id)
        self.broker.discarded.add(task_id)
        state.revoked.add(task_id)

    def body(self, task: Any, number: int, seconds: float, what: str) -> object:
        """A body."""
        life = self.begins(task, what)
        for _ in range(3):
            sleep(seconds / 3)
            self.works(task)
            life.is_lost = life.is_lost or not life.relies
            self.checker.touches(life)
        self.checker.ends(life)
        if what == "fails":
            raise ValueError(number)
        if what == "retries" and not task.request.retries:
            try:
                raise task.retry(countdown=self.world.random.choice((0.0, 0.3)))
            except Reject:  # Celery drops a call whose retry the broker does not take
                self.dropped.add(task.request.id)
                raise
        return number if what != "unstorable" else 1j  # no JSON: Celery fails it

    def works(self, task: Any) -> None:
        """What else a body does under its lock."""

    def begins(self, task: Any, what: str) -> Life:
        """A body begins: of a call that has not ended, and of each attempt once."""
        request, held, options = task.request, task.lock, task._guard.options
        rate = (options.terms.starts, options.terms.period_s) if options.rate else None
        life = self.has_lock(task, held, options.limit, rate)
        self.began.setdefault(request.id, self.world.now_us)
        has_twin = self.has_twin(task, what)
        if what == "ok" and not has_twin and task.AsyncResult(request.id).state == SUCCESS:
            self.world.broken(f"{request.id} runs though it has succeeded")
        if not has_twin and self.has_failed(task):
            self.world.broken(f"{request.id} runs though it has failed")
        self.ended.begins(task, held)
        earlier_lives = self.lives.setdefault((request.id, request.retries), [])
        # Data that were lost before, or came back, may have sent it a second time.
        is_once = not has_twin and self.sent.get(request.id, ("", 0))[1] == self.server.epoch
        self.check_second_look(task, earlier_lives)
        for earlier in earlier_lives:
            may_run_again = earlier.process.is_dead or earlier.is_lost or self.has_died(request.id)
            if is_once and not may_run_again:
                self.world.broken(f"{request.id} runs twice: {earlier.held.token}, then {held.token}")
        earlier_lives.append(life)
        return life

    def has_lock(self, task: Any, held: HeldLock, limit: int, rate: tuple[int, float] | None) -> Life:
        """A body has a lock, on these terms."""
        return self.checker.begins(held, limit, rate)

    def check_second_look(self, task: Any, earlier_lives: list[Life]) -> None:
        """A delivery that has waited for another, and not looked since, runs when that has told its end."""
        call, options = task.request._setnx_run.call, task._guard.options
        has_waited = task.acks_late and call.again and call.waits and call.copy == ORIGINAL
        last_us = max((earlier.ended_us for earlier in earlier_lives), default=0)
        if has_waited and not (call.asked or options.hold_on_retry) and self.world.now_us - last_us < US:
            self.world.broken(f"{call.task_id} runs just after another delivery of it has ended")

    def meets(self, request: Any, holder: Holder) -> None:
        """A call meets a conflict: none that was woken just ahead of its start, for which it waits."""
        call: Call = request._setnx_run.call
        is_near = holder.state == "paced" and (holder.deadline or 0.0) - self.world.now_us / US < AHEAD_S
        if call.copy != ORIGINAL and is_near and self.world.is_calm:
            self.world.broken(f"{call.task_id} was woken just ahead of its start, and is to wait once more")

    def on_refused(self, task_id: str) -> None:
        """The broker does not take a call's message: a lock that is kept for it is free a moment later."""
        world, server, process, epoch = self.world, self.server, self.world.process, self.server.epoch
        refused_us, was_full = world.now_us, server.data.is_full

        def look() -> None:
            if process.is_dead or process.was_hindered(refused_us) or server.epoch != epoch:
                return
            if was_full or server.data.is_full:
                return
            if self.checker.kept_for(self.key, task_id) < refused_us:
                world.broken(f"{task_id} was not sent, and its lock is kept for it")

        world.at(refused_us + round(0.9 * US), look)

    def has_failed(self, task: Any) -> bool:
        """Whether a call was told as failed before this delivery of it began, and for good."""
        request = task.request
        if not self.broker.is_failed[request.id] or self.server.epoch or self.has_lost_its_parent(request.id):
            return False
        # Its process has died when that was stored: it is delivered again, or had sent its message before.
        is_sent_again = task.acks_late or request.retries > 0 or request._setnx_run.call.waits
        may_come = is_sent_again and self.has_died(request.id)
        is_unasked = ("unasked", request.id) in self.broker.failed
        return not (may_come or is_unasked or self.is_unheard_of(request.id))

    def is_unheard_of(self, task_id: str) -> bool:
        """Whether Redis may not have heard that a call has failed, as the broker has failed its child, or has
        taken it unconfirmed.
        """
        broker, way = self.broker, ("unconfirmed", task_id)
        failed = [broker.failed_for[task_id]] if task_id in broker.failed_for else []
        failed += [(broker.failed[way], broker.failed_in[way])] if way in broker.failed_in else []
        return any(process.was_hindered(failed_us) for failed_us, process in failed)

    def may_not_come(self, task_id: str) -> bool:
        """Whether a call may have ended that has not said so."""
        return task_id in self.broker.discarded | self.dropped or self.has_died(task_id)

    def has_twin(self, task: Any, what: str) -> bool:
        """Whether a delivery may have a twin that has run, of which no stored success tells it."""
        request = task.request
        ways = {way for way, task_id in self.broker.failed if task_id == request.id}
        # The lock is given back before its end is stored.
        since_us, stored_us = task.lock._since_us, self.stored_us.get(request.id)
        if "doubled" in ways:  # one that the second has overtaken does not know that there is one
            is_flagged = request._setnx_run.call.again
            return what != "ok" or not is_flagged or stored_us is None or since_us <= stored_us
        return "unconfirmed" in ways and (what != "ok" or (stored_us is not None and since_us <= stored_us))

    def has_lost_its_parent(self, task_id: str) -> bool:
        """Whether a call was accepted by a worker that has died."""
        return any(worker.process.is_dead and task_id in dict(worker.accepted) for worker in self.workers)

    def has_died(self, task_id: str) -> bool:
        """Whether a process died that had accepted a call, and not returned."""
        return any(
            running == task_id and (process.is_dead or worker.process.is_dead)
            for worker in self.workers
            for running, process in worker.unreturned
        )

    def play(self) -> World:
        """The world, when all is over: lines go on in 30 s, and what Redis has lost comes by a courier."""
        world = self.world
        for last_s in CALM_S:
            world.run(world.calm_at_us + round(last_s * US))
            left: list[str] = []
            world.spawn(world.process_of("last"), partial(self.note_ends, left), "last")
            world.run(world.now_us + US)
            if not left or (last_s >= LAST_S and not (self.server.epoch or self.is_slow)):
                break
        for task_id in left:
            world.broken(f"{task_id} ({self.sent[task_id][0]}) has not ended")
        world.close()
        return world

    def note_ends(self, left: list[str]) -> None:
        """Whose calls have not ended, and were not lost with the worker that had acknowledged them early."""
        app = self.take_app()
        states = {task_id: app.AsyncResult(task_id).state for task_id in self.sent}
        acks_late = app.tasks[self.task].acks_late
        # By older data one that has died as it ran runs still: it may have parked since, and is not woken.
        may_be_lost = not acks_late or self.server.came_back_older
        lost = {each for each in states if each in self.dropped or (may_be_lost and self.has_died(each))}
        # What the broker did not take back is told as failed, and what is revoked or expires as revoked. Then
        # the attempt that has sent it, which ends later, is stored above that, as Celery's own is.
        not_sent = {each for _, each in self.broker.failed} | {*self.broker.failed_for}
        early = self.broker.discarded | (set() if acks_late else not_sent)
        lost |= {each for each in states if each in early and states[each] == RETRY}
        for task_id, end in states.items():
            self.world.note("ends as", end, task_id)
        # Whoever has joined a call that died between its attempts waits for its retry: for `queue_lease`.
        if not (self.task in ("joins", "joins_late") and any(states[task_id] == RETRY for task_id in lost)):
            left += [each for each in states if states[each] not in READY_STATES and each not in lost]


@lock_released.connect  # type: ignore[untyped-decorator]
def on_released(**told: Any) -> None:
    """A call of the seed that is played has given its lock back."""
    _playing.ended.on_released(**told)


@lock_conflict.connect  # type: ignore[untyped-decorator]
def on_conflict(sender: Any, holder: Holder, **_told: Any) -> None:
    """A call has met one that holds the lock, or its pace."""
    _playing.meets(sender.request, holder)


@task_success.connect  # type: ignore[untyped-decorator]
def on_stored(sender: Any, **_told: Any) -> None:
    """A call's result was stored."""
    _playing.stored_us.setdefault(sender.request.id, _playing.world.now_us)


def play(seed: int, task: str = "") -> World:
    """One seed; of one task, if it is named."""
    return played(Calls, seed, task)


def played(scene: type[Calls], seed: int, task: str) -> World:
    """One seed of a scene, which has its apps already: what they draw is no part of a seed."""
    while len(scene.made) < 8:
        scene.made.append(make_app(scene.of_app))
    return scene(seed, task).play()
