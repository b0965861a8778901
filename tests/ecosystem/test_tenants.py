"""tenant-schemas-celery, with django-tenants on a PostgreSQL: each call in the schema of its tenant."""

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_setnx.call.wake import COURIER
from tests import forks
from tests.ecosystem.postgres import Postgres
from tests.harness import Worker, is_parked, wait_until
from tests.stage import SOON

APP = "tests.ecosystem.tenancy.app"
COURIERS_RUN = re.compile(rf"Task {COURIER}\S* succeeded")


def make_tenants() -> None:
    """In a process of the project: the tables, and two tenants."""
    import django

    django.setup()
    from django.core.management import call_command

    from tests.ecosystem.tenancy.models import Tenant

    call_command("migrate_schemas", schema_name="public", run_syncdb=True, verbosity=0)
    for schema in ("north", "south"):
        Tenant(schema_name=schema).save(verbosity=0)


def publish(calls: list[tuple[str, str, list[str]]]) -> None:
    """In a process of the project: publish each call in its schema, and say its id and its lock."""
    import django

    django.setup()
    from django_tenants.utils import schema_context

    from tests.ecosystem.tenancy import app

    for schema, task, args in calls:
        with schema_context(schema):
            result = getattr(app, task).apply_async(args, singleton=SOON)
            print(json.dumps([result.id, getattr(app, task).lock_key(*args)]))


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a process of the project, whose tenants are there."""
    with Postgres() as postgres:
        environment = {
            "DJANGO_SETTINGS_MODULE": "tests.ecosystem.tenancy.settings",
            "TENANCY_SOCKET": postgres.directory,
            "PYTHONPATH": os.getcwd(),
        }
        code, said = forks.ended(tmp_path_factory.mktemp("tenants"), make_tenants, **environment)
        assert code == 0, said
        yield environment


@pytest.fixture(scope="module")
def worker(project, server, module_worker) -> Worker:
    """A worker of the project."""
    return module_worker(APP, environment=project, concurrency=3)


@pytest.fixture
def published(worker, project, tmp_path, locks, journal, name, gates) -> Iterator[Callable[..., Any]]:
    """Publishes calls of `(schema, task, args)`, one after the other; their ids, and their locks."""

    def published(*calls: tuple[str, str, list[str]]) -> Any:
        code, said = forks.ended(tmp_path, publish, list(calls), **project)
        assert code == 0, said
        return zip(*[json.loads(line) for line in said.splitlines() if line.startswith("[")])

    yield published
    gates(name, 1 + journal.unended())


def test_tenants_with_the_same_arguments_run_side_by_side_in_their_schemas(
    published, worker, journal, gates, locks, name
):
    """The key has the schema: a tenant waits for nobody but itself, and is woken in its own schema."""
    calls = [("north", "own", [name, name]), ("south", "own", [name, name])]
    (north, south), (northern, southern) = published(*calls)
    assert northern != southern
    journal.wait_for("start", 2, name=name)
    (waiting,), (key,) = published(("north", "own", [name]))
    assert key == northern
    wait_until(lambda: is_parked(locks, northern, waiting), "the second call of north waits")
    wait_until(lambda: COURIERS_RUN.search(worker.log_text()), "its courier has come, and looked")
    assert len(journal.entries(what="start", name=name)) == 2
    gates(name, 2)
    for task_id in (north, south, waiting):
        journal.wait_for("end", task_id=task_id)
    schemas = {entry["task_id"]: entry["schema"] for entry in journal.entries(what="schema")}
    assert schemas == {north: "north", south: "south", waiting: "north"}
    assert journal.words(waiting).count("start") == 1
    assert "Traceback" not in worker.log_text()


def test_arguments_alone_are_one_key_for_all_tenants(published, journal, gates, name):
    """A key without the schema: the other tenant's equal call is skipped."""
    (north,), (key,) = published(("north", "common", [name, name]))
    journal.wait_for("start", task_id=north)
    (south,), (same,) = published(("south", "common", [name]))
    assert key == same
    (told,) = journal.wait_for("conflict", task_id=south)
    assert told["holder"]["task_id"] == north
    gates(name)
    journal.wait_for("released", task_id=north)
