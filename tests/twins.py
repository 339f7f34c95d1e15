"""Resident twins of streamed models: plain transformers + PEFT, all weights in memory, torch's own
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import airtune
from airtune.model.layers import find_layers
from tests import zoo


def lora(name: str, *, dropout: float = 0.0) -> LoraConfig:
    """LoRA on all that PEFT can adapt; B is random too, so that every gradient is there from the first
    step.
    """
    return LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=list(zoo.lora_targets(name)),
        lora_dropout=dropout,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",  # it has Conv1D in place of Linear
    )


def resident(
    name: str, folder: Path, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """transformers' model with PEFT's adapter, seeded. Experts run one by one, as they do when streamed."""
    base = zoo.model_class(name).from_pretrained(folder, dtype=dtype)
    base.set_experts_implementation("eager")
    torch.manual_seed(0)
    return cast(PeftModel, get_peft_model(base, lora(name, dropout=dropout)))


def streamed(
    name: str,
    folder: Path,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> PeftModel:
    """The same model and adapter through `airtune.load`."""
    torch.manual_seed(0)
    config = lora(name, dropout=dropout)
    return cast(PeftModel, airtune.load(folder, lora=config, dtype=dtype, device=device, **options))


def adapter(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def ragged_batch(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    """Random text, padded on the right; rows of 12, 11, ... tokens."""
    input_ids = zoo.random_ids(rows, length)
    attention_mask = torch.ones_like(input_ids)
    for row in range(rows):
        attention_mask[row, length - row :] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def split_by_rows(model: PeftModel, rows: int, micro_batch_size: int) -> None:
    """Run each layer of a resident model on micro-batches: the naive form of layer-major micro-batching.

    It draws dropout in the same order as the streamed model, which the whole batch at once does not.
    """
    for layer in find_layers(cast(PreTrainedModel, model.get_base_model())).values():
        layer.forward = _naive_split(layer.forward, rows, micro_batch_size)  # type: ignore[method-assign]


def _naive_split(forward: Callable[..., Any], rows: int, size: int) -> Callable[..., Any]:
    def split(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}

        def part(start: int) -> Any:
            def take(leaf: Any) -> Any:
                batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
                return leaf[start : start + size] if batched else leaf

            part_args, part_kwargs = tree_map(take, (args, kwargs))
            return forward(*part_args, **part_kwargs)

        return torch.cat([part(start) for start in range(0, rows, size)])

    return split


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in adapter(model).items() if p.grad is not None}


def relative_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Largest |got - want| / |want| over the tensors (norms), which must be the same ones."""
    assert got.keys() == want.keys()
    floor = 1e-6 * max(tensor.norm() for tensor in want.values())
    return max(((got[n].double() - w.double()).norm() / (w.norm() + floor)).item() for n, w in want.items())
