"""What a streamed model would do wrongly and in silence, said instead.

Placeholders have shapes and no numbers. torch computes with them without an error in places: a product of a
CPU tensor with a weight on meta gives memory that nobody has written. So whatever PEFT or transformers would
do to base weights outside a visit (merge an adapter into them, create a second one beside them, save them,
make room for more tokens, move or cast them) is replaced, on the instance, by an error that names the way.
Moving a model to where it is already is no change, and trainers do it. Checkpointing of activations is
refused for another reason: each layer is recomputed already, and twice doubles the reading.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

_MERGE = (
    "the base weights are streamed and not there to merge into. Save the adapter, and merge it with PEFT on "
    "a resident model: PeftModel.from_pretrained(base, folder).merge_and_unload()"
)
_SECOND = (
    "PEFT creates an adapter beside base weights, and these are streamed and not there. Load the model "
    "again, with airtune.load(..., lora=...) or airtune.load(..., adapter=folder)"
)
_SAVE = (
    "the base weights stay in the checkpoint that they are streamed from. Save the adapter, with "
    "save_pretrained of the PeftModel"
)
_RESIZE = (
    "the tables at both ends are those of the checkpoint. Resize them with transformers on a resident model, "
    "save that, and load it"
)
_STAYS = (
    "a streamed model cannot be moved or cast: its layers compute where and in what airtune.load(..., "
    "device=..., dtype=...) says, and everything else, inputs too, is on the CPU (with transformers' own "
    "Trainer: use_cpu=True)"
)
# What copy.deepcopy and pickle call.
_COPY = "a copy of it would have no weights. Load the model again, or save its adapter"
_CHECKPOINTING = "streaming recomputes each layer in backward already. Leave it out: it would add nothing"
_OF_ANY_MODEL = {
    "gradient_checkpointing_enable": _CHECKPOINTING,
    "activation_checkpointing_enable": _CHECKPOINTING,
    "add_adapter": _SECOND,
    "load_adapter": _SECOND,
    "save_pretrained": _SAVE,
    "resize_token_embeddings": _RESIZE,
}


def refuse_what_needs_weights(model: PreTrainedModel, wrapped: nn.Module) -> Callable[[], None]:
    """Let methods of the streamed `model` and of a PeftModel around it raise ValueError. Returns the undo."""
    undo = ExitStack()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            undo.callback(_let_stay(module, model.dtype))
            for name, reason in _OF_ANY_MODEL.items():
                undo.callback(_refuse(module, name, reason))
    undo.callback(_refuse(model, "__reduce_ex__", _COPY))
    if isinstance(wrapped, PeftModel):
        undo.callback(_let_stay(wrapped, model.dtype))
        undo.callback(_refuse(wrapped, "add_adapter", _SECOND))
        for name in ("merge_adapter", "merge_and_unload"):
            undo.callback(_refuse(wrapped.base_model, name, _MERGE))  # where the PeftModel finds them
    return undo.close


def _refuse(module: nn.Module, name: str, reason: str) -> Callable[[], None]:
    def refused(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(f"{name} cannot be used on a streamed model: {reason}")

    setattr(module, name, refused)
    return lambda: delattr(module, name)


def _let_stay(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """`to`, `cuda`, `half`, ... apply a function to each tensor: refuse one that would change any."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        unchanged = torch.empty(0, dtype=dtype)
        if function(unchanged) is not unchanged:
            raise ValueError(_STAYS)
        return module

    setattr(module, "_apply", apply)  # noqa: B010
    return lambda: delattr(module, "_apply")
