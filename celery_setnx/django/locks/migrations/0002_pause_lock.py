"""The permission to pause a key or a task."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations


class Migration(migrations.Migration):  # type: ignore[misc]
    """Of a model without a table."""

    dependencies: ClassVar[list[Any]] = [("setnx_locks", "0001_initial")]
    operations: ClassVar[list[Any]] = [
        migrations.AlterModelOptions(
            "Lock",
            {
                "permissions": [("release_lock", "Can release lock"), ("pause_lock", "Can pause lock")],
                "managed": False,
                "default_permissions": ["view"],
            },
        ),
    ]
