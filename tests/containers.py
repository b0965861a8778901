"""Processes of a container stand still, and go on.

By signals, not by the engine's `pause`: its freezer gives up on a container in which much starts and ends
("unable to freeze"). A container's first process gets none from inside: what is meant has to be another one.
"""

from docker.models.containers import Container


def stand_still(container: Container) -> None:
    """Its processes keep their connections, and read and answer nothing. A kill of the container ends it."""
    _signal(container, "STOP")


def go_on(container: Container) -> None:
    """They go on."""
    _signal(container, "CONT")


def _signal(container: Container, name: str) -> None:
    ended, output = container.exec_run(["sh", "-c", f"kill -{name} -1"])
    assert ended == 0, output
