"""One call of a streamed layer: its first run, its second run, and the sums of gradients.

Both runs take the batch in micro-batches, in the same order and with the same random state. Nothing but the
inputs, and what the second run must restore, is kept in between; or the graphs of the first run, which then
stand in for the second.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.utils._pytree import TreeSpec

from airtune.autograd.ambient import Ambient
from airtune.autograd.gradients import Arguments, Gradients, Trainable, in_place_of
from airtune.autograd.hops import Hops
from airtune.autograd.layer_run import Layout, Lists, Recording, run_layer
from airtune.autograd.row_split import Join, MicroBatchError, RowSplit, Variant, joined_rows

Direction = Literal["forward", "backward"]
T = TypeVar("T")

# What may stand beside tensors in a call that is differentiated: nothing that could hide one.
PLAIN = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, enum.Enum, type(None))


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
class _Graph:
    """A micro-batch's first run that was kept: what the weights' visit said then, and what backward needs."""

    token: object
    leaves: list[Any]
    aliases: list[torch.Tensor]
    made: list[torch.Tensor]


class GraphSize:
    """Counts what graphs would keep, without keeping more than one at a time.

    Attributes:
        nbytes: of all graphs so far. What is saved twice counts once in a graph, frozen weights do not.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def of(self, module: torch.nn.Module, run: Callable[[], T]) -> T:
        """`run()` of `module`; what that saves for backward is counted and dropped at the end."""
        saved: list[torch.Tensor] = []  # held until then: the memory of a dropped one would be another's
        try:
            result = _instead_of_saving(saved.append, run)
            frozen = _storage_nbytes(p for p in module.parameters() if not p.requires_grad)
            self.nbytes += sum(n for address, n in _storage_nbytes(saved).items() if address not in frozen)
            return result
        finally:
            saved.clear()  # the graph holds what took its tensors, and would hold itself


