"""Processes with bare locks, and what befalls them all the time: the faults that are not of one call."""

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.names import permit_names, permits_name
from tests.chaos.bare import LEASES_S, Duty, be_bare
from tests.chaos.nursery import Fork
from tests.chaos.stage import Play
from tests.proxy import Fault, Proxy

PROCESSES, PROXIED = 8, 4
_LEASE_S = max(LEASES_S)
_TICK_S, _LOOK_S = 0.005, 0.7
_ANSWERS = (b"acquired", b"taken_over", b"released", b"renewed")
# A record that is lost while the lock is free, as it is when its retention ends.
_FORGET = "return redis.call('EXISTS', KEYS[1]) == 0 and redis.call('DEL', KEYS[2]) or 0"


@dataclass
class _Process:
    fork: Fork
    duty: Duty
    continue_at: float = 0.0


class Crowd:
    """Some reach the server by way of the proxy, and all fight for a few locks of 100 to 250 ms."""

    def __init__(
        self, play: Play, proxy: Proxy, admin: redis.Redis, locks: int, limit: int, rate: Any
    ) -> None:
        self._play, self._proxy, self._admin = play, proxy, admin
        self._random = random.Random(f"{play.stage.seed}/{play.name}")
        self._locks = tuple(f"chaos:{{{play.name}.{number}}}" for number in range(locks))
        self._terms: dict[str, Any] = {"limit": limit, "rate": rate}
        # A lock that more want than may have it is never left alone.
        self._heirs = "retry" if 2 * locks * limit < PROCESSES and not rate else ""
        self._processes: list[_Process] = []
        self._faults: list[Fault] = []
        self._started, self._memory_back_at = 0, float("inf")

    def live(self, count: int) -> None:
        """Until so many have been killed that had a lock; then each lock can be had, and nothing is left."""
        try:
            for number in range(PROCESSES):
                self._start(direct=number >= PROXIED)
            if self._suffer(count):
                self._drain()
                self._close()
        finally:
            for process in self._processes:
                process.fork.kill()
                process.fork.wait()

    def _start(self, *, direct: bool) -> None:
        self._started += 1
        stage = self._play.stage
        port = stage.locks.port if direct else self._proxy.port
        about = self._locks, stage.history, stage.mutant
        duty = Duty(self._play.name, self._started, port, direct, *about, **self._terms)
        self._processes.append(_Process(Fork(be_bare, duty), duty))

    def _suffer(self, count: int) -> bool:
        """Whether nothing was found that is broken, of which only flawed processes are asked at once."""
        events: dict[Callable[[], None], float] = {  # and the mean seconds between two
            self._kill: 0.25, self._stop: 0.2, self._break_connection: 0.1,
            self._flush: 0.25, self._fill: 3.0, self._forget: 0.3, self._cut_all: 1.0,
        }  # fmt: skip
        now = time.monotonic()
        due = {event: now + self._after(mean) for event, mean in events.items()}
        play, stage = self._play, self._play.stage
        look_at, struck, give_up = now + _LOOK_S, 0, now + stage.patience_s
        while play.injected < count and not stage.log.given_up:
            time.sleep(_TICK_S)
            now = time.monotonic()
            self._let_go_on(now)
            for event in [event for event, at in due.items() if at <= now]:
                event()
                due[event] += self._after(events[event])  # what a busy machine delays is made up for
            if stage.mutant and now >= look_at:
                if play.is_found_out():
                    return False
                look_at = time.monotonic() + _LOOK_S
            if play.injected > struck:
                struck, give_up = play.injected, now + stage.patience_s
            elif now > give_up:
                raise AssertionError(f"nobody has had a lock for {stage.patience_s:g} s")
        return True

    def _after(self, mean: float) -> float:
        return mean * self._random.uniform(0.3, 1.7)

    def _kill(self) -> None:
        process, holds = self._choose(self._processes)
        ended = process.fork.poll()
        if ended is not None:
            raise AssertionError(f"{process.duty.name} has ended with {ended}")
        self._play.stage.kill_bare(process.fork, process.duty.name, heirs=self._heirs)
        self._processes.remove(process)
        self._start(direct=process.duty.direct)
        self._play.counts["kills"] += 1
        if holds:
            self._play.struck()

    def _choose(self, among: list[_Process]) -> tuple[_Process, bool]:
        """Every other time a holder; and whether it is one."""
        record = self._admin.get(self._any_permit()[1]) or ""
        holders = [process for process in among if str(record).startswith(f"{process.duty.name}-")]
        if holders and self._random.random() < 0.5:
            return holders[0], "\nrunning\n" in str(record)
        process = self._random.choice(among)
        return process, False

    def _stop(self) -> None:
        running = [process for process in self._processes if not process.continue_at]
        if len(running) > 1:
            process, _ = self._choose(running)
            process.fork.send_signal(signal.SIGSTOP)
            process.continue_at = time.monotonic() + self._random.uniform(0.3, 2.5) * _LEASE_S
            self._play.counts["stops"] += 1

    def _let_go_on(self, now: float) -> None:
        for process in self._processes:
            if process.continue_at and now >= process.continue_at:
                process.fork.send_signal(signal.SIGCONT)
                process.continue_at = 0.0
        if now >= self._memory_back_at:
            self._admin.config_set("maxmemory", 0)
            self._memory_back_at = float("inf")

    def _break_connection(self) -> None:
        delay_s, reply_delay_s = self._random.uniform(0, _LEASE_S), self._random.uniform(0.3, 1.5) * _LEASE_S
        delayed = self._random.choice([b"acquired", b"taken_over", b"renewed"])
        faults: list[dict[str, Any]] = [
            *({"action": action} for action in ("cut_before", "cut_after", "drop_reply", "stall")),
            *({"action": "drop_reply", "answered": verb} for verb in _ANSWERS),
            {"action": "delay", "seconds": delay_s},
            {"action": "delay_reply", "answered": delayed, "seconds": reply_delay_s},
        ]
        # No backlog: what found nothing to strike gives way to a new one.
        for fault in self._faults[:-4]:
            self._proxy.disarm(fault)
        self._faults.append(self._proxy.arm(**self._random.choice(faults)))

    def _flush(self) -> None:
        self._admin.script_flush()
        self._play.counts["flushes"] += 1

    def _cut_all(self) -> None:
        self._play.counts["connections cut"] += self._proxy.cut()

    def _fill(self) -> None:
        """For a while no command that needs memory is served."""
        now, seconds = time.monotonic(), self._random.uniform(0.05, 0.3)
        self._play.stage.note("excuse", since=now, until=now + seconds + 0.1, of_worker="", of_pid=0)
        self._admin.config_set("maxmemory", 1)
        self._memory_back_at = now + seconds
        self._play.counts["times without memory"] += 1

    def _forget(self) -> None:
        if self._terms["limit"] > 1 and self._random.random() < 0.3:
            self._admin.delete(permits_name(self._locks[0]))
        with suppress(redis.ResponseError):  # it may have no memory for a script of its own just now
            self._play.counts["records forgotten"] += self._admin.eval(_FORGET, 2, *self._any_permit())

    def _any_permit(self) -> tuple[str, str]:
        """The names of a permit and of its record."""
        return permit_names(self._random.choice(self._locks), self._random.randrange(self._terms["limit"]))

    def _drain(self) -> None:
        self._let_go_on(float("inf"))
        for fault in self._faults:
            self._proxy.disarm(fault)
        self._play.counts["connection faults"] += sum(fault.struck for fault in self._faults)
        for process in self._processes:
            process.fork.terminate()
        for process in self._processes:
            code = process.fork.wait()
            if code not in (0, -signal.SIGTERM):  # which it hears of as soon as it is ready
                raise AssertionError(f"{process.duty.name} has ended with {code}")

    def _close(self) -> None:
        """Each lock can be had, with all its permits at a time; who was killed last is taken over."""
        for name in self._locks:
            lock = SetnxLock(self._admin, name, lease=60, **self._terms)
            held = [lock.acquire(self._play.stage.patience_s).lock for _ in range(self._terms["limit"])]
            if None in held:
                self._play.fail(f"{name} cannot be had any more: {held}")
            for permit in filter(None, held):
                permit.release()
        self._play.look_at_what_is_left()
        paced = [record for record in self._play.stage.log.records if record.get("paced")]
        self._play.counts["refused for their pace"] += len(paced)
        kinds = ["connection faults", "stops", "flushes"]
        kinds += ["refused for their pace"] if self._terms["rate"] else []
        for kind in kinds:
            if not self._play.counts[kind]:
                self._play.fail(f"no {kind}: that shows little")
