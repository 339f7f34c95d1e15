"""A head whose weights are all in memory, handed out chunk by chunk, and a count of the times it was."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class ResidentHead:
    """`airtune.autograd.linear_cross_entropy.HeadWeights` over a tensor, in chunks of `chunk_rows`."""

    def __init__(self, weight_VD: Tensor, chunk_rows: int, bias_V: Tensor | None = None) -> None:
        self.weight_VD, self.bias_V, self.chunk_rows = weight_VD, bias_V, chunk_rows
        self.vocab_size, self.hidden_size = weight_VD.shape
        self.dtype, self.device = weight_VD.dtype, weight_VD.device
        self.crossings = 0

    def chunks(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        self.crossings += 1
        bias_V = torch.zeros(0) if self.bias_V is None else self.bias_V
        for first in range(0, self.vocab_size, self.chunk_rows):
            rows = slice(first, first + self.chunk_rows)
            # Copies that are spoilt when the next chunk is asked for: nobody may hold on to one.
            weight_VD, chunk_bias_V = self.weight_VD[rows], bias_V[rows]
            if not weight_VD.requires_grad and not chunk_bias_V.requires_grad:
                weight_VD, chunk_bias_V = weight_VD.clone(), chunk_bias_V.clone()
            yield first, weight_VD, None if self.bias_V is None else chunk_bias_V
            if not weight_VD.requires_grad and not chunk_bias_V.requires_grad:
                weight_VD.fill_(torch.nan)
                chunk_bias_V.fill_(torch.nan)
