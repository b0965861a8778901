"""The app of workers whose broker or result backend is no Redis; their locks are in Redis all the same."""

import os
import time
import uuid
from types import SimpleNamespace
from typing import Any

from celery import Celery
from kombu.transport import filesystem
from kombu.utils.json import dumps

from celery_setnx import SingletonTask
from tests.app import body, make_app

OPTIONS = {"key": "name", "lease": 600}


def put_whole(self: Any, queue: str, payload: Any, **_options: Any) -> None:
    """kombu shows a message before it is written: who reads it just then loses it, and his worker ends."""
    path = os.path.join(self.data_folder_out, f"{int(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg")
    with open(f"{path}.part", "w") as file:
        file.write(dumps(payload))
    os.rename(f"{path}.part", path)


filesystem.Channel._put = put_whole


def work(name: str, gate: str = "") -> list[str]:
    """The body of all: `name` is the key, and a gated one waits for its gate."""
    return [name, body(gate)]


def define(app: Celery) -> SimpleNamespace:
    """The tasks of an app."""

    def task(name: str, **options: Any) -> Any:
        options = {"name": f"transports.{name}", "shared": False, "singleton": {**OPTIONS, **options}}
        return app.task(base=SingletonTask, **options)(work)

    named = {name: task(name, on_conflict=name) for name in ("skip", "wait")}
    if not app.conf.result_backend.startswith("rpc"):
        named["join"] = task("join", on_conflict="join")
    return SimpleNamespace(app=app, **named)


app = make_app("transports")
define(app)
