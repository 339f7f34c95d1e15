"""What transformers' conversions ask the model for, while the model cannot be asked.

Some operations look up the parameter that they make: its dtype, the sizes of the parts to split into, or its
shape, because a transpose is done only where shapes differ. They run whenever a layer is loaded, and by then
adapters wrap the model's modules, and their names with them. And where one expert is made out of a stack, the
right answer is the shape of a stack of one. So a conversion takes the answers along.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Self, cast

import torch
from transformers import PreTrainedConfig


class StandIn:
    """Stands where an operation expects the model.

    Args:
        config: the model's.
        wanted: {module tensor name: tensor of the shape and dtype that the model wants}.
        described: for a conversion that decodes, {checkpoint key: tensor on the host} of the sources that say
            how (a shape, a block size); else None.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None,
        wanted: Mapping[str, torch.Tensor],
        described: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.config, self.wanted, self.described = config, wanted, described

    def get_parameter(self, name: str) -> torch.Tensor:
        return self.wanted[name]

    def get_submodule(self, path: str) -> _Module:
        return _Module(path, self.wanted)

    def for_one(self, names: Iterable[str]) -> Self:
        """The same for stacks of one expert under these names."""
        made = copy.copy(self)
        rows = {name: self.wanted[name][:1] for name in names}
        made.wanted = ChainMap(rows, cast(MutableMapping[str, torch.Tensor], self.wanted))
        return made


class _Module:
    """A module of which only the shapes and dtypes of its tensors are asked."""

    def __init__(self, path: str, wanted: Mapping[str, torch.Tensor]) -> None:
        self._path, self._wanted = path, wanted

    def __getattr__(self, leaf: str) -> torch.Tensor:
        try:
            return self._wanted[f"{self._path}.{leaf}"]
        except KeyError:
            raise AttributeError(leaf) from None
