"""A streamed layer is the layer: same results, same gradients, while its weights come and go.

The naive twin of every case is the plain module under torch's own autograd, run on the same micro-batches one
after the other. The arithmetic is the same, so most comparisons are bit for bit.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from airtune.autograd.layer_run import Lists
from airtune.autograd.row_split import MicroBatchError, Variant
from airtune.autograd.streamed_layer import Direction, GraphSize, StreamedLayer
from tests.sim import Simulator


class FakeWeights:
    """Frozen parameters are on meta except in a visit; equal tokens say that they stayed where they were."""

    def __init__(self, module: nn.Module, *, moved: bool = True, device: str = "cpu") -> None:
        self.device = torch.device(device)
        owners = [(owner, leaf) for owner in module.to(device).modules() for leaf in owner._parameters]
        frozen = [(o, leaf, o._parameters[leaf]) for o, leaf in owners]
        self.frozen = [(o, leaf, p) for o, leaf, p in frozen if p is not None and not p.requires_grad]
        self.visits: list[Direction] = []
        self.inside, self.moved = 0, moved
        self._put(away=True)

    def _put(self, *, away: bool) -> None:
        for owner, leaf, parameter in self.frozen:
            here = nn.Parameter(parameter.to("meta"), requires_grad=False) if away else parameter
            owner._parameters[leaf] = here

    @contextmanager
    def visit(self, direction: Direction) -> Iterator[object]:
        self.visits.append(direction)
        self.inside += 1
        self._put(away=False)
        try:
            yield object() if self.moved else "the same memory"
        finally:
            self.inside -= 1
            self._put(away=True)


class Lora(nn.Module):
    """x + up(dropout(down(x))) beside a frozen projection: the shape of a layer with an adapter."""

    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).tanh() + self.up(self.dropout(self.down(x))).sigmoid() * x


class Fn(nn.Module):
    """A layer that is a function of its inputs and one adapter parameter."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.scale, *args, **kwargs)


def stream(module: nn.Module, *, moved: bool = True, device: str = "cpu", **options: Any) -> StreamedLayer:
    weights = FakeWeights(module, moved=moved, device=device)
    return StreamedLayer(module, "layer 3", module.forward, weights, **options)


def naive(module: nn.Module, rows: int, size: int | None, *args: Any, **kwargs: Any) -> Any:
    """The module on each micro-batch, joined; tensors that lead with `rows` carry the batch."""
    if size is None:
        return module(*args, **kwargs)

    def run(start: int) -> Any:
        def take(leaf: Any) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
            return leaf[start : start + size] if batched else leaf

        part_args, part_kwargs = tree_map(take, (args, kwargs))
        return module(*part_args, **part_kwargs)

    return tree_map(lambda *parts: torch.cat(parts), *(run(start) for start in range(0, rows, size)))


def batch(rows: int = 5, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *(shape or (4,)), dtype=dtype, generator=generator).requires_grad_()


def gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, tensors, allow_unused=True)


def weighted(tensor: Tensor) -> Tensor:
    """A loss in which every element has a weight of its own."""
    return (tensor * torch.linspace(-1, 2, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)).sum()


def assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


SIZES = [None, 1, 2, 3, 5]

# --- results and gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("size", [None, 2])
def test_gradcheck(size: int | None, keep_graph: bool) -> None:
    module = Lora().double()
    layer = stream(module, micro_batch_size=size, keep_graph=keep_graph)
    trainable = tuple(p for p in module.parameters() if p.requires_grad)
    assert torch.autograd.gradcheck(lambda x, *_: layer((x,), {}, 3), (batch(3), *trainable))


@pytest.mark.parametrize("size", SIZES)
def test_rows_in_micro_batches_also_when_the_last_is_smaller(size: int | None) -> None:
    module, x = Lora().double(), batch(5)
    want = naive(module, 5, size, x)
    want_grads = gradients(weighted(want), x, module.down.weight, module.up.weight)
    got = stream(module, micro_batch_size=size)((x,), {}, 5)
    assert_equal(got, want)
    assert_close(gradients(weighted(got), x, module.down.weight, module.up.weight), want_grads)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_dropout_draws_the_same_mask_twice(size: int | None, training: bool) -> None:
    module, x = Lora(dropout=0.5).double().train(training), batch(5)
    layer = stream(module, micro_batch_size=size)
    torch.manual_seed(7)
    want = naive(module_with_weights(layer), 5, size, x)
    drawn_by_the_twin = torch.get_rng_state()
    want_grads = gradients(weighted(want), x, module.down.weight, module.up.weight)
    torch.manual_seed(7)
    got = layer((x,), {}, 5)
    assert torch.equal(torch.get_rng_state(), drawn_by_the_twin), "the proof and the first run leave no trace"
    assert_equal(got, want)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    assert_close(gradients(weighted(got), x, module.down.weight, module.up.weight), want_grads)
    assert torch.equal(torch.get_rng_state(), before), "backward draws nothing that the caller can see"


