"""The Celery configurations of public projects, one a module: what is peculiar in each."""
