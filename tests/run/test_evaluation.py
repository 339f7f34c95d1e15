"""Sums over rows are those of the rows alone, whatever the batches; a comparison reads the weights once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import airtune
from airtune.model.scoring import TokenLogProbs
from airtune.run.data.collate import Collator
from airtune.run.evaluation import RowScore, batches_by_tokens, perplexity, row_scores, score_rows, totals
from tests import twins, zoo

Row = dict[str, list[int]]


def ragged_rows(count: int = 7) -> list[Row]:
    """Rows of 3 to 9 tokens of which very unequal shares are learned."""
    rows = []
    for i in range(count):
        ids = zoo.random_ids(1, 3 + i * 5 % 7, seed=i)[0].tolist()
        ignored = 1 if i % 2 else len(ids) - 1
        rows.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return rows


def naive(model: nn.Module, row: Row) -> tuple[int, float, int]:
    with torch.no_grad():
        logits_SV = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
    labels_S = torch.tensor(row["labels"][1:])
    nll = F.cross_entropy(logits_SV, labels_S, ignore_index=-100, reduction="sum").item()
    return int((labels_S != -100).sum()), nll, int((logits_SV.argmax(-1) == labels_S).sum())


@pytest.mark.parametrize("batch_tokens", [1, 20, 1000])
def test_every_row_has_the_sums_it_has_alone(tmp_path: Path, batch_tokens: int) -> None:
    folder, rows = zoo.make("gemma2", tmp_path), ragged_rows()
    resident = twins.resident("gemma2", folder).eval()
    model = twins.streamed("gemma2", folder, micro_batch_size=2)
    model.train()
    scores = score_rows(model, rows, Collator(0), batch_tokens=batch_tokens, compare=True)
    assert model.training and scores.base is not None
    for ours, base, row in zip(scores.model, scores.base, rows, strict=True):
        tokens, nll, hits = naive(resident, row)
        assert (ours.tokens, ours.hits) == (tokens, hits) and ours.nll == pytest.approx(nll, rel=1e-5)
        assert ours.loss == pytest.approx(nll / tokens, rel=1e-5)
        with resident.disable_adapter():
            tokens, nll, hits = naive(resident, row)
        assert (base.tokens, base.hits) == (tokens, hits) and base.nll == pytest.approx(nll, rel=1e-5)


def test_rows_share_a_pass_and_so_do_both_sides(tmp_path: Path) -> None:
    model = twins.streamed("llama", zoo.make("llama", tmp_path), micro_batch_size=2, file_access="buffered")
    stream, rows, told = airtune.stream_of(model), ragged_rows(8), []

    def passes(**options: object) -> tuple[float, float]:
        before = stream.counters()
        score_rows(model, rows, Collator(0), tell=told.append, **options)  # type: ignore[arg-type]
        after = stream.counters()
        return tuple((after[key] - before[key]) for key in ("visits", "bytes_read"))  # type: ignore[return-value]

    passes(batch_tokens=1000)  # the first finds nothing read ahead
    alone, once = passes(batch_tokens=1), passes(batch_tokens=1000)
    assert alone[0] == 8 * once[0] and once[0] == 4 and alone[1] > 7 * once[1]
    assert passes(batch_tokens=1000, compare=True) == once
    assert told[-1] == "evaluating batch 1/1" and told[1] == "evaluating batch 1/8"
    stream.close()


def test_batches_are_full_sorted_and_hold_every_row_once() -> None:
    lengths = [5, 1, 9, 4, 4, 30, 2, 8]
    batches = batches_by_tokens(lengths, 20)
    assert batches[0] == [5]  # longer than the bound: alone
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 20 for batch in batches[1:])
    assert [lengths[batch[0]] for batch in batches] == sorted((lengths[b[0]] for b in batches), reverse=True)
    assert batches == [[5], [2, 7], [0, 3, 4, 6], [1]]
    assert [len(batch) for batch in batches_by_tokens([4] * 6, 24, copies=2)] == [3, 3]
    assert batches_by_tokens([], 20) == []


def test_totals_are_per_token_of_all_rows() -> None:
    found = totals([RowScore(1, 2.0, 1), RowScore(9, 0.0, 4)])
    assert found == {
        "rows": 2,
        "tokens": 10,
        "loss": 0.2,
        "perplexity": pytest.approx(math.exp(0.2)),
        "accuracy": 0.5,
    }
    assert math.isnan(totals([])["loss"]) and math.isnan(totals([RowScore(0, 0.0, 0)])["perplexity"])
    assert perplexity(1000.0) == math.inf and math.isnan(perplexity(math.nan))


def test_the_first_position_is_no_prediction() -> None:
    labels_BS = torch.tensor([[7, 8, -100], [-100, -100, -100]])
    log_probs = TokenLogProbs(torch.tensor([[0.0, -2.0, 0.0], [0.0, 0.0, 0.0]]), torch.zeros(2, 3).bool())
    assert row_scores(log_probs, labels_BS) == [RowScore(1, 2.0, 0), RowScore(0, -0.0, 0)]
