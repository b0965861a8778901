"""What a worker answers by remote control: which live terms it knows."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from celery_setnx.call.live import known_live_terms


@inspect_command()  # type: ignore[untyped-decorator]
def setnx_terms(state: Any, **_told: Any) -> dict[str, Any]:
    """The scopes whose live terms this worker knows."""
    return {"scopes": sorted(known_live_terms(state.app).texts)}
