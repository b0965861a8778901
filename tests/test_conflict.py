"""Coming back: what the broker is asked to delay, and what happens when it does not take the call."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject

from celery_setnx import LockUnavailable, SingletonTask
from celery_setnx.conflict import WaitsForItself, _deliverable, backoff, come_back, in_workflow, waited
from celery_setnx.options import Options


def task_on(broker: str, **transport: Any) -> Any:
    app = Celery("conflicting", broker=broker, set_as_current=False)
    app.conf.update(broker_transport_options=transport, task_publish_retry=False)

    @app.task(base=SingletonTask, shared=False)
    def t() -> None: ...

    return app.tasks[t.name]


@pytest.fixture
def stranded() -> Iterator[Any]:
    """A running call whose broker is gone."""
    task = task_on("amqp://127.0.0.1:1//")
    headers = {"singleton": {"key": "setnx:{t}"}}
    task.push_request(id="id-1", args=[], kwargs={}, retries=0, headers=headers, called_directly=False)
    yield task
    task.pop_request()


def test_call_that_the_broker_does_not_take_back_is_unavailable(stranded: Any, caplog: Any) -> None:
    """Never a silent drop: the task fails, naming its key, why it came back, and the broker's error."""
    with pytest.raises(LockUnavailable, match=r"setnx:{t} now: Redis is down; and the broker"):
        come_back(stranded, 1.0, 0, 0.0, "Redis is down")
    assert "[id-1] could not be sent back to the broker" in caplog.text


def test_call_that_the_broker_still_has_is_requeued(stranded: Any) -> None:
    """With acks_late the message is not acknowledged yet: it is given back."""
    stranded.acks_late = True
    with pytest.raises(Reject) as caught:
        come_back(stranded, 1.0, 0, 0.0, "Redis is down")
    assert caught.value.requeue


@pytest.mark.parametrize(
    ("broker", "transport", "asked", "given"),
    [
        ("redis://h", {}, 0.1, 0.1),
        ("redis://h", {"visibility_timeout": 40}, 60, 10),
        ("redis://h", {}, 4000, 900),
        ("amqp://h", {}, 0.1, 1.05),
        ("amqp://h", {}, 60, 60),
    ],
)
def test_countdown_is_one_that_the_broker_keeps(
    broker: str, transport: Any, asked: float, given: float
) -> None:
    """More than a second on AMQP, and a quarter of the visibility timeout at most elsewhere."""
    assert _deliverable(task_on(broker, **transport), asked) == given


def test_backoff_doubles_with_jitter_up_to_its_limit() -> None:
    """retry_delay, twice as long with each wait, never above retry_delay_max."""
    options = Options(retry_delay=1, retry_delay_max=10)
    for waits, longest in enumerate([1, 2, 4, 8, 10, 10]):
        delays = [backoff(options, waits) for _ in range(50)]
        assert longest / 2 <= min(delays) < max(delays) <= longest
    assert backoff(options, 10_000) <= 10


def test_waiting_time_belongs_to_one_attempt() -> None:
    """A call that has waited starts anew with its own retry."""
    headers = {"singleton": {"wait": {"count": 3, "since": 100.0, "retries": 1}}}
    assert waited(SimpleNamespace(headers=headers, retries=1), 107.5) == (3, 7.5)
    assert waited(SimpleNamespace(headers=headers, retries=2), 107.5) == (0, 0.0)
    assert waited(SimpleNamespace(headers=None, retries=0), 107.5) == (0, 0.0)


@pytest.mark.parametrize(
    ("request_of", "expected"),
    [
        ({}, False),
        ({"chain": [{}]}, True),
        ({"chord": {}}, False),
        ({"chord": {"task": "x"}}, True),
        ({"callbacks": [{"immutable": True}]}, False),
        ({"callbacks": [{"immutable": True}, {"immutable": False}]}, True),
    ],
)
def test_workflow_is_a_chain_a_chord_or_a_mutable_link(request_of: Any, expected: bool) -> None:
    """What follows needs this call's result: then auto retries."""
    request = SimpleNamespace(**{"chain": None, "chord": None, "callbacks": None, **request_of})
    assert in_workflow(request) is expected


def test_waiting_for_itself_survives_the_way_to_the_workers_parent() -> None:
    """An end that the parent cannot unpickle would end the whole worker."""
    copy = pickle.loads(pickle.dumps(WaitsForItself("held by an earlier attempt", 1.5)))
    assert (copy.args[0], copy.when) == ("held by an earlier attempt", 1.5)
