"""The quickstart, and the recipe of a lock by hand: every command as it is printed."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.docs.pages import ROOT, blocks, commands, section, text_of
from tests.docs.reader import INSTALL, Reader, reading
from tests.harness import wait_until

QUICKSTART, RECIPES, BY_HAND = "docs/quickstart.md", "docs/recipes.md", "Lock by hand"

# The app of a lock by hand, to which the recipe adds a task.
SHOP = """
import os
from celery import Celery
from celery_setnx import SingletonTask

app = Celery("shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])


@app.task(base=SingletonTask, singleton={"key": (), "scope": "shop.bill"})
def audit():
    return "audited"


@app.task(base=SingletonTask, singleton={"key": "customer_id"})
def sync(customer_id):
    return f"synced {customer_id}"


"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Iterator[Reader]:
    """A reader of the recipe, whose worker has its task and two more."""
    with reading(tmp_path_factory.mktemp("shop")) as reader:
        (task,) = [block.text for block in blocks(section(text_of(RECIPES), BY_HAND)) if block.is_run]
        (reader.directory / "shop.py").write_text(SHOP + task)
        reader.run("celery -A shop worker -c 2 -l INFO")
        yield reader


@pytest.fixture
def asked(shop) -> Iterator[redis.Redis]:
    """A client of the reader's server."""
    with redis.Redis.from_url(shop.environment["REDIS_URL"], decode_responses=True) as client:
        yield client


@pytest.fixture
def clone(tmp_path) -> Path:
    """The root of a clone; an empty directory, if nothing is installed from it."""
    root = tmp_path / "clone"
    if INSTALL:
        subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
    else:
        root.mkdir()
    return root


@pytest.mark.timeout(400)  # it may make an environment of its own
def test_quickstart_goes_as_printed(clone):
    """From a clone to a deduplicated fan-out: every file, every command, every answer."""
    with reading(clone) as reader:
        reader.read(QUICKSTART, blocks(text_of(QUICKSTART)))
        assert reader.ran == commands(blocks(text_of(QUICKSTART)))


def test_lock_by_hand_goes_as_printed(shop):
    """Every command, every answer. One call is skipped; another waits, and starts at the release."""
    shown = [block for block in blocks(section(text_of(RECIPES), BY_HAND)) if block.language != "python"]
    *before, unlock = shown
    shop.read(RECIPES, before)
    shop.run("celery -A shop call shop.audit")
    shop.run("celery -A shop call shop.bill --args '[\"2026-11-22\"]'")
    wait_until(lambda: "Skipped shop.audit" in shop.log_text(), f"a skip in {shop.log}")
    wait_until(lambda: re.search(r"shop\.bill\S+ waits in line", shop.log_text()), f"a wait in {shop.log}")
    shop.read(RECIPES, [unlock])
    wait_until(lambda: "'billed 2026-11-22'" in shop.log_text(), f"the bill in {shop.log}", 10)


def test_lock_by_hand_that_is_forgotten_is_taken_over(shop, asked):
    """By a call that meets it, or for one that waits for it; the log says so."""
    assert asked.set("setnx:{shop.bill}", int(asked.time()[0]) + 1, nx=True)
    shop.run("celery -A shop call shop.bill --args '[\"2026-11-23\"]'")
    wait_until(lambda: "billed 2026-11-23" in shop.log_text(), f"the bill in {shop.log}")
    who = r"(shop\.bill\[.*\]|Task \S+ \(first in line\))"
    took_over = rf"WARNING.* {who} took over setnx:\{{shop\.bill\}} from a foreign client .*: it ended \d"
    wait_until(lambda: re.search(took_over, shop.log_text()), f"{took_over} in {shop.log}")


def test_lock_by_hand_of_a_keyed_task_is_for_one_key(shop, asked):
    """`setnx:{shop.sync}` locks nothing; the name that `show` says locks one customer."""
    shop.run("celery -A shop setnx show shop.sync 42")
    shown = re.search(r"^key +(\S+)$", shop.said, re.MULTILINE)
    assert shown is not None
    until = int(asked.time()[0]) + 600
    assert asked.set("setnx:{shop.sync}", until, nx=True)
    assert asked.set(shown[1], until, nx=True)
    for customer in (42, 43):
        shop.run(f"celery -A shop call shop.sync --args '[{customer}]'")
    wait_until(lambda: "'synced 43'" in shop.log_text(), f"customer 43 in {shop.log}")
    wait_until(lambda: f"{shown[1]} is held by a foreign client" in shop.log_text(), "customer 42's skip")
    assert "'synced 42'" not in shop.log_text()
