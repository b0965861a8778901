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

COUNTED = {
    "lock, two bare commands: the floor": "cycle: two bare commands",
    "lock, `SetnxLock`": "cycle: SetnxLock",
    "lock, of a task": "cycle: the lock of a task",
    "lock, redis-py `Lock`": "cycle: redis-py Lock",
    "lock, python-redis-lock": "cycle: python-redis-lock",
    "renewal, redis-py `Lock`: the floor": "renewal: redis-py Lock",
    "renewal, of many locks at once": "renewal: all in one trip",
    "`delay()`, plain Celery: the floor": "publish: plain Celery",
    "`delay()`, celery_setnx": "publish: celery_setnx",
    "`delay()`, celery_setnx with `dedupe`": "publish: celery_setnx, dedupe",
    "`fan_out` with `dedupe`": "publish: fan_out, dedupe",
    "`delay()`, celery-once": "publish: celery-once",
    "`delay()`, celery-singleton": "publish: celery-singleton",
    "`delay()`, celery-heimdall": "publish: celery-heimdall",
    "run, plain Celery: the floor": "run: plain Celery",
    "run, two bare commands": "run: two bare commands",
    "run, celery_setnx": "run: celery_setnx",
    "run, with a `rate`": "run: celery_setnx, a rate",
    "run, parked and woken before": "run: celery_setnx, waits in line",
    "run, celery-once": "run: celery-once",
    "run, celery-singleton": "run: celery-singleton",
    "run, celery-heimdall": "run: celery-heimdall",
}


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


AT_MOST = ("starts", "bodies", "never run")  # of which the highest of all rounds is shown
PACES = {
    '`rate=(50, 2)`, `"wait"`': 'celery_setnx, "wait", 50 in 2 s, {} ms',
    "the same, all in line before one may start": 'celery_setnx, "wait", 50 in 2 s, {} ms, all in line',
    '`rate=(50, 2)`, `"retry"`': 'celery_setnx, "retry", 50 in 2 s, {} ms',
    "a sorted set as window": "a sorted set as window, 50 in 2 s, {} ms",
    "celery-heimdall's `RateLimit`": "celery-heimdall, RateLimit, 50 in 2 s, {} ms",
}
PACE_COLUMNS = {
    "total, empty": ("total", 0, 2),
    "20 ms": ("total", 20, 2),
    "starts in 2 s": ("starts", 20, 0),
    "bodies in 2 s": ("bodies", 20, 0),
    "overtaken": ("overtaken", 20, 0),
    "by at most": ("overtaken, farthest", 20, 0),
}
PACE_COSTS = {
    "commands, locks": ("commands on the lock server", 20, 1),
    "time on the lock server": ("time on the lock server", 20, 0),
    "commands, broker": ("commands on the broker", 20, 1),
    "messages": ("messages", 20, 1),
    "deliveries": ("deliveries", 20, 1),
    "processor": ("processor", 20, 1),
}
SLOW_PACES = {
    '`rate=(10, 10)`, `"wait"`': 'celery_setnx, "wait", 10 in 10 s, {} ms',
    "a sorted set as window": "a sorted set as window, 10 in 10 s, {} ms",
    "celery-heimdall's `RateLimit`": "celery-heimdall, RateLimit, 10 in 10 s, {} ms",
}
SLOW_COLUMNS = {
    "total": ("total", 20, 2),
    "starts in 10 s": ("starts", 20, 0),
    "overtaken": ("overtaken", 20, 0),
    "commands, locks": ("commands on the lock server", 20, 1),
    "messages": ("messages", 20, 1),
    "processor": ("processor", 20, 1),
}
PACE_DEATHS = {
    '`rate=(50, 2)`, `"wait"`': 'celery_setnx, "wait"',
    '`rate=(50, 2)`, `"retry"`': 'celery_setnx, "retry"',
    "a sorted set as window": "a sorted set as window",
    "celery-heimdall's `RateLimit`": "celery-heimdall, RateLimit",
}
DEATH_COLUMNS = {
    "later than the ideal": ("kill -9 of one worker of two: later than the ideal", 0, 1),
    "longest pause": ("kill -9 of one worker of two: longest pause", 0, 1),
    "begun twice": ("kill -9 of one worker of two: begun twice", 0, 1),
    "never run": ("kill -9 of one worker of two: never run", 0, 0),
    "starts in 2 s": ("kill -9 of one worker of two: starts", 0, 0),
}


@pytest.mark.parametrize(
    ("labels", "columns"),
    [
        (PACES, PACE_COLUMNS),
        (PACES, PACE_COSTS),
        (SLOW_PACES, SLOW_COLUMNS),
        (PACE_DEATHS, DEATH_COLUMNS),
    ],
    ids=("paces", "costs", "slow", "deaths"),
)
def test_paces_are_those_of_the_results(labels: dict[str, str], columns: dict[str, tuple[str, int, int]]):
    """So many starts in a period, and what else does something like it: medians, or the highest."""
    rows = table(text_of(PAGE), "", *columns)
    assert [row[0] for row in rows] == list(labels)
    for label, *shown in rows:
        for cell, (title, body_ms, digits) in zip(shown, columns.values()):
            found = samples("pace", f"pace, {title}").get(labels[label].format(body_ms))
            middle = max if title.endswith(AT_MOST) else statistics.median
            expected = "" if found is None else f"{middle(found):.{digits}f}"
            assert cell.strip("*").partition(" ")[0] == expected, (label, title, body_ms)


def test_cost_of_a_rate_is_that_of_the_results():
    """Beside no rate: the median of the ratios within a round, and their lowest and highest."""
    free, unreached = "celery_setnx, no rate", "celery_setnx, a rate never reached"
    (time_, commands, processor) = table(
        text_of(PAGE), "", "no `rate`", "never reached", "ratio", "lowest", "highest"
    )
    for row, title, digits in (
        (time_, "time on the lock server", 0),
        (commands, "commands on the lock server", 1),
        (processor, "processor", 2),
    ):
        found = samples("pace_cost", f"pace cost, {title}")
        ratios = [one / other for one, other in zip(found[unreached], found[free])]
        medians = [f"{statistics.median(found[way]):.{digits}f}" for way in (free, unreached)]
        shown = [cell.partition(" ")[0] for cell in row[1:]]
        expected = [ratio(found, unreached, free), f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
        assert shown == [*medians, *expected], title


def test_counts_are_those_that_the_ci_compares():
    """Each row, and the server's share of each."""
    columns = ("", "instructions, beside the floor", "server's instructions, beside a single key")
    rows = table(text_of(PAGE), *columns, "round trips", "commands", "bytes sent")
    recorded = json.loads(text_of("benchmarks/counts.json"))["rows"]
    for label, *cells in rows:
        of = recorded[COUNTED[label]]
        shown = [f"{of['instructions']:.2f}", f"{abs(of['server']):.2f}", f"{of['trips']:.2f}"]
        assert cells == [*shown, f"{of['commands']:.1f}", f"{of['sent']:.0f}"]
    assert [label for label, *_ in rows] == list(COUNTED)
