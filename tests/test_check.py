"""What the static check finds in an app's settings and its tasks' options, and what it leaves alone."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Queue
from kombu.common import Broadcast

from celery_setnx import OptionError, SingletonTask, UnkeyableCall, singleton
from celery_setnx.doctor import check
from celery_setnx.doctor.app import Finding
from celery_setnx.doctor.server import examine
from celery_setnx.doctor.trial import LockServerCheck
from celery_setnx.options import settings
from celery_setnx.request import SingletonRequest

pytestmark = pytest.mark.usefixtures("alone")

LATE = {"acks_late": True, "time_limit": 3601}
PATIENT = {
    "dedupe": "until_done",
    "queue_lease": 10,
    "retry_delay_max": 9000,
    "task": {"acks_late": True, "time_limit": 9000, "default_retry_delay": 9000},
}


def one_name(user_id: int) -> None: ...


def other_name(account_id: int) -> None: ...


class DerivedRequest(SingletonRequest):
    """Derived from ours."""


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app with the broker and the results on a Redis that does not answer."""
    app = Celery("checked", set_as_current=False)
    app.conf.update(broker_url="redis://localhost:1/0", result_backend="redis://localhost:1/1")
    yield app
    app.close()  # else a shared task that is declared later would be bound to it, and be refused


def add(app: Celery, name: str = "work", function: Callable[..., Any] | None = None, **options: Any) -> None:
    """A task with these options of ours, and `task`, those of Celery's."""
    celerys = options.pop("task", {})

    def body(user_id: int, reason: str = "") -> None: ...

    body.__name__ = name
    app.task(base=SingletonTask, name=name, singleton=options, shared=False, **celerys)(function or body)


def problems(app: Celery) -> list[Finding]:
    return [found for found in check(app) if found.level != "ok"]


def subjects(app: Celery) -> list[tuple[str, str]]:
    return [(found.level, found.subject) for found in problems(app)]


def only(app: Celery, subject: str) -> Finding:
    """The one problem of this subject."""
    (found,) = (found for found in problems(app) if found.subject == subject)
    return found


def start_worker_check(app: Celery) -> None:
    """What a worker does when it starts."""
    LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


TIMED = {"expires": 60, "countdown": 5}
DAILY = {"dedupe": "until_done", "dedupe_for": 86_400}

