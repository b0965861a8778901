"""The shape of the package: imports point down, functions are short, scripts have one caller."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import celery_setnx
from tests.docs.pages import DOCS

PACKAGE = Path(celery_setnx.__file__).parent
# Folders and single modules, each knowing only those before it, and its own neighbours in one direction.
ORDER = [
    {"exceptions", "signals", "forks", "wording", "log", "threads"},
    {"lock"},
    {"arguments", "keys", "options", "connection", "address", "configured"},
    {"call"},
    {"run"},
    {"request", "task", "beat"},
    {"doctor", "byhand", "terms"},
    {"cli", "metrics", "testing", "django"},
    {"pytest_plugin"},
    {"__init__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# What may be longer, or take more: the doors of the package, whose docstrings are its reference.
LONG = {
    *("task.apply_async", "call.publish.send_task", "metrics.serve"),
    *("lock.lock.acquire",),
}
MANY = {"task.apply_async", "lock.lock.__init__"}


def _name(path: Path) -> str:
    dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


MODULES = {_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imports(tree: ast.Module) -> set[str]:
    """Modules of ours that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_setnx"):
            assert node.level == 0
            rest = (node.module or "").partition(".")[2]
            within = {f"{rest}.{alias.name}".lstrip(".") for alias in node.names} & MODULES.keys()
            found |= within or {rest}
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("celery_setnx.")}
    return found - {""}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """All functions of a module, methods and inner ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_point_down(module):
    """Lock, then keys, options and connection, then calls, then runs, then the doors that users name."""
    own = RANK[module.partition(".")[0]]
    for imported in imports(MODULES[module]):
        assert RANK[imported.partition(".")[0]] <= own, f"{module} imports {imported}"


def test_no_modules_know_each_other():
    """Nor in a circle of more."""
    known = {module: imports(tree) - {module} for module, tree in MODULES.items()}
    assert len(list(TopologicalSorter(known).static_order())) == len(MODULES)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.partition(".")[0] == "lock"))
def test_lock_knows_no_celery(module):
    """The lock is usable without Celery."""
    for node in ast.walk(MODULES[module]):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.partition(".")[0] in ("celery", "kombu", "billiard") for name in names)


def test_functions_are_short():
    """At most 40 lines, and 6 parameters besides the object itself, but for a few."""
    long, many = set(), set()
    for module, tree in MODULES.items():
        for function in functions(tree):
            given = function.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            parameters = [each for each in parameters if each.arg not in ("self", "cls")]
            if (function.end_lineno or 0) - function.lineno >= 40:
                long.add(f"{module}.{function.name}")
            if len(parameters) > 6:
                many.add(f"{module}.{function.name}")
    assert (long, many) == (LONG, MANY)


def sections(node: Any) -> set[str]:
    """Of a docstring."""
    text = ast.get_docstring(node) or ""
    return {section for section in ("Args:", "Returns:", "Raises:") if section in text.split("\n")}


def test_docstrings_of_what_is_internal_have_no_sections():
    """One line says what a private function is for; the reference names all others."""
    reference = (DOCS / "api.md").read_text()
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and sections(node):
                name = "SetnxLock" if node.name == "__init__" else node.name
                assert name in reference, f"{module}.{node.name} has {sections(node)}"


def test_every_module_says_what_it_is_for_and_asserts_nothing():
    """A module opens with one sentence; an assert vanishes under -O."""
    for name, tree in MODULES.items():
        assert ast.get_docstring(tree), name
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), name


SCRIPTS = {path.stem: path.read_text() for path in (PACKAGE / "lock" / "lua").glob("*.lua")}
IN_FRONT = (
    *("lock", "store", "grant", "permits", "line", "ticket", "pace", "start", "claim", "hand", "duplicate"),
    *("newest", "supersede", "terms", "change"),
)


def test_one_verb_per_lua_file():
    """Every script is named for its verb, and states its keys, its arguments and its reply."""
    assert set(SCRIPTS) - set(IN_FRONT) == {
        *("acquire", "renew", "release", "hold", "free", "look", "mark", "if_same", "forget"),
        *("park", "leave", "serve", "due", "sweep", "settle", "tick", "recall", "age"),
        *("reserve", "replace", "drop", "change_terms", "hold_back", "rouse"),
    }
    for name in set(SCRIPTS) - set(IN_FRONT):
        assert all(word in SCRIPTS[name] for word in ("-- KEYS", "-- ARGV", "-- Returns")), name


def is_question(node: ast.Attribute) -> bool:
    """Whether it is a step of an attempt's, such as `Ask.ACQUIRE`."""
    return isinstance(node.value, ast.Name) and node.value.id in ("Ask", "End")


def test_scripts_are_called_by_the_functions_beside_them():
    """Each is made in one module, for its verb, and no other module has it."""
    made: dict[str, str] = {}
    for module, tree in MODULES.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in ("Script", "PermitScript"):
                verb = ast.literal_eval(call.args[0])
                assert verb not in made
                made[verb] = module
    assert made.keys() == set(SCRIPTS) - set(IN_FRONT)
    for module, tree in MODULES.items():
        nodes = list(ast.walk(tree))
        named = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_question(node)}
        named |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not {name.lstrip("_") for name in named} & {verb.upper() for verb in made}, module


MOST_LINES = {"acquire": 75}  # whose turn it is, who gives way, and where it waits, in one step


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_lua_file_fits_a_screen(name):
    """Behind its header; and its lines are no longer than those of Python."""
    lines = SCRIPTS[name].splitlines()
    assert len(lines) - lines.index("") - 1 <= MOST_LINES.get(name, 60)
    assert max(map(len, lines)) <= 120


def test_no_script_says_what_the_texts_in_front_say():
    """The clock, the pattern of a record, a task's token and a ticket are each written once."""
    of = {
        "'TIME'": "lock",
        r"([%l_]+)\n": "lock",
        "'%.0f'": "lock",
        "|%x+$'": "lock",
        "(.*)|(%d+)$'": "ticket",
        "(40000": "line",
    }
    for sign, name in of.items():
        assert [each for each, text in SCRIPTS.items() if sign in text] == [name], sign


def test_public_names_are_exported_and_documented():
    """__all__ is complete, sorted and documented."""
    assert sorted(celery_setnx.__all__) == celery_setnx.__all__
    for name in celery_setnx.__all__:
        assert getattr(celery_setnx, name).__doc__, name
