"""What a page is made of: its blocks, its headings, its links. Reads Markdown; runs nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_SETUP = re.compile(r"^<!-- setup$")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) (.+?)\s*$")


def pages() -> list[str]:
    """The pages whose words are tested, by their paths in the repository."""
    return ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment `<!-- setup`, whose Python readers do not see."""

    language: str  # the first word after the fence; `setup` for a comment
    info: str  # the words after that
    text: str  # what is between the fences, without their indentation
    line: int  # the page's line on which the text begins, from 1
    before: str = ""  # the line before the fence, blank lines left out


def blocks(text: str) -> list[Block]:
    """The blocks of a page, from top to bottom.

    Raises:
        ValueError: A block has no end.
    """
    found = []
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence:
            indent, ticks, info = fence.groups()
            body = list(_until(lines, re.compile(rf"^ *{ticks}`*\s*$"), number))
            inner = "".join(f"{part.removeprefix(indent)}\n" for part in body)
            language, _, rest = info.strip().partition(" ")
            found.append(Block(language, rest.strip(), inner, number + 1, before))
        elif _SETUP.match(line):
            body = list(_until(lines, re.compile(r"^-->$"), number))
            found.append(Block("setup", "", "".join(f"{part}\n" for part in body), number + 1, before))
        if line.strip():
            before = line
    return found


def commands(block: Block) -> list[str]:
    """The command lines of a block in `sh`, or those after the prompts of one in `console`.

    Comments are left out, and lines that a backslash continues are one.
    """
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    bare = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines)
    return [line for line in bare if line]


def prose(text: str) -> str:
    """A page without its blocks."""
    out, ticks = [], ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if ticks:
            ticks = "" if fence and fence[2].startswith(ticks) and not fence[3].strip() else ticks
        elif fence:
            ticks = fence[2]
        else:
            out.append(line)
    return "\n".join(out)


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead to."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "`", prose(text)))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for line in prose(text).splitlines():
        heading = _HEADING.match(line)
        if heading:
            slug = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of a page: each one's head, and its rows."""
    for part in re.findall(r"(?:^\|.*\n)+", prose(text) + "\n", re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()
        ]
        yield head, rows


def table(text: str, *head: str) -> list[list[str]]:
    """The rows of the tables with this head.

    Raises:
        ValueError: There is none.
    """
    found = [row for titles, rows in tables(text) if titles == list(head) for row in rows]
    if not found:
        raise ValueError(f"no table with the head {head}")
    return found


def sections(text: str, level: int = 2) -> dict[str, str]:
    """What stands below each heading of a level, without the backticks of the heading."""
    found: dict[str, str] = {}
    title = ""
    for line in text.splitlines(keepends=True):
        heading = _HEADING.match(line)
        if heading and len(heading[1]) <= level:
            title = heading[2].strip("`") if len(heading[1]) == level else ""
        if title:
            found[title] = found.get(title, "") + line
    return found


def _until(lines: Iterator[tuple[int, str]], end: re.Pattern[str], begun: int) -> Iterator[str]:
    for _number, line in lines:
        if end.match(line):
            return
        yield line
    raise ValueError(f"the block that begins in line {begun} has no end")
