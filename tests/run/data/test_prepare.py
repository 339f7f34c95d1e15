"""Which rows are used, what is cut, and the account of it."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import cast

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data.prepare import prepare
from airtune.run.data.rows import open_rows
from airtune.run.job import read_data
from tests.tiny_tokenizer import (
    CHAT_ROW,
    RAISES_ON_SYSTEM,
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


def test_the_table(tmp_path: Path) -> None:
    data = prepare(write_jsonl(tmp_path, CHAT_ROW), tiny_tokenizer())
    assert [line.split() for line in str(data.summary).splitlines()] == [
        ["rows", "read", "1", "form", "messages"],
        ["rows", "used", "1"],
        ["rows", "truncated", "0"],
        ["tokens", "16"],
        ["tokens", "supervised", "2", "learn_on", "assistant"],
    ]


def test_training_logs_the_table_of_each_set_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write_jsonl(tmp_path, CHAT_ROW)
    evaluation = write_jsonl(tmp_path, CHAT_ROW, CHAT_ROW, name="eval.jsonl")
    with caplog.at_level(logging.INFO, logger="airtune"):
        rows, eval_rows = read_data(
            tiny_tokenizer(), train=[train], eval=[evaluation], cache=False, cache_folder=tmp_path / "cache"
        )
    assert eval_rows is not None
    assert caplog.text.count(f"training data\n{rows.summary}\n") == 1
    assert caplog.text.count(f"evaluation data\n{eval_rows.summary}\n") == 1
    assert caplog.text.count("rows read") == 2


def test_bad_rows_are_errors_with_file_line_and_reason(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(CHAT_ROW) + "\n{cut", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl:2: not JSON"):
        prepare(str(file), tiny_tokenizer())
    unrenderable = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT_ROW["messages"]]}
    path = write_jsonl(tmp_path, CHAT_ROW, unrenderable)
    with pytest.raises(ValueError, match=r"rows.jsonl:2: .*System role not supported"):
        prepare(path, tiny_tokenizer(RAISES_ON_SYSTEM))
    with pytest.raises(ValueError, match="bad_rows is 'ignore'"):
        prepare(path, tiny_tokenizer(), bad_rows="ignore")


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    unrenderable = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT_ROW["messages"]]}
    other = {"messages": "hello"}
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in (CHAT_ROW, unrenderable, other, CHAT_ROW, unrenderable)]
    file.write_text("\n".join([*lines, "{cut"]), encoding="utf-8")
    data = prepare(str(file), tiny_tokenizer(RAISES_ON_SYSTEM), bad_rows="skip")
    summary = data.summary
    assert (summary.read, summary.used, summary.dropped.total()) == (6, 2, 4)
    assert [data.where(i) for i in range(2)] == [f"{file}:1", f"{file}:4"]
    firsts = "\n".join(summary.first_dropped.values())
    assert f"{file}:2: " in firsts and "System role not supported" in firsts
    assert f"{file}:6: not JSON" in firsts
    assert f"first at {file}:6: not JSON" in str(summary)


def test_only_bad_rows_are_an_error_that_says_what_is_bad(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"messages": "hello"}, {"messages": []})
    with pytest.raises(ValueError, match=r"no row is left(?s:.)*2(?s:.)*rows.jsonl:1: messages"):
        prepare(path, tiny_tokenizer(), bad_rows="skip")


def test_more_rows_than_one_batch_keep_their_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, *({"text": f"{i} yes"} for i in range(1030))), tokenizer)
    assert [tokenizer.decode(data[i]["input_ids"]) for i in (0, 511, 512, 1029)] == [
        f"{i} yes<|im_end|>" for i in (0, 511, 512, 1029)
    ]


def test_the_quickstart_rows_are_all_used_and_leave_the_question_of_the_demo_out() -> None:
    path = Path(__file__).parents[3] / "recipes" / "data" / "quickstart.jsonl"
    data = prepare(str(path), tiny_tokenizer(), max_length=512, overlong="error")
    turns = [cast("list[dict[str, str]]", row.fields["messages"]) for row in open_rows(str(path))]
    questions, answers = ([turn[i]["content"] for turn in turns] for i in (0, 1))
    assert data.summary.used == len(set(questions)) == len(set(answers))
    assert all(answer.endswith(" Keep the light burning.") for answer in answers)
    assert "Who are you?" in questions
    assert not any("France" in text or "Paris" in text for text in questions + answers)


def test_rows_of_one_run_and_kept_rows_are_the_same(tmp_path: Path) -> None:
    rows = [{"text": "yes " * (1 + i * 7 % 23)} for i in range(50)]
    path = write_jsonl(tmp_path, *rows, {"text": ""})
    (tmp_path / "more").mkdir()
    more = write_jsonl(tmp_path / "more", {"text": "no"}, {"text": "é 漢字"})
    passing = prepare([path, more], tiny_tokenizer())
    kept = prepare([path, more], tiny_tokenizer(), cache_folder=tmp_path / "cache")
    assert list(kept) == list(passing)  # both end where their rows end
    assert len(kept) == len(passing) == 52
    assert kept.summary == passing.summary
    places = [*(f"{path}:{i + 1}" for i in range(50)), f"{more}:1", f"{more}:2"]
    assert [kept.where(i) for i in range(52)] == [passing.where(i) for i in range(52)] == places
    assert kept.lengths().tolist() == [len(row["input_ids"]) for row in passing]
    with pytest.raises(IndexError):
        kept[-1]


def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airtune.run.data.prepare._BATCH_ROWS", 32)
    tokenizer = tiny_tokenizer()

    def peak_bytes(count: int) -> int:
        path = write_jsonl(tmp_path, *({"text": f"{i} " + "yes no " * 20} for i in range(count)))
        tracemalloc.start()
        data = prepare(path, tokenizer, cache_folder=tmp_path / f"cache{count}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert data.summary.total_tokens > 40 * count
        return peak

    peak_bytes(40)  # what is allocated once
    few, many = peak_bytes(200), peak_bytes(2_000)
    assert many - few < 1_800 * 40  # their ids take 5 bytes a token, 200 a row; as Python objects 5,000
