"""From what the user named to files of known kinds."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pyarrow
import pytest

from airtune.run.data.files import DataFile, find_files, hub_parts, open_bytes


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names_of(files: list[DataFile], folder: Path) -> list[str]:
    return [str(Path(file.name).relative_to(folder)) for file in files]


def test_files_keep_their_order_and_patterns_are_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b2.jsonl", "b1.jsonl", "a[1].jsonl", "deep/b3.jsonl")
    files = find_files([str(tmp_path / "**" / "b*.jsonl"), str(tmp_path / "a[1].jsonl")])
    assert names_of(files, tmp_path) == ["b1.jsonl", "b2.jsonl", "deep/b3.jsonl", "a[1].jsonl"]


def test_a_folder_is_all_its_data_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "b/2.PARQUET", "a.csv", "c.txt.gz", "README.md", "LICENSE")
    touch(tmp_path, "._a.csv", ".cache/x.json", "c.parquet.gz")
    with caplog.at_level(logging.INFO, logger="airtune"):
        files = find_files(str(tmp_path))
        assert find_files(str(tmp_path)) == files
    assert names_of(files, tmp_path) == ["a.csv", "b/2.PARQUET", "c.txt.gz"]
    assert [file.kind for file in files] == ["csv", "parquet", "txt"]
    assert caplog.text.count("3 data files; 3 others are left out") == 1  # said once, not at each look


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        (["{}/a.jsonl", "{}/missing.jsonl"], r"no file is called .*missing\.jsonl"),
        (["{}/a.jsonl", "{}/*.jsonl"], "named twice.*give it a weight"),
        (["{}/a.jsonl", "{}/deep/../a.jsonl"], "named twice"),
        (["hf:a/b", "hf:a/b"], "named twice"),
        (["{}/notes.md"], r"the name does not tell what is in it: expected one that ends in \.jsonl"),
        (["{}/deep"], "holds no data file"),
        (["{}/*.md"], "holds no data file"),
        (["hf:a/b/c/d"], "expected hf:owner/name"),
        ([], "no data files were named"),
        ([""], 'a data file is called ""'),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, sources: list[str], complaint: str) -> None:
    touch(tmp_path, "a.jsonl", "notes.md", "deep/notes.md")
    with pytest.raises(ValueError, match=complaint):
        find_files([source.format(tmp_path) for source in sources])


def test_a_mapping_gives_weights(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "folder/b.jsonl", "folder/c.jsonl")
    files = find_files({str(tmp_path / "folder"): 0.5, str(tmp_path / "a.jsonl"): 2})
    assert names_of(files, tmp_path) == ["folder/b.jsonl", "folder/c.jsonl", "a.jsonl"]
    assert [file.weight for file in files] == [0.5, 0.5, 2]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True])
def test_a_weight_is_a_number_above_0(tmp_path: Path, weight: float) -> None:
    touch(tmp_path, "a.jsonl")
    with pytest.raises(ValueError, match=r"the weight of .*a\.jsonl is .*, expected a number above 0"):
        find_files({str(tmp_path / "a.jsonl"): weight})


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:owner/name", ("owner/name", None, "train")),
        ("hf:name", ("name", None, "train")),
        ("hf:owner/name/test", ("owner/name", None, "test")),
        ("hf:owner/name:main/train[:10%]", ("owner/name", "main", "train[:10%]")),
    ],
)
def test_the_parts_of_a_name_on_the_hub(source: str, parts: tuple[str, str | None, str]) -> None:
    assert hub_parts(source) == parts
    assert find_files(source) == [DataFile(source, "hub")]


def test_a_data_set_in_a_folder_is_one_thing(tmp_path: Path) -> None:
    touch(tmp_path, "test/state.json", "test/dataset_info.json", "test/data-00000-of-00001.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    [file] = find_files(str(tmp_path))
    assert (file.name, file.kind) == (str(tmp_path / "test"), "saved")
    assert [path.name for path in file.paths] == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds 2 splits: name one of .*/train, .*/test"):
        find_files(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"spl')
    with pytest.raises(ValueError, match=r"dataset_dict\.json: cannot be read"):
        find_files(str(tmp_path))


def test_a_saved_data_set_below_a_folder_is_one_of_its_files(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b/deep/state.json", "b/deep/dataset_info.json", "b/deep/data.arrow", "c.csv")
    files = find_files(str(tmp_path))
    assert names_of(files, tmp_path) == ["a.jsonl", "b/deep", "c.csv"]
    assert [file.kind for file in files] == ["json", "saved", "csv"]


def test_one_file_under_two_names_is_named_twice(tmp_path: Path) -> None:
    touch(tmp_path, "data/a.jsonl")
    (tmp_path / "data" / "b.jsonl").symlink_to("a.jsonl")
    with pytest.raises(ValueError, match=r"b\.jsonl is named twice"):
        find_files(str(tmp_path / "data"))


def test_a_link_to_a_folder_is_not_followed_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    touch(tmp_path, "data/a.jsonl")
    (tmp_path / "data" / "up").symlink_to("..")
    with caplog.at_level(logging.INFO, logger="airtune"):
        assert len(find_files(str(tmp_path / "data"))) == 1
    assert "1 others are left out, such as" in caplog.text


def test_compressed_files_and_byte_order_marks(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfone\r\ntwo"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    with pyarrow.output_stream(tmp_path / "a.txt.zst", compression="zstd") as stream:
        stream.write(text)
    (tmp_path / "empty.txt").touch()
    for name, lines in {"a.txt": 2, "a.txt.gz": 2, "a.txt.zst": 2, "empty.txt": 0}.items():
        with open_bytes(str(tmp_path / name)) as opened:
            assert list(opened) == [b"one\r\n", b"two"][:lines]


def test_utf16_and_what_is_not_compressed_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.csv: UTF-16 text \(it starts with ff fe\), save it as UTF-8"):
        open_bytes(str(tmp_path / "a.csv"))
    (tmp_path / "a.txt.gz").write_bytes(b"plain")
    with pytest.raises(ValueError, match=r"a\.txt\.gz: cannot be read as \.gz"):
        open_bytes(str(tmp_path / "a.txt.gz"))
