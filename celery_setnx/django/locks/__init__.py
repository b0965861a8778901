"""The page "Locks" of Django's admin, an app to install; see docs/django.md."""
