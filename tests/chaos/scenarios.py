"""The scenarios: which fault is injected, how often, and into what."""

import os
import random
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from examples.embedded import EmbeddedServer
from tests.chaos.app import LEASE_S, app
from tests.chaos.checker import POLL_S, SLACK_S
from tests.chaos.stage import MissingTool, Play, Stage, clock_shim, find_compiler
from tests.harness import wait_until
from tests.proxy import Proxy

LONG_S = 30.0
# A call that joins asks for a result that does not come for 6.4 s, and then runs itself.
JOIN_S = 9.0


@dataclass(frozen=True)
class Scenario:
    """One kind of fault.

    Attributes:
        play: Injects it.
        ci: How many times in CI.
        full: How many times in a full run.
        mutants: The flaws that it must catch.
        policies: What rivals do at a conflict, in turn.
        teeth: How many times with a flaw.
        own_stage: Whether its tasks are settled on a lock server of its own.
        needs: Programs and Python packages without which it cannot play.
    """

    play: Callable[[Play], None]
    ci: int
    full: int
    mutants: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("retry",)
    teeth: int = 4
    own_stage: bool = False
    needs: tuple[str, ...] = ()

    def check_tools(self) -> None:
        """Find out whether it can play.

        Raises:
            MissingTool: It cannot, for want of what the message names.
        """
        for name in self.needs:
            if name == "cc":
                find_compiler()
            elif find_spec(name) is None:
                raise MissingTool(f"the Python package {name}: pip install {name}")


