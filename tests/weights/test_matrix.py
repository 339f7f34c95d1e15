"""A matrix in chunks is the matrix, on the host and on an accelerator; its pages come and go in turn."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from airtune.weights.checkpoint import Checkpoint, CheckpointError
from airtune.weights.file_map import FileMap
from airtune.weights.matrix import ChunkedMatrix, FileRows, Rows, TensorRows
from airtune.weights.reader import ByteReader
from tests.sim import Simulator

SIZES = [(1, 1), (7, 3), (10, 4), (64, 1), (33, 17)]
CHUNKS = [1, 3, 7, 64]  # rows
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
MakeRows = Callable[[torch.Tensor], Rows]


@pytest.fixture
def reader() -> Iterator[ByteReader]:
    with ByteReader(threads=2) as reader:
        yield reader


@pytest.fixture(params=["in RAM", "in a file"])
def rows_of(request: pytest.FixtureRequest, tmp_path: Path, reader: ByteReader) -> MakeRows:
    def in_file(matrix: torch.Tensor) -> Rows:
        save_file({"before": torch.zeros(3), "head": matrix}, tmp_path / "model.safetensors")
        stored, files = Checkpoint.open(tmp_path)["head"], FileMap()
        return FileRows(stored, files.tensor(stored), reader, files)

    return TensorRows if request.param == "in RAM" else in_file


def chunked(rows: Rows, chunk_rows: int, dtype: torch.dtype, device: str = "cpu") -> ChunkedMatrix:
    chunk_nbytes = chunk_rows * rows.shape[1] * dtype.itemsize
    return ChunkedMatrix(rows, device=torch.device(device), dtype=dtype, chunk_nbytes=chunk_nbytes)


def assert_chunks(
    matrix: ChunkedMatrix, wanted_VD: torch.Tensor, chunk_rows: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    got: list[torch.Tensor] = []
    for first, chunk in matrix.chunks():
        assert first == sum(len(c) for c in got) and 0 < len(chunk) <= chunk_rows
        assert (chunk.dtype, chunk.device.type) == (dtype, device)
        got.append(chunk.clone())
    assert torch.equal(torch.cat(got).cpu(), wanted_VD.to(dtype))


@pytest.mark.parametrize("chunk_rows", CHUNKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chunks_are_the_rows(rows_of: MakeRows, size: tuple[int, int], chunk_rows: int) -> None:
    for stored_dtype in FLOATS:
        stored_VD = torch.randn(size).to(stored_dtype)
        rows = rows_of(stored_VD)
        assert rows.shape == size
        for dtype in FLOATS:
            matrix = chunked(rows, chunk_rows, dtype)
            assert (matrix.rows, matrix.columns) == size
            for _ in range(2):
                assert_chunks(matrix, stored_VD, chunk_rows, dtype)
            matrix.close()


def test_a_row_larger_than_a_chunk_comes_alone() -> None:
    stored_VD = torch.randn(3, 100)
    matrix = ChunkedMatrix(
        TensorRows(stored_VD), device=torch.device("cpu"), dtype=torch.float32, chunk_nbytes=16
    )
    assert_chunks(matrix, stored_VD, 1, torch.float32)


def test_on_the_host_nothing_is_copied_that_is_stored_as_computed(rows_of: MakeRows) -> None:
    rows = rows_of(torch.randn(10, 4))
    whole = rows.view(0, 10)
    for first, chunk in chunked(rows, 3, torch.float32).chunks():
        assert chunk.data_ptr() == whole.data_ptr() + first * 16


def test_a_write_to_a_chunk_never_reaches_the_file(tmp_path: Path, reader: ByteReader) -> None:
    save_file({"head": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    stored, files = Checkpoint.open(tmp_path)["head"], FileMap()
    rows = FileRows(stored, files.tensor(stored), reader, files)
    for _, chunk in chunked(rows, 2, torch.float32).chunks():
        chunk.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


class NotedRows(TensorRows):
    """Rows that note what is asked of them."""

    def __init__(self, matrix_VD: torch.Tensor) -> None:
        super().__init__(matrix_VD)
        self.notes: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        self.lacking: set[tuple[int, int]] = set()

    def lacks(self, start: int, stop: int) -> bool:
        return (start, stop) in self.lacking

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        self.notes.append(("copy", start, stop))
        self.threads.add(threading.current_thread().name)
        super().copy(start, stop, into)

    def bring(self, start: int, stop: int) -> None:
        self.notes.append(("bring", start, stop))
        self.threads.add(threading.current_thread().name)

    def release(self, start: int, stop: int) -> None:
        self.notes.append(("release", start, stop))


def use(matrix: ChunkedMatrix, rows: NotedRows) -> list[tuple[str, int, int]]:
    """A pass over the chunks; what was asked of the rows meanwhile and then, once their thread is done."""
    rows.notes.clear()
    matrix.announce()
    for first, chunk in matrix.chunks():
        rows.notes.append(("use", first, first + len(chunk)))
    finish(matrix)
    return rows.notes


def finish(matrix: ChunkedMatrix) -> None:
    """Wait for the thread to have done what it was asked to."""
    assert matrix._worker is not None
    matrix._worker.submit(lambda: None).result()


def test_a_thread_brings_rows_before_their_turn_and_releases_them_after_it() -> None:
    rows = NotedRows(torch.randn(7, 2))
    matrix = chunked(rows, 3, torch.float32)
    notes = use(matrix, rows)
    spans = [(0, 3), (3, 6), (6, 7)]
    assert sorted(notes) == sorted((kind, *span) for kind in ("bring", "use", "release") for span in spans)
    for span in spans:
        assert notes.index(("bring", *span)) < notes.index(("use", *span)) < notes.index(("release", *span))
    assert notes.index(("release", 0, 3)) < notes.index(("bring", 6, 7)), "no more than two chunks at a time"
    assert all(name.startswith("airtune-head") for name in rows.threads)


def test_rows_that_stay_are_brought_only_where_the_disk_would_be_waited_for() -> None:
    rows = NotedRows(torch.randn(7, 2))
    matrix = chunked(rows, 3, torch.float32)
    matrix.stays = True
    assert use(matrix, rows) == [("use", 0, 3), ("use", 3, 6), ("use", 6, 7)]
    rows.lacking = {(3, 6)}
    assert sorted(use(matrix, rows)) == [("bring", 3, 6), ("use", 0, 3), ("use", 3, 6), ("use", 6, 7)]


def test_a_pass_that_ends_early_releases_what_it_used() -> None:
    rows = NotedRows(torch.randn(7, 2))
    matrix = chunked(rows, 3, torch.float32)
    for _ in matrix.chunks():
        break
    finish(matrix)
    assert ("release", 0, 3) in rows.notes


# On an accelerator


@pytest.mark.parametrize("announced", [False, True], ids=["unannounced", "announced"])
@pytest.mark.parametrize("chunk_rows", CHUNKS)
def test_chunks_on_an_accelerator(
    sim: Simulator, rows_of: MakeRows, chunk_rows: int, announced: bool
) -> None:
    """Kernels and copies use each chunk, nobody waits for them: a refill too early is a wrong value."""
    for dtype in FLOATS:
        stored_VD = torch.randn(33, 17).bfloat16()
        matrix = chunked(rows_of(stored_VD), chunk_rows, dtype, "sim")
        for _ in range(3):
            if announced:
                matrix.announce()
            doubled = [chunk * 2 for _, chunk in matrix.chunks()]
            assert torch.equal(torch.cat(doubled).cpu(), stored_VD.to(dtype) * 2)
            sent = [
                torch.empty_like(chunk, device="cpu", pin_memory=True).copy_(chunk, non_blocking=True)
                for _, chunk in matrix.chunks()
            ]
            sim.synchronize()
            assert torch.equal(torch.cat(sent), stored_VD.to(dtype))
            assert_chunks(matrix, stored_VD, chunk_rows, dtype, "sim")
        matrix.close()


def test_the_device_holds_two_chunks_and_only_while_they_are_used(sim: Simulator) -> None:
    matrix = chunked(TensorRows(torch.randn(100, 8)), 10, torch.float32, "sim")
    start = sim.now()
    matrix.announce()
    assert sim.now() == start
    sim.reset_peak()
    assert sum(1 for _ in matrix.chunks()) == 10
    sim.synchronize()
    assert (sim.peak() - start, sim.now() - start) == (2 * 10 * 8 * 4, 0)
    matrix.close()


def test_rows_cross_to_the_device_once_and_are_read_by_another_thread(sim: Simulator) -> None:
    rows = NotedRows(torch.randn(10, 4))
    matrix = chunked(rows, 3, torch.float32, "sim")
    matrix.announce()
    matrix.announce()  # twice is once
    for _ in matrix.chunks():
        pass
    sim.synchronize()
    assert [note for note in rows.notes if note[0] == "copy"] == [
        ("copy", start, min(start + 3, 10)) for start in (0, 3, 6, 9)
    ]
    assert threading.current_thread().name not in rows.threads
    assert sim.traffic()["h2d_nbytes"] == 10 * 4 * 4
    assert sim.traffic()["unpinned_late_copies"] == 0
    matrix.close()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_leaving_early_and_starting_again(sim: Simulator, device: str) -> None:
    stored_VD, choice = torch.randn(20, 4), random.Random(0)
    matrix = chunked(TensorRows(stored_VD), 3, torch.float32, device)
    for _ in range(10):
        last = choice.randrange(0, 20)
        for first, chunk in matrix.chunks():
            filled = torch.ones(3, 4, device=device)  # may get the memory of a chunk that was let go
            assert torch.equal(chunk.cpu(), stored_VD[first : first + 3])
            if first >= last:
                break
        del chunk
        assert torch.ones(3, 4, device=device).add_(filled).eq(2).all()
    assert_chunks(matrix, stored_VD, 3, torch.float32, device)
    matrix.close()


def test_a_file_that_shrank_is_an_error_where_the_chunks_are_asked_for(
    sim: Simulator, tmp_path: Path, reader: ByteReader
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"head": torch.randn(100, 8)}, file)
    stored, files = Checkpoint.open(tmp_path)["head"], FileMap()
    matrix = chunked(FileRows(stored, files.tensor(stored), reader, files), 10, torch.float32, "sim")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: holds 2000 bytes"):
        for _ in matrix.chunks():
            pass
    matrix.close()


def test_close_ends_the_thread(sim: Simulator) -> None:
    before = threading.active_count()
    stored_VD = torch.randn(10, 4)
    matrix = chunked(TensorRows(stored_VD), 3, torch.float32, "sim")
    assert_chunks(matrix, stored_VD, 3, torch.float32, "sim")
    matrix.announce()
    matrix.close()
    assert threading.active_count() == before


def test_rows_that_stay_are_copied_to_the_device_once(sim: Simulator) -> None:
    """Also when the first pass was in inference mode and the second one trains."""
    rows = NotedRows(torch.randn(7, 2))
    matrix = chunked(rows, 3, torch.float32, "sim")
    matrix.stays = True
    with torch.inference_mode():
        assert_chunks(matrix, rows.view(0, 7), 3, torch.float32, "sim")
    assert len(rows.notes) == 3 and matrix.held_nbytes == matrix.nbytes == 7 * 2 * 4
    matrix.announce()
    assert_chunks(matrix, rows.view(0, 7), 3, torch.float32, "sim")
    assert len(rows.notes) == 3, "nothing was read again"
    hidden_ND = torch.ones(4, 2, device="sim", requires_grad=True)
    sum((hidden_ND @ chunk.T).sum() for _, chunk in matrix.chunks()).backward()  # type: ignore[union-attr]
    matrix.stays = False
    assert matrix.held_nbytes == 0
    assert_chunks(matrix, rows.view(0, 7), 3, torch.float32, "sim")
    assert len(rows.notes) == 6
    matrix.close()
