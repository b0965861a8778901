"""The reference pages and the code say the same."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task

import celery_setnx
from celery_setnx import (
    OptionError,
    SetnxError,
    SingletonTask,
    check,
    exceptions,
    singleton,
    testing,
)
from celery_setnx.options import (
    CONFLICT_POLICIES,
    DEDUPE_MODES,
    DUPLICATE_POLICIES,
    REDIS_ERROR_POLICIES,
    UNSET,
    Options,
    Settings,
    settings,
)
from tests import test_signals
from tests.docs.pages import sections, table, text_of
from tests.test_exceptions import ALL

PACKAGE = Path(celery_setnx.__file__).parent


def linked(cell: str) -> str:
    """The name in a cell such as [`key`](#key); its link must lead to the heading of that name."""
    found = re.fullmatch(r"\[`(\w+)`\]\(#(\w+)\)", cell)
    assert found, cell
    assert found[1].lower() == found[2], cell
    return found[1]


def literal(cell: str) -> Any:
    """The Python value in a cell, between backticks."""
    return ast.literal_eval(re.match(r"`([^`]+)`", cell)[1])  # type: ignore[index]


# options.md


def test_every_option_has_its_default_in_the_table_and_a_section():
    """All of `Options`, and nothing else; and the table's links lead to one section each."""
    rows = table(text_of("docs/options.md"), "option", "type", "unit", "default")
    listed = {linked(name): default for name, _type, _unit, default in rows}
    known = {option.name: option.default for option in dataclasses.fields(Options)}
    assert listed.keys() == known.keys()
    found = [section for section in sections(text_of("docs/options.md"), 3) if section in known]
    assert sorted(found) == sorted(listed)
    assert listed.pop("skip_result") == repr(known.pop("skip_result")) == repr(UNSET)
    assert {name: literal(default) for name, default in listed.items()} == known


POLICIES = {"on_conflict": CONFLICT_POLICIES, "dedupe": DEDUPE_MODES}
POLICIES |= {"on_duplicate": DUPLICATE_POLICIES, "on_redis_error": REDIS_ERROR_POLICIES}


@pytest.mark.parametrize("option", POLICIES)
def test_every_value_of_an_option_is_explained(option):
    """In the option's own section."""
    text = sections(text_of("docs/options.md"), 3)[option]
    assert [value for value in POLICIES[option] if f'`"{value}"`' not in text] == []


def refusal(base: type[Task], options: dict[str, Any]) -> str:
    """Why a task with these options is refused when it is bound: as a base class, or decorated."""
    app = Celery("proj", set_as_current=False)

    def settle(account_id: int, reason: str) -> None: ...

    if base is SingletonTask:
        app.task(shared=False, name="proj.settle", base=base, singleton=options)(settle)
    else:
        app.task(shared=False, name="proj.settle")(singleton(**options)(settle))
    with pytest.raises(OptionError) as refused:
        check(app)
    return str(refused.value)


@pytest.mark.parametrize(("options", "error"), table(text_of("docs/options.md"), "options", "error"))
def test_refused_options_are_refused_in_these_words(options, error):
    """When the task is bound."""
    assert error.strip("`") in refusal(SingletonTask, literal(options))


def test_other_refusals_are_in_the_words_of_the_code():
    """Each error of the second table is a message of the package."""
    nodes = [node for path in sorted(PACKAGE.rglob("*.py")) for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    source = "".join(text for text in texts if isinstance(text, str))
    rows = table(text_of("docs/options.md"), "what", "error")
    words = [re.search(r"`([^`]+)`$", error)[1] for _what, error in rows]  # type: ignore[index]
    assert [error for error in words if error not in source] == []


@pytest.mark.parametrize(
    "option", [{"dedupe": "until_done"}, {"hold_on_retry": True}, {"on_conflict": "join"}]
)
def test_what_needs_the_base_class_is_refused_without_it(option):
    """As the second table says."""
    assert "needs the base class: add base=SingletonTask" in refusal(Task, option)


# settings.md


def test_every_setting_has_its_default_in_the_table_and_a_section():
    """All that the code asks for, and nothing else; and what the table's links lead to."""
    rows = table(text_of("docs/settings.md"), "setting", "type", "default")
    listed = {linked(name): default for name, _type, default in rows}
    asked = {"setnx_transport_options"}
    for path in PACKAGE.rglob("*.py"):
        asked |= set(re.findall(r'conf\.get\("(setnx_\w+)"', path.read_text()))
    fields = {f"setnx_{field.name}" for field in dataclasses.fields(Settings)}
    assert asked - fields == {"setnx_url", "setnx_transport_options"}
    read = settings(Celery("proj", set_as_current=False).conf)
    known = {name: getattr(read, name.removeprefix("setnx_"), None) for name in asked | fields}
    assert listed.keys() == known.keys()
    assert listed["setnx_transport_options"] == "none"
    assert listed["setnx_url"] == "the result backend, else the broker"
    values = {name: literal(default) for name, default in listed.items() if known[name] is not None}
    assert values == {name: value for name, value in known.items() if value is not None}
    assert set(known) <= set(sections(text_of("docs/settings.md"), 3))


# monitoring.md


def test_orders_are_those_of_the_signals_tests():
    """Every order that a real worker is tested for stands in the table."""
    test = test_signals.test_signals_are_sent_in_order_with_exactly_their_arguments
    scenes = test.pytestmark[0].args[1]
    orders = {
        tuple(re.findall(r"`([a-z]+_[a-z_]+)`", row[1]))
        for row in table(text_of("docs/monitoring.md"), "the call", "signals, in this order")
    }
    assert len(scenes) >= 8
    assert {tuple(dict.fromkeys(expected)) for _scene, expected in scenes} <= orders


# api.md, glossary.md


def exceptions_listed() -> dict[str, list[str]]:
    """The exceptions of the table, each with its attributes."""
    rows = table(text_of("docs/api.md"), "exception", "raised", "retry?", "attributes")
    return {linked(row[0]): re.findall(r"`(\w+)`", row[3]) for row in rows}


def test_every_exception_has_a_section_and_a_row():
    """All of `exceptions`, and nothing else; the section is its docstring's."""
    classes = [value for value in vars(exceptions).values() if isinstance(value, type)]
    known = {value.__name__ for value in classes if issubclass(value, SetnxError)}
    found = sections(sections(text_of("docs/api.md"))["Exceptions"], 3)
    assert set(found) == known
    assert all(f".. autoexception:: celery_setnx.{name}()" in text for name, text in found.items())
    assert exceptions_listed().keys() == known - {"SetnxError"}


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_attributes_of_an_exception_are_listed_and_explained(error):
    """In the table all that it has; in its docstring those that it has beyond its parent's, and no others."""
    name = type(error).__name__
    assert set(exceptions_listed().get(name, [])) == set(vars(error))
    explained = re.findall(r"^ {8}(\w+): \S", error.__doc__.partition("Attributes:\n")[2], re.MULTILINE)
    parents = set(vars(exceptions.AlreadyRunning("t", "k", {}))) if name == "LockTimeout" else set()
    assert set(explained) == set(vars(error)) - parents


def test_every_public_name_is_in_the_api():
    """`celery_setnx.__all__`, and `__all__` of the test kit."""
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", text_of("docs/api.md"), re.MULTILINE))
    assert {f"celery_setnx.{name}" for name in celery_setnx.__all__} <= documented
    (members,) = re.findall(r"automodule:: celery_setnx.testing\n   :members: (.+)", text_of("docs/api.md"))
    assert {*members.split(", "), "Held"} == set(testing.__all__)


def test_words_of_the_glossary_are_those_of_the_code():
    """Each is used by the package, its scripts included; none is explained twice."""
    words = [row[0].strip("*") for row in table(text_of("docs/glossary.md"), "word", "meaning")]
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.lua")]
    code = "\n".join(path.read_text() for path in files).lower()
    assert 30 < len(words) == len(set(words)) <= 45
    assert [word for word in words if not re.search(word.replace(" ", r"[\s_]+"), code)] == []


def test_states_of_a_lock_are_in_the_glossary():
    """Those that a `Holder` may have, and that of a lock which nobody holds."""
    (text,) = [row[1] for row in table(text_of("docs/glossary.md"), "word", "meaning") if row[0] == "*state*"]
    (states,) = re.findall(r"state: (.*?)since:", celery_setnx.Holder.__doc__ or "", re.DOTALL)
    explained = set(re.findall(r"`(\w+)`", text)) - {"at_least_for"}
    assert {*re.findall(r"`(\w+)`", states), "free"} == explained
