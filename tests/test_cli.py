"""`celery setnx`: what each command prints, and with which code it ends. Real server, real workers."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import redis
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_setnx import HeldLock, SetnxLock
from celery_setnx.cli import setnx
from celery_setnx.keys import mark_name, record_name
from celery_setnx.line import Place, park
from celery_setnx.marks import Mark, mark_all
from celery_setnx.process import identity
from celery_setnx.signals import lock_released
from celery_setnx.survey import TakeOver, note_take_over
from tests.harness import Worker, wait_until

CELERY = shutil.which("celery", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
DOCS = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()

Ask = Callable[..., Result]


@pytest.fixture
def cli(locks) -> ModuleType:
    """The app that is asked about."""
    from tests import cliapp

    return cliapp


@pytest.fixture
def ask(cli) -> Ask:
    """Run `celery -A tests.cliapp setnx ...` in this process."""

    def run(*arguments: str, answer: str | None = None) -> Result:
        command = ["-A", "tests.cliapp", "setnx", *arguments]
        result = CliRunner().invoke(celery, command, input=answer)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return run


@pytest.fixture
def released() -> Iterator[list[dict[str, Any]]]:
    """What the signal `lock_released` has said."""
    heard: list[dict[str, Any]] = []

    def hear(**details: Any) -> None:
        heard.append(details)

    lock_released.connect(hear, weak=False)
    yield heard
    lock_released.disconnect(hear)


def celery_command(*arguments: str, app: str = "tests.workerapp", **environment: str) -> Any:
    """Run the real executable."""
    assert CELERY is not None
    return subprocess.run(
        [CELERY, "-A", app, "setnx", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def elsewhere() -> dict[str, Any]:
    """A process on another host."""
    return {**identity(), "host": "other", "boot": "another", "pid": 77}


def dead() -> dict[str, Any]:
    """A process of this host that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return {**identity(), "pid": process.pid}


def hold(locks: redis.Redis, task: Any, *args: Any, where: Any = None, **lock: Any) -> HeldLock:
    """The held lock of a call."""
    info = {**(where or identity()), "task": task.name, "task_id": "t-1", "worker": "w1@host"}
    held = SetnxLock(locks, task.lock_key(*args), info=info, **lock).acquire(token="t-1|0|ab").lock
    assert held is not None
    return held


def stale(locks: redis.Redis, task: Any, *args: Any, where: Any = None) -> HeldLock:
    """The lock of a holder whose lease has ended."""
    held = hold(locks, task, *args, where=where or elsewhere(), lease=1)
    wait_until(lambda: task.locked(*args) is None, "the end of its lease")
    return held


def queue(locks: redis.Redis, task: Any, *args: Any, task_id: str = "t-2") -> None:
    """A call that is marked as queued."""
    mark_all(locks, [Mark(task.lock_key(*args), task_id)], dedupe="until_started", lease=600)


# list


def test_list_says_that_there_is_nothing(ask):
    """No table, one line, exit code 0."""
    result = ask("list")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "No locks under t:{...}.\n", 0)
    assert ask("list", "--stale").stderr == "No stale locks under t:{...}.\n"
    assert ask("list", "--queued").stderr == "No marks under t:{...}.\n"


def test_list_prints_a_table(ask, cli, locks):
    """A heading, and a line for each lock."""
    hold(locks, cli.sync, 7)
    stale(locks, cli.retrying, 7)
    result = ask("list")
    heading, *lines = result.stdout.splitlines()
    assert heading.split() == ["TASK", "STATE", "AGE", "DEADLINE", "WAITING", "TASK", "ID", "WORKER", "KEY"]
    assert re.fullmatch(
        r"tests\.cliapp\.retrying  running  \d\.\d s  expired \d\.\d s ago  -        t-1      "
        r"w1@host \(pid 77\) +t:\{tests\.cliapp\.retrying:\w{32}\}",
        lines[0],
    )
    assert lines[1].startswith("tests.cliapp.sync      running  ")
    assert result.stderr == "2 locks under t:{...}.\n"


def test_list_chooses_by_task_and_by_deadline(ask, cli, locks):
    """--task and --stale leave out the others."""
    hold(locks, cli.sync, 7)
    old = stale(locks, cli.retrying, 7)
    only_task = json.loads(ask("list", "--json", "--task", "tests.cliapp.sync").stdout)
    assert [row["task"] for row in only_task] == ["tests.cliapp.sync"]
    only_stale = json.loads(ask("list", "--json", "--stale").stdout)
    assert [(row["key"], row["stale"]) for row in only_stale] == [(old.key, True)]
    assert ask("list", "--stale").stderr == "1 stale lock under t:{...}.\n"


