"""The app that ddtrace watches: its spans go to the journal, and to no agent."""

from importlib import import_module

from ddtrace import patch
from ddtrace.trace import Span, TraceFilter, tracer

from tests.app import journal


class ToJournal(TraceFilter):
    """Writes down the spans of each trace, and keeps them from the agent."""

    def process_trace(self, trace: list[Span]) -> list[Span] | None:
        if any(span.name.startswith("celery.") for span in trace):  # else it is the journal's own
            for span in reversed(trace):  # a run comes after its parts
                about = {"kind": span.get_tag("span.kind"), "name": span.resource, "error": bool(span.error)}
                journal.write("span", task_id=span.get_tag("celery.id"), trace=f"{span.trace_id:x}", **about)
        return None


patch(celery=True, redis=True)
tracer.configure(trace_processors=[ToJournal()])

app = import_module("tests.ecosystem.watched").app  # after the patch, as with ddtrace-run
