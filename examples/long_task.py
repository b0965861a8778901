"""A task longer than its lease, and a holder that is frozen past its lease: `python -m examples.long_task`.

Reports are written page by page into an SQLite file, every write with the fence of its holder. The first
report takes longer than the lease. The process that writes the second one is stopped (SIGSTOP) past its
lease, as a paused virtual machine would be; another takes over; then the first wakes (SIGCONT) and goes on.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from celery_setnx import LockLost, SingletonTask, is_skipped
from examples.checked import DEADLINE_S, all_shown, wait_until
from examples.embedded import EmbeddedServer

PAGES, PAGE_S, LEASE_S = 3, 2.0, 2.0

if __name__ == "__main__":
    if "REDIS_URL" not in os.environ:
        server = EmbeddedServer()  # dies with this process
        os.environ["REDIS_URL"] = server.url()
    directory = tempfile.TemporaryDirectory()
    os.environ["LONG_TASK_DATABASE"] = str(Path(directory.name, "reports.sqlite3"))

app = Celery("examples.long_task", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_default_queue="long_task", result_expires=600)
client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
DATABASE = os.environ["LONG_TASK_DATABASE"]
JOURNAL = "examples.long_task:journal"


@app.task(
    bind=True,
    base=SingletonTask,
    singleton={"key": "name", "lease": LEASE_S, "on_conflict": "wait"},
    throws=(LockLost,),  # logged in one line
)
def write_report(self: SingletonTask, name: str) -> int:
    """Write the pages that are missing, and return the fence."""
    fence = self.lock.fence
    page = take(name, fence)  # the first write: from now on an earlier holder's are refused
    while page < PAGES:
        self.lock.ensure()  # raises LockLost if the lock may be another's by now
        page += 1
        note("works on", name, page, fence)
        time.sleep(PAGE_S)  # the work. Who stands still here has a lock that was ensured, and has it no more
        is_written = write(name, page, fence)
        note("has written" if is_written else "was refused", name, page, fence)
    return fence


def write(name: str, page: int, fence: int) -> bool:
    """Write as the holder with this fence; False if a later holder has written."""
    with closing(sqlite3.connect(DATABASE, timeout=10)) as database, database:
        changed = database.execute(
            "UPDATE report SET pages = ?, fence = ? WHERE name = ? AND fence <= ?", (page, fence, name, fence)
        )
        return changed.rowcount == 1


def take(name: str, fence: int) -> int:
    """Write the fence, and only then read how many pages there are."""
    with closing(sqlite3.connect(DATABASE, timeout=10)) as database, database:
        taken = database.execute(
            "UPDATE report SET fence = ? WHERE name = ? AND fence <= ?", (fence, name, fence)
        )
        if taken.rowcount == 0:
            raise LookupError(f"there is no report {name!r}, or a later holder has written it")
        return database.execute("SELECT pages FROM report WHERE name = ?", (name,)).fetchone()[0]


def note(what: str, *details: Any) -> None:
    client.rpush(JOURNAL, json.dumps([what, *details]))


def noted(what: str, *details: Any) -> list[list[Any]]:
    entries = [json.loads(entry) for entry in client.lrange(JOURNAL, 0, -1)]
    return [entry for entry in entries if entry[: 1 + len(details)] == [what, *details]]


def renewed() -> dict[str, bool]:
    """The report of May takes longer than the lease, and nobody else gets the lock."""
    first = write_report.delay("May")
    wait_until(lambda: noted("works on", "May"), "May: the first page")
    began = time.monotonic()
    wait_until(lambda: noted("works on", "May", PAGES), "May: the last page")
    second = write_report.apply_async(["May"], singleton={"on_conflict": "skip"})
    skipped = second.get(timeout=DEADLINE_S)
    fence = first.get(timeout=DEADLINE_S)
    took_s = time.monotonic() - began
    print(f"May   written in {took_s:.1f} s, under a lease of {LEASE_S:.1f} s, with fence {fence}")
    return {
        "a task may run for longer than its lease, which is renewed": took_s > LEASE_S
        and len(noted("has written", "May")) == PAGES,
        "a call that comes after the lease meets the lock": is_skipped(skipped),
    }


def frozen() -> dict[str, bool]:
    """Who writes the report of June is stopped past the lease."""
    first = write_report.delay("June")
    ((*_, fence),) = wait_until(lambda: noted("works on", "June", 2), "June: page 2")
    pid = write_report.locked("June").info["pid"]
    os.kill(pid, signal.SIGSTOP)
    print(f"June  fence {fence} works on page 2, and is frozen (SIGSTOP)")
    try:
        stopped_at = time.monotonic()
        second = write_report.delay("June")
        (_, (*_, later)) = wait_until(
            lambda: len(found := noted("works on", "June", 2)) > 1 and found, "June: taken over"
        )
        after_s = time.monotonic() - stopped_at
        print(f"June  fence {later} takes over {after_s:.1f} s later, and works on page 2")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: noted("was refused", "June"), "June: a write is refused")
    print(f"June  fence {fence} wakes (SIGCONT), and writes page 2: refused")
    error = first.get(timeout=DEADLINE_S, propagate=False)
    print(f"June  fence {fence} asks lock.ensure(): {type(error).__name__}")
    finished = second.get(timeout=DEADLINE_S)
    print(f"June  fence {finished} has written the last page")
    with closing(sqlite3.connect(DATABASE)) as database:
        row = database.execute("SELECT pages, fence FROM report WHERE name = 'June'").fetchone()
    refused = noted("was refused")
    written = [entry[2:] for entry in noted("has written", "June")]
    return {
        "the fence has grown": fence < later,
        "the stale holder's write was refused, and no other": refused == [["was refused", "June", 2, fence]],
        "ensure() ended the stale body": isinstance(error, LockLost),
        "every page was written once, by who had the lock": written
        == [[1, fence], *([page, later] for page in range(2, PAGES + 1))],
        "the report is whole": row == (PAGES, later) and finished == later,
    }


def main() -> bool:
    """Both reports, and what must be true of them."""
    client.delete(JOURNAL)
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute("CREATE TABLE report (name TEXT PRIMARY KEY, pages BIGINT, fence BIGINT)")
        database.execute("INSERT INTO report VALUES ('May', 0, 0), ('June', 0, 0)")
    checks = {**renewed(), **frozen()}
    return all_shown(checks)


if __name__ == "__main__":
    celery = [sys.executable, "-m", "celery", "-q", "-A", "examples.long_task"]
    worker = subprocess.Popen([*celery, "worker", "-c2", "-l", "WARNING"])
    try:
        success = main()
    finally:
        client.delete(JOURNAL)
        worker.terminate()
        worker.wait()
    sys.exit(not success)
