"""LoRA on stacked experts, one expert at a time.

PEFT adapts a parameter W [E, out, in] through `target_parameters` by adding the product of its two factors to
all of W before the experts run. For 256 experts of 14 million elements that is a second stack of 7 GB, and
its gradient a third. Here the sum is formed where a weight is used anyway, for one expert, and its gradient
is taken to the factors on the spot:

    W_e + s L_e R_e,    dL_e = s dW_e R_e^T,    dR_e = s L_e^T dW_e

with PEFT's own factors L [E, out, R] and R [E, R, in] and scaling s, in the dtype of W as PEFT computes it.
The parameters, their names and their layout on disk stay PEFT's (`lora_A` has its rows expert by expert,
`lora_B` its columns with the expert as the fastest index).

It gives up `lora_dropout`, which PEFT refuses here too: the sum leaves no place to drop an input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from airtune.weights.lazy import LazyTensor, WeightSource


def match_parameters(config: LoraConfig, stacks: Collection[str]) -> list[str]:
    """The stacks that `target_parameters` name, by PEFT's rule: a whole name or its end.

    Raises:
        ValueError: one matches no stack of experts.
    """
    wanted = sorted(config.target_parameters or ())
    unmatched = [end for end in wanted if not any(_ends(name, end) for name in stacks)]
    if unmatched:
        known = sorted({name.split(".", 3)[-1] for name in stacks})
        raise ValueError(
            f"target_parameters {unmatched} match no parameter that holds stacked experts; "
            + (f"those are called {known}" if known else "this model has none")
        )
    if wanted and config.lora_dropout:
        raise ValueError(
            f"lora_dropout is {config.lora_dropout}, which PEFT cannot apply to target_parameters: "
            "set it to 0"
        )
    return [name for name in stacks if any(_ends(name, end) for end in wanted)]


def saved_shapes(config: LoraConfig, names: Sequence[str], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of the adapter's tensors for these parameters, under the names that PEFT saves them by.

    A module with several adapted parameters is wrapped several times, the last one outermost.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        experts = model.get_submodule(path)
        beside = [own for own, _ in experts.named_parameters(recurse=False) if f"{path}.{own}" in names]
        inner = ".base_layer" * (len(beside) - 1 - beside.index(leaf))
        count, outputs, inputs = getattr(experts, leaf).shape
        if getattr(experts, "is_transposed", False):  # PEFT's own question
            outputs, inputs = inputs, outputs
        ranks = config.rank_pattern or {}
        rank = ranks.get(get_pattern_key(list(ranks), name), config.r) * count
        shapes[f"base_model.model.{path}{inner}.lora_A.weight"] = (rank, inputs)
        shapes[f"base_model.model.{path}{inner}.lora_B.weight"] = (outputs, rank)
    return shapes


def adapted_parameters(model: nn.Module) -> dict[str, ParamWrapper]:
    """{parameter, by its name in the base model: what PEFT wraps it with}."""
    return {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}": module
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }


def adapt_expert_by_expert(model: nn.Module) -> None:
    """Let PEFT's wrappers around streamed stacks adapt the expert that is used, and not all of them."""
    for wrapper in adapted_parameters(model).values():
        setattr(wrapper, "_activate_lora", _Activation(wrapper))  # noqa: B010


class _Activation:
    """Stands where a wrapper's `_activate_lora` was."""

    def __init__(self, wrapper: ParamWrapper) -> None:
        self._wrapper = wrapper

    def __call__(self, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        return self._activated([name for name in active_adapters if name in self._wrapper.lora_A])

    @contextmanager
    def _activated(self, names: Sequence[str]) -> Iterator[None]:
        experts, leaf = self._wrapper.get_base_layer(), self._wrapper.parameter_name
        own: dict[str, Any] = experts._parameters
        weight = own[leaf]
        if not names:
            yield
            return
        if isinstance(weight, _AdaptedStack):
            raise RuntimeError(
                "these experts are running already: a hook, or another thread, calls the model within them"
            )
        assert isinstance(weight, LazyTensor), "experts are streamed while their layer runs"
        assert len(names) == 1, "a streamed model has one adapter"
        left_EOR, right_ERI, scaling = self._wrapper.get_delta_factors(names[0])
        own[leaf] = _AdaptedStack(weight, left_EOR.unbind(), right_ERI.unbind(), scaling)
        try:
            yield
        finally:
            own[leaf] = weight


class _AdaptedStack(LazyTensor):
    """A stack whose experts, taken one by one, have their adapter added."""

    _weight: LazyTensor
    _factors: tuple[Sequence[Tensor], Sequence[Tensor], float]

    @staticmethod
    def __new__(
        cls, weight: LazyTensor, left: Sequence[Tensor], right: Sequence[Tensor], scaling: float
    ) -> _AdaptedStack:
        made: _AdaptedStack = LazyTensor.__new__(cls, weight._source)  # type: ignore[assignment]
        made._weight, made._factors = weight, (left, right, scaling)
        return made

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], _AdaptedStack):
            return args[0]._expert(args[1])
        if func.__name__ != "__get__" and func.__name__ not in _QUESTIONS:
            raise ValueError(
                f"LoRA on stacked experts needs code that takes one expert at a time, and this model calls "
                f"{func.__name__} on all of them: leave its experts out of target_parameters"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _expert(self, index: Any) -> Tensor:
        left, right, scaling = self._factors
        expert = int(index)
        adapted: Tensor = _Adapt.apply(self._weight[expert], left[expert], right[expert], scaling)
        return adapted


_QUESTIONS = frozenset({"size", "dim", "numel", "stride", "is_floating_point", "__len__", "__repr__"})


class _Adapt(torch.autograd.Function):
    """W + s L R, formed when a kernel reads it; see the head of this file."""

    @staticmethod
    def forward(ctx: Any, weight: LazyTensor, left: Tensor, right: Tensor, scaling: float) -> LazyTensor:
        ctx.save_for_backward(left, right)
        ctx.scaling = scaling
        return LazyTensor(_Sum(weight, left.detach(), right.detach(), scaling))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        return None, ctx.scaling * (grad @ right.mT), ctx.scaling * (left.mT @ grad), None


class _Sum(WeightSource):
    def __init__(self, weight: LazyTensor, left: Tensor, right: Tensor, scaling: float) -> None:
        super().__init__(weight._like, weight.device)
        self._weight, self._left, self._right, self._scaling = weight, left, right, scaling

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        yield torch.addmm(self._weight, self._left, self._right, alpha=self._scaling)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
