"""A complete app: a user is never rebuilt twice at a time. Run it with `python -m examples.quickstart`."""

import os
import subprocess
import sys
import time

from celery import Celery

from celery_setnx import SingletonTask, is_skipped
from examples.embedded import EmbeddedServer

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.quickstart", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])


@app.task(base=SingletonTask, singleton={"key": "user_id"})
def rebuild(user_id: int, reason: str) -> str:
    time.sleep(2)  # the work
    return "rebuilt"


if __name__ == "__main__":
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "examples.quickstart", "worker", "-c2"]
    )
    try:
        calls = [(7, "new name"), (7, "new mail"), (8, "moved")]
        sent = [rebuild.delay(*call) for call in calls]
        results = [result.get(timeout=30) for result in sent]
    finally:
        worker.terminate()
        worker.wait()
    ends = ["skipped: is being rebuilt already" if is_skipped(result) else result for result in results]
    for user_id, end in sorted((call[0], end) for call, end in zip(calls, ends)):
        print(f"user {user_id}: {end}")
    sys.exit(sum(map(is_skipped, results)) != 1)
