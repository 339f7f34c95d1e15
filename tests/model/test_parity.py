"""Streamed training is resident training: every adapter tensor, not only the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import airtune
from tests import zoo
from tests.twins import (
    adapter,
    gradients,
    ragged_batch,
    relative_error,
    resident,
    split_by_rows,
    streamed,
)


def train(
    model: nn.Module, batch: dict[str, Tensor], steps: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of a few AdamW steps under a fixed seed."""
    model.train()
    optimizer = torch.optim.AdamW(adapter(model).values(), lr=1e-3)
    losses, seen = [], []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        seen.append({name: grad.clone() for name, grad in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 3])
def test_three_steps_in_micro_batches(tmp_path: Path, micro_batch_size: int | None, dropout: float) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    twin = resident("llama", folder, dropout=dropout)
    if micro_batch_size is not None:
        split_by_rows(twin, 4, micro_batch_size)
    losses, grads = train(twin, batch, 3)
    got = streamed("llama", folder, dropout=dropout, micro_batch_size=micro_batch_size)
    got_losses, got_grads = train(got, batch, 3)
    assert got_losses == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(got_grads, grads, strict=True):
        assert relative_error(mine, theirs) < 1e-5
    assert relative_error(adapter(got), adapter(twin)) < 1e-5


@pytest.mark.parametrize("places", ["1KB", None, "1GB"])
def test_any_number_of_places(tmp_path: Path, places: str | None) -> None:
    """Layers that must be converted live in slots on the CPU too: float32 compute from a bf16 file."""
    folder, batch = zoo.make("mixtral", tmp_path, dtype=torch.bfloat16), ragged_batch()
    _, grads = train(resident("mixtral", folder), batch, 3)
    if places == "1KB":
        says = r"limited to 1,000 bytes.*51,712 for the largest layer.*196,608 for experts"
        with pytest.raises(ValueError, match=says):
            streamed("mixtral", folder, host_memory=places)
        places = "950KB"  # one layer, and the head
    got = streamed("mixtral", folder, host_memory=places, poison=True, micro_batch_size=2)
    _, got_grads = train(got, batch, 3)
    for mine, theirs in zip(got_grads, grads, strict=True):
        assert relative_error(mine, theirs) < 1e-5


# Its routers and indexers amplify rounding thirtyfold: with float64 layers the same comparison gives 1e-6,
# which is what the float32 loss leaves.
TOLERANCE = {"qwen4_exp__vl": 1e-4}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_kind_of_decoder(tmp_path: Path, name: str) -> None:
    """One step: loss, every adapter gradient, with dropout, a padded row, and the auxiliary loss where
    there is one.
    """
    folder, batch = zoo.make(name, tmp_path), ragged_batch(2, 16)
    twin, got = resident(name, folder, dropout=0.1), streamed(name, folder, dropout=0.1)
    for a, b in zip(adapter(got).values(), adapter(twin).values(), strict=True):
        assert torch.equal(a, b), "initialised as PEFT does"
    options = {"output_router_logits": True} if name in ("mixtral", "qwen3_moe_mixed", "gpt_oss") else {}
    losses, grads = train(twin, {**batch, **options}, 1)
    got_losses, got_grads = train(got, {**batch, **options}, 1)
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert relative_error(got_grads[0], grads[0]) < TOLERANCE.get(name, 1e-5)


@pytest.mark.parametrize("name", ["gemma4_text", "mixtral", "kimi_k25", "qwen3_5__vl", "qwen4_exp__vl"])
def test_side_doors_in_micro_batches(tmp_path: Path, name: str) -> None:
    """Shared keys and values, recorded router logits, residual streams: split by rows and joined again."""
    folder, batch = zoo.make(name, tmp_path, dtype=torch.float32), ragged_batch(2, 16)
    options = {"output_router_logits": True} if name == "mixtral" else {}
    _, grads = train(resident(name, folder).double(), {**batch, **options}, 1)
    got = streamed(name, folder, micro_batch_size=1, dtype=torch.float64)
    for parameter in adapter(got).values():
        parameter.data = parameter.data.double()
    _, got_grads = train(got, {**batch, **options}, 1)
    assert relative_error(got_grads[0], grads[0]) < 1e-5  # their losses are computed in float32


def test_bf16_base_is_within_its_own_noise(tmp_path: Path) -> None:
    """The distance of bf16 training from float32 training is bf16's; streaming adds nothing to it."""
    folder, batch = zoo.make("llama", tmp_path, dtype=torch.bfloat16), ragged_batch()
    _, exact = train(resident("llama", folder), batch, 1)
    _, theirs = train(resident("llama", folder, dtype=torch.bfloat16), batch, 1)
    got = streamed("llama", folder, dtype=torch.bfloat16, micro_batch_size=2)
    assert {p.dtype for p in adapter(got).values()} == {torch.float32}
    _, mine = train(got, batch, 1)
    noise = relative_error(theirs[0], exact[0])
    assert relative_error(mine[0], exact[0]) < 1.5 * noise


