"""Who logs in to the lock server, and what else a URL or transport options say of its connections."""

import inspect
from typing import Any

import kombu
import pytest
import redis
from celery import Celery
from celery.backends import redis as celery_redis
from celery.exceptions import SoftTimeLimitExceeded

from celery_setnx import LockUnavailable, OptionError, SetnxLock
from celery_setnx.connection import client_for
from tests.conftest import LOCK_DB
from tests.topologies.servers import Cluster, Sentinels

pytestmark = pytest.mark.usefixtures("alone")

NAMED = f"{__name__}.Provider"
# Plain Celery knows nothing of providers before.
KOMBU_READS = "credential_provider" in inspect.signature(kombu.Connection.__init__).parameters
CELERY_READS = hasattr(celery_redis, "CredentialProvider")


class Provider(redis.CredentialProvider):
    """Lets in without a password in any setting."""

    def get_credentials(self) -> Any:
        return "limited", "pw"


class DataProvider(redis.CredentialProvider):
    """For the nodes behind Sentinels."""

    def get_credentials(self) -> Any:
        return "default", Sentinels.PASSWORD


class SentinelProvider(redis.CredentialProvider):
    """For Sentinels themselves."""

    def get_credentials(self) -> Any:
        return "default", Sentinels.SENTINEL_PASSWORD


class NeedsArguments(Provider):
    """No name can make it."""

    def __init__(self, vault: str) -> None: ...


def app_with(**conf: Any) -> Celery:
    app = Celery("logging_in", set_as_current=False)
    app.conf.update(conf)
    return app


def parameters(**conf: Any) -> dict[str, Any]:
    return client_for(app_with(**conf)).connection_pool.connection_kwargs


@pytest.fixture
def bare(server, limited) -> str:
    """The lock database's URL without a login; there is a user whom the provider knows."""
    limited("~*", "+@all")
    return str(server.url(LOCK_DB))


QUERY = f"?credential_provider={NAMED}"
WAYS: dict[str, Any] = {
    "setnx_url": lambda url: {"setnx_url": url + QUERY},
    "name in options": lambda url: {
        "setnx_url": url,
        "setnx_transport_options": {"credential_provider": NAMED},
    },
    "class in options": lambda url: {
        "setnx_url": url,
        "setnx_transport_options": {"credential_provider": Provider},
    },
    "object in options": lambda url: {
        "setnx_url": url,
        "setnx_transport_options": {"credential_provider": Provider()},
    },
    "login beside it": lambda url: {"setnx_url": url.replace("//", "//who:else@") + QUERY},
    "broker's options": lambda url: {
        "broker_url": url,
        "broker_transport_options": {"credential_provider": Provider()},
    },
    "backend's options": lambda url: {
        "result_backend": url,
        "result_backend_transport_options": {"credential_provider": NAMED},
    },
}
if KOMBU_READS:
    WAYS["broker_url"] = lambda url: {"broker_url": url + QUERY}
    WAYS["broker's two URLs"] = lambda url: {
        "broker_url": url,
        "broker_read_url": url + QUERY,
        "broker_write_url": url + QUERY,
    }
if CELERY_READS:
    WAYS["result_backend"] = lambda url: {"result_backend": url + QUERY}
    WAYS["setting"] = lambda url: {"result_backend": url, "redis_backend_credential_provider": NAMED}


@pytest.mark.parametrize("way", WAYS)
def test_provider_of_credentials_logs_in(way, bare):
    """Wherever Celery, or we, have it from."""
    client = client_for(app_with(**WAYS[way](bare)))
    assert client.execute_command("ACL", "WHOAMI") == b"limited"
    assert "password" not in client.connection_pool.connection_kwargs


def test_provider_logs_in_to_a_socket(tmp_path):
    """A URL of a socket has no user in it at all."""
    from examples.embedded import EmbeddedServer

    with EmbeddedServer(unixsocket=str(tmp_path / "r.sock")):
        url = f"redis+socket://{tmp_path}/r.sock"
        admin = client_for(app_with(setnx_url=url))
        admin.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "+@all")
        for setting in ("setnx_url", "broker_url"):
            client = client_for(app_with(**{setting: url + QUERY}))
            assert client.execute_command("ACL", "WHOAMI") == b"limited"


