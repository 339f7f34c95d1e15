"""A row's loss and gradients are its own: whatever pads it, whoever is beside it, however the step is cut.

On models of attention alone and on models whose layers carry a state along the row, which padding could
reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from airtune.run.data.batches import supervised_count
from airtune.run.data.collate import Collator
from airtune.run.trainer import StreamedTrainer
from tests import twins, zoo

# PEFT 0.21 still asks for a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

Row = dict[str, list[int]]
MODELS = (
    "llama",
    "gpt2",
    "qwen3_5__vl",
    "mamba2",
)  # gpt2: learned positions, of which no row may see another's
LENGTHS = (5, 12, 9, 3)
Side = Literal["right", "left"]
SIDES: tuple[Side, Side] = ("right", "left")


def ragged_rows(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    """Rows of which unequal shares are learned: all but the first 1, 2, ... tokens."""
    rows = []
    for i, length in enumerate(lengths):
        ids = zoo.random_ids(1, length, seed=i)[0].tolist()
        given = min(i + 1, length - 1)
        rows.append({"input_ids": ids, "labels": [-100] * given + ids[given:]})
    return rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: zoo.make(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def streamed(name: str, folder: Path, micro_batch_size: int) -> PeftModel:
    """The model without its dropout, whose masks differ from batch to batch."""
    model = twins.streamed(name, folder, micro_batch_size=micro_batch_size)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch_of(rows: list[Row], side: Side = "right") -> dict[str, Tensor]:
    # A pad id that is a word: were it not masked, it would be read.
    batch = Collator(pad_id=7)(rows)
    return batch if side == "right" else padded_left(batch)


def padded_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The padding of each row before it, as where a model goes on with it; positions then have to be told."""
    padding_B = (batch["attention_mask"] == 0).sum(1).tolist()
    rolled = {
        name: torch.stack([row_S.roll(n) for row_S, n in zip(tensor_BS, padding_B, strict=True)])
        for name, tensor_BS in batch.items()
    }
    return rolled | {"position_ids": (rolled["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def alone(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """The same batch, of which only one row is learned."""
    labels_BS = torch.full_like(batch["labels"], -100)
    labels_BS[row] = batch["labels"][row]
    return batch | {"labels": labels_BS}


def loss_and_gradients(model: PeftModel, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.train()(**batch).loss
    loss.backward()
    return loss.item(), {name: gradient.clone() for name, gradient in twins.gradients(model).items()}


def assert_same(got: tuple[float, dict[str, Tensor]], want: tuple[float, dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    # Other shapes, other order of sums: fp32 rounding over four layers. A leak is orders of magnitude larger.
    assert twins.relative_error(got[1], want[1]) < 1e-4


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_see_its_padding_nor_its_neighbours(
    folders: dict[str, Path], name: str, micro_batch_size: int
) -> None:
    rows = ragged_rows()
    model = streamed(name, folders[name], micro_batch_size)
    for i, row in enumerate(rows):
        want = loss_and_gradients(model, batch_of([row]))
        for side in SIDES:
            assert_same(loss_and_gradients(model, alone(batch_of(rows, side), i)), want)


@pytest.mark.parametrize("name", MODELS)
def test_other_neighbours_change_nothing(folders: dict[str, Path], name: str) -> None:
    first, *_ = rows = ragged_rows()
    others = ragged_rows((7, 3, 14, 8))[1:]
    model = streamed(name, folders[name], 4)
    got, want = (loss_and_gradients(model, alone(batch_of([first, *r]), 0)) for r in (others, rows[1:]))
    assert_same(got, want)


class KeepGradients(TrainerCallback):
    """The gradients that the optimizer gets, and the losses that are logged."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model: PeftModel, **kwargs) -> None:
        self.gradients = {name: gradient.clone() for name, gradient in twins.gradients(model).items()}

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def one_step(
    model: PeftModel, rows: list[Row], folder: Path, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    kept = KeepGradients()
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        max_steps=1, max_grad_norm=0.0, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    trainer = StreamedTrainer(
        model, arguments, train_dataset=rows, data_collator=Collator(pad_id=7), callbacks=[kept]
    )
    trainer.train()
    return kept.losses[0], kept.gradients


@pytest.mark.parametrize("name", ["llama", "qwen3_5__vl"])
def test_two_ragged_rows_are_one_step_however_they_are_cut(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    rows = ragged_rows((13, 4))  # 12 supervised tokens and 2: a mean of means would be far off

    def step(micro_batch_size: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
        model = streamed(name, folders[name], micro_batch_size)
        return one_step(model, rows, tmp_path, **options)

    whole = step(2, per_device_train_batch_size=2)
    assert_same(step(1, per_device_train_batch_size=2), whole)
    assert_same(step(1, per_device_train_batch_size=1, gradient_accumulation_steps=2), whole)

    model = streamed(name, folders[name], 1)
    losses, counts = [], []
    for row in rows:
        batch = batch_of([row])
        losses.append(loss_and_gradients(model, batch)[0])
        counts.append(supervised_count(batch))
    assert counts == [12, 2]
    by_tokens = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert whole[0] == pytest.approx(by_tokens, abs=1e-4)  # the log has four decimals
