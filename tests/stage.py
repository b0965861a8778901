"""Calls of one key, brought to where a test wants them: at a gate, in a line, or left at the broker."""

import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from celery_setnx.call.back import Message
from celery_setnx.call.wake import COURIER
from celery_setnx.connection import client_for
from celery_setnx.lock.names import line_names
from tests.harness import DEADLINE_S, Journal, Worker, wait_until

SOON = {"retry_delay_max": 0.3}
"""Options of a call that waits: its courier comes every 0.3 s, not every ten minutes (see `tests.app`)."""


class Stage:
    """The tasks of `tests.waitapp`, what they journal, and a key that is no other test's.

    Couriers of other tests may still be on their way, so no test may use another's key.
    """

    def __init__(self, tasks: Any, journal: Journal, gates: Callable[..., None]) -> None:
        self.tasks, self.journal, self._gates = tasks, journal, gates
        self.task = tasks.work
        self.key = uuid.uuid4().hex[:8]
        self.gate = f"gated-{self.key}"

    def open(self, times: int = 1, gate: str = "") -> None:
        """Let that many bodies go on that wait at the gate, now or later; or at another one."""
        self._gates(gate or self.gate, times)

    def held(self, *args: Any, task: Any = None, **options: Any) -> Any:
        """A call whose body has started and waits at the gate."""
        result = (task or self.task).apply_async([self.key, *args, self.gate], **options)
        return self.journal.reached("start", result)

    def parked(self, *args: Any, task: Any = None, **options: Any) -> Any:
        """A call that waits in line behind another."""
        result = (task or self.task).apply_async([self.key, *args], **options)
        self.journal.reached("waiting", result)
        return self.journal.reached("postrun", result)

    def line_up(self, count: int, **options: Any) -> list[Any]:
        """Calls that wait in line, in this order."""
        return [self.parked(f"{self.key}-{number}", **options) for number in range(count)]

    def holder_pid(self) -> int:
        """The process whose body started first."""
        return int(self.journal.entries(what="start")[0]["pid"])

    def starts(self) -> list[str]:
        """Ids of the calls whose bodies started, in order."""
        return [entry["task_id"] for entry in self.journal.entries(what="start")]

    def has_run(self, result: Any) -> None:
        """Wait until a call has succeeded, and its worker has told so; its body has run once."""
        result.get(timeout=60)
        self.journal.wait_for("postrun", task_id=result.id, state="SUCCESS")
        assert self.starts().count(result.id) == 1

    def have_run(self, results: list[Any], *, in_order: bool = True) -> None:
        """Wait until all have succeeded; no body of theirs ran twice, or beside another, or out of order."""
        for result in results:
            self.has_run(result)
        assert_one_at_a_time(self.journal)
        ids = [result.id for result in results]
        assert not in_order or [task_id for task_id in self.starts() if task_id in ids] == ids

    def unacknowledged(self) -> list[str]:
        """What a dead worker of the key's queue has left. Ask before another takes from that."""
        return unacknowledged(self.journal._client, self.key)

    def redeliver(self, left: list[str] | None = None) -> None:
        """Have what a dead worker of the key's queue has left delivered again."""
        redeliver(self.journal._client, self.unacknowledged() if left is None else left)

    def waker(self, task: Any, result: Any) -> Callable[..., None]:
        """Sends a waiting call once more; with other headers, if told."""
        app = self.tasks.app
        entry = client_for(app).hget(line_names(task.lock_key(self.key))[1], result.id)
        call, message = Message.unpacked(app, entry.decode().split("|", 2)[2])

        def send(**headers: Any) -> None:
            replace(message, headers={**message.headers, **headers}).send(app, call.as_copy())

        return send

    def settle(self) -> None:
        """Wait until no message but couriers is left: one that died may have sent a wake-up already."""
        settle(self.messages)

    def messages(self) -> list[str]:
        """The messages that name the key, or its lock, and that no worker has acknowledged."""
        names = self.key, self.tasks.work.lock_key(self.key)
        return messages(self.journal._client, names, ["celery", self.key])


