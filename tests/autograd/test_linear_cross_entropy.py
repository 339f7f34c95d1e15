"""The one-pass loss against its naive twin: `F.cross_entropy` over logits that are all there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from airtune.autograd.linear_cross_entropy import Step, linear_cross_entropy
from tests.resident_head import ResidentHead
from tests.sim import Simulator

VOCAB, WIDTH = 101, 16
SOFTCAP: tuple[Step, ...] = (lambda z: z / 3.0, torch.tanh, lambda z: z * 3.0)
STEPS: dict[str, tuple[Step, ...]] = {
    "none": (),
    "softcap": SOFTCAP,
    "scale": (lambda z: z * 0.25,),
    "divide": (lambda z: z / 8.0,),
    "cast": (Tensor.float, *SOFTCAP),
}


def problem(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden_ND, weight_VD, bias_V, labels_N), seeded; the first and the last row are among the labels."""
    make = torch.Generator().manual_seed(tokens)
    hidden_ND = torch.randn(tokens, WIDTH, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(VOCAB, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    bias_V = torch.randn(VOCAB, generator=make, dtype=torch.float64).to(dtype)
    labels_N = torch.randint(0, VOCAB, (tokens,), generator=make)
    labels_N[0], labels_N[-1] = 0, VOCAB - 1
    return hidden_ND, weight_VD, bias_V, labels_N


def naive(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, steps: tuple[Step, ...]
) -> Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V)
    for step in steps:
        logits_NV = step(logits_NV)
    wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return F.cross_entropy(wide, labels_N, reduction="sum")


def gradient(loss: Tensor, hidden_ND: Tensor) -> Tensor:
    return torch.autograd.grad(loss, hidden_ND)[0]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("chunk_rows", [1, 7, VOCAB])
@pytest.mark.parametrize(("tokens", "block_bytes"), [(1, 1), (6, 1), (6, 5000), (6, 1 << 20)])
def test_equals_the_naive_loss_and_gradient(
    steps: str, chunk_rows: int, tokens: int, block_bytes: int
) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(tokens, torch.float32)
    for bias in (None, bias_V):
        head = ResidentHead(weight_VD, chunk_rows, bias)
        ours = linear_cross_entropy(hidden_ND, head, labels_N, steps=STEPS[steps], block_bytes=block_bytes)
        twin = naive(hidden_ND, weight_VD, bias, labels_N, STEPS[steps])
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient(ours, hidden_ND), gradient(twin, hidden_ND), rtol=1e-5, atol=1e-6)
        assert head.crossings == 1


@pytest.mark.parametrize("steps", ["none", "softcap"])
def test_gradcheck(steps: str) -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(4, torch.float64)
    head = ResidentHead(weight_VD, 7, bias_V)
    assert torch.autograd.gradcheck(
        lambda h: linear_cross_entropy(h, head, labels_N, steps=STEPS[steps], block_bytes=3000), (hidden_ND,)
    )


@pytest.mark.parametrize("steps", ["none", "softcap"])
def test_bf16_is_as_close_to_the_truth_as_the_naive_one(steps: str) -> None:
    """Both round logits and probabilities to 8 bits, each in its order: each is judged against fp64."""
    hidden_ND, weight_VD, bias_V, labels_N = problem(64, torch.bfloat16)
    exact_ND = hidden_ND.detach().double().requires_grad_()
    truth = naive(exact_ND, weight_VD.double(), bias_V.double(), labels_N, STEPS[steps])
    twin = naive(hidden_ND, weight_VD, bias_V, labels_N, STEPS[steps])
    ours = linear_cross_entropy(
        hidden_ND, ResidentHead(weight_VD, 7, bias_V), labels_N, steps=STEPS[steps], block_bytes=1 << 20
    )

    def error(loss: Tensor) -> float:
        return (gradient(loss, hidden_ND).double() - gradient_of_truth).norm().item()

    gradient_of_truth = gradient(truth, exact_ND)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, twin, rtol=1e-4, atol=0)
    # 1.1: equal but for the luck of rounding. Sums over chunks are fp32, so many of them cost nothing.
    assert error(ours) < 1.1 * error(twin)


def test_a_token_known_well_keeps_its_small_gradient_in_bf16() -> None:
    """At a probability of 0.999 the label's factor is -0.001: rounding 0.999 to bf16 may lose twice that."""
    weight_VD = torch.eye(8, dtype=torch.bfloat16)
    hidden_ND = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden_ND[0, 3] = 9.0
    hidden_ND.requires_grad_()
    labels_N = torch.tensor([3])
    ours = linear_cross_entropy(hidden_ND, ResidentHead(weight_VD, 3), labels_N, block_bytes=1 << 20)
    truth = naive(hidden_ND.double(), weight_VD.double(), None, labels_N, ())
    torch.testing.assert_close(gradient(ours, hidden_ND), gradient(truth, hidden_ND), rtol=2**-7, atol=0)


