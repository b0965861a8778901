"""What the worker of the shop runs here: bodies that wait until a test lets them end."""

import os

import redis
from celery import current_task, shared_task

from celery_setnx import SingletonTask
from tests.harness import GATE_S


def wait(argument: str) -> str:
    """Wait until a test opens the gate of this call."""
    with redis.Redis.from_url(os.environ["REDIS_URL"], socket_timeout=None) as control:
        control.blpop([f"gate:{current_task.request.id}"], timeout=GATE_S)
    return argument


class Waiting(SingletonTask):
    abstract = True
    singleton = {"on_conflict": "wait"}


@shared_task(base=Waiting, name="orders.tasks.settle")
def settle(name: str) -> str:
    return wait(name)


@shared_task(
    base=SingletonTask, name="orders.tasks.fetch_rates", singleton={"on_conflict": "wait", "limit": 2}
)
def fetch_rates(bank: str) -> str:
    return wait(bank)
