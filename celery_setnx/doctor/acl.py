"""What the user of the locks must be allowed, as a line for the server's ACL. No server is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery

from celery_setnx.address import scheme_of
from celery_setnx.connection import lock_address, lock_url
from celery_setnx.exceptions import COMMANDS
from celery_setnx.lock.names import KNOWN_LINES
from celery_setnx.lock.survey import COMMANDS as OF_OPERATORS
from celery_setnx.options import settings_of

_OF_BEAT = ("HSETNX", "HKEYS")
_OF_CLUSTER = ("CLUSTER|SLOTS", "COMMAND")
_OF_DOCTOR = ("INFO", "CONFIG|GET", "CLUSTER|INFO")


def acl_lines(app: Celery) -> Iterator[str]:
    """What workers, publishers and beats need, and then what operators need as well.

    The lines add to what a user may do. A password stands in them only for a user whom no setting names.
    """
    params, prefix = lock_address(app).params, settings_of(app).prefix
    known = _user(params)
    user = known or "celery_setnx"
    commands = [*COMMANDS, *_OF_BEAT]
    if params.get("db"):
        commands.append("SELECT")
    if scheme_of(lock_url(app)[0]).endswith("+cluster"):
        commands += _OF_CLUSTER
    keys = [
        f"~{_literally(prefix)}:*",
        *([] if KNOWN_LINES.startswith(f"{prefix}:") else [f"~{KNOWN_LINES}"]),
    ]
    login = [] if known else ["on", ">PASSWORD"]
    yield _line(user, *login, *keys, *_allowed(commands))
    yield "# Also needed for list, watch, release --queued and doctor:"
    yield _line(user, *_allowed([*(c for c in OF_OPERATORS if c not in commands), *_OF_DOCTOR]))


def _user(params: Mapping[str, Any]) -> str | None:
    """The user who logs in; None if nobody names one."""
    provider = params.get("credential_provider")
    if provider is None:
        return params.get("username")
    user, *password = provider.get_credentials()
    return user if password else None


def _line(user: str, *rules: str) -> str:
    return " ".join(["ACL SETUSER", user, *rules])


def _allowed(commands: list[str]) -> list[str]:
    return [f"+{command.lower()}" for command in commands]


def _literally(prefix: str) -> str:
    """The prefix in a pattern of keys."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", prefix)
