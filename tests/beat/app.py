"""The app of the beats and workers of these tests. What is published is journalled just before it is."""

from typing import Any

import redis
from celery.schedules import crontab
from celery.signals import before_task_publish

from celery_setnx import signals
from tests.app import LOCK_DB, URL, journal, make_app
from tests.beat.beats import LOCK, QUEUE
from tests.harness import server_us

app = make_app("beats", setnx_same_host=False, setnx_beat_lease=3, task_default_queue=QUEUE)
app.set_current()  # a crontab tells the time by the current app


def entry(name: str, spec: Any) -> dict[str, Any]:
    """An entry by its interval in seconds, its crontab, or in full."""
    if isinstance(spec, dict):
        return {"args": [name], **spec}
    schedule = crontab(*spec.split()) if isinstance(spec, str) else spec
    return {"task": "beats.tick", "args": [name], "schedule": schedule}


app.conf.beat_schedule = {name: entry(name, spec) for name, spec in (app.conf.get("entries") or {}).items()}

locks = redis.Redis.from_url(f"{URL}/{LOCK_DB}", decode_responses=True)


@before_task_publish.connect
def journal_publication(body: Any, headers: Any, **_details: Any) -> None:
    """The entry, and what Redis remembers of it when its message is sent, on the server's clock."""
    if headers["task"] != "beats.tick":
        return
    entry, at_us = body[0][0], server_us(locks)
    run, runs, missed = map(int, (locks.hget(f"{LOCK}:entries", entry) or "0 0 0").split())
    about = {"run": run / 1e6, "runs": runs, "missed": missed, "at": at_us / 1e6}
    journal.write("tick", entry=entry, id=headers["id"], **about)


@signals.tick_late.connect
def journal_lateness(entry: str, late_s: float, missed: int, **_details: Any) -> None:
    journal.write("late", entry=entry, late_s=late_s, missed=missed)


@app.task(name="beats.tick", shared=False)
def tick(name: str) -> None:
    journal.write("run", name=name)
