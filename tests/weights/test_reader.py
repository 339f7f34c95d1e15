from __future__ import annotations

import itertools
import mmap
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from airtune.weights import reader as reader_module
from airtune.weights.header import CheckpointError, StoredTensor
from airtune.weights.reader import ByteRange, ByteReader, FileMap

PAGE = mmap.PAGESIZE


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    generator = random.Random(0)
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, nbytes in zip(paths, (1, 40_000, 3 * PAGE + 17), strict=True):
        path.write_bytes(generator.randbytes(nbytes))
    return paths


@pytest.fixture(params=[(1, 1000), (4, 7), (3, 2**24)], ids=str)
def reader(request: pytest.FixtureRequest) -> Iterator[ByteReader]:
    threads, piece_nbytes = request.param
    with ByteReader(threads=threads, piece_nbytes=piece_nbytes) as opened:
        yield opened


def read_naively(ranges: Sequence[ByteRange], before: bytes) -> bytes:
    result = bytearray(before)
    for part in ranges:
        data = part.file.read_bytes()[part.offset : part.offset + part.nbytes]
        result[part.into : part.into + part.nbytes] = data
    return bytes(result)


def random_ranges(files: Sequence[Path], seed: int, count: int) -> tuple[list[ByteRange], int]:
    """Ranges of random sizes (also zero) in random order; some are neighbours, some leave gaps."""
    generator = random.Random(seed)
    ranges, into = [], 0
    for _ in range(count):
        file = generator.choice(files)
        size = file.stat().st_size
        offset = generator.randrange(size)
        for _ in range(generator.choice([1, 1, 3])):
            nbytes = min(generator.choice([0, 1, 2, 63, 500, 5000]), size - offset)
            ranges.append(ByteRange(file, offset, nbytes, into))
            offset, into = offset + nbytes, into + nbytes
        into += generator.choice([0, 0, 5])
    generator.shuffle(ranges)
    return ranges, into


@pytest.mark.parametrize("seed", range(8))
def test_reads_what_a_naive_reader_reads(files: list[Path], reader: ByteReader, seed: int) -> None:
    ranges, nbytes = random_ranges(files, seed, count=20)
    buffer = torch.full((nbytes + 9,), 171, dtype=torch.uint8)
    expected = read_naively(ranges, bytes(buffer.tolist()))
    reader.read_into(ranges, buffer)
    assert bytes(buffer.tolist()) == expected  # also the bytes between and after the ranges
    assert reader.bytes_read == sum(part.nbytes for part in ranges)


def test_reads_into_a_memoryview(files: list[Path], reader: ByteReader) -> None:
    target = bytearray(40_000)
    reader.read_into([ByteRange(files[1], 0, 40_000, 0)], memoryview(target))
    assert target == files[1].read_bytes()


def test_reads_into_a_part_of_a_tensor(files: list[Path], reader: ByteReader) -> None:
    whole = torch.zeros(300, dtype=torch.uint8)
    reader.read_into([ByteRange(files[1], 11, 100, 0)], whole[100:200])
    assert bytes(whole.tolist()) == bytes(100) + files[1].read_bytes()[11:111] + bytes(100)


def test_nothing_to_read(files: list[Path], reader: ByteReader) -> None:
    reader.read_into([], torch.empty(0, dtype=torch.uint8))
    reader.read_into([ByteRange(files[0], 1, 0, 0)], torch.empty(0, dtype=torch.uint8))
    assert reader.bytes_read == 0


