"""Deferred logits against real ones: what is recorded, what is not, and what then happens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from airtune.model import deferred_logits
from airtune.model.deferred_logits import DeferredLogits
from airtune.model.head import causal_lm_loss
from tests.resident_head import ResidentHead

VOCAB = 101


def deferred(shape: tuple[int, ...] = (2, 4)) -> tuple[Tensor, ResidentHead, DeferredLogits, Tensor]:
    """(hidden [.., D], head, deferred logits, the real ones)"""
    torch.manual_seed(0)
    hidden = torch.randn(*shape, 16, requires_grad=True)
    head = ResidentHead(torch.randn(VOCAB, 16), 7)
    return hidden, head, DeferredLogits(hidden, head, 4000), hidden @ head.weight_VD.T


POINT = torch.tensor(3.0)


def in_place(logits: Tensor) -> Tensor:
    logits /= 3.0
    logits *= POINT
    logits -= 1
    logits += 2
    return logits.div_(2).tanh_()


DEFERRED_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softcap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "softcap, other spellings": lambda z: torch.mul(3, torch.tanh(torch.div(z, POINT))),
    "number first": lambda z: 2.0 * (1.0 - z) + 1,
    "0-d tensor first": lambda z: POINT * z,
    "reciprocal": lambda z: 1.0 / (z * 0.1 + 9.0),
    "in place": in_place,
    "casts": lambda z: z.double().to(torch.float32).to(dtype=torch.float64).type(torch.float32) * 2,
    "bf16 and back": lambda z: z.bfloat16().float(),
    "contiguous": lambda z: z.contiguous() * 2,
    "vocabulary without its padding": lambda z: (z * 2)[..., :90] / 3,
}


@pytest.mark.parametrize("case", DEFERRED_STEPS)
def test_elementwise_steps_are_recorded_and_replayed(case: str) -> None:
    hidden, head, logits, real = deferred()
    ours, twin = DEFERRED_STEPS[case](logits), DEFERRED_STEPS[case](real.clone())
    assert isinstance(ours, DeferredLogits) and ours.full is None and head.crossings == 0
    assert (ours.shape, ours.dtype, ours.device) == (twin.shape, twin.dtype, twin.device)
    assert ours.requires_grad and (ours.ndim, ours.size(-1), len(ours)) == (3, twin.size(-1), 2)

    labels_BS, vocab = torch.randint(0, 90, (2, 4)), twin.shape[-1]
    loss, expected = causal_lm_loss(ours, labels_BS, vocab), ForCausalLMLoss(twin, labels_BS, vocab)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden)[0],
        torch.autograd.grad(expected, hidden)[0],
        rtol=1e-5,
        atol=1e-6,
    )
    torch.testing.assert_close(ours[:], twin)


def test_a_scale_that_is_trained_or_not_one_number_is_not_recorded() -> None:
    hidden, _, logits, real = deferred()
    for scale in (torch.tensor(2.0, requires_grad=True), torch.randn(VOCAB, requires_grad=True)):
        got = torch.autograd.grad((logits * scale).square().mean(), (hidden, scale), retain_graph=True)
        expected = torch.autograd.grad((real * scale).square().mean(), (hidden, scale), retain_graph=True)
        torch.testing.assert_close(got, expected)
    assert not isinstance(logits * torch.ones(VOCAB), DeferredLogits)


def test_a_recorded_number_is_the_number_of_that_moment() -> None:
    _, _, logits, real = deferred()
    scale = torch.tensor(2.0)
    scaled = logits * scale
    scale.fill_(5.0)
    torch.testing.assert_close(scaled[:], real * 2.0)


def test_logits_that_were_changed_by_hand_are_what_the_loss_sees() -> None:
    """As in a model that forbids some tokens in place."""
    hidden, head, logits, real = deferred()
    real = real.clone()
    for each in (logits, real):
        each[:, :, 10:20] = -1e4
        each.masked_fill_(torch.arange(VOCAB) == 30, -1e4)
    labels_BS = torch.randint(50, VOCAB, (2, 4))
    ours, twin = causal_lm_loss(logits, labels_BS, VOCAB), ForCausalLMLoss(real, labels_BS, VOCAB)
    torch.testing.assert_close(ours, twin)
    torch.testing.assert_close(torch.autograd.grad(ours, hidden), torch.autograd.grad(twin, hidden))
    assert head.crossings == 2  # once for the logits, once for their gradient


def test_what_needs_full_logits_gets_them_once_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    deferred_logits._tell.cache_clear()
    _, head, logits, real = deferred()
    with caplog.at_level(logging.INFO, logger="airtune.model.deferred_logits"):
        torch.testing.assert_close(logits.softmax(-1), real.softmax(-1))
        torch.testing.assert_close(torch.cat([logits, logits]), torch.cat([real, real]))
        torch.testing.assert_close(logits.detach().numpy(), real.detach().numpy())
        torch.testing.assert_close(logits[..., 1:], real[..., 1:])
        assert logits.mT.shape == real.mT.shape
    assert head.crossings == 1
    assert [record.getMessage() for record in caplog.records if "softmax" in record.getMessage()]
    assert len(caplog.records) == 1
    assert "DeferredLogits([2, 4, 101]" in repr(logits)


def test_detached_logits_stay_deferred() -> None:
    _, head, logits, real = deferred()
    detached = logits.detach()
    assert isinstance(detached, DeferredLogits) and head.crossings == 0 and not detached.requires_grad
    torch.testing.assert_close(detached[:], real.detach())
    assert not detached[:].requires_grad
