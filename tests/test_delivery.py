"""What a worker's parent hands to the process that runs a task, without a worker."""

import logging
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_setnx import SingletonTask
from celery_setnx.call.delivery import DELIVERY, Delivery
from celery_setnx.call.live import KnownTerms, known_live_terms, learn, read_live_terms
from celery_setnx.call.message import HEADER, Call
from celery_setnx.call.wake import COURIER
from celery_setnx.connection import client_for
from celery_setnx.lock.record import task_token
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.receipt import receipt_of
from celery_setnx.run.sweep import CourierRequest
from celery_setnx.terms import NewTerm, Whose, set_term
from tests.conftest import LOCK_DB
from tests.delivered import Delivered

CALL = Call("t", "id-1", key="setnx:{t}", call_id="ab", options={"lease": 20.0}, about="n=1", has_header=True)


@pytest.fixture
def task(server) -> Any:
    app = Celery("deliveries", broker="memory://", set_as_current=False)
    app.conf.setnx_url = server.url(LOCK_DB)

    def body() -> None:
        """Nothing."""

    return app.task(base=SingletonTask, name="t", shared=False)(body)


def arrived(request: Any) -> Context:
    """The request that the task finds, in another process."""
    return Context(pickle.loads(pickle.dumps(request.request_dict)))


def test_task_has_the_call_and_the_token_of_its_parent(task):
    """The parent frees the lock of a child that has died by its token."""
    request = Delivered(task, call=CALL).request
    attempt = Attempt(task, task._settled(), arrived(request), (), {})
    assert attempt.call == request.call == CALL
    assert attempt.token == request._token == task_token("id-1", 0, request._delivery.nonce)


@pytest.mark.parametrize("wrong", [5, {"task": "t"}, {"task": "t", "id": "id-1", "attempt": 0, "key": 7}])
def test_header_that_is_ignored_is_said_once(task, caplog, wrong):
    """By the parent: the task reads it no more, and no retry brings it along."""
    given = Delivered(task, call=CALL).request
    told = {**given.message.headers, HEADER: wrong}
    given.message.headers = told
    request = type(given)(given.message, app=task.app, task=task, hostname="here")
    found = arrived(request)
    attempt = Attempt(task, task._settled(), found, (), {})
    assert not attempt.call.has_header
    assert HEADER not in vars(found)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_parent_writes_a_receipt_where_its_task_looks_for_it(task):
    """Though a setting has changed since the worker started: a pool process settles its task anew."""
    guard_of_parent = task._guard
    task.app.conf.setnx_prefix = "moved"
    assert receipt_of(guard_of_parent, CALL) == receipt_of(task._settled(), CALL)


def test_header_that_was_copied_to_a_courier_is_not_read(task, caplog):
    """A tracer, or a publisher's hook, may hand a call's header on to all that is sent."""
    told = task.app.amqp.as_task_v2("id-2", COURIER)
    about = {"properties": {}, "delivery_info": {}, "content_type": "application/json"}
    headers = {**told.headers, **CALL.as_headers()}
    message = SimpleNamespace(
        headers=headers, payload=told.body, body=told.body, content_encoding="", **about
    )
    courier = CourierRequest(message, app=task.app, task=task.app.tasks[COURIER], hostname="here")
    assert Delivery.of(arrived(courier)).content_type == "application/json"
    assert caplog.records == []


@pytest.mark.parametrize("sent", [[list(CALL), "ab", "text/plain", "q", False, True], {"nonce": "ab"}, "ab"])
def test_message_brings_no_delivery_along(task, sent):
    """Whoever may publish could else choose a token, or a call."""
    assert Delivery.of(Context({"id": "id-1", "properties": {DELIVERY: sent}})) is None
    given = Delivered(task, call=CALL).request
    given.message.properties = {DELIVERY: sent, "priority": 3}
    request = type(given)(given.message, app=task.app, task=task, hostname="here")
    assert request.request_dict["properties"] == {"priority": 3, DELIVERY: request._delivery}
    assert Delivery.of(arrived(request)).call == CALL


def pause(task: Any) -> None:
    """An operator pauses the task; workers read that later."""
    set_term(task.app, Whose(scope="t"), NewTerm("pause", 600))


@pytest.mark.parametrize(("read_at", "heeds"), [(math.inf, False), (-math.inf, True)])
def test_call_that_has_waited_in_its_worker_heeds_a_pause(task, read_at, heeds):
    """It has come before the pause, and waited for a process of the pool, or for its eta."""
    request = Delivered(task, call=CALL).request
    properties = request.request_dict["properties"]
    properties[DELIVERY] = properties[DELIVERY]._replace(live_read_at=read_at)
    pause(task)
    attempt = Attempt(task, task._settled(), arrived(request), (), {})
    assert attempt.lock.terms.live.startswith("pause ") == heeds


def test_delivery_tells_no_process_what_was_before(task):
    """In a pool of threads the worker itself has read later what an old delivery does not know."""
    pause(task)
    before = read_live_terms(task.app, client_for(task.app))
    learn(task.app, "t", "", known_live_terms(task.app).read_at - 1)
    assert known_live_terms(task.app).texts == before != {}


def test_call_starts_though_its_terms_cannot_be_read(task, limited):
    """Redis may forbid that: what the delivery has brought counts, and it is not asked again at once."""
    task.app.conf.setnx_url = limited("~*", "+@all", "-hgetall")
    learn(task.app, "t", "brought", -1e6)
    known = known_live_terms(task.app)
    assert known.texts == {"t": "brought"}
    assert known.read_at > KnownTerms().read_at
