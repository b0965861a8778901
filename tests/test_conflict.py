"""Coming back: what the broker is asked to delay, and what happens when it does not take the call."""

import pickle
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject

from celery_setnx import Conflict, LockUnavailable, OptionError, SingletonTask
from celery_setnx.call.back import Waits, come_back, deliverable
from celery_setnx.call.message import Call
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import Holder
from celery_setnx.options import Options
from celery_setnx.run.conflict import backoff, in_workflow, policy_of

CALL = {"id": "id-1", "args": [], "kwargs": {}, "called_directly": False}


def task_on(broker: str, **transport: Any) -> Any:
    app = Celery("conflicting", broker=broker, set_as_current=False)
    app.conf.update(broker_transport_options=transport, task_publish_retry=False)

    @app.task(base=SingletonTask, shared=False)
    def t() -> None: ...

    return app.tasks[t.name]


def test_call_that_the_broker_does_not_take_back_is_unavailable(caplog, monkeypatch):
    """Never a silent drop: the task fails, naming its key, why it came back, and the broker's error.

    With acks_late the message is not acknowledged yet: it is given back.
    """
    task = task_on("amqp://127.0.0.1:1//", max_retries=0)
    task.push_request(**CALL, retries=0)
    call = Call(task.name, "id-1", key="setnx:{t}")
    with pytest.raises(LockUnavailable) as unsent:
        come_back(task, call, 1.0, "Redis is down")
    said = (
        r"The call .*t\[id-1\] of setnx:{t} could not be sent back to the broker: .*refused; "
        r"it was to wait or retry because Redis is down\. Fix that, then send the call again\."
    )
    assert re.match(said, str(unsent.value))
    assert "[id-1] could not be sent back to the broker" in caplog.text
    assert "It was to wait or retry because Redis is down. It fails." in caplog.text
    task.acks_late = True
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(Reject) as caught:
        come_back(task, call, 0.01, "Redis is down")
    assert caught.value.requeue
    assert slept[-1] == 1  # it is delivered again at once, perhaps for ever


@pytest.mark.parametrize("countdown", [float("nan"), float("inf"), -1, 1e10, 10**400, "5", True])
def test_countdown_that_is_none_is_the_callables_mistake(countdown):
    """And not Redis', nor the broker's."""
    task = task_on("memory://")
    outcome = Outcome(False, holder=Holder("a|0|0", 9e9, 1, "running", 1.0), server_time=2.0)
    conflict = Conflict(task, Call(task.name, "id-1", key="setnx:{t}"), Options(), outcome)
    with pytest.raises(OptionError, match=r"countdown of conflict.retry\(\) of .* must be"):
        conflict.retry(countdown=countdown)


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
def test_countdown_is_one_that_the_broker_keeps(broker, transport, asked, given):
    """More than a second on AMQP, and a quarter of the visibility timeout at most elsewhere."""
    assert deliverable(task_on(broker, **transport).app, asked) == given


def test_backoff_doubles_with_jitter_up_to_its_limit():
    """retry_delay, twice as long with each wait, never above retry_delay_max."""
    options = Options(retry_delay=1, retry_delay_max=10)
    for waits, longest in enumerate([1, 2, 4, 8, 10, 10]):
        delays = [backoff(options, waits) for _ in range(50)]
        assert longest / 2 <= min(delays) < max(delays) <= longest
    assert backoff(options, 10_000) <= 10


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
def test_workflow_is_a_chain_a_chord_or_a_mutable_link(request_of, expected):
    """What follows needs this call's result: then auto retries."""
    request = SimpleNamespace(**{"chain": None, "chord": None, "callbacks": None, **request_of})
    assert in_workflow(request) is expected


@pytest.mark.parametrize(
    ("options", "chain", "policy"),
    [
        ({}, None, "skip"),
        ({}, [{}], "retry"),
        ({"dedupe": "until_done"}, None, "skip"),
        ({"dedupe": "until_done"}, [{}], "retry"),
        ({"dedupe": "until_started"}, None, "wait"),
        ({"dedupe": "until_started"}, [{}], "wait"),
        ({"on_conflict": "skip"}, [{}], "skip"),
        ({"on_conflict": "raise"}, [{}], "raise"),
        ({"on_conflict": "join"}, [{}], "join"),
        ({"on_conflict": "wait"}, None, "wait"),
        ({"on_conflict": "retry", "dedupe": "until_started"}, None, "retry"),
        ({"on_conflict": print}, [{}], print),
    ],
)
def test_policy_is_what_was_asked_for_and_auto_decides(options, chain, policy):
    """auto: wait with until_started; else retry in a workflow, and skip elsewhere."""
    request = SimpleNamespace(chain=chain, chord=None, callbacks=None)
    assert policy_of(Options(**options), request) == policy


def test_end_of_a_call_that_waits_survives_the_way_to_the_workers_parent():
    """An end that the parent cannot unpickle would end the whole worker."""
    copy = pickle.loads(pickle.dumps(Waits("held by an earlier attempt", 1.5)))
    assert (copy.args[0], copy.when) == ("held by an earlier attempt", 1.5)
