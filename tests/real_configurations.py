"""Every policy under a real project's Celery configuration: `play` publishes, and real workers run.

A configuration is a module that makes its app as the project does, and then a `CONFIGURATION` of that.
Workers import it, and so does the process that plays, which has no other: settings, signals and task classes
of a project are the whole process's. Its server is its own, too.

    python -m tests.real_configurations tests.real.superset [row ...]
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from celery import Celery, Task, chain, chord, current_task, group
from celery.app.defaults import DEFAULTS
from celery.backends.base import DisabledBackend
from celery.result import AsyncResult
from celery.signals import after_task_publish
from celery.states import READY_STATES

from celery_setnx import Conflict, SingletonTask, is_skipped, send_task, singleton
from celery_setnx.call.delivery import Delivery
from celery_setnx.call.queues import bound
from celery_setnx.signals import call_deduplicated
from examples.embedded import EmbeddedServer
from tests.harness import Journal, Worker, wait_until

KEYED = {"key": "name", "lease": 600}
EQUAL = 4
"""So many equal calls are made: one, and three while it runs."""


def waits(conflict: Conflict) -> Any:
    """A policy of one's own."""
    return conflict.wait()


@dataclass(frozen=True)
class Row:
    """A policy, and what becomes of equal calls under it.

    `others` is what becomes of those that come while the first runs: they `run`, are `skipped`, `fail`, get
    the `same` result, are its `duplicates`, or are one that is `pending` and its duplicates.
    """

    name: str
    others: str = "run"
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    of_base: bool = True
    scene: str = "equal"
    mode: str = ""

    @property
    def limit(self) -> int:
        """So many bodies may run at a time."""
        return int(self.options.get("limit", 1))


