"""The servers that an app's settings name, as Celery reads them: the one of its locks, and its client.

Nothing else in the package reads Celery's settings about servers.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.backends import BACKEND_ALIASES, by_url
from celery.backends.redis import RedisBackend, SentinelBackend
from kombu.utils.url import as_url
from redis.backoff import ExponentialBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_setnx.address import (
    EXAMPLE,
    SCHEMES,
    Address,
    connecting,
    connection_options,
    database,
    hosts_of,
    masked,
    options_of,
    parse,
    scheme_of,
    split,
)
from celery_setnx.configured import configured
from celery_setnx.exceptions import OptionError
from celery_setnx.options import timeout_s as usual_timeout_s

_QUICK_S = 0.5
_TRANSPORT_OPTIONS = {
    "setnx_url": "setnx_transport_options",
    "result_backend": "result_backend_transport_options",
    "broker_url": "broker_transport_options",
}
_REDIS_ALIASES = ("redis", "rediss", "sentinel")
_INSECURE = {"ssl_cert_reqs": ssl.CERT_NONE}  # what kombu takes rediss:// for that says no more


class _Known(NamedTuple):
    """A client, and what the settings were that it was made from."""

    client: redis.Redis
    state: list[Any]


def client_for(app: Celery) -> redis.Redis:
    """The Redis client that holds the app's locks: made at first use, anew in every process.

    And anew when the settings have changed since: locks are where the settings say, whenever they have come.
    """
    clients: dict[int, _Known] = app.__dict__.setdefault("_setnx_clients", {})
    pid, state = os.getpid(), configured(app)
    known = clients.get(pid)
    if known is None or known.state is not state:
        # A forked child leaves its parent's client alone: the sockets are the parent's.
        known = clients[pid] = _Known(new_client(app), state)
    return known.client


def quick_client_for(app: Celery) -> redis.Redis:
    """The same for a worker's event loop, which must not wait for a server that is away."""
    usual = client_for(app)
    quick: redis.Redis | None = usual.__dict__.get("_setnx_quick")
    if quick is None:
        timeout_s = min(_QUICK_S, usual_timeout_s(app.conf))
        quick = usual.__dict__.setdefault("_setnx_quick", new_client(app, timeout_s))
    return quick


def new_client(app: Celery, timeout_s: float | None = None) -> redis.Redis:
    """A Redis client of one's own for the app's locks, with `setnx_timeout`; see `client_for`."""
    url, setting = lock_url(app)
    timeout_s = timeout_s or usual_timeout_s(app.conf)
    with _usable(setting, url):
        client: redis.Redis = _client(app, url, setting, timeout_s)
    # For a thread that may share no connection with others.
    client.setnx_again = partial(new_client, app)  # type: ignore[attr-defined]
    return client


def lock_address(app: Celery) -> Address:
    """How the clients of the app's locks connect, whichever settings say so."""
    url, setting = lock_url(app)
    with _usable(setting, url):
        return _address(app, url, setting)


def lock_url(app: Celery) -> tuple[str, str]:
    """The URL of the Redis that holds the app's locks, and the setting it comes from.

    `setnx_url` if given, else the result backend if it is a Redis, else the broker if it is one.
    """
    explicit = os.environ.get("CELERY_SETNX_URL") or app.conf.get("setnx_url")
    if explicit:
        return _supported(explicit, "setnx_url"), "setnx_url"
    if os.environ.get("SETNX_URL"):
        raise OptionError(
            "the environment variable SETNX_URL is not read: set setnx_url in the app's configuration, or "
            "rename the variable to CELERY_SETNX_URL"
        )
    backend = _redis_backend(app)
    if backend is not None:
        return backend, "result_backend"
    urls, read = _joined(broker_write_urls(app)), _joined(broker_read_urls(app))
    if scheme_of(urls[0]) not in SCHEMES:
        raise OptionError(
            f"no Redis for locks: setnx_url is not set, and neither result_backend "
            f"({scheme_of(backend_url(app)) or None}) nor broker_url ({scheme_of(urls[0])}) is one of "
            f"{', '.join(SCHEMES)}. Set setnx_url, such as {EXAMPLE!r}"
        )
    if len(urls) > 1 and len({_place(app, url) for url in urls}) > 1:
        raise OptionError(
            "broker_url names several servers, but all locks must be on one: set setnx_url to that Redis"
        )
    if read != urls and {_place(app, url) for url in read} != {_place(app, urls[0])}:
        raise OptionError(
            "broker_read_url and broker_write_url name different servers, but all locks must be on one: set "
            "setnx_url to that Redis"
        )
    return urls[0], "broker_url"


