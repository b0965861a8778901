"""How words get out: what comes from Redis or a message is escaped, and a sentence has one full stop.

And how a call is named: by its task, and by what its key was made of.
"""

from __future__ import annotations

import logging
import re

from billiard.exceptions import SoftTimeLimitExceeded

_DIRECTIVE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_SENTENCE_ENDS = re.compile(r"$|\s+[A-Z]")
_STOPS = (".", "?", "!")
ABOUT = 80
"""Characters in which a call says what its key was made of."""


class _Wording(logging.Filter):
    """Makes what a log line quotes printable, and gives its sentences one full stop each."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Reword what is quoted; the line is always logged, and its template stays: services group by it."""
        if isinstance(record.args, tuple):
            text = str(record.msg).replace("%%", "  ")
            follow = [text[found.end() :] for found in _DIRECTIVE.finditer(text)]
            # Else, or if an argument has no words, logging itself says what is wrong.
            if len(follow) == len(record.args):
                try:
                    record.args = tuple(map(_quoted, record.args, follow))
                except SoftTimeLimitExceeded:
                    raise
                except Exception:  # noqa: BLE001 - whatever the argument's own words raise
                    pass
        return True


class _Quoted(str):
    """Words as `%s` has them; `%r` has the thing's own, which are escaped anyway."""

    __slots__ = ("of",)
    of: object

    def __repr__(self) -> str:
        return repr(self.of)


def about(said: object) -> str:
    """What a key was made of, as an argument, a message or a record says it: printable, and not too long.

    Nothing if it is no text.
    """
    if not isinstance(said, str):
        return ""
    return shortened(printable(said[: ABOUT + 1]), ABOUT)


def shortened(text: str, most: int) -> str:
    """The text, in so many characters at most."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def titled(task: str, about: str) -> str:
    """A task and what its key was made of: `settle(account_id=7)`; the task alone if that is not said."""
    return f"{task}({about})" if about else task


def held(key: str, holder: object, limit: int, *, paced: bool = False) -> str:
    """That a lock is held: by one, or as often as its limit says; or that its pace lets nobody have it."""
    if paced:
        return f"{key} is held back by {holder}"
    return (
        f"{key} is held by {holder}"
        if limit == 1
        else f"{key} is held {limit} times, for longest by {holder}"
    )


def printable(text: str) -> str:
    """The text with all escaped that is not printable: controls, newlines, what changes its direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unstopped(error: object) -> str:
    """The words of an error, to be quoted within a sentence: printable, and without their full stop."""
    return printable(str(error)).removesuffix(".")


def sentence(error: object) -> str:
    """The words of an error as a sentence: printable, and with one full stop."""
    words = printable(str(error))
    return words if words.endswith(_STOPS) else f"{words}."


def _quoted(argument: object, follows: str) -> object:
    """What a log line quotes, before what follows there."""
    if argument is None or isinstance(argument, (int, float)):
        return argument
    if not isinstance(argument, Exception):
        words = unstopped(argument) if follows.startswith(".") else printable(str(argument))
    else:
        words = sentence(argument) if _SENTENCE_ENDS.match(follows) else unstopped(argument)
    quoted = _Quoted(words)
    quoted.of = argument
    return quoted


logging.getLogger("celery_setnx").addFilter(_Wording())
logging.getLogger("celery_setnx.beat").addFilter(_Wording())