def test_provider_logs_in_to_every_node_of_a_cluster(cluster: Cluster):
    """By the URL, and by options."""
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "+@all")
    first = cluster.url().partition(";")[0]
    for conf in (
        {"setnx_url": first + QUERY},
        {"setnx_url": first, "setnx_transport_options": {"credential_provider": NAMED}},
    ):
        client = client_for(app_with(**conf))
        told = [client.execute_command("ACL", "WHOAMI", target_nodes=node) for node in client.get_primaries()]
        assert told == [b"limited"] * 3


@pytest.mark.parametrize("setting", ["setnx_url", "broker_url", "result_backend"])
def test_providers_log_in_to_sentinels_and_to_their_master(setting):
    """Each its own; a name will do."""
    options = {
        "setnx_url": "setnx_transport_options",
        "result_backend": "result_backend_transport_options",
        "broker_url": "broker_transport_options",
    }[setting]
    given = {
        "master_name": "main",
        "credential_provider": f"{__name__}.DataProvider",
        "sentinel_kwargs": {"credential_provider": f"{__name__}.SentinelProvider"},
    }
    pool = client_for(
        app_with(**{setting: "sentinel://a:1/3;sentinel://b:2", options: given})
    ).connection_pool
    assert pool.connection_kwargs["credential_provider"].get_credentials()[1] == Sentinels.PASSWORD
    assert pool.connection_kwargs["db"] == 3
    (first, second) = (each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels)
    assert (first["host"], second["port"]) == ("a", 2)
    logins = [each["credential_provider"].get_credentials()[1] for each in (first, second)]
    assert logins == [Sentinels.SENTINEL_PASSWORD] * 2


@pytest.mark.skipif(not CELERY_READS, reason="this Celery has no such setting")
def test_sentinels_of_the_result_backend_have_what_celery_has_for_them():
    """Its settings count beside the URL."""
    conf = {
        "result_backend": "sentinel://a:1/3",
        "result_backend_transport_options": {"master_name": "main"},
        "redis_backend_credential_provider": NAMED,
    }
    assert parameters(**conf)["credential_provider"].get_credentials() == ("limited", "pw")
    conf.pop("redis_backend_credential_provider")
    conf |= {"redis_username": "me", "redis_password": "pw"}
    kept = parameters(**conf)
    assert (kept["username"], kept["password"], kept["db"]) == ("me", "pw", 3)


class Failing(Provider):
    """Its service of tokens is away, until it is not."""

    error: BaseException | None = OSError("no route to the vault")

    def get_credentials(self) -> Any:
        if self.error is not None:
            raise self.error
        return super().get_credentials()