def test_a_token_known_well_has_a_loss_of_its_own_size() -> None:
    """A loss of 1e-6 at a logit of 40, beside which fp32 leaves 4e-6."""
    hidden_ND, labels_N = torch.zeros(1, 8), torch.tensor([3])
    hidden_ND[0, :4] = torch.tensor([25.0, 24.0, 26.0, 40.0])
    hidden_ND.requires_grad_()
    ours = linear_cross_entropy(hidden_ND, ResidentHead(torch.eye(8), 3), labels_N, block_bytes=1 << 20)
    truth = naive(hidden_ND.double(), torch.eye(8).double(), None, labels_N, ())
    torch.testing.assert_close(ours.double(), truth, rtol=0.05, atol=0)
    torch.testing.assert_close(gradient(ours, hidden_ND), gradient(truth, hidden_ND), rtol=0.05, atol=0)


def test_fp32_hidden_states_meet_a_bf16_head_in_bf16() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD.bfloat16(), 7)
    ours = linear_cross_entropy(hidden_ND, head, labels_N, block_bytes=1 << 20)
    torch.testing.assert_close(
        ours, naive(hidden_ND.bfloat16(), head.weight_VD, None, labels_N, ()), rtol=1e-5, atol=0
    )
    assert gradient(ours, hidden_ND).dtype == torch.float32


def test_autocast_outside_changes_nothing() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD, 7)
    plain = linear_cross_entropy(hidden_ND, head, labels_N, block_bytes=1 << 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_cross_entropy(hidden_ND, head, labels_N, block_bytes=1 << 20)
    assert torch.equal(plain, inside)
    assert torch.equal(gradient(plain, hidden_ND), gradient(inside, hidden_ND))


def test_the_gradient_is_scaled_by_what_comes_in() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD, 7)
    loss = linear_cross_entropy(hidden_ND, head, labels_N, block_bytes=1 << 20)
    once = torch.autograd.grad(loss, hidden_ND, retain_graph=True)[0]
    torch.testing.assert_close(gradient(loss * -3.0 / 7, hidden_ND), once * (-3.0 / 7))


def test_the_gradient_reaches_what_made_the_hidden_states() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    loss = linear_cross_entropy(hidden_ND.sin(), ResidentHead(weight_VD, 7), labels_N, block_bytes=1 << 20)
    twin = naive(hidden_ND.sin(), weight_VD, None, labels_N, ())
    torch.testing.assert_close(gradient(loss, hidden_ND), gradient(twin, hidden_ND), rtol=1e-5, atol=1e-6)


def test_without_a_gradient_only_the_loss_is_made() -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(6, torch.float32)
    head = ResidentHead(weight_VD, 7, bias_V)
    wanted = linear_cross_entropy(hidden_ND, head, labels_N, steps=SOFTCAP, block_bytes=1 << 20)
    with torch.no_grad(), Allocations() as allocations:
        quiet = linear_cross_entropy(hidden_ND, head, labels_N, steps=SOFTCAP, block_bytes=1 << 20)
    assert torch.equal(quiet, wanted.detach()) and not quiet.requires_grad
    assert (
        "aten.mm.default" not in allocations.operations
        and "aten.addmm_.default" not in allocations.operations
    )
    assert not linear_cross_entropy(hidden_ND.detach(), head, labels_N, block_bytes=1 << 20).requires_grad


def test_no_tokens_are_a_zero_that_still_has_a_gradient() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD, 7)
    loss = linear_cross_entropy(hidden_ND[:0], head, labels_N[:0], block_bytes=1 << 20)
    assert loss.item() == 0 and loss.dtype == torch.float32 and head.crossings == 0
    assert torch.equal(gradient(loss, hidden_ND), torch.zeros_like(hidden_ND))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    spoilt_ND = hidden_ND.detach().clone()
    spoilt_ND[2, 3] = bad
    spoilt_ND.requires_grad_()
    loss = linear_cross_entropy(spoilt_ND, ResidentHead(weight_VD, 7), labels_N, block_bytes=1 << 20)
    assert not loss.isfinite()
    assert not gradient(loss, spoilt_ND).isfinite().all()


def test_rows_that_a_bias_rules_out_count_for_nothing() -> None:
    """A whole chunk of -inf, the first, the last or one between, is as if it were not there."""
    hidden_ND, weight_VD, bias_V, _ = problem(5, torch.float32)
    labels_N = torch.arange(40, 45)
    for ruled_out in (slice(0, 14), slice(49, 63), slice(98, VOCAB)):
        bias = bias_V.clone()
        bias[ruled_out] = -torch.inf
        ours = linear_cross_entropy(
            hidden_ND, ResidentHead(weight_VD, 7, bias), labels_N, block_bytes=1 << 20
        )
        twin = naive(hidden_ND, weight_VD, bias, labels_N, ())
        torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient(ours, hidden_ND), gradient(twin, hidden_ND), rtol=1e-5, atol=1e-6)


