"""The app of these tests: for a worker as the environment says, and made anew for any topology."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import Celery, current_task

import tests.app
from celery_setnx import SingletonTask
from celery_setnx.call import back, wake
from celery_setnx.connection import client_for
from celery_setnx.lock.names import terms_name
from celery_setnx.run import courier
from tests.app import body, control, journal, wait_for_gate
from tests.harness import server_us

# Locks live where the settings of a test say, be it only its broker or its backend.
make_app = partial(tests.app.make_app, "topologies", setnx_url=None, setnx_same_host=False)


def make_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of an app."""

    def task(name: str, **options: Any) -> Any:
        singleton = {"key": "name", "lease": 2.0, **options}
        return app.task(
            base=SingletonTask, shared=False, bind=True, name=f"topologies.{name}", singleton=singleton
        )

    @task("work")
    def work(self: Any, name: str, *_rest: Any) -> str:
        """Waits at its gate, if its name says so."""
        return body(name)

    @task("careful")
    def careful(self: Any, name: str) -> str:
        """Asks before it relies on its lock."""
        body(name)
        self.lock.ensure()
        return name

    @task("once", dedupe="until_done")
    def once(self: Any, name: str) -> str:
        """At most one call of a name is queued or runs."""
        return body(name)

    @task("load", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.4)
    def load(self: Any, name: str, seconds: float) -> str:
        """Takes its time."""
        about = {"task_id": self.request.id, "name": name, "fence": self.lock.fence}
        journal.write("start", **about)
        time.sleep(seconds)  # a body must take time to be in the way
        journal.write("end", **about)
        control.incr("ended")
        return name

    @task("partner", on_conflict="wait")
    def partner(self: Any, name: str, says_429_for_s: float = 0.0) -> str:
        """Its partner may say "not now": then it journals for how long, by the server's clock."""
        about = {"task_id": self.request.id, "name": name, "fence": self.lock.fence}
        journal.write("start", **about)
        if says_429_for_s:
            self.lock.hold_back(says_429_for_s, "429")
            client = client_for(self.app)
            text = client.get(terms_name(self.lock.key)).decode()
            until_us = int(text.split()[1])
            journal.write("held back", since_us=server_us(client), until_us=until_us, **about)
        journal.write("end", **about)
        return name

    @task("tell")
    def tell(self: Any, name: str) -> dict[str, Any]:
        """Returns what its message said, and the way it came."""
        body(name)
        request, way = self.request, self.request.delivery_info
        said = {what: getattr(request, what) for what in ("expires", "timelimit", "shadow", "retries")}
        return {
            **said,
            "tenant": request.headers.get("tenant"),
            "priority": way["priority"],
            "key": request.headers["singleton"]["key"],
            "exchange": way["exchange"],
            "queue": way["routing_key"].rpartition(".")[2],
        }

    @task("again")
    def again(self: Any, name: str, times: int, countdown: float = 2) -> int:
        """Retries itself so many times."""
        body(name)
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @task("paced", on_conflict=lambda conflict: conflict.retry(3))
    def paced(self: Any, name: str) -> str:
        """Waits for its lock three seconds at a time."""
        return body(name)

    names = work, careful, once, load, partner, tell, again, paced
    return SimpleNamespace(app=app, **{each.name.rpartition(".")[2]: each for each in names})


app = make_app()
tasks = make_tasks(app)
# Couriers come as soon as a test says, and not after a minute and every ten minutes.
courier.FIRST_S, courier.LATER_S = app.conf.get("courier_waits_s") or (courier.FIRST_S, courier.LATER_S)
wake._LOOK_S = app.conf.get("looks_after_s") or wake._LOOK_S


def hang(*_args: Any, **_options: Any) -> None:
    """Send no call on."""
    journal.write("hop", task_id=current_task.request.id)
    wait_for_gate("never")


if app.conf.get("hangs_on_hops"):
    back.declared = hang  # type: ignore[assignment]
