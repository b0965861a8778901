"""The real scripts on a clock of the test's own: the line that reads TIME reads a key instead."""

from hashlib import sha1
from typing import Any

import redis

from celery_setnx.lock import line, live, look, marks, newest, verbs
from celery_setnx.lock.scripts import PermitScript

CLOCK_KEY = "test:clock"
SECOND = 1_000_000
# Far ahead of any server's own clock, so that no absolute expiry comes true behind the test's back; and below
# the places of those that are passed over.
EPOCH = 3_000_000_000 * SECOND
SCRIPTS = {
    "acquire": (verbs, "ACQUIRE"),
    "renew": (verbs, "RENEW"),
    "release": (verbs, "RELEASE"),
    "hold": (verbs, "HOLD"),
    "free": (verbs, "FREE"),
    "look": (look, "LOOK"),
    "mark": (marks, "MARK"),
    "if_same": (verbs, "IF_SAME"),
    "forget": (marks, "FORGET"),
    "serve": (verbs, "SERVE"),
    "park": (line, "PARK"),
    "leave": (line, "LEAVE"),
    "due": (line, "DUE"),
    "sweep": (line, "SWEEP"),
    "settle": (line, "SETTLE"),
    "reserve": (newest, "RESERVE"),
    "replace": (newest, "REPLACE"),
    "drop": (newest, "DROP"),
    "change_terms": (live, "CHANGE"),
    "hold_back": (live, "HOLD_BACK"),
    "rouse": (line, "ROUSE"),
}


def with_test_clock(text: str) -> str:
    """A script's text with the server's clock replaced by the test's."""
    assert text.count("redis.call('TIME')") <= 1, "the time is read in one place"
    return text.replace("redis.call('TIME')", f"redis.call('LRANGE', '{CLOCK_KEY}', 0, 1)")


def plain_texts() -> dict[str, str]:
    """The package's scripts, by verb; `<verb>#` is the same, told of several permits."""
    found = {}
    for verb, (module, name) in SCRIPTS.items():
        script = getattr(module, name)
        found[verb] = script.text
        if isinstance(script, PermitScript):
            found[f"{verb}#"] = script.text
    return found


def texts() -> dict[str, str]:
    """The same, on the test's clock."""
    return {verb: with_test_clock(text) for verb, text in plain_texts().items()}


def set_clock(now: int) -> list[tuple[Any, ...]]:
    """The commands that set the test's clock, in microseconds."""
    return [("DEL", CLOCK_KEY), ("RPUSH", CLOCK_KEY, now // SECOND, now % SECOND)]


class ServerClock:
    """The clock of a server whose scripts all read it, for the length of one test."""

    def __init__(self, client: redis.Redis, monkeypatch: Any) -> None:
        self._client = client
        for verb, text in texts().items():
            module, name = SCRIPTS[verb.rstrip("#")]
            script = getattr(module, name)
            monkeypatch.setattr(script, "text", text)
            monkeypatch.setattr(script, "sha", sha1(text.encode()).hexdigest())
        self.set(10)

    def set(self, second: float) -> None:
        """Set the clock to a second of the test's own count."""
        self.now = EPOCH + round(second * SECOND)
        for command in set_clock(self.now):
            self._client.execute_command(*command)
