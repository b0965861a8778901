"""Several calls of a key at a time: never more than the limit, and no permit lost. Real workers."""

import importlib
import json
from typing import Any

import pytest

from tests.harness import Worker, wait_until


@pytest.fixture(scope="module")
def workers(module_worker) -> list[Worker]:
    """Two workers, with more pool processes than there are permits."""
    return [module_worker("tests.limitapp", concurrency=5) for _ in range(2)]


@pytest.fixture
def tasks(server) -> Any:
    """The app's module."""
    return importlib.import_module("tests.limitapp")


def starts(tasks: Any, name: str) -> list[dict[str, Any]]:
    """What was told of each body that started."""
    return [json.loads(entry) for entry in tasks.control.lrange(f"started:{name}", 0, -1)]


@pytest.mark.parametrize("policy", ["waits", "retries"])
def test_never_more_than_the_limit_run(workers, tasks, name, policy):
    """All calls run, five at a time at most, and five of them do."""
    results = [getattr(tasks, policy).delay(name) for _ in range(200)]
    for result in results:
        result.get(timeout=60)
    told = starts(tasks, name)
    assert len(told) == 200
    assert max(start["at_a_time"] for start in told) == 5
    assert {start["permit"] for start in told} == set(range(5))
    wait_until(lambda: not tasks.waits.holders(name), "all permits are free")
