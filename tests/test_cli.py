"""`celery setnx`: what each command prints, and with which code it ends. Real server, real workers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
import redis
from celery.bin.celery import celery
from click.testing import CliRunner, Result
from rich.console import ConsoleDimensions

from celery_setnx import HeldLock, SetnxLock
from celery_setnx.cli import _picture, asked, screen, setnx
from celery_setnx.cli.describe import COLUMNS, DONE_COLUMNS, MARK_COLUMNS
from celery_setnx.cli.screen import table
from celery_setnx.keys import digest
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.look import Sighting
from celery_setnx.lock.marks import Mark, done_by, free_all, mark_all
from celery_setnx.lock.names import (
    done_name,
    key_name,
    mark_name,
    permit_names,
    permits_name,
    record_name,
)
from celery_setnx.lock.newest import Debounce, Reservation, Wanted, replace_all, reserve_all
from celery_setnx.lock.process import identity
from celery_setnx.lock.survey import survey
from celery_setnx.lock.takeover import TakeOver, note_take_over
from celery_setnx.signals import lock_released
from celery_setnx.testing import locks_on, pass_time
from tests.docs.pages import DOCS, sections
from tests.harness import CONF, age, due_set, server_us, wait_until
from tests.test_wording import EVIL, controls

CELERY = shutil.which("celery", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
PAGE = (DOCS / "cli.md").read_text()
TASK = "tests.cliapp."
OF_NEWEST = {"due_in_s", "superseded"}
SHOWN_MORE = {"token", "last_holder", "last_take_over", "line"}
ELSEWHERE = {**identity(), "host": "other", "boot": "another", "pid": 77}
DEAD = {**identity(), "start": 0}  # of this host; its pid is that of a later process


def ask(
    *arguments: str,
    app: str = "tests.cliapp",
    answer: str | None = None,
    ends: int | None = None,
    color: bool = False,
) -> Result:
    """Run `celery -A app setnx ...` in this process; it ends by itself, or with an exit code (`ends`)."""
    result = CliRunner().invoke(celery, ["-A", app, "setnx", *arguments], input=answer, color=color)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert ends in (None, result.exit_code), result.output
    return result


def ask_json(*arguments: str, app: str = "tests.cliapp") -> Any:
    """What a command says with --json."""
    return json.loads(ask(*arguments, "--json", app=app).stdout)


def celery_command(*arguments: str, **environment: str) -> Any:
    """Run the real executable."""
    return subprocess.run(
        [str(CELERY), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def cells() -> list[str]:
    """Those of the only row that `list` prints."""
    _heading, line = ask("list").stdout.splitlines()
    return re.split("  +", line)


def types(row: dict[str, Any]) -> str:
    """The fields of a row, with their types."""
    return " ".join(f"{name}:{type(value).__name__}" for name, value in row.items())


class Stage:
    """What there is of the tasks that are asked about, each with customer 7 unless it says another."""

    def __init__(self, locks: redis.Redis, foreign_keys: set[str]) -> None:
        from tests import cliapp

        self.app = cliapp.app
        self.locks = locks
        self.foreign_keys = foreign_keys

    def task(self, name: str) -> Any:
        return self.app.tasks[TASK + name]

    def key(self, name: str = "sync", customer: int = 7) -> str:
        return str(self.task(name).lock_key(customer))

    def hold(
        self, name: str = "sync", customer: int = 7, where: Any = None, task_id: str = "t-1", **options: Any
    ) -> HeldLock:
        """The held lock of a call."""
        info = {**(where or identity()), "task": TASK + name, "task_id": task_id, "worker": "w1@host"}
        lock = SetnxLock(self.locks, self.key(name, customer), info=info, **{"lease": 600, **options})
        held = lock.acquire(token=f"{task_id}|0|ab").lock
        assert held is not None
        return held

    def hold_many(self, *where: Any, name: str = "several", **options: Any) -> list[HeldLock]:
        """Permits of one lock, one for each place; the task has three."""
        options = {"limit": 3, **options}
        return [self.hold(name, 7, there, f"t-{number}", **options) for number, there in enumerate(where)]

    def stale(self, name: str = "sync") -> HeldLock:
        """The lock of a holder elsewhere whose lease has ended."""
        held = self.hold(name, where=ELSEWHERE)
        pass_time(601, self.task(name), 7)
        return held

    def queue(self, name: str, customer: int = 7) -> None:
        """A call that is marked as queued."""
        mark_all(self.locks, [Mark(self.key(name, customer), "t-2")], dedupe="until_started", lease=600)

    def publish(self, name: str = "saved", task_id: str = "t-2", customer: int = 7) -> Reservation:
        """A call that replaces older ones is sent, as its publisher does it."""
        found = self.reserve(name, task_id, customer)
        assert replace_all(self.locks, [found], 600) == [None]
        return found

    def reserve(self, name: str, task_id: str = "t-2", customer: int = 7) -> Reservation:
        """A call that replaces older ones is about to be sent."""
        options = self.task(name)._guard.options
        wanted = [Wanted(self.key(name, customer), task_id, task_id)]
        quiet = (options.debounce or 0.0, options.debounce_max, options.debounce_leading)
        (found,) = reserve_all(self.locks, wanted, debounce=Debounce(*quiet), lease=300, remember=600)
        assert isinstance(found, Reservation)
        return found

    def end(self, name: str, call: Reservation) -> None:
        """A call that replaces older ones has ended without a start."""
        assert free_all(self.locks, [Mark(self.key(name), call.task_id, call.generation)]) is None

    def pass_time(self, seconds: float, name: str = "saved") -> None:
        """Time passes for the keys of a task's lock."""
        age(self.locks, self.key(name), seconds)

    def succeed(
        self, name: str = "daily", customer: int = 7, task_id: str = "t-3", at_least_for: float = 0
    ) -> str:
        """A call that has succeeded, and counts for two hours; its key."""
        held = self.hold(name, customer, task_id=task_id, line=True)
        held.release(at_least_for=at_least_for, done_for=7200)
        return held.key

    def start(self, name: str = "paced", count: int = 2, customer: int = 7, ago: float = 0) -> str:
        """So many calls have started and ended, so many seconds ago; their key."""
        options = self.task(name)._guard.options
        terms = {"limit": options.limit, "rate": options.rate}
        for number in range(count):
            self.hold(name, customer, task_id=f"t-{number}", **terms).release()
        age(self.locks, self.key(name, customer), ago)
        return self.key(name, customer)

    def park(self, name: str = "sync", call: str = "", generation: int = 0, task_id: str = "t-9") -> None:
        """A call that has waited in line for 5 s, and what it is woken with."""
        entry = LineEntry(self.key(name), task_id, 0, 60, generation=generation)
        park(self.locks, entry, since=time.time() - 5, call=call)

    def is_due(self, name: str = "sync") -> bool:
        """Whether a worker is to look at the line now."""
        due_us = self.locks.zscore(due_set(self.app, TASK + name), self.key(name))
        return due_us is not None and bool(due_us <= server_us(self.locks))

    def foreign(self, name: str = "sync", customer: int = 7) -> None:
        """The lock that an operator has set, without a time."""
        key = self.key(name, customer)
        self.foreign_keys.add(key)
        self.locks.set(key, "maintenance")


@pytest.fixture
def cli(locks, foreign_keys) -> Stage:
    """The tasks that are asked about; there is nothing of them yet."""
    return Stage(locks, foreign_keys)


@pytest.fixture
def meanwhile(monkeypatch) -> Callable[[Callable[[], Any]], None]:
    """Called with what happens between the question and the answer, which is a yes."""
    return lambda happens: monkeypatch.setattr(click, "confirm", lambda _text: (happens(), True)[1])


