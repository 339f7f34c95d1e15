"""A layer's weights as one run of bytes, and how to fill it.

On an accelerator a layer is one host-to-device copy, not one per tensor, so its tensors lie back to back in
one buffer (a `LayerImage`), each at a 64-byte boundary as kernels like it. The buffer is filled by reads
that land in place; what must be cast or converted is written into its place by the reading thread.

When the device is the CPU and a tensor's stored bytes are its compute form, even that is one copy too many:
the parameter is then a view of the mapped file, and only the rest of the layer is in the buffer (most often
nothing).

A packed tensor is in the image as it is in the file: several stored tensors, which are decoded when the
tensor is used. What stands for it is a `LazyTensor` over views of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from airtune.weights.file_map import FileMap
from airtune.weights.header import StoredTensor
from airtune.weights.lazy import LazyTensor
from airtune.weights.packed.decode import Decoded
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteRange, ByteReader

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """A source of a packed tensor: where its bytes begin in the buffer."""

    key: str
    tensor: StoredTensor
    offset: int


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor of the image: its plan, and where its bytes begin in the buffer.

    Args:
        parts: of a packed tensor, its sources.
    """

    plan: TensorPlan
    offset: int
    parts: tuple[Stored, ...] = ()

    @classmethod
    def at(cls, offset: int, plan: TensorPlan) -> Region:
        """At the first place from `offset` on."""
        if not plan.packed:
            return cls(plan, _aligned(offset))
        parts, end = [], offset
        for key, stored in plan.conversion.travels():
            parts.append(Stored(key, stored, _aligned(end)))
            end = parts[-1].offset + stored.nbytes
        return cls(plan, _aligned(offset), tuple(parts))

    @property
    def nbytes(self) -> int:
        if not self.plan.packed:
            return self.plan.nbytes
        return self.parts[-1].offset + self.parts[-1].tensor.nbytes - self.offset

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `buffer` (uint8); a packed one decodes such views when it is used."""
        if not self.plan.packed:
            return _view(buffer, self.offset, self.plan)
        views = {part.key: _view(buffer, part.offset, part.tensor) for part in self.parts}
        return _decoded_when_used(self.plan, views)

    def ranges(self) -> list[ByteRange]:
        """Reads that land in the buffer as they are."""
        if self.plan.packed:
            return [ByteRange(p.tensor.file, p.tensor.offset, p.tensor.nbytes, p.offset) for p in self.parts]
        if not self.plan.lands:
            return []
        return [
            ByteRange(p.source.file, p.source.offset + p.offset, p.nbytes, self.offset + p.into)
            for p in self.plan.pieces or ()
        ]


def _aligned(offset: int) -> int:
    return math.ceil(offset / _ALIGNMENT) * _ALIGNMENT


def _view(buffer: torch.Tensor, offset: int, like: TensorPlan | StoredTensor) -> torch.Tensor:
    """The tensor of the shape and dtype of `like` whose bytes begin at `offset`."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _decoded_when_used(plan: TensorPlan, sources: Mapping[str, torch.Tensor]) -> LazyTensor:
    """The tensor of a packed plan over {checkpoint key: tensor as stored}, which are there."""
    like = torch.empty(plan.shape, dtype=plan.dtype, device="meta")
    device = next(iter(sources.values())).device
    return LazyTensor(Decoded(like, device, lambda: plan.decode(sources)))


