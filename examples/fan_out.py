"""Thousands of calls at once, each user's once: `python -m examples.fan_out`.

A log of page visits is fanned out as calls of one task, while a worker runs them. As long as a user's digest
is queued or runs, every other call for that user is a duplicate. At the end everything that was said is
checked.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import redis
from celery import Celery
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from celery_setnx import SingletonTask
from examples.embedded import EmbeddedServer

VISITS, USERS = 30_000, 1_000
DEADLINE_S = 120

if __name__ == "__main__" and "REDIS_URL" not in os.environ:
    server = EmbeddedServer()  # dies with this process
    os.environ["REDIS_URL"] = server.url()

app = Celery("examples.fan_out", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_default_queue="digests", result_expires=600)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
RUNS = "examples.fan_out:runs"


@app.task(base=SingletonTask, singleton={"key": "user_id", "dedupe": "until_done"})
def digest(user_id: int, page: str) -> None:
    client.hincrby(RUNS, str(user_id), 1)


def visits() -> Iterator[tuple[int, str]]:
    chance = random.Random(7)
    for number in range(VISITS):
        yield chance.randrange(USERS), f"/page/{number}"


def main(console: Console) -> bool:
    """Fan out, wait until all has run, and check it."""
    client.delete(RUNS)
    with console.status("the worker starts"):
        give_up = time.monotonic() + DEADLINE_S
        while not app.control.ping(timeout=0.2) and time.monotonic() < give_up:
            pass
    outcomes = []
    columns = (TextColumn("{task.description:10}"), BarColumn(20), TextColumn("{task.fields[said]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        published = bars.add_task("published", total=VISITS, said="")
        ran = bars.add_task("ran", total=None, said="")
        began = time.monotonic()

        def show(counts) -> None:
            said = f"{counts.total:,} calls: {counts.accepted:,} sent, {counts.duplicates:,} duplicates"
            bars.update(published, completed=counts.total, said=said)

        result = digest.fan_out(visits(), batch_size=100, each=outcomes.append, progress=show)
        took_s = time.monotonic() - began
        bars.update(ran, total=result.accepted)
        while (runs := sum(map(int, client.hvals(RUNS)))) < result.accepted:
            bars.update(ran, completed=runs, said=f"{runs:,} of {result.accepted:,}")
            if time.monotonic() - began > DEADLINE_S:
                break
            time.sleep(0.05)
        bars.update(ran, completed=runs, said=f"{runs:,} of {result.accepted:,}")

    sent = {outcome.task_id for outcome in outcomes if outcome.state == "accepted"}
    named = {outcome.task_id for outcome in outcomes if outcome.state == "duplicate"}
    checks = {
        f"{result.total:,} calls in {took_s:.1f} s: {result.total / took_s:,.0f} a second": (
            result.total == VISITS == len(outcomes) and not result.failed
        ),
        f"{result.accepted:,} were sent, and {runs:,} bodies ran": runs == result.accepted == len(sent),
        f"every user's digest ran, {client.hlen(RUNS):,} in all": (
            client.hlen(RUNS) == len({user for user, _ in visits()})
        ),
        f"each of {result.duplicates:,} duplicates names a call that was sent": named <= sent,
    }
    for claim, is_true in checks.items():
        console.print("[green]✓[/]" if is_true else "[red]✗[/]", claim)
    return all(checks.values())


if __name__ == "__main__":
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "examples.fan_out", "worker", "-c2", "-l", "WARNING"]
    )
    try:
        success = main(Console(highlight=False))
    finally:
        client.delete(RUNS)
        worker.terminate()
        worker.wait()
    sys.exit(not success)