def documented_fields(command: str) -> set[str]:
    """The names in the paragraph of docs/cli.md that says what the JSON of a command has."""
    match = re.search(rf"^`{command}` has(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    assert match is not None, command
    return set(re.findall(r"`(\w+)`", match[1]))


# list


NOTHING = {"": "No locks", "--stale": "No stale locks", "--queued": "No marks", "--done": "No done calls"}


@pytest.mark.parametrize("option", NOTHING)
def test_list_says_that_there_is_nothing(cli, option):
    """No table, one line, exit code 0; as JSON an empty array, which can always be parsed."""
    result = ask("list", *option.split())
    said = f"{NOTHING[option]} under t:{{...}}.\n"
    assert (result.stdout, result.stderr, result.exit_code) == ("", said, 0)
    assert ask_json("list", *option.split()) == []


def test_list_prints_a_table(cli):
    """A heading, and a line for each lock."""
    cli.hold()
    cli.stale("retrying")
    result = ask("list")
    heading, *lines = result.stdout.splitlines()
    assert re.split("  +", heading) == list(COLUMNS)
    assert re.fullmatch(
        r"tests\.cliapp\.retrying  running  10 min[ \w]* +[\d.]+ s ago +unknown  -        t-1      "
        r"w1@host \(pid 77\) +t:\{tests\.cliapp\.retrying:\w{32}\}",
        lines[0],
    )
    assert lines[1].startswith("tests.cliapp.sync      running  ")
    assert result.stderr == "2 locks under t:{...}.\n"


def test_list_prints_its_rows_as_they_come(cli, monkeypatch):
    """Of 100,000 locks the rows took 150 MB. All are under one heading; a column may get wider on the way."""
    cli.hold(customer=7)
    (seen,) = survey(cli.locks, "t")
    keys, read, printed = [f"t:{{shop:{number:0{1 + number // 1100}}}}" for number in range(2500)], [0], []

    def many(*_args: Any, **_which: bool) -> Iterator[Sighting]:
        for key in keys:
            read[0] += 1
            yield seen._replace(key=key)

    monkeypatch.setattr(asked, "survey", many)
    said = screen.say
    monkeypatch.setattr(screen, "say", lambda *what, **how: (printed.append(read[0]), said(*what, **how)))
    heading, *rows = ask("list").stdout.splitlines()
    assert printed == [1000, 2000, 2500, 2500]  # and how many there are
    assert heading.split()[0] == "TASK"
    assert [row.split()[-1] for row in rows] == keys
    assert len({row.index("t:{") for row in rows}) == 1


def test_list_chooses_by_task_and_by_deadline(cli):
    """--task and --stale leave out the others; a lock of its scope is in a task's way, whoever holds it.

    A task that the app does not have may be misspelt: one that is close is named.
    """
    cli.hold()
    cli.hold("crowd_two")
    old = cli.stale("retrying")
    assert [row["task"] for row in ask_json("list", "--task", TASK + "sync")] == [TASK + "sync"]
    assert [(row["key"], row["stale"]) for row in ask_json("list", "--stale")] == [(old.key, True)]
    assert ask("list", "--stale").stderr == "1 stale lock under t:{...}.\n"
    (crowd,) = ask_json("list", "--task", TASK + "crowd_one")
    assert (crowd["task"], crowd["scope"]) == (TASK + "crowd_two", "throng")
    said = ask("list", "--task", TASK + "snyc", ends=0).stderr
    assert "The app has no task tests.cliapp.snyc; did you mean tests.cliapp.sync?" in said


@pytest.mark.parametrize(("older", "listed"), [("1h", 1), ("90m", 0), ("3700", 0), ("3599s", 1), ("1d", 0)])
def test_list_chooses_by_age(cli, locks, older, listed):
    """A lock that somebody has had for so long: its body may hang, and is renewed all the same."""
    key = cli.hold("several", limit=3, lease=9000).key
    age(locks, key, 3600)
    cli.hold("several", limit=3, task_id="t-2")
    cli.hold("sync")
    cli.park("waiting")
    found = ask("list", "--older", older, ends=0)
    assert found.stdout.count("\n") == (2 if listed else 0)
    assert [row["key"] for row in ask_json("list", "--older", older)] == [key] * listed
    assert re.match(rf"{'1 lock' if listed else 'No locks'} held for .+ or more under", found.stderr)


@pytest.mark.parametrize(
    ("scene", "process", "stale", "listed"),
    [
        ("held", "alive", False, False),
        ("held elsewhere", "unknown", False, False),
        ("held by the dead", "dead", False, True),
        ("past its lease", "unknown", True, True),
        ("resting", None, False, False),
        ("held for a retry of the dead", None, False, False),
        ("foreign", None, False, False),
    ],
)
def test_list_says_whether_the_process_lives(cli, scene, process, stale, listed):
    """In a column and in the JSON; --stale lists it too if it is surely dead, though its lease runs."""
    SCENES[scene](cli, "sync")
    (row,) = ask_json("list")
    assert (row["process"], row["stale"]) == (process, stale)
    heading, line = ask("list").stdout.splitlines()
    assert line[heading.index("PROCESS") :].split()[0] == (process or "-")
    assert len(ask_json("list", "--stale")) == listed


@pytest.mark.parametrize(
    ("scene", "painted"),
    [
        ("held", ""),
        ("resting", "\x1b[2m"),
        ("held by the dead", "\x1b[31m"),
        ("past its lease", "\x1b[31m"),
        ("foreign", "\x1b[31m"),
    ],
)
def test_list_is_coloured_where_there_are_colours(cli, scene, painted):
    """What nobody will release is red, what nobody runs under is dim; --no-color and a pipe have neither."""
    SCENES[scene](cli, "sync")
    line = ask("list", color=True).stdout.splitlines()[1]
    assert line.startswith(f"{painted}tests.cliapp.sync")
    assert line.endswith("\x1b[0m" if painted else cli.key())
    assert "\x1b" not in ask("list").stdout
    plain = CliRunner().invoke(celery, ["--no-color", "-A", "tests.cliapp", "setnx", "list"], color=True)
    assert "tests.cliapp.sync" in plain.stdout
    assert "\x1b" not in plain.stdout


def test_list_json_has_the_documented_fields(cli):
    """Names and types of the fields are part of the interface. A free lock with a line is listed as free."""
    cli.hold()
    cli.foreign(customer=8)
    cli.park("waiting")
    rows = {row["state"]: row for row in ask_json("list")}
    assert types(rows["running"]) == (
        "key:str task:str about:str scope:str state:str stale:bool task_id:str worker:str host:str pid:int "
        "process:str fence:int since:float age_s:float deadline:float remaining_s:float waiting:int "
        "value:str held:int limit:int holders:NoneType rate:NoneType starts:NoneType next_start_s:NoneType"
    )
    unknown = [name for name, value in rows["foreign"].items() if value is None]
    of_holder = "task_id worker host pid process since age_s deadline remaining_s"
    assert " ".join(unknown) == f"{of_holder} holders rate starts next_start_s"
    assert (rows["free"]["waiting"], rows["free"]["task"]) == (1, TASK + "waiting")
    assert documented_fields("list --json") == set(rows["running"])


def test_list_of_marks_prints_a_table_and_json_with_the_documented_fields(cli):
    """Which calls are queued, and when their marks lapse; --queued has names of its own."""
    cli.queue("pending")
    result = ask("list", "--queued")
    heading, line = result.stdout.splitlines()
    assert re.split("  +", heading) == list(MARK_COLUMNS)
    assert re.fullmatch(r"tests\.cliapp\.pending  - +- +in (10|9) min[ \w]*  t-2 +t:\{tests.*\}", line)
    assert result.stderr == "1 mark under t:{...}.\n"
    (row,) = ask_json("list", "--queued")
    assert documented_fields("list --queued --json") == set(row)
    assert row.pop("lapses_in_s") == pytest.approx(600, abs=30)
    told = {"key": cli.key("pending"), "task": TASK + "pending", "task_id": "t-2"}
    assert row == {**told, "due_in_s": None, "superseded": None}


def test_list_of_marks_says_when_a_newest_call_is_due_and_how_many_it_has_replaced(cli):
    """Since when, once it may start; in JSON a negative number."""
    for number in range(3):
        cli.publish(task_id=f"t-{number}")
    _heading, line = ask("list", "--queued").stdout.splitlines()
    assert re.fullmatch(
        r"tests\.cliapp\.saved  in [45] min \d+ s +2 +in (10|9) min[ \w]*  t-2 +t:\{.*\}", line
    )
    (row,) = ask_json("list", "--queued")
    assert 0 < row["due_in_s"] <= 300
    assert row["superseded"] == 2
    cli.pass_time(400)
    _heading, line = ask("list", "--queued").stdout.splitlines()
    assert re.search(r"  1 min \d+ s ago  2  ", line)
    (row,) = ask_json("list", "--queued")
    assert -160 < row["due_in_s"] <= -60


def test_list_of_marks_has_no_call_that_is_reserved_or_has_started(cli):
    """Only calls that were sent are queued, and only until they start."""
    cli.reserve("saved")
    cli.end("newest", cli.publish("newest"))
    assert ask("list", "--queued").stderr == "No marks under t:{...}.\n"


def test_list_of_done_calls_prints_a_table_and_json_with_the_documented_fields(cli):
    """Whose success counts, and for how long; the other lists do not have them, nor has this one locks."""
    key = cli.succeed()
    other = cli.succeed("crowd_daily", 8, "t-4")
    cli.hold("sync")
    cli.queue("pending")
    result = ask("list", "--done")
    heading, *lines = result.stdout.splitlines()
    assert re.split("  +", heading) == list(DONE_COLUMNS)
    assert re.fullmatch(r"day crowd +for (2 h 0 min|1 h 5\d min) +t-4 +t:\{day crowd:\w+\}", lines[0])
    assert re.fullmatch(r"tests\.cliapp\.daily  for (2 h 0 min|1 h 5\d min) +t-3 +t:\{tests.+\}", lines[1])
    assert result.stderr == "2 done calls under t:{...}.\n"
    assert ask("list", "--done", "--task", TASK + "crowd_hourly").stderr == (
        f"1 done call of {TASK}crowd_hourly under t:{{...}}.\n"
    )
    rows = {row["key"]: row for row in ask_json("list", "--done")}
    assert rows.keys() == {key, other}
    assert documented_fields("list --done --json") == set(rows[key])
    assert rows[key].pop("counts_for_s") == pytest.approx(7200, abs=600)
    assert rows[key] == {"key": key, "task": TASK + "daily", "task_id": "t-3"}
    assert not {key, other} & {row["key"] for row in [*ask_json("list"), *ask_json("list", "--queued")]}


def test_list_of_done_calls_leaves_out_what_is_no_text(cli, locks):
    """Another program's key of that name."""
    locks.rpush(done_name(cli.key("daily")), "x")
    locks.expire(done_name(cli.key("daily")), 60)
    assert ask_json("list", "--done") == []


# show


def test_show_and_release_name_a_done_call(cli):
    """Which, and for how long; where none is there is no such line."""
    key = cli.succeed()
    shown = ask("show", key, ends=0).stdout
    assert re.search(r"^done      as t-3; duplicates for (2 h 0 min|1 h 5\d min) more$", shown, re.MULTILINE)
    found = ask_json("show", key)
    assert (found["done"], found["done_counts_for_s"]) == ("t-3", pytest.approx(7200, abs=600))
    said = "A call has succeeded, as t-3, and makes duplicates: see release --done."
    assert said in ask("release", key).stderr
    assert "done" not in ask("show", TASK + "daily", "8").stdout
    assert ask_json("show", TASK + "daily", "8")["done"] is None


def test_show_prints_what_is_known(cli):
    """Record, fate of its process, deadline, mark and line. What is not there has no line."""
    held = cli.hold()
    cli.queue("sync")
    cli.park()
    shown = ask("show", held.key).stdout
    for part in (
        f"key       {held.key}\n",
        "task      tests.cliapp.sync\n",
        "state     running\n",
        f"holder    tests.cliapp.sync[t-1] on w1@host (pid {os.getpid()}), running since ",
        f"process   Its process, pid {os.getpid()} on this host, is alive.\n",
        "token     t-1|0|ab\n",
        f"fence     {held.fence}\n",
        "deadline  Its lease ends in ",
        "mark      queued as t-2, lapses in ",
        "waiting   1\n          1. t-9, for ",
    ):
        assert part in shown
    assert "newest" not in shown


def test_show_tells_of_the_newest_call(cli):
    """Its id, when it is due, how many it has replaced, and for how long that is known."""
    cli.publish(task_id="t-1")
    cli.publish(task_id="t-2")
    shown = ask("show", TASK + "saved", "7").stdout
    assert "mark      -\n" in shown
    line = r"^newest    queued as t-2, due in [45] min \d+ s; 1 older call superseded; lapses in \d+ min"
    assert re.search(line, shown, re.MULTILINE), shown
    found = ask_json("show", TASK + "saved", "7")
    assert (found["mark"], found["superseded"]) == ("t-2", 1)


def test_show_names_who_had_the_lock_before(cli, locks):
    """Who took it over, when, and from which dead holder; for a minute, who had a lock that is free now."""
    held = cli.hold()
    assert "taken" not in ask("show", held.key).stdout
    dead = SetnxLock(locks, held.key).holder()
    assert dead is not None
    noted = time.time()
    note_take_over(locks, held.key, TakeOver(noted - 41, "app.sync[t-8]", dead.as_dict()), 60)
    shown = ask("show", held.key).stdout
    said = re.search(
        r"taken     over (\d+) s ago by app\.sync\[t-8\]\n"
        r"          from tests\.cliapp\.sync\[t-1\] on w1@host",
        shown,
    )
    assert said is not None
    assert 41 <= int(said[1]) <= 41 + round(time.time() - noted)
    found = ask_json("show", held.key)["last_take_over"]
    assert set(found) == {"at", "by", "holder"}
    assert found["holder"]["task_id"] == "t-1"
    held.release()
    shown = ask("show", TASK + "sync", "7", ends=0).stdout
    assert "state     free\n" in shown
    assert "last      tests.cliapp.sync[t-1] on w1@host" in shown


@pytest.mark.parametrize(
    ("arguments", "args", "kwargs"),
    [
        (["7"], (7,), {}),
        (["customer=7"], (), {"customer": 7}),
        (["--args", "[7]"], (7,), {}),
        (["--kwargs", '{"customer": 7}'], (), {"customer": 7}),
        (["seven"], ("seven",), {}),
        (['"7"'], ("7",), {}),
        (["[1, 2]", "null", "deep=true"], ([1, 2], None), {"deep": True}),
        (["since=2024-01-01", "customer=a=b"], (), {"customer": "a=b", "since": "2024-01-01"}),
        (["--", "-7"], (-7,), {}),
        (["1+1=2"], ("1+1=2",), {}),
        (["--args", '["a=b"]', "--kwargs", '{"deep": true}'], ("a=b",), {"deep": True}),
    ],
)
def test_arguments_are_json_or_text(cli, arguments, args, kwargs):
    """name=value is a keyword argument where the name can be one; the key is that of a publisher."""
    tokens = {cli.hold().key: "t-1|0|ab"}
    shown = json.loads(ask("show", "--json", TASK + "sync", *arguments).stdout)
    assert shown["key"] == cli.task("sync").lock_key(*args, **kwargs)
    assert shown["token"] == tokens.get(shown["key"])


def test_show_json_has_the_documented_fields(cli):
    """The fields of list, and more."""
    held = cli.hold()
    cli.park()
    shown = ask_json("show", held.key)
    more = {*SHOWN_MORE, *OF_NEWEST, "mark", "mark_lapses_in_s", "done", "done_counts_for_s"}
    assert set(shown) == {*ask_json("list")[0], *more}
    assert documented_fields("show --json") == more
    assert documented_fields("list --json") == set(ask_json("list")[0])
    assert (shown["process"], shown["last_holder"], shown["mark"]) == ("alive", None, None)
    (waiter,) = shown["line"]
    assert types(waiter) == "task_id:str place:int since:float age_s:float"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["list", "--stale", "--queued"], "list one kind at a time"),
        (["list", "--older", "soon"], "soon is not a duration: write 90s, 5m, 1h or 2d"),
        (["list", "--older", "h"], "h is not a duration"),
        (["show", "tests.cliapp.snyc", "7"], "did you mean tests.cliapp.sync?"),
        (["show", "tests.cliapp.snyc"], "did you mean tests.cliapp.sync?"),
        (["why", "sync", "7"], "did you mean tests.cliapp.sync?"),
        (["why", "snyc", "7"], "did you mean tests.cliapp.sync?"),
        (["why", "elsewhere.sync", "7"], "did you mean tests.cliapp.sync?"),
        (["show", "a}b"], "cannot be named"),
        (["show", "tests.cliapp.plain", "7"], "has no lock"),
        (["show", "tests.cliapp.sync"], "missing a required argument: 'customer'"),
        (["show", "tests.cliapp.sync", "--args", "7"], "not an array in JSON"),
        (["show", "tests.cliapp.sync", "--kwargs", "{"], "is not JSON"),
        (["why", "tests.cliapp.nothing"], "The app has no task tests.cliapp.nothing"),
        (["why", "tests.cliapp.plain", "7"], "has no lock: it has neither base=SingletonTask nor @singleton"),
        (["release"], "name the lock: a KEY, or a TASK and its ARGS. --queued takes --task NAME"),
        (["release", "t:{a}", "--queued", "--task", "a"], "name the lock: a KEY"),
        (["release", "--queued"], "name the lock: a KEY, or a TASK and its ARGS. --queued takes --task NAME"),
        (["release", "--done"], "--done takes either"),
        (["release", "--done", "t:{a}", "--task", "a"], "name the lock: a KEY"),
        (["release", "--task", "a"], "name the lock: a KEY"),
        (["release", "--starts"], "name the lock: a KEY, or a TASK"),
        (["release", "--starts", "--task", "a"], "name the lock: a KEY"),
        (["release", "--starts", "--force", "t:{a}"], "--force is only for locks"),
        (["release", "--done", "--task", "a", "--args", "[7]"], "--task means all calls of a"),
        (["release", "t:{a}#2", "7"], "t:{a}#2 is a key, so it takes no ARGS"),
        (["show", "t:{a}", "7"], "t:{a} is a key, so it takes no ARGS"),
        (["doctor", "--acl", "--strict"], "--acl only prints lines to copy: use it without other options"),
        (["release", "--done", "tests.cliapp.dayly", "7"], "did you mean tests.cliapp.daily?"),
        # What is neither a task nor a lock is no lock that is free.
        (["release", "tests.cliapp.snyc", "7"], "did you mean tests.cliapp.sync?"),
        (["release", "tests.cliapp.snyc"], "mean tests.cliapp.sync? No lock has that name either."),
        (["release", "tests.cliapp.plain", "7"], "has no lock"),
        (["release", "tests.cliapp.sync"], "missing a required argument: 'customer'"),
        (["show", "t:{tests.cliapp.sync"], "t:{tests.cliapp.sync is not a whole key, and no lock has"),
        (["show", "t:{tests.cliapp.sync:31ba40…"], "is not a whole key"),
        (["release", "t:{tests.cliapp.sync"], "is not a whole key"),
        (["why", "tests.cliapp.named", "reason=late"], "the key needs argument 'customer', which this call"),
        (["why", "tests.cliapp.named", "7", "custmer=7"], "unexpected keyword argument 'custmer'"),
        (["watch", "--interval", "0"], "--interval"),
    ],
)
def test_wrong_usage_is_told_and_ends_with_2(cli, command, says):
    """One message that says what to give instead."""
    assert says in ask(*command, ends=2).stderr


