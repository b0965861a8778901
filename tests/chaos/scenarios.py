"""The scenarios: which fault is injected, how often, and into what."""

import os
import random
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from celery_setnx.run.sweep import SWEEP_S
from examples.embedded import EmbeddedServer
from tests.chaos.app import LEASE_S, app
from tests.chaos.checker import SLACK_S, WAITS
from tests.chaos.crowd import Crowd
from tests.chaos.stage import LANES, LONG_S, Play, Stage, clock_shim
from tests.harness import redelivery
from tests.proxy import Proxy

# A call that joins asks for a result that does not come for 6.4 s, and then runs itself.
JOIN_S = 9.0
_ALL = (*WAITS, "retry")
_BARE_FLAWS = ("take_over_10_ms_early", "no_deadline_check", "plain_del", "greedy_renewal", "no_resend")
_IMPATIENT: dict[str, Any] = {"conf": {"broker_transport_options": redelivery(4)}}


@dataclass(frozen=True)
class Scenario:
    """One kind of fault."""

    play: Callable[[Play], None]
    ci: int  # how many times in CI
    full: int  # how many times in a full run
    mutants: tuple[str, ...] = ()  # the flaws that it must catch
    policies: tuple[str, ...] = ("retry",)  # what rivals do at a conflict, in turn
    teeth: int = 4  # how many times with a flaw
    own_stage: bool = False  # whether it has workers and a lock server of its own, and settles there


def in_lanes(lanes: int = LANES) -> Callable[[Callable[..., Any]], Callable[[Play], None]]:
    """A scenario made of one fault, which is injected in lanes beside each other; see `Play.lanes`."""

    def scenario(act: Callable[..., Any]) -> Callable[[Play], None]:
        @wraps(act)
        def play_all(play: Play) -> None:
            play.lanes(lambda *of_lane: act(play, *of_lane), lanes)

        return play_all

    return scenario


def on_servers_of_its_own(play_all: Callable[[Play], None]) -> Callable[[Play], None]:
    """A scenario with a broker and a lock server that no other scenario's workers know; it settles there."""

    @wraps(play_all)
    def scenario(play: Play) -> None:
        with play.stage.servers_of_its_own():
            play_all(play)
            if not (play.failures or play.late):
                play.stage.worker("closers", concurrency=4)
                play.settle("closers")

    return scenario


def victims(chance: random.Random) -> str:
    """The queue of one of the workers whose tasks come to harm."""
    return chance.choice(["va", "vb"])


def rivals(chance: random.Random) -> str:
    """The queue of a worker on the same host, or of one that proves nobody dead."""
    return chance.choice(["q", "remote"])


@in_lanes()
def child_kill(play: Play, key: str, chance: random.Random, number: int) -> None:
    """kill -9 of a pool process in mid-task: early and late acknowledgement, rivals waiting."""
    task = "late" if number % 3 == 2 else "work"
    _, start = play.holder(key, queue=victims(chance), task=task, lease=1.0)
    play.crowd(key, chance)
    policy = play.policy(number)
    waiter = play.waiter(key, 0.05, rivals(chance), "conflict", "start", policy=policy, lease=1.0)
    # Somewhere in the lease, and now and then in the middle of a renewal.
    time.sleep(chance.uniform(0, 0.4))
    before = time.monotonic()
    play.stage.kill_child(start["pid"], policy if policy != "join" else "")
    if policy == "join":
        play.soon(waiter, "done", "failed", since=before, within_s=1.0 + JOIN_S)
    else:
        play.all_done(waiter)


