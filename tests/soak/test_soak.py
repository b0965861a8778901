"""The soak as tests. Not in the default suite: `pytest tests/soak` or `python -m tests.soak --seconds 60`."""

import os
from dataclasses import replace

import pytest

from tests.soak import mutants
from tests.soak.checker import check
from tests.soak.driver import MUTANTS, Scenario, soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
MUTANT_S = 40.0
CONTROL_S = 5.0


@pytest.mark.timeout(SECONDS + 120)
def test_soak_finds_no_violation(capsys):
    """Under kills, stops, cuts, flushes and a full server every promise of the lock is kept."""
    report = soak(Scenario(), SECONDS)
    with capsys.disabled():
        print(f"\n{report.table()}")
    assert not report.violations
    assert report.counts["kills of a holder"] > SECONDS / 3
    assert report.counts["connection faults"] > SECONDS


@pytest.mark.parametrize("name", MUTANTS)
def test_soak_catches_the_mutant(name):
    """A lock with a seeded flaw does not survive the same soak."""
    report = soak(MUTANTS[name], MUTANT_S, stop_at_violation=True)
    assert report.violations


@pytest.mark.parametrize("name", MUTANTS)
def test_soak_of_the_lock_without_the_mutation_finds_nothing(name):
    """It is the flaw that is caught, not the weights of the scenario."""
    assert not soak(replace(MUTANTS[name], mutate=mutants.none), CONTROL_S).violations


def test_checker_of_an_empty_history_finds_nothing():
    """No records, no violations."""
    assert not check([]).violations
