"""transformers' TrainingArguments for a streamed run: which there are, which are fixed, which are refused.

What streaming cannot honour is refused by name, also to those who build the Trainer themselves: it would do
nothing, or something else than was asked for, without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from transformers import TrainingArguments

_REFUSED = {
    "activation_checkpointing": "streaming recomputes each layer already",
    "bf16": "the base computes in the dtype it was loaded in, and adapters keep fp32 values",
    "fp16": "the base computes in the dtype it was loaded in, and adapters keep fp32 values",
    "bf16_full_eval": "the model is never cast",
    "fp16_full_eval": "the model is never cast",
    "torch_compile": "layers are wrapped one by one",
    "use_liger_kernel": "it replaces forwards that streaming wraps",
    "auto_find_batch_size": "memory is bounded by the stream's budgets",
    "label_smoothing_factor": "the loss is computed without ever holding all logits",
    "push_to_hub": "push the folder `adapter` when the run is over",
}


def training_fields() -> dict[str, Any]:
    """Name -> type of every field of TrainingArguments that may be given."""
    hints = get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


def training_arguments(options: Mapping[str, Any], *, output_dir: Path, seed: int) -> TrainingArguments:
    """`options` as TrainingArguments, with what a streamed run needs. ValueError when they contradict."""
    ours: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "use_cpu": True,  # the model stays on the CPU, also where its layers visit an accelerator
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # such a loss stops the run, and must never be averaged away
    }
    if {"save_steps", "save_strategy"}.isdisjoint(options):
        ours["save_strategy"] = "no"
    args = TrainingArguments(**{**options, **ours})
    refuse_unsupported(args)
    return args


def refuse_unsupported(args: TrainingArguments) -> None:
    """ValueError for arguments that cannot be honoured beside streaming."""
    if not args.use_cpu:
        raise ValueError("use_cpu must be True: the model stays on the CPU, its layers visit the accelerator")
    if args.world_size > 1:
        raise ValueError(f"expected one process, got {args.world_size}: start the run without a launcher")
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ValueError(f"{name} cannot be used with streaming: {reason}")
    if args.deepspeed or args.fsdp:
        raise ValueError("deepspeed and fsdp cannot be used with streaming: layers are streamed, not sharded")