def worker_kill(play: Play) -> None:
    """kill -9 of a whole worker in mid-task; what it had not acknowledged is delivered again."""
    stage = play.stage

    def queue_of(key: str) -> str:
        return f"killed-{play.policy(0)}-{key}"

    def act(key: str, _chance: random.Random, number: int) -> None:
        queue, late_key, policy = queue_of(key), f"{key}-late", play.policy(number)
        lasting = {"policy": policy, "lease": 1.0}
        doomed = stage.worker(queue, concurrency=2, **_IMPATIENT)
        early = play.send(key, LONG_S, queue, lease=1.0)
        late, _ = play.holder(late_key, queue=queue, task="late", lease=1.0)
        play.wait(early, "start")
        waiters = [play.send(key, 0.05, "remote", **lasting), play.send(late_key, 0.05, "q", **lasting)]
        for waiter in waiters:
            play.wait(waiter, "conflict", "start")
        stage.kill_worker(doomed, policy if policy != "join" else "")
        play.all_done(*waiters)
        if number < 2:
            # The message comes back to the next worker of the queue.
            play.inherit(queue, late, concurrency=2, **_IMPATIENT)
        else:
            orphans.append(late)

    orphans: list[str] = []
    play.lanes(act, lanes=2)
    if orphans:
        heirs = stage.workers(**{queue_of(f"k{lane}"): _IMPATIENT for lane in range(2)})
        play.all_done(*orphans, patience=1.5)
        for heir in heirs:
            heir.stop()


@in_lanes()
def stopped_holder(play: Play, key: str, chance: random.Random, number: int) -> None:
    """SIGSTOP of a holder past its lease, then SIGCONT while the next holder is at work and others wait."""
    policy = play.policy(number)
    victim, start = play.holder(key, queue=victims(chance), lease=1.0)
    rival = play.waiter(key, 1.5, policy=policy, lease=1.0)
    with play.stage.stopped(start["pid"]) as stopped:
        taken = play.wait(rival, "start")
        play.recovery_s.append(taken["t"] - stopped)
        third = play.waiter(key, 0.3, "q", "conflict", "start", policy=policy, lease=1.0)
        time.sleep(chance.uniform(0, 0.4))
    play.wait(victim, "failed", "done")
    play.all_done(third)


def server_kill(play: Play) -> None:
    """kill -9 of the lock server and an empty restart, the broker living on; then exclusion holds again.

    What waits in line is put back half a lease after that, and at the next sweep.
    """
    stage, keys = play.stage, ("k0", "k1", "k2")
    for number in range(play.count):
        chance = random.Random(f"{stage.seed}/{play.name}/{number}")
        holders = {key: play.send(key, LONG_S, victims(chance)) for key in keys}
        for holder in holders.values():
            play.wait(holder, "start")
        policy = play.policy(number)
        kinds = ("work", "late", "queued") if policy in WAITS else ("work", "work")
        of_kind = {"work": policy, "late": policy, "queued": "wait"}
        waiters = {
            key: [play.send(key, 0.3, policy=of_kind[task], task=task) for task in kinds] for key in keys
        }
        for tid in (tid for key in keys for tid in waiters[key][: len(kinds) - 1]):
            play.wait(tid, "waiting" if policy in WAITS else "conflict")
        down = time.monotonic()
        with stage.excused(), stage.data_lost():
            stage.locks.stop()
            time.sleep(chance.choice([0.0, 0.3, LEASE_S + 0.5]))
            stage.locks.start(stage.locks.port)
        back = time.monotonic()
        play.struck()
        for key in keys:
            play.end(holders[key])  # if it has not lost its lock
            began = min(play.wait(tid, "start", "done", "failed", after=down)["t"] for tid in waiters[key])
            play.recovery_s.append(max(0.0, began - back))
            for tid in (*waiters[key], holders[key]):
                play.wait(tid, "failed", "done")


def bad_connection(play: Play) -> None:
    """Cuts, lost replies, delays and stalls between one worker and the lock server, not the rivals' own."""
    stage = play.stage
    with Proxy(stage.locks.port) as proxy:
        far = stage.worker("far", concurrency=5, conf={"setnx_url": proxy.url()})
        # One lost reply is no reason to lose a lock; what comes at random is.
        _every_reply_lost(play, proxy)
        if not play.is_found_out():
            with stage.excused(worker=far):
                _random_faults(play, proxy)
        far.stop()


