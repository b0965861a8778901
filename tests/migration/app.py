"""The worker's app of one stage of a deploy, from the page itself: `Deploy` says which.

`book`, the work that the pages leave open, journals its start and end; gates hold it open.
"""

import json
import os
import time

from celery import current_task

from tests.app import journal, wait_for_gate
from tests.harness import CONF
from tests.migration import pages
from tests.migration.deploy import shop_of

PAGE, STAGE, EDITS = json.loads(os.environ[CONF])["shop"]
BODY_S = 0.03


def book(account_id: str, reason: str) -> None:
    """The work: never twice at a time for one account. With celery-once some calls fail first, and retry."""
    request = current_task.request
    about = {"task_id": request.id, "account": account_id, "published_by": reason, "run_by": STAGE}
    journal.write("start", **about)
    is_gated = account_id.startswith("gated")
    if is_gated:
        wait_for_gate(account_id)
    else:
        time.sleep(BODY_S)
    fails = PAGE == pages.ONCE and not is_gated and not request.retries and request.id[0] in "01"
    journal.write("failed" if fails else "end", **about)
    if fails:
        raise ConnectionError(f"no connection for {account_id}")


app, settle = shop_of(PAGE, STAGE, EDITS, book)
