from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from airtune.weights.header import DTYPES, MAX_HEADER_NBYTES, CheckpointError, StoredTensor, read_header

F32_PAIR = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
}


def write_raw(file: Path, header: object, data: bytes = b"", padding: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += padding
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def read_naively(stored: StoredTensor) -> torch.Tensor:
    data = bytearray(stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes])
    if not data:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(stored.dtype).view(stored.shape)


def assert_same_as_safetensors(file: Path) -> None:
    header = read_header(file)
    with safe_open(file, "pt") as theirs:
        assert set(header) == set(theirs.keys())
        for name, stored in header.items():
            expected, got = theirs.get_tensor(name), read_naively(stored)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
            # Bytes, because NaN is not equal to itself and not every dtype has an equality.
            assert got.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8)), name


SAVEABLE = [dtype for code, dtype in DTYPES.items() if code != "F4"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (7,), (3, 5), (2, 1, 3, 1)])
def test_every_dtype_reads_as_safetensors_reads_it(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in SAVEABLE:
        flat = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
        tensors[str(dtype)] = flat.to(torch.uint8).view(dtype).view(shape)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert_same_as_safetensors(tmp_path / "x.safetensors")
    assert len(read_header(tmp_path / "x.safetensors")) == len(SAVEABLE)


def test_f4_packs_two_values_into_an_element(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}
    file = write_raw(tmp_path / "x.safetensors", {"a": entry}, bytes(range(6)))
    assert read_header(file)["a"].shape == (3, 2)
    assert_same_as_safetensors(file)


@pytest.mark.parametrize("padding", [b" ", b"   ", b"\n\t ", b" " * 4096])
def test_padding_of_any_length_moves_the_data(tmp_path: Path, padding: bytes) -> None:
    file = write_raw(tmp_path / "x.safetensors", F32_PAIR, bytes(range(12)), padding)
    assert_same_as_safetensors(file)


def test_zero_padding_is_accepted(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", F32_PAIR, bytes(range(12)), b"\0\0\0")
    assert read_naively(read_header(file)["b"]).view(torch.uint8).tolist() == [8, 9, 10, 11]


def test_order_in_the_header_is_not_order_in_the_file(tmp_path: Path) -> None:
    swapped = {"b": F32_PAIR["b"], "a": F32_PAIR["a"]}
    assert_same_as_safetensors(write_raw(tmp_path / "x.safetensors", swapped, bytes(range(12))))


def test_empty_tensors_may_share_an_offset(tmp_path: Path) -> None:
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}
    file = write_raw(tmp_path / "x.safetensors", {**F32_PAIR, "n": nothing, "m": nothing}, bytes(12))
    assert_same_as_safetensors(file)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    assert read_header(write_raw(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}})) == {}


def refused(file: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    for part in (str(file), *parts):
        assert part in str(caught.value)


def test_cut_short(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", F32_PAIR, bytes(5))
    refused(file, "7 bytes are missing", "Fetch the file again")


def test_cut_short_inside_the_header(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", F32_PAIR)
    file.write_bytes(file.read_bytes()[:-10])
    refused(file, "at least 10 bytes are missing", "Fetch the file again")


def test_trailing_bytes(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", F32_PAIR, bytes(15))
    refused(file, "3 bytes follow the last tensor", "Fetch the file again")


@pytest.mark.parametrize("length", [0, 7])
def test_too_short_for_a_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(length))
    refused(tmp_path / "x.safetensors", f"holds {length} bytes", "Fetch the file again")


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_NBYTES + 1, 2**63])
def test_absurd_header_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    refused(tmp_path / "x.safetensors", f"a header length of {length}", "not a safetensors file")


@pytest.mark.parametrize(
    "begins", [b"GGUF\3\0\0\0\1\1\1\1", b"PK\3\4\0\0\10\10 archive", b"<!DOCTYPE html><html>"]
)
def test_another_format_under_this_name_shows_how_it_begins(tmp_path: Path, begins: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(begins)
    refused(tmp_path / "x.safetensors", repr(begins[:16]), "save_pretrained")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 4988025760\n"
    (tmp_path / "x.safetensors").write_bytes(pointer)
    refused(tmp_path / "x.safetensors", "git-lfs pointer", "4988025760", "git lfs pull")


@pytest.mark.parametrize("header", [b"{not json}", b'{"a": \xff}', b"[" * 100_000, b"   "])
def test_header_is_not_json(tmp_path: Path, header: bytes) -> None:
    refused(write_raw(tmp_path / "x.safetensors", header), "not JSON", "Fetch the file again")


def test_header_is_not_an_object(tmp_path: Path) -> None:
    refused(write_raw(tmp_path / "x.safetensors", b"[1, 2]"), "JSON list", "Fetch the file again")


def entry(dtype: object = "F32", shape: object = (1,), data_offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("F32", "expected dtype, shape and data_offsets"),
        (entry(dtype="F6_E2M3"), "F6_E2M3"),
        (entry(dtype="F32X"), "F32X"),
        (entry(dtype=["F32"]), "['F32']"),
        ({"shape": [1], "data_offsets": [0, 4]}, "dtype None"),
        (entry(shape=[-1]), "shape [-1]"),
        (entry(shape=[1.0]), "shape [1.0]"),
        (entry(shape=[True]), "shape [True]"),
        (entry(shape=None), "shape None"),
        (entry(data_offsets=[4, 0]), "data_offsets [4, 0]"),
        (entry(data_offsets=[0]), "data_offsets [0]"),
        (entry(data_offsets=[-4, 0]), "data_offsets [-4, 0]"),
        (entry(data_offsets="04"), "data_offsets '04'"),
        (entry(shape=[2]), "hold 4 bytes, F32 of shape [2] takes 8"),
        (entry(dtype="BF16"), "hold 4 bytes, BF16 of shape [1] takes 2"),
        (entry(dtype="F4", shape=[4, 1]), "even last size"),
        (entry(dtype="F4", shape=[]), "even last size"),
    ],
)
def test_entry_that_makes_no_sense(tmp_path: Path, value: object, says: str) -> None:
    refused(write_raw(tmp_path / "x.safetensors", {"layer.weight": value}, bytes(4)), "layer.weight", says)


def test_overlap(tmp_path: Path) -> None:
    pair = {"a": entry(shape=[2], data_offsets=[0, 8]), "b": entry(shape=[2], data_offsets=[4, 12])}
    refused(write_raw(tmp_path / "x.safetensors", pair, bytes(12)), "b begins 4 bytes before a ends")


def test_gap(tmp_path: Path) -> None:
    pair = {"a": entry(), "b": entry(data_offsets=[8, 12])}
    refused(write_raw(tmp_path / "x.safetensors", pair, bytes(12)), "b begins 4 bytes after a ends")


def test_gap_at_the_start(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", {"a": entry(data_offsets=[4, 8])}, bytes(8))
    refused(file, "a begins 4 bytes after the header ends")


def test_the_same_name_twice_leaves_a_gap(tmp_path: Path) -> None:
    one = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    two = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}'
    refused(
        write_raw(tmp_path / "x.safetensors", b"{" + one + b", " + two + b"}", bytes(2)), "a begins 1 bytes"
    )


def test_all_tensors_at_fault_are_in_one_message(tmp_path: Path) -> None:
    faulty = {f"t{i}": entry(shape=[2]) for i in range(8)}
    refused(write_raw(tmp_path / "x.safetensors", faulty, bytes(4)), "t0", "t4", "and 3 more")
