"""Tests of the project: `python manage.py test`. They need neither Redis nor a worker."""

from django.test import TestCase
from shop.celery import app

from .models import Customer, Order


class Orders(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        app.conf.task_always_eager = True  # eager calls ask for no lock
        cls.addClassCleanup(setattr, app.conf, "task_always_eager", False)

    def place(self, *amounts):
        """Place orders; TestCase never commits, so the hooks are called here."""
        with self.captureOnCommitCallbacks(execute=True) as hooks:
            response = self.client.post("/customers/ann/orders", {"amount": amounts})
        return response.status_code, len(hooks)

    def test_orders_are_summed_up_when_they_are_committed(self):
        assert self.place(30, 12) == (202, 2)
        assert Customer.objects.get(name="ann").total == 42

    def test_orders_that_are_rolled_back_ask_for_nothing(self):
        assert self.place(5, -1) == (400, 0)
        assert not Order.objects.exists()
