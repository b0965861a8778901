"""The settings of the project; TENANCY_SOCKET is the directory of the database's socket."""

import os

from tests.ecosystem.postgres import USER

SECRET_KEY = "x"
DATABASES = {
    "default": {
        "ENGINE": "django_tenants.postgresql_backend",
        "NAME": USER,
        "USER": USER,
        "HOST": os.environ["TENANCY_SOCKET"],
    }
}
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
SHARED_APPS = ["django_tenants", "tests.ecosystem.tenancy"]
TENANT_APPS = ["django.contrib.contenttypes"]
INSTALLED_APPS = [*SHARED_APPS, *TENANT_APPS]
TENANT_MODEL, TENANT_DOMAIN_MODEL = "tenancy.Tenant", "tenancy.Domain"
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = True
LOGGING_CONFIG = None
