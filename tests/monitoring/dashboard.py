"""What examples/monitoring/dashboard.json asks of Prometheus, as Grafana would send it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITORING = Path(__file__).parents[2] / "examples/monitoring"


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        panel: The panel's title.
        expr: With the variables of Grafana in it.
        legend: What a series is called, with its labels in `{{}}`.
    """

    panel: str
    expr: str
    legend: str

    def within(self, interval: str, span: str) -> str:
        """The query of all jobs and all tasks, with this interval of rates, of this span of time."""
        expr = self.expr.replace("$__rate_interval", interval).replace("$__range", span)
        return expr.replace("$job", ".*").replace("$task", ".*")


def panels() -> list[dict[str, Any]]:
    """The panels that show something; not the headings of rows."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(*titles: str) -> list[Query]:
    """Those of these panels, or of all."""
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        if not titles or panel["title"] in titles
        for target in panel["targets"]
    ]
