"""The code of docs/moving.md: what the tests run is what the reader copies."""

import re
from collections.abc import Sequence
from typing import Any

from tests.docs.pages import blocks, sections, text_of

URL = "redis://localhost:6379/0"
"""The server in the page; the tests' server takes its place."""

ONCE, SINGLETON, HEIMDALL, CACHE = PAGES = ("celery-once", "celery-singleton", "celery-heimdall", "cache.add")
"""The sections of the page, one for each lock that users have."""
PEERS = (ONCE, SINGLETON, HEIMDALL)
SHARED = "One rollout"
"""The section with the code and the steps that all have."""

STAGES = ("before", "step-1", "step-2", "after")
"""The stages of a deploy; with `cache.add` the new code comes right after step 1."""


def text(section: str) -> str:
    """A section of the page as it stands."""
    return sections(text_of("docs/moving.md"))[section]


def code(section: str, block: str) -> str:
    """The Python of a section below the comment that names it."""
    named = (f"<!-- code: {block} -->", "python")
    (found,) = (one.text for one in blocks(text(section)) if (one.before, one.language) == named)
    return found


def told(section: str, pattern: str) -> str:
    """The one piece of code within the words of a section that a pattern has as its group."""
    (found,) = re.findall(pattern, text(section))
    return str(found)


def old_keys(section: str) -> str:
    """The pattern of the keys that a package leaves behind."""
    return told(section, "the old keys match `([^`]+)`")


def stages(section: str) -> list[str]:
    """The stages that a section goes through, in order."""
    return [stage for stage in STAGES if stage != "step-2" or section in PEERS]


def load(
    section: str, stage: str, url: str, edits: Sequence[tuple[str, str]] = (), **given: Any
) -> dict[str, Any]:
    """Execute the code of a stage as a module of its own.

    Args:
        section: One of `PAGES`.
        stage: One of its stages.
        url: The server.
        edits: What the test changes in the code, and into what. Defaults to nothing.
        given: Names that the code uses and does not define.
    """
    namespace: dict[str, Any] = {"__name__": "shop", **given}
    for source in _sources(section, stage):
        for old, new in ((URL, url), *edits):
            source = source.replace(old, new)
        exec(compile(source, f"docs/moving.md ({section}, {stage})", "exec"), namespace)
    return namespace


def _sources(section: str, stage: str) -> list[str]:
    """The code of a stage: whole, or with the changes of the code before that the page tells in its words."""
    app, before, after = code(section, "app"), code(section, "before"), code(SHARED, "after")
    if stage == "before":
        return [app, before]
    if stage == "step-1":
        return [app, *_both_locks(section, before)]
    if stage == "step-2":
        return [app, code(section, "step-2")]
    if section == CACHE:
        after = re.sub(r"singleton={.*}", told(section, r"with\s`(singleton=[^`]+)`"), after)
    return [after]


def _both_locks(section: str, before: str) -> list[str]:
    """The line of step 1 between the decorator and the function; heimdall has a base class as well."""
    line = told(
        section if section == CACHE else SHARED, r"`(@singleton\([^`]+\))` between `@app.task\(...\)`"
    )
    both = before.replace("def settle(", f"{line}\ndef settle(")
    found = ["from celery_setnx import singleton\n"]
    if section == HEIMDALL:
        found.append(code(section, "step-1"))
        both = both.replace("base=HeimdallTask", told(section, "Step 1 also needs `([^`]+)`"))
    return [*found, both]
