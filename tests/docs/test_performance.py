"""What docs/performance.md says in figures is what results.json has: medians, and medians of ratios."""

import json
import statistics
from typing import Any

import pytest

from tests.docs.pages import table, text_of

PAGE, RESULTS = "docs/performance.md", json.loads(text_of("docs/performance/results.json"))
FLOOR, REDIS_PY = "SET + DEL, raw Connection", "redis-py Lock"
LOCKS = {
    "the floor: `SET NX PX` and `DEL`, raw `redis.Connection`": FLOOR,
    "`SetnxLock`": "ours",
    "the lock of a task": "ours, a task's",
    "redis-py `Lock`": REDIS_PY,
    "python-redis-lock": "python-redis-lock",
    "the two commands, redis-py": "SET + DEL, redis-py",
}
LOCK_COLUMNS = (
    "wall",
    "beside the floor",
    "beside redis-py",
    "processor",
    "beside the floor",
    "beside redis-py",
)
WORKER_COLUMNS = {
    1: ("solo", "CPU per task"),
    2: ("prefork -c 2", "CPU per task"),
    3: ("solo", "rate"),
    4: ("prefork -c 2", "rate"),
    5: ("solo", "CPU per task with its publication"),
    6: ("prefork -c 2", "CPU per task with its publication"),
}
WORKER_HEAD = (
    "",
    "CPU per task, solo",
    "prefork -c 2",
    "tasks/s, solo",
    "prefork -c 2",
    "CPU with publication, solo",
    "prefork -c 2",
)


def samples(benchmark: str, title: str, results: Any = RESULTS) -> dict[str, list[float]]:
    """What was found, by way."""
    (found,) = [figure for figure in results[benchmark]["figures"] if figure["title"] == title]
    return dict(found["samples"])


def ratio(of: dict[str, list[float]], name: str, to: str) -> str:
    """The median of the ratios within a round."""
    return f"{statistics.median(one / other for one, other in zip(of[name], of[to])):.2f}"


def test_lock_cycles_are_those_of_the_results():
    """Beside the floor, and beside redis-py's lock."""
    rows = table(text_of(PAGE), "", *LOCK_COLUMNS)
    assert [row[0] for row in rows] == list(LOCKS)
    for label, *shown in rows:
        expected = []
        for title in ("Lock cycle: wall time", "Lock cycle: processor time"):
            found = samples("lock_cycle", title)
            us = f"{statistics.median(found[LOCKS[label]]):.0f}"
            expected += [us, *(ratio(found, LOCKS[label], to) for to in (FLOOR, REDIS_PY))]
        assert [cell.strip("*") for cell in shown] == expected, label


def test_servers_are_compared_as_their_results_say():
    """Redis 7.0 beside Valkey, each beside the floor on the same server."""
    head = ("", "Valkey 9.1.2: wall", "processor", "Redis 7.0.15: wall", "processor")
    rows = table(text_of(PAGE), *head)
    assert len(rows) == 4
    for label, *shown in rows:
        expected = []
        for name, server in (("valkey", "valkey 9.1.2"), ("redis-7.0", "redis 7.0.15")):
            results = json.loads(text_of(f"docs/performance/{name}.json"))
            assert results["lock_cycle"]["machine"][1].startswith(server)
            for title in ("Lock cycle: wall time", "Lock cycle: processor time"):
                expected.append(ratio(samples("lock_cycle", title, results), LOCKS[label], FLOOR))
        assert shown == expected, label


@pytest.mark.parametrize("row", table(text_of(PAGE), *WORKER_HEAD)[1:], ids=lambda row: row[0])
def test_workers_are_those_of_the_results(row: list[str]):
    """Beside plain Celery."""
    for place, (pool, title) in WORKER_COLUMNS.items():
        found: Any = samples("worker", f"worker, {pool}: {title}")
        assert row[place].strip("*x") == ratio(found, row[0], "plain Celery"), (row[0], pool, title)


def test_rates_of_the_readme_are_those_of_the_results():
    """And those of the page that compares us with others."""
    for name, *_rest in table(text_of(PAGE), *WORKER_HEAD)[1:]:
        if name in ("two bare commands", "celery-heimdall"):
            continue
        rates = [samples("worker", f"worker, {pool}: rate") for pool in ("solo", "prefork -c 2")]
        shown = [ratio(found, name, "plain Celery") for found in rates]
        assert ", ".join(shown) in text_of("docs/others.md"), name
        assert all(figure in text_of("README.md") for figure in shown), name


LIMITS = {
    '`limit=5`, `"wait"`': 'celery_setnx, "wait", {} ms',
    "the same, all in line before the first may go": 'celery_setnx, "wait", {} ms, all in line',
    '`limit=5`, `"retry"`': 'celery_setnx, "retry", {} ms',
    "a sorted set as semaphore": "a sorted set as semaphore, {} ms",
    "celery-heimdall's `RateLimit`": "celery-heimdall, RateLimit, {} ms",
}
LIMIT_COLUMNS = {
    "total, 50 ms": ("total", 50, 2),
    "250 ms": ("total", 250, 2),
    "at a time": ("bodies at a time", 50, 0),
    "overtaken, 50 ms": ("overtaken", 50, 0),
    "by at most": ("overtaken, farthest", 50, 0),
    "commands per call, 50 ms": ("commands on the lock server", 50, 1),
    "250 ms ": ("commands on the lock server", 250, 1),
    "server time per call, 50 ms": ("time on the lock server", 50, 0),
    "250 ms  ": ("time on the lock server", 250, 0),
    "deliveries per call, 50 ms": ("deliveries", 50, 1),
    "250 ms   ": ("deliveries", 250, 1),
}


def test_limits_are_those_of_the_results():
    """Five at a time, and what else does something like it: medians."""
    rows = table(text_of(PAGE), "", *(name.strip() for name in LIMIT_COLUMNS))
    assert [row[0] for row in rows] == list(LIMITS)
    for label, *shown in rows:
        for cell, (title, body_ms, digits) in zip(shown, LIMIT_COLUMNS.values()):
            found = samples("limit", f"limit, {title}").get(LIMITS[label].format(body_ms))
            expected = "" if found is None else f"{statistics.median(found):.{digits}f}"
            assert cell.strip("*").removesuffix(" us") == expected, (label, title, body_ms)
