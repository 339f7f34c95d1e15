"""Checkpoints whose weights bitsandbytes packed, as it, transformers and PEFT save them.

A weight of 4 bits is stored as

    X.weight                                   its bytes, in no shape of its own
    X.weight.absmax                            a scale for each block
    X.weight.nested_absmax, .nested_quant_map  where the scales are packed in turn
    X.weight.quant_map                         the 16 values, which are the same for all weights of a type
    X.weight.quant_state.bitsandbytes__nf4     (or fp4) JSON: shape, block size, dtype

and one of 8 bits as X.weight, X.SCB (a scale for each row) and X.weight_format. transformers knows the
names, and makes modules of bitsandbytes' own of them. Here they are decoded instead, one weight at a time
(see `bnb_decode`), into what a plain linear layer holds. For 8 bits that is another arithmetic than
bitsandbytes' own layer, which packs the activations as well.

Experts that are stacked, a parameter [E, ...] without `.weight`, have these names after their own (of 8 bits:
`_absmax`), and E in front of every part, so that one expert's are rows of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from airtune.weights.packed.bnb_decode import FourBit, decode_4bit, decode_8bit

_NESTED = ("nested_absmax", "nested_quant_map")
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
# .weight_format of plain rows. Other numbers are layouts for a GPU, written by old versions of bitsandbytes.
_ROWS = 0

Tensors = Mapping[str, torch.Tensor]


class _Decode(ConversionOps):
    """Packed weights and what lies beside them -> plain weights, on the device of the packed ones.

    Weights that have nothing beside them are handed on as they are.
    """

    def __init__(self, hf_quantizer: _Plain) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(  # type: ignore[override]
        self,
        input_dict: Mapping[str, list[torch.Tensor] | torch.Tensor],
        full_layer_name: str,
        model: PreTrainedModel,
        **kwargs: object,
    ) -> dict[str, list[torch.Tensor]]:
        scheme, dtype = self.hf_quantizer, model.get_parameter(full_layer_name).dtype
        tensors = {key: value if isinstance(value, list) else [value] for key, value in input_dict.items()}
        beside = {pattern: scheme.beside(pattern, tensors) for pattern in tensors}
        companions = {key for named in beside.values() for key in named.values()}
        made = {}
        for pattern, named in beside.items():
            if pattern in companions:
                continue
            decoded = tensors[pattern]
            if named:
                decoded = [scheme.decode(parts, dtype) for parts in _each(pattern, named, tensors)]
                if full_layer_name in scheme.turned:
                    decoded = [weight.t().contiguous() for weight in decoded]
            # Where this is the whole conversion, its result goes by the parameter's full name.
            made[pattern if "." in pattern else full_layer_name] = decoded
        return made


def _each(
    pattern: str, named: Mapping[str, str], tensors: Mapping[str, list[torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """The parts of each weight of a pattern: of one, or of as many as there are experts."""
    keys = {"weight": pattern, **named}
    return [
        dict(zip(keys, parts, strict=True))
        for parts in zip(*(tensors[k] for k in keys.values()), strict=True)
    ]


class _Plain:
    """What both quantizers share: the model's modules stay what they are.

    Attributes:
        serialized_names, described: of this model; complete once it was given to `preprocess_model`.
        turned: parameters [in, out] of `Conv1D` modules. They are packed as a linear layer's are, [out, in].
    """

    serialized_names: dict[str, list[str]]
    described: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: object = None, **kwargs: object
    ) -> None:
        stacks = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dim() == 3}
        # In this order: the name of a stack may also be the name of a module, `down_proj.weight`.
        self.serialized_names = {leaf: self.names(leaf) for leaf in ["weight", *sorted(stacks - {"weight"})]}
        names = [name for names in self.serialized_names.values() for name in names]
        self.described = frozenset(name for name in names if name.endswith((*_STATES, "weight_format")))
        conv1ds = [path for path, module in model.named_modules() if isinstance(module, Conv1D)]
        self.turned = frozenset(f"{path}.weight" for path in conv1ds)

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Decode}

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Several parameters of one tensor stay unpacked: transformers allows no other sources beside it."""
        split = [
            entry
            for entry in weight_conversions
            if isinstance(entry, WeightConverter) and len(entry.target_patterns) > 1
        ]
        others = [entry for entry in weight_conversions if entry not in split]
        return split + super().update_weight_conversions(others, model)  # type: ignore[misc]

    def names(self, leaf: str) -> list[str]:
        """What a parameter called `leaf` is stored as."""
        raise NotImplementedError

    def beside(self, pattern: str, tensors: Collection[str]) -> dict[str, str]:
        """{part: key} of the tensors that lie beside the weight of that pattern."""
        raise NotImplementedError

    def decode(self, parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """One weight."""
        raise NotImplementedError


class Bnb4Bit(_Plain, Bnb4BitHfQuantizer):
    """Weights of 4 bits: nf4 and fp4."""

    unread = frozenset({"quant_map"})

    def names(self, leaf: str) -> list[str]:
        return [leaf, *(f"{leaf}.{part}" for part in ("absmax", *_NESTED, *_STATES))]

    def beside(self, pattern: str, tensors: Collection[str]) -> dict[str, str]:
        names = {part: part for part in ("absmax", *_NESTED)} | dict.fromkeys(_STATES, "state")
        return {part: f"{pattern}.{name}" for name, part in names.items() if f"{pattern}.{name}" in tensors}

    def decode(self, parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return decode_4bit(parts, FourBit.read(parts["state"])).to(dtype)

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        """The names that must be stored, given those that are; none for a plain weight."""
        needed: set[str] = set()
        for leaf in {name.partition(".")[0] for name in stored}:
            beside = {name.removeprefix(f"{leaf}.") for name in stored if name.startswith(f"{leaf}.")}
            if beside or stored[leaf] == torch.uint8:
                parts = {"absmax", *(beside.intersection(_STATES) or _STATES[:1])}
                parts.update(_NESTED if beside.intersection(_NESTED) else ())
                needed |= {leaf, *(f"{leaf}.{part}" for part in parts)}
        return needed


class Bnb8Bit(_Plain, Bnb8BitHfQuantizer):
    """Weights of 8 bits, with a scale for each row."""

    def names(self, leaf: str) -> list[str]:
        return ["weight", "SCB", "weight_format"] if leaf == "weight" else [leaf, f"{leaf}_absmax"]

    def beside(self, pattern: str, tensors: Collection[str]) -> dict[str, str]:
        prefix, _, leaf = pattern.rpartition(".")
        start = f"{prefix}." if prefix else ""
        keys = [start + name for name in self.names(leaf)[1:]]
        return {
            part: key for part, key in zip(("SCB", "weight_format"), keys, strict=False) if key in tensors
        }

    def decode(self, parts: Tensors, dtype: torch.dtype) -> torch.Tensor:
        if "weight_format" in parts and (found := int(parts["weight_format"])) != _ROWS:
            raise ValueError(
                f"an 8-bit weight has weight_format {found}, a layout that only old versions of bitsandbytes "
                f"wrote; expected {_ROWS}. Load the model with transformers and save it again"
            )
        return decode_8bit(parts["weight"], parts["SCB"], dtype)

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        """The names that must be stored, given those that are; none for a plain weight."""
        pairs = [self.names(leaf)[:2] for leaf in self.serialized_names]
        packed = [(w, scb) for w, scb in pairs if scb in stored or stored.get(w) == torch.int8]
        return {name for pair in packed for name in pair}
