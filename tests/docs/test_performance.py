"""What the pages say in figures is what the results have: medians, and medians of ratios."""

import json
import statistics
from typing import Any

import pytest

from tests.docs.pages import table, text_of

PAGE, RESULTS = "docs/evidence.md", json.loads(text_of("docs/performance/results.json"))
COMPARED = "docs/compared.md"
FLOOR, REDIS_PY, PLAIN = "SET + DEL, raw Connection", "redis-py Lock", "plain Celery"
POOLS = ("solo", "prefork -c 2")
LOCKS = {
    "`SET NX PX` and `DEL`, raw connection": FLOOR,
    "`SetnxLock`": "ours",
    "the lock of a task": "ours, a task's",
    "redis-py `Lock`": REDIS_PY,
    "python-redis-lock": "python-redis-lock",
}
WORKER_COLUMNS = {
    "CPU per task": "CPU per task",
    "tasks a second": "rate",
    "CPU with publishing": "CPU per task with its publication",
}
PEERS = ("celery-once", "celery-singleton", "celery-heimdall")
WORKERS = ("two bare commands", "celery_setnx", *PEERS)


def samples(benchmark: str, title: str, results: Any = RESULTS) -> dict[str, list[float]]:
    """What was found, by way."""
    (found,) = [figure for figure in results[benchmark]["figures"] if figure.get("title") == title]
    return dict(found["samples"])


def median(benchmark: str, title: str, name: str) -> float:
    """The median of all rounds."""
    return statistics.median(samples(benchmark, title)[name])


def ratio(of: dict[str, list[float]], name: str, to: str) -> str:
    """The median of the ratios within a round."""
    return f"{statistics.median(one / other for one, other in zip(of[name], of[to])):.2f}"


def in_worker(name: str, title: str) -> str:
    """A way's figure beside plain Celery's, in each pool."""
    found = [samples("worker", f"worker, {pool}: {title}") for pool in POOLS]
    return ", ".join(ratio(of, name, PLAIN) for of in found)


def words(page: str) -> str:
    """A page without its line breaks."""
    return " ".join(text_of(page).split())


def test_lock_cycles_are_those_of_the_results():
    """Their times, and the wall time beside redis-py's lock."""
    rows = table(text_of(PAGE), "", "wall time", "CPU time", "wall, vs redis-py")
    assert [row[0] for row in rows] == list(LOCKS)
    for label, *shown in rows:
        found = [samples("lock_cycle", f"Lock cycle: {kind} time") for kind in ("wall", "processor")]
        times = [f"{statistics.median(of[LOCKS[label]]):.0f} us" for of in found]
        assert shown == [*times, ratio(found[0], LOCKS[label], REDIS_PY)], label


def test_servers_are_compared_as_their_results_say():
    """Redis 7.0 and Valkey, each beside the floor on the same server."""
    shown = []
    for name, server in (("redis-7.0", "redis 7.0.15"), ("valkey", "valkey 9.1.2")):
        results = json.loads(text_of(f"docs/performance/{name}.json"))
        assert results["lock_cycle"]["machine"][1].startswith(server)
        shown.append(ratio(samples("lock_cycle", "Lock cycle: wall time", results), "ours", FLOOR))
    redis, valkey = shown
    assert f"took {redis} times its time on Redis 7.0, and {valkey} times on Valkey 9.1" in words(PAGE)


def test_workers_are_those_of_the_results():
    """Beside plain Celery, in both pools."""
    rows = table(text_of(PAGE), "", *WORKER_COLUMNS)
    assert [row[0] for row in rows] == list(WORKERS)
    for name, *shown in rows:
        assert shown == [in_worker(name, title) for title in WORKER_COLUMNS.values()], name


@pytest.mark.parametrize(
    ("label", "title"),
    [("tasks/s, solo and prefork", "rate"), ("CPU with publishing", "CPU per task with its publication")],
)
def test_workers_of_the_comparison_are_those_of_the_results(label: str, title: str):
    """The same row in the tables of the packages for unique tasks."""
    shown: dict[str, str] = {}
    for head in (
        ("celery_setnx", "celery-once", "celery-singleton"),
        ("celery-heimdall", "`cache.add` recipe"),
    ):
        (row,) = [row for row in table(text_of(COMPARED), "", *head) if row[0] == label]
        shown |= {name: cell for name, cell in zip(head, row[1:]) if cell}
    assert shown == {name: in_worker(name, title) for name in ("celery_setnx", *PEERS)}


def test_rates_of_the_readme_are_those_of_the_results():
    """Ours, and those of two others."""
    for name in ("celery_setnx", "celery-once", "celery-singleton"):
        assert all(figure in text_of("README.md") for figure in in_worker(name, "rate").split(", ")), name


def test_recovery_of_the_comparison_is_that_of_the_results():
    """From kill -9 to the next run."""
    title = "recovery from kill -9 of a worker, duration 4 s"
    pool = "recovery from kill -9 of a pool process, duration 4 s"
    here = {f"{median('recovery', each, 'celery_setnx'):.1f}" for each in (title, pool)}
    there = f"{median('recovery', title, 'celery_setnx, elsewhere'):.1f}"
    peers = {f"{median('recovery', each, name):.1f}" for each in (title, pool) for name in PEERS}
    assert (len(here), len(peers)) == (1, 1)
    said = f"started {here.pop()} s after `kill -9`; it took {there} s from another host, and {peers.pop()} s"
    assert f"{said} with each" in words(COMPARED)


