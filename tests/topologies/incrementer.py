"""A process that increments an unprotected counter under a lock: `python -m tests.topologies.incrementer`."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from celery import Celery

from celery_setnx import LockUnavailable, SetnxLock
from celery_setnx.connection import client_for


def main(*, url: str, lock: str, counter: str, times: int) -> dict[str, Any]:
    """Increment the counter so many times.

    Returns:
        What the lock answered how often, and the fences in order.
    """
    app = Celery("incrementer", set_as_current=False)
    app.conf.update(setnx_url=url)
    client, file = client_for(app), Path(counter)
    answers: Counter[str] = Counter()
    fences = []
    while len(fences) < times:
        setnx_lock = SetnxLock(client, lock, lease=5)
        try:
            outcome = setnx_lock.acquire(wait=10)
        except LockUnavailable as error:
            answers[f"unavailable: {error.reason[:60]}"] += 1
            continue
        held = outcome.lock
        if held is None:
            answers["held"] += 1
            continue
        number = int(file.read_text())
        held.ensure()
        file.write_text(str(number + 1))
        fences.append(held.fence)
        try:
            answers[held.release()] += 1
        except LockUnavailable as error:
            answers[f"not released: {error.reason[:60]}"] += 1
    return {"answers": answers, "fences": fences}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