# Options and settings that go together.
SOUND = [
    ({}, {}),
    ({"on_conflict": "wait", "max_wait": 60}, {}),
    ({"on_conflict": "join"}, {}),
    ({"on_conflict": "retry", "retry_delay_max": 600, "max_wait": 1}, {}),
    ({"on_conflict": "skip", "skip_result": None}, {}),
    ({"on_conflict": lambda conflict: conflict.skip(), "skip_result": 1, "queue_lease": 7200}, {}),
    ({"dedupe": "until_started", "skip_result": 0, "on_conflict": "wait"}, {}),
    ({"dedupe": "until_done", "on_duplicate": "raise", "queue_lease": 7200}, {}),
    ({"hold_on_retry": True, "queue_lease": 60}, {}),
    ({"key": "user_id", "scope": "users"}, {}),
    ({"limit": 5, "on_conflict": "wait", "at_least_for": 1, "hold_on_retry": True}, {}),
    ({"rate": "10/m"}, {}),
    ({"rate": "10/m", "max_wait": 60, "queue_lease": 60}, {}),
    ({"rate": "10/m", "max_wait": 1, "on_conflict": lambda conflict: conflict.wait()}, {}),
    ({"rate": (6, 60), "at_least_for": 10}, {}),
    ({"rate": (7, 65), "at_least_for": 10}, {}),  # the seventh may start just within the period
    ({"rate": "12/m", "limit": 2, "at_least_for": 10}, {}),
    ({"limit": 5, "dedupe": "until_started", "on_duplicate": "raise", "queue_lease": 7200}, {}),
    ({"at_least_for": 3600, "at_most_for": 7200}, {}),
    ({"task": {"acks_late": True, "time_limit": 1800}}, {}),
    ({"task": {"Request": DerivedRequest}}, {}),
    ({"lease": 4}, {}),
    ({"dedupe": "until_started", "on_duplicate": "replace", "debounce_max": 30}, {}),
    ({"debounce": 5, "debounce_max": 30, "debounce_leading": True, "skip_result": 0}, {}),
    # A quarter of the visibility timeout; RabbitMQ has none.
    ({"debounce": 900, "debounce_max": 900}, {}),
    ({"debounce": 901, "debounce_max": 901}, {"broker_url": "amqp://localhost"}),
    ({"debounce": 5}, {"beat_schedule": {"a": {"task": "work"}, "b": {"task": "other", "options": TIMED}}}),
    ({"on_conflict": "retry", "task": {"serializer": "pickle"}}, {}),
    ({"lease": 600}, {}),
    ({"at_most_for": 100}, {}),
    ({"at_most_for": 100, "task": {"time_limit": 130}}, {}),
    ({"at_most_for": 100, "task": {"time_limit": 500, "soft_time_limit": 90}}, {}),
    ({"task": {**LATE, "acks_late": False}}, {}),
    ({"task": {"acks_late": True}}, {}),
    ({"task": LATE}, {"broker_transport_options": {"visibility_timeout": 7200}}),
    ({"retry_delay_max": 900}, {}),
    ({"dedupe": "until_done"}, {}),
    # Results are kept for as long as they are given away: a day, unless it is said.
    ({**DAILY, "on_conflict": "wait", "skip_result": 0}, {}),
    ({**DAILY, "dedupe_for": 604_800}, {"result_expires": timedelta(days=7)}),
    ({**DAILY, "dedupe_for": 604_800}, {"result_expires": None}),
    # RabbitMQ knows when a consumer is gone.
    (PATIENT, {"broker_url": "amqp://localhost"}),
    (PATIENT, {"broker_url": "memory://"}),
    # setnx_defaults are for all tasks, whichever they suit.
    ({"on_conflict": "skip"}, {"setnx_defaults": {"max_wait": 60, "on_duplicate": "raise"}}),
]


@pytest.mark.parametrize(("options", "conf"), SOUND)
def test_sound_task_has_no_findings_but_a_fine_one(app, options, conf):
    """No noise: what may be done is not warned of."""
    app.conf.update(conf)
    add(app, **options)
    assert [(found.level, found.subject) for found in check(app)] == [("ok", "tasks")]


