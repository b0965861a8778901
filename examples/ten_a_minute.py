"""At most ten starts of a partner's calls in any minute, over two workers: `python -m examples.ten_a_minute`.

Six seconds play the minute. The calls of two partners are sent, and one is answered with 429. Starts are
noted in a journal, by the lock server's clock; that is printed and checked at the end.
"""

import json
import os
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready

from celery_setnx import SingletonTask
from examples.checked import all_shown, wait_until
from examples.embedded import EmbeddedServer

RATE = (10, 6)  # ten in any 6 s; in life it is "10/m"
STARTS, PERIOD_S = RATE
CALLS, WORK_S = 25, 0.2
REFUSED = 3  # the call that the partner answers with a 429, the first time
WORKERS = ("one", "another")

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.ten_a_minute", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_default_queue="ten_a_minute", result_expires=600, worker_prefetch_multiplier=1)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
JOURNAL = "examples.ten_a_minute:journal"


class TooManyRequests(Exception):
    """The partner has answered 429."""


def post(partner: str, number: int, attempt: int) -> None:
    """The partner's API, which refuses one call the first time."""
    time.sleep(WORK_S)
    if number == REFUSED and attempt == 0:
        raise TooManyRequests


@app.task(
    base=SingletonTask,
    bind=True,
    singleton={"key": "partner", "rate": RATE},
    autoretry_for=(TooManyRequests,),
    retry_backoff=True,
)
def order(self: SingletonTask, partner: str, number: int) -> None:
    note("starts", partner, number, us=self.lock.fence, worker=self.request.hostname)
    try:
        post(partner, number, self.request.retries)
    finally:
        note("ends", partner, number)


@worker_ready.connect
def note_ready(**_details: Any) -> None:
    note("is ready")


def note(what: str, partner: str = "", number: int = 0, **details: Any) -> None:
    seconds, microseconds = client.time()
    at_us = seconds * 1_000_000 + microseconds
    entry = {"what": what, "partner": partner, "number": number, "us": at_us, **details}
    client.rpush(JOURNAL, json.dumps(entry))


def journal(**wanted: Any) -> list[dict[str, Any]]:
    """What happened, in order; only entries with these details."""
    entries = [json.loads(entry) for entry in client.lrange(JOURNAL, 0, -1)]
    return [entry for entry in entries if wanted.items() <= entry.items()]


def send() -> None:
    """Send more calls of a partner at once than may start in two minutes, and some of another one."""
    client.delete(JOURNAL)
    with worker(WORKERS[0]), worker(WORKERS[1]):
        wait_until(lambda: len(journal(what="is ready")) == len(WORKERS), "both workers are ready")
        calls = [order.delay("acme", number) for number in range(CALLS)]
        calls += [order.delay("bolt", number) for number in range(CALLS, CALLS + 3)]
        for call in calls:
            call.get(timeout=60)


@contextmanager
def worker(name: str) -> Iterator[None]:
    celery = [sys.executable, "-m", "celery", "-q", "-A", "examples.ten_a_minute", "worker"]
    options = ["-c", "2", "-n", name, "-l", "ERROR", "--without-gossip", "--without-mingle"]
    process = subprocess.Popen([*celery, *options])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def starts_of(partner: str) -> list[int]:
    """When the calls of a partner have started, on the lock server's clock, in microseconds."""
    return sorted(entry["us"] for entry in journal(what="starts", partner=partner))


def most_within(starts: list[int], period_s: float) -> int:
    """How many starts there are in the window of so many seconds that has most of them."""
    return max(bisect_left(starts, us + period_s * 1e6) - place for place, us in enumerate(starts))


def main() -> bool:
    """Send the calls, print what became of them, and check it."""
    send()
    starts, entries = starts_of("acme"), journal(what="starts")
    most = most_within(starts, PERIOD_S)
    first, next_one = starts[0], starts[STARTS]

    print(f"acme: {len(starts)} starts of {CALLS} calls, for one was refused with a 429, and came again")
    print(f"most in any {PERIOD_S} s: {most}")
    print(f"the eleventh started {(next_one - first) / 1e6:.2f} s after the first")
    times = Counter(entry["number"] for entry in entries)
    last_of_bolt = max(starts_of("bolt"))
    checks = {
        "every call starts once, and the refused one twice": times
        == Counter({**dict.fromkeys(range(CALLS + 3), 1), REFUSED: 2}),
        "never more than ten starts of a partner in any window": most == STARTS,
        "both workers have started some": len({entry["worker"] for entry in entries}) == len(WORKERS),
        "a partner does not wait for another": last_of_bolt < next_one,
    }
    return all_shown(checks)


if __name__ == "__main__":
    try:
        success = main()
    finally:
        client.delete(JOURNAL)
    sys.exit(not success)
