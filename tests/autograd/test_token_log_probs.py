"""Log-probabilities and first choices of tokens against their naive twin, which holds every logit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from airtune.autograd.linear_cross_entropy import Step, linear_cross_entropy
from airtune.autograd.token_log_probs import token_log_probs
from tests.autograd.test_linear_cross_entropy import STEPS, VOCAB, Allocations, problem
from tests.resident_head import ResidentHead
from tests.sim import Simulator


def naive(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens_N: Tensor, steps: tuple[Step, ...]
) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V)
    for step in steps:
        logits_NV = step(logits_NV)
    log_probs_NV = logits_NV.float().log_softmax(-1)
    return log_probs_NV.gather(1, tokens_N[:, None])[:, 0], logits_NV.argmax(-1) == tokens_N


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("chunk_rows", [1, 7, VOCAB])
@pytest.mark.parametrize(("tokens", "block_bytes"), [(1, 1), (6, 1), (6, 5000), (6, 1 << 20)])
def test_equals_the_naive_log_softmax(steps: str, chunk_rows: int, tokens: int, block_bytes: int) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(tokens, torch.float32)
    for bias in (None, bias_V):
        best_N = F.linear(hidden_ND, weight_VD, bias).argmax(-1)
        tokens_N = torch.where(torch.arange(tokens) % 2 == 0, best_N, labels_N)
        head = ResidentHead(weight_VD, chunk_rows, bias)
        ours = token_log_probs(hidden_ND, head, tokens_N, steps=STEPS[steps], block_bytes=block_bytes)
        log_prob_N, is_top_N = naive(hidden_ND, weight_VD, bias, tokens_N, STEPS[steps])
        torch.testing.assert_close(ours.log_prob, log_prob_N, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.is_top, is_top_N) and is_top_N.any()
        assert ours.log_prob.dtype == torch.float32 and not ours.log_prob.requires_grad
        assert head.crossings == 1


def test_sums_to_the_loss() -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(6, torch.bfloat16)
    head = ResidentHead(weight_VD, 7, bias_V)
    loss = linear_cross_entropy(hidden_ND, head, labels_N, steps=STEPS["softcap"], block_bytes=1 << 20)
    ours = token_log_probs(hidden_ND, head, labels_N, steps=STEPS["softcap"], block_bytes=1 << 20)
    torch.testing.assert_close(-ours.log_prob.sum(), loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk_rows", [1, 3, 8])
def test_of_equal_logits_the_first_is_the_choice_as_for_argmax(chunk_rows: int) -> None:
    """In bf16 the two best of many tokens are equal: the tie must fall as it does in generation."""
    weight_VD = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, -1.0, 2.0, 0.5])[:, None]
    tokens_N = torch.arange(8)
    ours = token_log_probs(
        torch.ones(8, 1), ResidentHead(weight_VD, chunk_rows), tokens_N, block_bytes=1 << 20
    )
    assert ours.is_top.tolist() == [token == 1 for token in range(8)]


def test_rows_that_a_bias_rules_out_count_for_nothing() -> None:
    hidden_ND, weight_VD, bias_V, _ = problem(5, torch.float32)
    tokens_N = torch.tensor([0, 20, 40, 60, 100])
    for ruled_out in (slice(0, 14), slice(49, 63), slice(98, VOCAB)):
        bias = bias_V.clone()
        bias[ruled_out] = -torch.inf
        ours = token_log_probs(hidden_ND, ResidentHead(weight_VD, 7, bias), tokens_N, block_bytes=1 << 20)
        log_prob_N, is_top_N = naive(hidden_ND, weight_VD, bias, tokens_N, ())
        torch.testing.assert_close(ours.log_prob, log_prob_N, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.is_top, is_top_N)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    spoilt_ND = hidden_ND.detach().clone()
    spoilt_ND[2, 3] = bad
    ours = token_log_probs(spoilt_ND, ResidentHead(weight_VD, 7), labels_N, block_bytes=1 << 20)
    assert [bool(x) for x in ours.log_prob.isfinite()] == [True, True, False, True, True]


def test_no_tokens_cost_no_crossing() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD, 7)
    ours = token_log_probs(hidden_ND[:0], head, labels_N[:0], block_bytes=1 << 20)
    assert ours.log_prob.shape == ours.is_top.shape == (0,) and head.crossings == 0


@pytest.mark.parametrize("steps", ["none", "softcap"])
def test_nothing_of_the_size_of_the_logits_is_made(steps: str) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(64, torch.float32)
    with Allocations() as allocations:
        token_log_probs(
            hidden_ND, ResidentHead(weight_VD, 20), labels_N, steps=STEPS[steps], block_bytes=4000
        )
    assert allocations.largest <= max(hidden_ND.numel(), 20 * weight_VD.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", ["none", "softcap", "cast"])
def test_the_device_takes_no_more_than_the_budget_however_many_the_tokens(
    sim: Simulator, dtype: torch.dtype, steps: str
) -> None:
    for tokens in (40, 1000):
        hidden_ND, weight_VD, bias_V, labels_N = problem(tokens, dtype)
        head = ResidentHead(weight_VD.to(sim.device), 40, bias_V.to(sim.device))
        chunk_bytes, before = 2 * 40 * (weight_VD.shape[1] + 1) * dtype.itemsize, sim.now()
        sim.reset_peak()
        ours = token_log_probs(hidden_ND, head, labels_N, steps=STEPS[steps], block_bytes=20_000)
        sums_bytes = tokens * 64  # what a token keeps, and its copies at the end
        assert sim.peak() - before <= 20_000 + chunk_bytes + sums_bytes
        assert ours.log_prob.device.type == ours.is_top.device.type == "cpu" and head.crossings == 1
        log_prob_N, is_top_N = naive(hidden_ND, weight_VD, bias_V, labels_N, STEPS[steps])
        # Other block sizes sum in another order; in bf16 that rounds some logits to a neighbour.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-4
        torch.testing.assert_close(ours.log_prob, log_prob_N, rtol=tolerance, atol=tolerance)
        assert (ours.is_top == is_top_N).float().mean() >= (1 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize("token", [-100, -1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    labels_N[2] = token
    with pytest.raises(ValueError, match="labels lie in"):
        token_log_probs(hidden_ND, ResidentHead(weight_VD, 7), labels_N, block_bytes=1 << 20)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    for hidden, tokens in ((hidden_ND[:, 1:], labels_N), (hidden_ND, labels_N[1:])):
        with pytest.raises(ValueError, match="expected hidden states"):
            token_log_probs(hidden, ResidentHead(weight_VD, 7), tokens, block_bytes=1 << 20)
