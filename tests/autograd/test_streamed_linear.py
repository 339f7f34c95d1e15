"""Real logits from a streamed head against `F.linear`."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from airtune.autograd.streamed_linear import streamed_linear
from tests.resident_head import ResidentHead
from tests.sim import Simulator

VOCAB, WIDTH = 101, 16


@pytest.mark.parametrize("chunk_rows", [1, 7, VOCAB])
@pytest.mark.parametrize("block_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("shape", [(1,), (2, 3), (2, 0), ()])
def test_equals_the_linear_layer_in_both_directions(
    chunk_rows: int, block_bytes: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(*shape, WIDTH, requires_grad=True)
    weight_VD, bias_V = torch.randn(VOCAB, WIDTH), torch.randn(VOCAB)
    for bias in (None, bias_V):
        head = ResidentHead(weight_VD, chunk_rows, bias)
        ours, twin = streamed_linear(hidden, head, block_bytes=block_bytes), F.linear(hidden, weight_VD, bias)
        torch.testing.assert_close(ours, twin)
        weights = torch.randn_like(twin)
        (got,) = torch.autograd.grad(ours, hidden, weights)
        (expected,) = torch.autograd.grad(twin, hidden, weights)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert head.crossings == 2


def test_gradcheck() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    head = ResidentHead(torch.randn(9, 4, dtype=torch.float64), 4, torch.randn(9, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda h: streamed_linear(h, head, block_bytes=200), (hidden,))


def test_the_logits_have_the_dtype_of_the_head_and_the_gradient_that_of_the_hidden_states() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, WIDTH, requires_grad=True)
    logits = streamed_linear(
        hidden, ResidentHead(torch.randn(VOCAB, WIDTH).bfloat16(), 7), block_bytes=1 << 20
    )
    assert logits.dtype == torch.bfloat16
    (got,) = torch.autograd.grad(logits.float().square().sum(), hidden)
    assert got.dtype == torch.float32


def test_the_device_takes_no_more_than_the_budget_however_many_the_tokens(sim: Simulator) -> None:
    torch.manual_seed(0)
    weight_VD, hidden = torch.randn(VOCAB, WIDTH), torch.randn(500, WIDTH, requires_grad=True)
    head = ResidentHead(weight_VD.to(sim.device), 40)
    chunk_bytes, before = 2 * 40 * WIDTH * 4, sim.now()
    sim.reset_peak()
    logits, twin = streamed_linear(hidden, head, block_bytes=8000), hidden @ weight_VD.T
    (got,) = torch.autograd.grad(logits.square().sum(), hidden)
    (expected,) = torch.autograd.grad(twin.square().sum(), hidden)
    assert sim.peak() - before <= 8000 + chunk_bytes and sim.now() == before
    assert logits.device == got.device == hidden.device
    torch.testing.assert_close(logits, twin)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


def test_nothing_to_differentiate_nothing_recorded() -> None:
    head = ResidentHead(torch.randn(VOCAB, WIDTH), 7)
    assert not streamed_linear(torch.randn(2, WIDTH), head, block_bytes=1 << 20).requires_grad
    with torch.inference_mode():
        assert streamed_linear(torch.randn(2, WIDTH), head, block_bytes=1 << 20).shape == (2, VOCAB)


def test_a_trainable_head_and_a_wrong_width_are_refused() -> None:
    weight_VD = torch.randn(VOCAB, WIDTH)
    with pytest.raises(ValueError, match="requires a gradient"):
        streamed_linear(
            torch.randn(2, WIDTH), ResidentHead(weight_VD.requires_grad_(), 7), block_bytes=1 << 20
        )
    with pytest.raises(ValueError, match=r"expected hidden states \[\.\., 16\]"):
        streamed_linear(torch.randn(2, 15), ResidentHead(weight_VD.detach(), 7), block_bytes=1 << 20)
