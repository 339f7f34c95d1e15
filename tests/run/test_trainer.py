"""The trainer takes the step it was asked for or none: loss per token, early stops, resume bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed

from airtune.model.adapter_io import AdapterError, adapter_tensors, read_adapter
from airtune.run.arguments import training_arguments
from airtune.run.checkpoints import (
    held,
    incomplete,
    newest_checkpoint,
    open_run_folder,
    remove_partial,
)
from airtune.run.trainer import StreamedTrainer, TrainingError

VOCAB = 31
Row = dict[str, list[int]]


def tiny_model(dropout: float = 0.0) -> PeftModel:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    base = LlamaForCausalLM(config)
    base.name_or_path = "somewhere/tiny"
    lora = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora)


def ragged_rows(count: int = 12) -> list[Row]:
    """Rows of 3 to 9 tokens of which very unequal shares are learned."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        ids = torch.randint(VOCAB, (3 + i * 5 % 7,), generator=generator).tolist()
        ignored = (i % 2) * (len(ids) - 1)
        rows.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return rows


def collate(rows: list[Row]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


def trainer_for(
    folder: Path, model: PeftModel | None = None, rows: list[Row] | None = None, **options
) -> StreamedTrainer:
    ours = {name: options.pop(name) for name in ("eval_dataset", "callbacks", "counters") if name in options}
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_nan_inf_filter": False,
    }
    args = TrainingArguments(output_dir=str(folder), **(defaults | options))
    return StreamedTrainer(
        model or tiny_model(), args, train_dataset=rows or ragged_rows(), data_collator=collate, **ours
    )


