"""The demo: real workers, a real server, a real kill -9, and a check of everything that is shown.

make demo
REDIS_URL=redis://localhost:6379/0 make demo     # a server of your own; its own keys are removed
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import redis
from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from celery_setnx import AlreadyRunning, CallOutcome, is_skipped, superseded_by
from examples.embedded import EmbeddedServer

CALLS, KEYS, THREADS = 100, 10, 10
WISHES, ITEMS = 1000, 6
TYPED, KEY_S = "hello", 0.2
SYNCS, LIMIT = 9, 3
ORDERS, STARTS, PERIOD_S = 10, 5, 1.5
WORKERS, PROCESSES = ("alpha", "beta"), 4
DEADLINE_S = 60.0
WIDTH, TRACK, NARROW = 100, 70, 48

Entry = dict[str, Any]
Wait = Callable[[Callable[[], Any], str], Any]
Check = tuple[bool, str, str]

# Kills the worker and its pool when its standard input ends: with the demo, even by kill -9.
_SUPERVISOR = """
import os, signal, subprocess, sys, threading
worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
print(worker.pid, flush=True)
def kill():
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
threading.Thread(target=lambda: (os.read(0, 1), kill()), daemon=True).start()
worker.wait()
kill()
"""


class Missed(Exception):
    """What had to happen did not happen in time."""


class Worker:
    """A prefork worker that serves the queue of all and a queue of its own."""

    def __init__(self, name: str, log: Path) -> None:
        self.node = f"{name}@demo"
        self.log = log
        self._killed = False
        command = [
            sys.executable, "-m", "celery", "-A", "examples.demo_app", "worker",
            "-n", self.node, "-Q", f"any,{name}", "-P", "prefork", "-c", str(PROCESSES), "-l", "INFO",
            "--without-gossip", "--without-mingle", "--without-heartbeat",
        ]  # fmt: skip
        with log.open("wb") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-S", "-c", _SUPERVISOR, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # Ctrl-C is for the demo alone
            )
        assert self._supervisor.stdout is not None
        self.pid = int(self._supervisor.stdout.readline())

    def kill(self) -> None:
        """kill -9 of the worker and its pool, as a dying host would."""
        self._killed = True
        os.killpg(self.pid, signal.SIGKILL)

    def last_line(self) -> str:
        return self.log.read_text(errors="replace").strip().rpartition("\n")[2]

    def has_failed(self) -> bool:
        return not self._killed and self._supervisor.poll() is not None

    def close(self) -> None:
        self._supervisor.communicate()

    def log_line(self, *texts: str) -> str:
        """The first line of its log that holds the texts, without time and process; else nothing."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.partition("] ")[2] for line in lines if all(text in line for text in texts)), "")


class History:
    """What the workers recorded, in the server's order."""

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key
        self.entries: list[Entry] = []

    def read(self) -> None:
        new = self._client.lrange(self._key, len(self.entries), -1)
        self.entries.extend(json.loads(entry) for entry in new)

    def of(self, what: str, **wanted: Any) -> list[Entry]:
        return [
            entry
            for entry in self.entries
            if entry["what"] == what and all(entry.get(name) == value for name, value in wanted.items())
        ]

    def words(self, task_id: str) -> list[str]:
        """What happened to one call, in order."""
        return [entry["what"] for entry in self.entries if entry.get("task_id") == task_id]

    def place(self, what: str, task_id: str) -> int:
        """When it happened to the call, as a place in the history."""
        return self.entries.index(self.of(what, task_id=task_id)[0])

    def bodies(self, **wanted: Any) -> list[tuple[float, float | None]]:
        """When bodies started and ended; None while they run."""
        ends = {entry["task_id"]: entry["at"] for entry in self.of("end", **wanted)}
        return [(entry["at"], ends.get(entry["task_id"])) for entry in self.of("start", **wanted)]


