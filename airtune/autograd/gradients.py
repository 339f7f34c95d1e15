"""What flows back out of a layer's second run: gradients of its inputs and of its parameters.

The inner graph is built on stand-ins (detached inputs, aliases of parameters), so that hooks which the user
put on a parameter see its gradient once, when the outer graph hands it on, and not once more for every
micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import setitem
from typing import Any, TypeVar

import torch

from airtune.autograd.hops import Hops
from airtune.autograd.row_split import RowSplit

T = TypeVar("T")


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
    """A parameter that gradients flow into, where its module keeps it, and the dtype that it computes in."""

    owner: torch.nn.Module
    leaf: str
    parameter: torch.nn.Parameter
    dtype: torch.dtype

    def alias(self) -> torch.Tensor:
        """The parameter as a leaf of its own: the same memory, or a copy in the dtype that it computes in."""
        return self.parameter.detach().to(self.dtype).requires_grad_()


def compute_dtypes(module: torch.nn.Module) -> dict[tuple[str, str], torch.dtype]:
    """The dtype that each trainable parameter of `module` computes in, by (path of its owner, leaf).

    Adapters are fp32 whatever the base is, because in bf16 most steps of an optimizer would round to nothing.
    Their products need not be: in fp32 they cost a cast of every input and output and run at half the speed
    (4 to 6 % of a step on the CPU), and the sum that they join is rounded to bf16 either way. So they compute
    in bf16 where the frozen weights that they stand beside are all bf16, as under autocast (a frozen half of
    an adapter is not). Their gradients are still summed over micro-batches, and handed on, in fp32. fp16 is
    left alone: a small gradient would become zero.
    """
    parameters = [
        (path, leaf, parameter)
        for path, owner in module.named_modules()
        for leaf, parameter in owner._parameters.items()
        if parameter is not None
    ]
    beside: dict[str, set[torch.dtype]] = {}  # of the frozen weights at or below each path
    for path, _, parameter in parameters:
        if not parameter.requires_grad:
            for place in _upwards(path):
                beside.setdefault(place, set()).add(parameter.dtype)
    found = {}
    for path, leaf, parameter in parameters:
        if parameter.requires_grad:
            base = next((beside[place] for place in _upwards(path) if place in beside), None)
            half = (base, parameter.dtype) == ({torch.bfloat16}, torch.float32)
            found[path, leaf] = torch.bfloat16 if half else parameter.dtype
    return found


def _upwards(path: str) -> Iterator[str]:
    """`a.b`, `a` and the root, which is ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield path


def in_place_of(parameters: Sequence[Trainable], aliases: Sequence[torch.Tensor], run: Callable[[], T]) -> T:
    """`run()`, in which the modules compute with the aliases. Afterwards they have what they had, which
    need not be the parameters of the forward pass (`torch.func.functional_call` lends others).

    An alias that stayed would take the gradients. A context manager stays open where an interrupt (Ctrl-C)
    comes as its exit begins, for as long as the error is kept, as notebooks do.
    """
    owners: list[Any] = [trainable.owner._parameters for trainable in parameters]
    leaves = [trainable.leaf for trainable in parameters]
    before = [owner[leaf] for owner, leaf in zip(owners, leaves, strict=True)]
    # In one call each, which no interrupt divides.
    exchange, put_back = map(setitem, owners, leaves, aliases), map(setitem, owners, leaves, before)
    try:
        deque(exchange, maxlen=0)
        return run()
    finally:
        deque(put_back, maxlen=0)


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
        self._room_of_inputs = {
            i: hops.host_like(inputs[i].shape, inputs[i].dtype, inputs[i].device) for i in self._needed
        }
        self._room_of_parameters = _adjacent([trainable.parameter for trainable in parameters])
        self._of_inputs: dict[int, torch.Tensor] = {}
        self._of_parameters: list[torch.Tensor | None] = [None] * len(parameters)

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
            self._hops.finish()  # the first micro-batch's part may still be on its way
            room.add_(grad.to(room.device))
        else:
            self._of_inputs[i] = room
            self._hops.bring(grad, room)

    def result(self) -> list[torch.Tensor | None]:
        """In the order of the call's tensors, then its parameters."""
        return [self._of_inputs.get(i) for i in self._tensors] + self._of_parameters