def assert_one_at_a_time(journal: Journal) -> None:
    """No body started before the one before it with its key had ended; one that was killed has no end."""
    entries = [entry for entry in journal.entries() if entry["what"] in ("start", "end") and entry["key"]]
    for key in {entry["key"] for entry in entries}:
        running: Any = None
        spans = [(e["what"], (e["task_id"], e["pid"])) for e in entries if e["key"] == key]
        for number, (what, body) in enumerate(spans):
            beside = what == "start" and ("end", running) in spans[number:]
            assert not beside, f"{body} beside {running}: {entries}"
            running = body if what == "start" else None


def revoke(app: Any, result: Any, *workers: Worker, **stamps: str) -> None:
    """Revoke a call, by its stamps if any are given; these workers know it then."""
    told = {"destination": [worker.node for worker in workers], "limit": len(workers), "timeout": 30}
    by, what = (app.control.revoke_by_stamped_headers, stamps) if stamps else (app.control.revoke, result.id)
    assert len(by(what, reply=True, **told)) == len(workers)


def wait_for_ends(app: Any, worker: Worker) -> None:
    """Wait until a worker has heard of the end of all that it has read, but for couriers.

    What is active is not enough: a busy worker may not even have heard that a call has begun.
    """
    node = worker.node
    asked = app.control.inspect([node], timeout=DEADLINE_S, limit=1)

    def has_heard() -> bool:
        calls = asked.reserved()[node] + asked.active()[node]
        return all(call["name"] == COURIER for call in calls)

    wait_until(has_heard, "the worker has heard how its calls ended")


def unacknowledged(broker: Any, queue: str, task_id: str = "") -> list[str]:
    """Tags of a queue's messages that were delivered and not acknowledged; those of one call, if it is named.

    If a worker lives that takes from the queue, they are its own, too: it may be about to acknowledge them.
    And a courier of an earlier test may be among them: delivered now, it would bring its call back.
    """
    found = {tag: json.loads(packed) for tag, packed in broker.hgetall("unacked").items()}
    return [
        tag
        for tag, (message, _exchange, routing_key) in found.items()
        if routing_key == queue and task_id in ("", message["headers"].get("id"))
    ]


def messages(broker: Any, names: Iterable[str], queues: Iterable[str]) -> list[str]:
    """The messages with any of these names that no worker has acknowledged."""
    queued = (broker.lrange(queue, 0, -1) for queue in queues)
    return [text for text in chain(broker.hvals("unacked"), *queued) if any(name in text for name in names)]


def settle(ask: Callable[[], list[str]]) -> None:
    """Wait until no message is left but couriers."""

    def left() -> list[str]:
        return [text for text in ask() if COURIER not in text]

    wait_until(lambda: not left(), lambda: f"no message but couriers, but {left()}")


def redeliver(broker: Any, left: list[str], to: str = "") -> None:
    """What a living worker does once the visibility timeout is over: what dead workers have left is delivered
    again, to the queue that it came from or to another. It comes at once, whatever its eta."""
    for tag in left:
        message, _exchange, routing_key = json.loads(broker.hget("unacked", tag))
        message["headers"].update(redelivered=True, eta=None)
        message["properties"]["delivery_info"]["redelivered"] = True
        broker.hdel("unacked", tag)
        broker.zrem("unacked_index", tag)
        broker.lpush(to or routing_key, json.dumps(message))


class Parked:
    """The queue `parked`, which no worker consumes: its messages are handed on when a test wants it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        client.delete("parked")

    def __len__(self) -> int:
        return int(self._client.llen("parked"))

    def move(self, change: Callable[[dict[str, Any]], Any] = lambda message: None) -> None:
        """Hand the oldest message to the workers, as if it had been sent to them, maybe changed."""
        message = json.loads(wait_until(lambda: self._client.rpop("parked"), "a parked message"))
        message["properties"]["delivery_info"]["routing_key"] = "celery"  # where it seems to come from
        change(message)
        self.send(message)

    def send(self, message: dict[str, Any]) -> None:
        """Hand a message to the workers."""
        self._client.lpush("celery", json.dumps(message))