SYNC, DAILY = f"{TASK}sync", f"{TASK}daily"
GIVEN = {
    "--task": [DAILY],
    "--older": ["1h"],
    "--for": ["1h"],
    "--because": ["why"],
    "--args": ["[7]"],
    "--kwargs": ['{"customer": 7}'],
}
FITTING = [
    (("list",), "--task --stale --older --queued --done --json"),
    (("list", "--stale"), "--task --older --json"),
    (("list", "--older", "1h"), "--task --stale --json"),
    (("list", "--queued"), "--task --json"),
    (("list", "--done"), "--task --json"),
    (("show", "t:{a}"), "--json"),
    (("show", SYNC), "--args --kwargs --json"),
    (("why", SYNC), "--args --kwargs --json"),
    (("release", "t:{a}"), "--yes --force --starts --done"),
    (("release", "t:{several}#2"), "--yes --force"),
    (("release", SYNC), "--args --kwargs --yes --force --starts --done"),
    (("release", SYNC, "--done"), "--args --kwargs --yes"),
    (("release", SYNC, "--starts"), "--args --kwargs --yes"),
    (("release", "--queued", "--task", DAILY), "--yes"),
    (("release", "--done", "--task", DAILY), "--yes"),
    (("check",), "--strict --json"),
    (("doctor",), "--strict --json --acl"),
    (("doctor", "--acl"), ""),
    (("pause", "t:{a}"), "--for --because"),
    (("pause", SYNC), "--args --kwargs --for --because"),
    (("resume", SYNC), "--args --kwargs"),
    (("limit", f"{TASK}several", "2"), "--args --kwargs --for --because"),
    (("limit", f"{TASK}several", "own"), "--args --kwargs"),
    (("rate", SYNC, "10/m"), "--args --kwargs --for --because"),
    (("rate", "t:{a}", "own"), ""),
    (("terms",), "--json"),
]
"""What may be added to a line: each option that does something there."""


@pytest.mark.parametrize(("line", "fitting"), FITTING, ids=str)
def test_option_that_would_do_nothing_is_refused(cli, locks, line, fitting):
    """None is ignored in silence: whoever gives it means something by it."""
    assert SetnxLock(locks, "t:{several}", limit=3).acquire().acquired
    for option in sorted(options_of(setnx.commands[line[0]]) - {"--help"} - set(line)):
        result = ask(*line, option, *GIVEN.get(option, []), answer="n")
        is_refused = result.exit_code == 2 and "missing a required argument" not in result.stderr
        assert is_refused == (option not in fitting.split()), (option, result.output)


def test_each_command_and_option_is_known_to_fit_somewhere():
    """A new one is to be thought of; of the live table both may be given."""
    for name in setnx.commands.keys() - {"watch"}:
        known = " ".join(f"{' '.join(line)} {fitting}" for line, fitting in FITTING if line[0] == name)
        assert options_of(setnx.commands[name]) - {"--help"} <= named_options(known)


# why

SCENES = {
    "free": lambda cli, name: None,
    "held": lambda cli, name: cli.hold(name),
    "held elsewhere": lambda cli, name: cli.hold(name, where=ELSEWHERE),
    "held by the dead": lambda cli, name: cli.hold(name, where=DEAD),
    "past its lease": lambda cli, name: cli.stale(name),
    "resting": lambda cli, name: cli.hold(name).release(at_least_for=60),
    "held for a retry of the dead": lambda cli, name: cli.hold(name, where=DEAD).hold(60),
    "foreign": lambda cli, name: cli.foreign(name),
    "queued": lambda cli, name: cli.queue(name),
    "done": lambda cli, name: cli.succeed(name),
    "done, and resting": lambda cli, name: cli.succeed(name, at_least_for=60),
    "done, and queued": lambda cli, name: (cli.succeed(name), cli.queue(name)),
    "done, and runs": lambda cli, name: (cli.succeed(name), cli.hold(name)),
}
DONE = (
    r"the same call has succeeded, as t-3; for (2 h 0 min|1 h 5\d min) more "
    r"a new one would not be published\."
)
QUEUED = "the same call is already queued, as t-2; a new one would not be published."


BECOMES = {
    "sync": "A call now would be skipped: it succeeds without running; if a chain, chord or link needs its",
    "retrying": "A call now would come back after 1 s, and then after up to 60 s each time; after 60 s it",
    "waiting": "A call now would wait in line, at place 1 (on_conflict='wa",
    "joining": "would wait in line, and get the holder's result",
    "raising": "would fail with AlreadyRunning (on_conflict='raise')",
    "deciding": "would do what its on_conflict decides: decide.",
    "pending": "would wait in line, at place 1",
}


@pytest.mark.parametrize("task", BECOMES)
def test_why_says_who_is_in_the_way_and_what_becomes_of_the_call(cli, task):
    """Who, since when, until when, whether that process lives, and what on_conflict does."""
    cli.hold(task)
    result = ask("why", TASK + task, "7", ends=1)
    assert result.stdout.startswith(
        "No: its lock is held.\n"
        f"  Held by tests.cliapp.{task}[t-1] on w1@host (pid {os.getpid()}), running since "
    )
    assert "  Its lease ends in " in result.stdout
    assert f"  Its process, pid {os.getpid()} on this host, is alive.\n" in result.stdout
    assert BECOMES[task] in result.stdout
    assert "If it hangs, stop it; its prefork worker then frees the lock:\n" in result.stdout
    assert "  celery -A APP control terminate KILL t-1\n" in result.stdout


@pytest.mark.parametrize(
    ("scene", "task", "answer", "says"),
    [
        ("free", "sync", "Yes", r".*\n  The key of .*sync\(customer=7, .*\) is t:{.*:\w+}\n$"),
        ("free", "decorated", "Yes", r".*\n  The key of tests\.cliapp\.decorated\(customer=7\) is t:{"),
        ("past its lease", "sync", "Yes", r"the holder's lease ended [\d.]+ s ago; the call takes over its"),
        ("past its lease", "sync", "Yes", r".*\n  Held by tests.cliapp.sync\[t-1\]"),
        ("held by the dead", "sync", "Yes", "its holder is dead; a worker on this host takes over the lock"),
        ("held elsewhere", "sync", "No", r"[^$]*pid 77 on other, which cannot be checked from this host\. "
                                         r"If it is dead, the lock is free when its lease ends\."),
        ("queued", "pending", "No", rf"{QUEUED}\n.*the result of t-2"),
        ("queued", "unique", "No", rf"{QUEUED}\n.*DuplicateTask"),
        ("held", "unique", "No", r"the same call is already running, as t-1; a new one would not be publish"),
        ("done", "daily", "No", rf"{DONE}\n  The caller would get the result of t-3 "),
        ("done, and resting", "daily", "No", rf"{DONE}\n.*\n  Held by tests.cliapp.daily\[t-3\]"),
        ("done, and queued", "daily", "No", QUEUED),
        ("done, and runs", "daily", "No", r"the same call is already running, as t-1;"),
        ("done", "unique", "Yes", r"its lock is free\."),  # without dedupe_for nobody asks
        ("foreign", "sync", "No", r".*\n  Held by a foreign client \(value 'maintenance'"),
        ("foreign", "sync", "No", r"[^$]*not a time, so it never ends\)\."),
        ("resting", "sync", "No", r"[^$]*Its task has ended; the lock is kept for .+ more \(at_least_for\)"),
    ],
)  # fmt: skip
def test_why_says_yes_or_no_and_why(cli, scene, task, answer, says):
    """Free, taken over, a duplicate, or in the way of something else; the exit code says it too."""
    SCENES[scene](cli, task)
    result = ask("why", TASK + task, "7", ends=int(answer == "No"))
    assert re.match(f"{answer}: {says}", result.stdout), result.stdout


DEBOUNCED = r"a new call would wait 5 min 0 s for newer ones \(debounce=300\)\."
BOUND = r"  However many follow, the newest is due in {} at the latest \(debounce_max=600\)\."
LATEST, NEARLY = r"10 min 0 s", r"(9 min \d+ s|10 min 0 s)"
REPLACED = r"  t-2 is queued, and {}; a new call would replace it{}\."
LEADING = r", unless it need not wait \(debounce_leading\)"
EQUAL = r"  An equal call would not be published: its caller would get the result of t-2\."
DUE = r"due in [45] min \d+ s"
PASSED = r"has been due for [\w. ]+"


def burst(cli: Stage, name: str) -> None:
    """Three calls, of which the first was published 500 s ago, and the last just now."""
    cli.publish(name, "t-0")
    cli.pass_time(500, name)
    cli.publish(name, "t-1")
    cli.publish(name)


def second(cli: Stage, name: str) -> None:
    """One has led, and has started; the next one waits."""
    cli.end(name, cli.publish(name, "t-1"))
    cli.publish(name)


def parked(cli: Stage, name: str) -> None:
    """The lock is held; a call of another kind waits in line, and behind it the newest."""
    cli.hold(name)
    cli.park(name)
    cli.park(name, generation=cli.publish(name).generation, task_id="t-2")


def behind(cli: Stage, name: str) -> None:
    """The lock is held, an older call waits in line, and the newest one has not been received."""
    cli.hold(name)
    cli.park(name, generation=cli.publish(name, "t-1").generation, task_id="t-1")
    cli.publish(name)


NEWEST_SCENES: dict[str, Callable[[Stage, str], Any]] = {
    "quiet": lambda cli, name: None,
    "held": lambda cli, name: cli.hold(name),
    "one queued": lambda cli, name: cli.publish(name),
    "due": lambda cli, name: (cli.publish(name), cli.pass_time(310, name)),
    "burst": burst,
    "too long": lambda cli, name: (burst(cli, name), cli.pass_time(110, name)),
    "second": second,
    "just started": lambda cli, name: cli.end(name, cli.publish(name)),
    "quiet again": lambda cli, name: (cli.end(name, cli.publish(name)), cli.pass_time(310, name)),
    "parked": parked,
    "behind": behind,
}


