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


INT = "local function int(number) return string.format('%.0f', number) end"
PARSED = "string.match(record or '', '^([^\\n]*)\\n(%d+)\\n(%d+)\\n([%l_]+)\\n(.*)$')"
IS_STALE = "later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then"
NEXT_IN_LINE = """
  local lingers = string.match(redis.call('HGET', KEYS[4], task) or '', '^@(%d+)$')
  if not lingers or clock() < tonumber(lingers) then
    heir, hand_over = task, lingers and tonumber(lingers) - now + 50000 or hand_over
    break
  end
  gone[#gone + 1] = task
end
"""


@pytest.mark.parametrize(
    ("fragment", "sign", "verbs"),
    [
        (INT, "function int", None),
        (PARSED, "([%l_]+)\\n(.*)$", "free hold release renew serve"),
        (IS_STALE, "local later", "acquire leave park"),
        (NEXT_IN_LINE, "local lingers", "release serve"),
    ],
    ids=["int", "record", "ticket", "line"],
)
def test_what_several_scripts_must_say_they_say_letter_by_letter(fragment, sign, verbs):
    """Wherever a script has such a thing, it is the same."""
    texts = {path.stem: path.read_text() for path in (PACKAGE / "lua").glob("*.lua")}
    having = {verb for verb, text in texts.items() if sign in text}
    assert len(having) > 1
    assert verbs is None or having == set(verbs.split())
    assert {verb for verb in having if fragment not in texts[verb]} == set()


def test_public_names_are_exported_and_documented():
    """__all__ is complete, sorted and documented."""
    assert sorted(celery_setnx.__all__) == celery_setnx.__all__
    for name in celery_setnx.__all__:
        assert getattr(celery_setnx, name).__doc__, name
