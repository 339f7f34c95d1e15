"""Which of a model's tensors are tables that stay in their files.

An embedding is looked up, so only the rows of a batch are needed of it, and they are needed where the ids
are: on the host. The weight of an `nn.Embedding` (by class: a model's own embeddings derive from it) is such
a table

    outside the layers   where no view of the file is it: it is stored in another dtype, or in several tensors
    inside a layer       if it is large. It then neither travels with its layer nor is let go with it. A small
                         one travels: that is faster than asking an accelerator for its ids and waiting
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from transformers import PreTrainedModel

from airtune.weights.file_map import FileMap
from airtune.weights.image import can_be_mapped
from airtune.weights.lazy import LazyTensor
from airtune.weights.plans import TensorPlan
from airtune.weights.tables import Table, can_be_table

# Inside a layer. At 25 GB/s it holds the bus for 1.3 ms.
LEAST_NBYTES = 32 * 2**20


class Tables:
    """The tables of a model, {name: a tensor whose rows are brought when they are looked up}.

    Attributes:
        inside: those that belong to a layer, by its path: they are there while it is visited.
        outside: the others.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Collection[str], plans: Mapping[str, TensorPlan], files: FileMap
    ) -> None:
        self.inside: dict[str, dict[str, LazyTensor]] = {path: {} for path in layers}
        self.outside: dict[str, LazyTensor] = {}
        scattered = FileMap(scattered=True)
        self._sources = []
        for path, module in model.named_modules():
            name = f"{path}.weight"
            if not isinstance(module, nn.Embedding) or name not in plans or not can_be_table(plans[name]):
                continue
            layer = next((layer for layer in layers if path.startswith(f"{layer}.")), None)
            if plans[name].nbytes < LEAST_NBYTES if layer is not None else can_be_mapped(plans[name]):
                continue
            if module.max_norm is not None:
                raise ValueError(
                    f"{path} scales its rows as it looks them up (max_norm={module.max_norm}), which writes "
                    "to the table, and that stays in its file. Such a model cannot be streamed."
                )
            source = Table.of(plans[name], files, scattered)
            self._sources.append(source)
            (self.outside if layer is None else self.inside[layer])[name] = LazyTensor(source)

    def names(self) -> set[str]:
        """Of all of them."""
        return {*self.outside, *(name for tables in self.inside.values() for name in tables)}

    def release(self) -> None:
        """Give back the pages that lookups have touched."""
        for source in self._sources:
            source.release()
