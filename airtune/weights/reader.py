"""Bytes of checkpoint files in host memory: read into a buffer that is reused, or mapped.

A layer of a 27B model is 0.77 GB, read twice a step for as long as a run lasts, so how the bytes arrive
decides the speed. With the file in the page cache, safetensors' `get_tensor().clone()` brings 1-2 GB/s: a
page fault per few pages and fresh memory per tensor. `preadv` into memory that exists already is one copy in
the kernel, and a few threads share it. That is `ByteReader`, for weights that travel on to an accelerator.

`FileMap` is for the case where nothing has to travel, because the CPU computes on the bytes as they are
stored: a tensor is then a view of the file, its pages come in as they are touched, or before that when they
are announced, and are handed back after the visit. It gives up control: a page that is late is waited for
inside a matrix product.

Both leave the page cache to the kernel, which evicts what it likes when the model is larger than memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch

from airtune.weights.header import CheckpointError, StoredTensor

# Linux cuts each MADV_WILLNEED, silently, to what the device reads at once: of 512 MB asked for in one call,
# 8 MB arrived. 128 kB is the default read-ahead, so a call of that size is served whole.
_READ_AHEAD_NBYTES = 128 * 2**10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`nbytes` bytes of `file` from its byte `offset`, bound for byte `into` of a destination."""

    file: Path
    offset: int
    nbytes: int
    into: int


class FileRange(Protocol):
    """Bytes of a file; `ByteRange` and `StoredTensor` both are."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class _Piece(NamedTuple):
    file: Path
    descriptor: int
    offset: int
    target: memoryview


class ByteReader:
    """Reads byte ranges straight into a buffer of the caller, with a few threads that stay.

    Files are opened once and kept open, so a file that is replaced under its name is still read as it was.
    May be called from several threads. A context manager; `close` ends threads and files.

    Args:
        threads: reads in flight.
        piece_nbytes: larger reads are split, so that the threads share a single large tensor.

    Attributes:
        bytes_read: bytes delivered so far.
        read_s: seconds that callers spent in `read_into` so far.
    """

    def __init__(self, *, threads: int = 4, piece_nbytes: int = 16 * 2**20) -> None:
        if threads < 1 or piece_nbytes < 1:
            raise ValueError(
                f"got threads={threads} and piece_nbytes={piece_nbytes}, expected at least 1 of each"
            )
        self.bytes_read = 0
        self.read_s = 0.0
        self._threads = threads
        self._piece_nbytes = piece_nbytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="airtune-read")
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, ranges: Sequence[ByteRange], buffer: torch.Tensor | memoryview) -> None:
        """Read every range to its place in `buffer`, and return when all are there.

        Args:
            ranges: in any order; their places in `buffer` do not overlap.
            buffer: one-dimensional uint8 tensor on the CPU, or writable memory of single bytes.

        Raises:
            CheckpointError: a file ends before a range does. `buffer` is then undefined, but no thread writes
                to it any more.
        """
        started = time.perf_counter()
        target = _as_bytes(buffer)
        for piece in ranges:
            if not 0 <= piece.into <= piece.into + piece.nbytes <= len(target):
                raise ValueError(f"{piece} does not fit a buffer of {len(target)} bytes: give a larger one")
        pieces = deque(self._split(_coalesced(ranges), target))
        futures = [self._pool.submit(_read_all, pieces) for _ in range(min(self._threads, len(pieces)))]
        try:
            for future in futures:
                future.result()
        finally:
            pieces.clear()
            wait(futures)
        with self._lock:
            self.bytes_read += sum(piece.nbytes for piece in ranges)
            self.read_s += time.perf_counter() - started

    def close(self) -> None:
        """End the threads and close the files; the reader is not used after that."""
        self._pool.shutdown()
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _split(self, ranges: Iterable[ByteRange], target: memoryview) -> Iterator[_Piece]:
        for whole in ranges:
            descriptor = self._descriptor(whole.file)
            for begin in range(0, whole.nbytes, self._piece_nbytes):
                end = min(begin + self._piece_nbytes, whole.nbytes)
                place = target[whole.into + begin : whole.into + end]
                yield _Piece(whole.file, descriptor, whole.offset + begin, place)

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]


def _as_bytes(buffer: torch.Tensor | memoryview) -> memoryview:
    if isinstance(buffer, torch.Tensor):
        if (
            buffer.dtype != torch.uint8
            or buffer.dim() != 1
            or not buffer.is_contiguous()
            or not buffer.is_cpu
        ):
            raise ValueError(
                f"got a buffer of {buffer.dtype}, shape {tuple(buffer.shape)} on {buffer.device}; "
                "expected a contiguous one-dimensional uint8 tensor on the CPU"
            )
        return buffer.numpy().data
    if buffer.readonly or buffer.nbytes != len(buffer) or not buffer.contiguous:
        raise ValueError("expected writable, contiguous memory of single bytes: memoryview(...).cast('B')")
    return buffer


def _coalesced(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """In file order, as disks like it; neighbours both in the file and in the buffer become one range."""
    run: ByteRange | None = None
    for piece in sorted(ranges, key=lambda piece: (piece.file, piece.offset, piece.into)):
        if (
            run is not None
            and run.file == piece.file
            and run.offset + run.nbytes == piece.offset
            and run.into + run.nbytes == piece.into
        ):
            run = ByteRange(run.file, run.offset, run.nbytes + piece.nbytes, run.into)
            continue
        if run is not None:
            yield run
        run = piece
    if run is not None:
        yield run


def _read_all(pieces: deque[_Piece]) -> None:
    """One thread's share: whatever is left. Taking from a deque is atomic, and a fast thread takes more."""
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        _read(piece)