@pytest.mark.parametrize(
    ("subject", "options", "conf", "said"),
    [
        # Too short for one lost reply, or so long that a dead host blocks its keys.
        ("lease", {"lease": 3.9}, {}, ""),
        ("lease", {"lease": 601}, {}, ""),
        # at_most_for ends the renewals, a lease later the lock; the time limit, also the app's, ends the run.
        ("at_most_for", {"at_most_for": 100, "task": {"time_limit": 131}}, {}, ""),
        ("at_most_for", {"at_most_for": 100, "task": {"soft_time_limit": 200}}, {}, ""),
        ("at_most_for", {"at_most_for": 100}, {"task_time_limit": 500}, ""),
        # A run that may be longer than the visibility timeout (kombu's default for SQS is half an hour);
        # without a stored result nobody knows that the first has succeeded.
        ("visibility", {"task": LATE}, {}, "is dropped if the first succeeds"),
        ("visibility", {"task": {**LATE, "ignore_result": True}}, {}, "is dropped if the first succeeds"),
        ("visibility", {"task": {"acks_late": True, "time_limit": 1801}}, {"broker_url": "sqs://"}, ""),
        # A line holds no pickles.
        ("pickle", {"on_conflict": "wait", "task": {"serializer": "pickle"}}, {}, "polls instead"),
        ("pickle", {"dedupe": "until_started"}, {"task_serializer": "pickle"}, "its calls are pickled"),
        # It is delivered again and again before it is due.
        ("visibility", {"task": {"default_retry_delay": 3601}}, {}, "default_retry_delay of 3601 s"),
        # A quarter of the visibility timeout is the most that a call waits at a time.
        ("visibility", {"retry_delay_max": 901}, {}, ""),
        # A dead worker's calls come back after the visibility timeout.
        ("queue_lease", {"dedupe": "until_done", "queue_lease": 3599}, {}, ""),
        # What duplicates get is gone while there are duplicates.
        ("dedupe_for", {**DAILY, "dedupe_for": 86_401}, {}, "results are kept for 86400 s (result_expires)"),
        ("dedupe_for", DAILY, {"result_expires": 3600}, "results are kept for 3600 s"),
        ("dedupe_for", DAILY, {"result_expires": timedelta(hours=23)}, "results are kept for 82800 s"),
        # Options without effect are named.
        ("useless", {"on_conflict": "skip", "max_wait": 5}, {}, "max_wait ("),
        ("useless", {"on_conflict": "raise", "max_wait": 5}, {}, "max_wait ("),
        ("useless", {"on_conflict": "wait", "skip_result": 5}, {}, "skip_result ("),
        ("useless", {"on_duplicate": "raise"}, {}, "on_duplicate ("),
        ("useless", {"queue_lease": 60}, {}, "queue_lease ("),
        ("useless", {"rate": "10/m", "skip_result": 5}, {}, "skip_result ("),
        ("useless", {"dedupe": "until_started", "debounce_max": 30}, {}, "debounce_max ("),
        # Permits that rest for longer than the pace would have calls wait.
        ("rate", {"rate": "7/m", "at_least_for": 10}, {}, "at most 6 calls start in 60 s"),
        ("rate", {"rate": "13/m", "limit": 2, "at_least_for": 10}, {}, "at most 12 calls start in 60 s"),
        ("useless", {"hold_on_retry": True, "task": {"max_retries": 0}}, {}, "hold_on_retry ("),
        # Nothing is locked.
        ("eager", {}, {"task_always_eager": True}, ""),
        # Its workers would not start.
        ("join", {"on_conflict": "join"}, {"result_backend": None}, ""),
    ],
)
def test_what_does_not_go_together_is_told(app, subject, options, conf, said):
    """One warning with its reason, or an error where no worker would start."""
    app.conf.update(conf)
    add(app, **options)
    assert subjects(app) == [("error" if subject == "join" else "warning", subject)]
    (found,) = problems(app)
    assert said in f"{found.what} {found.why}"


@pytest.mark.parametrize("backend", ["redis://127.0.0.1:1/0/0", "nowhere://a"])
def test_result_backend_that_cannot_be_made_ends_no_check(app, backend):
    """Celery says so when a worker starts; the tasks are looked at all the same."""
    app.conf.update(result_backend=backend, result_expires=86_400)
    add(app, **DAILY)
    assert "tasks" in {found.subject for found in check(app)}


@pytest.mark.parametrize(
    ("options", "conf", "said", "why"),
    [
        (
            {"debounce": 901, "debounce_max": 1000},
            {},
            "debounce of work is 901 s, and the broker delivers again after 3600 s (visibility_timeout): "
            "make it 900 s or less",
            "Workers of this app do not start.",
        ),
        (
            {"debounce": 5, "task": {"expires": 60}},
            {},
            "a call of work has expires, and on_duplicate='replace': it would replace older calls, and not "
            "run for a while, or ever; leave out expires.",
            "Each call is refused when it is published.",
        ),
        (
            {"dedupe": "until_started", "on_duplicate": "replace"},
            {"beat_schedule": {"hourly": {"task": "work", "options": {"countdown": 5}}}},
            "In beat_schedule 'hourly': a call of work has countdown, and on_duplicate='replace': it would "
            "replace older calls, and not run for a while, or ever; leave out countdown, or use debounce=.",
            "Beat cannot send it.",
        ),
    ],
)
def test_times_that_no_replacing_call_may_have_are_an_error(app, options, conf, said, why):
    """In the words in which a worker, or the publisher, refuses them."""
    app.conf.update(conf)
    add(app, **options)
    found = only(app, "debounce")
    assert (found.level, found.why) == ("error", why)
    assert found.what.startswith(said)


