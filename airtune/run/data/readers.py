"""One reader for each kind of text file: bytes to rows, one after the other.

Training data arrives from spreadsheets, editors on three systems, and scripts that were killed half-way.
Python's text mode hides what such files are: it splits on U+2028 inside a string, translates line ends, and
guesses an encoding. So files are read as bytes, split on the byte `\\n` and nothing else, and decoded line by
line as UTF-8. Blank lines are skipped, anything else that is no row comes out as a `BadRow`.

    json     one object a line, or a list of objects, or {"data": [objects]}: told apart by the first bytes,
             as suffixes are often wrong. Lists are cut into their elements, which need not be one a line
    csv tsv  a line of names, then one row a record; every value is a string, and an empty cell is ""
    txt      one text a line

Nothing holds more than a row and a buffer of a megabyte, so files may be larger than memory.
"""

from __future__ import annotations

import csv
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from airtune.run.data.files import DataFile, open_bytes
from airtune.run.data.json_list import list_in
from airtune.run.data.records import BadRow, Row, describe, has_surrogate, parse_json
from airtune.run.data.tables import read_hub, read_parquet, read_saved

CELLS = "wrong number of cells"
NOT_CSV = "not CSV"
NOT_JSON = "not JSON"
NOT_OBJECT = "no JSON object"
NOT_UTF8 = "not UTF-8"

Records = Iterator[Row | BadRow]


def read(file: DataFile) -> Records:
    """The rows of one file, in order. ValueError, with the file's name, when it cannot be read on at all."""
    try:
        yield from _READERS[file.kind](file.name)
    except (EOFError, OSError, zlib.error) as error:  # the last, and the first, are what a cut .gz raises
        raise ValueError(f"{file.name}: cannot be read ({error})") from error


def _read_json(name: str) -> Records:
    with open_bytes(name) as stream:
        elements = list_in(stream, name)
        if elements is not None:
            for number, element in elements:
                yield _parse(element, f"{name}:{number}", "element")
            return
    with open_bytes(name) as stream:
        for number, line in enumerate(stream, start=1):  # a binary file ends its lines at b"\n" alone
            if line.strip():
                yield _parse(line, f"{name}:{number}", "line")


def _parse(json_bytes: bytes, where: str, what: str) -> Row | BadRow:
    try:
        value = parse_json(json_bytes.rstrip().decode("utf-8"))  # or the end of a cut line is in the next
    except UnicodeDecodeError as error:
        return _not_utf8(error, where, what)
    except json.JSONDecodeError as error:
        is_cut = what == "line" and not json_bytes.endswith(b"\n")
        line = f"line {error.lineno} of the element, " if what == "element" else ""
        cut = "; the file ends here without a line end: was it cut?" if is_cut else ""
        what_is_wrong = error.msg.removesuffix(" at")
        return BadRow(where, NOT_JSON, f"not JSON, {what_is_wrong} at {line}column {error.colno}{cut}")
    except ValueError as error:
        return BadRow(where, NOT_JSON, f"JSON that cannot be held: {error}")
    if not isinstance(value, dict):
        return BadRow(where, NOT_OBJECT, f"expected a JSON object, got {describe(value)}")
    return Row(where, value)


def _not_utf8(error: UnicodeDecodeError, where: str, what: str) -> BadRow:
    return BadRow(where, NOT_UTF8, f"not UTF-8 at byte {error.start} of the {what} ({error.reason})")


def _read_text(name: str) -> Records:
    with open_bytes(name) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                yield Row(where, {"text": line.decode("utf-8").removesuffix("\n").removesuffix("\r")})
            except UnicodeDecodeError as error:
                yield _not_utf8(error, where, "line")


def _read_cells(name: str, delimiter: str) -> Records:
    csv.field_size_limit(sys.maxsize)  # of the whole process, and 128 KiB by default: texts are longer
    with open_bytes(name) as stream:
        # Bytes that are no UTF-8 come through as surrogates: an error here would lose the reader's place.
        lines = (line.decode("utf-8", "surrogateescape") for line in stream)
        # strict: a quote in the wrong place is an error, not a cell with the rest of the file in it.
        records = csv.reader(lines, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            number = records.line_num + 1
            try:
                cells = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                if names is None:
                    raise ValueError(f"{name}:{number}: the line of names is not CSV, {error}") from error
                yield _bad_record(name, number, records.line_num, error)
                continue
            if not any(cell.strip() for cell in cells) and len(cells) < 2:
                continue
            if names is None:
                names = _checked_names(cells, delimiter, f"{name}:{number}")
            else:
                yield _record(names, cells, f"{name}:{number}")


def _checked_names(cells: list[str], delimiter: str, where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if has_surrogate("".join(names)):
        raise ValueError(f"{where}: the line of names is not UTF-8")
    twice = [name for name, count in Counter(names).items() if name and count > 1]
    if twice:
        raise ValueError(f"{where}: two columns are called {twice[0]}")
    other = next((mark for mark in ",;\t" if mark in names[0]), None)
    if len(names) == 1 and other:
        raise ValueError(
            f"{where}: names are separated by {other!r}, but by the suffix it should be {delimiter!r}"
        )
    return names


def _record(names: list[str], cells: list[str], where: str) -> Row | BadRow:
    if len(cells) != len(names):
        return BadRow(where, CELLS, f"expected {len(names)} cells ({', '.join(names)}), got {len(cells)}")
    for name, cell in zip(names, cells, strict=True):
        if has_surrogate(cell):
            return BadRow(where, NOT_UTF8, f"not UTF-8 in the column {name}")
    # A column without a name is the row number that spreadsheets and data frames put first.
    return Row(where, {name: cell for name, cell in zip(names, cells, strict=True) if name})


def _bad_record(name: str, first: int, last: int, error: csv.Error) -> BadRow:
    if last > first and "end of data" in str(error):
        raise ValueError(f"{name}:{first}: not CSV, a quote that opens here is not closed before the end")
    return BadRow(f"{name}:{first}", NOT_CSV, f"not CSV, {error}")


_READERS: dict[str, Callable[[str], Records]] = {
    "json": _read_json,
    "csv": partial(_read_cells, delimiter=","),
    "tsv": partial(_read_cells, delimiter="\t"),
    "txt": _read_text,
    "parquet": read_parquet,
    "saved": read_saved,
    "hub": read_hub,
}
