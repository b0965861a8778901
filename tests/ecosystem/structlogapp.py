"""A Django project with django-structlog: what site and worker log goes to the journal."""

import sys
from typing import Any, NoReturn

import django
import structlog
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django_structlog.celery.steps import DjangoStructLogInitStep

from tests.app import journal
from tests.ecosystem.watched import app, waits

settings.configure(
    SECRET_KEY="of no use",
    ALLOWED_HOSTS=["testserver"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["django_structlog"],
    MIDDLEWARE=["django_structlog.middlewares.RequestMiddleware"],
    DJANGO_STRUCTLOG_CELERY_ENABLED=True,
    DJANGO_STRUCTLOG_TRUST_UPSTREAM_REQUEST_ID=True,
)
django.setup()
app.steps["worker"].add(DjangoStructLogInitStep)


def publish(request: HttpRequest, name: str, gate: str = "") -> HttpResponse:
    """Publishes a call, and says its id."""
    return HttpResponse(waits.delay(name, gate).id)


urlpatterns = [path("<name>/", publish), path("<name>/<gate>", publish)]


def to_journal(_logger: Any, _level: str, line: dict[str, Any]) -> NoReturn:
    """Writes down what a line says, and of which task and request it is."""
    wanted = ("event", "request_id", "task_id", "child_task_id")
    journal.write("log", **{name: line.get(name) for name in wanted})
    raise structlog.DropEvent


structlog.configure(processors=[structlog.contextvars.merge_contextvars, to_journal])


def serve() -> None:
    """Answer what comes by standard input: a request's id, as a proxy numbers it, and a path."""
    for line in sys.stdin:
        request_id, url = line.split()
        print(Client().get(url, headers={"x-request-id": request_id}).content.decode(), flush=True)