@pytest.mark.parametrize(
    ("scene", "task", "answer", "says"),
    [
        ("quiet", "newest", "Yes", [r"its lock is free\."]),
        ("quiet", "saved", "No", [DEBOUNCED, BOUND.format(LATEST), r"  Its lock is free\."]),
        ("quiet", "leading", "Yes", [r"its lock is free\."]),
        ("one queued", "newest", "Yes", [r"its lock is free\.", REPLACED.format(PASSED, ""), EQUAL]),
        (
            "one queued", "saved", "No",
            [DEBOUNCED, BOUND.format(NEARLY), r"  Its lock.*", REPLACED.format(DUE, "")],
        ),
        ("due", "saved", "No", [r".* wait 4 min \d+ s .*", r".*", r".*", REPLACED.format(PASSED, "")]),
        (
            "burst", "saved", "No",
            [
                r"a new call would wait 1 min \d+ s for newer ones \(debounce=300\)\.",
                BOUND.format(r"1 min \d+ s"),
                r"  Its lock is free\.",
                REPLACED.format(r"due in 1 min \d+ s", ""),
                r"  Superseded since the last start: 2 older calls\.",
            ],
        ),
        (
            "too long", "saved", "Yes",
            [r"its lock is free\.", REPLACED.format(PASSED, ""), r"  Superseded since .* 2 older calls\."],
        ),
        (
            "second", "leading", "No",
            [DEBOUNCED, r".*", r"  Its lock is free\.", REPLACED.format(DUE, LEADING)],
        ),
        ("just started", "leading", "No", [DEBOUNCED, BOUND.format(LATEST), r"  Its lock is free\."]),
        ("quiet again", "leading", "Yes", [r"its lock is free\."]),
        (
            "held", "leading", "No",
            [r"its lock is held\.", *[r".*"] * 5, r"  A call now would wait in line, at place 1 .*"],
        ),
        (
            "parked", "newest", "No",
            [
                r"its lock is held\.",
                *[r".*"] * 5,
                r"  1 call in line before it\.",
                r"  A call now would wait in line, at place 2 \(on_conflict='auto'\)\.",
                r"  t-2 waits in line, at place 2; a new call would replace it\.",
                EQUAL,
            ],
        ),
        (
            "behind", "newest", "No",
            [
                r"its lock is held\.",
                *[r".*"] * 5,
                r"  A call now would wait in line, at place 1 \(on_conflict='auto'\)\.",
                REPLACED.format(PASSED, ""),
                EQUAL,
                r"  Superseded since the last start: 1 older call\.",
            ],
        ),
        (
            "held", "saved", "No",
            [
                DEBOUNCED, BOUND.format(LATEST), r"  Its lock is held\.", *[r".*"] * 5,
                r"  If that is still so when it is due, it would wait in line, at place 1 \(on_conf.*\)\.",
            ],
        ),
    ],
)  # fmt: skip
def test_why_says_whether_a_call_that_replaces_older_ones_would_run(cli, scene, task, answer, says):
    """How long it would wait at least and at most, and which call it would replace, due when."""
    NEWEST_SCENES[scene](cli, task)
    result = ask("why", TASK + task, "7", ends=int(answer == "No"))
    lines = result.stdout.removeprefix(f"{answer}: ").splitlines()
    assert len(lines) == len(says) + 1, result.stdout
    for line, expected in zip(lines, says):
        assert re.fullmatch(expected, line), line


@pytest.mark.parametrize("scene", sorted(set(NEWEST_SCENES) - {"held", "parked", "behind"}))
@pytest.mark.parametrize("task", ["newest", "saved", "leading"])
def test_why_says_that_a_call_waits_as_long_as_its_publisher_finds(cli, task, scene):
    """The script decides how long; `why` says no other time, and yes where it is none."""
    NEWEST_SCENES[scene](cli, task)
    began = time.monotonic()
    said = ask("why", TASK + task, "7")
    waits_s = cli.reserve(task, "t-3").wait_s
    passed_s = time.monotonic() - began
    found = re.match(r"No: a new call would wait (\d+) min (\d+) s", said.stdout)
    assert (found is None) == (said.exit_code == 0) == (waits_s == 0.0)
    assert found is None or -1 < 60 * int(found[1]) + int(found[2]) - waits_s < passed_s + 1


def untimed(line: str) -> str:
    """A line without its durations, which pass."""
    return re.sub(r"(?:[\d.]+ (?:s|min|h)\b ?)+", "T ", line)


@pytest.mark.parametrize("scene", SCENES)
def test_why_json_says_the_same(cli, scene):
    """The answer, its reasons and the lock, under documented names; the exit code is the same."""
    SCENES[scene](cli, "pending")
    told = ask("why", TASK + "pending", "7")
    result = ask("why", TASK + "pending", "7", "--json", ends=told.exit_code)
    answer = json.loads(result.stdout)
    assert answer["runs"] == (told.exit_code == 0)
    assert untimed(answer["reason"]) == untimed(told.stdout.splitlines()[0].partition(": ")[2])
    shown = [line[2:] for line in told.stdout.splitlines()[1:-1]]
    assert [untimed(line) for line in answer["details"]] == [untimed(line) for line in shown]
    more = {"runs", "reason", "details", *OF_NEWEST, "mark", "mark_lapses_in_s", "done", "done_counts_for_s"}
    assert set(answer) == more | set(ask_json("show", cli.key("pending"))) - SHOWN_MORE
    assert documented_fields("why --json") == more
    assert answer["key"] == cli.key("pending")


@pytest.mark.parametrize(
    "call", [["7"], ["customer=7"], ["7", "late"], ["--kwargs", '{"customer": 7}']], ids=str
)
@pytest.mark.parametrize("command", ["why", "show", "release"])
def test_arguments_that_the_key_does_not_name_need_not_be_given(cli, command, call):
    """As list prints a lock; the answer says which key was asked about."""
    held = cli.hold("named")
    said = ask(command, TASK + "named", *call).stdout
    assert held.key in said
    free = ask("why", TASK + "named", "customer=8", ends=0).stdout.splitlines()[-1]
    assert free.startswith(f"  The key of {TASK}named(customer=8) is t:{{{TASK}named:")
    assert ask_json("why", TASK + "named", "8")["about"] == "customer=8"


@pytest.mark.parametrize(
    ("held", "asked", "says"),
    [
        ("7", ["7"], """named(customer='7') is held by .*To ask about that one: '"7"'"""),
        ("7", ["customer=7"], """named(customer='7') is held by .*To ask about that one: 'customer="7"'"""),
        (7, ['"7"'], "named(customer=7) is held by .*To ask about that one: 7"),
    ],
)
def test_text_that_is_held_in_place_of_a_number_is_named(cli, held, asked, says):
    """Nobody waits for a call whose key looks the same; the other way round, too."""
    SetnxLock(cli.locks, cli.task("named").lock_key(held), lease=600).acquire()
    pattern = re.escape(says).replace(r"\.\*", ".*")
    assert re.search(pattern, ask("why", TASK + "named", *asked, ends=0).stdout)
    assert re.search(pattern, ask("show", TASK + "named", *asked, ends=0).stdout)
    assert re.search(pattern, ask("release", TASK + "named", *asked, ends=1).stderr)
    other = ask("why", TASK + "named", "8", ends=0).stdout
    assert "But" not in other


# release


def test_release_takes_a_task_and_its_arguments(cli, locks):
    """As show and why do: a key need not be copied."""
    held = cli.stale()
    assert f"Released {held.key}.\n" in ask("release", SYNC, "7", "--yes", ends=0).stdout
    assert not locks.exists(held.key)
    assert ask("release", SYNC, "7", ends=1).stderr == f"Nothing to release: {held.key} is free.\n"


def test_release_asks_and_leaves_a_log_line(cli, locks, caplog):
    """A no changes nothing, and ends with 1; after a yes: who did it, which lock, who held it."""
    held = cli.stale()
    result = ask("release", held.key, answer="n\n")
    assert f"{held.key} is held by tests.cliapp.sync[t-1] on w1@host (pid 77), running since" in result.stdout
    assert "Its deadline passed " in result.stdout
    assert "Release it? [y/N]: n" in result.stdout
    assert (result.stderr, result.exit_code) == ("Not released.\n", 1)
    assert locks.exists(held.key, record_name(held.key)) == 2
    assert f"Released {held.key}.\n" in ask("release", held.key, answer="y\n", ends=0).stdout
    assert not locks.exists(held.key, record_name(held.key))
    (record,) = [record for record in caplog.records if record.name == "celery_setnx"]
    assert record.levelname == "WARNING"
    by_hand = r" was released by hand, by .+ on .+\. It was held by tests\.cliapp\.sync\[t-1\]"
    assert re.match(re.escape(held.key) + by_hand, record.getMessage())


@pytest.mark.parametrize(
    ("scene", "says"),
    [
        ("held", "Stop it first, or use --force."),  # its process is alive
        ("held elsewhere", "Stop it first, or use --force."),  # its process cannot be looked at
        ("foreign", "another program has set it"),
        # The process that has sent a retry may have ended: its lock is not abandoned.
        ("held for a retry of the dead", "It is kept for the task's own retry"),
    ],
)
def test_release_of_what_may_be_held_needs_force(cli, locks, scene, says):
    """It says why; with --force it deletes what it has shown, and the holder has lost it."""
    held, key = SCENES[scene](cli, "sync"), cli.key()
    refused = ask("release", key, "--yes")
    assert says in refused.output
    assert (refused.exit_code, locks.exists(key)) == (1, 1)
    assert ask("release", key, "--yes", "--force").exit_code == 0
    assert not locks.exists(key)
    if isinstance(held, HeldLock):
        assert held.release() == "lost"


def test_release_does_nothing_when_the_lock_has_changed(cli, meanwhile):
    """Between the question and the answer another took the lock over."""
    held = cli.stale()
    others: list[HeldLock] = []
    meanwhile(lambda: others.append(cli.hold()))
    assert "has changed since, or is not text" in ask("release", held.key, ends=1).stderr
    others[0].renew()


@pytest.mark.parametrize("force", [True, False])
def test_release_by_force_is_of_the_holder_that_was_shown(cli, meanwhile, force):
    """As from Python: that it renews its lease between the question and the answer does not matter."""
    held = cli.hold() if force else cli.stale()
    meanwhile(held.renew)
    said = ask("release", held.key, *["--force"] * force, ends=int(not force))
    assert (f"Released {held.key}.\n" in said.stdout) is force
    assert held.release() == ("lost" if force else "released")


def test_remedy_of_the_doctor_for_a_foreign_value_is_done(cli, locks):
    """The command that it prints deletes it."""
    cli.foreign("sync")
    (found,) = [found for found in ask_json("doctor") if found["subject"] == "foreign"]
    words = shlex.split(found["do"].partition("celery setnx ")[2])
    assert words[0] == "release"
    ask(*words, "--yes", ends=0)
    assert not locks.exists(cli.key())


def test_release_of_a_free_lock_ends_with_1(cli):
    """Nothing to release; a mark is named."""
    key = cli.key("pending")
    assert ask("release", key).stderr == f"Nothing to release: {key} is free.\n"
    cli.queue("pending")
    assert "A call is queued, as t-2" in ask("release", key, ends=1).stderr
    cli.publish("newest", "t-4")
    assert "A call is queued, as t-4" in ask("release", cli.key("newest"), ends=1).stderr


def test_release_touches_no_key_that_is_no_lock(cli, locks):
    """A key of another program is not deleted, even with --force."""
    locks.set("session:7", "x", ex=60)
    result = ask("release", "session:7", "--yes", "--force", ends=2)
    assert "session:7 is not a lock of this app's tasks" in result.stderr
    assert locks.exists("session:7")


def test_release_of_marks_frees_those_of_the_task(cli, locks, caplog):
    """All of them, and nobody else's; where there are none the exit code is 1.

    A mark says nothing of its task, so those of all tasks of a scope are freed, and who shares it is said.
    """
    for customer in range(3):
        cli.queue("pending", customer)
    cli.queue("unique", 1)
    command = ("release", "--queued", "--task", TASK + "pending")
    assert ask(*command, answer="n\n").exit_code == 1
    assert locks.exists(mark_name(cli.key("pending", 0)))
    result = ask(*command, answer="y\n", ends=0)
    assert "3 calls of tests.cliapp.pending are marked as queued, such as t-2.\n" in result.stdout
    assert "Freed 3 marks of tests.cliapp.pending.\n" in result.stdout
    assert [key for key in locks.scan_iter() if ":queued" in key] == [mark_name(cli.key("unique", 1))]
    assert "3 marks of tests.cliapp.pending were freed by hand" in caplog.text
    result = ask(*command, "--yes", ends=1)
    assert result.stderr == "Nothing to free: no call of tests.cliapp.pending is marked as queued.\n"
    cli.queue("crowd_one")
    result = ask("release", "--queued", "--task", TASK + "crowd_two", "--yes", ends=0)
    assert "1 mark of tests.cliapp.crowd_two was freed by hand" in caplog.text
    assert "tests.cliapp.crowd_one share its scope, so their calls are included." in result.stdout


