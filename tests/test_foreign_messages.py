"""Messages and lines that others have written to: old releases, tracers, intruders. Real workers."""

import json
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from celery_setnx.call.message import Call
from celery_setnx.lock.names import line_names
from tests.harness import wait_until

APP = "tests.waitapp"
MALFORMED = ("setnx:{settle:wait}", 5, {"key": "a}b", "wait": {"retries": 0, "copy": "x"}}, {"key": "\ud800"})


@pytest.mark.parametrize("header", MALFORMED, ids=["text", "number", "braces", "surrogate"])
@pytest.mark.parametrize("ended", ["expired", "revoked", "unknown"])
def test_malformed_header_of_a_call_that_is_thrown_away_ends_no_worker(stage, parked, worker, header, ended):
    """Nothing in a message raises in the worker's parent: it would end the worker, again at every start."""
    result = stage.tasks.work.apply_async([stage.key], queue="parked")
    if ended == "revoked":
        stage.tasks.app.control.revoke(result.id, reply=True, timeout=30, limit=1)

    def change(message: dict[str, Any]) -> None:
        own = {"task": APP + ".work", "id": result.id, "attempt": 0, "copy": "x", "marked": True}
        message["headers"]["singleton"] = {**own, **header} if isinstance(header, dict) else header
        if ended == "expired":
            message["headers"]["expires"] = "2024-05-06T00:00:00+00:00"
        if ended == "unknown":
            message["headers"]["task"] = "unknown"

    parked.move(change)
    said = {"unknown": "Received unregistered task of type 'unknown'"}
    worker.wait_for_log(said.get(ended, f"Discarding revoked task: {APP}.work[{result.id}]"))
    assert stage.tasks.work.delay(stage.key).get(timeout=60) == [stage.key, "", 0]
    assert worker.process.poll() is None


ODD_HEADERS: dict[str, Any] = {
    "lease": {"options": {"lease": 10**400}},
    "every duration": {"options": dict.fromkeys(("queue_lease", "retry_delay", "max_wait"), 1e300)},
    "key option": {"options": {"key": {"a": [1]}, "scope": "\ud800"}},
    "counts": {"waits": True, "asked": 10**30, "since": float("inf")},
    "attempt": {"attempt": 10**400},
    "copy": {"copy": "a|b\n", "call_id": "x" * 10**5},
    "key": {"key": "\ud800"},
    "mapping": "no mapping",
}
ODD_MESSAGES: dict[str, dict[str, Any]] = {
    "retries -1": {"retries": -1},
    "retries 2.0": {"retries": 2.0},
    "retries true": {"retries": True},
    "retries text": {"retries": "a|b"},
    "retries huge": {"retries": 10**400},
    "nesting": {"replaced_task_nesting": 10**400},
    "nesting text": {"replaced_task_nesting": [1]},
    "delivery": {"delivery_info": "x"},
    "properties": {"properties": 5},
    "id with a line break": {"id": "a\nb"},
    "id that is long": {"id": "x" * 10**6},
    "id that is a number": {"id": 5},
    "id with half a pair": {"id": "\ud800"},
}


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "plain"])
def test_task_runs_at_every_message_at_which_plain_celery_would_run_it(stage, parked, worker, guarded):
    """Whatever stands in our header, and in those of Celery that other clients write. One worker lives on."""
    task = stage.tasks.work if guarded else stage.tasks.app.tasks["tests.workerapp.arrival"]
    odd = {**ODD_MESSAGES, **{f"header: {name}": {"singleton": said} for name, said in ODD_HEADERS.items()}}
    for name, said in odd.items():
        task.apply_async([f"{stage.key}-{name}", name], queue="parked")

        def change(message: dict[str, Any], said: dict[str, Any] = said) -> None:
            headers = message["headers"]
            own = {"task": task.name, "id": headers["id"], "attempt": 0, "key": "t:{t}"}
            headers.update(said)
            if isinstance(said.get("singleton"), dict):
                headers["singleton"] = {**own, **said["singleton"]}

        parked.move(change)
    for name in odd:
        ran = {"what": "end", "name": name} if guarded else {"what": "arrival"}
        ran |= {} if guarded else {"values": [f"{stage.key}-{name}", name]}
        stage.journal.wait_for(**ran)
    assert len(stage.journal.entries(what=ran["what"])) == len(odd)
    assert worker.process.poll() is None


def test_task_id_that_is_used_again_without_a_header_is_a_new_call(stage, journal):
    """As of a nightly job with a fixed id, by `send_task`: the first use has waited, and has begun."""
    name, ran = f"{APP}.work", []
    for night in range(3):
        first = stage.held()
        nightly = stage.tasks.app.send_task(
            name, [stage.key, f"night-{night}"], task_id=f"nightly-{stage.key}"
        )
        journal.wait_for("waiting", count=night + 1, task_id=nightly.id)
        stage.open()
        journal.wait_for("end", name=f"night-{night}", task_id=nightly.id)
        ran.append(journal.wait_for("postrun", task_id=first.id))
        nightly.get(timeout=60)
        wait_until(lambda: stage.tasks.work.locked(stage.key) is None, "the lock is free")
    assert len(ran) == 3


def test_second_delivery_of_a_call_without_a_header_is_not_a_new_one(stage, journal, parked, worker):
    """Flagged by the broker, and its ticket is punched: it has begun by another message."""
    stage.held()
    second = stage.tasks.app.send_task(f"{APP}.work", [stage.key, "x"], queue="parked")
    copies: list[dict[str, Any]] = []
    parked.move(lambda message: copies.append(json.loads(json.dumps(message))))
    journal.wait_for("waiting", task_id=second.id)
    stage.open()
    assert second.get(timeout=60) == [stage.key, "x", 0]
    copies[0]["headers"]["redelivered"] = copies[0]["properties"]["delivery_info"]["redelivered"] = True
    parked.send(copies[0])
    worker.wait_for_log(f"[{second.id}]: this message is dropped: another message has started")
    assert stage.starts().count(second.id) == 1


def test_headers_that_are_handed_on_give_nobody_anothers_waiting(stage, journal):
    """A tracer, or a body that sends on its own headers: the joiner's result is its own call's."""
    first = stage.held(task=stage.tasks.joined)
    stage.open()
    assert first.get(timeout=60)
    key = stage.tasks.joined.lock_key(stage.key)
    stolen = Call(f"{APP}.joined", first.id, key=key, copy="abc", waits=1, since=1.0, join=first.id)
    options = {"headers": stolen.as_headers()}
    for send in (
        lambda: stage.tasks.joined.apply_async([stage.key], **options),
        lambda: stage.tasks.app.send_task(f"{APP}.joined", [stage.key], **options),
    ):
        result = send()  # when the one before has ended: one that meets it joins it, as it should
        assert result.get(timeout=60) == [stage.key, result.id], "its own body ran"


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_key_of_a_message_is_kept_when_its_call_comes_back(stage, journal, policy):
    """A deploy has changed `key=`: two calls of an old producer are two bodies, one after the other.

    Computed anew, the key would be another: the call would not find its place, and run once for each message.
    """
    task, key = stage.tasks.work, f"t:{{{APP}.work:{'0' * 31}1}}"
    results = []
    for gate in (stage.gate, "x"):
        task_id = f"{gate}-{stage.key}-{policy}"
        headers = Call(task.name, task_id, key=key, options={"on_conflict": policy}).as_headers()
        send = stage.tasks.app.send_task
        results.append(send(task.name, [stage.key, gate], task_id=task_id, headers=headers))
        journal.wait_for("start" if gate == stage.gate else "conflict", task_id=task_id)
    stage.open()
    stage.have_run(results)
    assert {entry["key"] for entry in journal.entries(what="start")} == {key}


def test_line_sends_only_what_belongs_there(stage, journal, locks, worker):
    """Who can write to the lock server has no other task run, and not this one under another key."""
    key = stage.tasks.work.lock_key(stage.key)
    first = stage.held()
    line, calls = line_names(key)
    second = stage.parked("x")
    vain, since, real = locks.hget(calls, second.id).split("|", 2)
    forged = {
        "another task": lambda call: call["headers"].update(task=f"{APP}.silent"),
        "no task of its": lambda call: call["headers"]["singleton"].update(key="t:{another}"),
        "another call": lambda call: call["headers"].update(id="another"),
        "a pickle": lambda call: call.update(
            content_type="application/x-python-serialize", encoding="binary"
        ),
        "nothing": lambda call: call.clear(),
    }
    for number, (task_id, forge) in enumerate(forged.items()):
        call = json.loads(real.replace(second.id, task_id))
        forge(call)
        locks.hset(calls, task_id, f"{vain}|{since}|{json.dumps(call)}")
        locks.zadd(line, {task_id: float(since) - 1e6 * (len(forged) - number)})
    stage.open()
    first.get(timeout=60)
    for task_id in forged:
        worker.wait_for_log(f"{key} is handed to task {task_id}, which cannot be sent")
    assert second.get(timeout=60) == [stage.key, "x", 0]
    assert {entry["task_id"] for entry in journal.entries(what="start")} == {first.id, second.id}


def test_app_that_was_finalized_before_the_import_can_wait():
    """A class-based task finalizes its app; what a guarded task needs, it brings along when it is bound."""
    program = """
from celery import Celery, Task
app = Celery("finalized", broker="memory://")
class Plain(Task):
    name = "plain"
app.register_task(Plain())
assert app.finalized
from celery_setnx import SingletonTask
assert "celery_setnx.courier" not in app.tasks
@app.task(base=SingletonTask)
def settle(): ...
settle.name
assert app.tasks["celery_setnx.courier"].app is app
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_outage_of_the_lock_server_is_no_time_that_a_clients_clock_tells(server, locks):
    """A call that comes back because Redis is away has no first conflict yet: max_wait begins with that."""
    app = Celery("outage", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url="redis://127.0.0.1:1/0", task_default_queue="outage")
    from celery_setnx import SingletonTask

    options = {"lease": 0.2, "retry_delay": 0.1, "max_wait": 60, "on_conflict": "wait"}

    @app.task(base=SingletonTask, shared=False, name="t", singleton=options)
    def t() -> None: ...

    app.finalize()
    task = app.tasks["t"]
    about = {"delivery_info": {"exchange": "", "routing_key": "outage"}, "called_directly": False}
    task.push_request(id="id-1", args=[], kwargs={}, retries=0, **about)
    with pytest.raises(Exception, match="tries again in"):
        task()
    task.pop_request()
    with app.connection_for_read() as connection, connection.SimpleQueue("outage") as messages:
        call = Call.of("t", messages.get_nowait().headers)
    assert (call.waits, call.since) == (1, 0.0)
