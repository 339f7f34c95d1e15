"""The keys of `trainer:`, which are fields of transformers' `TrainingArguments` and not ours.

They are read as our own keys are, against the type hints of `TrainingArguments`, which the caller brings:
importing transformers takes seconds, and a misspelt key should not. Two kinds are refused by name, which
needs no hints: what another key of ours sets, and what streaming cannot honour (see `unsupported`).
"""

from __future__ import annotations

from collections.abc import Mapping

from airtune.checks import ConfigError, type_problem, unknown
from airtune.unsupported import REFUSED

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


def check_trainer_keys(trainer: Mapping[str, object], fields: Mapping[str, object]) -> None:
    """Check the keys and values of `trainer:` against the real fields of `TrainingArguments`.

    Args:
        trainer: field name -> value, as in `TrainConfig.trainer`.
        fields: field name -> type hint, of `run.arguments.training_fields`.

    Raises:
        ConfigError: with a line for each unknown, refused or wrongly typed key.
    """
    problems = refused_trainer_keys(trainer)
    for key, value in trainer.items():
        if key in fields:
            problems += type_problem(f"trainer.{key}", value, fields[key])
        elif key not in REFUSED:
            problems.append(unknown(key, fields, prefix="trainer."))
    if problems:
        raise ConfigError("\n".join(problems))


def refused_trainer_keys(trainer: Mapping[str, object]) -> list[str]:
    """A line for each key of `trainer:` that another key sets or that streaming cannot honour, by name."""
    elsewhere = [
        f"trainer.{key}: set {_SET_ELSEWHERE[key]} instead" for key in trainer if key in _SET_ELSEWHERE
    ]
    # `false`, null and "" ask for nothing, so a recipe may say them aloud.
    asked = [key for key, value in trainer.items() if key in REFUSED and value]
    return elsewhere + [f"trainer.{key} cannot be used with streaming: {REFUSED[key]}" for key in asked]