def test_list_by_task_includes_those_who_share_its_scope(ask, cli, locks):
    """A lock under its scope is in a task's way, whoever holds it."""
    hold(locks, cli.crowd_two, 7)
    rows = json.loads(ask("list", "--json", "--task", "tests.cliapp.crowd_one").stdout)
    assert [(row["task"], row["scope"]) for row in rows] == [("tests.cliapp.crowd_two", "throng")]


def test_list_names_a_task_that_is_close(ask):
    """A task that the app does not have may be misspelt."""
    result = ask("list", "--task", "tests.cliapp.snyc")
    assert "The app has no task tests.cliapp.snyc; did you mean tests.cliapp.sync?" in result.stderr
    assert result.exit_code == 0


def test_list_json_has_the_documented_fields(ask, cli, locks, foreign_keys):
    """The names and types of the fields are part of the interface."""
    hold(locks, cli.sync, 7)
    foreign_keys.add(cli.sync.lock_key(8))
    locks.set(cli.sync.lock_key(8), "maintenance")
    rows = {row["state"]: row for row in json.loads(ask("list", "--json").stdout)}
    types = {name: type(value).__name__ for name, value in rows["running"].items()}
    assert types == {
        "key": "str",
        "task": "str",
        "scope": "str",
        "state": "str",
        "stale": "bool",
        "task_id": "str",
        "worker": "str",
        "host": "str",
        "pid": "int",
        "fence": "int",
        "since": "float",
        "age_s": "float",
        "deadline": "float",
        "remaining_s": "float",
        "waiting": "int",
        "value": "str",
    }
    nothing = {name for name, value in rows["foreign"].items() if value is None}
    assert nothing == {
        *("task_id", "worker", "host", "pid"),
        *("since", "age_s", "deadline", "remaining_s"),
    }
    assert documented_fields("list --json") == set(types)


def test_list_json_of_marks_has_the_documented_fields(ask, cli, locks):
    """--queued has names of its own."""
    queue(locks, cli.pending, 7)
    (row,) = json.loads(ask("list", "--queued", "--json").stdout)
    assert row.pop("lapses_in_s") == pytest.approx(600, abs=30)
    assert row == {"key": cli.pending.lock_key(7), "task": "tests.cliapp.pending", "task_id": "t-2"}
    assert documented_fields("list --queued --json") == {*row, "lapses_in_s"}


def test_list_json_of_nothing_is_an_empty_array(ask):
    """It can always be parsed."""
    assert json.loads(ask("list", "--json").stdout) == []


def test_list_of_marks_prints_a_table(ask, cli, locks):
    """Which calls are queued, and when their marks lapse."""
    queue(locks, cli.pending, 7)
    result = ask("list", "--queued")
    heading, line = result.stdout.splitlines()
    assert heading.split() == ["TASK", "LAPSES", "QUEUED", "TASK", "ID", "KEY"]
    assert re.fullmatch(r"tests\.cliapp\.pending  in (10|9) min[ \w]*  t-2 +t:\{tests.*\}", line)
    assert result.stderr == "1 mark under t:{...}.\n"


def test_list_shows_a_line_without_a_holder(ask, cli, locks):
    """A free lock with a line is listed as free."""
    park(locks, Place(cli.waiting.lock_key(7), "t-9", 0, 60), since=time.time(), call="")
    (row,) = json.loads(ask("list", "--json").stdout)
    assert (row["state"], row["waiting"], row["task"]) == ("free", 1, "tests.cliapp.waiting")


def test_list_refuses_stale_marks(ask):
    """Two questions at once are wrong usage."""
    assert ask("list", "--stale", "--queued").exit_code == 2


# show


def test_show_prints_what_is_known(ask, cli, locks):
    """Record, fate of its process, deadline, mark and line."""
    held = hold(locks, cli.sync, 7)
    queue(locks, cli.sync, 7)
    park(locks, Place(held.key, "t-9", 0, 60), since=time.time() - 5, call="")
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


