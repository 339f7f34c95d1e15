"""A weight decoded some rows at a time.

The arithmetic of decoding is in float32. In one piece it would take 10 bytes an element: 890 MB for a 5120 x
17408 matrix that is 89 MB packed and 178 MB decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

# Elements that are decoded at a time. On the CPU their float32 (4 MiB) had better stay in its caches: with
# four times as many it takes twice as long. On accelerators each block costs ten launches, whatever its size.
_BLOCK_NUMEL = 4 * 2**20
_BLOCK_NUMEL_ON_CPU = 2**20


def row_slices(rows: int, columns: int, unit: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows, multiples of `unit` (the last aside), of about as many elements as `device` likes."""
    numel = _BLOCK_NUMEL_ON_CPU if device.type == "cpu" else _BLOCK_NUMEL
    step = unit * max(1, numel // max(1, unit * columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def in_rows(
    tensors: Mapping[str, torch.Tensor], rows: int, columns: int
) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
    """The parts of the tensors that belong to some rows of a weight.

    A tensor has an entry in its first dimension for each row, or for each so many rows, or one for all.
    """
    counts = {len(tensor) for tensor in tensors.values() if tensor.dim() > 0 and len(tensor) > 1}
    unit = rows // min(counts, default=rows)
    if any(unit * count % rows for count in counts):  # blocks that are not whole at the edge
        yield slice(0, rows), dict(tensors)
        return
    for part in row_slices(rows, columns, unit, next(iter(tensors.values())).device):
        yield part, {name: _cut(tensor, part, rows) for name, tensor in tensors.items()}


def _cut(tensor: torch.Tensor, part: slice, rows: int) -> torch.Tensor:
    if tensor.dim() == 0 or len(tensor) == 1:
        return tensor
    return tensor[part.start * len(tensor) // rows : part.stop * len(tensor) // rows]