def test_release_of_marks_has_the_newest_call_count_as_started(cli, caplog):
    """Its like is no duplicate any more, nor is a call that waits replaced by it; a mark goes as well."""
    purged = cli.publish("newest")
    cli.queue("newest", 8)
    cli.queue("newest", 7)  # of a release that did not replace
    command = ("release", "--queued", "--task", TASK + "newest")
    result = ask(*command, "--yes", ends=0)
    assert "2 calls of tests.cliapp.newest are marked as queued, such as t-2.\n" in result.stdout
    assert "3 marks of tests.cliapp.newest were freed by hand" in caplog.text
    assert ask(*command, "--yes", ends=1).stderr.startswith("Nothing to free: no call of")
    assert cli.publish("newest").generation > purged.generation


def test_release_of_marks_leaves_a_call_that_has_come_meanwhile(cli, meanwhile):
    """Only what was shown counts as started."""
    cli.publish("newest", "t-2")
    meanwhile(lambda: cli.publish("newest", "t-3"))
    result = ask("release", "--queued", "--task", TASK + "newest", ends=0)
    assert "such as t-2" in result.stdout
    (row,) = ask_json("list", "--queued")
    assert row["task_id"] == "t-3"


def test_release_of_done_calls_forgets_those_of_the_task(cli, locks, caplog):
    """All of them, and nobody else's; who shares the scope is said. Where there are none the code is 1."""
    keys = [cli.succeed("daily", customer) for customer in range(3)]
    other = cli.succeed("crowd_daily")
    command = ("release", "--done", "--task", DAILY)
    refused = ask(*command, answer="n\n", ends=1)
    assert refused.stderr == "Not forgotten.\n"
    assert locks.exists(*map(done_name, keys)) == 3
    result = ask(*command, answer="y\n", ends=0)
    assert "3 calls of tests.cliapp.daily count as done, such as t-3.\n" in result.stdout
    assert "Forgot 3 done calls of tests.cliapp.daily.\n" in result.stdout
    assert (locks.exists(*map(done_name, keys)), locks.exists(done_name(other))) == (0, 1)
    assert "3 done calls of tests.cliapp.daily were forgotten by hand, by " in caplog.text
    result = ask(*command, "--yes", ends=1)
    assert result.stderr == "Nothing to forget: no call of tests.cliapp.daily counts as done.\n"
    result = ask("release", "--done", "--task", TASK + "crowd_hourly", "--yes", ends=0)
    assert "tests.cliapp.crowd_daily share its scope, so their calls are included." in result.stdout


@pytest.mark.parametrize("named", ["key", "call"])
def test_release_of_a_done_call_forgets_that_one(cli, locks, caplog, named):
    """Named by its key, or by its task and arguments; it is shown, and a log line stays."""
    key, other = cli.succeed(), cli.succeed("daily", 8)
    command = ("release", "--done", *([key] if named == "key" else [TASK + "daily", "7"]))
    result = ask(*command, answer="y\n", ends=0)
    assert result.stdout.startswith(f"{key}: a call has succeeded, as t-3; equal calls are duplicates for ")
    assert "Forget it? [y/N]: y\nForgot t-3.\n" in result.stdout
    assert (locks.exists(done_name(key)), locks.exists(done_name(other))) == (0, 1)
    assert f"{key}, done as t-3, was forgotten by hand, by " in caplog.text
    assert ask(*command, ends=1).stderr == f"Nothing to forget: no call of {key} counts as done.\n"


def test_release_leaves_a_done_call_that_was_not_shown(cli, locks, meanwhile):
    """Between the question and the answer another has succeeded."""
    key = cli.succeed()
    meanwhile(lambda: cli.succeed(task_id="t-4"))
    assert "has changed since it was shown" in ask("release", "--done", key, ends=1).stderr
    assert done_by(locks, key) == "t-4"


# several permits


def test_list_says_how_many_permits_are_held(cli):
    """In the state, and in the JSON with each holder; of a limit that was lowered those beyond it apart."""
    cli.hold_many(ELSEWHERE, DEAD)
    task, state, _age, _deadline, *who = cells()
    assert (task, state, *who[:3]) == (TASK + "several", "running 2/3", "dead", "-", "t-1")
    (row,) = ask_json("list", "--stale")
    assert (row["held"], row["limit"], row["task_id"], row["process"]) == (2, 3, "t-1", "dead")
    each = [(one["permit"], one["task_id"], one["process"]) for one in row["holders"]]
    assert each == [(0, "t-0", "unknown"), (1, "t-1", "dead")]
    assert " ".join(row["holders"][0]) == (
        "permit task state stale task_id worker host pid process fence since age_s deadline remaining_s value"
    )
    assert not SetnxLock(cli.locks, cli.key("several"), line=True).acquire().acquired
    assert cells()[1] == "running 1/1 +1"


def test_show_tells_of_each_permit(cli):
    """Number, holder, state, process, deadline, token and fence of each that is held."""
    held = cli.hold_many(identity(), ELSEWHERE, DEAD)
    held[1].release()
    shown = ask("show", TASK + "several", "7").stdout
    assert "permits   2/3 held\n" in shown
    assert re.findall(r"^permit (\d)$", shown, re.MULTILINE) == ["0", "2"]
    for one, fate in ((held[0], "alive"), (held[2], "dead")):
        for part in (
            "  state     running\n",
            f"  holder    tests.cliapp.several[t-{one.permit}] on w1@host (pid {os.getpid()}), running",
            f"  process   Its process, pid {os.getpid()} on this host, is {fate}.\n",
            f"  token     t-{one.permit}|0|ab\n",
            f"  fence     {one.fence}\n",
            "  deadline  Its lease ends in ",
        ):
            assert part in shown
    details = ask_json("show", held[0].key)["holders"]
    assert [(one["permit"], one["token"]) for one in details] == [(0, "t-0|0|ab"), (2, "t-2|0|ab")]
    said = re.search(r"The objects in `holders` have(.*?)\n\n", PAGE, re.DOTALL)
    assert said is not None
    documented = set(re.findall(r"`(\w+)`", said[1]))
    assert documented == set(details[0]) == {*ask_json("list")[0]["holders"][0], "token"}


def test_permits_that_are_all_free_are_said_to_be(cli):
    """Who had one last is shown, as of a lock. A line beside them is listed, as beside a free lock."""
    for held in cli.hold_many(identity(), identity()):
        held.release()
    shown = ask("show", TASK + "several", "7").stdout
    assert "state     free\nlast      tests.cliapp.several[t-1] on w1@host" in shown
    assert "permits   0/3 held\n" in shown
    cli.park("several")
    assert cells()[1] == "free 0/3"


@pytest.mark.parametrize(
    ("places", "answer", "says"),
    [
        ([identity()] * 2, "Yes", r"a permit is free \(2 of 3 held\)\.\n  Permit 0: tests\.cliapp"),
        ([ELSEWHERE] * 3, "No", r"3 of 3 permits are held; the first lease ends in \d+ min.*\n  Permit 0"),
        ([ELSEWHERE] * 3, "No", r"[^$]*; ends in (10|9) min[ \w]*, its process is unknown\.\n  Permit 1: "),
        ([ELSEWHERE] * 3, "No", r"[^$]*A call now would wait in line, at place 1"),
        ([DEAD, ELSEWHERE, ELSEWHERE], "Yes", "the holder of permit 0 is dead; a worker on this host"),
        ([ELSEWHERE, ELSEWHERE, DEAD], "No", "3 of 3 permits are held; "),
    ],
)  # fmt: skip
def test_why_says_whether_a_permit_is_free(cli, places, answer, says):
    """A free one will do; else which ends first, and who holds them. It alone is tested for death."""
    cli.hold_many(*places)
    result = ask("why", TASK + "several", "7", ends=int(answer == "No"))
    assert re.match(f"{answer}: {says}", result.stdout), result.stdout


def test_why_names_the_first_few_holders(cli, monkeypatch):
    """Of very many the rest is counted."""
    guard = cli.task("several")._guard
    monkeypatch.setattr(guard, "options", replace(guard.options, limit=5))
    cli.hold_many(*[ELSEWHERE] * 5, limit=5)
    told = ask("why", TASK + "several", "7", ends=1).stdout
    assert re.findall(r"Permit (\d):", told) == ["0", "1", "2"]
    assert "  2 more holders: see celery setnx show.\n" in told


def test_why_says_that_the_holder_is_dead_though_calls_wait(cli):
    """Its lease goes on; a worker on this host need not wait for its end."""
    cli.hold(where=DEAD)
    cli.park()
    told = ask("why", TASK + "sync", "7", ends=1).stdout
    assert told.startswith("No: the holder is dead; the first call in line takes over its lock.\n")


def test_why_names_no_process_of_a_lock_under_which_no_body_runs(cli):
    """The process of the last attempt may live, and run something else: to stop it would help nobody."""
    cli.hold(where=identity()).hold(60)
    told = ask("why", TASK + "sync", "7", ends=1).stdout
    assert "held_for_retry since" in told
    assert "  No body runs under it.\n" in told
    assert "alive" not in told
    assert "terminate" not in told


def test_why_lets_the_line_come_first(cli):
    """A free permit is for those who wait."""
    cli.hold_many(ELSEWHERE)
    cli.park("several")
    told = ask("why", TASK + "several", "7", ends=1).stdout
    assert told.startswith("No: a permit is free (1 of 3 held).\n  1 call in line comes first.\n")


@pytest.mark.parametrize(
    ("task", "limit", "count", "answer", "says"),
    [
        ("several", 5, 4, "No", "3 of 3 permits are held; "),
        ("several", 2, 2, "Yes", r"a permit is free \(2 of 3 held\)\."),
        ("several", 1, 1, "Yes", r"a permit is free \(1 of 3 held\)\."),
        ("waiting", 3, 3, "No", r"its lock is held\.\n  Held by tests\.cliapp\.waiting\[t-0\]"),
    ],
)
def test_why_goes_by_the_limit_of_the_app_and_names_another(cli, task, limit, count, answer, says):
    """While a deploy changes it: what a call of this app would find, and that others have another limit."""
    cli.hold_many(*[ELSEWHERE] * count, name=task, limit=limit)
    told = ask("why", TASK + task, "7", ends=int(answer == "No")).stdout
    assert re.match(f"{answer}: {says}", told), told
    own = 3 if task == "several" else 1
    assert f"  This app's limit is {own}, but the last client of the lock had {limit}: " in told
    beyond = max(0, count - own)
    assert (f"Held beyond the limit of {own}: {beyond} permit" in told) == (beyond > 0)


def test_release_drops_the_permits_that_are_abandoned(cli, caplog):
    """All that are held are shown, and only those are released whose holders will not come back."""
    living, dead = cli.hold_many(identity(), DEAD)
    hear = Mock()
    lock_released.connect(hear)
    result = ask("release", TASK + "several", "7", answer="y\n", ends=0)
    assert f"{living.key}: 2/3 permits are held.\n" in result.stdout
    assert "Permit 0 is held by tests.cliapp.several[t-0] on w1@host" in result.stdout
    assert "Permit 1 is held by tests.cliapp.several[t-1] on w1@host" in result.stdout
    assert f"Release permit 1? [y/N]: y\nReleased {living.key}#1.\n" in result.stdout
    assert dead.release() == "lost"
    living.renew()
    assert f"{living.key}#1 was released by hand" in caplog.text
    ((_, signal),) = hear.call_args_list
    assert [signal[name] for name in ("task_id", "key", "fence")] == ["t-1", living.key, dead.fence]


def test_release_of_permits_that_live_needs_force(cli, locks):
    """Then all are released, each as it was shown."""
    held = cli.hold_many(identity(), ELSEWHERE)
    refused = ask("release", held[0].key, "--yes", ends=1)
    assert "all holders may still be running. Stop them first, or use --force" in refused.stderr
    result = ask("release", held[0].key, "--force", answer="y\n", ends=0)
    assert "Release all of them? [y/N]" in result.stdout
    assert [one.release() for one in held] == ["lost", "lost"]
    assert locks.exists(held[0].key, *permit_names(held[0].key, 1)) == 0
    assert ask("release", held[0].key, ends=1).stderr == f"Nothing to release: {held[0].key} is free.\n"


