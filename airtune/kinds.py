"""Texts that are more than words (`groups.Kind`): paths, sizes and prose, found by the type of their key.

Relative paths mean the directory in which the command was typed. What could be a hub id or a folder is the
folder if there is one. Whatever command a key belongs to, its annotation says all that is needed here.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from airtune.groups import Keys, Kind
from airtune.sizes import parse_bytes

K = TypeVar("K", bound=Keys)


def with_absolute_paths(config: K) -> K:
    """`config` with every path in it made absolute."""
    located = {
        name: with_absolute_paths(value) if isinstance(value, Keys) else _located(value, hint)
        for name, value, hint in _annotated(config)
    }
    return replace(config, **located)  # type: ignore[type-var]  # all keys are dataclasses


def bad_texts(config: Keys, prefix: str = "") -> list[str]:
    """A line for each size that is none, each empty path, and each two keys of a mapping for one place."""
    lines = []
    for name, value, hint in _annotated(config):
        kind = _kind(hint)
        if isinstance(value, Keys):
            lines += bad_texts(value, f"{prefix}{name}.")
        elif kind is Kind.SIZE and isinstance(value, str):
            lines += [f"{prefix}{name}: {reason}" for reason in _size_problem(value)]
        elif kind in _PLACES:
            lines += [f"{prefix}{name}: {reason}" for reason in _place_problems(value, kind)]
    return lines


def prose_keys(schema: type[Keys]) -> set[str]:
    """The keys of a command, outside its groups, whose values are prose."""
    hints = get_type_hints(schema, include_extras=True)
    return {name for name, hint in hints.items() if _kind(hint) is Kind.PROSE}


def file_or_text(template: str) -> str:
    """A chat template is a file, a name the tokenizer knows, or Jinja itself, whose braces no path has."""
    return template if "{" in template or not Path(template).is_file() else absolute(template)


def file_or_hub(source: str) -> str:
    """What starts with `hf:` is a data set on the hub, and anything else a path."""
    return source if source.startswith("hf:") else absolute(source)


def absolute(path: str) -> str:
    """`path` from the current directory."""
    return str(Path(path).expanduser().absolute())


_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def folder_or_hub_id(path: str) -> str:
    """A local folder wins where both could be meant; what cannot be a hub id is a path."""
    return path if _HUB_ID.fullmatch(path) and not Path(path).exists() else absolute(path)


_PLACES: dict[Kind, Callable[[str], str]] = {
    Kind.FILE: absolute,
    Kind.SOURCE: file_or_hub,
    Kind.MODEL: folder_or_hub_id,
    Kind.TEMPLATE: file_or_text,
}


def _annotated(config: Keys) -> Iterator[tuple[str, object, object]]:
    """(name, value, type) of every key."""
    hints = get_type_hints(type(config), include_extras=True)
    for name, value in vars(config).items():
        yield name, value, hints[name]


def _located(value: Any, hint: object) -> Any:
    place = _PLACES.get(_kind(hint) or Kind.PROSE)
    if place is None or value is None:
        return value
    if isinstance(value, dict):
        return {place(item): weight for item, weight in value.items()}
    return [place(item) for item in value] if isinstance(value, list) else place(value)


def _kind(hint: object) -> Kind | None:
    """The kind of a text, of the texts in a list or before the values of a mapping, or of a text or null."""
    if get_origin(hint) is Annotated:
        return next((note for note in get_args(hint)[1:] if isinstance(note, Kind)), None)
    if get_origin(hint) in (list, dict, Union, types.UnionType):
        return next((kind for kind in map(_kind, get_args(hint)) if kind), None)
    return None


def _place_problems(value: object, kind: Kind) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | dict) else []
    if "" in texts:
        return [f"expected {kind.value}, got ''"]
    same: dict[str, str] = {}
    for text in texts if isinstance(value, dict) else []:
        other = same.setdefault(_PLACES[kind](text), text)
        if other != text:  # the mapping would keep one weight of the two
            return [f"{other!r} and {text!r} are the same file: name it once, with one weight"]
    return []


def _size_problem(size: str) -> list[str]:
    """A bare number would be bytes, and likely means gigabytes."""
    try:
        if size.isdigit():
            raise ValueError(f"{size} has no unit; write {size}GB or {size}MiB")
        if size != "auto":
            parse_bytes(size)
    except ValueError as error:
        return [str(error)]
    return []
