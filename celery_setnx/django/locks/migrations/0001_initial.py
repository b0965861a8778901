"""The permissions to see locks, to release one, and to pause keys and tasks."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    """Of a model without a table."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            "Lock",
            [("key", models.TextField(primary_key=True, serialize=False))],
            options={
                "permissions": [("release_lock", "Can release lock"), ("pause_lock", "Can pause lock")],
                "managed": False,
                "default_permissions": ["view"],
            },
        ),
    ]
