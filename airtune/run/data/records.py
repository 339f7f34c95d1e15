"""What a reader yields: rows, and rows that could not be read. Both know the place they came from.

A reader that raised at its first bad line could not go on to the next one, so a bad row is a value like any
other; whether it ends the run is decided by who asked for the rows (see `rows`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_NAMES = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object, or one line of a table, and the place that it was read from.

    where: `file:line` (the first line of a file is 1), or `file: row 3` where a file has no lines.
    """

    where: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A place with no row in it. kind: what such rows are counted under; reason: what is wrong with this."""

    where: str
    kind: str
    reason: str


def parse_json(text: str) -> object:
    """The value of a JSON text. ValueError also where it cannot be held, or holds what is no text."""
    try:
        value = json.loads(text)
    except RecursionError as error:  # a number of 5,000 digits is a ValueError as it is
        raise ValueError("nested too deep") from error
    # Half of a surrogate pair is legal JSON and no character: tokenizers fail on it.
    if "\\ud" in text.lower() and has_surrogate(json.dumps(value, ensure_ascii=False)):
        raise ValueError("a lone surrogate (\\ud800 to \\udfff) stands for no character")
    return value


def has_surrogate(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def describe(value: object) -> str:
    """A value in the words of JSON, cut short: `null`, `list [1, 2]`, `string "..."`."""
    if value is None:
        return "null"
    # Tables also hold what JSON does not: times, bytes, decimals.
    text = json.dumps(value, ensure_ascii=False, default=repr)
    cut = text if len(text) <= 40 else text[:37] + "..."
    return f"{_JSON_NAMES.get(type(value), type(value).__name__)} {cut}"
