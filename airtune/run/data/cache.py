"""Prepared rows that outlive a run, kept under a fingerprint of all that they were made from.

Rendering and tokenising 50 GB of text takes hours, and the result is wanted again at every resume. What is
kept must never stand for something else, so the name of the folder is a hash over everything that decides
the ids:

    files       path, weight, size and content. Above 64 MiB a whole read costs seconds a start, so there the
                first and last 4 MiB stand for it, with inode, mtime and ctime, which no program can set back
    tokenizer   its whole `tokenizer.json`, its chat templates, the code of its class
    options     of the preparation; a template file by its content; today's date where a template writes it
    code        the source of this package and the versions of the libraries that render and tokenise

Whatever changes, the name changes; nothing is ever compared or updated in place. A folder is written under
another name and renamed when it is complete, and its sizes are checked when it is opened.

Beside each folder lies a lock, whose time is that of its last use. While all kept rows together take more
than is free besides, those used longest ago are dropped: of the room on the disk that is not taken by others,
they leave half. A run that has its rows open keeps them; another that wants them prepares them again.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache as computed_once
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from airtune.model.adapter_io import atomic_folder
from airtune.run.data.files import DataFile
from airtune.run.data.prepared import Fill, PreparedData, map_rows, write_rows

logger = logging.getLogger(__name__)

_WHOLE_BYTES = 64 * 2**20  # files up to this size are hashed whole
_END_BYTES = 4 * 2**20
_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def kept_rows(
    cache_folder: Path,
    fill: Fill,
    files: Sequence[DataFile],
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, object],
) -> PreparedData:
    """The rows that `fill` writes, from `cache_folder` where an earlier call has left them.

    `options`: everything beside files and tokenizer that decides what `fill` writes. Raises what `fill`
    raises (then nothing is kept), ValueError when a file changes while it is read, and OSError.
    """
    contents = [_file_print(file) for file in files]
    folder = cache_folder / _name(contents, tokenizer, options)
    with _alone(_lock_of(folder)):
        if (data := _opened(folder)) is not None:
            logger.info("prepared rows are those of an earlier start, in %s", folder)
            return data
        _make_room(folder)
        with atomic_folder(folder) as partial:
            write_rows(partial, fill)
            if [_file_print(file) for file in files] != contents:
                raise ValueError(
                    "the data files changed while they were read: start again when they are whole"
                )
        kept_nbytes = _make_room(folder)
        sizes_gb = (_nbytes(folder) / 1e9, kept_nbytes / 1e9)
        logger.info(
            "prepared rows are kept in %s: %.2f GB, with those of other runs %.2f GB", folder, *sizes_gb
        )
        return map_rows(folder)


def _name(contents: object, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> str:
    parts = {
        "files": contents,
        "tokenizer": _tokenizer_print(tokenizer),
        "options": dict(options),
        "template": _template_print(tokenizer, options["chat_template"]),
        "code": _code_print(),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


@computed_once
def _code_print() -> list[str]:
    own = [_hash(path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return own + [version(name) for name in _LIBRARIES]


def _file_print(file: DataFile) -> list[object]:
    return [file.name, file.kind, file.weight, *map(_content_print, file.paths)]


def _content_print(path: Path) -> list[object]:
    stat = path.stat()
    with path.open("rb") as stream:
        if stat.st_size <= _WHOLE_BYTES:
            return [str(path), stat.st_size, _hash(stream.read())]
        ends = stream.read(_END_BYTES)
        stream.seek(-_END_BYTES, os.SEEK_END)
        ends += stream.read()
    return [str(path), stat.st_size, _hash(ends), stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _tokenizer_print(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    return [
        tokenizer.backend_tokenizer.to_str(),  # all of tokenizer.json
        tokenizer.special_tokens_map,
        tokenizer.split_special_tokens,
        _hash(Path(inspect.getfile(type(tokenizer))).read_bytes()),
    ]


def _template_print(tokenizer: PreTrainedTokenizerBase, chosen: object) -> list[object]:
    """The templates that may be used, and the date if one asks for it, as those of some models do."""
    templates = json.dumps(tokenizer.chat_template, sort_keys=True)
    if isinstance(chosen, str) and "{" not in chosen and Path(chosen).expanduser().is_file():
        templates += Path(chosen).expanduser().read_text(encoding="utf-8")
    asks_for_date = "strftime_now" in f"{templates}{chosen}"
    return [templates, date.today().isoformat() if asks_for_date else ""]


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def _opened(folder: Path) -> PreparedData | None:
    if not folder.is_dir():
        return None
    try:
        return map_rows(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the prepared rows in %s are damaged (%s): preparing them again", folder, error)
        return None


def _make_room(folder: Path) -> int:
    """Drops what was used longest ago, but for `folder`, while there is need to; bytes of what is left."""
    locks = sorted(folder.parent.glob(".*.lock"), key=lambda lock: lock.stat().st_mtime_ns)
    sizes = {lock: sum(map(_nbytes, _folders_of(lock))) for lock in locks}
    for lock in locks:
        if sum(sizes.values()) <= shutil.disk_usage(folder.parent).free:
            break
        if lock == _lock_of(folder) or not sizes[lock]:
            continue
        with lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # they are being prepared
                continue
            for old in _folders_of(lock):
                logger.info("dropping the prepared rows in %s, to leave room on the disk", old)
                shutil.rmtree(old)
        sizes[lock] = 0
    return sum(sizes.values())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _folders_of(lock: Path) -> list[Path]:
    """The rows of a lock, and what a run that was killed left of them."""
    name = lock.name.removesuffix(".lock")
    found = [lock.with_name(name[1:]), *lock.parent.glob(f"{name}.*")]
    return [path for path in found if path.is_dir()]


def _nbytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:  # another run gives it its name just now, or drops it
        return 0


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time for one folder: the second waits, and then finds the rows of the first."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process prepares the same rows: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(lock)
        yield
