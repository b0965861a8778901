"""What the admin and its permissions call a lock. There is no table: locks are in Redis."""

from django.db import models


class Lock(models.Model):  # type: ignore[misc]
    """A lock of a task, by its key in Redis."""

    key = models.TextField(primary_key=True)

    class Meta:
        """No table, and permissions."""

        managed = False
        default_permissions = ["view"]
        permissions = [("release_lock", "Can release lock"), ("pause_lock", "Can pause lock")]

    def __str__(self) -> str:
        return str(self.key)
