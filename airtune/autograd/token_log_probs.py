"""The log-probability of each token under an output projection that is read once and never held whole.

Evaluation asks two things of a token: how probable it was, and whether it was the most probable one (what
greedy generation would have said). Both come out of a running maximum and a running sum of exponentials over
chunks of the vocabulary,

    log p(y) = z_y - m - log sum_v exp(z_v - m),    m = max_v z_v

so a token keeps four numbers where its logits would be V: at N = 16384 tokens and V = 248320 in bf16 they
would take 8 GB, and their fp32 copy 16. Against `linear_cross_entropy`, which sums and keeps what a gradient
needs, this is forward only and keeps the tokens apart.

Legend: N tokens, D model width, V rows (of the vocabulary, or of the chunk at hand).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from airtune.autograd.linear_cross_entropy import HeadWeights, Step, exact_dtypes, frozen_chunks, sums_dtype


class TokenLogProbs(NamedTuple):
    """For each token its log-probability (fp32 or fp64), and whether it is the most probable one: of equally
    probable ones the first in the vocabulary, as for `argmax`.
    """

    log_prob: Tensor
    is_top: Tensor


@torch.no_grad()
def token_log_probs(
    hidden_ND: Tensor,
    head: HeadWeights,
    tokens_N: Tensor,
    *,
    steps: Sequence[Step] = (),
    block_bytes: int,
) -> TokenLogProbs:
    """Each token's log-probability after its hidden state, and whether it is the most probable one:

        logits_NV = hidden_ND.to(head.dtype) @ weight_VD.T + bias_V
        for step in steps:
            logits_NV = step(logits_NV)
        log_prob_N = logits_NV.float().log_softmax(-1).gather(1, tokens_N[:, None])[:, 0]
        is_top_N = logits_NV.argmax(-1) == tokens_N

    without any tensor of N x V elements. Both lie on the device of the hidden states. Where `head.device` is
    another one, blocks of tokens visit it, such that the tensors made there, the chunk itself aside, stay
    under `block_bytes`.

    Raises ValueError for shapes that do not fit, tokens outside the vocabulary, a projection that requires a
    gradient, or chunks that do not make up the vocabulary.
    """
    count, wide = len(tokens_N), sums_dtype(hidden_ND, head, tokens_N)
    sums, on_device_N = _Sums.start(count, wide, head.device), tokens_N.to(head.device)
    with exact_dtypes(head.device):
        for first, weight_VD, bias_V in frozen_chunks(head) if count else ():
            block = max(1, block_bytes // _token_bytes(weight_VD, len(steps), wide))
            for start in range(0, count, block):
                part = slice(start, start + block)
                logits_NV = F.linear(hidden_ND[part].to(head.device, head.dtype), weight_VD, bias_V)
                for step in steps:
                    logits_NV = step(logits_NV)
                _Sums(*(whole[part] for whole in sums)).add(logits_NV.to(wide), on_device_N[part], first)
    log_prob_N = sums.own_N - sums.top_N - sums.total_N.log()
    return TokenLogProbs(
        log_prob_N.to(hidden_ND.device), (sums.top_token_N == on_device_N).to(hidden_ND.device)
    )


def _token_bytes(weight_VD: Tensor, steps: int, wide: torch.dtype) -> int:
    """What one token makes of one chunk: its hidden state and its logits, upcast and as shares too.

    V = 3276 (a chunk of 32 MiB), D = 5120 in bf16 with no steps: 10 kB + 33 kB.
    """
    rows, width = weight_VD.shape
    logit_bytes = (1 + steps) * max(weight_VD.itemsize, wide.itemsize if steps else 0) + 2 * wide.itemsize
    return width * weight_VD.itemsize + rows * logit_bytes


class _Sums(NamedTuple):
    """What a token keeps from chunk to chunk: 20 bytes, so all tokens' stay on the device."""

    top_N: Tensor  # the largest logit so far
    top_token_N: Tensor  # whose it is
    total_N: Tensor  # sum of exp(logit - top)
    own_N: Tensor  # the token's own logit

    @classmethod
    def start(cls, count: int, dtype: torch.dtype, device: torch.device) -> "_Sums":
        # The lowest finite number, not -inf: a chunk of logits that are all -inf then adds exp(-inf) = 0.
        top_N = torch.full((count,), torch.finfo(dtype).min, dtype=dtype, device=device)
        zeros_N = torch.zeros(count, dtype=dtype, device=device)
        return cls(top_N, zeros_N.long(), zeros_N, zeros_N.clone())

    def add(self, logits_NV: Tensor, tokens_N: Tensor, first: int) -> None:
        """Let one chunk of logits, whose first row is `first`, into the sums, in place."""
        columns = logits_NV.shape[1]
        inside_N = (tokens_N >= first) & (tokens_N < first + columns)
        own_N1 = logits_NV.gather(1, (tokens_N - first).clamp_(0, columns - 1)[:, None])
        self.own_N.copy_(torch.where(inside_N, own_N1[:, 0], self.own_N))
        best_N, column_N = logits_NV.max(1)  # the first of equal ones
        self.top_token_N.copy_(torch.where(best_N > self.top_N, column_N + first, self.top_token_N))
        top_N = torch.maximum(self.top_N, best_N)
        share_N = (logits_NV - top_N[:, None]).exp_().sum(1)
        self.total_N.mul_((self.top_N - top_N).exp_()).add_(share_N)
        self.top_N.copy_(top_N)
