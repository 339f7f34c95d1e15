"""Experts that travel one by one: the same numbers, only what the router chose, and few at a time."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

import airtune
from airtune.model import assembly
from tests import zoo
from tests.sim import Simulator
from tests.twins import gradients, lora, ragged_batch, relative_error, resident, streamed

EXPERTS = ["mixtral", "qwen3_moe_mixed", "deepseek_v3", "gpt_oss", "kimi_linear", "qwen4_exp__vl"]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest window: one expert computes and one is on its way."""
    monkeypatch.setattr(assembly, "WINDOW_NBYTES", 1)


def expert_nbytes(model: PeftModel) -> int:
    window = airtune.stream_of(model)._window
    assert window is not None
    return window.expert_nbytes


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", EXPERTS)
def test_gradients(sim: Simulator, tmp_path: Path, name: str) -> None:
    folder, batch = zoo.make(name, tmp_path, dtype=torch.bfloat16), ragged_batch(3, 10)

    def step(model: PeftModel) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model.train()(**batch).loss.backward()
        return {name: gradient.cpu() for name, gradient in gradients(model).items()}

    want = step(resident(name, folder))
    for device, micro_batch_size in (("cpu", None), ("cpu", 1), ("sim", 1)):
        model = streamed(name, folder, device=device, micro_batch_size=micro_batch_size, poison=True)
        for _ in range(2):
            assert relative_error(step(model), want) < 3e-5, (device, micro_batch_size)


def read_bytes(model: PeftModel, ids: torch.Tensor) -> float:
    stream = airtune.stream_of(model)
    before = stream.counters()["bytes_read"]
    with torch.no_grad():
        model(input_ids=ids)
    return stream.counters()["bytes_read"] - before


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "gpt_oss"])
def test_only_the_experts_that_the_router_chose_are_read(tmp_path: Path, name: str) -> None:
    """One token, two of eight experts: in each layer with experts, two are read."""
    folder = zoo.make(name, tmp_path)
    model = streamed(name, folder, file_access="buffered").eval()
    stream = airtune.stream_of(model)
    window = stream._window
    assert window is not None
    window.places = 2
    ids = zoo.random_ids(1, 1)
    read_bytes(model, ids)
    loads = stream.counters()["expert_loads"]
    read_bytes(model, zoo.random_ids(1, 1, seed=1))
    layers = len({group.layer for group in window._groups})
    assert 0 < stream.counters()["expert_loads"] - loads <= 2 * layers


@pytest.mark.usefixtures("narrow")
def test_micro_batches_share_what_fits_on_the_host(sim: Simulator, tmp_path: Path) -> None:
    """Each expert is read once as far as host memory holds it, and copied as often as needed."""
    folder, batch = zoo.make("mixtral", tmp_path), ragged_batch(4, 8)
    counted = {}
    for memory in (None, "1GB"):
        config = lora("mixtral")
        model = airtune.load(
            folder, lora=config, device="sim", micro_batch_size=1, host_memory=memory
        ).train()
        stream = airtune.stream_of(model)
        model(**batch).loss.backward()
        before = stream.counters()
        model(**batch).loss.backward()
        after = stream.counters()
        counted[memory] = after["bytes_read"] - before["bytes_read"]
        assert after["bytes_copied"] > before["bytes_copied"]
        stream.close()
    assert counted["1GB"] == 0
    assert counted[None] > 0


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("host_memory", [None, "asked"])
def test_host_memory_for_one_layers_experts_reads_each_once_a_visit(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_memory: str | None
) -> None:
    """Forward, recompute and backward of four micro-batches ask twelve times; two visits read them.

    What is free is taken for that when nobody says otherwise, but not more than half of it.
    """
    folder, batch = zoo.make("mixtral", tmp_path), ragged_batch(4, 64)
    config = lora("mixtral")
    probe = airtune.load(folder, device="sim")
    window = airtune.stream_of(probe)._window
    assert window is not None
    one_layer_nbytes = window.layer_nbytes
    airtune.stream_of(probe).close()

    def step_nbytes() -> tuple[float, float]:
        options = {"device": "sim", "micro_batch_size": 1, "host_memory": host_memory and one_layer_nbytes}
        model = airtune.load(folder, lora=config, **options).train()
        stream = airtune.stream_of(model)
        model(**batch).loss.backward()  # the first step: afterwards the device has room for all of them
        counters = stream.counters()
        stream.close()
        return counters["bytes_read"] - 2 * 4 * stream._residency.layer_nbytes, counters["bytes_copied"]

    experts_nbytes = 4 * one_layer_nbytes
    monkeypatch.setattr(assembly, "available_memory_nbytes", lambda: 2 * one_layer_nbytes)
    read, copied = step_nbytes()
    assert read <= 2 * experts_nbytes
    assert copied > 8 * experts_nbytes
    if host_memory is None:
        monkeypatch.setattr(assembly, "available_memory_nbytes", lambda: 2 * one_layer_nbytes - 1)
        assert step_nbytes()[0] > 8 * experts_nbytes


def test_the_device_holds_a_window_and_not_a_layers_experts(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.make("qwen3_moe_mixed", tmp_path)
    peaks = {}
    for places in (2, 8):
        config = lora("qwen3_moe_mixed")
        monkeypatch.setattr(assembly, "WINDOW_NBYTES", places * 3 * 64 * 32 * 4)
        model = airtune.load(folder, lora=config, device="sim").train()
        gc.collect()
        sim.reset_peak()
        start = sim.now()
        model(**ragged_batch(1, 8)).loss.backward()
        peaks[places] = sim.peak() - start
        nbytes = expert_nbytes(model)
        airtune.stream_of(model).close()
        del model
        gc.collect()
    assert peaks[8] - peaks[2] == pytest.approx(6 * nbytes, rel=0.1)


def test_an_expert_that_is_missing_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = zoo.make("qwen3_moe_mixed", tmp_path)
    index = folder / "model.safetensors.index.json"
    gone = "model.layers.2.mlp.experts.5.up_proj.weight"
    shards = json.loads(index.read_text())
    file = folder / shards["weight_map"].pop(gone)
    index.write_text(json.dumps(shards))
    tensors = load_file(file)
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=gone.replace(".", r"\.")):
        airtune.load(folder)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", EXPERTS)
def test_generation(tmp_path: Path, name: str) -> None:
    folder = zoo.make(name, tmp_path)
    twin = resident(name, folder).eval()
    model = streamed(name, folder).eval()
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
    }
    ids = zoo.random_ids(2, 7)
    assert torch.equal(model.generate(input_ids=ids, **options), twin.generate(input_ids=ids, **options))


def test_the_peak_stays_within_any_budget(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first step leaves goes to layers, and then to experts; Adam's moments come after it."""
    monkeypatch.setattr(assembly, "LOSS_BLOCK_NBYTES", 2**14)
    folder = zoo.make("qwen3_moe_mixed", tmp_path)
    loads = []
    for budget in range(1_100_000, 3_200_000, 300_000):
        gc.collect()
        sim.reset_peak()
        start = sim.now()
        config = lora("qwen3_moe_mixed")
        model = airtune.load(folder, lora=config, device="sim", device_memory=budget).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        for _ in range(3):
            before = airtune.stream_of(model).counters()["expert_loads"]
            model(**ragged_batch(1, 12)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loads.append(airtune.stream_of(model).counters()["expert_loads"] - before)
        assert sim.peak() - start <= budget
        airtune.stream_of(model).close()
        del model, optimizer
    assert loads[-1] == 0, "with room for all, the third step brings none"
    assert loads[0] > 0
