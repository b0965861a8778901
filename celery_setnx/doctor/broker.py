"""Whether an AMQP broker keeps couriers and debounced calls until their time has come: it is asked for the
queues.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from celery import Celery

from celery_setnx.call.delay import declare, delaying_queue, hop_s, is_refusal, queue_named, waits_in_broker
from celery_setnx.call.queues import NoWayBack, own_queue
from celery_setnx.doctor.app import Finding, fail, guarded_tasks, note, ok, warn
from celery_setnx.run.courier import FIRST_S, LATER_S
from celery_setnx.wording import sentence


def courier_findings(app: Celery) -> Iterator[Finding]:
    """Declare the delaying queues of the app's queues, as its workers do: the broker deletes unused ones."""
    if not waits_in_broker(app):
        return
    if any(guard.options.may_wait for _, guard in guarded_tasks(app)):
        yield _couriers(app)
    yield from _debounced(app)


def _couriers(app: Celery) -> Finding:
    names = sorted({str(queue.name) for queue in app.amqp.queues.values()})
    refused = _first_refused(app, names, (FIRST_S, LATER_S))
    if refused is None:
        what = f"The broker keeps the couriers of waiting calls, in queues next to {', '.join(names)}."
        return ok("couriers", what)
    queue, error = refused
    if not is_refusal(error):
        return note(
            "couriers", _silence(error), "Whether it keeps the couriers of waiting calls is not known."
        )
    return warn(
        "couriers",
        f"The broker refuses the queue {queue}: {sentence(error)}",
        "So workers hold the couriers of waiting calls. A worker on a quorum queue stops when it holds as "
        "many couriers as it prefetches.",
        _rights(app, names),
    )


def _debounced(app: Celery) -> Iterator[Finding]:
    """Whether calls of tasks with `debounce` wait in the broker, beside the queues that they go to.

    One queue tells: the others have the same right.
    """
    waits = {task.name: guard.options.debounce for task, guard in guarded_tasks(app)}
    tasks = [name for name, wait_s in waits.items() if wait_s is not None]
    names = sorted(set(_queues_of(app, tasks)))
    if not names:
        return
    refused = _first_refused(app, names, [hop_s(max(wait_s or 0.0 for wait_s in waits.values()))])
    if refused is None:
        yield ok("debounce", f"The broker keeps debounced calls, in queues next to {', '.join(names)}.")
        return
    queue, error = refused
    if not is_refusal(error):
        yield note("debounce", _silence(error), "Whether it keeps debounced calls is not known.")
        return
    yield fail(
        "debounce",
        f"The broker refuses the queue {queue}: {sentence(error)}",
        f"So workers hold the debounced calls of {', '.join(tasks)}, and prefetch them: other calls may have "
        "to wait meanwhile.",
        _rights(app, names),
    )


def _queues_of(app: Celery, tasks: Iterable[str]) -> Iterator[str]:
    """The queues that calls of tasks go to, as far as the app's routes say."""
    for task in tasks:
        with suppress(NoWayBack):
            if queue := own_queue(app, task, (), {}):
                yield queue


def _first_refused(
    app: Celery, names: Iterable[str], waits_s: Sequence[float]
) -> tuple[str, Exception] | None:
    """The first delaying queue that the broker does not have, and its error; None if it has all."""
    for name in names:
        for wait_s in waits_s:
            queue = delaying_queue(queue_named(app, name), wait_s)
            try:
                declare(app, queue)
            except Exception as error:  # noqa: BLE001 - whatever the transport raises
                return str(queue.name), error
    return None


def _silence(error: Exception) -> str:
    return f"The broker does not answer: {type(error).__name__}: {sentence(error)}"


def _rights(app: Celery, names: Iterable[str]) -> str:
    """What to allow."""
    connection = app.connection_for_write()
    user, vhost = connection.userid or "guest", connection.virtual_host or "/"
    rights = rf"^({'|'.join(map(re.escape, names))})\.setnx-"
    return (
        f"On the virtual host {vhost}, let the user {user} configure and read {shlex.quote(rights)}, "
        "and write amq.default (rabbitmqctl set_permissions)."
    )
