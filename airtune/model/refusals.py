"""What a streamed model would do wrongly and in silence, said instead.

Placeholders have shapes and no numbers. torch computes with them without an error in places: a product of a
CPU tensor with a weight on meta gives memory that nobody has written. So whatever PEFT or transformers would
do to base weights outside a visit (merge an adapter into them, create a second adapter beside them) is
replaced, on the instance, by an error that names the way. Checkpointing of activations is refused for
another reason: each layer is recomputed already, and twice would double the reading.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

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
# What copy.deepcopy and pickle call.
_COPY = "a copy of it would have no weights. Load the model again, or save its adapter"
_CHECKPOINTING = "streaming recomputes each layer in backward already. Leave it out: it would add nothing"


def refuse_what_needs_weights(model: PreTrainedModel, wrapped: nn.Module) -> Callable[[], None]:
    """Let methods of the streamed `model` and of a PeftModel around it raise ValueError. Returns the undo."""
    undo = ExitStack()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
                undo.callback(_refuse(module, name, _CHECKPOINTING))
            for name in ("add_adapter", "load_adapter"):
                undo.callback(_refuse(module, name, _SECOND))
    undo.callback(_refuse(model, "__reduce_ex__", _COPY))
    if isinstance(wrapped, PeftModel):
        undo.callback(_refuse(wrapped, "add_adapter", _SECOND))
        for name in ("merge_adapter", "merge_and_unload"):
            undo.callback(_refuse(wrapped.base_model, name, _MERGE))  # where the PeftModel finds them
    return undo.close


def _refuse(module: nn.Module, name: str, reason: str) -> Callable[[], None]:
    def refused(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(f"{name} cannot be used on a streamed model: {reason}")

    setattr(module, name, refused)
    return lambda: delattr(module, name)
