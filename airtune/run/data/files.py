"""From what the user wrote to a list of files, each of a known kind.

A source is one of

    chats.jsonl                        a file; its kind is told by its suffix (see `KINDS`)
    data/**/*.jsonl                    a pattern: its matches, sorted
    data/                              a folder: all data below it, sorted, what is hidden left out
    saved/train                        a folder that `datasets` wrote with save_to_disk, also below another
    hf:owner/name[:config][/split]     a data set on the hub; the split is train unless it is given

The prefix `hf:` is there so that a mistyped path is never looked up on the network. Sources are given as one
text, as a list, or as a mapping from source to weight:

    {chats.jsonl: 1, identity.jsonl: 3, web.parquet: 0.5}

The weight of a file is how many times each of its rows counts in an epoch: 3 is every row three times, 0.5 is
a seeded half of the rows, 2.5 every row twice and a seeded half once more.

A suffix `.gz` or `.zst` may follow that of a text file. Of a folder or a pattern, files of no known kind are
left out, and the log says so. A file that is named itself must be of a known kind: a guess would read a
README as training data.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

logger = logging.getLogger(__name__)

Sources = str | Sequence[str] | Mapping[str, float]

HUB_PREFIX = "hf:"
KINDS = {  # suffix: how the file is read
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst")
_HUB = re.compile(r"hf:(?P<path>[^/:]+(?:/[^/:]+)?)(?::(?P<config>[^/]+))?(?:/(?P<split>[^/]+))?")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One thing to read rows from. name: a path, or a source that starts with `hf:`.

    kind: a value of `KINDS`, "saved" (a folder of `datasets`) or "hub".
    """

    name: str
    kind: str
    weight: float = 1.0

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files on this machine that the rows come from; none for a data set of the hub."""
        if self.kind == "hub":
            return ()
        path = Path(self.name)
        return tuple(sorted(file for file in path.rglob("*") if file.is_file())) if path.is_dir() else (path,)


def find_files(sources: Sources) -> list[DataFile]:
    """The files that `sources` name, in the order given. ValueError when one is missing or named twice."""
    named_by: dict[str, str] = {}
    files = []
    for source, weight in _weighted(sources):
        for file in _files_of(source, weight):
            key = file.name if file.kind == "hub" else os.path.realpath(file.name)
            if key in named_by:
                raise ValueError(
                    f"{file.name} is named twice, by {named_by[key]!r} and by {source!r}: to count its rows "
                    f"more often, give it a weight ({{{source}: 2}})"
                )
            named_by[key] = source
            files.append(file)
    if not files:
        raise ValueError("no data files were named: give a path, a pattern such as data/*.jsonl, or a list")
    return files


def hub_parts(source: str) -> tuple[str, str | None, str]:
    """Repository, configuration and split of `hf:owner/name[:config][/split]`."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise ValueError(
            f"{source}: expected hf:owner/name, hf:owner/name/split or hf:owner/name:config/split"
        )
    return match["path"], match["config"], match["split"] or "train"


def open_bytes(file: str) -> BinaryIO:
    """Opens a file for reading bytes, decompressed and past a byte order mark of UTF-8.

    ValueError when the file is UTF-16, which spreadsheets and PowerShell write.
    """
    stream = _open_stored(file)
    try:
        head = _peek(stream, file)
        if head.startswith(_UTF16_MARKS):
            raise ValueError(f"{file}: UTF-16 text (it starts with {head[:2].hex(' ')}), save it as UTF-8")
        if head.startswith(b"\xef\xbb\xbf"):
            stream.read(3)
    except BaseException:
        stream.close()
        raise
    return stream


def _open_stored(file: str) -> BinaryIO:
    suffix = Path(file).suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if suffix == ".zst":
        import pyarrow

        # pyarrow's stream has no peek; it is a raw stream in all but its type.
        return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(file, compression="zstd")))
    return open(file, "rb")


def _peek(stream: BinaryIO, file: str) -> bytes:
    assert isinstance(stream, (io.BufferedReader, gzip.GzipFile))
    try:
        return stream.peek(4)[:4]
    except OSError as error:
        raise ValueError(f"{file}: cannot be read as {Path(file).suffix} ({error})") from error


def _weighted(sources: Sources) -> list[tuple[str, float]]:
    if isinstance(sources, str):
        return [(sources, 1.0)]
    if not isinstance(sources, Mapping):
        return [(source, 1.0) for source in sources]
    for source, weight in sources.items():
        # A bool is a number to Python; someone who writes {file: true} means something else.
        if isinstance(weight, bool) or not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {source} is {weight!r}, expected a number above 0")
    return [(source, float(weight)) for source, weight in sources.items()]


def _files_of(source: str, weight: float) -> list[DataFile]:
    if not source:
        raise ValueError('a data file is called "": give a path, or . for all that is in the current folder')
    if source.startswith(HUB_PREFIX):
        hub_parts(source)
        return [DataFile(source, "hub", weight)]
    path = Path(source).expanduser()
    if path.is_dir():
        return _known(list(_below(path)), source, weight)
    if path.is_file():  # before anything is read as a pattern: a file may be called data[1].jsonl
        return [DataFile(str(path), _kind_or_refusal(path), weight)]
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise ValueError(f"no file is called {source}, nor does one match it (looked from {Path.cwd()})")
    return _known(found, source, weight)


def _below(folder: Path) -> Iterator[Path]:
    """Files and saved data sets, sorted. A link to a folder is not followed: it may lead back up."""
    if _is_saved(folder):
        yield folder
        return
    if (folder / "dataset_dict.json").is_file():
        yield _only_split(folder)
        return
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)
        else:
            yield path


def _only_split(folder: Path) -> Path:
    try:
        names = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder}/dataset_dict.json: cannot be read ({error!r})") from error
    if len(names) != 1:
        named = ", ".join(str(folder / name) for name in names)
        raise ValueError(f"{folder} holds {len(names)} splits: name one of {named}")
    return folder / names[0]


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _known(paths: list[Path], source: str, weight: float) -> list[DataFile]:
    files = [DataFile(str(path), kind, weight) for path in paths if (kind := _kind(path))]
    others = [path for path in paths if not _kind(path)]
    if not files:
        raise ValueError(f"{source} holds no data file: expected names that end in {', '.join(KINDS)}")
    if others:
        _say_once(
            f"{source}: {len(files)} data files; {len(others)} others are left out, such as {others[0]}"
        )
    return files


@cache
def _say_once(line: str) -> None:
    """A command looks for its files early, to say what is wrong with them, and again when it reads them."""
    logger.info("%s", line)


def _kind(path: Path) -> str | None:
    if path.is_dir():
        return "saved" if _is_saved(path) else None
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        inner = KINDS.get(Path(path.stem).suffix.lower())
        return None if inner == "parquet" else inner
    return KINDS.get(suffix)


def _kind_or_refusal(path: Path) -> str:
    kind = _kind(path)
    if kind is None:
        raise ValueError(
            f"{path}: the name does not tell what is in it: expected one that ends in {', '.join(KINDS)} "
            "(and then in .gz or .zst, but for Parquet)"
        )
    return kind
