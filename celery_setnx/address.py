"""What a URL and its options say of a Redis: its hosts and database, TLS, and who logs in. No settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import redis
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.imports import symbol_by_name
from redis.connection import parse_url

from celery_setnx.exceptions import OptionError

SCHEMES = ("redis", "rediss", "redis+socket", "sentinel", "redis+cluster", "rediss+cluster")
EXAMPLE = "redis://localhost:6379/1"
OF_SENTINELS = ("master_name", "min_other_sentinels", "sentinel_kwargs")

_LOGIN = ("username", "password", "credential_provider", "client_name", "protocol")
_ALIVE = ("socket_keepalive", "socket_keepalive_options")
_WHERE = ("host", "port", "path", "db", "virtual_host")
# What a connection of ours decides by itself, whatever is said of it.
_OURS = (
    *("socket_timeout", "socket_connect_timeout", "socket_read_size", "timeout", "health_check_interval"),
    *("retry", "retry_on_timeout", "retry_on_error", "max_connections", "decode_responses", "encoding"),
    *("encoding_errors", "lib_name", "lib_version", "driver_info", "legacy_responses"),
)
_READ = (*_LOGIN, *_ALIVE, *_OURS, "ssl")
_REQS = {"CERT_NONE": "none", "CERT_OPTIONAL": "optional", "CERT_REQUIRED": "required"}


class Address(NamedTuple):
    """Where a server is, and how to connect.

    Attributes:
        hosts: The hosts that the URL names, with their ports; none of a socket.
        params: How to connect to the servers that they lead to, in redis-py's words, as the first says.
    """

    hosts: list[tuple[str, int]]
    params: dict[str, Any]


class Login(redis.CredentialProvider):
    """A provider of credentials; while it has none, the server is out of reach, as with any other outage.

    Attributes:
        provider: The user's own.
    """

    def __init__(self, provider: redis.CredentialProvider) -> None:
        self.provider = provider

    def get_credentials(self) -> Any:
        """The provider's."""
        try:
            return self.provider.get_credentials()
        except (redis.RedisError, SoftTimeLimitExceeded):
            raise
        except Exception as error:
            kind = type(self.provider).__qualname__
            raise redis.ConnectionError(
                f"{kind} has no credentials ({type(error).__name__}: {error})"
            ) from error


def scheme_of(url: Any) -> str:
    """The scheme of a URL; of a text that is none, the text."""
    return url.partition("://")[0] if isinstance(url, str) and "://" in url else masked(str(url or ""))


def masked(url: str) -> str:
    """A URL without its passwords, for messages."""
    url = re.sub(r"(password=)[^&;]*", r"\1**", url)
    return re.sub(r"((?:^|;)(?:[\w+]+://)?[^:@/;]*):(?!//)[^;]*@", r"\1:**@", url)


def parse(url: str, setting: str) -> Address:
    """Read a URL, or several that are joined by semicolons; an OptionError says what nobody would read."""
    scheme = scheme_of(url)
    params: dict[str, Any] = {}
    for part in split(url):
        params = {**_params_of(part, setting), **params}
    if scheme.startswith("rediss"):
        params["ssl"] = True
    elif scheme != "sentinel" and any(name.startswith("ssl_") for name in params):
        secure = scheme.replace("redis", "rediss", 1)
        raise OptionError(f"{setting} has TLS options, but its scheme has no TLS: write {secure}://")
    return Address(hosts_of(url), params)


def split(url: str) -> list[str]:
    """The URLs that are joined in one text; those without a scheme have the first one's."""
    parts = [part.strip() for part in url.split(";") if part.strip()]
    scheme = scheme_of(parts[0]) if parts else ""
    return [part if "://" in part else f"{scheme}://{part}" for part in parts]


def hosts_of(url: str, default_port: int = 0) -> list[tuple[str, int]]:
    """The hosts of a URL, or of several, with their ports."""
    default_port = default_port or (26379 if url.startswith("sentinel:") else 6379)
    parts = [urlsplit(part) for part in split(url)]
    return [(unquote(part.hostname or "localhost"), part.port or default_port) for part in parts]


def database(named: Any, setting: str) -> int:
    """The number of a database; an OptionError where redis-py would take another name for 0."""
    text = str("" if named is None else named).strip("/")
    if text and not text.isdecimal():
        raise OptionError(f"{setting} names the database {text!r}: write a number, from 0")
    return int(text or 0)


def connecting(params: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """What is said of logging in and of TLS, as redis-py takes it: a provider by its name, and alone."""
    params = {name: value for name, value in params.items() if value is not None}
    if provider := params.pop("credential_provider", None):
        params = {name: params[name] for name in params if name not in ("username", "password")}
        params["credential_provider"] = Login(_provider(provider, setting))
    if "ssl_cert_reqs" in params:
        params["ssl_cert_reqs"] = _REQS.get(params["ssl_cert_reqs"], params["ssl_cert_reqs"])
    return params


def options_of(options: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """What our own transport options say of a connection; an OptionError for those that nobody reads."""
    _refuse_unread(options, [*_READ, *OF_SENTINELS], setting)
    return connection_options(options)


def connection_options(options: Mapping[str, Any], _setting: str = "") -> dict[str, Any]:
    """What transport options say of a connection; of Celery's own, others are about queues."""
    read = (*_LOGIN, *_ALIVE, "ssl")
    return {name: options[name] for name in options if name in read or name.startswith("ssl_")}


def _params_of(part: str, setting: str) -> dict[str, Any]:
    """One URL's own words, without its host."""
    is_socket = part.startswith("redis+socket:")
    text = re.sub(r"^redis\+socket:", "unix:", re.sub(r"^(?:sentinel|rediss?\+cluster):", "redis:", part))
    parsed = parse_url(text)  # type: ignore[no-untyped-call]
    parsed.pop("connection_class", None)
    _refuse_unread(parsed, [*_READ, *_WHERE], f"the URL of {setting}")
    path = "" if is_socket else unquote(urlsplit(text).path)
    parsed["db"] = database(parsed.get("virtual_host", parsed.get("db") or path), setting)
    unread = (*_OURS, "host", "port", "virtual_host")
    return {name: value for name, value in parsed.items() if name not in unread}


def _refuse_unread(given: Iterable[str], read: list[str], where: str) -> None:
    for name in given:
        if name not in read and not name.startswith("ssl_"):
            close = difflib.get_close_matches(name, read, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(read)}, ssl_*"
            raise OptionError(f"{where} has an unknown option {name!r}; {hint}")


def _provider(named: Any, setting: str) -> redis.CredentialProvider:
    """A provider of credentials: the object, its class, or the class's name."""
    try:
        made = symbol_by_name(named) if isinstance(named, str) else named
        made = made() if isinstance(made, type) else made
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise OptionError(
            f"the credential_provider of {setting}, {named!r}, cannot be created "
            f"({type(error).__name__}: {error}): name a class that needs no arguments, or give an object"
        ) from error
    if not isinstance(made, redis.CredentialProvider):
        raise OptionError(
            f"the credential_provider of {setting}, {named!r}, is not a redis.CredentialProvider: name "
            'such a class, as in "yours.module.Provider"'
        )
    return made
