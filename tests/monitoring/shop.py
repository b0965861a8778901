"""The shop whose dashboard `python -m tests.monitoring.picture` draws; its bodies do nothing but last."""

import os
import time

from celery import Celery

from celery_setnx import SingletonTask, metrics

URL = os.environ["SHOP_URL"]

app = Celery("shop", broker=f"{URL}/0", backend=f"{URL}/0", set_as_current=False)
app.conf.setnx_url = f"{URL}/1"
app.conf.setnx_same_host = False  # as if each worker had a host of its own
app.conf.worker_prefetch_multiplier = 1
if "METRICS_PORT" in os.environ:
    metrics.serve(app, int(os.environ["METRICS_PORT"]), "127.0.0.1")


@app.task(name="shop.settle", base=SingletonTask, singleton={"key": "account_id", "lease": 6})
def settle(account_id: str, lasts_s: float) -> None:
    time.sleep(lasts_s)


@app.task(name="shop.report", base=SingletonTask, singleton={"key": "month", "on_conflict": "wait"})
def report(month: str, lasts_s: float) -> None:
    time.sleep(lasts_s)


@app.task(name="shop.notify", base=SingletonTask, singleton={"key": "partner", "rate": "20/m"})
def notify(partner: str, lasts_s: float) -> None:
    time.sleep(lasts_s)


@app.task(name="shop.remind", base=SingletonTask, singleton={"key": "user_id", "dedupe": "until_started"})
def remind(user_id: int, lasts_s: float) -> None:
    time.sleep(lasts_s)