def test_dropout_gradient_is_the_slope_of_the_loss(tmp_path: Path) -> None:
    """Finite differences under a fixed seed: a recompute that drew another mask would be off by a factor."""
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = streamed("llama", folder, dropout=0.3, micro_batch_size=2, dtype=torch.float64)
    model.train()
    parameters = adapter(model)
    for p in parameters.values():
        p.data = p.data.double()

    def loss() -> Tensor:
        torch.manual_seed(5)
        return model(**batch).loss

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    slope = sum((p.grad * direction[n]).sum() for n, p in parameters.items() if p.grad is not None)
    values = []
    for step in (2e-4, -2e-4):  # transformers computes the loss itself in float32
        with torch.no_grad():
            for n, p in parameters.items():
                p.add_(direction[n], alpha=step)
        values.append(loss().item())
        with torch.no_grad():
            for n, p in parameters.items():
                p.sub_(direction[n], alpha=step)
    assert (values[0] - values[1]) / 4e-4 == pytest.approx(float(slope), rel=2e-3)


def test_an_open_cache_does_not_reach_the_recompute(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    _, grads = train(resident("llama", folder), {**batch, "use_cache": False}, 1)
    _, got_grads = train(streamed("llama", folder), {**batch, "use_cache": True}, 1)
    assert relative_error(got_grads[0], grads[0]) < 1e-5


def test_accumulation_and_a_second_backward(tmp_path: Path) -> None:
    """Gradients add up in `.grad`, and a retained graph can be walked twice: it is an ordinary module."""
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = streamed("llama", folder).train()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {n: g.clone() for n, g in gradients(model).items()}
    loss.backward()
    assert relative_error(gradients(model), {n: 2 * g for n, g in once.items()}) < 1e-6


def test_stepping_before_backward_is_an_error(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = streamed("llama", folder).train()
    loss = model(**batch).loss
    with torch.no_grad():
        next(iter(adapter(model).values())).add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


def test_a_layer_whose_batch_cannot_be_split_is_refused(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = streamed("llama", folder, micro_batch_size=1).train()
    layer = airtune.stream_of(model)._layers[2]
    plain = layer.forward
    layer.forward = lambda hidden, *a, **k: plain(hidden + hidden.mean(0, keepdim=True), *a, **k)
    with pytest.raises(ValueError, match=r"layers\.2 cannot be run in micro-batches"):
        model(**batch)


def test_saved_tensor_hooks_see_the_hidden_states(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model = streamed("llama", folder).train()
    packed = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal packed
        packed += tensor.shape == (4, 12, 64)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch).loss.backward()
    assert packed >= 4


def test_a_filled_cache_while_gradients_are_on_is_refused(tmp_path: Path) -> None:
    """Leaving it out would give the logits of another text."""
    model, ids = streamed("llama", zoo.make("llama", tmp_path)).eval(), zoo.random_ids(1, 8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :7], cache=cache)
    with pytest.raises(ValueError, match="filled KV cache"):
        model(input_ids=ids[:, 7:], cache=cache)


def test_inference_mode(tmp_path: Path) -> None:
    folder, batch = zoo.make("llama", tmp_path), ragged_batch()
    model, twin = streamed("llama", folder).eval(), resident("llama", folder).eval()
    with torch.inference_mode():
        assert model(**batch).loss.item() == pytest.approx(twin(**batch).loss.item(), rel=1e-6)


def test_evaluation_goes_in_micro_batches(tmp_path: Path) -> None:
    model = streamed("llama", zoo.make("llama", tmp_path), micro_batch_size=1).eval()
    seen: list[int] = []
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with torch.no_grad():
        model(**ragged_batch())
    assert seen[-4:] == [1, 1, 1, 1]


def test_base_weights_cannot_be_trained(tmp_path: Path) -> None:
    model = airtune.load(zoo.make("llama", tmp_path), device="cpu")
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="streamed and stay frozen"):
        model(**ragged_batch())


def test_mapped_layers_stay_while_tokens_are_generated(tmp_path: Path) -> None:
    """And are given back for training, unless a limit says otherwise."""
    folder = zoo.make("llama", tmp_path)
    model, limited = streamed("llama", folder), streamed("llama", folder, host_memory="350kB")
    for each, places in ((model, 4), (limited, 1)):
        each.eval().generate(input_ids=zoo.random_ids(1, 4), max_new_tokens=2, pad_token_id=0)
        assert len(airtune.stream_of(each)._residency._present) == places
    model.train()(**ragged_batch()).loss.backward()
    assert len(airtune.stream_of(model)._residency._present) == 2
