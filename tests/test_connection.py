"""Which Redis holds the locks, how it is reached, and what a starting worker finds out about it."""

import ssl
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from celery_setnx import LockRefused, OptionError, SetnxLock
from celery_setnx.connection import client_for, lock_url, quick_client_for
from celery_setnx.doctor import trial
from celery_setnx.doctor.trial import LockServerCheck
from examples.embedded import EmbeddedServer
from tests.conftest import LOCK_DB
from tests.harness import exit_code_of_fork, lock_keys, wait_until

pytestmark = pytest.mark.usefixtures("alone")  # a worker's start looks at every task of its app


def app_with(**conf: Any) -> Celery:
    app = Celery("connecting", set_as_current=False)
    app.conf.update(conf)
    return app


def parameters(**conf: Any) -> dict[str, Any]:
    return client_for(app_with(**conf)).connection_pool.connection_kwargs


@pytest.mark.parametrize(
    ("conf", "url", "setting"),
    [
        ({"setnx_url": "redis://a/3", "result_backend": "redis://b"}, "redis://a/3", "setnx_url"),
        ({"result_backend": "redis://b/1", "broker_url": "redis://c"}, "redis://b/1", "result_backend"),
        ({"result_backend": "db+sqlite://", "broker_url": "redis://c/2"}, "redis://c/2", "broker_url"),
        ({"broker_url": "redis://c/2"}, "redis://c/2", "broker_url"),
        ({"broker_url": "amqp://x", "result_backend": "rediss://b"}, "rediss://b", "result_backend"),
    ],
)  # fmt: skip
def test_first_redis_of_the_settings_holds_the_locks(conf, url, setting):
    """setnx_url, else the result backend, else the broker."""
    assert lock_url(app_with(**conf)) == (url, setting)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"broker_url": "amqp://x"}, "no Redis for locks: setnx_url is not set"),
        ({"broker_url": "redis://a;redis://b"}, "broker_url names several servers"),
        ({"setnx_url": "memcached://a"}, "setnx_url has the scheme 'memcached'"),
        (
            {"setnx_url": "a:6379/1"},
            r"no scheme: 'a:6379/1'; write .* such as 'redis://localhost:6379/1'",
        ),
        ({"setnx_url": "me:s3cret@a"}, r"no scheme: '\*\*@a'"),
        ({"setnx_url": "//:s3cr@t@a?password=b"}, r"no scheme: '\*\*@a\?password=\*\*'"),
        ({"setnx_url": ["redis://:s3cret@a"]}, "must be one URL, as text, .*, not a list$"),
        ({"setnx_url": "sentinel://a"}, "set setnx_transport_options = .*master_name"),
        ({"broker_url": "sentinel://a;sentinel://b"}, "set broker_transport_options = .*master_name"),
        ({"setnx_url": "redis+cluster://a/1"}, "has only database 0"),
    ],
)
def test_missing_or_unusable_redis_is_an_error_that_says_what_to_do(conf, message):
    """No lock server: said at once, never guessed."""
    with pytest.raises(OptionError, match=message):
        client_for(app_with(**conf))


TLS_FILES = {"ssl_ca_certs": "/ca.pem", "ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}
READ = {
    "user and encoded password": (
        {"setnx_url": "redis://bob:p%40ss%2Fword@host:6380/5"},
        {"username": "bob", "password": "p@ss/word", "host": "host", "port": 6380, "db": 5},
    ),
    "socket and its database": (
        {"setnx_url": "redis+socket:///run/redis.sock?virtual_host=4"},
        {"path": "/run/redis.sock", "db": 4},
    ),
    "timeouts are our own": (
        {"setnx_url": "redis://h/0?socket_timeout=100", "redis_socket_timeout": 120},
        {"socket_timeout": 2.0, "socket_connect_timeout": 2.0},
    ),
    "a timeout of the user's": (
        {"setnx_url": "redis://h/0", "setnx_timeout": timedelta(seconds=5)},
        {"socket_timeout": 5.0, "socket_connect_timeout": 5.0},
    ),
    "files of Celery's ssl options": (
        {"broker_url": "rediss://h", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED, **TLS_FILES}},
        TLS_FILES,
    ),
}


