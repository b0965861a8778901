"""Policies of one's own: `python -m examples.own_policy`.

A callable decides what becomes of a call whose lock another holds; another callable decides what a duplicate
gets; and a receiver of a signal counts.
"""

import os
import subprocess
import sys
import time
from typing import Any

import redis
from celery import Celery

from celery_setnx import Conflict, Duplicate, SingletonTask, signals
from examples.checked import DEADLINE_S, all_shown, wait_until
from examples.embedded import EmbeddedServer

FRESH_S, WORK_S = 2.0, 6.0

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.own_policy", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_default_queue="own_policy", result_expires=600)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
CONFLICTS = "examples.own_policy:conflicts"


def decide(conflict: Conflict) -> Any:
    """A run that began just now sees what we would see. An older one may not: then come back."""
    since = conflict.holder.since
    if since is None:  # no task has the lock: somebody has set it by hand
        return conflict.fail()
    if conflict.server_time - since < FRESH_S:
        return f"left to {conflict.holder.task_id}"
    return conflict.retry(countdown=0.5)


@app.task(base=SingletonTask, singleton={"key": "shop", "on_conflict": decide})
def sync(shop: str) -> str:
    time.sleep(WORK_S)  # the work
    return f"{shop} is in sync"


class Busy(Exception):
    """What a web page may say with status 409."""


def refuse(duplicate: Duplicate) -> Any:
    """A queued call is as good as ours. A running one has begun without what we know."""
    if duplicate.holder is None:
        return duplicate.result
    raise Busy(f"{duplicate.task}{duplicate.args} runs already, as {duplicate.task_id}")


@app.task(base=SingletonTask, singleton={"key": "month", "dedupe": "until_done", "on_duplicate": refuse})
def invoice(month: str) -> str:
    time.sleep(1)  # the work
    return f"invoices of {month}"


@signals.lock_conflict.connect
def count(sender: SingletonTask, policy: str, **_details: Any) -> None:
    client.hincrby(CONFLICTS, f"{sender.name}, policy: {policy}", 1)


def main() -> bool:
    """One conflict with a fresh run, one with an older run, and two duplicates."""
    client.delete(CONFLICTS)
    first = sync.delay("Lyon")
    since = wait_until(lambda: sync.locked("Lyon"), "the first sync runs").since
    early = sync.delay("Lyon").get(timeout=DEADLINE_S)
    wait_until(lambda: client.time()[0] >= since + FRESH_S, "the first sync is older")
    late = sync.delay("Lyon")
    print("first sync  ", first.get(timeout=DEADLINE_S))
    print("early call  ", early)
    print("late call   ", late.get(timeout=DEADLINE_S))

    queued = invoice.apply_async(["May"], countdown=1)
    again = invoice.delay("May")
    print("queued call  gives its result to the next one:", again.id == queued.id and again.deduplicated)
    wait_until(lambda: invoice.locked("May"), "the invoices are written")
    busy = ""
    try:
        invoice.delay("May")
    except Busy as error:
        busy = str(error)
    print("running call", busy)
    result = queued.get(timeout=DEADLINE_S)

    conflicts = client.hgetall(CONFLICTS)
    refused = f"{invoice.name}('May',) runs already, as {queued.id}"
    checks = {
        "the early call has what the callable returned": early == f"left to {first.id}",
        "the late call came back until it could run": late.result == first.result == "Lyon is in sync",
        "a duplicate of a queued call got its result": (again.id, result) == (queued.id, "invoices of May"),
        "a duplicate of a running call was refused": busy == refused,
        f"the receiver heard of every conflict of {', '.join(conflicts)}": len(conflicts) == 1
        and int(*conflicts.values()) >= 2,
    }
    return all_shown(checks)


if __name__ == "__main__":
    celery = [sys.executable, "-m", "celery", "-q", "-A", "examples.own_policy"]
    worker = subprocess.Popen([*celery, "worker", "-c2", "-l", "WARNING"])
    try:
        success = main()
    finally:
        client.delete(CONFLICTS)
        worker.terminate()
        worker.wait()
    sys.exit(not success)
