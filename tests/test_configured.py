"""Every way to configure Celery: the locks are where plain Celery has its results, or its queues.

Our own settings are read in each way, or refused with the spelling that is right there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery
import pytest
import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.bin.celery import celery as command_line
from click.testing import CliRunner

from celery_setnx import OptionError, SingletonTask, singleton
from celery_setnx import check as check_options
from celery_setnx.byhand import locks as locks_of
from celery_setnx.call.back import tells_redelivery, visibility_timeout_s
from celery_setnx.call.broker import broker_of
from celery_setnx.call.wake import lines_of
from celery_setnx.cli.asked import prefix
from celery_setnx.connection import client_for, lock_url
from celery_setnx.doctor import check
from celery_setnx.options import refuse_unread_environment, settings_of
from celery_setnx.task import lock_for, refuse
from celery_setnx.testing import locks_on

pytestmark = pytest.mark.usefixtures("alone", "plain_environment")

HERE, THERE = "redis://me:pw@here:6401/5", "redis://there:6402/6"
CELERY_TAKES_CLASSES = celery.VERSION >= (5, 7)
VARIABLES = ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL", "RESULT_BACKEND", "SETNX_URL")


@pytest.fixture
def plain_environment(monkeypatch):
    """None of Celery's variables is set; what a test sets, or a command line, goes."""
    for name in VARIABLES:
        monkeypatch.setenv(f"CELERY_{name}", "")
        monkeypatch.delenv(f"CELERY_{name}")


def new_app(**options: Any) -> Celery:
    return Celery("configured", set_as_current=False, **options)


def place(params: dict[str, Any]) -> dict[str, Any]:
    """Where a server is, and who logs in."""
    told = {name: params.get(name) for name in ("host", "port", "username", "password", "path")}
    return {**told, "db": int(params.get("db") or 0)}


def of_locks(app: Celery) -> dict[str, Any]:
    """Where the app's locks are."""
    return place(client_for(app).connection_pool.connection_kwargs)


def of_results(app: Celery) -> dict[str, Any]:
    """Where plain Celery puts its results."""
    return place(app.backend.connparams)


def of_queues(app: Celery) -> dict[str, Any]:
    """Where plain Celery publishes to."""
    named = app.connection_for_write()
    database = str(named.virtual_host).strip("/") or 0
    at = {"host": named.hostname, "port": named.port or 6379, "db": int(database)}
    return place({**at, "username": named.userid, "password": named.password})


OLD = {"result_backend": "CELERY_RESULT_BACKEND", "broker_url": "BROKER_URL"}


def in_module(text: str) -> Callable[..., Celery]:
    """Configured from a module with these lines, by a namespace or without one."""

    def way(monkeypatch: Any, tmp_path: Path, name: str, namespace: str | None = None) -> Celery:
        module = f"conf_{abs(hash((text, name, str(tmp_path))))}"
        old = OLD.get(name, name.upper())
        (tmp_path / f"{module}.py").write_text(text.format(name=name, NAME=name.upper(), old=old, url=HERE))
        monkeypatch.syspath_prepend(tmp_path)
        app = new_app()
        app.config_from_object(module, namespace=namespace)
        return app

    return way


def by_code(change: Callable[[Celery, str], Any]) -> Callable[..., Celery]:
    """Configured by a change of a new app."""

    def way(monkeypatch: Any, tmp_path: Path, name: str) -> Celery:
        app = new_app()
        change(app, name)
        return app

    return way


def guarded_task(app: Celery) -> Any:
    """A guarded task of the app."""

    def body() -> None: ...

    return app.task(base=SingletonTask, name="t", shared=False)(body)


