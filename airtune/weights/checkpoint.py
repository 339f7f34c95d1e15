"""A checkpoint as a lazy mapping: tensor name -> where its bytes lie. No tensor is read here.

The weights stay in the user's own safetensors files; a 1.4 TB checkpoint is some 200 files whose headers
together take tens of MB, so opening it is a matter of a second, and that second is where a bad
checkpoint is refused: a shard that is missing or cut short, an index that does not match its files, an
adapter where a model should be, a format that cannot be streamed. The alternative is to find out at
layer 57, an hour into a run.

What this gives up: files are not hashed, so a flipped bit inside a tensor goes unseen, and a file that
changes after `open` is noticed only by reads that run past its new end.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from airtune.weights.header import CheckpointError, StoredTensor, listed, read_header
from airtune.weights.packed.manifest import check_store
from airtune.weights.supported import SUPPORTED, read_json, refuse_packed, refuse_storage

__all__ = ["Checkpoint", "CheckpointError", "StoredTensor"]

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".ckpt": "PyTorch pickle",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".onnx": "ONNX",
}
_NUMBERED_SHARD = re.compile(r"(.*)-(\d{1,5})-of-(\d{1,5})\.safetensors")

# What a config and a tokenizer are made of, and a model's own code.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CODE_FILES = ("*.py",)


class Checkpoint(Mapping[str, StoredTensor]):
    """The tensors of one model, by name, without their data.

    Attributes:
        folder: the local folder, also for a checkpoint from the hub; config and tokenizer lie there.
        files: the safetensors files, in name order.
        nbytes: bytes of all tensors together.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self.files = tuple(sorted({tensor.file for tensor in tensors.values()}))
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._tensors = dict(tensors)

    @classmethod
    def open(cls, path: str | Path, *, revision: str | None = None, include_code: bool = False) -> Checkpoint:
        """Read the headers of a local folder (it wins if it exists) or of a hub repository (downloaded).

        Args:
            path: folder, or hub id such as "owner/name". The token comes from the environment, and
                HF_HUB_OFFLINE is honoured.
            revision: branch, tag or commit on the hub.
            include_code: also download the repository's Python files.

        Raises:
            CheckpointError: nothing there, a format that cannot be streamed, or files that do not agree.
        """
        folder = Path(path).expanduser()
        if folder.is_file():
            raise CheckpointError(
                f"{folder}: is a file, expected a checkpoint's folder. Give {folder.parent}. {SUPPORTED}."
            )
        if folder.is_dir():
            if revision is not None:
                logger.warning("%s is a local folder: revision %r is not used", folder, revision)
        else:
            folder = _download(str(path), revision, include_code)
        return cls(folder, _read_tensors(folder))

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    check_store(folder)
    file_names, weight_map = _choose_files(folder, [file.name for file in folder.iterdir() if file.is_file()])
    headers: dict[str, dict[str, StoredTensor]] = {}
    faults: list[str] = []
    for file_name in file_names:
        try:
            headers[file_name] = read_header(folder / file_name)
        except CheckpointError as fault:
            faults.append(str(fault))
    if faults:
        raise CheckpointError(listed(faults, separator="\n"))
    tensors = _join(folder, headers) if weight_map is None else _join_by_index(folder, headers, weight_map)
    if not tensors:
        raise CheckpointError(
            f"{folder}: {listed(file_names)} hold no tensors. Save the model again, or give another folder."
        )
    refuse_storage(folder, tensors)
    return tensors


def _choose_files(folder: Path, names: Collection[str]) -> tuple[list[str], dict[str, str] | None]:
    """Which of `names` hold the weights, and the index's word on which tensor is where (None: no index).

    `folder` needs to hold the JSON files only: before a download `names` is the hub's list. With both a
    single file and an index the single file is read, because that is the one that transformers reads.
    """
    refuse_packed(folder, names)
    if _SINGLE in names:
        if _INDEX in names:
            logger.warning("%s holds %s and %s: reading the former", folder, _SINGLE, _INDEX)
        return [_SINGLE], None
    if _INDEX in names:
        weight_map = _read_index(folder / _INDEX)
        file_names, complete = sorted(set(weight_map.values())), f"{_INDEX} names them"
    else:
        weight_map = None
        file_names = sorted(
            name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_model")
        )
        if not file_names:
            raise _no_weights(folder, names)
        complete = "the names of the other shards count them"
        file_names = sorted({*file_names, *_shards_of(file_names)})
    missing = [name for name in file_names if name not in names]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(file_names)} shards are missing ({complete}): "
            f"{listed(missing, limit=20)}. Finish the download, or copy them there."
        )
    return file_names, weight_map


