"""The app that sentry-sdk watches: what would be sent to Sentry goes to the journal."""

import os
from datetime import datetime, timedelta, timezone
from typing import Any

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.integrations.redis import RedisIntegration
from sentry_sdk.transport import Transport

from tests.app import journal
from tests.ecosystem.watched import app, once, skips

__all__ = ["app"]


class ToJournal(Transport):
    """Writes down errors, transactions and check-ins, in the thread that captures them."""

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            said: Any = item.payload.json or {}
            trace = said.get("contexts", {}).get("trace", {})
            journal.write(
                item.type or "",
                task=said.get("transaction"),
                task_id=said.get("tags", {}).get("celery_task_id"),
                trace=trace.get("trace_id"),
                status=said.get("status") or trace.get("status"),
                errors=[error["type"] for error in said.get("exception", {}).get("values", ())],
                monitor=said.get("monitor_slug"),
                check_in=said.get("check_in_id"),
            )


sentry_sdk.init(
    dsn="https://public@sentry.invalid/1",
    transport=ToJournal,
    traces_sample_rate=1.0,
    auto_enabling_integrations=False,
    integrations=[CeleryIntegration(monitor_beat_tasks=True), RedisIntegration()],
)

LONG_AGO = datetime.now(timezone.utc) - timedelta(hours=1)


def entry(task: Any, *args: str, **options: Any) -> dict[str, Any]:
    """Due at once, and then not for an hour."""
    return {"task": task.name, "args": args, "schedule": 3600.0, "last_run_at": LONG_AGO, "options": options}


if name := os.environ.get("SETNX_TEST_TICKS"):
    app.conf.beat_schedule = {
        "one": entry(skips, name, name),
        "another": entry(skips, name, name),
        "queued": entry(once, name, queue=f"aside-{name}"),
        "again": entry(once, name, queue=f"aside-{name}"),
    }
