"""send_task: calls of producers that do not have the task's code, to a worker that has."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery._state import get_current_app
from celery.local import Proxy

from celery_setnx import (
    Duplicate,
    DuplicateTask,
    OptionError,
    SingletonTask,
    UnkeyableCall,
    is_skipped,
    send_task,
    singleton,
)
from celery_setnx.call.message import HEADER
from celery_setnx.task import lock_for
from tests.harness import Worker, wait_until

QUEUE = "send-task"
NOWHERE = "parked"  # nobody consumes it
APP = "tests.sendapp"

STARTED = {"key": "name", "dedupe": "until_started"}
DONE = {"key": "name", "dedupe": "until_done"}
# For each form of key: the task, the options that a producer gives, and arguments.
FORMS = [
    pytest.param("work", {"key": "name"}, {"name": "n"}, id="name"),
    pytest.param("listed", {"key": ["day", "name"]}, {"name": "n", "day": 3}, id="list-of-names"),
    pytest.param("templated", {"key": "user:{user.id}"}, {"name": "n", "user": {"id": 7}}, id="template"),
    pytest.param("whole", {"key": ()}, {"name": "n"}, id="whole-task"),
    pytest.param("scoped", {"key": "name", "scope": "shared-scope"}, {"name": "n"}, id="scope"),
]


@pytest.fixture(scope="module", autouse=True)
def far_worker(module_worker) -> Worker:
    """A worker that has the tasks' code."""
    return module_worker(APP, queues=QUEUE)


@pytest.fixture
def knowing(locks, journal) -> Any:
    """The module with the tasks' code."""
    from tests import sendapp

    return sendapp


@pytest.fixture
def producer(knowing) -> Celery:
    """An app without the tasks' code."""
    from tests.app import make_app

    return make_app("producer")


def send(
    producer: Celery, task: str, options: Any, *args: Any, queue: str = QUEUE, more: Any = None, **kwargs: Any
) -> Any:
    """Send a call of a task; `more` are options of Celery's."""
    return send_task(producer, f"{APP}.{task}", args, kwargs, singleton=options, queue=queue, **(more or {}))


@pytest.mark.parametrize(("task", "options", "kwargs"), FORMS)
def test_send_task_has_the_key_of_the_task_that_runs(producer, knowing, journal, task, options, kwargs):
    """For every form of key the worker's lock is the one that the task's own call would have."""
    result = send(producer, task, options, **kwargs)
    assert result.get(timeout=60) == kwargs["name"]
    (start,) = journal.entries(what="start", task_id=result.id)
    assert start["key"] == getattr(knowing, task).lock_key(**kwargs)


@pytest.mark.parametrize("first_is", ["send-task", "delay"])
@pytest.mark.parametrize(("task", "options", "kwargs"), FORMS)
def test_duplicate_of_a_queued_call_is_recognised(producer, knowing, parked, task, options, kwargs, first_is):
    """A producer with the code recognises the call of one without, and the other way round."""
    by_name = partial(send, producer, task, {**options, "dedupe": "until_done"}, queue=NOWHERE, **kwargs)
    by_code = partial(getattr(knowing, task).apply_async, (), kwargs, queue=NOWHERE)
    first, second = (by_name(), by_code()) if first_is == "send-task" else (by_code(), by_name())
    assert (first.deduplicated, second.deduplicated, second.id) == (False, True, first.id)
    assert len(parked) == 1


@pytest.mark.parametrize("first_is", ["send-task", "delay"])
def test_duplicate_of_a_running_call_is_recognised(producer, knowing, journal, gates, first_is):
    """With until_done a run that one of them began makes a duplicate of the other's call, until it ends."""
    by_name = partial(send, producer, "work", DONE, name="gated-a")
    by_code = partial(knowing.work.apply_async, ("gated-a",), queue=QUEUE)
    publish, publish_again = (by_name, by_code) if first_is == "send-task" else (by_code, by_name)
    first = journal.reached("start", publish())
    second = publish_again()
    assert (second.deduplicated, second.id) == (True, first.id)
    gates("gated-a")
    assert second.get(timeout=60) == "gated-a"
    third = publish_again()
    gates("gated-a")
    assert third.get(timeout=60) == "gated-a"
    assert (third.deduplicated, third.id == first.id) == (False, False)


