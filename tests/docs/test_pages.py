"""The pages: their Python runs, their links lead somewhere, and each stands on the site once."""

import re

import pytest

from tests import forks
from tests.docs import runner
from tests.docs.pages import DOCS, ROOT, anchors, blocks, links, pages, text_of
from tests.docs.setups import SETUPS

LANGUAGES = {
    "python", "setup", "sh", "console", "text", "",
    "lua", "sql", "html", "json", "toml", "ini", "yaml", "diff",
    "{toctree}", "{eval-rst}",
}  # fmt: skip
# Pages whose blocks are the files of a project: the test that makes that project, and runs it.
PROJECTS = {"docs/testing.md": ("tests/test_pytest_plugin.py", "test_examples_of_the_docs_pass")}

TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in (path.stem, *re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))
}


def has_python(page: str) -> bool:
    return any(block.language == "python" for block in blocks(text_of(page)))


@pytest.mark.parametrize("page", [page for page in pages() if page not in PROJECTS and has_python(page)])
def test_python_of_a_page_runs(page, empty_server, tmp_path):
    """Block after block in one namespace, in a process of its own."""
    code, said = forks.ended(tmp_path, runner.run, page, empty_server)
    assert code == 0, f"{page}:\n{said[-6000:]}"


@pytest.mark.parametrize("page", PROJECTS)
def test_project_of_a_page_is_run_by_its_own_test(page):
    """That test exists, and reads this page."""
    file, name = PROJECTS[page]
    body = text_of(file).partition(f"def {name}(")[2].partition("\ndef ")[0]
    assert f'"{page}"' in body


def test_setups_are_those_of_pages_that_exist():
    """No fragment waits for a page that is gone."""
    assert set(SETUPS) <= set(pages())


@pytest.mark.parametrize("page", pages())
def test_blocks_say_what_they_are(page):
    """A language that is known; and who leaves a block out says why, in a comment before it."""
    lines = text_of(page).splitlines()
    end_of_last = 0
    for block in blocks(text_of(page)):
        assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}"
        if block.language == "python":
            assert block.info in ("", "notest"), f"{page}:{block.line}"
            between = "\n".join(lines[end_of_last : block.line - 1])
            if block.info == "notest":
                assert re.search(r"<!-- notest: \S", between), f"{page}:{block.line} says not why"
        end_of_last = block.line + block.text.count("\n")


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    """To a file of the repository, and where they name one, to a heading of it."""
    here = (ROOT / page).parent
    for link in links(text_of(page)):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = here / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page} links to {link}"


@pytest.mark.parametrize("page", pages())
def test_tests_that_a_page_names_exist(page):
    """What it says is shown is shown; a module is named as well."""
    text = text_of(page)
    assert [name for name in re.findall(r"`(test_\w+)`", text) if name not in TESTS] == []


def test_pages_are_few_and_short():
    """25 pages and the README, 36,000 words: a word has a letter or a digit."""
    shown = [page for page in pages() if page.startswith(("docs/", "README"))]
    words = {page: len(re.findall(r"\S*\w\S*", text_of(page))) for page in shown}
    assert len(words) <= 26, sorted(words)
    assert sum(words.values()) <= 36_000, words


def test_every_page_stands_on_the_site_once():
    """In one of the lists of docs/index.md; and those lists name nothing else."""
    lists = [block.text for block in blocks(text_of("docs/index.md")) if block.language == "{toctree}"]
    listed = [line for line in "".join(lists).splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("tests/docs/wrong.md", 'wrong.md", line {line}, in <module>'),
        ("tests/docs/wrong_doctest.md", 'wrong_doctest.md", line {line}'),
    ],
)
def test_a_wrong_page_is_found_out(page, says, empty_server, tmp_path):
    """The runner fails where a page is wrong, and names the page's own line."""
    (line,) = [n for n, text in enumerate(text_of(page).splitlines(), 1) if "a lock nobody has" in text]
    code, said = forks.ended(tmp_path, runner.run, page, empty_server)
    assert code == 1
    assert says.format(line=line) in said
