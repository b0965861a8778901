"""Jobs side by side, each in a process that may fork; and the search for seeded flaws."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any

CHANCES = 3
"""How often a flaw is looked for: when a process is killed is the driver's choice, and may miss it."""


def end_on_sigterm() -> None:
    """What this process has started ends with it; what it forks just ends."""
    own = os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143) if os.getpid() == own else os._exit(143))


def side_by_side(job: Callable[..., Any], rows: Sequence[tuple[Any, ...]], lanes: int) -> Iterator[Any]:
    """What `job(*row)` returns for each row, as it comes; so many jobs run at a time."""
    with ProcessPoolExecutor(lanes, get_context("spawn"), end_on_sigterm) as pool:
        try:
            for done in as_completed([pool.submit(job, *row) for row in rows]):
                yield done.result()
        except BaseException:
            for child in active_children():
                child.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def hunt(look: Callable[..., list[str]], rows: Sequence[tuple[str, ...]], seed: int, lanes: int) -> bool:
    """Whether `look(*row, seed)` finds a violation for each row, with one of three seeds; it is told."""
    all_found = True
    for found, told in side_by_side(_search, [(look, row, seed) for row in rows], lanes):
        print(told, flush=True)
        all_found &= found
    return all_found


def _search(look: Callable[..., list[str]], row: tuple[str, ...], seed: int) -> tuple[bool, str]:
    began, violations = time.monotonic(), ["NOT FOUND"]
    for chance in range(CHANCES):
        found = look(*row, seed + chance)
        if found:
            violations = found
            break
    took_s = time.monotonic() - began
    return bool(found), f"{' / '.join(row)}, chance {chance + 1}, {took_s:.1f} s: {violations[0]}"
