"""Packed weights: every one as the library decodes it, to the bit; what is not complete is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint, CheckpointError
from airtune.weights.expert_plans import ExpertGroup
from airtune.weights.file_map import FileMap
from airtune.weights.image import load_tensor
from airtune.weights.layout import plan_weights
from airtune.weights.packed import row_blocks
from airtune.weights.packed.schemes import _Fp8Dequantize, take_scheme
from airtune.weights.plans import TensorPlan
from airtune.weights.reader import ByteReader
from tests import packed, zoo

# transformers says that a config given to `from_pretrained` meets the one in config.json.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

LAYER = "model.layers.1"
Q_PROJ = f"{LAYER}.self_attn.q_proj"
EXPERT = f"{LAYER}.mlp.experts.3.up_proj"


def skeleton(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_skeleton(
        folder, dtype=dtype, stored_dtype=dtype, attn_implementation=None, trust_remote_code=False
    )


def plan(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, TensorPlan]:
    model = skeleton(folder, dtype)
    scheme = take_scheme(model)
    return plan_weights(model, Checkpoint.open(folder), scheme)


def load(plans: Mapping[str, TensorPlan]) -> dict[str, torch.Tensor]:
    files = FileMap()
    with ByteReader(threads=1) as reader:
        return {name: load_tensor(plan, reader, files) for name, plan in plans.items()}


def spread(scales: torch.Tensor, block: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan(folder)
    for part in parts:
        assert part in str(caught.value)


def without(folder: Path, *keys: str) -> None:
    def change(tensors: packed.Tensors) -> packed.Tensors:
        assert set(keys) <= tensors.keys()
        return {key: tensor for key, tensor in tensors.items() if key not in keys}

    packed.edit(folder, change)


@pytest.mark.parametrize("scheme", packed.PACKED)
def test_every_tensor_is_the_librarys(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a weight is decoded 32 rows at a time."""
    folder = packed.make(scheme, tmp_path)
    for dtype, numel in ((torch.float32, 2**22), (torch.bfloat16, 32 * 64)):
        monkeypatch.setattr(row_blocks, "_BLOCK_NUMEL_ON_CPU", numel)
        plans = plan(folder, dtype)
        wanted = packed.dense_twin(scheme, folder, dtype).state_dict()
        got = load(plans)
        assert got.keys() == wanted.keys()
        assert [n for n in got if got[n].dtype != wanted[n].dtype or not torch.equal(got[n], wanted[n])] == []
        assert sum(plan.packed for plan in plans.values()) >= 8


def test_weights_beside_packed_ones_stay_what_they_are(tmp_path: Path) -> None:
    plans = plan(packed.make("fp8", tmp_path))
    plain = [name for name, plan in plans.items() if not plan.packed]
    assert all(plans[name].lands for name in plain)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in plain} >= {
        "lm_head",
        "embed_tokens",
        "norm",
    }


def test_experts_that_are_not_packed_are_reads_into_place(tmp_path: Path) -> None:
    """The conversion of packed experts is there, and not needed."""
    folder = zoo.make("deepseek_v3", tmp_path, shard_size="1GB")
    packed.describe(folder, packed.fp8_settings(32))
    plans = plan(folder)
    assert all(plan.lands for plan in plans.values())


@pytest.mark.parametrize("scheme", ["fp8 experts", "int4 experts", "mxfp4 experts", "fp8 and int4 experts"])
def test_one_expert_is_its_part_of_the_stack(scheme: str, tmp_path: Path) -> None:
    plans = plan(packed.make(scheme, tmp_path))
    path = f"{LAYER if scheme != 'int4 experts' else 'model.layers.2'}.mlp.experts"
    names = {f"{path}.gate_up_proj", f"{path}.down_proj"}
    group = ExpertGroup(1, path, {name: plans[name] for name in names})
    whole = load(group.stacks)
    for expert in (0, 5):
        alone = group.plans(expert)
        assert alone.keys() == names and all(plan.packed for plan in alone.values())
        for name, tensor in load(alone).items():
            assert torch.equal(tensor, whole[name][expert : expert + 1])
        sources = [stored.nbytes for plan in alone.values() for _, stored in plan.conversion.travels()]
        stack = [s.nbytes for plan in group.stacks.values() for _, s in plan.conversion.travels()]
        assert sum(sources) == sum(stack) // 8


# Fine-grained fp8, where transformers' own operation gives up or is wrong


