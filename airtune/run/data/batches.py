"""What a batch holds, and where its rows are in the training data.

Shape legend: B rows, S positions. A batch is {"input_ids", "labels", "attention_mask"}, each int64 [B, S].
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from airtune.run.data.forms import IGNORED_LABEL
from airtune.run.data.prepared import PreparedData

Batch = dict[str, Tensor]


class TokenRows(Protocol):
    """A dataset of {"input_ids", "labels"}, two sequences of int of equal length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Sequence[int]]: ...


def token_count(batch: Batch) -> int:
    """Tokens without padding."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


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
    ids_BS, mask_BS = batch["input_ids"], batch.get("attention_mask")
    if mask_BS is None:
        return [ids_S.tolist() for ids_S in ids_BS]
    return [ids_S[mask_S.bool()].tolist() for ids_S, mask_S in zip(ids_BS, mask_BS, strict=True)]
