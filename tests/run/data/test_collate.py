"""Batches."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from airtune.run.data.collate import Collator
from airtune.run.data.prepare import prepare
from tests.tiny_tokenizer import (
    tiny_tokenizer,
    write_jsonl,
)


def test_padding_is_known_by_length_and_not_by_id() -> None:
    eos = 2
    batch = Collator(pad_id=eos)(
        [
            {"input_ids": [eos, 5, eos], "labels": [-100, 5, eos]},
            {"input_ids": [7, 8, 9, 9, eos], "labels": [-100, -100, 9, 9, eos]},
        ]
    )
    assert batch["input_ids"].tolist() == [[2, 5, 2, 2, 2], [7, 8, 9, 9, 2]]
    assert batch["labels"].tolist() == [[-100, 5, 2, -100, -100], [-100, -100, 9, 9, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(
    ("rows", "length", "padded"), [(1, 1, 1), (2, 2, 3), (3, 2, 2), (4, 4, 5), (4, 5, 5)]
)
def test_a_batch_of_rows_is_never_square(rows: int, length: int, padded: int) -> None:
    batch = Collator(pad_id=0)([{"input_ids": [1] * length, "labels": [1] * length}] * rows)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(rows, padded)}
    assert batch["attention_mask"].sum().item() == rows * length
    assert batch["labels"].ne(-100).sum().item() == rows * (length - 1)  # nothing predicts a first token


def test_a_tokenizer_without_pad_token_pads_with_something_masked(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(pad_token=None)
    with caplog.at_level(logging.INFO, logger="airtune"):
        assert Collator.of(tokenizer).pad_id == tokenizer.eos_token_id
        tokenizer.eos_token = None
        assert Collator.of(tokenizer).pad_id == 0
    assert caplog.text.count("no pad token") == 2
    assert Collator.of(tiny_tokenizer()).pad_id == tiny_tokenizer().pad_token_id


def test_labels_count_the_same_before_and_after_the_shift(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, {"text": "yes no"}, {"text": "one two three"}), tokenizer)
    labels_BS = Collator.of(tokenizer)([data[0], data[1]])["labels"]
    assert labels_BS.ne(-100).sum() == labels_BS[:, 1:].ne(-100).sum() == data.summary.supervised_tokens
