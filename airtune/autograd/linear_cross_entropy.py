"""Cross entropy of hidden states under an output projection that is read once and never held whole.

The last projection is the largest tensor of most models (V = 248320 rows of D = 5120 in bf16: 2.5 GB), and
its logits are larger still (N = 4096 tokens: 2 GB in bf16, 4 GB upcast, as much again for their gradient).
With a frozen projection only the hidden states need a gradient, and for one token it is

    d loss / d hidden = sum_v softmax(logits)_v W_v - W_label

whose first term is attention with K = V = W. So it is computed as attention is: over chunks of the
vocabulary, with a running maximum, a running sum of exponentials, and a running weighted sum of rows that is
rescaled whenever the maximum moves. Loss and gradient come out of one pass: each row crosses to the device
once, in two matrix products rather than three; backward multiplies what is kept ([N, D]) by one number.

What it gives up: no gradient of the projection, no second derivative, and a forward that is called for its
loss alone must say so (`torch.no_grad`) or it pays for the gradient as well.

Legend: N tokens, D model width, V rows (of the vocabulary, or of the chunk at hand).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from airtune.autograd.hops import can_pin

Step = Callable[[Tensor], Tensor]
"""An elementwise function of the logits that keeps their shape: a softcap, a scale, a cast."""

Chunk = tuple[int, Tensor, Tensor | None]
"""(first row, weight_VD, bias_V or None)."""


class HeadWeights(Protocol):
    """The rows of a frozen output projection, brought to `device` one chunk of the vocabulary at a time."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def chunks(self) -> Iterator[Chunk]:
        """All rows, in order. A chunk is valid until the next one is asked for."""
        ...


def linear_cross_entropy(
    hidden_ND: Tensor,
    head: HeadWeights,
    labels_N: Tensor,
    *,
    steps: Sequence[Step] = (),
    block_bytes: int,
) -> Tensor:
    """The summed loss of every token, differentiable in `hidden_ND` alone:

        logits_NV = hidden_ND.to(head.dtype) @ weight_VD.T + bias_V
        for step in steps:
            logits_NV = step(logits_NV)
        F.cross_entropy(logits_NV.float(), labels_N, reduction="sum")

    without any tensor of N x V elements. Sums are fp32, or fp64 when the hidden states or the projection are;
    so is the result, on the device of the hidden states. They may live elsewhere than `head.device`, and then
    visit it in blocks of tokens such that the tensors made there, the chunk itself aside, stay under
    `block_bytes`. Every label counts: drop the ignored ones first.

    Raises ValueError for shapes that do not fit, labels outside the vocabulary, a projection that requires a
    gradient, or chunks that do not make up the vocabulary.
    """
    sum_dtype = sums_dtype(hidden_ND, head, labels_N)
    if len(labels_N) == 0:
        return hidden_ND.to(sum_dtype).sum()  # zero, and still a function of the hidden states
    with_gradient = torch.is_grad_enabled() and hidden_ND.requires_grad
    plan = _Plan(head, tuple(steps), block_bytes, sum_dtype, with_gradient)
    return _LinearCrossEntropy.apply(hidden_ND, labels_N, plan)


def sums_dtype(hidden_ND: Tensor, head: HeadWeights, labels_N: Tensor) -> torch.dtype:
    """fp32, or fp64 when the hidden states or the projection are.

    Raises ValueError for shapes that do not fit, or labels outside the vocabulary.
    """
    if hidden_ND.shape != (len(hidden_ND), head.hidden_size) or labels_N.shape != (len(hidden_ND),):
        raise ValueError(
            f"expected hidden states [N, {head.hidden_size}] and labels [N], "
            f"got {list(hidden_ND.shape)} and {list(labels_N.shape)}"
        )
    if len(labels_N):
        lowest, highest = labels_N.min().item(), labels_N.max().item()
        if lowest < 0 or highest >= head.vocab_size:
            raise ValueError(
                f"labels lie in {lowest}..{highest}, the vocabulary has {head.vocab_size} rows; "
                "drop ignored labels before"
            )
    return torch.promote_types(torch.promote_types(hidden_ND.dtype, head.dtype), torch.float32)


