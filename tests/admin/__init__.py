"""The page "Locks" of examples/django_app in a real browser, beside a real worker."""
