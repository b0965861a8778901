"""What type checkers must make of the public names. Checked by mypy and pyright, never run.

A line that must be refused says so with an ignore comment: unused, it is an error itself.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import redis
from celery import Celery
from typing_extensions import assert_type

from celery_setnx import (
    CallOutcome,
    Conflict,
    Duplicate,
    FanOut,
    HeldLock,
    Holder,
    Outcome,
    SetnxLock,
    SingletonOptions,
    SingletonTask,
    current_lock,
    is_skipped,
    send_task,
    singleton,
    superseded_by,
)


# The decorator keeps the function's own type, and knows the options by name and value.
@singleton
def plain(account_id: int) -> str:
    return str(account_id)


@singleton(key="account_id", on_conflict="wait", lease=timedelta(minutes=1), max_wait=None)
def decorated(account_id: int) -> str:
    return str(account_id)


assert_type(plain(1), str)
assert_type(decorated(1), str)
decorated("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
singleton(on_conflict="wiat")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
singleton(laese=30)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


# A policy sees what there is to decide by.
def policy(conflict: Conflict) -> Any:
    assert_type(conflict.holder, Holder)
    return conflict.skip() if conflict.waits else conflict.retry()


def twin(duplicate: Duplicate) -> Any:
    return duplicate.result


# Options of a task, a base class, a call.
class OurTask(SingletonTask):
    abstract = True
    singleton = {"lease": 60, "on_conflict": policy, "on_duplicate": twin}


class Misspelt(SingletonTask):
    singleton = {"laese": 60}  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportAssignmentType]


of_a_call: SingletonOptions = {"on_conflict": "retry", "retry_delay": 0.5}
of_several: SingletonOptions = {"limit": 5}
no_number: SingletonOptions = {"limit": "5"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
newest: SingletonOptions = {"dedupe": "until_started", "on_duplicate": "replace"}
debounced: SingletonOptions = {"debounce": 5, "debounce_max": timedelta(minutes=1), "debounce_leading": True}
no_flag: SingletonOptions = {"debounce_leading": 5}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
wrong: SingletonOptions = {"dedupe": "until_over"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]


def calls(task: SingletonTask, app: Celery) -> None:
    task.apply_async((1,), singleton=of_a_call)
    task.apply_async((1,), singleton={"max_wait": 5})
    task.apply_async((1,), singleton={"max_wait": "5"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    outcomes: list[CallOutcome] = []
    assert_type(task.fan_out(((n,) for n in range(9)), each=outcomes.append), FanOut)
    send_task(app, "proj.task", kwargs={"a": 1}, singleton={"key": "a", "dedupe": "until_started"})
    assert_type(task.lock, HeldLock | None)
    assert_type(task.locked(1), Holder | None)
    assert_type(task.holders(1), list[Holder])
    assert_type([holder.permit for holder in task.holders(1)], list[int])
    assert_type(task.lock_key(1), str)
    assert_type(current_lock(), HeldLock | None)
    assert_type(is_skipped({}), bool)
    assert_type(superseded_by({}), str | None)


# The lock without Celery.
def without_celery(client: redis.Redis) -> Iterator[int]:
    with SetnxLock(client, "nightly", lease=60) as held:
        assert_type(held, HeldLock)
        yield held.fence
    several = SetnxLock(client, "export", limit=3)
    assert_type(several.holders(), list[Holder])
    with several as one_of_them:
        assert_type(one_of_them.permit, int)
    outcome = SetnxLock(client, "nightly").acquire(wait=timedelta(seconds=1))
    assert_type(outcome, Outcome)
    assert_type(outcome.lock, HeldLock | None)
    SetnxLock(client, "nightly", laese=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
