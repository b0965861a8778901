"""What a user writes where celery-types is installed. Checked by mypy, never run.

A line that must be refused says so with an ignore comment: unused, it is an error itself.
"""

from celery import Celery
from celery.result import AsyncResult
from typing_extensions import assert_type

from celery_setnx import HeldLock, Holder, SingletonOptions, SingletonTask, is_skipped, send_task, singleton

app = Celery("shop")


@app.task(base=SingletonTask, singleton={"key": "account_id", "dedupe": "until_started"})
def settle(account_id: int, reason: str = "") -> str:
    return str(account_id)


@app.task(bind=True, base=SingletonTask, singleton={"key": "account_id"})
def bound(self: SingletonTask, account_id: int) -> int:
    assert_type(self.lock, HeldLock | None)
    return self.lock.fence if self.lock else 0


@app.task
@singleton(key="account_id", on_conflict="wait")
def decorated(account_id: int) -> str:
    return str(account_id)


class Patient(SingletonTask):
    abstract = True
    singleton = {"lease": 60, "on_conflict": "wait"}


@app.task(base=Patient)
def patient(account_id: int) -> None: ...


# A task is what its base says, with all that ours has.
assert_type(settle, SingletonTask)
assert_type(bound, SingletonTask)
assert_type(patient, Patient)
assert_type(settle.lock_key(7), str)
assert_type(settle.locked(7), Holder | None)

# Options of one call.
of_a_call: SingletonOptions = {"max_wait": 5}
settle.apply_async((7,), singleton=of_a_call)
settle.apply_async((7,), singleton={"max_wait": "5"})  # type: ignore[arg-type]
send_task(app, "shop.settle", args=[7], singleton={"key": "account_id"})

# `delay` gives what celery-types says; whether the call is a duplicate, `apply_async` tells.
first: AsyncResult[str] = settle.delay(7)
unknown = settle.delay(7).deduplicated  # type: ignore[attr-defined]
if settle.apply_async((7,)).deduplicated or is_skipped(first.result):
    decorated.delay(7)