@pytest.mark.parametrize(("conf", "expected"), READ.values(), ids=READ)
def test_client_is_made_as_the_settings_say(conf, expected):
    """All parts of a URL are read; whatever the result backend waits for, a command answers soon or fails."""
    read = parameters(**conf)
    assert expected.items() <= read.items()
    assert read["retry"]._retries == 1


def test_timeout_that_changes_counts_from_the_next_command_on():
    """As every setting of ours; a worker's event loop waits for no longer than anybody else."""
    app = app_with(setnx_url="redis://h/0")
    first = client_for(app)
    app.conf.setnx_timeout = 0.25
    clients = client_for(app), quick_client_for(app)
    assert client_for(app) is not first
    assert [each.connection_pool.connection_kwargs["socket_timeout"] for each in clients] == [0.25, 0.25]


def test_unix_socket_serves_locks(tmp_path):
    """A real server behind a real socket."""
    with EmbeddedServer(unixsocket=str(tmp_path / "r.sock")):
        assert client_for(app_with(setnx_url=f"redis+socket://{tmp_path}/r.sock")).ping()


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"setnx_url": "rediss://h"}, ssl.CERT_REQUIRED),
        ({"setnx_url": "rediss://h?ssl_cert_reqs=CERT_NONE"}, ssl.CERT_NONE),
        ({"setnx_url": "rediss://h", "redis_backend_use_ssl": {"ssl_cert_reqs": "none"}}, ssl.CERT_NONE),
        ({"result_backend": "rediss://h?ssl_cert_reqs=required"}, ssl.CERT_REQUIRED),
        ({"result_backend": "rediss://h", "redis_backend_use_ssl": {"ssl_cert_reqs": "none"}}, ssl.CERT_NONE),
        ({"broker_url": "rediss://h", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}}, ssl.CERT_NONE),
        ({"broker_url": "redis://h", "broker_use_ssl": {"ssl_cert_reqs": "required"}}, ssl.CERT_REQUIRED),
    ],
)  # fmt: skip
def test_tls_verifies_unless_told_otherwise(conf, expected):
    """rediss:// with Celery's ssl options; a URL that is silent about it is verified."""
    pool = client_for(app_with(**conf)).connection_pool
    assert issubclass(pool.connection_class, redis.SSLConnection)
    assert pool.make_connection().cert_reqs == expected


def test_tls_of_the_result_backend_is_not_used_for_another_server():
    """redis_backend_use_ssl speaks of the backend, not of a plain setnx_url."""
    options = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    pool = client_for(app_with(setnx_url="redis://h", redis_backend_use_ssl=options)).connection_pool
    assert not issubclass(pool.connection_class, redis.SSLConnection)
    assert not any(name.startswith("ssl_") for name in pool.connection_kwargs)


def test_apps_of_one_process_have_clients_of_their_own():
    """Two apps never share a client by accident; one app keeps its client."""
    one, other = app_with(setnx_url="redis://a"), app_with(setnx_url="redis://b")
    assert client_for(one) is client_for(one)
    assert client_for(one) is not client_for(other)
    assert client_for(other).connection_pool.connection_kwargs["host"] == "b"


def test_forked_child_has_a_client_of_its_own(server):
    """One client per process: a child never reads its parent's replies."""
    app = app_with(setnx_url=server.url(1))
    parents = client_for(app)
    assert parents.ping()
    assert exit_code_of_fork(lambda: client_for(app) is parents or not client_for(app).ping()) == 0
    assert client_for(app) is parents
    assert parents.ping()


@pytest.fixture(autouse=True)
def instant(monkeypatch):
    """The check's own clock stands still: a late reply of a slow machine is no trouble of the server's."""
    monkeypatch.setattr(trial, "SetnxLock", partial(SetnxLock, clock=lambda: 0.0))


def start_worker_check(app: Celery) -> None:
    """What a worker does when it starts."""
    LockServerCheck(SimpleNamespace(app=app)).start(SimpleNamespace(app=app))


def test_worker_start_leaves_nothing_behind(locks, server, caplog):
    """A good server: no word, and no key stays."""
    start_worker_check(app_with(setnx_url=server.url(1)))
    assert caplog.text == ""
    assert lock_keys(locks) == set()