def test_worker_with_too_long_a_debounce_does_not_start(app):
    """As `check` says."""
    add(app, debounce=901, debounce_max=1000)
    with pytest.raises(OptionError, match=r"debounce of work is 901 s, and the broker delivers again after"):
        start_worker_check(app)


def test_join_with_a_result_backend_that_cannot_be_made_is_refused(app):
    """In one finding, as without a backend that is read by all."""
    app.conf.result_backend = "redis://127.0.0.1:1/0/0"
    add(app, on_conflict="join")
    found = only(app, "join")
    assert found.level == "error"
    assert "result_backend cannot be used (ValueError)" in found.what


@pytest.mark.parametrize(
    ("task", "conf"),
    [({"ignore_result": True}, {}), ({}, {"task_ignore_result": True}), ({}, {"result_backend": None})],
)
def test_window_of_a_task_whose_results_are_not_stored_is_a_note(app, task, conf):
    """Its duplicates get an id and no result, which may be all that is wanted."""
    app.conf.update(conf, result_expires=60)
    add(app, **DAILY, task=task)
    (found,) = check(app)
    assert (found.level, found.subject) == ("note", "dedupe_for")
    assert "its results are not stored" in found.what


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_wait": 59}, "a call that waits for more than 59 s fails with LockTimeout"),
        ({"max_wait": 59, "on_conflict": "retry"}, "may be 60 s after the last one"),
        (
            {"task": {"rate_limit": "10/m"}},
            "Celery's rate_limit of 10/m. The rate is per key, across all",
        ),
    ],
)
def test_what_a_rate_comes_to_beside_other_options_is_a_note(app, options, said):
    """It may be what is wanted."""
    add(app, rate="10/m", **options)
    (found,) = check(app)
    assert (found.level, found.subject) == ("note", "rate")
    assert said in f"{found.what} {found.why}"


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"task_routes": {"work": {"queue": "all"}}}, "a copy cannot wait"),
        ({"task_routes": {"work": {"queue": "all"}}, "broker_url": "memory://"}, "its own worker"),
        ({"task_routes": {"work": {"exchange": "all", "routing_key": "any"}}}, "a copy cannot wait"),
        ({"task_routes": {"work": {"queue": "celery"}}}, None),
        ({"task_routes": [lambda name, args, *_, **__: args[0]]}, None),
        ({}, None),
    ],
)
def test_guarded_task_that_a_fanout_exchange_copies_is_told(app, caplog, conf, said):
    """By `check`, and by a worker that starts. Other tasks may be broadcast."""
    app.conf.update(task_queues=[Queue("celery"), Broadcast("all")], task_default_queue="celery", **conf)
    add(app)
    assert subjects(app) == [("warning", "queue")] * (said is not None)
    assert said is None or said in problems(app)[0].why
    start_worker_check(app)
    assert ("fanout exchange" in caplog.text) == (said is not None)


def test_task_whose_self_is_an_argument_is_told(app):
    """Every call would have to give it; an error at a call asks the same. With bind=True it is none."""

    def work(self: Any, user_id: int) -> None: ...

    add(app, "bound", work, task={"bind": True})
    assert not problems(app)
    add(app, function=work)
    assert subjects(app) == [("warning", "bind")]
    with pytest.raises(UnkeyableCall, match=r"signature is \(self, user_id\): is bind=True missing\?"):
        app.tasks["work"].delay(7)


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"broker_url": "amqp://host", "result_backend": None}, "no Redis for locks: setnx_url is not set"),
        ({"setnx_url": "localhost:6379/1"}, "setnx_url has no scheme: 'localhost:6379/1'"),
        ({"setnx_url": "sentinel://host"}, "names Sentinels, but no master"),
        ({"setnx_url": "redis://host:port/0"}, "port"),
    ],
)
def test_guarded_tasks_without_a_lock_server_are_an_error(app, conf, said):
    """Their workers do not start. Nothing is asked; the rest is checked all the same."""
    app.conf.update(conf)
    add(app)
    found = check(app)
    assert [(one.level, one.subject) for one in found] == [("error", "connection"), ("ok", "tasks")]
    assert said in found[0].what


