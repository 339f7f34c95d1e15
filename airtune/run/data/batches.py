"""Which rows come together, what their batch holds, and where its rows are in the training data.

Rows of one batch are padded to its longest, so where lengths differ much, most of a random batch is padding.
`trainer.train_sampling_strategy=group_by_length` puts rows of about one length together. transformers draws
that order from the global generator, which a run that resumes in its second epoch finds in another state than
the run it goes on from: it would see some rows twice and others not at all. Here the seed and the number of
the epoch decide.

Shape legend: B rows, S positions. A batch is {"input_ids", "labels", "attention_mask"}, each int64 [B, S].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.trainer_pt_utils import LengthGroupedSampler

from airtune.run.data.forms import IGNORED_LABEL
from airtune.run.data.prepared import PreparedData

Batch = dict[str, Tensor]


class TokenRows(Protocol):
    """A dataset of {"input_ids", "labels"}, two sequences of int of equal length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Sequence[int]]: ...


class RowsByLength(LengthGroupedSampler):
    """Numbers of `rows`, those of one step of about one length. The Trainer says which epoch it is."""

    def __init__(self, rows: TokenRows, step_rows: int, seed: int) -> None:
        self.seed = seed
        super().__init__(step_rows, lengths=_lengths(rows), generator=torch.Generator().manual_seed(seed))

    def set_epoch(self, epoch: int) -> None:
        assert self.generator is not None
        self.generator.manual_seed(self.seed + epoch)


def _lengths(rows: TokenRows) -> list[int]:
    if isinstance(rows, PreparedData):
        return rows.lengths().tolist()  # without reading the rows
    return [len(rows[index]["input_ids"]) for index in range(len(rows))]


def token_count(batch: Batch) -> int:
    """Tokens without padding."""
    return int(batch["attention_mask"].sum())


def supervised_count(batch: Batch) -> int:
    """Tokens that are predicted: labels count from position 1 on, since nothing precedes position 0."""
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def name_rows(batches: Sequence[Batch], rows: TokenRows) -> str:
    """The rows of `batches` by file and line, or else by number. Reads all `rows`: only for errors."""
    wanted = [ids for batch in batches for ids in _id_lists(batch)]
    found = [i for i in range(len(rows)) if list(rows[i]["input_ids"]) in wanted]
    more = ", ..." if len(found) > 16 else ""
    if isinstance(rows, PreparedData):
        return f"rows {', '.join(map(rows.where, found[:16]))}{more}"
    return f"rows {', '.join(map(str, found[:16]))}{more} of the training data (counted from 0)"


def _id_lists(batch: Batch) -> list[list[int]]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids_S[mask_S.bool()].tolist() for ids_S, mask_S in rows]
