"""The peak on the device is the sum that was planned, and does not depend on the number of layers.

peak = slots + adapters with gradients and Adam's moments
     + the larger of (one layer's micro-batch, the loss's block)
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import airtune
from airtune.model import assembly
from tests.sim import Simulator
from tests.twins import adapter

S, D, VOCAB, PLACES = 64, 128, 512, 2
LOSS_BLOCK_NBYTES = 2**16


def checkpoint(folder: Path, layers: int) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=4 * D,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def lora() -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear")


def peak_nbytes(sim: Simulator, folder: Path, rows: int) -> int:
    """Of the second step, when the optimizer's moments are there."""
    gc.collect()
    before = sim.now()
    model = airtune.load(folder, lora=lora(), device="sim", micro_batch_size=1).train()
    airtune.stream_of(model).places.hold(PLACES)
    optimizer = torch.optim.AdamW(adapter(model).values(), foreach=False)
    input_ids = torch.arange(rows * S).reshape(rows, S) % VOCAB
    for _ in range(2):
        optimizer.zero_grad()
        sim.reset_peak()
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        peak = sim.peak()
        optimizer.step()
    return peak - before


def layer_working_nbytes(sim: Simulator, folder: Path) -> int:
    """What one resident layer takes on the device for one row, forward and backward, besides its weights."""
    twin = get_peft_model(LlamaForCausalLM.from_pretrained(folder), lora())
    base = twin.get_base_model()
    layer = base.model.layers[0].to("sim")
    hidden_BSD = torch.randn(1, S, D, device="sim", requires_grad=True)
    position_ids = torch.arange(S)[None]
    embeddings = tuple(t.to("sim") for t in base.model.rotary_emb(hidden_BSD.cpu(), position_ids))
    upstream_BSD = torch.randn(1, S, D, device="sim")
    trainable = [p for p in layer.parameters() if p.requires_grad]
    sim.reset_peak()
    start = sim.now()
    out = layer(hidden_BSD, position_embeddings=embeddings, attention_mask=None)
    torch.autograd.grad(out, [hidden_BSD, *trainable], upstream_BSD)
    return sim.peak() - start


@pytest.mark.parametrize("layers", [4, 12])
def test_the_peak_is_the_plan(
    sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    monkeypatch.setattr(assembly, "LOSS_BLOCK_NBYTES", LOSS_BLOCK_NBYTES)
    folder = checkpoint(tmp_path, layers)
    model = airtune.load(folder, lora=lora(), device="sim")
    slots = PLACES * airtune.stream_of(model)._residency.layer_nbytes
    adapters = 4 * sum(p.numel() * p.element_size() for p in adapter(model).values())
    del model
    head = 2 * VOCAB * D * 4  # two buffers for chunks: this head is one chunk
    planned = slots + adapters + max(layer_working_nbytes(sim, folder), head + LOSS_BLOCK_NBYTES)
    assert peak_nbytes(sim, folder, rows=4) == pytest.approx(planned, rel=0.1)
