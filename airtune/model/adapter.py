"""PEFT adapters on a model whose weights are not there.

PEFT creates an adapter beside each base weight: on its device, with its dtype, initialised from the random
state in the order of the modules. On the meta device it would create nothing. So while PEFT works, every
absent parameter is a CPU tensor of the right shape whose elements all share one number (stride 0): PEFT
runs its own code on it, draws the same numbers as on a resident model, and no memory is used.

An adapter is planned first, on the model without weights: all that can be wrong with its config, its targets
or its file is found before 54 GB of a 27B base are touched. What PEFT would do quietly (a tensor that it
does not find keeps its random start) is refused here.

Shape legend: R rank, I inputs, O outputs: `lora_A` is [R, I], `lora_B` is [O, R].
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import CONFIG_NAME
from peft.utils.other import get_pattern_key
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from airtune.model.adapter_io import AdapterError, check_fits, check_loaded, read_adapter
from airtune.model.adapter_targets import Targets, find_targets, summary
from airtune.model.expert_adapters import adapt_expert_by_expert, adapted_parameters, saved_shapes

logger = logging.getLogger(__name__)

_WEIGHT_FREE_INITS = (True, False, "gaussian", "orthogonal")
# What is known to be the same on streamed, frozen weights. Any other field has to have its default.
# fmt: off
_SUPPORTED = {
    "r", "lora_alpha", "lora_dropout", "lora_bias", "use_rslora", "init_lora_weights", "fan_in_fan_out",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern",
    "task_type", "inference_mode", "base_model_name_or_path", "revision",
    "peft_type", "peft_version", "auto_mapping",
}
# fmt: on


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter that fits the model.

    Attributes:
        targets: what PEFT is given, and the modules that it then adapts.
        shapes: of the adapter's tensors, by the names that PEFT saves them under.
        saved: the tensors to load, from `folder`; None for a fresh adapter.
    """

    targets: Targets
    shapes: Mapping[str, tuple[int, ...]]
    trainable: bool = True
    folder: Path | None = None
    saved: Mapping[str, Tensor] | None = None

    @property
    def trained_numel(self) -> int:
        return sum(map(math.prod, self.shapes.values())) if self.trainable else 0

    def attach(self, model: PreTrainedModel) -> PeftModel:
        """Wrap `model`; parameters in fp32 where the base is half precision."""
        config = self.targets.config
        with _stand_ins(model):
            if self.folder is None:
                wrapped = cast(PeftModel, get_peft_model(model, config))
            else:
                wrapped = PeftModel.from_pretrained(
                    model, str(self.folder), config=config, is_trainable=self.trainable, torch_device="cpu"
                )
        _check_injected(wrapped, self.targets)
        adapt_expert_by_expert(wrapped)
        if self.folder is not None and self.saved is not None:
            check_loaded(wrapped, self.saved, self.folder)
        return wrapped


def plan_adapter(
    model: PreTrainedModel,
    layers: Collection[str],
    stacks: Collection[str],
    lora: LoraConfig | None,
    folder: Path | None,
    *,
    trainable: bool,
) -> AdapterPlan | None:
    """The fresh adapter `lora`, or the one saved in `folder` (which is `trainable` or not), or none.

    Args:
        layers: paths of the streamed layers.
        stacks: names of the parameters that hold stacked experts.
        lora: `target_modules` may be "all-linear", a list of names, or a regular expression.

    Raises:
        ValueError: the adapter cannot be trained on a streamed model, a target matches nothing, or `folder`
            holds no adapter that fits this model.
    """
    if lora is not None:
        _check_supported(lora)
        with _stand_ins(model):
            targets = find_targets(model, layers, stacks, lora, saved=False)
        return AdapterPlan(targets, _shapes(model, targets))
    if folder is None:
        return None
    config = _read_config(folder)
    base, trained_on = str(model.name_or_path), config.base_model_name_or_path
    if trained_on and Path(trained_on).name != Path(base).name:
        logger.warning("%s was trained on %s; here it is on %s", folder, trained_on, base)
    with _stand_ins(model):
        targets = find_targets(model, layers, stacks, config, saved=True)
    # PEFT's own translation of names that an older transformers had for the same modules.
    saved = convert_peft_adapter_state_dict_for_transformers(model, targets.config, read_adapter(folder))
    shapes = _shapes(model, targets)
    check_fits(saved, shapes, folder)
    return AdapterPlan(targets, shapes, trainable, folder, saved)


def _read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_NAME
    if not path.is_file():
        inside = folder / "adapter"
        raise AdapterError(
            f"there is no folder {folder}"
            if not folder.is_dir()
            else f"{folder} has no {CONFIG_NAME}; did you mean {inside}?"
            if (inside / CONFIG_NAME).is_file()
            else f"{folder} has no {CONFIG_NAME}; expected a folder that PEFT's save_pretrained wrote"
        )
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON ({error}); save the adapter again") from error
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind is None:
        raise AdapterError(f"{path} names no peft_type; save the adapter again")
    if kind != PeftType.LORA:
        raise AdapterError(f"{folder} holds a {kind} adapter; only LoRA is supported")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    # A newer PEFT writes fields that this one does not know. They matter if they ask for something.
    if asked := sorted(name for name, value in values.items() if value and name not in known):
        raise AdapterError(f"{path} uses {', '.join(asked)}, which this version of PEFT does not know")
    config = LoraConfig(**{name: value for name, value in values.items() if name in known})
    _check_supported(config)
    return config


