"""What README and CONTRIBUTING promise: files that exist, commands that compose, code that runs, numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from peft import PeftModel

from airtune.compose import compose
from airtune.config import COMMANDS, TrainConfig
from tests import zoo

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page("README.md"), re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_exist(name: str) -> None:
    text = page(name)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = re.findall(r"(?<![\w/.])(?:\.ci|airtune|conf|recipes|scripts|tests)/[\w./-]*\w(?![\w*])", text)
    assert paths and (links or name != "README.md")
    assert [path for path in links + paths if not (ROOT / path).exists()] == []


def test_the_file_map_is_the_package() -> None:
    (tree,) = [block for block in blocks("") if block.startswith("airtune/\n")]
    folders: list[str] = []
    listed, reasons = set(), []
    for line in tree.splitlines():
        name, _, reason = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        reasons.append(reason.strip() or name == "airtune/")
        if not name.endswith("/"):
            listed.add("".join(folders))
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "airtune").rglob("*.py")}
    assert listed == {path for path in package if not path.endswith("__init__.py")}
    assert all(reasons)


def test_its_commands_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each command at least; the folders that they name are there."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine/adapter",):
        (tmp_path / folder).mkdir(parents=True)
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if "python -m airtune." in line]
    seen = set()
    for words in commands:
        assert words[:2] == ["python", "-m"]
        name = words[2].removeprefix("airtune.")
        seen.add(name)
        compose(words[3:], COMMANDS[name])
    assert seen == COMMANDS.keys()


def test_its_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, on a tiny model in place of the large one."""
    (code,) = blocks("python")
    assert code.count("Qwen/Qwen3-8B") == 1
    scope: dict[str, object] = {}
    exec(code.replace("Qwen/Qwen3-8B", str(zoo.make("llama", tmp_path))), scope)
    model = scope["model"]
    assert isinstance(model, PeftModel)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None for parameter in trained)
    assert re.match(r"tensor\(\[\[ *1, +2, +3, +4, +\d", capsys.readouterr().out)


def test_its_number_of_architectures_is_the_tested_one() -> None:
    (number,) = re.findall(r"for (\d+) tiny models", page("README.md"))
    assert int(number) == len(zoo.NAMES)


def test_it_lists_what_the_quick_start_leaves() -> None:
    config = compose(["+recipe=quickstart_sft"], TrainConfig)
    rows = len(Path(config.data.train[0]).read_text(encoding="utf-8").splitlines())
    batch, epochs = (config.trainer[key] for key in ("per_device_train_batch_size", "num_train_epochs"))
    assert isinstance(batch, int) and isinstance(epochs, int)
    assert f"`checkpoint-{-(-rows // batch) * epochs}/`" in page("README.md")
    assert config.output_dir.endswith("runs/quickstart_sft") and "`runs/quickstart_sft`" in page("README.md")
