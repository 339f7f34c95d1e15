"""Checkpoint files that are holes: of any size, all zeros, and on disk nothing but their header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_sparse(file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """A safetensors file with tensors of these dtypes and shapes."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