def losses(trainer: StreamedTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def summed_loss(model: PeftModel, rows: list[Row]) -> Tensor:
    """The naive twin: row by row, the sum over supervised tokens divided by their number."""
    nll, count = torch.zeros(()), 0
    for row in rows:
        logits_SV = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels_S = torch.tensor(row["labels"][1:])
        nll = nll + nn.functional.cross_entropy(logits_SV, labels_S, ignore_index=-100, reduction="sum")
        count += int((labels_S != -100).sum())
    return nll / count


class Gradients(TrainerCallback):
    """Keeps the gradients with which the first step was taken."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.first:
            self.first = [p.grad.clone() for p in model.parameters() if p.requires_grad]


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (3, 2), (2, 3), (1, 6)])
def test_loss_is_per_token_of_the_step_however_it_is_split(tmp_path: Path, batch: int, accumulation: int):
    rows, gradients = ragged_rows(6), Gradients()
    trainer = trainer_for(
        tmp_path,
        rows=rows,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=1e9,
        callbacks=[gradients],
    )
    trainer.train()

    twin = tiny_model()
    expected = summed_loss(twin, rows)
    expected.backward()
    wanted = [p.grad for p in twin.parameters() if p.requires_grad]
    assert losses(trainer) == pytest.approx([expected.item()], rel=1e-6)
    assert len(gradients.first) == len(wanted) == 28
    for got, want in zip(gradients.first, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


def test_a_model_that_ignores_num_items_in_batch_has_the_same_loss(tmp_path: Path):
    class OwnLoss(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **ignored):
            output = super().forward(input_ids=input_ids, attention_mask=attention_mask)
            loss = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": output.logits}

    model, rows = tiny_model(), ragged_rows(6)
    model.get_base_model().__class__ = OwnLoss
    trainer = trainer_for(tmp_path, model, rows, gradient_accumulation_steps=3, max_steps=1)
    trainer.train()
    assert losses(trainer) == pytest.approx([summed_loss(tiny_model(), rows).item()], rel=1e-6)


def test_eval_loss_is_per_token_of_all_rows_and_training_goes_on_in_training_mode(tmp_path: Path):
    rows = ragged_rows(5)
    trainer = trainer_for(tmp_path, tiny_model(dropout=0.5), eval_dataset=rows, per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(summed_loss(tiny_model().eval(), rows).item(), rel=1e-6)
    assert metrics["eval_tokens"] == sum(label != -100 for row in rows for label in row["labels"][1:])

    twin = trainer_for(tmp_path, tiny_model(dropout=0.5))
    twin.train()
    evaluated = trainer_for(
        tmp_path, tiny_model(dropout=0.5), eval_dataset=rows, eval_strategy="steps", eval_steps=2
    )
    evaluated.train()
    assert losses(evaluated) == losses(twin)
    assert [line["step"] for line in evaluated.state.log_history if "eval_loss" in line] == [2, 4, 6]


# --- faults stop before the optimizer -------------------------------------------------------------


def snapshot(model: PeftModel) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in adapter_tensors(model).items()}


class PoisonAt(TrainerCallback):
    """Makes one step's loss or gradient non-finite; remembers the adapter from before it."""

    def __init__(self, step: int, where: str, value: float) -> None:
        self.step, self.where, self.value = step, where, value
        self.before: dict[str, Tensor] = {}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 != self.step:
            return
        self.before = snapshot(model)
        if self.where == "loss":
            model.get_base_model().lm_head.weight.data[0, 0] = self.value
        else:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            parameter.register_hook(lambda grad: torch.full_like(grad, self.value))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_non_finite_stops_before_the_optimizer(
    tmp_path: Path, where: str, value: float, max_grad_norm: float
):
    poison = PoisonAt(3, where, value)
    trainer = trainer_for(
        tmp_path, rows=ragged_rows(6), callbacks=[poison], max_grad_norm=max_grad_norm,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"step 3: the loss is .*rows 4, 5 of the training data"):
        trainer.train()
    now = adapter_tensors(trainer.model)
    assert all(torch.equal(now[key], tensor) for key, tensor in poison.before.items())
    assert len(losses(trainer)) == 2
    trainer.save_model()  # the adapter of step 2 is good


def test_a_non_finite_adapter_is_not_saved(tmp_path: Path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.train()
    next(iter(adapter_tensors(trainer.model).values()))[0] = math.nan
    with pytest.raises(AdapterError, match="not finite"):
        trainer.save_model()
    assert not (tmp_path / "adapter").exists()


def test_a_batch_without_supervised_tokens_is_an_error(tmp_path: Path):
    rows = ragged_rows(4)
    # A label at position 0 is predicted by nothing: it does not count.
    rows[2]["labels"] = [rows[2]["input_ids"][0]] + [-100] * (len(rows[2]["input_ids"]) - 1)
    trainer = trainer_for(
        tmp_path, rows=rows, per_device_train_batch_size=1, train_sampling_strategy="sequential"
    )
    before = snapshot(trainer.model)
    with pytest.raises(TrainingError, match=r"step 3: rows 2 of the training data .*no supervised token"):
        trainer.train()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in adapter_tensors(trainer.model).items())
    with pytest.raises(TrainingError, match="evaluation rows have no supervised token"):
        trainer.evaluate(eval_dataset=rows[2:3])


def test_a_run_of_one_step_is_not_all_warm_up(tmp_path: Path):
    """A warm-up of 3 % of one step, rounded up, is that step, whose learning rate would be 0."""
    trainer = trainer_for(tmp_path, max_steps=1, warmup_steps=0.03)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 1e-2
    trainer.save_model()  # would refuse an adapter that is all zero


# --- what cannot be honoured is refused -----------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"activation_checkpointing": True},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"torch_compile": True},
        {"auto_find_batch_size": True},
        {"use_cpu": False},
    ],
)
def test_options_that_streaming_cannot_honour_are_refused(tmp_path: Path, option: dict):
    with pytest.raises(ValueError, match=next(iter(option))):
        trainer_for(tmp_path / "new", **option)
    assert not (tmp_path / "new").exists()


