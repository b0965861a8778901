"""Customers in the admin: an action asks for their totals now, and says who is queued already."""

from django.contrib import admin

from .models import Customer
from .tasks import sum_up


@admin.register(Customer)
class CustomerAdmin(admin.ModelAdmin):
    list_display = ["name", "total"]
    actions = ["sum_up_now"]

    @admin.action(description="Sum up now")
    def sum_up_now(self, request, queryset):
        results = [sum_up.delay(customer.pk) for customer in queryset]
        queued = sum(result.deduplicated for result in results)
        self.message_user(request, f"{len(results) - queued} sent, {queued} queued already")

    def save_model(self, request, obj, form, change):
        super().save_model(request, obj, form, change)  # in a transaction of the admin's
        sum_up.delay_on_commit(obj.pk)