def _storage_nbytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors are in; subclasses have none of their own."""
    plain = (tensor for tensor in tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in plain)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@dataclass
class LayerCall:
    """Everything about one call but the tensors that autograd tracks.

    Args:
        lists: the recording lists as the call found them, emptied.
        batched: for each tensor that the layer makes, whether it is joined by rows.
        keep_graph: keep the first run's graphs and use them in place of the second run.
        graph_size: counts what the graphs of the first run would take.
        variant: rows that are run otherwise; only without gradients.
    """

    name: str
    module: torch.nn.Module
    forward: Callable[..., Any]
    weights: Weights
    recording: Recording
    spec: TreeSpec
    arguments: Arguments
    split: RowSplit
    parameters: tuple[Trainable, ...]
    lists: Lists | None
    differentiable: bool
    keep_graph: bool = False
    graph_size: GraphSize | None = None
    variant: Variant | None = None
    batched: tuple[bool, ...] = ()
    tracked: tuple[bool, ...] = ()
    _ambients: list[Ambient] = field(default_factory=list)
    _graphs: list[_Graph] = field(default_factory=list)
    _versions: tuple[int, ...] = ()
    _training: bool = False

    def first_run(self, inputs: Sequence[Any], token: object) -> tuple[list[torch.Tensor], Layout]:
        """The layer on every micro-batch: its new tensors, joined on the inputs' device, and where they
        belong.
        """
        tensors = self.arguments.tensors
        hops = Hops(self.weights.device)
        home = inputs[tensors[0]].device if tensors else torch.device("cpu")
        join = Join(self.split, self.batched, home, hops)
        layout = None
        aliases = [trainable.alias() for trainable in self.parameters] if self.differentiable else []
        for index, leaves, _ in self._micro_batches(inputs, (), hops):
            versions = self._versions_of(leaves)
            if self.differentiable:
                made, layout = self._run_recomputable(leaves, aliases)
            else:
                with self.variant.around(self.split.slices[index]) if self.variant else nullcontext():
                    made, layout = self._run(leaves)
            if self._versions_of(leaves) != versions:
                self._bring_changes(inputs, index, leaves, versions, hops)
            join.add(index, [tensor.detach() for tensor in made])
            self._check_shared(index, made, join, hops)
            if self.keep_graph:
                self._graphs.append(_Graph(token, leaves, aliases, made))
        hops.finish()
        assert layout is not None
        self._versions = tuple(trainable.parameter._version for trainable in self.parameters)
        self._training = self.module.training
        return join.tensors, layout

    def _versions_of(self, leaves: Sequence[Any]) -> list[int]:
        """How often each tensor was written to; 0 where that is not counted, which is never so for a copy."""
        tensors = [leaves[i] for i in self.arguments.tensors]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def _bring_changes(
        self, inputs: Sequence[Any], index: int, leaves: Sequence[Any], versions: Sequence[int], hops: Hops
    ) -> None:
        """What a layer wrote into an input (a state that it goes on from) is so far only in the copy."""
        if self.differentiable:
            raise RuntimeError(f"{self.name} changes an input in place; its gradients cannot be recomputed")
        parts = self.split.take(inputs, self.split.slices[index])
        for i, before in zip(self.arguments.tensors, versions, strict=True):
            if leaves[i].device != parts[i].device and leaves[i]._version != before:
                hops.bring(leaves[i], parts[i])

    def _check_shared(self, index: int, made: Sequence[torch.Tensor], join: Join, hops: Hops) -> None:
        """What each micro-batch makes whole must be the same every time: a loss of the layer's own is not."""
        if index == 0 or all(self.batched):
            return
        hops.finish()  # what the first one made may still be on its way
        for tensor, first, batched in zip(made, join.tensors, self.batched, strict=True):
            if not batched and not torch.equal(tensor.detach().to(first.device), first):
                raise MicroBatchError(
                    f"{self.name} cannot be run in micro-batches: it returns something for the whole batch "
                    "(a loss of its own, say) that is another thing for each micro-batch. Set "
                    "micro_batch_size to None (the whole batch at once)."
                )

    def second_run(
        self,
        inputs: Sequence[Any],
        grads: Sequence[torch.Tensor | None],
        token: object,
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """The layer on every micro-batch again, with its graph: gradients of its tensors, then parameters."""
        hops = Hops(self.weights.device)
        gradients = Gradients(self.arguments, self.split, self.parameters, inputs, needed, hops)
        graphs, self._graphs = deque(self._graphs), []  # used up by one backward: another one recomputes
        if graphs and graphs[0].token == token:
            for index, _, moved in self._micro_batches((), grads, hops):
                graph = graphs.popleft()
                gradients.add(self.split.slices[index], graph.leaves, graph.aliases, graph.made, moved)
                del graph
            hops.finish()
            return gradients.result()
        graphs.clear()
        aliases = [trainable.alias() for trainable in self.parameters]
        for index, leaves, moved in self._micro_batches(inputs, grads, hops):
            with torch.enable_grad(), self._ambients[index].restored():
                made, _ = in_place_of(self.parameters, aliases, partial(self._run, leaves))
            if tuple(tensor.requires_grad for tensor in made) != self.tracked:
                raise RuntimeError(
                    f"{self.name} made {len(made)} tensors in backward and {len(self.tracked)} in forward, "
                    "or others that gradients pass through; call backward with the adapters as they were then"
                )
            gradients.add(self.split.slices[index], leaves, aliases, made, moved)
        hops.finish()
        return gradients.result()

    def run_rows(self, inputs: Sequence[Any], rows: slice) -> list[torch.Tensor]:
        """A run on some rows for its results alone: what it writes to is copies."""
        hops = Hops(self.weights.device)
        taken = self.split.take(inputs, rows)
        leaves = hops.send([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in taken])
        hops.arrive(leaves)
        return self._run(leaves)[0]

    def check_unchanged(self) -> None:
        """RuntimeError when the recompute would be another function than the first run was."""
        if tuple(trainable.parameter._version for trainable in self.parameters) != self._versions:
            raise RuntimeError(
                f"an adapter of {self.name} was changed between forward and backward; "
                "call backward before the optimizer steps"
            )
        if self.module.training != self._training:
            raise RuntimeError(
                f"{self.name} was switched between train() and eval() between forward and backward; "
                "call backward in the mode of the forward"
            )

    def _micro_batches(
        self, inputs: Sequence[Any], grads: Sequence[torch.Tensor | None], hops: Hops
    ) -> Iterator[tuple[int, list[Any], list[Any]]]:
        """(index, leaves, gradients of the outputs), on the device; the next micro-batch is on its way
        meanwhile. No `inputs`: for those of which the gradients are enough.
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
            for i in self.arguments.needs_grad if inputs else ():
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

    def _run_recomputable(
        self, leaves: Sequence[Any], aliases: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Layout]:
        """A run that can be repeated: what it depends on is noted, what it saves for backward is dropped."""
        self._ambients.append(Ambient.capture(self.weights.device))
        made, layout = in_place_of(self.parameters, aliases, partial(self._run_saving, leaves))
        for value in layout.constants():
            if not isinstance(value, PLAIN):
                raise TypeError(
                    f"{self.name} returns a {type(value).__name__}: gradients of tensors in it would be lost"
                )
        self.tracked = tuple(tensor.requires_grad for tensor in made)
        return made, layout

    def _run_saving(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], Layout]:
        """What the run saves for backward is kept, or counted, or dropped on the spot."""
        run = partial(self._run, leaves)
        if self.keep_graph:
            return run()
        if self.graph_size is not None:
            return self.graph_size.of(self.module, run)
        return _instead_of_saving(lambda tensor: None, run)


def _instead_of_saving(take: Callable[[torch.Tensor], None], run: Callable[[], T]) -> T:
    """`run()`, in which what is saved for backward is given to `take`, and not saved.

    As `torch.autograd.graph.saved_tensors_hooks` does it, whose hooks stay where an interrupt (Ctrl-C) comes
    as its exit begins.
    """
    try:
        torch._C._autograd._push_saved_tensors_default_hooks(take, lambda nothing: nothing)
        return run()
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
