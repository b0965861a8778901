"""What a benchmark was run on: printed above its figures."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context

import redis

from examples.embedded import EmbeddedServer

PACKAGES = (
    *("celery_setnx", "celery", "kombu", "redis", "hiredis"),
    *("celery-once", "celery-singleton", "celery-heimdall", "python-redis-lock"),
)


@contextmanager
def awake() -> Iterator[None]:
    """No processor halts meanwhile, where the system has SCHED_IDLE: a process on each that gives way to all.

    A virtual processor that halts between two commands takes longer to wake than Redis takes to answer.
    """
    forks = get_context("fork")
    spinners = [
        forks.Process(target=_spin, args=(cpu, os.getpid()), daemon=True)
        for cpu in (os.sched_getaffinity(0) if hasattr(os, "SCHED_IDLE") else ())
    ]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin(cpu: int, parent: int) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {cpu})
    while os.getppid() == parent:
        pass


def machine(server: EmbeddedServer) -> Iterator[str]:
    """The machine, the server and the versions, in three lines."""
    with redis.Redis(port=server.port) as client:
        about = client.info("server")
        trip_us = statistics.median(_round_trip_us(client) for _ in range(500))
    name = about.get("server_name", "redis")
    running = about.get(f"{name}_version", about["redis_version"])
    system = f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}"
    system += ", kept awake" if hasattr(os, "SCHED_IDLE") else ""
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
