"""Loss and perplexity of rows, with the adapter and without it.

    loss = sum of -log p over all learned tokens of all rows / their number        perplexity = exp(loss)

A mean of batch means would weigh a token by the company it happens to be in. So every row keeps its own sum
and its own number of tokens, and what is reported is made from those, whatever the batches were.

Nothing but the speed depends on the batches either. A pass over the weights costs the same for one row as for
a hundred, so as many rows share it as `batch_tokens` allows, padding included: sorted by length, which leaves
little padding, and the longest first, so that what does not fit into memory fails at the start. At 2 bytes
and D = 5120, 16384 tokens leave 168 MB of hidden states on the host; what is on the device is bounded by
micro-batches, as in training.

Legend: B rows, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from airtune.model.scoring import TokenLogProbs, score_batch, score_with_and_without_adapter
from airtune.run.data.batches import Batch, TokenRows
from airtune.run.data.forms import IGNORED_LABEL

Collate = Callable[[Sequence[Mapping[str, Sequence[int]]]], Batch]


@dataclass(frozen=True, slots=True)
class RowScore:
    """What one row's learned tokens sum up to.

    nll: of -log p, in nats. hits: tokens that were the most probable ones.
    """

    tokens: int
    nll: float
    hits: int

    @property
    def loss(self) -> float:
        return self.nll / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class RowScores:
    """In the order of the rows. `base`: with the adapter off, where that was asked for."""

    model: list[RowScore]
    base: list[RowScore] | None


def score_rows(
    model: nn.Module,
    rows: TokenRows,
    collate: Collate,
    *,
    batch_tokens: int,
    compare: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> RowScores:
    """The scores of all `rows`, in as few passes over the weights as `batch_tokens` allows.

    compare: each row also with the adapter off, in the same pass. `tell` hears which batch begins.
    The model is in evaluation mode meanwhile.
    """
    lengths = [len(rows[i]["input_ids"]) for i in range(len(rows))]
    batches = batches_by_tokens(lengths, batch_tokens, copies=1 + compare)
    scores: dict[int, RowScore] = {}
    base: dict[int, RowScore] = {}
    was_training = model.training
    model.eval()
    try:
        for number, indices in enumerate(batches, start=1):
            tell(f"evaluating batch {number}/{len(batches)}")
            batch = collate([rows[i] for i in indices] * (1 + compare))
            labels_BS = batch["labels"][: len(indices)]
            if compare:
                on, off = score_with_and_without_adapter(model, batch)
                base |= zip(indices, row_scores(off, labels_BS), strict=True)
            else:
                on = score_batch(model, batch)
            scores |= zip(indices, row_scores(on, labels_BS), strict=True)
    finally:
        model.train(was_training)
    order = range(len(rows))
    return RowScores([scores[i] for i in order], [base[i] for i in order] if compare else None)


def row_scores(log_probs: TokenLogProbs, labels_BS: Tensor) -> list[RowScore]:
    """Of each row of a scored batch. Sums are fp64: a row may have a hundred thousand tokens."""
    wanted_BS = labels_BS != IGNORED_LABEL
    wanted_BS[:, 0] = False  # nothing stands before it that could predict it
    tokens_B, hits_B = wanted_BS.sum(1), (log_probs.is_top & wanted_BS).sum(1)
    nll_B = -log_probs.log_prob.to(torch.float64).sum(1)
    columns = zip(tokens_B.tolist(), nll_B.tolist(), hits_B.tolist(), strict=True)
    return [RowScore(tokens, nll, hits) for tokens, nll, hits in columns]


def batches_by_tokens(lengths: Sequence[int], batch_tokens: int, copies: int = 1) -> list[list[int]]:
    """Indices of rows in batches whose padded size, `copies` times, is at most `batch_tokens`; the longest
    rows first, and a row that is longer alone.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if room == 0:
            batches.append([])
            room = max(1, batch_tokens // (copies * max(lengths[index], 1)))
        batches[-1].append(index)
        room -= 1
    return batches


def totals(scores: Iterable[RowScore]) -> dict[str, float]:
    """rows, tokens, loss, perplexity, and accuracy: the share of tokens that were the most probable ones."""
    scores = list(scores)
    tokens = sum(score.tokens for score in scores)
    loss = math.fsum(score.nll for score in scores) / tokens if tokens else math.nan
    return {
        "rows": len(scores),
        "tokens": tokens,
        "loss": loss,
        "perplexity": perplexity(loss),
        "accuracy": sum(score.hits for score in scores) / tokens if tokens else math.nan,
    }


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that is no longer a number (beyond a loss of 709)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
