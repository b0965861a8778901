"""Whether an AMQP broker keeps couriers until their time has come: it is asked for the queues."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from celery import Celery

from celery_setnx.call.delay import declare, delaying_queue, is_refusal, queue_named, waits_in_broker
from celery_setnx.doctor.app import Finding, guarded_tasks, note, ok, warn
from celery_setnx.run.courier import FIRST_S, LATER_S
from celery_setnx.wording import sentence


def courier_findings(app: Celery) -> Iterator[Finding]:
    """Declare the delaying queues of the app's queues, as its workers do: the broker deletes unused ones."""
    if not waits_in_broker(app) or not any(guard.options.may_wait for _, guard in guarded_tasks(app)):
        return
    names = sorted({str(queue.name) for queue in app.amqp.queues.values()})
    queues = [
        delaying_queue(queue_named(app, name), wait_s) for name in names for wait_s in (FIRST_S, LATER_S)
    ]
    for queue in queues:
        try:
            declare(app, queue)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises
            if is_refusal(error):
                yield _refused(app, names, str(queue.name), error)
            else:
                what = f"The broker does not answer: {type(error).__name__}: {sentence(error)}"
                yield note("couriers", what, "Whether it keeps the couriers of waiting calls is not known.")
            return
    yield ok(
        "couriers", f"The broker keeps the couriers of waiting calls, in queues next to {', '.join(names)}."
    )


def _refused(app: Celery, names: list[str], queue: str, error: Exception) -> Finding:
    connection = app.connection_for_write()
    user, vhost = connection.userid or "guest", connection.virtual_host or "/"
    rights = rf"^({'|'.join(map(re.escape, names))})\.setnx-"
    return warn(
        "couriers",
        f"The broker refuses the queue {queue}: {sentence(error)}",
        "So workers hold the couriers of waiting calls. A worker on a quorum queue stops when it holds as "
        "many couriers as it prefetches.",
        f"On the virtual host {vhost}, let the user {user} configure and read {shlex.quote(rights)}, "
        "and write amq.default (rabbitmqctl set_permissions).",
    )