def test_show_names_the_last_take_over(ask, cli, locks):
    """Who took the lock over, when, and from which dead holder."""
    held = hold(locks, cli.sync, 7)
    assert "taken" not in ask("show", held.key).stdout
    dead = SetnxLock(locks, held.key).holder()
    assert dead is not None
    noted = time.time()
    note_take_over(locks, held.key, TakeOver(noted - 41, "app.sync[t-8]", dead.as_dict()), 60)
    shown = ask("show", held.key).stdout
    took_s = time.time() - noted
    said = [f"taken     over {41 + s} s ago by app.sync[t-8]\n" for s in range(round(took_s) + 1)]
    said = [f"{line}          from tests.cliapp.sync[t-1] on w1@host" for line in said]
    assert any(text in shown for text in said)
    found = json.loads(ask("show", "--json", held.key).stdout)["last_take_over"]
    assert set(found) == {"at", "by", "holder"}
    assert found["holder"]["task_id"] == "t-1"


def test_show_by_task_and_arguments_is_show_by_key(ask, cli, locks):
    """The key is computed as a publisher computes it."""
    held = hold(locks, cli.sync, 7)
    for call in (["7"], ["customer=7"], ["--args", "[7]"], ["--kwargs", '{"customer": 7}']):
        shown = json.loads(ask("show", "--json", "tests.cliapp.sync", *call).stdout)
        assert (shown["key"], shown["token"]) == (held.key, "t-1|0|ab")


@pytest.mark.parametrize(
    ("arguments", "args", "kwargs"),
    [
        (["7"], (7,), {}),
        (["seven"], ("seven",), {}),
        (['"7"'], ("7",), {}),
        (["[1, 2]", "null", "deep=true"], ([1, 2], None), {"deep": True}),
        (["since=2024-01-01", "customer=a=b"], (), {"customer": "a=b", "since": "2024-01-01"}),
        (["--", "-7"], (-7,), {}),
        (["1+1=2"], ("1+1=2",), {}),
        (["--args", '["a=b"]', "--kwargs", '{"deep": true}'], ("a=b",), {"deep": True}),
    ],
)
def test_arguments_are_json_or_text(ask, cli, arguments, args, kwargs):
    """name=value is a keyword argument where the name can be one."""
    shown = json.loads(ask("show", "--json", "tests.cliapp.sync", *arguments).stdout)
    assert shown["key"] == cli.sync.lock_key(*args, **kwargs)


def test_show_json_has_the_documented_fields(ask, cli, locks):
    """The fields of list, and more."""
    held = hold(locks, cli.sync, 7)
    park(locks, Place(held.key, "t-9", 0, 60), since=time.time() - 5, call="")
    shown = json.loads(ask("show", "--json", held.key).stdout)
    listed = json.loads(ask("list", "--json").stdout)[0]
    more = {"token", "process", "last_holder", "last_take_over", "mark", "mark_lapses_in_s", "line"}
    assert set(shown) == {*listed, *more}
    assert documented_fields("show --json") == more
    assert (shown["process"], shown["last_holder"], shown["mark"]) == ("alive", None, None)
    (waiter,) = shown["line"]
    assert {name: type(value).__name__ for name, value in waiter.items()} == {
        "task_id": "str",
        "place": "int",
        "since": "float",
        "age_s": "float",
    }


def test_show_of_a_free_lock_names_who_had_it(ask, cli, locks):
    """For a minute after the release."""
    hold(locks, cli.sync, 7).release()
    shown = ask("show", "tests.cliapp.sync", "7")
    assert "state     free\n" in shown.stdout
    assert "last      tests.cliapp.sync[t-1] on w1@host" in shown.stdout
    assert shown.exit_code == 0


def test_show_finds_a_lock_that_the_user_named(ask, locks):
    """A SetnxLock of any name is shown by its key."""
    with SetnxLock(locks, "nightly"):
        assert "holder    token " in ask("show", "nightly").stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["show", "tests.cliapp.snyc", "7"], "did you mean tests.cliapp.sync?"),
        (["show", "tests.cliapp.snyc"], "did you mean tests.cliapp.sync?"),
        (["show", "a}b"], "cannot be named"),
        (["show", "tests.cliapp.plain", "7"], "has no lock"),
        (["show", "tests.cliapp.sync"], "missing a required argument: 'customer'"),
        (["show", "tests.cliapp.sync", "--args", "7"], "no JSON array"),
        (["show", "tests.cliapp.sync", "--kwargs", "{"], "is no JSON"),
        (["why", "tests.cliapp.nothing"], "The app has no task tests.cliapp.nothing"),
        (["why", "tests.cliapp.plain", "7"], "neither a SingletonTask nor a @singleton"),
        (["release"], "give a KEY, or --queued and --task NAME"),
        (["release", "t:{a}", "--queued", "--task", "a"], "give a KEY"),
        (["release", "--queued"], "give a KEY, or --queued and --task NAME"),
        (["watch", "--interval", "0"], "--interval"),
    ],
)
def test_wrong_usage_is_told_and_ends_with_2(ask, command, says):
    """One message that says what to give instead."""
    result = ask(*command)
    assert says in result.stderr
    assert result.exit_code == 2


