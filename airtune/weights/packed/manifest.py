"""What a store of packed weights was made of, and whether it is whole.

A store is a second copy on the disk, and second copies go stale: the source changes, a write is cut short, a
file is copied half. So `airtune_manifest.json` lies beside the weights. It tells the source by the sizes and
headers of its files and a sample of their contents, and the length and SHA-256 of every file of weights in
the store. While a store is being written its manifest has another name, which is what an unfinished store is
known by.

Lengths are compared whenever the store is opened; digests only when writing goes on after an interruption,
since reading a store takes as long as using it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from airtune.durable import write_whole
from airtune.weights.header import CheckpointError, listed

MANIFEST = "airtune_manifest.json"
UNFINISHED = "airtune_manifest.unfinished.json"

# A checkpoint that was trained on has the same sizes and headers, and other numbers nearly everywhere.
_SAMPLES = 32
_SAMPLE_NBYTES = 4096


@dataclass(frozen=True)
class WrittenFile:
    """A file of a store that is complete."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a store is.

    Args:
        scheme: how it is packed.
        source: {file name: fingerprint} of what it was made of.
        plan: digest of the headers of all its files of weights: what it will be.
        files: those that are complete.
    """

    scheme: str
    source: Mapping[str, Mapping[str, object]]
    plan: str
    files: Mapping[str, WrittenFile]

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Raises CheckpointError if it is not a manifest."""
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            files = {name: WrittenFile(**entry) for name, entry in told["files"].items()}
            return cls(told["scheme"], told["source"], told["plan"], files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file}: is not a manifest of packed weights ({error!r})") from error


def fingerprint(file: Path) -> dict[str, object]:
    """What a file is known by: its length, and a digest of its header and of samples."""
    digest = hashlib.sha256()
    nbytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)  # of safetensors: the header's length; of other, small files: all of it
        digest.update(start + stream.read(min(nbytes, int.from_bytes(start, "little"))))
        for sample in range(_SAMPLES):
            stream.seek(sample * max(0, nbytes - _SAMPLE_NBYTES) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_NBYTES))
    return {"nbytes": nbytes, "sha256_of_samples": digest.hexdigest()}


def digest_of(file: Path) -> WrittenFile:
    """Reads the whole file."""
    with file.open("rb") as stream:
        return WrittenFile(
            os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()
        )


def check_store(folder: Path) -> None:
    """Does nothing for a folder that is no store.

    Raises:
        CheckpointError: a store that is unfinished, or a file of which has another length than was written.
    """
    if (folder / UNFINISHED).is_file():
        raise CheckpointError(
            f"{folder}: packed weights that are not finished ({UNFINISHED}). Run the command that writes "
            "them again; it goes on where it stopped."
        )
    if not (folder / MANIFEST).is_file():
        return
    faults = []
    for name, written in Manifest.read(folder / MANIFEST).files.items():
        file = folder / name
        there = file.stat().st_size if file.is_file() else None
        if there != written.nbytes:
            found = "is missing" if there is None else f"holds {there} bytes"
            faults.append(f"{name} {found}, expected {written.nbytes}")
    if faults:
        raise CheckpointError(
            f"{folder}: not the packed weights that were written: {listed(faults)}. Copy them again, or pack "
            "the model again into an empty folder."
        )
