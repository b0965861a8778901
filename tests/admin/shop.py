"""The shop of examples/django_app for a test: its environment, its web server, its calls, its browser."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from celery_setnx import byhand
from tests.admin import tasks  # noqa: F401 - shared with every app
from tests.chromium import chromium
from tests.harness import DEADLINE_S, GATE_S, wait_until

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples/django_app"
PASSWORD = "correct horse"
ALL = ["view_lock", "release_lock", "pause_lock"]
USERS = {"ada": ALL, "bob": ALL[:1], "cleo": [], "dora": ALL[:2], "eve": ALL[::2]}
MIGRATED = f"""
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.contrib.auth.models import Permission, User
for name, permissions in {USERS!r}.items():
    user = User.objects.create_user(name, password={PASSWORD!r}, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
"""
# Without these a browser in a closed network waits for what it cannot reach.


@dataclass
class Shop:
    """The project in a directory, with users.

    All of them but cleo may see locks. Ada may release and pause them, dora may release, and eve may pause.
    """

    url: str
    directory: Path
    calls: list[AsyncResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = "examples.django_app"
        self.database = self.directory / "shop.sqlite3"
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]),
            "DJANGO_SETTINGS_MODULE": "tests.admin.settings",
            "REDIS_URL": self.url,
            "SHOP_DATABASE": str(self.database),
        }
        self.app = Celery("shop", broker=self.url, backend=self.url, set_as_current=False)
        self.app.conf.update(setnx_prefix="shop", task_default_queue=self.queue)
        self.redis = redis.Redis.from_url(self.url)
        self.run("shell", "--verbosity", "0", "--command", MIGRATED)

    def run(self, *command: str) -> str:
        """Run one of Django's commands: what it prints."""
        arguments = [sys.executable, PROJECT / "manage.py", *command]
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            arguments, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def call(self, task: str, *arguments: str) -> AsyncResult:
        """Publish a call; its body waits until it is ended."""
        self.calls.append(self.app.tasks[f"orders.tasks.{task}"].delay(*arguments))
        return self.calls[-1]

    def end(self, call: AsyncResult) -> Any:
        """Let a call's body end, and wait until it has."""
        gate = f"gate:{call.id}"
        self.redis.rpush(gate, "open")
        self.redis.expire(gate, GATE_S)
        return call.get(timeout=DEADLINE_S)

    def end_all(self) -> None:
        """End every call that was published."""
        while self.calls:
            self.end(self.calls.pop(0))

    def held(self, call: AsyncResult, waiting: int = 0) -> byhand.Sighting:
        """The lock of a call, once it has it and so many wait."""

        def found() -> byhand.Sighting | None:
            for seen in byhand.locks(self.app):
                for one in seen.of_each():
                    if (
                        one.holder.task_id == call.id
                        and one.holder.state == "running"
                        and one.waiting == waiting
                    ):
                        return one
            return None

        return wait_until(found, f"{call.id} has its lock, and {waiting} wait")

    def entries(self) -> list[tuple[str, str, str]]:
        """Who has done what by hand, in what words: the entries of Django's own log."""
        asked = """
            select username, object_id, change_message from django_admin_log
            join auth_user on auth_user.id = user_id
            join django_content_type on django_content_type.id = content_type_id
            where app_label = 'setnx_locks' order by action_time
        """
        with sqlite3.connect(self.database) as connection:
            return connection.execute(asked).fetchall()


class WebServer:
    """The shop's web server, as a process."""

    def __init__(self, shop: Shop, **environment: str) -> None:
        self.log = shop.directory / f"server-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.admin.serve"],
                cwd=ROOT,
                env={**os.environ, **shop.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

        def port() -> str | None:
            assert self.process.poll() is None, self.log_text()
            found = re.search(r"^port (\d+)$", self.log_text(), re.MULTILINE)
            return found and found[1]

        self.url = f"http://127.0.0.1:{wait_until(port, 'the web server listens')}"

    def log_text(self) -> str:
        """All it has said so far."""
        return self.log.read_text()

    def kill(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Browser:
    """A Chromium with an empty profile, on the pages of the admin."""

    def __init__(self, server: WebServer, profile: Path) -> None:
        self.driver = chromium(profile)
        self.driver.set_page_load_timeout(DEADLINE_S)
        self.driver.set_script_timeout(DEADLINE_S)
        self.url = server.url
        self.size(1200, 900)

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Make the page so large, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 640}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def save(self, picture: Path, width: int, scale: float = 1) -> None:
        """Save a picture of the whole page, so many CSS pixels wide."""
        self.size(width, 400, scale)
        height = self.driver.execute_script("return document.getElementById('container').scrollHeight")
        self.size(width, height, scale)
        self.driver.save_screenshot(str(picture))

    def go(self, path: str, server: WebServer | None = None) -> None:
        """Open a page; of another server, if one is given, with the same session."""
        self.driver.get((server.url if server else self.url) + path)

    def log_in(self, user: str) -> None:
        """As this user, with whatever session there was before forgotten."""
        self.driver.delete_all_cookies()
        self.go("/admin/login/?next=/admin/")
        self.driver.find_element(By.NAME, "username").send_keys(user)
        self.driver.find_element(By.NAME, "password").send_keys(PASSWORD)
        self.click("//input[@value='Log in']")
        self.wait_for(f"//*[@id='user-tools']//strong[.='{user}']")

    def wait_for(self, xpath: str, take: Callable[[Any], Any] = bool) -> Any:
        """What is taken of an element, once it is there; of a page that goes, it is looked for again."""
        ignored = [NoSuchElementException, StaleElementReferenceException]
        waiting = WebDriverWait(self.driver, DEADLINE_S, 0.1, ignored)
        try:
            return waiting.until(lambda driver: take(driver.find_element(By.XPATH, xpath)))
        except TimeoutException:
            body = self.driver.find_element(By.XPATH, "//body").text
            raise AssertionError(f"no {xpath} at {self.driver.current_url}:\n{body}") from None

    def write(self, name: str, text: str) -> None:
        """Write into a field of a form, in place of what it has."""
        field = self.wait_for(f"//input[@name={name!r}]", lambda element: element)
        field.clear()
        field.send_keys(text)

    def click(self, xpath: str) -> None:
        """Click on what is there, once it is."""
        self.wait_for(xpath, lambda element: element.click() or True)

    def text(self, xpath: str = "//*[@id='content']") -> str:
        """What a reader sees of it."""
        return str(self.wait_for(xpath, lambda element: element.text))

    def url_of(self, xpath: str) -> str:
        """Where a link leads to, on this server."""
        return str(self.wait_for(xpath, lambda element: element.get_attribute("href"))).removeprefix(self.url)

    def count(self, xpath: str) -> int:
        """How many of them the page has."""
        return len(self.driver.find_elements(By.XPATH, xpath))

    def status(self, method: str, path: str, *, with_token: bool = True) -> int:
        """What the server answers to a request of this page's, with its CSRF token or without."""
        asked = """
            const [method, path, withToken, done] = arguments;
            const token = document.querySelector("[name=csrfmiddlewaretoken]").value;
            const headers = withToken ? {"X-CSRFToken": token} : {};
            fetch(path, {method, headers, redirect: "manual"}).then(reply => done(reply.status));
        """
        return int(self.driver.execute_async_script(asked, method, path, with_token))
