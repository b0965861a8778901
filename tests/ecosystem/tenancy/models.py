"""Who the tenants are."""

from django_tenants.models import DomainMixin, TenantMixin


class Tenant(TenantMixin):
    """A tenant, with the schema of its name."""


class Domain(DomainMixin):
    """Where a tenant is served; django-tenants wants it."""
