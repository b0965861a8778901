"""The table of violations per 1,000 kills is what soak.json has; each library was killed often enough."""

import json

from benchmarks.soaked import table
from tests.docs import pages
from tests.docs.pages import text_of

PAGE, RESULTS = "docs/compared.md", json.loads(text_of("docs/performance/soak.json"))


def test_violations_per_thousand_kills_are_those_of_the_results():
    """Row by row, as the soak prints them."""
    assert table(RESULTS) in text_of(PAGE)


def test_every_library_was_killed_often_in_the_same_soak():
    """With one seed and one machine, each kind of kill about as often as the other."""
    for way, found in RESULTS.items():
        assert found["kills"] >= 750, way
        assert 0.4 < found["kills_of_workers"] / found["kills"] < 0.6, way
    assert len({(found["seed"], found["machine"][0]) for found in RESULTS.values()}) == 1


def test_our_lock_had_no_violation():
    """What the page says of it."""
    assert not any(RESULTS["celery_setnx"]["violations"].values())


def test_readme_has_the_overlaps_of_the_results():
    """And the number of our kills."""
    ((_ours, once, _singleton, heimdall),) = [
        cells
        for what, *cells in pages.table(
            text_of("README.md"), "", "celery_setnx", "celery-once", "celery-singleton", "celery-heimdall"
        )
        if what == "overlaps per 1,000 kills"
    ]
    for shown, way in ((once, "celery-once"), (heimdall, "celery-heimdall")):
        assert shown == f"{RESULTS[way]['violations']['overlap'] * 1000 / RESULTS[way]['kills']:.0f}"
    assert f"{RESULTS['celery_setnx']['kills']} kills" in text_of("README.md")
