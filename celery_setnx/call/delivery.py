"""What a worker's parent knows of a delivery, handed on to the process that runs the task."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from celery.app.task import Context

from celery_setnx.call.guard import guard_of
from celery_setnx.call.live import known_live_terms
from celery_setnx.call.message import Call
from celery_setnx.call.queues import origin_here

if TYPE_CHECKING:
    from celery.worker.request import Request

DELIVERY = "setnx_delivery"
"""The message property by which a delivery travels to its task."""


class Delivery(NamedTuple):
    """One delivery of a message. It travels to the task in a message property, which no retry inherits.

    A broker cannot bring one along: nothing that it delivers has this type.
    """

    call: Call  # read from the header, once
    nonce: str  # makes the token of each delivery its own: a broker may deliver one message twice
    content_type: str  # how the message was serialized
    queue: str  # where the message came from; empty if that is not known
    is_fanout: bool  # whether that queue gets copies of what other queues get too
    has_events: bool  # whether this worker sends task events
    live: str = ""  # the live terms of the call's task, as its worker knows them
    live_read_at: float = -math.inf  # when it has read them, by the machine's monotonic clock

    @classmethod
    def receive(cls, request: Request, call: Call, *, takes_lock: bool = True) -> Delivery:
        """Note the delivery of a request that this worker has just received. Its task finds it by `of`."""
        eventer = request.eventer  # at work for the worker's heartbeat in any case
        has_events = bool(eventer and eventer.enabled and (not eventer.groups or "task" in eventer.groups))
        nonce = os.urandom(6).hex() if takes_lock else ""
        live = _live_terms(request, call) if takes_lock else ("",)
        delivery = cls(call, nonce, request.content_type, *origin_here(), has_events, *live)
        properties = request._request_dict.get("properties") or {}
        request._request_dict["properties"] = {**properties, DELIVERY: delivery}
        if call.route is not None:  # its body sees by which it first came
            request._delivery_info.update(zip(("exchange", "routing_key"), call.route))
        return delivery

    @classmethod
    def of(cls, request: Context) -> Delivery | None:
        """The delivery that the task runs for. None if the task runs eagerly, or its worker noted none."""
        found = (request.properties or {}).get(DELIVERY)
        return found if isinstance(found, cls) else None


def _live_terms(request: Request, call: Call) -> tuple[str, float]:
    """Those of the scope of the call's lock, and when they were read; as a rule there are none at all."""
    known = known_live_terms(request.app)
    guard = guard_of(request.task) if known.texts else None
    return known.texts.get(guard.scope_at(guard.fitting(call)), "") if guard else "", known.read_at
