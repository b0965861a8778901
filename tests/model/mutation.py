"""Mutants of the scripts: each is a script's text with one small change, made by a fixed operator.

`python -m tests.model.mutation [file]...` prints those that nothing notices, by file and line. `BOUNDS=full`
asks more calls. A change in a text that several verbs use is noticed if any of them breaks its contract, or a
schedule of lines that are due. Verbs without either are left out: age, recall, rouse and tick. So is
what acquire and park say of the newest call: test_model_newest.py has mistakes of that.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from lupa import lua51

from celery_setnx.lock.scripts import assembled
from tests.bounds import bound
from tests.model.asked import CHANGES, explored_calls, odd_calls, seldom_met
from tests.model.contract import KNOWN_WORDS, Played, broken_clause, played
from tests.model.dues import Schedule
from tests.model.layout import laid_out
from tests.model.lock import TEXTS, Call, mistaken
from tests.model.store import MS
from tests.simulation.scripts import script

OF_EACH = bound(150, full=1_400)  # calls of a script, as they were made
FEW = 150  # calls that find most mutants
SEEDS = 400
OF_DUES = ("due", "sweep", "settle")
FILES = {
    path.name.removesuffix(".lua"): path.read_text("utf-8")
    for path in sorted((files("celery_setnx.lock") / "lua").iterdir(), key=lambda path: path.name)
}
TOKEN = re.compile(
    r"(?P<skip>\s+|--[^\n]*)|(?P<string>'(?:\\.|[^'\\])*')|(?P<number>\d+(?:\.\d+)?(?:e\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>==|~=|<=|>=|\.\.\.?|.)"
)
ABOUT_NEWEST = re.compile("newest|generation|older")
OPENS, CLOSES = {"(", "{", "["}, {")", "}", "]"}
BOUNDS = {"=", ",", "return", "if", "elseif", "then", "else", "end", "do", "local"}  # of an expression
STOPS = OPENS | CLOSES | BOUNDS
KEYWORDS = BOUNDS | {"and", "or", "not", "for", "in", "while", "function", "nil", "true", "false"}
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "ceil": "floor", "+": "-", "-": "+"}
COUNTED = {"+", "-", "and", "==", "return"}  # a number behind it says how much, not which
STRINGS = {
    r"\(": "",
    r"\(\d+": "+inf",
    r"\d{9,}|\+inf": "-inf",
    "-inf": "+inf",
    "0": "1",
    "[1-9]": "0",
    "[a-z_ ]+": "x",
}
"""What is said in place of which texts: of ends of a range, digits, and words; not of patterns."""


class Token(NamedTuple):
    """A word of the text, and where it is."""

    kind: str
    text: str
    start: int
    end: int
    line: int


class Mutant(NamedTuple):
    """A file's text with another thing at a place than the right one."""

    file: str
    operator: str
    right: str
    text: str
    place: int

    @property
    def number(self) -> int:
        """Of the line."""
        return self.text.count("\n", 0, self.place) + 1

    @property
    def line(self) -> str:
        """What it says now; behind it what it said, or where that was, as others may say the same."""
        if self.operator == "statement":
            rest = re.sub("--.*", "", self.text[self.place :]).strip()
            return f"without {self.right}, before {rest.splitlines()[0] if rest else 'the end'}"
        said = re.sub(" *--.*", "", self.text.splitlines()[self.number - 1]).strip()
        return f"{said} -- {self.right}" if self.operator in ("true", "false") else said


def tokens_of(text: str) -> list[Token]:
    """The text's words, without comments."""
    return [
        Token(found.lastgroup, found[0], *found.span(), text.count("\n", 0, found.start()) + 1)
        for found in TOKEN.finditer(text)
        if found.lastgroup not in (None, "skip")
    ]


Change = tuple[str, int, int, str]
"""An operator, and what it puts in place of which part."""


