"""The code of the migration pages: what the tests run is what the reader copies."""

from collections.abc import Sequence
from typing import Any

from tests.docs.pages import DOCS, blocks

URL = "redis://localhost:6379/0"
"""The server in the pages; the tests' server takes its place."""

STAGES = {
    "before": ("app", "before"),
    "step-1": ("app", "step-1"),
    "step-2": ("app", "step-2"),
    "after": ("after",),
}
"""The blocks of a page that make up the code of each stage of a deploy."""

ONCE, SINGLETON, HEIMDALL, CACHE = PAGES = (
    "from-celery-once",
    "from-celery-singleton",
    "from-celery-heimdall",
    "from-cache-add",
)


def text(page: str) -> str:
    """A page as it stands."""
    return (DOCS / f"{page}.md").read_text()


def code(page: str, block: str) -> str:
    """The Python of the block below the comment that names it."""
    named = (f"<!-- code: {block} -->", "python")
    (found,) = (one.text for one in blocks(text(page)) if (one.before, one.language) == named)
    return found


def stages(page: str) -> list[str]:
    """The stages that a page goes through, in order."""
    return [stage for stage in STAGES if f"<!-- code: {stage} -->" in text(page)]


def load(
    page: str, stage: str, url: str, edits: Sequence[tuple[str, str]] = (), **given: Any
) -> dict[str, Any]:
    """Execute a stage's blocks as a module of their own.

    Args:
        page: One of `PAGES`.
        stage: One of its stages.
        url: The server.
        edits: What the test changes in the code, and into what. Defaults to nothing.
        given: Names that the blocks use and do not define.
    """
    namespace: dict[str, Any] = {"__name__": "shop", **given}
    for block in STAGES[stage]:
        source = code(page, block).replace(URL, url)
        for old, new in edits:
            source = source.replace(old, new)
        exec(compile(source, f"docs/{page}.md ({block})", "exec"), namespace)
    return namespace
