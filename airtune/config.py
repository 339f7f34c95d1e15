"""The schema of every configuration key, and the values that make sense.

A large model takes minutes to open and hours to train, so every mistake that the configuration alone can
show is found before anything heavy is imported. Three small modules do it, and none of them needs torch:

    config.py    (this one) what keys there are, their types and units, which values contradict one another
    checks.py    plain mapping -> dataclass, with one clear line for each wrong key, type or missing value
    compose.py   command line + conf/*.yaml + recipe -> `Config`

Defaults stand in `conf/*/default.yaml`, each with its comment, and nowhere else: the dataclasses have none.
Tests that need a `Config` compose one, as users do. Entry points hand plain values on; no class of the
package takes a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ConfigError(ValueError):
    """A mistake in the user's configuration; its text is complete and is shown without a traceback."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model: frozen, streamed, never written."""

    path: str  # a local folder (absolute after composing) or a hub id
    revision: str | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    attn_implementation: Literal["auto", "sdpa", "eager"]
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The LoRA adapter: the only weights that are trained and saved."""

    r: int
    alpha: int
    dropout: float
    target_modules: list[str] | str  # "all-linear", module names, or one regular expression
    rslora: bool
    path: str | None  # a PEFT folder to go on from


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows of JSONL and what is learned from them."""

    train: list[str]  # JSONL files or globs (absolute after composing); one text is a list of one
    eval: list[str] | None
    format: Literal["auto", "messages", "prompt_completion", "text"]
    learn_on: Literal["assistant", "last_assistant", "completion", "all"]
    max_length: int  # tokens
    overlong: Literal["drop", "truncate", "error"]
    chat_template: str | None


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How weights and hidden states travel. Sizes are "auto" or text with a unit: "4GB", "1.5 GiB"."""

    device: str
    micro_batch_size: int  # rows that go through a layer at once
    device_memory: str
    host_memory: str
    file_access: Literal["auto", "mapped", "buffered", "direct"]
    poison: bool


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is shown and logged beside the metrics file, which is always written."""

    wandb: bool
    project: str
    run_name: str | None
    sample_prompts: list[str]
    sample_max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. `trainer` holds fields of `transformers.TrainingArguments` by name (see `checks`)."""

    output_dir: str
    resume: bool
    seed: int
    model: ModelConfig
    adapter: AdapterConfig
    data: DataConfig
    stream: StreamConfig
    trainer: dict[str, object]
    tracking: TrackingConfig


def contradictions(config: Config) -> list[str]:
    """One line for each value that its type allows and sense does not; empty when all is well."""
    adapter, data, stream, tracking = config.adapter, config.data, config.stream, config.tracking
    rules: list[tuple[bool, str, str, object]] = [
        (config.output_dir != "", "output_dir", "a folder", config.output_dir),
        (config.seed >= 0, "seed", "0 or more", config.seed),
        (config.model.path != "", "model.path", "a folder or a hub id", config.model.path),
        (adapter.r >= 1, "adapter.r", "a rank of 1 or more", adapter.r),
        (adapter.alpha > 0, "adapter.alpha", "more than 0", adapter.alpha),
        (0 <= adapter.dropout < 1, "adapter.dropout", "0 <= dropout < 1", adapter.dropout),
        (bool(adapter.target_modules), "adapter.target_modules", "module names", adapter.target_modules),
        (_filled(data.train), "data.train", "one file or more", data.train),
        (data.eval is None or _filled(data.eval), "data.eval", "null or one file or more", data.eval),
        (data.max_length >= 2, "data.max_length", "2 tokens or more", data.max_length),
        (stream.device != "", "stream.device", '"auto" or a device such as cuda:0', stream.device),
        (stream.micro_batch_size >= 1, "stream.micro_batch_size", "1 or more", stream.micro_batch_size),
        (
            tracking.sample_max_new_tokens >= 1,
            "tracking.sample_max_new_tokens",
            "1 or more",
            tracking.sample_max_new_tokens,
        ),
    ]
    lines = [f"{key}: expected {expected}, got {got!r}" for holds, key, expected, got in rules if not holds]
    strategy = config.trainer.get("eval_strategy", "no")
    if data.eval is None and strategy != "no":
        lines.append(
            f"trainer.eval_strategy is {strategy!r} but data.eval is null: give data.eval, or set it to no"
        )
    return lines + _bad_counts(config.trainer)


def _bad_counts(trainer: dict[str, object]) -> list[str]:
    counts = ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
    given = [(key, trainer[key]) for key in counts if key in trainer]
    return [f"trainer.{key}: expected 1 or more, got {n}" for key, n in given if isinstance(n, int) and n < 1]


def _filled(files: list[str]) -> bool:
    return bool(files) and all(files)
