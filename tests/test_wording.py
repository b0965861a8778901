"""How words get out: escaped, with one full stop to a sentence, into messages and log lines alike."""

import unicodedata

import pytest

from celery_setnx.exceptions import LockLost, LockRefused
from celery_setnx.log import Log
from celery_setnx.wording import held, printable, sentence, unstopped
from tests.harness import raising

EVIL = "\x1b]0;OWNED\x07\x1b[2J\x9b31m\u202eevil\u2066\u200f\u2028\x7f\r\nINFO all is well"
"""Escapes of a terminal, C1 controls, what turns the direction of text, and a line of its own."""


def controls(text: str) -> set[str]:
    """What may not reach a terminal: controls, format and line characters, lone surrogates."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")}


@pytest.mark.parametrize("logger", ["celery_setnx", "celery_setnx.beat"])
def test_log_line_has_nothing_but_printable_characters(caplog, logger):
    """Whatever it quotes, a text or an error; where a log is read, it is one line."""
    Log(logger).warning("%s is held by %s: %s", EVIL, LockLost(EVIL, EVIL), OSError(EVIL))
    (line,) = caplog.messages
    assert controls(line) == set()
    assert line.count(r"\x1b]0;OWNED\x07") == 4


@pytest.mark.parametrize(
    ("template", "error", "line"),
    [
        ("It failed: %s", OSError("refused."), "It failed: refused."),
        ("It failed: %s", OSError("refused"), "It failed: refused."),
        ("It failed: %s", OSError("refused?"), "It failed: refused?"),
        ("It failed: %s It is tried again.", OSError("refused"), "It failed: refused. It is tried again."),
        ("It failed (%s), and %%s.", unstopped(OSError("refused.")), "It failed (refused), and %s."),
        ("It failed: %s", "refused", "It failed: refused"),
    ],
)
def test_log_line_has_one_full_stop_to_a_sentence(caplog, template, error, line):
    """Whether or not an error brings one of its own."""
    Log("celery_setnx").warning(template, error)
    assert caplog.messages == [line]


def test_log_line_keeps_its_template_and_its_numbers(caplog):
    """By the template log services group; a number is formatted as one."""
    Log("celery_setnx").warning("%d of %s in %.1f s", 2, "work", 0.25)
    (record,) = caplog.records
    assert (record.msg, record.args) == ("%d of %s in %.1f s", (2, "work", 0.25))


def test_thing_without_words_is_named_by_its_class(caplog):
    """It does not fail who logs."""

    class Broken:
        __str__ = raising(ZeroDivisionError)

    Log("celery_setnx").warning("%s goes on.", Broken())
    (line,) = caplog.messages
    assert "Broken object" in line
    assert line.endswith(" goes on.")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 京都, 👍", "plain, größer, 京都, 👍"),
        ("\x1b[31m\n\t\x7f\x9b", r"\x1b[31m\n\t\x7f\x9b"),
        ("\u202e\u2066\u200f\u2028\ud800", r"\u202e\u2066\u200f\u2028\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    """All else stays as it is."""
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("limit", "paced", "words"),
    [
        (1, False, "k is held by h"),
        (5, False, "all 5 permits of k are held, the oldest by h"),
        (1, True, "k is held back by h"),
        (5, True, "k is held back by h"),
    ],
)
def test_lock_is_held_by_somebody_or_back_by_its_pace(limit, paced, words):
    """By one, by as many as may, or by nobody."""
    assert held("k", "h", limit, back=paced) == words


def test_words_of_an_error_are_quoted_with_one_full_stop_or_none():
    """A sentence of its own, or a part of another."""
    for error in (OSError("gone"), OSError("gone."), LockRefused("k", "gone.")):
        assert sentence(error).endswith(".")
        assert ".." not in sentence(error)
        assert not unstopped(error).endswith(".")
