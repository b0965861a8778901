"""The lowest and the newest versions of what celery_setnx is installed beside: `python -m tests.versions`."""
