"""The rules that keep the package's walls up, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "airtune"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the others. `run` uses a built model and knows nothing of weights or gradients.
ROOMS = {
    "weights": {"weights"},
    "autograd": {"autograd"},
    "model": {"model", "weights", "autograd"},
    "run": {"run", "model"},
}
# Configurations stop at the entry points: rooms take plain arguments.
CONFIGURATION = {"config", "groups", "checks", "foreign_keys", "kinds", "compose", "trainer_keys", "usage"}
# Slow to import, or extras that may be absent.
IMPORTED_WHERE_USED = {"wandb", "matplotlib", "bitsandbytes", "lm_eval", "gguf", "compressed_tensors"}


def imports_of(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b. Relative imports are made absolute."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    package = ".".join(path.relative_to(ROOT).parent.parts)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            module = ".".join(filter(None, [above, node.module]))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif top_level_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.extend(node.orelse)
            continue
        nodes.extend(ast.iter_child_nodes(node))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_run_one_way(room: str) -> None:
    crossed = [
        f"{name(path)} imports {imported}"
        for path in sorted((PACKAGE / room).glob("**/*.py"))
        for imported in imports_of(path)
        if imported.split(".")[0] == "airtune"
        and imported.split(".")[1] in (ROOMS.keys() | CONFIGURATION) - ROOMS[room]
    ]
    assert not crossed


def test_autograd_imports_torch_only() -> None:
    allowed = sys.stdlib_module_names | {"torch"}
    foreign = [
        f"{name(path)} imports {imported}"
        for path in sorted((PACKAGE / "autograd").rglob("*.py"))
        for imported in imports_of(path)
        if imported.split(".")[0] not in allowed and not imported.startswith("airtune.autograd")
    ]
    assert not foreign


def test_the_schema_imports_the_standard_library_only() -> None:
    roots = {imported.split(".")[0] for imported in imports_of(PACKAGE / "groups.py")}
    assert roots <= sys.stdlib_module_names


def test_composing_a_configuration_loads_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'peft')"
    code = f"import sys, airtune.compose; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_print_and_no_optional_package_at_import(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    roots = {imported.split(".")[0] for imported in imports_of(path, top_level_only=True)}
    assert not roots & IMPORTED_WHERE_USED


def test_the_import_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would pass by seeing nothing."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "airtune" / "run" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import airtune.weights\n"
        "from ..weights import reader\n"
        "from . import data\n"
        "if TYPE_CHECKING:\n    import wandb\n"
        "def f():\n    from airtune import autograd\n"
    )
    everything = set(imports_of(path))
    assert everything == {
        "airtune.weights",
        "airtune.weights.reader",
        "airtune.run.data",
        "wandb",
        "airtune.autograd",
    }
    assert set(imports_of(path, top_level_only=True)) == everything - {"wandb", "airtune.autograd"}
