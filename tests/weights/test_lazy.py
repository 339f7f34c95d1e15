"""Weights that are brought when a kernel reads them: like the tensor itself, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from airtune.weights.lazy import LazyTensor, WeightSource


class Counting(WeightSource):
    """Brings `tensor`, or its parts, and counts."""

    def __init__(self, tensor: Tensor, reads: list[str], name: str = "whole") -> None:
        super().__init__(tensor.to("meta"), tensor.device)
        self.tensor, self.reads, self.name = tensor, reads, name

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        self.reads.append(self.name)
        lent = self.tensor.clone()
        yield lent
        lent.fill_(torch.nan)  # whoever reads it later reads this

    def part(self, index: int) -> WeightSource | None:
        return Counting(self.tensor[index], self.reads, f"part {index}") if self.tensor.dim() == 3 else None


def lazy(tensor: Tensor) -> tuple[LazyTensor, list[str]]:
    reads: list[str] = []
    return LazyTensor(Counting(tensor, reads)), reads


def test_it_passes_for_the_tensor() -> None:
    weight = torch.randn(3, 4, 5, dtype=torch.bfloat16)
    got, reads = lazy(weight)
    assert (got.shape, got.dtype, got.device) == (weight.shape, weight.dtype, weight.device)
    assert "3, 4, 5" in repr(got)
    assert not reads


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda w: w.T,
    "chunk": lambda w: w.chunk(2, dim=0)[1],
    "slice": lambda w: w[1:3],
    "reshape": lambda w: w.reshape(2, -1),
    "unsqueeze and permute": lambda w: w[None].permute(2, 0, 1),
    "view of a view": lambda w: w.T[1:].unbind(0)[1],
    "detach": lambda w: w.detach(),
    "unsafe chunk": lambda w: torch.unsafe_chunk(w, 2)[1],
    "unsafe split": lambda w: torch.unsafe_split_with_sizes(w, [1, 3])[1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_read_nothing_until_they_are_computed_with(view: Callable[[Tensor], Tensor]) -> None:
    weight = torch.randn(4, 6)
    got, reads = lazy(weight)
    seen = view(got)
    assert isinstance(seen, LazyTensor)
    assert not reads
    assert torch.equal(seen + 0, view(weight))
    assert reads == ["whole"]


@pytest.mark.parametrize("index", [2, -1, torch.tensor(1)], ids=str)
def test_an_expert_is_brought_alone(index: int | Tensor) -> None:
    weight = torch.randn(3, 4, 5)
    got, reads = lazy(weight)
    assert torch.equal(F.linear(torch.eye(5), got[index]).T, weight[index])
    assert reads == [f"part {int(index) % 3}"]


def test_there_is_no_expert_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        lazy(torch.randn(3, 4, 2))[0].select(0, 3)


def test_all_of_a_stack_is_brought_where_code_computes_with_all_of_it() -> None:
    weight, x = torch.randn(3, 4, 5), torch.randn(3, 2, 4)
    got, reads = lazy(weight)
    assert torch.equal(torch.bmm(x, got), torch.bmm(x, weight))
    assert reads == ["whole"]


@pytest.mark.parametrize("bias", [False, True])
def test_backward_brings_it_again_and_nothing_is_kept(bias: bool) -> None:
    weight, x = torch.randn(4, 6), torch.randn(2, 3, 6, requires_grad=True)
    got, reads = lazy(weight)
    out = F.linear(x, got, torch.randn(4) if bias else None)
    assert reads == ["whole"]
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert reads == ["whole", "whole"]
    twin = F.linear(x, weight, torch.zeros(4))
    if not bias:
        (want,) = torch.autograd.grad(twin.square().sum(), x)
        torch.testing.assert_close(grad, want)
    assert grad.isfinite().all()


def test_a_product_with_no_rows_reads_nothing() -> None:
    """Some models run every expert, also on no tokens."""
    got, reads = lazy(torch.randn(4, 6))
    x = torch.randn(0, 6, requires_grad=True)
    out = F.linear(x, got, torch.randn(4))
    out.sum().backward()
    assert out.shape == (0, 4)
    assert not reads


def test_writing_is_refused() -> None:
    got, reads = lazy(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="frozen"):
        got.add_(1)
    with pytest.raises(RuntimeError, match="frozen"):
        torch._foreach_add_([torch.zeros(2, 2), got], 1)
    total = torch.zeros(2, 2)
    total.add_(got)
    assert reads == ["whole"]


def test_lazy_inside_lazy() -> None:
    """A source may itself give a lazy tensor: an expert whose numbers are packed."""

    class Nested(WeightSource):
        @contextmanager
        def read(self) -> Iterator[Tensor]:
            yield inner

    weight = torch.randn(3, 3)
    inner, reads = lazy(weight)
    outer = LazyTensor(Nested(weight.to("meta"), weight.device))
    assert torch.equal(torch.eye(3) @ outer.T, weight.T)
    assert reads == ["whole"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], torch.no_grad]) -> None:
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    got, _ = lazy(weight)
    with mode():
        assert torch.equal(F.linear(x, got), F.linear(x, weight))


def test_autocast() -> None:
    weight, x = torch.randn(4, 6), torch.randn(2, 6, requires_grad=True)
    got, _ = lazy(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(F.linear(x, got), F.linear(x, weight))
