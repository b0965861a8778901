"""The page "Locks" of the admin. Copy this directory into a project; see docs/django.md."""
