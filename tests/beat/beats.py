"""Real `celery beat` processes that stand by for each other, and what they have published."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis

from celery_setnx import SetnxLock
from tests.harness import CONF, Journal, Worker, server_us, wait_until

QUEUE, JOBS_QUEUE = "beat-nowhere", "beat-jobs"
LOCK = "t:{celery.beat:beats}"
HOT_STANDBY = "celery_setnx.beat:HotStandbyScheduler"
LEASE_S = 3.0
INTERVAL_S = 1.0
SLACK_S = 5.0  # for two cores that others use as well
_SENDS = "Scheduler: Sending due task"


class Beat(Worker):
    """A `celery beat` process with a schedule file and a log of its own, which outlive its death."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        app: str = "tests.beat.app",
        scheduler: str | None = HOT_STANDBY,
        level: str = "INFO",
        environment: dict[str, str] | None = None,
        **conf: Any,
    ) -> None:
        self.log = directory / f"{name}.log"
        self.log.touch()
        self._command = [
            sys.executable, "-m", "celery", "-A", app, "beat", "-l", level, "--pidfile=",
            "-s", str(directory / f"{name}.schedule"), *(["-S", scheduler] if scheduler else []),
        ]  # fmt: skip
        self._environment = {**os.environ, CONF: json.dumps(conf), **(environment or {})}
        self.start()

    def start(self) -> None:
        """Start it, and wait until it has looked who leads."""
        lines = self.log_text().count("beat: Starting")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )

        def has_started() -> bool:
            return self.process.poll() is not None or self.log_text().count("beat: Starting") > lines

        wait_until(has_started, f"beat started; its log: {self.log}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for_log(self, text: str, count: int = 1) -> str:
        """The log, once it holds the text so many times."""
        found = f"{count} x {text!r} in {self.log}"
        return wait_until(lambda: self.log_text().count(text) >= count and self.log_text(), found)

    def sent(self) -> int:
        """How many calls it has begun to send."""
        return self.log_text().count(_SENDS)

    def is_asleep_after(self, sent: int, entries: int = 1) -> bool:
        """True if it has sent more than so many, all entries of a tick, and sleeps; it logs at DEBUG.

        In the middle of a send, SIGTERM ends a beat with Celery's own scheduler with an error.
        """
        since = self.log_text().rpartition(_SENDS)[2]
        return self.sent() > sent and self.sent() % entries == 0 and "beat: Waking up" in since

    def freeze(self) -> None:
        """Stop it as SIGSTOP does, until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM, as an init system does; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


class Beats:
    """The beats of one test, and what they do.

    Args:
        directory: For their logs and schedule files.
        client: Of the lock database, decoding.
        journal: Of the app.
        broker: Of the broker's database.
    """

    def __init__(self, directory: Path, client: redis.Redis, journal: Journal, broker: redis.Redis) -> None:
        self._directory, self._client, self._journal, self._broker = directory, client, journal, broker
        self.all: list[Beat] = []

    def start(self, count: int = 1, **options: Any) -> list[Beat]:
        """Start beats; the options are settings, or those of `Beat`."""
        new = [Beat(self._directory, f"beat{len(self.all) + i}", **options) for i in range(count)]
        self.all.extend(new)
        return new

    def stop(self) -> None:
        """Kill them all, frozen ones too."""
        for beat in self.all:
            if beat.process.poll() is None:
                beat.kill()

    def leader(self) -> Beat | None:
        """The one that leads, by the record of the lock."""
        holder = SetnxLock(self._client, LOCK).holder()
        pid = holder.info.get("pid") if holder else None
        return next((beat for beat in self.all if beat.pid == pid), None)

    def wait_for_leader(self, but: Beat | None = None) -> Beat:
        """A leader other than this one."""
        return wait_until(lambda: (leader := self.leader()) is not but and leader, "a leader")

    def end_leaders(self, times: int, end: Callable[[Beat], object] = Beat.kill) -> list[float]:
        """End the leader so often, each after its second tick, and start it again; seconds to the next."""
        gaps = []
        for _ in range(times):
            leader = self.wait_for_leader()
            self.wait_for_ticks(2, pid=leader.pid)
            began = self.server_time()
            end(leader)
            gaps.append(self.wait_for_more(1)[0]["at"] - began)
            leader.start()
        return gaps

    def ticks(self, entry: str = "every", **wanted: Any) -> list[dict[str, Any]]:
        """What has been published of an entry, in order."""
        return self._journal.entries(what="tick", entry=entry, **wanted)

    def wait_for_ticks(self, count: int, entry: str = "every", **wanted: Any) -> list[dict[str, Any]]:
        """The publications of an entry, once there are so many."""
        return self._journal.wait_for("tick", count, entry=entry, **wanted)

    def wait_for_more(self, count: int, entry: str = "every", **wanted: Any) -> list[dict[str, Any]]:
        """The publications that come from now on, once there are so many."""
        known = len(self.ticks(entry, **wanted))
        return self.wait_for_ticks(known + count, entry, **wanted)[known:]

    def messages(self) -> int:
        """How many messages are in the queue."""
        return int(self._broker.llen(QUEUE))

    def remembered(self, entry: str = "every") -> tuple[float, int, int]:
        """What Redis remembers of an entry: last run (server time), runs, missed."""
        run, runs, missed = map(int, str(self._client.hget(f"{LOCK}:entries", entry)).split())
        return run / 1e6, runs, missed

    def server_time(self) -> float:
        return server_us(self._client) / 1e6

    def assert_each_once(self, interval: float, entry: str = "every", stops: int = 0) -> None:
        """Publications are of runs an interval apart, but for one per stop that was past its check."""
        ticks = self.ticks(entry)
        assert len(ticks) > 1, ticks
        early = [(one, two) for one, two in pairwise(ticks) if two["run"] - one["run"] < interval - 0.02]
        assert len(early) <= stops, early

    def worst_gap(self, entry: str = "every", after: float = 0.0) -> float:
        """The longest time between two publications, on the server's clock."""
        at = [tick["at"] for tick in self.ticks(entry) if tick["at"] >= after]
        return max((two - one for one, two in pairwise(at)), default=0.0)


def assert_clean(log: str) -> None:
    """No error of any kind in a log."""
    for word in ("Traceback", "SchedulingError", "Message Error", "CRITICAL", "ERROR"):
        assert word not in log, log


def with_tables(database: str) -> dict[str, Any]:
    """What starts a beat with django-celery-beat's scheduler on these tables."""
    return {
        "setnx_beat_scheduler": "django_celery_beat.schedulers:DatabaseScheduler",
        "environment": {
            "DJANGO_SETTINGS_MODULE": "tests.beat.djangosettings",
            "BEAT_TEST_DATABASE": database,
        },
    }
