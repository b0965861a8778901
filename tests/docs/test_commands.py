"""Every command that a page shows works: it is run here, or somewhere that is named."""

import re
import shlex

import pytest

from tests import forks
from tests.docs.commands import COMMANDS, PROJECT, Elsewhere, Run, of
from tests.docs.pages import blocks, commands, pages, text_of

# All command lines, each with its page.
SHOWN = list(dict.fromkeys((page, line) for page in pages() for line in commands(blocks(text_of(page)))))
TO_RUN = sorted({line: of(line, page) for page, line in SHOWN if isinstance(of(line, page), Run)}.items())


@pytest.mark.parametrize("page", pages())
def test_every_command_is_known(page):
    """It stands in `commands.py`."""
    assert [line for at, line in SHOWN if at == page and of(line, page) is None] == []


def test_every_command_of_the_table_is_shown():
    """What no page shows any more is taken out."""
    used = {id(of(line, page)) for page, line in SHOWN}
    assert [command for command in COMMANDS if id(command) not in used] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if isinstance(c, Elsewhere)], ids=lambda c: c.by)
def test_what_runs_a_command_elsewhere_exists(command):
    """A test by its name; a step of the CI by its text."""
    file, _, test = command.by.partition("::")
    file, _, step = file.partition(": ")
    assert (step or f"\ndef {test}(") in text_of(file)


@pytest.mark.parametrize(("line", "command"), TO_RUN, ids=[line for line, _command in TO_RUN])
def test_command_runs(line, command, empty_server, tmp_path):
    """As it is shown, with the exit code and the words of the table."""
    for name in ("app", "proj", "shop"):
        (tmp_path / f"{name}.py").write_text(PROJECT)
    celery, *arguments = shlex.split(line)
    assert celery == "celery"
    code, said = forks.ended(tmp_path, forks.celery, *arguments, SERVER=empty_server)
    assert code == command.code, said
    assert re.search(command.says, said), said
