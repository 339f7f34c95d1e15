"""What a batch counts, which rows it came from, and in which order rows are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from airtune.run.data.batches import Batch, RowsByLength, name_rows, supervised_count, token_count
from airtune.run.data.collate import Collator
from airtune.run.data.prepare import prepare
from airtune.run.trainer import StreamedTrainer
from tests.tiny_tokenizer import tiny_tokenizer, write_jsonl

# PEFT 0.21 still asks for a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

Row = dict[str, list[int]]


def rows_of(lengths: list[int]) -> list[Row]:
    """Rows that differ in their first ids."""
    return [{"input_ids": [i + 1] * n, "labels": [-100] + [i + 1] * (n - 1)} for i, n in enumerate(lengths)]


def test_rows_of_a_batch_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"text": "yes"}, {"text": ""}, {"text": "no no"}, {"text": "one"})
    data = prepare(path, tiny_tokenizer())
    batch = Collator(pad_id=0)([data[1], data[2]])  # the empty text is dropped
    assert name_rows([batch], data) == f"rows {path}:3, {path}:4"
    plain = [data[i] for i in range(3)]
    assert name_rows([batch], plain) == "rows 1, 2 of the training data (counted from 0)"


def test_counts_know_no_padding() -> None:
    batch = Collator(pad_id=1)(rows_of([5, 2, 3]))
    assert (token_count(batch), supervised_count(batch)) == (10, 7)


def test_rows_of_one_step_are_of_one_length() -> None:
    lengths = [3, 30, 4, 31, 5, 32, 3, 33, 4, 34, 5, 35] * 8
    order = list(RowsByLength(rows_of(lengths), step_rows=4, seed=0))
    assert sorted(order) == list(range(len(lengths)))
    assert order != list(RowsByLength(rows_of(lengths), step_rows=4, seed=1))
    steps = [[lengths[i] for i in order[start : start + 4]] for start in range(0, len(order), 4)]
    padded = sum(4 * max(step) - sum(step) for step in steps)
    assert padded < sum(lengths) / 5  # in the order given it is 0.8 of their sum
    assert max(steps[0]) == 35  # the largest batch comes first: what does not fit is known at once


def test_lengths_are_known_without_reading_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = prepare(write_jsonl(tmp_path, *({"text": "yes " * n} for n in (4, 1, 3))), tiny_tokenizer())
    want = [len(row["input_ids"]) for row in (data[0], data[1], data[2])]
    monkeypatch.delattr(type(data), "__getitem__")
    assert RowsByLength(data, step_rows=2, seed=0).lengths == want


def tiny_model() -> PeftModel:
    set_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
    )
    base.name_or_path = "somewhere/tiny"
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def losses(trainer: StreamedTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("stop_at", [2, 8])  # in the first epoch of six steps and in the second
def test_a_run_in_order_of_length_resumes_with_the_same_rows(tmp_path: Path, stop_at: int) -> None:
    drawn: list[list[int]] = []

    class Noting(Collator):
        def __call__(self, rows: list[Row]) -> Batch:
            drawn.append([row["input_ids"][0] for row in rows])
            return super().__call__(rows)

    def trainer(folder: Path) -> StreamedTrainer:
        drawn.clear()
        arguments = TrainingArguments(
            str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, max_steps=14,
            save_steps=stop_at, per_device_train_batch_size=4, train_sampling_strategy="group_by_length",
        )  # fmt: skip
        rows = rows_of([3 + i * 5 % 17 for i in range(24)])
        return StreamedTrainer(tiny_model(), arguments, train_dataset=rows, data_collator=Noting(0))

    straight = trainer(tmp_path)
    straight.train()
    order = list(drawn)
    first, second = (sorted(row for batch in part for row in batch) for part in (order[:6], order[6:12]))
    assert order[:6] != order[6:12] and first == second

    torch.rand(7)  # the order is not drawn from what the process did before
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop_at}"))
    assert drawn[-(14 - stop_at) :] == order[-(14 - stop_at) :]
    assert losses(resumed) == losses(straight)