def by_envvar(monkeypatch: Any, tmp_path: Path, name: str) -> Celery:
    """A variable names the module."""
    (tmp_path / "conf_envvar.py").write_text(f"{name} = {HERE!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "conf_envvar", raising=False)
    monkeypatch.setenv("SHOP_CONFIG", "conf_envvar")
    app = new_app()
    app.config_from_envvar("SHOP_CONFIG")
    return app


def by_environment(monkeypatch: Any, tmp_path: Path, name: str) -> Celery:
    """The code says something else, for development."""
    monkeypatch.setenv(f"CELERY_{name.upper()}", HERE)
    app = new_app()
    app.conf[name] = THERE
    return app


def by_environment_alone(monkeypatch: Any, tmp_path: Path, name: str) -> Celery:
    """The code says nothing, as in a file of docker compose."""
    monkeypatch.setenv(f"CELERY_{name.upper()}", HERE)
    return new_app()


def late(change: Callable[[Celery, dict[str, str]], Any]) -> Callable[..., Celery]:
    """Configured by changes of which the last comes after the locks were used."""

    def changes(app: Celery, name: str) -> None:
        change(app, {name: THERE})
        assert of_locks(app)["host"] == "there"
        change(app, {name: HERE})

    return by_code(changes)


def on_configure(app: Celery, name: str) -> None:
    """A receiver of Celery's signal."""
    app.on_after_configure.connect(lambda sender, **_: sender.conf.update({name: HERE}), weak=False)


WAYS: dict[str, Callable[..., Celery]] = {
    "argument": lambda monkeypatch, tmp_path, name: new_app(
        **{{"broker_url": "broker", "result_backend": "backend"}.get(name, name): HERE}
    ),
    "attribute": by_code(lambda app, name: setattr(app.conf, name, HERE)),
    "item": by_code(lambda app, name: app.conf.__setitem__(name, HERE)),
    "update": by_code(lambda app, name: app.conf.update({name: HERE})),
    "defaults": by_code(lambda app, name: app.add_defaults({name: HERE})),
    "mapping": by_code(lambda app, name: app.config_from_object({name: HERE})),
    "class": by_code(lambda app, name: app.config_from_object(type("Config", (), {name: HERE}))),
    "module": in_module("{name} = {url!r}\n"),
    "module in capitals": in_module("{old} = {url!r}\n"),
    "namespace": lambda *given: in_module("CELERY_{NAME} = {url!r}\n")(*given, namespace="CELERY"),
    "namespace of one's own": lambda *given: in_module("SHOP_{NAME} = {url!r}\n")(*given, namespace="SHOP"),
    "small namespace": lambda *given: in_module("shop_{name} = {url!r}\n")(*given, namespace="shop"),
    "variable for the module": by_envvar,
    "environment": by_environment,
    "environment alone": by_environment_alone,
    "signal": by_code(on_configure),
    "late": late(lambda app, conf: app.conf.update(conf)),
    "late object": late(lambda app, conf: app.config_from_object(conf)),
}


@pytest.mark.parametrize(("name", "celerys"), [("result_backend", of_results), ("broker_url", of_queues)])
@pytest.mark.parametrize("way", WAYS)
def test_locks_are_where_the_results_are_or_else_the_queues(way, name, celerys, monkeypatch, tmp_path):
    """However the result backend, or the broker, is named."""
    app = WAYS[way](monkeypatch, tmp_path, name)
    at = of_locks(app)
    assert at == celerys(app)
    assert (at["host"], at["db"], at["username"]) == ("here", 5, "me")


@pytest.mark.parametrize("way", WAYS)
def test_our_own_setting_is_read_or_refused_in_each_way(way, monkeypatch, tmp_path):
    """What is not read is refused with the right name, by whoever binds a task or asks for a lock."""
    app = WAYS[way](monkeypatch, tmp_path, "setnx_url")
    guarded_task(app)
    if way == "module in capitals":
        with pytest.raises(OptionError, match="there is no setting 'SETNX_URL'; did you mean 'setnx_url'"):
            refuse(app)
    else:
        refuse(app)
        assert (of_locks(app)["host"], lock_url(app)) == ("here", (HERE, "setnx_url"))


def test_our_prefix_counts_though_it_comes_when_the_task_is_bound():
    """For calls as for what lists them."""
    app = new_app(setnx_url=HERE)
    task = guarded_task(app)
    assert task.lock_key().startswith("setnx:")
    app.conf.setnx_prefix = "shop"
    assert task.lock_key().startswith("shop:")
    app.config_from_object({"setnx_prefix": "other"})
    assert prefix(app) == task.lock_key().partition(":")[0]


CHANGES: dict[str, Callable[[Celery], Any]] = {
    "in place": lambda app: app.conf.setnx_defaults.update(scope="late"),
    "by defaults": lambda app: app.add_defaults({"setnx_prefix": "late"}),
    "in what was added": lambda app: app.conf.maps[1].update(setnx_prefix="late"),
    "by its spaced name": lambda app: setattr(app.conf, "CELERY_SETNX_PREFIX", "late"),
    "in transport options": lambda app: app.conf.broker_transport_options.update(global_keyprefix="late:"),
    "in the object": lambda app: setattr(app.conf.maps[1].obj, "CELERY_SETNX_PREFIX", "late"),
    "by replacing another": lambda app: (app.conf.pop("timezone"), setattr(app.conf, "setnx_prefix", "late")),
}
PREFIXED, SPACED = {"CELERY_SETNX_PREFIX": "soon"}, {"namespace": "CELERY"}


def scoped() -> dict[str, Any]:
    """Settings with a scope that may be changed in place."""
    return {"setnx_defaults": {"scope": "soon"}}


def a_class(**settings: Any) -> type:
    """A class with these settings."""
    return type("Config", (), settings)


@pytest.mark.parametrize(
    ("change", "before"),  # what an app had when its locks were first used
    [
        ("in place", lambda app: app.conf.update(scoped())),
        ("in place", lambda app: app.config_from_object(scoped())),
        ("in place", lambda app: app.config_from_object(a_class(**scoped()))),
        ("in place", lambda app: app.add_defaults(scoped())),
        ("by defaults", lambda app: None),
        ("in what was added", lambda app: app.add_defaults({"setnx_prefix": "soon"})),
        ("in what was added", lambda app: app.add_defaults({"setnx_url": HERE})),
        ("by its spaced name", lambda app: app.config_from_object(PREFIXED, **SPACED)),
        (
            "in transport options",
            lambda app: app.conf.update(broker_transport_options={"global_keyprefix": "soon:"}),
        ),
        ("in transport options", lambda app: None),
        ("in the object", lambda app: app.config_from_object(a_class(**PREFIXED), **SPACED)),
        ("in the object", lambda app: app.config_from_object(a_class(), **SPACED)),
        ("by replacing another", lambda app: app.conf.update(timezone="UTC")),
    ],
)
def test_setting_that_changes_late_counts_for_all_who_ask(change, before):
    """Again and again, for publishers, for workers and for what lists the locks."""
    app = new_app(setnx_url=HERE, broker=THERE)
    before(app)
    task = guarded_task(app)

    @app.task(name="p", shared=False)
    @singleton
    def plain() -> None: ...

    app.finalize()

    def seen() -> list[str]:
        keys = [task.lock_key(), lock_for(app.tasks["p"], (), {}).name]
        return [*keys, f"{prefix(app)}:", lines_of(app), f"{settings_of(app).prefix}:"]

    assert not any("late" in each for each in seen())
    CHANGES[change](app)
    found = seen()
    starts = "setnx:{late" if change == "in place" else "late"
    assert [each.startswith(starts) for each in found[:2]] == [True] * 2, found
    assert found[2] == found[4] == found[0].partition("{")[0]
    assert found[3].startswith(found[2])


def test_broker_is_named_anew_by_what_keeps_it_apart(monkeypatch):
    """A call that waits goes back to the broker of now."""
    app = new_app(broker=THERE, broker_transport_options={"global_keyprefix": "soon:"})
    assert broker_of(app) == "redis://there:6402/6?global_keyprefix=soon:"
    app.conf.broker_transport_options["global_keyprefix"] = "late:"
    assert broker_of(app) == "redis://there:6402/6?global_keyprefix=late:"
    monkeypatch.setenv("CELERY_BROKER_URL", HERE)
    assert broker_of(app) == "redis://here:6401/5?global_keyprefix=late:"


def test_setting_of_somebody_elses_that_changes_late_is_no_reason_for_a_new_client():
    """Nor is a value that cannot be compared."""

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("ambiguous")

    config = a_class(setnx_url=HERE, setnx_defaults={"skip_result": Odd()})
    app = new_app()
    app.config_from_object(config)
    app.conf.task_routes = {"t": {"queue": "a"}}
    app.conf.odd = Odd()
    client, known = client_for(app), settings_of(app)
    app.conf.task_routes["t"] = {"queue": "b"}
    app.conf.result_expires = 5
    app.conf.odd = Odd()
    config.another = 5
    assert (client_for(app), settings_of(app)) == (client, known)
    app.conf.setnx_defaults = {"skip_result": Odd()}
    assert settings_of(app) is not known


def test_environment_that_is_replaced_is_read_all_the_same(monkeypatch):
    """By a mapping that is none of the system's."""
    app = new_app(backend=HERE)
    assert of_locks(app)["host"] == "here"
    monkeypatch.setattr(os, "environ", {"CELERY_RESULT_BACKEND": THERE})
    assert of_locks(app)["host"] == "there"


def test_setting_that_comes_late_in_a_wrong_spelling_is_refused():
    """By the next call, until it is right, and by what lists the locks."""
    app = new_app(setnx_url=HERE)
    task = guarded_task(app)
    assert task.lock_key()
    app.conf.SETNX_PREFIX = "shop"
    lists = (lambda: prefix(app), lambda: next(locks_of(app)), lambda: refuse(app))
    for ask in (task.lock_key, task.delay, *lists):
        with pytest.raises(OptionError, match="no setting 'SETNX_PREFIX'; did you mean 'setnx_prefix'"):
            ask()
    app.conf.pop("SETNX_PREFIX")
    app.conf.setnx_prefix = "shop"
    refuse(app)
    assert task.lock_key().startswith("shop:")


def test_environment_wins_over_the_code_for_our_url_too(monkeypatch):
    """As it does for Celery's URLs; but tests that name a server of theirs have it."""
    monkeypatch.setenv("CELERY_SETNX_URL", HERE)
    app = new_app(setnx_url=THERE)
    with locks_on(app, "redis://test"):
        assert of_locks(app)["host"] == "test"
    assert of_locks(app)["host"] == "here"
    assert os.environ["CELERY_SETNX_URL"] == HERE


@pytest.mark.parametrize(
    "variable", ["SETNX_URL", "SETNX_PREFIX", "CELERY_SETNX_PREFIX", "CELERY_SETNX_DEFAULTS"]
)
def test_variable_that_nobody_reads_is_refused_where_workers_start(variable, monkeypatch):
    """Unless the code has read it: then the setting is there."""
    monkeypatch.setenv(variable, HERE)
    name = variable.removeprefix("CELERY_").lower()
    said = f"the environment variable {variable} is not read: set {name}"
    with pytest.raises(OptionError, match=said):
        refuse_unread_environment(new_app().conf)
    assert any(variable in found.what for found in check(new_app(backend=HERE)) if found.level == "error")
    refuse_unread_environment(new_app(**{name: {}}).conf)
    app = new_app(backend=HERE)
    task = guarded_task(app)
    for ask in (lambda: check_options(app), task.delay, lambda: prefix(app)):  # one door for all
        with pytest.raises(OptionError, match=f"the environment variable {variable} is not read"):
            ask()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("SETNX_ULR", "setnx_url"), ("CELERY_SETNX_ULR", "setnx_url"), ("CELERY_SETNX_PREFX", "setnx_prefix")],
)
def test_variable_that_is_misspelt_is_refused(variable, meant, monkeypatch):
    """As a setting is; one that may be anybody's is not."""
    monkeypatch.setenv("SETNX_HOST", "here")
    app = new_app(backend=HERE)
    check_options(app)
    monkeypatch.setenv(variable, HERE)
    said = f"the environment variable {variable} is not read: set {meant}"
    with pytest.raises(OptionError, match=said):
        check_options(new_app(backend=HERE))
    assert any(variable in found.what for found in check(new_app(backend=HERE)) if found.level == "error")


