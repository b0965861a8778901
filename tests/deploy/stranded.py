"""A worker whose bodies need no network: `python -c` of this text, in a container (`Stack.stranded`)."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import task_postrun

from celery_setnx import LockLost, SingletonTask, signals

GO_ON = Path("/tmp/go-on")

app = Celery(broker=os.environ["DEMO_URL"], backend=os.environ["DEMO_URL"])
SOON = {"on_conflict": "retry", "retry_delay": 0.1, "retry_delay_max": 0.1}


def write(what: str, task_id: str, **details: Any) -> None:
    """To the container's log, which no cut takes away; past Celery, which turns prints into log lines."""
    entry = {"what": what, "task_id": task_id, "at": time.monotonic(), **details}
    os.write(1, f"{json.dumps(entry)}\n".encode())


@app.task(base=SingletonTask, bind=True, name="stranded", singleton={"key": "name", "lease": 3, **SOON})
def stranded(self: Any, name: str) -> None:
    """Asks after its lock until it has lost it, or may end; ends when it finds a file."""
    write("start", self.request.id, key=self.lock.key, fence=self.lock.fence)
    try:
        while not GO_ON.exists():
            self.lock.ensure()
            time.sleep(0.05)
    except LockLost:
        write("told", self.request.id)
        while not GO_ON.exists():
            time.sleep(0.05)
        raise


def tell(signal: Any, task_id: str, holder: Any = None, **_details: Any) -> None:
    """Of a lock."""
    write(SIGNALS[signal], task_id, holder=holder and holder.task_id)


SIGNALS = {getattr(signals, f"lock_{what}"): what for what in ("conflict", "lost", "taken_over", "released")}
for signal in SIGNALS:
    signal.connect(tell, weak=False)


@task_postrun.connect
def tell_state(task_id: str, state: str, **_details: Any) -> None:
    write("postrun", task_id, state=state)


if __name__ == "__main__":
    app.worker_main(["worker", "--concurrency", "1", "--queues", sys.argv[1], "--loglevel", "INFO"])
