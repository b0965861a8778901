"""The receipt: a note that an attempt of a call has ended. Redis only; nothing here knows Celery.

It stands apart from the lock, under what names the attempt: who writes it need not know the call's key.
"""

from __future__ import annotations

import redis

from celery_setnx.lock.scripts import reply_to


def write_receipt(client: redis.Redis, name: str, keep_s: float) -> None:
    """Note for so many seconds that an attempt has ended."""
    reply_to(client, "SET", name, "", "PX", str(max(1, int(keep_s * 1000))))


def has_receipt(client: redis.Redis, name: str) -> bool:
    """Whether an attempt is known to have ended."""
    return bool(reply_to(client, "EXISTS", name))
