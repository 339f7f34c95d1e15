"""Files to training data: which rows are used, and an account of what was left out.

The loss of a row with nothing to learn is 0 or NaN, and a prompt longer than `max_length` makes such rows
without a word. So learned tokens are counted on the final ids, after the cut and after the shift (the id at
position 0 is predicted by nothing), and a row that has none is dropped and counted, or is an error. Training
on nothing is never an option.

Rows are held in memory as token ids: 5 bytes a token and some 300 a row, so 100 million tokens in 200
thousand rows take 0.6 GB, and nothing is cached on disk that could go stale.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from airtune.run.encode import Encoded, Encoder
from airtune.run.rows import Row, load_rows
from airtune.run.texts import ScriptWriter

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
OVERLONG = ("drop", "truncate", "error")
_BATCH_ROWS = 512  # tokenised in one call: enough to keep the tokenizer's threads busy

TOO_LONG = "longer than max_length"
NOTHING_LEFT = "nothing to learn after the cut"
NOTHING_TO_LEARN = "nothing to learn"


@dataclass
class Summary:
    """What became of the rows. Tokens are those of the rows that are used."""

    form: str
    learn_on: str
    read: int
    used: int = 0
    truncated: int = 0
    total_tokens: int = 0
    supervised_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    first_dropped: dict[str, str] = field(default_factory=dict)  # by reason: file:line

    def use(self, encoded: Encoded) -> None:
        self.used += 1
        self.total_tokens += len(encoded)
        self.supervised_tokens += encoded.supervised_tokens

    def drop(self, row: Row, reason: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, row.where)

    def __str__(self) -> str:
        lines = [("rows read", self.read, f"form {self.form}"), ("rows used", self.used, "")]
        for reason, count in self.dropped.items():
            lines.append((f"dropped, {reason}", count, f"first at {self.first_dropped[reason]}"))
        lines.append(("rows truncated", self.truncated, ""))
        lines.append(("tokens", self.total_tokens, ""))
        lines.append(("tokens supervised", self.supervised_tokens, f"learn_on {self.learn_on}"))
        width = max(len(name) for name, _, _ in lines)
        return "\n".join(f"{name:{width}}  {count:>12,}  {note}".rstrip() for name, count, note in lines)


class PreparedData(Dataset[dict[str, list[int]]]):
    """Rows of {"input_ids", "labels"}, two lists of int of equal length; `summary` says how they came about.

    A label is the id itself where it is learned and -100 elsewhere, and always at position 0, which nothing
    predicts: so the labels that are not -100 count the same before and after the shift.
    """

    def __init__(self, rows: list[Encoded], summary: Summary) -> None:
        self.rows = rows
        self.summary = summary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        pairs = zip(row.ids, row.learned, strict=True)
        return {
            "input_ids": row.ids.tolist(),
            "labels": [i if learned else IGNORED_LABEL for i, learned in pairs],
        }


def prepare(
    paths: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: str = "auto",
    learn_on: str = "assistant",
    max_length: int = 2048,
    overlong: str = "drop",
    chat_template: str | None = None,
) -> PreparedData:
    """Reads, renders and tokenises the rows of `paths` (see `load_rows`), and logs a summary.

    learn_on: see `scripts`. max_length: in tokens, special tokens included. overlong: what happens to a
    longer row: "drop", "truncate" (it loses its end, and gets no EOS) or "error"; "error" also refuses a row
    with nothing to learn. Raises ValueError, with file and line where there is one, for what cannot be done
    as asked, and when no row is left.
    """
    _check_options(max_length, overlong)
    loaded = load_rows(paths, format=format)
    writer = ScriptWriter(tokenizer, loaded.form, learn_on, chat_template)
    summary = Summary(loaded.form, learn_on, read=len(loaded.rows))
    kept = []
    for row, encoded in _encode(loaded.rows, writer, Encoder(tokenizer)):
        fitting = _fit(row, encoded, max_length, overlong, summary)
        if fitting is not None:
            summary.use(fitting)
            kept.append(fitting)
    if not kept:
        raise ValueError(
            f"no row is left to train on (max_length {max_length}, overlong {overlong}):\n{summary}"
        )
    writer.report()
    _report_straddling(kept)
    logger.info("data\n%s", summary)
    return PreparedData(kept, summary)


def _check_options(max_length: int, overlong: str) -> None:
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: one token predicts the next")
    if overlong not in OVERLONG:
        raise ValueError(f"overlong is {overlong!r}, expected one of {', '.join(OVERLONG)}")


def _encode(rows: Sequence[Row], writer: ScriptWriter, encoder: Encoder) -> Iterator[tuple[Row, Encoded]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH_ROWS)):
        yield from zip(batch, encoder.encode([writer.write(row) for row in batch]), strict=True)


def _fit(row: Row, encoded: Encoded, max_length: int, overlong: str, summary: Summary) -> Encoded | None:
    """`encoded` within `max_length`, or None where the row is dropped. `summary` hears of cuts and drops."""
    is_long = len(encoded) > max_length
    if is_long and overlong == "error":
        raise ValueError(
            f"{row.where}: {len(encoded)} tokens, but max_length is {max_length} and overlong is error"
        )
    if is_long and overlong == "drop":
        summary.drop(row, TOO_LONG)
        return None
    fitting = encoded.cut(max_length) if is_long else encoded
    if fitting.supervised_tokens == 0:
        if overlong == "error":
            raise ValueError(f"{row.where}: nothing in the row is learned, and overlong is error")
        summary.drop(row, NOTHING_LEFT if is_long else NOTHING_TO_LEARN)
        return None
    summary.truncated += is_long
    return fitting


def _report_straddling(rows: Sequence[Encoded]) -> None:
    count = sum(row.straddles for row in rows)
    if count:
        logger.warning(
            "in %d rows one token holds the end of the prompt and the start of what is learned (mostly as "
            "the prompt ends in a space): generation will start from other ids. Move the space to the answer",
            count,
        )