def test_url_in_a_variable_that_nobody_reads_is_refused_where_locks_are_asked_for(monkeypatch):
    """They would be on another server than it says."""
    monkeypatch.setenv("SETNX_URL", HERE)
    with pytest.raises(OptionError, match=r"set setnx_url .*, or rename the variable to CELERY_SETNX_URL"):
        client_for(new_app(backend=THERE))
    assert of_locks(new_app(setnx_url=THERE))["host"] == "there"


class Backend(RedisBackend):
    """A backend of a project's own."""


class Classy(Celery):
    backend_cls = HERE


SPELLED = {
    "alias": {"result_backend": "redis", "redis_host": "here", "redis_port": 6401, "redis_db": 5},
    "alias with a login": {"result_backend": "redis", "redis_username": "me", "redis_password": "pw"},
    "class": {"result_backend": Backend, "redis_host": "here"},
    "class by its name": {"result_backend": f"{__name__}:Backend", "redis_host": "here"},
    "class before a URL": {"result_backend": f"{__name__}.Backend+{HERE}"},
    "URL and settings": {"result_backend": "redis://here/2", "redis_password": "pw", "redis_username": "me"},
    "database in the query": {"result_backend": "redis://here/2?db=3"},
    "beside a broker": {"result_backend": HERE, "broker_url": THERE},
}


