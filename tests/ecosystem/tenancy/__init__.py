"""A Django project whose tenants have a schema each: django-tenants, and tenant-schemas-celery."""
