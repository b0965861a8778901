"""A real Prometheus of one's own, with a private directory and port, that looks every other second."""

import json
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import wait_until
from tests.topologies.servers import free_port

_CONFIG = """\
global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: celery
    static_configs: {targets}
"""


class Prometheus:
    """A process that scrapes these ports of the loopback address; it is to be killed.

    Args:
        directory: Where its configuration, its data and its log are.
        ports: Of workers and publishers, by the name that each has as an instance.
        rules: A file of rules. Defaults to none.
    """

    def __init__(self, directory: Path, ports: Mapping[str, int], rules: Path | None = None) -> None:
        self._directory = directory
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in ports.items()
        ]
        self._config = _CONFIG.format(
            rules=json.dumps([str(rules)] if rules else []), targets=json.dumps(targets)
        )
        self._start()

    def _start(self) -> None:
        self._port = free_port()
        self._log = self._directory / f"prometheus-{self._port}.log"
        config = self._directory / "prometheus.yml"
        config.write_text(self._config)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Come back when it answers."""
        wait_until(self._is_ready, f"Prometheus ready; its log: {self._log}", 180)

    def ask(self, path: str, **parameters: Any) -> Any:
        """What its API answers."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            answer = json.loads(reply.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series, now."""
        found = self.ask("query", query=expr)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def history(
        self, expr: str, start: float, end: float, step_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels of each series, and its values with their times."""
        found = self.ask("query_range", query=expr, start=start, end=end, step=step_s)["result"]
        return [
            (series["metric"], [(at, float(value)) for at, value in series["values"]]) for series in found
        ]

    def firing(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The alerts that fire now, by name and task or scope."""
        return {
            (
                alert["labels"]["alertname"],
                alert["labels"].get("task", alert["labels"].get("scope", "")),
            ): alert
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def kill(self) -> None:
        """kill -9."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            said = self._log.read_text(errors="replace")
            if "address already in use" not in said:
                raise AssertionError(f"Prometheus ended:\n{said}")
            self._start()  # another process took the port meanwhile
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False