@pytest.mark.parametrize("spelled", SPELLED)
def test_result_backend_is_what_celery_makes_of_it(spelled):
    """An alias, a class, a URL with settings beside it."""
    app = new_app()
    app.conf.update(SPELLED[spelled])
    if spelled != "class" or CELERY_TAKES_CLASSES:
        assert of_locks(app) == of_results(app)
    assert lock_url(app)[1] == "result_backend"


def test_result_backend_of_an_app_class_counts():
    """It comes before the setting, as in Celery."""
    app = Classy("classy", set_as_current=False)
    app.conf.result_backend = THERE
    assert of_locks(app) == of_results(app)
    assert of_locks(app)["host"] == "here"


@pytest.mark.parametrize(
    "named", ["db+sqlite://", "rpc://", "cache+memory://", "disabled", "mongodb://h/1", None]
)
def test_backend_that_is_no_redis_has_no_locks_and_is_not_imported(named):
    """It need not be installed where calls are only published."""
    app = new_app(broker=HERE)
    app.conf.result_backend = named
    assert (lock_url(app), of_locks(app)) == ((HERE, "broker_url"), of_queues(app))


def test_backend_that_cannot_be_loaded_is_refused():
    """Elsewhere it may be a Redis, and hold the locks."""
    with pytest.raises(OptionError, match=r"result_backend .nobodys.module:Backend. cannot be loaded"):
        client_for(new_app(broker=HERE, backend="nobodys.module:Backend"))


