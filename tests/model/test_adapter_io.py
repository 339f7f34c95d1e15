"""Every way an adapter can be saved and be useless is caught before the folder has its name."""

import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from airtune.model.adapter_io import AdapterError, adapter_tensors, atomic_folder, load_adapter, save_adapter


def tiny_adapter(seed: int = 0, **lora) -> PeftModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    base = LlamaForCausalLM(config)
    base.name_or_path = "somewhere/tiny"
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]} | lora
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))


def trained(model: PeftModel) -> PeftModel:
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(torch.randn_like(tensor))
    return model


def test_peft_loads_what_we_save_and_answers_the_same(tmp_path: Path):
    model = trained(tiny_adapter())
    save_adapter(model, tmp_path / "adapter", trained=True)

    again = PeftModel.from_pretrained(tiny_adapter().unload(), tmp_path / "adapter").eval()
    ids_BS = torch.arange(14).view(2, 7)
    assert torch.equal(again(ids_BS).logits, model.eval()(ids_BS).logits)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere/tiny"
    assert config["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False


def test_whoever_reads_the_config_reads_the_weights(tmp_path: Path):
    """A server often runs as another user."""
    save_adapter(trained(tiny_adapter()), tmp_path / "adapter", trained=True)
    modes = {path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1


def test_file_equals_what_peft_itself_saves(tmp_path: Path):
    model = trained(tiny_adapter())
    save_adapter(model, tmp_path / "ours", trained=True)
    model.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_is_refused_and_the_old_adapter_stays(tmp_path: Path, value: float):
    model = trained(tiny_adapter())
    save_adapter(model, tmp_path / "adapter", trained=True)
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    next(iter(adapter_tensors(model).values()))[0, 0] = value
    with pytest.raises(AdapterError, match=r"1 of 8 adapter tensors are not finite.*q_proj"):
        save_adapter(model, tmp_path / "adapter", trained=True)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_all_b_zero_after_training_is_refused(tmp_path: Path):
    model = tiny_adapter()
    with pytest.raises(AdapterError, match="all 4 lora_B tensors are still zero"):
        save_adapter(model, tmp_path / "adapter", trained=True)
    assert list(tmp_path.iterdir()) == []
    save_adapter(model, tmp_path / "adapter", trained=False)


def test_some_b_zero_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = trained(tiny_adapter())
    tensors = adapter_tensors(model)
    idle = next(key for key in tensors if "lora_B" in key)
    tensors[idle].zero_()
    save_adapter(model, tmp_path / "adapter", trained=True)
    assert f"1 of 4 lora_B tensors are still zero (first: {idle})" in caplog.text


def test_base_model_must_be_known(tmp_path: Path):
    model = trained(tiny_adapter())
    model.peft_config["default"].base_model_name_or_path = None
    model.get_base_model().name_or_path = ""
    with pytest.raises(AdapterError, match="base_model_name_or_path"):
        save_adapter(model, tmp_path / "adapter", trained=True)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
    ],
)
def test_beyond_plain_lora_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture, lora: dict):
    save_adapter(trained(tiny_adapter(**lora)), tmp_path / "adapter", trained=True)
    assert f"This adapter uses {next(iter(lora))}." in caplog.text


def test_plain_lora_is_not_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        save_adapter(trained(tiny_adapter()), tmp_path / "adapter", trained=True)
    assert caplog.records == []


def test_load_is_in_place_and_bit_equal(tmp_path: Path):
    model, other = trained(tiny_adapter()), tiny_adapter(seed=1)
    save_adapter(model, tmp_path / "adapter", trained=True)
    held = {name: parameter for name, parameter in other.named_parameters() if parameter.requires_grad}
    load_adapter(other, tmp_path / "adapter")
    loaded = adapter_tensors(other)
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in adapter_tensors(model).items())
    assert all(parameter is held[name] for name, parameter in other.named_parameters() if name in held)


def test_load_refuses_another_rank_other_modules_and_a_cut_file(tmp_path: Path):
    save_adapter(trained(tiny_adapter()), tmp_path / "adapter", trained=True)
    with pytest.raises(AdapterError, match="another rank"):
        load_adapter(tiny_adapter(r=4), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="4 adapter tensors of the model are not in it"):
        load_adapter(tiny_adapter(target_modules=["q_proj", "down_proj", "k_proj"]), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    broken = {key: tensor * float("inf") for key, tensor in load_file(path).items()}
    save_file(broken, path)
    with pytest.raises(AdapterError, match="8 of 8 tensors are not finite"):
        load_adapter(tiny_adapter(), tmp_path / "adapter")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="not a complete safetensors file"):
        load_adapter(tiny_adapter(), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="is no adapter"):
        load_adapter(tiny_adapter(), tmp_path)


def test_a_file_that_reads_back_differently_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def corrupt(tensors, path, metadata):
        first = next(iter(tensors))
        save_file(tensors | {first: tensors[first] + 1}, path, metadata=metadata)

    monkeypatch.setattr("airtune.model.adapter_io.save_file", corrupt)
    with pytest.raises(AdapterError, match="does not read back as it was written"):
        save_adapter(trained(tiny_adapter()), tmp_path / "adapter", trained=True)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "checkpoint-3") as partial:
        (partial / "half").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_partial_left_by_a_power_cut_is_replaced(tmp_path: Path):
    (tmp_path / ".adapter.partial").mkdir()
    (tmp_path / ".adapter.partial" / "half").write_text("half")
    save_adapter(trained(tiny_adapter()), tmp_path / "adapter", trained=True)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert not (tmp_path / "adapter" / "half").exists()