def _every_reply_lost(play: Play, proxy: Proxy) -> None:
    """The reply lost after the k-th command, for every k of a task's acquire, renewals and release."""

    def lose(k: int) -> None:
        if play.is_found_out():
            return
        name = f"reply-{k}"
        fault = proxy.arm("drop_reply", containing=f"{play.name}/{name}/".encode(), skip=k)
        _check_unharmed(play, play.send(name, 2.3, "far", lease=1.0))
        proxy.disarm(fault)
        if fault.struck:
            play.struck()

    with ThreadPoolExecutor(5) as lanes:
        list(lanes.map(lose, range(9)))
    if play.is_found_out():
        return
    # And the one that tells of a take-over.
    _, start = play.holder("reply-take-over", queue="va", lease=1.0)
    tid = play.send("reply-take-over", 1.3, "far", lease=1.0)
    fault = proxy.arm("drop_reply", containing=tid.encode(), answered=b"taken_over")
    with play.stage.stopped(start["pid"]):
        _check_unharmed(play, tid)
        play.struck()
    proxy.disarm(fault)


def _check_unharmed(play: Play, tid: str) -> None:
    """Nobody is locked out by a lock that was granted unseen: neither its own task nor the next."""
    try:
        ended, sent = play.wait(tid, "done", "failed"), play.wait(tid, "sent")
        next_one, follower = play.holder(sent["name"].partition("/")[2], 0.0, lease=1.0)
        play.recovery_s.append(follower["t"] - ended["t"])
        for met in (*play.stage.log.find(tid, "conflict"), *play.stage.log.find(next_one, "conflict")):
            if met["victim"].get("tid") == tid:
                play.fail(f"{met['tid']} met the lock of {tid}, which was granted unseen")
    except AssertionError as error:
        play.fail(error)


def _random_faults(play: Play, proxy: Proxy) -> None:
    def act(key: str, chance: random.Random, _number: int) -> bool:
        acquired = ("delay_reply", {"answered": b"acquired", "seconds": chance.uniform(1.2, 1.8)})
        action, details = chance.choice(
            [
                *((cut, {"skip": chance.randrange(4)}) for cut in ("cut_before", "cut_after", "drop_reply")),
                ("delay", {"skip": chance.randrange(3), "seconds": chance.uniform(0, 1.0)}),
                *(acquired, acquired),
                ("delay_reply", {"answered": b"renewed", "seconds": chance.uniform(0.3, 1.8)}),
                ("stall", {"skip": chance.randrange(3)}),
                ("cut", {}),
            ]
        )
        name = f"random-{key}"
        fault = None
        if action != "cut":
            # Only this lane's tokens: the lanes do not take each other's faults.
            fault = proxy.arm(action, containing=f"{play.name}/{name}/".encode(), **details)
        victim = play.send(name, 1.0, "far", lease=1.0)
        play.wait(victim, "received")
        # Long enough to be at work when the victim hears of its own lock.
        rivals = [play.send(name, chance.choice([0.1, 1.0]), lease=1.0) for _ in range(2)]
        if fault is None:
            time.sleep(chance.uniform(0, 0.6))
            proxy.cut()
        for tid in (victim, *rivals):
            play.wait(tid, "done", "failed", patience=1.5)
        if fault is not None:
            proxy.disarm(fault)
        return fault is None or fault.struck > 0

    play.lanes(act)


