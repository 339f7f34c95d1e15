"""How a layer gets into its slot: file -> pinned host memory -> device.

A layer of a 27B model is 0.77 GB, and two pinned buffers of that size would be most of the host memory that
streaming needs. So it passes through a ring of small ones: while one part is read, the part before it is
copied. Small parts also leave room on the bus for activations, which the layer that is computing needs at
once: at 25 GB/s a 32 MiB part holds the bus for 1.3 ms, the whole layer would for 31 ms.

Layers for which there is host memory are read once and then copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from airtune.weights.file_map import FileMap
from airtune.weights.image import Filling, LayerImage
from airtune.weights.reader import ByteReader

PART_NBYTES = 32 * 2**20
_PARTS = 3  # one being read, one being copied, one waiting


class Slot:
    """Room for one layer on the device, and the order of its use on an accelerator.

    Attributes:
        buffer: uint8, on the device.
        fills: how often it was filled.
        views: for each layer that was here, its tensors as views of the buffer (or of the mapped file).
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.fills = 0
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

    def __init__(self) -> None:
        self._buffer = torch.empty(PART_NBYTES, dtype=torch.uint8, pin_memory=True)
        self.copied: torch.Event | None = None

    def wait(self) -> torch.Tensor:
        """The buffer, once the copy out of it is done."""
        if self.copied is not None:
            self.copied.synchronize()
        return self._buffer


class Transport:
    """Fills slots; used by one background thread."""

    def __init__(
        self,
        images: Sequence[LayerImage],
        reader: ByteReader,
        files: FileMap,
        model: PreTrainedModel,
        *,
        device: torch.device,
        cache_nbytes: int,
        poison: bool,
    ) -> None:
        self._images, self._reader, self._files, self._model = images, reader, files, model
        self._device, self._poison = device, poison
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._ring: list[_Part] = []
        self._cache: dict[int, torch.Tensor] = {}
        self._cache_nbytes_left = cache_nbytes

    def slot(self, nbytes: int) -> Slot:
        """A new slot; its memory is given back when it is dropped, once the copies into it are done."""
        slot = Slot(nbytes, self._device)
        if self._stream is not None:
            slot.buffer.record_stream(self._stream)
        return slot

    def fill(self, index: int, slot: Slot) -> tuple[int, int]:
        """Bring layer `index` into `slot`; returns the bytes read and the bytes copied to the device."""
        image = self._images[index]
        if self._stream is None:
            self._files.populate(image.mapped_ranges())
            if self._poison:
                slot.buffer.fill_(255)
            image.fill(slot.buffer, self._reader, self._files, self._model)
            return image.read_nbytes + image.mapped_nbytes, 0
        with self._stream:
            slot.begin_copy(self._stream)
            if self._poison:
                slot.buffer.fill_(255)
        cached = index in self._cache
        if cached or image.nbytes <= self._cache_nbytes_left:
            self._copy_cached(index, slot)
        else:
            self._copy_parts(image, slot)
        slot.end_copy(self._stream)
        return 0 if cached else image.read_nbytes, image.nbytes

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._ring.clear()
        self._cache.clear()

    def _copy_parts(self, image: LayerImage, slot: Slot) -> None:
        filling = Filling(image, self._reader, self._files, self._model)
        for start in range(0, image.nbytes, PART_NBYTES):
            stop = min(start + PART_NBYTES, image.nbytes)
            part = self._next_part()
            host = part.wait()
            filling.write(host, start, stop)
            part.copied = self._send(host[: stop - start], slot.buffer[start:stop])

    def _copy_cached(self, index: int, slot: Slot) -> None:
        image = self._images[index]
        if index not in self._cache:
            host = torch.empty(image.nbytes, dtype=torch.uint8, pin_memory=True)
            image.fill(host, self._reader, self._files, self._model)
            self._cache[index] = host
            self._cache_nbytes_left -= image.nbytes
        sent: list[torch.Event] = []
        for start in range(0, image.nbytes, PART_NBYTES):
            if len(sent) >= _PARTS:
                sent.pop(0).synchronize()  # not more on the bus than that: activations come first
            part = slice(start, min(start + PART_NBYTES, image.nbytes))
            sent.append(self._send(self._cache[index][part], slot.buffer[part]))

    def _send(self, host: torch.Tensor, target: torch.Tensor) -> torch.Event:
        assert self._stream is not None
        with self._stream:
            target.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def _next_part(self) -> _Part:
        part = self._ring.pop(0) if len(self._ring) >= _PARTS else _Part()
        self._ring.append(part)
        return part
