"""`stream_of(model).close()` takes everything of ours off the modules, and ends what ran beside them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

import airtune
from tests import zoo
from tests.twins import adapter, gradients, ragged_batch, relative_error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make("llama", tmp_path_factory.mktemp("llama"))


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def used(model: nn.Module) -> nn.Module:
    """The model after a step, an evaluation and an answer: whatever is installed late is there now."""
    model.train()
    model(**ragged_batch()).loss.backward()
    model.eval()
    with torch.no_grad():
        model(**ragged_batch())
        cast(Any, model).generate(input_ids=zoo.random_ids(1, 4), max_new_tokens=2, pad_token_id=0)
    return model


def ours(value: object) -> bool:
    """Whether a value, or the function or object behind it, was defined in the package."""
    behind = getattr(value, "__func__", value)
    modules = {getattr(behind, "__module__", None), type(getattr(value, "__self__", value)).__module__}
    return any(isinstance(name, str) and name.startswith("airtune") for name in modules)


def traces(model: nn.Module) -> list[str]:
    """Attributes and hooks of ours on any module."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = value.values() if key.endswith("_hooks") else [value]
            found += [f"{name}.{key}" for item in held if ours(item)]
    return found


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "mixtral", "qwen3_5__vl"])
def test_nothing_of_ours_is_left(tmp_path: Path, name: str) -> None:
    zoo.make(name, tmp_path)
    twin = zoo.model_class(name).from_pretrained(tmp_path)
    model = cast(PreTrainedModel, airtune.load(tmp_path, device="cpu", micro_batch_size=2))
    loss_function = twin.loss_function
    assert traces(model), "the test can see what is ours"
    airtune.stream_of(model).close()
    assert traces(model) == []
    assert model.loss_function is loss_function
    for (path, module), resident in zip(model.named_modules(), twin.modules(), strict=True):
        assert type(module) is type(resident), path
        assert "forward" not in vars(module), path
        hooks = {key for key, value in vars(module).items() if key.endswith("_hooks") and value}
        assert hooks == {key for key, value in vars(resident).items() if key.endswith("_hooks") and value}, (
            path
        )
    assert model.state_dict().keys() == twin.state_dict().keys()


def test_nothing_is_left_after_use_under_an_adapter(folder: Path) -> None:
    model = used(airtune.load(folder, lora=lora(), device="cpu", micro_batch_size=2))
    stream = airtune.stream_of(model)
    assert traces(model)
    stream.close()
    assert traces(model) == []
    twin = get_peft_model(zoo.model_class("llama").from_pretrained(folder), lora())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]


def test_a_closed_model_is_streamed_no_more(folder: Path) -> None:
    model = airtune.load(folder, lora=lora(), device="cpu")
    stream = airtune.stream_of(model)
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match=r"PeftModel is not streamed; get one from airtune\.load"):
        airtune.stream_of(model)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(**ragged_batch())


def test_a_model_that_never_was_streamed(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not streamed; get one from airtune\.load"):
        airtune.stream_of(zoo.model_class("llama").from_pretrained(folder))


def test_the_adapter_outlives_the_stream(folder: Path, tmp_path: Path) -> None:
    model = airtune.load(folder, lora=lora(), device="cpu")
    before = {name: parameter.clone() for name, parameter in adapter(model).items()}
    airtune.stream_of(model).close()
    assert relative_error(adapter(model), before) == 0
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    again = airtune.load(folder, adapter=tmp_path, device="cpu")
    assert relative_error(adapter(again), before) == 0


def test_closing_one_model_leaves_another_of_the_same_files_alone(folder: Path) -> None:
    first, second = (airtune.load(folder, lora=lora(), device="cpu") for _ in range(2))
    used(first)
    airtune.stream_of(first).close()
    del first
    torch.manual_seed(0)
    twin = get_peft_model(zoo.model_class("llama").from_pretrained(folder), lora())
    with torch.no_grad():
        for name, parameter in adapter(twin).items():
            parameter.copy_(adapter(second)[name])
    for model in (second, twin):
        model(**ragged_batch()).loss.backward()
    assert relative_error(gradients(second), gradients(twin)) < 1e-5


def test_the_worker_thread_ends_with_the_stream(folder: Path) -> None:
    before = set(threading.enumerate())
    model = used(airtune.load(folder, lora=lora(), device="cpu", dtype=torch.bfloat16))
    started = set(threading.enumerate()) - before
    assert any(thread.name.startswith("airtune") for thread in started)
    airtune.stream_of(model).close()
    assert not any(thread.is_alive() for thread in started if thread.name.startswith("airtune"))
