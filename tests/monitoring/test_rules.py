"""The files of examples/monitoring are whole: promtool accepts them, and they name what exists."""

import re
import subprocess
from itertools import combinations
from typing import Any

import pytest
import yaml

from celery_setnx.metrics import _GAUGES, FIGURES
from tests.docs.pages import table, text_of
from tests.monitoring.dashboard import MONITORING, panels, queries

ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
UNIT_TESTS = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
PARTS = ("_bucket", "_sum", "_count")
LABELS = {
    f"celery_setnx_{figure.name}{'_seconds' if figure.seconds else '_total'}": {*figure.labels}
    for figure in FIGURES
}
LABELS |= {f"celery_setnx_{name}": {"scope"} for name in _GAUGES}
"""Of every metric."""
OF_PROMETHEUS = {"job", "instance", "le"}


def metrics_of(expr: str) -> set[str]:
    """The metrics that a query names; of a histogram not its parts."""
    found = set(re.findall(r"\bcelery_setnx_\w+", expr))
    return {re.sub(f"({'|'.join(PARTS)})$", "", name) if "_seconds_" in name else name for name in found}


def exprs() -> dict[str, str]:
    """Every query of the rules and of the dashboard, by where it stands."""
    of_panels = {f"{query.panel}: {query.legend}": query.expr for query in queries()}
    return {**{rule["alert"]: rule["expr"] for rule in ALERTS}, **of_panels}


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(command):
    """The rules, the configuration that loads them, and each alert in time and out of it."""
    ended = subprocess.run(
        ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_alert_is_tested_when_it_fires_and_when_not(alert):
    """The unit tests have both."""
    asked = [each for test in UNIT_TESTS for each in test["alert_rule_test"] if each["alertname"] == alert]
    assert {bool(each["exp_alerts"]) for each in asked} == {True, False}


def test_docs_tell_of_every_alert():
    """With its severity, and how long it has to be true."""
    told = {
        name.strip("`"): (severity, re.findall(r"\bfor (15 minutes|5 minutes|an hour|a day)", when))
        for name, severity, when in table(text_of("docs/monitoring.md"), "alert", "severity", "it fires when")
    }
    lasts = {"15m": ["15 minutes"], "5m": ["5 minutes"], "1h": ["an hour"], "1d": ["a day"], None: []}
    assert told == {rule["alert"]: (rule["labels"]["severity"], lasts[rule.get("for")]) for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_says_how_bad_it_is_and_what_to_do(rule):
    """A severity, whom it is about, and a description of more than one sentence."""
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "{{ $labels." in rule["annotations"]["summary"]
    assert len(re.findall(r"\.(?= |$)", rule["annotations"]["description"])) > 1


@pytest.mark.parametrize("where", exprs())
def test_query_names_metrics_and_labels_that_exist(where):
    """Of celery_setnx.metrics; a label belongs to a metric of the query."""
    expr = exprs()[where]
    metrics = metrics_of(expr)
    assert metrics <= LABELS.keys()
    matched = {name for inner in re.findall(r"\{(.*?)\}", expr) for name in re.findall(r"(\w+)=", inner)}
    grouped = {name for inner in re.findall(r"\b(?:by|on) \((.*?)\)", expr) for name in inner.split(", ")}
    assert matched | grouped <= OF_PROMETHEUS.union(*(LABELS[metric] for metric in metrics))


def test_docs_tell_of_every_metric():
    """With the label that it has besides `task`; the gauges have `scope` alone."""
    told = {
        metric.strip("`"): set(re.findall(r"\bby `(\w+)`", counts))
        | {"scope" if "gauge" in counts else "task"}
        for metric, counts in table(text_of("docs/monitoring.md"), "metric", "counts")
    }
    assert told == LABELS


def test_query_asks_for_outcomes_that_exist():
    """Those of the table of outcomes."""
    documented = {row[0].strip("`") for row in table(text_of("docs/monitoring.md"), "outcome", "meaning")}
    asked = {outcome for expr in exprs().values() for outcome in re.findall(r'outcome="(\w+)"', expr)}
    assert asked == {"freed", "repaired"} <= documented


def test_every_metric_has_a_panel():
    """Nothing is counted that the dashboard does not show."""
    assert set().union(*(metrics_of(query.expr) for query in queries())) == LABELS.keys()


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_explains_itself(panel):
    """A title, a description, a unit, and the datasource that its reader chooses."""
    assert panel["title"][0].isupper()
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "cps", "s")
    for asked in (panel, *panel["targets"]):
        assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_cross():
    """Each has an id and a place of its own, within the 24 columns."""
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len(shown)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in shown)
    for one, other in combinations([panel["gridPos"] for panel in shown], 2):
        assert not crosses(one, other), (one, other)


def crosses(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two panels have a place in common."""
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]
