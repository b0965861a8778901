"""A wrong option: its task's calls are refused, workers do not start, and other tasks go on."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from celery import Celery, Task, _state, shared_task, signature
from celery.signals import import_modules

from celery_setnx import OptionError, SingletonTask, check, send_task, singleton
from celery_setnx.cli.asked import imported
from celery_setnx.django import apps as django_apps
from celery_setnx.doctor.trial import LockServerCheck
from celery_setnx.testing import guarded

pytestmark = pytest.mark.usefixtures("alone")

WRONG_KEY = {"key": "acount"}
WRONG = "key of broken names 'acount', which is not a parameter"


def settle(account: int) -> int:
    return account


@pytest.fixture
def app(server) -> Iterator[Celery]:
    app = Celery("refused", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.setnx_url = server.url(1)
    yield app
    app.close()


def declare(app: Celery, name: str = "settle", **options: Any) -> Any:
    options = {"base": SingletonTask, "shared": False, **options}
    return app.task(name=name, **options)(settle)


def broken(app: Celery) -> Any:
    return declare(app, "broken", singleton={"key": "acount"})


def starts(app: Celery) -> None:
    """What a worker does first with the tasks."""
    LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


def options_of(task: Any) -> Any:
    return task._settled().options


# It goes on refusing


def test_request_that_cannot_be_imported_refuses_each_call_and_no_other_task(app):
    """Whatever settling a task raises, its calls are never published unguarded."""
    base = type("Own", (SingletonTask,), {"abstract": True, "Request": "no.such.module:Request"})
    lost, fine = declare(app, "lost", base=base), declare(app, "fine")
    app.finalize()
    for _ in range(2):
        with pytest.raises(OptionError, match=r"lost cannot be guarded \(ModuleNotFoundError"):
            lost.delay(7)
    assert fine.delay(7).id


@pytest.mark.parametrize("declared", ["app", "shared"])
@pytest.mark.parametrize("base", ["SingletonTask", "celery_setnx.SingletonTask"])
def test_base_class_that_is_given_by_its_name_says_what_to_write(app, monkeypatch, declared, base):
    """Celery would derive a class from the text: a metaclass conflict."""
    monkeypatch.setattr(_state, "_get_active_apps", list)  # those of other tests are finalized
    task = app.task if declared == "app" else shared_task
    task(base=base)(settle)
    with pytest.raises(
        OptionError, match=f"settle has base='{base}', which is text, .* write base=SingletonTask"
    ):
        check(app)


CALLS = {
    "delay": lambda task: task.delay(7),
    "signature": lambda task: task.s(7).apply_async(),
    "by name": lambda task: signature("broken", args=(7,), app=task.app).delay(),
    "send_task": lambda task: send_task(task.app, "broken", (7,)),
    "fan_out": lambda task: task.fan_out([(7,)]),
    "locked": lambda task: task.locked(7),
    "eager": lambda task: task.apply((7,), throw=True),
    "past ours": lambda task: Task.apply_async(task.app.tasks["broken"], (7,)),
}


@pytest.mark.parametrize("how", CALLS)
def test_refused_task_refuses_each_of_its_calls(app, locks, how):
    """The first and all that follow, however they are made; others are published."""
    task, plain = broken(app), declare(app, "plain", base=Task)
    sound = declare(app, singleton={"dedupe": "until_started"})
    assert plain.delay(7).id
    for _ in range(2):
        with pytest.raises(OptionError, match=WRONG):
            CALLS[how](task)
        assert plain.delay(7).id
    assert [sound.delay(7).deduplicated for _ in range(2)] == [False, True]
    assert task(7) == 7  # a function that a program calls


BESIDE = {
    "decorated": lambda app: app.task(name="broken", shared=False)(singleton(key="acount")(settle)),
    "forgotten": lambda app: declare(app, "broken", base=Task, singleton={"key": "acount"}),
    "lost": lambda app: app.task(name="broken", shared=False, Strategy="no.such.module:strategy")(
        singleton(settle)
    ),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_refused_task_of_another_base_class_refuses_its_calls(app, kind):
    """Where they are published, too, once the app is finalized; others are published."""
    task, plain = BESIDE[kind](app), declare(app, "plain", base=Task)
    app.finalize()
    assert plain.delay(7).id
    for call in (task.delay, lambda account: task.s(account).apply_async()):
        with pytest.raises(OptionError, match="broken"):
            call(7)
    assert plain.delay(7).id
    with pytest.raises(OptionError, match="broken"):
        starts(app)


def test_refused_setting_refuses_all_guarded_tasks(app):
    """They would lock elsewhere; a plain one is published."""
    app.conf.setnx_ulr = "redis://elsewhere"
    sound, plain = declare(app), declare(app, "plain", base=Task)
    for _ in range(2):
        assert plain.delay(7).id
        with pytest.raises(OptionError, match="did you mean 'setnx_url'"):
            sound.delay(7)


def test_refusal_is_logged_once(app, caplog):
    """When the task is bound: a web process goes on, and says that it does so without this task."""
    broken(app)
    app.finalize()
    check_fails(app, WRONG)
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage()[:56] for record in told] == [
        "broken is refused, and so is each of its calls: key of b"
    ]


def check_fails(app: Celery, *texts: str) -> None:
    with pytest.raises(OptionError) as refused:
        check(app)
    lines = str(refused.value).split("\n")
    assert [line for line in lines if not any(text in line for text in texts)] == []
    assert len(lines) == len(texts)


def test_check_names_all_refusals(app):
    """Of settings and tasks; for the start of a process that publishes."""
    broken(app)
    declare(app, "worse", singleton={"leese": 1})
    declare(app, "worst", base=Task, singleton={"key": "account"})
    check_fails(app, WRONG, "worse has an unknown option 'leese'", "worst has singleton=")


def test_check_of_a_sound_app_is_silent(app):
    declare(app, singleton={"key": "account"})
    assert check(app) is None


def test_worker_does_not_start_with_a_refused_task(app):
    """Not even one whose locks are switched off."""
    broken(app)
    app.finalize()
    with pytest.raises(OptionError, match=WRONG):
        starts(app)


# Options that come late

ANNOTATED = [
    ({"settle": {"singleton": {"limit": 2}}}, {"key": "account", "limit": 2}),
    ({"*": {"singleton": {"limit": 2}}}, {"key": "account", "limit": 2}),
    ({"settle": {"singleton": {"limit": 2}}, "*": {"singleton": {"lease": 60}}}, {"limit": 2, "lease": 60}),
    ([{"settle": {"singleton": {"limit": 2}}}, {"settle": {"singleton": {"limit": 3}}}], {"limit": 2}),
    ({"settle": {"singleton": {"key": ()}}}, {"key": ()}),
]


@pytest.mark.parametrize("by", ["attribute", "decorator"])
@pytest.mark.parametrize(("annotations", "found"), ANNOTATED)
def test_annotations_are_laid_over_the_tasks_options(app, annotations, found, by):
    """What they do not name stays as the task has it."""
    app.conf.task_annotations = annotations
    if by == "attribute":
        task = declare(app, singleton={"key": "account"})
    else:
        base = {"base": SingletonTask, "name": "settle", "shared": False}
        task = app.task(**base)(singleton(key="account")(settle))
    app.finalize()
    assert {name: getattr(options_of(task), name) for name in found} == found


REFUSED_LATE = [
    ({"singleton": {"key": "acount"}}, {}, "names 'acount'"),
    ({"singleton": "wait"}, {}, "must be a mapping"),
    ({"ignore_result": True}, {"on_conflict": "join"}, "there is no result to share"),
]


@pytest.mark.parametrize(("annotation", "options", "said"), REFUSED_LATE)
def test_annotation_that_does_not_go_with_the_task_is_refused(app, annotation, options, said):
    """As if the task had it itself."""
    app.conf.task_annotations = {"settle": annotation}
    task = declare(app, singleton=options)
    with pytest.raises(OptionError, match=said):
        task.delay(7)
    check_fails(app, said)


def test_annotation_of_a_decorated_task_of_another_base_is_refused(app):
    """Nobody would read it."""
    app.conf.task_annotations = {"settle": {"singleton": {"limit": 2}}}
    app.task(name="settle", shared=False)(singleton(key="account")(settle))
    check_fails(app, "is no SingletonTask")


def set_on_task(task: Any, options: Any) -> None:
    task.singleton = options


def set_on_class(task: Any, options: Any) -> None:
    type(task).singleton = options


def set_in_place(task: Any, options: Any) -> None:
    type(task).singleton.update(options)


def set_for_the_app(task: Any, options: Any) -> None:
    task.app.conf.setnx_defaults = options


LATE = [set_on_task, set_on_class, set_in_place, set_for_the_app]


@pytest.mark.parametrize("late", LATE)
def test_options_that_come_after_the_task_was_bound_are_honoured_or_refused(app, late):
    """By the next call, and by a worker that starts."""
    task = declare(app, singleton={"lease": 20})
    app.finalize()
    task = app.tasks["settle"]
    before = task.lock_key(7)
    late(task, {"scope": "late"})
    assert task.lock_key(7) != before
    starts(app)
    with pytest.raises(OptionError, match="names 'acount'"):
        (late(task, {"key": "acount"}), task.delay(7))
    with pytest.raises(OptionError, match="names 'acount'"):
        starts(app)


def test_result_that_is_ignored_late_is_no_result_to_join(app):
    """Checked with each call, as the options are."""
    declare(app, singleton={"on_conflict": "join"})
    app.finalize()
    task = app.tasks["settle"]
    type(task).ignore_result = True
    with pytest.raises(OptionError, match="there is no result to share"):
        task.delay(7)


def test_options_that_a_task_gives_itself_are_read(app):
    """In its constructor, and when it is bound."""

    class Itself(SingletonTask):
        name = "itself"

        def __init__(self) -> None:
            self.singleton = {"key": "account", "lease": 60}

        def run(self, account: int) -> int:
            return account

    class WhenBound(SingletonTask):
        name = "bound"
        run = staticmethod(settle)

        @classmethod
        def on_bound(cls, app: Celery) -> None:
            cls.singleton = {"key": "account", "lease": 60}

    for task in (app.register_task(Itself()), app.register_task(WhenBound())):
        assert (options_of(task).key, options_of(task).lease) == ("account", 60)


def test_task_that_is_named_in_its_constructor_locks_under_that_name(app):
    """Several of one class would share one guard, and are refused."""

    class Named(SingletonTask):
        run = staticmethod(settle)

        def __init__(self, name: str) -> None:
            self.name = name

    task = app.register_task(Named("one"))
    assert task.lock_key(7).startswith("setnx:{one:")
    app.register_task(Named("two"))
    check_fails(app, "the tasks one, two are one class; give each a class of its own")


def test_refused_run_fails(app):
    """In a worker, too, that got the task late."""
    task = broken(app)
    with guarded(app), pytest.raises(OptionError, match=WRONG):
        task.apply((7,), throw=True)


@pytest.mark.parametrize("own", [{}, {"singleton": {"key": "account", "lease": 20}}])
def test_options_that_a_test_has_patched_are_gone_with_the_patch(app, own):
    """Those of the task are there again, and those of its class."""
    base = type("Base", (SingletonTask,), {"abstract": True, "singleton": {"scope": "base"}})
    task = declare(app, base=base, **own)
    before, had = options_of(task), vars(type(task)).get("singleton")
    for _ in range(2):
        with mock.patch.object(task, "singleton", {"key": (), "lease": 5}):
            assert (options_of(task).lease, options_of(task).scope) == (5, "base")
            task.singleton = {"lease": 6}
            assert options_of(task).lease == 6
        assert (options_of(task), vars(type(task)).get("singleton")) == (before, had)
    with pytest.raises(OptionError, match="names 'acount'"), mock.patch.object(task, "singleton", WRONG_KEY):
        raise AssertionError
    assert options_of(task) == before
    with pytest.raises(AttributeError, match="singleton"):
        del task.singleton


# Django


def django_check(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Any:
    current = SimpleNamespace(_get_current_object=lambda: app)
    monkeypatch.setattr(django_apps, "current_app", current)
    return django_apps.SetnxConfig("celery_setnx.django", django_apps).check_tasks()


IMPORTS = {
    "Django's check": lambda app, monkeypatch: django_check(app, monkeypatch),
    "check": lambda app, _: check(app),
    "command": lambda app, _: imported(app),
    "Celery": lambda app, _: app.loader.import_default_modules(),
    "worker": lambda app, _: app.loader.init_worker(),
}


@pytest.mark.parametrize("who", IMPORTS)
def test_tasks_are_imported_once(app, monkeypatch, who):
    """Receivers of the signal may do what is not to be done twice."""
    heard: list[Any] = []
    import_modules.connect(lambda **_: heard.append(who), sender=app, weak=False)
    if who != "Celery":  # its fixup for Django runs all checks when it hears of it
        import_modules.connect(lambda **_: django_check(app, monkeypatch), sender=app, weak=False)
    broken(app)
    with suppress(OptionError):
        IMPORTS[who](app, monkeypatch)
    assert heard == [who]
    found = django_check(app, monkeypatch)
    assert [message.id for message in found] == ["celery_setnx.E001"] * (
        who != "worker"
    )  # which refuses itself
    check_fails(app, WRONG)
    assert heard == [who]


def test_tasks_that_cannot_be_imported_are_a_warning_until_they_can(app, monkeypatch, tmp_path):
    """`migrate` may be what they need; the check imports them anew each time."""
    app.conf.imports = ["no_such_module_of_tasks"]
    monkeypatch.syspath_prepend(tmp_path)
    broken(app)
    for _ in range(2):
        (found,) = django_check(app, monkeypatch)
        assert (found.id, found.is_serious()) == ("celery_setnx.W001", False)
        assert "ModuleNotFoundError: No module named 'no_such_module_of_tasks'" in found.msg
        assert "a worker" in found.hint
    (tmp_path / "no_such_module_of_tasks.py").touch()
    importlib.invalidate_caches()
    assert [message.id for message in django_check(app, monkeypatch)] == ["celery_setnx.E001"]


PROJECT = """
from celery import Celery, shared_task
from celery_setnx import SingletonTask
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""
TASKS = """
from celery import shared_task
from celery_setnx import SingletonTask, singleton

@shared_task(name="broken", base=SingletonTask, singleton={"key": "acount"})
def broken(account): ...

@shared_task(name="plain")
def plain(account): ...
"""


