"""The lease is renewed while the body runs, in every pool, whatever the body does to its process."""

import pytest

from tests.exits import every_pool
from tests.harness import wait_until

pytestmark = pytest.mark.clock  # leases are renewed while they really run


@every_pool
@pytest.mark.parametrize("doing", ["computing", "forking"])
def test_lease_is_renewed_while_the_body_runs(scene, pool, tmp_path, doing):
    """By a real thread where threads are greenlets; a lock that a fork takes, by the fork's own keeper."""
    told = tmp_path / "told"
    held = scene.hold(getattr(scene.tasks, doing), pool, str(told))
    keys = [held.key]
    scene.open()
    try:
        if doing == "forking":
            keys.append(f"t:{{forked}}:{scene.gate}")
            wait_until(lambda: scene.locks.exists(keys[1]), "the lock of the fork")
        scene.assert_renewed(*keys, leases=2.5)
    finally:
        told.touch()  # else the body computes on, and a second try finds no process
    assert held.result.get(timeout=60) == scene.gate
    assert scene.journal.entries(what="lost") == []
    assert scene.outcomes(held.result) == ["released"]