def backend_url(app: Celery) -> str:
    """What the app's result backend is made of, as Celery reads it: a URL, an alias, or a class's name."""
    named = app.backend_cls or app.conf.result_backend or ""
    return named if isinstance(named, str) else f"{named.__module__}:{named.__qualname__}"


def broker_read_urls(app: Celery) -> list[str]:
    """The URLs that the app's workers read from, as Celery reads them; several are for failover."""
    return _broker_urls(app, app.conf.broker_read_url)


def broker_write_urls(app: Celery) -> list[str]:
    """The URLs that calls are published to, as Celery reads them; several are for failover."""
    return _broker_urls(app, app.conf.broker_write_url)


def transport_options(app: Celery, setting: str) -> dict[str, Any]:
    """What goes with the URL of `setnx_url`, `result_backend` or `broker_url` besides."""
    return dict(app.conf.get(_TRANSPORT_OPTIONS[setting]) or {})


def _broker_urls(app: Celery, named: Any) -> list[str]:
    """A broker's URLs, one by one; what is only a host has the scheme of the first, or Celery's settings."""
    texts = [named] if isinstance(named, str) else [str(url) for url in named or ()]
    text = ";".join(texts).strip("; ")
    return split(text if "://" in text.partition(";")[0] else _whole(app, text or "localhost"))


def _whole(app: Celery, host: str) -> str:
    """The URL of a broker that Celery's settings name in parts."""
    conf = app.conf
    password = conf.broker_password if isinstance(conf.broker_password, str) else ""  # else it is asked for
    vhost = quote(conf.broker_vhost or "", safe="")
    named = [
        as_url(conf.broker_transport or "amqp", each, conf.broker_port, conf.broker_user, password, vhost)
        for each in host.split(";")
    ]
    return ";".join(map(str, named))


def _joined(urls: list[str]) -> list[str]:
    """Each server's URL: several Sentinels name one."""
    return [";".join(urls)] if all(scheme_of(url) == "sentinel" for url in urls) else urls


class LateCluster:
    """A cluster's client that connects at its first command, as the clients of single servers do."""

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._client: Any = None
        self._connecting = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if self._client is None:
            with self._connecting:
                if self._client is None:
                    self._client = self._connect()
        return getattr(self._client, name)

    @property
    def is_unused(self) -> bool:
        """True until it connects."""
        return self._client is None

    def get_nodes(self) -> list[Any]:
        """Its nodes, as far as they are known."""
        return [] if self._client is None else list(self._client.get_nodes())

    def keyslot(self, key: str) -> int:
        """The slot of a key."""
        return int(self.__getattr__("keyslot")(key))


def _place(app: Celery, url: str) -> tuple[Any, ...]:
    """Where the data of a broker's URL are: one spelling for each place."""
    if scheme_of(url) not in SCHEMES:
        return (url,)
    hosts, params = _as_broker(app, url)
    local = ("localhost", "::1")
    named = {("127.0.0.1" if host.lower() in local else host.lower(), port) for host, port in hosts}
    return params.get("path") or frozenset(named), params["db"]


def _redis_backend(app: Celery) -> str | None:
    """The URL of the app's result backend if that is a Redis."""
    named = app.backend_cls or app.conf.result_backend
    if scheme_of(named).endswith("+cluster"):
        return str(named)
    backend_class, url = _backend_class(app, named)
    if backend_class is None or not issubclass(backend_class, RedisBackend):
        return None
    if url is None:  # an alias, or the class
        at = _connparams(app, backend_class, url)
        return f"redis://{at['host']}:{at['port']}/{at['db']}"
    return str(named) if scheme_of(named) in SCHEMES else str(url)


