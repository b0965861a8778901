"""What a message had when it arrived: what others put on its request later, or change, does not go back."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.task import Context, Task
from celery.utils.threads import LocalStack
from kombu.utils import json

from celery_setnx.call.delivery import DELIVERY

_KEPT = "_setnx_arrived"
# What is none of its headers, and goes back whatever it holds.
_ALWAYS_KEPT = ("args", "kwargs", "callbacks", "errbacks", "chain", "chord", "properties", "delivery_info")


class _Requests(LocalStack):  # type: ignore[misc]
    """A task's stack of requests, which keeps what each had when Celery made it: before any hook ran."""

    def push(self, request: Any) -> Any:
        """Celery's own fast stacks never call this: nothing is kept there."""
        _keep(request)
        return super().push(request)


def keep_arrived(task: Task | type[Task]) -> None:
    """Have a task keep what its messages had; before it has run, because its requests get another place."""
    if not isinstance(task.request_stack, _Requests):
        task.request_stack = _Requests()


def arrived(request: Context) -> Mapping[str, Any]:
    """What the running call's message had, and Celery has embedded; as it is now, if that was not kept."""
    kept = vars(request).get(_KEPT)
    if isinstance(kept, bytes):
        return dict(pickle.loads(kept))  # our own, of a moment ago
    return kept if isinstance(kept, dict) else _data(_as_came(request))


def let_go(request: Context) -> None:
    """Keep it no more: the body begins, and its call does not go back as it was."""
    vars(request).pop(_KEPT, None)


def _keep(request: Any) -> None:
    """A pickle, because hooks may also change what is there. What cannot be pickled is kept as it is."""
    if not isinstance(request, Context) or request.called_directly or request.is_eager:
        return
    came = _as_came(request)
    try:
        kept: Any = pickle.dumps(came, pickle.HIGHEST_PROTOCOL)
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001 - whatever the app's own serializer has made of the message
        kept = came
    vars(request)[_KEPT] = kept


def _as_came(request: Context) -> dict[str, Any]:
    """All that a request has, but for its delivery, and the headers that Celery collects a second time.

    A message may have a header `headers` of its own, as tracers send one.
    """
    own = dict(vars(request))
    if DELIVERY in (own.get("properties") or ()):
        own["properties"] = {n: value for n, value in own["properties"].items() if n != DELIVERY}
    collected = own.get("headers")
    if not isinstance(collected, Mapping) or all(own.get(n) is value for n, value in collected.items()):
        own.pop("headers", None)
    return own


def _data(own: Mapping[str, Any]) -> dict[str, Any]:
    """What may have come in a message; of a task under another base class nobody has kept that."""
    return {name: value for name, value in own.items() if name in _ALWAYS_KEPT or _is_data(value)}


def _is_data(value: Any) -> bool:
    try:
        json.dumps(value)  # type: ignore[no-untyped-call]
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001 - whatever the thing raises, it came in no message
        return False
    return True
