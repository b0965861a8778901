"""No second body within the window, while pool processes and workers are killed; what is lost is counted.

What the bodies have told says who ran; two moments of a death are known to cost a second run.
"""

import random
import subprocess
import sys
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery

from celery_setnx.lock.marks import done_by
from tests.bounds import bound
from tests.harness import Journal, wait_until
from tests.limitstage import worker_children
from tests.stage import redeliver, unacknowledged, wait_for_ends

APP = "tests.windowapp"
CALLS, KEYS = bound((300, 30), full=(5_000, 500))
PUBLISHERS = 3
KILLS = bound(10, full=60)  # of pool processes; every tenth is of a whole worker
CONF = {"test_deaths": 0.02}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(bound(180, full=600))]


class Run(NamedTuple):
    """A body that has come to its last line."""

    task_id: str
    pid: int
    parent: int
    ends: str


class History:
    """What the bodies have told, in order, and who was killed."""

    def __init__(self, journal: Journal, killed: set[int]) -> None:
        self.entries = journal.entries()
        self.killed = killed | {entry["pid"] for entry in self.entries if entry["what"] == "dies"}
        # A pool process that had just replaced another died with its worker as well.
        self.killed |= {entry["pid"] for entry in self.entries if entry.get("parent") in killed}
        self.told = {(e["what"], e.get("task_id"), e["pid"]) for e in self.entries}
        self.last = {entry["pid"]: entry.get("task_id") for entry in self.entries}
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.standing: dict[str, Run] = {}

    def check(self) -> None:
        """Find every second body of a key, and what explains it."""
        for entry in self.entries:
            if entry["what"] == "start":
                self._begins(entry)
            elif entry["what"] == "end":
                self.standing[entry["key"]] = Run(*(entry[name] for name in Run._fields))
                self.counts["came to their last line"] += 1

    def _begins(self, entry: dict[str, Any]) -> None:
        self.counts["bodies"] += 1
        if entry["done"] not in (None, entry["task_id"]):
            self.violations.append(f"{entry} began though the success of {entry['done']} counted")
        before = self.standing.pop(entry["key"], None)
        if before is None:
            return
        why = self.why_not(before)
        self.counts[f"second body: {why}"] += 1
        if not why:
            self.violations.append(f"{entry} began after {before} had succeeded")

    def why_not(self, run: Run) -> str:
        """Why a body that came to its last line does not count; empty if it should."""
        if run.ends == "unwritable":
            return "its result could not be stored"
        if run.pid not in self.killed or self.last[run.pid] != run.task_id:
            return ""
        if ("postrun", run.task_id, run.pid) in self.told:  # its result was stored
            return ""
        if ("released", run.task_id, run.pid) in self.told or ("dies", run.task_id, run.pid) in self.after():
            return "killed between its release and its result"
        return "killed between its last line and its release"

    def after(self) -> set[tuple[str, str, int]]:
        """Who died after its release, before that was told."""
        return {("dies", e["task_id"], e["pid"]) for e in self.entries if e.get("when") == "after"}


class Load:
    """Publishers, workers that are killed, and a broker that is empty in the end."""

    def __init__(self, start_worker: Any, control: redis.Redis, broker: redis.Redis, app: Celery) -> None:
        self.start_worker, self.control, self.broker, self.app = start_worker, control, broker, app
        self.workers = {queue: self._started(queue) for queue in ("lasting", "doomed")}
        self.killed: set[int] = set()

    def _started(self, queue: str) -> Any:
        return self.start_worker(APP, concurrency=2, queues=queue, conf=CONF)

    def run(self) -> None:
        """Publish all calls, and kill in the middle."""
        share = CALLS // PUBLISHERS + 1
        code = f"from {APP} import publish; import sys; publish(int(sys.argv[1]), {share}, {KEYS})"
        publishers = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(PUBLISHERS)]
        try:
            for kill in range(KILLS):
                wait_until(lambda: self.published() >= kill * CALLS // KILLS, "more calls")  # noqa: B023
                if kill % 10 == 5:
                    self._kill_worker("doomed")
                else:
                    self._kill_child()
            assert [publisher.wait(300) for publisher in publishers] == [0] * PUBLISHERS
        finally:
            for publisher in publishers:
                publisher.kill()
        wait_until(self._is_quiet, "all calls have come", 120)
        for worker in self.workers.values():
            wait_for_ends(self.app, worker)
        wait_until(self._is_quiet, "all calls have ended", 120)  # one may have been between two lists

    def published(self) -> int:
        """How many calls there were so far."""
        return int(self.control.get("window:calls") or 0)

    def _kill_child(self) -> None:
        children = worker_children(random.choice(list(self.workers.values())))
        if children:
            pid = random.choice(children)
            self.killed.add(pid)
            subprocess.run(["kill", "-9", str(pid)], check=False)

    def _kill_worker(self, queue: str) -> None:
        self.killed |= {self.workers[queue].process.pid, *worker_children(self.workers[queue])}
        self.workers[queue].kill()
        redeliver(self.broker, unacknowledged(self.broker, queue))
        self.workers[queue] = self._started(queue)

    def _is_quiet(self) -> bool:
        left = [self.broker.llen(queue) for queue in self.workers] + [self.broker.hlen("unacked")]
        return not any(left)


@pytest.fixture
def broker(server) -> Any:
    """The app's broker, empty."""
    with redis.Redis.from_url(server.url(14), decode_responses=True) as client:
        client.flushdb()
        yield client
        client.flushdb()


def test_no_second_body_within_the_window(server, start_worker, locks, journal, broker):
    """Of thousands of calls, in every way of publishing, no body begins while the success of another counts.

    A body that came to its last line has a second one after it in three cases only, each counted.
    """
    control = journal._client
    control.delete("window", "window:calls")
    load = Load(start_worker, control, broker, Celery("asks", broker=server.url(14), set_as_current=False))
    load.run()

    history = History(journal, load.killed)
    history.check()

    def counts_no_more(key: str, run: Run) -> bool:
        return bool(done_by(locks, key) != run.task_id)

    for key, run in history.standing.items():
        if run.ends == "unwritable" and run.parent not in load.killed:  # its worker lives, and takes it back
            wait_until(partial(counts_no_more, key, run), f"what could not be stored counts no more: {run}")
        why, counts = history.why_not(run), not counts_no_more(key, run)
        history.counts[f"at the end {'count' if counts else f'do not count: {why}'}"] += 1
        if not (why or counts):
            history.violations.append(f"the success of {run} counts no more")
    history.counts["processes killed from outside"] = len(load.killed)
    print(f"{CALLS:,} calls, {KEYS} keys, {control.hgetall('window')}")
    print("\n".join(f"{count:6,}  {what}" for what, count in sorted(history.counts.items())))
    control.delete("window", "window:calls")
    assert not history.violations, "\n".join(history.violations)
    assert history.counts["came to their last line"] >= KEYS // 2
