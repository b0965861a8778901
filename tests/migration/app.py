"""The app of one stage of a deploy, from the page itself: `MIGRATION_PAGE` and `MIGRATION_STAGE` say which.

`MIGRATION_EDITS` says what is changed in its code: pairs of old and new text, in JSON.

`book`, the work that the pages leave open, journals its start and end; gates hold it open.
"""

import json
import os
import time

import redis
from celery import current_task

from tests.harness import Journal
from tests.migration import pages
from tests.migration.deploy import DB, RETRY_DELAY_S

URL = os.environ["SETNX_TEST_URL"]
PAGE = os.environ["MIGRATION_PAGE"]
STAGE = os.environ["MIGRATION_STAGE"]
EDITS = json.loads(os.environ.get("MIGRATION_EDITS") or "[]")
BODY_S = 0.03

control = redis.Redis.from_url(f"{URL}/0", decode_responses=True, socket_timeout=None)
journal = Journal(control)

if PAGE == pages.CACHE:
    import django.conf

    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": f"{URL}/{DB}"}
    django.conf.settings.configure(CACHES={"default": cache})


def book(account_id: str, reason: str) -> None:
    """The work: never twice at a time for one account. With celery-once some calls fail first, and retry."""
    request = current_task.request
    about = {"task_id": request.id, "account": account_id, "published_by": reason, "run_by": STAGE}
    journal.write("start", **about)
    if account_id.startswith("gated"):
        control.blpop([f"gate:{account_id}"], timeout=60)
    else:
        time.sleep(BODY_S)
    is_gated = account_id.startswith("gated")
    fails = PAGE == pages.ONCE and not is_gated and not request.retries and request.id[0] in "01"
    journal.write("failed" if fails else "end", **about)
    if fails:
        raise ConnectionError(f"no connection for {account_id}")


namespace = pages.load(PAGE, STAGE, f"{URL}/{DB}", EDITS, book=book)
app = namespace["app"]
settle = namespace["settle"]
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_expires=600,
    setnx_defaults={"retry_delay": RETRY_DELAY_S},
    worker_prefetch_multiplier=1,
)
