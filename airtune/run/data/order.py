"""The order of rows by length, the same in every epoch whoever draws it.

Rows of one batch are padded to its longest, so where lengths differ much, most of a random batch is padding.
`trainer.train_sampling_strategy=group_by_length` puts rows of about one length together. transformers draws
that order from the global generator, which a run that resumes in its second epoch finds in another state than
the run it goes on from: it would see some rows twice and others not at all. Here the seed and the number of
the epoch decide.
"""

from __future__ import annotations

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from airtune.run.data.batches import TokenRows
from airtune.run.data.prepared import PreparedData


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
