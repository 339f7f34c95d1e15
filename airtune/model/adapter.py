"""PEFT adapters on a model whose weights are not there.

PEFT creates an adapter beside each base weight: on its device, with its dtype, initialised from the random
state in the order of the modules. On the meta device it would create nothing. So while PEFT works, every
absent parameter is a CPU tensor of the right shape whose elements all share one number (stride 0): PEFT
runs its own code on it, draws the same numbers as on a resident model, and no memory is used.

What PEFT would do quietly is said or refused here: a target that matches nothing, a target outside the
decoder layers, a target that is no plain linear layer, targets that PEFT turns into expert parameters,
initialisations that need base weights.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

_WEIGHT_FREE_INITS = (True, False, "gaussian", "orthogonal")


def add_adapter(model: PreTrainedModel, layers: Collection[str], lora: LoraConfig) -> PeftModel:
    """Wrap `model` with a fresh LoRA adapter on its decoder layers; fp32 where the base is half precision.

    Args:
        layers: paths of the streamed layers.
        lora: `target_modules` may be "all-linear", a list of names, or a regular expression.

    Raises:
        ValueError: the adapter cannot be trained on a streamed model, or a target matches nothing.
    """
    _check_supported(lora)
    with _stand_ins(model):
        wrapped = get_peft_model(model, _resolve_targets(model, layers, lora))
        _check_injected(wrapped, lora)
    return wrapped


def load_adapter(model: PreTrainedModel, folder: Path, *, trainable: bool) -> PeftModel:
    """Wrap `model` with the PEFT adapter saved in `folder`.

    Raises:
        ValueError: `folder` holds no adapter, or one that a streamed model cannot run.
    """
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} has no adapter_config.json; expected a folder that PEFT's save_pretrained wrote"
        )
    config = LoraConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder} holds a {config.peft_type} adapter; only LoRA is supported")
    _check_supported(config)
    with _stand_ins(model):
        wrapped = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
        _check_injected(wrapped, config)
    return wrapped


def _check_supported(lora: LoraConfig) -> None:
    unsupported = {
        "use_dora": bool(lora.use_dora),
        "bias": lora.bias != "none",
        "modules_to_save": bool(lora.modules_to_save),
        "trainable_token_indices": bool(lora.trainable_token_indices),
        "target_parameters": bool(lora.target_parameters),
        f"init_lora_weights={lora.init_lora_weights!r}": lora.init_lora_weights not in _WEIGHT_FREE_INITS,
    }
    refused = [name for name, used in unsupported.items() if used]
    if refused:
        raise ValueError(
            f"this LoRA config uses {', '.join(refused)}, which needs base weights that are streamed and "
            "frozen. Supported: LoRA on linear layers with bias='none' and an initialisation that does not "
            "read the weights."
        )


def _resolve_targets(model: PreTrainedModel, layers: Collection[str], lora: LoraConfig) -> LoraConfig:
    """A copy of the config whose targets are spelled out and whose `exclude_modules` keeps PEFT inside the
    layers.
    """
    config = copy.deepcopy(lora)
    if config.target_modules is None:
        raise ValueError('target_modules is not set; name the linear layers, or use "all-linear"')
    modules = dict(model.named_modules())
    inside = {name for name in modules if any(name.startswith(f"{layer}.") for layer in layers)}
    plain = {name for name in inside if _is_plain_linear(modules[name])}
    if config.target_modules == "all-linear":
        config.target_modules = sorted(_all_linear(model, plain, config))
    targets = config.target_modules
    matched = {name for name in modules if _matches(name, targets)}
    wanted = {name for name in matched & plain if not _matches(name, config.exclude_modules)}
    if isinstance(targets, str):
        unmatched = [] if wanted else [targets]
    else:
        unmatched = sorted(t for t in targets or () if not any(_matches(name, [t]) for name in wanted))
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name in plain})
        raise ValueError(
            f"target_modules {unmatched} match no linear layer in the decoder layers of "
            f"{type(model).__name__}; its linear layers are called {known}"
        )
    strangers = {name for name in matched - wanted if not _matches(name, config.exclude_modules)}
    if strangers:
        config.exclude_modules = _excluding(config.exclude_modules, strangers)
        logger.info("LoRA leaves out %s: not plain linear layers of the decoder", _summary(strangers))
    return config


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether LoRA's x @ A @ B can stand beside the module.

    A subclass of nn.Linear may return a tuple (routers) or group its features. All weights are ones here,
    so a plain layer answers a row of ones with the number of its features.
    """
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    ones = torch.ones(1, module.in_features, dtype=module.weight.dtype)
    try:
        with torch.no_grad():
            answer = module(ones)
    except (RuntimeError, TypeError, ValueError):
        return False
    want = torch.full((1, module.out_features), float(module.in_features + (module.bias is not None)))
    return (
        isinstance(answer, torch.Tensor)
        and answer.shape == want.shape
        and torch.allclose(answer.float(), want, rtol=0.01)
    )


def _all_linear(model: PreTrainedModel, plain: Collection[str], lora: LoraConfig) -> set[str]:
    """Names of the decoder's plain linear layers that PEFT accepts."""
    names = set()
    for name in sorted({name.rpartition(".")[2] for name in plain}):
        try:
            _check_lora_target_modules_mamba(lora, model, name)
        except ValueError:
            logger.warning("all-linear leaves out %s: PEFT does not support it in this architecture", name)
        else:
            names.add(name)
    return names


def _matches(name: str, targets: str | Collection[str] | None) -> bool:
    """PEFT's rule: a string is a regular expression for the whole path, a list holds paths or their last
    parts.
    """
    if not targets:
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _excluding(existing: str | list[str] | None, names: Collection[str]) -> str:
    """One regular expression for what was excluded before and `names`, with layer numbers folded."""
    folded = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "#", name) for name in names})
    patterns = [re.escape(name).replace(r"\#", r"\d+") for name in folded]
    if isinstance(existing, str):
        patterns.append(existing)
    elif existing:
        patterns += [rf"(?:.*\.)?{re.escape(name)}" for name in existing]
    return "|".join(f"(?:{pattern})" for pattern in patterns)


def _check_injected(wrapped: PeftModel, asked: LoraConfig) -> None:
    """Report what PEFT adapted, and refuse what it did beside what was asked."""
    config = wrapped.active_peft_config
    if config.target_parameters and not asked.target_parameters:
        raise ValueError(
            "PEFT turns targets of this mixture-of-experts model into expert parameters "
            f"{sorted(config.target_parameters)}, which are not trained yet. Leave them out of "
            f"target_modules; left are {sorted(config.target_modules)}."
        )
    adapted = {name: module for name, module in wrapped.named_modules() if isinstance(module, LoraLayer)}
    strange = {
        name: type(module.get_base_layer()).__name__
        for name, module in adapted.items()
        if not _is_plain_linear(module.get_base_layer())
    }
    if strange:
        raise ValueError(
            f"LoRA only goes on plain linear layers, and the targets match {strange}; narrow target_modules"
        )
    trainable = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name in trainable), "only adapters may be trainable"
    numel = sum(p.numel() for n, p in wrapped.named_parameters() if ".lora_" in n)
    logger.info("LoRA on %d modules: %s; %s parameters", len(adapted), _summary(adapted), f"{numel:,}")


def _summary(names: Collection[str]) -> str:
    counts = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


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
    for module, leaf, parameter in absent:
        number = torch.ones(1, dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[leaf] = nn.Parameter(number, requires_grad=False)
    try:
        yield
    finally:
        for module, leaf, parameter in absent:
            module._parameters[leaf] = parameter
