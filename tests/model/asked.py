"""Calls of the scripts as the scenarios of the model make them."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache

from tests.bounds import bound
from tests.model.explorer import explore
from tests.model.layout import LINE, LOCK, PERMITS, RECORD, others
from tests.model.lock import TEXTS, Call
from tests.model.scenarios import SCENARIOS

STATES = bound(400, full=1_500)  # of each scenario, whose calls are looked at


@cache
def explored_calls() -> dict[str, list[Call]]:
    """By verb, calls that the scenarios make first."""
    found: dict[str, dict[Call, None]] = {verb: {} for verb in TEXTS}
    for scenario in SCENARIOS.values():
        world = scenario.make()
        with suppress(RuntimeError):  # there are more states
            explore(world, (), STATES)
        for call in world.lock.calls:
            found[call.verb][call] = None
    for verb, more in (
        ("acquire", others(1)),
        ("acquire#", others(3)),
    ):  # look.lua is for those who ask by hand
        for call in found[verb]:
            keys = LOCK, RECORD, LINE, PERMITS, *more
            found[verb.replace("acquire", "look")][
                call._replace(verb=verb.replace("acquire", "look"), keys=keys, told=())
            ] = None
    return {verb: random.Random(1).sample(list(calls), len(calls)) for verb, calls in found.items()}
