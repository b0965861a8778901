"""Tasks of which several calls of a key may run at a time, on an app of their own."""

import json
import os
import time
from typing import Any

from celery_setnx import SingletonTask, current_lock
from tests.app import control, make_app

app = make_app("limitapp")
LIMIT = int(app.conf.get("test_limit") or 5)
OPTIONS = {"key": "name", "limit": LIMIT, "lease": 5, "retry_delay": 0.05, "retry_delay_max": 0.2}


def run(self: Any, name: str, seconds: float = 0.02) -> int:
    """Tell when the body starts and ends, under which permit, and how many ran then."""
    lock = current_lock()
    assert lock is not None
    at_a_time = control.incr(f"running:{name}")
    about = {"task_id": self.request.id, "permit": lock.permit, "pid": os.getpid(), "at_a_time": at_a_time}
    control.rpush(f"started:{name}", json.dumps(about))
    time.sleep(seconds)  # the work
    control.decr(f"running:{name}")
    return lock.permit


def variant(name: str, **options: Any) -> Any:
    """A task with this function and these options."""
    return app.task(base=SingletonTask, bind=True, name=name, singleton={**OPTIONS, **options})(run)


waits = variant("waits", on_conflict="wait")
retries = variant("retries", on_conflict="retry")
skips = variant("skips", on_conflict="skip")
