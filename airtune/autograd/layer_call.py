"""One call of a streamed layer: its first run, its second run, and the sums of gradients.

Both runs take the batch in micro-batches, in the same order and with the same random state. Nothing but the
inputs, and what the second run must restore, is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.utils._pytree import TreeSpec

from airtune.autograd.ambient import Ambient
from airtune.autograd.hops import Hops
from airtune.autograd.layer_run import Layout, Lists, Recording, run_layer
from airtune.autograd.row_split import Join, RowSplit, joined_rows

Direction = Literal["forward", "backward"]


class Weights(Protocol):
    """Where a layer's weights come from."""

    @property
    def device(self) -> torch.device: ...

    def visit(self, direction: Direction) -> AbstractContextManager[object]:
        """Inside, the layer's parameters are on `device`.

        Yields a token: two visits that yield equal ones found the weights in the same memory, untouched in
            between.
        """
        ...


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


@dataclass
class LayerCall:
    """Everything about one call but the tensors that autograd tracks.

    Args:
        lists: the recording lists as the call found them, emptied.
        batched: for each tensor that the layer makes, whether it is joined by rows.
        keep_graph: keep the first run's graph and use it in place of the second run.
    """

    name: str
    forward: Callable[..., Any]
    weights: Weights
    recording: Recording
    spec: TreeSpec
    arguments: Arguments
    split: RowSplit
    parameters: tuple[torch.nn.Parameter, ...]
    lists: Lists | None
    differentiable: bool
    keep_graph: bool
    batched: tuple[bool, ...] = ()
    tracked: tuple[bool, ...] = ()
    _ambients: list[Ambient] = field(default_factory=list)
    _graph: tuple[object, list[Any], list[torch.Tensor]] | None = None
    _versions: tuple[int, ...] = ()

    def first_run(self, inputs: Sequence[Any], token: object) -> tuple[list[torch.Tensor], Layout]:
        """The layer on every micro-batch: its new tensors, joined on the inputs' device, and where they
        belong.
        """
        tensors = self.arguments.tensors
        hops = Hops(self.weights.device)
        home = inputs[tensors[0]].device if tensors else torch.device("cpu")
        join = Join(self.split, self.batched, home, hops)
        layout = None
        for index, leaves, _ in self._micro_batches(inputs, (), hops):
            versions = [leaves[i]._version for i in tensors]
            made, layout = self._run_once(leaves)
            if self.differentiable and [leaves[i]._version for i in tensors] != versions:
                raise RuntimeError(
                    f"{self.name} changes an input in place; its gradients cannot be recomputed"
                )
            self.tracked = tuple(tensor.requires_grad for tensor in made)
            join.add(index, [tensor.detach() for tensor in made])
            if self.keep_graph:
                self._graph = (token, leaves, made)
        hops.finish()
        assert layout is not None
        self._versions = tuple(p._version for p in self.parameters)
        return join.tensors, layout

    def second_run(
        self,
        inputs: Sequence[Any],
        grads: Sequence[torch.Tensor | None],
        token: object,
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """The layer on every micro-batch again, with its graph: gradients of its tensors, then parameters."""
        hops = Hops(self.weights.device)
        gradients = Gradients(self, inputs, needed, hops)
        if self._graph is not None:
            kept, leaves, made = self._graph
            self._graph = None  # used up by one backward: another one recomputes
            if kept == token:
                moved = hops.send(grads)
                hops.arrive(moved)
                gradients.add(self.split.slices[0], leaves, made, moved)
                hops.finish()
                return gradients.result()
        for index, leaves, moved in self._micro_batches(inputs, grads, hops):
            with torch.enable_grad(), self._ambients[index].restored():
                made, _ = self._run(leaves)
            if len(made) != len(self.tracked):
                raise RuntimeError(
                    f"{self.name} made {len(made)} tensors in backward, {len(self.tracked)} in forward"
                )
            gradients.add(self.split.slices[index], leaves, made, moved)
        hops.finish()
        return gradients.result()

    def run_rows(self, inputs: Sequence[Any], rows: slice) -> list[torch.Tensor]:
        """A run on some rows for its results alone."""
        hops = Hops(self.weights.device)
        leaves = hops.send(self.split.take(inputs, rows))
        hops.arrive(leaves)
        return self._run(leaves)[0]

    def check_unchanged(self) -> None:
        """RuntimeError when an adapter was changed since the first run: the recompute would be another
        function.
        """
        if tuple(p._version for p in self.parameters) != self._versions:
            raise RuntimeError(
                f"an adapter of {self.name} was changed between forward and backward; "
                "call backward before the optimizer steps"
            )

    def _micro_batches(
        self, inputs: Sequence[Any], grads: Sequence[torch.Tensor | None], hops: Hops
    ) -> Iterator[tuple[int, list[Any], list[Any]]]:
        """(index, leaves, gradients of the outputs), on the device; the next micro-batch is on its way
        meanwhile.
        """
        count = len(self.split.slices)

        def send(index: int) -> list[Any]:
            leaves = self.split.take(inputs, self.split.slices[index])
            detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return hops.send([*detached, *self._rows_of(grads, index)])

        coming = send(0)
        for index in range(count):
            here = coming
            hops.arrive(here)
            coming = send(index + 1) if index + 1 < count else []
            leaves, moved = here[: len(inputs)], here[len(inputs) :]
            for i in self.arguments.needs_grad:
                leaves[i].requires_grad_(self.differentiable)
            yield index, leaves, moved
            hops.computed()

    def _rows_of(self, grads: Sequence[torch.Tensor | None], index: int) -> list[torch.Tensor | None]:
        """The part of each output's gradient that belongs to a micro-batch."""
        if len(self.split.slices) == 1:
            return list(grads)
        parts: list[torch.Tensor | None] = []
        for grad, batched in zip(grads, self.batched, strict=False):
            if grad is None or not (batched or index == 0):
                parts.append(None)  # an output that every micro-batch makes whole was taken from the first
            elif batched:
                parts.append(grad[joined_rows(self.split.slices[index], len(grad) // self.split.rows)])
            else:
                parts.append(grad)
        return parts

    def _run(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], Layout]:
        return run_layer(self.forward, leaves, self.spec, self.recording, self.lists)

    def _run_once(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], Layout]:
        if not self.differentiable:
            return self._run(leaves)
        self._ambients.append(Ambient.capture(self.weights.device))
        if self.keep_graph:
            return self._run(leaves)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            return self._run(leaves)


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

    def __init__(self, call: LayerCall, inputs: Sequence[Any], needed: Sequence[bool], hops: Hops) -> None:
        self._call, self._inputs, self._hops = call, inputs, hops
        self._needed = [i for i, need in zip(call.arguments.tensors, needed, strict=False) if need]
        # Room for everything that outlives the graph is taken before the graph is made. Allocated in the
        # middle of it, as autograd does, these tensors stay scattered over the heap when the graph is gone
        # and keep it from shrinking: 400 MB in a step of a 0.6B model.
        self._room_of_inputs = {i: self._like_input(inputs[i]) for i in self._needed}
        self._room_of_parameters = _adjacent(call.parameters)
        self._of_inputs: dict[int, torch.Tensor] = {}
        self._of_parameters: list[torch.Tensor | None] = [None] * len(call.parameters)

    def _like_input(self, like: torch.Tensor) -> torch.Tensor:
        return self._hops.host_like(like.shape, like.dtype, like.device)

    def add(
        self,
        rows: slice,
        leaves: Sequence[Any],
        made: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """Walk the graph from `made` back, with `grads` on its device."""
        pairs = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
        wanted = [leaves[i] for i in self._needed] + list(self._call.parameters)
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
        if i in self._call.split.batched:
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
        return [self._of_inputs.get(i) for i in self._call.arguments.tensors] + self._of_parameters
