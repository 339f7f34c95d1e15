"""transformers' TrainingArguments for a streamed run: which there are, which are fixed, which are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from airtune.unsupported import REFUSED


def training_fields() -> dict[str, Any]:
    """Name -> type of every field of TrainingArguments that may be given."""
    hints = get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


def training_arguments(options: Mapping[str, Any], *, output_dir: Path, seed: int) -> TrainingArguments:
    """`options` as TrainingArguments, with what a streamed run needs. ValueError for what cannot be."""
    if rows := options.get("per_device_train_batch_size"):
        # In an evaluation too a pass over the weights costs the same for one row as for many.
        options = {"per_device_eval_batch_size": rows, **options}
    # The model stays on the CPU, also where its layers visit an accelerator; tracking is ours.
    args = TrainingArguments(**options, output_dir=str(output_dir), seed=seed, use_cpu=True, report_to="none")
    refuse_unsupported(args)
    _try_optimizer(args)
    return args


def refuse_unsupported(args: TrainingArguments) -> None:
    """ValueError for arguments that cannot be honoured beside streaming."""
    if not args.use_cpu:
        raise ValueError("use_cpu must be True: the model stays on the CPU, its layers visit the accelerator")
    if args.world_size > 1:
        raise ValueError(f"expected one process, got {args.world_size}: start the run without a launcher")
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} cannot be used with streaming: {reason}")


def _try_optimizer(args: TrainingArguments) -> None:
    """ValueError for options that the optimizer or its schedule would refuse when training begins."""
    try:
        made, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = made([torch.nn.Parameter(torch.zeros(1))], **options)
        assert not isinstance(args.lr_scheduler_kwargs, str), "TrainingArguments reads JSON itself"
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 2, args.lr_scheduler_kwargs)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"trainer.optim, or trainer.lr_scheduler_type, with these options: {error}"
        ) from error
