"""One customer's events one after another, customers side by side: `python -m examples.per_customer`.

The events of three customers are sent to one worker with four processes. Bodies and waits are noted in a
journal, which is printed and checked at the end.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import redis
from celery import Celery

from celery_setnx import SingletonTask, signals
from examples.checked import all_shown, wait_until
from examples.embedded import EmbeddedServer

CUSTOMERS, EVENTS = ("ann", "bob", "cleo"), ("order", "payment", "parcel")
WORK_S = 0.8

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.per_customer", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_default_queue="per_customer", result_expires=600)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
JOURNAL = "examples.per_customer:journal"


@app.task(base=SingletonTask, singleton={"key": "customer", "on_conflict": "wait"})
def apply_event(customer: str, event: str) -> None:
    note("begins", customer, event)
    time.sleep(WORK_S)  # the work
    note("ends", customer, event)


@signals.lock_waiting.connect
def note_waiting(sender: SingletonTask, **_details: Any) -> None:
    note("waits", *sender.request.args)


def note(what: str, customer: str, event: str) -> None:
    seconds, microseconds = client.time()
    client.rpush(JOURNAL, json.dumps([what, customer, event, seconds + microseconds / 1e6]))


def journal() -> list[list[Any]]:
    """What happened, in order: what, to whom, which event, when."""
    return [json.loads(entry) for entry in client.lrange(JOURNAL, 0, -1)]


def send() -> None:
    """Send an event of each customer, and the next ones when these have come to their locks."""
    for event in EVENTS:
        for customer in CUSTOMERS:
            apply_event.delay(customer, event)
        # Calls that are sent within milliseconds of each other may come to their lock in another order.
        wait_until(
            lambda event=event: {entry[1] for entry in journal() if entry[2] == event} == {*CUSTOMERS},
            f"every {event} runs, or waits in line",
        )


def main() -> bool:
    """Send the events, print when each was applied, and check it."""
    client.delete(JOURNAL)
    send()
    total = len(CUSTOMERS) * len(EVENTS)
    wait_until(lambda: sum(entry[0] == "ends" for entry in journal()) == total, "all events are applied")

    at = {(what, customer, event): when for what, customer, event, when in journal()}
    origin = min(at.values())
    print(f"{'customer':10}{'event':10}{'began':>7}{'ended':>10}")
    for customer in CUSTOMERS:
        for event in EVENTS:
            began, ended = (at[what, customer, event] - origin for what in ("begins", "ends"))
            print(f"{customer:10}{event:10}{began:5.1f} s{ended:8.1f} s")

    applied = [(customer, event) for what, customer, event, _when in journal() if what == "ends"]
    running, peak, is_single = set(), 0, True
    for what, customer, _event, _when in journal():
        if what == "begins":
            is_single = is_single and customer not in running
            running.add(customer)
        elif what == "ends":
            running.discard(customer)
        peak = max(peak, len(running))
    orders = [[e[2] for e in journal() if e[:2] == ["begins", customer]] for customer in CUSTOMERS]
    checks = {
        "every event is applied once": len(applied) == len({*applied}) == total,
        "one customer's events are applied one at a time": is_single,
        "and in order": orders == [[*EVENTS]] * len(CUSTOMERS),
        "customers do not wait for each other": peak > 1,
    }
    return all_shown(checks)


if __name__ == "__main__":
    celery = [sys.executable, "-m", "celery", "-q", "-A", "examples.per_customer"]
    worker = subprocess.Popen([*celery, "worker", "-c4", "-l", "WARNING"])
    try:
        success = main()
    finally:
        client.delete(JOURNAL)
        worker.terminate()
        worker.wait()
    sys.exit(not success)
