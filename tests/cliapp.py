"""The app that the command line is asked about: a task for each answer. No worker runs it."""

from typing import Any

from celery_setnx import SingletonTask, singleton
from tests.app import make_app

app = make_app("cliapp")


def task(name: str, **options: Any) -> Any:
    """A task with these options."""

    def body(customer: Any) -> None: ...

    return app.task(shared=False, base=SingletonTask, name=f"{__name__}.{name}", singleton=options)(body)


def decide(conflict: Any) -> Any:
    """Whatever it decides."""
    return conflict.skip()


@app.task(shared=False, base=SingletonTask)
def sync(customer: Any, since: Any = None, *, deep: bool = False) -> None:
    """Skips: the default."""


@app.task(shared=False, base=SingletonTask, singleton={"key": "customer"})
def named(customer: Any, reason: str) -> None:
    """Its key names one of its arguments."""


retrying = task("retrying", on_conflict="retry", max_wait=60)
waiting = task("waiting", on_conflict="wait")
raising = task("raising", on_conflict="raise")
joining = task("joining", on_conflict="join")
deciding = task("deciding", on_conflict=decide)
pending = task("pending", dedupe="until_started")
unique = task("unique", dedupe="until_done", on_duplicate="raise")
daily = task("daily", dedupe="until_done", dedupe_for=86_400)
crowd_daily = task("crowd_daily", dedupe="until_done", dedupe_for=3600, scope="day crowd")
crowd_hourly = task("crowd_hourly", dedupe="until_done", dedupe_for=3600, scope="day crowd")
newest = task("newest", dedupe="until_started", on_duplicate="replace")
saved = task("saved", debounce=300, debounce_max=600)
leading = task("leading", debounce=300, debounce_max=600, debounce_leading=True)
several = task("several", on_conflict="wait", limit=3)
paced = task("paced", rate="2/m")
paced_several = task("paced_several", limit=3, rate="2/m", on_conflict="retry")
paced_skips = task("paced_skips", rate="2/m", on_conflict="skip")
crowd_one = task("crowd_one", dedupe="until_done", scope="throng")
crowd_two = task("crowd_two", dedupe="until_done", scope="throng")


@app.task(shared=False)
@singleton(key="customer")
def decorated(customer: Any) -> None: ...


@app.task(shared=False)
def plain(customer: Any) -> None:
    """No lock."""