PLAIN = [
    Row("plain", options={"limit": EQUAL}, scene="control"),
    Row("retries", options={"limit": EQUAL}, scene="control", mode="retries"),
]
WAIT, RETRY = {"on_conflict": "wait"}, {"on_conflict": "retry"}
TODAY = {"dedupe": "until_done", "dedupe_for": 600}
AUTORETRY = {"autoretry_for": (LookupError,)}
ROWS = [
    Row("auto", "skipped", of_base=False),
    Row("skip", "skipped", {"on_conflict": "skip"}, of_base=False),
    Row("raise", "fail", {"on_conflict": "raise"}, of_base=False),
    Row("retry", options=RETRY, of_base=False),
    Row("wait", options=WAIT),
    Row("join", "same", {"on_conflict": "join"}, {"ignore_result": False}),
    Row("callable", options={"on_conflict": waits}),
    Row("limit_wait", options={**WAIT, "limit": 2}),
    Row("limit_retry", options={**RETRY, "limit": 2}, of_base=False),
    Row("rate", options={"rate": (2, 1), "limit": 4}, scene="paced"),
    Row("until_started", "pending", {"dedupe": "until_started"}),
    Row("until_done", "duplicates", {"dedupe": "until_done"}),
    Row("dedupe_for", "duplicates", TODAY, scene="again"),
    Row("hold_on_retry", options={**WAIT, "hold_on_retry": True}, mode="retries"),
    Row("own_retry", options=RETRY, mode="retries", of_base=False),
    Row("autoretry", options=WAIT, task=AUTORETRY, mode="fails"),
    Row("wait_ignored", options=WAIT, task={"ignore_result": True}),
    Row("wait_stored", options=WAIT, task={"ignore_result": False}),
    Row("wait_late", options=WAIT, task={"acks_late": True, "reject_on_worker_lost": True}),
    Row("wait_early", options=WAIT, task={"acks_late": False}),
    Row("retry_late", options=RETRY, task={"acks_late": True}, of_base=False),
    Row("raise_ignored", "fail", {"on_conflict": "raise"}, {"ignore_result": True}, of_base=False),
    Row("dedupe_for_ignored", "duplicates", TODAY, {"ignore_result": True}, scene="again"),
    Row("by_name", options=WAIT, scene="by_name"),
    Row("by_name_pending", "pending", {"dedupe": "until_started"}, scene="by_name"),
    Row("send_task", "pending", {"dedupe": "until_started"}, scene="send_task"),
    Row("canvas_auto", scene="canvas"),
    Row("canvas_wait", options=WAIT, scene="canvas"),
    Row("canvas_retry", options=RETRY, scene="canvas", of_base=False),
    Row("canvas_dedupe", options={"dedupe": "until_started"}, scene="canvas"),
]  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """A project's app, with a guarded task for each row, under its own base class and combined with that.

    `calls` are the options that the project's calls have, in turns. `make` is the project's own decorator of
    tasks, `inside` what a body does. `worker` is how workers are started. A call comes back after `pause_s`.
    """

    app: Celery
    base: type[Task] | None = None
    both: type[Task] | None = None
    calls: Sequence[Mapping[str, Any]] = ({},)
    make: Callable[..., Any] | None = None
    inside: Callable[[], Any] = lambda: None
    worker: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    pause_s: float = 0.2
    tasks: dict[tuple[str, str], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = self.base or self.app.Task
        both = self.both or type(own)("Guarded", (SingletonTask, own), {"abstract": True})
        for row in PLAIN:
            self._add("plain", row, own, {})
        for row in ROWS:
            if row.others == "same" and not self.stores_results:
                continue
            delays = {"retry_delay": self.pause_s, "retry_delay_max": 3 * self.pause_s}
            terms = {**KEYED, **delays, **row.options}
            self._add("base", row, both, {"singleton": terms})
            if not row.of_base:
                self._add("decorator", row, own, {}, singleton(**terms))

    @property
    def stores_results(self) -> bool:
        return not isinstance(self.app.backend, DisabledBackend)

    def _add(self, style: str, row: Row, base: Any, more: Any, decorate: Any = lambda body: body) -> None:
        def work(self: Task, name: str, mode: str = "", gate: str = "") -> str:
            return _work(self, name, mode, gate, inside)

        inside, delay = self.inside, {"default_retry_delay": self.pause_s} if row.mode else {}
        options = {"shared": False, **self.options, **delay, **row.task, **more}
        make = (self.make or self.app.task)(bind=True, base=base, name=f"real.{style}.{row.name}", **options)
        self.tasks[style, row.name] = make(decorate(work))


def _work(self: Task, name: str, mode: str, gate: str, inside: Callable[[], Any]) -> str:
    """The body of all tasks: it journals, and waits at its gate."""
    from celery_setnx import current_lock
    from tests.app import journal, wait_for_gate

    request, lock = current_task.request, current_lock()
    wait_until(lambda: _retries_are_stored(request.id), "RETRY of earlier attempts")
    came = [request.delivery_info.get(word) or "" for word in ("exchange", "routing_key")]
    delivery = Delivery.of(request)
    queue = delivery.queue if delivery else ""
    about = {"task_id": request.id, "name": name, "retries": request.retries}
    journal.write("start", **about, came=came, queue=queue, fence=lock and lock.fence)
    inside()
    if gate and not request.retries:
        wait_for_gate(gate)
    journal.write("end", **about)
    if mode == "retries" and not request.retries:
        raise self.retry(max_retries=3)
    if mode == "fails" and not request.retries:
        raise LookupError(name)
    return str(request.id)


def _retries_are_stored(task_id: str) -> bool:
    """Whether each attempt that retries has stored that.

    It publishes the next one before. On a machine so busy that this one succeeds meanwhile, RETRY goes over
    SUCCESS, with plain Celery, too.
    """
    from tests.app import journal

    entries = journal.entries(task_id=task_id)
    conflicts = [entry for entry in entries if entry["what"] == "conflict" and entry["policy"] == "retry"]
    words = [entry["what"] for entry in entries]
    return words.count("retry") >= len(conflicts) + words.count("start")


class Play:
    """A configuration, its workers, and what happens to the calls."""

    def __init__(self, module: Any, directory: Path) -> None:
        self.name, self.directory = module.__name__, directory
        self.configuration, self.app = module.CONFIGURATION, module.CONFIGURATION.app
        self.tasks, self.calls = self.configuration.tasks, self.configuration.calls
        self.client = redis.Redis.from_url(f"{os.environ['SETNX_TEST_URL']}/0", decode_responses=True)
        self.journal = Journal(self.client)
        self.routes: dict[str, tuple[str, str]] = {}
        self.last = threading.local()
        after_task_publish.connect(self._note, weak=False)
        call_deduplicated.connect(self._note_duplicate, weak=False)

    def _note_duplicate(self, task_id: str, **_: Any) -> None:
        self.last.task_id = task_id

    def _note(self, headers: Any, exchange: Any, routing_key: str, **_: Any) -> None:
        self.last.task_id = headers["id"]
        self.routes.setdefault(headers["id"], (getattr(exchange, "name", exchange) or "", routing_key or ""))

    def worker(self, **options: Any) -> Worker:
        """Start a worker as the project does. Bodies of three rows may wait at their gates, two each."""
        options = {"concurrency": 8, "queues": "", **self.configuration.worker, **options}
        return Worker(self.directory, self.name, **options)

    def play(self, style: str, row: Row) -> None:
        """Play one row; an AssertionError says what is wrong."""
        call = Scene(self, self.tasks[style, row.name], row)
        getattr(call, row.scene)()
        call.has_been_fair()

    def played(self, names: Any = ()) -> Iterator[tuple[str, str, str]]:
        """Play rows side by side: style, row, and what was wrong."""
        known = {row.name: row for row in [*PLAIN, *ROWS]}
        rows = [(style, known[name]) for style, name in self.tasks if not names or name in names]

        def one(each: tuple[str, Row]) -> tuple[str, str, str]:
            style, row = each
            try:
                self.play(style, row)
            except Exception:
                return style, row.name, traceback.format_exc(limit=-4)
            return style, row.name, ""

        with ThreadPoolExecutor(3, initializer=self.app.set_current) as pool:
            yield from pool.map(one, rows)


class Scene:
    """Equal calls of one task."""

    def __init__(self, play: Play, task: Any, row: Row) -> None:
        self.play, self.task, self.row = play, task, row
        self.name = self.gate = f"{row.name}-{uuid.uuid4().hex[:8]}"
        self.sent = 0

    # What is published.

    def options(self) -> dict[str, Any]:
        """Those of the next call, as the project's calls have them."""
        self.sent += 1
        return dict(self.play.calls[(self.sent - 1) % len(self.play.calls)])

    def call(self, *, gated: bool = False) -> Any:
        """Publish the call."""
        options = self.options()
        result = (
            self.task.apply_async(self.args(gated=gated), **options)
            if options
            else self.task.delay(*self.args(gated=gated))
        )
        return result or self.task.AsyncResult(self.play.last.task_id)  # of a base class that returns nothing

    def args(self, *, gated: bool = False) -> list[Any]:
        return [self.name, self.row.mode, self.gate if gated else ""]

    def open(self, times: int = 1) -> None:
        self.play.client.rpush(f"gate:{self.gate}", *["open"] * times)

    # The scenes.

    def control(self) -> None:
        """What plain Celery does."""
        self.have_ended([self.call() for _ in range(EQUAL)], [])
        if self.row.mode:
            return
        self.canvas(EQUAL)

    def equal(self, call: Callable[[], Any] | None = None) -> list[Any]:
        """As many calls as may run, and the others while those do."""
        first = [self.call(gated=True) for _ in range(self.row.limit)]
        for each in first:
            self.has("start", each)
        others = [(call or self.call)() for _ in range(EQUAL - self.row.limit)]
        for each in others:
            if not self.is_one_of(first + others[:1], each):
                self.has("conflict", each)
        self.open(self.row.limit)
        self.have_ended(first, others)
        return first

    def again(self) -> None:
        """A call that comes after the first has succeeded."""
        first = self.equal()
        late = self.call()
        assert late.id == first[0].id, f"{late.id} is no duplicate of {first[0].id}"

    def by_name(self) -> None:
        """Plain `send_task` of an app that has no tasks."""
        assert self.task.name not in self.bare().tasks
        first = self.call(gated=True)
        self.has("start", first)
        others = [
            self.bare().send_task(self.task.name, self.args(), **self.options()) for _ in range(EQUAL - 1)
        ]
        for each in others:
            self.has("conflict", each)
        self.open()
        if self.row.others == "pending":  # one ran, the others were skipped
            wait_until(lambda: all(self.end_of(each) for each in [first, *others]), "all ended")
            assert [self.bodies(each) for each in [first, *others]].count(1) == 2
        else:
            self.have_ended([first], others)

    def send_task(self) -> None:
        """Our `send_task` of an app that has no tasks."""
        terms = {"key": "name", "dedupe": "until_started"}
        words = dict(zip(("name", "mode", "gate"), self.args()))
        self.equal(
            lambda: send_task(self.bare(), self.task.name, kwargs=words, singleton=terms, **self.options())
        )

    def bare(self) -> Celery:
        """An app as a program without the project's code has it."""
        app, conf = Celery("bare", set_as_current=False), self.play.app.conf
        for name in [*DEFAULTS, "setnx_url"]:
            if name not in ("task_routes", "task_annotations") and conf.get(name) is not None:
                app.conf[name] = conf[name]
        for name in [name for name in app.tasks if name.startswith("real.")]:  # shared ones
            app.tasks.unregister(name)
        return app

    def paced(self) -> None:
        """Two of them start in a second, whatever is free."""
        results = [self.call() for _ in range(EQUAL)]
        self.have_ended(results, [])
        starts = sorted(each["fence"] for each in self.entries("start"))
        assert all(late - early >= 1_000_000 for early, late in zip(starts, starts[2:])), starts

    def canvas(self, bodies: int = 0) -> None:
        """Workflows of equal calls; without results a chain is all that Celery has."""
        for what, (flow, count) in self.flows().items():
            if what == "group" and self.row.name == "canvas_auto":  # all but one are skipped
                continue
            bodies += count
            result = flow.apply_async(**self.options())
            self.has_bodies(bodies, what)
            if self.stores_results:
                wait_until(result.ready, f"the {what} is ready")
                assert result.successful(), result.results
        assert len(self.entries("start")) == bodies

    def flows(self) -> dict[str, tuple[Any, int]]:
        """Workflows, and how many bodies each has."""
        one = self.task.si(*self.args())
        flows = {"chain": (chain(one, one.clone(), one.clone()), 3)}
        if self.stores_results:
            flows["group"] = (group(one.clone(), one.clone()), 2)
            flows["chord"] = (chord([one.clone(), one.clone()], one.clone()), 3)
        return flows

    @property
    def stores_results(self) -> bool:
        return self.play.configuration.stores_results and not self.task.ignore_result

    # What is known of them.

    def entries(self, what: str, result: Any = None) -> list[dict[str, Any]]:
        wanted = {"name": self.name} if result is None else {"task_id": result.id}
        return self.play.journal.entries(what=what, **wanted)

    def has(self, what: str, result: Any) -> None:
        wait_until(
            lambda: self.entries(what, result),
            lambda: f"{what} of {result.id}; {self.told(result)}",
        )

    def told(self, result: Any) -> str:
        return f"its journal: {self.play.journal.entries(task_id=result.id)}"

    def has_bodies(self, count: int, what: str) -> None:
        """Wait until so many have ended."""
        wait_until(lambda: len(self.entries("end")) >= count, f"{count} bodies with the {what}")

    def bodies(self, result: Any) -> int:
        """How many bodies of a call have begun and ended."""
        return len(self.entries("end", result))

    def end_of(self, result: Any) -> str:
        """The state that a call has ended with."""
        states = [entry["state"] for entry in self.entries("postrun", result)]
        return next((state for state in states if state in ("SUCCESS", "FAILURE")), "")

    def is_one_of(self, results: list[Any], result: Any) -> bool:
        return any(result is not each and result.id == each.id for each in results)

    def have_ended(self, first: list[Any], others: list[Any]) -> None:
        """Wait until all have ended, each as the row says."""
        for each in [*first, *others]:
            wait_until(
                lambda each=each: self.end_of(each),
                lambda each=each: f"{each.id} has ended; {self.told(each)}",
            )
        fate, each_has = self.row.others, 2 if self.row.mode else 1
        ran = first + {"run": others, "pending": others[:1]}.get(fate, [])
        for each in ran:
            assert self.bodies(each) == each_has, (each.id, self.play.journal.entries(task_id=each.id))
            assert self.end_of(each) == "SUCCESS"
        bodies = self.entries("start")
        assert len(bodies) == len(ran) * each_has, bodies
        if fate in ("duplicates", "pending"):
            expected = ran[-1].id
            dropped = others if fate == "duplicates" else others[1:]
            assert [each.id for each in dropped] == [expected] * len(dropped)
            return
        for each in others:
            end = "FAILURE" if fate == "fail" else "SUCCESS"
            assert self.end_of(each) == end, self.play.journal.words(each.id)
            if self.stores_results:
                wait_until(
                    lambda each=each: each.state in READY_STATES,
                    lambda each=each: f"a result of {each.id}: {each.state}, {self.told(each)}",
                )
                assert each.state == end
                value = each.result
                assert {
                    "run": value == each.id,
                    "skipped": is_skipped(value),
                    "fail": "AlreadyRunning" in repr(value),
                    "same": value == first[0].id,
                }[fate], value

    def has_been_fair(self) -> None:
        """No more bodies at a time than may be; each call came by the route on which it was sent, and from a
        queue of that route."""
        running = most = 0
        for entry in self.play.journal.entries(name=self.name):
            running += {"start": 1, "end": -1}.get(entry["what"], 0)
            most = max(most, running)
        assert most <= self.row.limit, self.play.journal.entries(name=self.name)
        for entry in self.entries("start"):
            sent = self.play.routes.get(entry["task_id"])
            if sent is None:  # a worker sent it
                continue
            assert tuple(entry["came"]) == sent, (sent, entry)
            named = [sent[1]] if not sent[0] else [
                queue.name for queue in bound(self.play.app.amqp.queues.values(), *sent)
            ]  # fmt: skip
            assert not entry["queue"] or entry["queue"] in named, (named, entry)


def play(configuration: str, *names: str) -> int:
    """Play the rows of these names, or all, under a configuration; print what is wrong."""
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as directory:
        os.environ["SETNX_TEST_URL"] = server.url().rpartition("/")[0]
        os.environ["SETNX_TEST_DIRECTORY"] = directory
        play = Play(importlib.import_module(configuration), Path(directory))
        worker, wrong = play.worker(), 0
        try:
            for style, row, what in play.played(names):
                wrong += bool(what)
                print(f"{configuration} {style} {row}: {what or 'ok'}", flush=True)
            for entry in play.journal.entries(what="unread"):
                wrong += 1
                print(f"{configuration}: a receiver could not read {entry}", flush=True)
        finally:
            worker.stop()
            AsyncResult.__del__ = lambda self: None  # on a server that is gone it tries for 20 s
            if keep := os.environ.get("SETNX_TEST_LOG"):
                Path(keep).write_text(worker.log_text())
    return wrong


if __name__ == "__main__":
    raise SystemExit(play(*sys.argv[1:]))
