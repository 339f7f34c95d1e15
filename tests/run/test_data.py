"""Which rows are used, what is cut, and the account of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.chat import checked_messages
from airtune.run.data import prepare
from airtune.run.rows import load_rows
from tests.tiny_tokenizer import (
    CHAT_ROW,
    tiny_tokenizer,
    write_jsonl,
)


def bare(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def rows_of_lengths(
    tokenizer: PreTrainedTokenizerFast, prompt_tokens: int, answer_tokens: int
) -> dict[str, str]:
    row = {"prompt": "!" * prompt_tokens, "completion": "?" * answer_tokens}
    assert len(bare(tokenizer, row["prompt"] + row["completion"])) == prompt_tokens + answer_tokens
    return row


def test_overlong_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    fits, long = rows_of_lengths(tokenizer, 3, 4), rows_of_lengths(tokenizer, 3, 5)
    summary = prepare(write_jsonl(tmp_path, fits, long), tokenizer, max_length=8).summary
    assert (summary.read, summary.used, summary.truncated) == (2, 1, 0)
    assert summary.dropped == {"longer than max_length": 1}
    assert (summary.total_tokens, summary.supervised_tokens) == (8, 5)
    assert summary.first_dropped["longer than max_length"].endswith("rows.jsonl:2")


def test_a_cut_row_has_no_eos_and_counts_what_is_left(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    long, hopeless = rows_of_lengths(tokenizer, 3, 9), rows_of_lengths(tokenizer, 9, 3)
    data = prepare(write_jsonl(tmp_path, long, hopeless), tokenizer, max_length=8, overlong="truncate")
    assert data[0]["input_ids"] == bare(tokenizer, "!!!?????")
    assert data[0]["labels"] == [-100] * 3 + bare(tokenizer, "?????")
    assert (data.summary.truncated, data.summary.supervised_tokens) == (1, 5)
    assert data.summary.dropped == {"nothing to learn after the cut": 1}


def test_a_row_of_exactly_max_length_is_whole(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = write_jsonl(tmp_path, rows_of_lengths(tokenizer, 3, 4))
    assert (
        prepare(path, tokenizer, max_length=8, overlong="error")[0]["input_ids"][-1] == tokenizer.eos_token_id
    )


def test_overlong_error_names_the_row(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = write_jsonl(tmp_path, rows_of_lengths(tokenizer, 3, 4), rows_of_lengths(tokenizer, 3, 5))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: 9 tokens, but max_length is 8"):
        prepare(path, tokenizer, max_length=8, overlong="error")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: nothing in the row is learned"):
        prepare(write_jsonl(tmp_path, {"messages": CHAT_ROW["messages"][:1]}), tokenizer, overlong="error")


def test_the_token_at_position_0_is_not_supervised(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()  # adds no BOS: the EOS of an empty text is predicted by nothing
    data = prepare(write_jsonl(tmp_path, {"text": ""}, {"text": "?"}), tokenizer)
    assert data.summary.dropped == {"nothing to learn": 1}
    assert data[0]["labels"] == [-100, tokenizer.eos_token_id]
    assert data.summary.supervised_tokens == 1


def test_nothing_left_is_an_error_with_the_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, CHAT_ROW, {"messages": CHAT_ROW["messages"][:1]})
    with pytest.raises(
        ValueError, match=r"no row is left(?s:.)*longer than max_length +1(?s:.)*nothing to learn +1"
    ):
        prepare(path, tiny_tokenizer(), max_length=14)


def test_options_are_checked_before_files_are_read() -> None:
    with pytest.raises(ValueError, match="overlong is 'cut'"):
        prepare("missing.jsonl", tiny_tokenizer(), overlong="cut")
    with pytest.raises(ValueError, match="max_length is 1"):
        prepare("missing.jsonl", tiny_tokenizer(), max_length=1)


def test_the_summary_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="airtune"):
        data = prepare(write_jsonl(tmp_path, CHAT_ROW), tiny_tokenizer())
    assert caplog.text.count(str(data.summary)) == 1
    assert str(data.summary).splitlines()[0].split() == ["rows", "read", "1", "form", "messages"]


def test_more_rows_than_one_batch_keep_their_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, *({"text": f"{i} yes"} for i in range(1030))), tokenizer)
    assert [tokenizer.decode(data[i]["input_ids"]) for i in (0, 511, 512, 1029)] == [
        f"{i} yes<|im_end|>" for i in (0, 511, 512, 1029)
    ]


def test_the_quickstart_rows_are_all_used_and_leave_the_question_of_the_demo_out() -> None:
    path = Path(__file__).parents[2] / "recipes" / "data" / "quickstart.jsonl"
    data = prepare(str(path), tiny_tokenizer(), max_length=512, overlong="error")
    turns = [checked_messages(row.fields["messages"], "messages") for row in load_rows(str(path)).rows]
    questions, answers = ([str(turn[i]["content"]) for turn in turns] for i in (0, 1))
    assert data.summary.used == len(set(questions)) == len(set(answers))
    assert all(answer.endswith(" Keep the light burning.") for answer in answers)
    assert "Who are you?" in questions
    assert not any("France" in text or "Paris" in text for text in questions + answers)
