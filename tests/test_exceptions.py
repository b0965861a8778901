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
    LockForbidden,
    LockLost,
    LockRefused,
    LockTimeout,
    LockUnavailable,
    OptionError,
    SetnxError,
    UnkeyableCall,
)
from celery_setnx.exceptions import is_misled
from tests.test_wording import EVIL, controls

HOLDER = {"task_id": "id-1", "description": "proj.t[id-1] on w (pid 1), running since now"}
PACED = {"state": "paced", "description": "its pace of 10 in 60 s until then"}
ALL = [
    SetnxError("x"),
    OptionError("x"),
    UnkeyableCall("proj.t", "argument 'a' is odd"),
    AlreadyRunning("proj.t", "setnx:{proj.t}", HOLDER, 2.5),
    AlreadyRunning("proj.t", "setnx:{proj.t}", {}),
    LockTimeout("proj.t", "setnx:{proj.t}", HOLDER, 2.5, 7.25),
    LockLost("setnx:{proj.t}", "gone"),
    LockUnavailable("setnx:{proj.t}", "down"),
    LockUnavailable("setnx:{proj.t}", "refused; it was to wait or retry because it is held", "proj.t[id-1]"),
    LockRefused("setnx:{proj.t}", "NOPERM"),
    DuplicateTask("proj.t", "setnx:{proj.t}", "id-1", "queued"),
    FanOutFailed("proj.t", 2000, 31, 1, 1000, 12),
    LockForbidden("setnx:{proj.t}", "NOPERM"),
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
    assert "Grant its user what is missing (`celery setnx doctor --acl` prints" in str(ALL[9])


@pytest.mark.parametrize("limit", [1, 5])
def test_messages_of_a_pace_say_when_a_call_may_start(limit):
    """Nobody holds the lock, however many may."""
    back = "setnx:{proj.t} is held back by its pace of 10 in 60 s until then, for 4.2 s more."
    error = AlreadyRunning("proj.t", "setnx:{proj.t}", PACED, 4.25, limit)
    assert str(error) == f"proj.t may not start yet: {back}"
    error = LockTimeout("proj.t", "setnx:{proj.t}", PACED, 4.25, 7.25, limit)
    assert str(error) == f"proj.t gave up after waiting 7.2 s (max_wait): {back}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("error", ALL[2:], ids=lambda e: type(e).__name__)
def test_message_of_ours_has_one_full_stop_to_a_sentence(error):
    """Whatever it quotes of a server or of another error, which may bring its own."""
    reason = getattr(error, "reason", "no reason")
    again = type(error)(*(f"{part}." if part == reason else part for part in error.args))
    assert str(again) == str(error)
    assert str(error).endswith(".")
    assert ".." not in str(error)


@pytest.mark.parametrize("error", ALL[2:], ids=lambda e: type(e).__name__)
def test_message_of_ours_is_printable(error):
    """What it quotes may be anybody's words."""
    evil = (f"{part}{EVIL}" if isinstance(part, str) else part for part in error.args)
    assert controls(str(type(error)(*evil))) == set()


@pytest.mark.parametrize(
    ("reason", "do"),
    [
        (
            "AuthenticationError: invalid username-password pair or user is disabled.",
            "Check the user and the",
        ),
        ("AuthenticationError: WRONGPASS invalid username-password pair", "Check the user and the password"),
        ("AuthenticationError: HELLO must be called with the client already authenticated", "Check the user"),
        ("ResponseError: DB index is out of range", "the server must have the database"),
        (
            "RedisClusterException: ...reachable node: HELLO must be called with",
            "Check the user and the password",
        ),
        (
            "ConnectionError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed",
            "ssl_ca_certs",
        ),
        (
            "ConnectionError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch, "
            "certificate is not valid for 'a'",
            "for another host",
        ),
        (
            "ConnectionError: [SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
            "does not use TLS",
        ),
        (
            "InvalidResponse: Protocol Error: b'\\x15\\x03\\x03\\x00\\x02\\x02F'",
            "write rediss:// for redis://",
        ),
        ("RedisClusterException: Cluster mode is not enabled on this node", "redis+cluster:// for a cluster"),
        ("MovedError: 5061 127.0.0.1:7002", "redis+cluster:// for a cluster"),
        ("NoPermissionError: User x has no permissions to run the 'eval' command", "Grant its user"),
        ("ResponseError: The user executing the script can't run this command (SET)", "Grant its user"),
        ("NoPermissionError: No permissions to access a key", "Grant its user what is missing"),
        ("its line cannot be read: ZCOUNT is forbidden", "Grant its user what is missing"),
        ("ResponseError: unknown command 'EVALSHA', with args beginning with:", "too old"),
        ("ResponseError: Unknown Redis command called from script", "too old"),
        (
            "ResponseError: WRONGTYPE Operation against a key holding the wrong kind of value",
            "Another program",
        ),
        ("ResponseError: user_script:4: attempt to compare nil with number", "The server's log may say more"),
    ],
)
def test_remedy_of_a_refusal_fits_the_servers_words(reason, do):
    """Only a missing permission asks for one."""
    message = str(LockRefused("k", reason))
    assert reason.removesuffix(".") in message
    assert do in message
    assert ("Grant" in message) == ("Grant" in do)


@pytest.mark.parametrize(
    "reason",
    [
        "ConnectionError: Error -3 connecting to redis:6379. Temporary failure in name resolution.",
        "ConnectionError: Error while reading from redis:6379 : (104, 'Connection reset by peer')",
        "TimeoutError: Timeout reading from socket",
    ],
)
def test_outage_that_ends_by_itself_asks_for_nothing(reason):
    """Nobody is told to change a URL that is right."""
    assert LockUnavailable("k", reason).remedy == ""
    assert not is_misled(reason)


def test_name_of_a_key_does_not_tell_what_is_wrong():
    """A server quotes it: what is refused for good is no wrong URL."""
    assert not is_misled(
        "ResponseError: unknown command 'EVALSHA', with args: 'a', '1', 'setnx:{shop.moved :a}'"
    )
