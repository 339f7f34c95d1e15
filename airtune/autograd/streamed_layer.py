"""A decoder layer whose weights are there only while it is visited, as part of an autograd graph.

    loss -> ... -> [layer 3] -> [layer 2] -> [layer 1] -> ids        every [ ] is one `_StreamedLayer`

Forward runs the layer and keeps its inputs alone; backward visits it again, recomputes it with gradients and returns them.
So between the two visits the weights can be anywhere, and the memory of one layer's graph is enough for any depth: at hidden
size 5120 and 64 layers in bf16, 512 tokens leave 64 x 5.2 MB of inputs behind instead of 64 x ~250 MB of activations. The
price is one more forward: 4 units of compute where a resident model spends 3 (LoRA needs no weight gradients), the same as
ordinary gradient checkpointing.

The gradients of adapters are outputs of backward like any other, never written to `.grad`: hooks, clipping, accumulation
and reduction behave as everywhere else.

The first run is in grad mode, with every saved tensor dropped on the spot: kernels are chosen by `requires_grad` (scaled
dot-product attention with a learned bias), so that a `no_grad` run would not be the run that the gradients belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten

from airtune.autograd.ambient import Ambient, kept_rng
from airtune.autograd.layer_run import (
    Layout,
    Lists,
    NoRecording,
    Recording,
    apply_changes,
    blank,
    run_layer,
)
from airtune.autograd.row_split import Join, RowSplit, leading_rows, prove_split

Direction = Literal["forward", "backward"]


class Weights(Protocol):
    """Where a layer's weights come from."""

    @property
    def device(self) -> torch.device: ...

    def visit(self, direction: Direction) -> AbstractContextManager[object]:
        """Inside, the layer's parameters are on `device`.

        Yields a token: two visits that yield equal ones found the weights in the same memory, untouched in between.
        """
        ...


@dataclass
class StreamedLayer:
    """A layer and how to run it.

    Args:
        module: the decoder layer; `forward` is its own forward, bound.
        name: for messages.
        weights: brings the parameters to the device for the time of a visit.
        recording: the lists that hooks inside the layer append to.
        micro_batch_size: rows that go through the layer at once; None for all.
        keep_graph: with a single micro-batch, keep the graph of the first run for the backward pass. For the layer that
            backward visits first it saves the recompute and costs no memory at the peak; for others it costs their graph.
    """

    module: torch.nn.Module
    name: str
    forward: Callable[..., Any]
    weights: Weights
    recording: Recording = field(default_factory=NoRecording)
    micro_batch_size: int | None = None
    keep_graph: bool = False
    _proofs: dict[Any, tuple[bool, ...]] = field(default_factory=dict)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None = None) -> Any:
        """`forward(*args, **kwargs)`, and its gradients, with the weights there only during the visits.

        Args:
            rows: rows of the batch (B), for splitting into micro-batches; None runs the batch whole.

        Raises:
            MicroBatchError: the layer's output for a row depends on the other rows.
        """
        leaves, spec = tree_flatten((args, kwargs))
        lists = self.recording.current()
        split = RowSplit.of(leaves, rows, self.micro_batch_size)
        parameters = tuple(p for p in self.module.parameters() if p.requires_grad)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
        call = _Call(self, spec, _Arguments.of(leaves), split, parameters, blank(lists), differentiable)
        made, layout = call.first_run(leaves)
        if differentiable:
            made = _StreamedLayer.apply(call, tuple(made), *tensors, *parameters)
        output, changed, recorded = layout.rebuild(made, leaves)
        apply_changes(args, kwargs, changed, recorded, lists)
        return output

    def batched_outputs(self, call: _Call, inputs: Sequence[Any]) -> tuple[bool, ...]:
        """Which of the layer's new tensors are batched; proven once for each way that the layer is called."""
        if len(call.split.slices) == 1:
            return ()
        key = (call.spec, call.split.batched, tuple(call.lists or ()))
        if key not in self._proofs:
            training = [m for m in self.module.modules() if m.training]
            try:
                for module in training:
                    module.training = False
                with torch.no_grad(), kept_rng(self.weights.device):
                    self._proofs[key] = prove_split(
                        lambda rows: call.run(call.on_device(inputs, rows)), call.split, self.name
                    )
            finally:
                for module in training:
                    module.training = True
        return self._proofs[key]


