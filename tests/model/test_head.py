"""Models with a streamed head against themselves with a resident one; the loss against transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from airtune.model.deferred_logits import DeferredLogits
from airtune.model.head import causal_lm_loss, stream_head
from tests.resident_head import ResidentHead

VOCAB = 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.1)),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)),
    "division": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "bias": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "bias, old layout": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
    ),
}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.to(dtype)  # type: ignore[arg-type]
    for (
        parameter
    ) in model.parameters():  # nothing is left constant: a skipped bias of zeros would not be seen
        nn.init.normal_(parameter, std=0.3)
    return model


def head_of(model: PreTrainedModel, chunk_rows: int = 7) -> ResidentHead:
    linear = model.get_output_embeddings()
    bias_V = None if linear.bias is None else linear.bias.detach().clone()
    return ResidentHead(linear.weight.detach().clone(), chunk_rows, bias_V)


@contextmanager
def streamed(model: PreTrainedModel) -> Iterator[ResidentHead]:
    """`model` with a streamed head; the module itself holds NaNs meanwhile, so that any use of them shows."""
    head, linear = head_of(model), model.get_output_embeddings()
    undo, resident, bias = stream_head(model, head, block_bytes=4000), linear.weight, linear.bias
    linear.weight = nn.Parameter(torch.full_like(resident, torch.nan), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(torch.full_like(bias, torch.nan), requires_grad=False)
    try:
        yield head
    finally:
        undo()
        linear.weight, linear.bias = resident, bias


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids_BS, labels_BS): two rows of nine, some labels ignored."""
    make = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(3, VOCAB, (2, 9), generator=make)
    labels_BS = ids_BS.clone()
    labels_BS[0, :4] = -100
    labels_BS[1, 8] = -100
    return ids_BS, labels_BS


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of all parameters below the head. A tied table counts as head: in streaming both are frozen."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    frozen = {id(model.get_input_embeddings().weight), id(head.weight), id(head.bias)}  # type: ignore[operator]
    below = {name: p for name, p in model.named_parameters() if id(p) not in frozen}
    return dict(zip(below, torch.autograd.grad(loss, list(below.values())), strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and len(got) > 5
    for name in expected:
        scale = max(1.0, expected[name].abs().max().item())
        assert (got[name] - expected[name]).abs().max().item() < 1e-6 * scale, name


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_logits_are_those_of_the_resident_model(name: str) -> None:
    model, (ids_BS, labels_BS) = tiny(name), batch()
    resident = model(input_ids=ids_BS, labels=labels_BS)
    expected = gradients(model, resident.loss)
    with streamed(model) as head:
        ours = model(input_ids=ids_BS, labels=labels_BS)
        got = gradients(model, ours.loss)
        assert head.crossings == 1
        assert isinstance(ours.logits, DeferredLogits) and ours.logits.full is None
        assert (ours.logits.shape, ours.logits.dtype) == (resident.logits.shape, resident.logits.dtype)
        assert torch.equal(ours.logits.argmax(-1), resident.logits.argmax(-1))
        torch.testing.assert_close(ours.logits[:], resident.logits)
        torch.testing.assert_close(model(input_ids=ids_BS).logits, resident.logits)
    torch.testing.assert_close(ours.loss, resident.loss, rtol=1e-6, atol=1e-6)
    assert_close(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_the_resident_model(name: str) -> None:
    model, (ids_BS, _) = tiny(name), batch()

    def answer() -> Tensor:
        return model.generate(  # type: ignore[operator]
            ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=5, do_sample=False, pad_token_id=0
        )

    expected = answer()
    with streamed(model):
        assert torch.equal(answer(), expected)


@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_a_loss_of_ones_own_gets_its_gradients(name: str) -> None:
    """From real logits; and from those of a forward with labels, after a metric under no_grad saw them."""
    model, (ids_BS, labels_BS) = tiny(name), batch()

    def preference(logits_BSV: Tensor) -> Tensor:
        logprob_BSV = logits_BSV.float().log_softmax(-1)
        return -F.logsigmoid(logprob_BSV[0, :, 5].sum() - logprob_BSV[1, :, 7].sum())

    expected = gradients(model, preference(model(input_ids=ids_BS).logits))
    with streamed(model):
        assert_close(gradients(model, preference(model(input_ids=ids_BS).logits)), expected)
        outputs = model(input_ids=ids_BS, labels=labels_BS)
        with torch.no_grad():
            assert outputs.logits.max().isfinite()
        assert_close(gradients(model, preference(outputs.logits)), expected)


def test_labels_are_noticed_by_position_and_none_is_not_labels() -> None:
    model, (ids_BS, labels_BS) = tiny("plain"), batch()
    with streamed(model):
        by_position = model(ids_BS, None, None, None, None, labels_BS)
        assert isinstance(by_position.logits, DeferredLogits)
        torch.testing.assert_close(by_position.loss, model(ids_BS, labels=labels_BS).loss)
        assert not isinstance(model(ids_BS, None, None, None, None, None).logits, DeferredLogits)
        assert not isinstance(model(ids_BS, labels=None).logits, DeferredLogits)


def test_a_forward_within_a_forward_and_one_that_fails_leave_the_next_one_alone() -> None:
    model, (ids_BS, labels_BS) = tiny("plain"), batch()
    inner: list[Tensor] = []

    def look_aside(module: nn.Module, args: object) -> None:
        if not inner:
            inner.append(torch.empty(0))  # it is called again by the forward below
            inner.append(model(input_ids=ids_BS).logits)

    with streamed(model):
        handle = model.model.norm.register_forward_pre_hook(look_aside)
        assert isinstance(model(input_ids=ids_BS, labels=labels_BS).logits, DeferredLogits)
        assert not isinstance(inner[1], DeferredLogits)
        handle.remove()
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), VOCAB), labels=torch.zeros(1, 3, dtype=torch.long))
        hidden_BSD = torch.randn(1, 2, 16)
        assert not isinstance(model.get_output_embeddings()(hidden_BSD), DeferredLogits)