@pytest.mark.parametrize("conf", [{}, {"broker_url": "amqp://host", "result_backend": None}])
def test_app_without_guarded_tasks_is_a_warning(app, conf):
    """Celery's own do not count; the modules may not be imported. It may only publish: it needs no server."""
    app.conf.update(conf)
    app.task(one_name, name="plain", shared=False)
    assert subjects(app) == [("warning", "tasks")]


class Once(Task):  # type: ignore[misc]
    """As the base class of celery-once: it reads `once`."""

    abstract = True
    once: Any = {}


class Forgotten(Task):  # type: ignore[misc]
    """A base class of one's own, for which SingletonTask was forgotten."""

    abstract = True
    singleton = {"scope": "users"}


class Methodical(SingletonTask):
    """What is code in a class is no option."""

    name = "methodical"

    @property
    def scope(self) -> str:
        return "local"

    def lease(self) -> None: ...

    def run(self, user_id: int) -> None: ...


OURS = {"base": SingletonTask}
FROM_ONCE = {"keys": [], "timeout": 5, "odd": 1}


@pytest.mark.parametrize(
    ("task", "said", "do"),
    [
        ({**OURS, "key": "user_id"}, "has key='user_id', which", "write singleton={'key': ...}"),
        ({**OURS, "max_wait": 5}, "has max_wait=5, which has no effect", "write singleton={'max_wait'"),
        ({**OURS, "once": {"keys": []}}, "has once={'keys': []}", "moving.md#celery-once"),
        (
            {**OURS, "once": FROM_ONCE},
            "has once={",
            "Remove it. Instead of keys use key. Instead of timeout use lease",
        ),
        ({**OURS, "once": 5}, "has once=5", "Remove it. See docs/moving.md#celery-once."),
        (
            {**OURS, "unique_on": "a"},
            "has unique_on='a'",
            "Instead of unique_on use key. See docs/moving.md#celery-single",
        ),
        ({**OURS, "lock_expiry": 5}, "has lock_expiry=5", "Instead of lock_expiry use lease"),
        ({**OURS, "raise_on_duplicate": True}, "has raise_on_duplicate", "moving.md#celery-singleton"),
        ({**OURS, "singelton": {"key": "user_id"}}, "has singelton={", "Write singleton={...}"),
        ({"once": {"graceful": True}}, "has once={'graceful': True}", "moving.md#celery-once"),
        ({"singleton": True}, "has singleton=True", "add base=SingletonTask"),
        ({"singleton": {"key": "user_id", "ttl": 5}}, "has singleton={", "add base=SingletonTask"),
        ({"base": Forgotten}, "has singleton={'scope': 'users'}", "add base=SingletonTask"),
        ({"dedupe": "until_done"}, "has dedupe='until_done'", "base=SingletonTask, singleton={'dedupe'"),
    ],
)
def test_what_nobody_reads_of_a_task_is_told(app, task, said, do):
    """It may be meant for us, or for another: that is what a warning is for."""
    add(app, "sound")
    app.task(**{"name": "odd", "shared": False, **task})(one_name)
    (found,) = problems(app)
    assert (found.level, found.subject) == ("warning", "unread")
    assert found.what.startswith(f"odd {said}")
    assert do in found.do


def test_worker_says_what_nobody_reads_when_it_starts(app, caplog):
    """What is forgotten or misplaced leaves a task without the options that it was given."""
    add(app, "sound")
    app.conf.setnx_lease = 30
    for options in ({"key": "user_id"}, {"once": {"keys": []}}, {"unique_on": "a"}, {"lock_expiry": 5}):
        name = next(iter(options))
        app.task(name=name, base=SingletonTask, shared=False, **options)(one_name)
    start_worker_check(app)
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert said == [f"{found.what} {found.do}" for found in problems(app) if found.subject == "unread"]
    assert len(said) == 5


