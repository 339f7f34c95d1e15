"""Files that are there whole or not at all, also after a power cut.

A rename is atomic, but it may reach the disk before the bytes do. So the bytes are brought down first, then
the file gets its name, then the folder, which holds the name, is brought down as well. And what takes hours
to write is written by one process: of two, one would give the other's half of a file its name.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(partial: Path, file: Path) -> None:
    """Give a complete file its name, in the same folder; one of that name is replaced."""
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)


def partial_of(file: Path) -> Path:
    """What a file is called while it is written."""
    return file.with_name(f".{file.name}.partial")


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file; text is UTF-8 and its line ends stay as they are."""
    partial = partial_of(file)
    partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    put(partial, file)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other process is in `folder` that asks for it as well. ValueError when one is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is writing into {folder}: wait for it, or name another folder"
            ) from error
        except OSError as error:
            logger.warning("Another process in %s would not be noticed: no lock (%s)", folder, error)
        yield
    finally:
        os.close(descriptor)
