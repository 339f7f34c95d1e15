"""The commands: which keys each has, and the values that make no sense together.

A large model takes minutes to open and hours to train, so every mistake that the configuration alone can
show is found before anything heavy is imported. Small modules do it, and none of them needs torch:

    groups.py        the groups of keys that commands share
    config.py        (this one) the commands
    checks.py        plain mapping -> dataclass, with one clear line for each wrong key, type or missing value
    foreign_keys.py  what a recipe says to another command is no mistake in this one
    kinds.py         texts that are paths, sizes or prose
    compose.py       command line + conf/*.yaml + recipe -> the configuration of one command
    trainer_keys.py  the keys of `trainer:`, which are those of transformers
    unsupported.py   what of them streaming cannot honour
    usage.py         --help

A command is a dataclass here with its line in `COMMANDS`, and `conf/NAME.yaml`, which lists its groups. Tests
that need a configuration compose one, as users do. Entry points hand plain values on; no class of the package
takes a config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from airtune.groups import (
    SEED,
    AdapterConfig,
    ChatConfig,
    DataConfig,
    DecodingConfig,
    EvalConfig,
    EvalDataConfig,
    File,
    Keys,
    ModelConfig,
    Prose,
    Rule,
    SavedAdapterConfig,
    SourceConfig,
    StreamConfig,
    TrackingConfig,
    WandbConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Keys):
    """One training run. `trainer` holds fields of `transformers.TrainingArguments` (see `trainer_keys`)."""

    output_dir: File
    resume: bool
    seed: int
    model: ModelConfig
    adapter: AdapterConfig
    data: DataConfig
    stream: StreamConfig
    trainer: dict[str, object]
    tracking: TrackingConfig

    def completed(self) -> Self:
        """Evaluates once an epoch where there is something to evaluate on and nothing else was asked."""
        implied = {"eval_strategy": "epoch" if self.data.eval else "no"}
        if self.trainer.get("save_strategy") == "best":
            implied["metric_for_best_model"] = "loss"
        return replace(self, trainer=implied | self.trainer)

    def rules(self) -> list[Rule]:
        strategy = self.trainer.get("eval_strategy", "no")
        ends = "num_train_epochs" if self.trainer.get("max_steps", -1) == -1 else "max_steps"
        counts = ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
        given = [(key, self.trainer[key]) for key in [*counts, ends, "learning_rate"] if key in self.trainer]
        return [
            (0 <= self.seed < 2**32, "seed", SEED),
            (
                self.data.eval is not None or strategy in ("no", False),  # false: a bare no, see `checks`
                "data.eval",
                f"files (trainer.eval_strategy is {strategy!r}; or set that to no)",
            ),
            (
                self.trainer.get("metric_for_best_model") in (None, "loss", "eval_loss"),
                "trainer.metric_for_best_model",
                "loss, which is what evaluation computes",
            ),
            *[(not isinstance(n, int | float) or n > 0, f"trainer.{key}", "more than 0") for key, n in given],
        ]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Keys):
    """Texts that a model writes, with an adapter or without one."""

    prompt: Prose | None
    prompts: File | None
    system: Prose | None
    chat: bool | Literal["auto"]
    output: File | None
    batch_size: int  # prompts that are answered at once
    seed: int
    model: ModelConfig
    adapter: SavedAdapterConfig
    data: ChatConfig
    stream: StreamConfig
    generation: DecodingConfig

    def rules(self) -> list[Rule]:
        return [
            (self.prompt is None or self.prompts is None, "prompts", "null beside prompt: give one of them"),
            (self.prompt != "", "prompt", "some text for the model to go on from"),
            (self.system is None or self.chat is not False, "system", "null beside chat=false"),
            (self.batch_size >= 1, "batch_size", "1 or more"),
            (0 <= self.seed < 2**32, "seed", SEED),
        ]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Keys):
    """How good a model is, with an adapter or without one."""

    output_dir: File
    seed: int
    model: ModelConfig
    adapter: SavedAdapterConfig
    data: EvalDataConfig
    stream: StreamConfig
    eval: EvalConfig
    tracking: WandbConfig

    def rules(self) -> list[Rule]:
        asked = self.eval.tasks or self.data.eval
        return [
            (0 <= self.seed < 2**32, "seed", SEED),
            (bool(asked), "data.eval", "files, or some eval.tasks: there is nothing to evaluate on"),
            (not self.eval.scores or bool(self.data.eval), "data.eval", "files with answers for eval.scores"),
            (
                not self.eval.compare or self.adapter.path is not None,
                "adapter.path",
                "a folder to eval.compare",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Keys):
    """Training data as a model will see it."""

    samples: int  # rows that are shown as text
    seed: int
    model: ModelConfig
    data: DataConfig

    def rules(self) -> list[Rule]:
        return [(self.samples >= 0, "samples", "0 or more"), (0 <= self.seed < 2**32, "seed", SEED)]


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(Keys):
    """A copy of a model with packed weights."""

    scheme: Literal["nf4", "int8"]
    output_dir: File
    model: SourceConfig


COMMANDS: dict[str, type[Keys]] = {
    "train": TrainConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "inspect_data": InspectConfig,
    "quantize": QuantizeConfig,
}