def test_task_that_is_refused_is_told_once(app):
    """Its error names all that nobody reads. So it is when Celery has told of it before."""
    app.task(name="odd", base=SingletonTask, key="user_id", on_conflict="wait", shared=False)(one_name)
    add(app, "typo", leese=5)
    first, second = (found.what for found in problems(app) if found.subject == "options")
    assert first.startswith("odd has key, on_conflict outside of singleton={...}, where it has no effect;")
    assert second.endswith("did you mean 'lease'?")
    assert {found.subject for found in problems(app)} == {"options"}


def test_what_a_base_class_reads_is_left_alone(app):
    """Nor is a method taken for an option."""
    add(app, "sound")
    app.task(base=Once, once={"keys": []}, name="old", shared=False)(one_name)
    leaving = type("Leaving", (SingletonTask, Once), {"abstract": True})
    app.task(base=leaving, once={}, name="b", shared=False)(other_name)
    app.register_task(Methodical())
    assert not problems(app)


def test_options_of_a_task_without_the_base_class_are_an_error(app):
    """Of every such task, and also of one that was declared after its app was finalized."""
    add(app, "sound")
    for name in ("first", "second"):
        app.task(one_name, name=name, singleton={"key": "user_id"}, shared=False)
    found = problems(app)
    assert [(one.level, one.subject) for one in found] == [("error", "options")] * 2
    app.task(one_name, name="third", singleton={"key": "user_id"}, shared=False)
    assert [one.what.partition(" ")[0] for one in problems(app)] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("written", "namespace", "meant"),
    [
        ("setnx_ulr", None, "setnx_url"),
        ("setnx_beat_leas", None, "setnx_beat_lease"),
        ("setnx_same_hosts", "CELERY", "setnx_same_host"),
        ("CELERY_SETNX_ULR", "CELERY", "CELERY_SETNX_URL"),
        ("SETNX_URL", None, "setnx_url"),
        ("SETNX_PREFX", None, "setnx_prefix"),
        ("CELERY_SETNX_URL", None, "setnx_url"),
        ("SETNX_URL", "CELERY", "CELERY_SETNX_URL"),
        ("CELERY_setnx_prefix", "CELERY", "CELERY_SETNX_PREFIX"),
        ("SETNX_PREFIX", "shop", "shop_setnx_prefix"),
    ],
)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_setting_that_is_misspelt_is_an_error(written, namespace, meant, kind):
    """From wherever Celery has it."""
    app = Celery("misspelt", set_as_current=False)
    app.config_from_object(kind(**{written: "a"}), namespace=namespace)
    found = only(app, "options")
    assert found.level == "error"
    assert f"there is no setting {written!r}; did you mean {meant!r}?" in found.what
    app.close()


def test_names_of_settings_are_those_of_the_namespace(app, monkeypatch):
    """As they are to be written in Django's settings."""
    app.config_from_object({"CELERY_SETNX_LEASE": 30}, namespace="CELERY")
    assert "write CELERY_SETNX_DEFAULTS={'lease': ...}" in only(app, "unread").do
    monkeypatch.setenv("SETNX_PREFX", "a")
    app.conf.setnx_retention = 5  # it is read anew
    found = only(app, "options")
    assert "is not read: set CELERY_SETNX_PREFIX in the app's configuration" in found.what


OF_ALL = "If this is meant as an option of all tasks, write setnx_defaults={'lease': ...}."


@pytest.mark.parametrize(
    ("name", "do"), [("setnx_host", "rename it"), ("setnx_quux", ""), ("setnx_lease", OF_ALL)]
)
def test_setting_that_may_be_meant_otherwise_is_a_warning(app, name, do):
    """Such as a part of an URL, in a module of settings: its app starts. An option is said to be one."""
    app.conf[name] = "there"
    found = only(app, "unread")
    assert (found.level, found.what) == ("warning", f"The setting {name} has no effect.")
    assert do in found.do


def test_setting_that_is_made_by_attribute_is_looked_at_too(app):
    """Also by a default that is laid below."""
    app.conf.setnx_prefx = "a"
    app.add_defaults({"setnx_defautls": {}})
    assert "did you mean 'setnx_" in only(app, "options").what


