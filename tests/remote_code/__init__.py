"""Tiny checkpoints with modelling code of their own beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from airtune.model.remote_code import moved_names, remote_class
from tests import zoo

_HERE = Path(__file__).parent
MODEL = "modeling_latent.LatentForConditionalGeneration"
LAYERS = "language_model.model.layers"


def make(folder: Path, dtype: torch.dtype = torch.float32, **text: object) -> Path:
    """Write a checkpoint with random weights, and its code, into `folder`; returns `folder`.

    Args:
        text: of its text config, what is not as in `LatentTextConfig`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("configuration_latent.py", "modeling_latent.py"):
        shutil.copy(_HERE / name, folder)
    _write_config(folder, {"text_config": text, "dtype": str(dtype).removeprefix("torch.")})
    with init_empty_weights():
        model = skeleton(folder)
    model.to_empty(device="cpu")
    for name, tensor in model.state_dict().items():
        tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    zoo.randomise(model, torch.Generator().manual_seed(0))
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    write(folder, tensors)
    return folder


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """These tensors, in two files, in place of those in `folder`."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    for number, own in enumerate((names[::2], names[1::2]), start=1):
        save_file(
            {n: tensors[n].contiguous() for n in own}, folder / f"model-{number:05}-of-00002.safetensors"
        )


def read(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def skeleton(folder: Path) -> PreTrainedModel:
    """The model that the code in `folder` makes, without its weights."""
    with moved_names():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return remote_class(MODEL, folder)._from_config(config, attn_implementation="sdpa")


def in_memory(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same with them, by torch's own means."""
    model = skeleton(folder)
    model.load_state_dict(read(folder))
    nn.Module.to(model, dtype)
    return model.requires_grad_(False)


def _write_config(folder: Path, settings: Mapping[str, object]) -> None:
    config = {
        "architectures": [MODEL.partition(".")[2]],
        "auto_map": {"AutoConfig": "configuration_latent.LatentConfig", "AutoModelForCausalLM": MODEL},
        "model_type": "latent",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