PARTS = {
    "parts": {"broker_transport": "redis", "broker_host": "here", "broker_port": 6401, "broker_vhost": "5"},
    "parts beside a URL": {"broker_url": "redis://here", "broker_password": "pw", "broker_vhost": "5"},
    "host alone": {"broker_url": "here", "broker_transport": "redis"},
    "list of one": {"broker_url": [HERE]},
    "list that names one server twice": {"broker_url": [HERE, f"{HERE}?"]},
    "two spellings": {
        "broker_read_url": "redis://localhost/1",
        "broker_write_url": "redis://127.0.0.1:6379/1",
    },
    "two logins": {"broker_read_url": "redis://reads@here/1", "broker_write_url": "redis://writes@here/1"},
    "beside a third": {"broker_url": THERE, "broker_read_url": HERE, "broker_write_url": HERE},
}


@pytest.mark.parametrize("parts", PARTS)
def test_broker_is_what_kombu_makes_of_it(parts):
    """However it is spelled, and though it has two names."""
    app = new_app()
    app.conf.update(PARTS[parts])
    assert of_locks(app) == of_queues(app)


@pytest.mark.parametrize(
    "conf",
    [
        {"broker_read_url": HERE, "broker_write_url": THERE},
        {"broker_url": HERE, "broker_read_url": THERE},
        {"broker_url": HERE, "broker_write_url": THERE},
        {"broker_url": "amqp://", "broker_write_url": THERE},
        {"broker_read_url": "redis://here/1", "broker_write_url": "redis://here/2"},
        {"broker_url": [HERE, THERE]},
        {"broker_url": f"{HERE};{THERE}"},
    ],
)
def test_broker_that_is_two_servers_holds_no_locks(conf):
    """Who publishes and who works would lock at two places."""
    app = new_app()
    app.conf.update(conf)
    with pytest.raises(OptionError, match=r"must be on one: set setnx_url"):
        client_for(app)
    app.conf.setnx_url = HERE
    assert of_locks(app)["host"] == "here"


def test_broker_that_the_environment_divides_holds_no_locks(monkeypatch):
    """The same, if only this host reads from another server."""
    monkeypatch.setenv("CELERY_BROKER_READ_URL", THERE)
    with pytest.raises(OptionError, match="broker_read_url and broker_write_url name different servers"):
        client_for(new_app(broker=HERE))


def test_sentinels_that_are_named_in_another_order_are_one_place():
    """One text, a list, and with the scheme once."""
    app = new_app(broker_transport_options={"master_name": "m"}, broker_read_url="sentinel://a:1/2;b:2")
    app.conf.broker_write_url = ["sentinel://b:2/2", "sentinel://a:1"]
    assert client_for(app).connection_pool.connection_kwargs["db"] == 2


@pytest.mark.parametrize(
    ("conf", "seconds"),
    [
        ({"broker_url": "redis://h"}, 3600),
        ({"broker_url": "redis://h", "broker_transport_options": {"visibility_timeout": 60}}, 60),
        ({"broker_url": "amqp://", "broker_read_url": "SQS://"}, 1800),
        ({"broker_url": ["sentinel://h", "sentinel://i"]}, 3600),
        ({"broker_transport": "redis", "broker_host": "h"}, 3600),
        ({"broker_url": "amqp://"}, None),
    ],
)
def test_visibility_timeout_is_that_of_the_broker_that_workers_read(conf, seconds):
    """However it is named."""
    app = new_app()
    app.conf.update(conf)
    assert visibility_timeout_s(app) == seconds


