"""The plan of one expert: its share of the bytes, whatever way the checkpoint stores experts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Transpose, WeightConverter

from airtune.model.experts import find_experts
from airtune.model.layers import find_layers
from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.expert_plans import ExpertGroup, can_be_cut
from airtune.weights.file_map import FileMap
from airtune.weights.header import StoredTensor
from airtune.weights.image import load_tensor
from airtune.weights.layout import plan_weights
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteReader
from airtune.weights.stand_in import StandIn
from tests import zoo


def groups_of(folder: Path, dtype: torch.dtype) -> list[ExpertGroup]:
    model = build_skeleton(
        folder, dtype=dtype, stored_dtype=dtype, attn_implementation=None, trust_remote_code=False
    )
    plans = plan_weights(model, Checkpoint.open(folder))
    return find_experts(model, list(find_layers(model)), plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as stored", "cast"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_mixed", "gpt_oss", "deepseek_v3", "kimi_linear"])
def test_the_experts_are_the_slices_of_the_stack(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = zoo.make(name, tmp_path, dtype=torch.bfloat16)
    want = zoo.model_class(name).from_pretrained(folder, dtype=dtype).state_dict()
    groups = groups_of(folder, dtype)
    files = FileMap()
    assert groups
    with ByteReader() as reader:
        for group in groups:
            for index in range(group.count):
                for tensor, plan in group.plans(index).items():
                    got = load_tensor(plan, reader, files)
                    assert torch.equal(got.view(plan.shape), want[tensor][index].view(plan.shape)), tensor


def test_the_sources_of_an_expert_are_its_own(tmp_path: Path) -> None:
    """So that reading one expert counts, and releases, the bytes of one."""
    groups = groups_of(zoo.make("mixtral", tmp_path), torch.float32)
    (group, *_) = groups
    for name, plan in group.plans(3).items():
        stored = sum(source.nbytes for _, _, source in plan.conversion.sources)
        assert stored * group.count == group.stacks[name].nbytes


def test_dense_layers_have_no_experts(tmp_path: Path) -> None:
    groups = groups_of(zoo.make("qwen3_moe_mixed", tmp_path / "a"), torch.float32)
    assert [group.layer for group in groups] == [0, 2, 3]
    for name in ("llama", "zamba", "gemma4_text"):
        assert not groups_of(zoo.make(name, tmp_path / name), torch.float32)


@pytest.mark.parametrize("stored", ["as the module has them", "turned"])
def test_experts_that_are_turned_where_their_shape_says_so(tmp_path: Path, stored: str) -> None:
    """transformers asks the model for the shape of the stack, which is not that of one expert."""
    folder = zoo.make("qwen3_vl_moe", tmp_path, shard_size="1GB")
    files = FileMap()
    if stored == "turned":
        file = folder / "model.safetensors"
        tensors = {
            key: tensor.mT.contiguous() if ".experts." in key else tensor
            for key, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    want = zoo.model_class("qwen3_vl_moe").from_pretrained(folder).state_dict()
    groups = groups_of(folder, torch.float32)
    assert len(groups) == 4
    with ByteReader() as reader:
        for group in groups:
            for tensor, plan in group.plans(5).items():
                got = load_tensor(plan, reader, files)
                assert torch.equal(got.view(plan.shape)[0], want[tensor][5]), tensor


@pytest.mark.parametrize("stored", [(4, 8, 2), (4, 4, 2)], ids=["rows are no experts", "experts are mixed"])
def test_a_stack_that_cannot_be_cut(stored: tuple[int, int, int]) -> None:
    source = StoredTensor(Path("x"), 0, math.prod(stored) * 4, torch.float32, stored)
    turn = WeightConverter(["w"], ["stack"], operations=[Transpose(0, 1)])
    shape = (stored[1], stored[0], stored[2])
    asked = StandIn(None, {"stack": torch.empty(shape, device="meta")})
    conversion = Conversion("stack", (("w", "w", source),), turn, asked)
    assert conversion.outline()["stack"].shape == shape
    assert not can_be_cut(TensorPlan("stack", torch.float32, shape, conversion, "stack", None))
