"""The runbook: real workers make what each section is about, and its commands are run as printed."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.docs.pages import Block, blocks, commands, sections, text_of
from tests.docs.reader import COLUMNS, Reader, alike, reading
from tests.harness import wait_until

PAGE, CLI = "docs/runbook.md", "docs/cli.md"
_FIRST = "celery -A shop setnx why shop.sync 42"  # before the first section, which runs it as well
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SHOP = """
import os, time
from celery import Celery
from celery_setnx import SingletonTask

app = Celery("shop", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.setnx_url = os.environ["REDIS_URL"].replace("/0", "/1")


# Its worker is seen to be dead before the lease ends; that of the report, which others wait for, ends.
@app.task(base=SingletonTask, singleton={"key": "account_id", "lease": 600})
def sync(account_id):
    time.sleep(600)


@app.task(base=SingletonTask, singleton={"key": "month", "on_conflict": "wait", "lease": 10})
def report(month):
    time.sleep(600)


@app.task(base=SingletonTask, singleton={"dedupe": "until_started"})
def reindex(name): ...


@app.task(base=SingletonTask, singleton={"debounce": 60, "debounce_max": 600})
def rebuild(name): ...


@app.task(base=SingletonTask, singleton={"rate": "10/m"})
def notify(partner): ...


@app.task(base=SingletonTask, singleton={"limit": 5})
def export(name): ...


@app.task(base=SingletonTask, bind=True, singleton={"key": "order_id", "hold_on_retry": True})
def charge(self, order_id):
    raise self.retry(countdown=600)
"""


class Shop(Reader):
    """A shop whose locks get stuck, and an operator who reads the runbook."""

    def __init__(self, directory: Path, server: str) -> None:
        super().__init__(directory, server)
        self.task_id = ""
        (directory / "shop.py").write_text(SHOP)

    def start_worker(self) -> None:
        """Start the only worker."""
        self.start("celery -A shop worker -n w1@shop -c 4 -l INFO")

    def wait_for_log(self, text: str) -> None:
        """Wait until the worker has logged this."""
        wait_until(lambda: text in self.log_text(), f"{text!r} in {self.log}")

    def publish(self, call: str, times: int = 1) -> None:
        """Publish a call, as the shop's own code does; its id is kept."""
        text = f"import shop\nfor _ in range({times}): print(shop.{call}.id)"
        said, code = self.ask(f"{sys.executable} -c '{text}'")
        assert code == 0, said
        self.task_id = said.split()[-1]

    def client(self, db: int) -> redis.Redis:
        """A client of one of the server's databases."""
        server = self.environment["REDIS_URL"].rpartition("/")[0]
        return redis.Redis.from_url(f"{server}/{db}", decode_responses=True)

    def key(self, task: str) -> str:
        """The key of the only lock of a task, once it is held."""
        with self.client(1) as client:
            pattern = rf"setnx:\{{shop\.{task}:\w+\}}"
            (key,) = wait_until(
                lambda: [key for key in client.scan_iter() if re.fullmatch(pattern, key)], f"a lock of {task}"
            )
            return str(key)

    def follow(self, block: Block) -> None:
        """Run a block's commands, and compare what they say with what is printed."""
        where = f"{PAGE}, line {block.line}"
        if block.language == "sh":
            self.read(PAGE, [block])
        elif block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                self._follow(ID.sub(self.task_id, command), alike(printed), where)

    def watch(self, block: Block) -> None:
        """Run a block's commands in a terminal, and compare all that they show, word by word."""
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            where = f"{block.line}: {command}"
            assert max(map(len, printed.splitlines())) <= COLUMNS, where
            words = alike(" ".join(printed.split()))
            shown = self.see(command)
            assert alike(" ".join(shown.split())) == words, f"{where} shows:\n{shown}"
            if " pause shop.notify " in command:  # its customers go on
                self.publish('notify.delay("partner")')
                self.wait_for_log(f"[{self.task_id}] waits in line")

    def _follow(self, command: str, printed: list[str], where: str) -> None:
        """It says what is printed, and maybe other lines between; `why` is asked until it does."""
        said = ""

        def is_said() -> bool:
            nonlocal said
            said, _code = self.ask(command)
            left = iter(alike(said))
            return all(line in left for line in printed)

        if " why " in command:
            wait_until(is_said, lambda: f"{where}: {command}: {printed}, not\n{said}")
        else:
            assert is_said(), f"{where}: {command} said:\n{said}"


def _body_runs(shop: Shop) -> None:
    shop.start_worker()
    shop.publish('report.delay("2026-10")', 2)
    shop.wait_for_log("waits in line")
    shop.publish("sync.delay(42)")


def _all_workers_die(shop: Shop) -> None:
    shop.stop()


def _queue_is_purged(shop: Shop) -> None:
    shop.publish('reindex.delay("A")')
    with shop.client(0) as client:
        assert client.delete("celery") == 1


def _index_is_to_be_rebuilt(shop: Shop) -> None:
    shop.publish('rebuild.delay("A")', 3)


def _partner_is_notified(shop: Shop) -> None:
    shop.start_worker()
    shop.publish('notify.delay("partner")', 11)


def _charge_is_retried(shop: Shop) -> None:
    shop.publish("charge.delay(7)")


def _key_is_set_by_hand(shop: Shop) -> None:
    shop.publish("sync.delay(42)")
    key = shop.key("sync")
    with shop.client(1) as client:
        client.set(key, "maintenance")


def _sync_runs(shop: Shop) -> None:
    shop.publish("sync.delay(42)")
    shop.key("sync")


STAGES: dict[str, Callable[[Shop], None]] = {
    "A body runs, or hangs": _body_runs,
    "The holder is dead": _all_workers_die,
    "No worker consumes the queue": lambda shop: None,
    "Duplicate, and nothing is queued": _queue_is_purged,
    "A newer call replaces it": _index_is_to_be_rebuilt,
    "A rate limit holds it back": _partner_is_notified,
    "Held for a retry": _charge_is_retried,
    "A foreign value": _key_is_set_by_hand,
    "Pause and resume": lambda shop: None,
    "Stop a running task": _sync_runs,
    "Redis was restarted": lambda shop: None,
}


SEEN = ("Pause and resume",)
"""What is printed as a terminal shows it, whole."""


@pytest.fixture
def shop(tmp_path) -> Iterator[Shop]:
    """On an empty server, without a worker."""
    with reading(tmp_path, Shop) as shop:
        yield shop


@pytest.mark.timeout(600)  # some forty commands
def test_runbook_goes_as_printed(shop):
    """Every case as it is, every command, every line that is shown."""
    text = text_of(PAGE)
    parts = sections(text) | sections(text, 3)
    ran = []
    for heading, stage in STAGES.items():
        found = blocks(parts[heading])
        stage(shop)
        for block in found:
            (shop.watch if heading in SEEN else shop.follow)(block)
        ran += commands(found)
    assert commands(blocks(text)) == [_FIRST, *ran]


def test_live_terms_go_as_printed(shop):
    """All that docs/cli.md shows of them, in its order."""
    parts = sections(text_of(CLI))
    shop.start_worker()
    for heading in ("pause", "limit", "rate", "terms"):
        for block in blocks(parts[heading]):
            shop.watch(block)