def test_visibility_timeout_follows_the_settings():
    """What was asked before does not count: another broker, another timeout, also changed where it stands."""
    app = new_app(broker="redis://h")
    assert (visibility_timeout_s(app), tells_redelivery(app)) == (3600, True)
    app.conf.broker_transport_options = {"visibility_timeout": 60}
    assert visibility_timeout_s(app) == 60
    app.conf.broker_transport_options["visibility_timeout"] = 90
    assert visibility_timeout_s(app) == 90
    app.conf.broker_read_url = "sqs://"
    assert (visibility_timeout_s(app), tells_redelivery(app)) == (90, False)
    app.conf.broker_read_url = "amqp://h"
    assert (visibility_timeout_s(app), tells_redelivery(app)) == (None, True)


def test_visibility_timeout_is_that_of_the_environments_broker(monkeypatch):
    """The code's is another."""
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://h")
    assert visibility_timeout_s(new_app(broker=HERE)) is None


@pytest.mark.parametrize("way", ["options", "environment", "result backend alone"])
def test_command_line_and_environment_say_where_a_process_has_its_locks(
    way, server, locks, tmp_path, monkeypatch
):
    """`celery -b ... --result-backend ...` as the variables, whatever the code says."""
    module = f"asked_{way.replace(' ', '_')}"
    nowhere = "redis://nowhere.invalid:1"
    code = f"from celery import Celery\napp = Celery('asked', broker='{nowhere}/0', backend='{nowhere}/1')\n"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    locks.set("setnx:{t:x}", "9999999999", ex=60)
    broker, backend = ["-b", server.url(2)], ["--result-backend", server.url(1)]
    options = {"options": broker + backend, "environment": [], "result backend alone": backend}[way]
    if way == "environment":
        monkeypatch.setenv("CELERY_BROKER_URL", server.url(2))
        monkeypatch.setenv("CELERY_RESULT_BACKEND", server.url(1))
    done = CliRunner().invoke(command_line, ["-A", module, *options, "setnx", "list", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["key"] for row in json.loads(done.stdout)] == ["setnx:{t:x}"]


def test_worker_finds_its_locks_where_the_environment_has_put_them(server, locks, monkeypatch):
    """Though a client was made before: a command line sets the variables when the app is there already."""
    from tests.test_connection import start_worker_check

    app = new_app(backend="redis://nowhere.invalid:1/1")
    client_for(app)
    monkeypatch.setenv("CELERY_RESULT_BACKEND", server.url(1))
    start_worker_check(app)
    assert isinstance(client_for(app), redis.Redis)
    assert client_for(app).ping()


STARTED = """
import sys
from celery import Celery
from celery_setnx import SingletonTask
from celery_setnx.call.broker import broker_of
from celery_setnx.connection import client_for

app = Celery("t", broker="redis://nowhere.invalid:1/0", backend="rpc://", set_as_current=False)
app.conf.result_backend_transport_options = {"global_keyprefix": "results:"}

@app.task(base=SingletonTask, name="t", shared=False)
def t(): ...

def say():
    at = client_for(app).connection_pool.connection_kwargs
    print(t.lock_key().partition("{")[0], broker_of(app), at["host"], at["db"])

t.s(), t.delay, say()
app.start(sys.argv[1:])
say()
"""


def test_command_line_of_a_program_that_has_used_its_tasks_counts(server, locks, tmp_path):
    """With `app.start()` it comes late: the module that reads it has bound and asked its tasks before."""
    locks.set("results:setnx:{t:x}", "9999999999", ex=60)
    (tmp_path / "started.py").write_text(STARTED)
    options = ["-b", server.url(2), "--result-backend", server.url(1), "setnx", "list", "--json"]
    done = subprocess.run(
        [sys.executable, "started.py", *options], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    before, listed, after = done.stdout.splitlines()
    assert before == "setnx: redis://nowhere.invalid:1/0 nowhere.invalid 0"
    assert [row["key"] for row in json.loads(listed)] == ["results:setnx:{t:x}"]
    assert after == f"results:setnx: {server.url(2)} 127.0.0.1 1".replace("127.0.0.1", "localhost", 1)
