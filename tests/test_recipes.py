"""Every recipe composes, from a checkout and from a built wheel, in whatever directory the user stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from airtune.checks import ConfigError
from airtune.compose import compose, conf_folder, recipe_names
from airtune.config import COMMANDS, TrainConfig
from airtune.trainer_keys import check_trainer_keys

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def trainer_fields() -> dict[str, object]:
    from airtune.run.arguments import training_fields

    return training_fields()


def needs_data(recipe: str) -> list[str]:
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    return ["data.train=chats.jsonl"] if "train: ???" in text else []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_anywhere(
    recipe: str, trainer_fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose([f"+recipe={recipe}", *needs_data(recipe)], TrainConfig)
    check_trainer_keys(config.trainer, trainer_fields)
    assert config.output_dir == str(tmp_path / "runs" / recipe)
    assert all(Path(file).is_absolute() for file in config.data.train)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_says_no_wrong_thing_to_other_commands(recipe: str, command: str) -> None:
    """What a command still needs may be asked for; nothing in a recipe may be unknown to it."""
    try:
        compose([f"+recipe={recipe}"], COMMANDS[command])
    except ConfigError as error:
        assert "unknown" not in str(error)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_opens_with_its_package_and_its_command(recipe: str) -> None:
    first, second, *_ = (ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    assert first == "# @package _global_"
    command = f"python -m airtune.train {' '.join([f'+recipe={recipe}', *needs_data(recipe)])}"
    assert second.startswith("# ") and second.endswith(command)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_says_only_what_differs_from_the_defaults(recipe: str) -> None:
    given = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    same = []
    for group in ["model", "adapter", "stream", "trainer", "tracking", "data"]:
        defaults = yaml.safe_load((conf_folder() / group / "default.yaml").read_text(encoding="utf-8"))
        # A required value is repeated as `???`, so that whoever reads the recipe sees what to bring.
        repeated = [key for key, value in given.get(group, {}).items() if defaults.get(key) == value != "???"]
        same += [f"{group}.{key}" for key in repeated]
    assert not same


def test_the_shipped_recipes_are_the_known_ones() -> None:
    assert recipe_names() == RECIPES
    assert "quickstart_sft" in RECIPES


def test_the_quickstart_needs_nothing_from_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRTUNE_CACHE", str(tmp_path))
    config = compose(["+recipe=quickstart_sft"], TrainConfig)
    assert config.model.path == str(tmp_path / "smollm2-135m-instruct")
    assert [Path(file) for file in config.data.train] == [ROOT / "recipes" / "data" / "quickstart.jsonl"]
    assert Path(config.data.train[0]).is_file()
    assert config.tracking.sample_prompts == ["Who are you?", "What is the capital of France?"]


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel is a zip of what lands in site-packages: unpacking installs it without dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("airtune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_recipe_composes_from_a_wheel(unpacked_wheel: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys, airtune.compose as c\nfrom airtune.config import TrainConfig\n"
        "made = {n: c.compose([f'+recipe={n}', *words], TrainConfig)"
        " for n, words in json.loads(sys.argv[1]).items()}\n"
        "print(json.dumps([c.__file__, c.recipe_names(), {n: m.data.train for n, m in made.items()}]))\n"
    )
    words = json.dumps({recipe: needs_data(recipe) for recipe in RECIPES})
    environment = os.environ | {"PYTHONPATH": str(unpacked_wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code, words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    file, names, train = json.loads(done.stdout)
    assert Path(file).is_relative_to(unpacked_wheel)
    assert names == RECIPES
    (quickstart,) = train["quickstart_sft"]
    assert Path(quickstart).is_relative_to(unpacked_wheel) and Path(quickstart).is_file()


def test_a_wheel_holds_the_package_and_its_data_only(unpacked_wheel: Path) -> None:
    top = {path.name for path in unpacked_wheel.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"airtune"}
    assert all((unpacked_wheel / "airtune" / "conf" / f"{command}.yaml").is_file() for command in COMMANDS)
