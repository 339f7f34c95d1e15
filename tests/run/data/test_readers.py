"""Bytes to rows: what each kind of file may hold, and what is said of what it may not."""

from __future__ import annotations

import gzip
import io
import json
import re
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from airtune.run.data import json_list
from airtune.run.data.files import DataFile, find_files
from airtune.run.data.json_list import list_in
from airtune.run.data.readers import read
from airtune.run.data.records import BadRow, Row, describe


def rows_of(path: Path) -> list[tuple[str, dict[str, object]]]:
    """(place without the folder, fields) of each row; a bad row is an error."""
    places = []
    for record in read(*find_files(str(path))):
        assert isinstance(record, Row), record
        places.append((record.where.removeprefix(str(path)), record.fields))
    return places


def bad_row_of(path: Path) -> str:
    """place and reason of the one bad row."""
    [bad] = [record for record in read(*find_files(str(path))) if isinstance(record, BadRow)]
    return f"{bad.where.removeprefix(str(path))} {bad.kind}: {bad.reason}"


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


ODD_TEXT = "a\u2028b\u2029c\x85d\x0be\U0001f600"


def test_jsonl_bytes_as_they_come(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbf{"text": "bom"}\r\n'
        + b"\n \t\r\n"
        + json.dumps({"text": ODD_TEXT}, ensure_ascii=False).encode().replace(b"\x0b", b"\\u000b")
        + b'\n{"text": "\\ud83d\\ude00"}\n'
        + b'{"text": "last, without a line end"}'
    )
    texts = ["bom", ODD_TEXT, "\U0001f600", "last, without a line end"]
    rows = rows_of(written(tmp_path, "rows.jsonl", content))
    assert [fields["text"] for _, fields in rows] == texts
    assert [place for place, _ in rows] == [":1", ":4", ":5", ":6"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "cut', ":3 not JSON: not JSON, Unterminated string starting at column 10; .* was it"),
        (b'{"text": "cut"\n', ":3 not JSON: not JSON, Expecting ',' delimiter at column 15$"),
        (b'{"text": "\xff"}\n', ":3 not UTF-8: not UTF-8 at byte 10 of the line"),
        (b'{"text": "\\ud800"}\n', ":3 not JSON: .* a lone surrogate"),
        (b"[1]\n", r":3 no JSON object: expected a JSON object, got list \[1\]"),
        (b"null\n", ":3 no JSON object: .* got null"),
        (b"0\n", ":3 no JSON object: .* got number 0"),
        (b"false\n", ":3 no JSON object: .* got boolean false"),
        (b'""\n', ":3 no JSON object: .* got string"),
        (b'{"n": ' + b"1" * 5000 + b"}\n", ":3 not JSON: JSON that cannot be held"),
        (b"[" * 100_000 + b"\n", ":3 not JSON: JSON that cannot be held"),
        (b"\xef\xbb\xbf{}\n", ":3 not JSON: "),
    ],
)
def test_bad_lines_have_a_place_and_a_reason(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = written(tmp_path, "rows.jsonl", b'{"text": ""}\n\n' + line)
    bad = bad_row_of(path)
    assert re.match(complaint, bad), bad


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])  # suffixes are often wrong
@pytest.mark.parametrize(
    "content",
    [
        b'[{"n": 0}, {"n": [{}, "]}"]}]',
        b'\xef\xbb\xbf \r\n[\r\n{"n": 0}\r\n,{"n": [{}, "]}"]}]\r\n\r\n',
        b'{"data": [{"n": 0}, {"n": [{}, "]}"]}], "more": [1]}',
        b'{"kind": "data", "x": {"data": [{}]},\n "data" : [ {"n": 0}, {"n": [{}, "]}"]} ] }\n',
        b'{"n": 0}\n{"n": [{}, "]}"]}',
    ],
)
def test_json_is_a_list_or_has_one_or_is_lines(tmp_path: Path, name: str, content: bytes) -> None:
    rows = rows_of(written(tmp_path, name, content))
    assert [fields for _, fields in rows] == [{"n": 0}, {"n": [{}, "]}"]}]


