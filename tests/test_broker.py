"""Which broker a call came from: one name for it, however its URL is spelt."""

import socket
from typing import Any

import pytest
from celery import Celery

from celery_setnx import OptionError
from celery_setnx.call.broker import broker_of
from celery_setnx.options import settings


def app_with(url: Any = None, **conf: Any) -> Celery:
    app = Celery("named", set_as_current=False)
    app.conf.update({"setnx_url": "redis://localhost/1", **({"broker_url": url} if url else {}), **conf})
    return app


def name(url: Any, **options: Any) -> str:
    return broker_of(app_with(url, broker_transport_options=options))


@pytest.mark.parametrize(
    "spellings",
    [
        [
            "redis://h",
            "redis://h/",
            "redis://H:6379/0",
            "redis://u:p@h.:6379/0?socket_timeout=3",
            "rediss://h",
        ],
        ["redis://", "redis://localhost", "redis://127.0.0.1:6379", "redis://[::1]/0"],
        ["redis://127.0.0.1/3", "redis://[0:0:0:0:0:0:0:1]:6379/3"],
        [
            "amqp://",
            "pyamqp://",
            "amqps://",
            "localhost",
            "amqp://guest:guest@127.0.0.1:5672//",
            "amqp:///%2F",
        ],
        ["amqp://h/v", "pyamqp://ann:secret@h:5672/v"],
        ["redis://a/1;redis://b/1", ["redis://b:6379/1", "redis://a/1"]],
        ["sentinel://a/1;sentinel://b", ["sentinel://b:26379", "sentinel://a/1"]],
        ["redis+socket:///run/r.sock", "redis+socket:///run/r.sock?virtual_host=0"],
        ["mongodb://u:p@b,a/jobs", "mongodb://a:27017,b:27017/jobs?w=1"],
        ["sqs://key:secret@", "sqs://"],
        ["sqla+postgresql://u:p@h/d", "sqlalchemy+postgresql+psycopg2://h/d"],
    ],
    ids=lambda spellings: str(spellings[0]),
)
def test_broker_has_one_name_in_all_spellings(spellings):
    """Users, queries, defaults, letters' case and the order of hosts do not count."""
    names = {name(url) for url in spellings}
    assert len(names) == 1
    assert "secret" not in names.pop()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (app_with("redis://h/0"), app_with("redis://h/1")),
        (app_with("redis://h"), app_with("redis://h2")),
        (app_with("redis://h"), app_with("redis://h:6380")),
        (app_with("amqp://h//"), app_with("amqp://h/v")),
        (app_with("amqp://h"), app_with("amqp://h", broker_vhost="v")),
        (app_with("redis://localhost"), app_with("redis://localhost.example")),
        (app_with("redis+socket:///a"), app_with("redis+socket:///b")),
        *(
            (app_with(url, broker_transport_options=options), app_with(url))
            for url, options in [
                ("redis://h", {"global_keyprefix": "a:"}),
                ("sqs://", {"queue_name_prefix": "a-"}),
                ("sqs://", {"region": "eu-west-1"}),
                ("sentinel://h", {"master_name": "a"}),
                ("filesystem://", {"data_folder_in": "/a"}),
            ]
        ),
    ],
)
def test_brokers_that_differ_have_two_names(one, other):
    """Host, port, virtual host or database, and what Celery keeps apps apart by."""
    assert broker_of(one) != broker_of(other)


def test_broker_is_the_one_that_workers_read_from(monkeypatch):
    """Also where the environment names it: as Celery reads it."""
    app = app_with("redis://a", broker_read_url="redis://b", broker_write_url="redis://c")
    assert broker_of(app) == "redis://b:6379/0"
    monkeypatch.setenv("CELERY_BROKER_READ_URL", "redis://d")
    assert broker_of(app_with("redis://a")) == "redis://d:6379/0"


def test_broker_has_the_name_that_the_app_gives():
    """One that two hosts know by different names."""
    assert broker_of(app_with("redis://h", setnx_broker="jobs")) == "jobs"
    with pytest.raises(OptionError, match="setnx_broker must be text"):
        broker_of(app_with("redis://h", setnx_broker=5))


def test_localhost_is_each_hosts_own_where_locks_are_elsewhere():
    """Two hosts with a broker each may share one lock server: their calls go each to its own."""
    assert broker_of(app_with("redis://localhost/3", setnx_url="redis://far/1")) == (
        f"redis://{socket.gethostname()}:6379/3"
    )
    assert (
        broker_of(app_with("redis://localhost/3", setnx_url="redis+socket:///r"))
        == "redis://localhost:6379/3"
    )


PREFIXED = {"global_keyprefix": "a:"}


@pytest.mark.parametrize(
    ("conf", "prefix"),
    [
        ({"broker_transport_options": PREFIXED}, "a:setnx"),
        ({"result_backend": "redis://h", "result_backend_transport_options": PREFIXED}, "a:setnx"),
        ({"result_backend": "rpc://", "result_backend_transport_options": PREFIXED}, "setnx"),
        ({"setnx_url": "redis://h", "broker_transport_options": PREFIXED}, "a:setnx"),
        ({"setnx_url": "redis://h", "result_backend_transport_options": PREFIXED}, "setnx"),
        ({"broker_transport_options": {"global_keyprefix": "{a}:"}}, "a:setnx"),
        ({"broker_transport_options": PREFIXED, "setnx_prefix": "own"}, "own"),
        ({}, "setnx"),
    ],
)
def test_locks_are_apart_where_celery_keeps_apps_apart(conf, prefix):
    """By the key prefix of the server that has the locks, else of the broker; a setting of our own wins."""
    app = Celery("apart", broker="redis://h", set_as_current=False)
    app.conf.update(conf)
    assert settings(app.conf).prefix == prefix
