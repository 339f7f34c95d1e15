"""The output projection's rows, streamed from the checkpoint (or from the tied embedding table)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from airtune.weights.image import can_be_mapped, is_one_view, load_tensor, view_stored
from airtune.weights.layout import TensorPlan
from airtune.weights.matrix import ChunkedMatrix
from airtune.weights.reader import ByteRange, ByteReader, FileMap


class StreamedHead:
    """`airtune.autograd.linear_cross_entropy.HeadWeights` over a matrix on the host."""

    def __init__(self, matrix: ChunkedMatrix, bias_V: torch.Tensor | None) -> None:
        self._matrix = matrix
        self._bias_V = bias_V
        self.vocab_size, self.hidden_size = matrix.rows, matrix.columns
        self.dtype, self.device = matrix.dtype, matrix.device

    def chunks(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        for start, weight_VD in self._matrix.chunks():
            bias_V = None if self._bias_V is None else self._bias_V[start : start + len(weight_VD)]
            yield start, weight_VD, bias_V


def head_weights(
    model: PreTrainedModel, plan: TensorPlan, device: torch.device, reader: ByteReader, files: FileMap
) -> StreamedHead:
    """The head of `model`, whose weight is made by `plan`; a tied head reads the embedding table's memory."""
    head = cast(nn.Linear, model.get_output_embeddings())
    viewed = is_one_view(plan)
    if not head.weight.is_meta:  # tied to the embedding table, which is there already
        matrix_VD = head.weight.detach()
        viewed = viewed and can_be_mapped(plan)
    else:
        matrix_VD = view_stored(plan, files) if viewed else load_tensor(plan, reader, files, model)
    stored = plan.conversion.sources[0][2]
    row_nbytes = matrix_VD.shape[1] * matrix_VD.element_size()

    def release(start: int, rows: int) -> None:
        files.release([ByteRange(stored.file, stored.offset + start * row_nbytes, rows * row_nbytes, 0)])

    matrix = ChunkedMatrix(matrix_VD, device=device, dtype=plan.dtype, release=release if viewed else None)
    bias_V = None if head.bias is None else head.bias.detach().to(device)
    return StreamedHead(matrix, bias_V)
