"""What a run says of itself at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airtune.run.report import loading_line, report


def model_at(revision: str | None) -> Any:
    base = SimpleNamespace(name_or_path="owner/base")
    config = SimpleNamespace(revision=revision)
    return SimpleNamespace(get_base_model=lambda: base, peft_config={"default": config})


def test_the_line_that_loads_the_model_names_its_revision() -> None:
    assert "'owner/base', trust_remote_code=True)" in loading_line(model_at(None), Path("run/adapter"))
    assert "revision='v2')" in loading_line(model_at("v2"), Path("run/adapter"))


def test_an_evaluation_that_was_not_finite_does_not_keep_a_run_from_its_report() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "tokens": 10, "tokens_per_s": 5.0},
        {"step": 1, "eval_loss": None},
        {"step": 2, "loss": 1.0, "tokens": 10, "tokens_per_s": 5.0},
        {"step": 2, "eval_loss": 1.5},
    ]
    model = model_at(None)
    shown = report(lines, model, Path("run/adapter"))
    assert "eval loss     1.5000\n" in shown and "loss          2.0000 -> 1.0000\n" in shown
    assert "eval loss" not in report(lines[:2], model, Path("run/adapter"))
