"""Decoding against bitsandbytes' own functions and against the formula, written as plainly as it can be."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional

from airtune.weights.packed import bnb_decode
from airtune.weights.packed.bnb_decode import FourBit, by_formula, decode_4bit, decode_8bit
from tests.sim import Simulator

Parts = dict[str, torch.Tensor]
# Rows that are whole blocks, rows that are not, less than a block, an odd count, and a stack.
SHAPES = [(6, 128), (3, 96), (7, 32), (2, 5), (5, 7), (33, 65), (4, 6, 64)]


def packed_4bit(
    shape: tuple[int, ...],
    *,
    quant_type: str = "nf4",
    blocksize: int = 64,
    nested: bool = False,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype = torch.uint8,
) -> tuple[Parts, FourBit]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
    )
    return stored(packed, state)


def stored(packed: torch.Tensor, state: functional.QuantState) -> tuple[Parts, FourBit]:
    beside = state.as_dict(packed=True)
    told = FourBit.read(beside.pop(f"quant_state.bitsandbytes__{state.quant_type}"))
    return {"weight": packed, **beside}, told


def naive(parts: Parts, state: FourBit) -> torch.Tensor:
    codes = [
        code for byte in parts["weight"].view(-1).view(torch.uint8).tolist() for code in divmod(byte, 16)
    ]
    absmax = parts["absmax"]
    if absmax.dtype == torch.uint8:
        spread = parts["nested_absmax"].repeat_interleave(state.nested_blocksize)[: len(absmax)]
        absmax = parts["nested_quant_map"][absmax.int()] * spread + state.nested_offset
    count = torch.Size(state.shape).numel()
    scales = absmax.repeat_interleave(state.blocksize)[:count]
    return (parts["quant_map"][torch.tensor(codes[:count])] * scales).to(state.dtype).view(state.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits_of_any_shape(
    shape: tuple[int, ...], blocksize: int, quant_type: str, nested: bool
) -> None:
    parts, state = packed_4bit(shape, blocksize=blocksize, quant_type=quant_type, nested=nested)
    assert torch.equal(decode_4bit(parts, state), naive(parts, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_are_those_of_the_library(nested: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 128).to(dtype)
    packed, library = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    want = functional.dequantize_4bit(packed, library)
    assert torch.equal(decode_4bit(*stored(packed, library)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_and_the_formula_agree(dtype: torch.dtype) -> None:
    parts, state = packed_4bit((33, 66), dtype=dtype)
    got = by_formula(parts["weight"].view(-1), parts["absmax"], 33 * 66, state)
    assert torch.equal(got, decode_4bit(parts, state).view(-1))


def test_the_formula_goes_bite_by_bite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb_decode, "_BITE", 64)
    parts, state = packed_4bit((5, 71))
    assert torch.equal(decode_4bit(parts, state), naive(parts, state))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_may_be_stored_as_another_dtype(storage: torch.dtype) -> None:
    parts, state = packed_4bit((6, 128), storage=storage)
    assert parts["weight"].dtype == storage
    assert torch.equal(decode_4bit(parts, state), decode_4bit(*packed_4bit((6, 128))))


def test_some_matrices_of_a_stack() -> None:
    parts, state = packed_4bit((4, 6, 64))
    whole = decode_4bit(parts, state)
    stacked = {"weight": parts["weight"].view(4, -1, 1), "absmax": parts["absmax"].view(4, -1)}
    assert torch.equal(decode_4bit(stacked, state), whole)
    some = {name: part[2:3] for name, part in stacked.items()}
    assert torch.equal(decode_4bit(some, state), whole[2:3])


@pytest.mark.parametrize("nested", [False, True])
def test_a_device_without_kernels(nested: bool, sim: Simulator) -> None:
    parts, state = packed_4bit((33, 65), nested=nested, dtype=torch.bfloat16)
    got = decode_4bit({name: part.to("sim") for name, part in parts.items()}, state)
    assert got.device.type == "sim"
    assert torch.equal(got.cpu(), decode_4bit(parts, state))
    weight, scales = packed_8bit((5, 24))
    got = decode_8bit(weight.to("sim"), scales.to("sim"), torch.bfloat16)
    assert torch.equal(got.cpu(), decode_8bit(weight, scales, torch.bfloat16))


def test_shapes_alone() -> None:
    parts, state = packed_4bit((6, 128), dtype=torch.bfloat16)
    got = decode_4bit({name: part.to("meta") for name, part in parts.items()}, state)
    assert got.is_meta and got.shape == (6, 128) and got.dtype == torch.bfloat16
    weight, scales = packed_8bit((5, 24))
    assert decode_8bit(weight.to("meta"), scales.to("meta"), torch.float16).shape == (5, 24)


def test_parts_that_do_not_belong_together() -> None:
    parts, state = packed_4bit((6, 128))
    with pytest.raises(ValueError, match=r"shape \(6, 128\) is 384 bytes and 12 scales, and 352 and 12"):
        decode_4bit({**parts, "weight": parts["weight"][:-32]}, state)
    with pytest.raises(ValueError, match="and 384 and 11 were stored"):
        decode_4bit({**parts, "absmax": parts["absmax"][:-1]}, state)
    weight, scales = packed_8bit((5, 24))
    with pytest.raises(ValueError, match=r"\(5, 24\) has a scale for each row, and SCB of shape \(4,\)"):
        decode_8bit(weight, scales[:-1], torch.float32)


@pytest.mark.parametrize("text", ["{", "[]", '{"shape": [2, 2]}', '{"quant_type": "nf4", "blocksize": 64}'])
def test_a_description_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="quant_state is not what bitsandbytes writes"):
        FourBit.read(torch.tensor(list(text.encode()), dtype=torch.uint8))


def packed_8bit(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, scales, _ = functional.int8_vectorwise_quant(weight.half().view(-1, shape[-1]))
    return packed.view(shape), scales.view(shape[:-1])


@pytest.mark.parametrize("bite", [16, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 24), (1, 7), (3, 4, 16)])
def test_eight_bits(
    shape: tuple[int, ...], dtype: torch.dtype, bite: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bnb_decode, "_BITE", bite)
    weight, scales = packed_8bit(shape)
    want = functional.int8_vectorwise_dequant(weight.view(-1, shape[-1]), scales.view(-1)).to(dtype)
    assert torch.equal(decode_8bit(weight, scales, dtype), want.view(shape))
