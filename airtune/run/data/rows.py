"""Rows of one form out of all files of a run, read when they are asked for.

Files may be larger than memory, and each is read several times (to check it, to count, for every epoch), so
`Rows` is not a list: each iteration over it opens the files anew.

The form (see `forms`) is found in the first row and holds for every row of every file: a mixture is more
often a mistake than a wish. It is an error even where bad rows are skipped: half of the data might be
missing, and training would go on.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator

from airtune.run.data.files import DataFile, Sources, find_files
from airtune.run.data.forms import ALSO_READ, FORMS, detect, forms_of, has_form, named_fields, unknown_form
from airtune.run.data.readers import read
from airtune.run.data.records import BadRow, Row

logger = logging.getLogger(__name__)

OTHER_FORM = "unknown form"
BAD_ROWS = ("error", "skip")
_LEAVE_OUT = "data.bad_rows=skip leaves such rows out"


def open_rows(sources: Sources, *, format: str = "auto", bad_rows: str = "error", seed: int = 0) -> Rows:
    """The rows of `sources` (see `files`), in the order given. Nothing is read yet.

    format: a key of `FORMS`, or "auto" for the form of the first row. bad_rows: "error" raises at the first
    bad row, "skip" leaves such rows out and counts them. seed: which rows a weight below 1 picks. ValueError
    when a file is missing or named twice.
    """
    if format != "auto" and format not in FORMS:
        raise ValueError(f"data format is {format!r}, expected auto, {', '.join(FORMS)}")
    if bad_rows not in BAD_ROWS:
        raise ValueError(f"bad_rows is {bad_rows!r}, expected {' or '.join(BAD_ROWS)}")
    return Rows(find_files(sources), format, skip_bad=bad_rows == "skip", seed=seed)


class Rows:
    """What `open_rows` gives: an iterable of `Row`, as often as wanted; a row of weight 2 comes twice.

    skipped: how many rows the last iteration left out, by kind; first_skipped: for each kind the first place
    and its reason. Iterating raises ValueError, with file, line and reason, for a bad row (unless they are
    skipped), for a mixture of forms, and when there is no row at all.
    """

    def __init__(self, files: list[DataFile], format: str, *, skip_bad: bool, seed: int) -> None:
        self.files = files
        self.skip_bad = skip_bad
        self.seed = seed
        self.skipped: Counter[str] = Counter()
        self.first_skipped: dict[str, str] = {}
        self._form = None if format == "auto" else format
        self._is_found = False  # in a row, rather than given
        self._first_where = ""  # of the first row of that form

    @property
    def form(self) -> str:
        """A key of `FORMS`. Reads up to the first row unless it is known."""
        if self._form is None:
            next(iter(self))
        assert self._form is not None
        return self._form

    @property
    def names(self) -> str:
        """Of the files, the first few."""
        return ", ".join(file.name for file in self.files[:3]) + (", ..." if len(self.files) > 3 else "")

    def __iter__(self) -> Iterator[Row]:
        self.skipped.clear()
        self.first_skipped.clear()
        is_empty = True
        for number, file in enumerate(self.files):
            for row in self._rows_of(file, random.Random(f"{self.seed}, file {number}")):
                is_empty = False
                yield row
        if is_empty:
            raise ValueError(self._no_rows())

    def refuse(self, where: str, kind: str, reason: str, advice: str = "") -> None:
        """Hears of a bad row, also of one that others find to be bad: raises, or counts it as skipped."""
        if not self.skip_bad:
            raise ValueError(f"{where}: {reason}" + (f" ({advice})" if advice else ""))
        self.skipped[kind] += 1
        self.first_skipped.setdefault(kind, f"{where}: {reason}")

    def _rows_of(self, file: DataFile, draws: random.Random) -> Iterator[Row]:
        for _ in range(int(file.weight)):
            yield from self._good_rows_of(file)
        part = file.weight % 1
        if part:
            yield from _pick(self._good_rows_of(file), part, draws)

    def _good_rows_of(self, file: DataFile) -> Iterator[Row]:
        for record in read(file):
            if isinstance(record, BadRow):
                self.refuse(record.where, record.kind, record.reason, _LEAVE_OUT)
            elif self._is_of_form(record):
                yield record

    def _is_of_form(self, row: Row) -> bool:
        if self._form is None:
            if not forms_of(row.fields):
                self.refuse(row.where, OTHER_FORM, unknown_form(row.fields))
                return False
            try:
                self._form = detect(row.fields)
            except ValueError as error:
                raise ValueError(f"{row.where}: {error}") from error
            self._is_found = True
        if not has_form(row.fields, self._form):
            self._refuse_form(row, self._form)
            return False
        if not self._first_where:
            self._first_where = row.where
            self._announce(row, self._form)
        return True

    def _refuse_form(self, row: Row, form: str) -> None:
        others = forms_of(row.fields)
        if others and self._is_found:
            raise ValueError(
                f"mixed forms: {self._first_where} is the first row of {form}, "
                f"{row.where} the first of {others[0]}"
            )
        reason = f"expected {' and '.join(FORMS[form])}, got {named_fields(row.fields)}"
        self.refuse(row.where, OTHER_FORM, reason)

    def _announce(self, row: Row, form: str) -> None:
        how = f"found in {row.where}" if self._is_found else "as data.format says"
        others = [name for name in row.fields if name not in (*FORMS[form], *ALSO_READ[form])]
        unread = f"; of each row these fields are not used: {', '.join(others)}" if others else ""
        logger.info("form: %s, %s%s", form, how, unread)

    def _no_rows(self) -> str:
        skipped = [f"{count} skipped, {self.first_skipped[kind]}" for kind, count in self.skipped.items()]
        return "\n".join([f"no rows in {self.names}", *skipped])


def _pick(rows: Iterator[Row], share: float, draws: random.Random) -> Iterator[Row]:
    """Each row with the odds `share`, and as many as that makes of all rows, rounded up or down.

    The ordered pivotal method (Deville and Tille, 1998): two rows fight over the odds they have together, the
    winner of a whole is picked, and whoever has odds left meets the next row. One row is held at a time, so
    a row may come after one that it stood before.
    """
    held, held_odds = next(rows, None), share
    for row in rows:
        assert held is not None
        odds = held_odds + share
        if odds < 1:  # one of the two is out
            if draws.random() * odds < share:
                held = row
            held_odds = odds
        else:  # one of the two is in
            if draws.random() * (2 - odds) < 1 - share:
                picked, held = held, row
            else:
                picked = row
            held_odds = odds - 1
            yield picked
    # What is left of adding up shares by the last row is a whole but for rounding, where it should be.
    if held is not None and draws.random() < round(held_odds, 9):
        yield held