def module_with_weights(layer: StreamedLayer) -> nn.Module:
    """The module, with its weights in place for a run of its own."""

    class Visited(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with layer.weights.visit("forward"):
                return layer.module(*args, **kwargs)

    # The frozen weights may leave again: torch's own graph keeps them.
    return Visited()


def test_several_outputs_nested_and_by_name() -> None:
    def function(scale: Tensor, x: Tensor, *, extra: Mapping[str, Tensor]) -> Any:
        return x * scale, {"sum": [x + extra["a"], (extra["b"] * x.sin(),)]}

    module, x, a, b = Fn(function), batch(3), batch(3, seed=1), batch(3, seed=2)

    def loss(output: Any) -> Tensor:
        return weighted(output[0]) + weighted(output[1]["sum"][0]) ** 2 + weighted(output[1]["sum"][1][0])

    want = gradients(loss(module(x, extra={"a": a, "b": b})), x, a, b, module.scale)
    for size in (None, 2):
        got = stream(module, micro_batch_size=size)((x,), {"extra": {"a": a, "b": b}}, 3)
        assert_close(gradients(loss(got), x, a, b, module.scale), want)


def test_outputs_that_the_loss_does_not_use() -> None:
    module, x = Fn(lambda scale, x: (x * scale, x.sin(), x.cos() * scale)), batch(3)
    for used in range(3):
        want = gradients(weighted(module(x)[used]), x, module.scale)
        for size in (None, 2):
            got = stream(module, micro_batch_size=size)((x,), {}, 3)
            assert_close(gradients(weighted(got[used]), x, module.scale), want)


def test_an_input_that_is_handed_through() -> None:
    module, x, y = Fn(lambda scale, x, y: (x, y * scale)), batch(3), batch(3, seed=1)
    for size in (None, 2):
        first, second = stream(module, micro_batch_size=size)((x, y), {}, 3)
        assert first is x
        assert_equal(
            gradients(weighted(first * second), x, y), gradients(weighted(x * (y * module.scale)), x, y)
        )


def test_a_layer_that_does_nothing() -> None:
    x = batch(3)
    assert stream(Fn(lambda scale, x: x))((x,), {}) is x
    assert stream(Fn(lambda scale, x: None))((x,), {}) is None


def test_outputs_that_are_views_and_duplicates() -> None:
    def function(scale: Tensor, x: Tensor) -> Any:
        left, right = (x * scale).chunk(2, -1)
        return left, right, left, x[:, :2]

    module, x = Fn(function), batch(3)

    def loss(parts: tuple[Tensor, ...]) -> Tensor:
        return sum((weighted(part) * (i + 1) for i, part in enumerate(parts)), torch.zeros((), dtype=x.dtype))

    want = gradients(loss(module(x)), x, module.scale)
    for size in (None, 2):
        got = stream(module, micro_batch_size=size)((x,), {}, 3)
        assert_close(gradients(loss(got), x, module.scale), want)


def test_the_caller_may_change_a_result_in_place() -> None:
    """As models do that add features of an image to some positions."""
    module, x = Fn(lambda scale, x: x * scale), batch(3)

    def use(output: Tensor) -> Tensor:
        output[1] += 1
        output.mul_(2)
        return weighted(output.sin())

    want = gradients(use(module(x)), x, module.scale)
    assert_equal(gradients(use(stream(module)((x,), {})), x, module.scale), want)


@pytest.mark.parametrize("size", [None, 2])
def test_integer_tensors_in_and_out(size: int | None) -> None:
    def function(scale: Tensor, x: Tensor, index: Tensor) -> Any:
        return x.gather(1, index) * scale[:2], x.argmax(-1), index > 1

    module, x = Fn(function), batch(3)
    index = torch.tensor([[0, 1], [3, 2], [1, 1]])
    want, want_top, want_mask = module(x, index)
    got, top, mask = stream(module, micro_batch_size=size)((x, index), {}, 3)
    assert torch.equal(top, want_top) and torch.equal(mask, want_mask) and not top.requires_grad
    assert_close(gradients(weighted(got), x, module.scale), gradients(weighted(want), x, module.scale))


@pytest.mark.parametrize("size", [None, 2])
def test_a_float_output_without_gradient_has_none(size: int | None) -> None:
    module, x = Fn(lambda scale, x: (x * scale, x.detach() * 2)), batch(3)
    got, cut = stream(module, micro_batch_size=size)((x,), {}, 3)
    assert got.requires_grad and not cut.requires_grad
    assert_close(gradients(weighted(got * cut), x), gradients(weighted(x * module.scale * cut), x))


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("size", SIZES)
def test_an_input_shared_by_all_rows(sim: Simulator, size: int | None, device: str) -> None:
    """A bias for positions, [1, 4], is passed whole; its gradient is the sum over the micro-batches."""
    module, x, shared = Fn(lambda scale, x, shared: (x + shared).sin() * scale), batch(5), batch(1, seed=1)
    want = gradients(weighted(module(x, shared)), x, shared, module.scale)
    got = stream(module, device=device, micro_batch_size=size)((x,), {"shared": shared}, 5)
    assert_close(on_host(gradients(weighted(got), x, shared, module.scale)), want)


def on_host(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if grad is None else grad.cpu() for grad in grads)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("size", SIZES)
def test_an_output_shared_by_all_rows(sim: Simulator, size: int | None, device: str) -> None:
    """What every micro-batch makes whole counts once."""
    module, x, shared = (
        Fn(lambda scale, x, shared: (x * scale, shared.exp() * scale)),
        batch(5),
        batch(1, seed=1),
    )

    def loss(rows: Tensor, whole: Tensor) -> Tensor:
        return weighted(rows * whole)

    want = gradients(loss(*module(x, shared)), x, shared, module.scale)
    rows, whole = stream(module, device=device, micro_batch_size=size)((x, shared), {}, 5)
    assert rows.shape == (5, 4) and whole.shape == (1, 4)
    assert_close(on_host(gradients(loss(rows, whole), x, shared, module.scale)), want)


@pytest.mark.parametrize("size", [None, 2])
def test_several_lines_a_row(size: int | None) -> None:
    """[B, S, D] in, [B*S, D] out, as routers do."""
    module, x = Fn(lambda scale, x: ((x * scale).flatten(0, 1), x.sin())), batch(5, 3, 4)
    want = gradients(weighted(module(x)[0]) + weighted(module(x)[1]), x, module.scale)
    lines, rows = stream(module, micro_batch_size=size)((x,), {}, 5)
    assert lines.shape == (15, 4)
    assert_close(gradients(weighted(lines) + weighted(rows), x, module.scale), want)


@pytest.mark.parametrize("size", [None, 2])
def test_an_input_whose_rows_share_memory(size: int | None) -> None:
    module, row = Fn(lambda scale, x, y: x * y * scale), batch(1, seed=1)
    x = batch(5)
    want = gradients(weighted(module(x, row.expand(5, 4))), x, row)
    got = stream(module, micro_batch_size=size)((x, row.expand(5, 4)), {}, 5)
    assert_close(gradients(weighted(got), x, row), want)


@pytest.mark.parametrize("size", [None, 2])
def test_one_tensor_given_twice(size: int | None) -> None:
    module, x = Fn(lambda scale, x, residual: x * scale + residual.sin()), batch(5)
    want = gradients(weighted(module(x, x)), x, module.scale)
    got = stream(module, micro_batch_size=size)((x, x), {}, 5)
    assert_close(gradients(weighted(got), x, module.scale), want)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_whose_gradients_are_one_tensor(size: int) -> None:
    """Autograd hands a and b of a + b the same tensor; adding to it in place would count it twice."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.a + self.b)

    module, x = Sum(), batch(5)
    got = stream(module, micro_batch_size=size)((x,), {}, 5)
    assert_close(gradients(got.sum(), module.a, module.b), (x.sum(0).detach(),) * 2)


@pytest.mark.parametrize("size", [None, 2])
def test_a_frozen_layer_passes_gradients_on(size: int | None) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().requires_grad_(False), batch(5)
    want = gradients(weighted(module(x)), x)
    layer = stream(module, micro_batch_size=size)
    assert_close(gradients(weighted(layer((x,), {}, 5)), x), want)
    assert layer.weights.visits == ["forward", "backward"]  # type: ignore[attr-defined]


def test_a_layer_called_twice_in_one_graph() -> None:
    module, x = Lora().double(), batch(3)
    want = gradients(weighted(module(module(x))), x, module.down.weight)
    layer = stream(module, keep_graph=True)
    got = layer((layer((x,), {}),), {})
    assert_close(gradients(weighted(got), x, module.down.weight), want)


# --- side doors ---------------------------------------------------------------------------------------------


def shares(scale: Tensor, x: Tensor, shared: dict[str, Tensor], trail: list[Tensor]) -> Tensor:
    """Reads what an earlier layer left, and leaves something for later ones."""
    mixed = x * scale + shared.get("kv", torch.zeros((), dtype=x.dtype))
    shared["kv"] = (x * scale).tanh()
    trail.append(x.sin() * scale)
    return mixed


@pytest.mark.parametrize("size", [None, 1, 2])
def test_containers_that_layers_write_carry_gradients(size: int | None) -> None:
    x = batch(5)
    modules = [Fn(shares) for _ in range(3)]
    scales = [module.scale for module in modules]

    def loss(layers: list[Callable[..., Tensor]]) -> Tensor:
        shared: dict[str, Tensor] = {}
        trail: list[Tensor] = []
        hidden = x
        for layer in layers:
            hidden = layer(hidden, shared, trail=trail)
        assert shared.keys() == {"kv"} and len(trail) == 3
        return weighted(hidden) + sum(weighted(t) * (i + 1) for i, t in enumerate(trail))

    def streamed(module: nn.Module) -> Callable[..., Tensor]:
        layer = stream(module, micro_batch_size=size)
        return lambda *args, **kwargs: layer(args, kwargs, 5)

    want = gradients(loss(modules), x, *scales)  # type: ignore[arg-type]
    got = gradients(loss([streamed(module) for module in modules]), x, *scales)
    assert all(grad is not None for grad in want)
    assert_close(got, want)


class Book:
    """Lists that hooks append to, as transformers keeps them in a context variable."""

    def __init__(self) -> None:
        self.page: Lists | None = None

    def current(self) -> Lists | None:
        return self.page

    @contextmanager
    def replaced(self, lists: Lists | None) -> Iterator[None]:
        before, self.page = self.page, lists
        try:
            yield
        finally:
            self.page = before


@pytest.mark.parametrize("size", [None, 1, 2])
def test_recorded_values_carry_gradients(size: int | None) -> None:
    book, x = Book(), batch(5, 3, 4)

    def function(scale: Tensor, x: Tensor) -> Tensor:
        if book.page is not None:
            book.page["router"].append((x * scale).flatten(0, 1).softmax(-1))
        return x.sin() * scale

    modules = [Fn(function) for _ in range(2)]
    scales = [module.scale for module in modules]

    def loss(layers: list[Callable[[Tensor], Tensor]]) -> Tensor:
        book.page = {"router": []}
        hidden = layers[1](layers[0](x))
        recorded, book.page = book.page["router"], None
        assert [len(logits) for logits in recorded] == [15, 15]
        return weighted(hidden) + weighted(torch.cat(recorded))

    def streamed(module: nn.Module) -> Callable[[Tensor], Tensor]:
        layer = stream(module, micro_batch_size=size, recording=book)
        return lambda hidden: layer((hidden,), {}, 5)

    want = gradients(loss(modules), x, *scales)  # type: ignore[arg-type]
    assert_close(gradients(loss([streamed(module) for module in modules]), x, *scales), want)


# --- modes --------------------------------------------------------------------------------------------------


def test_without_gradients_it_is_the_plain_layer() -> None:
    module, x = Lora().double(), batch(5)
    want = module(x).detach()
    layer = stream(module, micro_batch_size=2, keep_graph=True)
    with torch.no_grad():
        got = layer((x,), {}, 5)
    assert_equal(got, want)
    assert not got.requires_grad and layer.weights.visits == ["forward"]  # type: ignore[attr-defined]


def test_no_grad_inside_a_layer() -> None:
    def function(scale: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = (x * scale).norm()
        return x * scale / norm

    module, x = Fn(function), batch(3)
    want = gradients(weighted(module(x)), x, module.scale)
    assert_equal(gradients(weighted(stream(module)((x,), {})), x, module.scale), want)


def test_inputs_and_parameters_that_need_nothing() -> None:
    module = Lora().requires_grad_(False)
    got = stream(module)((torch.ones(2, 4),), {})
    assert not got.requires_grad and got.grad_fn is None


@pytest.mark.parametrize("size", [None, 2])
def test_autocast_is_that_of_the_forward_pass(size: int | None) -> None:
    # x is a leaf for the twin too: autocast casts a leaf once, and adds up its gradient in the cast dtype.
    module, x = Lora(), batch(4, dtype=torch.float32)
    layer = stream(module, micro_batch_size=size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = naive(module_with_weights(layer), 4, size, x)
    want_grads = gradients(weighted(want.float()), x, module.down.weight, module.up.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer((x,), {}, 4)
    assert not torch.is_autocast_enabled("cpu")
    assert_equal(got, want)
    got_grads = gradients(weighted(got.float()), x, module.down.weight, module.up.weight)
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-2 if size else 0, atol=1e-2 if size else 0)


def test_backward_inside_autocast_still_reaches_the_adapters() -> None:
    """Autocast caches its casts of parameters, also those of the proof, which runs without gradients."""
    module, x = Lora(), torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = stream(module, micro_batch_size=2)((x,), {}, 4)
        grads = gradients(got.float().sum(), module.down.weight, module.up.weight)
    assert all(grad is not None and bool(grad.any()) for grad in grads)


@contextmanager
def without_adapter(module: Lora) -> Iterator[None]:
    up = module.up.weight.detach().clone()
    module.up.weight.data.zero_()
    try:
        yield
    finally:
        module.up.weight.data.copy_(up)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 1, 2, 4])
@torch.no_grad()
def test_rows_that_are_run_otherwise_in_the_same_visit(size: int | None, start: int) -> None:
    module, x = Lora().double(), batch()
    on = module(x)
    with without_adapter(module):
        off = module(x)
    layer = stream(module, micro_batch_size=size, variant=Variant(start, lambda: without_adapter(module)))
    got = layer((x,), {}, len(x))
    assert_close(got, torch.cat([on[:start], off[start:]]))
    assert not torch.equal(on, off) and layer.weights.visits == ["forward"]  # type: ignore[attr-defined]


def test_rows_cannot_be_run_otherwise_with_gradients_or_beside_an_object() -> None:
    module, x = Lora().double(), batch()
    layer = stream(module, variant=Variant(2, lambda: without_adapter(module)))
    with pytest.raises(MicroBatchError, match="in two ways in a forward pass"):
        layer((x,), {}, len(x))
    with torch.no_grad():
        for rows, others in ((None, {}), (len(x), {"cache": object()})):
            with pytest.raises(MicroBatchError, match="without gradients and without a cache"):
                layer((x,), others, rows)


def test_equal_rows_prove_nothing_for_others() -> None:
    """They are right by themselves: what mixes rows does not change equal ones."""
    module = Fn(lambda scale, x: x * scale + x.mean(0))
    layer, x = stream(module, micro_batch_size=1), batch(4).detach()
    assert_close(layer((x[[0, 0]],), {}, 2), module(x[[0, 0]]))
    with pytest.raises(MicroBatchError, match="two rows is not"):
        layer((x[[0, 0, 0, 3]],), {}, 4)


# --- which gradients, how often -----------------------------------------------------------------------------


def test_only_what_is_asked_for_is_given() -> None:
    module, x = Lora().double(), batch(3)
    layer = stream(module)
    want = gradients(weighted(layer((x,), {})), x, module.down.weight)
    assert_equal(gradients(weighted(layer((x,), {})), x), want[:1])
    assert_equal(gradients(weighted(layer((x,), {})), module.down.weight), want[1:])
    assert x.grad is None and module.down.weight.grad is None


@pytest.mark.parametrize("size", [None, 1])
def test_gradients_accumulate_once_for_each_backward(size: int | None) -> None:
    module, x = Lora().double(), batch(3)
    seen: list[Tensor] = []
    module.up.weight.register_post_accumulate_grad_hook(seen.append)
    layer = stream(module, micro_batch_size=size)
    for _ in range(2):
        weighted(layer((x,), {}, 3)).backward()
    assert len(seen) == 2
    once = gradients(weighted(layer((x,), {}, 3)), module.up.weight)[0]
    assert once is not None
    assert_close(module.up.weight.grad, 2 * once)


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("size", [None, 2])
def test_a_retained_graph_can_be_walked_again(size: int | None, keep_graph: bool) -> None:
    module, x = Lora(dropout=0.5).double(), batch(5)
    loss = weighted(stream(module, moved=False, micro_batch_size=size, keep_graph=keep_graph)((x,), {}, 5))
    first = torch.autograd.grad(loss, (x, module.down.weight), retain_graph=True)
    torch.manual_seed(99)
    assert_equal(torch.autograd.grad(loss, (x, module.down.weight), retain_graph=True), first)


def test_a_second_derivative_is_refused() -> None:
    module, x = Lora().double(), batch(3)
    (grad,) = torch.autograd.grad(weighted(stream(module)((x,), {})) ** 2, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- the graph that is kept for the turn --------------------------------------------------------------------


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counting, calls


def dropped(scale: Tensor, x: Tensor) -> Tensor:
    return F.dropout(x * scale, 0.5).sin()


@pytest.mark.parametrize(("moved", "runs"), [(False, 1), (True, 2)])
def test_a_kept_graph_is_used_only_if_the_weights_stayed(moved: bool, runs: int) -> None:
    function, calls = counted(dropped)
    module, x = Fn(function), batch(5)
    layer = stream(module, moved=moved, keep_graph=True)
    torch.manual_seed(5)
    got = gradients(weighted(layer((x,), {}, 5)), x, module.scale)
    assert len(calls) == runs
    assert layer.weights.visits == ["forward", "backward"]  # type: ignore[attr-defined]
    torch.manual_seed(5)
    assert_equal(got, gradients(weighted(module(x)), x, module.scale))


@pytest.mark.parametrize(("moved", "again"), [(False, 0), (True, 3)])
def test_each_micro_batch_has_its_graph(moved: bool, again: int) -> None:
    module, x = Lora(dropout=0.5).double(), batch(5)
    torch.manual_seed(5)
    want = gradients(weighted(naive(module, 5, 2, x)), x, module.down.weight, module.up.weight)
    layer = stream(module, moved=moved, micro_batch_size=2, keep_graph=True)
    layer.forward, calls = counted(layer.forward)
    torch.manual_seed(5)
    loss = weighted(layer((x,), {}, 5))
    calls.clear()
    assert_close(gradients(loss, x, module.down.weight, module.up.weight), want)
    assert len(calls) == again


@pytest.mark.parametrize("size", [None, 2])
def test_what_graphs_would_take_is_counted_without_them(size: int | None) -> None:
    """Each tensor once, however often it is saved, and no frozen weight."""
    module, x = Lora(dropout=0.5).double(), batch(4)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda t: t):
        naive(module, 4, size, x)
    storages = [tensor.untyped_storage() for tensor in held]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del kept[module.base.weight.data_ptr()]
    in_each = sum(kept[tensor.data_ptr()] for tensor in (x, module.down.weight, module.up.weight))
    layer = stream(module, micro_batch_size=size, graph_size=(counted := GraphSize()))
    layer((x,), {}, 4)
    assert counted.nbytes == sum(kept.values()) + (in_each if size else 0)


# --- memory -------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Remembers its activations without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = (x * self.scale).exp()
        self.made.append(weakref.ref(inner))
        return inner.sin() * inner

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


@pytest.mark.parametrize("size", [None, 2])
def test_no_activation_is_kept_between_forward_and_backward(size: int | None) -> None:
    module, x = Watched(), batch(4, dtype=torch.float32)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    layer = stream(module, micro_batch_size=size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = layer((x,), {}, 4).sum()
        assert module.alive() == 0
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()], (
        "the input alone, where hooks can move it"
    )
    loss.backward()
    assert module.alive() == 0


def test_a_kept_graph_is_let_go_by_backward_or_with_the_result() -> None:
    module, x = Watched(), batch(4, dtype=torch.float32)
    layer = stream(module, moved=False, keep_graph=True)
    loss = layer((x,), {}).sum()
    assert module.alive() == 1
    loss.backward()
    assert module.alive() == 0
    loss = layer((x,), {}).sum()
    del loss
    assert module.alive() == 0


@pytest.mark.parametrize("size", [None, 2])
def test_nothing_is_left_after_a_step(size: int | None) -> None:
    """Without help from the garbage collector: a layer that waits for it would hold a step's memory."""
    module = Watched()
    layer = stream(module, micro_batch_size=size, keep_graph=True)
    x = batch(4, dtype=torch.float32)
    hidden = x * 2
    refs = [weakref.ref(hidden)]
    gc.collect()
    gc.disable()
    try:
        out = layer((hidden,), {}, 4)
        refs.append(weakref.ref(out))
        out.sum().backward()
        del out, hidden
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


# --- errors -------------------------------------------------------------------------------------------------


def test_an_adapter_that_changed_before_backward_is_an_error() -> None:
    module, x = Lora().double(), batch(3)
    loss = weighted(stream(module)((x,), {}))
    with torch.no_grad():
        module.up.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"adapter of layer 3 was changed between forward and backward"):
        loss.backward()


