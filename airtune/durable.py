"""Files that are there whole or not at all, also after a power cut.

A rename is atomic, but it may reach the disk before the bytes do. So the bytes are brought down first, then
the file gets its name, then the folder, which holds the name, is brought down as well.
"""

from __future__ import annotations

import os
from pathlib import Path


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


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file; text is UTF-8 and its line ends stay as they are."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    put(partial, file)
