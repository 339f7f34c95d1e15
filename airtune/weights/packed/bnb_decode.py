"""Numbers out of what bitsandbytes packed.

4 bits ("nf4", "fp4"). The matrix is flattened and cut into blocks (of 64, as a rule) with a scale each; two
codes lie in a byte, the first in its upper half. The scales may be packed in turn, in 8 bits and blocks of
256:

    W[i] = values[code[i]] * absmax[i // 64]
    absmax[b] = nested_quant_map[byte[b]] * nested_absmax[b // 256] + nested_offset

8 bits. A scale for each row: W[o, i] = weight[o, i] * SCB[o] / 127.

Where bitsandbytes has kernels for 4 bits they decode (2048 x 2048 on one CPU thread: 0.6 ms; in torch: 17
ms); on other devices the formula does, to the same bits. The CPU kernel takes a matrix row by row and is
wrong where a row is no whole number of blocks. Handed a block as a row it is right for every shape.

It rounds twice where the model computes in another dtype than the weight was packed from: like bitsandbytes,
it decodes to the latter first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Devices for which bitsandbytes has kernels of its own.
_KERNELS = frozenset({"cpu", "cuda", "xpu"})
# From this block size on, its CPU kernel gives way to one that is compiled first.
_LARGE_BLOCK = 2048
# What is decoded at once without a kernel: some 30 MB of intermediate values.
_BITE = 2**20
# 1 / 127, as bitsandbytes writes it.
_SCALE_OF_INT8 = 7.874015718698502e-3


@dataclass(frozen=True)
class FourBit:
    """What is told beside a packed weight, in a JSON object."""

    quant_type: str
    blocksize: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    @classmethod
    def read(cls, stored: torch.Tensor) -> FourBit:
        """From the object's bytes (uint8, host). ValueError if it is not one of bitsandbytes'."""
        try:
            told = json.loads(bytes(stored.tolist()))
            return cls(
                quant_type=str(told["quant_type"]),
                blocksize=int(told["blocksize"]),
                dtype=getattr(torch, told["dtype"]),
                shape=tuple(told["shape"]),
                nested_blocksize=int(told.get("nested_blocksize", 0)),
                nested_offset=float(told.get("nested_offset", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"quant_state is not what bitsandbytes writes: {error!r}") from error


def decode_4bit(parts: Mapping[str, torch.Tensor], state: FourBit) -> torch.Tensor:
    """The weight: a new tensor of `state.dtype` on the device of its parts.

    Args:
        parts: "weight" (bytes, in any dtype) and "absmax" (float32, or uint8 with "nested_absmax" and
            "nested_quant_map"). Those of a stack [E, ...] have E in front, or fewer for some of its matrices.

    Raises:
        ValueError: the parts do not make up `state.shape`.
    """
    packed, absmax = parts["weight"], parts["absmax"]
    shape = (len(packed), *state.shape[1:]) if packed.dim() == len(state.shape) == 3 else state.shape
    count = math.prod(shape)
    blocks = math.ceil(count / state.blocksize)
    if packed.nbytes != math.ceil(count / 2) or absmax.numel() != blocks:
        raise ValueError(
            f"a 4-bit weight of shape {shape} is {math.ceil(count / 2)} bytes and {blocks} scales, "
            f"and {packed.nbytes} and {absmax.numel()} were stored"
        )
    if packed.is_meta:
        return torch.empty(shape, dtype=state.dtype, device="meta")
    packed, absmax = packed.reshape(-1).view(torch.uint8), absmax.reshape(-1)
    if absmax.dtype == torch.uint8:
        absmax = _unnested(absmax, parts["nested_absmax"], parts["nested_quant_map"], state)
    simple = count % 2 == 0 and state.blocksize < _LARGE_BLOCK
    decode = _by_kernel if simple and packed.device.type in _KERNELS else by_formula
    return decode(packed, absmax.float(), count, state).view(shape)


def by_formula(packed: torch.Tensor, absmax: torch.Tensor, count: int, state: FourBit) -> torch.Tensor:
    """`count` numbers out of bytes [ceil(count / 2)] and scales [blocks], on any device."""
    from bitsandbytes import functional

    values = functional.get_4bit_type(state.quant_type, device="cpu")
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).to(packed.device)
    decoded = torch.empty(2 * len(packed), dtype=state.dtype, device=packed.device)
    for start in range(0, len(packed), _BITE):
        bite = pairs[packed[start : start + _BITE].int()].view(-1)
        scales = absmax[2 * start // state.blocksize :][: math.ceil(len(bite) / state.blocksize)]
        bite *= scales.repeat_interleave(state.blocksize)[: len(bite)]
        decoded[2 * start : 2 * start + len(bite)].copy_(bite)
    return decoded[:count]


def _by_kernel(packed: torch.Tensor, absmax: torch.Tensor, count: int, state: FourBit) -> torch.Tensor:
    from bitsandbytes import functional

    whole = count % state.blocksize == 0
    told = functional.QuantState(
        absmax=absmax,
        shape=torch.Size((count // state.blocksize, state.blocksize) if whole else (count,)),
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
    )
    decoded: torch.Tensor = functional.dequantize_4bit(packed.view(-1, 1), told)
    return decoded.view(-1)


def _unnested(
    packed: torch.Tensor, absmax: torch.Tensor, values: torch.Tensor, state: FourBit
) -> torch.Tensor:
    """The scales. Plain torch on every device: there are 64 times fewer of them than of codes."""
    spread = absmax.repeat_interleave(state.nested_blocksize)[: len(packed)]
    return values[packed.int()].mul_(spread).add_(state.nested_offset)


def decode_8bit(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, from `weight` int8 [..., out, in] and `scales` float32 [..., out]."""
    columns = weight.shape[-1]
    if scales.numel() * columns != weight.numel():
        raise ValueError(
            f"an 8-bit weight of shape {tuple(weight.shape)} has a scale for each row, "
            f"and SCB of shape {tuple(scales.shape)} was stored"
        )
    decoded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if weight.is_meta:
        return decoded
    tensors = (weight.view(-1, columns), scales.reshape(-1, 1), decoded.view(-1, columns))
    for some, scale, into in zip(*(t.split(max(1, _BITE // columns)) for t in tensors), strict=True):
        into.copy_((some * scale).mul_(_SCALE_OF_INT8))
    return decoded
