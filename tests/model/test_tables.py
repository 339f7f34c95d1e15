"""Embeddings stay in their files: the same losses, gradients and tokens as with tables in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel

import airtune
from airtune.model import tables
from airtune.model.skeleton import build_skeleton
from airtune.model.tables import Tables
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.file_map import FileMap
from airtune.weights.layout import plan_weights
from airtune.weights.lazy import LazyTensor
from tests import zoo
from tests.sim import Simulator
from tests.sparse import write_sparse
from tests.twins import gradients, lora, ragged_batch, relative_error, resident, streamed
from tests.weights.test_tables import resident_nbytes

EMBEDDINGS = {
    "llama": "model.embed_tokens",
    "llama_tied": "model.embed_tokens",
    "gemma4_text": "model.embed_tokens_per_layer",
    "qwen4_exp__vl": "model.language_model.embed_tokens",
    "doge_moe": "model.embed_tokens",
}
INSIDE = ["qwen4_exp__vl", "doge_moe"]  # these have tables in their layers
N_GRAMS = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.fixture(autouse=True)
def every_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST_NBYTES", 0)
    # Experts that are retrieved: two tables in each layer.
    monkeypatch.setitem(
        zoo.ZOO,  # type: ignore[arg-type]
        "doge_moe",
        zoo.Tiny(
            "DogeForCausalLM",
            "model.layers",
            {**zoo.BASE, "keep_window_size": 8, "is_moe": True, "num_experts": 64, "num_experts_per_tok": 4},
        ),
    )


def one_step(model: PeftModel) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    loss = model.train()(**ragged_batch(2, 16)).loss
    loss.backward()
    return loss.item(), {name: grad.cpu().clone() for name, grad in gradients(model).items()}


def on(device: str, name: str, folder: Path) -> PeftModel:
    return streamed(name, folder, device=device, poison=device != "cpu")


@pytest.mark.parametrize(
    ("name", "stored"),
    [*((name, torch.bfloat16) for name in EMBEDDINGS), *((name, torch.float32) for name in INSIDE)],
)
def test_same_as_in_memory(sim: Simulator, tmp_path: Path, name: str, stored: torch.dtype) -> None:
    folder = zoo.make(name, tmp_path, dtype=stored)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompt, twin = zoo.random_ids(2, 8), resident(name, folder)
    loss, wanted = one_step(twin)
    with torch.inference_mode():
        tokens = twin.eval().generate(prompt, **options)
    for device in ("cpu", "sim"):
        model = on(device, name, folder)
        weight = model.get_base_model().get_submodule(EMBEDDINGS[name]).weight
        assert isinstance(weight, LazyTensor) == (stored != torch.float32)
        got, grads = one_step(model)
        assert got == pytest.approx(loss, rel=1e-5 if device == "sim" else 1e-6)
        assert relative_error(grads, wanted) < (1e-4 if name == "qwen4_exp__vl" else 1e-5)  # see test_parity
        with torch.inference_mode():
            assert torch.equal(model.eval().generate(prompt, **options), tokens)


def test_a_table_is_no_part_of_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.make("qwen4_exp__vl", tmp_path)
    held = airtune.stream_of(streamed("qwen4_exp__vl", folder))._residency._images
    monkeypatch.setattr(tables, "LEAST_NBYTES", 2**20)
    whole = airtune.stream_of(streamed("qwen4_exp__vl", folder))._residency._images
    checkpoint = Checkpoint.open(folder)
    table = sum(stored.nbytes for name, stored in checkpoint.items() if "ngram_embedding" in name)
    less = [b.nbytes + b.mapped_nbytes - a.nbytes - a.mapped_nbytes for a, b in zip(held, whole, strict=True)]
    assert table > 0 and less == [0, table, 0, 0]


def test_only_in_visits(tmp_path: Path) -> None:
    model = streamed("qwen4_exp__vl", zoo.make("qwen4_exp__vl", tmp_path))
    embedding = model.get_base_model().get_submodule(N_GRAMS)
    assert isinstance(embedding, nn.Embedding) and embedding.weight.is_meta
    seen = []
    embedding.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.device, args[0].device))
    )
    one_step(model)
    assert seen == [(torch.device("cpu"), torch.device("cpu"))] * 2 and embedding.weight.is_meta


def test_one_that_writes_to_its_rows_is_refused(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path, dtype=torch.bfloat16)
    model = build_skeleton(
        folder,
        dtype=torch.float32,
        stored_dtype=torch.bfloat16,
        attn_implementation=None,
        trust_remote_code=False,
    )
    embedding = model.get_submodule("model.embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    embedding.max_norm = 1.0
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens scales its rows as it looks them up \(max_norm=1\.0\)"
    ):
        Tables(model, [], plan_weights(model, Checkpoint.open(folder)), FileMap())


def test_in_micro_batches(tmp_path: Path) -> None:
    folder = zoo.make("qwen4_exp__vl", tmp_path)
    whole, split = (streamed("qwen4_exp__vl", folder, micro_batch_size=size) for size in (None, 1))
    assert relative_error(one_step(split)[1], one_step(whole)[1]) < 1e-4  # see test_parity


@pytest.mark.parametrize("limit", [None, "1MB"])
def test_touched_pages_are_given_back_under_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    released = []
    monkeypatch.setattr(Tables, "release", lambda self: released.append(len(self.names())))
    one_step(streamed("llama", zoo.make("llama", tmp_path, dtype=torch.bfloat16), host_memory=limit))
    assert released == ([1] if limit else [])


def with_large_table(folder: Path, rows: int) -> Path:
    """The tiny model, with an n-gram table of so many rows for each of its eight heads, all zero."""
    zoo.make("qwen4_exp__vl", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["ngram_vocab_size_base"] = rows
    (folder / "config.json").write_text(json.dumps(settings))
    with init_empty_weights(include_buffers=False):
        model = zoo.model_class("qwen4_exp__vl")._from_config(AutoConfig.from_pretrained(folder))
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    owner, _, _ = N_GRAMS.rpartition(".")
    buffers = dict(model.get_submodule(owner).named_buffers())
    small = {name: tensor for name, tensor in tensors.items() if "ngram_embedding.shard" not in name}
    small |= {f"{owner}.{name}": b for name, b in buffers.items() if f"{owner}.{name}" in small}
    save_file(small, folder / "model-00001-of-00002.safetensors")
    count, width = model.get_submodule(N_GRAMS).weight.shape
    shards = {f"{N_GRAMS}.shard_{i}.weight": (torch.float32, (count // 4, width)) for i in range(4)}
    write_sparse(folder / "model-00002-of-00002.safetensors", shards)
    return folder


def test_a_model_with_a_table_of_20_gb(tmp_path: Path) -> None:
    folder = with_large_table(tmp_path, rows=80_000_000)
    assert Checkpoint.open(folder).nbytes > 20e9
    config = lora("qwen4_exp__vl")
    before, started = resident_nbytes(), time.perf_counter()
    model = airtune.load(folder, lora=config, device="cpu", file_access="mapped")
    assert isinstance(model, PeftModel)
    loss, grads = one_step(model)
    assert time.perf_counter() - started < 30 and resident_nbytes() - before < 200e6
    assert loss > 0 and all(grad.isfinite().all() for grad in grads.values())


def build_on_meta(folder: Path) -> PreTrainedModel:
    with init_empty_weights():
        return zoo.model_class("qwen4_exp__vl")._from_config(AutoConfig.from_pretrained(folder))