# why


def test_why_says_yes_to_a_free_lock(ask, cli):
    """Exit code 0."""
    result = ask("why", "tests.cliapp.sync", "7")
    assert result.stdout == f"Yes: nothing holds its lock.\n  The key is {cli.sync.lock_key(7)}\n"
    assert result.exit_code == 0


def test_why_knows_a_decorated_function(ask):
    """@singleton under Celery's own base class has a lock too."""
    result = ask("why", "tests.cliapp.decorated", "7")
    assert result.stdout.startswith("Yes: ")
    assert "t:{tests.cliapp.decorated:" in result.stdout


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("sync", "it would be skipped: it succeeds with its skip_result, and does nothing; as a step of a"),
        (
            "retrying",
            "it would come back after 1 s, and then after up to 60 s each time; after 60 s it fails",
        ),
        (
            "waiting",
            "it would wait in line, at place 1, and be woken when its turn has come (on_conflict='wa",
        ),
        ("joining", "it would wait in line, and end with the holder's result"),
        ("raising", "it would fail with AlreadyRunning (on_conflict='raise')"),
        ("deciding", "its on_conflict, decide, decides"),
        ("pending", "it would wait in line, at place 1"),
    ],
)
def test_why_says_who_is_in_the_way_and_what_becomes_of_the_call(ask, cli, locks, task, says):
    """Who, since when, until when, whether that process lives, and what on_conflict does."""
    hold(locks, getattr(cli, task), 7)
    result = ask("why", f"tests.cliapp.{task}", "7")
    assert result.stdout.startswith(
        "No: its lock is held.\n"
        f"  Held by tests.cliapp.{task}[t-1] on w1@host (pid {os.getpid()}), running since "
    )
    assert "  Its lease ends in " in result.stdout
    assert f"  Its process, pid {os.getpid()} on this host, is alive.\n" in result.stdout
    assert says in result.stdout
    assert result.exit_code == 1


def test_why_cannot_look_at_another_host(ask, cli, locks):
    """It says so, and what ends the lock."""
    hold(locks, cli.sync, 7, where=elsewhere())
    result = ask("why", "tests.cliapp.sync", "7")
    assert (
        "Its process is pid 77 on other, which cannot be looked at from here; if it is dead, its lease ends "
        "the lock."
    ) in result.stdout
    assert result.exit_code == 1


def test_why_says_yes_after_the_lease(ask, cli, locks):
    """The call takes the lock over, and from whom."""
    stale(locks, cli.sync, 7)
    result = ask("why", "tests.cliapp.sync", "7")
    assert re.match(
        r"Yes: the holder's lease ended \d\.\d s ago; the call takes its lock over\.\n", result.stdout
    )
    assert "Held by tests.cliapp.sync[t-1]" in result.stdout
    assert result.exit_code == 0


def test_why_says_yes_when_the_holder_is_dead(ask, cli, locks, monkeypatch):
    """A worker on the same host proves it, unless that is turned off."""
    hold(locks, cli.sync, 7, where=dead())
    result = ask("why", "tests.cliapp.sync", "7")
    assert result.stdout.startswith("Yes: its holder is dead; a worker on this host takes the lock over")
    assert result.exit_code == 0


@pytest.mark.parametrize(("task", "says"), [("pending", "the result of t-2"), ("unique", "DuplicateTask")])
def test_why_says_that_a_call_is_a_duplicate_of_a_queued_one(ask, cli, locks, task, says):
    """It would not be published, and what its caller gets."""
    queue(locks, getattr(cli, task), 7)
    result = ask("why", f"tests.cliapp.{task}", "7")
    assert "No: the same call is queued, as t-2; a new one would not be published.\n" in result.stdout
    assert says in result.stdout
    assert result.exit_code == 1


def test_why_says_that_a_call_is_a_duplicate_of_a_running_one(ask, cli, locks):
    """With dedupe="until_done"."""
    hold(locks, cli.unique, 7)
    result = ask("why", "tests.cliapp.unique", "7")
    assert "No: the same call runs already, as t-1; a new one would not be published.\n" in result.stdout
    assert result.exit_code == 1


