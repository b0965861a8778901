"""The app that OpenTelemetry watches: the spans of the pool's processes go to the journal."""

from collections.abc import Sequence
from typing import Any

from celery.signals import worker_process_init
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from tests.app import journal
from tests.ecosystem.watched import app

__all__ = ["app"]


class ToJournal(SpanExporter):
    """Writes down each span as it ends."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            told: Any = span.attributes or {}
            task_id = told.get("messaging.message.id") or told.get("messaging.message_id")
            about = {"kind": span.kind.name.lower(), "name": told.get("celery.task_name") or span.name}
            trace, error = f"{span.context.trace_id:x}", span.status.status_code is StatusCode.ERROR
            journal.write("span", task_id=task_id, trace=trace, error=error, **about)
        return SpanExportResult.SUCCESS


@worker_process_init.connect
def instrument(**_details: Any) -> None:
    """In each process of the pool, as OpenTelemetry's documentation says."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToJournal()))
    CeleryInstrumentor().instrument(tracer_provider=provider)
    RedisInstrumentor().instrument(tracer_provider=provider)
