"""Tasks that run in the schema of the tenant they were published for."""

from typing import Any

from django.db import connection
from tenant_schemas_celery.app import CeleryApp
from tenant_schemas_celery.task import TenantTask

from celery_setnx import SingletonTask
from tests.app import body, journal, make_app

app = make_app("tenancy", of=CeleryApp)


class SingletonTenantTask(SingletonTask, TenantTask):
    """Guarded, and in its tenant's schema."""

    abstract = True


def in_its_schema(name: str, gate: str = "") -> list[str]:
    """The key: what a tenant's calls have in common, and no other's."""
    return [connection.schema_name, name]


def work(self: Any, name: str, gate: str = "") -> str:
    """Says in which schema it runs, by the database."""
    with connection.cursor() as cursor:
        cursor.execute("select current_schema()")
        (schema,) = cursor.fetchone()
    journal.write("schema", task_id=self.request.id, schema=schema)
    body(gate)
    return str(schema)


def task(name: str, **singleton: Any) -> Any:
    options = {"base": SingletonTenantTask, "bind": True, "shared": False, "name": f"tenancy.{name}"}
    return app.task(**options, singleton={"lease": 600, "retry_delay": 0.1, **singleton})(work)


own = task("own", key=in_its_schema, on_conflict="wait")
common = task("common", key="name")