def _check_supported(lora: LoraConfig) -> None:
    """Refuse by name what is not known to be the same on streamed weights, and values PEFT trips over."""
    blank = LoraConfig()
    refused = [
        field.name
        for field in dataclasses.fields(lora)
        if field.name not in _SUPPORTED
        and (value := getattr(lora, field.name))
        and value != getattr(blank, field.name)
    ]
    if lora.init_lora_weights not in _WEIGHT_FREE_INITS:
        refused.append(f"init_lora_weights={lora.init_lora_weights!r}")
    if refused:
        raise ValueError(
            f"this LoRA config uses {', '.join(refused)}, which needs base weights that are streamed and "
            "frozen, or is not known to be right with them. Supported: LoRA on linear layers with "
            "bias='none' and an initialisation that does not read the weights."
        )
    if not lora.target_modules and not lora.target_parameters:
        raise ValueError('target_modules is not set; name the linear layers, or use "all-linear"')
    for rank in (lora.r, *(lora.rank_pattern or {}).values()):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"a LoRA rank is a whole number of at least 1, got {rank!r}")
    if not isinstance(lora.lora_dropout, int | float) or not 0 <= lora.lora_dropout < 1:
        raise ValueError(f"lora_dropout must be at least 0 and less than 1, got {lora.lora_dropout!r}")
    _check_patterns(lora)


def _check_patterns(lora: LoraConfig) -> None:
    layers = [lora.layers_pattern] if isinstance(lora.layers_pattern, str) else lora.layers_pattern or []
    patterns = [("layers_pattern", pattern) for pattern in layers]
    for field in ("target_modules", "exclude_modules"):
        value = getattr(lora, field)
        patterns += [(field, value)] if isinstance(value, str) else []
        if not isinstance(value, str) and not all(isinstance(name, str) for name in value or ()):
            raise ValueError(f"{field} must be names of modules or one regular expression, got {value!r}")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns += [(field, pattern) for pattern in getattr(lora, field) or {}]
    for field, pattern in patterns:
        try:
            re.compile(f"(?:{pattern})")  # as it is used: inside a longer one
        except re.error as error:
            raise ValueError(f"{field} {pattern!r} is no regular expression: {error}") from error


def _shapes(model: PreTrainedModel, targets: Targets) -> dict[str, tuple[int, ...]]:
    """Of the tensors that PEFT will save for these targets, under its names."""
    config = targets.config
    shapes: dict[str, tuple[int, ...]] = {}
    for name in targets.modules:
        layer = model.get_submodule(name)
        assert isinstance(layer.weight, Tensor)
        outputs, inputs = layer.weight.shape
        if not isinstance(layer, nn.Linear):  # a Conv1D is stored transposed
            outputs, inputs = inputs, outputs
        ranks = config.rank_pattern or {}
        rank = ranks.get(get_pattern_key(list(ranks), name), config.r)
        shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
        shapes[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
        if config.lora_bias:
            shapes[f"base_model.model.{name}.lora_B.bias"] = (outputs,)
    return shapes | saved_shapes(config, targets.parameters, model)


def _check_injected(wrapped: PeftModel, targets: Targets) -> None:
    """Compare what PEFT adapted with what was asked for, and report it."""
    base = wrapped.get_base_model()
    parameters = adapted_parameters(base)
    adapted = {
        name
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    } | parameters.keys()
    wanted = targets.modules | set(targets.parameters)
    if adapted != wanted:
        missing, extra = sorted(wanted - adapted), sorted(adapted - wanted)
        raise ValueError(
            f"PEFT did not adapt what was asked for: {len(missing)} modules are missing (first: "
            f"{missing[:1]}) and {len(extra)} are too many (first: {extra[:1]}). Name the modules in a list"
        )
    numel = 0
    for name, parameter in wrapped.named_parameters():
        numel += parameter.numel() if ".lora_" in name else 0
        assert ".lora_" in name or not parameter.requires_grad, "only adapters may be trainable"
    logger.info("LoRA on %d places: %s; %s parameters", len(adapted), summary(adapted), f"{numel:,}")


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, parameters on meta are CPU tensors of ones that take no memory; the same meta tensors come
    back.
    """
    absent = [
        (module, leaf, parameter)
        for module in model.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    ones = {dtype: torch.ones(1, dtype=dtype) for dtype in {parameter.dtype for *_, parameter in absent}}
    for module, leaf, parameter in absent:
        number = ones[parameter.dtype].expand(parameter.shape)
        module._parameters[leaf] = nn.Parameter(number, requires_grad=False)
    try:
        yield
    finally:
        for module, leaf, parameter in absent:
            module._parameters[leaf] = parameter