def test_why_names_a_foreign_lock(ask, cli, locks, foreign_keys):
    """An operator's lock that is no time never ends by itself."""
    foreign_keys.add(cli.sync.lock_key(7))
    locks.set(cli.sync.lock_key(7), "maintenance")
    result = ask("why", "tests.cliapp.sync", "7")
    assert "Held by a foreign client (value 'maintenance'" in result.stdout
    assert "Its value is not a time, so it never ends by itself." in result.stdout


def test_why_says_that_a_lock_rests(ask, cli, locks):
    """Nobody runs, and when it is over."""
    hold(locks, cli.sync, 7).release(at_least_for=60)
    result = ask("why", "tests.cliapp.sync", "7")
    assert re.search(r"It rests for .+ more \(at_least_for\); nobody runs\.", result.stdout)
    assert result.exit_code == 1


# release


def test_release_asks_and_a_no_changes_nothing(ask, cli, locks):
    """Exit code 1."""
    held = stale(locks, cli.sync, 7)
    result = ask("release", held.key, answer="n\n")
    assert f"{held.key} is held by tests.cliapp.sync[t-1] on w1@host (pid 77), running since" in result.stdout
    assert "Its deadline passed " in result.stdout
    assert "Release it? [y/N]: n" in result.stdout
    assert (result.stderr, result.exit_code) == ("Not released.\n", 1)
    assert locks.exists(held.key, record_name(held.key)) == 2


def test_release_leaves_a_log_line_and_a_signal(ask, cli, locks, released, caplog):
    """Who did it, which lock, who held it."""
    held = stale(locks, cli.sync, 7)
    result = ask("release", held.key, answer="y\n")
    assert result.exit_code == 0
    assert f"Released {held.key}.\n" in result.stdout
    assert not locks.exists(held.key, record_name(held.key))
    (record,) = [record for record in caplog.records if record.name == "celery_setnx"]
    assert record.levelname == "WARNING"
    assert re.match(
        re.escape(held.key)
        + r" was released by hand, by .+ on .+\. It was held by tests\.cliapp\.sync\[t-1\]",
        record.getMessage(),
    )
    (signal,) = released
    assert signal["sender"] == cli.sync
    assert {name: signal[name] for name in ("task_id", "key", "fence", "outcome")} == {
        "task_id": "t-1",
        "key": held.key,
        "fence": held.fence,
        "outcome": "by_hand",
    }


@pytest.mark.parametrize("where", [None, elsewhere()])
def test_release_refuses_a_holder_that_may_live(ask, cli, locks, where):
    """Whether it is on this host or cannot be looked at: only with --force."""
    held = hold(locks, cli.sync, 7, where=where)
    result = ask("release", held.key, "--yes")
    assert "--force releases it all the same" in result.stderr
    assert result.exit_code == 1
    held.renew()
    result = ask("release", held.key, "--yes", "--force")
    assert result.exit_code == 0
    assert held.release() == "lost"


def test_release_trusts_the_proof_of_a_death(ask, cli, locks):
    """A dead holder's lock needs no --force, though its lease has not ended."""
    held = hold(locks, cli.sync, 7, where=dead())
    result = ask("release", held.key, "--yes")
    assert "on this host, is dead." in result.stdout
    assert result.exit_code == 0


def test_release_knows_that_a_retry_outlives_the_process_that_sent_it(ask, cli, locks):
    """A lock that is held for a retry is not abandoned because the process which held it has ended."""
    held = hold(locks, cli.sync, 7, where=dead())
    held.hold(60)
    result = ask("release", held.key, "--yes")
    assert "It is kept for the holder's own retry" in result.stdout
    assert result.exit_code == 1
    assert locks.exists(held.key)


def test_release_does_nothing_when_the_lock_has_changed(ask, cli, locks, monkeypatch):
    """Between the question and the answer another took the lock over."""
    held = stale(locks, cli.sync, 7)
    others: list[HeldLock] = []

    def confirm(_text: str) -> bool:
        others.append(hold(locks, cli.sync, 7, where=identity()))
        return True

    monkeypatch.setattr(click, "confirm", confirm)
    result = ask("release", held.key)
    assert "has changed meanwhile" in result.stderr
    assert result.exit_code == 1
    others[0].renew()


def test_release_of_a_free_lock_ends_with_1(ask, cli, locks):
    """Nothing to release; a mark is named."""
    key = cli.pending.lock_key(7)
    assert ask("release", key).stderr == f"Nothing to release: {key} is free.\n"
    queue(locks, cli.pending, 7)
    result = ask("release", key)
    assert "A call is queued, as t-2" in result.stderr
    assert result.exit_code == 1


