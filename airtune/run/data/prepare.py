"""Files to training data: which rows are used, and an account of what was left out.

The loss of a row with nothing to learn is 0 or NaN, and a prompt longer than `max_length` makes such rows
without a word. So learned tokens are counted on the final ids, after the cut and after the shift (the id at
position 0 is predicted by nothing), and a row that has none is dropped and counted, or is an error. Training
on nothing is never an option.

Rows pass through one batch at a time, and what becomes of them is written as it is made (see `prepared`), so
files may be larger than memory. With a `cache_folder` the next start finds them there (see `cache`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from transformers import PreTrainedTokenizerBase

from airtune.run.data.cache import kept_rows
from airtune.run.data.encode import Encoded, Encoder
from airtune.run.data.files import Sources
from airtune.run.data.forms import Tokens, canonical
from airtune.run.data.prepared import PreparedData, RowWriter, rows_of_this_run
from airtune.run.data.rows import Rows, open_rows
from airtune.run.data.summary import BAD_ROW, NOTHING_LEFT, NOTHING_TO_LEARN, TOO_LONG, Summary
from airtune.run.data.texts import Script, ScriptWriter

logger = logging.getLogger(__name__)

_OVERLONG = ("drop", "truncate", "error")
# Scripts that are tokenised in one call: enough to keep the tokenizer's threads busy. Offsets are Python
# objects of some 150 bytes a token, so a million characters are about 40 MB while they last.
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1_000_000
_NEWS_S = 30.0


@dataclass(frozen=True)
class _Preparation:
    """The way from rows to ids, with its choices."""

    rows: Rows
    writer: ScriptWriter
    encoder: Encoder
    max_length: int
    overlong: str

    def fill(self, store: RowWriter) -> Summary:
        """Writes every row that is used to `store`. ValueError when none is, or as `overlong` asks."""
        summary = Summary(self.rows.form, self.writer.learn_on, self.max_length)
        straddling, said_s = 0, time.monotonic()
        for where, encoded in self._encoded(summary):
            fitting = self._fit(where, encoded, summary)
            if fitting is not None:
                straddling += fitting.straddles
                summary.use(fitting)
                store.add(fitting, where)
            if time.monotonic() - said_s > _NEWS_S:
                said_s = time.monotonic()
                logger.info("preparing rows: %d read, now at %s", summary.read, where)
        for reason, count in self.rows.skipped.items():
            summary.dropped[reason] = count
            summary.first_dropped[reason] = self.rows.first_skipped[reason]
        summary.read += sum(self.rows.skipped.values())
        if not summary.used:
            raise ValueError(
                f"no row is left of {self.rows.names} (max_length {self.max_length}):\n{summary}"
            )
        summary.notes += self.writer.notes() + _straddling_note(straddling)
        return summary

    def _encoded(self, summary: Summary) -> Iterator[tuple[str, Encoded]]:
        for batch in _batches(self._scripts(summary)):
            encoded = self.encoder.encode([script for _, script in batch])
            yield from zip((where for where, _ in batch), encoded, strict=True)

    def _scripts(self, summary: Summary) -> Iterator[tuple[str, Script | Tokens]]:
        for row in self.rows:
            try:
                script = self.writer.write(canonical(row, self.rows.form), row.where)
            except ValueError as error:
                self.rows.refuse(row.where, BAD_ROW, str(error).removeprefix(f"{row.where}: "))
            else:
                summary.read += 1
                summary.chat |= isinstance(script, Script) and not script.plain
                yield row.where, script

    def _fit(self, where: str, encoded: Encoded, summary: Summary) -> Encoded | None:
        """`encoded` within `max_length`, or None where the row is dropped. `summary` hears of it."""
        length = len(encoded)
        summary.longest = max(summary.longest, length)
        is_long = length > self.max_length
        if is_long and self.overlong == "error":
            raise ValueError(
                f"{where}: {length} tokens, but max_length is {self.max_length} and overlong is error"
            )
        if is_long and self.overlong == "drop":
            summary.drop(where, TOO_LONG)
            return None
        fitting = encoded.cut(self.max_length) if is_long else encoded
        if fitting.supervised_tokens == 0:
            if self.overlong == "error":
                raise ValueError(f"{where}: nothing in the row is learned, and overlong is error")
            summary.drop(where, NOTHING_LEFT if is_long else NOTHING_TO_LEARN)
            return None
        summary.truncated += is_long
        return fitting


def prepare(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: str = "auto",
    learn_on: str = "assistant",
    max_length: int = 2048,
    overlong: str = "drop",
    bad_rows: str = "error",
    chat_template: str | None = None,
    seed: int = 0,
    cache_folder: Path | None = None,
) -> PreparedData:
    """Reads, renders and tokenises the rows of `sources`, and says in the log what there is to know of them.

    Args:
        sources, format, seed: see `open_rows`.
        learn_on, chat_template: see `texts`.
        max_length: in tokens, special tokens included.
        overlong: what happens to a longer row: "drop", "truncate" (it loses its end, and gets no EOS) or
            "error", which also refuses a row with nothing to learn.
        bad_rows: what happens to a row that cannot be read or written: "error", or "skip" (it is counted).
        cache_folder: where prepared rows are kept for later calls; None, or rows of the hub: for this one.

    Raises:
        ValueError: with file and line where there are such, for what cannot be done as asked, and when no row
            is left.
    """
    _check_options(max_length, overlong)
    rows = open_rows(sources, format=format, bad_rows=bad_rows, seed=seed)
    writer = ScriptWriter(tokenizer, rows.form, learn_on, chat_template)
    preparation = _Preparation(rows, writer, Encoder(tokenizer), max_length, overlong)
    if cache_folder is None or not _can_keep(rows, cache_folder):
        data = rows_of_this_run(preparation.fill)
    else:
        options = {"format": format, "learn_on": learn_on, "max_length": max_length, "overlong": overlong}
        options |= {"bad_rows": bad_rows, "chat_template": chat_template, "seed": seed}
        data = kept_rows(cache_folder, preparation.fill, rows.files, tokenizer, options)
    for note in data.summary.notes:
        logger.warning("%s", note)
    return data


def _can_keep(rows: Rows, folder: Path) -> bool:
    if not all(file.paths for file in rows.files):
        logger.info("rows of the hub may change unseen: they are prepared for this run alone")
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("rows are prepared for this run alone: they cannot be kept (%s)", error)
        return False
    return True


def _check_options(max_length: int, overlong: str) -> None:
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: one token predicts the next")
    if overlong not in _OVERLONG:
        raise ValueError(f"overlong is {overlong!r}, expected one of {', '.join(_OVERLONG)}")


def _batches(scripts: Iterable[tuple[str, Script | Tokens]]) -> Iterator[list[tuple[str, Script | Tokens]]]:
    batch: list[tuple[str, Script | Tokens]] = []
    characters = 0
    for where, script in scripts:
        batch.append((where, script))
        characters += len(script.ids if isinstance(script, Tokens) else script.text)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _straddling_note(rows: int) -> list[str]:
    if not rows:
        return []
    return [
        f"in {rows} rows one token holds the end of the prompt and the start of what is learned (mostly as "
        "the prompt ends in a space): generation will start from other ids. Move the space to the answer"
    ]
