"""Rows of unequal length to one batch.

B rows, S positions (the longest row decides).

Padding is on the right: whatever looks back only (attention, a convolution, a recurrent state) meets it after
the row.

Padding is known by length alone. Many tokenizers pad with their EOS token, so a mask made by comparing ids
would also hide the EOS at the end of each answer, and the model would never learn to stop.

Layers are given micro-batches by slicing every tensor along the axis whose size is B. In a square batch that
axis is not to be told from the sequence (a 4 x 4 mask, a [1, 4, 4] bias), so a batch of B > 1 rows never has
S == B: it gets one more column of padding, which costs B tokens and only ever happens to very short rows or
very large batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from airtune.run.data.forms import IGNORED_LABEL

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collator:
    """Pads rows of {"input_ids", "labels"}. Padding is `pad_id`, label -100, attention 0."""

    pad_id: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Pads with the tokenizer's pad token, else with EOS, else with 0: masked padding may be any id."""
        if tokenizer.pad_token_id is not None:
            return cls(tokenizer.pad_token_id)
        pad_id = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        logger.info("the tokenizer has no pad token: padding with id %d, which is masked", pad_id)
        return cls(pad_id)

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """`input_ids`, `labels` and `attention_mask`, each int64 [B, S]."""
        lengths = [len(row["input_ids"]) for row in rows]
        B, S = len(rows), max(lengths)
        if B > 1 and S == B:
            S += 1
        ids_BS = torch.full((B, S), self.pad_id, dtype=torch.int64)
        labels_BS = torch.full((B, S), IGNORED_LABEL, dtype=torch.int64)
        mask_BS = torch.zeros((B, S), dtype=torch.int64)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids_BS[b, :length] = torch.as_tensor(row["input_ids"])
            labels_BS[b, :length] = torch.as_tensor(row["labels"])
            mask_BS[b, :length] = 1
        labels_BS[:, 0] = IGNORED_LABEL  # nothing predicts a first token
        return {"input_ids": ids_BS, "labels": labels_BS, "attention_mask": mask_BS}