ALL = {"setnx_url": "redis://host", "setnx_transport_options": {}}
ALL |= {f"setnx_{name}": value for name, value in asdict(settings({})).items()}


SHOPS_OWN = {"SETNX_HOST": "host", "MY_SETNX_ULR": 5, "setnx_maker": len, "CELERY_SETNX_URL": "x"}


@pytest.mark.parametrize(
    ("source", "namespace"),
    [
        ({"SETNX_URL": "redis://host", "CELERY_SETNX_URL": "redis://host"}, "CELERY"),
        (SHOPS_OWN, "CELERY"),
        ({f"CELERY_{name.upper()}": value for name, value in ALL.items()}, "CELERY"),
        (ALL, None),
    ],
)
def test_setting_beside_the_one_that_is_read_is_the_projects_own(source, namespace):
    """A project may have such names for itself, and give their values on."""
    app = Celery("capital", set_as_current=False)
    app.config_from_object(source, namespace=namespace)
    assert [found.what for found in problems(app) if found.subject in ("unread", "options")] == []
    app.close()


def test_default_retry_delay_that_is_cut_is_not_worth_a_word(app):
    """Nobody has asked for 60 s."""
    app.conf.broker_transport_options = {"visibility_timeout": 60}
    add(app)
    assert [found for found in problems(app) if "retry_delay_max" in found.what] == []


@pytest.mark.parametrize("options", [{}, {"max_wait": 5}, {"on_conflict": "raise"}])
def test_decorated_function_is_checked_too(app, options):
    """@singleton under another base class; its Request is Celery's own, and that is fine."""

    @app.task(shared=False)
    @singleton(lease=900, **options)
    def work(number: int) -> None: ...

    assert subjects(app) == [("warning", "lease")]


@pytest.mark.parametrize(
    ("base", "conf", "is_told"),
    [
        (Task, {"task_ignore_result": True}, False),
        (Task, {"result_backend": None}, False),
        (Task, {"result_expires": 3599}, False),
        (Task, {"task_ignore_result": True, "task_acks_late": False}, True),
        (Task, {}, True),
        (SingletonTask, {"task_ignore_result": True}, True),
    ],
)
def test_task_that_nothing_tells_that_it_has_ended_is_a_warning(app, caplog, base, conf, is_told):
    """Neither a receipt nor a result: the check says what to set, and so does a worker when it starts."""
    app.conf.update({"task_acks_late": True, **conf})

    @app.task(base=base, name="work", shared=False)
    @singleton
    def work(number: int) -> None: ...

    assert subjects(app) == [("warning", "redelivery")] * (not is_told)
    start_worker_check(app)
    said = "work has acks_late, but no stored result and no base=SingletonTask"
    assert (said in caplog.text) == (not is_told)


def test_every_refused_task_is_named(app):
    """Celery stops at the first one. A decorated function is settled when all tasks exist."""

    @app.task(name="decorated", shared=False)
    @singleton(key="nobody")
    def work(number: int) -> None: ...

    add(app, "first", lease=-1)
    add(app, "sound", lease=900)
    add(app, "second", on_conflict="ski")
    *refused, long = problems(app)
    assert [(one.level, one.subject) for one in refused] == [("error", "options")] * 3
    assert (long.level, long.subject) == ("warning", "lease")
    said = " ".join(one.what for one in refused)
    assert "lease of first must be more than 0 seconds, not -1." in said
    assert "did you mean 'skip'" in said
    assert "'nobody'" in said


@pytest.mark.parametrize(
    ("conf", "tasks", "said"),
    [
        ({"setnx_prefix": "a{b}"}, {"one": {}, "two": {}}, "setnx_prefix must be text without braces"),
        ({"setnx_retention": -1}, {}, "setnx_retention of the app must be more than 0 seconds"),
        ({}, {"bad": {"lease": -1}}, "lease of bad must be more than 0 seconds"),
    ],
    ids=["setting-of-every-task", "setting-of-who-only-publishes", "option-of-a-task"],
)
def test_what_is_refused_is_said_once_and_the_examination_goes_on(app, conf, tasks, said):
    """One error, after the server's findings."""
    app.conf.update(conf)
    for name, options in tasks.items():
        add(app, name, **options)
    found = list(examine(app))
    assert [(f.level, f.subject) for f in found] == [("error", "connection"), ("error", "options")]
    assert said in found[1].what