def test_no_batch_is_no_run(tmp_path: Path):
    trainer = trainer_for(tmp_path, per_device_train_batch_size=99, dataloader_drop_last=True)
    with pytest.raises(TrainingError, match="rows do not fill one of per_device_train_batch_size=99"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optim": "galore_adamw"}, "galore_torch"),
        ({"adam_beta1": 2}, "Invalid beta parameter"),
        ({"lr_scheduler_kwargs": {"bogus": 1}}, "bogus"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr"),
    ],
)
def test_what_the_optimizer_would_refuse_is_refused_at_once(tmp_path: Path, options: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        training_arguments(options, output_dir=tmp_path, seed=0)


def test_an_evaluation_has_as_many_rows_a_pass_as_a_step(tmp_path: Path):
    args = training_arguments({"per_device_train_batch_size": 64}, output_dir=tmp_path, seed=0)
    assert args.per_device_eval_batch_size == 64
    options = {"per_device_train_batch_size": 64, "per_device_eval_batch_size": 2}
    assert training_arguments(options, output_dir=tmp_path, seed=0).per_device_eval_batch_size == 2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated.*:FutureWarning")
def test_gradient_checkpointing_is_refused_under_its_old_name(tmp_path: Path):
    with pytest.raises(ValueError, match="activation_checkpointing cannot be used with streaming"):
        trainer_for(tmp_path, gradient_checkpointing=True)


def test_accumulation_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer_for(tmp_path, gradient_accumulation_steps=4)
    assert "streams the whole model 4 times a step" in caplog.text


def test_the_model_is_never_moved_cast_or_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()

    def refuse(*args, **kwargs):
        raise AssertionError(f"moved: {args[1:]} {kwargs}")

    monkeypatch.setattr(nn.Module, "to", refuse)
    forward = model.forward
    trainer = trainer_for(tmp_path, model, max_steps=1, eval_dataset=ragged_rows(3), eval_strategy="steps")
    trainer.train()
    assert trainer.model is model and trainer.model_wrapped is model
    assert model.forward == forward


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("batch", [2, 5])
def test_resume_is_bit_equal(tmp_path: Path, batch: int, accumulation: int):
    """6 steps straight against 3, new objects, and 3 more; with dropout, inside an epoch and at its end."""
    options = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    straight = trainer_for(tmp_path / "straight", tiny_model(dropout=0.3), **options)
    straight.train()

    class StopAt3(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    saving = options | {"save_strategy": "steps", "save_steps": 3}
    first = trainer_for(tmp_path / "cut", tiny_model(dropout=0.3), callbacks=[StopAt3()], **saving)
    first.train()
    checkpoint = open_run_folder(tmp_path / "cut", resume=True)
    assert checkpoint == tmp_path / "cut" / "checkpoint-3"
    torch.rand(7)  # the state of the generators is the checkpoint's, not the process's
    second = trainer_for(tmp_path / "cut", tiny_model(dropout=0.3), **saving)
    second.train(resume_from_checkpoint=str(checkpoint))

    assert losses(second) == losses(straight)
    assert losses(second)[:3] == losses(first)
    expected = adapter_tensors(straight.model)
    for key, tensor in adapter_tensors(second.model).items():
        assert torch.equal(tensor, expected[key]), key


class Rates(TrainerCallback):
    """What each step was taken with: learning rate and weight decay."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.taken.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))


def test_a_resume_takes_the_rates_and_intervals_that_are_asked_for_now(tmp_path: Path):
    """Not those of the checkpoint, whose schedule was at its end: the rate there is 0."""
    straight, resumed = Rates(), Rates()
    asked = {"lr_scheduler_type": "linear", "learning_rate": 2e-3, "weight_decay": 0.2, "max_steps": 5}
    trainer_for(tmp_path / "straight", callbacks=[straight], **asked).train()
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer_for(tmp_path / "run", lr_scheduler_type="linear", max_steps=3, **saving).train()
    again = trainer_for(tmp_path / "run", callbacks=[resumed], **saving | asked | {"save_steps": 4})
    again.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path / "run")))
    assert resumed.taken == straight.taken[3:]
    logged = {line["step"]: line["learning_rate"] for line in again.state.log_history if "loss" in line}
    assert [logged[4], logged[5]] == [rate for rate, _ in resumed.taken]
    assert (tmp_path / "run" / "checkpoint-4").is_dir()


def saved_run(folder: Path) -> StreamedTrainer:
    trainer = trainer_for(folder, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    return trainer


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_and_no_base(tmp_path: Path):
    saved_run(tmp_path)
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert files == {
        "adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
        "trainer_state.json",
    }  # fmt: skip
    assert all("lora_" in key for key in read_adapter(tmp_path / "checkpoint-4"))
    optimizer = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == 28


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing or cut"),
        (lambda folder: cut(folder / "optimizer.pt"), "optimizer.pt is missing or cut"),
        (lambda folder: cut(folder / "rng_state.pth"), "rng_state.pth is missing or cut"),
        (lambda folder: (folder / "scheduler.pt").write_bytes(b""), "scheduler.pt is missing or cut"),
        (lambda folder: cut(folder / "adapter_model.safetensors"), "not a complete safetensors file"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "is no adapter"),
        (lambda folder: cut(folder / "trainer_state.json"), "trainer_state.json cannot be read"),
        (lambda folder: (folder / "trainer_state.json").write_text('{"global_step": 3}'), "is of step 3"),
    ],
)
def test_incomplete_checkpoints_are_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, fault: str
):
    saved_run(tmp_path)
    assert newest_checkpoint(tmp_path).name == "checkpoint-4"
    damage(tmp_path / "checkpoint-4")
    assert fault in (incomplete(tmp_path / "checkpoint-4") or "")
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"
    assert f"Skipping {tmp_path / 'checkpoint-4'}: " in caplog.text and fault in caplog.text


def test_ten_comes_after_nine(tmp_path: Path):
    trainer_for(tmp_path, max_steps=10, save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    assert newest_checkpoint(tmp_path).name == "checkpoint-10"


def test_nothing_to_resume_from_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no folder"):
        open_run_folder(tmp_path / "none", resume=True)
    (tmp_path / ".checkpoint-3.partial").mkdir()
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        open_run_folder(tmp_path, resume=True)


def test_a_folder_in_use_is_an_error_that_says_what_to_do(tmp_path: Path):
    assert open_run_folder(tmp_path / "new", resume=False) is None
    assert open_run_folder(tmp_path, resume=False) is None
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ValueError, match=r"not empty \(it holds adapter\).*resume=true"):
        open_run_folder(tmp_path, resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        open_run_folder(tmp_path / "file", resume=False)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path):
    with (
        held(tmp_path / "run", resume=False),
        pytest.raises(ValueError, match="another process is writing into"),
        held(tmp_path / "run", resume=True),
    ):
        pass
    (tmp_path / "run" / "config.yaml").write_text("")
    with pytest.raises(ValueError, match="is not empty"), held(tmp_path / "run", resume=False):
        pass  # the other run began, and ended, while this one's model was loaded
    with held(tmp_path / "run", resume=True):
        pass


def test_a_save_that_dies_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_for(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    save = trainer._save_rng_state

    def die_at_4(folder: str) -> None:
        if trainer.state.global_step == 4:
            raise KeyboardInterrupt
        save(folder)

    monkeypatch.setattr(trainer, "_save_rng_state", die_at_4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("airtune.run.trainer.write_adapter", fail)
    with pytest.raises(TrainingError, match=r"checkpoint-2 cannot be saved: .*No space left"):
        saved_run(tmp_path)


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / ".checkpoint-4.partial").mkdir()
    (tmp_path / ".metrics.jsonl.partial").write_text("")
    (tmp_path / "checkpoint-2").mkdir()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert "left by an interrupted save" in caplog.text


def test_resuming_a_finished_run_takes_no_extra_step(tmp_path: Path):
    saved_run(tmp_path)
    again = trainer_for(tmp_path, max_steps=4)
    with pytest.raises(TrainingError, match="checkpoint is at step 4 of 4"):
        again.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path)))


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path):
    """A learning rate that destroys what it has learned: the first evaluation is the best."""
    options = {
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    trainer = trainer_for(tmp_path, eval_dataset=ragged_rows(5), **options)
    trainer.train()
    evals = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    best = min(evals, key=lambda step: evals[step])
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert best != 6
    assert trainer.evaluate()["eval_loss"] == evals[best]
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")
