"""Several public projects with Mastodon's queues: a worker drains them in their order, each by priorities."""

import os

from celery import Celery
from kombu import Exchange, Queue

from tests import app as tests_app  # noqa: F401 - it journals
from tests.real_configurations import Configuration

URL = os.environ["SETNX_TEST_URL"]
QUEUES = ("ingress", "default", "push", "mailers", "pull", "scheduler")
app = Celery("queues", broker=f"{URL}/2", backend=f"{URL}/3")
app.conf.update(
    broker_transport_options={
        "priority_steps": list(range(10)),
        "sep": ":",
        "queue_order_strategy": "priority",
    },
    task_queues=[
        Queue(name, Exchange(name), routing_key=name, queue_arguments={"x-max-priority": 10})
        for name in QUEUES
    ],
    task_default_queue="default",
    task_default_priority=5,
    task_queue_max_priority=10,
    task_inherit_parent_priority=True,
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_disable_rate_limits=True,
    broker_connection_retry_on_startup=True,
)
CONFIGURATION = Configuration(
    app,
    calls=[{"priority": 9}, {"priority": 0, "queue": "push"}, {"queue": "pull"}],
    worker={"queues": ",".join(QUEUES)},
)
