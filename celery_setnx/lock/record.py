"""What a lock's keys say: whose it is, who waits, whose turn it is. Values; nothing here asks a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_setnx import wording
from celery_setnx.wording import printable, titled

US = 1_000_000

ORIGINAL = "-"
"""The copy that a call's first message is; those that wake it have ids of their own."""

ENDED = "!"
"""The copy that no message is: a ticket that names it says that the attempt has failed, and never starts."""


def task_token(task_id: str, retries: int | None, nonce: str) -> str:
    """A task's token: proof of being the holder, new for every delivery."""
    return f"{task_id}|{retries or 0}|{nonce}"


def task_of(token: str) -> str | None:
    """The id of the task whose token it is; None if it is no task's."""
    parts = token.rsplit("|", 2)
    return parts[0] if len(parts) == 3 else None


class Terms(NamedTuple):
    """On what terms a call has a lock.

    Attributes:
        limit: How many may hold it at a time. Defaults to 1.
        starts: How many may start within a period. Defaults to 0: any number.
        period_s: The period, in seconds.
        live: The live terms of its task, which count above these; see lua/terms.lua. Defaults to none.
    """

    limit: int = 1
    starts: int = 0
    period_s: float = 0.0
    live: str = ""

    @property
    def pace(self) -> str:
        """How many may start within how long."""
        return f"{self.starts} in {self.period_s:.12g} s"

    def __str__(self) -> str:
        own = f"{self.limit}:{self.starts}/{round(self.period_s * US)}" if self.starts else str(self.limit)
        return f"{own}\n{self.live}" if self.live else own


PLAIN = Terms()
"""One at a time, as often as you like."""

UNKNOWN = Terms(0)
"""Those of the last caller count."""


@dataclass(frozen=True)
class Waiter:
    """A task that waits in line for a lock.

    Attributes:
        task_id: Its id.
        place: Its place in the line; the first is 1.
        since: Server time (Unix seconds) since which it waits.
        age_s: Seconds for which it has waited.
    """

    task_id: str
    place: int
    since: float
    age_s: float


@dataclass(frozen=True)
class Heir:
    """The first in line, to which a lock was handed.

    Attributes:
        task_id: The task's id.
        call: The message to wake it with; None if it asks by itself, or its wake-up is on its way.
        taken_over_from: The holder before, if it has died.
        server_time: The server's clock (Unix seconds) then; 0 if nobody has died.
    """

    task_id: str
    call: str | None
    taken_over_from: Holder | None = None
    server_time: float = 0.0


class Turn(NamedTuple):
    """The work left for a line when a permit was released.

    Attributes:
        heir: The call that it was handed to, to be woken; None if there is none.
        look_in_s: Seconds after which to look at the line; None if there is no need.
    """

    heir: Heir | None
    look_in_s: float | None


class ServeReply(NamedTuple):
    """What became of the service of a line.

    Attributes:
        heir: To whom the lock is handed; None if it is not.
        holder: Who has it otherwise; None if nobody does.
        look_in_s: Seconds after which it is time to look again; None if nobody waits, or that is not known.
    """

    heir: Heir | None
    holder: Holder | None
    look_in_s: float | None

    @property
    def waits(self) -> bool:
        """Whether anybody may wait."""
        return self != (None, None, None)


