"""What happens at once, inside one another, and after the end: experts, packed weights and tables."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel

import airtune
from airtune.model import assembly
from tests import packed, zoo
from tests.sim import Simulator
from tests.twins import adapter, gradients, lora, ragged_batch, relative_error, resident

NAMES = ["mixtral", "qwen4_exp__vl"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert computes and one is on its way."""
    monkeypatch.setattr(assembly, "WINDOW_NBYTES", 1)


def load(name: str, folder: Path, **options: Any) -> PeftModel:
    config = lora(name)
    torch.manual_seed(0)
    model = airtune.load(folder, lora=config, dtype=torch.float32, **options)
    return cast(PeftModel, model).train()


def answer(model: PeftModel) -> torch.Tensor:
    ids = zoo.random_ids(2, 7)
    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        return cast(torch.Tensor, model.generate(input_ids=ids, pad_token_id=0, **options))


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_and_an_answer_in_the_middle_of_backward(
    sim: Simulator, tmp_path: Path, name: str
) -> None:
    """On an accelerator a hook on a gradient runs in the device's own thread, beside the next visit."""
    folder, batch = zoo.make(name, tmp_path), ragged_batch(3, 10)
    twin = resident(name, folder).eval()
    twin(**batch).loss.backward()
    want_loss, want = twin(**batch).loss.detach(), answer(twin)

    def check(model: PeftModel) -> None:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def look(grad: torch.Tensor) -> None:
            with torch.no_grad():
                loss = model(**batch).loss
            seen.append((loss, answer(model)))

        for index in (1, 3):
            parameter = next(p for n, p in adapter(model).items() if f"layers.{index}." in n)
            parameter.register_hook(look)
        model(**batch).loss.backward()
        got = {n: g.cpu() for n, g in gradients(model).items()}
        assert relative_error(got, gradients(twin)) < 3e-5
        assert len(seen) == 2
        for loss, tokens in seen:
            assert torch.allclose(loss, want_loss) and torch.equal(tokens, want)

    for device, micro_batch_size in itertools.product(("cpu", "sim"), (None, 1)):
        check(load(name, folder, device=device, micro_batch_size=micro_batch_size, poison=True).eval())


def test_a_call_inside_a_call_leaves_the_outer_one_its_micro_batches(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch(3, 10)
    model = load("llama", folder, device="cpu", micro_batch_size=1)
    layers = airtune.stream_of(model)._layers
    inner = {"input_ids": zoo.random_ids(1, 4)}
    calls: list[int] = []

    def peek(module: Any, args: Any) -> None:
        if not calls:
            calls.append(0)
            with torch.no_grad():
                model(**inner)

    hook = layers[1].module.register_forward_pre_hook(peek)
    rows: list[int] = []
    forward = layers[2].forward
    layers[2].forward = lambda hidden, *args, **kwargs: (
        rows.append(len(hidden)),
        forward(hidden, *args, **kwargs),
    )[1]
    model(**batch)
    hook.remove()
    assert calls and rows[-3:] == [1, 1, 1]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_two_models_in_two_threads(sim: Simulator, tmp_path: Path, device: str) -> None:
    folders = [zoo.make(name, tmp_path / name) for name in NAMES]
    batch = ragged_batch(2, 10)
    models = [load(n, f, device=device, poison=True) for n, f in zip(NAMES, folders, strict=True)]

    def train(model: PeftModel) -> None:
        for _ in range(2):
            model.zero_grad()
            model(**batch).loss.backward()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(train, model) for model in models]:
            done.result()
    for name, folder, model in zip(NAMES, folders, models, strict=True):
        twin = resident(name, folder).train()
        twin(**batch).loss.backward()
        got = {n: g.cpu() for n, g in gradients(model).items()}
        assert relative_error(got, gradients(twin)) < 3e-5


def _experts(folder: Path, **options: Any) -> PeftModel:
    return load("mixtral", zoo.make("mixtral", folder), **options)


def _tables(folder: Path, **options: Any) -> PeftModel:
    return load("qwen4_exp__vl", zoo.make("qwen4_exp__vl", folder), **options)


def _packed(folder: Path, **options: Any) -> PeftModel:
    return packed.streamed("fp8 experts", packed.make("fp8 experts", folder), **options).train()


def descriptors() -> set[str]:
    """Checkpoint files that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {os.readlink(entry)}")
        except FileNotFoundError:
            continue
    return {line for line in found if "safetensors" in line}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which files are open")
@pytest.mark.parametrize("file_access", ["mapped", "buffered"])
@pytest.mark.parametrize("make", [_experts, _tables, _packed])
def test_a_model_that_nobody_holds_leaves_nothing(
    tmp_path: Path, make: Callable[..., PeftModel], file_access: str
) -> None:
    """Neither itself, nor threads, nor open files."""
    gc.collect()
    threads, files = set(threading.enumerate()), descriptors()
    model = make(tmp_path, device="cpu", file_access=file_access)
    model(**ragged_batch(2, 8)).loss.backward()
    answer(model.eval())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive(), thread.name
    assert descriptors() == files


@pytest.mark.parametrize("make", [_experts, _tables, _packed])
def test_device_memory_of_a_model_that_nobody_holds_is_given_back(
    sim: Simulator, tmp_path: Path, make: Callable[..., PeftModel]
) -> None:
    gc.collect()
    before = sim.now()
    model = make(tmp_path, device="sim")
    model(**ragged_batch(2, 8)).loss.backward()
    answer(model.eval())
    del model
    gc.collect()
    sim.synchronize()
    gc.collect()
    assert sim.now() == before


@pytest.mark.parametrize("make", [_experts, _tables, _packed])
def test_closing_while_weights_are_on_their_way(
    sim: Simulator, tmp_path: Path, make: Callable[..., PeftModel]
) -> None:
    model = make(tmp_path, device="sim")
    model(**ragged_batch(2, 8))  # what comes next is being read now
    airtune.stream_of(model).close()
    assert sim.pending() == 0