def test_an_input_that_the_layer_changes_is_an_error() -> None:
    module = Fn(lambda scale, x, mask: x * scale * mask.mul_(2))
    with pytest.raises(RuntimeError, match="layer 3 changes an input in place"):
        stream(module)((batch(3), torch.ones(3, 4)), {})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_state_that_the_layer_goes_on_from(
    sim: Simulator, size: int | None, device: str, mode: Callable[[], Any]
) -> None:
    """Without gradients; models without attention keep one so, and write to it in place."""

    def function(scale: Tensor, x: Tensor, state: list[Tensor]) -> Tensor:
        state[0][:, 1].add_(x * scale)
        return state[0][:, 1] * 1

    layer = stream(Fn(function), device=device, micro_batch_size=size)
    with mode():
        x, state = batch(5).detach().clone(), [torch.zeros(5, 2, 4, dtype=torch.float64)]
        for _ in range(3):
            got = layer((x, state), {}, 5)
    want = 3 * x * torch.linspace(0.5, 1.5, 4, dtype=x.dtype)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state[0][:, 1], want)


def test_an_input_that_the_caller_changes_is_an_error() -> None:
    module, x = Fn(lambda scale, x: x * scale), batch(3)
    hidden = x * 2
    loss = weighted(stream(module)((hidden,), {}))
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_recompute_that_makes_something_else_is_an_error() -> None:
    calls: list[int] = []

    def function(scale: Tensor, x: Tensor) -> Any:
        calls.append(1)
        return (x * scale,) * 1 if len(calls) > 1 else (x * scale, x.sin())

    loss = weighted(stream(Fn(function))((batch(3),), {})[0])
    with pytest.raises(RuntimeError, match="layer 3 made 1 tensors in backward and 2 in forward"):
        loss.backward()


