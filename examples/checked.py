"""What the examples have in common at their end: to wait for something, and to say whether all was true."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Value = TypeVar("Value")

DEADLINE_S = 60


def wait_until(condition: Callable[[], Value], what: str) -> Value:
    """The condition's value, once it is true; ends the program if that takes too long."""
    give_up = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > give_up:
            sys.exit(f"not within {DEADLINE_S} s: {what}")
        time.sleep(0.02)
    return value


def all_shown(checks: Mapping[str, bool]) -> bool:
    """True if every claim is; prints each of them."""
    for claim, is_true in checks.items():
        print("✓" if is_true else "✗", claim)
    return all(checks.values())
