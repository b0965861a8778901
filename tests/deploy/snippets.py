"""What the snippets say of how a worker ends, and the tools that read them."""

import configparser
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.deploy.stack import compose_command
from tests.topologies.servers import not_here

TOP = Path(__file__).parents[2]
UNIT = TOP / "examples" / "deploy" / "celery-worker.service"
KUBERNETES = TOP / "examples" / "deploy" / "kubernetes.yml"
COMPOSE = TOP / "docker-compose.yml"
# The program that the unit starts; here it is elsewhere.
PROGRAM = "/srv/proj/venv/bin/celery"
SOFT = "worker.soft_shutdown_timeout="
DEADLINE_S = 120


@dataclass(frozen=True)
class Ending:
    """How a worker is told to end, and when it is killed."""

    command: list[str]
    environment: dict[str, str]
    grace_s: float

    @property
    def soft_s(self) -> float:
        """For how long bodies may go on."""
        (found,) = (each for each in self.command if each.startswith(SOFT))
        return float(found.removeprefix(SOFT))


def of_unit() -> Ending:
    """The worker of systemd."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    service = parser["Service"]
    name, value = service["Environment"].split("=", 1)
    return Ending(shlex.split(service["ExecStart"]), {name: value}, float(service["TimeoutStopSec"]))


def deployments() -> dict[str, dict[str, Any]]:
    """The objects of Kubernetes by name."""
    return {each["metadata"]["name"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


def of_deployment(name: str) -> Ending:
    """The worker, or the beat, of Kubernetes."""
    pod = deployments()[name]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container.get("env", [])}
    return Ending(container["command"], environment, float(pod["terminationGracePeriodSeconds"]))


def of_service(name: str) -> Ending:
    """A worker of Compose."""
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    grace = service["stop_grace_period"]
    assert grace.endswith("s")
    return Ending(shlex.split(service["command"]), service["environment"], float(grace[:-1]))


def systemd_says(unit: str, directory: Path) -> str:
    """What systemd finds wrong with a unit; it wants a program that is here."""
    path = directory / UNIT.name
    path.write_text(unit.replace(PROGRAM, sys.executable))
    verify = ["systemd-analyze", "verify", "--man=no", str(path)]
    try:
        ran = subprocess.run(verify, capture_output=True, text=True, timeout=DEADLINE_S)
    except FileNotFoundError:
        not_here("no systemd-analyze: Debian's systemd has it")
    # Not what it finds in the machine's own units, which it reads too.
    said = "\n".join(line for line in (ran.stdout + ran.stderr).splitlines() if UNIT.name in line)
    return said or (f"ended with {ran.returncode}" if ran.returncode else "")


def kubernetes_says(text: str, _directory: Path) -> str:
    """What the newest schemas find wrong, fields that there are not included."""
    for each in yaml.safe_load_all(text):
        try:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            return str(error.message)
    return ""


def compose_says(text: str, directory: Path) -> str:
    """What Compose finds wrong; it asks no engine."""
    command = compose_command()
    if command is None:
        not_here("neither `docker compose` nor `docker-compose` is here; DOCKER_COMPOSE may name it")
    path = directory / "docker-compose.yml"
    path.write_text(text)
    config = [*command, "-f", str(path), "--project-name", "proj", "--profile", "*", "config", "--quiet"]
    ran = subprocess.run(config, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ)
    said = ran.stdout + ran.stderr
    return said or (f"ended with {ran.returncode}" if ran.returncode else "")
