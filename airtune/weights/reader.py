"""Bytes of checkpoint files read into host memory that is there already and is used again and again.

A layer of a 27B model is 0.77 GB, read twice a step for as long as a run lasts, so how the bytes arrive
decides the speed. With the file in the page cache, safetensors' `get_tensor().clone()` brings 1-2 GB/s: a
page fault per few pages and fresh memory per tensor. `preadv` into memory that exists already is one copy in
the kernel, and a few threads share it.

What to keep in the page cache is left to the kernel. When the model is larger than memory, most of that is
work without a gain: a page is found, filled, copied, and evicted before it is needed again. Direct reads
(O_DIRECT) go past the cache: the disk writes into memory of ours. They give up what the cache would have
kept. They also come in whole blocks, at aligned addresses, which tensors do not have, so each takes one more
copy, out of a buffer that does. `airtune.weights.access` chooses.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from airtune.weights.header import CheckpointError

# Direct reads begin and end at multiples of this. Disks ask for 512 bytes or for 4 kB, and a file's own
# st_blksize is a hint about speed: megabytes on network file systems.
BLOCK_NBYTES = 4096
# While one thread copies a direct piece out, the disk works for the others, so that of 32 MiB asked for,
# pieces of 4 MiB leave it less idle than two of 16 (1.07 against 0.86 GB/s on a virtual disk).
_DIRECT_PIECE_NBYTES = 4 * 2**20


class NoDirectIO(ValueError):
    """Direct I/O was asked for where there is none."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`nbytes` bytes of `file` from its byte `offset`, bound for byte `into` of a destination."""

    file: Path
    offset: int
    nbytes: int
    into: int


class _Piece(NamedTuple):
    file: Path
    descriptor: int
    offset: int
    target: memoryview


class _Bounce(NamedTuple):
    """Memory that direct reads arrive in; it begins at a page, so its blocks are aligned."""

    memory: mmap.mmap
    address: int

    @classmethod
    def of(cls, nbytes: int) -> _Bounce:
        # Populated at once: the first reads would be slower than the rest, and they are the ones measured.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        return cls(memory, _address(memoryview(memory)))


class ByteReader:
    """Reads byte ranges straight into a buffer of the caller, with a few threads that stay.

    Files are opened once and kept open, so a file that is replaced under its name is still read as it was.
    May be called from several threads. A context manager; `close` ends threads and files.

    Args:
        threads: reads in flight.
        piece_nbytes: larger reads are split, so that the threads share a single large tensor.
        direct: read past the page cache, in pieces of 4 MiB at most, with a buffer for each thread. Linux
            only.

    Attributes:
        bytes_read: bytes delivered so far.
        read_s: seconds that callers spent in `read_into` so far.

    Raises:
        NoDirectIO: (a ValueError) `direct` on another system than Linux.
    """

    def __init__(self, *, threads: int = 4, piece_nbytes: int = 16 * 2**20, direct: bool = False) -> None:
        if threads < 1 or piece_nbytes < 1:
            raise ValueError(
                f"got threads={threads} and piece_nbytes={piece_nbytes}, expected at least 1 of each"
            )
        if direct and sys.platform != "linux":
            raise NoDirectIO(
                f"direct I/O is not available on this system ({sys.platform}), only on Linux: "
                "read without it, through the page cache"
            )
        self.bytes_read = 0
        self.read_s = 0.0
        self._threads = threads
        self._piece_nbytes = min(piece_nbytes, _DIRECT_PIECE_NBYTES) if direct else piece_nbytes
        # The blocks that cover a piece reach out of it on both sides.
        cover_nbytes = self._piece_nbytes + 2 * BLOCK_NBYTES
        self._bounces = deque(_Bounce.of(cover_nbytes) for _ in range(threads if direct else 0))
        self._direct = direct
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="airtune-read")
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        # Whoever forgets the reader leaves no files open: threads end by themselves, descriptors do not.
        self._close_files = weakref.finalize(self, _close_all, self._descriptors)

    def read_into(self, ranges: Sequence[ByteRange], buffer: torch.Tensor | memoryview) -> None:
        """Read every range to its place in `buffer`, and return when all are there.

        After an error `buffer` is undefined, but no thread writes to it any more.

        Args:
            ranges: in any order; their places in `buffer` do not overlap.
            buffer: one-dimensional uint8 tensor on the CPU, or writable memory of single bytes.

        Raises:
            CheckpointError: a file ends before a range does.
            NoDirectIO: (a ValueError) the file lies where direct reads are refused.
        """
        started = time.perf_counter()
        target = _as_bytes(buffer)
        for piece in ranges:
            if not 0 <= piece.into <= piece.into + piece.nbytes <= len(target):
                raise ValueError(f"{piece} does not fit a buffer of {len(target)} bytes: give a larger one")
        pieces = deque(self._split(_coalesced(ranges), target))
        work = self._read_all_direct if self._direct else _read_all
        futures = [self._pool.submit(work, pieces) for _ in range(min(self._threads, len(pieces)))]
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
            self._close_files()
        self._bounces.clear()

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
                self._descriptors[file] = _open(file, direct=self._direct)
            return self._descriptors[file]

    def _read_all_direct(self, pieces: deque[_Piece]) -> None:
        bounce = self._bounces.pop()  # there is one: the pool runs no more of us than it has threads
        try:
            _read_all(pieces, lambda piece: _read_direct(piece, bounce))
        finally:
            self._bounces.append(bounce)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


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


def _open(file: Path, *, direct: bool) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise _refused(file) from error
        raise


def _read(piece: _Piece) -> None:
    done = 0
    while done < len(piece.target):
        # May return less than asked. An interrupting signal is retried by Python itself.
        count = os.preadv(piece.descriptor, [piece.target[done:]], piece.offset + done)
        if count == 0:
            raise _ended(piece)
        done += count


def _read_direct(piece: _Piece, bounce: _Bounce) -> None:
    """The blocks that cover the piece into `bounce`, and out of it what is wanted."""
    before = piece.offset % BLOCK_NBYTES
    wanted = before + len(piece.target)
    cover = memoryview(bounce.memory)[: wanted + -wanted % BLOCK_NBYTES]
    done = 0
    while done < wanted:
        # Less than asked may come, and the file's last block is short: from there a whole block again.
        begin = done - done % BLOCK_NBYTES
        try:
            count = os.preadv(piece.descriptor, [cover[begin:]], piece.offset - before + begin)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise _refused(piece.file) from error
            raise
        if begin + count <= done:
            raise _ended(piece)
        done = begin + count
    # Not a slice assignment: that holds the GIL, half a millisecond for 4 MB, and others compute meanwhile.
    ctypes.memmove(_address(piece.target), bounce.address + before, len(piece.target))


def _read_all(pieces: deque[_Piece], read: Callable[[_Piece], None] = _read) -> None:
    """One thread's share: whatever is left. Taking from a deque is atomic, and a fast thread takes more."""
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        read(piece)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _ended(piece: _Piece) -> CheckpointError:
    return CheckpointError(
        f"{piece.file}: holds {os.fstat(piece.descriptor).st_size} bytes, a range of it ends at byte "
        f"{piece.offset + len(piece.target)}: the file changed after it was opened. Restore it "
        "and start again."
    )


def _refused(file: Path) -> NoDirectIO:
    return NoDirectIO(
        f"{file}: its file system refuses direct I/O (O_DIRECT). Read without it, through the page cache, or "
        "move the file to a local disk (ext4 or xfs)."
    )
