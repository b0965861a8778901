"""What a benchmark was run on: printed above its figures."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version

import redis

from examples.embedded import EmbeddedServer

PACKAGES = (
    *("celery_setnx", "celery", "kombu", "redis", "hiredis"),
    *("celery-once", "celery-singleton", "celery-heimdall", "python-redis-lock"),
)


def machine(server: EmbeddedServer) -> Iterator[str]:
    """The machine, the server and the versions, in three lines."""
    with redis.Redis(port=server.port) as client:
        about = client.info("server")
        trip_us = statistics.median(_round_trip_us(client) for _ in range(500))
    name = about.get("server_name", "redis")
    running = about.get(f"{name}_version", about["redis_version"])
    system = f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}"
    yield f"{system}, Python {platform.python_version()}"
    yield f"{name} {running} on the same machine, {trip_us:.0f} us for a PING"
    yield ", ".join(f"{package} {version(package)}" for package in PACKAGES if _is_installed(package))


def _round_trip_us(client: redis.Redis) -> float:
    """What machines differ in most, and what every lock pays twice."""
    began = time.perf_counter()
    client.ping()
    return (time.perf_counter() - began) * 1e6


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except ModuleNotFoundError:
        return False
