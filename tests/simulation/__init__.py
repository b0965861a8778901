"""A simulated Redis: the commands that celery_setnx sends, on immutable values, with a clock of the test's."""