class Mutator:
    """The changes of one text."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, tokens_of(text)

    def changes(self) -> Iterator[Change]:
        """Each change, some of them more than once."""
        for place, token in enumerate(self.tokens):
            yield from self._of_one(place, token)
            if token.text in ("and", "or"):
                yield from self._operands(place, token)
            elif token.text in ("if", "elseif"):
                yield from self._condition(place + 1)
            elif token.text in ("max", "min") and self._said(place + 1) == "(":
                yield from self._arguments(place)
            elif self._begins_statement(place):
                end = self._end_of_statement(place)
                is_alone = self._said(place - 1) in ("then", "do") and self._said(end + 1) == "end"
                if not is_alone:
                    yield "statement", token.start, self.tokens[end].end, ""

    def _said(self, place: int) -> str:
        return self.tokens[place].text if 0 <= place < len(self.tokens) else ""

    def _of_one(self, place: int, token: Token) -> Iterator[Change]:
        said, before = token.text, self._said(place - 1)
        new = None
        if said in ("+", "-"):
            is_binary = before in CLOSES or self.tokens[place - 1].kind in ("name", "number")
            new = SWAPS[said] if is_binary and before not in KEYWORDS else None
        elif said in SWAPS:
            new = None if "PTTL" in self._line_before(token) else SWAPS[said]
        elif token.kind == "number" and (before in COUNTED or (before not in "*/<" and len(said) > 3)):
            new = "0" if "e" in said else str(int(said) + 1)
        elif token.kind == "string":
            yield from self._of_string(place, token)
        if new is not None:
            yield token.kind if token.kind == "number" else said, token.start, token.end, new

    def _line_before(self, token: Token) -> str:
        return self.text[self.text.rfind("\n", 0, token.start) : token.start]

    def _of_string(self, place: int, token: Token) -> Iterator[Change]:
        word, before = token.text[1:-1], self._said(place - 1)
        for pattern, new in STRINGS.items():
            if re.fullmatch(pattern, word):
                yield "string", token.start, token.end, f"'{new}'"
        if word in ("NX", "KEEPTTL", "WITHSCORES"):
            start = self.tokens[place - 1].start if before == "," else token.start
            yield "flag", start, token.end, ""

    def _condition(self, place: int) -> Iterator[Change]:
        """It holds always, or never; of several operands that which the lack of one does not show."""
        end = self._ahead(place, set())
        is_or, is_and = (self._ahead(place, {sign}) != end for sign in ("or", "and"))
        for value, is_shown in (("true", is_and and not is_or), ("false", is_or)):
            if not is_shown:
                yield value, self.tokens[place].start, self.tokens[end].end, value

    def _operands(self, place: int, token: Token) -> Iterator[Change]:
        """One operand alone."""
        ends = {"and", "or"} if token.text == "and" else {"or"}
        start, end = self._back(place - 1, ends), self._ahead(place + 1, ends)
        yield "operand", self.tokens[start].start, self.tokens[place + 1].start, ""
        is_default = token.text == "or" and end == place + 1
        if not is_default:
            yield "operand", self.tokens[place - 1].end, self.tokens[end].end, ""

    def _arguments(self, place: int) -> Iterator[Change]:
        """One argument alone."""
        first = place + 2
        end = self._ahead(first, {","})
        last = self._ahead(end + 2, {","})
        yield "argument", self.tokens[first].start, self.tokens[end + 2].start, ""
        yield "argument", self.tokens[end].end, self.tokens[last].end, ""

    def _back(self, place: int, ends: set[str]) -> int:
        """Where the expression begins that ends here."""
        depth = 0
        while place >= 0:
            said = self._said(place)
            if not depth and (said in ends or said in STOPS - CLOSES):
                break
            depth += (said in CLOSES) - (said in OPENS)
            place -= 1
        return place + 1

    def _ahead(self, place: int, ends: set[str]) -> int:
        """Where the expression ends that begins here."""
        depth, start = 0, place
        while place < len(self.tokens):
            said = self._said(place)
            if not depth and (
                said in ends or said in STOPS - OPENS or (place > start and self._is_new(place))
            ):
                break
            depth += (said in OPENS) - (said in CLOSES)
            place += 1
        return place - 1

    def _is_new(self, place: int) -> bool:
        """Whether a statement begins on this line."""
        token, before = self.tokens[place], self.tokens[place - 1]
        ends = before.kind in ("name", "number", "string") and before.text not in ("and", "or", "not")
        goes_on = token.kind == "sign" or token.text in ("and", "or")
        return token.line > before.line and (ends or before.text in CLOSES) and not goes_on

    def _begins_statement(self, place: int) -> bool:
        token, before = self.tokens[place], self._said(place - 1)
        is_first = place == 0 or token.line > self.tokens[place - 1].line or before in ("then", "else", "do")
        return is_first and token.kind == "name" and (token.text == "return" or token.text not in KEYWORDS)

    def _end_of_statement(self, place: int) -> int:
        depth, start = 0, place
        while place < len(self.tokens):
            said = self._said(place)
            ends = said in ("end", "else", "elseif") or said in CLOSES or self._is_new(place)
            if not depth and place > start and ends:
                break
            depth += (said in OPENS or said in ("function", "if")) - (said in CLOSES or said == "end")
            place += 1
        return place - 1


def lines_of_newest(text: str) -> set[int]:
    """Lines, from 1, that say something of the newest call alone."""
    found: set[int] = set()
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if is_inside or (ABOUT_NEWEST.search(line) and "STARTS" not in line):
            found.add(number)
        begins = line.startswith("if newest") and not line.endswith("end")
        is_inside = line != "end" and (is_inside or begins)
    return found


@cache
def mutants_of(file: str) -> list[Mutant]:
    """All that compile, once each."""
    right = FILES[file]
    compiles = lua51.LuaRuntime().eval("function(text) return loadstring(text) ~= nil end")
    left_out = lines_of_newest(right) if file in ("acquire", "park") else ()
    found: dict[str, Mutant] = {}
    for operator, start, end, new in Mutator(right).changes():
        if right.count("\n", 0, start) + 1 in left_out:
            continue
        text = right[:start] + new + right[end:]
        if text not in found and compiles(text):
            found[text] = Mutant(file, operator, right[start:end], text, start)
    return list(found.values())


@cache
def equals() -> dict[str, set[str]]:
    """By file, the lines of mutants that nothing notices, as `equal.txt` has them with the reasons."""
    found: dict[str, set[str]] = {file: set() for file in FILES}
    file = ""
    for line in (files("tests.model") / "equal.txt").read_text("utf-8").splitlines():
        if line.startswith("  "):
            found[file].add(line.strip())
        else:
            file = line.partition(":")[0]
    return found


def text_of(verb: str, mutant: Mutant | None = None) -> str:
    """A verb's text, with a mutant in the place of one of its files."""
    changed = {mutant.file: mutant.text} if mutant else {}
    return assembled(verb.rstrip("#"), lambda file: changed.get(file, FILES[file]))


