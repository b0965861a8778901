"""Exceptions: they pickle, survive a JSON result, and say what to do."""

import json
import pickle

import pytest
from celery.app import app_or_default
from celery.backends.base import Backend

import celery_setnx
from celery_setnx import (
    AlreadyRunning,
    DuplicateTask,
    FanOutFailed,
    LockLost,
    LockRefused,
    LockTimeout,
    LockUnavailable,
    OptionError,
    SetnxError,
    UnkeyableCall,
)

HOLDER = {"task_id": "id-1", "description": "proj.t[id-1] on w (pid 1), running since now"}
ALL = [
    SetnxError("x"),
    OptionError("x"),
    UnkeyableCall("proj.t", "argument 'a' is odd"),
    AlreadyRunning("proj.t", "setnx:{proj.t}", HOLDER, 2.5),
    AlreadyRunning("proj.t", "setnx:{proj.t}", {}),
    LockTimeout("proj.t", "setnx:{proj.t}", HOLDER, 2.5, 7.25),
    LockLost("setnx:{proj.t}", "gone"),
    LockUnavailable("setnx:{proj.t}", "down"),
    LockRefused("setnx:{proj.t}", "NOPERM"),
    DuplicateTask("proj.t", "setnx:{proj.t}", "id-1", "queued"),
    FanOutFailed("proj.t", 2000, 31, 1, 1000, 12),
]


def test_every_exception_is_tried_here():
    """The list above is complete."""
    public = {value for value in vars(celery_setnx).values() if isinstance(value, type)}
    errors = {cls for cls in public if issubclass(cls, Exception)}
    assert {type(error) for error in ALL} == errors


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_exception_pickles_and_survives_a_json_result(error):
    """Through a pool's pipe: same type, message and attributes; as a JSON result: type and message."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    backend = Backend(app=app_or_default(), serializer="json")
    copy = backend.exception_to_python(json.loads(json.dumps(backend.prepare_exception(error))))
    assert (type(copy), str(copy)) == (type(error), str(error))


def test_messages_name_task_key_holder_and_remedy():
    """Read aloud: what happened, to which task and key, who holds it, what to do."""
    assert str(ALL[3]) == (
        "proj.t is already running: setnx:{proj.t} is held by proj.t[id-1] on w (pid 1), running since now, "
        "for 2.5 s more unless it renews its lease or releases it."
    )
    assert str(ALL[4]).endswith("held by an unknown holder, with no deadline.")
    assert "gave up after waiting 7.2 s (max_wait)" in str(ALL[5])
    assert "Stop what it protects" in str(ALL[6])
    assert "Grant them, or point setnx_url" in str(ALL[8])
