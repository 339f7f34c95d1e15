"""What a store of packed weights stands for: a checkpoint of the numbers that bitsandbytes decodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from torch import Tensor

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_COMPANIONS = ("SCB", "_absmax", "weight_format", *_STATES)


def unpack(store: Path, folder: Path, *, turned: bool = False) -> Path:
    """Write it into `folder`; returns `folder`.

    Args:
        turned: the model's linear layers are `Conv1D`, [in, out].
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {key: tensor for file in store.glob("*.safetensors") for key, tensor in load_file(file).items()}
    tensors = {}
    for key, tensor in stored.items():
        beside = {name: stored[name] for name in stored if name.startswith(f"{key}.")}
        by_row = f"{key.removesuffix('weight')}SCB" if key.endswith(".weight") else f"{key}_absmax"
        if any(name.endswith(_STATES) for name in beside):
            decoded = _of_4bit(tensor, beside)
        elif by_row in stored:
            rows = tensor.reshape(-1, tensor.shape[-1])
            decoded = functional.int8_vectorwise_dequant(rows, stored[by_row].reshape(-1)).view(tensor.shape)
        else:
            if key.rpartition(".")[0] not in stored and not key.endswith(_COMPANIONS):
                tensors[key] = tensor
            continue
        tensors[key] = decoded.t().contiguous() if turned else decoded
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((store / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _of_4bit(packed: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """One block a row: bitsandbytes' CPU kernel is wrong where rows are no whole number of blocks."""
    state = functional.QuantState.from_dict({**beside}, torch.device("cpu"))
    shape = state.shape
    state.shape = torch.Size((shape.numel() // state.blocksize, state.blocksize))
    return functional.dequantize_4bit(packed.view(-1, 1), state).view(shape)