def _shards_of(file_names: list[str]) -> set[str]:
    """All the shards that "-00002-of-00005" speaks of."""
    shards: set[str] = set()
    for match in filter(None, map(_NUMBERED_SHARD.fullmatch, file_names)):
        stem, number, count = match.groups()
        width = len(number)
        shards |= {f"{stem}-{i:0{width}}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    return shards


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: has no weight_map {{tensor: file}}. Fetch the file again.")
    odd = [name for name in weight_map.values() if not isinstance(name, str)]
    # A name with a folder in it could point anywhere on the disk.
    odd = odd or [name for name in set(weight_map.values()) if not name or Path(name).name != name]
    if odd:
        raise CheckpointError(
            f"{file}: weight_map names {listed(map(repr, odd))}, expected plain names of files beside it."
        )
    return weight_map


def _join(folder: Path, headers: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if len(tensors) < sum(map(len, headers.values())):
        counts = Counter(name for header in headers.values() for name in header)
        twice = [name for name, count in counts.items() if count > 1]
        raise CheckpointError(
            f"{folder}: no {_INDEX}, and {len(twice)} tensors are in more than one of {listed(headers)}: "
            f"{listed(twice)}. Keep one set of files in the folder, or add the index."
        )
    return tensors


def _join_by_index(
    folder: Path, headers: Mapping[str, Mapping[str, StoredTensor]], weight_map: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Index and files must tell the same story; files that the index does not mention were never opened."""
    faults = []
    absent = [
        f"{name} ({file_name})" for name, file_name in weight_map.items() if name not in headers[file_name]
    ]
    if absent:
        faults.append(f"{len(absent)} tensors are not in the file the index gives: {listed(absent)}")
    extra = [
        f"{name} ({file_name})"
        for file_name, header in headers.items()
        for name in header
        if weight_map.get(name) != file_name
    ]
    if extra:
        faults.append(
            f"{len(extra)} tensors are in a file but the index does not put them there: {listed(extra)}"
        )
    if faults:
        raise CheckpointError(
            f"{folder / _INDEX}: index and files disagree: {'; '.join(faults)}. They are of different "
            "versions: fetch the index and these files again."
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _no_weights(folder: Path, names: Collection[str]) -> CheckpointError:
    if _ADAPTER_CONFIG in names:
        base = read_json(folder / _ADAPTER_CONFIG).get("base_model_name_or_path")
        return CheckpointError(
            f"{folder}: holds an adapter ({_ADAPTER_CONFIG}) and no model weights; its base is {base!r}. "
            f"Set model.path to the base model and adapter.path to {folder}."
        )
    others = sorted(
        {_OTHER_FORMATS[Path(name).suffix] for name in names if Path(name).suffix in _OTHER_FORMATS}
    )
    if others:
        return CheckpointError(
            f"{folder}: holds weights as {listed(others)} only, which cannot be streamed. {SUPPORTED}. "
            "Take the model's safetensors version, or load it with transformers and call save_pretrained."
        )
    return CheckpointError(f"{folder}: no weights among {listed(sorted(names)) or 'no files'}. {SUPPORTED}.")


def _download(repo_id: str, revision: str | None, include_code: bool) -> Path:
    """The folder in the hub's cache. Small files come first: they can rule the large ones out."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo_id) or repo_id.startswith("."):
        raise CheckpointError(
            f"{repo_id}: no such folder (in {Path.cwd()}), and not a hub id of the form owner/name."
        )
    patterns = [*SMALL_FILES, *(CODE_FILES if include_code else ())]
    at = repo_id if revision is None else f"{repo_id} at revision {revision}"
    try:
        names = _top_level_names(repo_id, revision)
        if names is None:  # Only what the cache holds can be used, and it is checked like any folder.
            return Path(
                huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=["config.json"])
            )
        folder = Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
        weights, _ = _choose_files(folder, names)
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, revision=revision, allow_patterns=[*patterns, *weights]
            )
        )
    except (HTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"{at}: {_explained(error)}") from error


def _explained(error: HTTPError | LocalEntryNotFoundError) -> str:
    if isinstance(error, GatedRepoError):
        return "the repository is gated. Accept its terms on the hub, and set HF_TOKEN."
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision. Correct model.revision."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no such folder (in {Path.cwd()}), and no such repository on the hub. Correct model.path, or "
            "set HF_TOKEN if the repository is private."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return (
            "not in the local cache, or not all of it, and the hub cannot be reached. Connect (and unset "
            "HF_HUB_OFFLINE), or give a local folder."
        )
    return f"the download stopped ({type(error).__name__}: {error}). Start again, and it goes on."


def _top_level_names(repo_id: str, revision: str | None) -> list[str] | None:
    """The repository's files outside folders (those hold other copies of the weights); None when offline."""
    try:
        names = huggingface_hub.list_repo_files(repo_id, revision=revision)
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except (HTTPError, OfflineModeIsEnabled) as error:
        logger.warning(
            "the hub's file list of %s is out of reach (%s: %s): using the cache",
            repo_id,
            type(error).__name__,
            error,
        )
        return None
    return [name for name in names if "/" not in name]
