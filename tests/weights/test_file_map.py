from __future__ import annotations

import itertools
import mmap
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from airtune.weights import file_map as file_map_module
from airtune.weights.file_map import FileMap
from airtune.weights.header import CheckpointError, StoredTensor
from airtune.weights.reader import ByteRange

PAGE = mmap.PAGESIZE


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    generator = random.Random(0)
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, nbytes in zip(paths, (1, 40_000, 3 * PAGE + 17), strict=True):
        path.write_bytes(generator.randbytes(nbytes))
    return paths


def stored(file: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(file, offset, torch.Size(shape).numel() * dtype.itemsize, dtype, shape)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 1, 7), (0,), (4, 0)])
@pytest.mark.parametrize("offset", [0, 8, 4096, 4104, 13])
def test_tensor_is_what_the_file_says(
    files: list[Path], dtype: torch.dtype, shape: tuple[int, ...], offset: int
) -> None:
    place = stored(files[1], offset, shape, dtype)
    tensor = FileMap().tensor(place)
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) and tensor.is_contiguous()
    expected = files[1].read_bytes()[offset : offset + place.nbytes]
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == expected
    assert tensor.untyped_storage().nbytes() == place.nbytes  # what is saved with it


def test_aligned_tensors_are_views_of_one_mapping_and_others_are_copies(files: list[Path]) -> None:
    file_map = FileMap()
    first = file_map.tensor(stored(files[1], 8, (4,), torch.float32))
    second = file_map.tensor(stored(files[1], 4096, (4,), torch.float32))
    assert second.data_ptr() - first.data_ptr() == 4088
    unaligned = file_map.tensor(stored(files[1], 13, (4,), torch.float32))
    assert unaligned.data_ptr() - first.data_ptr() != 5 and unaligned.data_ptr() % 4 == 0


def test_tensor_outlives_the_map(files: list[Path]) -> None:
    tensor = FileMap().tensor(stored(files[1], 0, (40_000,), torch.uint8))
    assert bytes(tensor.tolist()) == files[1].read_bytes()


def test_a_write_never_reaches_the_file(files: list[Path]) -> None:
    before = files[2].read_bytes()
    file_map = FileMap()
    place = stored(files[2], 0, (len(before),), torch.uint8)
    file_map.tensor(place).zero_()
    assert file_map.tensor(place).eq(0).all()
    file_map.release([place])
    assert bytes(file_map.tensor(place)[: 3 * PAGE].tolist()) == before[: 3 * PAGE]
    assert files[2].read_bytes() == before


def test_file_that_is_shorter_than_its_tensor(files: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"1\.safetensors: holds 40000 bytes.*40004.*Restore it"):
        FileMap().tensor(stored(files[1], 39_996, (2,), torch.float32))


def test_file_that_was_emptied(files: list[Path]) -> None:
    os.truncate(files[1], 0)
    with pytest.raises(CheckpointError, match=r"1\.safetensors: is empty.*Restore it"):
        FileMap().tensor(stored(files[1], 8, (2,), torch.float32))


def test_released_tensor_faults_back_in(files: list[Path]) -> None:
    file_map = FileMap()
    place = stored(files[2], 5, (2 * PAGE + 100,), torch.uint8)
    tensor = file_map.tensor(place)
    for _ in range(2):
        assert bytes(tensor.tolist()) == files[2].read_bytes()[5 : 5 + place.nbytes]
        file_map.release([place])
        file_map.announce([place])


def test_advice_of_nothing(files: list[Path]) -> None:
    for advise in (FileMap().announce, FileMap().release):
        advise([])
        advise([stored(files[1], 8, (0,), torch.float32)])


