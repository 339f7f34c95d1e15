"""The packed forms that can be decoded, each by transformers' quantizer for it.

A quantizer is made for loading a whole model: it puts modules of its own into the model, asks for a GPU,
and may decode everything at once on the first forward. Here the model keeps its plain linear layers and
experts, and of the quantizer only its conversions are used: which tensors belong to a weight, and the
operation that decodes them, which runs on any device. What they leave open is added: fp8 blocks that are
not whole at the edges (a 576 x 7168 projection has 4.5 x 56 blocks of 128 x 128), and in modules of their
own compressed-tensors and bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from airtune.weights.header import CheckpointError
from airtune.weights.packed.bnb import Bnb4Bit, Bnb8Bit
from airtune.weights.packed.compressed import CompressedTensors
from airtune.weights.packed.decode import COMPUTE_DTYPES, PlainModules, Scheme
from airtune.weights.packed.row_blocks import row_slices


def take_scheme(model: PreTrainedModel) -> Scheme | None:
    """How the weights of `model` are packed, by its config; None if they are not.

    `model` is on meta, with plain modules. It computes in its own dtype from now on, so its config does not
    speak of packed weights any more, and its modules are those that the checkpoint's keys were written for.

    Raises:
        CheckpointError: the config is not complete, or a package is missing.
    """
    owner = model.config
    if getattr(owner, "quantization_config", None) is None:
        owner = owner.get_text_config(decoder=True)
    settings = getattr(owner, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = settings["quant_method"]
    try:
        config = AutoQuantizationConfig.from_dict({**settings})
        config.dequantize = True
        quantizer = _QUANTIZERS[method](config, pre_quantized=True)
    except ImportError as error:
        raise CheckpointError(
            f"the weights are packed with {method}, and a package that reads them is not there: {error}. "
            f"Install airtune[{_EXTRAS.get(method, method)}]."
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"quantization_config of method {method} in config.json is not understood: {error}"
        ) from error
    quantizer.preprocess_model(model)
    quantizer.remove_quantization_config(model)
    if getattr(owner, "quantization_config", None) is not None:
        del owner.quantization_config
    return cast(Scheme, quantizer)


class _Fp8Dequantize(Fp8Dequantize):
    """transformers' operation, also for blocks that are not whole at the edges, some rows at a time."""

    def convert(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, list[torch.Tensor] | torch.Tensor]:
        """It hands the scales of parameters that are not called `weight` on."""
        made = super().convert(*args, **kwargs)
        return {pattern: value for pattern, value in made.items() if not pattern.endswith("_scale_inv")}

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if quantized.dim() == scales.dim() == 3:
            pairs = zip(quantized, scales, strict=True)
            return torch.stack([self._dequantize_one(*pair, output_dtype) for pair in pairs])
        if quantized.dim() != 2 or scales.dim() != 2:
            return super()._dequantize_one(quantized, scales, output_dtype)
        per_item = 2 if quantized.dtype in (torch.int8, torch.float4_e2m1fn_x2) else 1
        rows, columns = len(quantized), quantized.shape[1] * per_item
        height, width = self._block((rows, columns), scales)
        made = torch.empty((rows, columns), dtype=output_dtype, device=quantized.device)
        for part in [] if made.is_meta else row_slices(rows, columns, height, made.device):
            some = scales[part.start // height : math.ceil(part.stop / height)]
            padded = _padded(quantized[part], len(some) * height, some.shape[1] * width // per_item)
            decoded = super()._dequantize_one(padded, some, output_dtype)
            made[part] = decoded[: part.stop - part.start, :columns]
        return made

    def _block(self, shape: tuple[int, int], scales: torch.Tensor) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block and all(math.ceil(shape[i] / block[i]) == scales.shape[i] for i in range(2)):
            return block[0], block[1]
        if any(shape[i] % scales.shape[i] for i in range(2)):
            raise ValueError(f"a weight of {shape} has scales of {tuple(scales.shape)}, in blocks of {block}")
        return shape[0] // scales.shape[0], shape[1] // scales.shape[1]


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    more = (0, columns - tensor.shape[1], 0, rows - len(tensor))
    return F.pad(tensor.view(torch.uint8), more).view(tensor.dtype) if any(more) else tensor


class Fp8(FineGrainedFP8HfQuantizer):
    """Weights of 8 bits (or 4, two in a byte) with a scale for each block, such as 128 x 128, or for all."""

    described: frozenset[str] = frozenset()
    unread = frozenset({"activation_scale", "input_scale"})

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, use_kernels: bool = False, **kwargs: object
    ) -> None:
        """Stacks of experts, which transformers packs one by one, may have been packed as stacks."""
        stacks = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dim() == 3}
        names = {leaf: [leaf, f"{leaf}_scale_inv"] for leaf in sorted(stacks - {"weight"})}
        self.serialized_names = {**self.serialized_names, **names}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Fp8Dequantize}

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        pairs = [(leaf, f"{leaf}_scale_inv") for leaf in self.serialized_names]
        packed = [
            p for p in pairs if p[1] in stored or stored.get(p[0], torch.bfloat16) not in COMPUTE_DTYPES
        ]
        return [name for pair in packed for name in pair]


class Mxfp4(PlainModules, Mxfp4HfQuantizer):
    """Stacked experts of 4 bits, with a scale of 8 bits, an exponent, for 32 values."""

    described: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        return [n for names in self.serialized_names.values() if stored.keys() & set(names) for n in names]


_QUANTIZERS: Mapping[str, Callable[..., HfQuantizer]] = {
    "fp8": Fp8,
    "mxfp4": Mxfp4,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": lambda config, **options: (Bnb8Bit if config.load_in_8bit else Bnb4Bit)(
        config, **options
    ),
}
_EXTRAS = {"compressed-tensors": "compressed", "bitsandbytes": "quantized"}
