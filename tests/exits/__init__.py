"""Every way out, in every pool: what happens to the lock. A suite of its own: `pytest tests/exits`."""

import pytest

POOLS = ["prefork", "solo", "threads", "gevent", "eventlet"]


def in_pools(*pools: str) -> pytest.MarkDecorator:
    """Runs a test in each of these pools, by its fixture `pool`."""
    return pytest.mark.parametrize("pool", pools, indirect=True)


every_pool = in_pools(*POOLS)
