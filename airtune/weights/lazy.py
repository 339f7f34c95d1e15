"""Weights that are brought when a kernel reads them, and not before.

A router decides which of a layer's experts are read, and only while the layer runs. A packed weight is
decoded into something two to four times its size, and one decoded matrix at a time is enough. Both are the
same thing: a parameter whose numbers are not there yet. `LazyTensor` is such a parameter. It has the shape,
dtype and device of the real one, so that a model's own code takes it for that; views of it (`weight[e]`,
`.T`, a chunk) are lazy too; a kernel that gets it gets the numbers, for as long as the kernel takes to be
queued.

Autograd then does by itself what streaming needs. A product saves the lazy tensor for its backward pass,
which is a note of where the numbers come from, and brings them again when it gets there: 256 experts of 44 MB
that were all used leave nothing behind but their activations.

It gives up the last microseconds (each operation passes through Python once: 10 to 20 us) and in-place
changes, which frozen weights do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Views by what they do, though their schema does not say so.
_ALSO_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
)
_THE_SAME = frozenset({aten.detach.default, aten.alias.default})
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_IDS = frozenset({torch.int64, torch.int32})


class WeightSource:
    """Where a lazy tensor's numbers come from.

    Args:
        like: a tensor on the meta device, of the shape and dtype of what is brought.
        device: where it is brought to.
    """

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        # With its index: autograd queues work by it.
        self.like, self.device = like, torch.empty(0, device=device).device

    def read(self) -> AbstractContextManager[torch.Tensor]:
        """Inside, the tensor is there, for what is queued on the current stream."""
        raise NotImplementedError

    def part(self, index: int) -> WeightSource | None:
        """The source of `tensor[index]`, where that can be brought alone."""
        return None

    def span(self, start: int, stop: int) -> WeightSource | None:
        """The source of `tensor[start:stop]`, where that can be brought alone."""
        return None

    def rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        """`tensor[ids]`, a new tensor, where rows can be brought alone."""
        return None


class LazyTensor(torch.Tensor):
    """A frozen weight that `source` brings whenever it is computed with."""

    _source: WeightSource
    _like: torch.Tensor
    _views: tuple[Callable[[torch.Tensor], Any], ...]

    @staticmethod
    def __new__(
        cls,
        source: WeightSource,
        like: torch.Tensor | None = None,
        views: tuple[Callable[[torch.Tensor], Any], ...] = (),
    ) -> LazyTensor:
        like = source.like if like is None else like
        # Also where inference mode is on: the view of a tensor that is from outside is from outside too. Not
        # `torch.inference_mode`, which is Python: interrupted on its way out, it leaves the mode changed.
        with torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else nullcontext():
            made: LazyTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, like.shape, strides=like.stride(), dtype=like.dtype, device=source.device
            )
        made._source, made._like, made._views = source, like, views
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A linear layer whose gradient nobody wants is one kernel. Taken apart into transpose and product,
        # each through Python, it takes longer than the product itself where an expert is small.
        if func is linear and not torch.is_grad_enabled() and not kwargs and not _has_no_rows(args[0]):
            return _with_numbers(func, args, {})
        return torch._C._disabled_torch_function_impl(func, types, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor):
            if func in _THE_SAME:
                return LazyTensor(first._source, first._like, first._views)
            if func.is_view or func in _ALSO_VIEWS:
                return first._viewed(func, args[1:], kwargs)
            ids = None if first._views else _looked_up(func, args)
            if ids is not None and (found := first._source.rows(ids)) is not None:
                return found
        _refuse_writing(func, args, kwargs)
        if func in _PRODUCTS and any(_has_no_rows(arg) for arg in args):
            # An expert without tokens: the result has no rows either, whatever the weight is.
            return func(*_replaced(args, _nothing), **kwargs)
        return _with_numbers(func, args, kwargs)

    def _viewed(self, func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        narrower = None if self._views else self._narrowed(func, rest)
        return self._view(func, rest, kwargs) if narrower is None else narrower

    def _view(self, func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        like = func(self._like, *rest, **kwargs)
        if isinstance(like, torch.Tensor):
            return LazyTensor(self._source, like, (*self._views, partial(_apply, func, rest, kwargs)))
        return [
            LazyTensor(self._source, one, (*self._views, partial(_apply, func, rest, kwargs, output=i)))
            for i, one in enumerate(like)
        ]

    def _narrowed(self, func: Any, rest: tuple[Any, ...]) -> Any:
        """A view of some rows, of which the others need not be brought."""
        if func not in (aten.select.int, aten.slice.Tensor) or not rest or rest[0] != 0:
            return None
        if func is aten.select.int:
            index = range(self.shape[0])[int(rest[1])]
            if (part := self._source.part(index)) is not None:
                return LazyTensor(part)
            row = self._source.span(index, index + 1)
            return None if row is None else LazyTensor(row)._view(func, (0, 0), {})
        first, last, by = (*rest[1:], None, None, None)[:3]
        start, stop, step = slice(first, last, by).indices(self.shape[0])
        found = self._source.span(start, stop) if step == 1 else None
        return None if found is None else LazyTensor(found)


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operation on the tensors that lazy ones stand for, which are there for as long as it is queued."""
    with ExitStack() as reading:

        def brought(lazy: LazyTensor) -> torch.Tensor:
            tensor = reading.enter_context(lazy._source.read())
            for view in lazy._views:
                tensor = view(tensor)
            return tensor

        return func(*_replaced(args, brought), **{k: _replaced(v, brought) for k, v in kwargs.items()})


def _apply(
    func: Any,
    rest: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensor: torch.Tensor,
    output: int | None = None,
) -> Any:
    """A view of the tensor itself; `output` picks one of several."""
    made = func(tensor, *rest, **kwargs)
    return made if output is None else made[output]


def _looked_up(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The ids, if the operation picks rows of its first argument by them."""
    if func is aten.embedding.default:
        return args[1]
    if func is aten.index_select.default and args[1] == 0:
        return args[2]
    if func is aten.index.Tensor and len(args[1]) == 1:
        (ids,) = args[1]  # or a mask, of booleans or bytes
        return torch.where(ids < 0, ids + len(args[0]), ids) if ids.dtype in _IDS else None
    return None


def _replaced(value: Any, brought: Callable[[LazyTensor], torch.Tensor]) -> Any:
    """`value` with what was brought in place of lazy tensors; arguments are tensors, or lists of them."""
    if isinstance(value, LazyTensor):
        return brought(value)
    return type(value)(_replaced(v, brought) for v in value) if type(value) in (tuple, list) else value


def _has_no_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and value.numel() == 0


def _nothing(lazy: LazyTensor) -> torch.Tensor:
    return torch.zeros(1, dtype=lazy.dtype, device=lazy.device).expand(lazy.shape)


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    declared = func._schema.arguments
    given = dict(zip((argument.name for argument in declared), args, strict=False)) | dict(kwargs)
    written = [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
    if any(isinstance(leaf, LazyTensor) for leaf in tree_leaves(written)):
        raise RuntimeError(f"{func} would write to a streamed weight, and those are frozen")