def test_a_recompute_without_the_adapter_is_an_error() -> None:
    """PEFT's `disable_adapter()` around backward alone."""
    enabled = [True, False]
    module = Fn(lambda scale, x: x * scale if enabled.pop(0) else x * 2)
    loss = weighted(stream(module)((batch(3).detach(),), {}))
    with pytest.raises(RuntimeError, match="with the adapters as they were then"):
        loss.backward()


def fails_on(call: int) -> tuple[Callable[..., Any], list[int]]:
    def function(scale: Tensor, x: Tensor) -> Tensor:
        if len(calls) == call:
            raise KeyError("out of luck")
        return F.dropout(x * scale, 0.5)

    function, calls = counted(function)
    return function, calls


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_in_the_layer_leaves_nothing_behind(backward: bool) -> None:
    function, calls = fails_on(2 if backward else 1)
    module, x, book = Fn(function), batch(3), Book()
    page: Lists = {"router": []}
    book.page = page
    layer = stream(module, recording=book, keep_graph=True)
    weights = layer.weights
    assert isinstance(weights, FakeWeights)
    if backward:
        loss = weighted(layer((x,), {}))
        state = torch.get_rng_state()
        with pytest.raises(KeyError):
            loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
    else:
        with pytest.raises(KeyError):
            layer((x,), {})
    assert weights.inside == 0 and book.page is page and page["router"] == [] and module.training
    assert torch.is_grad_enabled() and x.grad is None
    calls.clear()
    calls.extend([1] * 5)
    assert layer((x,), {}).requires_grad, "the next step is an ordinary one"


