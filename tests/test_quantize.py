"""The command: composes, writes, reports, and leaves a model that the other commands take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import airtune
from airtune import quantize
from airtune.checks import ConfigError
from airtune.compose import compose
from airtune.config import QuantizeConfig
from scripts.make_checkpoint import byte_tokenizer
from tests import zoo


def words(source: Path, output: Path, scheme: str = "nf4") -> list[str]:
    return [f"model.path={source}", f"scheme={scheme}", f"output_dir={output}"]


def test_it_packs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = zoo.make("mixtral", tmp_path / "source")
    byte_tokenizer().save_pretrained(source)
    assert quantize.main(words(source, tmp_path / "packed")) == 0
    said = capsys.readouterr().out
    assert re.search(r"packed: nf4, 94\.\d % of the bytes packed, 0\.00 GB -> 0\.00 GB\n", said)
    assert (tmp_path / "packed" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    airtune.load(tmp_path / "packed", device="cpu")


def test_a_mistake_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize.main(words(tmp_path / "nowhere", tmp_path / "packed")) == 1
    said = capsys.readouterr().err
    assert "no such folder" in said and "Traceback" not in said


def test_keys(tmp_path: Path) -> None:
    config = compose(words(tmp_path, Path("packed")), QuantizeConfig)
    assert config.scheme == "nf4" and config.output_dir == str(Path.cwd() / "packed")
    with pytest.raises(ConfigError, match="scheme"):
        compose(words(tmp_path, tmp_path, "fp4"), QuantizeConfig)
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        compose([*words(tmp_path, tmp_path), "model.dtype=bfloat16"], QuantizeConfig)


def test_a_recipe_names_the_model() -> None:
    config = compose(["+recipe=qwen3_8b_sft", "output_dir=x"], QuantizeConfig)
    assert config.model.path == "Qwen/Qwen3-8B"
