"""Tiny checkpoints whose weights are packed, as the releases of each scheme are, and their resident twins.

Every scheme here is made from a model of the zoo, by the library's own way to quantise or by a few lines of
arithmetic, and leaves what releases leave as it is: embeddings, norms, routers, and the head.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CompressedTensorsConfig, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.mxfp4 import FP4_VALUES
from transformers.utils.quantization_config import Mxfp4Config

from tests import twins, zoo

Tensors = dict[str, Tensor]
_LINEAR = re.compile(r"layers\..*(proj|_mqa|\.w[123])\.weight$")
_FP8_MOST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Packed:
    """A model of the zoo, the way its weights are packed, and what config.json says about it."""

    name: str
    pack: Callable[[str, Tensor], Tensors]  # (key, weight) -> what is stored in its place
    settings: Mapping[str, object]
    library: type  # transformers' config for it; takes dequantize=True
    which: re.Pattern[str] = _LINEAR


# Fine-grained fp8


def fp8_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(fp8 weight, scale of each block), the last block of a row or column being what is left."""
    rows, columns = weight.shape
    grid = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    scales = torch.empty(grid)
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            here = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[here].abs().max().float() / _FP8_MOST
            packed[here] = (weight[here].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return packed, scales


def _fp8(block: int) -> Callable[[str, Tensor], Tensors]:
    def pack(key: str, weight: Tensor) -> Tensors:
        packed, scales = fp8_blocks(weight, (block, block))
        return {key: packed, f"{key}_scale_inv": scales}

    return pack


def fp8_settings(block: int) -> dict[str, object]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }


# Stacked experts of 4 bits


def _mxfp4(key: str, weight_EIO: Tensor) -> Tensors:
    """Blocks and scales lie along the inputs of each output."""
    weight = weight_EIO.float().transpose(1, 2)
    experts, outputs, inputs = weight.shape
    groups = weight.reshape(experts, outputs, inputs // 32, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1) / 6)).clamp(-127, 127) + 1
    values = torch.tensor(FP4_VALUES)
    nearest = (
        (groups / exponents.exp2()[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1).to(torch.uint8)
    )
    blocks = nearest[..., 0::2] | (nearest[..., 1::2] << 4)
    return {f"{key}_blocks": blocks, f"{key}_scales": (exponents + 127).to(torch.uint8)}


# compressed-tensors


def _weights(**arguments: object) -> dict[str, object]:
    return {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        **arguments,
    }


INT4 = _weights()
INT4_ASYMMETRIC = _weights(symmetric=False)
INT8 = _weights(num_bits=8, strategy="channel", group_size=None)
FP8_CHANNEL = _weights(num_bits=8, type="float", strategy="channel", group_size=None)
FP8_TENSOR = _weights(num_bits=8, type="float", strategy="tensor", group_size=None)
MXFP4 = _weights(type="float")


def _compressed(form: str, weights: Mapping[str, Any]) -> Callable[[str, Tensor], Tensors]:
    """The library's compression of each weight, with the scales that its simplest observer would find."""

    def pack(key: str, weight: Tensor) -> Tensors:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
        rows = weight.reshape(len(weight), -1, weights["group_size"] or weight.shape[1])
        rows = weight.reshape(1, 1, -1) if weights["strategy"] == "tensor" else rows
        low, high = rows.amin(-1).float(), rows.amax(-1).float()
        most = {
            "int": 2 ** (weights["num_bits"] - 1) - 1,
            "float": 6 if weights["num_bits"] == 4 else _FP8_MOST,
        }
        scale = torch.maximum(low.abs(), high.abs()) / most[weights["type"]]
        state = {"weight": weight, "weight_scale": scale}
        if form == "mxfp4-pack-quantized":
            state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(scale)))
        elif not weights["symmetric"]:
            state["weight_scale"] = scale = (high.clamp(min=0) - low.clamp(max=0)) / 15
            state["weight_zero_point"] = (-8 - low.clamp(max=0) / scale).round().clamp(-8, 7).to(torch.int8)
        if weights["strategy"] == "tensor":
            state["weight_scale"] = scale.reshape(1)
        stored = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
        extra = {"input_scale": torch.ones(1)} if weights["type"] == "float" else {}
        stem = key.removesuffix("weight")
        return {f"{stem}{name}": tensor.contiguous() for name, tensor in {**stored, **extra}.items()}

    return pack