def test_send_task_gives_its_mark_up_when_it_starts(producer, locks, journal, gates):
    """until_started: the same call may be queued again as soon as the first one runs."""
    first = journal.reached("start", send(producer, "work", STARTED, name="gated-c"))
    second = send(producer, "work", STARTED, name="gated-c")
    assert not second.deduplicated
    gates("gated-c", 2)
    assert (first.get(timeout=60), second.get(timeout=20)) == ("gated-c", "gated-c")
    assert [entry["what"] for entry in journal.entries(name="gated-c")] == ["start", "end", "start", "end"]
    assert not [*locks.scan_iter("*:queued")]


UNTOLD = (
    r"^send_task of tests\.sendapp\.work does not know the task's parameters; give it the task's key "
    r'option: singleton=\{"key": \.\.\.\}$'
)
CALLABLE = r"option 'key' of a call of tests\.sendapp\.work is a callable, which cannot travel in a message"
MISSPELT = r"a call of tests\.sendapp\.work .* did you mean 'dedupe'"
POSITIONAL = r"of tests\.sendapp\.work: the key needs argument 'name'.* by keyword"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[(options, OptionError, UNTOLD) for options in (None, {}, {"dedupe": "until_done"})],
        pytest.param({"key": lambda name: name}, OptionError, CALLABLE, id="key-function"),
        pytest.param({"key": "name", "dedup": "until_done"}, OptionError, MISSPELT, id="misspelt"),
        pytest.param(DONE, UnkeyableCall, POSITIONAL, id="keyed-argument-by-position"),
    ],
)
def test_send_task_with_wrong_options_is_refused(producer, parked, locks, options, error, message):
    """The message names the call once, says what is needed and why; nothing is sent or marked."""
    args, kwargs = (("n",), {}) if error is UnkeyableCall else ((), {"name": "n"})
    with pytest.raises(error, match=message):
        send(producer, "work", options, *args, queue=NOWHERE, **kwargs)
    assert len(parked) == 0
    assert not [*locks.scan_iter("*:queued")]


def test_send_task_may_give_other_arguments_by_position(producer, knowing, journal):
    """Only what the key names has to come by keyword."""
    result = send(producer, "listed", {"key": "day", "scope": "days"}, "n", day=3)
    assert result.get(timeout=60) == "n"
    (start,) = journal.entries(what="start", task_id=result.id)
    assert start["key"].startswith("t:{days:")


def test_send_task_keys_a_parameter_named_args(producer, knowing, parked):
    """`key="args"` is the argument of that name, so that different calls are no duplicates."""
    options = {**STARTED, "key": "args"}
    one = send(producer, "command", options, queue=NOWHERE, name="n", args=["one"])
    other = send(producer, "command", options, queue=NOWHERE, name="n", args=["other"])
    assert (one.deduplicated, other.deduplicated) == (False, False)
    by_code = knowing.command.apply_async(("n",), {"args": ["one"]}, queue=NOWHERE)
    assert by_code.id == one.id


def test_send_task_keeps_its_key_when_the_task_retries_itself(producer, journal):
    """The worker computes the retry's key anew, by what the call says and not by what the task says."""
    result = send(producer, "retrying", {**DONE, "scope": "of-the-call"}, name="n", reason="whatever")
    assert result.get(timeout=60) == 1
    first, second = journal.entries(what="start", task_id=result.id)
    assert first["key"] == second["key"]
    assert first["key"].startswith("t:{of-the-call:")


