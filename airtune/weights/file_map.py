"""Checkpoint files as memory: tensors that are views of the file they lie in.

Where the CPU computes on a layer's bytes as they are stored, nothing has to travel: 0.77 GB a layer (27B
model) need be copied nowhere, twice a step. A tensor is then a view of the mapped file; its pages come in as
they are touched, or before that when they are announced, and are handed back after the visit.

It gives up control: a page that is late is waited for inside a matrix product, and what stays in memory is
the kernel's choice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from airtune.weights.header import CheckpointError, StoredTensor
from airtune.weights.reader import ByteRange

# Reads pages and maps them, in the thread that asks (Linux 5.14), so that they are not faulted in one by one
# in the middle of a matrix product. Python has no name for it yet.
_MADV_POPULATE_READ = 22
# Python has a name for it from 3.13 on.
_MAP_NORESERVE = 0x4000
# The address space is locked against new mappings meanwhile, and large tensors are mappings: in small bites.
_POPULATE_NBYTES = 2 * 2**20
# A thread that populates waits for each of its reads; a disk likes to be asked for several things at once.
_POPULATE_THREADS = 4
# Elsewhere the kernel is only told. Linux cuts each MADV_WILLNEED, silently, to what the device reads at once
# (of 512 MB asked for at once, 8 MB arrived). 128 kB is the default read-ahead: such a call is served whole.
_READ_AHEAD_NBYTES = 128 * 2**10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)

FileRange = StoredTensor | ByteRange  # bytes of a file


class _Mapping(NamedTuple):
    memory: mmap.mmap
    address: int


class FileMap:
    """Tensors as views of the files they lie in; each file is mapped once, when it is first needed.

    A mapping lives as long as this object or any of its tensors. The pages are private: writing to a tensor
    never reaches the file. A file that is cut short while it is mapped ends the process (SIGBUS), as with any
    mapping. May be used from several threads.

    Args:
        scattered: what is read lies anywhere: the kernel reads nothing beside it.
    """

    def __init__(self, *, scattered: bool = False) -> None:
        self._scattered = scattered
        self._mappings: dict[Path, _Mapping] = {}
        self._lock = threading.Lock()
        self._can_populate = _can_populate()
        self._pool = ThreadPoolExecutor(_POPULATE_THREADS, thread_name_prefix="airtune-map")

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

    def populate(self, ranges: Iterable[FileRange]) -> None:
        """Bring these bytes into memory, in whole pages; where the kernel can only be told, tell it.

        Meant for a thread of its own: it takes as long as reading does.
        """
        for file, begin, end in _pages(ranges):
            if not self._can_populate:
                self._announce(file, begin, end)
                continue
            begins = range(begin, end, _POPULATE_NBYTES)
            bites = [(file, bite, min(bite + _POPULATE_NBYTES, end), _MADV_POPULATE_READ) for bite in begins]
            if len(bites) > 1 and any(self._lacks(*bite[:3]) for bite in (bites[0], bites[-1])):
                for _ in self._pool.map(lambda bite: self._advise(*bite), bites):
                    pass
            else:
                for bite in bites:
                    self._advise(*bite)

    def lacks(self, ranges: Iterable[FileRange]) -> bool:
        """Whether reading these bytes would wait for the disk, as far as the kernel says: it tells the file's
        owner and whoever may write it. Always False where it cannot be asked to read.
        """
        return self._can_populate and any(self._lacks(*pages) for pages in _pages(ranges))

    def _lacks(self, file: Path, begin: int, end: int) -> bool:
        in_memory = ctypes.create_string_buffer(-(-(end - begin) // mmap.PAGESIZE))
        if _libc.mincore(self._mapping(file).address + begin, end - begin, in_memory) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(file))
        return b"\0" in in_memory.raw

    def announce(self, ranges: Iterable[FileRange]) -> None:
        """Have the kernel read these bytes ahead, rounded out to whole pages; the reads may end later."""
        for pages in _pages(ranges):
            self._announce(*pages)

    def _announce(self, file: Path, begin: int, end: int) -> None:
        for bite in range(begin, end, _READ_AHEAD_NBYTES):
            self._advise(file, bite, min(bite + _READ_AHEAD_NBYTES, end), mmap.MADV_WILLNEED)

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
                    if os.fstat(stream.fileno()).st_size == 0:
                        raise CheckpointError(
                            f"{file}: is empty: it changed after it was opened. Restore it and start again."
                        )
                    # Writable, which is what torch asks of a buffer. No memory is set aside for such writes:
                    # the file may be larger than all of it.
                    memory = mmap.mmap(
                        stream.fileno(),
                        0,
                        flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                        prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    )
                if self._scattered:
                    memory.madvise(mmap.MADV_RANDOM)
                address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
                self._mappings[file] = _Mapping(memory, address)
            return self._mappings[file]

    def _advise(self, file: Path, begin: int, end: int, advice: int) -> None:
        # Not mmap.madvise: that holds the GIL, and giving up 1 GB of pages takes 70 ms.
        if _libc.madvise(self._mapping(file).address + begin, end - begin, advice) != 0:
            code = ctypes.get_errno()
            if code != errno.EAGAIN:  # "Not now" is a fine answer to advice.
                raise OSError(code, os.strerror(code), str(file))


def _can_populate() -> bool:
    """Whether this kernel knows MADV_POPULATE_READ: tried on a page of our own."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return sys.platform == "linux" and _libc.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_READ) == 0


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


def _pages(ranges: Iterable[FileRange]) -> Iterator[tuple[Path, int, int]]:
    """The same, from the beginning of a page on."""
    for file, begin, end in _unions(ranges):
        yield file, begin - begin % mmap.PAGESIZE, end
