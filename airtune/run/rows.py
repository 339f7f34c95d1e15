"""From JSONL files to rows that still know where they came from.

Training data arrives from spreadsheets, editors on three systems, and scripts that were killed half-way.
Python's text mode hides what such files are: it splits on U+2028 inside a string, translates line ends, and
guesses an encoding. So files are read as bytes, split on the byte `\\n` and nothing else, and decoded line by
line as UTF-8 (a byte order mark is allowed at the start of a file). Every complaint names file, line and
reason, and nothing is skipped but blank lines.

A row is one JSON object in one of three forms:

    {"messages": [{"role": ..., "content": ...}, ...]}         a conversation
    {"prompt": ..., "completion": ...}                         two strings, or two lists of messages
    {"text": ...}                                              plain text

A `null` says that there is no value; `0`, `false` and `""` are values. The form is found in the first row and
holds for every row of every file: a mixture is more often a mistake than a wish.
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Each form with the fields that it must have.
FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object and the place that it was read from."""

    file: Path
    line: int  # the first line of a file is 1
    fields: dict[str, object]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Rows:
    """All rows of some files, which share one form (a key of `FORMS`)."""

    form: str
    rows: list[Row]


def load_rows(paths: str | Sequence[str], *, format: str = "auto") -> Rows:
    """Reads JSONL files (paths, or patterns such as `data/**/*.jsonl`) in the order given.

    `format` is a key of `FORMS`, or "auto" to take the form of the first row. Raises ValueError when a file
    is missing or named twice, when a line is no JSON object, when there is no row at all, or when a row has
    another form.
    """
    if format != "auto" and format not in FORMS:
        raise ValueError(f"data format is {format!r}, expected auto, {', '.join(FORMS)}")
    files = find_files(paths)
    rows = [row for file in files for row in read_jsonl(file)]
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, files))}: expected one JSON object a line")
    form = _form_of_first(rows[0]) if format == "auto" else format
    for row in rows:
        if any(row.fields.get(name) is None for name in FORMS[form]):
            raise ValueError(_other_form(row, form, rows[0]))
    logger.debug("read %d rows from %d files, form: %s", len(rows), len(files), form)
    return Rows(form, rows)


def find_files(paths: str | Sequence[str]) -> list[Path]:
    """The files that `paths` name: each path or pattern in turn, the matches of a pattern sorted."""
    named_by: dict[Path, str] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        for file in _matches(path):
            if file in named_by:
                raise ValueError(f"{file} is named twice, by {named_by[file]!r} and by {path!r}")
            named_by[file] = path
    if not named_by:
        raise ValueError("no data files were named: give a path, a pattern such as data/*.jsonl, or a list")
    return list(named_by)


def _matches(path: str) -> list[Path]:
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{path} is a folder: name the files in it, for instance {path.rstrip('/')}/*.jsonl")
    if file.is_file():  # before anything is read as a pattern: a file may be called data[1].jsonl
        return [file]
    found = [Path(name) for name in sorted(glob.glob(str(file), recursive=True)) if Path(name).is_file()]
    if not found:
        raise ValueError(f"no file is called {path}, nor does one match it (looked from {Path.cwd()})")
    return found


def read_jsonl(file: Path) -> Iterator[Row]:
    """Yields the JSON objects of one file. ValueError names file, line and reason."""
    with file.open("rb") as stream:
        for number, line_bytes in enumerate(stream, start=1):  # a binary file ends its lines at b"\n" alone
            if number == 1:
                line_bytes = line_bytes.removeprefix(b"\xef\xbb\xbf")
            if line_bytes.strip():
                yield Row(file, number, _parse(line_bytes, f"{file}:{number}"))


def _parse(line_bytes: bytes, where: str) -> dict[str, object]:
    try:
        value = json.loads(line_bytes.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line ({error.reason})") from error
    except json.JSONDecodeError as error:
        cut = "" if line_bytes.endswith(b"\n") else "; the file ends here without a line end: was it cut?"
        raise ValueError(f"{where}: not JSON, {error.msg} at column {error.colno}{cut}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object a line, got {describe(value)}")
    if (
        b"\\ud" in line_bytes.lower()
    ):  # half of a surrogate pair is legal JSON and no text: tokenizers fail on it
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: a lone surrogate (\\ud800 to \\udfff) stands for no character"
            ) from error
    return value


def describe(value: object) -> str:
    """A JSON value in the words of JSON, cut short: `null`, `list [1, 2]`, `string "..."`."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    text = json.dumps(value, ensure_ascii=False)
    return f"{names[type(value)]} {text if len(text) <= 40 else text[:37] + '...'}"


def _forms_of(row: Row) -> list[str]:
    return [form for form, names in FORMS.items() if all(row.fields.get(name) is not None for name in names)]


def _form_of_first(row: Row) -> str:
    forms = _forms_of(row)
    if len(forms) != 1:
        got = f"could be any of {', '.join(forms)}" if forms else f"is of no known form: {_fields_of(row)}"
        raise ValueError(
            f"{row.where}: the row {got}. Expected {_expected()}; data.format forces one of them"
        )
    return forms[0]


def _other_form(row: Row, form: str, first: Row) -> str:
    others = _forms_of(row)
    if others and row is not first:
        return f"mixed forms: {first.where} is the first row of {form}, {row.where} the first of {others[0]}"
    return f"{row.where}: expected {' and '.join(FORMS[form])}, got {_fields_of(row)}"


def _fields_of(row: Row) -> str:
    names = [f"{name} (null)" if value is None else name for name, value in row.fields.items()]
    return f"the fields {', '.join(names)}" if names else "an empty object"


def _expected() -> str:
    return ", or ".join(" and ".join(names) for names in FORMS.values())
