"""Writing a store of packed weights from a checkpoint that is larger than memory.

A shard is written as it will lie there: the header, then each tensor's bytes to their place, a few million
numbers at a time. When it is complete it gets its name, and its line in the manifest. Killed, the writing
goes on at the next shard: what is lost is some minutes of work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from airtune.durable import alone_in, put, write_whole
from airtune.weights.checkpoint import CODE_FILES, SMALL_FILES, Checkpoint
from airtune.weights.file_map import FileMap
from airtune.weights.header import listed
from airtune.weights.packed.manifest import (
    MANIFEST,
    UNFINISHED,
    Manifest,
    WrittenFile,
    check_store,
    digest_of,
    fingerprint,
)
from airtune.weights.packed.packing import PACKINGS
from airtune.weights.packed.shards import Shard, Weight

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
# What lies beside the weights. Templates that have names (one for tools, ...) are in a folder of their own.
_COPIED = (*SMALL_FILES, *CODE_FILES, "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")
_NOT_COPIED = (MANIFEST, UNFINISHED, "config.json", _INDEX)


@dataclass(frozen=True)
class PackedStore:
    """A store that is to be written.

    Args:
        source: the checkpoint; `shards` hold all its tensors.
        config: what config.json will say.
    """

    source: Checkpoint
    scheme: str
    shards: Sequence[Shard]
    config: Mapping[str, object]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def write(self, folder: Path, device: torch.device) -> None:
        """Write it into `folder`: new, empty, or begun before. `device` is where weights are packed.

        Raises:
            ValueError: the folder holds something else, another process writes into it, the disk is too full,
                or a weight cannot be packed.
        """
        if not folder.exists():
            folder.mkdir(parents=True)
        with alone_in(folder):
            self._write_alone(folder, device)

    def _write_alone(self, folder: Path, device: torch.device) -> None:
        manifest = self._manifest()
        before = _manifest_in(folder, manifest)
        if before is not None and (folder / MANIFEST).is_file():
            check_store(folder)
            logger.info("%s is there already: the same source and scheme", folder)
            return
        whole = {} if before is None else self._whole_files(folder, before)
        for partial in folder.glob("*.partial"):
            partial.unlink()
        missing = [shard for shard in self.shards if shard.name not in whole]
        self._require_space(folder, missing)
        manifest = replace(manifest, files=whole)
        manifest.write(folder / UNFINISHED)
        for file in self._small_files():
            copy = folder / file.relative_to(self.source.folder)
            copy.parent.mkdir(exist_ok=True)
            write_whole(copy, file.read_bytes())
        started, done_nbytes = time.perf_counter(), 0
        for shard in missing:
            written = self._write_shard(folder, shard, device)
            manifest = replace(manifest, files={**manifest.files, shard.name: written})
            manifest.write(folder / UNFINISHED)
            done_nbytes += shard.nbytes
            speed = done_nbytes / (time.perf_counter() - started) / 1e6
            logger.info("%s of %d is written, %.0f MB/s", shard.name, len(self.shards), speed)
        self._write_index(folder)
        manifest = replace(manifest, files={**manifest.files, _INDEX: digest_of(folder / _INDEX)})
        manifest.write(folder / UNFINISHED)
        put(folder / UNFINISHED, folder / MANIFEST)

    def _manifest(self) -> Manifest:
        files = (*self.source.files, self.source.folder / "config.json")
        headers = hashlib.sha256(b"".join(shard.header for shard in self.shards)).hexdigest()
        return Manifest(self.scheme, {file.name: fingerprint(file) for file in files}, headers, {})

    def _whole_files(self, folder: Path, before: Manifest) -> dict[str, WrittenFile]:
        """The shards that were written before, and are as they were."""
        whole = {}
        for shard in self.shards:
            if (written := before.files.get(shard.name)) is None:
                continue
            file = folder / shard.name
            if file.is_file() and digest_of(file) == written:
                whole[shard.name] = written
            else:
                logger.warning("%s is not as it was written: it is written again", file)
        logger.info("%d of %d shards are there already", len(whole), len(self.shards))
        return whole

    def _require_space(self, folder: Path, missing: Sequence[Shard]) -> None:
        nbytes = sum(shard.nbytes for shard in missing) + sum(f.stat().st_size for f in self._small_files())
        free_nbytes = shutil.disk_usage(folder).free
        if nbytes > free_nbytes:
            raise ValueError(
                f"{folder}: {nbytes} bytes are to be written, and the disk has {free_nbytes} free. "
                "Free some space, or name a folder on another disk."
            )

    def _write_shard(self, folder: Path, shard: Shard, device: torch.device) -> WrittenFile:
        file, partial = folder / shard.name, folder / f"{shard.name}.partial"
        files = FileMap()
        with partial.open("wb") as stream:
            stream.truncate(shard.nbytes)
            stream.write(shard.header)
            for weight in shard.weights:
                self._write_weight(stream, weight, shard.offsets, files.tensor(weight.stored), device)
                files.release([weight.stored])
        written = digest_of(partial)
        put(partial, file)
        return written

    def _write_weight(
        self,
        stream: BinaryIO,
        weight: Weight,
        offsets: Mapping[str, int],
        tensor: torch.Tensor,
        device: torch.device,
    ) -> None:
        if not weight.packed:
            _put(stream, offsets[weight.key], tensor)
            return
        matrix = tensor.t() if weight.turned else tensor
        for key, offset, chunk in PACKINGS[self.scheme].pack(weight.key, matrix, device):
            _put(stream, offsets[key] + offset, chunk)

    def _write_index(self, folder: Path) -> None:
        weight_map = {key: shard.name for shard in self.shards for key in shard.offsets}
        total_nbytes = sum(shard.nbytes - len(shard.header) for shard in self.shards)
        index = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
        write_whole(folder / _INDEX, json.dumps(index, indent=1).encode())
        write_whole(folder / "config.json", json.dumps(self.config, indent=2).encode())

    def _small_files(self) -> list[Path]:
        found = {file for pattern in _COPIED for file in self.source.folder.glob(pattern)}
        return sorted(file for file in found if file.is_file() and file.name not in _NOT_COPIED)


def _manifest_in(folder: Path, manifest: Manifest) -> Manifest | None:
    """The manifest of the work that was begun in the folder.

    Raises ValueError if there is something else in it than what `manifest` is about.
    """
    file = next((folder / name for name in (MANIFEST, UNFINISHED) if (folder / name).is_file()), None)
    if file is None:
        if folder.is_file() or any(folder.iterdir()):
            raise ValueError(f"{folder} is not an empty folder. Name a new one for the packed weights.")
        return None
    before = Manifest.read(file)
    if before.scheme != manifest.scheme:
        what = f"scheme {before.scheme}, and {manifest.scheme} is asked for"
    elif before.source != manifest.source:
        names = sorted({*before.source, *manifest.source})
        changed = [name for name in names if before.source.get(name) != manifest.source.get(name)]
        what = f"another source, which differs in {listed(changed)}"
    elif before.plan != manifest.plan:
        what = "another version of airtune"
    else:
        return before
    raise ValueError(f"{folder} holds packed weights of {what}. Name a new folder, or empty this one.")


def _put(stream: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    stream.seek(offset)
    stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
