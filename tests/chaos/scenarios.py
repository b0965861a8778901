"""The scenarios: which fault is injected, how often, and into what."""

import os
import random
import signal
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

from celery_setnx.lock.process import has_ended
from celery_setnx.run.sweep import SWEEP_S
from examples.embedded import EmbeddedServer
from tests.chaos.app import LEASE_S, app
from tests.chaos.checker import SLACK_S, WAITS
from tests.chaos.stage import LANES, LONG_S, Late, Play, Stage, clock_shim
from tests.harness import redelivery, wait_until
from tests.proxy import Proxy

# A call that joins asks for a result that does not come for 6.4 s, and then runs itself.
JOIN_S = 9.0
_ALL = (*WAITS, "retry")
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
    play.stage.kill_child(start["pid"], waiter if policy != "join" else "")
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
        queue, late_key = queue_of(key), f"{key}-late"
        lasting = {"policy": play.policy(number), "lease": 1.0}
        doomed = stage.worker(queue, concurrency=2, **_IMPATIENT)
        early = play.send(key, LONG_S, queue, lease=1.0)
        late, _ = play.holder(late_key, queue=queue, task="late", lease=1.0)
        play.wait(early, "start")
        waiters = [play.send(key, 0.05, "remote", **lasting), play.send(late_key, 0.05, "q", **lasting)]
        for waiter in waiters:
            play.wait(waiter, "conflict", "start")
        stage.kill_worker(doomed, waiters[0] if play.policy(number) != "join" else "")
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


@in_lanes(2)
def killed_between_attempts(play: Play, key: str, _chance: random.Random, number: int) -> None:
    """kill -9 of the worker in which a retry waits: its lock is held until it has come back and ended."""
    stage, queue = play.stage, f"between-{key}"
    doomed = stage.worker(queue, concurrency=1, **_IMPATIENT)
    victim, first = play.holder(key, 0.1, queue, task="held")
    waiter = play.send(key, 0.1, policy=play.policy(number))
    retry = play.wait(victim, "holds")
    play.wait(victim, "received", after=retry["t"])
    play.wait(victim, "released", after=retry["t"])
    stage.kill_worker(doomed)
    heir = stage.worker(queue, concurrency=1, **_IMPATIENT)
    second = play.wait(victim, "start", after=first["t"])
    if second["fence"] != first["fence"]:
        raise AssertionError(f"{victim} came back with another fence")
    play.all_done(waiter)
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
        far = stage.worker("far", concurrency=3, conf={"setnx_url": proxy.url()})
        # One lost reply is no reason to lose a lock; what comes at random is.
        _every_reply_lost(play, proxy)
        with stage.excused(worker=far):
            _random_faults(play, proxy)
        far.stop()


def _every_reply_lost(play: Play, proxy: Proxy) -> None:
    """The reply lost after the k-th command, for every k of a task's acquire, renewals and release."""

    def lose(k: int) -> None:
        name = f"reply-{k}"
        fault = proxy.arm("drop_reply", containing=f"{play.name}/{name}/".encode(), skip=k)
        _check_unharmed(play, play.send(name, 2.3, "far", lease=1.0), 0.0)
        proxy.disarm(fault)
        if fault.struck:
            play.struck()

    with ThreadPoolExecutor(3) as lanes:
        list(lanes.map(lose, range(9)))
    # And the one that tells of a take-over.
    _, start = play.holder("reply-take-over", queue="va", lease=1.0)
    tid = play.send("reply-take-over", 1.3, "far", lease=1.0)
    fault = proxy.arm("drop_reply", containing=tid.encode(), answered=b"taken_over")
    with play.stage.stopped(start["pid"]):
        _check_unharmed(play, tid, 1.0)
        play.struck()
    proxy.disarm(fault)


def _check_unharmed(play: Play, tid: str, wait_s: float) -> None:
    """Nobody is locked out by a lock that was granted unseen: neither its own task nor the next."""
    try:
        ended = play.wait(tid, "done", "failed")
        sent, start = play.wait(tid, "sent"), play.wait(tid, "start")
        passed_s = start["t"] - play.wait(tid, "received")["t"]  # a worker that boots is not what is measured
        if passed_s > wait_s + 1.2:
            raise Late(f"{tid} began {passed_s:.2f} s after it was received, for want of a reply")
        _, follower = play.holder(sent["name"].partition("/")[2], 0.0, lease=1.0)
        play.recovery_s.append(follower["t"] - ended["t"])
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


