"""Time that passes in a test, for debounced calls that a worker in this process holds, or is to hold.

Only the test kit imports it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery import Celery
from celery.signals import task_received

from celery_setnx.call.message import Call
from celery_setnx.run.held import take_from
from celery_setnx.run.sweep import workers_here

_MOST = 1000
_PRIORITY = 6  # of what Celery puts into a timer


class Passage(NamedTuple):
    """Time that has passed for a key, after the call with the generation `latest` was published."""

    number: int
    key: str
    by_s: float
    latest: int

    def is_of(self, request: Any) -> bool:
        """Whether it has passed for a call that is here: one that waits for newer calls, and nothing else."""
        call = getattr(request, "call", None)
        if not isinstance(call, Call) or call.key != self.key or call.attempt or call.waits or call.is_woken:
            return False
        return 0 < call.generation <= self.latest and self.number > _known.get(request, 0)


_numbers = count(1)
_passages: deque[Passage] = deque(maxlen=_MOST)
_known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by request, the last passage that it has had


def pass_for_held(app: Celery, key: str, by_s: float, latest: int) -> None:
    """Let the time of debounced calls come sooner, also of those whose messages are still to come here."""
    passage = Passage(next(_numbers), key, by_s, latest)
    _passages.append(passage)
    for worker in workers_here(app):
        if (consumer := worker.consumer) is not None:
            if hasattr(consumer.timer, "mutex"):  # its loop may be in no hurry
                _bring_forward(consumer, passage)
            # There no message is between its arrival and the timer.
            consumer.call_soon(partial(_bring_forward, consumer, passage))


def _bring_forward(consumer: Any, passage: Passage) -> None:
    def is_wanted(request: Any) -> bool:
        is_of = passage.is_of(request)
        if is_of:
            _known[request] = passage.number
        return is_of

    for held in take_from(consumer.timer, is_wanted):
        when = held.when - passage.by_s
        held.request._eta_timer_entry = consumer.timer.call_at(when, held.do, held.args, priority=_PRIORITY)


def _arrive(sender: Any = None, request: Any = None, **_details: Any) -> None:
    """A message comes: what has passed since it was published has passed for it, too."""
    if getattr(request, "eta", None) is None:
        return
    for passage in _passages_of(request):
        request._eta -= timedelta(seconds=passage.by_s)
        _known[request] = passage.number


task_received.connect(_arrive)


def _passages_of(request: Any) -> Iterator[Passage]:
    return (passage for passage in list(_passages) if passage.is_of(request))