def _backend_class(app: Celery, named: Any) -> tuple[Any, Any]:
    """The class of the app's result backend, and its URL, as Celery finds them.

    No class if it is known that it is none of Redis: it may not be installed where calls are only published.
    """
    alias = scheme_of(named).partition("+")[0] if isinstance(named, str) else named
    is_other = alias in BACKEND_ALIASES and alias not in (*_REDIS_ALIASES, *app.loader.override_backends)
    if not named or is_other:
        return None, None
    if not isinstance(named, str):
        return named, None
    try:
        backend_class, url = by_url(named, app.loader)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise OptionError(
            f"result_backend ({masked(str(named))}) cannot be loaded, and it may hold the locks: {error}. "
            "Fix it, or set setnx_url"
        ) from error
    return (backend_class if isinstance(backend_class, type) else None), url


def _connparams(app: Celery, backend_class: Any, url: str | None) -> dict[str, Any]:
    """How the result backend connects, as Celery makes it of its settings and the URL."""
    is_silent = "ssl_cert_reqs" not in (app.conf.redis_backend_use_ssl or {})
    if url and scheme_of(url) == "rediss" and "ssl_cert_reqs=" not in url and is_silent:
        # The backend refuses a URL that is silent about this; we verify.
        url += ("&" if "?" in url else "?") + "ssl_cert_reqs=required"
    with _usable("result_backend", url or ""):
        return dict(backend_class(app=app, url=url).connparams)


def _as_backend(app: Celery, url: str) -> Address:
    """How Celery connects to the result backend."""
    backend_class, own_url = _backend_class(app, app.backend_cls or app.conf.result_backend)
    is_sentinel = bool(own_url) and issubclass(backend_class, SentinelBackend)
    # That of Sentinels says the same of the first, but fails for providers of credentials.
    params = _connparams(app, *(RedisBackend, split(own_url)[0]) if is_sentinel else (backend_class, own_url))
    given = params.pop("connection_class", None)
    if given is not None and issubclass(given, redis.SSLConnection):
        params["ssl"] = True
    host, port = params.pop("host", None), params.pop("port", None)
    return Address(hosts_of(url, app.conf.redis_port or 6379) if is_sentinel else [(host, port)], params)


def _as_broker(app: Celery, url: str) -> Address:
    """How kombu connects to the broker, a Redis: by its URL, and by Celery's settings beside it."""
    scheme = scheme_of(url)
    if scheme not in ("redis", "rediss", "sentinel"):
        return parse(url, "broker_url")
    with _usable("broker_url", url):
        named = app.connection_for_write(split(url)[0])
    params: dict[str, Any] = {
        "username": named.userid,
        "password": named.password,
        "credential_provider": getattr(named, "credential_provider", None),  # kombu 5.7
        "db": database(named.virtual_host, "broker_url"),
    }
    tls = named.ssl
    if tls == _INSECURE and not app.conf.broker_use_ssl and "ssl_" not in url:
        tls = {}  # we verify
    if scheme == "rediss" or (tls and isinstance(tls, dict)):  # as in kombu, True alone is none
        params = {**(tls if isinstance(tls, dict) else {}), **params, "ssl": True}
    is_sentinel = scheme == "sentinel"
    return Address(hosts_of(url) if is_sentinel else [(named.hostname, named.port or 6379)], params)


def _as_named(app: Celery, url: str, setting: str) -> Address:
    """How to connect to a server that is no broker and no backend of Celery's, or is a cluster."""
    hosts, params = parse(url, setting)
    tls = app.conf.broker_use_ssl if setting == "broker_url" else app.conf.redis_backend_use_ssl
    return Address(hosts, {**(tls if params.get("ssl") and isinstance(tls, dict) else {}), **params})


def _address(app: Celery, url: str, setting: str) -> Address:
    """How to connect: as the URL and Celery's settings beside it say, and then the transport options."""
    if setting == "setnx_url" or scheme_of(url).endswith("+cluster"):
        hosts, params = _as_named(app, url, setting)
    else:
        hosts, params = _as_backend(app, url) if setting == "result_backend" else _as_broker(app, url)
    read = options_of if setting == "setnx_url" else connection_options
    said = {name: value for name, value in params.items() if value is not None}
    options = read(transport_options(app, setting), _TRANSPORT_OPTIONS[setting])
    return Address(hosts, connecting({**options, **said}, setting))


