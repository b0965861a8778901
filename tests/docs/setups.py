"""What fragments on the pages need before they run, and what must be true after them.

A page may have both for itself, in a comment `<!-- setup`; these are for blocks whose page is read as plain
Markdown too, such as the README.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fragment:
    """A block of a page, and the Python that is run before it, and after it to say what must be true then."""

    marks: str
    """A text that is in this block, and in no other of the page."""
    before: str = ""
    after: str = ""


SETUPS: dict[str, list[Fragment]] = {
    "README.md": [
        Fragment(
            'singleton={"key": "account_id"})\ndef settle(account_id, reason)',
            after='assert settle.lock_key(7, "a") == settle.lock_key(7, "b") != settle.lock_key(8, "a")',
        ),
        Fragment(
            "settle.fan_out(",
            before="accounts = range(20)",
            after="""
assert not first.deduplicated
assert again.deduplicated and again.id == first.id
# Of the fan-out, 7 was queued already.
assert app.backend.client.llen("celery") == len(accounts)
""",
        ),
    ],
    "docs/how-it-works.md": [
        Fragment(
            'task_default_queue_type="quorum"',
            after="""
import celery
if celery.VERSION >= (5, 5):
    assert app.amqp.queues["celery"].queue_arguments == {"x-queue-type": "quorum"}
    assert app.amqp.queues["celery"].exchange.type == "topic"
""",
        ),
    ],
    "docs/index.md": [
        Fragment(
            "def settle(account_id, reason): ...",
            after='assert settle.lock_key(7, "nightly") == settle.lock_key(7, "by hand")',
        ),
    ],
    "docs/monitoring.md": [
        Fragment("def somebody_died(sender", before="@app.task(base=SingletonTask)\ndef settle(): ..."),
        Fragment(
            "metrics.serve(app, port=9808)",
            after="from celery_setnx.signals import lock_acquired\nassert lock_acquired.receivers",
        ),
        Fragment(
            "metrics.opentelemetry(app)",
            before="receivers = len(lock_acquired.receivers)",
            after="assert len(lock_acquired.receivers) > receivers",
        ),
        Fragment(
            "def measure(**_):",
            before="""
import os
from celery.signals import worker_process_init
from opentelemetry.metrics import get_meter_provider, set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter as OTLPMetricExporter
from opentelemetry.sdk.resources import Resource
""",
            after="""
measure()
provider = get_meter_provider()
assert isinstance(provider, MeterProvider)
provider.shutdown()
""",
        ),
    ],
    "docs/periodic.md": [
        Fragment(
            "def import_feed(feed_url):",
            before="""
class Feed:
    class objects:
        @staticmethod
        def import_feed(feed_url):
            return type("Feed", (), {"url": feed_url})
""",
            after='assert import_feed("https://example.org/feed") == "https://example.org/feed"',
        ),
        Fragment(
            '"at_least_for": 55',
            after="""
from celery_setnx import is_skipped
from celery_setnx.testing import guarded, pass_time
with guarded(app):
    assert send_reminders.apply().get() is None
    assert is_skipped(send_reminders.apply().get())  # the second copy of the tick
    pass_time(55, send_reminders)
    assert send_reminders.apply().get() is None
""",
        ),
    ],
    "docs/waiting.md": [
        Fragment(
            '"key": "customer_id", "on_conflict": "wait"',
            after="assert apply_event.lock_key(1, 'a') == apply_event.lock_key(1, 'b')",
        ),
    ],
}
