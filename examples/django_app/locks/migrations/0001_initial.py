from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            "Lock",
            [("key", models.TextField(primary_key=True, serialize=False))],
            options={
                "permissions": [("release_lock", "Can release lock")],
                "managed": False,
                "default_permissions": ["view"],
            },
        ),
    ]
