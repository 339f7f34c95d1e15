"""`generate` for modelling code that is older than transformers' way to have it.

Once every transformers model could generate; since 4.50 a class must inherit from `GenerationMixin`. Code
that a repository brings along was often written before that. transformers' auto classes mend it when the code
has its own `prepare_inputs_for_generation`; here the class that is loaded is a subclass that has the mixin,
whenever the model's forward can serve what `generate` will ask of it. The repository's own files and classes
stay as they are.

A model's `device` is where `generate` puts what it makes. transformers takes it from the first parameter, and
in a few models that is a placeholder of a streamed layer.

What it gives up: code that neither prepares its inputs nor names a `cache` is given the whole text with each
token. Its older caches are known to nobody any more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import NoReturn, cast

import torch
from transformers import GenerationMixin, PreTrainedModel

logger = logging.getLogger(__name__)

# On classes that are made here.
_USES_CACHES = "_airtune_uses_caches"


def able_to_generate(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`model_class`, or one that is like it and can `generate`.

    Where the forward cannot serve it, `generate` is there and raises a ValueError that says why.
    """
    if issubclass(model_class, GenerationMixin) or "generate" in vars(model_class):
        return model_class
    if lacking := _lacking(model_class):
        return like(model_class, generate=_refusal(model_class, lacking))
    caches = _prepares(model_class) or "cache" in inspect.signature(model_class.forward).parameters
    return like(model_class, GenerationMixin, **{_USES_CACHES: caches})


def leave_out_caches(model: PreTrainedModel) -> None:
    """Let `generate` make no cache for a model that would not use it, and would then be shown the last token
    alone.
    """
    if vars(type(model)).get(_USES_CACHES) is False:
        logger.info("%s takes no cache: each new token is computed from the whole text", type(model).__name__)
        model.generation_config.use_cache = False


def honest_device(model: PreTrainedModel) -> Callable[[], None]:
    """Let `model.device` be the CPU, where inputs and outputs live, also where the first parameter is a
    placeholder. Returns the undo.
    """
    found = type(model)
    if not next(model.parameters()).is_meta:
        return lambda: None
    model.__class__ = like(found, device=property(lambda self: torch.device("cpu")))

    def undo() -> None:
        model.__class__ = found

    return undo


def like(model_class: type[PreTrainedModel], *more: type, **members: object) -> type[PreTrainedModel]:
    """A subclass with the same name and module: saving looks the code up under them."""
    named = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return cast(type[PreTrainedModel], type(model_class.__name__, (model_class, *more), named | members))


def _prepares(model_class: type[PreTrainedModel]) -> bool:
    return "prepare_inputs_for_generation" in dir(model_class)


def _lacking(model_class: type[PreTrainedModel]) -> str:
    """What `forward` does not take and `generate` would give it; empty if there is nothing."""
    parameters = inspect.signature(model_class.forward).parameters
    asked = ["input_ids", "return_dict"]
    if not _prepares(model_class):
        asked += ["attention_mask", "use_cache"]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        asked = ["input_ids"]
    return ", ".join(name for name in asked if name not in parameters)


def _refusal(model_class: type[PreTrainedModel], lacking: str) -> object:
    def generate(self: PreTrainedModel, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            f"{model_class.__name__} cannot generate: its code is older than transformers.GenerationMixin, "
            f"and its forward does not take {lacking}. Let it take that, or inherit from the mixin"
        )

    return generate
