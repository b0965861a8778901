"""What a worker's parent knows of a delivery, handed on to the process that runs the task."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from celery.app.task import Context

from celery_setnx.call.message import Call
from celery_setnx.call.queues import origin_here

if TYPE_CHECKING:
    from celery.worker.request import Request

DELIVERY = "setnx_delivery"
"""The message property by which a delivery travels to its task."""


class Delivery(NamedTuple):
    """One delivery of a message, as it travels to the task: in a property, which no retry inherits.

    A foreign message cannot have one: what comes from a broker is of no such type.
    """

    call: Call  # by the message's header, which nobody reads again
    nonce: str  # makes the token of each delivery its own: a broker may deliver one message twice
    content_type: str  # how the message was serialized
    queue: str  # that it came from; empty if that is not known
    is_fanout: bool  # whether that queue got a copy of what all others got too
    has_events: bool  # whether this worker sends task events

    @classmethod
    def taken_in(cls, request: Request, call: Call, *, takes_lock: bool = True) -> Delivery:
        """The one that this process is taking in; its task will find it."""
        eventer = request.eventer  # at work for the worker's heartbeat in any case
        has_events = bool(eventer and eventer.enabled and (not eventer.groups or "task" in eventer.groups))
        nonce = os.urandom(6).hex() if takes_lock else ""
        delivery = cls(call, nonce, request.content_type, *origin_here(), has_events)
        properties = request._request_dict.get("properties") or {}
        request._request_dict["properties"] = {**properties, DELIVERY: delivery}
        if call.route is not None:  # its body sees by which it first came
            request._delivery_info.update(zip(("exchange", "routing_key"), call.route))
        return delivery

    @classmethod
    def of(cls, request: Context) -> Delivery | None:
        """The one that a running task finds; None if it is eager, or no worker of ours has taken it in."""
        found = (request.properties or {}).get(DELIVERY)
        return found if isinstance(found, cls) else None
