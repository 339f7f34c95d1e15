"""Tables that are looked up row by row and stay in their files.

An n-gram table of 320 million rows is 102 GB, and a batch of 4,096 tokens looks up 65,536 of them: 21 MB. So
it is never in memory as a whole, and never on the device. What stands for it is a `LazyTensor` over views of
the mapped files: a lookup picks for each row the stored tensor that holds it, touches the pages of these rows
alone, and casts these rows alone where the table is stored in another dtype. One that is stored in several
tensors needs no joined copy.

Rows lie anywhere, and that is the opposite of what a kernel expects of a file. Left to itself it reads 128 kB
around each row, 400 times too much for a row of 320 bytes, and one row after the other. So a table's files
are mapped a second time for this, without read-ahead, and all rows of a lookup are asked for before the
first is used.

It gives up repeats: what two lookups share is read by both, from the page cache if it is still there.

Shape legend: N ids, U different ones among them, D width of a row, V rows of the table.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from airtune.weights.file_map import FileMap
from airtune.weights.header import StoredTensor
from airtune.weights.lazy import WeightSource
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.pieces import Piece
from airtune.weights.plans import TensorPlan
from airtune.weights.reader import ByteRange

# Of so many places in a lookup it is asked whether they are in memory; if these are, the rest is taken to be.
_SAMPLES = 16


def can_be_table(plan: TensorPlan) -> bool:
    """Whether each row of the tensor lies in one piece, where a view of the file can be had."""
    if plan.packed or plan.pieces is None or len(plan.shape) < 2 or 0 in plan.shape:
        return False
    itemsize = plan.stored_dtype.itemsize
    width = math.prod(plan.shape[1:]) * itemsize
    return all(
        piece.into % width == 0
        and piece.nbytes % width == 0
        and (piece.source.offset + piece.offset) % itemsize == 0
        for piece in plan.pieces
    )


class Shard(NamedTuple):
    """Rows [first, stop) of a table, in one run of bytes."""

    first: int
    stop: int
    stored: StoredTensor

    @classmethod
    def of(cls, piece: Piece, row: tuple[int, ...]) -> Shard:
        width = math.prod(row) * piece.source.dtype.itemsize
        first, count = piece.into // width, piece.nbytes // width
        return cls(first, first + count, piece.stored((count, *row)))

    def cut(self, start: int, stop: int) -> Shard:
        """Its rows among [start, stop), in a table that begins at `start`; possibly none."""
        first, stop = max(start, self.first), min(stop, self.stop)
        count, width = max(0, stop - first), self.stored.nbytes // (self.stop - self.first)
        stored = replace(
            self.stored,
            offset=self.stored.offset + (first - self.first) * width,
            nbytes=count * width,
            shape=(count, *self.stored.shape[1:]),
        )
        return Shard(first - start, first - start + count, stored)


class Table(WeightSource):
    """The source of a table [V, D] (or of more dimensions: a row is what an id picks).

    Args:
        name: for messages.
        dtype: compute dtype.
        shards: all rows, in their order.
        files: for reading rows one after another.
        scattered: for rows that lie anywhere; made with `FileMap(scattered=True)`.
    """

    def __init__(
        self, name: str, dtype: torch.dtype, shards: Sequence[Shard], files: FileMap, scattered: FileMap
    ) -> None:
        shape = (shards[-1].stop, *shards[0].stored.shape[1:])
        super().__init__(torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"))
        self._name, self._shards, self._files, self._scattered = name, shards, files, scattered
        self._bounds = torch.tensor([[shard.first, shard.stop] for shard in shards])
        self._views = [scattered.tensor(shard.stored) for shard in shards]

    @classmethod
    def of(cls, plan: TensorPlan, files: FileMap, scattered: FileMap) -> Table:
        """The table that a plan makes which `can_be_table`."""
        assert can_be_table(plan) and plan.pieces is not None
        pieces = sorted((piece for piece in plan.pieces if piece.nbytes), key=lambda piece: piece.into)
        shards = [Shard.of(piece, plan.shape[1:]) for piece in pieces]
        return cls(plan.name, plan.dtype, shards, files, scattered)

    def release(self) -> None:
        """Give back the pages that lookups have touched."""
        self._scattered.release(shard.stored for shard in self._shards)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """`table[ids]`, on the device of `ids`: each different row is read, cast and sent once.

        Raises:
            IndexError: an id is negative, or is no row.
        """
        ids_N = ids.reshape(-1)
        wanted_U, place_N = ids_N.to("cpu", torch.int64).unique(return_inverse=True)
        if len(wanted_U) and (wanted_U[0] < 0 or wanted_U[-1] >= len(self.like)):
            raise IndexError(
                f"{self._name} has rows 0 to {len(self.like) - 1}, and {int(wanted_U[0])} to "
                f"{int(wanted_U[-1])} were looked up"
            )
        rows_UD = self._gather(wanted_U).to(ids.device)
        return rows_UD.index_select(0, place_N.to(ids.device)).view(*ids.shape, *rows_UD.shape[1:])

    def span(self, start: int, stop: int) -> Table | None:
        """The source of rows [start, stop)."""
        cut = [shard.cut(start, stop) for shard in self._shards]
        shards = [shard for shard in cut if shard.first < shard.stop]
        if not shards:
            return None
        return Table(self._name, self.like.dtype, shards, self._files, self._scattered)

    @contextmanager
    def read(self) -> Iterator[torch.Tensor]:
        """All rows, in new memory, unless the file holds them as they are.

        Raises:
            ValueError: that memory is not there.
        """
        stored, dtype = self._shards[0].stored, self.like.dtype
        if len(self._shards) == 1 and stored.dtype == dtype:
            yield self._files.tensor(stored)
            return
        needed, available = self.like.numel() * dtype.itemsize, available_memory_nbytes()
        if needed > available:
            raise ValueError(
                f"the model computes with {len(self.like):,} rows of {self._name} at once, {needed:,} bytes, "
                f"and {available:,} bytes of memory are available. A table of this size can only be looked "
                "up row by row."
            )
        whole = torch.empty(self.like.shape, dtype=dtype)
        for first, stop, stored in self._shards:
            self._files.populate([stored])
            whole[first:stop].copy_(self._files.tensor(stored))
            self._files.release([stored])
        yield whole

    def _gather(self, wanted_U: torch.Tensor) -> torch.Tensor:
        """The rows with these ids, which ascend."""
        made_UD = torch.empty((len(wanted_U), *self.like.shape[1:]), dtype=self.like.dtype)
        places = [slice(*ends) for ends in torch.searchsorted(wanted_U, self._bounds).tolist()]
        local = [wanted_U[place] - shard.first for place, shard in zip(places, self._shards, strict=True)]
        hit = [number for number, own in enumerate(local) if len(own)]
        self._announce([run for number in hit for run in _runs(self._shards[number].stored, local[number])])
        for number in hit:
            made_UD[places[number]] = self._views[number].index_select(0, local[number])
        return made_UD

    def _announce(self, runs: Sequence[ByteRange]) -> None:
        """Have the disk work on all of these at once."""
        if len(runs) > 1 and self._scattered.lacks(runs[:: math.ceil(len(runs) / _SAMPLES)]):
            self._scattered.announce(runs)


def _runs(stored: StoredTensor, rows_U: torch.Tensor) -> list[ByteRange]:
    """The bytes of ascending rows of a stored tensor; rows with less than a page between them are one run."""
    width = stored.nbytes // stored.shape[0]
    begins = stored.offset + rows_U * width
    apart = begins[1:] - begins[:-1] >= width + mmap.PAGESIZE
    edge = torch.ones(1, dtype=torch.bool)
    firsts, lasts = begins[torch.cat([edge, apart])], begins[torch.cat([apart, edge])]
    return [
        ByteRange(stored.file, first, last + width - first, 0)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
