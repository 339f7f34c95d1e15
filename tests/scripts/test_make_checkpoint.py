"""The random checkpoints of the benchmarks load like any other, and have the size that was asked for."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
VOCAB = 300


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(script: ModuleType, folder: Path, kind: str, *more: str) -> Path:
    arguments = [
        str(folder),
        "--kind",
        kind,
        "--params",
        "1.2M",
        "--vocab",
        str(VOCAB),
        "--shard-size",
        "500KB",
    ]
    script.main([*arguments, *more])
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_transformers_loads_it_whole(script: ModuleType, tmp_path: Path, kind: str) -> None:
    folder = make(script, tmp_path / kind, kind)
    config = AutoConfig.from_pretrained(folder)
    cls = cast(type[PreTrainedModel], getattr(transformers, config.architectures[0]))
    model, report = cast(
        tuple[PreTrainedModel, dict[str, set[str]]], cls.from_pretrained(folder, output_loading_info=True)
    )
    assert not any(report.values()), report
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.num_parameters() == pytest.approx(1.2e6, rel=0.25)
    for name, tensor in stored(folder).items():
        assert tensor.min() < tensor.max(), f"{name} is constant"

    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Añy tèxt ☃"}], tokenize=False
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids_BS = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert tokenizer.decode(ids_BS[0]) == text
    assert int(ids_BS.max()) < 260
    loss = model(input_ids=ids_BS, labels=ids_BS).loss
    assert loss.item() == pytest.approx(torch.tensor(float(VOCAB)).log().item(), rel=0.2)


def test_shards_are_small_and_the_index_is_right(script: ModuleType, tmp_path: Path) -> None:
    folder = make(script, tmp_path / "out", "llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(folder).values())
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 500_000
        assert {name for name, where in index["weight_map"].items() if where == file.name} == tensors.keys()


def test_values_depend_on_seed_and_name_alone(script: ModuleType, tmp_path: Path) -> None:
    first = stored(make(script, tmp_path / "first", "llama"))
    one_file = stored(make(script, tmp_path / "one_file", "llama", "--shard-size", "1GB"))
    other_seed = stored(make(script, tmp_path / "other_seed", "llama", "--seed", "1"))
    assert first.keys() == one_file.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, one_file[name])
        assert not torch.equal(tensor, other_seed[name])


def test_large_tensors_are_drawn_block_by_block(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    randn = torch.randn

    def noting(shape: torch.Size, generator: torch.Generator) -> Tensor:
        asked.append(shape.numel())
        return randn(shape, generator=generator)

    monkeypatch.setattr(script, "DRAWN_AT_ONCE", 1000)
    monkeypatch.setattr(torch, "randn", noting)
    drawn = script.draw("x", torch.empty(47, 50, device="meta"), torch.bfloat16, seed=0)
    assert drawn.shape == (47, 50)
    assert asked == [1000, 1000, 350]
    assert drawn.float().std().item() == pytest.approx(script.MATRIX_STD, rel=0.1)
    assert not torch.equal(drawn.flatten()[:1000], drawn.flatten()[1000:2000])


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("parameters", [600_000_000, 8_000_000_000, 70_000_000_000])
def test_size_is_near_what_was_asked(script: ModuleType, kind: str, parameters: int) -> None:
    config = script.choose_config(kind, parameters, vocab=32768)
    model = script.on_meta(config)
    assert model.num_parameters() == pytest.approx(parameters, rel=0.1)
    assert 20 <= config.get_text_config().num_hidden_layers <= 160


def test_what_cannot_be_made_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    config = script.choose_config("llama", 1_200_000, VOCAB)
    with pytest.raises(ValueError, match="not empty"):
        script.write(tmp_path, config, torch.float32, 500_000)
    with pytest.raises(ValueError, match="smaller --vocab"):
        script.choose_config("llama", 1_000_000, vocab=100_000)
    with pytest.raises(ValueError, match="264 or more"):
        script.choose_config("llama", 1_000_000, vocab=100)
    with pytest.raises(argparse.ArgumentTypeError, match="got '6 apples'"):
        script.number("6 apples")


@pytest.mark.parametrize(
    ("text", "value"), [("0.6B", 600_000_000), ("400MB", 400_000_000), ("12", 12), ("1K", 1000)]
)
def test_numbers_are_read(script: ModuleType, text: str, value: int) -> None:
    assert script.number(text) == value