def frozen_chunks(head: HeadWeights) -> Iterator[Chunk]:
    """`head.chunks()`, checked: nothing requires a gradient, and the rows are all there, in order.

    A row that is skipped or counted twice would leave the loss plausible and wrong.
    """
    chunks, expected = iter(head.chunks()), 0
    while True:
        with torch.enable_grad():  # else a slice would not tell that its parameter is trainable
            chunk = next(chunks, None)
        if chunk is None:
            break
        first, weight_VD, bias_V = chunk
        if weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad):
            raise ValueError(
                "the output projection requires a gradient, and a streamed one gets none: freeze it"
            )
        if first != expected or weight_VD.shape[1] != head.hidden_size:
            raise ValueError(
                f"expected rows of {head.hidden_size} from row {expected} on, "
                f"got a chunk {list(weight_VD.shape)} from row {first} on"
            )
        expected += weight_VD.shape[0]
        yield chunk
    if expected != head.vocab_size:
        raise ValueError(f"expected {head.vocab_size} rows of the output projection, got {expected}")


def exact_dtypes(device: torch.device) -> torch.autocast | nullcontext[None]:
    """Autocast off: the dtype of the projection has been chosen, and fp32 sums must stay fp32."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


@dataclass(frozen=True)
class _Plan:
    head: HeadWeights
    steps: tuple[Step, ...]
    block_bytes: int
    sum_dtype: torch.dtype
    with_gradient: bool

    def token_bytes(self) -> int:
        """What one token holds on the device from chunk to chunk, and while its gradient is finished.

        A channel: the hidden state (head dtype), and with a gradient the label's row (head dtype), the
        running sum and what is being added to it. D = 5120 in bf16: 5120 x (2 + 2 + 4 + 4) = 61 kB.
        """
        gradient_bytes = self.head.dtype.itemsize + 2 * self.sum_dtype.itemsize if self.with_gradient else 0
        return self.head.hidden_size * (self.head.dtype.itemsize + gradient_bytes)

    def logits_bytes(self, rows: int) -> int:
        """What one token makes of one chunk.

        A logit: itself and the cast of its share (head dtype), upcast and as a share (sum dtype), and what
        each step keeps for its derivative. V = 8192 in bf16 with no steps: 8192 x (2 + 2 + 4 + 4) = 98 kB.
        """
        return rows * (2 * self.head.dtype.itemsize + (2 + len(self.steps)) * self.sum_dtype.itemsize)


class _Sums(NamedTuple):
    """The running sums of each token."""

    top_N: Tensor  # the largest logit so far
    total_N: Tensor  # sum of exp(logit - top)
    own_N: Tensor  # the label's logit before the steps, in the dtype of the projection
    own_row_ND: Tensor  # the label's row of the projection ([N, 0] when no gradient is wanted)
    pull_ND: Tensor  # sum over all rows but that one of exp(logit - top) * slope of the steps * row; likewise

    @classmethod
    def start(cls, tokens: int, plan: _Plan, home: torch.device) -> "_Sums":
        # Sums that commute to an accelerator do so for every chunk: pinned, at the full speed of the bus.
        pinned = home.type == "cpu" and plan.head.device.type != "cpu" and can_pin()
        width = plan.head.hidden_size if plan.with_gradient else 0

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(tokens, *shape, dtype=dtype, device=home, pin_memory=pinned)

        return cls(
            # The lowest finite number, not -inf: a chunk of logits that are all -inf then adds exp(-inf) = 0.
            zeros(plan.sum_dtype).fill_(torch.finfo(plan.sum_dtype).min),
            zeros(plan.sum_dtype),
            zeros(plan.head.dtype),
            zeros(plan.head.dtype, width),
            zeros(plan.sum_dtype, width),
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden_ND: Tensor, labels_N: Tensor, plan: _Plan) -> Tensor:
        with exact_dtypes(plan.head.device):
            loss, gradient_ND = _one_pass(hidden_ND, labels_N, plan)
        if plan.with_gradient:
            ctx.save_for_backward(gradient_ND.to(hidden_ND.device, hidden_ND.dtype))
        return loss.to(hidden_ND.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient_ND,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient_ND * grad_loss, None, None


def _one_pass(hidden_ND: Tensor, labels_N: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """(summed loss, its gradient). Chunks outside, blocks of tokens inside: each row crosses once."""
    # Half of the budget is for what stays on the device from chunk to chunk, the rest for logits. Tokens that
    # do not fit their half stay at home and commute, so that the device's share does not grow with their
    # number.
    tokens, device = hidden_ND.shape[0], plan.head.device
    commute = tokens * plan.token_bytes() > plan.block_bytes // 2
    home = hidden_ND.device if commute else device
    budget, resident_bytes = (plan.block_bytes, plan.token_bytes()) if commute else (plan.block_bytes // 2, 0)
    hidden_ND, labels_N = hidden_ND.to(home, plan.head.dtype), labels_N.to(home, torch.int64)
    sums = _Sums.start(tokens, plan, home)
    for first, weight_VD, bias_V in frozen_chunks(plan.head):
        block = max(1, budget // (resident_bytes + plan.logits_bytes(weight_VD.shape[0])))
        for start in range(0, tokens, block):
            rows = slice(start, start + block)
            part = _Sums(*(whole[rows].to(device) for whole in sums))  # views where home is the device
            _add_chunk(
                part, hidden_ND[rows].to(device), labels_N[rows].to(device), first, weight_VD, bias_V, plan
            )
            if part.top_N.device != sums.top_N.device:
                for whole, piece in zip(sums, part, strict=True):
                    whole[rows].copy_(piece)
    return _finish(sums, plan)


def _add_chunk(
    sums: _Sums,
    hidden_ND: Tensor,
    labels_N: Tensor,
    first: int,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    plan: _Plan,
) -> None:
    """Let one chunk of the vocabulary into the sums of one block of tokens, in place."""
    raw_NV = F.linear(hidden_ND, weight_VD, bias_V)
    # No index lists: their length would have to come back from the device before more work is queued.
    inside_N = (labels_N >= first) & (labels_N < first + weight_VD.shape[0])
    column_N = (labels_N - first).clamp_(0, weight_VD.shape[0] - 1)
    own_N1 = raw_NV.gather(1, column_N[:, None])
    sums.own_N.copy_(torch.where(inside_N, own_N1[:, 0], sums.own_N))

    needs_slope = plan.with_gradient and len(plan.steps) > 0
    with torch.set_grad_enabled(needs_slope):
        leaf_NV = raw_NV.requires_grad_() if needs_slope else raw_NV
        stepped_NV = _replay(plan.steps, leaf_NV)
    logits_NV = stepped_NV.detach().to(plan.sum_dtype)
    top_N = torch.maximum(sums.top_N, logits_NV.amax(1))
    fade_N = (sums.top_N - top_N).exp_()
    # Probabilities, but for a factor that is known at the end.
    share_NV = (logits_NV - top_N[:, None]).exp_()
    del logits_NV
    sums.top_N.copy_(top_N)
    sums.total_N.mul_(fade_N).add_(share_NV.sum(1))
    if not plan.with_gradient:
        return

    # The label's own row is left out here: its factor is (probability - 1), which rounding to bf16 would
    # swamp as soon as the token is known well. It joins at the end, in full precision.
    others_N1 = torch.where(inside_N[:, None], 0, share_NV.gather(1, column_N[:, None]))
    share_NV.scatter_(1, column_N[:, None], others_N1)
    sums.own_row_ND.copy_(torch.where(inside_N[:, None], weight_VD[column_N], sums.own_row_ND))
    if needs_slope:
        (share_NV,) = torch.autograd.grad(stepped_NV, leaf_NV, share_NV.to(stepped_NV.dtype))
    sums.pull_ND.mul_(fade_N[:, None])
    if weight_VD.dtype == plan.sum_dtype:
        sums.pull_ND.addmm_(share_NV, weight_VD)
    else:
        sums.pull_ND.add_(share_NV.to(weight_VD.dtype) @ weight_VD)


def _finish(sums: _Sums, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Sums -> (loss, gradient), where everything that depends on the label alone joins in."""
    with torch.set_grad_enabled(plan.with_gradient):
        leaf_N = sums.own_N.requires_grad_() if plan.with_gradient else sums.own_N
        own_N = _replay(plan.steps, leaf_N).to(plan.sum_dtype)
    # In this order: beside a logit of 40 a loss of 1e-6 is lost in fp32, beside a difference it is not.
    log_prob_N = own_N.detach() - sums.top_N - sums.total_N.log()
    loss = -log_prob_N.sum()
    if not plan.with_gradient:
        return loss, sums.pull_ND
    (slope_N,) = torch.autograd.grad(own_N, leaf_N, torch.ones_like(own_N))
    excess_N = torch.expm1(log_prob_N) * slope_N  # (probability of the label - 1) * slope
    sums.pull_ND.div_(sums.total_N[:, None]).add_(sums.own_row_ND * excess_N[:, None])
    return loss, sums.pull_ND


def _replay(steps: Sequence[Step], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits
