"""Migrate, order, roll back, run a worker, and check what came of it: what users of the project do."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import redis

from examples.checked import all_shown, wait_until
from examples.embedded import EmbeddedServer

HERE = Path(__file__).parent


def main() -> bool:
    """What the project's web server, admin and worker do."""
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=HERE, check=True)

    sys.path.insert(0, str(HERE))
    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.contrib.messages import get_messages
    from django.test import Client
    from orders.models import Customer, Order
    from shop.celery import app

    broker = redis.Redis.from_url(os.environ["REDIS_URL"])
    queue = app.conf.task_default_queue
    broker.delete(queue)
    browser = Client()

    def order(name: str, *amounts: int) -> tuple[int, int, int]:
        """The status, and how many orders and messages there are now."""
        status = browser.post(f"/customers/{name}/orders", {"amount": amounts}).status_code
        now = (status, Order.objects.count(), broker.llen(queue))
        print(f"{name} orders {amounts}: status {status}; orders: {now[1]}, messages: {now[2]}")
        return now

    def is_summed_up(name: str, total: int, times: int) -> bool:
        row = browser.get(f"/customers/{name}").json()
        return (row["total"], row["times"]) == (total, times)

    committed = order("ann", 30, 12)
    rolled_back = order("cleo", 5, -1)
    order("bob", 7)
    browser.force_login(User.objects.create_superuser("boss"))
    selected = [*Customer.objects.values_list("pk", flat=True)]
    page = "/admin/orders/customer/"
    response = browser.post(page, {"action": "sum_up_now", "_selected_action": selected})
    (said,) = map(str, get_messages(response.wsgi_request))
    print(f"admin action for ann and bob: {said}")

    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "shop", "worker", "-c2", "-l", "WARNING"], cwd=HERE
    )
    try:
        wait_until(lambda: is_summed_up("ann", 42, 1) and is_summed_up("bob", 7, 1), "both are summed up")
        print("worker has run:", [*Customer.objects.values_list("name", "total", "times")])
        browser.post("/customers/ann/orders", {"amount": 10})
        wait_until(lambda: is_summed_up("ann", 52, 2), "ann is summed up again")
        print("ann orders (10,):", [*Customer.objects.values_list("name", "total", "times")])
    finally:
        worker.terminate()
        worker.wait()

    rows = [*Customer.objects.values_list("name", "total", "times")]
    checks = {
        "two orders of one transaction are one message": committed == (202, 2, 1),
        "what is rolled back sends nothing": rolled_back == (400, 2, 1),
        "the admin does not queue it again": said == "0 sent, 2 queued already",
        "every total is right, and was summed up no more often than needed": rows
        == [("ann", 52, 2), ("bob", 7, 1)],
    }
    return all_shown(checks)


if __name__ == "__main__":
    if "REDIS_URL" not in os.environ:
        server = EmbeddedServer()  # dies with this process
        os.environ["REDIS_URL"] = server.url()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["SHOP_DATABASE"] = str(Path(directory, "shop.sqlite3"))
        success = main()
    sys.exit(not success)