class Demo:
    """Seven scenes, what they show, and whether it was true."""

    def __init__(self, console: Console, app: Any, history: History, alpha: Worker, beta: Worker) -> None:
        self.console = console
        self.app = app
        self.history = history
        self.alpha = alpha
        self.beta = beta
        self.checks: list[Check] = []

    def check(self, claim: str, is_true: bool, seen: str) -> None:
        self.checks.append((is_true, claim, seen))

    @contextmanager
    def shown(self, picture: Callable[[], RenderableType]) -> Iterator[Wait]:
        """A live picture, and a function that keeps it up to date until a condition holds."""
        live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

        def draw(last: bool = False) -> None:
            self.history.read()
            if live is not None:
                live.update(indented(picture()), refresh=True)
            elif last:
                self.console.print(indented(picture()))

        def wait(condition: Callable[[], Any], what: str) -> Any:
            give_up = time.monotonic() + DEADLINE_S
            draw()
            while not (value := condition()):
                for worker in (self.alpha, self.beta):
                    if worker.has_failed():
                        raise Missed(f"{what}: {worker.node} has ended; {worker.last_line()}")
                if time.monotonic() > give_up:
                    raise Missed(f"{what}: not within {DEADLINE_S:g} s")
                time.sleep(0.05)
                draw()
            self.history.read()
            return value

        with live or nullcontext():
            try:
                yield wait
            except Missed:
                draw(last=True)
                raise
            draw(last=True)

    def title(self, number: int, title: str, remark: str) -> None:
        heading = Text.assemble((f" {number} ", "bold reverse"), " ", (title, "bold"), "  ", (remark, "dim"))
        self.console.print("", heading, "", sep="\n")

    def start(self) -> None:
        """Both workers come up."""
        history = self.history
        with self.shown(lambda: workers_picture(len(history.of("ready")))) as wait:
            wait(lambda: len(history.of("ready")) == len(WORKERS), "both workers are ready")

    def fan_out(self) -> None:
        """Scene 1: one key in single file, different keys side by side."""
        self.title(
            1, f"{CALLS} calls over {KEYS} keys, from {THREADS} threads", "one row per key, █ = a body runs"
        )
        history, app = self.history, self.app
        began = app.server_time()

        def send(_thread: int) -> list[str]:
            return [app.charge.delay(account).id for account in range(KEYS)]

        with (
            ThreadPoolExecutor(THREADS) as threads,
            self.shown(lambda: fan_out_picture(history, began, app.server_time())) as wait,
        ):
            sent = threads.map(send, range(THREADS))
            wait(lambda: len(history.of("end")) >= CALLS, f"all {CALLS} calls have run")
            wait(lambda: len(history.of("released") + history.of("lost")) >= CALLS, "all locks are released")
            calls = [task_id for ids in sent for task_id in ids]

        ran = [entry["task_id"] for entry in history.of("start")]
        waits = len(history.of("conflict"))
        overlaps, peak = overlaps_and_peak(history.entries)
        acquired, released, lost = (len(history.of(word)) for word in ("acquired", "released", "lost"))
        fences = [[e["fence"] for e in history.of("start", account=account)] for account in range(KEYS)]
        self.check(
            "every call runs exactly once",
            sorted(ran) == sorted(calls),
            f"{len(calls)} calls, {len(ran)} bodies, {waits} conflicts",
        )
        self.check(
            "bodies of one key never overlap", overlaps == 0, f"{overlaps} overlaps among {CALLS} bodies"
        )
        self.check("different keys run in parallel", peak >= 2, f"up to {peak} bodies at once")
        self.check(
            "every lock is released, none is lost",
            (acquired, released, lost) == (CALLS, CALLS, 0),
            f"{acquired} acquired, {released} released, {lost} lost",
        )
        self.check(
            "a key's fence only grows",
            all(sorted(set(numbers)) == numbers for numbers in fences),
            f"{KEYS} rising rows of {CALLS // KEYS}",
        )

    def policies(self) -> None:
        """Scene 2: every policy against one held lock."""
        self.title(2, "The lock is held: what becomes of the next call?", "on_conflict decides")
        history, app = self.history, self.app
        calls: dict[str, Any] = {}
        with self.shown(lambda: policies_picture(history, calls)) as wait:
            calls["holder"] = holder = app.report.delay("May")
            wait(lambda: history.of("start", task_id=holder.id), "the holder runs")
            for policy in ("skip", "raise", "wait", "join", "retry"):
                calls[policy] = app.report.apply_async(["May"], singleton={"on_conflict": policy})
                if policy in ("wait", "join"):
                    wait(partial(history.of, "waiting", task_id=calls[policy].id), f"{policy}: it is in line")
            skip, retry, failed = calls["skip"], calls["retry"], calls["raise"]
            waiting, joining = calls["wait"], calls["join"]
            wait(skip.ready, "the skipped call has a result")
            wait(failed.ready, "the raising call has a result")
            wait(
                lambda: len(history.of("conflict", task_id=retry.id)) >= 2,
                "the retried call comes back twice",
            )
            for last, following in ((holder, waiting), (waiting, retry)):
                app.open_gate("report")
                wait(partial(history.of, "end", task_id=last.id), "a body ends")
                wait(partial(history.of, "start", task_id=following.id), "the next body starts")
            app.open_gate("report")
            wait(lambda: all(call.ready() for call in calls.values()), "every call has a result")

        skipped = skip.result
        self.check(
            "skip: no body, the result names the holder",
            is_skipped(skipped)
            and skipped["holder"]["task_id"] == holder.id
            and history.words(skip.id) == ["conflict"],
            f"{skip.state}, skipped",
        )
        (end,) = history.of("end", task_id=holder.id)
        (start,) = history.of("start", task_id=waiting.id)
        words = history.words(waiting.id)
        self.check(
            "wait: in line, woken by the holder's release",
            words == ["conflict", "waiting", "woken", "acquired", "start", "end", "released"]
            and history.place("end", holder.id) < history.place("start", waiting.id)
            and (waiting.state, waiting.result) == ("SUCCESS", "report of May"),
            f"{waiting.state}, began {(start['at'] - end['at']) * 1000:.0f} ms after the holder's end",
        )
        self.check(
            "join: in line, no body, the holder's result",
            history.words(joining.id) == ["conflict", "waiting"] and joining.result == holder.result,
            f"{joining.state}, {joining.result!r}",
        )
        words = history.words(retry.id)
        waits = words.count("conflict")
        self.check(
            "retry: comes back, and runs after them",
            words == ["conflict"] * waits + ["acquired", "start", "end", "released"]
            and history.place("end", waiting.id) < history.place("start", retry.id)
            and (retry.state, retry.result) == ("SUCCESS", "report of May"),
            f"{retry.state}, came back {times(waits)}",
        )
        error = failed.result
        self.check(
            "raise: no body, the error names the holder",
            isinstance(error, AlreadyRunning)
            and error.holder["task_id"] == holder.id
            and history.words(failed.id) == ["conflict"],
            f"{failed.state}, {type(error).__name__}",
        )

    def queued_once(self) -> None:
        """Scene 3: many equal calls are fanned out, and each is queued once."""
        self.title(3, f"{WISHES:,} calls of {ITEMS} items, fanned out", 'dedupe="until_done"')
        history, app = self.history, self.app
        outcomes: list[CallOutcome] = []
        began = time.monotonic()
        counts = app.refresh.fan_out(((n % ITEMS,) for n in range(WISHES)), each=outcomes.append)
        took_s = time.monotonic() - began
        story = [
            f"fan_out   {WISHES:,} calls in {took_s * 1000:.0f} ms: {counts.accepted} messages, "
            f"{counts.duplicates} duplicates"
        ]
        with self.shown(lambda: Text("\n".join(story))) as wait:
            wait(lambda: len(history.of("start", item=0)) == 1, "the first item is refreshed")
            again = app.refresh.delay(0)
            story.append(
                f"delay     refresh(0) runs, and is asked for again: deduplicated={again.deduplicated}"
            )
            for _ in range(ITEMS):
                app.open_gate("refresh")
            ran = wait(
                lambda: (
                    [e for n in range(ITEMS) for e in history.of("end", item=n)][ITEMS - 1 :]
                    and [e["task_id"] for n in range(ITEMS) for e in history.of("start", item=n)]
                ),
                "all items are refreshed",
            )
            story.append(f"bodies    {len(ran)}")

        sent = {outcome.task_id for outcome in outcomes if outcome.state == "accepted"}
        named = {outcome.task_id for outcome in outcomes if outcome.state == "duplicate"}
        self.check(
            "fan-out: each call is queued and runs once",
            (counts.accepted, counts.duplicates) == (ITEMS, WISHES - ITEMS) and sorted(ran) == sorted(sent),
            f"{WISHES:,} calls, {counts.accepted} messages, {len(ran)} bodies",
        )
        self.check(
            "a duplicate gets the id of the call that runs",
            named == sent and again.deduplicated and again.id in sent,
            f"{counts.duplicates} duplicates name {len(named)} calls",
        )

    def newest_wins(self) -> Saved:
        """Scene 4: of the calls that are sent while somebody types, the newest runs, once."""
        quiet_s = self.app.save.singleton["debounce"]
        self.title(4, f"{len(TYPED)} saves while one types", f"debounce={quiet_s}, █ = the body runs")
        history, app = self.history, self.app
        saved = Saved(history, app.server_time, quiet_s)
        with self.shown(saved.picture) as wait:
            for end in range(1, len(TYPED) + 1):
                due = time.monotonic() + KEY_S
                saved.sent.append((app.server_time(), app.save.delay(7, TYPED[:end])))
                wait(lambda due=due: time.monotonic() >= due, "the next key is pressed")
            wait(lambda: all(call.ready() for _, call in saved.sent), "every call has a result")
            wait(lambda: history.of("end", page=7), "the last text is saved")

        bodies, calls = history.of("start", page=7), [call for _, call in saved.sent]
        pressed, newest = saved.sent[-1][0], calls[-1]
        self.check(
            f"debounce: {len(TYPED)} saves, one body, the last text",
            [body["text"] for body in bodies] == [newest.result] == [TYPED]
            and bodies[0]["at"] >= pressed + quiet_s,
            f"{newest.result!r}, {bodies[0]['at'] - pressed:.2f} s after the last key",
        )
        by = [superseded_by(call.result) for call in calls[:-1]]
        told = {entry["task_id"]: entry["superseded_by"] for entry in history.of("superseded")}
        later = [{call.id for call in calls[place:]} for place in range(1, len(calls))]
        self.check(
            "the others are skipped, and name a newer call",
            all(call.state == "SUCCESS" and is_skipped(call.result) for call in calls[:-1])
            and all(newer in ids for newer, ids in zip(by, later))
            and told == {call.id: newer for call, newer in zip(calls, by)},
            f"{len(by)} skipped, for {', '.join(sorted(f'save[{str(newer)[:8]}…]' for newer in {*by}))}",
        )
        return saved

    def several_at_a_time(self) -> None:
        """Scene 5: as many calls of one key as the limit says, and the others in line."""
        self.title(5, f"{SYNCS} calls of one key, {LIMIT} at a time", f"limit={LIMIT}, one row per permit")
        history, app = self.history, self.app
        began = app.server_time()
        with self.shown(lambda: permits_picture(history, began, app.server_time())) as wait:
            calls = [app.sync.delay("acme").id for _ in range(SYNCS)]
            in_line = partial(waiting_of, history, calls)
            wait(lambda: len(history.of("start", tenant="acme")) >= LIMIT, f"{LIMIT} bodies run")
            wait(lambda: in_line() >= SYNCS - LIMIT, "the others wait in line")
            history.read()
            ran, waited, holders = history.of("start", tenant="acme"), in_line(), app.sync.holders("acme")
            for _ in range(SYNCS):
                app.open_gate("sync")
            wait(lambda: len(history.of("end", tenant="acme")) >= SYNCS, "all of them have run")

        starts = history.of("start", tenant="acme")
        most = {permit: peak(history.entries, permit=permit) for permit in range(LIMIT)}
        self.check(
            f"limit={LIMIT}: {LIMIT} run at once, the others wait",
            peak(history.entries, tenant="acme") == len(ran) == LIMIT and waited == SYNCS - LIMIT,
            f"{len(ran)} bodies at once, {waited} in line",
        )
        self.check(
            "each has a permit of its own, and hands it on",
            [holder.task_id for holder in holders] == [e["task_id"] for e in sorted(ran, key=permit_of)]
            and sorted(entry["task_id"] for entry in starts) == sorted(calls)
            and set(most.values()) == {1},
            f"{len(starts)} bodies under permits {', '.join(map(str, most))}",
        )

    def so_many_in_a_while(self) -> None:
        """Scene 6: no more calls of one key start in any window than the rate says."""
        rate = f"rate=({STARTS}, {PERIOD_S})"
        self.title(
            6, f"{ORDERS} calls of one key, {STARTS} in any {PERIOD_S} s", f"{rate}, how many start when"
        )
        history, app = self.history, self.app
        began = app.server_time()
        with self.shown(lambda: starts_picture(history, began, app.server_time())) as wait:
            calls = [app.order.delay("acme").id for _ in range(ORDERS)]
            wait(lambda: len(history.of("end", partner="acme")) >= ORDERS, "all of them have run")

        starts = history.of("start", partner="acme")
        fences = sorted(entry["fence"] for entry in starts)  # the server's clock, in microseconds
        most = max(within(fences, first, PERIOD_S) for first in fences)
        self.check(
            f"rate: never more than {STARTS} starts in {PERIOD_S} s",
            most == STARTS and sorted(entry["task_id"] for entry in starts) == sorted(calls),
            f"{len(starts)} bodies in {(fences[-1] - fences[0]) / 1e6:.1f} s, {most} in the fullest window",
        )

    def take_over(self, lives_s: float = 0.0) -> TakeOver:
        """Scene 7: a worker is killed in mid-task, and another one takes its lock over."""
        self.title(7, "kill -9 of a worker in mid-task", "nobody is left to release the lock")
        history, app = self.history, self.app
        scene = TakeOver(history, app.server_time)
        with self.shown(scene.picture) as wait:
            scene.first = first = app.settle.apply_async(["acme"], queue="alpha").id
            (start,) = wait(lambda: history.of("start", task_id=first), "the task runs on alpha")
            wait(lambda: app.server_time() >= start["at"] + lives_s, "it has run for a while")
            self.alpha.kill()
            scene.killed_at = app.server_time()
            second = app.settle.apply_async(["acme"], queue="beta")
            scene.second = second.id
            (taken,) = wait(lambda: history.of("taken_over", task_id=second.id), "beta takes the lock over")
            app.open_gate("settle")
            wait(second.ready, "the task is done on beta")
            told = f"[{first}] on {start['worker']} (pid {start['pid']})"
            scene.warning = wait(
                lambda: self.beta.log_line("took over", told), "beta's log names the dead holder"
            )

        conflicts = history.of("conflict", task_id=second.id)
        dead = taken["holder"]
        late = taken["at"] - dead["deadline"]
        self.check(
            "kill -9: the lock holds until the lease ends",
            bool(conflicts) and all(c["holder"]["task_id"] == first for c in conflicts) and late >= 0,
            f"rival told {times(len(conflicts))} that it is held",
        )
        self.check(
            "then another worker takes it over, and runs",
            history.words(second.id)[len(conflicts) :]
            == ["taken_over", "acquired", "start", "end", "released"]
            and second.result == taken["fence"] > start["fence"]
            and history.words(first) == ["acquired", "start"],
            f"{late * 1000:.0f} ms later on {taken['worker']}, with a larger fence",
        )
        self.check(
            "the dead holder is named",
            (dead["task_id"], dead["worker"], dead["pid"]) == (first, self.alpha.node, start["pid"]),
            f"task {dead['task_id'][:8]}…, worker {dead['worker']}, pid {dead['pid']}",
        )
        return scene

    def leftovers(self) -> None:
        """No key of ours stays without a TTL."""
        locks = list(self.app.client.scan_iter(f"{self.app.PREFIX}:{{*"))
        endless = [key for key in locks if self.app.client.pttl(key) == -1]
        self.check(
            "every key left in Redis has a TTL", not endless, f"{len(locks)} keys, {len(endless)} endless"
        )


