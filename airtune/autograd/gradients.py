"""What flows back out of a layer's second run: gradients of its inputs and of its parameters.

The inner graph is built on stand-ins (detached inputs, aliases of parameters), so that hooks which the user
put on a parameter see its gradient once, when the outer graph hands it on, and not once more for every
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from airtune.autograd.hops import Hops
from airtune.autograd.row_split import RowSplit


@dataclass(frozen=True)
class Arguments:
    """The leaves of a call without its tensors, which only `save_for_backward` may keep (hooks can move
    them elsewhere).
    """

    others: tuple[Any, ...]
    tensors: tuple[int, ...]
    needs_grad: frozenset[int]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Arguments:
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(others, tensors, frozenset(i for i in tensors if leaves[i].requires_grad))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        leaves = list(self.others)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        return leaves


@dataclass(frozen=True)
class Trainable:
    """A parameter that gradients flow into, and where its module keeps it."""

    owner: torch.nn.Module
    leaf: str
    parameter: torch.nn.Parameter

    def alias(self) -> torch.Tensor:
        """The same memory, as a leaf of its own."""
        return self.parameter.detach().requires_grad_()


@contextmanager
def in_place_of(parameters: Sequence[Trainable], aliases: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the modules compute with the aliases."""
    try:
        for trainable, alias in zip(parameters, aliases, strict=True):
            trainable.owner._parameters[trainable.leaf] = alias  # type: ignore[assignment]
        yield
    finally:
        for trainable in parameters:
            trainable.owner._parameters[trainable.leaf] = trainable.parameter


def _adjacent(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Uninitialised tensors like `parameters`, side by side in one piece of memory of each kind."""
    room: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for k, parameter in enumerate(parameters):
        room.setdefault((parameter.device, parameter.dtype), []).append(k)
    views: dict[int, torch.Tensor] = {}
    for (device, dtype), members in room.items():
        numels = [parameters[k].numel() for k in members]
        parts = torch.empty(sum(numels), device=device, dtype=dtype).split(numels)
        views |= {k: part.view(parameters[k].shape) for k, part in zip(members, parts, strict=True)}
    return [views[k] for k in range(len(parameters))]


class Gradients:
    """Sums what the micro-batches give: adapters' gradients over all, inputs' by rows (or summed, when
    passed whole).
    """

    def __init__(
        self,
        arguments: Arguments,
        split: RowSplit,
        parameters: Sequence[Trainable],
        inputs: Sequence[Any],
        needed: Sequence[bool],
        hops: Hops,
    ) -> None:
        self._tensors, self._batched, self._hops = arguments.tensors, split.batched, hops
        self._needed = [i for i, need in zip(arguments.tensors, needed, strict=False) if need]
        # Room for everything that outlives the graph is taken before the graph is made. Allocated in the
        # middle of it, as autograd does, these tensors stay scattered over the heap when the graph is gone
        # and keep it from shrinking.
        self._room_of_inputs = {i: self._like_input(inputs[i]) for i in self._needed}
        self._room_of_parameters = _adjacent([trainable.parameter for trainable in parameters])
        self._of_inputs: dict[int, torch.Tensor] = {}
        self._of_parameters: list[torch.Tensor | None] = [None] * len(parameters)

    def _like_input(self, like: torch.Tensor) -> torch.Tensor:
        return self._hops.host_like(like.shape, like.dtype, like.device)

    def add(
        self,
        rows: slice,
        leaves: Sequence[Any],
        aliases: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """Walk the graph from `made` back, with `grads` on its device."""
        pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
        wanted = [*(leaves[i] for i in self._needed), *aliases]
        if not pairs or not wanted:
            return
        found = torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        for i, grad in zip(self._needed, found, strict=False):
            if grad is not None:
                self._add_input(i, rows, grad)
        for k, grad in enumerate(found[len(self._needed) :]):
            if grad is not None and self._of_parameters[k] is None:
                self._of_parameters[k] = self._room_of_parameters[k].copy_(grad)
            elif grad is not None:
                self._room_of_parameters[k].add_(grad)

    def _add_input(self, i: int, rows: slice, grad: torch.Tensor) -> None:
        room = self._room_of_inputs[i]
        if i in self._batched:
            if i not in self._of_inputs:
                self._of_inputs[i] = room.zero_()
            self._hops.bring(grad, room[rows])
        elif i in self._of_inputs:
            room.add_(grad.to(room.device))
        else:
            self._of_inputs[i] = room
            self._hops.bring(grad, room)

    def result(self) -> list[torch.Tensor | None]:
        """In the order of the call's tensors, then its parameters."""
        return [self._of_inputs.get(i) for i in self._tensors] + self._of_parameters
