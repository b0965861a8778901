"""A slow periodic job and three beats, whose leader is killed: `python -m examples.periodic`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis
from celery import Celery

from celery_setnx import SingletonTask
from celery_setnx.beat import leader
from examples.embedded import EmbeddedServer

INTERVAL_S, WORK_S, LEASE_S = 1.0, 2.5, 3.0
DEADLINE_S = 60

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.periodic", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.beat_schedule = {"report": {"task": "examples.periodic.report", "schedule": INTERVAL_S}}
app.conf.update(setnx_beat_lease=LEASE_S, task_ignore_result=True, task_default_queue="periodic")
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
RUNNING, RUNS = "examples.periodic:running", "examples.periodic:runs"


@app.task(base=SingletonTask, singleton={"key": (), "dedupe": "until_started"})
def report() -> None:
    client.hincrby(RUNS, f"{client.incr(RUNNING)} at a time", 1)
    time.sleep(WORK_S)  # the work
    client.decr(RUNNING)


def celery(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "-q", "-A", "examples.periodic", *arguments, "-l", "WARNING"]
    return subprocess.Popen(command)


def wait_until(condition: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > DEADLINE_S:
            sys.exit(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def main() -> bool:
    """Kill the leader, go on under the next one, and check that no two reports ran at a time."""
    client.delete(RUNNING, RUNS)
    scheduler = ("-S", "celery_setnx.beat:HotStandbyScheduler")
    with tempfile.TemporaryDirectory() as files:
        beats = [celery("beat", *scheduler, "-s", str(Path(files) / str(n))) for n in range(3)]
        started = [celery("worker", "-c", "4"), *beats]
        try:
            wait_until(lambda: client.hlen(RUNS) > 0, "a first report")
            first = leader(app)
            print("leads:", first)
            os.kill(first.info["pid"], signal.SIGKILL)
            after_s = wait_until(lambda: (leader(app) or first).token != first.token, "another leader")
            print(f"killed; {after_s:.1f} s later leads:", leader(app))
            runs = sum(map(int, client.hvals(RUNS)))
            wait_until(lambda: sum(map(int, client.hvals(RUNS))) >= runs + 2, "two more reports")
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
    seen = client.hkeys(RUNS)
    print(f"reports every {INTERVAL_S:g} s that take {WORK_S:g} s:", ", ".join(sorted(seen)))
    return seen == ["1 at a time"]


if __name__ == "__main__":
    sys.exit(not main())
