"""The app of the fan-out tests: for a worker as it stands, and made anew on any broker and lock server.

It has nothing of `tests.app`, which listens to every signal: a fan-out would send one for each duplicate.

`python -m tests.fanoutapp '{...}'` is a publisher in a process of its own: see `main`.
"""

import gc
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery

from celery_setnx import SingletonTask

BROKER_DB, LOCK_DB = 3, 1
QUEUE, PARKED = "fan", "parked"
BODIES, STARTED, GATE = "bodies", "started", "gate"
URL = os.environ.get("SETNX_TEST_URL", "redis://127.0.0.1:6379")


def make_app(broker: str, locks: str, **settings: Any) -> Celery:
    """An app whose results are beside its locks. Nobody consumes its calls unless they name the queue."""
    app = Celery("fanoutapp", broker=broker, backend=locks, set_as_current=False)
    app.conf.update(
        setnx_url=locks,
        setnx_prefix="t",
        task_default_queue=PARKED,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        result_expires=600,
        # A broker that a test lets die does not come back.
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0, "interval_max": 0},
    )
    app.conf.update(settings)
    return app


def make_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of an app; their bodies count themselves on the broker's server."""

    def count(name: Any) -> redis.Redis:
        client = redis.Redis.from_url(app.conf.broker_url, socket_timeout=None)
        client.hincrby(BODIES, str(name), 1)
        return client

    def task(function: Any, name: str = "", **options: Any) -> Any:
        name = f"fan.{name or function.__name__}"
        return app.task(base=SingletonTask, shared=False, name=name, **options)(function)

    def counted(name: Any, *rest: Any, **more: Any) -> Any:
        count(name)
        return [name, *rest]

    def gated(name: Any) -> Any:
        """At most one call of a name is queued or runs; it runs until its gate opens."""
        client = count(name)
        client.sadd(STARTED, str(name))
        if client.blpop([f"{GATE}:{name}"], timeout=600) is None:
            raise TimeoutError(f"nobody opened the gate of {name}")
        return name

    def spread(count: int) -> list[int]:
        """A task that fans out itself."""
        counts = app.tasks["fan.once"].fan_out((f"k{number}",) for number in range(count))
        return [counts.accepted, counts.duplicates, counts.failed]

    return SimpleNamespace(
        app=app,
        once=task(counted, "once", singleton={"key": "name", "dedupe": "until_started"}),
        free=task(counted, "free", singleton={"key": "name"}),  # not deduplicated
        silent=task(counted, "silent", ignore_result=True),
        gated=task(gated, singleton={"key": "name", "dedupe": "until_done"}),
        spread=task(spread),
    )


app = make_app(f"{URL}/{BROKER_DB}", f"{URL}/{LOCK_DB}")
tasks = make_tasks(app)


def main(
    *, broker: str, locks: str, calls: int, keys: int = 0, seed: int = 0, batch_size: int = 1000
) -> dict[str, Any]:
    """Fan out `calls` calls, each of another name, or of `keys` names in all, once the start is given.

    Returns:
        The counts, and by how many objects each batch has let those in use grow, in the median: what a lost
        connection or a full dictionary takes once is not kept for each call.
    """
    chosen = random.Random(seed)
    in_use: list[int] = []

    def drawn() -> Iterator[tuple[int]]:
        names = None if keys else chosen.sample(range(calls), calls)
        for index in range(calls):
            yield (names[index] if names else chosen.randrange(keys),)

    def measure(counts: Any) -> None:
        if counts.total >= calls * 0.2:
            gc.collect()
            in_use.append(sys.getallocatedblocks())

    gc.freeze()  # what is there now need not be looked at again
    with redis.Redis.from_url(locks) as client:
        client.blpop(["start"], timeout=30)
    once = make_tasks(make_app(broker, locks)).once
    counts = once.fan_out(drawn(), batch_size=batch_size, progress=measure)
    grown = statistics.median(after - before for before, after in pairwise(in_use))
    return {"accepted": counts.accepted, "duplicates": counts.duplicates, "grown": grown}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
