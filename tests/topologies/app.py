"""The app of these tests: for a worker as the environment says, and made anew for any topology."""

import json
import os
import time
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_setnx import SingletonTask
from tests.workerapp import BROKER_DB, URL, body, control, journal

CONF = "TOPOLOGY_CONF"
LEASE_S = 2.0
ENDED = "ended"


def make_app(**conf: Any) -> Celery:
    """An app with a plain broker and backend, unless the settings name others."""
    app = Celery("topologies", set_as_current=False)
    plain = f"{URL}/{BROKER_DB}"
    defaults = {
        "broker_url": plain,
        "result_backend": plain,
        "setnx_prefix": "t",
        "setnx_same_host": False,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
        "result_expires": 600,
    }
    app.conf.update({**defaults, **conf})
    return app


def make_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of an app."""
    lease = {"key": "name", "lease": LEASE_S}

    @app.task(base=SingletonTask, shared=False, name="topologies.work", singleton=lease)
    def work(name: str, *_rest: Any) -> str:
        """Waits at its gate, if its name says so."""
        return body(name)

    @app.task(base=SingletonTask, shared=False, bind=True, name="topologies.careful", singleton=lease)
    def careful(self: Any, name: str) -> str:
        """Asks before it relies on its lock."""
        body(name)
        self.lock.ensure()
        return name

    @app.task(
        base=SingletonTask, shared=False, name="topologies.once", singleton={**lease, "dedupe": "until_done"}
    )
    def once(name: str) -> str:
        """At most one call of a name is queued or runs."""
        return body(name)

    @app.task(
        base=SingletonTask,
        shared=False,
        bind=True,
        name="topologies.load",
        singleton={**lease, "on_conflict": "retry", "retry_delay": 0.1, "retry_delay_max": 0.4},
    )
    def load(self: Any, name: str, seconds: float) -> str:
        """Takes its time."""
        about = {"task_id": self.request.id, "name": name, "fence": self.lock.fence}
        journal.write("start", at=time.monotonic(), **about)
        time.sleep(seconds)  # a body must take time to be in the way
        journal.write("end", at=time.monotonic(), **about)
        control.incr(ENDED)
        return name

    @app.task(base=SingletonTask, shared=False, bind=True, name="topologies.tell", singleton=lease)
    def tell(self: Any, name: str) -> dict[str, Any]:
        """Returns what its message said, and the way it came."""
        body(name)
        request = self.request
        way = request.delivery_info
        return {
            "tenant": request.headers.get("tenant"),
            "priority": way["priority"],
            "expires": request.expires,
            "timelimit": request.timelimit,
            "shadow": request.shadow,
            "retries": request.retries,
            "key": request.headers["singleton"]["key"],
            "exchange": way["exchange"],
            "queue": way["routing_key"].rpartition(".")[2],
        }

    @app.task(base=SingletonTask, shared=False, bind=True, name="topologies.again", singleton=lease)
    def again(self: Any, name: str, times: int, countdown: float = 2) -> int:
        """Retries itself so many times."""
        body(name)
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @app.task(
        base=SingletonTask,
        shared=False,
        name="topologies.paced",
        singleton={**lease, "on_conflict": lambda conflict: conflict.retry(3)},
    )
    def paced(name: str) -> str:
        """Waits for its lock three seconds at a time."""
        return body(name)

    return SimpleNamespace(
        app=app, work=work, careful=careful, once=once, load=load, tell=tell, again=again, paced=paced
    )


app = make_app(**json.loads(os.environ.get(CONF, "{}")))
tasks = make_tasks(app)