def test_many_callers_at_once(files: list[Path]) -> None:
    rounds, wrong = 20, []

    def work(reader: ByteReader, seed: int) -> None:
        buffer = torch.zeros(2**20, dtype=torch.uint8)
        for turn in range(rounds):
            ranges, nbytes = random_ranges(files, 100 * seed + turn, count=15)
            before = bytes(buffer[:nbytes].tolist())
            reader.read_into(ranges, buffer)
            if bytes(buffer[:nbytes].tolist()) != read_naively(ranges, before):
                wrong.append((seed, turn))

    with ByteReader(threads=4, piece_nbytes=333) as reader:
        threads = [threading.Thread(target=work, args=(reader, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


class CountedReads:
    """`os.preadv` that notes its calls, and may return less than asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_most: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self._preadv, self._at_most = os.preadv, at_most
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        self.calls.append((offset, len(buffer)))
        return self._preadv(descriptor, [buffer[: self._at_most]], offset)


def test_short_reads_go_on(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    CountedReads(monkeypatch, at_most=7)
    buffer = torch.zeros(1000, dtype=torch.uint8)
    with ByteReader() as reader:
        reader.read_into([ByteRange(files[1], 3, 1000, 0)], buffer)
    assert bytes(buffer.tolist()) == files[1].read_bytes()[3:1003]


def test_neighbours_in_file_and_buffer_are_one_read(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = CountedReads(monkeypatch)
    file = files[1]
    neighbours = [ByteRange(file, 10 * i, 10, 100 + 10 * i) for i in range(10)]
    elsewhere_in_buffer = [ByteRange(file, 100, 10, 0)]
    elsewhere_in_file = [ByteRange(file, 500, 10, 200)]
    with ByteReader() as reader:
        reader.read_into(
            neighbours[::-1] + elsewhere_in_buffer + elsewhere_in_file, torch.zeros(300, dtype=torch.uint8)
        )
    assert sorted(reads.calls) == [(0, 100), (100, 10), (500, 10)]


def test_large_ranges_are_split_in_order(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = CountedReads(monkeypatch)
    with ByteReader(threads=1, piece_nbytes=1000) as reader:
        reader.read_into([ByteRange(files[1], 5, 2500, 0)], torch.zeros(2500, dtype=torch.uint8))
    assert reads.calls == [(5, 1000), (1005, 1000), (2005, 500)]


def test_each_file_is_opened_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real_open = os.open

    def counted(path: Path, flags: int) -> int:
        opened.append(path.name)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", counted)
    with ByteReader() as reader:
        for _ in range(3):
            ranges = [ByteRange(file, 0, 1, i) for i, file in enumerate(files)]
            reader.read_into(ranges, torch.zeros(3, dtype=torch.uint8))
    assert sorted(opened) == [file.name for file in files]


def test_close_leaves_no_descriptors_or_threads(files: list[Path]) -> None:
    before = len(os.listdir("/dev/fd")), threading.active_count()
    reader = ByteReader()
    reader.read_into([ByteRange(file, 0, 1, 0) for file in files], torch.zeros(1, dtype=torch.uint8))
    assert len(os.listdir("/dev/fd")) == before[0] + 3
    reader.close()
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


def test_file_that_shrank_is_named_and_no_thread_goes_on(files: list[Path]) -> None:
    buffer = torch.zeros(40_000, dtype=torch.uint8)
    with ByteReader(threads=4, piece_nbytes=100) as reader:
        reader.read_into([ByteRange(files[1], 0, 40_000, 0)], buffer)
        os.truncate(files[1], 30_010)
        with pytest.raises(CheckpointError, match=r"1\.safetensors: holds 30010 bytes, .*Restore it"):
            reader.read_into([ByteRange(files[1], 0, 40_000, 0)], buffer)
        buffer.zero_()
        assert reader.bytes_read == 40_000
        reader.read_into([ByteRange(files[1], 0, 10, 0)], buffer)  # and the reader is not broken
    assert buffer[10:].eq(0).all()


def test_file_that_is_gone(tmp_path: Path) -> None:
    with ByteReader() as reader, pytest.raises(FileNotFoundError, match="gone"):
        reader.read_into([ByteRange(tmp_path / "gone", 0, 1, 0)], torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize(("into", "nbytes"), [(-1, 2), (9, 2), (11, 0), (0, -1)])
def test_range_outside_the_buffer(files: list[Path], into: int, nbytes: int) -> None:
    with ByteReader() as reader, pytest.raises(ValueError, match="does not fit a buffer of 10 bytes"):
        reader.read_into([ByteRange(files[1], 0, nbytes, into)], torch.zeros(10, dtype=torch.uint8))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(8),
        torch.zeros(2, 4, dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
        memoryview(bytes(8)),
        memoryview(bytearray(8)).cast("i"),
        memoryview(bytearray(16))[::2],
    ],
    ids=["float", "2-D", "strided", "meta", "readonly", "ints", "strided memory"],
)
def test_buffer_that_will_not_do(files: list[Path], buffer: torch.Tensor | memoryview) -> None:
    with ByteReader() as reader, pytest.raises(ValueError, match="expected"):
        reader.read_into([ByteRange(files[1], 0, 1, 0)], buffer)


@pytest.mark.parametrize("kwargs", [{"threads": 0}, {"piece_nbytes": 0}])
def test_reader_without_threads_or_pieces(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        ByteReader(**kwargs)


# The file map


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


def test_released_tensor_faults_back_in(files: list[Path]) -> None:
    file_map = FileMap()
    place = stored(files[2], 5, (2 * PAGE + 100,), torch.uint8)
    tensor = file_map.tensor(place)
    for _ in range(2):
        assert bytes(tensor.tolist()) == files[2].read_bytes()[5 : 5 + place.nbytes]
        file_map.release([place])
        file_map.advise_will_need([place])


def test_advice_of_nothing(files: list[Path]) -> None:
    for advise in (FileMap().advise_will_need, FileMap().release):
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
    file_map = FileMap()
    advice = NotedAdvice(file_map.tensor(StoredTensor(file, 0, 1, torch.uint8, (1,))).data_ptr())
    monkeypatch.setattr(reader_module, "_libc", advice)

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


def test_read_ahead_covers_every_byte_in_calls_that_are_served_whole(
    noted: Callable[..., list[tuple[int, int, int]]],
) -> None:
    calls = noted("advise_will_need", (PAGE + 5, 399 * PAGE + 1))
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
        file_map.advise_will_need([ByteRange(files[1], 0, 10, 0)])


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
