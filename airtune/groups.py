"""The groups of keys that commands share: their types and units, and which values make no sense.

A group is a folder of `conf/` and a dataclass here, and a command (see `config`) is made of groups. Defaults
stand in `conf/`, each with its comment, and nowhere else: the dataclasses have none. This file imports the
standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, Self


class Kind(Enum):
    """What a text stands for where it is more than a word (see `kinds`)."""

    # Paths are absolute after composing.
    FILE = "a file or a folder"
    SOURCE = "a file, a folder, a glob or hf:owner/name"
    MODEL = "a folder or a hub id"
    TEMPLATE = "a file, a name, or the template itself"
    SIZE = '"auto", or bytes as text with a unit: "4GB", "1.5 GiB"'
    PROSE = "what people write: taken from the command line as it stands"


File = Annotated[str, Kind.FILE]
Source = Annotated[str, Kind.SOURCE]
Model = Annotated[str, Kind.MODEL]
Template = Annotated[str, Kind.TEMPLATE]
Size = Annotated[str, Kind.SIZE]
Prose = Annotated[str, Kind.PROSE]

Rule = tuple[bool, str, str]  # whether it holds, the key it is about, what is expected of the key's value
SEED = "a seed from 0 to 4294967295"  # what NumPy takes


class Keys:
    """A group of keys, or all keys of a command."""

    def rules(self) -> list[Rule]:
        """What the types allow and sense does not."""
        return []

    def completed(self) -> Self:
        """With the values that follow from others."""
        return self


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Keys):
    """A model that is read and not run."""

    path: Model
    revision: str | None
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SourceConfig):
    """The base model: frozen, streamed, never written."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    attn_implementation: Literal["auto", "sdpa", "eager"]


@dataclass(frozen=True, kw_only=True)
class SavedAdapterConfig(Keys):
    """An adapter that is used as it is."""

    path: File | None  # a PEFT folder


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(SavedAdapterConfig):
    """The LoRA adapter: the only weights that are trained and saved. path: to go on from."""

    r: int
    alpha: int
    dropout: float
    target_modules: list[str] | str  # "all-linear", module names, or one regular expression
    target_parameters: list[str]  # of stacked experts, such as mlp.experts.down_proj
    rslora: bool

    def rules(self) -> list[Rule]:
        return [
            (self.r >= 1, "r", "a rank of 1 or more"),
            (self.alpha > 0, "alpha", "more than 0"),
            (0 <= self.dropout < 1, "dropout", "0 <= dropout < 1"),
            (bool(self.target_modules or self.target_parameters), "target_modules", "module names"),
        ]


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Keys):
    """How conversations are written."""

    chat_template: Template | None


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig(ChatConfig):
    """Rows to evaluate on, and what of them is learned, or would be."""

    eval: list[Source] | dict[Source, float] | None  # with a weight for each; one text is a list of one
    format: Literal[
        "auto",
        "messages",
        "prompt_completion",
        "text",
        "alpaca",
        "sharegpt",
        "preference",
        "tokens",
    ]
    learn_on: Literal["assistant", "last_assistant", "completion", "all"]
    max_length: int  # tokens
    overlong: Literal["drop", "truncate", "error"]
    bad_rows: Literal["error", "skip"]
    cache: bool

    def rules(self) -> list[Rule]:
        files = "null, or one file or more, with weights above 0 if any"
        return [
            (self.eval is None or _filled(self.eval), "eval", files),
            (self.max_length >= 2, "max_length", "2 tokens or more"),
        ]


@dataclass(frozen=True, kw_only=True)
class DataConfig(EvalDataConfig):
    """Rows to train on too."""

    train: list[Source] | dict[Source, float]

    def rules(self) -> list[Rule]:
        files = "one file or more, with weights above 0 if any"
        return [(_filled(self.train), "train", files), *super().rules()]


