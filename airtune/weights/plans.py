"""What was found out about one module tensor: which stored tensors make it, and how.

A plan is made once, from names and shapes alone (see `layout`), and a layer is loaded by its plans twice a
step, for days.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter

from airtune.weights.header import CheckpointError, StoredTensor, listed
from airtune.weights.packed.decode import Source
from airtune.weights.pieces import Piece
from airtune.weights.stand_in import StandIn


@dataclass(frozen=True, slots=True)
class Conversion:
    """Checkpoint tensors that make one or more module tensors together.

    Args:
        target: the module tensor that transformers files the conversion under.
        sources: (checkpoint key, source pattern, stored tensor), in the order the converter expects.
        converter: None for a plain copy under another name.
        asked: stands where the converter expects the model.
    """

    target: str
    sources: tuple[Source, ...]
    converter: WeightConverter | None
    asked: StandIn = field(default=StandIn(None, {}), compare=False)

    @property
    def packed(self) -> bool:
        """Whether the sources are packed, and the converter decodes them."""
        return self.asked.described is not None

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """transformers' own operations on {checkpoint key: tensor}; returns {module tensor name: tensor}."""
        tensors = {**tensors, **(self.asked.described or {})}
        if self.converter is None:
            return {self.target: tensors[self.sources[0][0]]}
        # Tensors are collected in it. Its operations stay as they are: they may hold a whole quantizer.
        transform = copy.copy(self.converter)
        transform.collected_tensors, transform.layer_targets = defaultdict(list), defaultdict(set)
        for key, pattern, _ in self.sources:
            transform.add_tensor(self.target, key, pattern, partial(tensors.__getitem__, key))  # type: ignore[arg-type]
        model: Any = self.asked
        made = transform.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def outline(self) -> dict[str, torch.Tensor]:
        """What `convert` makes, on the meta device: shapes alone.

        Raises:
            CheckpointError: nothing can be made of sources of these shapes.
        """
        sources = {
            key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for key, _, stored in self.sources
        }
        try:
            return self.convert(sources)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{self.target} cannot be made of the checkpoint's {listed(sources)}: {error}. "
                "Check that config.json and the weights belong together."
            ) from error

    def was_read(self, key: str) -> bool:
        """Whether this source was read when the plan was made: it says how to decode the others."""
        return key in (self.asked.described or {})

    def travels(self) -> list[tuple[str, StoredTensor]]:
        """(checkpoint key, stored tensor) of the sources that are not read yet."""
        return [(key, stored) for key, _, stored in self.sources if not self.was_read(key)]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one module tensor is made.

    Args:
        name: the tensor's name in the model's state dict.
        dtype, shape: compute form, as the meta model has it.
        conversion: its sources; `output` is this tensor's name among the conversion's outputs (another one
            when tied).
        pieces: where each byte range lands, when moving bytes is all there is to do; else None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    conversion: Conversion
    output: str
    pieces: tuple[Piece, ...] | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.conversion.sources[0][2].dtype

    @property
    def packed(self) -> bool:
        """True when the tensor is decoded from its sources whenever it is used."""
        return self.conversion.packed

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor of a packed plan, on the device of its sources {checkpoint key: tensor, as stored}.

        Raises:
            RuntimeError: the device has no memory for it.
        """
        assert self.packed
        device = next(iter(tensors.values())).device
        with torch.no_grad():
            made = self.conversion.convert(tensors)[self.output].detach()
        if made.device != device:  # some operations turn to the CPU when memory runs out
            raise torch.OutOfMemoryError(f"{self.name} could not be decoded on {device}: no memory")
        return made.to(self.dtype)

    @property
    def lands(self) -> bool:
        """True when reading the pieces is all: no conversion, no cast."""
        return self.pieces is not None and self.stored_dtype == self.dtype
