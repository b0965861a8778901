"""Makes every task a SingletonTask with a key that is unique for every call, in each Python that finds this.

Python imports it at its start, before the suite's modules name `celery.Task`, and so does each process that a
test starts. What runs and what acquires a lock is written to a file: it shows that everything was guarded.
"""

import json
import os
from uuid import uuid4

import celery
from celery.signals import task_prerun

from celery_setnx import SingletonTask
from celery_setnx.signals import lock_acquired

JOURNAL = os.open(os.environ["CELERY_SUITE_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def unique(*_args, **_kwargs):
    """A key that no other call has."""
    return uuid4().hex


class Guarded(SingletonTask):
    """What every task of the suite is."""

    abstract = True
    singleton = {"key": unique, **json.loads(os.environ["CELERY_SUITE_OPTIONS"])}


class Swallowing(Guarded):
    """A defect for the suite to find: of what a member of a chord returns, its chord sees nothing."""

    abstract = True

    def __call__(self, *args, **kwargs):
        """As the guard does it, but for the result."""
        is_member = self.request.called_directly is False and self.request.chord
        result = super().__call__(*args, **kwargs)
        return None if is_member else result


def write(word, task_id):
    """A line that no other process can break."""
    os.write(JOURNAL, f"{word} {task_id}\n".encode())


@task_prerun.connect(weak=False)
def note_run(task=None, task_id=None, **_rest):
    """A worker is about to call a task of the suite; those of Celery itself are not guarded."""
    if not task.name.startswith("celery.") and not task.request.is_eager:
        write("run", task_id)


@lock_acquired.connect(weak=False)
def note_lock(task_id=None, **_rest):
    """The guard has let it through."""
    write("lock", task_id)


celery.Celery.task_cls = celery.Task = Swallowing if "CELERY_SUITE_FLAW" in os.environ else Guarded
