"""The settings of the shop, with tasks whose bodies a test can end."""

from shop.settings import *  # noqa: F403

CELERY_IMPORTS = ["tests.admin.tasks"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # the default takes long on purpose
