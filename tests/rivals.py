"""Processes that fight for one lock: ours, and the classic recipe to the letter."""

import os
import sys
import time
from typing import Any

import redis

from celery_setnx import HeldLock, SetnxLock


class ClassicLock:
    """The SETNX recipe of the Redis documentation as programs have it: client clocks and all.

    Args:
        client: A Redis client that decodes replies.
        name: The lock's key.
        timeout: Seconds that a lock is valid.
    """

    def __init__(self, client: Any, name: str, timeout: int) -> None:
        self.client, self.name, self.timeout = client, name, timeout
        self.stamp = 0

    def acquire(self) -> bool:
        now = int(time.time())
        stamp = now + self.timeout + 1
        if not self.client.setnx(self.name, stamp):
            value = self.client.get(self.name)
            if value is not None and not now > int(value):
                return False
            old = self.client.getset(self.name, stamp)
            if old is not None and not now > int(old):
                return False
        self.stamp = stamp
        return True

    def release(self) -> None:
        """DEL, guarded by the clock as the recipe says."""
        if time.time() < self.stamp:
            self.client.delete(self.name)


class OurLock:
    """SetnxLock with the rival's two verbs."""

    def __init__(self, client: Any, name: str, timeout: int) -> None:
        self.lock = SetnxLock(client, name, lease=timeout + 1)

        self.held: HeldLock | None = None

    def acquire(self) -> bool:
        self.held = self.lock.acquire().lock
        return self.held is not None

    def release(self) -> None:
        self.lock.release()


def compete(kind: str, url: str, name: str, history: str, seconds: float, section_s: float) -> None:
    """Take the lock as often as possible; write when each section began and ended."""
    client = redis.Redis.from_url(url, decode_responses=True)
    lock = {"classic": ClassicLock, "ours": OurLock}[kind](client, name, 2)
    log = os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if not lock.acquire():
            time.sleep(0.002)  # the recipe polls
            continue
        begin = time.monotonic()
        os.write(log, f"{kind} {os.getpid()} begin {begin}\n".encode())
        time.sleep(section_s)  # a section takes its time
        os.write(log, f"{kind} {os.getpid()} end {time.monotonic()}\n".encode())
        lock.release()


if __name__ == "__main__":
    compete(*sys.argv[1:5], float(sys.argv[5]), float(sys.argv[6]))  # type: ignore[arg-type]