def skewed_workers(play: Play) -> None:
    """Workers whose clocks are 60 s fast and slow fight for the same keys."""
    stage = play.stage
    shim = clock_shim(stage.directory)
    clocks = {"fast": 60, "slow": -60}
    shifted = {queue: {"environment": _shifted(stage, shim, queue, by)} for queue, by in clocks.items()}
    workers = stage.workers(**shifted)

    def act(key: str, chance: random.Random, number: int) -> None:
        # Each worker has a queue of its own: a countdown is a moment of the sender's clock.
        queues = ["fast", "slow", "q"]
        chance.shuffle(queues)
        first, _ = play.holder(key, LEASE_S + 0.5, queues[0])
        policies = (play.policy(number), play.policy(number + 1))
        rest = [play.send(key, 0.3, queue, policy=policy) for queue, policy in zip(queues[1:], policies)]
        play.all_done(first, *rest)

    play.lanes(act, lanes=2)
    for worker in workers:
        worker.stop()


def clock_jump(play: Play) -> None:
    """The lock server's clock jumps two minutes ahead, and back: fences rise, the old holder is told."""
    stage = play.stage
    shim = clock_shim(stage.directory)
    environment = _shifted(stage, shim, "server", 0)
    with mock.patch.dict(os.environ, environment), EmbeddedServer() as server:
        os.environ.pop("LD_PRELOAD")
        stage.locks, usual = server, stage.locks
        try:
            workers = stage.workers(j1={"concurrency": 3}, j2={"concurrency": 3})
            for number in range(play.count):
                ahead = number % 2 == 0
                first, _ = play.holder("k", LONG_S if ahead else 3 * LEASE_S, "j1")
                policies = (play.policy(number), play.policy(number + 1))
                waiters = [play.send("k", 0.3, "j2", policy=policy) for policy in policies]
                play.wait(waiters[0], "conflict")
                # Every lease is over at once if it goes ahead.
                with stage.data_lost() if ahead else nullcontext():
                    _set_clock(stage, "server", 120 if ahead else 0)
                play.struck()
                for tid in (first, *waiters):
                    play.wait(tid, "done", "failed")
            play.settle("j2")
            for worker in workers:
                worker.stop()
        finally:
            stage.locks = usual