@pytest.mark.parametrize("permit", [0, 1])
def test_release_takes_the_name_of_one_permit(cli, permit):
    """A permit is a lock with a name: nothing else is shown, or touched."""
    held = cli.hold_many(ELSEWHERE, ELSEWHERE)
    name = f"{held[0].key}#{permit}"
    assert "its holder may still be running" in ask("release", name, "--yes", ends=1).stderr
    result = ask("release", name, "--yes", "--force", ends=0)
    assert f"{name} is held by tests.cliapp.several[t-{permit}]" in result.stdout
    assert f"t-{1 - permit}" not in result.stdout
    assert held[permit].release() == "lost"
    held[1 - permit].renew()
    assert ask("release", name, ends=1).stderr == f"Nothing to release: {name} is free.\n"


def test_release_knows_a_lock_whose_name_is_like_a_permits(cli, locks):
    """A user may have named it so; and the permits of a lock without a tag are known by its name."""
    with SetnxLock(locks, "job#3"):
        assert "job#3 is held by token " in ask("release", "job#3", ends=1).stdout
    with SetnxLock(locks, "jobs", limit=2), SetnxLock(locks, "jobs", limit=2) as second:
        assert "Released jobs#1." in ask("release", "jobs#1", "--yes", "--force").stdout
        assert not locks.exists(*permit_names("jobs", 1))
        assert locks.exists("jobs", permits_name("jobs")) == 2
        assert second.permit == 1


def test_release_says_which_permit_has_changed_meanwhile(cli, meanwhile):
    """The others are released all the same."""
    held = cli.hold_many(ELSEWHERE, ELSEWHERE)
    meanwhile(held[0].release)
    result = ask("release", held[0].key, "--force", ends=1)
    assert f"Released {held[0].key}#1.\n" in result.stdout
    assert f"Not released: {held[0].key}#0 has changed since" in result.stderr
    assert held[1].release() == "lost"


def test_release_of_a_permit_lets_the_first_in_line_run(cli):
    """The line is the lock's: it goes on, whichever permit is free."""
    held = cli.hold_many(ELSEWHERE, ELSEWHERE, ELSEWHERE)
    cli.park("several")
    result = ask("release", f"{held[0].key}#2", "--yes", "--force", ends=0)
    assert "Calls wait in line; the first of them is next." in result.stdout
    assert cli.is_due("several")


# a pace

MOST_OF_A_MINUTE = r"([1-5]\d s|1 min 0 s)"


def test_list_says_that_a_lock_is_paced(cli):
    """One that is free, and that no call may have yet; when the next may start is its deadline."""
    key = cli.start(ago=20)
    cli.start(count=1, customer=8)  # another may start at once: there is nothing to see
    assert ask("list").stderr == "1 lock under t:{...}.\n"
    cli.park("paced")
    result = ask("list")
    _heading, line = result.stdout.splitlines()
    assert re.fullmatch(rf"{TASK}paced  paced  -  +in [1-4]\d s +-  +1  +-  +-  +{re.escape(key)}", line)
    assert result.stderr == "1 lock under t:{...}.\n"
    (row,) = ask_json("list")
    assert (row["state"], row["rate"], row["starts"], row["held"]) == ("paced", [2, 60.0], 2, 0)
    assert 0 < row["next_start_s"] <= 40
    assert ask("list", "--stale").stdout == ""


def test_list_says_that_permits_are_free_though_their_pace_allows_no_start(cli):
    """The row is about the pace; but a holder that will not come back is shown first."""
    key = cli.hold_many(ELSEWHERE, ELSEWHERE, name="paced_several", rate=(2, 60))[0].key
    state, age_of_it, ends, process = cells()[1:5]
    assert (state, age_of_it, process) == ("paced 2/3", "-", "-")
    assert re.fullmatch(MOST_OF_A_MINUTE, ends.removeprefix("in "))
    (row,) = ask_json("list")
    assert [row["state"], *(one["state"] for one in row["holders"])] == ["paced", "running", "running"]
    age(cli.locks, key, 600)
    cli.hold_many(DEAD, ELSEWHERE, name="paced_several", rate=(2, 60))
    row = cells()
    assert (row[1], row[4]) == ("running 2/3", "dead")


def test_show_says_how_many_starts_count(cli):
    """Of how many, and when the next may be."""
    show = ("show", TASK + "paced", "7")
    cli.start(count=1)
    assert re.search(r"^state     free\n(?:.*\n)?starts    1 of 2 in 60 s$", ask(*show).stdout, re.MULTILINE)
    cli.start(count=1)
    starts = rf"^starts    2 of 2 in 60 s; the next is allowed in {MOST_OF_A_MINUTE}$"
    assert re.search(starts, ask(*show).stdout, re.MULTILINE)
    assert "\nstate     paced\n" in ask(*show).stdout
    cli.hold("sync")
    assert "starts" not in ask("show", SYNC, "7").stdout


BECOMES_PACED = {
    "paced": "would wait in line, at place 1 .on_conflict='auto'",
    "paced_several": f"would come back after {MOST_OF_A_MINUTE}, and then after up to 60 s each time",
    "paced_skips": "would be skipped: it succeeds without running .on_conflict=",
}


@pytest.mark.parametrize("task", BECOMES_PACED)
def test_why_says_when_the_next_call_may_start_and_what_becomes_of_this_one(cli, task):
    """The pace is in the way of what nobody holds; a start that is left is a yes."""
    cli.start(task, count=1)
    ask("why", TASK + task, "7", ends=0)
    cli.start(task, count=1)
    told = ask("why", TASK + task, "7", ends=1).stdout
    because = rf"No: its rate allows the next start in {MOST_OF_A_MINUTE} \(starts: 2 of 2 in 60 s\)\."
    assert re.match(rf"{because}\n  A call now {BECOMES_PACED[task]}", told), told
    found = json.loads(ask("why", TASK + task, "7", "--json", ends=1).stdout)
    assert (found["runs"], found["state"], found["starts"]) == (False, "paced", 2)
    age(cli.locks, cli.key(task), 60)
    ask("why", TASK + task, "7", ends=0)


def test_why_says_that_the_pace_holds_up_a_line(cli):
    """Who waits there comes before this call, and waits for nobody else."""
    cli.start()
    cli.park("paced")
    told = ask("why", TASK + "paced", "7", ends=1).stdout
    assert re.match(
        r"No: its rate allows the next start in .*\n  1 call in line before it\.\n  A call now ", told
    )
    assert "at place 2" in told


@pytest.mark.parametrize(
    ("where", "lease", "says"),
    [
        (ELSEWHERE, 600, r"its lock is held\.\n(.*\n)*  Its rate allows no start either: 2 of 2 in 60 s;"),
        (DEAD, 600, r"its rate allows the next start in "),
        (ELSEWHERE, 10, r"its rate allows the next start in "),
    ],
    ids=["held", "dead", "stale"],
)
def test_why_knows_that_a_take_over_is_paced_too(cli, where, lease, says):
    """A lock that the call could have had, but for its pace; and one that is held all the same."""
    cli.start(count=1)
    cli.hold("paced", where=where, rate=(2, 60), lease=lease)
    age(cli.locks, cli.key("paced"), 20)
    told = ask("why", TASK + "paced", "7", ends=1).stdout
    assert re.match(f"No: {says}", told), told


def test_why_goes_by_the_rate_of_the_app_and_names_another(cli):
    """While a deploy changes it: what a call of this app would find."""
    for _ in range(2):
        SetnxLock(cli.locks, cli.key("paced"), rate=(9, 60.0)).acquire().lock.release()
    told = ask("why", TASK + "paced", "7", ends=1).stdout
    assert "(starts: 2 of 2 in 60 s)" in told
    assert "  This app's rate is 2 in 60 s, but the last client of the lock had 9 in 60 s: a deploy" in told
    SetnxLock(cli.locks, cli.key("sync"), rate=(1, 60.0)).acquire().lock.release()
    told = ask("why", TASK + "sync", "7", ends=0).stdout
    assert "  This app's rate is none, but the last client of the lock had 1 in 60 s" in told


def test_release_of_starts_lets_calls_start_at_once(cli, caplog):
    """They are shown, asked about, and forgotten; the first in line has its turn."""
    key = cli.start()
    refused = ask("release", key, ends=1).stderr
    assert f"Nothing to release: {key} is free. Its rate allows no start (2 of 2 in 60 s; the next" in refused
    assert "see release --starts.\n" in refused
    cli.park("paced")
    assert ask("release", "--starts", key, answer="n\n", ends=1).stderr == "Not forgotten.\n"
    assert ask_json("show", key)["starts"] == 2
    result = ask("release", "--starts", TASK + "paced", "7", answer="y\n", ends=0)
    assert f"Starts of {key}: 2 of 2 in 60 s; the next is allowed in " in result.stdout
    assert "Forgot 2 starts.\nCalls wait in line; as many as the rate allows are next.\n" in result.stdout
    assert f"2 starts of {key} were forgotten by hand, by " in caplog.text
    assert cli.is_due("paced")
    assert "no start of" in ask("release", "--starts", TASK + "sync", "7", ends=1).stderr


# what is not to reach a terminal

COMMANDS = [
    "list",
    "list --queued",
    "list --stale",
    "list --task EVIL",
    "show KEY",
    "show --json KEY",
    "show tests.cliapp.pending 7",
    "why tests.cliapp.pending 7",
    "why tests.cliapp.unique 7",
    "why tests.cliapp.waiting 7",
    "why --json tests.cliapp.waiting 7",
    "release KEY",
    "release --yes KEY",
    "release --yes --force KEY",
    "release tests.cliapp.pending 7",
    "release --yes --queued --task tests.cliapp.pending",
    "release --yes --queued --task EVIL",
    "doctor",
    "doctor --json",
]


@pytest.fixture
def poisoned(cli, locks, foreign_keys) -> str:
    """Whatever a holder, a caller or another program can write there is full of escapes; one such key."""
    word = EVIL.replace("\r\n", "")  # a token and an id are of one line
    about = {"task": EVIL, "worker": EVIL, "host": EVIL, "pid": 7}
    evil = key_name("t", EVIL, digest([7]))
    for key in (evil, *map(cli.key, ("unique", "waiting"))):
        lock = SetnxLock(locks, key, info=about, line=True, lease=600)
        assert lock.acquire(token=f"{word}|0|ab").acquired
        dead = lock.holder()
        assert dead is not None
        note_take_over(locks, key, TakeOver(time.time(), EVIL, {**dead.as_dict(), "description": EVIL}), 60)
        park(locks, LineEntry(key, word, 0, 60), since=time.time(), call="")
    for key in (evil, cli.key("pending")):
        mark_all(locks, [Mark(key, word)], dedupe="until_started", lease=600)
    for key in (cli.key("pending"), key_name("t", EVIL, digest([8]))):
        foreign_keys.add(key)
        locks.set(key, EVIL)
    foreign_keys.add(f"{evil}:more")
    locks.set(f"{evil}:more", EVIL)
    stale = SetnxLock(locks, key_name("t", EVIL, digest([9])), info=about, lease=600)
    assert stale.acquire(token=f"{word}|0|ab").acquired
    age(locks, stale.name, 601)
    return evil


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_is_not_printable_reaches_the_terminal(poisoned, caplog, command):
    """Neither an escape nor a line of its own, on stdout, stderr or in the log, as text or as JSON."""
    given = [{"KEY": poisoned, "EVIL": EVIL}.get(word, word) for word in command.split()]
    result = ask(*given, answer="y\n", color=True)
    ours = re.sub(r"\x1b\[\d+m", "", result.stdout + result.stderr)
    assert controls(ours) <= {"\n"}
    assert controls("".join(caplog.messages)) == set()
    assert "OWNED" in ours
    assert not any(line.startswith("INFO all is well") for line in ours.splitlines())


def test_nothing_that_is_not_printable_reaches_the_screen_of_watch(poisoned, cli):
    """Nor there, where rich writes; and what Redis says when it does not answer."""
    pictures = [_picture(cli.app, None, ConsoleDimensions(width, 40)) for width in (80, 300)]
    with locks_on(cli.app, "redis://127.0.0.1:1/1"):
        pictures.append(_picture(cli.app, None, ConsoleDimensions(80, 40)))
    for picture in pictures:
        assert controls(picture.plain) <= {"\n"}
    assert "OWNED" in pictures[1].plain
    assert "ConnectionError" in pictures[2].plain


# tables that fit


