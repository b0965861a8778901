"""The Redis that holds an app's locks: which one it is, and its client."""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from typing import Any

import redis
from celery import Celery
from celery.app.backends import by_url
from redis.backoff import ExponentialBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_setnx.exceptions import OptionError

SOCKET_TIMEOUT_S = 2.0
_QUICK_S = 0.5
SCHEMES = ("redis", "rediss", "redis+socket", "sentinel", "redis+cluster", "rediss+cluster")
_EXAMPLE = "redis://localhost:6379/1"
_PARAMS = (
    "host",
    "port",
    "path",
    "username",
    "password",
    "db",
    "connection_class",
    "client_name",
    "protocol",
)
_LOGIN = ("username", "password", "db", "client_name", "protocol")
_TRANSPORT_OPTIONS = {
    "setnx_url": "setnx_transport_options",
    "result_backend": "result_backend_transport_options",
    "broker_url": "broker_transport_options",
}
_REQS = {"CERT_NONE": "none", "CERT_OPTIONAL": "optional", "CERT_REQUIRED": "required"}


def client_for(app: Celery) -> redis.Redis:
    """The Redis client that holds the app's locks: made at first use, anew in every process."""
    clients: dict[int, redis.Redis] = app.__dict__.setdefault("_setnx_clients", {})
    pid = os.getpid()
    client = clients.get(pid)
    if client is None:
        # A forked child leaves its parent's client alone: the sockets are the parent's.
        client = clients.setdefault(pid, new_client(app))
    return client


def quick_client_for(app: Celery) -> redis.Redis:
    """The same for a worker's event loop, which must not wait for a server that is away."""
    usual = client_for(app)
    quick: redis.Redis | None = usual.__dict__.get("_setnx_quick")
    if quick is None:
        quick = usual.__dict__.setdefault("_setnx_quick", new_client(app, _QUICK_S))
    return quick


