"""`python -m airtune.inspect_data`: the table, the lengths and marked samples, with the tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from airtune.inspect_data import main
from tests.tiny_tokenizer import CHAT_ROW, tiny_tokenizer


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a tokenizer and nothing else of a model, and two files of rows."""
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    long = {"messages": [{"role": "user", "content": "yes " * 90}, {"role": "assistant", "content": "no"}]}
    rows = [CHAT_ROW, CHAT_ROW, long, CHAT_ROW]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{cut")
    (tmp_path / "eval.jsonl").write_text(json.dumps(CHAT_ROW))
    return tmp_path


def words(home: Path, *more: str) -> list[str]:
    return [f"model.path={home / 'base'}", f"data.train={home / 'chat.jsonl'}", "data.bad_rows=skip", *more]


def test_it_shows_what_became_of_the_rows(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, "data.max_length=64", f"data.eval={home / 'eval.jsonl'}", "samples=2")) == 0
    out = capsys.readouterr().out
    training, evaluation = out.split("evaluation data\n")
    table = [line.split() for line in training.splitlines()]
    for line in ("rows read 5", "rows used 3", "rows truncated 0", "tokens 48", "tokens supervised 6"):
        assert any(got[: len(line.split())] == line.split() for got in table)
    assert f"dropped, longer than max_length             1  first at {home}/chat.jsonl:3\n" in training
    assert f"first at {home}/chat.jsonl:5: not JSON" in training
    assert "tokens of a row" in training
    assert training.count("[[yes<|im_end|>]]") == 2 and evaluation.count("[[yes<|im_end|>]]") == 1
    assert "\x1b" not in out


def test_a_recipe_of_a_training_run_is_enough(
    home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    again = words(home, "+recipe=quickstart_sft", "samples=1")
    assert main(again) == 0 and main(again) == 0
    first, second = capsys.readouterr().out.split("training data\n")[1:]
    assert first == second
    assert sum("earlier start" in record.message for record in caplog.records) <= 1  # of a log at this level
    assert any((home / "cache" / "prepared").iterdir())


def test_nothing_is_kept_where_that_was_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, "data.cache=false", "samples=0")) == 0
    assert "rows used" in capsys.readouterr().out
    assert not (home / "cache").exists()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["data.train=nowhere.jsonl"], 1, "no file is called"),
        (["data.max_length=3"], 1, "no row is left"),
        (["data.bad_rows=error"], 1, "chat.jsonl:5: not JSON"),
        (["model.path=/nowhere/model"], 1, "there is no folder /nowhere/model"),
    ],
)
def test_a_mistake_is_one_message(
    home: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str
) -> None:
    assert main(words(home, *more)) == code
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and shown.out == ""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("samples=-1", "samples: expected 0 or more"),
        ("data.bad_rows=ignore", "data.bad_rows: expected one of error, skip"),
        ("data.packing=true", "data.packing"),
        ("trainer.max_steps=3", "trainer.max_steps"),
    ],
)
def test_a_wrong_key_is_said_at_once(
    home: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words(home, word))
    assert message in capsys.readouterr().err
