"""Real logits from an output projection that is never held whole.

Generation, preference losses and whoever looks at `outputs.logits` need all [.., V] of them. The logits
themselves are theirs to pay for (N = 2048 tokens of V = 248320 in bf16: 1 GB), the projection is not: forward
brings its rows to the device chunk by chunk, and backward brings them once more, because d loss / d hidden =
sum over chunks of dlogits_chunk @ W_chunk and nothing of a chunk is kept. Two crossings where the one-pass
loss needs one: that is the price of a free choice of loss.

Legend: N tokens, D model width, V rows (of the vocabulary, or of the chunk at hand).
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from airtune.autograd.linear_cross_entropy import HeadWeights, exact_dtypes, frozen_chunks


def streamed_linear(hidden: Tensor, head: HeadWeights, *, block_bytes: int) -> Tensor:
    """`hidden.to(head.dtype) @ weight_VD.T + bias_V`: [.., D] -> [.., V], differentiable in `hidden` alone.

    The result has the dtype of the projection and lies on the device of `hidden`. Where `head.device` is
    another one, tokens visit it in blocks of `block_bytes`, the chunk itself aside. Raises ValueError for a
    width that is not the projection's, one that requires a gradient, or chunks that do not make up the
    vocabulary.
    """
    if hidden.shape[-1] != head.hidden_size:
        raise ValueError(f"expected hidden states [.., {head.hidden_size}], got {list(hidden.shape)}")
    hidden_ND = hidden.reshape(-1, head.hidden_size)
    logits_NV: Tensor = _StreamedLinear.apply(hidden_ND, head, block_bytes)
    return logits_NV.view(*hidden.shape[:-1], head.vocab_size)


class _StreamedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden_ND: Tensor, head: HeadWeights, block_bytes: int) -> Tensor:
        ctx.head, ctx.block_bytes, ctx.hidden_dtype = head, block_bytes, hidden_ND.dtype  # type: ignore[attr-defined]
        logits_NV = hidden_ND.new_empty(hidden_ND.shape[0], head.vocab_size, dtype=head.dtype)
        with exact_dtypes(head.device):
            for first, weight_VD, bias_V in frozen_chunks(head):
                columns = slice(first, first + weight_VD.shape[0])
                for rows in _blocks(hidden_ND.shape[0], weight_VD, block_bytes):
                    block_ND = hidden_ND[rows].to(head.device, head.dtype)
                    logits_NV[rows, columns] = F.linear(block_ND, weight_VD, bias_V).to(hidden_ND.device)
        return logits_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_NV: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        head: HeadWeights = ctx.head  # type: ignore[attr-defined]
        sum_dtype = torch.promote_types(head.dtype, torch.float32)
        grad_ND = grad_NV.new_zeros(grad_NV.shape[0], head.hidden_size, dtype=sum_dtype)
        with exact_dtypes(head.device):
            for first, weight_VD, _ in frozen_chunks(head):
                columns = slice(first, first + weight_VD.shape[0])
                for rows in _blocks(grad_NV.shape[0], weight_VD, ctx.block_bytes):  # type: ignore[attr-defined]
                    grad_ND[rows] += (grad_NV[rows, columns].to(head.device) @ weight_VD).to(grad_ND.device)
        return grad_ND.to(ctx.hidden_dtype), None, None  # type: ignore[attr-defined]


def _blocks(tokens: int, weight_VD: Tensor, block_bytes: int) -> list[slice]:
    """Tokens in blocks: each has its logits and its hidden state (or their gradients) on the device.

    V = 8192, D = 5120 in bf16: (8192 + 5120) x 2 = 27 kB a token.
    """
    block = max(1, block_bytes // (sum(weight_VD.shape) * weight_VD.element_size()))
    return [slice(start, start + block) for start in range(0, tokens, block)]