def test_option_without_effect_may_come_from_a_base_class(app):
    """As the app's, it is for many tasks."""

    class Patient(SingletonTask):
        abstract = True
        singleton = {"on_conflict": "wait", "max_wait": 60}

    app.task(base=Patient, name="patient", shared=False)(one_name)
    app.task(base=Patient, name="hasty", shared=False, singleton={"on_conflict": "skip"})(other_name)
    assert not problems(app)


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ((one_name, None), (one_name, None), 0),
        ((one_name, None), (other_name, None), 1),
        ((one_name, "user_id"), (other_name, "account_id"), 0),
        ((one_name, "user_id"), (other_name, ["account_id"]), 0),
        ((one_name, "user_id"), (one_name, None), 1),
        ((one_name, ()), (one_name, "user_id"), 1),
        ((one_name, ()), (other_name, ()), 0),
        ((one_name, "u:{user_id}"), (other_name, "u:{account_id}"), 0),
        ((one_name, "u:{user_id}"), (other_name, "a:{account_id}"), 1),
        ((one_name, lambda user_id: user_id), (other_name, None), 0),
    ],
)
def test_shared_scope_with_keys_that_never_meet_is_a_warning(app, first, second, count):
    """The finding agrees with the keys themselves, but of a callable's nothing is known."""
    for name, (function, key) in {"first": first, "second": second}.items():
        add(app, name, function, scope="users", key=key)
    assert subjects(app) == [("warning", "scope")] * count
    if not callable(first[1]):
        keys = {app.tasks[name].lock_key(7) for name in ("first", "second")}
        assert len(keys) == 1 + count


WHY = {"limit": "up to 5 run at a time", "rate": "each call uses its own rate"}


@pytest.mark.parametrize(
    ("subject", "first", "second", "told"),
    [
        ("limit", {"scope": "a", "limit": 5}, {"scope": "a"}, "first (limit 5), second (limit 1)"),
        ("limit", {"limit": 5}, {"scope": "first"}, "first (limit 5), second (limit 1)"),  # its own name
        ("limit", {"scope": "a", "limit": 5}, {"scope": "a", "limit": 5}, ""),
        ("limit", {"limit": 5}, {"limit": 2}, ""),
        ("rate", {"scope": "a", "rate": "9/m"}, {"scope": "a"}, "first (rate 9 in 60 s), second (no rate)"),
        ("rate", {"rate": "1/s"}, {"scope": "first", "rate": "2/s"}, "second (rate 2 in 1 s)"),
        ("rate", {"scope": "a", "rate": "1/m"}, {"scope": "a", "rate": (1, 60)}, ""),
        ("rate", {"rate": "1/s"}, {"rate": "2/s"}, ""),
    ],
)
def test_shared_scope_under_different_terms_is_a_warning(app, subject, first, second, told):
    """They share permits or starts, and no limit, or rate, is that of all."""
    add(app, "first", **first)
    add(app, "second", **second)
    assert subjects(app) == [("warning", subject)] * bool(told)
    for found in problems(app):
        assert told in found.what
        assert WHY[subject] in found.why


def test_scopes_of_one_task_each_are_left_alone(app):
    """Only tasks of one scope are compared."""
    add(app, "first", one_name, scope="users")
    add(app, "second", other_name, scope="accounts")
    assert not problems(app)


def test_late_acknowledgement_is_explained_by_the_doctor_only(app):
    """Nothing is wrong with it; but who examines a deployment should know."""
    add(app, task={"acks_late": True})
    assert not problems(app)
    (found,) = [found for found in examine(app) if found.subject == "visibility"]
    assert found.level == "note"
    assert "with acks_late that run for more than 3600 s: work." in found.what
