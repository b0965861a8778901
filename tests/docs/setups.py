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
            'singleton={"key": "month"})\ndef report(month, requested_by)',
            after='assert report.lock_key(5, "a") == report.lock_key(5, "b") != report.lock_key(6, "a")',
        ),
        Fragment(
            "refresh.fan_out(",
            before="accounts = range(20)",
            after="""
assert not first.deduplicated
assert again.deduplicated and again.id == first.id
# Of the fan-out, 7 was queued already.
assert app.backend.client.llen("celery") == len(accounts)
""",
        ),
    ],
    "docs/django.md": [
        Fragment(
            "CELERY_SETNX_PREFIX",
            before="""
import os, sys, tempfile
directory = tempfile.TemporaryDirectory()
os.environ.update(
    SHOP_DATABASE=os.path.join(directory.name, "shop.sqlite3"),
    DJANGO_SETTINGS_MODULE="shop.settings",
    REDIS_URL="redis://localhost:6379/0",
)
sys.path.insert(0, "examples/django_app")
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.db import IntegrityError, transaction
from django.db.models import F, Sum
from django.http import JsonResponse
from django.test import RequestFactory, TestCase
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from orders.models import Customer, Order
from orders.tasks import sum_up as shipped
from shop.celery import app
broker = app.connection_for_write().default_channel.client
queue = app.conf.task_default_queue
""",
            after="""
assert shipped.lock_key(7).startswith("shop:{orders.tasks.sum_up:")
assert shipped._guard.options.lease == 20
""",
        ),
        Fragment(
            "def place(request, name):",
            after="""
post = RequestFactory().post
assert place(post("/", {"amount": [30, 12]}), "ann").status_code == 202
assert place(post("/", {"amount": [5, -1]}), "cleo").status_code == 400
assert broker.llen(queue) == 1
ann = Customer.objects.get(name="ann")
assert sum_up(ann.pk) == 42
queryset = Customer.objects.all()
counts = sum_up.fan_out((pk,) for pk in queryset.values_list("pk", flat=True))
assert (counts.accepted, counts.duplicates) == (0, 1)
""",
        ),
        Fragment(
            "class OnCommitTask(",
            after="""
@shared_task(base=SingletonOnCommitTask, singleton={"key": "customer_id", "dedupe": "until_started"})
def remind(customer_id): ...
queued = broker.llen(queue)
with transaction.atomic():
    assert remind.delay(7) is remind.delay(7) is None
    assert broker.llen(queue) == queued
assert broker.llen(queue) == queued + 1
""",
        ),
        Fragment(
            "async def order_by_user(",
            after="""
import asyncio
first, again = (asyncio.run(order_by_user(user, "2026-10")) for user in ("ann", "bob"))
assert again == {"task": first["task"], "duplicate": True} != first
""",
        ),
        Fragment(
            "def show_totals(month):",
            after="""
asked = web.test_client().post("/reports/2026-10")
assert (asked.status_code, asked.json) == (202, again)
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
            "def report(month, requested_by): ...",
            after='assert report.lock_key(5, "nightly") == report.lock_key(5, "by hand")',
        ),
    ],
    "docs/monitoring.md": [
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
    "docs/beat.md": [
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
    "docs/signals.md": [
        Fragment("def somebody_died(sender", before="@app.task(base=SingletonTask)\ndef settle(): ..."),
    ],
}