@pytest.mark.parametrize("name", ["plain", "tied", "bias"])
def test_the_undo_leaves_nothing_behind(name: str) -> None:
    model, (ids_BS, labels_BS) = tiny(name), batch()
    linear = model.get_output_embeddings()

    def state() -> list[dict[str, object]]:
        return [
            {key: dict(v) if isinstance(v, dict) else v for key, v in vars(m).items()}
            for m in (model, linear)
        ]

    before, expected = state(), model(input_ids=ids_BS, labels=labels_BS)
    stream_head(model, head_of(model), block_bytes=4000)()
    assert state() == before
    after = model(input_ids=ids_BS, labels=labels_BS)
    assert type(after.logits) is Tensor and torch.equal(after.loss, expected.loss)


def test_the_undo_puts_back_what_the_instance_had() -> None:
    model = tiny("plain")
    linear = model.get_output_embeddings()
    own, model.loss_function = linear.forward, ForCausalLMLoss
    linear.forward = own
    stream_head(model, head_of(model), block_bytes=4000)()
    assert vars(linear)["forward"] is own and vars(model)["_loss_function"] is ForCausalLMLoss


def test_another_loss_function_is_left_alone_and_gets_real_logits() -> None:
    model, (ids_BS, labels_BS) = tiny("plain"), batch()
    seen: list[Tensor] = []

    def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: object) -> Tensor:
        seen.append(logits)
        return logits.float().logsumexp(-1).mean()

    model.loss_function = own_loss
    expected = gradients(model, model(input_ids=ids_BS, labels=labels_BS).loss)
    with streamed(model):
        assert model.loss_function is own_loss
        assert_close(gradients(model, model(input_ids=ids_BS, labels=labels_BS).loss), expected)
    assert type(seen[1]) is Tensor


def test_heads_that_are_not_a_linear_layer_are_refused_by_name() -> None:
    model = tiny("plain")
    head = head_of(model)

    class ScaledLinear(nn.Linear):
        pass

    model.set_output_embeddings(ScaledLinear(16, VOCAB, bias=False))
    with pytest.raises(ValueError, match="LlamaForCausalLM is a ScaledLinear"):
        stream_head(model, head, block_bytes=4000)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is a NoneType"):
        stream_head(LlamaForSequenceClassification(LlamaConfig(**SIZES)), head, block_bytes=4000)
    with pytest.raises(ValueError, match=r"weight \[101, 16\], the streamed one \[90, 16\]"):
        stream_head(tiny("plain"), ResidentHead(head.weight_VD[:90], 7), block_bytes=4000)