@pytest.fixture
def blocks_of_48() -> Iterator[_Fp8Dequantize]:
    config = FineGrainedFP8Config(weight_block_size=(48, 48), dequantize=True)
    yield _Fp8Dequantize(SimpleNamespace(quantization_config=config))


@pytest.mark.parametrize("shape", [(96, 96), (96, 100), (100, 96), (60, 90), (20, 10), (1, 7), (360, 48)])
@pytest.mark.parametrize("numel", [1, 2**22])
def test_blocks_that_are_not_whole_at_the_edges(
    blocks_of_48: _Fp8Dequantize, shape: tuple[int, int], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[360, 48] has 7.5 blocks and 8 scales; by the grid alone they would be blocks of 45."""
    monkeypatch.setattr(row_blocks, "_BLOCK_NUMEL_ON_CPU", numel)
    weight, scales = packed.fp8_blocks(torch.randn(shape), (48, 48))
    got = blocks_of_48._dequantize_one(weight, scales, torch.float32)
    assert torch.equal(got, weight.float() * spread(scales, 48, shape))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("grid", [(), (1,), (1, 1), (64, 1), (2, 4), (64, 4)])
def test_other_grids_are_those_of_the_library(
    blocks_of_48: _Fp8Dequantize, dtype: torch.dtype, grid: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    """Scales of rows, of tensors and of groups; two values of 4 bits in a byte; scales that are exponents."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 120, (64, 64), dtype=torch.uint8, generator=generator).view(dtype)
    scales = torch.randint(-3, 4, grid, generator=generator).float().exp2().to(scale_dtype)
    library = Fp8Dequantize(blocks_of_48.hf_quantizer)._dequantize_one(weight, scales, torch.float32)
    assert torch.equal(blocks_of_48._dequantize_one(weight, scales, torch.float32), library)


def test_experts_that_are_packed_as_a_stack(tmp_path: Path) -> None:
    folder = zoo.make("gpt_oss", tmp_path, shard_size="1GB")
    wanted: dict[str, torch.Tensor] = {}

    def pack(key: str, stack: torch.Tensor) -> packed.Tensors:
        weights, scales = zip(*(packed.fp8_blocks(weight, (48, 48)) for weight in stack), strict=True)
        wanted[key] = torch.stack(
            [w.float() * spread(s, 48, tuple(w.shape)) for w, s in zip(weights, scales, strict=True)]
        )
        return {key: torch.stack(weights), f"{key}_scale_inv": torch.stack(scales)}

    experts = packed.Packed("gpt_oss", pack, {}, FineGrainedFP8Config, re.compile(r"experts\.\w+_proj$"))
    packed.edit(folder, lambda tensors: packed.pack_all(tensors, experts))
    packed.describe(folder, packed.fp8_settings(48))
    plans = plan(folder)
    got = load(plans)
    assert len(wanted) == 8 and all(torch.equal(got[name], want) for name, want in wanted.items())
    name = f"{LAYER}.mlp.experts.down_proj"
    alone = ExpertGroup(1, name, {name: plans[name]}).plans(5)
    assert torch.equal(load(alone)[name], wanted[name][5:6])
    without(folder, f"{name}_scale_inv")
    refused(folder, f"missing {name}_scale_inv")


def test_scales_that_do_not_fit_the_weight(tmp_path: Path) -> None:
    folder = packed.make("fp8", tmp_path)
    key = f"{Q_PROJ}.weight_scale_inv"
    packed.edit(folder, lambda tensors: {**tensors, key: torch.ones(3, 2)})
    refused(folder, f"{Q_PROJ}.weight", "cannot be made of", "(64, 64) has scales of (3, 2)")


def test_scales_under_another_name(tmp_path: Path) -> None:
    folder = packed.make("fp8", tmp_path)
    plans = plan(folder)
    want = load(plans)
    packed.edit(
        folder, lambda tensors: {k.replace("weight_scale_inv", "scale"): t for k, t in tensors.items()}
    )
    plans = plan(folder)
    assert all(torch.equal(tensor, want[name]) for name, tensor in load(plans).items())
    without(folder, f"{Q_PROJ}.scale")
    refused(folder, f"{Q_PROJ}.weight")


def test_a_half_that_is_not_packed(tmp_path: Path) -> None:
    """Of a fused weight one half may be stored as it is computed with."""
    folder = packed.make("int4 experts", tmp_path)
    plans = plan(folder)
    want = load(plans)

    def unpack_up(tensors: packed.Tensors) -> packed.Tensors:
        made = {}
        for key, tensor in tensors.items():
            stem, _, name = key.rpartition(".")
            if ".experts." not in stem or not stem.endswith("up_proj"):
                made[key] = tensor
            elif name == "weight_packed":
                layer, _, expert = stem.removesuffix(".up_proj").rpartition(".")
                made[f"{stem}.weight"] = want[f"{layer}.gate_up_proj"][int(expert)].chunk(2)[1].clone()
        return made

    packed.edit(folder, unpack_up)
    plans = plan(folder)
    assert [name for name, plan in plans.items() if name.endswith("gate_up_proj") and plan.packed]
    assert all(torch.equal(tensor, want[name]) for name, tensor in load(plans).items())


# What is not complete

INCOMPLETE = [
    ("fp8", f"{Q_PROJ}.weight_scale_inv", f"{Q_PROJ}.weight"),
    ("fp8", f"{Q_PROJ}.weight", f"{Q_PROJ}.weight_scale_inv"),
    ("fp8 experts", f"{EXPERT}.weight_scale_inv", f"{EXPERT}.weight"),
    ("fp8 experts", f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"),
    ("mxfp4 experts", f"{LAYER}.mlp.experts.down_proj_scales", f"{LAYER}.mlp.experts.down_proj_blocks"),
    ("mxfp4 experts", f"{LAYER}.mlp.experts.down_proj_blocks", f"{LAYER}.mlp.experts.down_proj_scales"),
    ("int4", f"{Q_PROJ}.weight_scale", f"{Q_PROJ}.weight_packed"),
    ("int4", f"{Q_PROJ}.weight_packed", f"{Q_PROJ}.weight_scale"),
    ("int4 asymmetric", f"{Q_PROJ}.weight_zero_point", f"{Q_PROJ}.weight_packed"),
    ("fp8 channels", f"{Q_PROJ}.weight_scale", f"{Q_PROJ}.weight"),
    ("fp8 channels", f"{Q_PROJ}.weight", f"{Q_PROJ}.weight_scale"),
    ("mxfp4", f"{Q_PROJ}.weight_scale", f"{Q_PROJ}.weight_packed"),
]


@pytest.mark.parametrize(("scheme", "missing", "present"), INCOMPLETE, ids=[m for _, m, _ in INCOMPLETE])
def test_what_is_missing_is_named(scheme: str, missing: str, present: str, tmp_path: Path) -> None:
    folder = packed.make(scheme, tmp_path)
    without(folder, missing)
    refused(folder, f"missing {missing} (for {present})")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = packed.make("fp8 experts", tmp_path)
    without(folder, f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv")
    refused(folder, "missing", f"{EXPERT}.weight")


def test_two_tensors_for_one_place(tmp_path: Path) -> None:
    folder = packed.make("fp8", tmp_path)
    key = f"{Q_PROJ}.weight_scale_inv"
    packed.edit(folder, lambda tensors: {**tensors, key.removeprefix("model."): tensors[key].clone()})
    refused(folder, "more than one tensor for", key)


def test_a_tensor_that_no_scheme_knows(tmp_path: Path) -> None:
    folder = packed.make("int4", tmp_path)
    packed.edit(folder, lambda tensors: {**tensors, f"{Q_PROJ}.weight_g_idx": torch.zeros(64)})
    refused(folder, "no place for", f"{Q_PROJ}.weight_g_idx")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integers_are_not_taken_for_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path, shard_size="1GB")
    packed.edit(folder, lambda tensors: {**tensors, f"{Q_PROJ}.weight": torch.zeros(64, 64, dtype=dtype)})
    refused(folder, f"{Q_PROJ}.weight is stored as {dtype}", "nothing to decode it by")


def test_a_scale_of_activations_is_not_read(tmp_path: Path) -> None:
    folder = packed.make("fp8", tmp_path)
    packed.edit(folder, lambda tensors: {**tensors, f"{Q_PROJ}.activation_scale": torch.ones(1)})
    plans = plan(folder)
    keys = [key for key, _ in plans[f"{Q_PROJ}.weight"].conversion.travels()]
    assert keys == [f"{Q_PROJ}.weight", f"{Q_PROJ}.weight_scale_inv"]


# The config


def test_the_model_is_not_called_quantised_any_more(tmp_path: Path) -> None:
    model = skeleton(packed.make("fp8", tmp_path))
    modules = [type(module) for module in model.modules()]
    assert take_scheme(model) is not None and take_scheme(model) is None
    assert not model.is_quantized and "quantization_config" not in model.config.to_dict()
    assert [type(module) for module in model.modules()] == modules


def test_a_config_of_the_text_model(tmp_path: Path) -> None:
    """Image-text models may have it there, and tensors of other parts that are not packed."""
    scheme = packed.PACKED["int4 experts"]
    folder = zoo.make("kimi_k25", tmp_path, shard_size="1GB")
    before = load(plan(folder))
    packed.edit(folder, lambda tensors: packed.pack_all(tensors, scheme))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = scheme.settings
    (folder / "config.json").write_text(json.dumps(config))
    plans = plan(folder)
    got = load(plans)
    assert got.keys() == before.keys()
    assert {name for name, plan in plans.items() if plan.packed} == {
        name for name, tensor in got.items() if not torch.equal(tensor, before[name])
    }
    assert all(torch.dist(got[n], before[n]) < 0.2 * before[n].norm() + 1e-6 for n in got)


def test_groups_that_do_not_say_which_modules(tmp_path: Path) -> None:
    folder = packed.make("fp8 and int4 experts", tmp_path)
    settings: dict[str, Any] = json.loads(json.dumps(packed.PACKED["fp8 and int4 experts"].settings))
    settings["config_groups"]["dense"]["targets"] = ["re:.*mlp.*"]
    packed.describe(folder, settings)
    refused(folder, "self_attn", "0 of the config_groups")
    settings["config_groups"]["dense"]["targets"] = ["re:.*experts.*", "re:.*proj"]
    packed.describe(folder, settings)
    refused(folder, "experts", "2 of the config_groups")


def test_a_config_that_is_not_understood(tmp_path: Path) -> None:
    folder = packed.make("int4", tmp_path)
    settings: dict[str, Any] = json.loads(json.dumps(packed.PACKED["int4"].settings))
    settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    packed.describe(folder, settings)
    with pytest.raises(
        CheckpointError, match=r"(?s)compressed-tensors in config.json is not understood: .*actorder"
    ):
        take_scheme(skeleton(folder))


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packed.make("int4", tmp_path)
    model = skeleton(folder)
    monkeypatch.setattr(
        "transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False
    )
    with pytest.raises(CheckpointError, match=r"compressed-tensors.*not there.*airtune\[compressed\]"):
        take_scheme(model)


def test_planning_reads_headers_only(tmp_path: Path) -> None:
    folder = packed.make("fp8 experts", tmp_path)
    checkpoint, model = Checkpoint.open(folder), skeleton(folder)
    (folder / "model.safetensors").unlink()
    assert plan_weights(model, checkpoint, take_scheme(model))


# Rows at a time


@pytest.mark.parametrize("lengths", [(12,), (12, 12), (12, 3), (12, 3, 1), (12, 4, 6), (1,)])
@pytest.mark.parametrize("numel", [1, 30, 2**22])
def test_rows_belong_together(lengths: tuple[int, ...], numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "_BLOCK_NUMEL_ON_CPU", numel)
    rows, columns = lengths[0], 5
    tensors = {str(i): torch.arange(length).float() for i, length in enumerate(lengths)}
    seen = torch.zeros(rows)
    for part, some in row_blocks.in_rows({**tensors, "all": torch.tensor(1.0)}, rows, columns):
        seen[part] += 1
        for name, tensor in tensors.items():
            by_row = tensor.repeat_interleave(math.ceil(rows / len(tensor)))[part]
            assert torch.equal(some[name].repeat_interleave(math.ceil(len(by_row) / len(some[name]))), by_row)
    assert seen.eq(1).all()


def test_rows_that_share_no_whole_number_of_entries_stay_together() -> None:
    [(part, some)] = row_blocks.in_rows({"w": torch.zeros(12, 5), "s": torch.zeros(5, 5)}, 12, 5)
    assert (part, len(some["s"])) == (slice(0, 12), 5)


def test_a_decoded_weight_is_frozen(tmp_path: Path) -> None:
    """One of transformers' operations returns a parameter that wants a gradient."""
    plans = plan(packed.make("mxfp4 experts", tmp_path))
    made = load({"w": plans[f"{LAYER}.mlp.experts.down_proj"]})["w"]
    assert not made.requires_grad and not isinstance(made, nn.Parameter)