class Allocations(TorchDispatchMode):
    """The largest result, in elements, and the names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.operations.add(str(func))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max(self.largest, *(leaf.numel() for leaf in results), 0)
        return out


@pytest.mark.parametrize("steps", ["none", "softcap"])
def test_nothing_of_the_size_of_the_logits_is_made(steps: str) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(64, torch.float32)
    with Allocations() as allocations:
        loss = linear_cross_entropy(
            hidden_ND, ResidentHead(weight_VD, 20), labels_N, steps=STEPS[steps], block_bytes=8000
        )
        gradient(loss, hidden_ND)
    # All tokens have hidden states, their gradient and the labels' rows; a few at a time have logits.
    assert allocations.largest == max(hidden_ND.numel(), 20 * WIDTH)
    assert allocations.largest < 64 * VOCAB // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", ["none", "softcap", "cast"])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_the_device_takes_no_more_than_the_budget_however_many_the_tokens(
    sim: Simulator, dtype: torch.dtype, steps: str, with_gradient: bool
) -> None:
    """Few tokens stay there from chunk to chunk; more than fit live on the CPU and commute."""
    for tokens in (40, 1000):
        hidden_ND, weight_VD, bias_V, labels_N = problem(tokens, dtype)
        head = ResidentHead(weight_VD.to(sim.device), 40, bias_V.to(sim.device))
        chunk_bytes, before = 2 * 40 * (WIDTH + 1) * dtype.itemsize, sim.now()
        sim.reset_peak()
        with torch.set_grad_enabled(with_gradient):
            ours = linear_cross_entropy(hidden_ND, head, labels_N, steps=STEPS[steps], block_bytes=20_000)
        assert sim.peak() - before <= 20_000 + chunk_bytes
        # What waits for backward waits where the hidden states are. (Autograd's thread lets go a bit later.)
        deadline_s = time.monotonic() + 5
        while sim.now() > before and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert sim.now() == before
        assert ours.device.type == "cpu" and head.crossings == 1
        twin = naive(hidden_ND, weight_VD, bias_V, labels_N, STEPS[steps])
        # Other block sizes sum in another order: 24 bits in fp32; in bf16 the logits are rounded to 8.
        torch.testing.assert_close(ours, twin, rtol=1e-6 if dtype == torch.float32 else 1e-4, atol=1e-6)
        if with_gradient:
            tolerance = 1e-5 if dtype == torch.float32 else 2**-5
            torch.testing.assert_close(
                gradient(ours, hidden_ND), gradient(twin, hidden_ND), rtol=tolerance, atol=tolerance
            )


def test_a_trainable_head_is_refused() -> None:
    hidden_ND, weight_VD, bias_V, labels_N = problem(5, torch.float32)
    for head in (
        ResidentHead(weight_VD.clone().requires_grad_(), 7),
        ResidentHead(weight_VD, 7, bias_V.clone().requires_grad_()),
    ):
        with pytest.raises(ValueError, match="requires a gradient"):
            linear_cross_entropy(hidden_ND, head, labels_N, block_bytes=1 << 20)


class LosesRows(ResidentHead):
    lost = 1

    def chunks(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        for number, chunk in enumerate(super().chunks()):
            if number != self.lost:
                yield chunk


class LosesItsTail(LosesRows):
    lost = VOCAB // 7


def test_chunks_that_are_not_the_vocabulary_are_refused() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    with pytest.raises(ValueError, match=r"from row 7 on, got a chunk .* from row 14 on"):
        linear_cross_entropy(hidden_ND, LosesRows(weight_VD, 7), labels_N, block_bytes=1 << 20)
    with pytest.raises(ValueError, match="expected 101 rows of the output projection, got 98"):
        linear_cross_entropy(hidden_ND, LosesItsTail(weight_VD, 7), labels_N, block_bytes=1 << 20)


@pytest.mark.parametrize("label", [-100, -1, VOCAB])
def test_labels_outside_the_vocabulary_are_refused(label: int) -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    labels_N[2] = label
    with pytest.raises(ValueError, match="labels lie in"):
        linear_cross_entropy(hidden_ND, ResidentHead(weight_VD, 7), labels_N, block_bytes=1 << 20)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_ND, weight_VD, _, labels_N = problem(5, torch.float32)
    head = ResidentHead(weight_VD, 7)
    for hidden, labels in (
        (hidden_ND[:, 1:], labels_N),
        (hidden_ND, labels_N[1:]),
        (hidden_ND[None], labels_N[None]),
    ):
        with pytest.raises(ValueError, match="expected hidden states"):
            linear_cross_entropy(hidden, head, labels, block_bytes=1 << 20)