def storm(play: Play) -> None:
    """SCRIPT FLUSH and CLIENT KILL ten times a second each, under load."""
    stage = play.stage
    chance = random.Random(f"{stage.seed}/{play.name}")
    holders = [play.holder(f"k{lane}", 2.5 * LEASE_S, victims(chance))[0] for lane in range(3)]
    waiters = [play.send(f"k{lane}", 0.1, policy=play.policy(lane)) for lane in range(3)]
    with stage.lock_client() as client:
        while play.injected < play.count or not all(stage.log.find(tid, "end") for tid in holders):
            client.script_flush()
            client.client_kill_filter(_type="normal", skipme=True)
            play.struck()
            if play.injected % 10 == 0:
                play.crowd(f"k{chance.randrange(3)}", chance)
            if play.injected > 100 * play.count + 1000:
                play.fail("the holders did not end")
                break
            time.sleep(0.1)
    play.all_done(*waiters)


@in_lanes(1)
def full_server(play: Play, key: str, chance: random.Random, number: int) -> None:
    """maxmemory reached under noeviction for more than a lease: who holds a lock keeps it, others wait."""
    policy = play.policy(number)
    holder = play.send(key, LONG_S, victims(chance))
    brief, _ = play.holder(f"{key}-brief", queue=victims(chance))
    play.wait(holder, "start")
    waiters = [play.send(name, 0.1, policy=policy) for name in (key, f"{key}-brief")]
    for waiter in waiters:
        play.wait(waiter, "conflict")
    with play.stage.lock_client() as client:
        client.config_set("maxmemory", 1)
        try:
            newcomer = play.send(f"{key}-new", 0.1)
            waiters.append(play.send(key, 0.1, policy=policy))
            play.end(brief)
            time.sleep(LEASE_S + 1.0)  # a lease without memory
        finally:
            client.config_set("maxmemory", 0)
    back = time.monotonic()
    play.recovery_s.append(play.wait(newcomer, "start")["t"] - back)
    play.end(holder)
    play.all_done(holder, brief, *waiters, newcomer)


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


@in_lanes()
def revoked(play: Play, key: str, chance: random.Random, number: int) -> None:
    """Revoked before the start, while running, and with terminate by SIGTERM and by SIGKILL."""
    # With a long lease, so that it is seen whether the lock was released or has run out.
    queue, how = victims(chance), number % 4
    if how == 0:
        victim = play.send(key, 0.1, queue, countdown=4)  # a busy worker takes its time to hear of the revoke
        play.wait(victim, "received")
        app.control.revoke(victim)
        play.wait(victim, "revoked")
        return
    lease = 1.0 if how == 3 else 4.0
    victim, start = play.holder(key, queue=queue, lease=lease)
    waiter = play.waiter(key, policy=play.policy(number), lease=lease)
    before = time.monotonic()
    options = {1: {}, 2: {"terminate": True}, 3: {"terminate": True, "signal": "SIGKILL"}}[how]
    app.control.revoke(victim, **options)
    if how == 1:
        play.end(victim)
    if how == 3:
        wait_until(lambda: has_ended(start["pid"]), f"the end of {start['pid']}")
        play.stage.note("kill", victim_pid=start["pid"], before=before, waiter=waiter)
    play.wait(victim, "done", "revoked")
    if how == 2:
        play.soon(waiter, "start", "done", "failed", since=before, within_s=2.0)
    # A revoke finds no call in the worker that has just been received for the second time.
    play.wait(waiter, "done", "failed")


@in_lanes()
def time_limits(play: Play, key: str, chance: random.Random, number: int) -> None:
    """A soft limit, a hard one, and a hard one of a body that does not listen to SIGTERM."""
    limits = [{"soft_time_limit": 0.6}, {"time_limit": 0.6}, {"time_limit": 0.6, "deaf": True}]
    lease = 4.0 if number % 3 == 0 else 1.0
    victim, _ = play.holder(key, queue=victims(chance), lease=lease, **limits[number % 3])
    waiter = play.send(key, 0.05, policy=play.policy(number), lease=lease)
    failed = play.wait(victim, "failed")
    within_s = 2.0 if number % 3 == 0 else lease + 1.2
    play.soon(waiter, "start", "failed", since=failed["t"], within_s=within_s)