class NotedAdvice:
    """`madvise` that notes (begin, end, advice) relative to the mapping instead of doing anything."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.calls: list[tuple[int, int, int]] = []

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.calls.append((address - self.base, address - self.base + nbytes, advice))
        return 0


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, int, int]]]:
    file = tmp_path / "large"
    file.touch()
    os.truncate(file, 400 * PAGE)
    monkeypatch.setattr(file_map_module, "_can_populate", lambda: False)
    file_map = FileMap()
    advice = NotedAdvice(file_map.tensor(StoredTensor(file, 0, 1, torch.uint8, (1,))).data_ptr())
    monkeypatch.setattr(file_map_module, "_libc", advice)

    def note(what: str, *spans: tuple[int, int]) -> list[tuple[int, int, int]]:
        advice.calls.clear()
        getattr(file_map, what)([ByteRange(file, begin, end - begin, 0) for begin, end in spans])
        return advice.calls

    return note


def test_release_takes_whole_pages_inside_only(noted: Callable[..., list[tuple[int, int, int]]]) -> None:
    dont_need = mmap.MADV_DONTNEED
    assert noted("release", (0, 2 * PAGE)) == [(0, 2 * PAGE, dont_need)]
    assert noted("release", (1, 3 * PAGE - 1)) == [(PAGE, 2 * PAGE, dont_need)]
    assert noted("release", (1, PAGE)) == []
    assert noted("release", (PAGE + 1, 2 * PAGE + 1)) == []


def test_release_joins_ranges_that_share_a_page(noted: Callable[..., list[tuple[int, int, int]]]) -> None:
    seam = PAGE + 100
    assert noted("release", (seam, 2 * PAGE), (0, seam)) == [(0, 2 * PAGE, mmap.MADV_DONTNEED)]
    assert noted("release", (0, seam), (seam + 1, 2 * PAGE)) == [(0, PAGE, mmap.MADV_DONTNEED)]
    overlapping = noted("release", (0, 3 * PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 4 * PAGE))
    assert overlapping == [(0, 4 * PAGE, mmap.MADV_DONTNEED)]


@pytest.mark.parametrize("what", ["announce", "populate"])
def test_read_ahead_covers_every_byte_in_calls_that_are_served_whole(
    noted: Callable[..., list[tuple[int, int, int]]], what: str
) -> None:
    """Also where the kernel cannot be asked to read at once."""
    calls = noted(what, (PAGE + 5, 399 * PAGE + 1))
    assert calls[0][0] == PAGE and calls[-1][1] == 399 * PAGE + 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(calls))
    assert all(begin % PAGE == 0 and 0 < end - begin <= 2**17 for begin, end, _ in calls)
    assert {advice for _, _, advice in calls} == {mmap.MADV_WILLNEED}


def test_advice_that_fails_is_an_error_with_the_file(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file_map = FileMap()
    monkeypatch.setattr(mmap, "MADV_WILLNEED", 9999)
    with pytest.raises(OSError, match=r"1\.safetensors"):
        file_map.announce([ByteRange(files[1], 0, 10, 0)])


def resident_file_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile in /proc/self/status")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_gives_memory_back(tmp_path: Path) -> None:
    nbytes = 32 * 2**20
    (tmp_path / "large").write_bytes(bytes(range(256)) * (nbytes // 256))
    file_map = FileMap()
    place = stored(tmp_path / "large", 0, (nbytes // 8,), torch.int64)
    tensor = file_map.tensor(place)
    before = resident_file_nbytes()
    expected = tensor.sum()
    assert resident_file_nbytes() - before > 0.9 * nbytes
    file_map.release([place])
    assert resident_file_nbytes() - before < 0.1 * nbytes
    assert tensor.sum() == expected


def drop_from_page_cache(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel with mincore")
def test_what_the_kernel_has_dropped_is_lacking_until_it_is_brought(tmp_path: Path) -> None:
    """Also when it is brought in many bites, which several threads share."""
    file, nbytes = tmp_path / "large", 9 * 2**20 + 17
    file.write_bytes(random.Random(1).randbytes(nbytes))
    file_map = FileMap()
    place = stored(file, 5 * 8, (nbytes // 8 - 5,), torch.int64)
    tensor = file_map.tensor(place)
    drop_from_page_cache(file)
    if not file_map.lacks([place]):
        pytest.skip("this file system keeps its files in memory, or does not tell")
    file_map.populate([place])
    assert not file_map.lacks([place])
    assert bytes(tensor.view(torch.uint8)[-8:].tolist()) == file.read_bytes()[nbytes // 8 * 8 - 8 :][:8]
    file_map.release([place])
    assert not file_map.lacks([place]), "the page cache still has it"
    drop_from_page_cache(file)
    assert file_map.lacks([place])