@dataclass(frozen=True)
class Holder:
    """The holder of a lock, or the dead holder of one that was taken over.

    Attributes:
        token: Proof of being the holder; for a task `<task id>|<retries>|<nonce>`. Empty if foreign.
        deadline: Server time (Unix seconds) at which the lease ends; None if the lock has none.
        fence: The holder's fence; 0 if foreign.
        state: `running`, `resting` or `held_for_retry`; `handed`: kept for the first in line, which has been
            woken; `failed`: its run has failed and is about to release it; `foreign`: another program has set
            it; `paced`: nobody has it, and no call may start before the deadline; or `paused`: the same,
            because an operator or a body has said so.
        since: Server time (Unix seconds) of the acquisition; None if foreign.
        info: Details of the holder: task, about, task_id, worker, host, pid. Of a pause: because, by, and
            whose it is, as scope or key.
        value: The lock's value in Redis.
        waiters: The first hundred in line for the lock, if they were asked for.
        waiting: How many wait in line.
        permit: Which of several permits it holds; the first is 0.
        raw: Its value and its record as in Redis; set by `look`.
    """

    token: str
    deadline: float | None
    fence: int
    state: str
    since: float | None
    info: Mapping[str, Any] = field(default_factory=dict)
    value: str = ""
    waiters: tuple[Waiter, ...] = ()
    waiting: int = 0
    permit: int = 0
    raw: tuple[Any, Any] = field(default=(None, None), repr=False, compare=False)

    @property
    def task_id(self) -> str | None:
        """The holding task's id, or None if no task holds the lock."""
        return self.info.get("task_id")

    @property
    def task(self) -> str | None:
        """The holding task's name, or None if the holder has not said it."""
        return self._said("task")

    @property
    def worker(self) -> str | None:
        """The node name of the worker whose process it is, such as `w1@host`; None if it has not said it."""
        return self._said("worker")

    @property
    def host(self) -> str | None:
        """The host of its process, or None if it has not said it."""
        return self._said("host")

    def _said(self, name: str) -> str | None:
        said = self.info.get(name)
        return said if isinstance(said, str) else None

    @property
    def about(self) -> str:
        """What its key was made of, such as `account_id=7`; empty if the holder has not said it."""
        return wording.about(self.info.get("about"))

    @property
    def pid(self) -> int | None:
        """The holding process's id on its host, or None if the holder has not said it."""
        pid = self.info.get("pid")
        return pid if isinstance(pid, int) else None

    def has_ended(self, server_time: float) -> bool:
        """Whether its deadline has passed by the server's clock (Unix seconds)."""
        return self.deadline is not None and self.deadline <= server_time

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            **{name: self.info.get(name) for name in ("task", "task_id", "worker", "host")},
            "about": self.about,
            "pid": self.pid,
            "state": self.state,
            "fence": self.fence,
            "since": self.since,
            "deadline": self.deadline,
            "value": self.value,
            "description": str(self),
        }

    def __str__(self) -> str:
        return printable(self._description())

    def _description(self) -> str:
        """Who it is, in words."""
        if self.state == "handed":
            return f"task {self.task_id}, the first in line, which was woken at {clock(self.since)}"
        if self.state == "paced":
            return f"its pace of {self.info.get('pace')} until {clock(self.deadline)}"
        if self.state == "paused":
            return _pause(self.deadline, self.info)
        if self.state == "foreign":
            until = f"valid until {clock(self.deadline)}" if self.deadline else "not a time, so it never ends"
            return f"a foreign client (value {self.value!r}, {until})"
        info = self.info
        who = titled(info["task"], self.about) if info.get("task") else f"token {self.token}"
        who += f"[{self.task_id}]" if self.task_id else ""
        where = (
            f" on {info.get('worker') or info.get('host')} (pid {info.get('pid')})" if info.get("pid") else ""
        )
        return f"{who}{where}, {self.state} since {clock(self.since)}"


def holder_of(
    value: str | None, record: str | None, permit: int = 0, raw: tuple[Any, Any] = (None, None)
) -> Holder | None:
    """Who has a permit, or had it if it has no value, as scripts tell of it; None if nobody."""
    if record is None:
        return None
    token, deadline_us, fence, state, since_us, info = record.split("\n", 5)
    return Holder(
        token=token,
        deadline=int(deadline_us) / US if deadline_us != "0" else None,
        fence=int(fence),
        state=state,
        since=int(since_us) / US if state != "foreign" else None,
        info={"task_id": info} if state == "handed" else _info(info, token),
        value=value or "",
        permit=permit,
        raw=raw,
    )


def turn_of(heir: str | None, call: str | None, look_us: str | int, now_us: int) -> Turn | None:
    """What is left to be done, as scripts tell of it; None if nothing is."""
    if heir:
        return Turn(Heir(heir, call), None)
    return Turn(None, max(0.0, (int(look_us) - now_us) / US)) if look_us else None


def parse_terms(text: str) -> Terms:
    """Terms as scripts have them (lua/permits.lua)."""
    limit, _, rate = text.partition(":")
    starts, _, period_us = rate.partition("/")
    return Terms(int(limit), int(starts or 0), int(period_us or 0) / US)


def _info(text: str, token: str) -> dict[str, Any]:
    """What a holder says of itself; nothing, if another program has put its own words there.

    The id of the task is the token's, and not written down twice.
    """
    try:
        info = json.loads(text)
    except ValueError:
        info = None
    info = info if isinstance(info, dict) else {}
    task_id = task_of(token)
    return info if task_id is None else {"task_id": task_id, **info}


def _pause(deadline: float | None, info: Mapping[str, Any]) -> str:
    """Whose pause it is, until when, by whom and why; and what ends it."""
    scope, source = info.get("scope"), wording.source(info.get("by"), info.get("because"))
    of = f" of all calls of {scope}" if scope else ""
    ends = wording.resume(str(scope or info.get("key")))
    return f"a pause{of} until {clock(deadline)}{source} ({ends} ends it)"


def clock(moment: float | None) -> str:
    """A time of the server's clock, for people; `?` if it is not known."""
    if moment is None:
        return "?"
    try:
        return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"second {moment:.0f}"