def test_figures_in_the_words_are_those_of_the_results():
    """Where a table would be too much."""
    added = [median("worker", f"worker, solo: added {kind}", "celery_setnx") for kind in ("wall time", "CPU")]
    published = samples("fan_out", "published, each key once")
    waits, served = "wait, 200 of 5 ms", "as a task's lock"
    handed = [median("hand_over", f"waiting, hand-over, {of}", waits) for of in ("median", "99th percentile")]
    limit = {
        way: median("limit", "limit, total", f"{way}, 250 ms")
        for way in ('celery_setnx, "wait"', 'celery_setnx, "retry"', "a sorted set as semaphore")
    }
    at_once, retries, semaphore = limit.values()
    short = median("limit", "limit, total", 'celery_setnx, "wait", 50 ms')
    per_call = {
        number: median("long_lines", "long lines, CPU", f"{number} calls") for number in ("2,500", "10,000")
    }
    for said in (
        f"adds {added[0]:.2f} ms to a task, of which {added[1]:.2f} ms are CPU (solo)",
        f"{ratio(published, 'fan_out, dedupe', 'plain delay()')} times as fast as plain `delay()`",
        f"starts {handed[0]:.1f} ms after the lock is released ({handed[1]:.1f} ms in the 99th percentile)",
        f'take {at_once:.2f} times the ideal (`"wait"`) or {retries:.2f} times (`"retry"`)',
        f"semaphore takes {semaphore:.2f} times",
        f"within 1.25 of the ideal: {at_once:.2f}, or {short:.2f} with bodies of 50 ms",
        f"serves 11,000 tasks a second here ({median('capacity', 'One Redis', served):.0f} us each)",
        f"it is {per_call['10,000'] / per_call['2,500']:.2f} times that of 2,500",
    ):
        assert said in words(PAGE)
    assert median("hand_over", "waiting, overtaken", waits) == 0
    bodies = [median("limit", "limit, bodies at a time", f"{way}, 250 ms") for way in limit]
    assert bodies == [5, 5, 6]


def test_round_trips_are_those_that_the_ci_counts():
    """Two of a run, and two of a call that is published with `dedupe`."""
    counted = json.loads(text_of("benchmarks/counts.json"))["rows"]
    assert counted["run: celery_setnx"]["trips"] == counted["publish: celery_setnx, dedupe"]["trips"] == 2
    said = "in two round trips to Redis. Publishing with `dedupe` makes two more."
    assert said in words(PAGE)


NEWEST_COSTS = {
    "plain `delay()`": ("plain Celery", 1),
    "`until_started`": ("celery_setnx, until_started", 1),
    '`on_duplicate="replace"`': ("celery_setnx, newest wins", 1),
    "`debounce` on Redis": ("celery_setnx, debounce", 1),
    "burst of 5, `until_started`": ("celery_setnx, until_started, five times", 5),
    'burst of 5, `on_duplicate="replace"`': ("celery_setnx, newest wins, five times", 1),
}


def test_costs_of_newest_wins_are_those_that_the_ci_counts():
    """Of a call that is published; of five with one mark only one runs."""
    counted = json.loads(text_of("benchmarks/counts.json"))["rows"]

    def said(row: dict[str, float], per: int = 1) -> str:
        trips, commands = row["trips"] / per, row["commands"] / per
        return f"{trips:g} ({commands:g} commands)" if trips else "0"

    for name, messages, published, ran in table(text_of(PAGE), "", "messages", "publish", "run"):
        way, per = NEWEST_COSTS[name]
        row = counted[f"publish: {way}"]
        assert (messages, published) == (f"{row['broker commands']:g}", said(row)), name
        run = counted.get(f"run: {way}") or counted.get(f"run: {way.removesuffix(', five times')}")
        assert ran == ("as above" if run is None else said(run, per)), name


AT_MOST = ("starts",)  # of which the highest of all rounds is shown
PACES = {
    '`rate=(50, 2)`, `"wait"`': 'celery_setnx, "wait", 50 in 2 s, 20 ms',
    '`rate=(50, 2)`, `"retry"`': 'celery_setnx, "retry", 50 in 2 s, 20 ms',
    "a sorted set as window": "a sorted set as window, 50 in 2 s, 20 ms",
    "celery-heimdall's `RateLimit`": "celery-heimdall, RateLimit, 50 in 2 s, 20 ms",
}
PACE_COLUMNS = {
    "total": ("total", 2),
    "starts in 2 s": ("starts", 0),
    "deliveries per call": ("deliveries", 1),
}


def test_paces_are_those_of_the_results():
    """So many starts in a period, and what else does something like it: medians, or the highest."""
    rows = table(text_of(PAGE), "", *PACE_COLUMNS)
    assert [row[0] for row in rows] == list(PACES)
    for label, *shown in rows:
        for cell, (title, digits) in zip(shown, PACE_COLUMNS.values()):
            middle = max if title in AT_MOST else statistics.median
            expected = middle(samples("pace", f"pace, {title}")[PACES[label]])
            assert cell == f"{expected:.{digits}f}", (label, title)
