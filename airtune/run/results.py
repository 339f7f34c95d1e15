"""What an evaluation leaves: numbers as JSON, a line for each row, a table, and the same numbers in W&B.

    results.json     {"model", "adapter", "loss": {side: numbers}, "answers": {side: numbers},
                      "tasks": {side: {task: numbers}}, "cost": {...}}; a side is "adapter" or "base"
    rows.jsonl       a line for each row: its tokens, its loss with the adapter and without
    answers.jsonl    a line for each answered row: what was expected, what was said, the scores

JSON has no word for what is not finite: such a number is null. Files are renamed when they are whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from airtune.durable import write_whole

RESULTS, ROWS, ANSWERS = "results.json", "rows.jsonl", "answers.jsonl"


def refuse_existing(folder: Path) -> None:
    """ValueError when `folder` holds the results of another evaluation, or is none.

    RESULTS is written last: what an interrupted evaluation has left without it may be written again.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; choose another")
    if (folder / RESULTS).exists():
        raise ValueError(
            f"output_dir {folder} holds {RESULTS} of an earlier evaluation: choose another, or delete it"
        )


def make_folder(folder: Path) -> None:
    """A folder without what an interrupted evaluation has left, which would pass for a part of this one.

    OSError when nothing can be written there: said before hours of evaluation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, ANSWERS):
        (folder / name).unlink(missing_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output_dir {folder} cannot be written to; choose another")


def write_json(path: Path, value: object) -> None:
    write_whole(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    write_whole(path, "".join(json.dumps(finite(line), ensure_ascii=False) + "\n" for line in lines))


def table(named: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each name with its value on each side, `-` where it has none (see `by_name`)."""
    sides = list(dict.fromkeys(side for values in named.values() for side in values))
    cells = [["", *sides]]
    cells += [[name, *(_shown(values.get(side)) for side in sides)] for name, values in named.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    return "".join("  ".join(line).rstrip() + "\n" for line in lines)


def by_name(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """name -> side -> value, out of {part: {side: {name: value}}}; a task's are called `task metric`."""
    named: dict[str, dict[str, float]] = {}
    for sides in results.values():
        for side, values in sides.items():
            for name, value in values.items():
                metrics = value.items() if isinstance(value, Mapping) else [("", value)]
                for metric, number in metrics:
                    named.setdefault(f"{name} {metric}".rstrip(), {})[side] = number
    return named


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def finite(value: object) -> object:
    """`value`, with null for what JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
