"""What a page is made of: its blocks, its headings, its links. Reads Markdown; runs nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

_MARKDOWN = MarkdownIt().enable("table")
_SETUP = "<!-- setup\n"


def pages() -> list[str]:
    """The pages whose words are tested, by their paths in the repository."""
    return [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")),
    ]


def text_of(page: str) -> str:
    """A page, or another file of the repository, as it stands."""
    return (ROOT / page).read_text()


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment `<!-- setup`, whose Python readers do not see."""

    language: str  # the first word after the fence; `setup` for a comment
    info: str  # the words after that
    text: str  # what is between the fences, without their indentation
    line: int  # the page's line on which the text begins, from 1
    before: str  # the line before the fence, blank lines left out

    @property
    def is_run(self) -> bool:
        """Whether this is Python that runs as it stands."""
        return self.language == "python" and self.info != "notest"


def blocks(text: str) -> list[Block]:
    """The blocks of a page, from top to bottom.

    Raises:
        ValueError: A block has no end.
    """
    found = []
    lines = text.splitlines()
    for part in _parts(text, "fence", "html_block"):
        language, _, info = part.info.strip().partition(" ")
        inner = part.content
        if part.type == "html_block":
            if not inner.startswith(_SETUP):
                continue
            language, inner = "setup", inner.removeprefix(_SETUP).removesuffix("-->\n")
        first, end = part.map or (0, 0)
        if inner.count("\n") != end - first - 2:
            raise ValueError(f"the block that begins in line {first + 1} has no end")
        before = next((line for line in reversed(lines[:first]) if line.strip()), "")
        found.append(Block(language, info.strip(), inner, first + 2, before))
    return found


def commands(shown: list[Block]) -> list[str]:
    """The command lines of blocks in `sh`, and those after the prompts of blocks in `console`.

    Comments are left out, and lines that a backslash continues are one.
    """
    found = []
    for block in shown:
        lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if block.language in ("sh", "console"):
            found += [re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines]
    return [line for line in found if line]


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead to."""
    return [str(part.attrs.get("href") or part.attrs["src"]) for part in _parts(text, "link", "image")]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in _parts(text, "heading"):
        slug = re.sub(r"[^\w\- ]", "", heading.children[0].content.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def table(text: str, *head: str) -> list[list[str]]:
    """The rows of the tables with this head.

    Raises:
        ValueError: There is none.
    """
    found = []
    for part in _parts(text, "table"):
        titles, *rows = [_cells(row) for row in part.walk() if row.type == "tr"]
        found += rows if titles == list(head) else []
    if not found:
        raise ValueError(f"no table with the head {head}")
    return found


def sections(text: str, level: int = 2) -> dict[str, str]:
    """What stands below each heading of a level, without the backticks of the heading."""
    lines = text.splitlines(keepends=True)
    headings = [part for part in _parts(text, "heading") if int(part.tag[1]) <= level]
    begins = [part.map[0] for part in headings if part.map]
    return {
        heading.children[0].content.strip("`"): "".join(lines[begin:end])
        for heading, begin, end in zip(headings, begins, [*begins[1:], len(lines)])
        if int(heading.tag[1]) == level
    }


def section(text: str, heading: str, level: int = 2) -> str:
    """One of these sections, below blank lines, so that its blocks have the page's line numbers."""
    found = sections(text, level)[heading]
    return "\n" * text[: text.index(found)].count("\n") + found


def _parts(text: str, *types: str) -> Iterator[SyntaxTreeNode]:
    """What a page has of these types, as markdown-it names them."""
    return (part for part in SyntaxTreeNode(_MARKDOWN.parse(text)).walk() if part.type in types)


def _cells(row: SyntaxTreeNode) -> list[str]:
    return [cell.children[0].content for cell in row.children]