@in_lanes()
def shutdowns(play: Play, key: str, _chance: random.Random, number: int) -> None:
    """Warm: the body ends under its lock. Soft: it does if it fits. Cold: body and lock end at once."""
    stage, how = play.stage, ("warm", "soft", "cold", "cold-late")[number % 4]
    cold, queue = how.startswith("cold"), f"{how}-{key}-{play.policy(0)}"
    worker = stage.worker(queue, concurrency=2, conf={"worker_soft_shutdown_timeout": 10 * (how == "soft")})
    task = "late" if how == "cold-late" else "work"
    holder, _ = play.holder(key, LONG_S if cold else 2.5 * LEASE_S, queue, task=task)
    waiter = play.waiter(key, 0.1, policy=play.policy(number))
    before = time.monotonic()
    os.kill(worker.process.pid, signal.SIGTERM if how == "warm" else signal.SIGQUIT)
    if cold:
        stage.note("cold", victim_worker=f"{worker.name}@test", before=before)
    else:
        play.all_done(holder)
    began = play.wait(waiter, "start", "done", after=before)
    if cold:
        play.recovery_s.append(began["t"] - before)
    wait_until(lambda: worker.process.poll() is not None, f"the end of {worker.name}")
    if how == "cold-late":
        # What was not acknowledged is back in the queue.
        play.inherit(queue, holder, concurrency=1)


def short_lives(play: Play) -> None:
    """max_tasks_per_child: the pool's processes are replaced all the time, and every one renews."""
    stage = play.stage
    worker = stage.worker("brief", concurrency=3, arguments=("--max-tasks-per-child=2",))
    pids: set[int] = set()
    tids = []
    for number in range(play.count):
        chance = random.Random(f"{stage.seed}/{play.name}/{number}")
        # Every few a body that lives on renewal.
        seconds = LEASE_S + 0.6 if number % 6 == 0 else 0.05
        for length_s, queue in ((seconds, "brief"), (0.05, "q")):
            policy = chance.choice(["retry", "skip", "wait", "join"])
            tids.append(play.send(f"k{number % 2}", length_s, queue, policy=policy))
    play.all_done(*tids, patience=3)
    for tid in tids:
        pids |= {start["pid"] for start in stage.log.find(tid, "start")}
    for _ in pids:
        play.struck()
    worker.stop()


@in_lanes(5)
def pools(play: Play, key: str, chance: random.Random, number: int) -> None:
    """prefork, solo, threads, gevent, eventlet: each renews for two leases, then is killed in mid-task."""
    pool = ("prefork", "solo", "threads", "gevent", "eventlet")[number % 5]
    queue = f"pool-{pool}-{number}"
    worker = play.stage.worker(queue, pool=pool, concurrency=1 if pool == "solo" else 2)
    renewing, _ = play.holder(key, 2.2 * LEASE_S, queue)
    others = [play.send(key, 0.1, policy=policy) for policy in ("retry", "skip", *WAITS)]
    if pool != "solo":
        others += [play.send(key, 0.1, queue, policy=policy) for policy in WAITS]
    play.all_done(renewing, *others)
    play.holder(key, queue=queue, lease=1.0)
    waiter = play.waiter(key, 0.05, rivals(chance), lease=1.0)
    play.stage.kill_worker(worker, waiter)
    play.all_done(waiter)


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


