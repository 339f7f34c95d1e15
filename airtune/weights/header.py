"""The header of one safetensors file: which tensor lies where.

    8 bytes          header_nbytes, little-endian
    header_nbytes    JSON: {name: {"dtype": "BF16", "shape": [5120, 512], "data_offsets": [begin, end]}, ...}
    the rest         the tensors, back to back; data_offsets count from 8 + header_nbytes

A 5 GB shard has a header of some 10-100 kB, so everything that can be wrong with the *form* of a
checkpoint (a download cut short, a pointer where a file should be, a range that does not fit its shape)
is known after one small read per file and before any weight moves. What this cannot see is a flipped bit
inside a tensor: nothing here reads tensor data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

# F6_E2M3 and F6_E3M2 have no torch type and are refused by name. F4 packs two values into each element.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# safetensors' own limit; the 330,000 tensors of a 2.8T mixture of experts would take about 50 MB in one file.
MAX_HEADER_NBYTES = 100_000_000

_LENGTH_NBYTES = 8
_PADDING = b" \t\r\n\0"
_FETCH_AGAIN = "Fetch the file again"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, what was found, and what to do."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `nbytes` bytes of `file` from its byte `offset`, row-major, little-endian."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def listed(items: Iterable[object], *, limit: int = 5, separator: str = ", ") -> str:
    """The first `limit` items and the number of the rest: a checkpoint can have 300,000 tensors at fault."""
    texts = [str(item) for item in items]
    shown = separator.join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown}{separator}and {len(texts) - limit} more"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file, from its header and its length alone; the file is opened once.

    Raises `CheckpointError` when the file is not safetensors, is a git-lfs pointer, is shorter or longer than
    its header says, or when a tensor's range, shape and dtype do not agree. One message names all of them.
    """
    with file.open("rb") as stream:
        file_nbytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(_LENGTH_NBYTES)
        header_nbytes = int.from_bytes(prefix, "little")
        data_start = _LENGTH_NBYTES + header_nbytes
        if len(prefix) < _LENGTH_NBYTES or not 2 <= header_nbytes <= MAX_HEADER_NBYTES:
            raise _not_safetensors(file, file_nbytes, prefix + stream.read(256))
        if data_start > file_nbytes:
            raise CheckpointError(
                f"{file}: holds {file_nbytes} bytes, its header alone needs {data_start}: at least "
                f"{data_start - file_nbytes} bytes are missing, or it is no safetensors file. {_FETCH_AGAIN}."
            )
        header = stream.read(header_nbytes)

    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    for name, entry in _parse(file, header).items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _stored_tensor(file, name, entry, data_start)
        except CheckpointError as fault:
            faults.append(str(fault))
    # Ranges are compared with one another only when each of them makes sense.
    faults = faults or _layout_faults(tensors, data_start, file_nbytes)
    if faults:
        raise CheckpointError(f"{file}: {listed(faults, separator='; ')}.")
    return tensors


def _not_safetensors(file: Path, file_nbytes: int, head: bytes) -> CheckpointError:
    if head.startswith(b"version https://git-lfs"):
        sizes = [line.removeprefix(b"size ") for line in head.splitlines() if line.startswith(b"size ")]
        real = f", the real one {sizes[0].decode('ascii', 'replace')}" if sizes else ""
        return CheckpointError(
            f"{file}: is a git-lfs pointer, not the weights (it has {file_nbytes} bytes{real}). "
            "Run `git lfs pull` in the repository, or download with `hf download`."
        )
    if file_nbytes < _LENGTH_NBYTES:
        return CheckpointError(
            f"{file}: holds {file_nbytes} bytes; a safetensors file begins with {_LENGTH_NBYTES} bytes "
            f"that give the length of its header. {_FETCH_AGAIN}."
        )
    header_nbytes = int.from_bytes(head[:_LENGTH_NBYTES], "little")
    return CheckpointError(
        f"{file}: not a safetensors file: it begins with {head[:16]!r}, a header length of {header_nbytes} "
        f"bytes (expected 2 to {MAX_HEADER_NBYTES}). {_FETCH_AGAIN}, or save the model with save_pretrained."
    )


def _parse(file: Path, header: bytes) -> dict[str, object]:
    try:
        parsed: object = json.loads(header.rstrip(_PADDING).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON ({error}). {_FETCH_AGAIN}.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            f"{file}: the header is a JSON {type(parsed).__name__}, expected an object. {_FETCH_AGAIN}."
        )
    return parsed


def _stored_tensor(file: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{name}: the header entry is {entry!r}, expected dtype, shape and data_offsets"
        )
    code, stored_shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{name}: dtype {code!r} is not supported; known are {', '.join(DTYPES)}")
    if not _are_counts(stored_shape):
        raise CheckpointError(f"{name}: shape {stored_shape!r} is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{name}: data_offsets {offsets!r} is not [begin, end] with begin <= end")
    dtype, shape = DTYPES[code], tuple(stored_shape)
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"{name}: F4 of shape {list(shape)}, but F4 needs an even last size")
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = offsets[1] - offsets[0]
    expected_nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != expected_nbytes:
        raise CheckpointError(
            f"{name}: data_offsets {offsets} hold {nbytes} bytes, {code} of shape {stored_shape} takes "
            f"{expected_nbytes}; the file was written wrongly, convert or fetch it again"
        )
    return StoredTensor(file, data_start + offsets[0], nbytes, dtype, shape)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    # `type(...) is int`: True is an int, and 3.0 is not.
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)


def _layout_faults(tensors: dict[str, StoredTensor], data_start: int, file_nbytes: int) -> list[str]:
    """The format leaves no gaps: sorted by offset, each tensor begins where the one before ends."""
    faults: list[str] = []
    end, before = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            gap = tensor.offset - end
            how = (
                f"{gap} bytes after {before} ends"
                if gap > 0
                else f"{-gap} bytes before {before} ends (overlap)"
            )
            faults.append(f"{name} begins {how}; the file was written wrongly, convert or fetch it again")
        if tensor.offset + tensor.nbytes >= end:
            end, before = tensor.offset + tensor.nbytes, name
    if end > file_nbytes:
        faults.append(
            f"holds {file_nbytes} bytes, its header asks for {end}: {end - file_nbytes} bytes are missing. "
            f"The download or copy was cut short. {_FETCH_AGAIN}"
        )
    elif end < file_nbytes:
        faults.append(
            f"holds {file_nbytes} bytes, its header asks for {end}: {file_nbytes - end} bytes follow the "
            f"last tensor. Header and data are not of one write. {_FETCH_AGAIN}"
        )
    return faults