def lock_row(**cells: str) -> list[str]:
    """The cells of a lock, of the usual width."""
    usual = dict(zip(COLUMNS, ["proj.billing.settle", "running", "4.1 s", "in 26 s", "alive", "12"]))
    usual |= {"TASK ID": str(uuid.uuid4()), "WORKER": "w1@shop (pid 23344)", "KEY": f"t:{{proj:{'d' * 32}}}"}
    return list({**usual, **{name.replace("_", " "): cell for name, cell in cells.items()}}.values())


ROWS = [
    lock_row(),
    lock_row(STATE="held_for_retry", AGE="23 h 59 min", DEADLINE="23 h 59 min ago", PROCESS="unknown"),
    lock_row(TASK="京都.任務", WORKER="müller@häuschen (pid 1)"),
]


@pytest.mark.parametrize(
    ("room", "gone", "cut"),
    [
        (None, [], []),
        (300, [], []),
        (160, ["KEY"], []),
        (140, ["KEY"], ["WORKER"]),
        (120, ["KEY", "WORKER"], ["TASK ID"]),
        (80, ["KEY", "WORKER", "TASK ID"], ["TASK"]),
    ],
)
def test_table_keeps_what_matters_and_cuts_the_rest(room, gone, cut):
    """State, age, deadline, process and who waits are always whole; first the key goes, then the worker.

    Columns that there is no room for are not left out without a word.
    """
    heading, *lines = table(COLUMNS, ROWS, room)
    missing = ", ".join(name for name in COLUMNS if name in gone)
    said = f" No room for {missing}: widen the terminal." if gone else ""
    assert screen.left_out(COLUMNS, heading) == said
    left = [name for name in COLUMNS if name not in gone]
    assert re.split("  +", heading) == left
    for line, row in zip(lines, ROWS):
        assert screen._width(line) <= (room or 1000)
        for name, cell in zip(COLUMNS, row):
            assert (cell in line) or name in (*gone, *cut), name
        assert ("…" in line) == (bool(cut) and (cut != ["TASK"] or row[0] == "proj.billing.settle"))


@pytest.mark.parametrize("room", [0, *range(10, 200, 7)])
def test_table_is_never_wider_than_its_room(room):
    """However little that is; COLUMNS=0 is no reason to hang."""
    key = "t:{proj.billing.reindex:d66aba8f}"
    marks = [["proj.billing.reindex", "in 4.1 s", "12", "in 1 h 9 min", str(uuid.uuid4()), key]]
    for columns, rows in ((COLUMNS, ROWS), (MARK_COLUMNS, marks)):
        assert 0 < max(map(screen._width, table(columns, rows, room))) <= max(room, 1)


@pytest.mark.parametrize("room", [20, 40, 80])
@pytest.mark.parametrize(
    "text",
    ["error    server: the memory is full, and no lock is granted any more", "  Held by one two three four"],
)
def test_line_is_broken_between_words(monkeypatch, room, text):
    """Under its first column; in a pipe it stays one line."""
    assert screen.whole_words(text) == text
    monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda: True))
    monkeypatch.setattr(screen, "_columns", lambda: room)
    first, *more = screen.whole_words(text).split("\n")
    assert " ".join([first, *map(str.strip, more)]) == text
    indent = 9 if text.startswith("error") else 2
    assert all(line.startswith(" " * indent) and line[indent] != " " for line in more)
    assert all(len(line) <= room for line in [first, *more])


def test_name_of_a_task_is_cut_at_its_beginning():
    """The end of a dotted name says most; other cells are cut at theirs."""
    _heading, line = table(COLUMNS, [lock_row(TASK="proj." + "deep." * 20 + "settle")], 80)
    assert re.match(r"…[a-z.]*\.settle  running  4\.1 s  in 26 s   alive    12", line)
    _heading, line = table(COLUMNS, [lock_row(TASK_ID="6c33b3ee-ec29-4d6d-a778-06f166cc7d45")], 90)
    assert re.search(r"  12       6c33b3ee-[-0-9a-f]*…$", line)


def test_watch_shows_trouble_first(cli):
    """Stale locks and those of the dead, then those for which most wait, then the oldest."""
    for customer in range(20):
        cli.hold(customer=customer)
    cli.stale("retrying")
    cli.hold("raising", where=DEAD)
    cli.foreign("deciding")
    cli.hold("waiting")
    cli.park("waiting")
    cli.hold("joining")
    pass_time(300, cli.task("joining"), 7)
    picture = _picture(cli.app, None, ConsoleDimensions(120, 9)).plain.splitlines()
    tasks = [line.split()[0].removeprefix(TASK) for line in picture[1:-1]]
    assert sorted(tasks[:3]) == ["deciding", "raising", "retrying"]
    assert tasks[3:] == ["waiting", "joining", "sync"]
    assert picture[-1].startswith("25 locks, 19 of them not shown, ")


def test_why_says_that_another_programs_record_is_in_the_way(cli, locks, foreign_keys):
    """Each call would be refused, though nobody holds the lock."""
    record = record_name(cli.key("sync"))
    foreign_keys.add(record)
    locks.set(record, "garbage")
    result = ask("why", f"{TASK}sync", "7", ends=1)
    assert result.stdout.startswith(f"No: another program has written {record}: each call fails with LockRef")


# errors

UNREACHABLE = "redis://ops:secret@127.0.0.1:1/1"
TOLD = "Error: redis://ops:**@127.0.0.1:1/1 (setnx_url)"


@pytest.mark.parametrize("command", [["list"], ["show", "t:{a}"], ["release", "t:{a}", "--yes"]])
def test_an_unreachable_server_ends_with_3(cli, command):
    """One line that names the server and the setting; no traceback, no password."""
    with locks_on(cli.app, UNREACHABLE):
        result = ask(*command, ends=3)
    (line,) = result.stderr.splitlines()
    assert line.startswith(TOLD)
    assert "secret" not in result.output


@pytest.mark.parametrize("command", ["scan", "mget"])
def test_a_user_who_may_not_look_is_told_so(cli, limited, command):
    """What the server forbids, and all that looking needs: in the script, too."""
    cli.hold("waiting")
    with locks_on(cli.app, limited("~*", "+@all", f"-{command}")):
        result = ask("list", ends=3)
    assert "celery setnx needs SCAN, EVAL, EVALSHA, TIME, GET, MGET, " in result.stderr
    assert "ZREVRANGEBYSCORE on t:*" in result.stderr


OPTIONS = """
from other import app
from celery_setnx import SingletonTask
@app.task(base=SingletonTask, singleton={"leese": 5})
def work(): ...
@app.task(base=SingletonTask, singleton={"lease": -1})
def more(): ...
"""
DECORATED = """
from other import app
from celery_setnx import singleton
@app.task
@singleton(leese=5)
def work(): ...
"""
SHARED = """
from celery import shared_task
from celery_setnx import SingletonTask
@shared_task(base=SingletonTask)
def shared(n): ...
"""
UNKNOWN = "work has an unknown option 'leese'; did you mean 'lease'?"
NEGATIVE = "lease of othertasks.more must be more than 0 seconds"


@pytest.fixture
def other(alone, server, tmp_path, monkeypatch) -> Iterator[Any]:
    """Asks an app of another project, whose module of tasks has this text."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for module in ("other", "othertasks"):
            sys.modules.pop(module, None)

    def ask_other(tasks: str, *command: str, ends: int) -> Result:
        forget()
        made = f"Celery('other', broker='{server.url(1)}', set_as_current=False, include=['othertasks'])"
        (tmp_path / "other.py").write_text(f"from celery import Celery\napp = {made}\n")
        (tmp_path / "othertasks.py").write_text(tasks)
        return ask(*command, app="other", ends=ends)

    yield ask_other
    forget()


@pytest.mark.parametrize(
    ("tasks", "found"),
    [(OPTIONS, [f"othertasks.{UNKNOWN}", NEGATIVE]), (DECORATED, [f"@singleton on {UNKNOWN}"])],
    ids=["bound", "imported"],
)
def test_check_finds_every_task_whose_options_are_refused(other, tasks, found):
    """Not only the first, at which Celery stops; @singleton refuses while the module is imported."""
    findings = json.loads(other(tasks, "check", "--json", ends=1).stdout)
    assert [finding["level"] for finding in findings] == ["error"] * len(found)
    said = other(tasks, "check", ends=1)
    assert [what for what in found if what not in said.stdout] == []
    assert said.stderr.endswith(f"{len(found)} error{'s' * (len(found) > 1)}.\n")


def test_other_commands_say_why_the_tasks_cannot_be_imported(other):
    """Which app; one line, exit code 1."""
    (line,) = other("import no_such", "list", ends=1).stderr.splitlines()
    assert "the tasks of other cannot be imported: ModuleNotFoundError: No module named" in line


def test_refused_task_is_in_the_way_of_its_own_questions_alone(other, locks):
    """`why` says what is refused, in one line; the list is that of all others."""
    (line,) = other(OPTIONS, "why", "othertasks.work", ends=1).stderr.splitlines()
    assert line == f"Error: othertasks.{UNKNOWN}"
    assert other(OPTIONS, "list", ends=0).stdout == ""


def test_tasks_of_included_modules_are_known(other, locks):
    """As a worker does, the command imports what the app includes."""
    result = other(SHARED, "why", "othertasks.shared", "1", ends=0)
    assert result.stdout.startswith("Yes: its lock is free.")


def test_doctor_prints_findings_and_ends_with_their_code(cli):
    """Text and JSON say the same; --strict makes warnings count."""
    result = ask("doctor")
    assert "ok       server: " in result.stdout
    findings = ask_json("doctor")
    assert {tuple(sorted(finding)) for finding in findings} == {("do", "level", "subject", "what", "why")}
    levels = [finding["level"] for finding in findings]
    assert result.stderr.startswith(f"{levels.count('ok')} ok, ")
    assert result.exit_code == (1 if "error" in levels else 0)
    assert "warning" in levels  # the server of the tests keeps nothing
    assert ask("doctor", "--strict").exit_code == 1


def test_doctor_prints_the_acl_line_and_asks_no_server(cli, monkeypatch):
    """To be copied into redis-cli."""
    monkeypatch.setitem(cli.app.conf, "setnx_url", "redis://localhost:1/0")
    result = ask("doctor", "--acl")
    assert result.stdout.startswith("ACL SETUSER celery_setnx on >PASSWORD ~")
    assert (result.exit_code, result.stderr) == (0, "")


# the executable, and real workers


def test_without_an_app_it_says_so():
    """The forgotten -A."""
    done = celery_command("setnx", "list")
    assert done.stderr.startswith("Error: no Redis for locks")
    assert done.stderr.endswith("No app was given: use celery -A app setnx ...\n")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_executable_says_in_one_line_what_does_not_answer(server):
    """No log line beside it, no password; exit code 3."""
    conf = json.dumps({"setnx_url": UNREACHABLE})
    done = celery_command("-A", "tests.cliapp", "setnx", "list", **{CONF: conf})
    (line,) = done.stderr.splitlines()
    assert line.startswith(TOLD)
    assert "secret" not in done.stdout + done.stderr
    assert done.returncode == 3


def test_options_that_the_app_adds_to_all_commands_are_handed_on(tmp_path, locks):
    """user_options["preload"] works as with Celery's own commands."""
    (tmp_path / "preloadapp.py").write_text(
        "from celery import Celery\nfrom celery.signals import user_preload_options\n"
        "from click import Option\n"
        "app = Celery('preload', broker='memory://')\n"
        "app.user_options['preload'].add(Option(['--zone']))\n"
        "@user_preload_options.connect\ndef hear(options, **_details): print(options)\n"
    )
    command = ("-A", "preloadapp", "setnx", "--zone", "north", "why", "nothing")
    result = celery_command(*command, PYTHONPATH=str(tmp_path))
    assert result.stdout == "{'zone': 'north'}\n"
    assert result.returncode == 2


def release_by_hand(key: str) -> subprocess.CompletedProcess[str] | None:
    """The command's end; None if it says to look again, because the holder has renewed meanwhile."""
    done = celery_command("-A", "tests.workerapp", "setnx", "release", key, "--yes", "--force")
    return None if "Look again." in done.stderr else done


