"""Splitting a layer's batch into micro-batches, and the proof that it may be split.

All micro-batches of a step go through a layer while its weights are there, so weights cross once per layer
and not once per micro-batch. Which arguments carry the batch is not guessed from their names: a tensor
whose leading size is the number of rows is sliced, the rest is passed whole. That can be wrong (a layer
that mixes rows, a leading axis that is something else), so before a layer is first split, its output for
two rows is compared with its outputs for each row alone. The two must differ: of rows that are alike, nothing
shows that they were mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from airtune.autograd.hops import Hops

# Kernels round differently for another batch size; a row that is mixed up is off by a factor, not by a
# rounding.
_PROOF_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


class MicroBatchError(ValueError):
    """This layer's batch cannot be split into micro-batches."""


@dataclass(frozen=True)
class Variant:
    """Rows of a batch that a layer runs otherwise than the rest, in the same visit.

    Those from row `start` on are run inside `context()`. They share no micro-batch with the rest.
    """

    start: int
    context: Callable[[], AbstractContextManager[object]]

    def around(self, rows: slice) -> AbstractContextManager[object]:
        """What to enter around a run of `rows`."""
        return self.context() if (rows.start or 0) >= self.start else nullcontext()


@dataclass(frozen=True)
class RowSplit:
    """Slices of the rows, and which of the input leaves they apply to."""

    slices: tuple[slice, ...]
    batched: frozenset[int]

    @property
    def rows(self) -> int:
        """Rows of the whole batch; only of a batch that is split."""
        return self.slices[-1].stop

    @classmethod
    def of(
        cls, leaves: Sequence[Any], rows: int | None, micro_batch_size: int | None, cut: int = 0
    ) -> RowSplit:
        """`rows` None (outside a model's forward) or a micro-batch of all rows means a single micro-batch.

        No micro-batch holds rows of both sides of `cut`.
        """
        size = rows if micro_batch_size is None else micro_batch_size
        if rows is None or size is None or (size >= rows and not cut):
            return cls((slice(None),), frozenset())
        starts = [*range(0, cut, size), *range(cut, rows, size)]
        stops = [*starts[1:], rows]
        slices = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
        return cls(slices, frozenset(i for i, leaf in enumerate(leaves) if _leading(leaf) == rows))

    def unlike(self, leaves: Sequence[Any]) -> int | None:
        """The first row that differs from the next one; None when all rows are alike."""
        batched = [leaves[i] for i in sorted(self.batched)]
        for row in range(self.rows - 1):
            if any(not torch.equal(leaf[row], leaf[row + 1]) for leaf in batched):
                return row
        return None

    def take(self, leaves: Sequence[Any], rows: slice) -> list[Any]:
        return [leaf[rows] if i in self.batched else leaf for i, leaf in enumerate(leaves)]


def _leading(leaf: Any) -> int | None:
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else None


def prove_split(
    run: Callable[[slice], list[torch.Tensor]], split: RowSplit, row: int, name: str
) -> tuple[bool, ...]:
    """For each tensor that the layer makes: True if it is batched (joined by rows), False if every
    micro-batch makes it whole.

    Args:
        run: one run of the layer on the given rows, in evaluation mode, without gradients.
        row: the first of the two that are compared.
        name: how to call the layer in the error.

    Raises:
        MicroBatchError: the outputs for two rows are not the outputs for each row.
    """
    if not split.batched:
        raise MicroBatchError(_refusal(name, "none of its inputs has the batch as its leading axis"))
    try:
        both, first, second = (run(slice(row + i, row + j)) for i, j in ((0, 2), (0, 1), (1, 2)))
    except (RuntimeError, IndexError, ValueError) as error:
        raise MicroBatchError(
            _refusal(name, f"it fails on one or two rows of the batch ({error})")
        ) from error
    if not len(both) == len(first) == len(second):
        raise MicroBatchError(_refusal(name, "it returns more or fewer tensors for one row than for two"))
    return tuple(_is_batched(two, a, b, name) for two, a, b in zip(both, first, second, strict=True))


def _is_batched(two: torch.Tensor, a: torch.Tensor, b: torch.Tensor, name: str) -> bool:
    if two.dim() and a.shape == b.shape and two.shape == (2 * len(a), *a.shape[1:]):
        if _close(two, torch.cat([a, b])):
            return True
    elif two.shape == a.shape == b.shape and _close(two, a) and _close(two, b):
        return False
    raise MicroBatchError(_refusal(name, "its output for two rows is not its outputs for each row"))


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not got.is_floating_point():
        return torch.equal(got, want)
    wide = torch.float64 if got.dtype == torch.float64 else torch.float32
    # Masked entries may be infinite on both sides; what is not a number is not a matter of rows.
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, 0, got.to(wide) - want.to(wide)).norm()
    scale = torch.where(want.isfinite(), want, 0).to(wide).norm()
    return bool(difference <= _PROOF_TOLERANCE[got.dtype] * scale + 1e-6)


def _refusal(name: str, reason: str) -> str:
    return (
        f"{name} cannot be run in micro-batches: {reason}. "
        "Set micro_batch_size to None (the whole batch at once)."
    )


class Join:
    """Puts the tensors that the micro-batches make together on `home`, writing each where it belongs as it
    comes.
    """

    def __init__(self, split: RowSplit, batched: Sequence[bool], home: torch.device, hops: Hops) -> None:
        self._split, self._batched, self._home, self._hops = split, batched, home, hops
        self.tensors: list[torch.Tensor] = []

    def add(self, index: int, made: Sequence[torch.Tensor]) -> None:
        """`made` by micro-batch `index`; they must be added in order."""
        slices = self._split.slices
        if index == 0:
            self.tensors = [self._first(i, tensor) for i, tensor in enumerate(made)]
        assert len(made) == len(self.tensors), "a micro-batch made another number of tensors"
        if len(slices) > 1:
            rows = slices[index]
            for i, tensor in enumerate(made):
                if self._batched[i]:
                    lines = joined_rows(rows, len(tensor) // (rows.stop - rows.start))
                    self._hops.bring(tensor, self.tensors[i][lines])

    def _first(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        slices = self._split.slices
        if len(slices) == 1 or not self._batched[i]:
            return self._hops.home(tensor, self._home)
        lines = len(tensor) // (slices[0].stop - slices[0].start) * self._split.rows
        return self._hops.host_like((lines, *tensor.shape[1:]), tensor.dtype, self._home)


def joined_rows(rows: slice, per_row: int) -> slice:
    """Where a micro-batch's lines lie in the joined tensor, with `per_row` lines a row ([B*S, E] has S)."""
    return slice(rows.start * per_row, rows.stop * per_row)
