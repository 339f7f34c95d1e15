"""A language model whose output projection is streamed.

The head is the one layer whose output should not exist in training: see `linear_cross_entropy` for its size.
So its `forward` is replaced, on the instance, by one that answers to what the model was called for: with
labels it hands on deferred logits, which pass through whatever the model does after its head and reach
`causal_lm_loss`; without labels (generation, a loss of one's own) it hands on real ones. No model family is
known here: the model's own forward stays in charge.

What it gives up: the projection's weight on the module is a placeholder, and a model whose loss is not
transformers' loss for causal language models gets real logits, at their price.

Legend: N tokens, B batch, S sequence, D model width, V vocabulary rows.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from airtune.autograd.linear_cross_entropy import HeadWeights, linear_cross_entropy
from airtune.autograd.streamed_linear import streamed_linear
from airtune.model.deferred_logits import DeferredLogits, HeadView


def stream_head(model: PreTrainedModel, head: HeadWeights, *, block_bytes: int) -> Callable[[], None]:
    """Let `model` compute its logits, and its loss if that is the usual one, from `head`. Returns the undo.

    `model.get_output_embeddings()` keeps its place and its name; its own weight is no longer read.
    `block_bytes` bounds what the head's work takes on the device besides a chunk of weights. Undo in the
    reverse order of what was done to the model since; nothing of ours then remains on it.

    Raises ValueError if the output embedding is not exactly an `nn.Linear` (a subclass may compute something
    else), or not of the head's shape.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise ValueError(
            f"the output embedding of {type(model).__name__} is a {type(linear).__name__}, "
            "only an exact torch.nn.Linear can be streamed"
        )
    if (linear.out_features, linear.in_features) != (head.vocab_size, head.hidden_size):
        raise ValueError(
            f"the output embedding has weight [{linear.out_features}, {linear.in_features}], "
            f"the streamed one [{head.vocab_size}, {head.hidden_size}]"
        )
    # A wrapper may leave the loss to the model inside it that owns the head.
    owners = [
        m
        for m in model.modules()
        if isinstance(m, PreTrainedModel) and (m is model or linear in m.children())
    ]
    owners = [owner for owner in owners if owner.loss_function is ForCausalLMLoss]
    calls = _Calls(model)

    def forward(hidden_BSD: Tensor) -> Tensor:
        weights = _as_computed(head)
        if owners and calls.with_labels():
            return DeferredLogits(hidden_BSD, weights, block_bytes)
        return streamed_linear(hidden_BSD, weights, block_bytes=block_bytes)

    undo = ExitStack()
    undo.callback(model.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True).remove)
    undo.callback(model.register_forward_hook(calls.leave, always_call=True).remove)
    undo.callback(_replace(linear, "forward", forward))
    for owner in owners:
        undo.callback(
            _replace(owner, "_loss_function", causal_lm_loss)
        )  # what the `loss_function` property reads
    return undo.close


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: object,
) -> Tensor:
    """transformers' `ForCausalLMLoss(...)`, in one pass over the head if the logits are still deferred.

    Mean over the supervised tokens (nan if there are none), or their sum over `num_items_in_batch`.
    `shift_labels` are labels that are aligned with the logits already. fp32, on the device of the logits.
    """
    real = logits.full if isinstance(logits, DeferredLogits) else logits
    if not isinstance(logits, DeferredLogits) or real is not None:
        items: Any = num_items_in_batch  # transformers takes an int as well, but does not say so
        return ForCausalLMLoss(real, labels, vocab_size, items, ignore_index, shift_labels, **kwargs)
    if vocab_size != logits.shape[-1]:
        raise ValueError(
            f"the loss is asked for a vocabulary of {vocab_size}, the logits have {logits.shape[-1]}"
        )
    if shift_labels is None:
        if labels is None:
            raise ValueError("the loss needs labels or shift_labels, got neither")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden_ND = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    labels_N = shift_labels.reshape(-1).to(hidden_ND.device)
    if len(hidden_ND) != len(labels_N):
        raise ValueError(f"{len(labels_N)} labels for {len(hidden_ND)} positions with logits")
    supervised_N = labels_N != ignore_index
    loss = linear_cross_entropy(
        hidden_ND[supervised_N],
        logits.head,
        labels_N[supervised_N],
        steps=logits.steps,
        block_bytes=logits.block_bytes,
    ).float()
    if num_items_in_batch is None:
        num_items_in_batch = supervised_N.sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


class _Calls:
    """Whether the innermost running forward of a model was given labels, by name or by position."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.position = names.index("labels") if "labels" in names else None
        self.running: list[bool] = []

    def with_labels(self) -> bool:
        return bool(self.running) and self.running[-1]

    def enter(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        by_position = (
            self.position is not None and self.position < len(args) and args[self.position] is not None
        )
        self.running.append(by_position or kwargs.get("labels") is not None)

    def leave(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.running.pop()


def _as_computed(head: HeadWeights) -> HeadWeights:
    """The head as `nn.Linear` would use it here: autocast makes the product in its own dtype."""
    kind = head.device.type
    if not torch.is_autocast_enabled(kind) or head.dtype == torch.float64:
        return head
    return HeadView(head, head.vocab_size, torch.get_autocast_dtype(kind))


def _replace(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of the instance; returns what puts back the one it had, or none."""
    had, before = name in vars(module), vars(module).get(name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before) if had else delattr(module, name)
