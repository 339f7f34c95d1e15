"""Packed copies: what is packed in them, and that training on one is training on what it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import BitsAndBytesConfig, Llama4ForCausalLM, Llama4TextConfig
from transformers.core_model_loading import Chunk, WeightConverter

import airtune
from airtune.model.quantising import _can_be_read_back, quantise
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.header import StoredTensor
from airtune.weights.plans import Conversion, TensorPlan
from tests import twins, zoo
from tests.sim import Simulator
from tests.unpacked import unpack

SCHEMES = ["nf4", "int8"]
# Plain; Conv1D; keys under other names; ties between layers and float32; each expert's matrices in the file;
# experts stacked in the file, with biases; several parameters of one stored tensor; a table inside a layer.
NAMES = ["llama", "gpt2", "dory", "zamba", "mixtral", "gpt_oss", "kimi_k25", "qwen4_exp__vl"]


def store_of(name: str, scheme: str, folder: Path, **options: Any) -> Path:
    source = zoo.make(name, folder / "source", dtype=torch.float32)
    quantise(source, scheme=scheme, output_dir=folder / "packed", **options)
    return folder / "packed"


def packed_keys(store: Path) -> set[str]:
    keys = set(Checkpoint.open(store))
    by_4bit = {key.removesuffix(".absmax") for key in keys if key.endswith(".absmax")}
    by_8bit = {f"{key.removesuffix('SCB')}weight" for key in keys if key.endswith(".SCB")}
    return by_4bit | by_8bit | {key.removesuffix("_absmax") for key in keys if key.endswith("_absmax")}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.eval()  # no dropout: the weights are what this is about
    model(**twins.ragged_batch()).loss.backward()
    return {name: gradient.cpu() for name, gradient in twins.gradients(model).items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, scheme: str, sim: Simulator, tmp_path: Path) -> None:
    store = store_of(name, scheme, tmp_path)
    dense = unpack(store, tmp_path / "dense", turned=name == "gpt2")
    got, want = twins.streamed(name, store, micro_batch_size=2), twins.resident(name, dense)
    ids = zoo.random_ids()
    with torch.no_grad():
        torch.testing.assert_close(got.eval()(ids).logits, want.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    wanted = gradients(want)
    assert twins.relative_error(gradients(got), wanted) < 1e-5
    if name in ("gpt2", "mixtral", "gpt_oss"):
        on_sim = twins.streamed(name, store, device="sim", poison=True)
        assert twins.relative_error(gradients(on_sim), wanted) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gemma2", "qwen3_5__vl", "mamba2"])
def test_the_library_loads_it(name: str, scheme: str, tmp_path: Path) -> None:
    """Its own modules, dequantised by its own function, are bit for bit what is streamed."""
    store, ids = store_of(name, scheme, tmp_path), zoo.random_ids()
    library = zoo.model_class(name).from_pretrained(store)
    library = library.dequantize(torch.float32).eval()  # type: ignore[operator]
    with torch.no_grad():
        assert torch.equal(airtune.load(store, device="cpu")(ids).logits, library(ids).logits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_what_the_library_packs(scheme: str, tmp_path: Path) -> None:
    """All keys, all bytes: as when transformers packs the model while it loads it, and saves it."""
    store = store_of("llama", scheme, tmp_path)
    settings = json.loads((store / "config.json").read_text())["quantization_config"]
    model = zoo.model_class("llama").from_pretrained(
        tmp_path / "source", quantization_config=BitsAndBytesConfig.from_dict({**settings})
    )
    model.save_pretrained(tmp_path / "library")
    theirs, ours = Checkpoint.open(tmp_path / "library"), Checkpoint.open(store)
    assert set(ours) == set(theirs)
    for key in theirs:
        assert torch.equal(tensor_of(ours, key), tensor_of(theirs, key)), key


def tensor_of(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    with safe_open(checkpoint[key].file, "pt") as file:
        return cast(torch.Tensor, file.get_tensor(key))


def test_what_is_packed(tmp_path: Path) -> None:
    packed = packed_keys(store_of("qwen4_exp__vl", "int8", tmp_path))
    kinds = {key.split(".layers.")[1].partition(".")[2] for key in packed if ".experts." not in key}
    experts = {key for key in packed if ".experts." in key}
    assert all(key.startswith("model.language_model.layers.") for key in packed)
    assert len(experts) == 4 * 8 * 3
    assert {kind.removesuffix(".weight") for kind in kinds} == {
        *(
            f"linear_attn.{part}"
            for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
        ),
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        "self_attn.indexer.index_qk_proj",
        *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
        *(
            f"{block}_hyper_connection.input_mix_weight_{way}"
            for block in ("attn", "mlp")
            for way in ("up", "down")
        ),
        "ple.key_proj",
        "ple.value_proj",
    }


def test_what_stays(tmp_path: Path) -> None:
    """As it is in the source, to the bit: tables, head, norms, routers, vectors."""
    store = store_of("gpt_oss", "nf4", tmp_path)
    source, written = Checkpoint.open(tmp_path / "source"), Checkpoint.open(store)
    stays = set(source) - packed_keys(store)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < stays
    for part in (
        "mlp.router.weight",
        "mlp.experts.down_proj_bias",
        "self_attn.sinks",
        "self_attn.q_proj.bias",
    ):
        assert f"model.layers.0.{part}" in stays
    assert "model.layers.0.mlp.experts.down_proj" not in stays
    for key in stays:
        assert torch.equal(tensor_of(written, key), tensor_of(source, key)), key


def test_a_linear_layer_beside_experts_that_routes_stays(tmp_path: Path) -> None:
    packed = packed_keys(store_of("qwen4_exp__vl", "int8", tmp_path))
    assert not any("shared_expert_gate" in key or "mlp.gate." in key for key in packed)


@pytest.mark.parametrize(
    ("keys", "targets", "packed"),
    [
        ({"a.w.weight": (64, 64)}, None, True),
        ({"a.proj": (64, 64)}, None, False),  # its parts would go by another name than the parameter
        ({"a.0.weight": (64, 64), "a.1.weight": (64, 64)}, ["a.w.weight"], True),
        ({"a.fused.weight": (64, 64)}, ["a.w.weight", "a.v.weight"], False),
        ({"a.stack.weight": (4, 64, 64)}, ["a.w.weight"], True),
        ({"a.stack.proj": (4, 64, 64)}, ["a.w.weight"], False),
    ],
    ids=str,
)
def test_what_could_not_be_read_back_stays(
    keys: dict[str, tuple[int, ...]], targets: list[str] | None, packed: bool
) -> None:
    sources = [(k, k, StoredTensor(Path("f"), 0, 0, torch.float16, shape)) for k, shape in keys.items()]
    converter = targets and WeightConverter(["x"], targets, operations=[Chunk(0)])
    made = Conversion("a.w.weight", tuple(sources), converter or None)
    plan = TensorPlan("a.w.weight", torch.float16, (64, 64), made, "a.w.weight", None)
    assert _can_be_read_back(plan) == packed


def test_the_numbers_that_are_reported(tmp_path: Path) -> None:
    source = zoo.make("mixtral", tmp_path / "source", dtype=torch.bfloat16)
    done = quantise(source, scheme="nf4", output_dir=tmp_path / "packed")
    files = list((tmp_path / "packed").glob("*.safetensors"))
    assert done.nbytes == sum(file.stat().st_size for file in files)
    assert done.source_nbytes == Checkpoint.open(source).nbytes
    layer = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 8 * 3 * 64 * 128) * 2
    assert done.share == layer / done.source_nbytes


def test_a_packed_source_is_refused(tmp_path: Path) -> None:
    store = store_of("llama", "nf4", tmp_path)
    with pytest.raises(ValueError, match="its weights are packed already"):
        quantise(store, scheme="int8", output_dir=tmp_path / "twice")


def test_a_copy_that_would_get_other_modules_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """For these experts, which all compute at once, transformers puts a list when they are packed."""
    config = Llama4TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
    )
    Llama4ForCausalLM(config).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="other modules when its weights are packed"):
        quantise(tmp_path / "source", scheme="nf4", output_dir=tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_what_the_library_is_told_to_skip(tmp_path: Path) -> None:
    """The outermost modules: a tower goes by its own name, not by those of its layers."""
    store = store_of("kimi_linear", "int8", tmp_path / "a")
    settings = json.loads((store / "config.json").read_text())["quantization_config"]
    gates = [f"model.layers.{layer}.self_attn.b_proj" for layer in range(3)]
    assert settings["llm_int8_skip_modules"] == [*gates, "lm_head"]
    store = store_of("qwen3_5__vl", "nf4", tmp_path / "b")
    settings = json.loads((store / "config.json").read_text())["quantization_config"]
    assert settings["llm_int8_skip_modules"] == ["model.visual", "lm_head"]


def test_the_dtype_is_told_where_nothing_else_does(tmp_path: Path) -> None:
    """The scales are float32: by them a model of bfloat16 would compute in float32."""
    source = zoo.make("llama", tmp_path / "source", dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    quantise(source, scheme="nf4", output_dir=tmp_path / "packed")
    assert airtune.load(tmp_path / "packed", device="cpu").dtype == torch.bfloat16


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Install airtune\[quantized\]"):
        quantise(tmp_path, scheme="nf4", output_dir=tmp_path / "packed")
