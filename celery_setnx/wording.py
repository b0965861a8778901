"""How words get out: what comes from Redis or a message is escaped, and a sentence has one full stop.

And how a call is named: by its task, and by what its key was made of.
"""

from __future__ import annotations

import shlex

from billiard.exceptions import SoftTimeLimitExceeded

_STOPS = (".", "?", "!")
ABOUT = 80
"""Characters in which a call says what its key was made of."""


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


def resume(*whose: str) -> str:
    """The command that ends the pause of a scope, of a key, or of a call by its words, to be copied."""
    return f"celery -A APP setnx resume {shlex.join(whose)}"


def source(by: object, because: object) -> str:
    """By whom, and why, as far as that is known, to be put behind what was done."""
    return (f" by {by}" if by else "") + (f": {because}" if because else "")


HELD_BACK = ("paced", "paused")
"""What the state is of a holder that is nobody: a pace, or a pause, lets no call start."""


def held(key: str, holder: object, limit: int, *, back: bool = False) -> str:
    """That a lock is held: by one, or as often as its limit says; or that nobody may have it."""
    if back:
        return f"{key} is held back by {holder}"
    return (
        f"{key} is held by {holder}"
        if limit == 1
        else f"all {limit} permits of {key} are held, the oldest by {holder}"
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


def quoted(argument: object) -> object:
    """What a log line quotes: printable, and an error as a sentence; a number as it is."""
    if argument is None or isinstance(argument, (int, float)):
        return argument
    try:
        return sentence(argument) if isinstance(argument, Exception) else printable(str(argument))
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # noqa: BLE001 - whatever its own words raise
        return object.__repr__(argument)
