"""A simulated Redis: the commands that celery_setnx sends, on immutable values and a virtual clock."""