def test_commands_see_what_a_worker_does(tasks, journal, holding, locks):
    """list, show, why and release, of a lock that a worker's process holds."""
    call = (tasks.work.name, "gated-cli")
    with holding(tasks.work, "gated-cli") as result:
        (start,) = journal.entries(what="start", task_id=result.id)
        (row,) = ask_json("list", app="tests.workerapp")
        (_heading, line) = ask("list", app="tests.workerapp").stdout.splitlines()
        assert line.startswith("tests.workerapp.work(name='gated-cli')  running")
        of_worker = {name: start[name] for name in ("key", "task_id", "pid", "fence")}
        of_worker["about"] = "name='gated-cli'"
        assert {**row, **of_worker, "task": tasks.work.name, "state": "running", "stale": False} == row
        shown = ask("show", *call, app="tests.workerapp").stdout
        assert f"process   Its process, pid {start['pid']} on this host, is alive." in shown
        why = ask("why", *call, app="tests.workerapp", ends=1)
        assert why.stdout.startswith("No: its lock is held.\n")
        assert f"Held by tests.workerapp.work(name='gated-cli')[{result.id}]" in why.stdout
        refused = ask("release", start["key"], "--yes", app="tests.workerapp", ends=1)
        assert "Not released: its holder may still be running." in refused.stderr
        forced = wait_until(lambda: release_by_hand(start["key"]), "a look that no renewal has overtaken")
        assert f"Released {start['key']}." in forced.stdout
        assert "was released by hand" in forced.stderr
        assert forced.returncode == 0
        ask("why", *call, app="tests.workerapp", ends=0)
        journal.wait_for("lost", task_id=result.id)


# the docs


def options_of(command: click.Command) -> set[str]:
    """The long options of a command."""
    options = (parameter.opts for parameter in command.params if isinstance(parameter, click.Option))
    return {option for opts in options for option in opts if option.startswith("--")}


def named_options(text: str) -> set[str]:
    """The options that a text names."""
    return set(re.findall(r"(?<![\w-])--[a-z]+", text))


@pytest.mark.parametrize("name", setnx.commands)
def test_every_command_and_option_is_documented(cli, name):
    """docs/cli.md has a heading for each command, and below it each of its options, and no other's.

    The help of each says what it does, and no line is wider than 80 columns.
    """
    text = ask(name, "--help").stdout
    assert text.startswith(f"Usage: celery setnx {name}")
    assert max(map(len, text.splitlines())) <= 80
    options = options_of(setnx.commands[name])
    assert options <= named_options(sections(PAGE)[name]) <= {*options, "--help"}


def test_docs_name_no_option_that_does_not_exist():
    """In no place of docs/cli.md."""
    known = {option for command in setnx.commands.values() for option in options_of(command)}
    assert named_options(PAGE) <= {*known, "--help"}


# Live terms


def test_paused_key_is_seen_as_paused(cli):
    """In the list, by why, and among the terms: until when, by whom and why; and then no more."""
    said = ask("pause", f"{TASK}sync", "7", "--for", "2h", "--because", "partner down", ends=0).stdout
    assert re.fullmatch(rf"{re.escape(cli.key())}: paused until .* UTC, for 2 h 0 min\.\n", said)
    assert cells()[:2] == [f"{TASK}sync", "paused"]
    told = ask("why", f"{TASK}sync", "7", ends=1).stdout.splitlines()
    assert re.fullmatch(r"No: its key is paused for .* more by .*: partner down\.", told[0])
    assert told[1].strip().startswith("A call now would wait in line; others would be skipped")
    (row,) = ask_json("terms")
    assert (row["key"], row["name"], row["because"]) == (cli.key(), "pause", "partner down")
    assert 7100 < row["ends_in_s"] <= 7200
    assert "no longer paused" in ask("resume", f"{TASK}sync", "7", ends=0).stdout
    assert ask_json("terms") == []
    assert ask("why", f"{TASK}sync", "7", ends=0).stdout.startswith("Yes")


def test_pause_and_its_end_are_logged_as_done_by_hand(cli, caplog):
    """With the key, by whom and why."""
    ask("pause", cli.key(), "--because", "partner down", ends=0)
    ask("resume", cli.key(), ends=0)
    told = [record for record in caplog.records if record.name == "celery_setnx"]
    assert [(each.setnx_event, each.setnx_key) for each in told] == [("by_hand", cli.key())] * 2
    paused, resumed = (each.getMessage() for each in told)
    assert re.fullmatch(rf"{re.escape(cli.key())}: paused until .* UTC by \S+ on .*: partner down\.", paused)
    assert re.fullmatch(rf"{re.escape(cli.key())}: no longer paused; ended by \S+ on .*\.", resumed)


def test_second_call_of_a_paused_key_would_be_skipped(cli):
    """One waits, and is first."""
    ask("pause", cli.key())
    cli.park()
    told = ask("why", f"{TASK}sync", "7", ends=1).stdout
    assert "would be skipped, as another of its key waits (on_conflict='auto')" in told


def test_resume_has_the_line_looked_at(cli):
    """Of a key; a task's lines are the workers' business."""
    ask("pause", cli.key())
    cli.park(call=json.dumps({"headers": {"task": f"{TASK}sync"}}))
    assert not cli.is_due()
    ask("resume", cli.key(), ends=0)
    assert cli.is_due()


def test_paused_task_is_paused_for_each_key(cli):
    """Which workers heed it is said, as far as they answer."""
    said = ask("pause", f"{TASK}sync", "--because", "release", ends=0).stdout
    assert said.startswith(f"all calls of {TASK}sync: paused until ")
    assert "heed it within two seconds" in said
    told = ask("why", f"{TASK}sync", "8", ends=1).stdout
    assert re.match(r"No: its task is paused for .* more by .*: release\.", told)
    cli.park()
    assert cells()[:2] == [f"{TASK}sync", "paused"]
    assert ask("why", f"{TASK}named", "8", ends=None).stdout.startswith("Yes")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["limit", "several", "2"], "limited to 2 at a time until"),
        (["limit", "several", "7", "2", "--for", "10m"], "limited to 2 at a time until"),
        (["rate", "sync", "10/m"], "limited to 10 starts in 60 s until"),
        (["rate", "paced", "7", "1/h"], "limited to 1 starts in 3600 s until"),
    ],
)
def test_limit_and_rate_end_when_ones_own_count_again(cli, arguments, said):
    """What has changed is said in words."""
    verb, task, *rest = arguments
    assert said in ask(verb, TASK + task, *rest, ends=0).stdout
    of_call = rest[:1] if len(rest) > 1 and rest[1] != "--for" else []
    assert (
        f"no longer {said.removesuffix(' until')}" in ask(verb, TASK + task, *of_call, "own", ends=0).stdout
    )
    assert ask_json("terms") == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["limit", "sync", "2"], "has limit=1: no two of its calls may run at a time"),
        (["limit", "joining", "2"], "has limit=1"),
        (["rate", "sync", "ten"], "must be text such as '10/m'"),
        (["limit", "several", "101"], "limit"),
        (["pause", "sync", "--for", "2y"], "2y"),
        (["pause", "sync", "--for", "0"], "a millisecond at least"),
        (["pause", "sync", "--for", "367d"], "a year at most, not 3.17088e+07 s"),
        (["pause", "nosuch"], "The app has no task"),
        (["resume", "sync"], f"Nothing has changed: no pause of all calls of {TASK}sync."),
        (["rate", "sync", "7", "own"], "Nothing has changed: no live rate of t:{"),
    ],
)
def test_terms_that_cannot_be_are_refused(cli, arguments, why):
    """And nothing is written."""
    verb, task, *rest = arguments
    result = ask(verb, TASK + task, *rest)
    assert result.exit_code
    assert why in result.output
    assert ask_json("terms") == []


def test_pause_of_a_key_that_no_task_has_is_refused(cli):
    """Nobody would heed it."""
    result = ask("pause", "elsewhere:{sync}")
    assert (result.exit_code, ask_json("terms")) == (1, [])
    assert "is no name of a lock of this app's tasks" in result.output


@pytest.mark.parametrize(
    ("whose", "says", "ends"),
    [
        ([f"{TASK}sync", "7"], "its key", f"{TASK}sync 7"),
        (
            [f"{TASK}sync", "--kwargs", '{"customer": 7}'],
            "its key",
            f"{TASK}sync --kwargs '{{\"customer\": 7}}'",
        ),
        ([f"{TASK}sync"], "its task", f"{TASK}sync"),
        ([f"{TASK}crowd_one"], "its task", "throng"),
    ],
    ids=["call", "exact", "task", "scope"],
)
def test_why_names_the_command_that_ends_a_pause(cli, whose, says, ends):
    """Of the key by its call, of the task by its scope; as it stands there it works."""
    asked = whose if len(whose) > 1 else [*whose, "7"]
    ask("pause", *whose, ends=0)
    told = ask("why", *asked, ends=1).stdout.splitlines()
    assert told[0].startswith(f"No: {says} is paused for ")
    command = told[told.index("  To end the pause:") + 1].strip()
    assert command == f"celery -A APP setnx resume {ends}"
    ask(*shlex.split(command)[4:], ends=0)
    assert ask("why", *asked, ends=None).stdout.startswith("Yes")


def test_why_of_a_held_lock_says_that_a_pause_follows(cli):
    """And not that a rate does, which the task has not."""
    cli.hold()
    ask("pause", f"{TASK}sync")
    told = ask("why", f"{TASK}sync", "7", ends=1).stdout
    assert "No: its lock is held." in told
    assert "A pause lets no call start either: its task is paused for 23 h" in told
    assert "rate" not in told


def test_why_and_show_tell_the_live_limit(cli):
    """How many permits count, who has said so, and until when."""
    cli.hold_many(None, None)
    ask("limit", f"{TASK}several", "2", "--because", "slow", ends=0)
    told = ask("why", f"{TASK}several", "7", ends=1).stdout
    assert told.startswith("No: 2 of 2 permits are held")
    its = r"its task is limited to 2 at a time until \S+ \S+ UTC by .*: slow\."
    assert re.search(its, told, re.IGNORECASE)
    assert re.search(rf"^terms     {its}$", ask("show", f"{TASK}several", "7").stdout, re.MULTILINE)
    assert cells()[1] == "running 2/2"


def test_key_of_a_paused_task_is_not_resumed_by_itself(cli):
    """Whoever tries is told what ends the pause."""
    ask("pause", f"{TASK}sync", ends=0)
    said = ask("resume", f"{TASK}sync", "7", ends=1).stderr.splitlines()
    assert said == [
        f"Nothing has changed: no pause of {cli.key()}.",
        "Its task has one. To end that:",
        f"  celery -A APP setnx resume {TASK}sync",
    ]
    assert "A pause lets no call start: see why." in ask("release", f"{TASK}sync", "7", ends=1).stderr


def test_scope_is_paused_by_its_own_name(cli):
    """Which may be no task's; `terms` lists it."""
    said = ask("pause", "throng", "--for", "1h", "--because", "maintenance", ends=0).stdout
    assert said.startswith("all calls of throng: paused until ")
    (line,) = ask("terms", ends=0).stdout.splitlines()
    assert re.fullmatch(r"throng: paused for 59 min .* more by .*: maintenance\.", line)
    assert ask("why", f"{TASK}crowd_two", "7", ends=1).stdout.startswith("No: its task is paused")


def test_key_with_nothing_but_a_live_limit_is_no_lock(cli):
    """`terms` lists it, `list` does not."""
    ask("limit", f"{TASK}several", "7", "2", ends=0)
    assert ask_json("list") == []
    assert [row["key"] for row in ask_json("terms")] == [cli.key("several")]


def test_worker_that_knows_no_terms_is_named(cli, monkeypatch):
    """And nobody says that it will heed them."""
    replies = [{"old@a": {"error": "KeyError('setnx_terms')"}}]
    monkeypatch.setattr(cli.app.control, "broadcast", lambda *_, **__: replies)
    said = ask("pause", f"{TASK}sync", ends=0).stdout.splitlines()
    assert said[1:] == ["  1 worker knows no live terms, and does not heed this: old@a."]
    replies.append({"new@b": {"scopes": []}})
    said = ask("pause", f"{TASK}sync", ends=0).stdout.splitlines()
    assert said[2:] == ["  1 worker will heed it within two seconds."]


def test_doctor_names_what_was_forgotten(cli):
    """A limit that somebody has set two days ago, for a month."""
    ask("limit", f"{TASK}several", "2", "--for", "30d")
    assert "Live terms: 1; the oldest: " in ask("doctor").output
    (scope, text), *_ = cli.locks.hgetall("t:terms").items()
    cli.locks.hset(
        "t:terms", scope, re.sub(r'"since":\d+', lambda m: f'"since":{time.time() - 180_000:.0f}', text)
    )
    told = ask("doctor").output
    assert re.search(r"warning  terms: Live terms: 1; the oldest: .*several is limited to 2 at a time", told)