def test_elements_of_a_list_have_lines_and_are_bad_one_by_one(tmp_path: Path) -> None:
    path = written(
        tmp_path, "rows.json", b'[\n  {\n "n": 1},\n {"n"\n 2}, {"n": 3},\n\n{"n": "\\"\\\\"}\n]\n'
    )
    assert (
        bad_row_of(path)
        == ":4 not JSON: not JSON, Expecting ':' delimiter at line 2 of the element, column 2"
    )
    good = [record.where for record in read(*find_files(str(path))) if isinstance(record, Row)]
    assert good == [f"{path}:{line}" for line in (2, 5, 7)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"n": 1},\n{"n": 2}', "json:2: not JSON, the list is not closed .* was the file cut"),
        (b'[{"n": 1},\n\n{"n": "cut\n}]', "json:3: not JSON, a string is not closed"),
        (b'{"data": [{"n": 1}]\n', "json:2: not JSON, the list is not closed"),
        (b'[{"n": 1}]\n[{"n": 2}]\n', "json:2: something follows the end of the list"),
        (b'{\n"n": 1}\n', 'no list is called "data" in it'),
    ],
)
def test_a_list_that_cannot_be_followed_is_an_error(tmp_path: Path, content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        list(read(*find_files(str(written(tmp_path, "rows.json", content)))))


@pytest.mark.parametrize("content", [b"", b"  \n", b"[]", b" [ \n ] ", b'{"data": []}'])
def test_there_may_be_no_rows(tmp_path: Path, content: bytes) -> None:
    assert rows_of(written(tmp_path, "rows.json", content)) == []


def test_a_list_is_read_the_same_whatever_the_size_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": '"\\\n,[]{}' * n, "list": [[], {}]} for n in range(4)]
    content = json.dumps({"a": [1], "data": rows}, indent=1).encode()
    for chunk_nbytes in (1, 2, 3, 7, 64):
        monkeypatch.setattr(json_list, "_CHUNK_NBYTES", chunk_nbytes)
        elements = list_in(io.BytesIO(content), "rows.json")
        assert elements is not None
        assert [json.loads(element) for _, element in elements] == rows


@pytest.mark.parametrize("kind", ["lines", "list"])
def test_files_are_read_as_rows_are_asked_for(tmp_path: Path, kind: str) -> None:
    row = json.dumps({"text": "x" * 1_000_000}).encode()
    content = b"\n".join([row] * 30) if kind == "lines" else b"[" + b",\n".join([row] * 30) + b"]"
    path = written(tmp_path, "rows.json", content)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read(DataFile(str(path), "json"))) == 30
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_csv_cells_are_strings_with_their_line_ends(tmp_path: Path) -> None:
    long = "y" * 1_000_000
    content = f'\ufefftext,n\r\n"a\r\n""b"",\nc",0\r\n\r\n{ODD_TEXT},\r\n{long},false'.encode()
    rows = rows_of(written(tmp_path, "rows.csv", content))
    assert rows == [
        (":2", {"text": 'a\r\n"b",\nc', "n": "0"}),
        (":6", {"text": ODD_TEXT, "n": ""}),
        (":7", {"text": long, "n": "false"}),
    ]