def test_an_interrupt_leaves_nothing_behind() -> None:
    """As any function is about to begin, which is where Python takes notice of Ctrl-C. The error is kept, as
    notebooks do, and with it whatever was open.
    """
    x, at, calls, kept = batch(3), 0, 0, list[BaseException]()

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        # Not in a generator, which may be one that is closed: then the interrupt has nobody to go to.
        calls += not frame.f_code.co_flags & CO_GENERATOR
        if calls == at:
            raise KeyboardInterrupt

    while calls == at:
        module, at, calls = Lora().double(), at + 1, 0
        layer, own = stream(module), [module.down.weight, module.up.weight]
        try:
            sys.settrace(count)
            weighted(layer((x,), {}, 3)).backward()
        except KeyboardInterrupt as interrupt:
            kept[:] = [interrupt]
        finally:
            sys.settrace(None)
        assert [module.down.weight, module.up.weight] == own
        assert_equal(gradients((x * x).sum(), x), (2 * x.detach(),))


def test_no_gradient_comes_after_an_interrupt(sim: Simulator) -> None:
    """Adapters' gradients are added in the accelerator's own thread, beside the layers before them."""
    first, second = (stream(Lora().double(), device="sim:0") for _ in range(2))
    loss = weighted(second((first((batch(3),), {}, 3),), {}, 3))

    def interrupt(direction: Direction) -> None:
        raise KeyboardInterrupt

    first.weights.visit = interrupt  # type: ignore[method-assign, assignment]
    weight = second.module.down.weight
    weight.register_hook(lambda grad: time.sleep(0.1))
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    weight.grad = None
    time.sleep(0.3)
    assert weight.grad is None


