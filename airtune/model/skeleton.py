"""The model without its weights: every parameter on the meta device, everything that no checkpoint holds
real.

A 70B model built this way takes megabytes. Buffers that are computed (rotary frequencies) are made by
transformers' own initialisation in fp32; a constructor that runs under a bf16 default dtype would round them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import transformers
from accelerate import init_empty_weights
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

logger = logging.getLogger(__name__)


def build_skeleton(
    folder: Path,
    *,
    dtype: torch.dtype | None,
    stored_dtype: torch.dtype,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The model that `folder`'s config.json describes, with its parameters on meta, in evaluation mode.

    Args:
        dtype: compute dtype; None for the one in config.json, or `stored_dtype` if that names none.
        attn_implementation: None for sdpa, or eager where the architecture has no sdpa.

    Raises:
        ValueError: the architecture is unknown, not a language model's decoder, or needs code that is not
            trusted or a package that is not there.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model_class = _model_class(config, folder, trust_remote_code)
    # Whoever seeds and then asks for an adapter gets PEFT's own numbers: building draws none that count.
    with torch.random.fork_rng(devices=[]):
        with init_empty_weights(include_buffers=False), _packages_needed(model_class, attn_implementation):
            model = model_class._from_config(
                config,
                dtype=dtype or _named_dtype(config) or stored_dtype,
                attn_implementation=attn_implementation,
            )
        _initialise_buffers(model)
    if not model.can_generate() and model.get_output_embeddings() is None:
        raise ValueError(
            f"{folder}/config.json: 'architectures' names {model_class.__name__}, which has no output "
            "projection: it is no language model. Name the class that was trained, such as one ...ForCausalLM"
        )
    # One expert at a time: the grouped kernels' fallback makes a gradient for all experts of a layer,
    # frozen or not.
    model.set_experts_implementation("eager")
    model.name_or_path = str(folder)
    model.eval()
    if model.can_generate():
        _read_generation_config(model, folder)
    if attn_implementation is None and config._attn_implementation != "sdpa":
        logger.info("%s has no sdpa attention; %s is used", model_class.__name__, config._attn_implementation)
    return model


def _model_class(config: PreTrainedConfig, folder: Path, trust_remote_code: bool) -> type[PreTrainedModel]:
    names = config.architectures or []
    if config.is_encoder_decoder:
        raise ValueError(
            f"{folder}: {names or config.model_type} is an encoder-decoder; only decoders are streamed"
        )
    if len(names) != 1:
        raise ValueError(
            f"{folder}/config.json: expected one name under 'architectures', got {names}. "
            "It says which model class the weights belong to."
        )
    remote = getattr(config, "auto_map", None) or {}
    if trust_remote_code and (reference := remote.get("AutoModelForCausalLM")):
        return cast(type[PreTrainedModel], get_class_from_dynamic_module(reference, folder))
    found = vars(transformers).get(names[0]) or getattr(transformers, names[0], None)
    if found is None:
        hint = (
            "The repository brings its own code: set trust_remote_code=True to run it"
            if remote
            else "A newer transformers may know it"
        )
        raise ValueError(f"{folder}: transformers {transformers.__version__} has no {names[0]}. {hint}.")
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ValueError(f"{folder}/config.json: 'architectures' names {names[0]}, which is no model class")
    if not _belongs(found, config):
        raise ValueError(
            f"{folder}/config.json: 'architectures' names {names[0]}, which is no model of type "
            f"{config.model_type!r}; one of the two is wrong"
        )
    return found


def _belongs(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether transformers builds such a model from such a config.

    Mostly the class names its config's; a decoder may take the text part of one, and some types borrow the
    class of another.
    """
    expected = model_class.config_class
    if expected is not None and (
        isinstance(config, expected) or isinstance(config.get_text_config(), expected)
    ):
        return True
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        borrowed = mapping.get(type(config), ())
        if model_class in (borrowed if isinstance(borrowed, tuple) else (borrowed,)):
            return True
    return False


@contextmanager
def _packages_needed(model_class: type[PreTrainedModel], attn_implementation: str | None) -> Iterator[None]:
    """A package that is asked for and not installed is a ValueError too."""
    try:
        yield
    except ImportError as error:
        attention = f" with attn_implementation={attn_implementation!r}" if attn_implementation else ""
        raise ValueError(
            f"{model_class.__name__}{attention} needs a package that is not there: {error}"
        ) from error


def _named_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    dtype = config.dtype or config.get_text_config().dtype
    return cast(torch.dtype, getattr(torch, dtype)) if isinstance(dtype, str) else dtype


def _initialise_buffers(model: PreTrainedModel) -> None:
    """Let transformers initialise what is in no checkpoint, and only that."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = not module._non_persistent_buffers_set  # type: ignore[assignment]
    model.initialize_weights()
    model.tie_weights()


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
