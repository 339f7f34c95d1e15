"""Host memory that an accelerator copies from beside its work, where there is such memory.

Copies from pageable memory wait for the host and for the device. CUDA and its like pin pages. Devices that
share the host's memory (mps) have nothing to pin, and torch says so only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch


def host_buffer(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Uninitialised host memory, pinned where that is possible."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=_can_pin())


def piece_nbytes(nbytes: int, largest: int) -> list[int]:
    """Sizes of pinned buffers that hold `nbytes` together, `largest` (a power of two) the most.

    Pinned memory comes in powers of two: an expert of 9.8 MB would take 16.8 MB in one piece. In pieces that
    are powers of two only the last is rounded up, and it is at most a sixteenth of the whole.
    """
    sizes, left = [], nbytes
    while left > max(1, nbytes // 16):
        sizes.append(min(largest, 1 << (left.bit_length() - 1)))
        left -= sizes[-1]
    return [*sizes, left] if left else sizes


def owned_by(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """`stream` uses `tensor` as well: its memory is not reused before that is done. A device with a single
    stream needs no such record, and may not know any.
    """
    if stream != torch.accelerator.current_stream(tensor.device):
        tensor.record_stream(stream)


@cache
def _can_pin() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True