def test_a_failed_proof_leaves_every_module_in_its_mode() -> None:
    off = nn.Sequential(nn.Dropout(0.5), Fn(lambda scale, x: x * scale - x.mean(0))).eval()
    off[0].train()
    module = nn.Sequential(nn.Dropout(0.5), off)
    modes = [m.training for m in module.modules()]
    x, state = batch(4), torch.get_rng_state()
    layer = stream(module, micro_batch_size=2)
    for _ in range(2):
        with pytest.raises(MicroBatchError, match=r"layer 3 cannot be run in micro-batches"):
            layer((x,), {}, 4)
        assert [m.training for m in module.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
    assert layer.weights.inside == 0  # type: ignore[attr-defined]


def test_a_successful_proof_leaves_every_module_in_its_mode() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), Fn(lambda scale, x: x * scale))
    module[1].eval()
    modes = [m.training for m in module.modules()]
    stream(module, micro_batch_size=2)((batch(4),), {}, 4)
    assert [m.training for m in module.modules()] == modes


def test_the_proof_is_made_once_for_each_way_of_calling() -> None:
    function, calls = counted(lambda scale, x, mask=None: x * scale if mask is None else x * scale * mask)
    layer = stream(Fn(function), micro_batch_size=2)
    for _ in range(2):
        layer((batch(4),), {}, 4)
    assert len(calls) == 3 + 2 + 2
    layer((batch(4),), {"mask": torch.ones(4, 4)}, 4)
    assert len(calls) == 7 + 3 + 2
    layer((batch(4),), {"mask": torch.ones(1, 4)}, 4)
    assert len(calls) == 12 + 3 + 2, "another tensor carries the batch"
    layer((batch(6),), {}, 6)
    assert len(calls) == 17 + 3