@in_lanes()
def killed_before_waking(play: Play, key: str, chance: random.Random, number: int) -> None:
    """kill -9 of whoever has handed a lock over and not yet said so: a pool process, or all its worker."""
    stage, queue = play.stage, f"mortal-{key}"
    order = stage.directory / queue
    worker = stage.worker(queue, concurrency=1, environment={"CHAOS_DIES_BEFORE_WAKING": str(order)})
    policy = play.policy(number // 2)
    holder, start = play.holder(key, queue=queue, lease=1.0)
    waiter = play.waiter(key, 0.1, rivals(chance), "waiting", policy=policy, lease=1.0)
    whole = number % 2 == 0
    order.write_text("worker" if whole else "child")
    ended = play.end(holder)
    wait_until(lambda: has_ended(start["pid"]), f"the end of {start['pid']}")
    victim = {"victim_worker": f"{worker.name}@test"} if whole else {"victim_pid": start["pid"]}
    stage.note("kill", before=ended["t"], **victim)
    # The lock was kept for it in vain, and it is passed over for a lease; then a sweep finds it each time.
    within_s = 2 * (1.0 + SWEEP_S) + SLACK_S
    if policy == "join":
        play.soon(waiter, "done", "failed", since=ended["t"], within_s=within_s + JOIN_S)
    else:
        play.soon(waiter, "start", since=ended["t"], within_s=within_s)
    worker.stop()


def late_wakes(play: Play) -> None:
    """A woken call finds its pool busy until long after its lock was kept for it; so it is woken again."""
    queues = [f"busy-k{lane}" for lane in range(2)]
    workers = play.stage.workers(**{queue: {"concurrency": 1} for queue in queues})

    def act(key: str, chance: random.Random, number: int) -> None:
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
@in_lanes(2)
def unswept(play: Play, key: str, _chance: random.Random, number: int) -> None:
    """kill -9 of a holder's worker where nobody sweeps: whoever comes next lets the line go on."""
    queues = [f"{what}-{key}-{number}" for what in ("gone", "here")]
    seldom = {"environment": {"CHAOS_SWEEP_S": "600"}, "concurrency": 2}
    doomed, heir = play.stage.workers(**dict.fromkeys(queues, seldom))
    play.holder(key, queue=queues[0], lease=1.0)
    line = play.line(key, queues[1])
    play.stage.kill_worker(doomed)
    time.sleep(1.2)
    since = time.monotonic()
    newcomer = play.send(key, 0.1, queues[1], policy=("wait", "skip", "retry")[number % 3], lease=1.0)
    play.soon(line[0], "start", since=since, within_s=SLACK_S)
    play.all_done(*line, newcomer)
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


@on_servers_of_its_own
@in_lanes(2)
def deploys(play: Play, key: str, _chance: random.Random, number: int) -> None:
    """kill -9 or SIGTERM of all workers; the next ones are of a release with other tasks; and back."""
    stage, killed = play.stage, number % 2 == 0
    queue, aside = f"deploy-{key}-{number}", f"aside-{key}-{number}"
    releases = (
        {"shorter": "TypeError", "renamed": "NotRegistered", "rekeyed": "", "eased": "", "freed": ""},
        {"shorter": "", "renamed_since": "NotRegistered", "rekeyed": "", "eased": "", "freed": ""},
    )
    worker = stage.worker(f"{queue},{aside}", concurrency=7, **_IMPATIENT)
    for later in (False, True):

        def send(place: int, seconds: float, by: int) -> str:
            task, may = list(releases[by].items())[place]
            return play.send_changed(f"{key}-{place}", task, seconds, queue, later=bool(by), may=may)

        # Those that have waited and ended have couriers still.
        ended = [[send(place, 0.2, later) for _ in range(2)] for place in range(5)]
        play.all_done(*(tid for of_key in ended for tid in of_key))
        # None runs for longer than its message stays away: a call without a header has another key elsewhere.
        holders = [send(place, LONG_S if killed else 3.0, later) for place in range(5)]
        for holder in holders:
            play.wait(holder, "start")
        lines = [[send(place, 0.1, later) for _ in range(3)] for place in range(5)]
        for tid in (tid for line in lines for tid in line):
            play.wait(tid, "waiting", "start", *(["conflict"] if later else []))  # "eased" waits no more
        before = worker
        time.sleep(0.5)  # what the pool has accepted is acknowledged
        if killed:  # not as it reads: with a courier it would lose a call whose task nobody knows by then
            worker.take_no_more_from(app, queue)
            play.all_done(play.send(f"{key}-aside", 0.0, aside))  # it ends a read that is under way
            stage.kill_worker(worker)
        else:
            worker.process.terminate()
        after = {} if later else {"environment": {"CHAOS_RELEASE": "later"}}
        worker = stage.worker(f"{queue},{aside}", concurrency=7, **_IMPATIENT, **after)
        since = time.monotonic()
        lines += [[send(place, 0.1, not later)] for place in range(5)]
        if not killed:
            since = max(since, play.wait(holders[2], "end")["t"])
        play.soon(lines[2][0], "start", since=since, within_s=1.0 + SWEEP_S + SLACK_S)
        play.account({*holders, *(tid for line in lines for tid in line)}, redelivery_s=4.0 + 3.0)
        wait_until(lambda: before.process.poll() is not None, f"the end of {before.name}")  # noqa: B023
    worker.stop()


SCENARIOS: dict[str, Scenario] = {
    "kill -9 of a pool child": Scenario(child_kill, 30, 500, ("early_take_over", "no_lock")),
    "kill -9 of a worker": Scenario(worker_kill, 10, 100, ("no_take_over",), teeth=2),
    "kill -9 between attempts": Scenario(
        killed_between_attempts, 2, 20, ("no_hold",), ("retry", "wait"), teeth=1
    ),
    "SIGSTOP past the lease": Scenario(stopped_holder, 5, 50, ("plain_del", "no_deadline")),
    "lock server killed, empty": Scenario(server_kill, 3, 20, ("counting_fence",), teeth=2),
    "cuts, stalls, lost replies": Scenario(
        bad_connection, 20, 200, ("no_deadline", "renewal_gives_up"), teeth=8
    ),
    "SCRIPT FLUSH, CLIENT KILL": Scenario(storm, 40, 400, ("no_resend",), _ALL),
    "server full (noeviction)": Scenario(full_server, 2, 10, ("greedy_renewal",), _ALL, teeth=1),
    "worker clocks +-60 s": Scenario(skewed_workers, 6, 30, ("client_clock",), _ALL),
    "server clock +-120 s": Scenario(clock_jump, 4, 20, ("clock_fence",), _ALL, own_stage=True),
    "revoke": Scenario(revoked, 12, 60, ("no_release_on_error",), _ALL),
    "time limits": Scenario(time_limits, 9, 60, ("no_release_on_error",), _ALL),
    "warm, soft, cold shutdown": Scenario(shutdowns, 4, 40, ("no_renewal",), _ALL, teeth=2),
    "max_tasks_per_child": Scenario(short_lives, 24, 200, ("no_lock",), teeth=6),
    "every pool": Scenario(pools, 5, 25, ("no_renewal",), teeth=5),
    "kill -9 of a pool child, wait": Scenario(child_kill, 8, 200, ("no_wake", "lost_wake"), ("wait",)),
    "kill -9 of a pool child, join": Scenario(child_kill, 4, 100, (), ("join",)),
    "kill -9 of a worker, wait and join": Scenario(worker_kill, 2, 40, ("no_sweep",), WAITS, teeth=2),
    "kill -9 of a waiting worker": Scenario(waiting_worker_kill, 3, 60, ("claimed_once",), WAITS, teeth=3),
    "kill -9 before the wake-up": Scenario(killed_before_waking, 4, 60, ("no_sweep",), WAITS, teeth=2),
    "woken late": Scenario(late_wakes, 2, 20, ("no_ticket", "twin_wakes", "join_first"), WAITS, teeth=5),
    "SIGSTOP past the lease, wait": Scenario(stopped_holder, 4, 50, ("no_sweep",), ("wait",)),
    "lock server killed, wait": Scenario(server_kill, 2, 20, ("epoch_unnoticed",), WAITS, teeth=1),
    "broker killed, empty": Scenario(broker_kill, 2, 20, ("no_sweep",), WAITS, teeth=1, own_stage=True),
    "kill -9, and nothing comes": Scenario(
        left_alone,
        3,
        30,
        ("no_sweep", "forgotten_line", "serve_without_wake", "no_passing_over"),
        WAITS,
        teeth=3,
        own_stage=True,
    ),
    "kill -9, and nobody sweeps": Scenario(unswept, 2, 20, ("no_serve",), WAITS, teeth=2, own_stage=True),
    "all down for two days": Scenario(
        downtime, 1, 20, ("no_courier", "short_ticket"), WAITS, teeth=1, own_stage=True
    ),
    "deploy and roll-back": Scenario(
        deploys, 2, 20, ("no_letting_go", "unknown_stays"), WAITS, teeth=2, own_stage=True
    ),
}


def _shifted(stage: Stage, shim: Path, name: str, seconds: int) -> dict[str, str]:
    """The environment of a process whose wall clock is shifted."""
    _set_clock(stage, name, seconds)
    return {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(stage.directory / f"{name}.clock")}


def _set_clock(stage: Stage, name: str, seconds: int) -> None:
    path = stage.directory / f"{name}.clock"
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("q", seconds))
