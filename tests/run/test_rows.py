"""Bytes, files, and the forms of rows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from airtune.run.rows import load_rows
from tests.tiny_tokenizer import (
    CHAT_ROW,
    write_jsonl,
)


def test_bytes_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"text": "bom"}\r\n'
        b"\n \t\r\n"
        + '{"text": "a\u2028b\u2029c\x85d"}\n'.encode()
        + b'{"text": "\\ud83d\\ude00"}\n'
        + b'{"text": "last, without a line end"}'
    )
    loaded = load_rows(str(file))
    texts = [row.fields["text"] for row in loaded.rows]
    assert texts == ["bom", "a\u2028b\u2029c\x85d", "\U0001f600", "last, without a line end"]
    assert [row.line for row in loaded.rows] == [1, 4, 5, 6]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "cut', "rows.jsonl:3: not JSON.*was it cut"),
        (b'{"text": "\xff"}\n', "rows.jsonl:3: not UTF-8 at byte 10"),
        (b'{"text": "\\ud800"}\n', "rows.jsonl:3: a lone surrogate"),
        (b"[1]\n", r"rows.jsonl:3: expected a JSON object a line, got list \[1\]"),
        (b"null\n", "rows.jsonl:3: expected a JSON object a line, got null"),
        (b"0\n", "rows.jsonl:3: expected a JSON object a line, got number 0"),
        (b"false\n", "rows.jsonl:3: expected a JSON object a line, got boolean false"),
        (b'""\n', "rows.jsonl:3: expected a JSON object a line, got string"),
        (b"{}\n", "rows.jsonl:3: expected text, got an empty object"),
        (b'{"text": null}\n', r"rows.jsonl:3: expected text, got the fields text \(null\)"),
    ],
)
def test_complaints_name_file_line_and_reason(tmp_path: Path, line: bytes, complaint: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": ""}\n\n' + line)
    with pytest.raises(ValueError, match=complaint):
        load_rows(str(tmp_path / "rows.jsonl"))


def test_files_keep_their_order_and_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b1", "b2", "a[1]"):
        write_jsonl(tmp_path, {"text": name}, name=f"{name}.jsonl")
    loaded = load_rows([str(tmp_path / "b*.jsonl"), str(tmp_path / "a[1].jsonl")])
    assert [row.fields["text"] for row in loaded.rows] == ["b1", "b2", "a[1]"]


def test_files_that_are_not_there_or_there_twice(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"text": "x"})
    with pytest.raises(ValueError, match=r"no file is called .*missing\.jsonl"):
        load_rows([path, str(tmp_path / "missing.jsonl")])
    with pytest.raises(ValueError, match="named twice"):
        load_rows([path, str(tmp_path / "*.jsonl")])
    with pytest.raises(ValueError, match="is a folder"):
        load_rows(str(tmp_path))
    with pytest.raises(ValueError, match="no rows"):
        load_rows(write_jsonl(tmp_path, name="empty.jsonl"))
    with pytest.raises(ValueError, match="no data files were named"):
        load_rows([])


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (CHAT_ROW, "messages"),
        ({"prompt": "", "completion": "", "text": None}, "prompt_completion"),
        ({"text": "", "messages": None, "id": 7}, "text"),
        ({"prompt": "kept for reference", **CHAT_ROW}, "messages"),
    ],
)
def test_the_form_is_found_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: object, form: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger="airtune"):
        assert load_rows(write_jsonl(tmp_path, row)).form == form
    assert f"form: {form}" in caplog.text


def test_mixed_forms_name_the_first_row_of_each(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path, CHAT_ROW, CHAT_ROW, name="one.jsonl")
    two = write_jsonl(tmp_path, CHAT_ROW, {"text": "x"}, CHAT_ROW, name="two.jsonl")
    with pytest.raises(ValueError, match=r"one.jsonl:1 is the first row of messages, .*two.jsonl:2 .* text"):
        load_rows([one, two])


def test_unknown_and_ambiguous_rows_are_refused_and_can_be_forced(tmp_path: Path) -> None:
    both = write_jsonl(tmp_path, {"text": "x", "prompt": "p", "completion": "c"})
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the row could be any of prompt_completion, text"):
        load_rows(both)
    assert load_rows(both, format="text").form == "text"
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: expected messages, got the fields text, prompt, completion"
    ):
        load_rows(both, format="messages")
    with pytest.raises(ValueError, match=r"of no known form: the fields chosen, rejected"):
        load_rows(write_jsonl(tmp_path, {"chosen": "a", "rejected": "b"}))
    with pytest.raises(ValueError, match="data format is 'csv'"):
        load_rows(both, format="csv")
