"""Publishers as processes of their own: many of one call, and one that stands still in mid-publish."""

import os
import signal
from typing import Any

from celery import Celery
from celery.signals import before_task_publish

from celery_setnx import SingletonTask


def task_of(broker: str, locks: str) -> Any:
    """A deduplicated task."""
    app = Celery("publishers", broker=broker, backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=locks, setnx_prefix="t")

    @app.task(base=SingletonTask, shared=False, name="published", singleton={"dedupe": "until_started"})
    def published(name: str) -> None: ...

    return app.tasks["published"]


def publish_many(broker: str, locks: str, name: str, times: int, begin: Any, answers: Any) -> None:
    """Publish one call many times, at the same time as others do."""
    task = task_of(broker, locks)
    begin.wait(60)
    results = [task.delay(name) for _time in range(times)]
    answers.put(({result.id for result in results}, sum(not result.deduplicated for result in results)))


def publish_and_stop(broker: str, locks: str, name: str) -> None:
    """Stand still between the mark and the message."""

    @before_task_publish.connect(weak=False)
    def stop(**_details: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    task_of(broker, locks).delay(name)
