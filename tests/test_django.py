"""Django: calls that are published when the transaction commits, and what the base classes are."""

import os
from collections.abc import Callable, Iterator

import django
import pytest
import redis
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.conf import settings
from django.db import connection, connections
from django.db.transaction import atomic
from django.utils.functional import empty

from celery_setnx import DuplicateTask, SingletonTask
from celery_setnx.lock.names import mark_name
from tests import forks
from tests.harness import lock_keys

NOWHERE = "django-nowhere"


@pytest.fixture(scope="module", autouse=True)
def database() -> Iterator[None]:
    """Django with an SQLite in memory, in this process; forgotten afterwards."""
    memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": memory}, LOGGING_CONFIG=None)
    django.setup()
    yield
    connections.close_all()
    settings._wrapped = empty


@pytest.fixture
def broker(server) -> Iterator[redis.Redis]:
    """A client of the broker's database; the queue without a consumer is empty before and after."""
    with redis.Redis.from_url(server.url(0), decode_responses=True) as client:
        client.delete(NOWHERE)
        yield client
        client.delete(NOWHERE)


@pytest.fixture
def work(server, locks, broker) -> SingletonTask:
    """A task with both bases; its messages go where nobody consumes them."""
    app = Celery("shop", set_as_current=False, broker=server.url(0), backend=server.url(0))
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_default_queue=NOWHERE)

    class SingletonDjangoTask(SingletonTask, DjangoTask):
        abstract = True
        singleton = {"dedupe": "until_started"}

    @app.task(shared=False, base=SingletonDjangoTask, name="shop.both", singleton={"key": "name"})
    def work(name: str) -> None: ...

    return app.tasks[work.name]


@pytest.fixture
def marked(work, locks) -> Callable[[str], bool]:
    """Whether a call of the task with this name is marked as queued."""
    return lambda name: bool(locks.exists(mark_name(work.lock_key(name))))


PUBLISH = {
    "delay_on_commit": lambda task, name: task.delay_on_commit(name),
    "apply_async_on_commit": lambda task, name: task.apply_async_on_commit((name,), countdown=1),
}


@pytest.mark.parametrize("publish", PUBLISH.values(), ids=PUBLISH)
def test_call_on_commit_is_published_and_marked_when_it_commits(work, broker, marked, publish):
    """Until then there is neither a message nor a mark, and two equal calls are one message when it commits.

    Outside a transaction it is published at once.
    """
    with atomic():
        for name in ("a", "a", "b"):
            publish(work, name)
        assert (broker.llen(NOWHERE), marked("a"), marked("b")) == (0, False, False)
    assert (broker.llen(NOWHERE), marked("a"), marked("b")) == (2, True, True)
    publish(work, "c")
    assert (broker.llen(NOWHERE), marked("c")) == (3, True)


@pytest.mark.parametrize(
    ("publish", "sent"),
    [*((publish, 0) for publish in PUBLISH.values()), (SingletonTask.delay, 1)],
    ids=[*PUBLISH, "delay"],
)
def test_rolled_back_transaction_leaves_only_what_did_not_wait_for_it(work, broker, locks, publish, sent):
    """Of a call on commit there is neither a message nor a mark, so the next call is no duplicate.

    Plain delay() does not wait for the commit: its message and its mark survive the rollback.
    """
    with pytest.raises(ZeroDivisionError), atomic():
        publish(work, "a")
        raise ZeroDivisionError
    assert (broker.llen(NOWHERE), len(lock_keys(locks))) == (sent, sent)
    assert work.delay("a").deduplicated == bool(sent)


def test_rolled_back_savepoint_takes_its_call_along(work, broker, marked):
    """Only the calls of what was committed are published and marked."""
    with atomic():
        work.delay_on_commit("outer")
        with pytest.raises(ZeroDivisionError), atomic():
            work.delay_on_commit("inner")
            raise ZeroDivisionError
    assert (broker.llen(NOWHERE), marked("outer"), marked("inner")) == (1, True, False)


def test_duplicate_of_a_call_queued_before_the_transaction_is_not_published(work, broker):
    """The mark is asked at the commit, whenever the other call was made."""
    with atomic():
        work.delay_on_commit("a")
        first = work.delay("a")  # as another process would, meanwhile
    assert not first.deduplicated
    assert broker.llen(NOWHERE) == 1


def test_duplicate_that_raises_on_commit_raises_when_all_is_committed(work, broker):
    """on_duplicate="raise" comes too late to undo anything, and Django drops the hooks that follow."""
    with connection.cursor() as cursor:
        cursor.execute("create table if not exists sold (what text)")
        cursor.execute("delete from sold")
    work.delay("a")
    with pytest.raises(DuplicateTask), atomic(), connection.cursor() as cursor:
        cursor.execute("insert into sold values ('book')")
        work.apply_async_on_commit(("a",), singleton={"on_duplicate": "raise"})
        work.delay_on_commit("b")
    with connection.cursor() as cursor:
        assert cursor.execute("select what from sold").fetchall() == [("book",)]
    assert broker.llen(NOWHERE) == 1


PROJECT = """
from celery import Celery
from celery.contrib.django.task import DjangoTask
from celery_setnx import SingletonTask, singleton
from tests.app import body, make_app

class SingletonDjangoTask(SingletonTask, DjangoTask):
    abstract = True

app = make_app("shop")
whole_app = Celery("whole", set_as_current=False, broker=app.conf.broker_url, task_cls=SingletonDjangoTask)

@app.task
def plain(): ...

@app.task
@singleton
def decorated(): ...

@app.task(base=SingletonTask)
def single(): ...

@app.task(base=SingletonDjangoTask, singleton={"key": "name"})
def both(name):
    return body(name)

@whole_app.task(shared=False)
def everywhere(): ...

has_on_commit = {
    task.name.removeprefix("shop.") for task in (plain, decorated, single, both, everywhere)
    if hasattr(task, "delay_on_commit") and hasattr(task, "apply_async_on_commit")
}
"""


@pytest.fixture
def project(tmp_path, server) -> dict[str, str]:
    """The environment of a process of a Django project, where Celery's fixup chooses the app's task class."""
    (tmp_path / "shop_settings.py").write_text("SECRET_KEY = 'x'\nINSTALLED_APPS = []\n")
    (tmp_path / "shop.py").write_text(PROJECT)
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    return {"DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": paths}


def test_committed_call_runs_under_the_lock_of_its_key(work, project, start_worker, journal, locks):
    """A real worker of the Django project runs what was committed, and gives its mark up."""
    start_worker("shop", queues=NOWHERE, concurrency=1, environment=project)
    key = work.lock_key("a")
    with atomic():
        work.delay_on_commit("a")
        assert not journal.entries(key=key)
    (released,) = journal.wait_for("released", key=key)
    assert journal.words(released["task_id"])[:4] == ["acquired", "start", "end", "released"]
    assert not [*locks.scan_iter("*:queued")]


def classes() -> None:
    """In a process of the project: which task has what."""
    import shop

    print(sorted(shop.has_on_commit))
    print(shop.everywhere._guard is None, shop.whole_app.tasks["celery.chord_unlock"]._guard is None)


def test_task_class_of_a_django_project_is_replaced_by_a_base(project, tmp_path):
    """A task with base=SingletonTask has no delay_on_commit; with both bases it has, by base or by task_cls.

    The fixup leaves a task_cls alone that the project chose: every task is guarded then, but Celery's own.
    """
    code, said = forks.ended(tmp_path, classes, **project)
    assert code == 0, said
    assert said.splitlines() == ["['both', 'decorated', 'everywhere', 'plain']", "False True"]
