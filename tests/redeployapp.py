"""One task in several releases: the setting `release` says which one this process has."""

from typing import Any

from celery import Celery, _state

from celery_setnx import SingletonTask
from tests.app import URL, body, make_app

OTHER_DB = 6
LEASE = {"lease": 600, "retry_delay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "coarse": {"key": "account_id", "on_conflict": "wait"},
    "fine": {"key": ["account_id", "reason"], "on_conflict": "wait"},
    "skips": {"key": "account_id", "on_conflict": "skip"},
    "all arguments": {"on_conflict": "wait"},
    "one argument more": {"on_conflict": "wait"},
    "other prefix": {"key": "account_id", "on_conflict": "wait"},
    "other server": {"key": "account_id", "on_conflict": "wait"},
    "renamed": {"key": "account_id", "on_conflict": "wait", "scope": "redeploy.settle"},
}
SETTINGS = {"other prefix": {"setnx_prefix": "u"}, "other server": {"setnx_url": f"{URL}/{OTHER_DB}"}}


def two(account_id: str, reason: str) -> str:
    return body(account_id)


def three(account_id: str, reason: str, dry: bool = False) -> str:
    return body(account_id)


def release(name: str) -> Celery:
    """The app of a release; no other app of this process knows its tasks."""
    app = make_app("redeploy")
    app.conf.update(SETTINGS.get(name, {}))
    shared = set(_state._on_app_finalizers)
    options = {"base": SingletonTask, "singleton": OPTIONS[name] | LEASE, "shared": False}
    function = three if name == "one argument more" else two
    app.task(function, name="redeploy.settle", **options)
    if name == "renamed":
        app.task(function, name="redeploy.book", **options)
    app.finalize()
    _state._on_app_finalizers.intersection_update(shared)
    return app


app = release(make_app("redeploy").conf.get("release", "coarse"))
