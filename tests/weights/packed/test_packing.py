"""What is packed, in pieces, against bitsandbytes packing all of it at once."""

from __future__ import annotations

import math

import pytest
import torch
from bitsandbytes import functional

from airtune.weights.packed import packing
from airtune.weights.packed.packing import PACKINGS

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(
    scheme: str, weight: torch.Tensor, key: str = "layer.weight"
) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """{key: (dtype, shape, bytes)}, put together as a file is."""
    forms = PACKINGS[scheme].forms(key, tuple(weight.shape), weight.dtype)
    written = {name: bytearray(math.prod(shape) * dtype.itemsize) for name, (dtype, shape) in forms.items()}
    left = {name: len(content) for name, content in written.items()}
    for name, offset, chunk in PACKINGS[scheme].pack(key, weight, CPU):
        content = bytes(chunk.contiguous().view(-1).view(torch.uint8).tolist())
        assert chunk.dtype == forms[name][0]
        written[name][offset : offset + len(content)] = content
        left[name] -= len(content)
    assert set(left.values()) == {0}, "each byte once"
    return {name: (*forms[name], bytes(content)) for name, content in written.items()}


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("bite", [128, 2**22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4(dtype: torch.dtype, bite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BITE", bite)
    weight = torch.randn(7, 192).to(dtype)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    stored = packed("nf4", weight)
    want = {"weight": codes} | {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    assert {f"layer.{name}": (t.dtype, tuple(t.shape), content(t)) for name, t in want.items()} == stored


@pytest.mark.parametrize("bite", [64, 2**22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8(dtype: torch.dtype, bite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BITE", bite)
    weight = torch.randn(7, 33).to(dtype)
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    stored = packed("int8", weight)
    assert stored["layer.weight"] == (torch.int8, (7, 33), content(codes))
    assert stored["layer.SCB"] == (torch.float32, (7,), content(scales))
    assert stored["layer.weight_format"] == (torch.uint8, (), b"\0")


@pytest.mark.parametrize(
    ("scheme", "scales"), [("nf4", "experts.down.absmax"), ("int8", "experts.down_absmax")]
)
def test_a_stack_is_its_matrices(scheme: str, scales: str) -> None:
    """Each part has the experts in front, and an expert's rows of it are what it would be packed as alone."""
    stack_EIO = torch.randn(3, 4, 64)
    stored = packed(scheme, stack_EIO, "experts.down")
    alone = [packed(scheme, matrix, "experts.down") for matrix in stack_EIO]
    for name in ("experts.down", scales):
        assert stored[name][1][0] == 3
        assert stored[name][2] == b"".join(one[name][2] for one in alone)


def test_rows_that_nf4_does_not_take() -> None:
    assert PACKINGS["nf4"].takes((5, 128)) and PACKINGS["int8"].takes((5, 96))
    assert not PACKINGS["nf4"].takes((64, 96))


def test_zeros() -> None:
    assert set(packed("nf4", torch.zeros(2, 64))["layer.weight"][2]) == {0x77}
    assert set(packed("int8", torch.zeros(2, 64))["layer.weight"][2]) == {0}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_what_is_not_finite(scheme: str, number: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = number
    with pytest.raises(ValueError, match=r"layer\.weight holds numbers from .* cannot be packed"):
        packed(scheme, weight)


def test_what_float16_does_not_hold() -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = -7e4
    packed("nf4", weight)
    with pytest.raises(ValueError, match=r"holds numbers from -70000 to"):
        packed("int8", weight)