def _settings(form: str, **groups: Mapping[str, object]) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": groups,
    }


def _one_group(name: str, form: str, weights: Mapping[str, object]) -> Packed:
    settings = _settings(form, group_0={"targets": ["Linear"], "weights": weights})
    return Packed(name, _compressed(form, weights), settings, CompressedTensorsConfig)


def _mixed(key: str, weight: Tensor) -> Tensors:
    if ".experts." in key:
        return _compressed("pack-quantized", INT4)(key, weight)
    return _compressed("float-quantized", FP8_CHANNEL)(key, weight)


PACKED: Mapping[str, Packed] = {
    "fp8": Packed("llama", _fp8(32), fp8_settings(32), FineGrainedFP8Config),
    "fp8 experts": Packed("deepseek_v3", _fp8(32), fp8_settings(32), FineGrainedFP8Config),
    "mxfp4 experts": Packed(
        "gpt_oss",
        _mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        Mxfp4Config,
        re.compile(r"experts\.(gate_up|down)_proj$"),
    ),
    "int4": _one_group("llama", "pack-quantized", INT4),
    "int4 asymmetric": _one_group("llama", "pack-quantized", INT4_ASYMMETRIC),
    "int4 experts": _one_group("qwen3_moe_mixed", "pack-quantized", INT4),
    "int8": _one_group("llama", "int-quantized", INT8),
    "fp8 channels": _one_group("llama", "float-quantized", FP8_CHANNEL),
    "fp8 tensors": _one_group("llama", "float-quantized", FP8_TENSOR),
    "mxfp4": _one_group("llama", "mxfp4-pack-quantized", MXFP4),
    "mxfp4 apart": _one_group("mixtral", "mxfp4-pack-quantized", MXFP4),
    "fp8 and int4 experts": Packed(
        "deepseek_v3",
        _mixed,
        _settings(
            "mixed-precision",
            dense={"targets": ["Linear"], "weights": FP8_CHANNEL, "format": "float-quantized"},
            experts={"targets": ["re:.*mlp.experts.*"], "weights": INT4, "format": "pack-quantized"},
        ),
        CompressedTensorsConfig,
    ),
}


def make(scheme: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint called `scheme` into `folder`; returns `folder`."""
    packed = PACKED[scheme]
    zoo.make(packed.name, folder, dtype, shard_size="1GB")
    edit(folder, lambda tensors: pack_all(tensors, packed))
    describe(folder, packed.settings)
    return folder


def pack_all(tensors: Tensors, packed: Packed) -> Tensors:
    made: Tensors = {}
    for key, tensor in tensors.items():
        made |= packed.pack(key, tensor) if packed.which.search(key) else {key: tensor}
    return made


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Write the checkpoint in `folder` again, with other tensors."""
    file = folder / "model.safetensors"
    save_file(
        change({key: tensor.clone() for key, tensor in load_file(file).items()}), file, {"format": "pt"}
    )


def describe(folder: Path, settings: object) -> None:
    """Set quantization_config in config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))


def dense_twin(scheme: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The library's own dequantised model."""
    packed = PACKED[scheme]
    model = zoo.model_class(packed.name).from_pretrained(
        folder, dtype=dtype, quantization_config=packed.library(dequantize=True)
    )
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data = parameter.data.to(dtype)  # decompressed ones are left in their scales' dtype
    return model


def resident(scheme: str, folder: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    """That model with PEFT's adapter, seeded."""
    base = dense_twin(scheme, folder, dtype)
    torch.manual_seed(0)
    return cast(PeftModel, get_peft_model(base, twins.lora(PACKED[scheme].name)))


def streamed(scheme: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    """The same model and adapter through `airtune.load`."""
    return twins.streamed(PACKED[scheme].name, folder, dtype=dtype, **options)