@dataclass(frozen=True, kw_only=True)
class StreamConfig(Keys):
    """How weights and hidden states travel."""

    device: str
    micro_batch_size: int  # rows that go through a layer at once
    device_memory: Size
    host_memory: Size
    file_access: Literal["auto", "mapped", "buffered", "direct"]
    poison: bool

    def rules(self) -> list[Rule]:
        return [
            (self.device != "", "device", '"auto" or a device such as cuda:0'),
            (self.micro_batch_size >= 1, "micro_batch_size", "1 or more"),
        ]


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Keys):
    """Where results are logged beside the files, which are always written."""

    wandb: bool
    project: str
    run_name: str | None


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(WandbConfig):
    """What is shown during a run too."""

    sample_prompts: list[str]
    sample_max_new_tokens: int

    def rules(self) -> list[Rule]:
        return [(self.sample_max_new_tokens >= 1, "sample_max_new_tokens", "1 or more")]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Keys):
    """What a model is asked, and how many questions share a pass over its weights."""

    compare: bool
    batch_tokens: int
    scores: list[str]
    pattern: str | None  # a regular expression
    ignore_space: bool
    max_new_tokens: int
    batch_size: int  # rows that are answered at once
    limit: int | None
    tasks: list[str]
    task_folder: File | None
    num_fewshot: int | None
    apply_chat_template: bool

    def rules(self) -> list[Rule]:
        known = ("exact_match", "regex", "rouge_l")
        return [
            (self.batch_tokens >= 1, "batch_tokens", "1 or more"),
            (set(self.scores) <= set(known), "scores", f"some of {', '.join(known)}"),
            (
                ("regex" in self.scores) == (self.pattern is not None),
                "pattern",
                "a regular expression if regex is among eval.scores, null if it is not",
            ),
            (self.max_new_tokens >= 1, "max_new_tokens", "1 or more"),
            (self.batch_size >= 1, "batch_size", "1 or more"),
            (_at_least_1(self.limit), "limit", "null, or 1 or more"),
            (all(self.tasks), "tasks", "names of tasks"),
            (self.num_fewshot is None or self.num_fewshot >= 0, "num_fewshot", "null, or 0 or more"),
        ]


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Keys):
    """How the next token is chosen. What is null is as the model's own generation_config says."""

    max_new_tokens: int | None  # null: up to the model's limit
    do_sample: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    num_beams: int | None
    repetition_penalty: float | None
    stop: list[str]
    prompt_lookup_num_tokens: int | None
    assistant_model: Model | None

    def rules(self) -> list[Rule]:
        guesses = {self.prompt_lookup_num_tokens, self.assistant_model} != {None}
        greedy = "more than 0 (for greedy decoding write do_sample=false)"
        return [
            (_at_least_1(self.max_new_tokens), "max_new_tokens", "null, or 1 or more"),
            (self.temperature is None or self.temperature > 0, "temperature", f"null, or {greedy}"),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p", "null, or 0 < top_p <= 1"),
            (self.top_k is None or self.top_k >= 0, "top_k", "null, or 0 (no limit) or more"),
            (_at_least_1(self.num_beams), "num_beams", "null, or 1 or more"),
            (
                self.num_beams in (None, 1) or not guesses,
                "num_beams",
                "null or 1 beside prompt_lookup_num_tokens and assistant_model",
            ),
            (
                self.repetition_penalty is None or self.repetition_penalty > 0,
                "repetition_penalty",
                "null, or more than 0",
            ),
            (all(self.stop), "stop", "texts that are not empty"),
            (_at_least_1(self.prompt_lookup_num_tokens), "prompt_lookup_num_tokens", "null, or 1 or more"),
            (
                self.assistant_model is None or self.prompt_lookup_num_tokens is None,
                "assistant_model",
                "null beside prompt_lookup_num_tokens: one of the two guesses tokens",
            ),
            (
                self.do_sample is not False or {self.temperature, self.top_p, self.top_k} == {None},
                "do_sample",
                "true or null beside temperature, top_p or top_k, which have no effect without sampling",
            ),
        ]


def _filled(sources: list[str] | dict[str, float]) -> bool:
    weights = sources.values() if isinstance(sources, dict) else [1.0]
    return bool(sources) and all(0 < weight < math.inf for weight in weights)


def _at_least_1(number: int | None) -> bool:
    return number is None or number >= 1
