"""Plans: every tensor of every model of the zoo as transformers makes it; what does not fit is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint, CheckpointError, StoredTensor
from airtune.weights.file_map import FileMap
from airtune.weights.image import load_tensor
from airtune.weights.layout import plan_weights
from airtune.weights.pieces import trace_pieces
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteReader
from tests import zoo

Stored = dict[str, StoredTensor]
FLOATS = [torch.float32, torch.bfloat16]


def skeleton(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_skeleton(
        folder, dtype=dtype, stored_dtype=dtype, attn_implementation=None, trust_remote_code=False
    )


def plans_of(name: str, folder: Path) -> dict[str, TensorPlan]:
    return plan_weights(skeleton(zoo.make(name, folder)), Checkpoint.open(folder))


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))
    )


def tiles(plan: TensorPlan) -> bool:
    """True when the pieces cover the tensor exactly once, and each lies inside its source."""
    pieces = sorted(plan.pieces or (), key=lambda piece: piece.into)
    inside = all(0 <= p.offset <= p.offset + p.nbytes <= p.source.nbytes for p in pieces)
    ends = [piece.into + piece.nbytes for piece in pieces]
    whole = math.prod(plan.shape) * plan.stored_dtype.itemsize
    return inside and [piece.into for piece in pieces] == [0, *ends[:-1]] and ends[-1] == whole


@pytest.mark.parametrize("stored_dtype", FLOATS, ids=["stored fp32", "stored bf16"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_tensor_is_what_transformers_loads(
    name: str, stored_dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(zoo.make(name, tmp_path, stored_dtype))
    with ByteReader(threads=1) as reader:
        for dtype in FLOATS:
            model, files = skeleton(tmp_path, dtype), FileMap()
            plans = plan_weights(model, checkpoint)
            wanted = zoo.model_class(name).from_pretrained(tmp_path, dtype=dtype).state_dict()
            assert plans.keys() == wanted.keys()
            different = [
                key
                for key, want in wanted.items()
                if not same_bits(load_tensor(plans[key], reader, files), want)
            ]
            assert different == []
            assert all(tiles(plan) for plan in plans.values() if plan.pieces is not None)


def test_planning_reads_headers_only(tmp_path: Path) -> None:
    checkpoint, model = Checkpoint.open(zoo.make("mixtral", tmp_path)), skeleton(tmp_path)
    for file in checkpoint.files:
        file.unlink()
    assert len(plan_weights(model, checkpoint)) == len(model.state_dict())


# Where bytes land


def test_stacked_and_concatenated_experts_are_reads_into_place(tmp_path: Path) -> None:
    plans = plans_of("mixtral", tmp_path)
    experts, width, hidden = 8, 128, 64
    gate_up = plans["model.layers.2.mlp.experts.gate_up_proj"]
    down = plans["model.layers.2.mlp.experts.down_proj"]
    assert gate_up.lands and gate_up.pieces is not None and gate_up.shape == (experts, 2 * width, hidden)
    assert down.lands and down.pieces is not None and down.shape == (experts, hidden, width)
    assert {piece.nbytes for piece in (*gate_up.pieces, *down.pieces)} == {width * hidden * 4}
    key_of = {stored: key for key, _, stored in (*gate_up.conversion.sources, *down.conversion.sources)}
    prefix = "model.layers.2.block_sparse_moe.experts"
    in_order = sorted(gate_up.pieces, key=lambda piece: piece.into)
    assert [key_of[piece.source] for piece in in_order] == [
        f"{prefix}.{expert}.{which}.weight" for expert in range(experts) for which in ("w1", "w3")
    ]
    in_order = sorted(down.pieces, key=lambda piece: piece.into)
    assert [key_of[piece.source] for piece in in_order] == [f"{prefix}.{e}.w2.weight" for e in range(experts)]


def test_twelve_experts_are_stacked_by_number(tmp_path: Path) -> None:
    """As text, 10 comes before 2."""
    settings: dict[str, Any] = {**zoo.ZOO["mixtral"].config, "num_local_experts": 12, "num_hidden_layers": 1}
    config = MixtralConfig(**settings)
    made = MixtralForCausalLM._from_config(config, dtype=torch.float32)
    made.save_pretrained(tmp_path)
    model, files = skeleton(tmp_path), FileMap()
    plans = plan_weights(model, Checkpoint.open(tmp_path))
    with ByteReader(threads=1) as reader:
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.0.mlp.experts.{name}"
            assert torch.equal(load_tensor(plans[key], reader, files), made.state_dict()[key])


def test_what_cannot_be_moved_keeps_the_converter(tmp_path: Path) -> None:
    plans = plans_of("kimi_k25", tmp_path)
    converted = {name: plan for name, plan in plans.items() if plan.pieces is None}
    assert converted and all("vision_tower" in name for name in converted)
    assert not any(plan.lands for plan in converted.values())
    one_to_many = [plan.conversion.target for plan in converted.values()]
    assert len(set(one_to_many)) < len(one_to_many), "q, k and v come from one stored tensor"


# The traced pieces against the converter itself


def make_stored(name: str, shape: tuple[int, ...], index: int) -> StoredTensor:
    nbytes = math.prod(shape) * 4
    return StoredTensor(Path(name), index * nbytes, nbytes, torch.float32, shape)


def conversion(target: str, converter: WeightConverter, sources: dict[str, list[StoredTensor]]) -> Conversion:
    flat = [(str(s.file), pattern, s) for pattern, group in sources.items() for s in group]
    return Conversion(target, tuple(flat), converter)


def converter_of(patterns: list[str], targets: list[str], *operations: ConversionOps) -> WeightConverter:
    return WeightConverter(patterns, targets, operations=list(operations))


MANY, ONE = ["experts.*.gate", "experts.*.up"], ["fused"]
SHAPES: dict[str, tuple[Callable[[], WeightConverter], int, tuple[int, ...], bool]] = {
    "stack": (lambda: converter_of(MANY[:1], ONE, MergeModulelist(dim=0)), 5, (3, 2), True),
    "stack one": (lambda: converter_of(MANY[:1], ONE, MergeModulelist(dim=0)), 1, (3, 2), True),
    "stack, then join": (
        lambda: converter_of(MANY, ONE, MergeModulelist(dim=0), Concatenate(dim=1)), 5, (3, 2), True),
    "stack, then join outermost": (
        lambda: converter_of(MANY, ONE, MergeModulelist(dim=0), Concatenate(dim=0)), 5, (3, 2), True),
    "stack, then join innermost": (
        lambda: converter_of(MANY, ONE, MergeModulelist(dim=0), Concatenate(dim=-1)), 5, (3, 2), True),
    "stack, then join long rows innermost": (
        lambda: converter_of(MANY, ONE, MergeModulelist(dim=0), Concatenate(dim=2)), 2, (40, 2), False),
    "join": (lambda: converter_of(["q", "k"], ONE, Concatenate(dim=0)), 1, (3, 2), True),
    "join vectors": (lambda: converter_of(["q", "k"], ONE, Concatenate(dim=0)), 1, (3,), True),
    "chunk": (lambda: converter_of(["qkv"], ["q", "k", "v"], Chunk(dim=0)), 1, (6, 2), True),
    "chunk vectors": (lambda: converter_of(["qkv"], ["q", "k", "v"], Chunk(dim=0)), 1, (6,), True),
    "chunk columns": (lambda: converter_of(["qkv"], ["q", "k", "v"], Chunk(dim=1)), 1, (2, 6), False),
    "transpose": (lambda: converter_of(["w"], ONE, Transpose(0, 1)), 1, (2, 6), False),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_pieces_are_what_the_converter_makes(case: str) -> None:
    make_converter, count, shape, moves_bytes = SHAPES[case]
    converter = make_converter()
    sources = {
        pattern: [make_stored(pattern.replace("*", str(i)), shape, i) for i in range(count)]
        for pattern in converter.source_patterns
    }
    made = conversion(converter.target_patterns[0], converter, sources)
    tensors = {key: torch.randn(shape) for key, _, _ in made.sources}
    wanted = made.convert(tensors)
    traced = trace_pieces(made.target, [(p, s) for _, p, s in made.sources], made.converter, None)
    assert (traced.keys() == wanted.keys()) if moves_bytes else traced == {}
    for name, pieces in traced.items():
        moved = torch.full((wanted[name].numel(),), torch.nan)
        for piece in pieces:
            part = tensors[str(piece.source.file)].reshape(-1).view(torch.uint8)
            moved.view(torch.uint8)[piece.into : piece.into + piece.nbytes] = part[
                piece.offset : piece.offset + piece.nbytes
            ]
        assert torch.equal(moved.view(wanted[name].shape), wanted[name])


def test_converting_shares_the_operations() -> None:
    """They may hold a quantizer and its config: too much to copy for each expert that is decoded."""

    class Operation(Transpose):
        def __deepcopy__(self, memo: object) -> Operation:
            raise AssertionError("copied")

    made = conversion(
        "fused", converter_of(["w"], ONE, Operation(0, 1)), {"w": [make_stored("w", (2, 3), 0)]}
    )
    tensor = torch.randn(2, 3)
    assert all(torch.equal(made.convert({"w": tensor})["fused"], tensor.T) for _ in range(2))


def test_converting_twice_leaves_no_trace(tmp_path: Path) -> None:
    plan = next(plan for plan in plans_of("kimi_k25", tmp_path).values() if plan.pieces is None)
    files = FileMap()
    tensors = {key: files.tensor(stored) for key, _, stored in plan.conversion.sources}
    first, second = (plan.conversion.convert(tensors) for _ in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# Ties and buffers


def test_a_tied_head_has_the_sources_of_the_table(tmp_path: Path) -> None:
    plans = plans_of("llama_tied", tmp_path)
    head, table = plans["lm_head.weight"], plans["model.embed_tokens.weight"]
    assert (head.conversion, head.pieces) == (table.conversion, table.pieces)


def test_layers_that_share_weights_share_sources(tmp_path: Path) -> None:
    plans = plans_of("zamba", tmp_path)
    first = {n: p for n, p in plans.items() if n.startswith("model.layers.1.shared_transf.")}
    assert first
    for name, plan in first.items():
        assert plans[name.replace("layers.1.", "layers.3.")].conversion == plan.conversion


def test_persistent_buffers_are_planned_and_others_are_not(tmp_path: Path) -> None:
    plans = plans_of("deepseek_v3", tmp_path)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in plans
    assert not any("inv_freq" in name for name in plans)


def test_tensors_that_a_model_keeps_in_float32(tmp_path: Path) -> None:
    folder = zoo.make("deepseek_v3", tmp_path, torch.bfloat16)
    plans = plan_weights(skeleton(folder, torch.bfloat16), Checkpoint.open(folder))
    kept = {name for name, plan in plans.items() if plan.dtype == torch.float32}
    assert kept and all(plans[name].stored_dtype == torch.bfloat16 for name in kept)
    assert not any(plans[name].lands for name in kept)


# Checkpoints that do not fit


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Stored]:
    folder = zoo.make("mixtral", tmp_path_factory.mktemp("mixtral"))
    return skeleton(folder), dict(Checkpoint.open(folder))


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3"


def without(stored: Stored, *parts: str) -> Stored:
    left = {key: tensor for key, tensor in stored.items() if not any(part in key for part in parts)}
    assert len(left) < len(stored)
    return left


def test_a_missing_tensor_is_named(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    with pytest.raises(
        CheckpointError, match=f"does not fit MixtralForCausalLM: .*without a source.*: {Q_PROJ}. Check"
    ):
        plan_weights(model, without(stored, Q_PROJ))


def test_an_untied_head_that_is_missing_is_named(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    with pytest.raises(CheckpointError, match=r"without a source in the checkpoint: lm_head\.weight\. Check"):
        plan_weights(model, without(stored, "lm_head"))


@pytest.mark.parametrize("name", ["model.layers.1.extra", "model.layers.9.self_attn.q_proj.weight"])
def test_an_extra_tensor_is_named(mixtral: tuple[PreTrainedModel, Stored], name: str) -> None:
    model, stored = mixtral
    with pytest.raises(CheckpointError, match=f"no place for: {name}. Check"):
        plan_weights(model, {**stored, name: stored["model.norm.weight"]})


def test_extra_tensors_are_called_what_the_checkpoint_calls_them(
    mixtral: tuple[PreTrainedModel, Stored],
) -> None:
    model, stored = mixtral
    extra = {k.replace("layers.1.", "layers.9."): s for k, s in stored.items() if EXPERT in k}
    with pytest.raises(CheckpointError) as caught:
        plan_weights(model, {**stored, **extra})
    assert f"no place for: {', '.join(sorted(extra))}. Check" in str(caught.value)


def test_an_extra_tensor_on_the_models_ignore_list_is_fine(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(zoo.make("qwen3_5__vl", tmp_path))
    extra: Any = {**checkpoint, "mtp.norm.weight": next(iter(checkpoint.values()))}
    plans = plan_weights(skeleton(tmp_path), extra)
    assert not any("mtp" in name for name in plans)


def test_a_wrong_shape_is_named_with_both_shapes(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    wrong = {**stored, Q_PROJ: dataclasses.replace(stored[Q_PROJ], shape=(32, 128))}
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}: \(32, 128\) in the checkpoint, \(64, 64\) in the"):
        plan_weights(model, wrong)


@pytest.mark.parametrize("missing", [(f"{EXPERT}.w2",), (f"{EXPERT}.w1", f"{EXPERT}.w3"), (f"{EXPERT}.",)])
def test_a_layer_that_lacks_an_expert_is_named(
    mixtral: tuple[PreTrainedModel, Stored], missing: tuple[str, ...]
) -> None:
    model, stored = mixtral
    with pytest.raises(CheckpointError, match=rf"missing .*{missing[0].rstrip('.')}"):
        plan_weights(model, without(stored, *missing))


def test_one_part_of_an_expert_missing_is_named(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    with pytest.raises(CheckpointError, match=r"missing .*experts\.3\.w1"):
        plan_weights(model, without(stored, f"{EXPERT}.w1"))


def test_numbers_with_a_gap_are_not_closed_up(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    """Experts 0-2 and 4-8 are eight: the shape fits, and every expert from 3 on would be another one."""
    model, stored = mixtral
    moved = {k.replace("experts.3.", "experts.8.") if "layers.1." in k else k: v for k, v in stored.items()}
    with pytest.raises(CheckpointError, match=r"missing .*experts\.3"):
        plan_weights(model, moved)


def test_all_of_one_part_missing_is_an_error(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    kept = {k: v for k, v in stored.items() if not ("layers.1." in k and ".w3." in k)}
    with pytest.raises(CheckpointError, match=r"layers\.1.*cannot be made of"):
        plan_weights(model, kept)


def test_two_tensors_for_one_place_are_an_error(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, stored = mixtral
    twice = {**stored, Q_PROJ.removeprefix("model."): stored[Q_PROJ]}
    with pytest.raises(CheckpointError, match="more than one tensor for"):
        plan_weights(model, twice)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_stack_beside_the_experts_that_make_it_is_an_error(
    mixtral: tuple[PreTrainedModel, Stored], name: str
) -> None:
    """A converter has no use for it, and would leave it out without a word."""
    model, stored = mixtral
    stack = f"model.layers.1.mlp.experts.{name}"
    with pytest.raises(CheckpointError, match=f"more than one tensor for {stack}: {stack}, .*and .* more"):
        plan_weights(model, {**stored, stack: stored[Q_PROJ]})


def test_an_empty_checkpoint_names_a_few_and_counts_the_rest(mixtral: tuple[PreTrainedModel, Stored]) -> None:
    model, _ = mixtral
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, .* and 31 more"):
        plan_weights(model, {})


def test_sources_of_two_dtypes_are_cast_before_they_are_joined(tmp_path: Path) -> None:
    """One expert stored in bf16 among fp32 ones: bytes cannot be moved, values can."""
    checkpoint, model = Checkpoint.open(zoo.make("mixtral", tmp_path / "fp32")), skeleton(tmp_path / "fp32")
    other = Checkpoint.open(zoo.make("mixtral", tmp_path / "bf16", torch.bfloat16))
    key = f"{EXPERT}.w1.weight"
    mixed: Any = {**checkpoint, key: other[key]}
    plan = plan_weights(model, mixed)["model.layers.1.mlp.experts.gate_up_proj"]
    plain = plan_weights(model, checkpoint)["model.layers.1.mlp.experts.gate_up_proj"]
    assert plan.pieces is None and plain.pieces is not None
    files = FileMap()
    with ByteReader(threads=1) as reader:
        got, want = (load_tensor(p, reader, files) for p in (plan, plain))
    rounded = want.clone()
    rounded[3, :128] = want[3, :128].bfloat16().float()
    assert torch.equal(got, rounded) and not torch.equal(got, want)
