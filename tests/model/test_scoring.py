"""Probabilities of tokens, with the adapter and without it, against a resident model with all its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

import airtune
from airtune.model.scoring import (
    Wanted,
    adapters_off,
    score_batch,
    score_tokens,
    score_with_and_without_adapter,
)
from tests import twins, zoo
from tests.sim import Simulator

Batch = dict[str, Tensor]


def naive(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """log-probabilities and first choices [B, S], from the logits of each row alone."""
    log_prob_BS, is_top_BS = torch.zeros(batch["labels"].shape), torch.zeros(batch["labels"].shape).bool()
    for b, (ids_S, mask_S, labels_S) in enumerate(
        zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ):
        length = int(mask_S.sum())
        with torch.no_grad():
            logits_SV = model(input_ids=ids_S[None, :length], use_cache=False).logits[0].float()
        for s in range(1, length):
            if labels_S[s] != -100:
                log_prob_BS[b, s] = logits_SV[s - 1].log_softmax(-1)[labels_S[s]]
                is_top_BS[b, s] = logits_SV[s - 1].argmax() == labels_S[s]
    return log_prob_BS, is_top_BS


def doubled(batch: Batch) -> Batch:
    return {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}


def with_own_choices(model: nn.Module, batch: Batch) -> Batch:
    """Some labels are what the model would have said, so that first choices are among them."""
    with torch.no_grad():
        best_BS = model(input_ids=batch["input_ids"], use_cache=False).logits.argmax(-1)
    labels_BS = batch["labels"].clone()
    labels_BS[:, 5:7] = torch.where(labels_BS[:, 5:7] == -100, -100, best_BS[:, 4:6])
    return batch | {"labels": labels_BS}


# Soft caps, shared keys and values, layers called twice, experts (with an auxiliary loss), a packed head.
@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "gemma4_text", "dory", "mixtral", "qwen3_5__vl"])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_with_and_without_the_adapter_in_one_batch(
    tmp_path: Path, name: str, micro_batch_size: int | None
) -> None:
    folder = zoo.make(name, tmp_path)
    resident = twins.resident(name, folder).eval()
    batch = with_own_choices(resident, twins.ragged_batch(rows=4, length=12))
    model = twins.streamed(name, folder, micro_batch_size=micro_batch_size).eval()
    on, off = score_with_and_without_adapter(model, doubled(batch))

    want_on = naive(resident, batch)
    with resident.disable_adapter():
        want_off = naive(resident, batch)
    for got, want in ((on, want_on), (off, want_off)):
        torch.testing.assert_close(got.log_prob, want[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(got.is_top, want[1])
    assert on.is_top.any()
    assert (on.log_prob - off.log_prob).abs().max() > 0.01
    airtune.stream_of(model).close()


def test_a_single_row_beside_itself(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    batch = {name: tensor[:1] for name, tensor in twins.ragged_batch().items()}
    resident = twins.resident("llama", folder).eval()
    model = twins.streamed("llama", folder).eval()
    on, off = score_with_and_without_adapter(model, doubled(batch))
    torch.testing.assert_close(on.log_prob, naive(resident, batch)[0], rtol=1e-4, atol=1e-4)
    with resident.disable_adapter():
        torch.testing.assert_close(off.log_prob, naive(resident, batch)[0], rtol=1e-4, atol=1e-4)


def test_scoring_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    folder = zoo.make("llama", tmp_path)
    batch = twins.ragged_batch()
    model = twins.streamed("llama", folder).eval()
    before = model(**batch).loss
    for trainable in (True, False):
        for parameter in twins.adapter(model).values():
            parameter.requires_grad_(trainable)
        score_with_and_without_adapter(model, doubled(batch))
        assert {p.requires_grad for p in twins.adapter(model).values()} == {trainable}
    assert torch.equal(model(**batch).loss, before)


def test_a_resident_model_is_scored_by_its_real_logits(tmp_path: Path) -> None:
    model = twins.resident("gemma2", zoo.make("gemma2", tmp_path)).eval()
    batch = twins.ragged_batch()
    loss = model(**batch).loss
    got, want = score_batch(model, batch), naive(model, batch)
    torch.testing.assert_close(got.log_prob, want[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(got.is_top, want[1])
    assert torch.equal(model(**batch).loss, loss)  # it has its loss back


def test_one_place_may_be_asked_for_several_tokens(tmp_path: Path) -> None:
    folder = zoo.make("gemma2", tmp_path)
    batch = twins.ragged_batch()
    wanted = Wanted(torch.tensor([1, 1, 1, 0]), torch.tensor([4, 4, 11, 12]), torch.tensor([7, 9, 7, 7]))
    for model in (twins.streamed("gemma2", folder).eval(), twins.resident("gemma2", folder).eval()):
        got = score_tokens(model, batch, wanted)
        with torch.no_grad():
            logits_BSV = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
        log_prob_NV = logits_BSV[wanted.row_N, wanted.length_N - 1].log_softmax(-1)
        torch.testing.assert_close(
            got.log_prob, log_prob_NV.gather(1, wanted.token_N[:, None])[:, 0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_on_an_accelerator(sim: Simulator, tmp_path: Path, micro_batch_size: int | None) -> None:
    folder, batch = zoo.make("gemma2", tmp_path), twins.ragged_batch()
    resident = twins.resident("gemma2", folder).eval()
    config = twins.lora("gemma2")
    torch.manual_seed(0)
    model = airtune.load(
        folder, lora=config, device="sim", poison=True, dtype=torch.float32, micro_batch_size=micro_batch_size
    ).eval()
    on, off = score_with_and_without_adapter(model, doubled(batch))
    torch.testing.assert_close(on.log_prob, naive(resident, batch)[0], rtol=1e-4, atol=1e-4)
    with resident.disable_adapter():
        torch.testing.assert_close(off.log_prob, naive(resident, batch)[0], rtol=1e-4, atol=1e-4)
    airtune.stream_of(model).close()


def test_layers_that_cannot_be_split_take_two_passes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.make("llama", tmp_path)
    batch = twins.ragged_batch()
    model = twins.streamed("llama", folder).eval()
    want = score_with_and_without_adapter(model, doubled(batch))

    mixing = twins.streamed("llama", folder).eval()
    monkeypatch.setattr("airtune.autograd.row_split._close", lambda got, want: False)
    got = score_with_and_without_adapter(mixing, doubled(batch))
    assert "two passes over the weights" in caplog.text
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.log_prob, theirs.log_prob, rtol=1e-4, atol=1e-5)


def test_adapters_off_is_the_base(tmp_path: Path) -> None:
    model: PeftModel = twins.resident("llama", zoo.make("llama", tmp_path)).eval()
    batch = twins.ragged_batch()
    with model.disable_adapter():
        want = model(**batch).logits
    with adapters_off(model):
        got = model(**batch).logits
    assert torch.equal(got, want) and not torch.equal(model(**batch).logits, want)