def child_kill(play: Play) -> None:
    """kill -9 of a pool process in mid-task: early and late acknowledgement, rivals waiting."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        task = "late" if number % 3 == 2 else "work"
        victim = play.send(key, LONG_S, chance.choice(["va", "vb"]), task=task, lease=1.0)
        start = stage.log.wait(victim, "start")
        play.crowd(key, chance)
        policy = play.policy(number)
        waiter = play.send(key, 0.05, chance.choice(["q", "remote"]), policy=policy, lease=1.0)
        stage.log.wait(waiter, "conflict", "start")
        # Somewhere in the lease, and now and then in the middle of a renewal.
        time.sleep(chance.uniform(0, 0.4))
        if policy != "join":
            stage.kill_child(start["pid"], waiter)
            stage.log.wait(waiter, "done")
            return
        before = time.monotonic()
        stage.kill_child(start["pid"])
        play.joined(waiter, since=before, within_s=1.0 + JOIN_S)

    play.lanes(act)


def worker_kill(play: Play) -> None:
    """kill -9 of a whole worker in mid-task; what it had not acknowledged is delivered again."""
    stage = play.stage
    stage.company()
    environment = {"CHAOS_VISIBILITY_S": "4"}

    def act(key: str, _chance: random.Random, number: int) -> None:
        queue = f"killed-{play.policy(0)}-{key}"
        policy = play.policy(number)
        doomed = stage.worker(queue, concurrency=2, environment=environment)
        early = play.send(key, LONG_S, queue, lease=1.0)
        late = play.send(f"{key}-late", LONG_S, queue, task="late", lease=1.0)
        stage.log.wait(early, "start")
        stage.log.wait(late, "start")
        waiter = play.send(key, 0.05, "remote", policy=policy, lease=1.0)
        late_waiter = play.send(f"{key}-late", 0.05, "q", policy=policy, lease=1.0)
        stage.log.wait(waiter, "conflict", "start")
        stage.log.wait(late_waiter, "conflict", "start")
        stage.kill_worker(doomed, waiter if policy != "join" else "")
        stage.log.wait(waiter, "done")
        stage.log.wait(late_waiter, "done")
        if number < 2:
            # The message comes back to the next worker of the queue.
            heir = stage.worker(queue, concurrency=2, environment=environment)
            stage.log.wait(late, "done")
            heir.stop()
        else:
            orphans.append(late)

    orphans: list[str] = []
    play.lanes(act, lanes=2)
    if orphans:
        queues = [f"killed-{play.policy(0)}-k{lane}" for lane in range(2)]
        heirs = stage.workers(**{queue: {"environment": environment} for queue in queues})
        for late in orphans:
            stage.log.wait(late, "done", patience=1.5)
        for heir in heirs.values():
            heir.stop()


def killed_between_attempts(play: Play) -> None:
    """kill -9 of the worker in which a retry waits: its lock is held until it has come back and ended."""
    stage = play.stage
    stage.company()
    environment = {"CHAOS_VISIBILITY_S": "4"}

    def act(key: str, _chance: random.Random, number: int) -> None:
        queue = f"between-{key}"
        doomed = stage.worker(queue, concurrency=1, environment=environment)
        victim = play.send(key, 0.1, queue, task="held")
        first = stage.log.wait(victim, "start")
        waiter = play.send(key, 0.1, policy=play.policy(number))
        retry = stage.log.wait(victim, "holds")
        stage.log.wait(victim, "received", after=retry["t"])
        stage.log.wait(victim, "released", after=retry["t"])
        stage.kill_worker(doomed)
        heir = stage.worker(queue, concurrency=1, environment=environment)
        second = stage.log.wait(victim, "start", after=first["t"])
        if second["fence"] != first["fence"]:
            raise AssertionError(f"{victim} came back with another fence")
        stage.log.wait(waiter, "done")
        heir.stop()

    play.lanes(act, lanes=2)


def stopped_holder(play: Play) -> None:
    """SIGSTOP of a holder past its lease, then SIGCONT while the next holder is at work and others wait."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        policy = play.policy(number)
        victim = play.send(key, LONG_S, chance.choice(["va", "vb"]), lease=1.0)
        start = stage.log.wait(victim, "start")
        rival = play.send(key, 1.5, policy=policy, lease=1.0)
        stage.log.wait(rival, "conflict")
        with stage.excused(pid=start["pid"]):
            stopped = time.monotonic()
            os.kill(start["pid"], signal.SIGSTOP)
            try:
                taken = stage.log.wait(rival, "start")
                play.recovered(taken["t"] - stopped)
                third = play.send(key, 0.3, policy=policy, lease=1.0)
                stage.log.wait(third, "conflict", "start")
                time.sleep(chance.uniform(0, 0.4))
            finally:
                os.kill(start["pid"], signal.SIGCONT)
            woken = time.monotonic()
        stage.log.wait(victim, "failed", "done")
        stage.log.wait(third, "done")
        if taken["t"] > woken:
            raise AssertionError(f"{rival} began only when {victim} was woken")

    play.lanes(act)


def server_kill(play: Play) -> None:
    """kill -9 of the lock server and an empty restart, the broker living on; then exclusion holds again."""
    stage = play.stage
    stage.company()
    for number in range(play.count):
        chance = random.Random(f"{stage.seed}/{play.name}/{number}")
        keys = [f"k{lane}" for lane in range(3)]
        holders = {key: play.send(key, 3.0, chance.choice(["va", "vb"])) for key in keys}
        for holder in holders.values():
            stage.log.wait(holder, "start")
        policy = play.policy(number)
        waiters = {key: [play.send(key, 0.3, policy=policy) for _ in range(2)] for key in keys}
        for key in keys:
            stage.log.wait(waiters[key][0], "conflict")
        down = time.monotonic()
        with stage.excused(), stage.data_lost():
            stage.locks.stop()
            time.sleep(chance.choice([0.0, 0.3, LEASE_S + 0.5]))
            stage.locks.start(stage.locks.port)
        back = time.monotonic()
        play.struck()
        for key in keys:
            began = min(stage.log.wait(tid, "start", after=down)["t"] for tid in waiters[key])
            play.recovered(max(0.0, began - back))
            for waiter in waiters[key]:
                stage.log.wait(waiter, "done")
            stage.log.wait(holders[key], "failed", "done")


