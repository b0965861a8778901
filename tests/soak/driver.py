"""The driver of a soak: starts the processes, then kills, stops, cuts and flushes until time is up."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

from celery_setnx.lock.names import permit_names, permits_name
from examples.embedded import EmbeddedServer
from tests.proxy import Fault, Proxy
from tests.soak.checker import check
from tests.soak.history import History, Report, now_us, read
from tests.soak.holder import UNMUTATED, Duty, hold
from tests.soak.nursery import Fork

MUTANT_S = 120.0
_TICK_S = 0.005
_LAG_S = 0.05
_LOOK_EVERY_S = 0.7
_ANSWERS = (b"acquired", b"taken_over", b"released", b"renewed")
_DRIVER, _CLOSER = -1, -2
# A record that is lost while the lock is free, as it is when its retention ends.
_FORGET = "return redis.call('EXISTS', KEYS[1]) == 0 and redis.call('DEL', KEYS[2]) or 0"


@dataclass(frozen=True)
class Scenario:
    """What a soak is made of. Rates are mean seconds between two events; 0 is never."""

    flaw: str = "none"  # what is wrong with the lock in every process
    processes: int = 8
    proxied: int = 4  # of them reach the server by way of the proxy
    locks: int = 3
    limit: int = 1  # how many may hold a lock at a time
    rate: tuple[int, float] | None = None  # how many may start within how many seconds
    leases: tuple[float, ...] = (0.15, 0.15, 0.1, 0.25)  # each attempt chooses one
    kill: float = 0.25  # kill -9 of a process, every other time of a holder
    stop: float = 0.2  # SIGSTOP for 0.3 to 2.5 leases
    fault: float = 0.1  # a connection of the proxy cut, delayed or stalled
    flush: float = 0.25  # SCRIPT FLUSH
    full: float = 3.0  # no memory for up to 0.3 s
    forget: float = 0.3  # the record of a free lock lost


# Several permits of one lock: never more than three hold it.
PERMITS = Scenario(locks=1, limit=3)
# And at a pace: never more than five have it within any half second.
PACED = replace(PERMITS, rate=(5, 0.5))

# The same soak; some with other weights, so that what the mutant breaks comes up within seconds.
MUTANTS: dict[str, Scenario] = {
    "classic recipe, unequal timeouts": Scenario(
        "classic_recipe", proxied=0, locks=1, leases=(0.02, 0.16), kill=0.03, fault=0, full=0, forget=0
    ),
    "plain DEL": Scenario("plain_del"),
    "INCR fence": Scenario("counting_fence"),
    "no deadline check after acquire": Scenario("no_deadline_check", proxied=8, kill=0.5, fault=0.05),
    "milliseconds floored": Scenario("floored_milliseconds"),
    "GETSET before PEXPIREAT": Scenario("greedy_renewal", full=0.5),
    "expired lease revived": Scenario("reviving_renewal", processes=4, proxied=0, locks=8, stop=0.1),
    "renewal of another's lock": Scenario("careless_renewal", locks=2, kill=1.0, stop=0.08),
    "take-over 10 ms early": Scenario("take_over_10_ms_early"),
    "a permit too many": replace(PERMITS, flaw="one_permit_more"),
    "a start too many": replace(PACED, flaw="one_start_more"),
    "permits taken over 10 ms early": replace(PERMITS, flaw="take_over_10_ms_early"),
}


@dataclass
class _Process:
    fork: Fork
    duty: Duty
    continue_at: float = 0.0


@dataclass
class Soak:
    """One soak on a server of its own."""

    scenario: Scenario
    history: Path
    seed: int = 0
    _processes: list[_Process] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _started: int = 0

    def run(self, seconds: float, *, stop_at_violation: bool = False) -> Report:
        """Soak, then let every process end, acquire each lock once more, and check the history."""
        self._random = random.Random(self.seed)
        self._notes = History(self.history, _DRIVER)
        self._locks = [f"lock.{number}" for number in range(self.scenario.locks)]
        with (
            EmbeddedServer() as server,
            Proxy(server.port) as proxy,
            redis.Redis(port=server.port) as admin,
        ):
            self._admin, self._port, self._proxy = admin, server.port, proxy
            try:
                for number in range(self.scenario.processes):
                    self._start(direct=number >= self.scenario.proxied)
                found = self._drive(seconds, stop_at_violation)
                if found is None:
                    self._drain()
            finally:
                self._end()
            return found or self._check(final=True)

    def _check(self, *, final: bool) -> Report:
        scenario = self.scenario
        awaited = scenario.processes > 2 * scenario.locks * scenario.limit and scenario.rate is None
        about = {"awaited": awaited, "limit": scenario.limit, "rate": scenario.rate}
        return check(read(self.history), final=final, **about)

    def _start(self, *, direct: bool, once: bool = False) -> _Process:
        self._started += 1
        port = self._port if direct else self._proxy.port
        uid = _CLOSER if once else self._started
        scenario = self.scenario
        about = self.history, scenario.flaw, once, scenario.limit, scenario.rate
        duty = Duty(uid, port, direct, self._locks, scenario.leases, *about)
        process = _Process(Fork(hold, duty), duty)
        self._processes.append(process)
        return process

    def _drive(self, seconds: float, stop_at_violation: bool) -> Report | None:
        scenario = self.scenario
        events: dict[Callable[[], None], float] = {
            self._kill: scenario.kill,
            self._stop: scenario.stop,
            self._break_connection: scenario.fault,
            self._flush: scenario.flush,
            self._fill: scenario.full,
            self._forget: scenario.forget,
        }
        started = last = time.monotonic()
        due = {event: started + self._after(mean) for event, mean in events.items() if mean}
        look_at = started + _LOOK_EVERY_S if stop_at_violation else float("inf")
        self._memory_back_at = float("inf")
        while last < started + seconds:
            time.sleep(_TICK_S)
            now = time.monotonic()
            if now - last > _LAG_S:
                self._notes.note("lag", us=now_us() - int((now - last) * 1e6), seconds=now - last)
            self._continue(now)
            for event in [event for event, at in due.items() if at <= now]:
                event()
                due[event] += self._after(events[event])  # what a busy machine delays is made up for
            if time.monotonic() >= look_at:
                report = self._check(final=False)
                if report.violations:
                    return report
                look_at = time.monotonic() + _LOOK_EVERY_S
                now = time.monotonic()
            last = now
        return None

    def _after(self, mean: float) -> float:
        return mean * self._random.uniform(0.3, 1.7)

    def _kill(self) -> None:
        process = self._choose(self._processes)
        before, us = time.monotonic(), now_us()
        process.fork.kill()
        if process.fork.wait() == UNMUTATED:
            raise RuntimeError(f"{self.scenario.flaw} does not apply to the package any more")
        self._notes.note("kill", victim=process.duty.uid, before=before, us=us)
        self._processes.remove(process)
        self._start(direct=process.duty.direct)

    def _choose(self, among: list[_Process]) -> _Process:
        """Every other time a holder."""
        record = self._admin.get(self._any_permit()[1]) or b""
        holders = [p for p in among if record.startswith(f"{p.duty.uid}-".encode())]
        return self._random.choice(holders if holders and self._random.random() < 0.5 else among)

    def _stop(self) -> None:
        running = [process for process in self._processes if not process.continue_at]
        if len(running) < 2:
            return
        process = self._choose(running)
        seconds = self._random.uniform(0.3, 2.5) * max(self.scenario.leases)
        process.fork.send_signal(signal.SIGSTOP)
        process.continue_at = time.monotonic() + seconds
        self._notes.note("stop", victim=process.duty.uid, seconds=seconds)

    def _continue(self, now: float) -> None:
        for process in self._processes:
            if process.continue_at and now >= process.continue_at:
                process.fork.send_signal(signal.SIGCONT)
                process.continue_at = 0.0
        if now >= self._memory_back_at:
            self._admin.config_set("maxmemory", 0)
            self._memory_back_at = float("inf")

    def _break_connection(self) -> None:
        lease = max(self.scenario.leases)
        delay_s, reply_delay_s = self._random.uniform(0, lease), self._random.uniform(0.3, 1.5) * lease
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
        self._notes.note("flush")

    def _fill(self) -> None:
        """For a while no command that needs memory is served."""
        seconds = self._random.uniform(0.05, 0.3)
        self._notes.note("full", us=now_us(), seconds=seconds + 2 * _LAG_S)
        self._admin.config_set("maxmemory", 1)
        self._memory_back_at = time.monotonic() + seconds

    def _forget(self) -> None:
        name, record = self._any_permit()
        if self.scenario.limit > 1 and self._random.random() < 0.3:
            self._admin.delete(permits_name(self._locks[0]))
        # The server may have no memory for a script of its own just now.
        with suppress(redis.ResponseError):
            if self._admin.eval(_FORGET, 2, name, record):
                self._notes.note("forgot", name=name)

    def _any_permit(self) -> tuple[str, str]:
        """The names of a permit and of its record."""
        limit = self.scenario.limit
        number = self._random.randrange(limit) if limit > 1 else 0
        return permit_names(self._random.choice(self._locks), number)

    def _drain(self) -> None:
        self._continue(float("inf"))
        for fault in self._faults:
            self._proxy.disarm(fault)
        for process in self._processes:
            process.fork.terminate()
        give_up = time.monotonic() + 10
        for process in self._processes:
            self._await_end(process, give_up - time.monotonic())
        # Whoever was killed last is taken over now, within a lease.
        self._await_end(self._start(direct=True, once=True), 30)
        for key in self._admin.scan_iter():
            if self._admin.pttl(key) == -1 and self.scenario.flaw != "classic_recipe":
                self._notes.note("endless", key=key.decode())
        self._notes.note("proxy", struck=sum(fault.struck for fault in self._faults))

    def _await_end(self, process: _Process, within_s: float) -> None:
        try:
            process.fork.wait(within_s)
        except subprocess.TimeoutExpired:
            self._notes.note("crash", error=f"process {process.duty.uid} did not end")

    def _end(self) -> None:
        for process in self._processes:
            process.fork.kill()
        for process in self._processes:
            process.fork.wait()


def soak(scenario: Scenario, seconds: float, seed: int = 0, *, stop_at_violation: bool = False) -> Report:
    """One soak whose history is thrown away, unless it shows a violation that was not wanted."""
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        history = Path(directory, "history")
        report = Soak(scenario, history, seed).run(seconds, stop_at_violation=stop_at_violation)
        if report.violations and not stop_at_violation:
            kept = Path(tempfile.gettempdir(), f"soak-history-{os.getpid()}-{seed}.jsonl")
            kept.write_bytes(history.read_bytes())
            report.violations.append(f"the history is kept in {kept}")
        return report


def catch(name: str, seed: int) -> list[str]:
    """The violations by which a mutant is found out; none if it is not in time."""
    return soak(MUTANTS[name], MUTANT_S, seed, stop_at_violation=True).violations
