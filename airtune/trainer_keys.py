"""The keys of `trainer:`, which are fields of transformers' `TrainingArguments` and not ours.

They are read as our own keys are, against the type hints of `TrainingArguments`, which the caller brings:
importing transformers takes seconds, and a misspelt key should not. Two kinds are refused by name, which
needs no hints: what another key of ours sets, and what streaming cannot honour.
"""

from __future__ import annotations

from collections.abc import Mapping

from airtune.checks import ISOLATION, ConfigError, type_problem, unknown

# Fields of TrainingArguments that a key of ours sets; two places for one value would contradict each other.
_SET_ELSEWHERE = {
    "output_dir": "output_dir",
    "seed": "seed",
    "resume_from_checkpoint": "resume=true",
    "run_name": "tracking.run_name",
    "project": "tracking.project",
    "report_to": "tracking.wandb=true",
    "use_cpu": "stream.device=cpu",
    "hub_token": "the environment variable HF_TOKEN (secrets stay out of configurations)",
}

_RECOMPUTED = "streaming already recomputes each layer in backward; leave it out"
_DTYPE = "set model.dtype for the base; adapters and optimizer are fp32"
_SHARDING = "layers are streamed, not sharded; leave it out"
_KERNELS = "it replaces forwards that streaming wraps; leave it out"

# Fields that streaming cannot honour, refused when they are switched on.
_REFUSED = {
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_compile": _KERNELS,
    "torch_compile_backend": _KERNELS,
    "torch_compile_mode": _KERNELS,
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "packing": ISOLATION,
    "padding_free": ISOLATION,
    "use_cache": "a cache that reaches a recomputed layer makes its gradients wrong; leave it out",
    "auto_find_batch_size": "set stream.device_memory and stream.micro_batch_size, which bound memory",
}


def check_trainer_keys(trainer: Mapping[str, object], fields: Mapping[str, object]) -> None:
    """Check the keys and values of `trainer:` against the real fields of `TrainingArguments`.

    Args:
        trainer: field name -> value, as in `TrainConfig.trainer`.
        fields: field name -> type hint. With `hints = typing.get_type_hints(TrainingArguments)` that is
            `{f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}`.

    Raises:
        ConfigError: with a line for each unknown, refused or wrongly typed key.
    """
    problems = refused_trainer_keys(trainer)
    for key, value in trainer.items():
        if key in fields:
            problems += type_problem(f"trainer.{key}", value, fields[key])
        elif key not in _REFUSED:
            problems.append(unknown(key, fields, prefix="trainer."))
    if problems:
        raise ConfigError("\n".join(problems))


def refused_trainer_keys(trainer: Mapping[str, object]) -> list[str]:
    """A line for each key of `trainer:` that another key sets or that streaming cannot honour, by name."""
    elsewhere = [
        f"trainer.{key}: set {_SET_ELSEWHERE[key]} instead" for key in trainer if key in _SET_ELSEWHERE
    ]
    # `false`, null and "" ask for nothing, so a recipe may say them aloud.
    asked = [key for key, value in trainer.items() if key in _REFUSED and value]
    return elsewhere + [f"trainer.{key} cannot be used with streaming: {_REFUSED[key]}" for key in asked]