def new_client(app: Celery, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A Redis client of one's own for the app's locks; see `client_for`."""
    url, setting = lock_url(app)
    if _scheme(url) == "sentinel":
        client = _sentinel_client(app, url, setting, timeout_s)
    elif _scheme(url).endswith("+cluster"):
        client = _cluster_client(app, url, timeout_s)
    else:
        client = redis.Redis(connection_pool=_pool(app, url, setting, timeout_s))
    # For a thread that may share no connection with others.
    client.setnx_again = partial(new_client, app)  # type: ignore[attr-defined]
    return client


def lock_url(app: Celery) -> tuple[str, str]:
    """The URL of the Redis that holds the app's locks, and the setting it comes from.

    `setnx_url` if given, else the result backend if it is a Redis, else the broker if it is one.
    """
    explicit = app.conf.get("setnx_url")
    if explicit:
        return _supported(explicit, "setnx_url"), "setnx_url"
    backend = app.conf.get("result_backend")
    if isinstance(backend, str) and _scheme(backend) in SCHEMES:
        return backend, "result_backend"
    # Producers and workers may have an URL each; the locks must be the same for both.
    brokers = app.conf.get("broker_url") or app.conf.get("broker_write_url") or "amqp://"
    urls = brokers.split(";") if isinstance(brokers, str) else list(brokers)
    if all(_scheme(url) == "sentinel" for url in urls):
        return ";".join(urls), "broker_url"
    if _scheme(urls[0]) in SCHEMES:
        if len(urls) > 1:
            raise OptionError(
                "broker_url names several servers, and locks must live on exactly one: "
                "set setnx_url to the Redis that holds them"
            )
        return urls[0], "broker_url"
    raise OptionError(
        f"no Redis for locks: setnx_url is not set, and neither result_backend ({_scheme(backend) or None}) "
        f"nor broker_url ({_scheme(urls[0])}) is one of {', '.join(SCHEMES)}. Set setnx_url, "
        f"such as {_EXAMPLE!r}"
    )


def masked(url: str) -> str:
    """A URL without its passwords, for messages."""
    url = re.sub(r"(password=)[^&;]*", r"\1**", url)
    return re.sub(r"((?:^|;)(?:[\w+]+://)?[^:@/;]*):(?!//)[^;]*@", r"\1:**@", url)


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

    def keyslot(self, key: str) -> int:
        """The slot of a key."""
        return int(self.__getattr__("keyslot")(key))


def _pool(app: Celery, url: str, setting: str, timeout_s: float) -> redis.ConnectionPool:
    params = _params(app, url, setting)
    params = {**params, **_ours(timeout_s)}
    if "path" in params:
        del params["socket_connect_timeout"]
    for refused in ("max_connections", "retry_on_timeout"):
        params.pop(refused, None)
    return redis.ConnectionPool(**params)


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


def _sentinel_client(app: Celery, url: str, setting: str, timeout_s: float) -> redis.Redis:
    """The master that the Sentinels name, asked again with every new connection."""
    options = _transport_options(app, setting)
    if not options.get("master_name"):
        raise OptionError(
            f"{setting} names Sentinels, but not their master: set {_TRANSPORT_OPTIONS[setting]} = "
            '{"master_name": "..."}'
        )
    hosts, params = _hosts_and_params(app, url, setting)
    if params.pop("ssl", False):
        params["connection_class"] = redis.sentinel.SentinelManagedSSLConnection
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        hosts,
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={**_ours(timeout_s, retries=0), **(options.get("sentinel_kwargs") or {})},
    )
    params = {**params, **_ours(timeout_s)}
    return sentinels.master_for(options["master_name"], **params)  # type: ignore[no-any-return,no-untyped-call]


def _cluster_client(app: Celery, url: str, timeout_s: float) -> Any:
    """A cluster, of which the URL names one node or more; it finds the others."""
    hosts, params = _hosts_and_params(app, url.replace("+cluster://", "://"), "setnx_url")
    if params.pop("db", 0):
        raise OptionError(f"a Redis Cluster has no databases but 0: {masked(url)}")
    nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
    params = {**params, **_ours(timeout_s)}
    return LateCluster(partial(RedisCluster, startup_nodes=nodes, **params))


def _hosts_and_params(app: Celery, url: str, setting: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """All hosts of a URL, and how to connect to the servers they lead to, as the first one says."""
    hosts: list[tuple[str, int]] = []
    params: dict[str, Any] = {}
    default_port = 26379 if url.startswith("sentinel:") else 6379
    scheme = url.partition("://")[0]
    for part in url.split(";"):
        part = part if "://" in part else f"{scheme}://{part}"
        parsed = parse_url(re.sub(r"^sentinel:", "redis:", part))  # type: ignore[no-untyped-call]
        hosts.append((parsed.get("host", "localhost"), parsed.get("port", default_port)))
        own = {name: parsed[name] for name in parsed if name in _LOGIN or name[:4] == "ssl_"}
        params = {**own, **params}
        if parsed.get("connection_class") is redis.SSLConnection:
            params["ssl"] = True
    ssl = app.conf.get("broker_use_ssl" if setting == "broker_url" else "redis_backend_use_ssl")
    if ssl and (params.get("ssl") or setting != "setnx_url"):
        params = {**(ssl if isinstance(ssl, dict) else {}), **params, "ssl": True}
    return hosts, _with_requirement(params)


def _transport_options(app: Celery, setting: str) -> dict[str, Any]:
    return app.conf.get(_TRANSPORT_OPTIONS[setting]) or {}


def _with_requirement(params: dict[str, Any]) -> dict[str, Any]:
    """Celery's names of what TLS requires are redis-py's in capitals."""
    if "ssl_cert_reqs" in params:
        params["ssl_cert_reqs"] = _REQS.get(params["ssl_cert_reqs"], params["ssl_cert_reqs"])
    return params


def _params(app: Celery, url: str, setting: str) -> dict[str, Any]:
    if setting == "result_backend":
        ssl = app.conf.get("redis_backend_use_ssl") or {}
        if _scheme(url) == "rediss" and "ssl_cert_reqs" not in ssl and "ssl_cert_reqs=" not in url:
            # The backend refuses a URL that is silent about this; we verify.
            url += ("&" if "?" in url else "?") + "ssl_cert_reqs=required"
        backend_class, url = by_url(url, app.loader)
        return dict(backend_class(app=app, url=url).connparams)
    parsed = parse_url(re.sub(r"^redis\+socket:", "unix:", url))  # type: ignore[no-untyped-call]
    if "virtual_host" in parsed:
        parsed["db"] = int(str(parsed["virtual_host"]).strip("/"))
    params = {name: parsed[name] for name in parsed if name in _PARAMS or name.startswith("ssl_")}
    secure = "connection_class" in params and issubclass(params["connection_class"], redis.SSLConnection)
    if setting == "broker_url":
        ssl = app.conf.get("broker_use_ssl")
    else:
        ssl = app.conf.get("redis_backend_use_ssl") if secure else None
    if ssl and "path" not in params:
        params = {**(ssl if isinstance(ssl, dict) else {}), **params, "connection_class": redis.SSLConnection}
    return _with_requirement(params)


def _supported(url: Any, setting: str) -> str:
    if not isinstance(url, str):
        raise OptionError(
            f"{setting} must be one URL as a text, such as {_EXAMPLE!r}, not a {type(url).__name__}"
        )
    if "://" not in url:
        shown = masked(re.sub(r"^.*@", "**@", url))
        raise OptionError(
            f"{setting} has no scheme: it is {shown!r}; write it as an URL, such as {_EXAMPLE!r}. "
            f"The schemes are {', '.join(SCHEMES)}"
        )
    if _scheme(url) not in SCHEMES:
        raise OptionError(
            f"{setting} has the scheme {_scheme(url)!r}; this version keeps locks on {', '.join(SCHEMES)}"
        )
    return url


def _scheme(url: Any) -> str:
    return url.partition("://")[0] if isinstance(url, str) and "://" in url else masked(str(url or ""))
