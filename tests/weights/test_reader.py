from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from airtune.weights.header import CheckpointError
from airtune.weights.reader import BLOCK_NBYTES, ByteRange, ByteReader, NoDirectIO


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    generator = random.Random(0)
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, nbytes in zip(paths, (1, 40_000, 3 * BLOCK_NBYTES), strict=True):
        path.write_bytes(generator.randbytes(nbytes))
    return paths


@pytest.fixture
def direct_io(files: list[Path]) -> None:
    """Skips the test where the folder for temporary files cannot be read directly."""
    try:
        with ByteReader(direct=True) as reader:
            reader.read_into([ByteRange(files[0], 0, 1, 0)], torch.zeros(1, dtype=torch.uint8))
    except NoDirectIO as refusal:
        pytest.skip(str(refusal))


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("direct_io")
    return bool(request.param)


@pytest.fixture(params=[(1, 1000), (4, 7), (3, 2**24)], ids=str)
def reader(request: pytest.FixtureRequest, direct: bool) -> Iterator[ByteReader]:
    threads, piece_nbytes = request.param
    with ByteReader(threads=threads, piece_nbytes=piece_nbytes, direct=direct) as opened:
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


def test_many_callers_at_once(files: list[Path], direct: bool) -> None:
    rounds, wrong = 20, []

    def work(reader: ByteReader, seed: int) -> None:
        buffer = torch.zeros(2**20, dtype=torch.uint8)
        for turn in range(rounds):
            ranges, nbytes = random_ranges(files, 100 * seed + turn, count=15)
            before = bytes(buffer[:nbytes].tolist())
            reader.read_into(ranges, buffer)
            if bytes(buffer[:nbytes].tolist()) != read_naively(ranges, before):
                wrong.append((seed, turn))

    with ByteReader(threads=4, piece_nbytes=333, direct=direct) as reader:
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


def test_close_leaves_no_descriptors_or_threads(files: list[Path], direct: bool) -> None:
    before = len(os.listdir("/dev/fd")), threading.active_count()
    reader = ByteReader(direct=direct)
    reader.read_into([ByteRange(file, 0, 1, 0) for file in files], torch.zeros(1, dtype=torch.uint8))
    assert len(os.listdir("/dev/fd")) == before[0] + 3
    reader.close()
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


def test_file_that_shrank_is_named_and_no_thread_goes_on(files: list[Path], direct: bool) -> None:
    buffer = torch.zeros(40_000, dtype=torch.uint8)
    with ByteReader(threads=4, piece_nbytes=100, direct=direct) as reader:
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


@pytest.mark.parametrize(("threads", "piece_nbytes"), [(0, 1), (1, 0)])
def test_reader_without_threads_or_pieces(threads: int, piece_nbytes: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        ByteReader(threads=threads, piece_nbytes=piece_nbytes)


# Direct reads


@pytest.mark.usefixtures("direct_io")
@pytest.mark.parametrize("file", [1, 2], ids=["ends inside a block", "ends with a block"])
def test_direct_reads_around_the_edges_of_blocks(files: list[Path], file: int) -> None:
    content = files[file].read_bytes()
    edges = {0, BLOCK_NBYTES, 2 * BLOCK_NBYTES, len(content) - len(content) % BLOCK_NBYTES, len(content)}
    places = sorted({edge + step for edge in edges for step in (-1, 0, 1)} & set(range(len(content) + 1)))
    with ByteReader(threads=2, direct=True) as reader:
        for begin in places:
            for end in places[places.index(begin) :]:
                buffer = torch.full((end - begin + 2,), 171, dtype=torch.uint8)
                reader.read_into([ByteRange(files[file], begin, end - begin, 1)], buffer)
                assert bytes(buffer.tolist()) == b"\xab" + content[begin:end] + b"\xab"


@pytest.mark.usefixtures("direct_io")
def test_direct_reads_are_of_whole_blocks_into_aligned_memory(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preadv, calls = os.preadv, list[tuple[int, int, int]]()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
        calls.append((offset, len(buffers[0]), address))
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with ByteReader(piece_nbytes=5000, direct=True) as reader:
        ranges = [ByteRange(files[1], 77, 30_000, 0), ByteRange(files[1], 39_999, 1, 30_000)]
        reader.read_into(ranges, torch.zeros(30_001, dtype=torch.uint8))
    assert len(calls) > 3
    assert all(place % BLOCK_NBYTES == 0 for call in calls for place in call)


@pytest.mark.usefixtures("direct_io")
def test_short_direct_reads_go_on_at_a_block(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real_preadv, offsets = os.preadv, list[int]()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        count = real_preadv(descriptor, buffers, offset)
        buffers[0][6000:count] = bytes(max(0, count - 6000))
        return min(6000, count)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = torch.zeros(20_000, dtype=torch.uint8)
    with ByteReader(direct=True) as reader:
        reader.read_into([ByteRange(files[1], 5000, 20_000, 0)], buffer)
    assert bytes(buffer.tolist()) == files[1].read_bytes()[5000:25_000]
    assert offsets == [block * BLOCK_NBYTES for block in range(1, 6)]


@pytest.mark.usefixtures("direct_io")
def test_large_direct_ranges_are_split_finer(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    large = files[0].with_name("large")
    large.touch()
    os.truncate(large, 9 * 2**20)
    reads = CountedReads(monkeypatch)
    with ByteReader(threads=1, direct=True) as reader:
        reader.read_into([ByteRange(large, 0, 9 * 2**20, 0)], torch.zeros(9 * 2**20, dtype=torch.uint8))
    assert reads.calls == [(0, 2**22), (2**22, 2**22), (2**23, 2**20)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads a file of /proc, where direct I/O is refused")
def test_file_system_that_refuses_to_open_directly() -> None:
    refusal = r"/proc/self/status: its file system refuses direct I/O .*Read without it"
    with ByteReader(direct=True) as reader, pytest.raises(NoDirectIO, match=refusal):
        reader.read_into([ByteRange(Path("/proc/self/status"), 0, 1, 0)], torch.zeros(1, dtype=torch.uint8))


@pytest.mark.usefixtures("direct_io")
@pytest.mark.parametrize(("code", "error"), [(errno.EINVAL, NoDirectIO), (errno.EIO, OSError)])
def test_file_system_that_refuses_to_read_directly(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", preadv)
    with ByteReader(direct=True) as reader, pytest.raises(error, match=r"1\.safetensors: its|Input/output"):
        reader.read_into([ByteRange(files[1], 0, 1, 0)], torch.zeros(1, dtype=torch.uint8))


def test_system_without_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"not available on this system \(darwin\), only on Linux"):
        ByteReader(direct=True)
