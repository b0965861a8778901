"""The log: a line that cannot be logged stops nothing, and what must be mended is said once a minute."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery

from celery_setnx import LockForbidden, LockUnavailable, SingletonTask, is_skipped, log
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields, hand_lines_to, say_loudly
from celery_setnx.signals import LockSignal
from celery_setnx.testing import guarded, hold

logger = Log("celery_setnx")


class Away(logging.Handler):
    """As one whose log server is away; it may also be a filter."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error

    def filter(self, record: logging.LogRecord) -> bool:
        raise self.error


@contextmanager
def broken(what: str, error: Exception) -> Iterator[None]:
    """Logging whose filter, handler or factory of records raises, for the length of a block."""
    ours, factory, away = logging.getLogger("celery_setnx"), logging.getLogRecordFactory(), Away(error)
    if what == "filter":
        ours.addFilter(away)
    elif what == "handler":
        logging.getLogger().addHandler(away)
    else:
        logging.setLogRecordFactory(lambda *_args, **_kwargs: away.emit(None))  # type: ignore[arg-type]
    try:
        yield
    finally:
        ours.removeFilter(away)
        logging.getLogger().removeHandler(away)
        logging.setLogRecordFactory(factory)


each = pytest.mark.parametrize("what", ["filter", "handler", "factory"])


@each
def test_line_that_cannot_be_logged_is_printed(what, capfd):
    """It raises nothing, and says what it could not be logged for."""
    with broken(what, OSError("the log server is away")):
        logger.warning("%s is\n lost", "a lock")
    said = (
        r"celery_setnx: WARNING: a lock is\n lost (it could not be logged: OSError: the log server is away)"
    )
    assert (
        said in capfd.readouterr().err.splitlines()
    )  # a worker in this process may have led lines there, too


@each
def test_line_lets_the_time_limit_of_its_task_through(what):
    """Which may strike anywhere in it."""
    with broken(what, SoftTimeLimitExceeded()), pytest.raises(SoftTimeLimitExceeded):
        logger.warning("a line")


def test_line_names_who_has_logged_it(caplog):
    """And not the log's own functions."""
    logger.warning("a line")
    logger.log(logging.WARNING, "another")
    assert [record.funcName for record in caplog.records] == ["test_line_names_who_has_logged_it"] * 2


def test_lines_of_a_thread_may_be_left_to_another(caplog, monkeypatch):
    """With the exception of that moment."""
    lines: list[Any] = []
    monkeypatch.setattr(log, "_of_thread", type(log._of_thread)())
    hand_lines_to(lines.append)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logger.exception("it failed")
    assert not caplog.records
    lines.pop()()
    assert "ZeroDivisionError" in caplog.text


@each
def test_signal_is_sent_though_what_its_receiver_raises_cannot_be_logged(what):
    """Celery logs that."""
    signal = LockSignal(name="odd")

    @signal.connect
    def receiver(**_details: Any) -> None:
        raise ZeroDivisionError

    celerys, away = logging.getLogger("celery.utils.dispatch.signal"), Away(OSError("away"))
    celerys.addFilter(away)
    try:
        with broken(what, OSError("away")):
            assert signal.send(sender=None) in ([], [(receiver, signal.send(sender=None))])
    finally:
        celerys.removeFilter(away)


@each
def test_lock_is_given_back_though_nothing_can_be_logged(what, server, locks):
    """Lines stand between its loss, its release and who is told of that."""
    app = Celery("logging", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"at_least_for": 0})
    def t() -> str:
        locks.set(t.lock.key, "1")  # as a classic client does: it is repaired, and that is logged
        return "ran"

    with guarded(app), broken(what, OSError("away")):
        assert t.apply().get() == "ran"
    assert t.locked() is None