@dataclass(frozen=True)
class _Arguments:
    """The leaves of a call without its tensors, which only `save_for_backward` may keep (hooks can move them elsewhere)."""

    others: tuple[Any, ...]
    tensors: tuple[int, ...]
    needs_grad: frozenset[int]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> _Arguments:
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(others, tensors, frozenset(i for i in tensors if leaves[i].requires_grad))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        leaves = list(self.others)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        return leaves


@dataclass
class _Call:
    """One call of a layer: everything but the tensors that autograd tracks."""

    layer: StreamedLayer
    spec: TreeSpec
    arguments: _Arguments
    split: RowSplit
    parameters: tuple[torch.nn.Parameter, ...]
    lists: Lists | None
    differentiable: bool
    ambients: list[Ambient] = field(default_factory=list)
    batched: tuple[bool, ...] = ()
    tracked: tuple[bool, ...] = ()
    graph: tuple[object, list[Any], list[torch.Tensor]] | None = None
    versions: tuple[int, ...] = ()

    def run(self, leaves: list[Any]) -> tuple[list[torch.Tensor], Layout]:
        return run_layer(self.layer.forward, leaves, self.spec, self.layer.recording, self.lists)

    def on_device(self, leaves: Sequence[Any], rows: slice | None = None) -> list[Any]:
        """The leaves (of some rows) where the layer runs, cut off from the caller's graph and ready for one of their own."""
        taken = list(leaves) if rows is None else self.split.take(leaves, rows)
        for i in self.arguments.tensors:
            moved = taken[i].detach().to(self.layer.weights.device)
            taken[i] = moved.requires_grad_(i in self.arguments.needs_grad)
        return taken

    def first_run(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], Layout]:
        """Visit the layer forward; returns its new tensors, joined on the caller's device, and their layout."""
        tensors = self.arguments.tensors
        home = inputs[tensors[0]].device if tensors else torch.device("cpu")
        keep_graph = self.layer.keep_graph and len(self.split.slices) == 1 and self.differentiable
        layout = None
        with self.layer.weights.visit("forward") as token:
            self.batched = self.layer.batched_outputs(self, inputs)
            join = Join(self.split, self.batched, home)
            for index, rows in enumerate(self.split.slices):
                leaves = self.on_device(inputs, rows)
                versions = [leaves[i]._version for i in tensors]
                made, layout = self._run_once(leaves, keep_graph)
                if self.differentiable and [leaves[i]._version for i in tensors] != versions:
                    raise RuntimeError(
                        f"{self.layer.name} changes one of its inputs in place; its gradients cannot be recomputed"
                    )
                self.tracked = tuple(tensor.requires_grad for tensor in made)
                join.add(index, [tensor.detach() for tensor in made])
                if keep_graph:
                    self.graph = (token, leaves, made)
        assert layout is not None
        self.versions = tuple(p._version for p in self.parameters)
        return join.tensors, layout

    def _run_once(self, leaves: list[Any], keep_graph: bool) -> tuple[list[torch.Tensor], Layout]:
        if not self.differentiable:
            return self.run(leaves)
        self.ambients.append(Ambient.capture(self.layer.weights.device))
        if keep_graph:
            return self.run(leaves)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            return self.run(leaves)

    def recompute(self, inputs: Sequence[Any], index: int, token: object) -> tuple[list[Any], list[torch.Tensor]]:
        """Micro-batch `index` again, with its graph: (leaves on the device, new tensors)."""
        if self.graph is not None:
            kept, leaves, made = self.graph
            self.graph = None  # backward frees it: a second backward recomputes
            if kept == token:
                return leaves, made
        leaves = self.on_device(inputs, self.split.slices[index])
        with torch.enable_grad(), self.ambients[index].restored():
            made, _ = self.run(leaves)
        if len(made) != len(self.tracked):
            raise RuntimeError(f"{self.layer.name} made {len(made)} tensors in backward and {len(self.tracked)} in forward")
        return leaves, made