def test_provider_that_fails_is_an_outage(bare):
    """What tasks do then, their on_redis_error says; with the next credentials it is over."""
    provider = Failing()
    options = {"credential_provider": provider}
    lock = SetnxLock(client_for(app_with(setnx_url=bare, setnx_transport_options=options)), "t:{outage}")
    with pytest.raises(LockUnavailable, match=r"Failing has no credentials .OSError: no route to the vault"):
        lock.acquire()
    provider.error = SoftTimeLimitExceeded()
    with pytest.raises(SoftTimeLimitExceeded):
        lock.acquire()
    provider.error = None
    assert lock.acquire().acquired
    assert lock.release()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nobodys.module.Provider", "cannot be created .*nobodys"),
        (f"{__name__}.NeedsArguments", "cannot be created .*vault"),
        ("builtins.dict", "is not a redis.CredentialProvider"),
        (7, "is not a redis.CredentialProvider"),
    ],
)
def test_provider_that_is_none_is_refused(named, said):
    """Not left out: somebody else would log in."""
    with pytest.raises(OptionError, match=said):
        parameters(setnx_url="redis://h", setnx_transport_options={"credential_provider": named})


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"setnx_url": "redis://h?pasword=x"}, "has an unknown option 'pasword'; did you mean 'password'"),
        ({"setnx_url": "redis://h?userid=bob"}, "has an unknown option 'userid'"),
        ({"setnx_url": "redis://h?database=4"}, "has an unknown option 'database'"),
        ({"setnx_url": "redis+cluster://h?credential_provder=x"}, "did you mean 'credential_provider'"),
        ({"setnx_url": "redis://h/abc"}, "names the database 'abc'"),
        ({"setnx_url": "redis://h?db=abc"}, "Invalid value for .db"),
        ({"setnx_url": "redis://h:port"}, "cannot be used"),
        ({"setnx_url": "redis://h?ssl_cert_reqs=none"}, "has TLS options, .* write rediss://"),
        (
            {"setnx_url": "redis://h", "setnx_transport_options": {"global_keyprefix": "a"}},
            "'global_keyprefix'",
        ),
        ({"setnx_url": "sentinel://h", "setnx_transport_options": {"mastername": "a"}}, "'master_name'"),
        ({"broker_url": "redis://h/abc"}, "names the database 'abc'"),
        ({"broker_url": "redis://h?pasword=x"}, "pasword"),
        ({"result_backend": "redis://h/abc"}, "abc"),
        ({"result_backend": "redis://h?pasword=x"}, "pasword"),
        ({"result_backend": "redis://h?ssl_cert_reqs=none"}, "cannot be used"),
    ],
)
def test_word_that_nobody_reads_is_refused(conf, said):
    """Left out, it would have somebody else log in, or to another database."""
    with pytest.raises(OptionError, match=said):
        client_for(app_with(**conf))


def test_refusal_tells_no_password():
    """Nor a part of one that looks like a port."""
    with pytest.raises(OptionError) as refused:
        client_for(app_with(setnx_url="redis://me:s3c/ret@h"))
    assert "s3c" not in str(refused.value)


KEPT: dict[str, Any] = {
    "of our URL": (
        {"setnx_url": "redis://h?client_name=shop&protocol=3&socket_keepalive=true"},
        {"client_name": "shop", "socket_keepalive": True},
    ),
    "of our options": (
        {
            "setnx_url": "redis://h",
            "setnx_transport_options": {"client_name": "shop", "username": "me", "password": "pw"},
        },
        {"client_name": "shop", "username": "me", "password": "pw"},
    ),
    "of the broker's options": (
        {
            "broker_url": "redis://h",
            "broker_transport_options": {
                "client_name": "shop",
                "socket_keepalive": True,
                "socket_keepalive_options": {4: 60},
                "visibility_timeout": 60,
                "global_keyprefix": "shop",
            },
        },
        {"client_name": "shop", "socket_keepalive": True, "socket_keepalive_options": {4: 60}},
    ),
    "of the backend's settings": (
        {"result_backend": "redis://h", "redis_socket_keepalive": True, "redis_username": "me"},
        {"username": "me", "socket_keepalive": True},
    ),
    "of a Sentinel's URL": (
        {
            "setnx_url": "sentinel://me:pw@h/2?client_name=shop",
            "setnx_transport_options": {"master_name": "m", "socket_keepalive": True},
        },
        {"username": "me", "password": "pw", "db": 2, "client_name": "shop", "socket_keepalive": True},
    ),
}


@pytest.mark.parametrize("of", KEPT)
def test_what_is_said_of_a_connection_is_kept(of):
    """Who logs in, the client's name, TCP's keepalive; the timeouts are our own."""
    conf, kept = KEPT[of]
    read = parameters(**conf)
    assert kept.items() <= read.items()
    assert read["socket_timeout"] == 2


def test_broker_without_tls_in_kombu_has_none_here():
    """`broker_use_ssl=True` says nothing to kombu's Redis."""
    pool = client_for(app_with(broker_url="redis://h", broker_use_ssl=True)).connection_pool
    assert not issubclass(pool.connection_class, redis.SSLConnection)


def test_sentinels_master_may_have_tls_by_our_own_options():
    """Their URL has no scheme for it."""
    options = {"master_name": "m", "ssl": True, "ssl_ca_certs": "/ca.pem"}
    pool = client_for(app_with(setnx_url="sentinel://h", setnx_transport_options=options)).connection_pool
    assert issubclass(pool.connection_class, redis.SSLConnection)
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
