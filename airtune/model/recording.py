"""What transformers keeps beside a layer's arguments and outputs, in the terms of the autograd room.

Hooks inside a layer append router logits or attentions to lists that transformers holds in a context
variable; layers that share keys and values write them into a `KVSharingDict`. Both carry gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node
from transformers.cache_utils import KVSharingDict
from transformers.utils.output_capturing import _active_collector

from airtune.autograd.layer_run import Lists


class TransformersRecording:
    """The lists of `transformers.utils.output_capturing`."""

    def current(self) -> Lists | None:
        return _active_collector.get()

    @contextmanager
    def replaced(self, lists: Lists | None) -> Iterator[None]:
        token = _active_collector.set(lists)
        try:
            yield
        finally:
            _active_collector.reset(token)


def register_containers() -> None:
    """Let pytree see the tensors inside a KVSharingDict, which is a UserDict and a leaf otherwise."""
    if KVSharingDict not in SUPPORTED_NODES:
        register_pytree_node(
            KVSharingDict,
            lambda shared: (list(shared.data.values()), list(shared.data)),
            lambda values, keys: KVSharingDict(dict(zip(keys, values, strict=True))),
        )
