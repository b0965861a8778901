"""Customers and orders."""

from django.db import models


class Customer(models.Model):
    """A customer; `total` is what the orders come to, summed up `times` times by a task."""

    name = models.SlugField(unique=True)
    total = models.PositiveIntegerField(default=0)
    times = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """An order of a customer. The database refuses a negative amount."""

    customer = models.ForeignKey(Customer, models.CASCADE)
    amount = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.customer}: {self.amount}"
