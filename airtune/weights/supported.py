"""Which forms of weights can be streamed; everything else is refused by name.

By what config.json and the headers say, before a weight is read or, from the hub, downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from airtune.weights.header import CheckpointError, StoredTensor, listed

# What can be streamed, here and nowhere else: a scheme that gains a decoder is added to these lines.
STORAGE_DTYPES = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)
# Only where config.json names the method they are packed with.
PACKED_DTYPES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
)
QUANTISATION_METHODS = frozenset({"fp8", "mxfp4", "compressed-tensors", "bitsandbytes"})
COMPRESSED_FORMATS = frozenset(
    {"pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized"}
)

SUPPORTED = (
    "Supported: safetensors files that hold bfloat16, float16, float32 or float64 weights (and integer or "
    "boolean buffers), with model.safetensors.index.json when there are several; or weights packed with "
    f"{', '.join(sorted(QUANTISATION_METHODS))} ({', '.join(sorted(COMPRESSED_FORMATS))})"
)
# Quantisers that say nothing in config.json leave one of these files, or give their tensors these endings.
_QUANTISER_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_QUANTISED_ENDINGS = {".qweight": "gptq or awq", ".q_weight": "exl2"}


def refuse_packed(folder: Path, names: Collection[str]) -> None:
    """Refuse by what the JSON files say, before a shard is opened or downloaded."""
    methods = {
        f"{method} ({name})"
        for name, method in _QUANTISER_FILES.items()
        if name in names and method not in QUANTISATION_METHODS
    }
    for key, scheme in _named_schemes(folder, names):
        method = scheme.get("quant_method", f"{key} without quant_method")
        if method not in QUANTISATION_METHODS:
            methods.add(f"{method} (config.json)")
        elif method == "compressed-tensors":
            methods |= {f"{method} with {part} (config.json)" for part in _not_decompressed(scheme)}
    if methods:
        raise _quantised(folder, methods)


def _named_schemes(folder: Path, names: Collection[str]) -> list[tuple[str, dict[str, object]]]:
    """What config.json says about packed weights: (key, its object)."""
    config = read_json(folder / "config.json") if "config.json" in names else {}
    # MLX writes "quantization" where everyone else writes "quantization_config".
    return [
        (key, scheme)
        for part in (config, config.get("text_config"))
        for key in ("quantization_config", "quantization")
        if isinstance(part, dict) and isinstance(scheme := part.get(key), dict) and scheme
    ]


def _not_decompressed(scheme: Mapping[str, object]) -> list[str]:
    """What a compressed-tensors config asks for that decompressing single weights does not do."""
    whole, groups = scheme.get("format"), scheme.get("config_groups")
    own = (
        [g.get("format") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    )
    formats = {form or whole for form in own} or {whole}
    sparsity = scheme.get("sparsity_config")
    sparse = sparsity.get("format", "sparse") if isinstance(sparsity, dict) and sparsity else "dense"
    return [
        *(f"format {form}" for form in sorted(map(str, formats - COMPRESSED_FORMATS))),
        *([f"sparsity {sparse}"] if sparse != "dense" else []),
        *(["a transform of the activations"] if scheme.get("transform_config") else []),
    ]


def refuse_storage(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse by what the headers say: old quantisers leave no word in the JSON files."""
    said = _named_schemes(folder, [file.name for file in folder.iterdir()])
    allowed = STORAGE_DTYPES | PACKED_DTYPES if said else STORAGE_DTYPES
    for name, tensor in tensors.items():
        for ending, method in _QUANTISED_ENDINGS.items():
            if name.endswith(ending):
                raise _quantised(tensor.file, {f"{method} (tensor {name})"})
    foreign = [name for name, tensor in tensors.items() if tensor.dtype not in allowed]
    if foreign:
        file, first = tensors[foreign[0]].file, [f"{name} ({tensors[name].dtype})" for name in foreign]
        unless = "" if said else " without a quantization_config in config.json"
        raise CheckpointError(
            f"{file}: {len(foreign)} tensors are of a dtype that cannot be streamed{unless}: {listed(first)}."
            f" {SUPPORTED}. Use the model's unquantised checkpoint."
        )


def _quantised(where: Path, methods: Collection[str]) -> CheckpointError:
    return CheckpointError(
        f"{where}: is quantised in a form that cannot be streamed: {listed(sorted(methods))}. {SUPPORTED}. "
        "Use the model's unquantised checkpoint."
    )


def read_json(file: Path) -> dict[str, object]:
    try:
        parsed: object = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error}). Fetch the file again.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            f"{file}: is a JSON {type(parsed).__name__}, expected an object. Fetch the file again."
        )
    return parsed