def bad_connection(play: Play) -> None:
    """Cuts, lost replies, delays and stalls between one worker and the lock server, not the rivals' own."""
    stage = play.stage
    stage.company()
    with Proxy(stage.locks.port) as proxy:
        far = stage.worker("far", concurrency=3, environment={"CHAOS_LOCKS": proxy.url()})
        # One lost reply is no reason to lose a lock; what comes at random is.
        _every_reply_lost(play, proxy)
        with stage.excused(worker=far):
            _random_faults(play, proxy)
        far.stop()


def _every_reply_lost(play: Play, proxy: Proxy) -> None:
    """The reply lost after the k-th command, for every k of a task's acquire, renewals and release."""
    stage = play.stage

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
    stopped = play.send("reply-take-over", LONG_S, "va", lease=1.0)
    pid = stage.log.wait(stopped, "start")["pid"]
    tid = play.send("reply-take-over", 1.3, "far", lease=1.0)
    fault = proxy.arm("drop_reply", containing=tid.encode(), answered=b"taken_over")
    with stage.excused(pid=pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            _check_unharmed(play, tid, 1.0)
            play.struck()
        finally:
            os.kill(pid, signal.SIGCONT)
    proxy.disarm(fault)


def _check_unharmed(play: Play, tid: str, wait_s: float) -> None:
    """Nobody is locked out by a lock that was granted unseen: neither its own task nor the next."""
    log = play.stage.log
    try:
        ended = log.wait(tid, "done", "failed")
        sent, start = log.find(tid, "sent")[0], log.wait(tid, "start")
        if start["t"] - sent["t"] > wait_s + 1.2:
            play.fail(f"{tid} began {start['t'] - sent['t']:.2f} s after it was sent, for want of a reply")
        name = sent["name"].partition("/")[2]
        follower = play.send(name, 0.0, lease=1.0)
        play.recovered(log.wait(follower, "start")["t"] - ended["t"])
    except AssertionError as error:
        play.fail(str(error))


def _random_faults(play: Play, proxy: Proxy) -> None:
    stage = play.stage

    def act(key: str, chance: random.Random, _number: int) -> bool:
        action, details = chance.choice(
            [
                ("cut_before", {"skip": chance.randrange(4)}),
                ("cut_after", {"skip": chance.randrange(4)}),
                ("drop_reply", {"skip": chance.randrange(4)}),
                ("delay", {"skip": chance.randrange(3), "seconds": chance.uniform(0, 1.0)}),
                ("delay_reply", {"answered": b"acquired", "seconds": chance.uniform(1.2, 1.8)}),
                ("delay_reply", {"answered": b"acquired", "seconds": chance.uniform(1.2, 1.8)}),
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
        stage.log.wait(victim, "received")
        # Long enough to be at work when the victim hears of its own lock.
        rivals = [play.send(name, chance.choice([0.1, 1.0]), lease=1.0) for _ in range(2)]
        if fault is None:
            time.sleep(chance.uniform(0, 0.6))
            proxy.cut()
        for tid in (victim, *rivals):
            stage.log.wait(tid, "done", "failed", patience=1.5)
        if fault is not None:
            proxy.disarm(fault)
        return fault is None or fault.struck > 0

    play.lanes(act)


def storm(play: Play) -> None:
    """SCRIPT FLUSH and CLIENT KILL ten times a second each, under load."""
    stage = play.stage
    stage.company()
    chance = random.Random(f"{stage.seed}/{play.name}")
    holders = [play.send(f"k{lane}", 2.5 * LEASE_S, chance.choice(["va", "vb"])) for lane in range(3)]
    for holder in holders:
        stage.log.wait(holder, "start")
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
    for waiter in waiters:
        stage.log.wait(waiter, "done")


def full_server(play: Play) -> None:
    """maxmemory reached under noeviction for more than a lease: who holds a lock keeps it, others wait."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        policy = play.policy(number)
        holder = play.send(key, 4.0, chance.choice(["va", "vb"]))
        brief = play.send(f"{key}-brief", 1.0, chance.choice(["va", "vb"]))
        start = stage.log.wait(holder, "start")
        stage.log.wait(brief, "start")
        waiters = [play.send(name, 0.1, policy=policy) for name in (key, f"{key}-brief")]
        for waiter in waiters:
            stage.log.wait(waiter, "conflict")
        with stage.lock_client() as client:
            client.config_set("maxmemory", 1)
            try:
                newcomer = play.send(f"{key}-new", 0.1)
                waiters.append(play.send(key, 0.1, policy=policy))
                wait_until(lambda: time.monotonic() > start["t"] + LEASE_S + 1.5, "a lease without memory")
            finally:
                client.config_set("maxmemory", 0)
        back = time.monotonic()
        play.recovered(stage.log.wait(newcomer, "start")["t"] - back)
        for tid in (holder, brief, *waiters, newcomer):
            stage.log.wait(tid, "done")

    play.lanes(act, lanes=1)


def skewed_workers(play: Play) -> None:
    """Workers whose clocks are 60 s fast and slow fight for the same keys."""
    stage = play.stage
    shim = clock_shim(stage.directory)
    clocks = {"fast": 60, "slow": -60}
    stage.company()
    stage.workers(
        **{queue: {"environment": _shifted(stage, shim, queue, by)} for queue, by in clocks.items()}
    )

    def act(key: str, chance: random.Random, number: int) -> None:
        # Each worker has a queue of its own: a countdown is a moment of the sender's clock.
        queues = ["fast", "slow", "q"]
        chance.shuffle(queues)
        first = play.send(key, LEASE_S + 0.5, queues[0])
        stage.log.wait(first, "start")
        rest = [
            play.send(key, 0.3, queue, policy=play.policy(number + place))
            for place, queue in enumerate(queues[1:])
        ]
        for tid in (first, *rest):
            stage.log.wait(tid, "done")

    play.lanes(act, lanes=2)
    for queue in clocks:
        stage.stop(queue)


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
                first = play.send("k", 3 * LEASE_S if not ahead else LONG_S, "j1")
                stage.log.wait(first, "start")
                waiters = [
                    play.send("k", 0.3, "j2", policy=play.policy(number + place)) for place in range(2)
                ]
                stage.log.wait(waiters[0], "conflict")
                if ahead:  # every lease is over at once
                    with stage.data_lost():
                        _set_clock(stage, "server", 120)
                else:
                    _set_clock(stage, "server", 0)
                play.struck()
                for tid in (first, *waiters):
                    stage.log.wait(tid, "done", "failed")
            play.settle("j2")
            for worker in workers.values():
                worker.stop()
        finally:
            stage.locks = usual


def revoked(play: Play) -> None:
    """Revoked before the start, while running, and with terminate by SIGTERM and by SIGKILL."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        # With a long lease, so that it is seen whether the lock was released or has run out.
        queue = chance.choice(["va", "vb"])
        how = number % 4
        if how == 0:
            victim = play.send(key, 0.1, queue, countdown=0.7)
            stage.log.wait(victim, "received")
            app.control.revoke(victim)
            stage.log.wait(victim, "revoked")
            return
        lease = 1.0 if how == 3 else 4.0
        victim = play.send(key, 0.7 if how == 1 else LONG_S, queue, lease=lease)
        start = stage.log.wait(victim, "start")
        waiter = play.send(key, 0.05, policy=play.policy(number), lease=lease)
        stage.log.wait(waiter, "conflict")
        before = time.monotonic()
        if how == 1:
            app.control.revoke(victim)
        elif how == 2:
            app.control.revoke(victim, terminate=True)
        else:
            app.control.revoke(victim, terminate=True, signal="SIGKILL")
            wait_until(lambda: not _runs(start["pid"]), f"the end of {start['pid']}")
            stage.note("kill", victim_pid=start["pid"], before=before, waiter=waiter)
        stage.log.wait(victim, "done", "revoked")
        began = stage.log.wait(waiter, "start", "done", "failed")
        if how == 2:
            play.recovered(began["t"] - before)
        # A revoke finds no call in the worker that has just been received for the second time.
        stage.log.wait(waiter, "done", "failed")
        if how == 2 and began["t"] - before > 2.0:
            raise AssertionError(
                f"{waiter} began only {began['t'] - before:.2f} s after the revoke of {victim}"
            )

    play.lanes(act)


def time_limits(play: Play) -> None:
    """A soft limit, a hard one, and a hard one of a body that does not listen to SIGTERM."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        limits = [{"soft_time_limit": 0.6}, {"time_limit": 0.6}, {"time_limit": 0.6, "deaf": True}]
        limit = limits[number % 3]
        lease = 4.0 if number % 3 == 0 else 1.0
        victim = play.send(key, LONG_S, chance.choice(["va", "vb"]), lease=lease, **limit)
        stage.log.wait(victim, "start")
        waiter = play.send(key, 0.05, policy=play.policy(number), lease=lease)
        failed = stage.log.wait(victim, "failed")
        began = stage.log.wait(waiter, "start", "failed")
        took = began["t"] - failed["t"]
        play.recovered(took)
        if took > (2.0 if number % 3 == 0 else lease + 1.2):
            raise AssertionError(f"{waiter} began only {took:.2f} s after the limit of {victim}")

    play.lanes(act)


def shutdowns(play: Play) -> None:
    """Warm: the body ends under its lock. Soft: it does if it fits. Cold: body and lock end at once."""
    stage = play.stage
    stage.company()
    length_s = 2.5 * LEASE_S

    def act(key: str, _chance: random.Random, number: int) -> None:
        how = ("warm", "soft", "cold", "cold-late")[number % 4]
        cold = how.startswith("cold")
        environment = {"CHAOS_SOFT_SHUTDOWN_S": "10"} if how == "soft" else {}
        queue = f"{how}-{key}-{play.policy(0)}"
        worker = stage.worker(queue, concurrency=2, environment=environment)
        task = "late" if how == "cold-late" else "work"
        holder = play.send(key, LONG_S if cold else length_s, queue, task=task)
        stage.log.wait(holder, "start")
        waiter = play.send(key, 0.1, policy=play.policy(number))
        stage.log.wait(waiter, "conflict")
        before = time.monotonic()
        os.kill(worker.process.pid, signal.SIGTERM if how == "warm" else signal.SIGQUIT)
        if cold:
            stage.note("cold", victim_worker=f"{worker.name}@test", before=before)
        else:
            stage.log.wait(holder, "done")
        began = stage.log.wait(waiter, "start", "done", after=before)
        if cold:
            play.recovered(began["t"] - before)
        wait_until(lambda: worker.process.poll() is not None, f"the end of {worker.name}")
        if how == "cold-late":
            # What was not acknowledged is back in the queue.
            heir = stage.worker(queue, concurrency=1)
            stage.log.wait(holder, "done")
            heir.stop()

    play.lanes(act)


def short_lives(play: Play) -> None:
    """max_tasks_per_child: the pool's processes are replaced all the time, and every one renews."""
    stage = play.stage
    stage.company()
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
    for tid in tids:
        stage.log.wait(tid, "done", patience=3)
        pids |= {start["pid"] for start in stage.log.find(tid, "start")}
    for _ in pids:
        play.struck()
    worker.stop()


def pools(play: Play) -> None:
    """prefork, solo, threads, gevent, eventlet: each renews for two leases, then is killed in mid-task."""
    stage = play.stage
    stage.company()
    kinds = ("prefork", "solo", "threads", "gevent", "eventlet")

    def act(key: str, chance: random.Random, number: int) -> None:
        pool = kinds[number % len(kinds)]
        queue = f"pool-{pool}-{number}"
        worker = stage.worker(queue, pool=pool, concurrency=1 if pool == "solo" else 2)
        renewing = play.send(key, 2.2 * LEASE_S, queue)
        stage.log.wait(renewing, "start")
        rivals = [play.send(key, 0.1, policy=policy) for policy in ("retry", "skip", "wait", "join")]
        if pool != "solo":
            rivals += [play.send(key, 0.1, queue, policy=policy) for policy in ("wait", "join")]
        for tid in (renewing, *rivals):
            stage.log.wait(tid, "done")
        victim = play.send(key, LONG_S, queue, lease=1.0)
        stage.log.wait(victim, "start")
        waiter = play.send(key, 0.05, chance.choice(["q", "remote"]), lease=1.0)
        stage.log.wait(waiter, "conflict")
        stage.kill_worker(worker, waiter)
        stage.log.wait(waiter, "done")

    play.lanes(act, lanes=5)


def waiting_worker_kill(play: Play) -> None:
    """kill -9 of the worker of a call that waits: in line, woken with its pool busy, and in its body."""
    stage = play.stage
    stage.company()
    environment = {"CHAOS_VISIBILITY_S": "4"}

    def act(key: str, chance: random.Random, number: int) -> None:
        queue = f"parked-{key}"
        doomed = stage.worker(queue, concurrency=1, environment=environment)
        how = ("in line", "woken", "in its body")[number % 3]
        policy = "wait" if how == "in its body" else play.policy(number // 3)
        # A courier that waits for the busy pool would leave no room for the woken call in the worker.
        holder_s = 0.7 if how == "woken" else 2.0
        holder = play.send(key, holder_s, chance.choice(["va", "vb"]), lease=1.0)
        stage.log.wait(holder, "start")
        task, length_s = ("late", LONG_S) if how == "in its body" else ("work", 0.1)
        waiter = play.send(key, length_s, queue, policy=policy, task=task, lease=1.0)
        stage.log.wait(waiter, "waiting")
        if how == "woken":
            blocker = play.send(f"{key}-blocker", LONG_S, queue)
            stage.log.wait(blocker, "start")
            ended = stage.log.wait(holder, "end")
            stage.log.wait(waiter, "received", after=ended["t"])
        elif how == "in its body":
            stage.log.wait(waiter, "start")
        before = time.monotonic()
        stage.kill_worker(doomed)
        heir = stage.worker(queue, concurrency=1, environment=environment)
        stage.log.wait(waiter, "done")
        play.recovered(time.monotonic() - before)
        heir.stop()

    play.lanes(act, lanes=3)


def killed_before_waking(play: Play) -> None:
    """kill -9 of whoever has handed a lock over and not yet said so: a pool process, or all its worker."""
    stage = play.stage
    stage.company()

    def act(key: str, chance: random.Random, number: int) -> None:
        queue, order = f"mortal-{key}", stage.directory / f"mortal-{key}"
        worker = stage.worker(queue, concurrency=1, environment={"CHAOS_DIES_BEFORE_WAKING": str(order)})
        victim = ("worker", "child")[number % 2]
        policy = play.policy(number // 2)
        holder = play.send(key, 0.8, queue, lease=1.0)
        start = stage.log.wait(holder, "start")
        waiter = play.send(key, 0.1, chance.choice(["q", "remote"]), policy=policy, lease=1.0)
        stage.log.wait(waiter, "waiting")
        order.write_text(victim)
        ended = stage.log.wait(holder, "end")
        wait_until(lambda: not _runs(start["pid"]), f"the end of {start['pid']}")
        victims = (
            {"victim_worker": f"{worker.name}@test"} if victim == "worker" else {"victim_pid": start["pid"]}
        )
        stage.note("kill", before=ended["t"], **victims)
        if policy == "join":
            play.joined(waiter, since=ended["t"], within_s=1.0 + JOIN_S)
        else:
            began = stage.log.wait(waiter, "start")
            took = began["t"] - ended["t"]
            play.recovered(took)
            if took > 1.0 + SLACK_S + POLL_S:
                raise AssertionError(f"{waiter} began only {took:.2f} s after the release by {holder}")
        worker.stop()

    play.lanes(act)


def late_wakes(play: Play) -> None:
    """A woken call finds its pool busy until long after its lock was kept for it; so it is woken again."""
    stage = play.stage
    stage.company()
    stage.workers(**{f"busy-k{lane}": {"concurrency": 1} for lane in range(2)})

    def act(key: str, chance: random.Random, number: int) -> None:
        queue, policy = f"busy-{key}", play.policy(number)
        holder = play.send(key, 1.5, chance.choice(["va", "vb"]), lease=1.0)
        stage.log.wait(holder, "start")
        waiter = play.send(key, 0.1, queue, policy=policy, lease=1.0)
        stage.log.wait(waiter, "waiting")
        blocker = play.send(f"{key}-blocker", 3.2, queue)
        stage.log.wait(blocker, "start")
        next_in_line = play.send(key, 0.1, policy="wait", lease=1.0)
        for tid in (blocker, waiter, next_in_line):
            stage.log.wait(tid, "done")
        # Whatever was sent in vain is gone once the next has ended.
        stage.log.wait(play.send(key, 0.0, queue), "done")

    play.lanes(act, lanes=2)
    for lane in range(2):
        stage.stop(f"busy-k{lane}")


_WAITS = ("wait", "join")
_ALL = (*_WAITS, "retry")

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
    "worker clocks +-60 s": Scenario(skewed_workers, 6, 30, ("client_clock",), _ALL, needs=("cc",)),
    "server clock +-120 s": Scenario(
        clock_jump, 4, 20, ("clock_fence",), _ALL, own_stage=True, needs=("cc",)
    ),
    "revoke": Scenario(revoked, 12, 60, ("no_release_on_error",), _ALL),
    "time limits": Scenario(time_limits, 9, 60, ("no_release_on_error",), _ALL),
    "warm, soft, cold shutdown": Scenario(shutdowns, 4, 40, ("no_renewal",), _ALL, teeth=2),
    "max_tasks_per_child": Scenario(short_lives, 24, 200, ("no_lock",), teeth=6),
    "every pool": Scenario(pools, 5, 25, ("no_renewal",), teeth=5, needs=("gevent", "eventlet")),
    "kill -9 of a pool child, wait": Scenario(
        child_kill, 8, 200, ("no_wake", "lost_wake"), policies=("wait",)
    ),
    "kill -9 of a pool child, join": Scenario(child_kill, 4, 100, policies=("join",)),
    "kill -9 of a worker, wait and join": Scenario(
        worker_kill, 2, 40, ("no_courier",), policies=_WAITS, teeth=2
    ),
    "kill -9 of a waiting worker": Scenario(
        waiting_worker_kill, 3, 60, ("claimed_once",), policies=_WAITS, teeth=3
    ),
    "kill -9 before the wake-up": Scenario(
        killed_before_waking, 4, 60, ("no_courier",), policies=_WAITS, teeth=2
    ),
    "woken late": Scenario(late_wakes, 2, 20, ("no_ticket", "join_first"), policies=_WAITS),
    "SIGSTOP past the lease, wait": Scenario(stopped_holder, 4, 50, ("no_courier",), policies=("wait",)),
    "lock server killed, wait": Scenario(server_kill, 1, 20, ("no_courier",), policies=("wait",), teeth=1),
}


def _shifted(stage: Stage, shim: Path, name: str, seconds: int) -> dict[str, str]:
    """The environment of a process whose wall clock is shifted."""
    _set_clock(stage, name, seconds)
    return {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(stage.directory / f"{name}.clock")}


def _set_clock(stage: Stage, name: str, seconds: int) -> None:
    path = stage.directory / f"{name}.clock"
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("q", seconds))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
