"""Locks behind TLS: a CA, a client certificate, and the server's name."""

from collections.abc import Callable
from urllib.parse import urlencode

import pytest

from celery_setnx import LockUnavailable, OptionError

NAMES = {"ca": "ssl_ca_certs", "client": "ssl_certfile", "client_key": "ssl_keyfile"}


@pytest.fixture
def files(certificates) -> dict[str, str]:
    """What a client of the server needs."""
    return {option: getattr(certificates, name) for name, option in NAMES.items()}


@pytest.fixture
def url_of(secured) -> Callable[..., str]:
    """The server's URL with these options."""

    def url_of(host: str = "localhost", **options: str) -> str:
        return f"rediss://{host}:{secured.port}/0?{urlencode(options)}"

    return url_of


def test_tasks_are_locked_behind_tls(work_with, url_of, files, secured, journal, gates, name):
    """rediss:// with a CA, a client certificate and the server's name: locked, renewed, deduplicated."""
    tasks = work_with(setnx_url=url_of(**files))
    result = tasks.once.delay(name)
    (start,) = journal.wait_for("start", task_id=result.id)
    assert secured.ask("EXISTS", start["key"], f"{start['key']}:holder") == 2
    assert tasks.once.delay(name).deduplicated
    gates(name)
    assert result.get(timeout=10) == name
    assert secured.ask("EXISTS", start["key"]) == 0


def test_tls_options_of_celery_serve_the_locks(tasks_of, url_of, files):
    """redis_backend_use_ssl instead of a long URL."""
    tasks = tasks_of(setnx_url=url_of(), redis_backend_use_ssl={**files, "ssl_cert_reqs": "CERT_REQUIRED"})
    assert tasks.work.locked("a") is None


def test_server_is_not_verified_if_told_so(tasks_of, url_of, files):
    """ssl_cert_reqs=none: neither the CA nor the name counts."""
    own = {name: files[name] for name in ("ssl_certfile", "ssl_keyfile")}
    tasks = tasks_of(setnx_url=url_of("127.0.0.1", ssl_cert_reqs="none", **own))
    assert tasks.work.locked("a") is None


def test_server_of_another_ca_is_refused(tasks_of, url_of, files, certificates):
    """The error says that the certificate was not verified."""
    tasks = tasks_of(setnx_url=url_of(**{**files, "ssl_ca_certs": certificates.wrong_ca}))
    with pytest.raises(LockUnavailable, match="certificate verify failed: self-signed certificate"):
        tasks.work.locked("a")


def test_server_of_another_name_is_refused(tasks_of, url_of, files):
    """The certificate is localhost's, not the address's."""
    tasks = tasks_of(setnx_url=url_of("127.0.0.1", **files))
    with pytest.raises(
        LockUnavailable, match=r"IP address mismatch, certificate is not valid for '127\.0\.0\.1'"
    ):
        tasks.work.locked("a")


def test_client_without_a_certificate_is_refused(tasks_of, url_of, files):
    """Under TLS 1.3 the server ends a connection that is open already; the error says one or the other."""
    tasks = tasks_of(setnx_url=url_of(ssl_ca_certs=files["ssl_ca_certs"]))
    with pytest.raises(LockUnavailable, match=r"certificate required|EOF occurred|reset by peer"):
        tasks.work.locked("a")


def test_missing_file_is_an_error_that_says_so(tasks_of, url_of, files):
    """A path that does not exist."""
    tasks = tasks_of(setnx_url=url_of(**{**files, "ssl_ca_certs": "/nowhere/ca.pem"}))
    with pytest.raises((LockUnavailable, OptionError), match=r"/nowhere/ca.pem|No such file"):
        tasks.work.locked("a")
