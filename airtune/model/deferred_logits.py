"""A tensor that stands for logits nobody has computed yet.

Between its head and its loss a model does at most something elementwise to its logits (a softcap is a
division, a tanh and a product; a scale; a cast), so a one-pass loss needs only the hidden states and that
recipe. `DeferredLogits` looks like the logits [.., V] to the model's own forward, holds hidden [.., D], and
writes the recipe down. For 2048 tokens and V = 248320 that is 21 MB where bf16 logits take 1 GB, and their
fp32 copy and gradient 2 GB each.

Whatever cannot be written down gets real logits: they are computed once, kept, and stand in from then on, so
`outputs.logits.argmax(-1)` and a model that masks some of its logits in place both do what they always did,
at the price they always had. It is logged, since that price is memory.

Legend: D model width, V vocabulary rows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from airtune.autograd.linear_cross_entropy import Chunk, HeadWeights, Step
from airtune.autograd.streamed_linear import streamed_linear

logger = logging.getLogger(__name__)

CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
ARITHMETIC = {
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "add",
    "sub",
    "subtract",
    "tanh",
    "__rdiv__",
    "__rsub__",
}

# What the wrapper itself knows: reading it computes nothing.
METADATA: set[object] = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta")
    ),
    *(
        getattr(torch.Tensor, name)
        for name in ("size", "dim", "numel", "nelement", "element_size", "get_device", "__len__")
    ),
    *(
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ),
}


@dataclass(frozen=True)
class HeadView:
    """The first `vocab_size` rows of a head, in another dtype."""

    head: HeadWeights
    vocab_size: int
    dtype: torch.dtype

    @property
    def hidden_size(self) -> int:
        return self.head.hidden_size

    @property
    def device(self) -> torch.device:
        return self.head.device

    def chunks(self) -> Iterator[Chunk]:
        for first, weight_VD, bias_V in self.head.chunks():
            rows = self.vocab_size - first
            if rows <= 0:
                return
            bias_V = None if bias_V is None else bias_V[:rows].to(self.dtype)
            yield first, weight_VD[:rows].to(self.dtype), bias_V


class DeferredLogits(Tensor):
    """`hidden @ weight.T + bias` followed by `steps`: [.., V], not computed.

    `full` holds the real logits once something has asked for them, with the gradient real logits have.
    """

    hidden: Tensor
    head: HeadWeights
    steps: tuple[Step, ...]
    block_bytes: int
    full: Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        head: HeadWeights,
        block_bytes: int,
        steps: tuple[Step, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> "DeferredLogits":
        shape = (*hidden.shape[:-1], head.vocab_size)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or head.dtype, device=hidden.device)
        self.hidden, self.head, self.steps, self.block_bytes, self.full = (
            hidden,
            head,
            steps,
            block_bytes,
            None,
        )
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, {len(self.steps)} steps)"

    def materialise(self, reason: str) -> Tensor:
        """The real logits. The head streams past once; a second call returns the same tensor."""
        if self.full is None:
            _tell(reason)
            # In the mode of the forward, not of whoever looks first: a metric under no_grad must not cost a
            # loss its gradient.
            with torch._C._InferenceMode(False), torch.set_grad_enabled(self.hidden.requires_grad):
                logits = streamed_linear(self.hidden, self.head, block_bytes=self.block_bytes)
                for step in self.steps:
                    logits = step(logits)
            self.full = logits
        return self.full

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        ours = [value for value in (*args, *kwargs.values()) if isinstance(value, cls)]
        if len(ours) == 1 and ours[0].full is None:
            if func is Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
                return ours[0].hidden.requires_grad
            still_deferred = ours[0]._deferring(func, args, kwargs)
            if still_deferred is not None:
                return still_deferred
        real_args, real_kwargs = tree_map_only(
            cls, lambda logits: logits.materialise(func.__name__), (tuple(args), dict(kwargs))
        )
        return func(*real_args, **real_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., object], types: Sequence[type], args: object = (), kwargs: object = None
    ) -> object:
        raise RuntimeError(
            f"{func} reached deferred logits below autograd, where real ones would lose their gradient"
        )

    def _deferring(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> "DeferredLogits | None":
        """What `func` makes of the logits, if that can be said without them."""
        name = func.__name__
        if name == "contiguous":
            return self
        if name == "detach":
            return DeferredLogits(self.hidden.detach(), self.head, self.block_bytes, self.steps, self.dtype)
        if name == "__getitem__":
            rows = _leading_rows(args[1], self.shape[-1])
            if rows is None:
                return None
            view = HeadView(self.head, rows, self.head.dtype)
            return DeferredLogits(self.hidden, view, self.block_bytes, self.steps, self.dtype)
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place:
            name = name[:-1]
            func = getattr(Tensor, name)  # a step replays on tensors that autograd may need unchanged
        if name not in (ARITHMETIC if in_place else ARITHMETIC | CASTS):
            return None
        step = _elementwise_step(func, args, kwargs)
        sample = step and step(torch.zeros(1, dtype=self.dtype, device=self.device))
        if (
            step is None
            or not isinstance(sample, Tensor)
            or (sample.shape, sample.device) != ((1,), self.device)
        ):
            return None
        if not in_place:
            return DeferredLogits(self.hidden, self.head, self.block_bytes, (*self.steps, step), sample.dtype)
        if sample.dtype != self.dtype:
            return None
        self.steps = (*self.steps, step)
        return self


def _elementwise_step(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Step | None:
    """`func` with the logits left open, if every other operand is one number (or a dtype) for all of them.

    A 0-d tensor counts as a number unless it is trainable: a replay would lose its gradient.
    """

    def fixed(value: object) -> object:
        return value.detach().clone() if isinstance(value, Tensor) else value

    at = [index for index, value in enumerate(args) if isinstance(value, DeferredLogits)]
    if len(at) != 1:
        return None
    before, after = args[: at[0]], args[at[0] + 1 :]
    for value in (*before, *after, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.dim() or value.requires_grad:
                return None
        elif not isinstance(value, Number | torch.dtype):
            return None
    before, after = [fixed(value) for value in before], [fixed(value) for value in after]
    options = {key: fixed(value) for key, value in kwargs.items()}
    return lambda logits: func(*before, logits, *after, **options)  # type: ignore[return-value]


def _leading_rows(index: object, vocab_size: int) -> int | None:
    """n for `[..., :n]`, as of a model that drops the padding of its vocabulary. None for other indices."""
    if not isinstance(index, tuple) or not isinstance(index[-1], slice):
        return None
    if (
        any(other is not Ellipsis and other != slice(None) for other in index[:-1])
        or Ellipsis not in index[:-1]
    ):
        return None
    start, stop, stride = index[-1].indices(vocab_size)
    return stop if (start, stride) == (0, 1) and stop > 0 else None


@cache
def _tell(reason: str) -> None:
    logger.info(
        "this model's logits are computed and kept in full, for `%s`: a loss alone would not need them",
        reason,
    )