def test_send_task_options_travel_to_the_worker(producer):
    """What the worker needs is in the message; what only the publisher needs is not."""
    result = send(producer, "telling", {**DONE, "lease": 7, "on_duplicate": "raise"}, name="n")
    assert result.get(timeout=60) == {"key": "name", "dedupe": "until_done", "lease": 7.0}


def test_send_task_decides_what_becomes_of_a_conflict(producer, knowing, holding):
    """An option of the call is nearer than those of the task."""
    options = {"key": "name", "on_conflict": "skip", "skip_result": 5}
    with holding(knowing.work, "gated-a", queue=QUEUE):
        assert send(producer, "work", options, name="gated-a").get(timeout=60) == 5


def test_send_task_with_celerys_options_hands_them_on(producer, knowing, parked):
    """A task id of one's own, and with it no dedupe; headers, beside ours."""
    more = {"task_id": "my-own", "headers": {"tenant": "acme"}}
    for _ in range(2):
        result = send(producer, "work", DONE, queue=NOWHERE, more=more, name="n")
        assert (result.id, result.deduplicated) == ("my-own", False)
    assert len(parked) == 2
    headers = json.loads(parked._client.lrange(NOWHERE, 0, 0)[0])["headers"]
    assert (headers["tenant"], headers["singleton"]["key"]) == ("acme", knowing.work.lock_key("n"))


def test_send_task_of_a_known_task_is_its_apply_async(knowing, parked):
    """The task's own options and signature count: no key is needed, and positions are understood."""
    first = send(knowing.app, "work", None, "n", queue=NOWHERE)
    second = knowing.work.apply_async((), {"name": "n"}, queue=NOWHERE)
    assert (first.deduplicated, second.deduplicated, second.id) == (False, True, first.id)
    assert not send(knowing.app, "work", {"scope": "other"}, "n", queue=NOWHERE).deduplicated


def test_send_task_knows_a_task_before_the_app_is_finalized(producer, parked):
    """A task of a module just imported is known, although nothing has finalized the app yet."""

    @producer.task(shared=False, base=SingletonTask, name="lazy.t", singleton={"key": "a"})
    def t(a: int) -> None: ...

    send_task(producer, "lazy.t", (1,), queue=NOWHERE)
    assert len(parked) == 1


def test_celerys_send_task_leaves_no_mark(producer, knowing, parked):
    """Queued twice by send_task of Celery is queued twice; our own delay() does not see them."""
    for _ in range(2):
        producer.send_task(f"{APP}.work", ("n",), queue=NOWHERE)
    assert not knowing.work.apply_async(("n",), queue=NOWHERE).deduplicated
    assert len(parked) == 3


def test_celery_call_is_guarded_but_not_deduplicated(knowing, holding):
    """`celery call` sends although the same call runs, even with the task's code; its run is skipped."""
    command = [sys.executable, "-m", "celery", "-A", APP, "call", f"{APP}.work", "--queue", QUEUE]
    with holding(knowing.work, "gated-a", queue=QUEUE) as first:
        said = subprocess.check_output([*command, "-k", '{"name": "gated-a"}'], text=True, timeout=60)
        second = knowing.app.AsyncResult(said.strip())
        assert second.id != first.id
        assert is_skipped(second.get(timeout=60))


def test_duplicate_send_task_raises_or_is_decided_by_a_callable(producer, parked):
    """The error names the call that is queued. on_duplicate stays at home, so it may be a function, too; its
    value is send_task's."""
    refused = {**STARTED, "on_duplicate": "raise"}
    first = send(producer, "work", refused, queue=NOWHERE, name="n")
    with pytest.raises(DuplicateTask) as caught:
        send(producer, "work", refused, queue=NOWHERE, name="n")
    assert (caught.value.task_id, caught.value.state) == (first.id, "queued")
    assert len(parked) == 1
    decided = {**STARTED, "on_duplicate": lambda duplicate: duplicate}
    duplicate = send(producer, "work", decided, queue=NOWHERE, name="n")
    assert isinstance(duplicate, Duplicate)
    about = (duplicate.task, duplicate.task_id, duplicate.state, duplicate.kwargs)
    assert about == (f"{APP}.work", first.id, "queued", {"name": "n"})


