"""A model of the lock in pure Python: explored exhaustively here, compared with the scripts elsewhere.

How far it is explored: `MODEL_BOUNDS=small` in seconds; nothing set, as `make test` does; `MODEL_BOUNDS=full`
the whole of what is promised, as the CI does; `MODEL_SCALE=10` far beyond that.
"""

import os
from typing import Any

SCALE = int(os.environ.get("MODEL_SCALE", "1"))
DEEP = SCALE > 1
_LEVEL = "full" if DEEP else os.environ.get("MODEL_BOUNDS", "usual")
SMALL = _LEVEL == "small"
assert _LEVEL in ("small", "usual", "full"), f"MODEL_BOUNDS is small or full, not {_LEVEL}"


def bound(usual: Any, *, small: Any = None, full: Any = None, deep: Any = None) -> Any:
    """How large a bound is; what is left out is as usual, and deep as full."""
    chosen = {"small": small, "usual": usual, "full": full}[_LEVEL]
    chosen = deep if DEEP and deep is not None else chosen
    return usual if chosen is None else chosen