@dataclass(frozen=True)
class LayerImage:
    """The tensors of one layer.

    Args:
        mapped: tensors that are views of the checkpoint file.
        packed: tensors that live in the layer's buffer.
        nbytes: size of the buffer.
        read_nbytes: bytes of the checkpoint that filling the buffer reads.
        ranges: reads that land in the buffer as they are; the rest is converted.
    """

    mapped: tuple[TensorPlan, ...]
    packed: tuple[Region, ...]
    nbytes: int
    read_nbytes: int
    ranges: tuple[ByteRange, ...]

    @classmethod
    def of(cls, plans: Iterable[TensorPlan], *, map_files: bool) -> LayerImage:
        """Lay out a layer. `map_files` when the device reads host memory: views of the file will do."""
        mapped, packed, end = [], [], 0
        for plan in plans:
            if map_files and can_be_mapped(plan):
                mapped.append(plan)
                continue
            packed.append(Region.at(end, plan))
            end = _aligned(packed[-1].offset + packed[-1].nbytes)
        ranges = tuple(part for region in packed for part in region.ranges())
        sources = {source for region in packed for source in _sources(region.plan)}
        read_nbytes = sum(source.nbytes for source in sources)
        return cls(tuple(mapped), tuple(packed), end, read_nbytes, ranges)

    def names(self) -> list[str]:
        """Module tensors, in the order mapped, then packed."""
        return [plan.name for plan in (*self.mapped, *(region.plan for region in self.packed))]

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of the file behind the views."""
        return sum(
            sum(stored.nbytes for stored in _sources(plan)) if plan.packed else plan.nbytes
            for plan in self.mapped
        )

    def mapped_ranges(self) -> list[StoredTensor]:
        """The stored tensors behind the views, for read-ahead and release."""
        return [stored for plan in self.mapped for stored in _sources(plan)]

    def fill(self, buffer: torch.Tensor, reader: ByteReader, files: FileMap) -> None:
        """Write the packed tensors into `buffer` (uint8, host, at least `nbytes` long)."""
        Filling(self, reader, files).write(buffer, 0, self.nbytes)


class Filling:
    """Writing an image part by part, so that reading one part overlaps with sending the part before."""

    def __init__(self, image: LayerImage, reader: ByteReader, files: FileMap) -> None:
        self._image, self._reader, self._files = image, reader, files
        self._converted: dict[Conversion, dict[str, torch.Tensor]] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def write(self, buffer: torch.Tensor, start: int, stop: int) -> None:
        """Bytes [start, stop) of the image to the beginning of `buffer` (uint8, host); in ascending order."""
        reads = [part for whole in self._image.ranges if (part := _clipped(whole, start, stop))]
        self._reader.read_into(reads, buffer)
        for region in self._image.packed:
            first, last = max(start, region.offset), min(stop, region.offset + region.nbytes)
            if region.plan.lands or region.plan.packed or first >= last:
                continue
            if last - first == region.plan.nbytes:
                self._convert(region.plan, buffer[first - start : last - start])
            else:
                if region.offset not in self._scratch:
                    self._scratch[region.offset] = torch.empty(region.plan.nbytes, dtype=torch.uint8)
                    self._convert(region.plan, self._scratch[region.offset])
                done = self._scratch[region.offset][first - region.offset : last - region.offset]
                buffer[first - start : last - start].copy_(done)
            if last == region.offset + region.plan.nbytes:
                self._scratch.pop(region.offset, None)
                self._files.release(_sources(region.plan))

    def _convert(self, plan: TensorPlan, target_bytes: torch.Tensor) -> None:
        """Cast, or convert with transformers' operations; what else these make is kept for its turn."""
        target = target_bytes.view(plan.dtype).view(plan.shape)
        if plan.pieces is not None:
            flat = target.view(-1)
            for piece in plan.pieces:
                size = piece.source.dtype.itemsize
                stored = self._files.tensor(piece.source).view(-1)
                part = stored[piece.offset // size : (piece.offset + piece.nbytes) // size]
                flat[piece.into // size : (piece.into + piece.nbytes) // size].copy_(part)
            return
        made = self._converted.setdefault(plan.conversion, {})
        if plan.output not in made:
            # The cast comes first, as when transformers loads, so that the result is the same to the bit.
            sources = {key: self._files.tensor(s).to(plan.dtype) for key, _, s in plan.conversion.sources}
            made |= plan.conversion.convert(sources)
        target.copy_(made.pop(plan.output))


def _clipped(whole: ByteRange, start: int, stop: int) -> ByteRange | None:
    """The part of a range that lands in bytes [start, stop) of the image, in a buffer that begins there."""
    first, last = max(start, whole.into), min(stop, whole.into + whole.nbytes)
    if first >= last:
        return None
    return ByteRange(whole.file, whole.offset + first - whole.into, last - first, first - start)


def can_be_mapped(plan: TensorPlan) -> bool:
    """True when the bytes in the file are, as they lie there, the tensor, or what it is decoded from."""
    if plan.packed:
        return all(s.nbytes > 0 and s.offset % s.dtype.itemsize == 0 for s in _sources(plan))
    return plan.lands and is_one_view(plan)


def is_one_view(plan: TensorPlan) -> bool:
    """True when the tensor, in its stored dtype, is one run of bytes of the file."""
    pieces = plan.pieces or ()
    whole = math.prod(plan.shape) * plan.stored_dtype.itemsize
    aligned = all(piece.source.offset % plan.stored_dtype.itemsize == 0 for piece in pieces)
    return aligned and len(pieces) == 1 and 0 < pieces[0].nbytes == whole


def view_stored(plan: TensorPlan, files: FileMap) -> torch.Tensor:
    """The tensor of a plan that `is_one_view`, in its stored dtype, as a view of the file; a packed one
    decodes such views when it is used.
    """
    if plan.packed:
        return _decoded_when_used(plan, {key: files.tensor(s) for key, s in plan.conversion.travels()})
    assert is_one_view(plan) and plan.pieces is not None
    piece = plan.pieces[0]
    start = piece.offset // plan.stored_dtype.itemsize
    whole = files.tensor(piece.source).view(-1)
    return whole[start : start + math.prod(plan.shape)].view(plan.shape)


def load_tensor(plan: TensorPlan, reader: ByteReader, files: FileMap) -> torch.Tensor:
    """The tensor of any plan, in host memory: a view of the file where that will do, else a new tensor."""
    if plan.packed:
        made = plan.decode({key: files.tensor(stored) for key, stored in plan.conversion.travels()})
        files.release(_sources(plan))
        return made
    if can_be_mapped(plan):
        return view_stored(plan, files)
    image = LayerImage.of([plan], map_files=False)
    buffer = torch.empty(image.nbytes, dtype=torch.uint8)
    image.fill(buffer, reader, files)
    return image.packed[0].view(buffer)


def _sources(plan: TensorPlan) -> Sequence[StoredTensor]:
    return [stored for _, stored in plan.conversion.travels()]