@cache
def files_of(verb: str) -> list[str]:
    """The files that a verb's text is made of."""
    found: list[str] = []
    assembled(verb.rstrip("#"), lambda file: found.append(file) or FILES[file])
    return found


def verbs_of(file: str) -> list[str]:
    """The verbs with this file, that have a contract."""
    return [verb for verb in TEXTS if verb.rstrip("#") in KNOWN_WORDS and file in files_of(verb)]


OF_NEWEST = ("newest", "supersede")
CHECKED = [file for file in FILES if file in OF_DUES or (verbs_of(file) and file not in OF_NEWEST)]
assert all(text == text_of(verb) for verb, text in TEXTS.items())


@cache
def calls_of(verb: str) -> list[tuple[Call, Played, Played]]:
    """Calls of a script, odd and explored, those first of which none is like another; what it makes of each,
    also on a full server.
    """
    many = OF_EACH * len(CHANGES[verb.rstrip("#")]) // 2
    calls = odd_calls(verb, many) + explored_calls()[verb][:OF_EACH] + seldom_met(verb)
    right, seen = script(TEXTS[verb]), Counter[object]()
    found = []
    for call in calls:
        answer = played(right, call)
        kind = (
            frozenset(answer.keys),
            frozenset(dict(laid_out(call.store, call.now // MS))),
            not verb.startswith("look") and answer.word,
        )
        found.append((seen[kind], call, answer, played(right, call, is_full=True)))
        seen[kind] += 1
    return [tuple(each) for _, *each in sorted(found, key=lambda each: each[0])]


def broken_by(verb: str, text: str, first: int, last: int) -> Iterator[str]:
    """What a changed text breaks of the contract in these calls, where it differs from the right one."""
    wrong = script(text)
    for place, (call, right, right_if_full) in enumerate(calls_of(verb)[first:last], first):
        found = played(wrong, call)
        differs = found != right or (place % 4 == 0 and played(wrong, call, is_full=True) != right_if_full)
        if differs or place < 40:
            yield broken_clause(wrong, call, found)


def is_noticed(mutant: Mutant) -> bool:
    """By a contract, or by a schedule of lines that are due; be it that nobody could read what it answers."""
    try:
        return _is_noticed(mutant)
    except (IndexError, MemoryError, OverflowError, TypeError, ValueError):
        return True


def _is_noticed(mutant: Mutant) -> bool:
    changed = {verb: text_of(verb, mutant) for verb in verbs_of(mutant.file)}
    breaks_contract = any(
        any(broken_by(verb, text, first, last))
        for first, last in ((0, FEW), (FEW, sys.maxsize))
        for verb, text in changed.items()
    )
    return breaks_contract or _is_noticed_by_schedules(mutant)


def _is_noticed_by_schedules(mutant: Mutant) -> bool:
    verbs = [verb for verb in OF_DUES if mutant.file in files_of(verb)]
    with ExitStack() as mistakes:
        for verb in verbs:
            mistakes.enter_context(mistaken(verb, TEXTS[verb], text_of(verb, mutant)))
        return bool(verbs) and any(Schedule(seed).broken() for seed in range(SEEDS))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CHECKED:
        for mutant in mutants_of(chosen):
            is_known = mutant.line in equals()[chosen]
            if is_noticed(mutant) == is_known:
                said = "is noticed, though equal.txt has it" if is_known else mutant.operator
                print(f"{chosen}.lua:{mutant.number}", said, mutant.line, sep="\t", flush=True)
