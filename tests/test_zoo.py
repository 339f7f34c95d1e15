"""The tiny checkpoints are what the other tests take them for: readable, finite, and nowhere constant."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from tests import zoo


def load(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers reads it; nothing may be missing or left over."""
    model, report = cast(
        tuple[PreTrainedModel, dict[str, set[str]]],
        zoo.model_class(name).from_pretrained(folder, dtype=dtype, output_loading_info=True),
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", zoo.NAMES)
def test_seed_decides_every_tensor_and_none_is_constant(name: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16  # in which more would be constant than in float32
    first = load(name, zoo.make(name, tmp_path / "first", dtype), dtype)
    second = load(name, zoo.write(name, tmp_path / "second", dtype, seed=0, shard_size="1GB"), dtype)

    assert AutoConfig.from_pretrained(tmp_path / "first").architectures == [zoo.ZOO[name].class_name]
    again = second.state_dict()
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, again[key]), key
        assert tensor.numel() == 1 or tensor.min() < tensor.max(), key


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_is_read_is_what_was_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Tensor] = {}
    cls = zoo.model_class(name)
    save = cls.save_pretrained

    def note_and_save(model: PreTrainedModel, folder: Path, max_shard_size: str) -> None:
        made.update({key: tensor.clone() for key, tensor in model.state_dict().items()})
        save(model, folder, max_shard_size=max_shard_size)

    monkeypatch.setattr(cls, "save_pretrained", note_and_save)
    read = load(name, zoo.write(name, tmp_path, torch.float32, seed=0, shard_size="1GB")).state_dict()
    assert made.keys() == read.keys()
    for key, tensor in made.items():
        assert torch.equal(tensor, read[key]), key


@pytest.mark.parametrize("name", zoo.NAMES)
def test_lora_on_the_targets_gets_gradients(name: str, tmp_path: Path) -> None:
    base = load(name, zoo.make(name, tmp_path))
    targets = zoo.lora_targets(name)
    config = LoraConfig(
        r=2, target_modules=list(targets), init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    model = get_peft_model(base, config)
    ids_BS = zoo.random_ids()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, 12:] = 0
    loss = model(
        input_ids=ids_BS,
        attention_mask=mask_BS,
        labels=ids_BS.masked_fill(mask_BS == 0, -100),
        use_cache=False,
    ).loss
    loss.backward()

    assert torch.isfinite(loss)
    adapted = {key: parameter for key, parameter in model.named_parameters() if "lora_A" in key}
    names = {key.removeprefix("base_model.model.").partition(".lora_A")[0] for key in adapted}
    assert names == set(targets) != set()
    untouched = {
        key for key, parameter in adapted.items() if parameter.grad is None or not parameter.grad.any()
    }
    # Text does not reach a cross-attention layer, and no gradient passes a choice of the top k.
    assert all("cross_attn" in key or "layers.3.mlp" in key or "indexer" in key for key in untouched)


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first, second = (load("llama", zoo.make("llama", tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    other = second.state_dict()
    assert not any(torch.equal(tensor, other[key]) for key, tensor in first.state_dict().items())


def test_shards_are_as_small_as_asked(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path, shard_size="150KB")
    sizes_bytes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes_bytes) > 3
    assert max(sizes_bytes) < 160_000
