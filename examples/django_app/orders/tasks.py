"""The task of the project, and the base class that all its tasks may have."""

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db.models import F, Sum

from celery_setnx import SingletonTask

from .models import Customer, Order


class SingletonDjangoTask(SingletonTask, DjangoTask):
    """Guarded, and with `delay_on_commit`."""

    abstract = True


@shared_task(base=SingletonDjangoTask, singleton={"key": "customer_id", "dedupe": "until_started"})
def sum_up(customer_id):
    """Sum up a customer's orders. The next call sums up orders that are committed during the run."""
    orders = Order.objects.filter(customer_id=customer_id)
    total = orders.aggregate(total=Sum("amount", default=0))["total"]
    Customer.objects.filter(pk=customer_id).update(total=total, times=F("times") + 1)
    return total
