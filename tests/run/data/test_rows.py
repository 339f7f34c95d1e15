"""All files of a run as rows of one form: laziness, weights, mixtures, and what is left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from airtune.run.data import rows as rows_module
from airtune.run.data.files import DataFile
from airtune.run.data.records import Row
from airtune.run.data.rows import OTHER_FORM, Rows, open_rows
from tests.tiny_tokenizer import CHAT_ROW, write_jsonl


def texts_of(rows: Rows) -> list[object]:
    return [row.fields["text"] for row in rows]


def test_rows_of_all_files_in_order_as_often_as_wanted(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path, {"text": "a"}, {"text": ""}, name="one.jsonl")
    (tmp_path / "two.csv").write_bytes(b"text\r\nb\r\n")
    rows = open_rows([one, str(tmp_path / "two.csv")])
    assert rows.form == "text"
    assert texts_of(rows) == texts_of(rows) == ["a", "", "b"]
    assert [row.where for row in rows] == [f"{one}:1", f"{one}:2", f"{tmp_path / 'two.csv'}:2"]


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def endless(file: DataFile) -> Iterator[Row]:
        for n in range(1_000_000_000):
            seen.append(n)
            yield Row(f"{file.name}:{n}", {"text": str(n)})

    monkeypatch.setattr(rows_module, "read", endless)
    rows = open_rows(write_jsonl(tmp_path))
    assert rows.form == "text"
    assert next(iter(rows)).fields == {"text": "0"}
    assert seen == [0, 0]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (CHAT_ROW, "messages"),
        ({"text": "x", "id": 7}, "text"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
    ],
)
def test_the_form_is_found_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, object], form: str
) -> None:
    path = write_jsonl(tmp_path, row, row)
    with caplog.at_level(logging.INFO, logger="airtune"):
        rows = open_rows(path)
        assert rows.form == form
        assert len(list(rows)) == 2
    assert caplog.text.count(f"form: {form}, found in {path}:1") == 1
    assert ("these fields are not used: id" in caplog.text) == ("id" in row)


def test_a_question_that_the_chosen_answer_needs_is_not_called_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"instruction": "Say", "input": "yes", "chosen": "yes", "rejected": "no", "id": 7}
    with caplog.at_level(logging.INFO, logger="airtune"):
        list(open_rows(write_jsonl(tmp_path, row), format="preference"))
    assert caplog.text.rstrip().endswith("these fields are not used: id")


def test_a_form_may_be_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = write_jsonl(tmp_path, {"text": "x", "prompt": "p", "completion": "c"})
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the row could be any of prompt_completion, text"):
        list(open_rows(both))
    with caplog.at_level(logging.INFO, logger="airtune"):
        assert texts_of(open_rows(both, format="text")) == ["x"]
    assert "form: text, as data.format says" in caplog.text
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected messages, got the fields text, prompt"):
        list(open_rows(both, format="messages"))


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_mixed_forms_name_the_first_row_of_each(tmp_path: Path, bad_rows: str) -> None:
    one = write_jsonl(tmp_path, CHAT_ROW, CHAT_ROW, name="one.jsonl")
    two = write_jsonl(tmp_path, CHAT_ROW, {"text": "x"}, CHAT_ROW, name="two.jsonl")
    with pytest.raises(ValueError, match=r"one.jsonl:1 is the first row of messages, .*two.jsonl:2 .* text"):
        list(open_rows([one, two], bad_rows=bad_rows))


def test_bad_rows_are_errors_with_a_place(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"text": "a"}, 0)
    with pytest.raises(ValueError, match=r"rows.jsonl:2: expected a JSON object, got number 0"):
        list(open_rows(path))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: expected text, got the fields text \(null\)"):
        list(open_rows(write_jsonl(tmp_path, {"text": ""}, {"text": None})))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the row is of no known form: the fields q"):
        list(open_rows(write_jsonl(tmp_path, {"q": 1})))


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"q": 1}\n{"text": "a"}\n[0]\n{"text": null}\n{"text": "\xff"}\n{"text": "b"}\n"cut')
    rows = open_rows(str(path), bad_rows="skip")
    for _ in range(2):  # the counts are of the last iteration
        assert texts_of(rows) == ["a", "b"]
        assert rows.skipped == Counter({OTHER_FORM: 2, "no JSON object": 1, "not UTF-8": 1, "not JSON": 1})
    assert rows.first_skipped["no JSON object"] == f"{path}:3: expected a JSON object, got list [0]"
    rows.refuse("here", OTHER_FORM, "a template refuses it")
    assert rows.skipped[OTHER_FORM] == 3


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_no_rows_are_an_error(tmp_path: Path, bad_rows: str) -> None:
    with pytest.raises(ValueError, match=r"no rows in .*empty\.jsonl"):
        list(open_rows(write_jsonl(tmp_path, name="empty.jsonl"), bad_rows=bad_rows))
    with pytest.raises(ValueError, match="no rows in"):
        _ = open_rows(write_jsonl(tmp_path, name="empty.jsonl"), bad_rows=bad_rows).form


def test_only_bad_rows_are_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, 0, {"q": 1}, {"q": 2})
    with pytest.raises(
        ValueError, match=r"no rows in .*\n1 skipped, .*:1: expected .*\n2 skipped, .*:2: the row"
    ):
        list(open_rows(path, bad_rows="skip"))


def weighted(tmp_path: Path, weight: float, seed: int = 0, n_rows: int = 100) -> list[int]:
    path = write_jsonl(tmp_path, *({"text": str(n)} for n in range(n_rows)))
    rows = open_rows({path: weight}, seed=seed)
    numbers = [int(str(row.fields["text"])) for row in rows]
    assert numbers == [int(str(row.fields["text"])) for row in rows]
    return numbers


def test_whole_weights_repeat_every_row(tmp_path: Path) -> None:
    assert weighted(tmp_path, 2.0) == [*range(100), *range(100)]


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.99])
def test_weights_below_1_pick_a_seeded_part(tmp_path: Path, weight: float) -> None:
    numbers = weighted(tmp_path, weight)
    assert len(numbers) == len(set(numbers)) == round(100 * weight)
    assert numbers != weighted(tmp_path, weight, seed=1)


def test_other_weights_do_both(tmp_path: Path) -> None:
    numbers = weighted(tmp_path, 2.5, n_rows=10)
    assert numbers[:20] == [*range(10), *range(10)]
    assert len(set(numbers[20:])) == len(numbers[20:]) == 5


def test_every_row_may_be_picked(tmp_path: Path) -> None:
    counts = Counter(n for seed in range(300) for n in weighted(tmp_path, 0.3, seed, n_rows=10))
    assert all(60 < counts[n] < 120 for n in range(10)), counts  # 90 each, standard deviation 8


def test_options_are_checked_before_files_are_looked_for() -> None:
    with pytest.raises(ValueError, match="data format is 'csv', expected auto, messages, sharegpt"):
        open_rows("missing.jsonl", format="csv")
    with pytest.raises(ValueError, match="bad_rows is 'keep', expected error or skip"):
        open_rows("missing.jsonl", bad_rows="keep")
