"""Weights that are stored packed: fewer bits and a scale for each block of them.

A 671B model is 689 GB in 8 bits and 1,340 GB in bf16, and what streaming pays for is bytes that travel. So
the packed bytes travel and are kept, as they lie in the file, and a weight is decoded where it is computed
with, when a kernel asks for it: one matrix at a time (117 MB for 7168 x 8192 in bf16), which is gone when
the kernel has it, and is decoded again in backward.

How to decode is the library's knowledge (a `Scheme`: transformers' quantizer, with its conversions). Here
is what a scheme is, what may be wrong with the tensors it finds, and how a decoded weight takes the place
of a real one.

It gives up the time to decode: two or three passes over the weight's memory, three times a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from airtune.weights.header import CheckpointError, StoredTensor, listed
from airtune.weights.lazy import WeightSource
from airtune.weights.stand_in import StandIn

# What a layer can compute in. Anything else that stands for numbers is packed.
COMPUTE_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

Source = tuple[str, str, StoredTensor]  # checkpoint key, source pattern, where it lies


class Scheme(Protocol):
    """How a checkpoint's weights are packed: transformers' quantizer, and what it does not say.

    Attributes:
        serialized_names: {parameter: the tensors that one such parameter is stored as}.
        described: those of them that describe the others (a shape, a block size): read once, on the host.
        unread: last parts of checkpoint keys that decoding has no use for, such as scales of activations.
    """

    serialized_names: dict[str, list[str]]
    described: frozenset[str]
    unread: frozenset[str]

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """The model's conversions, for packed weights as well."""
        ...

    def required(self, module: str, stored: Mapping[str, torch.dtype]) -> Collection[str]:
        """The serialized names that must be there, given those that are stored for a weight of `module`."""
        ...


class PlainModules:
    """The part of a quantizer that would put modules of its own into the model, doing nothing."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, use_kernels: bool = False, **kwargs: object
    ) -> None:
        pass


def decodes(converter: WeightConverter) -> bool:
    """Whether one of the converter's operations is a quantizer's."""
    return any(_is_of_quantizer(operation) for operation in converter.operations)


def without_decoding(converter: WeightConverter) -> WeightConverter | None:
    """The converter for weights that are not packed; None when nothing is left to do."""
    operations = [operation for operation in converter.operations if not _is_of_quantizer(operation)]
    if not operations:
        return None
    return converter.copy(
        list(converter._original_source_patterns),
        list(converter._original_target_patterns),
        operations=operations,
    )


def _is_of_quantizer(operation: object) -> bool:
    return getattr(operation, "hf_quantizer", None) is not None


# What is stored for one weight


@dataclass(frozen=True)
class _Stored:
    """The tensors that are stored for one weight: {serialized name: (checkpoint key, tensor)}."""

    tensors: Mapping[str, tuple[str, StoredTensor]]

    @property
    def module(self) -> str:
        return self.key_of("").rstrip(".")

    def key_of(self, name: str) -> str:
        """The key that `name` has, or would have."""
        other, (key, _) = next(iter(self.tensors.items()))
        # Renaming changes at most the last part of a key here: `.scale` for `.weight_scale_inv`.
        return (key.removesuffix(other) if key.endswith(other) else key.rpartition(".")[0] + ".") + name


def is_packed(scheme: Scheme, sources: Iterable[Source]) -> bool:
    """Whether any of the sources is more than a plain weight; if so, all of them must be there.

    Raises:
        CheckpointError: a weight without its scale, a scale without its weight, two tensors for one place.
    """
    packed, faults = False, []
    for weight in _by_weight(scheme, sources):
        dtypes = {name: stored.dtype for name, (_, stored) in weight.tensors.items()}
        required = scheme.required(weight.module, dtypes)
        packed |= bool(required)
        faults += [
            f"{weight.key_of(name)} (for {next(iter(weight.tensors.values()))[0]})"
            for name in required
            if name not in weight.tensors
        ]
    if faults:
        raise CheckpointError(
            f"packed weights are not complete: the checkpoint is missing {listed(faults)}. "
            "Check that every shard was downloaded."
        )
    return packed


def _by_weight(scheme: Scheme, sources: Iterable[Source]) -> list[_Stored]:
    """All for one module tensor, so that nothing but the numbers in their keys tells weights apart."""
    names = [n for group in scheme.serialized_names.values() for n in group]
    found: dict[tuple[str, ...], dict[str, tuple[str, StoredTensor]]] = defaultdict(dict)
    for key, pattern, stored in sources:
        name = max((n for n in names if f".{pattern}".endswith(f".{n}")), key=len, default=None)
        if name is None:
            continue
        tensors = found[pattern.removesuffix(name), *re.findall(r"\d+", key.removesuffix(name))]
        if name in tensors:
            raise CheckpointError(f"the checkpoint has more than one tensor for {tensors[name][0]}: {key}")
        tensors[name] = (key, stored)
    return [_Stored(tensors) for tensors in found.values()]


def read_described(scheme: Scheme, sources: Iterable[Source]) -> dict[str, torch.Tensor]:
    """{checkpoint key: tensor on the host} of those sources that describe the others."""
    return {
        key: _read_small(stored)
        for key, pattern, stored in sources
        if any(pattern == name or pattern.endswith(f".{name}") for name in scheme.described)
    }


def _read_small(stored: StoredTensor) -> torch.Tensor:
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        content = bytearray(stream.read(stored.nbytes))
    if not content:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(stored.dtype).view(stored.shape)


def refuse_undecoded(target: str, dtype: torch.dtype, sources: Sequence[Source]) -> None:
    """Raises CheckpointError if numbers would be taken from packed bytes as if they were numbers."""
    if dtype not in COMPUTE_DTYPES:
        return
    for key, _, stored in sources:
        if stored.dtype not in COMPUTE_DTYPES:
            raise CheckpointError(
                f"{key} is stored as {stored.dtype}, {target} computes in {dtype}, and the checkpoint has "
                f"nothing to decode it by: no scale beside it, such as {key}_scale_inv or {key}_scale, or no "
                "quantization_config in config.json that speaks of it. Check that every file was downloaded."
            )


# Decoding


class Decoder(StandIn):
    """What a conversion that decodes asks for besides the packed tensors.

    Args:
        described: what was read on the host, by checkpoint key.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None,
        wanted: Mapping[str, torch.Tensor],
        described: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(config, wanted)
        self.described = described


class Decoded(WeightSource):
    """The source of a lazy tensor whose packed bytes are there.

    Args:
        like: of its shape and dtype, on meta.
        device: of the packed bytes.
        decode: makes it, as a new tensor.
    """

    def __init__(self, like: torch.Tensor, device: torch.device, decode: Callable[[], torch.Tensor]) -> None:
        super().__init__(like, device)
        self._decode = decode

    @contextmanager
    def read(self) -> Iterator[torch.Tensor]:
        yield self._decode()