def test_release_of_an_operators_lock(ask, cli, locks, foreign_keys):
    """A foreign value is deleted as it was shown, with --force."""
    key = cli.sync.lock_key(7)
    foreign_keys.add(key)
    locks.set(key, "maintenance")
    assert ask("release", key, "--yes").exit_code == 1
    assert ask("release", key, "--yes", "--force").exit_code == 0
    assert not locks.exists(key)


def test_release_touches_no_key_that_is_no_lock(ask, locks):
    """A key of another program is not deleted, even with --force."""
    locks.set("session:7", "x", ex=60)
    result = ask("release", "session:7", "--yes", "--force")
    assert "session:7 is no lock of this app's tasks" in result.stderr
    assert result.exit_code == 2
    assert locks.exists("session:7")


def test_release_of_marks_frees_those_of_the_task(ask, cli, locks, caplog):
    """All of them, and nobody else's."""
    for customer in range(3):
        queue(locks, cli.pending, customer)
    queue(locks, cli.unique, 1)
    command = ("release", "--queued", "--task", "tests.cliapp.pending")
    assert ask(*command, answer="n\n").exit_code == 1
    assert locks.exists(mark_name(cli.pending.lock_key(0)))
    result = ask(*command, answer="y\n")
    assert "3 calls of tests.cliapp.pending are marked as queued, such as t-2.\n" in result.stdout
    assert "Freed 3 marks of tests.cliapp.pending.\n" in result.stdout
    assert result.exit_code == 0
    assert [key for key in locks.scan_iter() if ":queued" in key] == [mark_name(cli.unique.lock_key(1))]
    assert "3 marks of tests.cliapp.pending were freed by hand" in caplog.text


def test_release_of_marks_says_who_shares_the_scope(ask, cli, locks):
    """A mark says nothing of its task, so those of all tasks of the scope are freed."""
    queue(locks, cli.crowd_one, 7)
    result = ask("release", "--queued", "--task", "tests.cliapp.crowd_two", "--yes")
    assert "tests.cliapp.crowd_one share its scope: calls of theirs are among them." in result.stdout
    assert result.exit_code == 0


def test_release_of_marks_that_are_not_there(ask):
    """Exit code 1."""
    result = ask("release", "--queued", "--task", "tests.cliapp.pending", "--yes")
    assert result.stderr == "Nothing to free: no call of tests.cliapp.pending is marked as queued.\n"
    assert result.exit_code == 1


# errors


def test_an_unreachable_server_ends_with_3(locks):
    """One line that names the server and the setting; no traceback, no password."""
    url = "redis://ops:secret@127.0.0.1:1/1"
    for command in (["list"], ["show", "t:{a}"], ["release", "t:{a}", "--yes"]):
        result = celery_command(*command, app="tests.cliapp", SETNX_TEST_LOCK_URL=url)
        assert result.returncode == 3
        (line,) = result.stderr.splitlines()
        assert line.startswith("Error: redis://ops:**@127.0.0.1:1/1 (setnx_url)")
        assert "secret" not in line


