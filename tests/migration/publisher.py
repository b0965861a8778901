"""A producer with the code of one stage: `python -m tests.migration.publisher`, until it is told to stop.

With arguments it publishes one call: an account and a queue. It prints the id that it was handed.
"""

import random
import sys
import time
from typing import Any

from tests.migration.app import STAGE, control, settle
from tests.migration.deploy import HANDED, STOP

ACCOUNTS = ("1", "2")


def publish(account: str, **options: Any) -> str | None:
    """The id that the producer is handed: its own call's, or that of the call that is queued or runs."""
    result = settle.apply_async((account, STAGE), **options)
    if result.id is not None:
        control.sadd(HANDED, result.id)
    return None if result.id is None else str(result.id)


def main() -> None:
    """Publish until this stage's producers are told to stop."""
    while not control.exists(f"{STOP}:{STAGE}"):
        publish(random.choice(ACCOUNTS))
        time.sleep(random.uniform(0, 0.03))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(publish(sys.argv[1], queue=sys.argv[2]))
    else:
        main()
