"""Where a scenario plays: the servers, the workers, the tasks that are sent, and the history as it grows."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import redis

from examples.embedded import EmbeddedServer
from tests.chaos import nursery
from tests.chaos.app import GAP_S, LEASE_S, app, late, order_to_end, queued, work
from tests.chaos.checker import FAULTS, FINAL, check, is_lost
from tests.chaos.history import History, Record, of_kind
from tests.harness import Worker, wait_until
from tests.stage import redeliver, unacknowledged

LANES = 4
LONG_S = 30.0
PATIENCE_S = 20.0
# A flaw often shows in a task that never ends: there is no need to wait long for it.
_PATIENCE_WITH_A_FLAW_S = 5.0
_TICK_S = 0.005
_LOOK_S = 0.1
_TASKS = {"work": work, "late": late, "queued": queued}
_REMEMBERED = re.compile(
    r":(holder|taken_over|permits|starts)$|:(ticket|successor|lines|receipt):|\{celery_setnx\.check:"
)
_DAY_MS = 86_400_000
# A lane has one body at a time that is to come to harm: who is woken beside them finds a process free.
_SHARED: dict[str, dict[str, Any]] = {
    "va": {"concurrency": LANES + 1},
    "vb": {"concurrency": LANES + 1},
    "q": {"concurrency": 4},
    "remote": {"concurrency": 3, "conf": {"setnx_same_host": False}},
}
_SHIM = Path(__file__).with_name("clock_shim.c")
_COMPILER = "a C compiler that works: install the Debian packages gcc and libc6-dev"


class MissingTool(Exception):
    """A scenario needs a program that this machine has not got."""


class BrokenStage(Exception):
    """A worker did not start: nothing was shown, neither a promise kept nor a flaw found."""


class Log:
    """The history as it grows, by task and by kind; one thread reads it."""

    def __init__(self, path: Path, note: Callable[..., None], patience_s: float) -> None:
        self.records: list[Record] = []
        self._patience_s = patience_s
        self._path = path
        self._note = note
        self._by_tid: dict[str, list[Record]] = defaultdict(list)
        self._changed = threading.Condition()
        self._closed = self.given_up = False
        self._thread = threading.Thread(target=self._follow, name="chaos-log", daemon=True)
        self._thread.start()

    def of(self, tid: str) -> list[Record]:
        """All records of one task so far."""
        with self._changed:
            return list(self._by_tid[tid])

    def find(self, tid: str, kind: str) -> list[Record]:
        """The records of one kind of one task."""
        return of_kind(self.of(tid), kind)

    def wait(self, tid: str, *kinds: str, after: float = 0.0, patience: float = 1.0) -> Record:
        """The task's first record of one of the kinds that is later than `after`."""
        patience_s = patience * self._patience_s
        give_up = time.monotonic() + patience_s
        with self._changed:
            while True:
                for record in self._by_tid[tid]:
                    if record["kind"] in kinds and record["t"] > after:
                        return record
                left = give_up - time.monotonic()
                if left <= 0 or self.given_up:
                    seen = [record["kind"] for record in self._by_tid[tid]]
                    raise AssertionError(f"{tid}: no {' or '.join(kinds)} within {patience_s:g} s: {seen}")
                self._changed.wait(left)

    def give_up(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self.given_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._thread.join()

    def _follow(self) -> None:
        rest, last = b"", time.monotonic()
        with self._path.open("rb") as file:
            while not self._closed:
                data = file.read()
                now = time.monotonic()
                if now - last > GAP_S:
                    self._note("excuse", since=last, until=now, of_worker="", of_pid=0)
                last = now
                if not data:
                    time.sleep(_TICK_S)
                    continue
                *lines, rest = (rest + data).split(b"\n")
                with self._changed:
                    for line in lines:
                        record = json.loads(line)
                        self.records.append(record)
                        if "tid" in record:
                            self._by_tid[record["tid"]].append(record)
                    self._changed.notify_all()


class Stage:
    """One broker, one lock server, the workers, and one history."""

    def __init__(self, seed: int = 0, mutant: str = "") -> None:
        self.seed = seed
        self.directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.mutant = mutant
        self.keep = False
        self.history = self.directory / "history"
        self._notes = History(self.history)
        self.patience_s = _PATIENCE_WITH_A_FLAW_S if mutant else PATIENCE_S
        self.log = Log(self.history, self.note, self.patience_s)
        self._exits = ExitStack()
        self.broker = self._exits.enter_context(EmbeddedServer())
        self.locks = self._exits.enter_context(EmbeddedServer())
        self._use_servers()
        app.finalize()  # here, and not in many lanes at once
        self._forked = type("ForkedWorker", (Worker,), {"popen": staticmethod(nursery.worker)})
        self._workers: list[Worker] = []
        self._shared: dict[str, Worker] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Kill every worker, stop the servers, and remove the logs unless they are of use."""
        for worker in self._workers:
            if worker.process.poll() is None:
                with suppress(ProcessLookupError):
                    worker.kill()
        for fork in active_children():  # who never got ready
            fork.kill()
        self.log.close()
        self._exits.close()
        if not self.keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def note(self, kind: str, **details: Any) -> None:
        """Write what the driver does into the history."""
        self._notes.note(kind, **details)

    @contextmanager
    def supervised(self, workers: dict[str, Worker], **options: Any) -> Iterator[None]:
        """For the length of a block those are started anew that end: a worker does if the broker goes whose
        messages it holds. One that says so may stay for half a minute, for a result that it has not read.
        """
        over = threading.Event()

        def supervise() -> None:
            while not over.wait(_LOOK_S):
                for queue, worker in workers.items():
                    stays = worker.process.poll() is None
                    if stays and "Unrecoverable error" not in worker.log_text():
                        continue
                    if stays:
                        with suppress(ProcessLookupError):  # it has ended meanwhile
                            self.kill_worker(worker)
                    workers[queue] = self.worker(queue, **options)

        with ThreadPoolExecutor(1) as pool:
            supervisor = pool.submit(supervise)
            try:
                yield
            finally:
                over.set()
            supervisor.result()

    def worker(self, queue: str, *, conf: dict[str, Any] | None = None, **options: Any) -> Worker:
        """Start a worker that serves one queue."""
        broker = self.broker.url()
        where = {"broker_url": broker, "result_backend": broker, "setnx_url": self.locks.url()}
        environment = {
            "CHAOS_HISTORY": str(self.history), "CHAOS_FLAW": self.mutant, **options.pop("environment", {})
        }  # fmt: skip
        options |= {"queues": queue, "conf": {**where, **(conf or {})}, "environment": environment}
        # Greenlets and a shifted clock have to be there before anything is imported.
        whole = options.get("pool") in ("gevent", "eventlet") or "LD_PRELOAD" in environment
        try:
            worker = (Worker if whole else self._forked)(self.directory, "tests.chaos.app", **options)
        except AssertionError as error:
            raise BrokenStage(str(error)) from error
        with self._lock:
            self._workers.append(worker)
        return worker

    def workers(self, **queues: dict[str, Any]) -> list[Worker]:
        """Start several at once: options by queue."""
        with ThreadPoolExecutor(max(1, len(queues))) as starters:
            started = [starters.submit(self.worker, queue, **options) for queue, options in queues.items()]
        return [worker.result() for worker in started]

    def company(self) -> None:
        """Have the workers that scenarios share: two whose tasks come to harm, two of rivals.

        The worker of the queue `remote` behaves like one on another host: it proves nobody dead.
        """
        up = [queue for queue, worker in self._shared.items() if worker.process.poll() is None]
        missing = {queue: options for queue, options in _SHARED.items() if queue not in up}
        self._shared.update(zip(missing, self.workers(**missing)))

    def kill_child(self, pid: int, heirs: str = "") -> None:
        """kill -9 of a pool process; with the policy of those who are to have its lock next, if any is."""
        before = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.note("kill", victim_pid=pid, before=before, heirs=heirs)

    def kill_worker(self, worker: Worker, heirs: str = "") -> None:
        """kill -9 of a worker with its whole pool."""
        before = time.monotonic()
        worker.kill()
        self.note("kill", victim_worker=worker.node, before=before, heirs=heirs)

    def kill_bare(self, fork: nursery.Fork, name: str, heirs: str) -> None:
        """kill -9 of a process with a bare lock."""
        before = time.monotonic()
        fork.kill()
        fork.wait()
        self.note("kill", victim_worker=name, before=before, heirs=heirs)

    def excused(self, *, worker: Worker | None = None, pid: int = 0) -> AbstractContextManager[float]:
        """For the length of a block a process, a worker or (without both) everything may miss its lease."""
        return self._spell("excuse", of_worker=f"{worker.name}@test" if worker else "", of_pid=pid)

    def data_lost(self) -> AbstractContextManager[float]:
        """For the length of a block the server loses its data, or its sense of time."""
        return self._spell("epoch")

    @contextmanager
    def _spell(self, kind: str, **details: Any) -> Iterator[float]:
        since = time.monotonic()
        try:
            yield since
        finally:
            self.note(kind, since=since, until=time.monotonic(), **details)

    @contextmanager
    def stopped(self, pid: int) -> Iterator[float]:
        """For the length of a block a process stands still; since when."""
        with self.excused(pid=pid) as since:
            os.kill(pid, signal.SIGSTOP)
            try:
                yield since
            finally:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def servers_of_its_own(self) -> Iterator[None]:
        """For the length of a block another broker and another lock server, which no worker uses yet."""
        usual = self.broker, self.locks
        with EmbeddedServer() as self.broker, EmbeddedServer() as self.locks:
            self._use_servers()
            older = len(self._workers)
            try:
                yield
            finally:
                for worker in self._workers[older:]:
                    if worker.process.poll() is None:
                        worker.kill()
                self.broker, self.locks = usual
                self._use_servers()

    @contextmanager
    def empty_broker(self) -> Iterator[None]:
        """For the length of a block the broker is dead (kill -9); it starts with nothing that it had."""
        with self.excused():
            self.broker.stop()
            self.note("emptied")
            yield
            self.broker.start(self.broker.port)

    def two_days_pass(self, queue: str) -> None:
        """What lasts no longer expires; then the broker delivers again what dead workers of a queue had."""
        with self.lock_client() as locks, redis.Redis(port=self.broker.port) as broker:
            for key in list(locks.scan_iter(count=1000)):
                locks.pexpire(key, locks.pttl(key) - 2 * _DAY_MS)  # which deletes what has expired
            for result in list(broker.scan_iter("celery-task-meta-*", count=1000)):
                broker.delete(result)
            redeliver(broker, unacknowledged(broker, queue))

    def _use_servers(self) -> None:
        """Point the driver's own app at this stage's broker and lock server."""
        app.close()
        broker, locks = self.broker.url(), self.locks.url()
        app.conf.update(broker_url=broker, result_backend=broker, setnx_url=locks)
        for name in ("amqp", "backend", "_setnx_clients"):
            app.__dict__.pop(name, None)
        app._pool = None
        app._local = threading.local()

    def lock_client(self) -> redis.Redis:
        """A client of the lock database."""
        return redis.Redis(port=self.locks.port, decode_responses=True, socket_timeout=5)


class Late(AssertionError):
    """It came, but later than is promised."""


class Play:
    """One run of one scenario on a stage."""

    def __init__(self, stage: Stage, name: str, count: int, policies: tuple[str, ...] = ("retry",)) -> None:
        self.stage, self.wait = stage, stage.log.wait
        self.name = name
        self.count = count
        self._policies = policies
        self.injected = 0
        self.counts: Counter[str] = Counter()  # of what else was done
        self.failures: list[str] = []
        self.late: list[str] = []
        self.recovery_s: list[float] = []
        self._sent: dict[str, str] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def policy(self, number: int) -> str:
        """What the rivals of a fault do at a conflict."""
        # Scenarios have two to four kinds of faults in turn: none always meets the same policy.
        return self._policies[(number + number // 4) % len(self._policies)]

    def send(
        self,
        name: str,
        seconds: float,
        queue: str = "q",
        *,
        policy: str = "retry",
        task: str = "work",
        lease: float = LEASE_S,
        may: str = "",
        **options: Any,
    ) -> str:
        """Send a task whose body lives for so many seconds; its id.

        Its key is the scenario's name and this one; the task is `work`, `late` or `queued`.
        """
        about = {"scenario": self.name, "policy": policy, "may": may, "late": task == "late"}
        before, name, tid = time.monotonic(), f"{self.name}/{name}", None
        if task != "queued":  # what may be a duplicate gets no id of ours; whose it is one of is noted
            tid = f"{name}/{next(self._numbers)}"
            self.stage.note("sent", tid=tid, name=name, **about)
        of_call = {"singleton": {"on_conflict": policy, "lease": lease}, **options}
        result = _TASKS[task].apply_async([name, seconds], queue=queue, task_id=tid, **of_call)
        result.backend = None  # nobody reads it, and its end would ask a broker that may be down
        if result.deduplicated:
            self.stage.note("deduplicated", tid=result.id, t=before)
        elif tid is None:
            self.stage.note("sent", tid=result.id, name=name, **about)
        with self._lock:
            self._sent[result.id] = name
        return str(result.id)

    def all_done(self, *tids: str, patience: float = 1.0) -> None:
        """Wait until these tasks have ended, as they should."""
        for tid in tids:
            self.wait(tid, "done", patience=patience)

    def holder(
        self, name: str, seconds: float = LONG_S, queue: str = "q", **options: Any
    ) -> tuple[str, Record]:
        """Send a task, and wait until its body lives: its id, and the record of its start."""
        tid = self.send(name, seconds, queue, **options)
        return tid, self.wait(tid, "start")

    def end(self, tid: str) -> Record:
        """Have a body end that lives, however long it was to; the record of its end.

        A holder that others are to wait for ends so, and not after a time in which a slow machine has not yet
        sent them.
        """
        order_to_end(self.stage.history, tid).touch()
        return self.wait(tid, "end")

    def waiter(self, name: str, seconds: float = 0.05, queue: str = "q", *kinds: str, **options: Any) -> str:
        """Send a task, and wait until it has met the lock (or one of these kinds has happened); its id."""
        tid = self.send(name, seconds, queue, **options)
        self.wait(tid, *(kinds or ("conflict",)))
        return tid

    def line(self, name: str, queue: str, *, join: bool = True) -> list[str]:
        """A call of each kind that waits in line; the last one for a result, if it may."""
        kinds = [("wait", "work"), ("wait", "late"), ("wait", "queued"), ("join" if join else "wait", "work")]
        return [
            self.waiter(name, 0.1, queue, "waiting", policy=policy, task=task, lease=1.0)
            for policy, task in kinds
        ]

    def crowd(self, name: str, chance: random.Random, queues: tuple[str, ...] = ("q", "va", "vb")) -> None:
        """A few short calls of a key, with one policy or another."""
        for _ in range(2):
            policy = chance.choice(["skip", "retry", "raise", "wait", "join"])
            self.send(name, chance.uniform(0, 0.08), chance.choice(queues), policy=policy)

    def lanes(self, act: Callable[[str, random.Random, int], Any], lanes: int = LANES) -> None:
        """Inject `count` faults in lanes beside each other, each with a key and a seed of its own.

        `act` gets the key, a source of chance and the fault's number; if it answers False, the fault did not
        strike, and it is called again.
        """

        def run(lane: int) -> None:
            for number in range(lane, self.count, lanes):
                if self.stage.log.given_up or ((self.failures or self.late) and self.stage.mutant):
                    return
                chance = random.Random(f"{self.stage.seed}/{self.name}/{number}")
                try:
                    for _attempt in range(3):
                        if act(f"k{lane}", chance, number) is not False:
                            self.struck()
                            break
                except AssertionError as error:
                    self.fail(error)

        with ThreadPoolExecutor(min(lanes, self.count)) as pool:
            try:
                list(pool.map(run, range(min(lanes, self.count))))
            except BaseException:  # the end of the process, which is not to wait for lanes
                self.stage.log.give_up()
                raise

    def struck(self) -> None:
        """Count a fault."""
        with self._lock:
            self.injected += 1

    def fail(self, what: str | AssertionError) -> None:
        """Write down a promise that was seen broken while the scenario played."""
        (self.late if isinstance(what, Late) else self.failures).append(f"{self.name}: {what}")

    def is_found_out(self) -> bool:
        """Whether the workers' flaw was found by now; not to be asked while anything is excused."""
        if not self.stage.mutant:
            return False
        so_far = check(list(self.stage.log.records), self.name, final=False)
        return bool(self.failures or self.late or so_far.violations or so_far.late)

    def soon(self, tid: str, *kinds: str, since: float, within_s: float) -> None:
        """Wait for a record of a task; it must come so soon after a fault."""
        record = self.wait(tid, *kinds)
        took_s = record["t"] - since
        self.recovery_s.append(took_s)
        if took_s > within_s:
            raise Late(f"{tid}: {record['kind']} only {took_s:.2f} s after the fault")

    def inherit(self, queue: str, *tids: str, **options: Any) -> None:
        """The next worker of a queue ends what the one before it has left."""
        heir = self.stage.worker(queue, **options)
        self.all_done(*tids)
        heir.stop()

    def settle(self, queue: str = "q") -> None:
        """Wait until every task is accounted for, run every key once more, and look at the lock database."""
        self.account(set(self._sent))
        closers = {self.send(name.partition("/")[2], 0.0, queue) for name in sorted(set(self._sent.values()))}
        self.account(closers)
        self.look_at_what_is_left()

    def look_at_what_is_left(self) -> None:
        """No lock is, and nothing for ever."""
        with self.stage.lock_client() as client:
            try:
                wait_until(lambda: not self._locks_left(client), "no lock left", 5.0)
            except AssertionError:
                self.fail(f"locks left at the end: {self._locks_left(client)}")
            endless = [key for key in client.scan_iter(count=1000) if client.pttl(key) == -1]
        if endless:
            self.fail(f"keys without a TTL: {endless}")

    def account(self, tids: set[str]) -> None:
        """Wait until these tasks have ended, or were lost as Celery documents it."""
        give_up = time.monotonic() + 1.5 * self.stage.patience_s
        log = self.stage.log
        while tids and time.monotonic() < give_up:
            tids = {tid for tid in tids if not of_kind(log.of(tid), *FINAL)}
            faults = of_kind(log.records, *FAULTS)
            tids = {tid for tid in tids if not is_lost(log.of(tid), faults)}
            if tids:
                time.sleep(0.05)
        for tid in sorted(tids):
            where = [(record["kind"], record.get("worker")) for record in log.of(tid)]
            self.fail(f"{tid} is not accounted for: {where}")

    def _locks_left(self, client: redis.Redis) -> list[str]:
        """Locks and lines, not what is only remembered; a worker that starts tries a lock of its own."""
        keys = client.scan_iter("chaos:*", count=1000)
        return [key for key in keys if not _REMEMBERED.search(key)]


def clock_shim(directory: Path) -> Path:
    """The library that shifts a process's wall clock, compiled."""
    library = directory / "clock_shim.so"
    if not library.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise MissingTool(_COMPILER)
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SHIM), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingTool(f"{_COMPILER}\n{done.stderr}")
    return library
