"""Files that are whole or not there, numbers that JSON can hold, and a table to look at."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from airtune.run.results import by_name, make_folder, refuse_existing, table, write_json, write_lines

FOUND = {
    "loss": {"adapter": {"rows": 1200, "loss": 0.5}, "base": {"rows": 1200, "loss": 2.0}},
    "answers": {"adapter": {"rouge_l": 0.25}},
    "tasks": {"adapter": {"arc_easy": {"acc": 0.75, "acc_stderr": 0.01}}},
}


def test_names_of_all_parts_stand_side_by_side() -> None:
    assert by_name(FOUND) == {
        "rows": {"adapter": 1200, "base": 1200},
        "loss": {"adapter": 0.5, "base": 2.0},
        "rouge_l": {"adapter": 0.25},
        "arc_easy acc": {"adapter": 0.75},
        "arc_easy acc_stderr": {"adapter": 0.01},
    }


def test_the_table() -> None:
    assert table(by_name(FOUND)) == (
        "                     adapter    base\n"
        "rows                   1,200   1,200\n"
        "loss                  0.5000  2.0000\n"
        "rouge_l               0.2500       -\n"
        "arc_easy acc          0.7500       -\n"
        "arc_easy acc_stderr   0.0100       -\n"
    )


def test_what_is_not_finite_is_null_and_other_scripts_are_legible(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": {"loss": math.inf, "n": 3}, "text": "кот"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"x": {"loss": None, "n": 3}, "text": "кот"} and "кот" in text
    write_lines(tmp_path / "b.jsonl", [{"nll": math.nan, "answer": "two\nlines"}, {"nll": 1.5}])
    assert (tmp_path / "b.jsonl").read_text() == '{"nll": null, "answer": "two\\nlines"}\n{"nll": 1.5}\n'


def test_earlier_results_are_not_overwritten(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "new")
    (tmp_path / "config.yaml").touch()
    refuse_existing(tmp_path)  # the folder of a training run
    (tmp_path / "rows.jsonl").touch()
    refuse_existing(tmp_path)  # of an evaluation that was interrupted: "start again", it said
    make_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]  # no part of it passes for a new one
    (tmp_path / "results.json").touch()
    with pytest.raises(ValueError, match=r"holds results.json of an earlier evaluation"):
        refuse_existing(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        refuse_existing(tmp_path / "config.yaml")
