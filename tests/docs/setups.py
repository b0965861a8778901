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
    "docs/choose.md": [
        Fragment(
            "def settle(account_id, reason)",
            after='assert settle.lock_key(7, "a") == settle.lock_key(7, "b") != settle.lock_key(8, "a")',
        ),
    ],
    "docs/runbook.md": [
        Fragment(
            '"key": ["account_id", "reason"], "dedupe": "until_started"',
            before="""
@app.task(base=SingletonTask, singleton={"key": "account_id", "dedupe": "until_started"})
def settle(account_id, reason): ...
by_account = settle.lock_key(7, "nightly")
settle.delay(7, "nightly")
""",
            after="""
assert settle.lock_key(7, "nightly") != by_account
app.amqp.flush_routes()
app.amqp.router = app.amqp.Router()  # as an app has it that starts with this setting
settle.delay(7, "nightly")
assert app.backend.client.llen("celery") == app.backend.client.llen("settle-new") == 1
""",
        ),
        Fragment(
            "new_name = app.task(",
            before="""
@app.task(name="proj.settle_old", base=SingletonTask, singleton={"key": "account_id"})
def settle_old(account_id, reason): ...
before = settle_old.lock_key(7, "x")
app._tasks.pop("proj.settle_old")
""",
            after="""
app.finalize()
assert old_name.lock_key(7, "x") == new_name.lock_key(7, "x") == before
""",
        ),
    ],
    "docs/recipes.md": [
        # Fan-out
        Fragment("def refresh(", before="def touched_accounts():\n    return iter([3, 5, 3, 8, 5, 3, 3, 8])"),
        Fragment(
            "counts = refresh.fan_out(",
            after="assert (counts.accepted, counts.duplicates, counts.failed) == (3, 5, 0)",
        ),
        Fragment("def refresh_all():", after="assert refresh_all() == 0  # all are queued already"),
        # One running, one pending
        Fragment(
            "def reindex(",
            before="client.flushall()\naccounts, search = {}, {}",
            after="""
first, second = save(7, "at home"), save(7, "on the road")
assert second.deduplicated and second.id == first.id
client.flushall()
""",
        ),
        Fragment("countdown=5", after='assert save(7, "somewhere else").deduplicated'),
        Fragment(
            "def rename(",
            before="""
import sqlite3
from celery_setnx.testing import guarded, pass_time
database = sqlite3.connect(":memory:", isolation_level=None)
database.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, name TEXT, wanted INTEGER, synced INTEGER)")
database.execute("INSERT INTO account VALUES (1, 'a', 0, 0), (2, 'b', 0, 0), (3, 'c', 0, 0)")
""",
            after="""
broker = app.backend.client
broker.delete("celery")
rename(1, "A")
assert broker.delete("celery") == 1  # purged
assert rename(1, "AA").deduplicated  # of a call that is gone
assert broker.llen("celery") == 0
with guarded(app):
    assert sweep.apply().get().duplicates == 1  # the mark has not lapsed
    pass_time(3600, sync, 1)
    assert sweep.apply().get().accepted == 1
    assert broker.llen("celery") == 1
    sync.apply([1]).get()
    assert search[1] == "AA"
    assert sweep.apply().get().accepted == 0  # nothing lags
""",
        ),
        # Save as one types
        Fragment(
            "def save(page_id, text)",
            before="""
client.flushall()
pages = {}
app.conf.task_annotations = {"proj.save": {"singleton": {"debounce": 0.5}}}
""",
            after="""
from celery.contrib.testing.worker import start_worker
worker = start_worker(app, perform_ping_check=False, loglevel="error")
worker.__enter__()
""",
        ),
        Fragment(
            "older, newest = save.delay(",
            after="""
newest.get(timeout=60)
assert pages == {7: "hello"}
with __import__("pytest").raises(OptionError, match="leave out countdown"):
    save.apply_async((7, "later"), countdown=5)
worker.__exit__(None, None, None)
""",
        ),
        Fragment(
            "def set_plan(",
            after="""
basic, again, gold = set_plan.delay(7, "basic"), set_plan.delay(7, "basic"), set_plan.delay(7, "gold")
assert again.deduplicated and again.id == basic.id
with start_worker(app, perform_ping_check=False, loglevel="error"):
    assert superseded_by(basic.get(timeout=60)) == gold.id
    assert gold.get(timeout=60) is None
app.conf.task_annotations = None
client.flushall()
""",
        ),
        # One customer after the other
        Fragment(
            "def apply_event(customer, event)",
            after="""
assert apply_event.lock_key("ann", "order") == apply_event.lock_key("ann", "parcel")
assert apply_event.lock_key("ann", "order") != apply_event.lock_key("bob", "order")
""",
        ),
        Fragment(
            "def empty_inbox(",
            before="""
client.flushall()
handled = []
def handle(customer, event):
    handled.append((customer, event))
""",
            after="""
sent = [send("ann", event) for event in ("order", "payment", "parcel")]
assert [result.deduplicated for result in sent] == [False, True, True]
assert broker.llen("celery") == 1
empty_inbox("ann")
assert handled == [("ann", "order"), ("ann", "payment"), ("ann", "parcel")]
assert client.exists("inbox:ann") == 0
def handle(customer, event):
    handled.append((customer, event))
    if event == "order":  # another body has taken over, and gone on
        client.lrem(f"inbox:{customer}", 1, event)
send("bob", "order")
send("bob", "payment")
empty_inbox("bob")
assert handled[3:] == [("bob", "order"), ("bob", "payment")]
""",
        ),
        # Five at a time
        Fragment(
            "def export(",
            before="client.flushall()",
            after="""
with guarded(app):
    export.apply(["acme", 1]).get()

def limited(name, policy):
    def ran(tenant):
        return "ran"
    options = {"key": "tenant", "limit": 5, "on_conflict": policy, "scope": "tenants"}
    return app.task(name=f"proj.{name}", base=SingletonTask, singleton=options)(ran)

skips, raises = limited("five_skips", "skip"), limited("five_raises", "raise")
app.finalize()
leases = (60, 50, 20, 40, 30)
held = [SetnxLock(client, skips.lock_key("acme"), lease=lease, limit=5).acquire().lock for lease in leases]
with guarded(app):
    assert skips.apply(["bolt"]).get() == "ran"
    skipped = skips.apply(["acme"]).get()
    assert is_skipped(skipped) and skipped["holder"]["fence"] == held[0].fence
    error = raises.apply(["acme"]).result
    assert isinstance(error, AlreadyRunning) and error.holder["fence"] == held[0].fence
    assert 15 < error.remaining_s <= 20
    held[3].release()
    assert skips.apply(["acme"]).get() == "ran"
for lock in held:
    lock.release()

locks = [SetnxLock(client, export.lock_key("acme", 1), limit=5, info={"task": "t"}) for _ in range(5)]
held = [lock.acquire().lock for lock in locks]
assert [holder.permit for holder in export.holders("acme", 1)] == [0, 1, 2, 3, 4]
assert export.locked("acme", 1).fence == held[0].fence
held[0].release()
assert export.locked("acme", 1) is None
assert [holder.permit for holder in export.holders("acme", 1)] == [1, 2, 3, 4]
for lock in held[1:]:
    lock.release()

# A deploy lowers the limit.
old = [SetnxLock(client, "lock.deploy", limit=5) for _ in range(5)]
held = [lock.acquire().lock for lock in old]
new = SetnxLock(client, "lock.deploy", limit=3)
assert not new.acquire().acquired
assert [held[4].release(), held[0].release()] == ["released"] * 2
assert new.acquire().lock.permit == 0
assert not new.acquire().acquired
try:
    export.apply_async(("acme", 1), singleton={"limit": 3})
except OptionError:
    pass
else:
    raise AssertionError("a call had a limit of its own")
""",
        ),
        # Ten a minute
        Fragment(
            '"rate": "10/m"},\n    autoretry_for',
            before="""
client.flushall()
posted = []
class TooManyRequests(Exception): ...
def post(partner, number):
    posted.append((partner, number))
    if posted.count((partner, number)) < number:
        raise TooManyRequests
""",
            after="""
with guarded(app):
    order.apply(["acme", 1]).get()
    assert posted == [("acme", 1)]

def paced(name, policy):
    def ran(partner):
        return "ran"
    options = {"key": "partner", "rate": "10/m", "on_conflict": policy}
    return app.task(name=f"proj.{name}", base=SingletonTask, singleton=options)(ran)

skips, raises = paced("paced_skips", "skip"), paced("paced_raises", "raise")
app.finalize()
with guarded(app):
    for task in (skips, raises):
        assert [task.apply(["acme"]).get() for _ in range(10)] == ["ran"] * 10
    skipped = skips.apply(["acme"]).get()
    assert is_skipped(skipped) and skipped["holder"]["state"] == "paced"
    error = raises.apply(["acme"]).result
    assert isinstance(error, AlreadyRunning) and error.holder["state"] == "paced"
    assert 30 < error.remaining_s <= 60
    assert skips.apply(["bolt"]).get() == "ran"
    assert skips.locked("acme") is None and skips.holders("acme") == []
    pass_time(61, skips, "acme")
    assert skips.apply(["acme"]).get() == "ran"

@app.task(
    base=SingletonTask,
    bind=True,
    max_retries=20,
    singleton={"key": "partner", "rate": "10/m", "hold_on_retry": True},
)
def held_order(self, partner):
    if self.request.retries == 0:
        raise self.retry(countdown=30)
app.finalize()
with guarded(app):
    assert held_order.apply(["bolt"]).successful()
assert client.zcard(f"{held_order.lock_key('bolt')}:starts") == 2

# A deploy changes the rate.
def fetch(rate):
    return SetnxLock(client, "lock.rates", rate=rate).acquire()
for _ in range(3):
    fetch((3, 60)).lock.release()
assert fetch((2, 60)).paced and fetch((3, 60)).paced
more = fetch((5, 60))
assert more.acquired
more.lock.release()
assert 0 < fetch((3, 60)).remaining_s <= 60
try:
    order.apply_async(("acme", 1), singleton={"rate": "1/m"})
except OptionError:
    pass
else:
    raise AssertionError("a call had a rate of its own")
""",
        ),
        # Once a day
        Fragment(
            "def remind(",
            before="""
from celery.contrib.testing.worker import start_worker
client.flushall()
DAY = 24 * 3600
mails = []
def send_mail(user_id):
    if user_id == 13:
        raise ConnectionError("no mail server")
    mails.append(user_id)
""",
            after="""
worker = start_worker(app, perform_ping_check=False, loglevel="error")
worker.__enter__()
""",
        ),
        Fragment(
            "again = remind.delay(7)",
            after="""
first.get(timeout=30)
done = remind.delay(7)
assert done.deduplicated and done.id == first.id
other = remind.delay(8)
assert not other.deduplicated
failed = remind.delay(13)
assert isinstance(failed.get(timeout=30, propagate=False), ConnectionError)
assert not remind.delay(13).deduplicated  # it tries again
skipped = app.send_task("proj.remind", [7]).get(timeout=30)
assert is_skipped(skipped) and skipped["holder"] == {"task_id": first.id, "state": "done"}
other.get(timeout=30)
assert mails == [7, 8]
pass_time(DAY - 60, remind, 7)
assert remind.delay(7).deduplicated
pass_time(60, remind, 7)
assert not remind.delay(7).deduplicated
worker.__exit__(None, None, None)
""",
        ),
        # Long tasks
        Fragment(
            "def write_report(",
            before="""
client.flushall()
PAGES = 3
database.execute("CREATE TABLE report (name TEXT PRIMARY KEY, pages BIGINT, fence BIGINT)")
database.execute("INSERT INTO report VALUES ('May', 0, 0)")
""",
            after="""
with guarded(app):
    write_report.apply(["May"]).get()
((pages, fence),) = database.execute("SELECT pages, fence FROM report WHERE name = 'May'")
assert pages == PAGES and fence > 0
guard = "UPDATE report SET pages = ? WHERE name = ? AND fence <= ?"
write(guard, 99, "May", fence + 1)
try:
    write(guard, 0, "May", fence - 1)
except LookupError:
    pass
else:
    raise AssertionError("an earlier holder has written")
with guarded(app):
    write_report.apply(["May"]).get()
((pages, later),) = database.execute("SELECT pages, fence FROM report WHERE name = 'May'")
assert pages == 99 and later > fence
""",
        ),
        # At most once
        Fragment(
            "def pay(",
            before="""
now_s = 1000

class Partner:
    def __init__(self):
        self.paid, self.dies, self.freezes = [], None, None

    def pay(self, reference):
        if self.dies == "before":
            raise SystemExit
        if self.freezes:
            self.freezes()
        self.paid.append(reference)
        if self.dies == "after":
            raise SystemExit

    def has(self, reference):
        return reference in self.paid

partner = Partner()
def now():
    return now_s
database.execute("CREATE TABLE payment (id INTEGER PRIMARY KEY, state, claimed_at INTEGER, fence BIGINT)")
database.executemany("INSERT INTO payment VALUES (?, 'new', 0, 0)", [(1,), (2,), (3,), (4,)])
""",
            after="""
with guarded(app):
    assert pay.apply([1]).get() == "paid"
    assert pay.apply([1]).get() == "not new"  # delivered again
    assert partner.paid == ["payment-1"]
    for payment_id, dies in ((2, "before"), (3, "after")):
        partner.dies = dies
        try:
            pay.apply([payment_id]).get()
        except SystemExit:  # as after kill -9
            pass
partner.dies = None
states = dict(database.execute("SELECT id, state FROM payment"))
assert states == {1: "paid", 2: "claimed", 3: "claimed", 4: "new"}
assert partner.paid == ["payment-1", "payment-3"]
""",
        ),
        Fragment(
            "def reconcile(",
            before="OLD_S = 600",
            after="""
broker.delete("celery")
assert reconcile.lock_key(2) == pay.lock_key(2)
with guarded(app):
    reconcile.apply([2]).get()  # too young
    assert broker.llen("celery") == 0
    now_s += OLD_S + 1
    for payment_id in (1, 2, 3):
        reconcile.apply([payment_id]).get()
    states = dict(database.execute("SELECT id, state FROM payment"))
    assert states == {1: "paid", 2: "new", 3: "paid", 4: "new"}
    assert broker.llen("celery") == 1  # 2 is published again
    assert pay.apply([2]).get() == "paid"
    assert partner.paid == ["payment-1", "payment-3", "payment-2"]

    def another_decides():
        \"\"\"While the body stands still its lease ends, and its row is judged.\"\"\"
        global now_s
        partner.freezes = None
        client.delete(pay.lock_key(4), f"{pay.lock_key(4)}:holder")
        now_s += OLD_S + 1
        reconcile.apply([4]).get()
    partner.freezes = another_decides
    pay.apply([4]).get()
assert dict(database.execute("SELECT id, state FROM payment"))[4] == "new"  # its note was refused
""",
        ),
        # 429: not now
        Fragment(
            "self.lock.hold_back(retry_after",
            before="""
client.flushall()
answers, sent = [(429, 600), (200, None), (200, None)], []
def send(partner, number):
    sent.append((partner, number))
    return answers.pop(0)
""",
            after="""
from celery_setnx.terms import live_terms
with guarded(app):
    refused = push.apply(["acme", 1], throw=False)
    assert refused.state == "RETRY" and sent == [("acme", 1)]
    (terms,) = live_terms(app).values()
    (pause,) = terms
    assert (pause.name, pause.because) == ("pause", "429") and pause.by.startswith("task ")
    push.apply(["bolt", 1]).get()
    push.apply(["acme", 2])
    assert sent == [("acme", 1), ("bolt", 1)]
    pass_time(600, push, "acme")
    push.apply(["acme", 2]).get()
assert sent == [("acme", 1), ("bolt", 1), ("acme", 2)]
""",
        ),
        # Pause a task during a release
        Fragment(
            'syncs = Whose(scope="proj.sync")',
            before="""
client.flushall()
@app.task(base=SingletonTask, name="proj.sync", singleton={"key": "account_id"})
def sync(account_id):
    return "synced"
app.finalize()
""",
            after="""
from threading import Timer
from celery_setnx.terms import live_terms
from celery_setnx.testing import hold
with guarded(app), hold(sync, 7) as running:
    Timer(4, running.release).start()
    def migrate():
        assert not running.lives
        assert [term.because for term in live_terms(app)[syncs]] == ["release 42"]
        client.set("migrated", 1)
    release(migrate)
    assert client.exists("migrated") and live_terms(app) == {}
    assert sync.apply([8]).get() == "synced"
""",
        ),
        # Lock by hand
        Fragment("def bill(", after='assert bill.lock_key("today") == "setnx:{proj.bill}"'),
        # Without Celery
        Fragment(
            "def nightly():",
            before="""
import os, redis, socket
from contextlib import redirect_stdout
from io import StringIO
client.flushall()
PARTS, parts = range(4), []
work = parts.append
os.environ["REDIS_URL"] = "redis://localhost:6379/1"
""",
            after="""
nightly()
assert parts == [*PARTS]
lock = SetnxLock(client, "lock.nightly-report", lease=5)
assert lock.holder() is None
with lock as held, redirect_stdout(StringIO()) as said:
    nightly()
    assert said.getvalue().startswith("not now: ") and parts == [*PARTS]
    assert 4 < held.remaining_s() <= 5
    held.ensure()
    client.delete("lock.nightly-report", "{lock.nightly-report}:holder")
    try:
        held.renew()
    except LockLost:
        pass
    else:
        raise AssertionError("a lock that is gone was renewed")

lock = SetnxLock(client, "lock.export", limit=3)
copies = [SetnxLock(client, "lock.export", limit=3).acquire() for _ in range(4)]
assert [copy.acquired for copy in copies] == [True, True, True, False]
assert [copy.lock.permit for copy in copies[:3]] == [0, 1, 2]
assert [holder.permit for holder in lock.holders()] == [0, 1, 2]
assert lock.holder().token == copies[3].holder.token == copies[0].lock.token
copies[1].lock.release()
assert lock.holder() is None and len(lock.holders()) == 2
fewer = SetnxLock(client, "lock.export", limit=2)
assert fewer.acquire().lock.permit == 1
assert not fewer.acquire().acquired
copies[0].lock.release()
copies[2].lock.release()
assert fewer.acquire().lock.permit == 0
assert not fewer.acquire().acquired

feed = SetnxLock(client, "lock.feed", rate=(10, 60))
for _ in range(10):
    with feed:
        pass
outcome = feed.acquire()
assert outcome.paced and not outcome.acquired and 50 < outcome.remaining_s <= 60
assert str(outcome.holder).startswith("its pace of 10 in 60 s until ")
short = SetnxLock(client, "lock.short", rate=(1, 0.3))
first = short.acquire().lock
assert first.release() == "released"
second = short.acquire(wait=10).lock
assert second.release() == "released" and second.fence - first.fence >= 300_000

import subprocess, sys
script = \"\"\"
import os, redis, signal, sys, time
from celery_setnx import SetnxLock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with SetnxLock(redis.Redis.from_url(os.environ["REDIS_URL"]), "lock.terminated"):
    print("works", flush=True)
    time.sleep(30)
\"\"\"
process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
assert process.stdout.readline() == "works\\n" and client.exists("lock.terminated")
process.terminate()
assert process.wait(10) == 143
assert not client.exists("lock.terminated")
for name in ("a{}b", "a}b"):
    try:
        SetnxLock(client, name)
    except ValueError:
        pass
    else:
        raise AssertionError(name)
""",
        ),
        Fragment(
            "SetnxLock(client, settle.lock_key(7)",
            before="""
@app.task(base=SingletonTask, singleton={"key": "account_id"})
def settle(account_id, reason=""):
    return "settled"
""",
            after="""
with guarded(app):
    assert settle.apply([7]).get() == "settled"
    with SetnxLock(client, settle.lock_key(7)):
        assert is_skipped(settle.apply([7]).get())
        assert settle.apply([8]).get() == "settled"
""",
        ),
    ],
}