class Saved:
    """What scene 4 shows."""

    def __init__(self, history: History, clock: Callable[[], float], quiet_s: float) -> None:
        self.quiet_s = quiet_s
        self.sent: list[tuple[float, Any]] = []  # when each call was sent, and its result
        self._history = history
        self._clock = clock

    def picture(self) -> RenderableType:
        """The keys along the time axis, the quiet time after the last one, and the body."""
        rows = Table.grid(padding=(0, 2))
        if not self.sent:
            return rows
        began, last = self.sent[0][0], self.sent[-1][0]
        bodies, now = self._history.bodies(page=7), self._clock()
        ends = [end for _, end in bodies if end is not None]
        scale = NARROW / max((ends[-1] if ends else now) - began, 2.0)
        keys = [" "] * NARROW
        for (at, _), key in zip(self.sent, TYPED):
            keys[min(NARROW - 1, int((at - began) * scale))] = key
        first, width = int((last - began) * scale), round(min(now - last, self.quiet_s) * scale)
        quiet = f"{' ' * first}├{'─' * (width - 2)}┤"[:NARROW]
        skipped = sum(call.ready() and is_skipped(call.result) for _, call in self.sent)
        rows.add_row("keys", Text("".join(keys), "bold cyan"), f"{len(self.sent)} saves")
        rows.add_row("quiet", Text(quiet, "dim"), f"{self.quiet_s} s")
        rows.add_row("body", Text(track(bodies, began, now, scale, NARROW), "green"), f"{len(bodies)} run")
        rows.add_row("", Text(f"0 s{NARROW / scale:{NARROW - 5}.1f} s", "dim"), f"{skipped} skipped")
        return rows