def test_tsv_and_a_column_without_a_name(tmp_path: Path) -> None:
    path = written(
        tmp_path, "rows.tsv", b'\tprompt\tcompletion\n0\t"Hi" he said, "x"\tb\n'.replace(b'"Hi" h', b"H")
    )
    assert rows_of(path) == [(":2", {"prompt": 'He said, "x"', "completion": "b"})]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (b"one\n", r":2 wrong number of cells: expected 2 cells \(a, b\), got 1"),
        (b"1,2,3\n", ":2 wrong number of cells: .* got 3"),
        (b"1,\xff\n", ":2 not UTF-8: not UTF-8 in the column b"),
        (b'"1"x,2\n', ":2 not CSV: "),
    ],
)
def test_bad_records_of_csv(tmp_path: Path, record: bytes, complaint: str) -> None:
    path = written(tmp_path, "rows.csv", b"a,b\n" + record + b"\nlast,row")
    bad = bad_row_of(path)
    assert re.match(complaint, bad), bad
    assert [r.where for r in read(*find_files(str(path))) if isinstance(r, Row)] == [f"{path}:4"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'a,b\n1,"2\n3,4\n', r"rows\.csv:2: not CSV, a quote that opens here is not closed"),
        (b"a, a\n1,2\n", r"rows\.csv:1: two columns are called a"),
        (b"\ntext;n\n1;2\n", r"rows\.csv:2: names are separated by ';', but by the suffix it should be ','"),
        (b"text,\xff\n1,2\n", r"rows\.csv:1: the line of names is not UTF-8"),
        (b"text,n\r1,2\r", r"rows\.csv:1: the line of names is not CSV"),
    ],
)
def test_csv_that_cannot_be_read_on(tmp_path: Path, content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        list(read(*find_files(str(written(tmp_path, "rows.csv", content)))))


def test_txt_is_one_text_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.txt", f"\ufeff  one\r\n\r\n \t\n{ODD_TEXT}\n0".encode())
    assert rows_of(path) == [(":1", {"text": "  one"}), (":4", {"text": ODD_TEXT}), (":5", {"text": "0"})]
    bad = written(tmp_path, "bad.txt", b"good\nb\xe4d\n")
    assert bad_row_of(bad).startswith(":2 not UTF-8: not UTF-8 at byte 1 of the line")


def test_a_cut_compressed_file_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl.gz", gzip.compress(b'{"text": "0123456789"}\n' * 9)[:-12])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: cannot be read"):
        list(read(*find_files(str(path))))


# As tables store them: the arguments of each call have the names of all others, filled with null.
CALLS: list[dict[str, object]] = [
    {"messages": [{"role": "user", "calls": [{"city": "Bern"}]}, {"role": "user", "calls": None}], "n": 0},
    {"messages": [{"role": "user", "calls": [{"day": 3}]}], "n": None},
]
AS_MEANT: list[dict[str, object]] = [
    {"messages": [{"role": "user", "calls": [{"city": "Bern"}]}, {"role": "user"}], "n": 0},
    {"messages": [{"role": "user", "calls": [{"day": 3}]}], "n": None},
]


def test_parquet_over_row_groups_without_the_nulls_of_structs(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(CALLS), path, row_group_size=1)
    assert rows_of(path) == [(": row 1", AS_MEANT[0]), (": row 2", AS_MEANT[1])]


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.parquet: no Parquet file that can be read"):
        rows_of(written(tmp_path, "rows.parquet", b"PAR1"))


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(CALLS).with_format("torch")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path)
    for path in (tmp_path, tmp_path / "train"):
        rows = [record for record in read(*find_files(str(path))) if isinstance(record, Row)]
        assert [row.fields for row in rows] == AS_MEANT
        assert rows[1].where == f"{tmp_path / 'train'}: row 2"


def test_a_damaged_data_set_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path)
    [arrow] = tmp_path.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(ValueError, match=f"{tmp_path}: no data set that can be read"):
        rows_of(tmp_path)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> datasets.Dataset:
        if path != "owner/name":
            raise datasets.exceptions.DatasetNotFoundError(f"no {path}")
        return datasets.Dataset.from_dict({"text": [f"{name} {split}", ""]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(read(*find_files("hf:owner/name:small/test")))
    assert rows[0] == Row("hf:owner/name:small/test: row 1", {"text": "small test"})
    with pytest.raises(ValueError, match="hf:owner/other: the data set cannot be had from the hub"):
        list(read(*find_files("hf:owner/other")))


def test_values_are_described_in_the_words_of_json() -> None:
    values: list[object] = [None, 0, False, "", [], {}]
    assert [describe(value) for value in values] == [
        "null", "number 0", "boolean false", 'string ""', "list []", "object {}",
    ]  # fmt: skip
    assert describe(b"\xff") == "bytes \"b'\\\\xff'\""
    assert len(describe("x" * 1000)) < 50