def test_autocast_makes_the_product_in_its_dtype_as_a_linear_layer_does() -> None:
    model, (ids_BS, labels_BS) = tiny("plain"), batch()

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            labelled, plain = model(input_ids=ids_BS, labels=labels_BS), model(input_ids=ids_BS)
        return labelled.loss, labelled.logits, plain.logits

    loss, logits, _ = outputs()
    with streamed(model):
        ours = outputs()
        assert ours[1].dtype == ours[2].dtype == logits.dtype == torch.bfloat16
        # One unit in the last of 8 bits: the chunks may sum a product in another order.
        torch.testing.assert_close(ours[0], loss, rtol=2**-8, atol=0)
        torch.testing.assert_close(ours[1][:], logits, rtol=2**-7, atol=2**-7)


def test_a_bf16_model_is_within_bf16_noise() -> None:
    model, (ids_BS, labels_BS) = tiny("softcap", torch.bfloat16), batch()
    resident = model(input_ids=ids_BS, labels=labels_BS).loss
    expected = gradients(model, resident)
    with streamed(model):
        ours = model(input_ids=ids_BS, labels=labels_BS).loss
        got = gradients(model, ours)
    torch.testing.assert_close(ours, resident, rtol=1e-3, atol=0)
    for name in expected:
        # 8 bits a rounding, and a gradient passes about ten of them on its way down: 4 %.
        assert (got[name] - expected[name]).norm() <= 0.04 * expected[name].norm() + 1e-3, name


def adapted(name: str) -> tuple[PreTrainedModel, nn.Module]:
    """(the model, the same with adapters)"""
    base = tiny(name)
    torch.manual_seed(1)
    return base, get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def test_adapters_get_the_gradients_of_the_resident_model() -> None:
    ids_BS, labels_BS = batch()

    def adapter_gradients(model: nn.Module) -> dict[str, Tensor]:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss = model(input_ids=ids_BS, labels=labels_BS).loss
        return dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))

    expected = adapter_gradients(adapted("softcap")[1])
    base, model = adapted("softcap")
    with streamed(base) as head:
        assert_close(adapter_gradients(model), expected)
        assert head.crossings == 1


def test_trainer_steps_and_evaluates_alike(tmp_path: Path) -> None:
    """Trainer hands `num_items_in_batch` over as a tensor, and gathers logits when there is a metric."""
    rows = [
        dict(zip(("input_ids", "labels"), (t[i].tolist() for t in batch(s)), strict=True))
        for s in (1, 2)
        for i in (0, 1)
    ]

    def run(folder: str) -> tuple[float, float, float]:
        base, model = adapted("plain")
        with streamed(base) if folder == "streamed" else nullcontext():
            trainer = Trainer(
                model=model,
                args=TrainingArguments(
                    output_dir=str(tmp_path / folder),
                    max_steps=2,
                    per_device_train_batch_size=1,
                    gradient_accumulation_steps=2,
                    report_to=[],
                    use_cpu=True,
                    save_strategy="no",
                    disable_tqdm=True,
                    dataloader_pin_memory=False,
                ),
                train_dataset=Dataset.from_list(rows),
                eval_dataset=Dataset.from_list(rows),
                compute_metrics=lambda p: {
                    "right": float((np.asarray(p.predictions).argmax(-1) == p.label_ids).mean())
                },
            )
            loss = trainer.train().training_loss
            metrics = trainer.evaluate()
        return loss, metrics["eval_loss"], metrics["eval_right"]

    assert run("streamed") == pytest.approx(run("resident"), rel=1e-5)


def test_logits_of_an_inference_forward_can_be_read_outside_it() -> None:
    model, (ids_BS, labels_BS) = tiny("softcap"), batch()
    with torch.no_grad():
        expected = model(input_ids=ids_BS).logits
    with streamed(model):
        with torch.inference_mode():
            outputs = model(input_ids=ids_BS, labels=labels_BS)
        torch.testing.assert_close(outputs.logits[:], expected)
        outputs.logits[0, 0] = 0.0  # what is made outside inference mode may be changed outside it