class _StreamedLayer(torch.autograd.Function):
    """Joins what a first run made to the graph; see `StreamedLayer.__call__`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, made: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, tracked in zip(made, call.tracked, strict=True) if not tracked))
        # Only the inputs: adapters are parameters that stay, and are read from their modules.
        ctx.save_for_backward(*tensors[: len(tensors) - len(call.parameters)])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if tuple(p._version for p in call.parameters) != call.versions:
            raise RuntimeError(
                f"an adapter of {call.layer.name} was changed between forward and backward; "
                "call backward before the optimizer steps"
            )
        inputs = call.arguments.with_tensors(ctx.saved_tensors)
        gradients = _Gradients(call, inputs, ctx.needs_input_grad[2:])
        with call.layer.weights.visit("backward") as token:
            for index, rows in enumerate(call.split.slices):
                leaves, made = call.recompute(inputs, index, token)
                gradients.add(rows, leaves, made, _rows_of(call, grad_outputs, made, index))
        return (None, None, *gradients.result())


def _rows_of(
    call: _Call, grads: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor], index: int
) -> list[torch.Tensor | None]:
    """The part of each output's gradient that belongs to micro-batch `index`."""
    if len(call.split.slices) == 1:
        return list(grads)
    rows = call.split.slices[index]
    parts: list[torch.Tensor | None] = []
    for grad, tensor, batched in zip(grads, made, call.batched, strict=True):
        if grad is None or not (batched or index == 0):
            parts.append(None)  # an output that every micro-batch makes whole was taken from the first
        else:
            parts.append(grad[leading_rows(rows, len(tensor))] if batched else grad)
    return parts


class _Gradients:
    """Sums what the micro-batches give: adapters' gradients over all, inputs' by rows (or summed, when passed whole)."""

    def __init__(self, call: _Call, inputs: Sequence[Any], needed: Sequence[bool]) -> None:
        self._call, self._inputs = call, inputs
        self._needed = [i for i, need in zip(call.arguments.tensors, needed, strict=False) if need]
        self._of_inputs: dict[int, torch.Tensor] = {}
        self._of_parameters: list[torch.Tensor | None] = [None] * len(call.parameters)

    def add(
        self, rows: slice, leaves: Sequence[Any], made: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        pairs = [(t, g.to(t.device)) for t, g in zip(made, grads, strict=True) if g is not None and t.requires_grad]
        wanted = [leaves[i] for i in self._needed] + list(self._call.parameters)
        if not pairs or not wanted:
            return
        found = torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        for i, grad in zip(self._needed, found, strict=False):
            if grad is not None:
                self._add_input(i, rows, grad)
        for k, grad in enumerate(found[len(self._needed) :]):
            if grad is not None:
                total = self._of_parameters[k]
                self._of_parameters[k] = grad if total is None else total.add_(grad)

    def _add_input(self, i: int, rows: slice, grad: torch.Tensor) -> None:
        home, split = self._inputs[i].device, self._call.split
        if len(split.slices) == 1:
            self._of_inputs[i] = grad.to(home)
        elif i in split.batched:
            if i not in self._of_inputs:
                self._of_inputs[i] = torch.zeros_like(self._inputs[i])
            self._of_inputs[i][rows].copy_(grad)
        elif i in self._of_inputs:
            self._of_inputs[i].add_(grad.to(home))
        else:
            self._of_inputs[i] = grad.to(home, copy=True)

    def result(self) -> list[torch.Tensor | None]:
        return [self._of_inputs.get(i) for i in self._call.arguments.tensors] + self._of_parameters
