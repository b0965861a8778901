"""Locks behind TLS: a CA, a client certificate, and the server's name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest

from celery_setnx import LockForbidden, LockUnavailable, OptionError
from tests.topologies.contract import runs_under_its_lock


@pytest.fixture
def url_of(secured) -> Callable[..., str]:
    """The server's URL with these options."""

    def url_of(host: str = "localhost", **options: str) -> str:
        return f"rediss://{host}:{secured.port}/0?{urlencode(options)}"

    return url_of


def test_tasks_are_locked_behind_tls(work_with, url_of, certificates, secured, journal, gates, name):
    """rediss:// with a CA, a client certificate and the server's name: locked, renewed, deduplicated."""
    tasks = work_with(setnx_url=url_of(**certificates))
    runs_under_its_lock(tasks, journal, gates, name, partial(secured.ask, "EXISTS"))


def test_tls_options_of_celery_serve_the_locks(tasks_of, url_of, certificates):
    """redis_backend_use_ssl instead of a long URL."""
    options = {**certificates, "ssl_cert_reqs": "CERT_REQUIRED"}
    assert tasks_of(setnx_url=url_of(), redis_backend_use_ssl=options).work.locked("a") is None


def test_server_is_not_verified_if_told_so(tasks_of, url_of, certificates):
    """ssl_cert_reqs=none: neither the CA nor the name counts."""
    own = {name: value for name, value in certificates.items() if name != "ssl_ca_certs"}
    tasks = tasks_of(setnx_url=url_of("127.0.0.1", ssl_cert_reqs="none", **own))
    assert tasks.work.locked("a") is None


@pytest.mark.parametrize(
    ("host", "own", "remedy"),
    [
        ("localhost", {"ssl_ca_certs": "wrong-ca.pem"}, "to the CA that signed the server's certificate"),
        ("127.0.0.1", {}, "use the name in the certificate as the host"),
    ],
    ids=["another CA", "another name"],
)
def test_certificate_that_does_not_verify_is_no_outage(tasks_of, url_of, certificates, host, own, remedy):
    """Waiting does not help: the error says what to change. Calls wait for it all the same."""
    files = {**certificates, **own}
    files["ssl_ca_certs"] = str(Path(certificates["ssl_ca_certs"]).parent / files["ssl_ca_certs"])
    with pytest.raises(LockForbidden, match="Redis is not trusted with the lock") as refused:
        tasks_of(setnx_url=url_of(host, **files)).work.locked("a")
    assert remedy in refused.value.remedy


def test_tls_with_a_port_that_speaks_none_is_said_to_be(tasks_of, server):
    """The server waits for a command, so there is a timeout: of the handshake."""
    tasks = tasks_of(setnx_url=server.url(1).replace("redis://", "rediss://"), setnx_timeout=0.2)
    with pytest.raises(LockUnavailable, match="its port may not use TLS"):
        tasks.work.locked("a")


@pytest.mark.parametrize(
    ("host", "own", "message"),
    [
        ("localhost", {"ssl_ca_certs": "wrong-ca.pem"}, "certificate verify failed: self-signed certificate"),
        ("127.0.0.1", {}, r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'"),
        # Under TLS 1.3 the server ends a connection that is open already; the error says one or the other.
        ("localhost", {"ssl_certfile": None}, r"certificate required|EOF occurred|reset by peer"),
        ("localhost", {"ssl_ca_certs": "/nowhere/ca.pem"}, r"/nowhere/ca.pem|No such file"),
    ],
    ids=["another CA", "another name", "no certificate of its own", "missing file"],
)
def test_what_does_not_match_is_said(tasks_of, url_of, certificates, host, own, message):
    """The server's CA, its name (the certificate is localhost's), the client's certificate, a path."""
    files = {**certificates, **own}
    if files["ssl_certfile"] is None:
        del files["ssl_certfile"], files["ssl_keyfile"]
    files["ssl_ca_certs"] = str(Path(certificates["ssl_ca_certs"]).parent / files["ssl_ca_certs"])
    tasks = tasks_of(setnx_url=url_of(host, **files))
    expected = (LockUnavailable, OptionError) if "nowhere" in message else LockUnavailable
    with pytest.raises(expected, match=message):
        tasks.work.locked("a")