def test_a_head_that_loses_the_loss_to_another_module_still_learns() -> None:
    """A model that makes its loss by itself, from slices of its logits: right, at a price."""
    torch.manual_seed(0)
    model = GPT2DoubleHeadsModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    ).eval()
    ids_BS, labels_BS = batch()
    resident = model(
        input_ids=ids_BS[:, None], labels=labels_BS[:, None], mc_token_ids=torch.zeros(2, 1).long()
    )
    norm = model.transformer.ln_f.weight
    (expected,) = torch.autograd.grad(resident.loss, norm)
    with streamed(model):
        ours = model(
            input_ids=ids_BS[:, None], labels=labels_BS[:, None], mc_token_ids=torch.zeros(2, 1).long()
        )
        torch.testing.assert_close(ours.loss, resident.loss)
        torch.testing.assert_close(torch.autograd.grad(ours.loss, norm)[0], expected)


# causal_lm_loss against transformers' own

LOSS_CASES: dict[str, dict[str, object]] = {
    "mean": {},
    "items as an int": {"num_items_in_batch": 5},
    "items as a tensor": {"num_items_in_batch": torch.tensor(5)},
    "labels that are shifted already": {"shift_labels": torch.randint(0, VOCAB, (2, 4))},
    "another ignored label": {"ignore_index": 3},
    "options it does not know": {"use_cache": False},
}


def deferred(shape: tuple[int, ...] = (2, 4)) -> tuple[Tensor, ResidentHead, DeferredLogits, Tensor]:
    """(hidden [.., D], head, deferred logits, the real ones)"""
    torch.manual_seed(0)
    hidden = torch.randn(*shape, 16, requires_grad=True)
    head = ResidentHead(torch.randn(VOCAB, 16), 7)
    return hidden, head, DeferredLogits(hidden, head, 4000), hidden @ head.weight_VD.T


@pytest.mark.parametrize("case", LOSS_CASES)
def test_the_loss_is_that_of_transformers(case: str) -> None:
    hidden, head, logits, real = deferred()
    labels_BS = torch.tensor([[5, 3, -100, 3], [3, 7, 8, 100]])
    if case == "another ignored label":
        labels_BS[0, 2] = 3
    ours = causal_lm_loss(logits, labels_BS, VOCAB, **LOSS_CASES[case])  # type: ignore[arg-type]
    twin = ForCausalLMLoss(real, labels_BS, VOCAB, **LOSS_CASES[case])  # type: ignore[arg-type]
    torch.testing.assert_close(ours, twin, rtol=1e-6, atol=1e-6)
    (got,), (expected,) = torch.autograd.grad(ours, hidden), torch.autograd.grad(twin, hidden)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert head.crossings == 1
    assert torch.equal(causal_lm_loss(real, labels_BS, VOCAB, **LOSS_CASES[case]), twin)  # type: ignore[arg-type]


def test_nothing_supervised_is_nan_as_a_mean_and_zero_as_a_share() -> None:
    hidden, _, logits, real = deferred()
    labels_BS = torch.full((2, 4), -100)
    assert (
        causal_lm_loss(logits, labels_BS, VOCAB).isnan() and ForCausalLMLoss(real, labels_BS, VOCAB).isnan()
    )
    share = causal_lm_loss(logits, labels_BS, VOCAB, num_items_in_batch=4)
    assert share.item() == 0
    assert not torch.autograd.grad(share, hidden)[0].any()


def test_labels_that_do_not_fit_the_logits_are_refused() -> None:
    _, _, logits, _ = deferred()
    labels_BS = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="10 labels for 8 positions"):
        causal_lm_loss(logits, torch.zeros(2, 5, dtype=torch.long), VOCAB)
    with pytest.raises(ValueError, match="a vocabulary of 90, the logits have 101"):
        causal_lm_loss(logits, labels_BS, 90)
    with pytest.raises(ValueError, match="got neither"):
        causal_lm_loss(logits, None, VOCAB)
