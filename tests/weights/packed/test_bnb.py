"""Checkpoints as transformers and bitsandbytes write them, and what may be wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter

import airtune
from airtune.model.experts import find_experts
from airtune.model.layers import find_layers
from airtune.model.quantising import quantise
from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint, CheckpointError
from airtune.weights.layout import plan_weights
from airtune.weights.packed.bnb import Bnb4Bit, Bnb8Bit
from airtune.weights.packed.schemes import take_scheme
from tests import packed, zoo

RELEASED: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "nf4, scales packed": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bfloat16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
}


def release(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A model of the zoo that transformers packs while it loads it, and saves."""
    source = zoo.make(name, folder / "source", dtype)
    config = BitsAndBytesConfig(**(settings or {"load_in_8bit": True}))
    model = zoo.model_class(name).from_pretrained(source, dtype=dtype, quantization_config=config)
    model.save_pretrained(folder / "released")
    return folder / "released"


def library_logits(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = zoo.model_class(name).from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model.dequantize(dtype).eval()(zoo.random_ids()).logits  # type: ignore[operator]


def our_logits(folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return airtune.load(folder, device="cpu", **options)(zoo.random_ids()).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", RELEASED)
def test_released_in_4_bits(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = release(tmp_path, dtype=dtype, load_in_4bit=True, **RELEASED[form])
    assert torch.equal(our_logits(folder, dtype=dtype), library_logits("llama", folder, dtype))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_released_in_8_bits(name: str, tmp_path: Path) -> None:
    folder = release(tmp_path, name)
    assert torch.equal(our_logits(folder), library_logits(name, folder))


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_brought_one_by_one(name: str, scheme: str, tmp_path: Path) -> None:
    """Those that the file stacks too: an expert's parts are rows of theirs."""
    quantise(zoo.make(name, tmp_path / "source"), scheme=scheme, output_dir=tmp_path / "packed")
    model = build_skeleton(
        tmp_path / "packed",
        dtype=torch.float32,
        stored_dtype=torch.float32,
        attn_implementation=None,
        trust_remote_code=False,
    )
    scheme_of = take_scheme(model)
    plans = plan_weights(model, Checkpoint.open(tmp_path / "packed"), scheme_of)
    groups = find_experts(model, list(find_layers(model)), plans)
    assert [group.count for group in groups] == [8] * 4
    expert = groups[0].plans(3)
    assert {plan.shape[0] for plan in expert.values() if len(plan.shape) == 3} == {1}


# Faults

Change = Callable[[packed.Tensors], packed.Tensors]
LAYER = "model.layers.1.mlp.up_proj"


def without(*keys: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in keys}


def with_(**changed: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, **{f"{LAYER}.{key}": tensor for key, tensor in changed.items()}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{LAYER}.weight.absmax"), rf"missing {LAYER}\.weight\.absmax"),
        (
            without(f"{LAYER}.weight.quant_state.bitsandbytes__nf4"),
            r"missing .*quant_state\.bitsandbytes__nf4",
        ),
        (without(f"{LAYER}.weight"), rf"missing {LAYER}\.weight "),
        (with_(weight=torch.zeros(64, 1, dtype=torch.uint8)), "and 64 and 128 were stored"),
    ],
)
def test_four_bits_that_are_not_complete(change: Change, message: str, tmp_path: Path) -> None:
    folder = release(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed.edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        airtune.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{LAYER}.SCB"), rf"missing {LAYER}\.SCB"),
        (with_(weight_format=torch.tensor(2, dtype=torch.uint8)), "weight_format 2, a layout that only old"),
        (with_(SCB=torch.ones(3)), r"a scale for each row, and SCB of shape \(3,\)"),
    ],
)
def test_eight_bits_that_are_not_complete(change: Change, message: str, tmp_path: Path) -> None:
    folder = release(tmp_path)
    packed.edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        airtune.load(folder, device="cpu")


def test_experts_that_are_packed_in_part(tmp_path: Path) -> None:
    """Weights and scales are lists in the same order: a scale less would shift all that follow."""
    quantise(
        zoo.make("mixtral", tmp_path / "source"),
        scheme="int8",
        output_dir=tmp_path / "packed",
        shard_nbytes=10**9,
    )
    (tmp_path / "packed" / "airtune_manifest.json").unlink()
    (tmp_path / "packed" / "model.safetensors.index.json").unlink()
    (tmp_path / "packed" / "model-00001-of-00001.safetensors").rename(
        tmp_path / "packed" / "model.safetensors"
    )
    expert = "model.layers.0.block_sparse_moe.experts.2.w2"

    def unpack_one(tensors: packed.Tensors) -> packed.Tensors:
        rest = without(f"{expert}.SCB", f"{expert}.weight_format")(tensors)
        return {**rest, f"{expert}.weight": tensors[f"{expert}.weight"].float()}

    packed.edit(tmp_path / "packed", unpack_one)
    with pytest.raises(CheckpointError, match=r"missing .*experts\.2\.w2\.SCB"):
        airtune.load(tmp_path / "packed", device="cpu")


def test_a_tensor_that_is_split_into_parameters_is_no_obstacle() -> None:
    """transformers refuses a conversion of several sources into several targets, packed or not."""
    model = zoo.model_class("llama")(zoo.model_class("llama").config_class(**zoo.ZOO["llama"].config))
    for kind, options in ((Bnb4Bit, {"load_in_4bit": True}), (Bnb8Bit, {"load_in_8bit": True})):
        config = BitsAndBytesConfig(**options)
        config.dequantize = True
        scheme = kind(config, pre_quantized=True)
        scheme.preprocess_model(model)
        split = WeightConverter(["mlp.both.weight"], ["mlp.a.weight", "mlp.b.weight"], operations=[Chunk(0)])
        merged = WeightConverter(
            ["mlp.a.weight", "mlp.b.weight"], "mlp.c.weight", operations=[Concatenate(0)]
        )
        split_too, merged_too, *_ = scheme.update_weight_conversions([merged, split], model)
        assert split_too is split
        assert len(merged_too.source_patterns) > 2
