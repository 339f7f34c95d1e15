"""How probable the tokens of a batch are, with the adapter and without it, in one pass over the weights.

The logits of an evaluation batch are never made: 16384 tokens of a vocabulary of 248320 would take 8 GB in
bf16. The model is called for its loss, as in training, so its head hands on deferred logits; but the loss
itself is left out, and what the model returns as its logits, with whatever it does to them after its head, is
asked for the probability of each wanted token instead. On a model with real logits the same is taken from
those.

With and without the adapter are two rows of one batch. While a layer is there, the first half of the rows
goes through it as it is and the second half with its adapters off, so the comparison costs compute but not a
single byte more of reading.

Legend: B rows, S positions, N wanted tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from airtune.autograd.token_log_probs import TokenLogProbs, token_log_probs
from airtune.model.deferred_logits import DeferredLogits
from airtune.model.stream import MicroBatchError, stream_of

logger = logging.getLogger(__name__)

_IGNORED_LABEL = -100
_BLOCK_NBYTES = 64 * 2**20  # of fp32 logits at a time, where a model has made them all


@dataclass(frozen=True)
class Wanted:
    """Tokens whose probability is asked for: `token_N` after the first `length_N` ids of row `row_N`.

    The same place may be asked for several tokens.
    """

    row_N: Tensor
    length_N: Tensor
    token_N: Tensor

    @classmethod
    def labels(cls, labels_BS: Tensor) -> Wanted:
        """Every label but -100 after the ids before it. Nothing stands before position 0."""
        row_N, before_N = (labels_BS[:, 1:] != _IGNORED_LABEL).nonzero().unbind(1)
        return cls(row_N, before_N + 1, labels_BS[row_N, before_N + 1])


def score_tokens(model: nn.Module, batch: Mapping[str, Tensor], wanted: Wanted) -> TokenLogProbs:
    """The log-probability of each wanted token, and whether it is the most probable one: fp32, on the CPU.

    `batch` is what the model is called with, labels among it (any: they are not looked at).
    """
    with torch.no_grad(), _without_loss(model):
        logits_BSV = model(**batch)["logits"]
    log_prob_N, is_top_N = _scores(logits_BSV, wanted)
    return TokenLogProbs(log_prob_N.float().cpu(), is_top_N.cpu())


def score_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> TokenLogProbs:
    """`score_tokens` of the labels of `batch`, as [B, S]: each at its own place, where there is none 0.

    The labels [B, S] are not shifted; -100 is none, and so is what stands at position 0.
    """
    labels_BS = batch["labels"].cpu()
    wanted = Wanted.labels(labels_BS)
    places = (wanted.row_N, wanted.length_N)
    log_prob_BS, is_top_BS = torch.zeros(labels_BS.shape), torch.zeros(labels_BS.shape, dtype=torch.bool)
    log_prob_BS[places], is_top_BS[places] = score_tokens(model, batch, wanted)
    return TokenLogProbs(log_prob_BS, is_top_BS)


def score_with_and_without_adapter(
    model: nn.Module, doubled: Mapping[str, Tensor]
) -> tuple[TokenLogProbs, TokenLogProbs]:
    """`score_batch` of the first half of the rows, and of the second half with the adapter off.

    Every tensor of `doubled` is [2 B, S], of a streamed model's batch. Where the layers of the model cannot
    be given a part of the batch the halves are two passes, and that is logged.
    """
    rows = len(doubled["labels"]) // 2
    stream = stream_of(model)
    try:
        with stream.rows_run_otherwise(rows, adapters_off):
            both = score_batch(model, doubled)
    except MicroBatchError as error:
        logger.warning("With and without the adapter are two passes over the weights: %s", error)
        on = score_batch(model, {name: tensor[:rows] for name, tensor in doubled.items()})
        with without_adapter(model):
            return on, score_batch(model, {name: tensor[rows:] for name, tensor in doubled.items()})
    return TokenLogProbs(*(t[:rows] for t in both)), TokenLogProbs(*(t[rows:] for t in both))


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """Within, a streamed model is its base: for forward passes without gradients, and for generation."""
    return stream_of(model).rows_run_otherwise(0, adapters_off)


@contextmanager
def adapters_off(layer: nn.Module) -> Iterator[None]:
    """Inside, `layer` is without its adapters; afterwards they are trainable or not as before, which PEFT
    would forget.
    """
    adapted = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
    flags = [(p, p.requires_grad) for module in adapted for p in module.parameters()]
    for module in adapted:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _scores(logits_BSV: Tensor, wanted: Wanted) -> TokenLogProbs:
    home = logits_BSV.device
    places = (wanted.row_N.to(home), wanted.length_N.to(home) - 1)
    token_N = wanted.token_N.to(home)
    if isinstance(logits_BSV, DeferredLogits):
        if logits_BSV.full is None:
            return token_log_probs(
                logits_BSV.hidden[places],
                logits_BSV.head,
                token_N,
                steps=logits_BSV.steps,
                block_bytes=logits_BSV.block_bytes,
            )
        logits_BSV = logits_BSV.full
    log_prob_N, is_top_N = torch.zeros(len(token_N), device=home), torch.zeros_like(token_N, dtype=torch.bool)
    block = max(1, _BLOCK_NBYTES // (4 * logits_BSV.shape[-1]))
    for start in range(0, len(token_N), block):
        part = slice(start, start + block)
        logits_NV, token_N1 = logits_BSV[places[0][part], places[1][part]].float(), token_N[part, None]
        log_prob_N[part] = logits_NV.log_softmax(-1).gather(1, token_N1)[:, 0]
        is_top_N[part] = logits_NV.argmax(-1) == token_N1[:, 0]
    return TokenLogProbs(log_prob_N, is_top_N)


@contextmanager
def _without_loss(model: nn.Module) -> Iterator[None]:
    """Inside, `model` takes its loss for zero: computing it would cost a second pass over the head."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                had, before = "_loss_function" in vars(module), vars(module).get("_loss_function")
                module.loss_function = _no_loss
                undo.callback(_put_back, module, had, before)
        yield


def _no_loss(*args: object, **kwargs: object) -> Tensor:
    return torch.zeros(())


def _put_back(module: PreTrainedModel, had: bool, before: object) -> None:
    if had:
        module.loss_function = before
    else:
        del module._loss_function
