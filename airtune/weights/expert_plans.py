"""The weights of one expert, out of the plans for all of them.

A module holds its experts in one of two ways: stacked, one parameter [E, out, in] for all of them, or apart,
a list of modules with parameters of their own. Checkpoints do either as well. For one expert of a stack the
plan is cut down: where bytes land as they are, the expert's share of the bytes; where transformers converts,
the expert's own sources (those whose key carries its number, or its row of a source that is stacked itself)
through the same converter, which then makes a stack of one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from airtune.weights.header import CheckpointError, StoredTensor
from airtune.weights.image import LayerImage
from airtune.weights.layout import source_number
from airtune.weights.pieces import Piece, cut_pieces
from airtune.weights.plans import Conversion, TensorPlan


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of one module of a layer.

    Args:
        layer: index of the layer.
        path: of the module.
        stacks: {module tensor name: plan of the stack}; empty when they are apart.
        apart: for each expert, {module tensor name: plan}; empty when they are stacked.
    """

    layer: int
    path: str
    stacks: Mapping[str, TensorPlan]
    apart: Sequence[Mapping[str, TensorPlan]] = ()

    @property
    def count(self) -> int:
        return len(self.apart) or max(plan.shape[0] for plan in self.stacks.values())

    def names(self) -> list[str]:
        """Module tensors that the group makes."""
        return [*self.stacks, *(name for plans in self.apart for name in plans)]

    def plans(self, index: int) -> dict[str, TensorPlan]:
        """{module tensor name: plan} of expert `index` alone; of a stack, for its slice."""
        if self.apart:
            return dict(self.apart[index])
        made = {}
        for name, plan in self.stacks.items():
            if index < plan.shape[0]:
                one = _of_expert(plan, index)
                assert one is not None, "see can_be_cut"
                made[name] = one
        return made


class ExpertImages(Sequence[LayerImage]):
    """The images of all experts of all groups, one after another; each is made when it is first needed.

    A 2.8T model has 55 thousand experts, and most runs of a few tokens never ask for most of them.
    """

    def __init__(self, groups: Sequence[ExpertGroup], *, map_files: bool) -> None:
        self._groups, self._map_files = groups, map_files
        self._starts = list(accumulate((group.count for group in groups), initial=0))
        self._made: dict[int, LayerImage] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> LayerImage:  # type: ignore[override]
        if index not in self._made:
            group = self.group_of(index)
            plans = self._groups[group].plans(index - self._starts[group])
            self._made[index] = LayerImage.of(plans.values(), map_files=self._map_files)
        return self._made[index]

    def group_of(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def first(self, group: int) -> int:
        """Index of the group's first expert."""
        return self._starts[group]


def can_be_cut(plan: TensorPlan) -> bool:
    """Whether a stack's plan can be followed for one expert at a time."""
    return _of_expert(plan, 0) is not None


def _of_expert(plan: TensorPlan, index: int) -> TensorPlan | None:
    if plan.pieces is not None:
        return _cut_pieces(plan, index)
    sources = _sources_of(plan, index)
    if sources is None:
        return None
    one = plan.conversion.asked.for_one({plan.conversion.target, plan.output})
    conversion = replace(plan.conversion, sources=sources, asked=one)
    shape = (1, *plan.shape[1:])
    try:
        made = conversion.outline().get(plan.output)
    except CheckpointError:
        return None  # its rows are not the experts
    if made is None or tuple(made.shape) != shape:
        return None
    return replace(plan, shape=shape, conversion=conversion)


def _cut_pieces(plan: TensorPlan, index: int) -> TensorPlan:
    assert plan.pieces is not None
    width = math.prod(plan.shape[1:]) * plan.stored_dtype.itemsize
    cut = cut_pieces(plan.pieces, index * width, (index + 1) * width)
    sources, pieces = [], []
    for number, piece in enumerate(cut):
        stored = piece.stored((piece.nbytes // piece.source.dtype.itemsize,))
        sources.append((f"{plan.name}[{index}]#{number}", plan.name, stored))
        pieces.append(Piece(stored, 0, piece.nbytes, piece.into))
    conversion = Conversion(plan.conversion.target, tuple(sources), None)
    return replace(plan, shape=plan.shape[1:], conversion=conversion, pieces=tuple(pieces))


def _sources_of(plan: TensorPlan, index: int) -> tuple[tuple[str, str, StoredTensor], ...] | None:
    """The sources of one expert: those with its number, or its row of each that is stacked."""
    count, kept = plan.shape[0], []
    for key, pattern, stored in plan.conversion.sources:
        number = source_number(key, pattern)
        if number is not None:
            if number == index:
                kept.append((key, pattern, stored))
        elif plan.conversion.was_read(key):
            kept.append((key, pattern, stored))  # it speaks of all of them
        elif stored.shape and stored.shape[0] == count:
            row = Piece(stored, index * (stored.nbytes // count), stored.nbytes // count, 0)
            kept.append((key, pattern, row.stored((1, *stored.shape[1:]))))
        else:
            return None
    return tuple(kept) or None