class TakeOver:
    """What scene 7 shows."""

    def __init__(self, history: History, clock: Callable[[], float]) -> None:
        self._history = history
        self._clock = clock
        self.first = self.second = self.warning = ""
        self.killed_at = 0.0

    def picture(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for entry in self._history.of("start", task_id=self.first):
            rows.add_row(
                "alpha", f"settle('acme') runs in process {entry['pid']}, and renews its lease of 3 s"
            )
        if self.killed_at:
            rows.add_row("alpha", Text("kill -9: the worker and its pool are gone", "bold red"))
            rows.add_row(
                "", "The workers play two hosts, so beta cannot see that the process is dead, and waits"
            )
            rows.add_row("", "for the end of its lease. On one host it would take over at once.")
        conflicts = self._history.of("conflict", task_id=self.second)
        if conflicts:
            holder = conflicts[-1]["holder"]
            told = times(len(conflicts))
            rows.add_row(
                "beta",
                f"the same call: held by {briefly(holder)}, pid {holder['pid']}, told {told}",
            )
            rows.add_row("lease", self._lease(conflicts[-1]))
        for entry in self._history.of("taken_over", task_id=self.second):
            late = entry["at"] - entry["holder"]["deadline"]
            rows.add_row(
                "beta", Text(f"took over {late * 1000:.0f} ms after the lease had ended", "bold green")
            )
        for entry in self._history.of("end", task_id=self.second):
            rows.add_row("beta", f"settle('acme') is done in process {entry['pid']}")
        if self.warning:
            rows.add_row("log", Text(self.warning, "yellow"))
        return rows

    def _lease(self, conflict: Entry) -> RenderableType:
        deadline = conflict["holder"]["deadline"]
        left = max(0.0, deadline - self._clock()) / (deadline - self.killed_at)
        full = round(30 * min(1.0, left))
        if not full:
            return Text(f"ended {deadline - self.killed_at:.1f} s after the kill")
        return Text.assemble(
            ("█" * full, "yellow"), ("░" * (30 - full), "dim"), f" {deadline - self._clock():.1f} s left"
        )


def indented(picture: RenderableType) -> RenderableType:
    return Padding(picture, (0, 0, 0, 3), expand=False)


def workers_picture(ready: int) -> RenderableType:
    return Text(f"workers  {ready} of {len(WORKERS)} ready, {PROCESSES} processes each", "dim")


def fan_out_picture(history: History, began: float, now: float) -> RenderableType:
    """A row per key along the time axis, and below how many bodies run at once."""
    ends = [end for _, end in history.bodies() if end is not None]
    until = max(ends) if len(ends) == CALLS else now
    scale = TRACK / max(until - began, 2.0)
    running = [0] * TRACK
    rows = Table.grid(padding=(0, 2))
    for account in range(KEYS):
        bodies = history.bodies(account=account)
        cells = track(bodies, began, now, scale, TRACK)
        running = [count + (cell != " ") for count, cell in zip(running, cells)]
        done = sum(end is not None for _, end in bodies)
        rows.add_row(f"key {account}", Text(cells, "cyan"), f"{done:>2}/{CALLS // KEYS}")
    levels = "".join(" ▁▂▃▄▅▆▇█"[min(8, count)] for count in running)
    rows.add_row("at once", Text(levels, "green"), f"{len(ends)}/{CALLS}")
    rows.add_row("", Text(f"0 s{TRACK / scale:{TRACK - 5}.1f} s", "dim"))
    return rows


def permits_picture(history: History, began: float, now: float) -> RenderableType:
    """A row per permit along the time axis, and how many bodies each has had."""
    ends = [end for _, end in history.bodies(tenant="acme") if end is not None]
    until = max(ends) if len(ends) == SYNCS else now
    scale = NARROW / max(until - began, 1.0)
    rows = Table.grid(padding=(0, 2))
    for permit in range(LIMIT):
        bodies = history.bodies(permit=permit)
        done = sum(end is not None for _, end in bodies)
        rows.add_row(f"permit {permit}", Text(track(bodies, began, now, scale, NARROW), "cyan"), f"{done:>3}")
    rows.add_row("", Text(f"0 s{NARROW / scale:{NARROW - 5}.1f} s", "dim"))
    return rows


def starts_picture(history: History, began: float, now: float) -> RenderableType:
    """The starts along the time axis, and the windows into which they fall."""
    starts = sorted(start for start, _ in history.bodies(partner="acme"))
    until = starts[-1] + 0.1 if len(starts) == ORDERS else now
    scale = NARROW / max(until - began, 2 * PERIOD_S)
    rows = Table.grid(padding=(0, 2))
    counts = Counter(min(NARROW - 1, int((start - began) * scale)) for start in starts)
    cells = "".join(str(counts[place] or " ") for place in range(NARROW))
    rows.add_row("starts", Text(cells, "bold cyan"), f"{len(starts):>3}")
    for first in starts[:1] + starts[STARTS : STARTS + 1]:
        count = sum(first <= start < first + PERIOD_S for start in starts)
        begins, width = int((first - began) * scale), round(PERIOD_S * scale)
        window = f"{' ' * begins}├{'─' * (width - 2)}┤"[:NARROW]
        rows.add_row(f"{PERIOD_S} s", Text(window, "dim"), f"{count:>3}")
    rows.add_row("", Text(f"0 s{NARROW / scale:{NARROW - 5}.1f} s", "dim"))
    return rows


def track(
    bodies: list[tuple[float, float | None]], began: float, now: float, scale: float, width: int
) -> str:
    """Bodies along the time axis, one after the other; of two that meet each is to be seen."""
    cells = [" "] * width
    for number, (start, end) in enumerate(bodies):
        first = min(width - 1, int((start - began) * scale))
        last = max(first + 1, int(((end or now) - began) * scale))
        cells[first:last] = ["█▓"[number % 2]] * (min(last, width) - first)
    return "".join(cells)


def policies_picture(history: History, calls: dict[str, Any]) -> RenderableType:
    """The holder, and what became of the calls that met its lock."""
    shown = {"conflict": "held", "waiting": "in line", "start": "runs", "end": "done"}
    rows = Table.grid(padding=(0, 2))
    for name, call in calls.items():
        story = " · ".join(shown[word] for word in history.words(call.id) if word in shown)
        style = {"SUCCESS": "green", "FAILURE": "red"}.get(call.state, "yellow")
        rows.add_row(
            Text(name, "bold"), story, Text(call.state, style), result_of(call) if call.ready() else ""
        )
    return rows


def result_of(call: Any) -> str:
    result = call.result
    if is_skipped(result):
        return f"skipped, because of {briefly(result['holder'])}"
    if isinstance(result, AlreadyRunning):
        return f"AlreadyRunning: {briefly(result.holder)}"
    return repr(result)


def briefly(holder: Entry) -> str:
    return f"{holder['task'].rpartition('.')[2]}[{holder['task_id'][:8]}…] on {holder['worker']}"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def overlaps_and_peak(entries: list[Entry]) -> tuple[int, int]:
    """How often a body started while one of its key ran, and how many bodies ran at once at most."""
    running: Counter[int] = Counter()
    overlaps = peak = 0
    for entry in entries:
        if "account" in entry:
            running[entry["account"]] += {"start": 1, "end": -1}[entry["what"]]
            overlaps += entry["what"] == "start" and running[entry["account"]] > 1
            peak = max(peak, running.total())
    return overlaps, peak


def peak(entries: list[Entry], **wanted: Any) -> int:
    """How many bodies of a kind ran at once at most."""
    running = most = 0
    for entry in entries:
        if wanted.items() <= entry.items():
            running += {"start": 1, "end": -1}.get(entry["what"], 0)
            most = max(most, running)
    return most


def within(fences: list[int], first: int, period_s: float) -> int:
    """How many starts there are in the window that begins with this one."""
    return sum(first <= fence < first + period_s * 1e6 for fence in fences)


def permit_of(entry: Entry) -> int:
    return int(entry["permit"])


def waiting_of(history: History, calls: list[str]) -> int:
    """How many of these calls have been parked in line."""
    return len({entry["task_id"] for entry in history.of("waiting")} & {*calls})


def summary(checks: list[Check], took_s: float) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    for is_true, claim, seen in checks:
        tick = Text("✓", "bold green") if is_true else Text("✗", "bold red")
        rows.add_row(
            tick, claim if is_true else Text(claim, "bold red"), Text(seen, "dim" if is_true else "red")
        )
    true = sum(is_true for is_true, _, _ in checks)
    rows.add_row("", Text(f"{true} of {len(checks)} checks passed", "bold"), Text(f"{took_s:.1f} s", "dim"))
    return Padding(rows, (1, 0, 1, 3), expand=False)


@contextmanager
def server() -> Iterator[tuple[str, str]]:
    """The URL of the server, and what it is: the one that REDIS_URL names, or one of our own."""
    url = os.environ.get("REDIS_URL")
    if url:
        yield url, "named by REDIS_URL"
    else:
        with EmbeddedServer() as embedded:
            yield embedded.url(), "embedded, dies with the demo"


@contextmanager
def no_key_left(client: redis.Redis, prefix: str) -> Iterator[None]:
    """Afterwards no key with the prefix is left."""
    try:
        yield
    finally:
        for key in client.scan_iter(f"{prefix}:*"):
            client.delete(key)


@contextmanager
def stage(console: Console, logs: Path) -> Iterator[Demo]:
    """A demo with its server and its workers."""
    with ExitStack() as stack:
        url, kind = stack.enter_context(server())
        prefix = f"demo-{uuid.uuid4().hex[:8]}"
        # The workers get the same, and the app reads it when it is imported.
        os.environ.update(DEMO_URL=url, DEMO_PREFIX=prefix)
        app = importlib.import_module("examples.demo_app")
        about = app.client.info("server")
        name = about.get("server_name", "redis")
        version = about.get(f"{name}_version", about["redis_version"])
        if os.environ.get("REDIS_URL"):
            stack.enter_context(no_key_left(app.client, prefix))
        console.print(
            Text.assemble(("celery_setnx", "bold"), "  tasks that run at most once at a time per key\n")
        )
        console.print(f"   server   {name} {version}, {kind}", style="dim")
        alpha, beta = (stack.enter_context(closing(Worker(name, logs / f"{name}.log"))) for name in WORKERS)
        yield Demo(console, app, History(app.client, app.HISTORY), alpha, beta)


def run(console: Console, logs: Path) -> bool:
    """Run the demo; true if everything it shows is true."""
    began = time.monotonic()
    with stage(console, logs) as demo:
        try:
            demo.start()
            demo.fan_out()
            demo.policies()
            demo.queued_once()
            demo.newest_wins()
            demo.several_at_a_time()
            demo.so_many_in_a_while()
            demo.take_over()
            demo.leftovers()
        except Missed as missed:
            demo.check("everything happens in time", False, str(missed))
        console.print(summary(demo.checks, time.monotonic() - began))
        return all(is_true for is_true, _, _ in demo.checks)


def main() -> int:
    # Also when it is told to end or its terminal goes away, it tidies up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _frame: sys.exit(128 + signum))
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    logs = Path(tempfile.mkdtemp(prefix="celery_setnx-demo-"))
    code = 1
    try:
        code = 0 if run(console, logs) else 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing is left running.")
        code = 130
    except redis.RedisError as error:
        console.print(f"The server does not answer: {type(error).__name__}: {error}", style="bold red")
    finally:
        if code == 1 and any(logs.iterdir()):
            console.print(f"The workers' logs: {logs}/*.log", soft_wrap=True)
        else:
            shutil.rmtree(logs)
    return code


if __name__ == "__main__":
    sys.exit(main())
