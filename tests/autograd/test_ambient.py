"""A second run sees the random state and the casts of the first, and leaves the caller's own alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from airtune.autograd.ambient import Ambient, kept_rng

CPU = torch.device("cpu")


def autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_draws_are_those_that_followed_the_snapshot_however_often() -> None:
    snapshot = Ambient.capture(CPU)
    first = torch.rand(3)
    for _ in range(2):
        with snapshot.restored():
            assert torch.equal(torch.rand(3), first)


def test_the_caller_goes_on_as_if_nothing_had_been_drawn() -> None:
    snapshot = Ambient.capture(CPU)
    torch.rand(3)
    state = torch.get_rng_state()
    with snapshot.restored():
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_later_seed_does_not_reach_the_snapshot() -> None:
    torch.manual_seed(3)
    snapshot = Ambient.capture(CPU)
    want = torch.rand(2)
    torch.manual_seed(4)
    with snapshot.restored():
        assert torch.equal(torch.rand(2), want)


@pytest.mark.parametrize("restore", [lambda: Ambient.capture(CPU).restored(), lambda: kept_rng(CPU)])
def test_state_comes_back_after_an_error(restore: Callable[[], AbstractContextManager[None]]) -> None:
    state, casts = torch.get_rng_state(), autocast()
    with pytest.raises(KeyError), restore():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
    assert autocast() == casts


def test_kept_rng_keeps_nothing_else() -> None:
    drawn: list[Tensor] = []
    with kept_rng(CPU):
        drawn.append(torch.rand(2))
    drawn.append(torch.rand(2))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("then", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("now", [torch.bfloat16, torch.float16, None])
def test_casts_are_those_of_the_snapshot(then: torch.dtype | None, now: torch.dtype | None) -> None:
    with torch.autocast("cpu", dtype=then, enabled=then is not None):
        snapshot, wanted = Ambient.capture(CPU), product_dtype()
    assert wanted == (then or torch.float32)
    with torch.autocast("cpu", dtype=now, enabled=now is not None):
        outside = autocast()
        with snapshot.restored():
            assert product_dtype() == wanted
        assert autocast() == outside
    assert product_dtype() == torch.float32
