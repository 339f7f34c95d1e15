"""The model without its weights: every parameter on the meta device, everything that no checkpoint holds
real.

A 70B model built this way takes megabytes. Buffers that are computed (rotary frequencies) are made by
transformers' own initialisation in fp32; a constructor that runs under a bf16 default dtype would round them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from airtune.model.generation import able_to_generate, leave_out_caches
from airtune.model.remote_code import moved_names, remote_class

logger = logging.getLogger(__name__)

# Elements of a tensor that is born on meta. What the allocator would take from the heap and give back at once
# (each linear layer's weight) leaves it full of holes, in which a training step then scatters its tensors.
# Code that came with a checkpoint may fill an empty tensor and keep it as a buffer: of what it makes itself,
# only what no machine could promise is.
_LARGE_NUMEL = 2**12
_HUGE_NUMEL = 2**24


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
    with moved_names():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model_class = _model_class(config, folder, trust_remote_code)
    # Whoever seeds and then asks for an adapter gets PEFT's own numbers: building draws none that count.
    with torch.random.fork_rng(devices=[]):
        with (
            init_empty_weights(include_buffers=False),
            no_init_weights(),  # a parameter on meta keeps no values, and a model may have 160,000 of them
            _LargeOnMeta(_LARGE_NUMEL if model_class.__module__.startswith("transformers.") else _HUGE_NUMEL),
            _packages_needed(model_class, attn_implementation),
        ):
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
    model.eval()
    if model.can_generate():
        _read_generation_config(model, folder)
    if attn_implementation is None and config._attn_implementation != "sdpa":
        logger.info("%s has no sdpa attention; %s is used", model_class.__name__, config._attn_implementation)
    return model


class _LargeOnMeta(TorchFunctionMode):
    """Tensors without values are born on meta and not moved there later: those of `numel` elements and more,
    and what is large among the weights of torch's own layers.

    A parameter is allocated before it is registered. A table of 320 million rows is 102 GB then, which many
    systems refuse to promise. What has values is made as always: it may be a buffer.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and args:
            shape = args[0] if isinstance(args[0], tuple | list | torch.Size) else args
            # torch's own layers hand their `device=None` on.
            if math.prod(shape) >= (_LARGE_NUMEL if "device" in kwargs else self._numel):
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


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
    reference = remote.get("AutoModelForCausalLM") or remote.get("AutoModelForImageTextToText")
    if trust_remote_code and reference:
        return able_to_generate(remote_class(reference, folder))
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
    """As transformers does: from its own file, or as it stands in the config.json of older repositories."""
    own = (folder / "generation_config.json").is_file()
    older: dict[str, Any] = {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder, **older)
    leave_out_caches(model)
