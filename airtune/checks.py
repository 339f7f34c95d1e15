"""Plain mapping -> dataclass, with one clear line for everything that is wrong with it.

Hydra's own checks let much through: `+adapter.rr=8` is added without a word, `clip=None` becomes the text
"None", a missing `???` fails only when it is read, and what does fail is reported one at a time. So the
composed configuration is taken as plain data and read against the type hints here: unknown keys come with
the closest known one, missing values all at once.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from airtune.groups import Keys
from airtune.unsupported import ISOLATION

T = TypeVar("T")
MISSING = "???"


class ConfigError(ValueError):
    """A mistake in the user's configuration; its text is complete and is shown without a traceback."""


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


def contradictions(config: Keys, prefix: str = "") -> list[str]:
    """One line for each value that its type allows and sense does not; empty when all is well."""
    lines = [
        f"{prefix}{key}: expected {expected}, got {_value_at(config, key)!r}"
        for holds, key, expected in config.rules()
        if not holds
    ]
    for name, value in vars(config).items():
        if isinstance(value, Keys):
            lines += contradictions(value, f"{prefix}{name}.")
    return lines


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


def _value_at(config: object, key: str) -> object:
    name, _, rest = key.partition(".")
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name)
    return _value_at(value, rest) if rest else value


def _inspect(cls: type, mapping: Mapping[str, object], prefix: str = "") -> tuple[list[str], list[str]]:
    """(a line for each unknown key or wrong type, the paths of missing values)."""
    hints = get_type_hints(cls)
    problems = [_unknown_key(key, hints, prefix, mapping) for key in mapping if key not in hints]
    missing: list[str] = []
    for name, hint in hints.items():
        path, value = prefix + name, mapping.get(name, MISSING)
        if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            inner = _inspect(hint, value, f"{path}.")
            problems, missing = problems + inner[0], missing + inner[1]
        elif value == MISSING:
            missing.append(path)
        else:
            problems += type_problem(path, _widened(value, hint), hint)
    return problems, missing


def _unknown_key(key: str, known: Iterable[str], prefix: str, siblings: Mapping[str, object]) -> str:
    if prefix + key == "data.packing":
        return f"data.packing cannot be used with streaming: {ISOLATION}"
    for group, keys in siblings.items():
        if isinstance(keys, Mapping) and key in keys:
            return f"unknown key {prefix + key!r}; did you mean {f'{prefix}{group}.{key}'!r}?"
    return unknown(key, known, prefix=prefix)


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
    if isinstance(value, int) and not isinstance(value, bool) and float in choices and int not in choices:
        return float(value)
    return value


def type_problem(path: str, value: object, hint: object) -> list[str]:
    """A line when `value` is no `hint`, else none."""
    choices = _members(hint)
    if any(_fits(value, choice) for choice in choices):
        return []
    expected = " or ".join(dict.fromkeys(map(_described, choices)))
    words = [str(word) for choice in choices for word in _words(choice)]
    close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    hint_text = f"; did you mean {close[0]!r}?" if close else ""
    if value is False and "no" in words:
        hint_text = '; YAML reads a bare no as false, write "no"'
    return [f"{path}: expected {expected}, got {value!r}{hint_text}"]


def _members(hint: object) -> tuple[object, ...]:
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(map(_is_enum, choices)):  # `SchedulerType | str` means the words of the enumeration, not any text
        return tuple(choice for choice in choices if choice is not str)
    return choices


def _fits(value: object, hint: object) -> bool:
    """Whether `value`, as YAML gives it, is a `hint`; a whole number is a number, true and false are not."""
    origin = get_origin(hint) or hint
    if hint is Any or hint is object:
        return True
    if origin is Literal or _is_enum(hint):
        return value in _words(hint)
    if origin is list:
        return isinstance(value, list) and all(_item_fits(item, hint) for item in value)
    if origin is dict and get_args(hint):
        key_hint, item_hint = get_args(hint)
        return isinstance(value, dict) and all(
            _fits(key, key_hint) and _fits(item, item_hint) for key, item in value.items()
        )
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(origin, type) and isinstance(value, origin)


def _item_fits(item: object, list_hint: object) -> bool:
    item_hints = get_args(list_hint)
    return not item_hints or any(_fits(item, choice) for choice in _members(item_hints[0]))


def _is_enum(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _words(hint: object) -> list[object]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [member.value for member in hint] if isinstance(hint, type) and issubclass(hint, Enum) else []


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
    if get_origin(hint) is dict and get_args(hint):
        return f"a mapping from {' to '.join(_described(part) for part in get_args(hint))}"
    origin = get_origin(hint) or hint
    return "a group of keys" if is_dataclass(origin) else _NAMES.get(origin, str(origin))