def test_worker_start_leaves_no_connection_behind(locks, server):
    """In the parent of a prefork pool nobody would use those again."""
    app = app_with(setnx_url=server.url(1), setnx_transport_options={"client_name": "check"})
    start_worker_check(app)
    wait_until(lambda: "check" not in [each["name"] for each in locks.client_list()], "all are closed", 10)
    assert SetnxLock(client_for(app), "lock.later").acquire().lock.release() == "released"


NEEDED = [
    *("eval", "evalsha", "time", "get", "mget", "exists", "set", "getset"),
    *("del", "pttl", "pexpire", "pexpireat"),
    *("zadd", "zrem", "zremrangebyscore", "zrange", "zrangebyscore", "zrevrange", "zrevrangebyscore"),
    *("zcount", "zrank", "zscore", "hset", "hget", "hdel"),
]


@pytest.mark.parametrize("command", ["eval|evalsha", *(name for name in NEEDED[2:] if name != "get")])
def test_worker_does_not_start_where_the_acl_forbids_a_command(limited, command, caplog):
    """The missing permission is named before the first task needs it, a take-over's included."""
    app = app_with(setnx_url=limited("~*", "+@all", *[f"-{name}" for name in command.split("|")]))
    with pytest.raises(LockRefused, match="Redis refuses to serve the lock") as refused:
        start_worker_check(app)
    assert "This worker cannot lock" in caplog.text
    assert command.split("|")[-1] in refused.value.reason.lower()
    assert ".." not in caplog.text


@pytest.mark.parametrize("command", ["getset", "zadd", "hset", "pexpireat", "del", "zcount"])
def test_worker_start_that_is_refused_leaves_nothing_that_stays(limited, locks, command):
    """What the trial had written is deleted; where DEL is forbidden it lapses at once."""
    with pytest.raises(LockRefused):
        start_worker_check(app_with(setnx_url=limited("~*", "+@all", f"-{command}")))
    wait_until(lambda: not lock_keys(locks), "no key is left", 10)


@pytest.mark.parametrize(
    ("change", "do"),
    [
        (lambda url: url.replace("redis://", "redis://nobody:wrong@"), "Check the user and the password"),
        (lambda url: f"{url}99", "the server must have the database"),
    ],
    ids=["password", "database"],
)
def test_worker_that_is_not_let_in_is_told_what_is_wrong_with_its_url(server, change, do, caplog):
    """No permission is asked for that would not help."""
    with pytest.raises(LockRefused):
        start_worker_check(app_with(setnx_url=change(server.url(1))))
    assert do in caplog.text
    assert "EVAL" not in caplog.text
    assert ".." not in caplog.text


def test_worker_starts_with_only_the_needed_commands(limited):
    """The permissions that the error message asks for are enough; INFO is not among them."""
    assert all(name.upper() in str(LockRefused("k", "NOPERM")) for name in NEEDED)
    rules = [f"+{name}" for name in NEEDED]
    start_worker_check(app_with(setnx_url=limited("~setnx:*", *rules, db=0)))


def test_client_sends_again_after_a_lost_reply(proxy, locks):
    """One lost reply is no outage, whatever this redis-py does by itself."""
    client = client_for(app_with(setnx_url=proxy.url(LOCK_DB)))
    SetnxLock(client, "lock.first").acquire()
    with proxy.fault("drop_reply", containing=b"lock.again"):
        assert SetnxLock(client, "lock.again").acquire().acquired


def test_worker_start_warns_of_a_server_that_evicts(caplog):
    """maxmemory with a policy other than noeviction can drop locks."""
    with EmbeddedServer(**{"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}) as evicting:
        start_worker_check(app_with(setnx_url=evicting.url()))
    assert "maxmemory-policy allkeys-lru" in caplog.text


def test_worker_starts_without_its_lock_server(caplog):
    """A server that is down may come back: a warning, no refusal."""
    start_worker_check(app_with(setnx_url="redis://127.0.0.1:1/0"))
    assert "Until it answers, tasks do as their on_redis_error says" in caplog.text
