"""Which broker an app's calls come from, and go back to: one name for it, however its URL is spelt."""

from __future__ import annotations

import os
import re
import socket
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from celery import Celery

from celery_setnx.address import hosts_of, scheme_of
from celery_setnx.configured import until_changed
from celery_setnx.connection import broker_read_urls, lock_url, transport_options
from celery_setnx.exceptions import OptionError
from celery_setnx.options import settings_of

_FAMILIES = {
    **dict.fromkeys(("amqps", "pyamqp", "librabbitmq"), "amqp"),
    "rediss": "redis",
    "confluentkafka": "kafka",
    "sqlalchemy": "sqla",
}
_PORTS = {"amqp": 5672, "redis": 6379, "sentinel": 26379, "mongodb": 27017, "kafka": 9092}
_TLS_PORTS = {("amqp", 5671): 5672}  # another door of the same server
_VHOSTS = {"amqp": "/", "redis": "0", "sentinel": "0"}
_CLOUDS = ("sqs", "gcpubsub", "azureservicebus", "azurestoragequeues", "slmq")  # no host is not this host
_APART = ("global_keyprefix", "queue_name_prefix", "master_name", "queue_tablename", "messages_collection")
"""The transport options by which Celery keeps apps apart on one server."""
_HERE = "localhost"


class Place(NamedTuple):
    """Where a URL leads; what is empty is as the driver has it."""

    family: str
    host: str
    port: str
    vhost: str


def broker_of(app: Celery) -> str:
    """The name of the broker that the app's workers read from; made anew when the settings have changed."""
    return until_changed(app, "_setnx_broker", lambda: settings_of(app).broker or _made_name(app))


def broker_scheme(app: Celery) -> str:
    """The scheme of the URL that the app's workers read from, of the first if there are several."""
    return until_changed(app, "_setnx_scheme", lambda: scheme_of(broker_read_urls(app)[0]).lower())


def _made_name(app: Celery) -> str:
    """Driver, hosts and database of a broker, and what keeps apps apart there; no user, no password."""
    urls, options = broker_read_urls(app), transport_options(app, "broker_url")
    apart = {name: str(options[name]) for name in _APART if options.get(name)}
    scheme = urls[0].partition(":")[0].lower()
    if scheme == "sqs":
        apart["region"] = options.get("region") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    elif scheme == "filesystem":
        apart["folder"] = os.path.abspath(options.get("data_folder_in") or "data_in")
    port, vhost = app.conf.broker_port, app.conf.broker_vhost or ""  # where a URL names none
    places = [_place_of(url, port) for several in urls for url in _one_by_one(several)]
    here = _name_of_this_host(app)
    family = places[0].family
    hosts = {(here if place.host == _HERE else place.host) + place.port for place in places}
    vhosts = {place.vhost for place in places} - {""}
    vhosts = vhosts or {_vhost(family, vhost) or _VHOSTS.get(family, "")}
    what = "&".join(f"{name}={apart[name]}" for name in sorted(apart))
    name = f"{family}://{','.join(sorted(hosts))}/{','.join(sorted(vhosts))}"
    return f"{name}?{what}" if what else name


def _name_of_this_host(app: Celery) -> str:
    """`localhost`, if all who share the app's locks are on this host; else that is another one elsewhere."""
    try:
        url, _ = lock_url(app)
    except OptionError:  # the calls say that
        return _HERE
    return _HERE if all(_host(host) == _HERE for host, _ in hosts_of(url)) else socket.gethostname()


def _one_by_one(url: str) -> list[str]:
    """The URLs of all hosts that one URL names, between commas."""
    scheme, _, rest = url.partition("://")
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    more = rest[len(hosts) :]
    return [f"{scheme}://{host}{more}" for host in hosts.rpartition("@")[2].split(",")]


def _place_of(url: str, usual_port: int | None = None) -> Place:
    """Where a URL leads, in one spelling."""
    scheme, _, rest = url.rpartition("://")
    first, _, more = scheme.lower().partition("+")
    family = _FAMILIES.get(first, first)
    parts = urlsplit(f"http://{rest}")
    if more == "socket":
        vhost = dict(parse_qsl(parts.query)).get("virtual_host", "")
        return Place(family, _HERE, parts.path, _vhost(family, vhost))
    if more:  # a database, by one of its drivers
        family += f"+{more.partition('+')[0]}"
    host = _host(unquote(parts.hostname or "")) or ("" if family in _CLOUDS else _HERE)
    port = parts.port or usual_port or _PORTS.get(family)
    port = _TLS_PORTS.get((family, port or 0), port)
    return Place(family, host, f":{port}" if port else "", _vhost(family, unquote(parts.path[1:])))


def _host(name: str) -> str:
    """A host's name in lower case; this host's own is one, by whichever address."""
    try:
        name = ip_address(name).compressed
    except ValueError:
        name = name.lower().rstrip(".")
    return _HERE if name in ("127.0.0.1", "::1") else name


def _vhost(family: str, vhost: str) -> str:
    """A virtual host as the driver takes it; empty for its default one."""
    vhost = vhost if family == "amqp" else vhost.strip("/")
    return "" if vhost == _VHOSTS.get(family) else vhost
