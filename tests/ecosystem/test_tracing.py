"""opentelemetry-instrumentation-celery, opentelemetry-instrumentation-redis and ddtrace beside ours."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_setnx.call.wake import COURIER
from tests.ecosystem.play import QUEUE, Play
from tests.harness import Journal, Worker

# ddtrace hands its traces on only if it is told so.
DISTRIBUTED = {"DD_CELERY_DISTRIBUTED_TRACING": "true", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}


@pytest.fixture(scope="module", params=["otelapp", "ddapp"])
def tracer(request, module_worker: Callable[..., Worker]) -> Iterator[str]:
    """A worker that is traced."""
    worker = module_worker(f"tests.ecosystem.{request.param}", queues=QUEUE, environment=DISTRIBUTED)
    yield request.param
    worker.kill()


@pytest.fixture
def spans(tracer: str, journal: Journal) -> Callable[..., list[dict[str, Any]]]:
    """Call it with what spans say: those, once there are so many."""

    def spans(count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
        return journal.wait_for("span", count, **wanted)

    return spans


def test_trace_of_a_waited_call_is_its_callers(spans, play: Play, journal: Journal):
    """Both its runs are in the trace of what has published it; what we send for it is in no caller's."""
    other, held = play.holder()
    publisher, waited = play.parked()
    play.let_go(held, waited)
    (of_other,) = spans(kind="consumer", task_id=other)
    (of_publisher,) = spans(kind="consumer", task_id=publisher)
    callers = {of_publisher["trace"], of_other["trace"]}
    assert len(callers) == 2
    runs = spans(2, kind="consumer", task_id=waited)
    assert {run["trace"] for run in runs} == {of_publisher["trace"]}
    (run_of_held,) = spans(kind="consumer", task_id=held)
    assert run_of_held["trace"] == of_other["trace"]
    sent = {span["trace"] for span in spans(2, kind="producer", task_id=waited)}
    assert len(sent) == 2
    assert sent & callers == {of_publisher["trace"]}
    assert not callers & {span["trace"] for span in spans(kind="producer", name=COURIER)}


def test_lock_commands_are_no_spans(spans, play: Play, journal: Journal):
    """The commands of a body and of Celery are spans of its run; those of its lock are not."""
    _, held = play.holder()
    play.let_go(held)
    (run,) = spans(kind="consumer", task_id=held)
    # The RPUSH is the journal's, by which the body says that it has started.
    commands = {span["name"] for span in spans(trace=run["trace"], kind="client")}
    assert "RPUSH" in commands
    assert not [command for command in commands if "EVAL" in command]


def test_already_running_is_an_error_where_throws_is_not_honoured(
    tracer, spans, play: Play, journal: Journal
):
    """ddtrace honours a task's `throws`, and so AlreadyRunning is no error; OpenTelemetry ignores it."""
    _, held = play.holder()
    refused = play.failed("refuses", play.name)
    expected = play.failed("expects")
    failed = play.failed("fails", play.name + "-")
    play.let_go(held)
    is_error = {id_: spans(kind="consumer", task_id=id_)[0]["error"] for id_ in (refused, expected, failed)}
    ignores = tracer == "otelapp"
    assert is_error == {refused: ignores, expected: ignores, failed: True}
