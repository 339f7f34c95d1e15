"""Checkpoints that compressed-tensors packed, as llm-compressor writes them.

Their config has groups of modules, each with a scheme of its own (fp8 for the dense layers, integers of 4
bits for the experts), and the package decompresses a module's tensors by its scheme. It would do so for the
whole model, by hooks on its first forward; here it is asked for one weight at a time.

transformers has an operation for that as well. It takes one scheme for all dense modules and one for all
experts, has no zero points of experts, and looks at a shape that lies on the device, which waits for all
that is queued there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from airtune.weights.header import CheckpointError
from airtune.weights.packed.decode import COMPUTE_DTYPES, PlainModules
from airtune.weights.packed.row_blocks import in_rows
from airtune.weights.stand_in import StandIn

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme


class _Decompress(ConversionOps):
    """compressed-tensors' decompression of single weights, each by the scheme of its module."""

    def __init__(self, hf_quantizer: CompressedTensors) -> None:
        self.hf_quantizer = hf_quantizer
        self._tried: set[tuple[object, ...]] = set()

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, list[torch.Tensor]],
        target_patterns: list[str],
        full_layer_name: str,
        model: StandIn,
        **kwargs: object,
    ) -> dict[str, list[torch.Tensor]]:
        dtype = model.get_parameter(full_layer_name).dtype
        weights: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            stem, _, name = pattern.rpartition(".")
            weights.setdefault(stem, {})[name] = tensors
        made = {}
        for stem, stored in weights.items():
            module = full_layer_name.rpartition(".")[0]
            if stem:
                module = full_layer_name.partition(target_patterns[0])[0] + stem.replace("*", "0")
            count = len(next(iter(stored.values())))
            made[f"{stem}.weight" if stem else full_layer_name] = [
                self._decompress(module, {name: tensors[i] for name, tensors in stored.items()}, dtype)
                for i in range(count)
            ]
        return made

    def _decompress(self, module: str, stored: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor

        if stored.keys() == {"weight"}:
            return stored["weight"].to(dtype)
        scheme = self.hf_quantizer.scheme_of(module)
        compressor = BaseCompressor.get_value_from_registry(self.hf_quantizer.format_of(scheme))
        rows, columns = _unpacked_shape(stored, scheme)
        if next(iter(stored.values())).is_meta:
            # Once for tensors of a kind: on meta it takes milliseconds, and a model may have 160,000 of them.
            kind = (id(scheme), *((name, tensor.shape, tensor.dtype) for name, tensor in stored.items()))
            if kind not in self._tried:
                made = compressor.decompress(stored, scheme)["weight"][:, :columns]
                if made.shape != (rows, columns):
                    return made
                self._tried.add(kind)
            return torch.empty((rows, columns), dtype=dtype, device="meta")
        made = torch.empty((rows, columns), dtype=dtype, device=stored["weight_scale"].device)
        for part, some in in_rows(stored, rows, columns):
            # The stored shape lies on the device, and looking at it would wait for all that is queued there.
            shape = torch.Size((part.stop - part.start, columns))
            made[part] = compressor.decompress({**some, "weight_shape": shape}, scheme)["weight"]
        return made


def _unpacked_shape(stored: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> tuple[int, int]:
    packed = stored.get("weight_packed")
    if packed is None:
        return len(stored["weight"]), stored["weight"].shape[1]
    return len(packed), packed.shape[1] * packed.element_size() * 8 // scheme.weights.num_bits


class CompressedTensors(PlainModules, CompressedTensorsHfQuantizer):
    """Integers of few bits, fp8, fp4, for each group of modules in its own way."""

    use_fp8_kernel = False
    described: frozenset[str] = frozenset()
    unread = frozenset(
        {"weight_shape", "input_scale", "input_zero_point", "input_global_scale"}
        | {"output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale"}
    )

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Decompress}

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        if stored.keys() == {"weight"} and stored["weight"] in COMPUTE_DTYPES:
            return ()
        scheme = self.scheme_of(module)
        weight = "weight_packed" if "pack" in self.format_of(scheme) else "weight"
        return (weight, "weight_scale", *(() if scheme.weights.symmetric else ("weight_zero_point",)))

    def format_of(self, scheme: QuantizationScheme) -> str:
        return str(scheme.format or self._settings.format)

    def scheme_of(self, module: str) -> QuantizationScheme:
        """The config group that `module` belongs to: by its name, or else by being a linear layer.

        Raises:
            CheckpointError: none of them, or several that differ.
        """
        from compressed_tensors.utils.match import is_match, match_name

        groups = list(self._settings.config_groups.values())
        if len(groups) > 1:
            by_name = [g for g in groups if any(match_name(module, target) for target in g.targets)]
            linear = nn.Linear(1, 1, device="meta")
            groups = by_name or [g for g in groups if is_match(module, linear, g.targets)]
        if len(groups) != 1 and len({(str(group.weights), group.format) for group in groups}) != 1:
            raise CheckpointError(
                f"{module} is packed, and {len(groups)} of the config_groups in config.json's "
                "quantization_config are for it by their targets, expected one"
            )
        return groups[0]

    @property
    def _settings(self) -> QuantizationConfig:
        return self.quantization_config.quantization_config
