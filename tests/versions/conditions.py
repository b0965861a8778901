"""What a test needs that not every version has; the reason says which one brought it."""

import kombu
import pytest
from packaging.version import Version

from tests.versions.table import installed

BATCHES = hasattr(kombu.Producer, "batch")
LOSES_RESULTS = installed("celery") < Version("5.7")

needs_batches = pytest.mark.skipif(not BATCHES, reason="batches of messages came with kombu 5.7")
needs_dumped_models = pytest.mark.skipif(
    installed("celery") < Version("5.7"), reason="before Celery 5.7 a pydantic model could not be published"
)
needs_pipelines_sent_again = pytest.mark.skipif(
    installed("redis") < Version("5.0.2"),
    reason="before redis-py 5.0.2 a pipeline is not sent again when its connection is lost",
)
needs_slots_asked_first = pytest.mark.skipif(
    installed("redis") < Version("5.0.8"),
    reason="before redis-py 5.0.8 a cluster's client asks INFO first, and then not for the slots",
)
needs_ignore_result_of_a_call = pytest.mark.skipif(
    installed("celery") < Version("5.6.3"),
    reason="before Celery 5.6.3 a call's ignore_result=False did not outdo its task's",
)