@pytest.fixture
def settle(server, locks) -> Any:
    """A guarded task whose eager calls take their lock."""
    app = Celery("logging", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", result_expires=60)

    @app.task(
        base=SingletonTask, shared=False, name="shop.settle", bind=True, singleton={"key": "account_id"}
    )
    def settle(self: Any, account_id: int, again: bool = False) -> Any:
        return self.apply((account_id,)).get() if again else "done"

    with guarded(app):
        yield settle


@pytest.mark.parametrize("options", [{}, {"skip_result": None}])
def test_skip_is_one_line(settle, caplog, options):
    """Celery's "succeeded" beside ours would say that a body has run; those of bodies stay."""
    caplog.set_level(logging.INFO)
    settle.singleton = {"key": "account_id", **options}
    with hold(settle, 7):
        settle.apply((7,), task_id="id-1").get()
        settle.apply((8,), task_id="id-2").get()
    (skipped,) = [record for record in caplog.records if "id-1" in record.getMessage()]
    assert skipped.getMessage().startswith("Skipped shop.settle[id-1]: ")
    (ran,) = [record for record in caplog.records if "id-2" in record.getMessage()]
    assert ran.getMessage().startswith("Task shop.settle[id-2] succeeded in ")


def test_skip_is_said_by_celery_where_our_line_is_not_wanted(settle, caplog):
    """It is never silent at INFO."""
    caplog.set_level(logging.WARNING, logger="celery_setnx")
    caplog.set_level(logging.INFO)
    with hold(settle, 7):
        settle.apply((7,), task_id="id-1").get()
    (said,) = [record for record in caplog.records if "id-1" in record.getMessage()]
    assert said.getMessage().startswith("Task shop.settle[id-1] succeeded in ")


def test_call_that_runs_in_a_skipped_ones_body_keeps_its_line(settle, caplog):
    """The line that is left out is that of the request itself."""
    caplog.set_level(logging.INFO)
    assert is_skipped(settle.apply((7, True), task_id="id-1").get())
    assert [record.getMessage()[:20] for record in caplog.records if record.levelno == logging.INFO] == [
        "Skipped shop.settle[",
        "Task shop.settle[id-",
    ]


def test_result_of_a_skip_is_short(settle):
    """Monitors show its beginning, and a backend stores it for each."""
    with hold(settle, 7) as held:
        told = settle.apply((7,)).get()
    assert told.keys() == {"celery_setnx", "task", "about", "key", "holder"}
    assert set(told["holder"]) == {"task", "task_id", "worker", "state", "fence", "since", "deadline"}
    assert (told["holder"]["fence"], told["holder"]["worker"]) == (held.fence, "another@elsewhere")
    assert json.loads(json.dumps(told)) == told


def said_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record."""
    return {name: value for name, value in vars(record).items() if name.startswith("setnx_")}


def test_record_of_a_call_has_fields(settle, caplog):
    """What a log service filters by, beside the sentence."""
    with hold(settle, 7):
        settle.apply((7,), task_id="id-1").get()
    assert [said_of(record) for record in caplog.records if record.name == "celery_setnx"] == [
        {
            "setnx_event": "skipped",
            "setnx_task": "shop.settle",
            "setnx_task_id": "id-1",
            "setnx_key": settle.lock_key(7),
            "setnx_about": None,  # an eager call has no message that says it
        }
    ]


def test_every_record_has_every_field(caplog):
    """A format that names one must not fail: what is not known is None."""
    logger.warning("a line")
    logger.warning("another", extra=fields("lost", key="a\nb", of=object()))
    nothing = dict.fromkeys(("setnx_task", "setnx_task_id", "setnx_key", "setnx_about"))
    assert list(map(said_of, caplog.records)) == [
        {**nothing, "setnx_event": "trouble"},
        {**nothing, "setnx_event": "lost", "setnx_key": "a\\nb"},
    ]


def test_fields_of_a_holder_are_those_that_it_has_said(caplog):
    """What else a record in Redis may say is nobody's field."""
    info = {"task": "t", "about": "a=1", "worker": "w@h", "host": 7}
    holder = Holder("id-1|0|n", 1e9, 1, "running", 1e9, {**info, "task_id": "id-1"})
    assert (holder.task, holder.worker, holder.host) == ("t", "w@h", None)
    logger.warning("a line", extra=fields("by_hand", holder, key="k"))
    assert list(said_of(caplog.records[0]).values()) == ["by_hand", "t", "id-1", "k", "a=1"]


FORBIDDEN = LockForbidden("a", "NOPERM no permissions")


def test_what_must_be_mended_is_an_error_once_a_minute(caplog, monkeypatch):
    """With what to do; an outage that ends by itself is not."""
    now = [1000.0]
    monkeypatch.setattr(log, "_say_again_at", {})
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    for _ in range(130):
        say_loudly(FORBIDDEN)
        say_loudly(LockUnavailable("a", "ConnectionError: gone"))
        now[0] += 1
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert "Grant its user what is missing" in caplog.text
    say_loudly(LockUnavailable("a", "ReadOnlyError: You can't write against a read only replica."))
    assert "at the primary" in caplog.text


@pytest.mark.parametrize(
    ("reason", "do"),
    [
        ("OutOfMemoryError: command not allowed when used memory > 'maxmemory'.", "Give the server memory"),
        ("ResponseError: MISCONF Redis is configured to save RDB snapshots", "cannot save to its disk"),
        ("ResponseError: NOREPLICAS Not enough good replicas to write.", "has too few replicas"),
        ("BusyLoadingError: Redis is loading the dataset in memory", ""),
        ("ConnectionError: Connection refused", ""),
    ],
)
def test_outage_that_somebody_must_end_says_what_to_do(reason, do):
    """Whatever lasts until then."""
    error = LockUnavailable("a", reason)
    assert do in error.remedy
    assert bool(error.remedy) is bool(do)
    assert str(error) == f"{error.brief} {error.remedy}".rstrip()
