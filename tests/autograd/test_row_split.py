"""A batch is split only where it provably may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from airtune.autograd.row_split import MicroBatchError, RowSplit, prove_split

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("rows", "size", "want"),
    [
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (4, 2, [(0, 2), (2, 4)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
        (5, 4, [(0, 4), (4, 5)]),
    ],
)
def test_every_row_is_in_one_slice(rows: int, size: int, want: list[tuple[int, int]]) -> None:
    split = RowSplit.of([torch.zeros(rows, 2)], rows, size)
    assert [(s.start, s.stop) for s in split.slices] == want
    assert split.batched == {0} and split.rows == rows


@pytest.mark.parametrize(("rows", "size"), [(5, None), (5, 5), (5, 9), (1, 1), (None, 2), (None, None)])
def test_one_micro_batch_takes_everything_as_it_is(rows: int | None, size: int | None) -> None:
    split = RowSplit.of([X, 3], rows, size)
    assert len(split.slices) == 1 and split.batched == frozenset()
    taken = split.take([X, 3], split.slices[0])
    assert taken[0] is X and taken[1] == 3


def test_only_tensors_that_lead_with_the_batch_are_cut() -> None:
    leaves: list[Any] = [
        X,
        torch.zeros(1, 5),
        torch.tensor(5),
        5,
        None,
        torch.zeros(5, dtype=torch.int64),
        "five",
    ]
    split = RowSplit.of(leaves, 5, 2)
    assert split.batched == {0, 5}
    taken = split.take(leaves, split.slices[2])
    assert torch.equal(taken[0], X[4:]) and len(taken[5]) == 1
    assert all(a is b for i, (a, b) in enumerate(zip(taken, leaves, strict=True)) if i not in (0, 5))


@pytest.mark.parametrize(
    ("size", "cut", "want"),
    [
        (None, 2, [(0, 2), (2, 5)]),
        (9, 4, [(0, 4), (4, 5)]),
        (2, 3, [(0, 2), (2, 3), (3, 5)]),
        (2, 0, [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_no_slice_has_rows_of_both_sides_of_a_cut(
    size: int | None, cut: int, want: list[tuple[int, int]]
) -> None:
    split = RowSplit.of([torch.zeros(5, 2)], 5, size, cut)
    assert [(s.start, s.stop) for s in split.slices] == want and split.batched == {0}


# --- the proof ----------------------------------------------------------------------------------------------


def prove(layer: Callable[[Tensor], list[Tensor]], x: Tensor = X) -> tuple[bool, ...]:
    return prove_split(lambda rows: layer(x[rows]), RowSplit.of([x], len(x), 2), 0, "layer 3")


def test_rows_that_mind_their_own_business() -> None:
    assert prove(lambda x: [x.tanh()]) == (True,)


def test_several_lines_a_row() -> None:
    """Routers flatten [B, S, E] to [B*S, E]."""
    assert prove(lambda x: [x.reshape(-1, 1).tanh(), x]) == (True, True)


def test_what_does_not_depend_on_the_rows_is_made_whole() -> None:
    constant = torch.ones(3)
    assert prove(lambda x: [x * 2, constant, torch.tensor(1.5), torch.arange(4)]) == (
        True,
        False,
        False,
        False,
    )


def test_integers_and_booleans_are_compared_exactly() -> None:
    assert prove(lambda x: [x.argmax(-1), x > 0]) == (True, True)


def test_masked_entries_may_be_infinite() -> None:
    assert prove(lambda x: [x.masked_fill(x > 0, -torch.inf)]) == (True,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_is_no_mixing(dtype: torch.dtype) -> None:
    noise = iter([0.0, 2.0, -2.0])
    x = X.to(dtype)
    assert prove(lambda x: [x * (1 + next(noise) * torch.finfo(x.dtype).eps)], x) == (True,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "layer",
    [
        lambda x: [x - x.mean(0, keepdim=True)],
        lambda x: [x.flip(0)],
        lambda x: [x.cumsum(0)],
        lambda x: [x.mean()],
        lambda x: [x.T],
        lambda x: [x.sum(0)],
        lambda x: [x, x.argmax(0)],
        lambda x: [torch.cat([x, x])],
    ],
    ids=["batch norm", "reversed", "running sum", "mean", "rows last", "sum", "index", "stacked copies"],
)
def test_rows_that_see_one_another_are_refused(
    layer: Callable[[Tensor], list[Tensor]], dtype: torch.dtype
) -> None:
    with pytest.raises(
        MicroBatchError, match=r"layer 3 .* output for two rows .* Set micro_batch_size to None"
    ):
        prove(layer, X.to(dtype))


def test_another_number_of_tensors_is_refused() -> None:
    with pytest.raises(MicroBatchError, match="returns more or fewer tensors"):
        prove(lambda x: [x] * len(x))


def test_a_layer_that_needs_the_whole_batch_is_refused() -> None:
    with pytest.raises(MicroBatchError, match=r"fails on one or two rows .*shape"):
        prove(lambda x: [x.view(5, 3)])


def test_a_layer_without_a_batch_is_refused() -> None:
    split = RowSplit.of([torch.zeros(1, 5), 5], 5, 2)
    with pytest.raises(MicroBatchError, match="none of its inputs has the batch"):
        prove_split(lambda rows: [], split, 0, "layer 3")


def test_the_refusal_is_a_value_error() -> None:
    assert issubclass(MicroBatchError, ValueError)
