"""A real Prometheus that scrapes a real worker answers the dashboard's queries, and its alerts fire."""

import math
import re
import time
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import DOCS
from tests.harness import wait_until
from tests.monitoring import picture
from tests.monitoring.conftest import MARKED, PACED, WORK
from tests.monitoring.dashboard import MONITORING, Query, panels, queries

pytestmark = pytest.mark.timeout(600)  # the first has to start it all
WINDOW = "30m"  # longer than this module takes
NOW = {
    "Locks held now": 1,
    "Calls that wait now": 1,
    "Locks lost": 1,
    "Locks taken over": 1,
    "Pool processes that died": 1,
    "Marks that lapsed": 1,
}
HAPPENED = {
    ("CelerySetnxLockLost", WORK): "lost a lock while it ran",
    ("CelerySetnxTakenOver", WORK): "took a lock over from a dead holder",
    ("CelerySetnxProcessDied", WORK): "a pool process died while it had a lock",
    ("CelerySetnxMarkLapsed", MARKED): "a queued call outlived its mark",
    ("CelerySetnxPausedLong", PACED): "calls have been paused for a day",
}


def test_prometheus_loads_every_rule(prometheus):
    """All of alerts.yml."""
    (group,) = prometheus.ask("rules")["groups"]
    (wanted,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in wanted["rules"]]


def test_every_alert_can_be_judged(prometheus):
    """Its expression has been evaluated on the real figures, without an error."""

    def judged() -> bool:
        (group,) = prometheus.ask("rules")["groups"]
        return all(rule["health"] == "ok" for rule in group["rules"])

    wait_until(judged, f"every rule is evaluated: {prometheus.ask('rules')}")


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_query_of_the_dashboard_is_answered(prometheus, query: Query):
    """With a number, and with the labels that its legend names."""

    def answer() -> list[tuple[dict[str, str], float]]:
        found = prometheus.query(query.within(WINDOW, WINDOW))
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    found = wait_until(answer, f"an answer to {query.within(WINDOW, WINDOW)}")
    for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
        assert all(labels.get(label) for labels, _value in found), found


@pytest.mark.parametrize(("panel", "count"), NOW.items())
def test_figure_of_the_dashboard_is_what_happened(prometheus, panel, count):
    """Each first event counts, though its series begins with it."""
    (query,) = queries(panel)
    wait_until(lambda: prometheus.query(query.within("2s", WINDOW)) == [({}, count)], f"{panel}: {count}")


def test_dashboard_says_how_old_the_oldest_lock_is(prometheus):
    """Seconds that pass while it is held."""
    (query,) = queries("Oldest lock")

    def age_s() -> float:
        ((_labels, seconds),) = prometheus.query(query.within("2s", WINDOW))
        return seconds

    before = wait_until(age_s, "an age")
    wait_until(lambda: age_s() > before, "a later age")


@pytest.mark.parametrize(("name", "says"), list(HAPPENED.items()))
def test_alert_fires_for_what_happened(prometheus, name, says):
    """The first event of its kind is enough, and the alert names the task."""
    alert = wait_until(lambda: prometheus.firing().get(name), f"{name} fires")
    assert says in alert["annotations"]["summary"]
    assert name[1] in alert["annotations"]["summary"]


def test_alert_is_quiet_about_what_did_not_happen(prometheus):
    """Once those fire that should: locks were given back in many ways, and none was overwritten."""
    wait_until(lambda: prometheus.firing().keys() >= HAPPENED.keys(), "the alerts of what happened")
    assert "CelerySetnxOverwritten" not in {name for name, _of in prometheus.firing()}


@pytest.mark.filterwarnings("error::UserWarning")
def test_picture_is_drawn_from_the_answers(prometheus):
    """Of every panel: the figures in numbers, the histories as plots; there is room for all of it."""
    titles = {panel["title"]: panel["type"] for panel in panels()}
    now = time.time()
    shown = picture.answers(prometheus, now - 60, now)
    counted = picture.figures(prometheus, 60)
    assert [*counted, *shown] == list(titles)
    for parts in shown.values():  # names as short as those of a shop: longer ones leave no room
        for series in parts:
            series[:] = [(re.sub(r"tests\.(monitoring\.)?", "", name), xs, ys) for name, xs, ys in series]
    drawn = ElementTree.fromstring(picture.draw(shown, counted, 60))
    assert set(shown) <= {text.strip() for text in drawn.itertext()}


def test_picture_of_the_docs_has_every_panel_and_is_small():
    """A page loads fast; and the picture was drawn since the dashboard has changed last."""
    drawn = (DOCS / "dashboard.svg").read_bytes()
    assert len(drawn) < 250_000
    said = " ".join(" ".join(ElementTree.fromstring(drawn).itertext()).split())
    assert [panel["title"] for panel in panels() if panel["title"] not in said] == []
