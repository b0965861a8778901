"""Placing orders, all or none; and what they come to."""

from django.db import IntegrityError, transaction
from django.http import JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .models import Customer, Order
from .tasks import sum_up


@csrf_exempt
@require_POST
def place(request, name):
    try:
        with transaction.atomic():
            customer, _ = Customer.objects.get_or_create(name=name)
            for amount in request.POST.getlist("amount"):
                Order.objects.create(customer=customer, amount=int(amount))
                sum_up.delay_on_commit(customer.pk)
    except IntegrityError:
        return JsonResponse({"error": "an amount is negative; nothing is ordered"}, status=400)
    return JsonResponse({"customer": name}, status=202)


def show(request, name):
    customer = get_object_or_404(Customer, name=name)
    holder = sum_up.locked(customer.pk)
    return JsonResponse(
        {
            "customer": name,
            "total": customer.total,
            "times": customer.times,
            "is_summed_up_by": holder and holder.task_id,
        }
    )
