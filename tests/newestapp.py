"""Tasks whose newest call replaces those before it, on the app of `tests.workerapp`; `name` is the key."""

from typing import Any

from tests.workerapp import app, body, variant

__all__ = ["app"]

REPLACE = {
    "key": "name",
    "lease": 600,
    "retry_delay": 0.1,
    "dedupe": "until_started",
    "on_duplicate": "replace",
}


def keep(name: str, version: int, gate: str = "") -> int:
    """Ends with the version that it has saved."""
    body(gate or name)
    return version


def keep_at_last(self: Any, name: str, version: int, gate: str = "") -> int:
    """The same; its first attempt retries by way of a queue that nobody consumes."""
    body(gate or name)
    if not self.request.retries:
        raise self.retry(countdown=1, queue="parked")
    return version


save = variant(keep, "save", singleton=REPLACE)
late = variant(keep, "late", acks_late=True, singleton=REPLACE)
telling = variant(keep, "telling", singleton={**REPLACE, "skip_result": "older"})
typed = variant(keep, "typed", singleton={"key": "name", "lease": 600, "debounce": 1})
flaky = variant(keep_at_last, "flaky", bind=True, singleton=REPLACE)
holding = variant(keep_at_last, "holding", bind=True, singleton={**REPLACE, "hold_on_retry": True})
