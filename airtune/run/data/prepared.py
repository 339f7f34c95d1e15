"""Token rows in three flat arrays that are mapped from files.

    ids_N       int32   the ids of all rows, one after another
    learned_N   uint8   1 where the id is learned
    index_R3    int64   for each row: where it ends in the two above, and its place (file, number of the line)

That is 5 bytes a token and 24 a row. A token is about 4 bytes of text, so the arrays are about as large as
the files they are made from, and may be larger than memory too: they are mapped, so 100 GB of rows cost the
pages of the current batch, and opening them takes no time. A table of `datasets` can be mapped as well, but
the place of each row and the account would still be ours to keep, in step with it, and are here as they are.

Shape legend: N tokens of all rows, R rows, S tokens of one row.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from airtune.run.data.encode import Encoded
from airtune.run.data.forms import IGNORED_LABEL
from airtune.run.data.summary import Summary

_ARRAYS: dict[str, np.dtype[Any]] = {
    "ids.int32": np.dtype(np.int32),
    "learned.uint8": np.dtype(np.uint8),
    "index.int64": np.dtype(np.int64),
}
_ACCOUNT = "account.json"  # the summary, and the names of places


class PreparedData(Dataset[dict[str, list[int]]]):
    """Rows of {"input_ids", "labels"}, two lists of int of equal length; `summary` says how they came about.

    A label is the id itself where it is learned and -100 elsewhere, and always at position 0, which nothing
    predicts: so the labels that are not -100 count the same before and after the shift.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], places: Sequence[str], summary: Summary) -> None:
        """`arrays` as in the head of this module; `places` are what the index counts (see `RowWriter`)."""
        self.ids_N, self.learned_N, index = arrays
        self.index_R3 = index.reshape(-1, 3)
        self.places = places
        self.summary = summary

    def __len__(self) -> int:
        return len(self.index_R3)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):  # what ends a loop over the rows
            raise IndexError(f"row {index} of {len(self)}")
        start, end = int(self.index_R3[index - 1, 0]) if index else 0, int(self.index_R3[index, 0])
        ids_S = self.ids_N[start:end]
        labels_S = np.where(self.learned_N[start:end], ids_S, IGNORED_LABEL)
        return {"input_ids": ids_S.tolist(), "labels": labels_S.tolist()}

    def where(self, index: int) -> str:
        """The place that a row was read from, as in `Row.where`: file:line."""
        _, place, number = self.index_R3[index].tolist()
        return self.places[place] + (str(number) if number >= 0 else "")

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, `lengths_R`."""
        return np.diff(self.index_R3[:, 0], prepend=0)


class RowWriter:
    """Appends rows to three binary streams, one for each array.

    `places`: the texts before the numbers at the end of rows' places, one for each file and not for each row.
    """

    def __init__(self, streams: Sequence[BinaryIO]) -> None:
        self._ids, self._learned, self._index = streams
        self._end = 0
        self._place_ids: dict[str, int] = {}

    def add(self, encoded: Encoded, where: str) -> None:
        found = _PLACE.fullmatch(where)
        text, number = (found[1], int(found[2])) if found else (where, -1)
        place = self._place_ids.setdefault(text, len(self._place_ids))
        self._end += len(encoded)
        self._ids.write(encoded.ids)
        self._learned.write(encoded.learned)
        self._index.write(array("q", (self._end, place, number)))

    @property
    def places(self) -> list[str]:
        return list(self._place_ids)


_PLACE = re.compile(r"(.*\D)(0|[1-9]\d{0,17})", re.DOTALL)

Fill = Callable[[RowWriter], Summary]  # writes all rows and gives the account of them


def rows_of_this_run(fill: Fill) -> PreparedData:
    """The rows that `fill` writes, for this process alone.

    The files are deleted at once: what is mapped stays until the process ends, however it ends.
    """
    # On many systems /tmp is memory, which rows may be larger than; TMPDIR is what the user has chosen.
    on_disk = "/var/tmp" if os.path.isdir("/var/tmp") and "TMPDIR" not in os.environ else None
    with TemporaryDirectory(prefix="airtune-rows-", dir=on_disk) as folder:
        write_rows(Path(folder), fill)
        return map_rows(Path(folder))


def write_rows(folder: Path, fill: Fill) -> None:
    """Put the rows that `fill` writes into the empty `folder`, for `map_rows`."""
    with ExitStack() as stack:
        writer = RowWriter([stack.enter_context((folder / name).open("wb")) for name in _ARRAYS])
        summary = fill(writer)
    account = {"summary": vars(summary), "places": writer.places}
    (folder / _ACCOUNT).write_text(json.dumps(account, indent=1), encoding="utf-8")


def map_rows(folder: Path) -> PreparedData:
    """The rows in `folder`, mapped. ValueError or OSError when a part is missing or has another size."""
    account = json.loads((folder / _ACCOUNT).read_text(encoding="utf-8"))
    summary = Summary.of(account["summary"])
    counts = (summary.total_tokens, summary.total_tokens, 3 * summary.used)
    arrays = []
    for (name, dtype), count in zip(_ARRAYS.items(), counts, strict=True):
        nbytes = (folder / name).stat().st_size
        if nbytes != count * dtype.itemsize:
            raise ValueError(f"{folder / name} has {nbytes:,} bytes, expected {count * dtype.itemsize:,}")
        arrays.append(np.memmap(folder / name, dtype, "r"))
    return PreparedData(arrays, account["places"], summary)
