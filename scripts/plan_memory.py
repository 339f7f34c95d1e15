#!/usr/bin/env python
"""What a large model asks of a machine, from its shapes alone: no weight is downloaded or read.

    python scripts/plan_memory.py                       the models of the recipes
    python scripts/plan_memory.py deepseek_v3 --rank 8
    python scripts/plan_memory.py --folder /models/mine     a folder with a config.json

The model is laid out on the meta device, its layers and experts are found as `airtune.load` finds them, and
bytes are counted by the width that each part has in the released checkpoint. The device holds, besides
activations,

    two layers without their experts + a window of experts (256 MiB, two at least) + 16 bytes for each of the
    adapter's parameters (fp32: itself, its gradient, Adam's two moments)

A step brings every layer twice. Experts that were hit (for many tokens: all) are brought three times for each
micro-batch: forward, recompute, backward. `stream.host_memory` for the experts of one layer lets the disk
read them twice a step, however many micro-batches there are. Activations, and what really crosses, are
measured by `measure_device_memory.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from _bench import table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from airtune.model.assembly import WINDOW_NBYTES
from airtune.model.experts import LEAST_EXPERTS
from airtune.model.layers import find_layers
from airtune.model.skeleton import build_skeleton
from airtune.weights.experts import LEAST_PLACES

TRAINED_NBYTES = 16  # an adapter's parameter: fp32 value, gradient and two moments
BF16, FP8, MXFP4 = 2.0, 1.0, 0.53125  # bytes an element; MXFP4 has a scale byte for 32 values


@dataclass(frozen=True)
class Released:
    """A released model: its class, what differs from the class's own shapes, and how wide it is stored."""

    architecture: str
    shapes: dict[str, Any]
    layer_width: float = BF16
    expert_width: float = BF16


MODELS = {
    "deepseek_v3": Released("DeepseekV3ForCausalLM", {}, FP8, FP8),
    "gpt_oss_120b": Released("GptOssForCausalLM", {}, BF16, MXFP4),
    "qwen3_235b": Released(
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_8b": Released(
        "Qwen3ForCausalLM",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "intermediate_size": 12288,
        },
    ),
    "llama33_70b": Released(
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
        },
    ),
}


@dataclass(frozen=True)
class Plan:
    """Bytes; `expert` and `experts` are 0 without experts."""

    layers: int
    layer: int  # the largest, without experts
    expert: int
    experts: int  # in a layer
    model: int  # all layers with all experts
    adapter: int

    @property
    def window(self) -> int:
        return self.expert * max(LEAST_PLACES, WINDOW_NBYTES // self.expert) if self.expert else 0

    @property
    def device(self) -> int:
        return 2 * self.layer + self.window + self.adapter


def skeleton(released: Released, folder: Path) -> PreTrainedModel:
    model_class = getattr(transformers, released.architecture)
    config: PreTrainedConfig = model_class.config_class(**released.shapes)
    config.architectures = [released.architecture]
    # A config that says how its weights are packed builds modules for packed weights: here they are counted.
    config.save_pretrained(folder)
    return laid_out(folder)


def laid_out(folder: Path) -> PreTrainedModel:
    return build_skeleton(
        folder, dtype=None, stored_dtype=torch.bfloat16, attn_implementation=None, trust_remote_code=False
    )


def expert_stacks(layer: nn.Module) -> list[nn.Parameter]:
    """Stacked experts of a layer, as `airtune.model.experts` knows them."""
    return [
        parameter
        for module in layer.modules()
        for parameter in module._parameters.values()
        if parameter is not None
        and parameter.dim() >= 3
        and parameter.shape[0] >= LEAST_EXPERTS
        and not type(module).__module__.startswith("torch.")
    ]


def plan(model: PreTrainedModel, released: Released, rank: int) -> Plan:
    layers = find_layers(model)
    without, expert, experts, total = [], 0, 0, 0
    for layer in layers.values():
        stacks = expert_stacks(layer)
        stacked = sum(p.numel() for p in stacks)
        rest = int((sum(p.numel() for p in layer.parameters()) - stacked) * released.layer_width)
        without.append(rest)
        total += rest + int(stacked * released.expert_width)
        if stacks:
            experts = max(p.shape[0] for p in stacks)
            expert = int(stacked // experts * released.expert_width)
    return Plan(len(layers), max(without), expert, experts, total, adapter_nbytes(layers.values(), rank))


def adapter_nbytes(layers: Any, rank: int) -> int:
    """Of an adapter on every linear layer outside experts, with its gradients and optimizer."""
    linears = [m for layer in layers for m in layer.modules() if type(m) is nn.Linear]
    return TRAINED_NBYTES * rank * sum(m.in_features + m.out_features for m in linears)


def row(name: str, found: Plan) -> dict[str, str]:
    gb = 1e9
    return {
        "model": name,
        "layers": str(found.layers),
        "GB a layer": f"{found.layer / gb:.2f}",
        "experts": f"{found.experts} x {found.expert / 1e6:.1f} MB" if found.experts else "-",
        "GB a layer's experts": f"{found.experts * found.expert / gb:.1f}" if found.experts else "-",
        "GB of all layers": f"{found.model / gb:.0f}",
        "GB adapter state": f"{found.adapter / gb:.2f}",
        "GB window": f"{found.window / gb:.2f}",
        "GB on the device": f"{found.device / gb:.2f}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a model asks of a machine, from its shapes.")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all without one")
    parser.add_argument("--folder", type=Path, help="a folder with config.json, counted in bf16")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    asked = parser.parse_args(argv)
    if unknown := sorted(set(asked.models) - MODELS.keys()):
        parser.error(f"unknown models {unknown}; known: {', '.join(MODELS)}")
    rows = []
    if asked.folder is not None:
        rows.append(row(asked.folder.name, plan(laid_out(asked.folder), Released("", {}), asked.rank)))
    else:
        for name in asked.models or MODELS:
            with tempfile.TemporaryDirectory(prefix="airtune-plan-") as folder:
                model = skeleton(MODELS[name], Path(folder))
            rows.append(row(name, plan(model, MODELS[name], asked.rank)))
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
