"""The output projection's rows, streamed from the checkpoint (or from the tied embedding table)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from airtune.weights.file_map import FileMap
from airtune.weights.image import is_one_view, load_tensor, view_stored
from airtune.weights.matrix import ChunkedMatrix, FileRows, Rows, TensorRows
from airtune.weights.plans import TensorPlan
from airtune.weights.reader import ByteReader


class StreamedHead:
    """`airtune.autograd.linear_cross_entropy.HeadWeights` over a matrix on the host."""

    def __init__(self, matrix: ChunkedMatrix, bias_V: torch.Tensor | None) -> None:
        self._matrix = matrix
        self._bias_V = bias_V
        self.vocab_size, self.hidden_size = matrix.rows, matrix.columns
        self.dtype, self.device = matrix.dtype, matrix.device

    def announce(self) -> None:
        """The chunks are asked for soon."""
        self._matrix.announce()

    @property
    def stays(self) -> bool:
        """Whether rows stay where they were used; see `ChunkedMatrix`."""
        return self._matrix.stays

    @stays.setter
    def stays(self, value: bool) -> None:
        self._matrix.stays = value

    @property
    def nbytes(self) -> int:
        """Of the weight, in compute form."""
        return self._matrix.nbytes

    @property
    def held_nbytes(self) -> int:
        """Device memory of rows that stay."""
        return self._matrix.held_nbytes

    def close(self) -> None:
        self._matrix.close()

    def chunks(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        for start, weight_VD in self._matrix.chunks():
            bias_V = None if self._bias_V is None else self._bias_V[start : start + len(weight_VD)]
            yield start, weight_VD, bias_V


def head_weights(
    model: PreTrainedModel, plan: TensorPlan, device: torch.device, reader: ByteReader, files: FileMap
) -> StreamedHead:
    """The head of `model`, whose weight is made by `plan`; a tied head reads the embedding table's memory."""
    head = cast(nn.Linear, model.get_output_embeddings())
    rows: Rows
    if is_one_view(plan):
        stored = (plan.pieces or ())[0].stored(plan.shape)
        rows = FileRows(stored, view_stored(plan, files), reader, files)
    elif head.weight.is_meta:
        rows = TensorRows(load_tensor(plan, reader, files))
    else:
        rows = TensorRows(head.weight.detach())  # tied to the embedding table, which is in memory anyway
    matrix = ChunkedMatrix(rows, device=device, dtype=plan.dtype)
    return StreamedHead(matrix, None if head.bias is None else head.bias.detach().to(device))
