"""Where the bytes of checkpoint tensors land in a module tensor.

Identity, stacking, concatenating along an outer dimension and chunking move whole runs of bytes and change
none. Followed on shapes alone, such a conversion becomes a list of pieces: reading them into place is the
conversion. What does more (a transpose, a permutation) is not followed, and keeps transformers' own
converter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
)

from airtune.weights.header import StoredTensor

# A conversion that shatters into more reads than this per source tensor is cheaper as a copy.
_MAX_PIECES_PER_SOURCE = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` bytes of a checkpoint tensor, from its `offset`, that land at `into` in the module tensor."""

    source: StoredTensor
    offset: int
    nbytes: int
    into: int

    def stored(self, shape: tuple[int, ...]) -> StoredTensor:
        """Its bytes as a stored tensor of their own."""
        return replace(self.source, offset=self.source.offset + self.offset, nbytes=self.nbytes, shape=shape)


@dataclass(frozen=True)
class _Virtual:
    """A tensor that was not computed: its shape, and the pieces that it would consist of."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def trace_pieces(
    target: str,
    sources: Sequence[tuple[str, StoredTensor]],
    converter: WeightConverter | None,
    config: PreTrainedConfig | None,
) -> dict[str, tuple[Piece, ...]]:
    """{module tensor name: pieces} when all that the converter does is to move whole runs of bytes; else {}.

    Args:
        target: the module tensor that transformers files the conversion under.
        sources: (source pattern, stored tensor), all of one dtype, in the order that the converter expects.
        converter: None for a plain copy under another name.
        config: the model's; some conversions depend on it.
    """
    itemsize = sources[0][1].dtype.itemsize
    state: dict[str, list[_Virtual]] = {}
    for pattern, stored in sources:
        whole = _Virtual(stored.shape, (Piece(stored, 0, stored.nbytes, 0),))
        state.setdefault(pattern, []).append(whole)
    if converter is None:
        return {target: next(iter(state.values()))[0].pieces}
    for operation in converter.operations:
        traced = _trace_operation(operation, state, converter, itemsize, config)
        if traced is None:
            return {}
        state = traced
    most = _MAX_PIECES_PER_SOURCE * len(sources)
    named = _full_names(target, state)
    return {name: value.pieces for name, value in named.items() if len(value.pieces) <= most}


def _full_names(target: str, state: dict[str, list[_Virtual]]) -> dict[str, _Virtual]:
    """Expand target patterns to full names as WeightConverter.convert does."""
    name = target.replace("*.", "0.")
    found = next((pattern for pattern in state if pattern in name), None)
    if found is None:
        return {}
    prefix, _, suffix = name.partition(found)
    return {prefix + pattern + suffix: values[0] for pattern, values in state.items()}


def _trace_operation(
    operation: ConversionOps,
    state: dict[str, list[_Virtual]],
    converter: WeightConverter,
    itemsize: int,
    config: PreTrainedConfig | None,
) -> dict[str, list[_Virtual]] | None:
    targets = converter.target_patterns
    if type(operation) is MergeModulelist and operation.dim == 0:
        return {
            operation.get_target_pattern(len(state), pattern, targets): [_stack(values, itemsize)]
            for pattern, values in state.items()
        }
    if type(operation) is Concatenate and len(targets) == 1:
        ordered = [value for p in converter.source_patterns for value in state.get(p, [])]
        joined = _concatenate(ordered, operation.dim % len(ordered[0].shape), itemsize)
        return None if joined is None else {targets[0]: [joined]}
    if type(operation) is Chunk and operation.dim == 0 and len(state) == 1:
        names = operation.get_target_patterns(targets, config=config)
        return _chunk(next(iter(state.values()))[0], names, itemsize)
    return None


def _stack(values: Sequence[_Virtual], itemsize: int) -> _Virtual:
    step = values[0].count * itemsize
    moved = [_shift(piece, index * step) for index, value in enumerate(values) for piece in value.pieces]
    return _Virtual((len(values), *values[0].shape), tuple(moved))


def _concatenate(values: Sequence[_Virtual], dim: int, itemsize: int) -> _Virtual | None:
    outer = math.prod(values[0].shape[:dim])
    if outer > _MAX_PIECES_PER_SOURCE * sum(len(value.pieces) for value in values):
        return None
    widths = [math.prod(value.shape[dim:]) * itemsize for value in values]
    moved = []
    for index in range(outer):
        start = index * sum(widths)
        for value, width in zip(values, widths, strict=True):
            moved += [
                _shift(piece, start) for piece in cut_pieces(value.pieces, index * width, (index + 1) * width)
            ]
            start += width
    shape = list(values[0].shape)
    shape[dim] = sum(value.shape[dim] for value in values)
    return _Virtual(tuple(shape), tuple(moved))


def _chunk(value: _Virtual, names: Sequence[str], itemsize: int) -> dict[str, list[_Virtual]] | None:
    if value.shape[0] % len(names):
        return None
    rows = value.shape[0] // len(names)
    width = value.count // len(names) * itemsize
    shape = (rows, *value.shape[1:])
    return {
        name: [_Virtual(shape, cut_pieces(value.pieces, i * width, (i + 1) * width))]
        for i, name in enumerate(names)
    }


def _shift(piece: Piece, by: int) -> Piece:
    return Piece(piece.source, piece.offset, piece.nbytes, piece.into + by)


def cut_pieces(pieces: Iterable[Piece], start: int, end: int) -> tuple[Piece, ...]:
    """The bytes [start, end) of the tensor that `pieces` make, as pieces of a tensor that begins there."""
    kept = []
    for piece in pieces:
        lo, hi = max(start, piece.into), min(end, piece.into + piece.nbytes)
        if lo < hi:
            kept.append(Piece(piece.source, piece.offset + lo - piece.into, hi - lo, lo - start))
    return tuple(kept)
