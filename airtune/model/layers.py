"""Finding the decoder layers of any transformers model, without knowing its family.

They are the `ModuleList`s inside the decoder that are not inside another one; if some consist of
`GradientCheckpointingLayer`s, only those (a list of projections is not a stack of layers); and of these,
the heavy ones: a model may have two stacks, and may have a short list of small blocks beside its layers,
which stays resident.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Lists lighter than this share of the heaviest one are not worth streaming.
_LEAST_SHARE = 0.2
_TOWERS = re.compile(r"visi|visual|audio|image|perceiver|resampler|qformer")


def find_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """{path: layer} of the decoder layers, in the order of the stacks.

    Raises:
        ValueError: the model has no list of layers.
    """
    prefix = _decoder_path(model)
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        ours = name.startswith(prefix) and not inside and not _TOWERS.search(name)
        if isinstance(module, nn.ModuleList) and len(module) and ours:
            lists[name] = module
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of decoder layers that could be streamed one by one"
        )
    checkpointing = {
        n: m for n, m in lists.items() if all(isinstance(x, GradientCheckpointingLayer) for x in m)
    }
    weight = {n: sum(p.numel() for p in m.parameters()) for n, m in (checkpointing or lists).items()}
    heavy = [name for name, numel in weight.items() if numel >= _LEAST_SHARE * max(weight.values())]
    return {f"{name}.{i}": layer for name in heavy for i, layer in enumerate(lists[name])}


def _decoder_path(model: PreTrainedModel) -> str:
    """Path prefix of `get_decoder()`, or "" (the whole model) when that holds no list (it may be the
    head).
    """
    decoder = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    if path and any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        return f"{path}."
    return ""