@pytest.mark.parametrize(
    ("tasks", "ends", "said"),
    [
        (TASKS, 1, f"(celery_setnx.E001) {WRONG}"),
        (TASKS.replace("acount", "account"), 0, "System check identified no issues"),
        ("from celery_setnx import singleton\nsingleton(leese=1)(print)\n", 1, "did you mean 'lease'"),
        ("import no_such_module", 0, "(celery_setnx.W001) The options of guarded tasks were not checked"),
    ],
    ids=["refused", "sound", "at import", "lost"],
)
def test_check_of_django_finds_what_is_refused(tmp_path, tasks, ends, said):
    """`manage.py check`, with our app among the installed ones; it imports the tasks itself."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text(PROJECT)
    (tmp_path / "shop" / "tasks.py").write_text(tasks)
    (tmp_path / "shop" / "settings.py").write_text(
        "SECRET_KEY = 'x'\nINSTALLED_APPS = ['celery_setnx.django', 'shop']\n"
        "CELERY_BROKER_URL = 'memory://'\nCELERY_SETNX_URL = 'redis://localhost:1'\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    found = subprocess.run(
        [sys.executable, "-m", "django", "check"],
        env={**os.environ, "PYTHONPATH": paths, "DJANGO_SETTINGS_MODULE": "shop.settings"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, said in found.stderr + found.stdout) == (ends, True), found.stderr
