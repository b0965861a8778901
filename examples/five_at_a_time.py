"""At most five calls of a tenant at a time, over two workers: `python -m examples.five_at_a_time`.

The calls of two tenants are sent, and one worker is killed in the middle of a call. Bodies are noted in a
journal, with their permits, which is printed and checked at the end.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready

from celery_setnx import SingletonTask, signals
from examples.checked import all_shown, wait_until
from examples.embedded import EmbeddedServer

LIMIT, LEASE_S, WORK_S, LIVES_S, LONG_S = 5, 3, 0.7, 1.0, 600
WAITING = 2 * LIMIT  # calls beyond those that run

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.five_at_a_time", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(
    task_default_queue="five_at_a_time",
    result_expires=600,
    worker_prefetch_multiplier=1,
    # The two workers play two hosts. On one host a dead process is proved dead: its permit is free at once.
    setnx_same_host=False,
)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
JOURNAL = "examples.five_at_a_time:journal"


@app.task(
    base=SingletonTask,
    bind=True,
    singleton={"key": "tenant", "limit": LIMIT, "on_conflict": "wait", "lease": LEASE_S},
)
def sync(self: SingletonTask, tenant: str, number: int, seconds: float = WORK_S) -> None:
    note("begins", tenant, number, permit=self.lock.permit)
    time.sleep(seconds)  # the work
    note("ends", tenant, number, permit=self.lock.permit)


@signals.lock_taken_over.connect
def note_take_over(sender: Any, holder: Any, **_details: Any) -> None:
    note("is taken over", "acme", 0, deadline=holder.deadline)


@worker_ready.connect
def note_ready(**_details: Any) -> None:
    note("is ready")


def note(what: str, tenant: str = "", number: int = 0, **details: Any) -> None:
    seconds, microseconds = client.time()
    entry = {"what": what, "tenant": tenant, "number": number, "at": seconds + microseconds / 1e6, **details}
    client.rpush(JOURNAL, json.dumps(entry))


def journal(**wanted: Any) -> list[dict[str, Any]]:
    """What happened, in order; only entries with these details."""
    entries = [json.loads(entry) for entry in client.lrange(JOURNAL, 0, -1)]
    return [entry for entry in entries if wanted.items() <= entry.items()]


def send() -> None:
    """Have one worker die in the first call of a tenant, while that and another tenant have more calls."""
    client.delete(JOURNAL)
    with worker("solo", "other_host") as doomed, worker("prefork", "five_at_a_time"):
        wait_until(lambda: len(journal(what="is ready")) == 2, "both workers are ready")
        sync.apply_async(("acme", 0, LONG_S), queue="other_host")
        (first,) = wait_until(lambda: journal(what="begins"), "the first call runs")
        calls = [sync.delay("bolt", number) for number in range(3)]
        numbers = count(1)

        def goes_on(until: Callable[[], Any]) -> Any:
            """Whether it is so; meanwhile there are always some calls of acme that wait."""
            if len(calls) - len(journal(what="ends")) < LIMIT + WAITING:
                calls.append(sync.delay("acme", next(numbers)))
            return until()

        wait_until(partial(goes_on, lambda: peak("acme") == LIMIT), "as many run as may")
        wait_until(partial(goes_on, lambda: time_of_server() > first["at"] + LIVES_S), "all go on")
        doomed.kill()
        note("dies", "acme", 0)
        wait_until(partial(goes_on, lambda: journal(what="is taken over")), "its permit is another's")
        for call in calls:
            call.get(timeout=60)


def time_of_server() -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


@contextmanager
def worker(pool: str, queue: str) -> Iterator["subprocess.Popen[bytes]"]:
    celery = [sys.executable, "-m", "celery", "-q", "-A", "examples.five_at_a_time", "worker"]
    options = ["-P", pool, "-c", "8", "-Q", queue, "-n", queue, "-l", "ERROR"]
    process = subprocess.Popen([*celery, *options, "--without-gossip", "--without-mingle"])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def peak(tenant: str) -> int:
    """How many bodies of a tenant ran at once at most, by the journal; the dead one runs no more."""
    running = most = 0
    for entry in journal(tenant=tenant):
        running += {"begins": 1, "ends": -1, "dies": -1}.get(entry["what"], 0)
        most = max(most, running)
    return most


def main() -> bool:
    """Send the calls, print what became of them, and check it."""
    send()
    entries = journal()
    begun = [entry for entry in entries if entry["what"] == "begins"]
    ((died,), (taken_over,)) = journal(what="dies"), journal(what="is taken over")
    before, after = ([e for e in begun if (e["at"] > taken_over["at"]) is late] for late in (False, True))
    meanwhile = {e["permit"] for e in before if e["at"] > died["at"] and e["tenant"] == "acme"}
    permits, lost = {e["permit"] for e in begun if e["tenant"] == "acme"}, begun[0]["permit"]
    heir = next(e for e in after if e["permit"] == lost)

    print(f"acme: {peak('acme')} calls at once, under permits {sorted(permits)}")
    print(f"kill -9 of a worker in a call of acme, under permit {lost}")
    print(f"permit {lost} is another's {heir['at'] - died['at']:.1f} s later; its lease was {LEASE_S} s")
    calls, ended = (Counter((e["tenant"], e["number"]) for e in journal(what=w)) for w in ("begins", "ends"))
    last_of_bolt = max(entries.index(entry) for entry in begun if entry["tenant"] == "bolt")
    checks = {
        "every call runs once, but for the end of the dead one": calls == ended + Counter([("acme", 0)]),
        "never more than five of a tenant at a time": peak("acme") == LIMIT,
        "a tenant does not wait for another": last_of_bolt < entries.index(begun[-1]),
        "a death costs one permit, and the others go on": bool(meanwhile) and lost not in meanwhile,
        "until its lease has ended": taken_over["at"] >= taken_over["deadline"],
    }
    return all_shown(checks)


if __name__ == "__main__":
    try:
        success = main()
    finally:
        client.delete(JOURNAL)
    sys.exit(not success)
