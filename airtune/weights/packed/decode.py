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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightTransform

from airtune.weights.file_map import FileMap
from airtune.weights.header import CheckpointError, StoredTensor, listed
from airtune.weights.lazy import WeightSource

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


def is_packed(scheme: Scheme, sources: Iterable[Source]) -> bool:
    """Whether any of the sources is more than a plain weight; if so, all of them must be there.

    Raises:
        CheckpointError: a weight without its scale, a scale without its weight, two tensors for one place.
    """
    packed, faults = False, []
    for stem, tensors in _by_weight(scheme, sources):
        dtypes = {name: stored.dtype for name, (_, stored) in tensors.items()}
        required = scheme.required(stem.rstrip("."), dtypes)
        packed |= bool(required)
        present, _ = next(iter(tensors.values()))
        faults += [f"{stem}{name} (for {present})" for name in required if name not in tensors]
    if faults:
        raise CheckpointError(
            f"packed weights are not complete: the checkpoint is missing {listed(faults)}. "
            "Check that every shard was downloaded."
        )
    return packed


def _by_weight(
    scheme: Scheme, sources: Iterable[Source]
) -> Iterable[tuple[str, dict[str, tuple[str, StoredTensor]]]]:
    """(how its keys begin, {serialized name: (checkpoint key, tensor)}) of each weight.

    All are for one module tensor, so that nothing but the numbers in their keys tells weights apart.
    """
    names = [n for group in scheme.serialized_names.values() for n in group]
    found: dict[tuple[str, ...], tuple[str, dict[str, tuple[str, StoredTensor]]]] = {}
    for key, pattern, stored in sources:
        name = max((n for n in names if f".{pattern}".endswith(f".{n}")), key=len, default=None)
        if name is None:
            continue
        # Renaming changes at most the last part of a key here: `.scale` for `.weight_scale_inv`.
        stem = key.removesuffix(name) if key.endswith(name) else key.rpartition(".")[0] + "."
        which = (pattern.removesuffix(name), *re.findall(r"\d+", key.removesuffix(name)))
        _, tensors = found.setdefault(which, (stem, {}))
        if name in tensors:
            raise CheckpointError(f"the checkpoint has more than one tensor for {tensors[name][0]}: {key}")
        tensors[name] = (key, stored)
    return found.values()


def read_described(scheme: Scheme, sources: Iterable[Source]) -> dict[str, torch.Tensor]:
    """{checkpoint key: tensor on the host} of those sources that describe the others."""
    files = FileMap()
    return {
        key: files.tensor(stored).clone()
        for key, pattern, stored in sources
        if any(pattern == name or pattern.endswith(f".{name}") for name in scheme.described)
    }


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
