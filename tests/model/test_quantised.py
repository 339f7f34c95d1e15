"""Packed weights against the library's own dequantised model: logits and every gradient, for every scheme."""

from __future__ import annotations

import gc
import json
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch import nn

import airtune
from airtune.weights.checkpoint import Checkpoint, CheckpointError
from airtune.weights.lazy import LazyTensor
from tests import packed, zoo
from tests.sim import Simulator
from tests.twins import adapter, gradients, ragged_batch, relative_error, streamed

# transformers says that a config given to `from_pretrained` meets the one in config.json.
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


def steps(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of a few AdamW steps."""
    optimizer = torch.optim.AdamW(adapter(model).values(), lr=1e-3)
    model.train()
    seen = []
    for _ in range(count):
        model(**ragged_batch()).loss.backward()
        seen.append({name: grad.cpu().clone() for name, grad in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


ON_SIM = ["fp8", "fp8 experts", "mxfp4 experts", "int4 asymmetric", "mxfp4 apart", "fp8 and int4 experts"]


@pytest.mark.parametrize("scheme", packed.PACKED)
def test_logits_and_gradients(scheme: str, sim: Simulator, tmp_path: Path) -> None:
    folder, ids = packed.make(scheme, tmp_path), zoo.random_ids(2, 12)
    twin = packed.resident(scheme, folder)
    with torch.no_grad():
        logits = twin.eval()(ids).logits
    want = steps(twin, 2)
    model = packed.streamed(scheme, folder)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, logits, rtol=1e-5, atol=1e-5)
    assert relative_error(steps(model, 1)[0], want[0]) < 1e-5
    options: dict[str, Any] = {"device": "sim"} if scheme in ON_SIM else {}
    model = packed.streamed(scheme, folder, poison=True, micro_batch_size=3, **options)
    for mine, theirs in zip(steps(model, 2), want, strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4 experts", "int4 experts"])
def test_generates_the_same_tokens(scheme: str, tmp_path: Path) -> None:
    folder, prompt = packed.make(scheme, tmp_path), zoo.random_ids(2, 8)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    got, want = packed.streamed(scheme, folder).eval(), packed.resident(scheme, folder).eval()
    assert torch.equal(got.generate(input_ids=prompt, **options), want.generate(input_ids=prompt, **options))


def test_bf16_weights_are_the_librarys(tmp_path: Path) -> None:
    """They are decoded to the compute dtype, not by way of another one."""
    folder = packed.make("fp8", tmp_path, torch.bfloat16)
    got = packed.streamed("fp8", folder, torch.bfloat16).eval()
    want = packed.resident("fp8", folder, torch.bfloat16).eval()
    ids = zoo.random_ids(1, 8)
    with torch.no_grad():
        torch.testing.assert_close(got(ids).logits, want(ids).logits, rtol=2e-2, atol=2e-2)
        layer = cast(Any, got.get_base_model()).model.layers[0]
        with airtune.stream_of(got)._residency.visit(0, "forward"):
            weight = layer.self_attn.o_proj.weight
            assert weight.dtype == torch.bfloat16 and isinstance(weight, LazyTensor)


# Only packed bytes travel, and only they are kept


def layers_nbytes(folder: Path) -> int:
    return sum(stored.nbytes for key, stored in Checkpoint.open(folder).items() if ".layers." in key)


def read_in_a_step(model: PeftModel) -> int:
    model.train()(**ragged_batch()).loss.backward()
    return int(airtune.stream_of(model).counters()["bytes_read"])


def unread_nbytes(folder: Path) -> int:
    """Shapes, and scales of activations."""
    unread = ("weight_shape", "input_scale")
    return sum(stored.nbytes for key, stored in Checkpoint.open(folder).items() if key.endswith(unread))


@pytest.mark.parametrize("options", [{}, {"poison": True}, {"device": "sim"}], ids=["mapped", "read", "sim"])
def test_a_step_reads_packed_bytes(options: dict[str, Any], sim: Simulator, tmp_path: Path) -> None:
    """The same layers as without packing, and of these what is packed."""
    plain = zoo.make("llama", tmp_path / "plain")
    dense = read_in_a_step(streamed("llama", plain, **options))
    layers = Fraction(dense, layers_nbytes(plain))
    assert layers >= 1
    for scheme in ("fp8", "int4", "mxfp4"):
        folder = packed.make(scheme, tmp_path / scheme)
        stored = layers_nbytes(folder) - unread_nbytes(folder)
        assert stored < layers_nbytes(plain) / 3
        model = packed.streamed(scheme, folder, **options)
        assert Fraction(read_in_a_step(model), stored) == layers
        copied = airtune.stream_of(model).counters()["bytes_copied"]
        assert copied == 0 or stored <= copied / layers < 1.1 * stored, (
            "tensors begin at multiples of 64 bytes"
        )


def test_packed_bytes_are_what_is_kept_in_host_memory(sim: Simulator, tmp_path: Path) -> None:
    folder = packed.make("fp8", tmp_path)
    model = packed.streamed("fp8", folder, device="sim", host_memory="300kB")
    model.train()(**ragged_batch()).loss.backward()
    before = airtune.stream_of(model).counters()["bytes_read"]
    model(**ragged_batch()).loss.backward()
    assert airtune.stream_of(model).counters()["bytes_read"] == before
    assert layers_nbytes(folder) < 300_000 < layers_nbytes(zoo.make("llama", tmp_path / "dense"))


def test_few_decoded_weights_at_a_time(sim: Simulator, tmp_path: Path) -> None:
    """What packing saves of two layers is saved, but for one weight and its decoding."""

    def peak(model: PeftModel) -> int:
        stream = airtune.stream_of(model)
        stream.places.hold(2)
        model.train()(**ragged_batch(1, 4)).loss.backward()
        gc.collect()
        sim.reset_peak()
        model(**ragged_batch(1, 4)).loss.backward()
        stream.close()
        return sim.peak() - start

    plain, folder = zoo.make("llama", tmp_path / "plain"), packed.make("int4", tmp_path / "packed")
    gc.collect()
    start = sim.now()
    dense = peak(streamed("llama", plain, device="sim"))
    saved = 2 * (layers_nbytes(plain) - layers_nbytes(folder)) // 4
    largest = 128 * 64 * 4
    gc.collect()
    start = sim.now()
    assert peak(packed.streamed("int4", folder, device="sim")) < dense - saved + 4 * largest


# What stays in memory may be packed too, and what is asked for must be there


def test_a_packed_head_and_embedding(tmp_path: Path) -> None:
    scheme = packed.PACKED["int4"]
    folder = zoo.make("llama", tmp_path, shard_size="1GB")

    def change(tensors: packed.Tensors) -> packed.Tensors:
        made: packed.Tensors = {}
        for key, tensor in tensors.items():
            made |= scheme.pack(key, tensor) if tensor.dim() == 2 else {key: tensor}
        return made

    packed.edit(folder, change)
    packed.describe(folder, {**scheme.settings, "ignore": []})
    got, want = packed.streamed("int4", folder), packed.resident("int4", folder)
    assert relative_error(steps(got, 1)[0], steps(want, 1)[0]) < 1e-5


def test_nothing_is_decompressed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.compressors import ModelCompressor

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the whole model was to be decompressed")

    monkeypatch.setattr(ModelCompressor, "decompress_model", never)
    monkeypatch.setattr(ModelCompressor, "compress_model", never)
    model = packed.streamed("int4", packed.make("int4", tmp_path))
    steps(model, 1)
    assert not any(hasattr(module, "quantization_scheme") for module in model.modules())


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4 experts", "int4"])
def test_a_deleted_scale_is_refused_by_key(scheme: str, tmp_path: Path) -> None:
    folder = packed.make(scheme, tmp_path)
    gone = next(key for key in Checkpoint.open(folder) if "scale" in key and "layers.2" in key)
    packed.edit(folder, lambda tensors: {key: t for key, t in tensors.items() if key != gone})
    with pytest.raises(CheckpointError, match=f"missing {gone}"):
        airtune.load(folder, device="cpu")


def test_an_unknown_scheme_is_refused_by_name(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    for settings, name in (
        ({"quant_method": "vptq"}, "vptq"),
        (
            {**packed.PACKED["int4"].settings, "format": "marlin-24"},
            "compressed-tensors with format marlin-24",
        ),
    ):
        packed.describe(folder, settings)
        with pytest.raises(CheckpointError, match=name):
            airtune.load(folder, device="cpu")


def test_the_dtype_of_a_config_that_names_none(tmp_path: Path) -> None:
    """Most bytes are fp8, in which nothing computes."""
    folder = packed.make("fp8", tmp_path, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    model = airtune.load(folder, device="cpu")
    assert model.dtype == torch.bfloat16