def test_a_user_who_may_not_scan_is_told_so(ask, locks, server):
    """What the server forbids, and all that looking needs."""
    locks.acl_setuser("blind", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-scan"])
    url = server.url(1).replace("redis://", "redis://blind:pw@")
    try:
        result = celery_command("list", app="tests.cliapp", SETNX_TEST_LOCK_URL=url)
    finally:
        locks.acl_deluser("blind")
    assert result.returncode == 3
    assert "celery setnx needs SCAN, TIME, GET, MGET, TYPE, PTTL, ZCARD, ZRANGE on t:*" in result.stderr


BAD_TASKS = """
@app.task(base=SingletonTask, singleton={"leese": 5})
def work(): ...
@app.task(base=SingletonTask, singleton={"lease": -1})
def other(): ...
"""
BAD_DECORATOR = """
@app.task
@singleton(leese=5)
def work(): ...
"""


@pytest.fixture
def bad_app(tmp_path) -> Callable[[str], dict[str, str]]:
    """Write an app whose module of tasks has this text; the environment in which it is found."""

    def write(tasks: str) -> dict[str, str]:
        (tmp_path / "badapp.py").write_text(
            "from celery import Celery\napp = Celery('badapp', broker='memory://', include=['badtasks'])\n"
        )
        (tmp_path / "badtasks.py").write_text(
            f"from badapp import app\nfrom celery_setnx import SingletonTask, singleton\n{tasks}"
        )
        return {"app": "badapp", "PYTHONPATH": str(tmp_path)}

    return write


def test_check_finds_every_task_whose_options_are_refused(bad_app):
    """Not only the first, at which Celery stops; exit code 1, no traceback."""
    result = celery_command("check", **bad_app(BAD_TASKS))
    assert "badtasks.work has an unknown option 'leese'; did you mean 'lease'?" in result.stdout
    assert "lease of badtasks.other must be positive" in result.stdout
    assert result.stderr.endswith("2 errors.\n")
    assert "Traceback" not in result.stderr
    assert result.returncode == 1
    assert [
        found["level"] for found in json.loads(celery_command("check", "--json", **bad_app(BAD_TASKS)).stdout)
    ] == [
        "error",
        "error",
    ]


def test_check_finds_what_stops_an_import(bad_app):
    """@singleton refuses its options when the module is imported."""
    result = celery_command("check", **bad_app(BAD_DECORATOR))
    assert "@singleton on work has an unknown option 'leese'; did you mean 'lease'?" in result.stdout
    assert result.returncode == 1


def test_other_commands_name_the_task_whose_options_are_refused(bad_app):
    """One line, exit code 1."""
    result = celery_command("list", **bad_app(BAD_TASKS))
    (line,) = result.stderr.splitlines()
    assert line in (
        "Error: badtasks.work has an unknown option 'leese'; did you mean 'lease'?",
        "Error: lease of badtasks.other must be positive and finite, in seconds, not -1",
    )
    assert result.returncode == 1


def test_doctor_prints_findings_and_ends_with_their_code(ask, locks):
    """Text and JSON say the same; --strict makes warnings count."""
    result = ask("doctor")
    assert "ok       server: " in result.stdout
    findings = json.loads(ask("doctor", "--json").stdout)
    assert {tuple(sorted(finding)) for finding in findings} == {("do", "level", "subject", "what", "why")}
    levels = [finding["level"] for finding in findings]
    assert result.stderr.startswith(f"{levels.count('ok')} ok, ")
    assert result.exit_code == (1 if "error" in levels else 0)
    assert "warning" in levels  # the server of the tests keeps nothing
    assert ask("doctor", "--strict").exit_code == 1


def test_an_app_whose_tasks_cannot_be_imported_ends_with_1(tmp_path):
    """Which app, and the error."""
    (tmp_path / "brokenapp.py").write_text(
        "from celery import Celery\napp = Celery('brokenapp', include=['no_such_module'])\n"
    )
    result = celery_command("list", app="brokenapp", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "the tasks of brokenapp cannot be imported: ModuleNotFoundError: No module named" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_an_app_it_says_so():
    """The forgotten -A."""
    assert CELERY is not None
    done = subprocess.run([CELERY, "setnx", "list"], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Error: no Redis for locks")
    assert done.stderr.endswith("No app was given: celery -A app setnx ...\n")
    assert done.returncode == 1


def test_options_that_the_app_adds_to_all_commands_are_handed_on(tmp_path, locks):
    """user_options["preload"] works as with Celery's own commands."""
    (tmp_path / "preloadapp.py").write_text(
        "from celery import Celery\nfrom celery.signals import user_preload_options\n"
        "from click import Option\n"
        "app = Celery('preload', broker='memory://')\n"
        "app.user_options['preload'].add(Option(['--zone']))\n"
        "@user_preload_options.connect\ndef hear(options, **_details): print(options)\n"
    )
    result = celery_command("--zone", "north", "why", "nothing", app="preloadapp", PYTHONPATH=str(tmp_path))
    assert result.stdout == "{'zone': 'north'}\n"
    assert result.returncode == 2


def test_tasks_of_included_modules_are_known(tmp_path, server, locks):
    """As a worker does, the command imports what the app includes."""
    (tmp_path / "includingapp.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('including', broker='{server.url(1)}', include=['includedtasks'])\n"
    )
    (tmp_path / "includedtasks.py").write_text(
        "from celery import shared_task\nfrom celery_setnx import SingletonTask\n"
        "@shared_task(base=SingletonTask)\ndef work(n): ...\n"
    )
    result = celery_command("why", "includedtasks.work", "1", app="includingapp", PYTHONPATH=str(tmp_path))
    assert result.stdout.startswith("Yes: nothing holds its lock.")
    assert result.returncode == 0


# a real worker


def test_commands_see_what_a_worker_does(tasks, journal, gates, locks):
    """list, show, why and release, of a lock that a worker's process holds."""
    result = tasks.work.delay("gated-cli")
    (start,) = journal.wait_for("start", task_id=result.id)
    (row,) = json.loads(celery_command("list", "--json").stdout)
    assert (row["key"], row["task"], row["task_id"]) == (start["key"], tasks.work.name, result.id)
    assert (row["state"], row["stale"], row["pid"], row["fence"]) == (
        *("running", False),
        *(start["pid"], start["fence"]),
    )
    shown = celery_command("show", tasks.work.name, "gated-cli").stdout
    assert f"process   Its process, pid {start['pid']} on this host, is alive." in shown
    why = celery_command("why", tasks.work.name, "gated-cli")
    assert why.stdout.startswith("No: its lock is held.\n")
    assert f"Held by tests.workerapp.work[{result.id}]" in why.stdout
    assert why.returncode == 1
    refused = celery_command("release", start["key"], "--yes")
    assert "Not released: it is not known to be abandoned." in refused.stderr
    assert refused.returncode == 1
    forced = celery_command("release", start["key"], "--yes", "--force")
    assert f"Released {start['key']}." in forced.stdout
    assert "was released by hand" in forced.stderr
    assert celery_command("why", tasks.work.name, "gated-cli").returncode == 0
    journal.wait_for("lost", task_id=result.id)
    gates("gated-cli")
    assert result.get(timeout=20) == "gated-cli"


def test_release_lets_the_first_in_line_run(tasks, journal, gates, locks):
    """A call that waits for the lock that was released by hand is woken at once."""
    name = "gated-release"
    first, second = (tasks.work.apply_async((name,), singleton={"on_conflict": "wait"}) for _ in range(2))
    (start,) = journal.wait_for("start", name=name)
    woken = second if start["task_id"] == first.id else first
    wait_until(lambda: (holder := tasks.work.locked(name)) and holder.waiting == 1, "the other waits")
    shown = json.loads(celery_command("show", start["key"], "--json").stdout)
    assert [waiter["task_id"] for waiter in shown["line"]] == [woken.id]
    done = celery_command("release", start["key"], "--yes", "--force")
    assert "Others wait in line; the first has its turn." in done.stdout
    journal.wait_for("start", task_id=woken.id)
    gates(name)
    gates(name)
    assert first.get(timeout=20) == second.get(timeout=20) == name


def test_release_after_a_worker_was_killed(logs, locks, journal, server):
    """kill -9 of a whole worker: its lock is shown as a dead process's, and released without --force."""
    from tests import workerapp

    workerapp.app.set_current()
    worker = Worker(logs, concurrency=1, queues="killed")
    try:
        result = workerapp.work.apply_async(("gated-killed",), queue="killed")
        (start,) = journal.wait_for("start", task_id=result.id)
    finally:
        worker.kill()
    shown = celery_command("show", start["key"]).stdout
    assert f"pid {start['pid']} on this host, is dead." in shown
    why = celery_command("why", "tests.workerapp.work", "gated-killed")
    assert why.returncode == 0
    released = celery_command("release", start["key"], "--yes")
    assert released.returncode == 0
    assert not locks.exists(start["key"])


# the docs


def documented_fields(command: str) -> set[str]:
    """The names in the table of docs/cli.md that says what the JSON of a command has."""
    match = re.search(rf"`{command}`(?: has)?:\n\n(.*?)\n\n", DOCS, re.DOTALL)
    assert match is not None, command
    return set(re.findall(r"^\| `(\w+)`", match[1], re.MULTILINE))


def test_every_command_and_option_is_documented():
    """docs/cli.md has a heading for each command, and below it each of its options."""
    for name, command in setnx.commands.items():
        section = DOCS.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, f"no section for {name}"
        for option in options_of(command):
            assert option in section, f"{name} {option}"


def test_docs_name_no_option_that_does_not_exist():
    """Below each heading stand only options of that command."""
    known = {option for command in setnx.commands.values() for option in options_of(command)}
    for name, command in setnx.commands.items():
        section = DOCS.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        named = set(re.findall(r"(?<![\w-])--[a-z]+", section))
        assert named <= {*options_of(command), "--help"}, name
    assert set(re.findall(r"(?<![\w-])--[a-z]+", DOCS)) <= {*known, "--help"}


def options_of(command: click.Command) -> set[str]:
    """The long options of a command."""
    return {
        option
        for parameter in command.params
        for option in parameter.opts
        if isinstance(parameter, click.Option) and option.startswith("--")
    }


def test_help_of_every_command_fits_a_terminal(ask):
    """Each says what it does, and no line is wider than 80 columns."""
    for name in setnx.commands:
        text = ask(name, "--help").stdout
        assert text.startswith(f"Usage: celery setnx {name}")
        assert max(map(len, text.splitlines())) <= 80
