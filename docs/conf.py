"""The site: Sphinx with MyST and furo. `make docs` builds it; every warning fails the build."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from celery_setnx import __version__

project = "celery_setnx"
author = "The celery_setnx developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"celery_setnx {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
# What a reader copies are commands and code, without prompts and output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Pages link to each other's headings as on GitHub. A link to a file of the repository is a download.
myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]

# Docstrings are Google's style, with names in single backticks.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

# Nothing is fetched when the site is built, so the names of others lead nowhere; ours must.
nitpick_ignore_regex = [(r"py:.*", r"(?!celery_setnx\b).*")]
# A type variable, a call as its message has it, and how one that waits leaves its body: not to be caught.
nitpick_ignore = [
    ("py:class", "celery_setnx.task.Function"),
    ("py:class", "celery_setnx.call.message.Call"),
    ("py:exc", "celery_setnx.run.conflict.WaitInLine"),
]

# How wide a cell must be on a phone, by the length of its text; site.css has the widths.
CELLS = {160: "paragraph", 60: "sentence", 22: "words", 11: "", 1: "short"}


def classify(_app: Sphinx, page: nodes.document, _name: str) -> None:
    """Tell the style sheet what is long and what is short, which it cannot see."""
    for cell in page.findall(nodes.entry):
        length = len(cell.astext())
        cell["classes"] += [name for least, name in CELLS.items() if length >= least][:1]
    for code in page.findall(nodes.literal):
        if "-" in code.astext() and len(code.astext()) <= 24:
            code["classes"].append("short")  # not to be broken at a dash of an option
    for block in page.findall(nodes.literal_block):
        is_told = block.get("language") in ("console", "sh") and not re.search(r"\S {2}", block.astext())
        if is_told or re.match(r"\[\d{4}-", block.astext()):
            block["classes"].append("log")  # commands, answers and log lines, not tables: long lines wrap


def add_to_index(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Make index entries of `<!-- index: stuck lock; unlock -->`: the search shows them first."""
    source[0] = re.sub(
        r"<!-- index: (.+) -->",
        lambda found: "```{index} ! " + found[1].replace("; ", ", ! ") + "\n```",
        source[0],
    )


def keep_options_whole(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: nodes.document | None
) -> None:
    """Keep a line that wraps from ending within an option: `--yes` is not `-- yes`."""
    context["body"] = re.sub(
        r'<div class="[^"]*\blog\b.*?</pre>',
        lambda block: re.sub(r"(?<= )--[\w-]+", r'<span class="short">\g<0></span>', block[0]),
        context.get("body", ""),
        flags=re.DOTALL,
    )


def setup(app: Sphinx) -> None:
    """What this site adds to Sphinx."""
    app.connect("source-read", add_to_index)
    app.connect("doctree-resolved", classify)
    app.connect("html-page-context", keep_options_whole)
