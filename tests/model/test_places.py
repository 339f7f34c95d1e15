"""A budget holds whatever kinds of passes follow one another, and what it leaves goes where it saves most."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch

import airtune
from airtune.model import assembly
from tests import zoo
from tests.sim import Simulator
from tests.twins import gradients, lora, relative_error

BUDGET_NBYTES = 2_000_000
LAYERS = 4


def load(name: str, folder: Path, budget_nbytes: int) -> tuple[torch.nn.Module, airtune.Stream]:
    config = lora(name)
    gc.collect()  # models of other tests
    model = airtune.load(
        folder,
        lora=config,
        device="sim",
        device_memory=budget_nbytes,
        dtype=torch.float32,
        micro_batch_size=1,
    )
    return model, airtune.stream_of(model)


def step(model: torch.nn.Module, length: int) -> None:
    ids_BS = zoo.random_ids(2, length)
    model.train()(input_ids=ids_BS, labels=ids_BS).loss.backward()


@pytest.mark.parametrize("budget_nbytes", [1_100_000, 1_300_000, BUDGET_NBYTES])
def test_training_after_generation(sim: Simulator, tmp_path: Path, budget_nbytes: int) -> None:
    """What generation filled is given back, and is not taken for what training needs."""
    folder = zoo.make("llama", tmp_path)
    places = []
    for generates in (False, True):
        gc.collect()
        sim.reset_peak()
        start = sim.now()
        model, stream = load("llama", folder, budget_nbytes)
        for _ in range(2 * generates):
            model.eval().generate(input_ids=zoo.random_ids(1, 8), max_new_tokens=3, pad_token_id=0)
        for _ in range(3):
            step(model, 32)
        places.append(stream._residency.places)
        assert sim.peak() - start <= budget_nbytes
        stream.close()
        del model, stream
    assert places[0] == places[1]


def test_evaluation_before_any_training_uses_the_budget(sim: Simulator, tmp_path: Path) -> None:
    model, stream = load("llama", zoo.make("llama", tmp_path), BUDGET_NBYTES)
    ids_BS = zoo.random_ids(2, 32)
    with torch.no_grad():
        for _ in range(3):
            before = stream.counters()["bytes_read"]
            model.eval()(input_ids=ids_BS, labels=ids_BS)
    assert stream.counters()["bytes_read"] == before


@pytest.mark.parametrize("budget_nbytes", [1_300_000, BUDGET_NBYTES])
def test_longer_rows_are_measured_anew(sim: Simulator, tmp_path: Path, budget_nbytes: int) -> None:
    """Layers stay while rows are short; they give way when rows come that need their room."""
    folder = zoo.make("llama", tmp_path)
    sim.reset_peak()
    start = sim.now()
    model, stream = load("llama", folder, budget_nbytes)
    places = []
    for length in (4, 4, 48, 48, 4, 48):
        step(model, length)
        places.append(stream._residency.places)
    assert places[1] > 2 >= places[2]
    assert sim.peak() - start <= budget_nbytes


def test_in_training_experts_come_before_further_layers(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "WINDOW_NBYTES", 1)
    model, stream = load("mixtral", zoo.make("mixtral", tmp_path), 1_500_000)
    window = stream._window
    assert window is not None and window.places == 2
    for _ in range(2):
        step(model, 16)
    assert window.places >= window.layer_count > 2


def watch_runs(model: torch.nn.Module) -> Counter[str]:
    """Counts how often each layer computes."""
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(lambda *_, name=name: runs.update([name]))
    return runs


@pytest.mark.parametrize("budget_nbytes", [2_000_000, 3_000_000, 8_000_000])
def test_what_layers_leave_holds_graphs(sim: Simulator, tmp_path: Path, budget_nbytes: int) -> None:
    """Layers whose graphs fit are computed once a step, the last ones first, and nothing else changes."""
    folder = zoo.make("llama", tmp_path)
    sim.reset_peak()
    start = sim.now()
    model, stream = load("llama", folder, budget_nbytes)
    runs = watch_runs(model)
    seen = []
    for _ in range(3):
        runs.clear()
        model.zero_grad()
        step(model, 64)
        seen.append(gradients(model))
    assert sim.peak() - start <= budget_nbytes
    for later in seen[1:]:
        assert relative_error(later, seen[0]) < 1e-6
    assert (
        list(runs.values())
        == {
            2_000_000: [4, 4, 4, 4],
            3_000_000: [4, 4, 2, 2],
            8_000_000: [2, 2, 2, 2],
        }[budget_nbytes]
    ), "two micro-batches, forward and again in backward"
    stream.places.hold(2)
    step(model, 64)


def test_on_the_cpu_graphs_take_no_more_than_layers(tmp_path: Path) -> None:
    model = airtune.load(zoo.make("llama", tmp_path), lora=lora("llama"))
    runs = watch_runs(model)
    counts = []
    for length in (8, 8, 512, 512):
        runs.clear()
        step(model, length)
        counts.append(list(runs.values()))
    longer = [2, 2, 2, 1]  # the last layer's graph is there at the peak anyway
    assert counts == [longer, [1, 1, 1, 1], longer, longer]


@pytest.mark.parametrize("budget_nbytes", [5_000_000, 7_000_000])
def test_two_forward_passes_before_one_backward(sim: Simulator, tmp_path: Path, budget_nbytes: int) -> None:
    """As preference losses want them: what is on the device for one is still there when the other runs."""
    folder = zoo.make("llama", tmp_path)
    sim.reset_peak()
    start = sim.now()
    model, _ = load("llama", folder, budget_nbytes)
    ids_BS = zoo.random_ids(1, 256)
    for _ in range(3):
        one, other = (model.train()(input_ids=ids_BS, labels=ids_BS).loss for _ in range(2))
        (one + 2 * other).backward()
        assert sim.peak() - start <= budget_nbytes