@pytest.mark.parametrize("size", [None, 1])
def test_a_hook_on_a_parameter_runs_once(size: int | None) -> None:
    """It sees the gradient of the whole call, not those of the inner graphs as well."""
    module, x = Lora().double(), batch(3)
    want = gradients(weighted(module(x)), module.up.weight)[0] / 2
    module.up.weight.register_hook(lambda grad: grad / 2)
    weighted(stream(module, micro_batch_size=size)((x,), {}, 3)).backward()
    torch.testing.assert_close(module.up.weight.grad, want)


def test_ragged_outputs_are_refused() -> None:
    """The second row gives fewer lines than the first: their places in the joined tensor are unknown."""
    mask_BS = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]).bool()
    module = Fn(lambda scale, x, mask: x[mask] * scale)
    with pytest.raises(MicroBatchError):
        stream(module, micro_batch_size=1)((batch(3, 4, 4), mask_BS), {}, 3)


def test_parameters_that_were_lent_are_given_back() -> None:
    """Backward comes when the module has its own again, or others."""
    module, x = Lora().double(), batch(3)
    layer, own = stream(module), dict(module.named_parameters())
    lent = {"down.weight": (2 * own["down.weight"].detach()).requires_grad_()}
    streamed = nn.Module()
    streamed.inner, streamed.forward = module, lambda x: layer((x,), {})  # type: ignore[method-assign]
    got = torch.func.functional_call(streamed, {f"inner.{n}": p for n, p in lent.items()}, (x,))
    grads = gradients(weighted(got), x, lent["down.weight"])
    assert all(p is own[n] for n, p in module.named_parameters() if p.requires_grad)
    module.down.weight = nn.Parameter(lent["down.weight"].detach())
    assert_equal(gradients(weighted(layer((x,), {})), x, module.down.weight), grads)


