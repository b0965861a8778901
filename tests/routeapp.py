"""Tasks whose calls come by a topic exchange, under hooks that put things on the request and change it."""

from typing import Any

from celery import Task
from celery.signals import task_prerun
from kombu import Exchange, Queue

from celery_setnx import SingletonTask, singleton
from tests.app import body, journal, make_app

__all__ = ["app", "journal"]

FEEDS, FEED = Exchange("routes", type="topic"), {"exchange": "routes", "routing_key": "feed.import"}
OPTIONS = {"key": "name", "lease": 600, "retry_delay": 0.1, "retry_delay_max": 0.2}

app = make_app("routes")
app.conf.update(
    task_queues=[
        Queue("routes.feeds", FEEDS, routing_key="feed.#"),
        Queue("routes.rest", FEEDS, routing_key="rest.#"),
        Queue("routes.twice", FEEDS, routing_key="twice.*"),
        Queue("routes.again", FEEDS, routing_key="twice.#"),
    ],
    task_default_queue="routes.rest",
)


class Thing:
    """Nothing that a message can have, nor anything that may be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __hash__ = object.__hash__


def put_things_on(task: Task, kwargs: dict[str, Any]) -> None:
    """What hooks of all kinds do."""
    task.request.session, task.request.by_accident = Thing(), {"of": "this process"}
    task.request.update(pyramid_env={"request": Thing()})
    task.request.stamps = {"not": "sent"}
    kwargs["nested"]["seen"] += 1
    kwargs["user"] = Thing()


@task_prerun.connect
def put_in_prerun(task: Task, kwargs: dict[str, Any], **_details: Any) -> None:
    if task.name == "routes.plain_base":
        put_things_on(task, kwargs)


class Hooked(SingletonTask):
    """A base class whose hook runs before the lock is asked for."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        put_things_on(self, kwargs)


def told(task: Task, name: str, nested: dict[str, int]) -> dict[str, Any]:
    """What the body sees of its call."""
    request = task.request
    body(name)
    way = {word: request.delivery_info[word] for word in FEED}
    return {"seen": nested["seen"], "tenant": request.tenant, "headers": sorted(request.headers), **way}


def work(self: Task, name: str, nested: dict[str, int], user: Any) -> dict[str, Any]:
    return told(self, name, nested)


for policy in ("retry", "wait", "join"):
    options: dict[str, Any] = {"singleton": {**OPTIONS, "on_conflict": policy}, "shared": False}
    app.task(work, bind=True, base=Hooked, name=f"routes.{policy}", **options)


@app.task(bind=True, name="routes.plain_base", shared=False)
@singleton(**OPTIONS, on_conflict="retry")
def plain_base(self: Task, name: str, nested: dict[str, int], user: Any) -> dict[str, Any]:
    """Guarded under Celery's own base class."""
    return told(self, name, nested)
