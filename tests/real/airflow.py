"""Airflow: settings in a dict, an exchange of the default queue's name, late acknowledgement, results by SQL.

A body forks; only its child runs the operator. The scheduler makes its app anew in each process that sends.
"""

import gc
import logging
import os
import sys

from celery import Celery
from celery.signals import import_modules, worker_ready

from tests import app as tests_app  # noqa: F401 - it journals
from tests.real_configurations import Configuration

URL = os.environ["SETNX_TEST_URL"]

DEFAULT_CELERY_CONFIG = {
    "accept_content": ["json"],
    "event_serializer": "json",
    "worker_prefetch_multiplier": 1,
    "task_acks_late": True,
    "task_default_queue": "default",
    "task_default_exchange": "default",
    "task_track_started": True,
    "broker_url": f"{URL}/2",
    "broker_transport_options": {"visibility_timeout": 86400},
    "broker_connection_retry_on_startup": True,
    "result_backend": f"db+sqlite:///{os.environ['SETNX_TEST_DIRECTORY']}/airflow.sqlite",
    "database_engine_options": {},
    "worker_concurrency": 16,
    "worker_enable_remote_control": True,
    "worker_redirect_stdouts": False,
    "worker_hijack_root_logger": False,
    "setnx_url": f"{URL}/1",
}

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(processName)s %(message)s")


@import_modules.connect
def preload(*_args: object, **_details: object) -> None:
    gc.freeze()


@worker_ready.connect
def unfreeze(*_args: object, **_details: object) -> None:
    gc.unfreeze()


def execute_in_fork() -> None:
    """The operator runs in a child, which ends the hard way."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        logging.shutdown()
    finally:
        sys.stderr.flush()
        os._exit(0)


app = Celery("airflow.executors.celery_executor", config_source=DEFAULT_CELERY_CONFIG)
CONFIGURATION = Configuration(
    app,
    calls=[{"queue": "default"}, {"queue": "etl"}],
    inside=execute_in_fork,
    worker={"queues": "default,etl"},
)