class Box:
    """An object that hides a tensor from autograd's view of arguments."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def test_objects_that_hide_tensors_are_refused() -> None:
    x = batch(3)
    with pytest.raises(TypeError, match="is given a Box"):
        stream(Fn(lambda scale, x, box: x * scale + box.hidden))((x, Box(batch(3, seed=1))), {})
    with pytest.raises(TypeError, match="returns a Box"):
        stream(Fn(lambda scale, x: Box(x * scale)))((x,), {})


def test_a_list_inside_a_tuple_is_written_to() -> None:
    def forward(scale: Tensor, x: Tensor, state: tuple[list[Tensor]]) -> Tensor:
        state[0].append(x * scale)
        return x * 1

    x, state = batch(3), ([],)
    module = Fn(forward)
    stream(module)((x, state), {})
    assert_close(gradients(weighted(state[0][0]), x), gradients(weighted(x * module.scale), x))


class AuxiliaryLoss(nn.Module):
    """A layer that has a loss of its own, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.scale
        return y, y.pow(2).mean() if self.training else x.new_zeros(())


def test_a_loss_of_the_layers_own_cannot_be_split() -> None:
    with pytest.raises(MicroBatchError, match="another thing for each micro-batch"):
        stream(AuxiliaryLoss(), micro_batch_size=1)((batch(3),), {}, 3)


def test_another_mode_in_backward_is_an_error() -> None:
    module, x = Lora(dropout=0.5).double(), batch(4)
    loss = weighted(stream(module)((x,), {}))
    module.eval()
    with pytest.raises(RuntimeError, match="train\\(\\) and eval\\(\\)"):
        loss.backward()


def test_a_parameter_without_values_is_an_error() -> None:
    """torch itself would multiply with whatever is in memory."""
    module = Lora().double()
    layer = stream(module)
    module.up.to("meta")
    with pytest.raises(RuntimeError, match="has no values"):
        layer((batch(3),), {})


class Half(nn.Module):
    """A frozen bf16 projection with an fp32 adapter, which casts its input as PEFT's does."""

    def __init__(self, base: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4).requires_grad_(False)  # fp32, and no adapter stands beside it
        self.wrapped = nn.Module()
        self.wrapped.base = nn.Linear(4, 4, dtype=base).requires_grad_(False)
        self.wrapped.down, self.wrapped.up = nn.Linear(4, 2), nn.Linear(2, 4, bias=False)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        wrapped = self.wrapped
        base = wrapped.base(self.norm(x.float()).to(x.dtype))
        low = wrapped.down(x.to(wrapped.down.weight.dtype))
        if torch.is_grad_enabled():
            self.seen |= {low.dtype, wrapped.up.weight.dtype}
        return (base + wrapped.up(low)).to(x.dtype)


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("size", [None, 2])
def test_an_adapter_computes_in_bf16_beside_a_bf16_weight(size: int | None, keep_graph: bool) -> None:
    module, x = Half(torch.bfloat16), batch(dtype=torch.bfloat16).requires_grad_()
    twin, adapter = copy.deepcopy(module), [p for p in module.parameters() if p.requires_grad]
    layer = stream(module, moved=False, micro_batch_size=size, keep_graph=keep_graph)
    got = gradients(layer((x,), {}, rows=5).float().square().sum(), x, *adapter)
    assert module.seen == {torch.bfloat16}
    assert [g.dtype for g in got if g is not None] == [torch.bfloat16, *[torch.float32] * len(adapter)]

    twin.wrapped.down.bfloat16()
    twin.wrapped.up.bfloat16()
    whole = [p for p in twin.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in whole]
    for rows in x.detach().split(size or 5):
        part = gradients(twin(rows).float().square().sum(), *whole)
        sums = [total + grad for total, grad in zip(sums, part, strict=True) if grad is not None]
    assert_equal(list(got[1:]), sums)


@pytest.mark.parametrize("base", [torch.float32, torch.float16, torch.bfloat16])
def test_beside_other_weights_it_computes_in_its_own_dtype(base: torch.dtype) -> None:
    """Also beside its own half that is frozen."""
    module, x = Half(base), batch(dtype=base).requires_grad_()
    module.wrapped.down.requires_grad_(base != torch.bfloat16)
    stream(module)((x,), {}, rows=5)
    assert module.seen == {torch.float32}