def test_send_task_through_the_current_app_proxy(knowing, parked, producer):
    """`celery.current_app` is a proxy, and as good as the app."""
    assert get_current_app() is not producer
    proxy = Proxy(lambda: producer)
    first = send(proxy, "work", STARTED, queue=NOWHERE, name="n")
    assert knowing.work.apply_async(("n",), queue=NOWHERE).id == first.id


def test_send_task_of_a_misspelt_name_leaves_no_mark(producer, locks, far_worker):
    """No worker knows it: it is queued no longer."""
    send(producer, "no_such_task", STARTED, name="n")
    wait_until(lambda: not [*locks.scan_iter("*:queued")], "no mark")
    far_worker.wait_for_log("no_such_task")


def test_call_whose_options_its_task_does_not_take_runs_without_them(producer, locks, far_worker):
    """As after a deploy: the worker says so, the key stays that of the message, and no mark is left."""
    result = send(producer, "skipping", STARTED, name="n")
    assert result.get(timeout=60) == "n"
    assert not [*locks.scan_iter("*:queued")]
    far_worker.wait_for_log(f"[{result.id}] runs without the options of its call: ")
    assert far_worker.log_text().count("runs without the options of its call") == 1


def test_mark_of_a_task_without_a_guard_ends_when_its_worker_has_it(producer, locks):
    """It runs without a lock, and without being asked about; so its mark says nothing any more."""
    result = send(producer, "unguarded", {**STARTED, "queue_lease": 60}, name="n")
    assert result.get(timeout=60) == "n"
    wait_until(lambda: not locks.keys("*:queued"), "its mark is gone")


def test_send_task_deduplicates_a_decorated_task(producer, locks, journal, gates):
    """@singleton under Celery's own base class cannot ask for dedupe; a call by send_task can."""
    calls = [send(producer, "decorated", DONE, name="gated-g") for _ in range(2)]
    assert [call.deduplicated for call in calls] == [False, True]
    (start,) = journal.wait_for("start", task_id=calls[0].id)
    assert start["key"].startswith(f"t:{{{APP}.decorated:")
    gates("gated-g")
    assert calls[1].get(timeout=60) == "gated-g"
    assert not [*locks.scan_iter("*:queued")]


@pytest.mark.parametrize("options", [{}, {"serializer": None}])
def test_send_task_of_a_decorated_task_known_here_travels_as_its_delay_does(server, locks, options):
    """By the serializer of the task: its key is of what arrives."""
    app = Celery("known", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), task_default_queue=NOWHERE)

    @app.task(name="known", serializer="pickle", shared=False)
    @singleton(key="tags")
    def known(tags: Any) -> None: ...

    kwargs = {"tags": {7}}  # a list in JSON
    send_task(app, "known", kwargs=kwargs, singleton={"key": "tags"}, **options)
    known.apply_async(kwargs=kwargs)
    with app.connection_for_read() as connection:
        ours, plain = (connection.default_channel.basic_get(NOWHERE, no_ack=True) for _ in range(2))
    assert ours.content_type == plain.content_type == "application/x-python-serialize"
    assert ours.headers[HEADER]["key"] == lock_for(app.tasks["known"], (), kwargs).name
    app.close()


def test_send_task_needs_the_prefix_of_the_workers(producer, knowing, parked, locks):
    """With another setnx_prefix the key is another: the documentation says to set it."""
    producer.conf.setnx_prefix = "elsewhere"
    send(producer, "work", STARTED, queue=NOWHERE, name="n")
    assert not knowing.work.apply_async(("n",), queue=NOWHERE).deduplicated
    assert {key.partition(":")[0] for key in locks.scan_iter("*:queued")} == {"elsewhere", "t"}
