"""Beats to be killed, a table of what their deaths cost, and Django's admin tables."""

import os
import statistics
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
import redis

from tests.beat.beats import Beats
from tests.tables import Recorded, recorded, write


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was done to the leaders, and what it cost."""
    head = "| beat | kills | ticks | missed | worst gap s | kill to next tick: median s | max s |"
    rows = [row for _, row in recorded(terminalreporter, "row")]
    write(terminalreporter, "beat", [head, "|---" * 7 + "|", *rows])


@pytest.fixture
def report(request) -> Callable[..., None]:
    """Adds a line to the table."""

    def report(what: str, beats: Any, deaths: list[float], entry: str = "every") -> None:
        _run, _runs, missed = beats.remembered(entry)
        Recorded(request.node, "row").append(
            f"| {what} | {len(deaths)} | {len(beats.ticks(entry))} | {missed} | "
            f"{beats.worst_gap(entry):.1f} | {statistics.median(deaths):.1f} | {max(deaths):.1f} |"
        )

    return report


@pytest.fixture
def broker(server) -> Iterator[redis.Redis]:
    """A client of the broker's database, which is empty before."""
    with redis.Redis.from_url(server.url(0), decode_responses=True) as client:
        client.flushdb()
        yield client


@pytest.fixture
def beats(server, tmp_path, locks, journal, broker) -> Iterator[Any]:
    """Starts beats; all are killed at the end."""
    beats = Beats(tmp_path, locks, journal, broker)
    yield beats
    beats.stop()


@pytest.fixture(scope="session")
def django_tables(tmp_path_factory) -> str:
    """The admin tables, in a new SQLite file, in this process too."""
    os.environ["BEAT_TEST_DATABASE"] = str(tmp_path_factory.mktemp("django") / "beat.sqlite3")
    import django
    from django.conf import settings
    from django.core.management import call_command

    from tests.beat import djangosettings

    settings.configure(**{name: value for name, value in vars(djangosettings).items() if name.isupper()})
    django.setup()
    call_command("migrate", verbosity=0)
    return os.environ["BEAT_TEST_DATABASE"]


@pytest.fixture
def tables(django_tables) -> Any:
    """The models of django-celery-beat; their tables are empty."""
    from django_celery_beat import models

    for model in (models.PeriodicTask, models.IntervalSchedule, models.ClockedSchedule, models.PeriodicTasks):
        model.objects.all().delete()
    return models


@pytest.fixture
def row(tables) -> Callable[..., Any]:
    """Makes a periodic task, every second unless its fields say otherwise; or one for a time, once."""

    def row(name: str, at: datetime | None = None, **fields: Any) -> Any:
        if at is not None:
            fields |= {"clocked": tables.ClockedSchedule.objects.create(clocked_time=at), "one_off": True}
        elif "crontab" not in fields:
            fields["interval"], _new = tables.IntervalSchedule.objects.get_or_create(
                every=1, period="seconds"
            )
        return tables.PeriodicTask.objects.create(name=name, task="beats.tick", args=f'["{name}"]', **fields)

    return row
