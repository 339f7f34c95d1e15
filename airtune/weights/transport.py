"""How a layer gets into its slot: file -> pinned host memory -> device.

A layer of a 27B model is 0.77 GB, and two pinned buffers of that size would be most of the host memory that
streaming needs. So it passes through a ring of small ones: while one part is read, the part before it is
copied. Small parts also leave room on the bus for activations, which the layer that is computing needs at
once: at 25 GB/s a 32 MiB part holds the bus for 1.3 ms, the whole layer would for 31 ms.

Layers for which there is host memory are read once and then copied from there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch

from airtune.weights.file_map import FileMap
from airtune.weights.image import Filling, LayerImage
from airtune.weights.pinned import host_buffer, owned_by, piece_nbytes
from airtune.weights.reader import ByteReader

PART_NBYTES = 32 * 2**20
_PARTS = 3  # one being read, one being copied, one waiting


class Slot:
    """Room for one layer on the device, and the order of its use on an accelerator.

    Attributes:
        buffer: uint8, on the device.
        fill: number of the filling that is in it; no two of a residency are the same, but 0 where the buffer
            is not used.
        views: for each layer that was here, its tensors as views of the buffer (or of the mapped file).
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.fill = 0
        self.views: dict[int, list[torch.Tensor]] = {}
        self._on_host = device.type == "cpu"
        self._device = device
        self._ready: torch.Event | None = None
        self._free: torch.Event | None = None
        if not self._on_host:
            # The allocator may hand out memory that kernels queued earlier still read.
            self.release()

    def acquire(self) -> None:
        """What the current stream does next comes after the copies into the slot."""
        if self._ready is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._ready)

    def release(self) -> None:
        """What was queued on the current stream so far comes before the next copy into the slot."""
        if not self._on_host:
            self._free = torch.accelerator.current_stream(self._device).record_event()

    def begin_copy(self, stream: torch.Stream) -> None:
        if self._free is not None:
            stream.wait_event(self._free)

    def end_copy(self, stream: torch.Stream) -> None:
        self._ready = stream.record_event()


class _Part:
    """A pinned host buffer of the ring."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = host_buffer([nbytes])
        self.copied: torch.Event | None = None

    def is_free(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> torch.Tensor:
        """The buffer, once the copy out of it is done."""
        if self.copied is not None:
            self.copied.synchronize()
        return self._buffer


class _Cached:
    """An image that stays in host memory, in pieces."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pieces = [host_buffer([size]) for size in piece_nbytes(nbytes, PART_NBYTES)]
        self.copied: torch.Event | None = None

    def wait(self) -> None:
        """Until no copy reads it any more."""
        if self.copied is not None:
            self.copied.synchronize()


class Transport:
    """Fills slots; used by background threads, each with another slot and image."""

    def __init__(
        self,
        images: Sequence[LayerImage],
        reader: ByteReader,
        files: FileMap,
        *,
        device: torch.device,
        cache_nbytes: int,
        poison: bool,
        evict: bool = False,
        part_nbytes: int = PART_NBYTES,
    ) -> None:
        """
        Args:
            evict: what was copied longest ago makes room in the cache; without it, what came first stays.
            part_nbytes: of the images that go through the ring; small images need no large parts.
        """
        self._images, self._reader, self._files = images, reader, files
        self._device, self._poison = device, poison
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._part_nbytes = max(1, min(PART_NBYTES, part_nbytes))
        self._ring: deque[_Part] = deque()  # those that nobody fills; the one that was sent first comes first
        self._parts = 0
        self._cache: OrderedDict[int, _Cached] = OrderedDict()
        self._cache_nbytes = self._cache_nbytes_left = cache_nbytes
        self._evict = evict
        self._lock = threading.Lock()  # for the ring and the cache

    def keep(self, nbytes: int) -> None:
        """Give the cache another size; only while it is empty."""
        assert not self._cache
        self._cache_nbytes = self._cache_nbytes_left = nbytes

    def slot(self, nbytes: int) -> Slot:
        """A new slot; its memory is given back when it is dropped, once the copies into it are done."""
        slot = Slot(nbytes, self._device)
        if self._stream is not None:
            owned_by(slot.buffer, self._stream)
        return slot

    def fill(self, index: int, slot: Slot) -> tuple[int, int]:
        """Bring layer `index` into `slot`; returns the bytes read and the bytes copied to the device."""
        image = self._images[index]
        if self._stream is None:
            self._files.populate(image.mapped_ranges())
            if self._poison:
                slot.buffer.fill_(255)
            image.fill(slot.buffer, self._reader, self._files)
            return image.read_nbytes + image.mapped_nbytes, 0
        with self._stream:
            slot.begin_copy(self._stream)
            if self._poison:
                slot.buffer.fill_(255)
        with self._lock:
            cached = self._cache.get(index)
            keep = cached is None and self._make_room(image.nbytes)
        if cached is None and not keep:
            self._copy_parts(image, slot)
        else:
            self._copy_cached(index, cached or self._read_to_keep(index), slot)
        slot.end_copy(self._stream)
        return image.read_nbytes if cached is None else 0, image.nbytes

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._ring.clear()
        self._cache.clear()

    def _copy_parts(self, image: LayerImage, slot: Slot) -> None:
        filling = Filling(image, self._reader, self._files)
        for start in range(0, image.nbytes, self._part_nbytes):
            stop = min(start + self._part_nbytes, image.nbytes)
            with self._lock:
                part = self._ring.popleft() if self._ring else None
            if part is None or (self._parts < _PARTS and not part.is_free()):
                part = self._another_part(part)
            host = part.wait()
            filling.write(host, start, stop)
            part.copied = self._send(host[: stop - start], slot.buffer[start:stop])
            with self._lock:
                self._ring.append(part)

    def _make_room(self, nbytes: int) -> bool:
        """Reserve room in the cache; what was used longest ago may have to go."""
        if self._evict and nbytes <= self._cache_nbytes:
            while nbytes > self._cache_nbytes_left and self._cache:
                _, oldest = self._cache.popitem(last=False)
                oldest.wait()
                self._cache_nbytes_left += oldest.nbytes
        if nbytes > self._cache_nbytes_left:
            return False
        self._cache_nbytes_left -= nbytes
        return True

    def _read_to_keep(self, index: int) -> _Cached:
        image = self._images[index]
        try:
            cached, start = _Cached(image.nbytes), 0
            filling = Filling(image, self._reader, self._files)
            for piece in cached.pieces:
                filling.write(piece, start, start + piece.numel())
                start += piece.numel()
        except BaseException:
            with self._lock:
                self._cache_nbytes_left += image.nbytes
            raise
        with self._lock:
            self._cache[index] = cached
            return cached

    def _copy_cached(self, index: int, cached: _Cached, slot: Slot) -> None:
        sent, start = deque[torch.Event](), 0
        for piece in cached.pieces:
            if len(sent) >= _PARTS:
                sent.popleft().synchronize()  # not more on the bus than that: activations come first
            cached.copied = self._send(piece, slot.buffer[start : start + piece.numel()])
            sent.append(cached.copied)
            start += piece.numel()
        with self._lock:
            if index in self._cache:
                self._cache.move_to_end(index)
                return
        cached.wait()  # another thread made room meanwhile: nobody else keeps this memory until it is copied

    def _send(self, host: torch.Tensor, target: torch.Tensor) -> torch.Event:
        assert self._stream is not None
        with self._stream:
            target.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def _another_part(self, busy: _Part | None) -> _Part:
        with self._lock:
            if busy is not None:
                self._ring.appendleft(busy)
            self._parts += 1
        return _Part(self._part_nbytes)
