"""Plain mapping -> dataclass, with one clear line for everything that is wrong with it.

Hydra's own checks let much through: `+adapter.rr=8` is added without a word, `clip=None` becomes the text
"None", a missing `???` fails only when it is read, and what does fail is reported one at a time. So the
composed configuration is taken as plain data and read against the type hints here: unknown keys come with
the closest known one, missing values all at once. `trainer:` is read the same way against the hints of
`TrainingArguments`, which the caller brings: importing transformers takes seconds, and a misspelt key
should not.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from airtune.config import ConfigError

T = TypeVar("T")
MISSING = "???"

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
_ISOLATION = "rows would see one another; raise per_device_train_batch_size instead"

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
    "packing": _ISOLATION,
    "padding_free": _ISOLATION,
    "use_cache": "a cache that reaches a recomputed layer makes its gradients wrong; leave it out",
    "auto_find_batch_size": "set stream.device_memory and stream.micro_batch_size, which bound memory",
}


def from_mapping(cls: type[T], mapping: Mapping[str, object]) -> T:
    """`mapping` as the dataclass `cls`, nested dataclasses included.

    One text where a list of texts is expected becomes a list of one, and a whole number where text is
    expected its digits (`tracking.run_name=7`).

    Raises:
        ConfigError: with a line for each unknown key and wrong type, and one that names all missing values.
    """
    problems, missing = _inspect(cls, mapping)
    if missing:
        problems.append(f"missing: {', '.join(missing)} (write {missing[0]}=..., or start from a +recipe=)")
    if problems:
        raise ConfigError("\n".join(problems))
    return _built(cls, mapping)


def check_trainer_keys(trainer: Mapping[str, object], fields: Mapping[str, object]) -> None:
    """Check the keys and values of `trainer:` against the real fields of `TrainingArguments`.

    Args:
        trainer: field name -> value, as in `Config.trainer`.
        fields: field name -> type hint. With `hints = typing.get_type_hints(TrainingArguments)` that is
            `{f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}`.

    Raises:
        ConfigError: with a line for each unknown, refused or wrongly typed key.
    """
    problems = refused_trainer_keys(trainer)
    for key, value in trainer.items():
        if key in fields:
            problems += _type_problem(f"trainer.{key}", value, fields[key])
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


def none_texts(value: object, path: str = "") -> list[str]:
    """A line for each text "None" inside `value`: Python's word for what YAML and Hydra write as null."""
    if value == "None":
        return [f"{path}: got the text 'None'; for no value write {path}=null"]
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in none_texts(item, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [line for item in value for line in none_texts(item, path)]
    return []


def unknown(name: str, known: Iterable[str], what: str = "key", prefix: str = "") -> str:
    """The sentence about an unknown name, with the closest known one or else all of a short list."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        hint = f"did you mean {prefix + close[0]!r}?"
    elif len(names) <= 20:
        hint = f"known: {', '.join(prefix + known_name for known_name in names)}"
    else:
        hint = "no known one is close to it"
    return f"unknown {what} {prefix + name!r}; {hint}"


def _inspect(cls: type, mapping: Mapping[str, object], prefix: str = "") -> tuple[list[str], list[str]]:
    """(a line for each unknown key or wrong type, the paths of missing values)."""
    hints = get_type_hints(cls)
    problems = [unknown(key, hints, prefix=prefix) for key in mapping if key not in hints]
    missing: list[str] = []
    for name, hint in hints.items():
        path, value = prefix + name, mapping.get(name, MISSING)
        if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            inner = _inspect(hint, value, f"{path}.")
            problems, missing = problems + inner[0], missing + inner[1]
        elif value == MISSING:
            missing.append(path)
        else:
            problems += _type_problem(path, _widened(value, hint), hint)
    return problems, missing


def _built(cls: type[T], mapping: Mapping[str, object]) -> T:
    values: dict[str, object] = {}
    for name, hint in get_type_hints(cls).items():
        value = mapping[name]
        if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            values[name] = _built(hint, value)
        else:
            values[name] = _widened(value, hint)
    return cls(**values)


def _widened(value: object, hint: object) -> object:
    """`value` as the hint needs it where only its spelling differs."""
    choices = _members(hint)
    if isinstance(value, str) and list[str] in choices and str not in choices:
        return [value]
    if isinstance(value, int) and not isinstance(value, bool) and str in choices:
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and hint is float:
        return float(value)
    return value


def _type_problem(path: str, value: object, hint: object) -> list[str]:
    choices = _members(hint)
    if any(_fits(value, choice) for choice in choices) and not _outside_enum(value, choices):
        return []
    expected = " or ".join(
        dict.fromkeys(_described(choice) for choice in choices if not _shadowed(choice, choices))
    )
    words = [str(word) for choice in choices for word in _words(choice)]
    close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    hint_text = f"; did you mean {close[0]!r}?" if close else ""
    if value is False and "no" in words:
        hint_text = '; YAML reads a bare no as false, write "no"'
    return [f"{path}: expected {expected}, got {value!r}{hint_text}"]


def _members(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: object) -> bool:
    """Whether `value`, as YAML gives it, is a `hint`; a whole number is a number, true and false are not."""
    origin = get_origin(hint) or hint
    if hint is Any or hint is object:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_item_fits(item, hint) for item in value)
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [member.value for member in origin]
    return isinstance(origin, type) and isinstance(value, origin)


def _item_fits(item: object, list_hint: object) -> bool:
    item_hints = get_args(list_hint)
    return not item_hints or any(_fits(item, choice) for choice in _members(item_hints[0]))


def _outside_enum(value: object, choices: tuple[object, ...]) -> bool:
    """Hints such as `SchedulerType | str` mean the words of the enumeration, not any text."""
    return isinstance(value, str) and any(map(_is_enum, choices)) and value not in _all_words(choices)


def _shadowed(choice: object, choices: tuple[object, ...]) -> bool:
    return choice is str and any(map(_is_enum, choices))


def _is_enum(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _all_words(choices: tuple[object, ...]) -> list[object]:
    return [word for choice in choices for word in _words(choice)]


def _words(hint: object) -> list[object]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [member.value for member in hint]
    return []


_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
}


def _described(hint: object) -> str:
    words = _words(hint)
    if words:
        return f"one of {', '.join(map(str, words))}"
    if get_origin(hint) is list and get_args(hint):
        return f"a list of {_described(get_args(hint)[0])}"
    origin = get_origin(hint) or hint
    return "a group of keys" if is_dataclass(origin) else _NAMES.get(origin, str(origin))
