"""The shape of the package: imports point down, scripts have one caller, the public names are few."""

import ast
from pathlib import Path

import pytest

import celery_setnx

PACKAGE = Path(celery_setnx.__file__).parent
LAYERS = [
    {"exceptions", "keys", "process", "switches", "forks"},
    {"wire"},
    {"scripts"},
    {"lock"},
    {"marks", "line"},
    {"options", "connection", "signals", "survey"},
    {"message", "keeper", "trial"},
    {"back"},
    {"waiting", "check"},
    {"conflict", "sweep"},
    {"guard"},
    {"events", "doctor"},
    {"request", "publish", "run"},
    {"fanout"},
    {"task", "beat", "cli.describe", "cli.asked"},
    {"cli.byhand"},
    {"cli", "metrics", "testing"},
    {"pytest_plugin"},
    {"__init__"},
]  # fmt: skip
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
# Within a level: who may know whom.
SIDEWAYS = {("keys", "exceptions"), ("connection", "options")}


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
            found |= {rest} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("celery_setnx.")}
    return found


def test_every_module_has_a_level():
    """A new module must be given its place."""
    assert set(MODULES) == set(LEVEL)


@pytest.mark.parametrize("module", sorted(LEVEL))
def test_imports_only_point_down(module):
    """exceptions, keys -> scripts -> lock -> marks, options -> conflict -> guard -> publish, run -> task."""
    for imported in imports(MODULES[module]):
        points_down = LEVEL[imported] < LEVEL[module]
        assert points_down or (module, imported) in SIDEWAYS, f"{module} imports {imported}"


@pytest.mark.parametrize("module", ["exceptions", "keys", "scripts", "lock", "marks", "line"])
def test_lock_knows_no_celery(module):
    """The lock is usable without Celery."""
    for node in ast.walk(MODULES[module]):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.partition(".")[0] == "celery" for name in names)


def test_every_module_says_what_it_is_for_and_asserts_nothing():
    """A module opens with one sentence; an assert vanishes under -O."""
    for name, tree in MODULES.items():
        assert ast.get_docstring(tree), name
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), name


def test_one_verb_per_lua_file():
    """Every script is named for its verb, states its keys and arguments, and its body fits a screen."""
    scripts = {path.stem: path.read_text() for path in (PACKAGE / "lua").glob("*.lua")}
    assert set(scripts) == {
        *("acquire", "renew", "release", "hold", "free", "look", "mark", "extend", "unmark"),
        *("park", "leave", "instead", "serve", "due", "sweep", "settle", "tick", "recall", "drop", "age"),
    }
    for name, text in scripts.items():
        assert all(word in text for word in ("-- KEYS", "-- ARGV", "-- Returns")), name
        body = [line for line in text.splitlines() if not line.startswith("--")]
        assert len(body) <= {"acquire": 140, "serve": 100}.get(name, 80), name


def test_public_names_are_exported_and_documented():
    """__all__ is complete, sorted and documented."""
    assert sorted(celery_setnx.__all__) == celery_setnx.__all__
    for name in celery_setnx.__all__:
        assert getattr(celery_setnx, name).__doc__, name
