"""The files of a store of packed weights, as they will be: known before a weight is read.

What a weight takes when it is packed follows from its shape, so the shards, their headers and the space that
all of it needs do too. Within a shard tensors are ordered as safetensors' own writer does, the widest dtype
first, so that each is aligned; otherwise they keep the order of the source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from airtune.weights.header import DTYPES, StoredTensor
from airtune.weights.packed.packing import PACKINGS, Form

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Weight:
    """A tensor of the source, and what becomes of it.

    Args:
        packed: packed, or copied as it is.
        turned: stored [in, out], and packed as [out, in].
    """

    key: str
    stored: StoredTensor
    packed: bool
    turned: bool = False

    def forms(self, scheme: str) -> dict[str, Form]:
        """{key: (dtype, shape)} of what is written for it."""
        shape, dtype = self.stored.shape, self.stored.dtype
        if not self.packed:
            return {self.key: (dtype, shape)}
        return PACKINGS[scheme].forms(self.key, shape[::-1] if self.turned else shape, dtype)

    def nbytes(self, scheme: str) -> int:
        """What is written for it, headers aside."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.forms(scheme).values())


@dataclass(frozen=True)
class Shard:
    """A file: the weights in it, its first bytes, and where each tensor begins."""

    name: str
    weights: Sequence[Weight]
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, name: str, weights: Sequence[Weight], scheme: str) -> Shard:
        forms = {key: form for weight in weights for key, form in weight.forms(scheme).items()}
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for key, (dtype, shape) in sorted(forms.items(), key=lambda item: -item[1][0].itemsize):
            begins[key], end = end, end + math.prod(shape) * dtype.itemsize
            entries[key] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begins[key], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {key: len(header) + begin for key, begin in begins.items()}
        return cls(name, weights, header, offsets, len(header) + end)


def plan_shards(weights: Sequence[Weight], scheme: str, shard_nbytes: int) -> list[Shard]:
    """The weights in order, in files of about `shard_nbytes`; a larger weight has a file of its own."""
    groups = list(_grouped(weights, scheme, shard_nbytes))
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [Shard.of(name, group, scheme) for name, group in zip(names, groups, strict=True)]


def _grouped(weights: Sequence[Weight], scheme: str, shard_nbytes: int) -> Iterator[list[Weight]]:
    group: list[Weight] = []
    group_nbytes = 0
    for weight in weights:
        nbytes = weight.nbytes(scheme)
        if group and group_nbytes + nbytes > shard_nbytes:
            yield group
            group, group_nbytes = [], 0
        group.append(weight)
        group_nbytes += nbytes
    if group:
        yield group