def _read(piece: _Piece) -> None:
    done = 0
    while done < len(piece.target):
        # May return less than asked. An interrupting signal is retried by Python itself.
        count = os.preadv(piece.descriptor, [piece.target[done:]], piece.offset + done)
        if count == 0:
            raise CheckpointError(
                f"{piece.file}: holds {os.fstat(piece.descriptor).st_size} bytes, a range of it ends at byte "
                f"{piece.offset + len(piece.target)}: the file changed after it was opened. Restore it "
                "and start again."
            )
        done += count


class _Mapping(NamedTuple):
    memory: mmap.mmap
    address: int


class FileMap:
    """Tensors as views of the files they lie in; each file is mapped once, when it is first needed.

    A mapping lives as long as this object or any of its tensors. The pages are private: writing to a tensor
    never reaches the file. A file that is cut short while it is mapped ends the process (SIGBUS), as with any
    mapping. May be used from several threads.
    """

    def __init__(self) -> None:
        self._mappings: dict[Path, _Mapping] = {}
        self._lock = threading.Lock()

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor, of `stored.shape` and `stored.dtype`, without a copy and without reading a byte yet.

        Where `stored.offset` is no multiple of the item size, no view is possible and the result is a copy in
        new memory; writers of safetensors align their tensors, so this is rare.

        Raises:
            CheckpointError: the file ends before the tensor does.
        """
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        memory = self._mapping(stored.file).memory
        end = stored.offset + stored.nbytes
        if end > len(memory):
            raise CheckpointError(
                f"{stored.file}: holds {len(memory)} bytes, a tensor of it ends at byte {end}: the file "
                "changed after it was opened. Restore it and start again."
            )
        # A storage of its own, of exactly the tensor's bytes: what saves or copies the tensor takes no more.
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        if stored.offset % stored.dtype.itemsize:
            flat = flat.clone()
        return flat.view(stored.dtype).view(stored.shape)

    def advise_will_need(self, ranges: Iterable[FileRange]) -> None:
        """Have the kernel read these bytes ahead, rounded out to whole pages; the reads may end later."""
        for file, begin, end in _unions(ranges):
            for chunk in range(begin - begin % mmap.PAGESIZE, end, _READ_AHEAD_NBYTES):
                self._advise(file, chunk, min(chunk + _READ_AHEAD_NBYTES, end), mmap.MADV_WILLNEED)

    def release(self, ranges: Iterable[FileRange]) -> None:
        """Give back the pages that lie wholly inside these bytes; a tensor that is used again faults them in.

        What was written to such a tensor is lost with them: it then holds the file's values again.
        """
        for file, begin, end in _unions(ranges):
            begin += -begin % mmap.PAGESIZE
            end -= end % mmap.PAGESIZE
            if begin < end:
                self._advise(file, begin, end, mmap.MADV_DONTNEED)

    def _mapping(self, file: Path) -> _Mapping:
        with self._lock:
            if file not in self._mappings:
                with file.open("rb") as stream:
                    # ACCESS_COPY is MAP_PRIVATE and writable, which is what torch asks of a buffer.
                    memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
                self._mappings[file] = _Mapping(memory, address)
            return self._mappings[file]

    def _advise(self, file: Path, begin: int, end: int, advice: int) -> None:
        # Not mmap.madvise: that holds the GIL, and giving up 1 GB of pages takes 70 ms.
        if _libc.madvise(self._mapping(file).address + begin, end - begin, advice) != 0:
            code = ctypes.get_errno()
            if code != errno.EAGAIN:  # "Not now" is a fine answer to advice.
                raise OSError(code, os.strerror(code), str(file))


def _unions(ranges: Iterable[FileRange]) -> Iterator[tuple[Path, int, int]]:
    """(file, begin, end) of the ranges; those that touch or overlap are one: a page may hold their seam."""
    by_file: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for part in ranges:
        if part.nbytes:
            by_file[part.file].append((part.offset, part.offset + part.nbytes))
    for file, spans in by_file.items():
        spans.sort()
        begin, end = spans[0]
        for next_begin, next_end in spans[1:]:
            if next_begin > end:
                yield file, begin, end
                begin = next_begin
            end = max(end, next_end)
        yield file, begin, end
