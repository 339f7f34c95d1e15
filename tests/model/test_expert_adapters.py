"""LoRA on stacked experts: PEFT's own numbers, names and layout, without PEFT's second stack."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import airtune
from airtune.model import assembly
from airtune.model.adapter_io import save_adapter
from tests import zoo
from tests.sim import Simulator
from tests.twins import adapter, gradients, ragged_batch, relative_error

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config(parameters: list[str], modules: list[str] | None = None, **options: object) -> LoraConfig:
    """Different random values for every expert: `init_lora_weights=False`."""
    return LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj"] if modules is None else modules,
        target_parameters=parameters,
        init_lora_weights=False,
        **options,
    )


def twin_of(name: str, folder: Path, lora: LoraConfig, dtype: torch.dtype = torch.float32) -> PeftModel:
    base = zoo.model_class(name).from_pretrained(folder, dtype=dtype)
    base.set_experts_implementation("eager")
    torch.manual_seed(0)
    return cast(PeftModel, get_peft_model(base, lora))


def streamed(folder: Path, lora: LoraConfig, **options: object) -> PeftModel:
    torch.manual_seed(0)
    return cast(PeftModel, airtune.load(folder, lora=lora, **options))


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "gpt_oss", "mixtral", "qwen3_vl_moe"])
def test_gradients(sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(assembly, "WINDOW_NBYTES", 1)
    folder, batch = zoo.make(name, tmp_path), ragged_batch(3, 10)
    twin = twin_of(name, folder, config(BOTH)).train()
    twin(**batch).loss.backward()
    for device, micro_batch_size in itertools.product(("cpu", "sim"), (None, 1)):
        options = {"device": device, "micro_batch_size": micro_batch_size, "poison": True}
        model = streamed(folder, config(BOTH), **options).train()
        assert adapter(model).keys() == adapter(twin).keys()
        assert all(torch.equal(adapter(model)[n].cpu(), p) for n, p in adapter(twin).items())
        model(**batch).loss.backward()
        got = {n: g.cpu() for n, g in gradients(model).items()}
        assert relative_error(got, gradients(twin)) < 1e-5, options


@pytest.mark.parametrize("parameters", [BOTH, BOTH[1:], BOTH[:1]], ids=["both", "down", "gate and up"])
def test_a_saved_adapter_is_pefts(tmp_path: Path, parameters: list[str]) -> None:
    """Peft loads it, and so does airtune, with the same logits."""
    folder, ids = zoo.make("qwen3_moe_mixed", tmp_path / "base"), zoo.random_ids(2, 9)
    model = streamed(folder, config(parameters)).eval()
    save_adapter(model, tmp_path / "adapter", trained=False)
    base = zoo.model_class("qwen3_moe_mixed").from_pretrained(folder)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    again = airtune.load(folder, adapter=tmp_path / "adapter").eval()
    with torch.no_grad():
        got, theirs, ours = (m(input_ids=ids).logits for m in (model, loaded, again))
        without = zoo.model_class("qwen3_moe_mixed").from_pretrained(folder)(input_ids=ids).logits
    torch.testing.assert_close(theirs, got)
    assert torch.equal(ours, got)
    assert not torch.allclose(without, got, atol=1e-3)


def test_the_layout_on_disk_is_pefts(tmp_path: Path) -> None:
    """`lora_A` has its rows expert by expert, `lora_B` its columns with the expert as the fastest index."""
    folder = zoo.make("qwen3_moe_mixed", tmp_path / "base")
    model = streamed(folder, config(BOTH[1:], modules=[])).eval()
    save_adapter(model, tmp_path / "adapter", trained=False)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.mlp.experts"
    a_ERI = saved[f"{prefix}.lora_A.weight"].view(8, 3, 32)
    b_ORE = saved[f"{prefix}.lora_B.weight"].view(64, 3, 8)
    merged = PeftModel.from_pretrained(
        zoo.model_class("qwen3_moe_mixed").from_pretrained(folder), tmp_path / "adapter"
    ).merge_and_unload()
    base = zoo.model_class("qwen3_moe_mixed").from_pretrained(folder)
    for expert in range(8):
        delta = (merged.model.layers[0].mlp.experts.down_proj - base.model.layers[0].mlp.experts.down_proj)[
            expert
        ]
        torch.testing.assert_close(delta, 2 * b_ORE[:, :, expert] @ a_ERI[expert], atol=1e-5, rtol=1e-4)


def test_without_the_adapter(tmp_path: Path) -> None:
    folder, ids = zoo.make("gpt_oss", tmp_path), zoo.random_ids(1, 9)
    model = streamed(folder, config(BOTH)).eval()
    base = zoo.model_class("gpt_oss").from_pretrained(folder)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (config(["mlp.experts.up_proj"]), r"\['mlp.experts.up_proj'\] match no parameter.*gate_up_proj"),
        (config(BOTH, lora_dropout=0.1), "lora_dropout is 0.1"),
    ],
    ids=["no such parameter", "dropout"],
)
def test_what_cannot_be_done_is_said_before_a_weight_is_read(
    tmp_path: Path, lora: LoraConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        streamed(zoo.make("qwen3_moe_mixed", tmp_path), lora)


def test_in_bf16_the_error_is_the_resident_models_own(tmp_path: Path) -> None:
    """Factors compute in bf16 beside bf16 experts, from fp32 values. Against the same adapter in fp32."""
    name = "qwen3_moe_mixed"
    folder, batch = zoo.make(name, tmp_path, dtype=torch.bfloat16), ragged_batch()
    exact = twin_of(name, folder, config(BOTH))
    values = {n: p.detach().clone() for n, p in adapter(exact).items()}
    half = twin_of(name, folder, config(BOTH), torch.bfloat16)
    ours = streamed(folder, config(BOTH), dtype=torch.bfloat16)
    for model in (exact, half, ours):
        for n, parameter in adapter(model).items():
            parameter.data.copy_(values[n])
        model.train()(**batch).loss.backward()
    want = gradients(exact)
    assert {g.dtype for g in gradients(ours).values()} == {torch.float32}
    assert _error(gradients(ours), want) < 1.2 * _error(gradients(half), want)


def _error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative."""
    off = sum(float((got[n].float() - w).square().sum()) for n, w in want.items())
    return (off / sum(float(w.square().sum()) for w in want.values())) ** 0.5