@in_lanes(3)
def waiting_worker_kill(play: Play, key: str, chance: random.Random, number: int) -> None:
    """kill -9 of the worker of a call that waits: in line, woken with its pool busy, and in its body."""
    stage, queue = play.stage, f"parked-{key}"
    doomed = stage.worker(queue, concurrency=1, **_IMPATIENT)
    how = ("in line", "woken", "in its body")[number % 3]
    policy = "wait" if how == "in its body" else play.policy(number // 3)
    holder, _ = play.holder(key, queue=victims(chance), lease=1.0)
    task, length_s = ("late", LONG_S) if how == "in its body" else ("work", 0.1)
    waiter = play.waiter(key, length_s, queue, "waiting", policy=policy, task=task, lease=1.0)
    if how == "woken":
        play.holder(f"{key}-blocker", queue=queue)
        play.wait(waiter, "received", after=play.end(holder)["t"])
    elif how == "in its body":
        play.end(holder)
        play.wait(waiter, "start")
    before = time.monotonic()
    stage.kill_worker(doomed)
    if how == "in line":
        play.end(holder)
    play.inherit(queue, waiter, concurrency=1, **_IMPATIENT)
    play.recovery_s.append(play.wait(waiter, "done")["t"] - before)


def late_wakes(play: Play) -> None:
    """A woken call finds its pool busy until long after its lock was kept for it; so it is woken again."""
    queues = [f"busy-k{lane}" for lane in range(2)]
    workers = play.stage.workers(**{queue: {"concurrency": 1} for queue in queues})

    def act(key: str, chance: random.Random, number: int) -> None:
        if play.is_found_out():
            return
        queue = f"busy-{key}"
        holder, _ = play.holder(key, queue=victims(chance), lease=1.0)
        waiter = play.waiter(key, 0.1, queue, "waiting", policy=play.policy(number), lease=1.0)
        blocker, _ = play.holder(f"{key}-blocker", 5.5, queue)  # until it has been woken twice
        play.end(holder)
        play.all_done(blocker, waiter, play.send(key, 0.1, policy="wait", lease=1.0), patience=2.0)
        # Whatever was sent in vain is gone once the next has ended.
        play.all_done(play.send(key, 0.0, queue))

    play.lanes(act, lanes=2)
    for worker in workers:
        worker.stop()


@on_servers_of_its_own
def broker_kill(play: Play) -> None:
    """kill -9 of the broker and an empty restart, with all its messages: what waits in line still runs."""
    stage, keys = play.stage, ("k0", "k1", "k2")
    workers = dict(zip(("b0", "b1"), stage.workers(b0={"concurrency": 4}, b1={"concurrency": 4})))
    for number in range(play.count):
        chance = random.Random(f"{stage.seed}/{play.name}/{number}")
        # The broker is where results are stored, too.
        holders = [play.holder(key, queue="b0", lease=1.0, may="ConnectionError")[0] for key in keys]
        lines = [play.line(key, "b1") for key in keys]
        play.send(keys[0], 0.1, "nobody")  # which has not begun, and is lost
        with stage.empty_broker():
            for holder in holders:
                play.end(holder)
            time.sleep(chance.choice([0.0, 0.3, 2.5]) if number else 2.5)
        back = time.monotonic()
        play.struck()
        with stage.supervised(workers, concurrency=4):
            for line in lines:
                # A wake-up that the broker has lost was in vain.
                play.soon(line[0], "start", since=back, within_s=2.0 + 2 * (1.0 + SWEEP_S) + SLACK_S)
                play.account(set(line))  # the last one fails if it has joined a holder that did


@on_servers_of_its_own
@in_lanes(3)
def left_alone(play: Play, key: str, _chance: random.Random, number: int) -> None:
    """kill -9 of the worker of a holder, or of calls in line or woken, whose messages stay away for an hour.

    Nobody publishes, and those in line whose worker lives are not kept waiting.
    """
    stage, gone, here = play.stage, f"gone-{key}-{number}", f"here-{key}-{number}"
    how = ("holder", "woken", "in line")[number % 3]
    doomed, heir = stage.workers(**{gone: {"concurrency": 1 + (how == "holder")}, here: {"concurrency": 2}})
    holder, _ = play.holder(key, queue=gone if how == "holder" else here, lease=1.0)
    of_gone = [] if how == "holder" else [play.waiter(key, 0.1, gone, "waiting", policy="wait", lease=1.0)]
    of_here = play.line(key, here, join=how != "holder")
    of_gone += play.line(key, gone, join=how != "holder")
    if how == "woken":
        play.holder(f"{key}-blocker", queue=gone)
        since = play.end(holder)["t"]
        play.wait(of_gone[0], "received", after=since)
    elif how == "holder":
        time.sleep(1.0 + SWEEP_S)  # somebody has looked at the line before
        since = time.monotonic()
    stage.kill_worker(doomed)
    if how == "in line":
        since = play.end(holder)["t"]
    play.soon(of_here[0], "start", since=since, within_s=1.0 + SWEEP_S + SLACK_S)
    heir.take_from(app, gone)
    play.all_done(*of_here, *of_gone)
    heir.stop()


@on_servers_of_its_own
def downtime(play: Play) -> None:
    """All workers are down for two days: what has begun is known then, and couriers have what waits."""
    stage, keys = play.stage, ("k0", "k1", "k2")
    worker = stage.worker("down", concurrency=5)
    for number in range(play.count):
        holders = [play.holder(key, queue="down", lease=1.0)[0] for key in keys]
        ended = [play.line(key, "down") for key in keys]
        for holder, line in zip(holders, ended):
            play.end(holder)
            play.all_done(*line)
        tasks = ("work", "late", "work") if number % 2 else ("late", "work", "late")
        holders = [play.holder(key, queue="down", task=task, lease=1.0)[0] for key, task in zip(keys, tasks)]
        lines = [play.line(key, "down", join=key == "k0") for key in keys]
        worker.has_read_all(app)  # their couriers: nobody else has the calls
        stage.kill_worker(worker)
        lines[0].append(play.send(keys[0], 0.1, "down", policy="wait", lease=1.0))
        stage.two_days_pass("down")
        worker = stage.worker("down", concurrency=5)
        since = time.monotonic()
        play.struck()
        for line in lines:
            play.soon(line[0], "start", since=since, within_s=1.0 + SWEEP_S + SLACK_S)
        play.all_done(*(holder for holder, task in zip(holders, tasks) if task == "late"))
        for line in lines:
            play.all_done(*line)


def _bare(play: Play, locks: int = 1, limit: int = 1, rate: tuple[int, float] | None = None) -> None:
    with Proxy(play.stage.locks.port) as proxy, play.stage.lock_client() as admin:
        Crowd(play, proxy, admin, locks, limit, rate).live(play.count)


def bare_locks(play: Play) -> None:
    """Bare locks under kill -9, stops, cuts, SCRIPT FLUSH, full memory and forgotten records."""
    _bare(play, locks=3)


def bare_permits(play: Play) -> None:
    """Several permits of one lock: never more than three hold it."""
    _bare(play, limit=3)


def bare_pace(play: Play) -> None:
    """And at a pace: never more than five start within any half second."""
    _bare(play, limit=3, rate=(5, 0.5))


SCENARIOS: dict[str, Scenario] = {
    "bare locks": Scenario(bare_locks, 60, 600, _BARE_FLAWS, teeth=99, own_stage=True),
    "bare locks, three permits": Scenario(
        bare_permits, 20, 200, ("one_permit_more",), teeth=99, own_stage=True
    ),
    "bare locks, at a pace": Scenario(bare_pace, 10, 100, ("one_start_more",), teeth=99, own_stage=True),
    "cuts, stalls, lost replies": Scenario(bad_connection, 12, 200, ("renewal_gives_up",), teeth=8),
    "woken late": Scenario(late_wakes, 2, 20, ("twin_wakes", "join_first"), WAITS, teeth=5),
    "kill -9 of a worker": Scenario(worker_kill, 4, 100, ("no_sweep",), _ALL, teeth=2),
    "kill -9 of a pool child": Scenario(child_kill, 24, 600, ("no_lock",), _ALL),
    "worker clocks +-60 s": Scenario(skewed_workers, 3, 30, ("client_clock", "no_renewal"), _ALL),
    "server clock +-120 s": Scenario(clock_jump, 2, 20, ("clock_fence",), _ALL, own_stage=True),
    "SIGSTOP past the lease": Scenario(stopped_holder, 8, 80, ("no_deadline",), ("wait", "retry")),
    "lock server killed, empty": Scenario(server_kill, 4, 40, ("epoch_unnoticed",), _ALL, teeth=1),
    "kill -9 of a waiting worker": Scenario(waiting_worker_kill, 3, 60, ("claimed_once",), WAITS, teeth=3),
    "broker killed, empty": Scenario(broker_kill, 2, 20, (), WAITS, teeth=1, own_stage=True),
    "kill -9, and nothing comes": Scenario(
        left_alone, 3, 30, ("serve_without_wake", "forgotten_line"), WAITS, teeth=3, own_stage=True
    ),
    "all down for two days": Scenario(
        downtime, 1, 20, ("no_courier", "short_ticket"), WAITS, teeth=1, own_stage=True
    ),
}
"""What takes longest comes first, so that the lanes end together."""


def _shifted(stage: Stage, shim: Path, name: str, seconds: int) -> dict[str, str]:
    """The environment of a process whose wall clock is shifted."""
    _set_clock(stage, name, seconds)
    return {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(stage.directory / f"{name}.clock")}


def _set_clock(stage: Stage, name: str, seconds: int) -> None:
    path = stage.directory / f"{name}.clock"
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("q", seconds))