def _client(app: Celery, url: str, setting: str, timeout_s: float) -> Any:
    (hosts, params), scheme = _address(app, url, setting), scheme_of(url)
    if scheme == "sentinel":
        return _sentinel_client(hosts, params, transport_options(app, setting), setting, timeout_s)
    if scheme.endswith("+cluster"):
        return _cluster_client(hosts, params, timeout_s)
    return _single_client(hosts[0], params, timeout_s)


def _single_client(at: tuple[str, int], params: dict[str, Any], timeout_s: float) -> redis.Redis:
    params = {**params, **_ours(timeout_s)}
    is_secure = params.pop("ssl", False)
    if "path" in params:
        params["connection_class"] = redis.UnixDomainSocketConnection
        for of_tcp in ("socket_connect_timeout", "socket_keepalive", "socket_keepalive_options"):
            params.pop(of_tcp, None)
    else:
        params.update(host=at[0], port=at[1])
        if is_secure:
            params["connection_class"] = redis.SSLConnection
    for refused in ("max_connections", "retry_on_timeout"):
        params.pop(refused, None)
    pool = redis.ConnectionPool(**params)
    pool.connection_class(**pool.connection_kwargs)  # is refused if it could not be made
    return redis.Redis(connection_pool=pool)


def _ours(timeout_s: float, *, retries: int = 1) -> dict[str, Any]:
    """What every connection to a lock server has, whatever the result backend waits for.

    A task must not hang on a dead server. A command may be sent again: every script knows its own token.
    """
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(ExponentialBackoff(cap=0.1, base=0.01), retries),
        # redis-py 5 sends nothing again unless it is told after which errors.
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        "decode_responses": False,
        # A connection is tried by using it: a PING would cost a round trip, and a permission of its own.
        "health_check_interval": 0,
    }


def _sentinel_client(
    hosts: list[tuple[str, int]],
    params: dict[str, Any],
    options: Mapping[str, Any],
    setting: str,
    timeout_s: float,
) -> redis.Redis:
    """The master that the Sentinels name, asked again with every new connection."""
    if not options.get("master_name"):
        raise OptionError(
            f"{setting} names Sentinels, but no master: set {_TRANSPORT_OPTIONS[setting]} = "
            '{"master_name": "..."}'
        )
    if params.pop("ssl", False):
        params["connection_class"] = redis.sentinel.SentinelManagedSSLConnection
    login = connecting(options.get("sentinel_kwargs") or {}, f"sentinel_kwargs of {setting}")
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        hosts,
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={**_ours(timeout_s, retries=0), **login},
    )
    params = {**params, **_ours(timeout_s)}
    return sentinels.master_for(options["master_name"], **params)  # type: ignore[no-any-return,no-untyped-call]


def _cluster_client(hosts: list[tuple[str, int]], params: dict[str, Any], timeout_s: float) -> Any:
    """A cluster, of which the URL names one node or more; it finds the others."""
    if params.pop("db", 0):
        raise OptionError("a Redis Cluster has only database 0")
    nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
    params = {**params, **_ours(timeout_s)}
    return LateCluster(partial(RedisCluster, startup_nodes=nodes, **params))


@contextmanager
def _usable(setting: str, url: str) -> Iterator[None]:
    """What Celery, kombu or redis-py cannot make of a URL and its settings is an OptionError."""
    try:
        yield
    except OptionError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, redis.RedisError) as error:
        said = f": {error}" if "@" not in url else ""  # it may quote a part of the password
        raise OptionError(f"{setting} cannot be used ({masked(url)}){said}") from error


def _supported(url: Any, setting: str) -> str:
    if not isinstance(url, str):
        raise OptionError(
            f"{setting} must be one URL, as text, such as {EXAMPLE!r}, not a {type(url).__name__}"
        )
    if "://" not in url:
        shown = masked(re.sub(r"^.*@", "**@", url))
        raise OptionError(
            f"{setting} has no scheme: {shown!r}; write a URL, such as {EXAMPLE!r}. "
            f"The schemes are {', '.join(SCHEMES)}"
        )
    if scheme_of(url) not in SCHEMES:
        raise OptionError(
            f"{setting} has the scheme {scheme_of(url)!r}, but locks need one of {', '.join(SCHEMES)}"
        )
    return url
