"""Training and generating with the layers on an accelerator and everything else on the CPU.

On the simulated accelerator a missing wait is a wrong value or a recorded race, a released slot is NaN, and
memory is counted to the byte.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

import airtune
from airtune.model import assembly
from tests import zoo
from tests.sim import Simulator
from tests.twins import adapter, gradients, ragged_batch, relative_error, resident, split_by_rows, streamed


def on_accelerator(name: str, folder: Path, **options: Any) -> PeftModel:
    return streamed(name, folder, device="sim", poison=True, **options)


def keep_places(model: PeftModel, places: int) -> None:
    """Let the budget not change the number of places after the first step."""
    stream = airtune.stream_of(model)
    stream.places.hold(places)


def three_steps(model: PeftModel, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    model.train()
    optimizer = torch.optim.AdamW(adapter(model).values(), lr=1e-3)
    seen = []
    torch.manual_seed(1)
    for _ in range(3):
        model(**batch).loss.backward()
        seen.append({name: grad.cpu().clone() for name, grad in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_gradients(sim: Simulator, tmp_path: Path, places: int) -> None:
    folder, batch = zoo.make("llama", tmp_path, dtype=torch.bfloat16), ragged_batch()
    want = three_steps(resident("llama", folder), batch)
    for micro_batch_size in (None, 1, 3):
        model = on_accelerator("llama", folder, micro_batch_size=micro_batch_size)
        keep_places(model, places)
        for mine, theirs in zip(three_steps(model, batch), want, strict=True):
            assert relative_error(mine, theirs) < 1e-5, micro_batch_size
        assert model.device.type == "cpu"
        assert {p.device.type for p in adapter(model).values()} == {"sim"}


def test_dropout_in_micro_batches(sim: Simulator, tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    twin = resident("llama", folder, dropout=0.2)
    split_by_rows(twin, 4, 2)
    got = three_steps(on_accelerator("llama", folder, dropout=0.2, micro_batch_size=2), batch)
    for mine, theirs in zip(got, three_steps(twin, batch), strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize("name", ["gemma4_text", "dory", "mixtral", "kimi_k25", "qwen3_5__vl", "zamba"])
def test_other_decoders(sim: Simulator, tmp_path: Path, name: str) -> None:
    folder, batch = zoo.make(name, tmp_path), ragged_batch(2, 16)
    model, twin = on_accelerator(name, folder).train(), resident(name, folder).train()
    torch.manual_seed(1)
    model(**batch).loss.backward()
    torch.manual_seed(1)
    twin(**batch).loss.backward()
    assert relative_error({n: g.cpu() for n, g in gradients(model).items()}, gradients(twin)) < 3e-5
    prompt = zoo.random_ids(2, 8)
    model.eval()
    twin.eval()
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    generated = model.generate(input_ids=prompt, **options)
    assert torch.equal(generated, twin.generate(input_ids=prompt, **options))


def bytes_per_step(model: PeftModel, batch: dict[str, torch.Tensor], steps: int) -> list[float]:
    stream, read = airtune.stream_of(model), []
    for _ in range(steps):
        before = stream.counters()["bytes_read"]
        model(**batch).loss.backward()
        read.append(stream.counters()["bytes_read"] - before)
    return read


def test_a_step_reads_twice_what_is_not_kept(sim: Simulator, tmp_path: Path) -> None:
    """Two places: each turn finds two layers there, so that 2L - 4 layers are read in a step."""
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = on_accelerator("llama", folder).train()
    keep_places(model, 2)
    layer_nbytes = airtune.stream_of(model)._residency.layer_nbytes
    # The last read of a step may be under way when the step ends: it counts when it is waited for.
    assert sum(bytes_per_step(model, batch, 5)[1:]) == 4 * (2 * 4 - 4) * layer_nbytes


def test_host_memory_keeps_layers_in_ram(sim: Simulator, tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = on_accelerator("llama", folder, host_memory="1GB").train()
    read = bytes_per_step(model, batch, 3)
    assert read[0] == 4 * airtune.stream_of(model)._residency.layer_nbytes
    assert read[1:] == [0, 0]


def test_a_budget_becomes_places_after_the_first_step(sim: Simulator, tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    gc.collect()  # models of other tests
    sim.reset_peak()
    start = sim.now()
    model = on_accelerator("llama", folder, device_memory=2_000_000).train()
    read = bytes_per_step(model, batch, 4)
    assert sim.peak() - start <= 2_000_000
    assert read[-1] == 0, "all four layers stay"


def test_a_budget_that_cannot_be_met_says_the_least(sim: Simulator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"limited to 100,000 bytes and at least \d+,\d+ are needed"):
        on_accelerator("llama", zoo.make("llama", tmp_path), device_memory="100kB")


def peak_of_a_step(sim: Simulator, folder: Path, rows: int) -> int:
    model = on_accelerator("llama", folder, micro_batch_size=1).train()
    keep_places(model, 2)
    batch = ragged_batch(rows, 32)
    model(**batch).loss.backward()
    gc.collect()
    sim.reset_peak()
    start = sim.now()
    model(**batch).loss.backward()
    return sim.peak() - start


def test_the_peak_does_not_grow_with_the_batch(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the micro-batch and the budget of the loss, which this makes small."""
    monkeypatch.setattr(assembly, "LOSS_BLOCK_NBYTES", 2**16)
    folder = zoo.make("llama", tmp_path)
    few, many = peak_of_a_step(sim, folder, 6), peak_of_a_step(sim, folder, 24)
    assert many <= 1.02 * few


def test_the_peak_stays_within_any_budget(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when Adam's moments come after the first step."""
    monkeypatch.setattr(assembly, "LOSS_BLOCK_NBYTES", 2**14)
    folder = zoo.make("llama", tmp_path)
    for budget in range(1_100_000, 2_000_000, 100_000):
        gc.collect()
        sim.reset_peak()
        start = sim.now()
        model = on_accelerator("llama", folder, device_memory=budget).train()
        optimizer = torch.optim.AdamW(adapter(model).values(), foreach=False)
        for _ in range(3):
            model(**ragged_batch(1, 12)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sim.peak() - start <= budget
        airtune.stream_of(model).close()
        del model, optimizer


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_two_forwards_and_one_backward(sim: Simulator, tmp_path: Path, micro_batch_size: int | None) -> None:
    """Autograd may start on the second graph inside a layer of the first: visits are nested then."""
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    model = on_accelerator("llama", folder, micro_batch_size=micro_batch_size).train()
    keep_places(model, 1)
    twin = resident("llama", folder).train()
    for m in (model, twin):
        (m(**batch).loss + 2 * m(**other).loss).backward()
    assert relative_error({n: g.cpu() for n, g in gradients(model).items()}, gradients(twin)) < 1e-5
