"""How far tests go: usual bounds in `make test`, `BOUNDS=full` in the CI.

`BOUNDS=deep` goes far beyond, for hours.
"""

import os
from typing import Any

_LEVEL = os.environ.get("BOUNDS", "usual")
assert _LEVEL in ("usual", "full", "deep"), f"BOUNDS is usual, full or deep, not {_LEVEL}"
DEEP = _LEVEL == "deep"


def bound(usual: Any, *, full: Any = None, deep: Any = None) -> Any:
    """How large a bound is; what is left out is as usual, and deep as full."""
    larger = full if deep is None else deep
    chosen = {"usual": usual, "full": full, "deep": larger}[_LEVEL]
    return usual if chosen is None else chosen
