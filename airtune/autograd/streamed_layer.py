"""A decoder layer whose weights are there only while it is visited, as part of an autograd graph.

    loss -> ... -> [layer 3] -> [layer 2] -> [layer 1] -> ids        every [ ] is one `_StreamedLayer`

Forward runs the layer and keeps its inputs alone; backward visits it again, recomputes it with gradients and
returns them. So between the two visits the weights can be anywhere, and the memory of one layer's graph is
enough for any depth: at hidden size 5120 and 64 layers in bf16, 512 tokens leave 64 x 5.2 MB of inputs behind
instead of 64 graphs of 210 to 440 MB (`scripts/measure_device_memory.py`). The price is one more forward: 4
units of compute where a resident model spends 3 (LoRA needs no weight gradients), the same as ordinary
gradient checkpointing.

The gradients of adapters are outputs of backward like any other, never written to `.grad`: hooks, clipping,
accumulation and reduction behave as everywhere else.

The first run is in grad mode, with every saved tensor dropped on the spot: kernels are chosen by
`requires_grad` (scaled dot-product attention with a learned bias), so that a `no_grad` run would not be the
run that the gradients belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten

from airtune.autograd.ambient import kept_rng
from airtune.autograd.gradients import Arguments, Trainable, compute_dtypes
from airtune.autograd.hops import settle
from airtune.autograd.layer_call import PLAIN, Direction, GraphSize, LayerCall, Weights
from airtune.autograd.layer_run import NoRecording, Recording, apply_changes, blank
from airtune.autograd.row_split import MicroBatchError, RowSplit, Variant, prove_split

__all__ = ["Direction", "GraphSize", "StreamedLayer", "Weights"]


@dataclass
class StreamedLayer:
    """A layer and how to run it.

    Args:
        module: the decoder layer; `forward` is its own forward, bound.
        name: for messages.
        weights: brings the parameters to the device for the time of a visit.
        recording: the lists that hooks inside the layer append to.
        micro_batch_size: rows that go through the layer at once; None for all.
        keep_graph: keep the graphs of the first run for the backward pass, which saves the recompute. With
            a single micro-batch, the layer that backward visits first has one at the peak anyway.
        graph_size: counts what the graphs of first runs would take, where they are not kept.
        variant: rows that are run otherwise, in the same visit; for forward passes without gradients.
    """

    module: torch.nn.Module
    name: str
    forward: Callable[..., Any]
    weights: Weights
    recording: Recording = field(default_factory=NoRecording)
    micro_batch_size: int | None = None
    keep_graph: bool = False
    graph_size: GraphSize | None = None
    variant: Variant | None = None
    _proofs: dict[Any, tuple[bool, ...]] = field(default_factory=dict)
    _dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    _looked: bool = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None = None) -> Any:
        """`forward(*args, **kwargs)`, and its gradients, with the weights there only during the visits.

        Args:
            rows: rows of the batch (B), for splitting into micro-batches; None runs the batch whole.

        Raises:
            MicroBatchError: the layer's output for a row depends on the other rows.
            TypeError: gradients would have to pass through an object that is no tensor or container.
        """
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        opaque = next((leaf for leaf in leaves if not isinstance(leaf, PLAIN)), None)
        lists = self.recording.current()
        with self.weights.visit("forward") as token:
            parameters = self._trainable_parameters()
            differentiable = torch.is_grad_enabled() and any(
                t.requires_grad for t in (*tensors, *(p.parameter for p in parameters))
            )
            if opaque is not None and differentiable:
                raise TypeError(
                    f"{self.name} is given a {type(opaque).__name__}: gradients of tensors in it would be "
                    "lost; call it under torch.no_grad(), or without that argument"
                )
            whole = opaque is not None or rows is None
            if self.variant is not None and (differentiable or (whole and self.variant.start)):
                raise MicroBatchError(
                    f"{self.name}: rows of one batch can be run in two ways in a forward pass of the model "
                    "without gradients and without a cache, and this is none"
                )
            call = LayerCall(
                name=self.name,
                module=self.module,
                forward=self.forward,
                weights=self.weights,
                recording=self.recording,
                spec=spec,
                arguments=Arguments.of(leaves),
                # An object such as a cache holds all rows: the batch stays together.
                split=RowSplit.of(
                    leaves,
                    None if whole else rows,
                    self.micro_batch_size,
                    cut=self.variant.start if self.variant else 0,
                ),
                parameters=parameters,
                lists=blank(lists),
                differentiable=differentiable,
                keep_graph=self.keep_graph and differentiable,
                graph_size=self.graph_size,
                variant=self.variant,
            )
            call.batched = self._batched_outputs(call, leaves)
            made, layout = call.first_run(leaves, token)
        if differentiable:
            made = _StreamedLayer.apply(call, tuple(made), *tensors, *(p.parameter for p in parameters))
        output, changed, recorded = layout.rebuild(made, leaves)
        apply_changes(args, kwargs, changed, recorded, lists)
        return output

    def _trainable_parameters(self) -> tuple[Trainable, ...]:
        """The layer's parameters that take part in gradients; called when all of them must be there.

        Without gradients only the first call looks: with hundreds of experts the walk takes milliseconds.
        """
        if self._looked and not torch.is_grad_enabled():
            return ()
        found = []
        for path, owner in self.module.named_modules():
            for leaf, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                if parameter.is_meta:
                    # torch multiplies with a matrix that is not there, and returns whatever is in memory.
                    raise RuntimeError(
                        f"{self.name}: {path}.{leaf} has no values (it is on the meta device). If PEFT added "
                        "it: an adapter goes into airtune.load, as lora= or adapter="
                    )
                if parameter.requires_grad:
                    if (path, leaf) not in self._dtypes:
                        self._dtypes = compute_dtypes(self.module)
                    found.append(Trainable(owner, leaf, parameter, self._dtypes[path, leaf]))
        self._looked = True
        return tuple(found)

    def _batched_outputs(self, call: LayerCall, inputs: Sequence[Any]) -> tuple[bool, ...]:
        """Which of the layer's new tensors are batched; proven once for each way that the layer is called."""
        if len(call.split.slices) == 1:
            return ()
        row = call.split.unlike(inputs)
        # Rows that are all alike (one beside itself, run in two ways) prove nothing for other batches.
        key = (call.spec, call.split.batched, tuple(call.lists or ()), row is None)
        if key not in self._proofs:
            with torch.no_grad(), kept_rng(self.weights.device), _evaluating(self.module):
                self._proofs[key] = prove_split(
                    lambda rows: call.run_rows(inputs, rows), call.split, row or 0, self.name
                )
        return self._proofs[key]


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for all modules, and each one's own mode back afterwards."""
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


class _StreamedLayer(torch.autograd.Function):
    """Joins what a first run made to the graph; see `StreamedLayer.__call__`."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, made: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, tracked in zip(made, call.tracked, strict=True) if not tracked)
        )
        # Only the inputs: adapters are parameters that stay, and are read from their modules.
        ctx.save_for_backward(*tensors[: len(tensors) - len(call.parameters)])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: LayerCall = ctx.call
        try:
            call.check_unchanged()
            inputs = call.arguments.with_tensors(ctx.saved_tensors)
            with call.weights.visit("backward") as token:
                found = call.second_run(inputs, grad_outputs, token, ctx.needs_input_grad[2:])
        except BaseException:
            settle(call.weights.device)  # gradients of the layers after it may still be on their way
            raise
        return (None, None, *found)
