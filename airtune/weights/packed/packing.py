"""Packing a weight with bitsandbytes: what it will be stored as, known before a byte is read, and its bytes.

    nf4     4.5 bits a weight: a code of 4 bits, and a float32 scale for each block of 64. 54 GB become 15.
    int8    8 bits, and a float32 scale for each row

Packing goes a few million numbers at a time, so that neither a stack of experts (3.2 GB) nor the
intermediate float32 of a large matrix is ever in memory whole; block by block and row by row the result is
the same. On a CPU bitsandbytes packs some 15 million numbers a second and thread (27B: half an hour on one),
on a GPU as fast as they come from the disk.

The scales of nf4 are not packed in turn (4.13 bits): 8 % fewer bytes, for a second rounding and twice the
tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

import torch

BLOCKSIZE = 64
_BITE = 4 * 2**20  # numbers that are packed at once
_LARGEST_FP16 = torch.finfo(torch.float16).max

Form = tuple[torch.dtype, tuple[int, ...]]
Chunk = tuple[str, int, torch.Tensor]  # key, offset in its tensor in bytes, what stands from there on


class Nf4:
    """bitsandbytes' 4-bit floats for numbers that are normally distributed.

    As every packing does, it stores a matrix [out, in] or a stack of them [E, out, in].
    """

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of that shape can be packed."""
        # Other rows could be packed too, but bitsandbytes' own CPU kernel does not read them back rightly.
        return shape[-1] % BLOCKSIZE == 0

    def forms(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Form]:
        """{key: (dtype, shape)} of what is stored for a weight called `key`."""
        front, count = shape[:-2], math.prod(shape[-2:])
        return {
            key: (torch.uint8, (*front, count // 2, 1)),
            f"{key}.absmax": (torch.float32, (*front, count // BLOCKSIZE)),
            f"{key}.quant_map": (torch.float32, (16,)),
            _state_key(key): (torch.uint8, (len(_state(shape, dtype)),)),
        }

    def pack(self, key: str, weight: torch.Tensor, device: torch.device) -> Iterator[Chunk]:
        """All of that, in chunks on the host; computed on `device`. ValueError for what is not finite."""
        from bitsandbytes import functional

        yield f"{key}.quant_map", 0, functional.get_4bit_type("nf4", device="cpu")
        state_bytes = list(_state(tuple(weight.shape), weight.dtype))
        yield _state_key(key), 0, torch.tensor(state_bytes, dtype=torch.uint8)
        start = 0
        for bite in weight.contiguous().view(-1).split(_BITE):
            _check_finite(key, bite)
            packed, state = functional.quantize_4bit(bite.to(device), blocksize=BLOCKSIZE, quant_type="nf4")
            yield key, start // 2, packed.cpu()
            yield f"{key}.absmax", start // BLOCKSIZE * state.absmax.itemsize, state.absmax.cpu()
            start += len(bite)


class Int8:
    """Rows of 8-bit integers. bitsandbytes rounds to float16 first, which is too small for some weights."""

    def takes(self, shape: tuple[int, ...]) -> bool:
        return True

    def forms(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Form]:
        scales, layout = self._beside(key)
        forms: dict[str, Form] = {key: (torch.int8, shape), scales: (torch.float32, shape[:-1])}
        return forms | ({layout: (torch.uint8, ())} if layout else {})

    def pack(self, key: str, weight: torch.Tensor, device: torch.device) -> Iterator[Chunk]:
        from bitsandbytes import functional

        scales, layout = self._beside(key)
        if layout:
            yield layout, 0, torch.tensor(0, dtype=torch.uint8)  # rows as they are
        columns, start = weight.shape[-1], 0
        for rows in weight.view(-1, columns).split(max(1, _BITE // columns)):
            _check_finite(key, rows, _LARGEST_FP16)
            packed, absmax, _ = functional.int8_vectorwise_quant(rows.to(device, torch.float16))
            yield key, start * columns, packed.cpu()
            yield scales, start * absmax.itemsize, absmax.cpu()
            start += len(rows)

    def _beside(self, key: str) -> tuple[str, str | None]:
        prefix, _, leaf = key.rpartition(".")
        return (f"{prefix}.SCB", f"{prefix}.weight_format") if leaf == "weight" else (f"{key}_absmax", None)


PACKINGS: Mapping[str, Nf4 | Int8] = {"nf4": Nf4(), "int8": Int8()}


def _state_key(key: str) -> str:
    return f"{key}.quant_state.bitsandbytes__nf4"


def _state(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """The JSON object beside a weight, as bitsandbytes writes it."""
    name = str(dtype).removeprefix("torch.")
    return json.dumps({"quant_type": "nf4", "blocksize": BLOCKSIZE, "dtype": name, "shape": shape}).encode()


def _check_finite(key: str, weight: torch.Tensor, largest: float = math.inf) -> None:
    low, high = weight.aminmax()  # NaN, if there is one
    if not (torch.isfinite(low) and torch.isfinite(high) and max(-low, high) <= largest):
        raise ValueError(
            f"{key} holds numbers from {low.item():g} to {high.item():g}, which cannot be packed. The "
            "checkpoint is damaged: fetch the file again."
        )
