"""Which linear layers an adapter goes on: PEFT's answer, kept inside the streamed layers.

PEFT matches names over the whole model and speaks of a mismatch only when nothing matches at all. Three
things follow that nobody asked for: a tower or a router is adapted because a projection in it has the same
name; one mistyped name in a list is lost; and in architectures whose experts were once modules of their own,
names such as those of the dense MLP are taken for expert parameters, and a regular expression becomes a list
of last names, for all layers. So the modules are worked out here first, from names alone, and PEFT is given a
config that leads to exactly these.

Experts that are stacked in one parameter are adapted by its name (`expert_adapters`). It gives up what cannot
be a frozen, streamed layer's neighbour: adapters on embeddings, on the head and on routers.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba, check_target_module_exists
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.pytorch_utils import Conv1D

from airtune.model.expert_adapters import match_parameters
from airtune.weights.header import listed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Targets:
    """The config to give to PEFT, and what it then adapts: modules (paths), and parameters (names) that hold
    stacked experts.
    """

    config: LoraConfig
    modules: frozenset[str]
    parameters: tuple[str, ...] = ()


def find_targets(
    model: PreTrainedModel, layers: Collection[str], stacks: Collection[str], lora: LoraConfig, *, saved: bool
) -> Targets:
    """What an adapter goes on. Of a saved one nothing may be left out.

    Args:
        model: has its placeholders' stand-ins.
        layers: paths.
        stacks: names of parameters that hold stacked experts.

    Raises:
        ValueError: a target matches no plain linear layer of the decoder, or one that cannot be adapted.
    """
    config = copy.deepcopy(lora)
    parameters = match_parameters(config, stacks)
    config.target_modules = config.target_modules or []
    modules = dict(model.named_modules())
    plain = _plain_linears(modules, layers)
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = _all_linear(model, plain, config)
    _refuse_experts(model, config)
    matched = _matched(modules, config)
    wanted, strangers = frozenset(matched & plain), matched - plain
    if config.target_modules and not saved:
        _require_matches(model, config, plain, wanted)
    elif not wanted and not parameters and not strangers:
        raise ValueError(f"the adapter's target_modules {config.target_modules} match nothing in this model")
    for name in {_last(name) for name in wanted}:
        _check_lora_target_modules_mamba(config, model, name)
    if strangers and saved:
        raise ValueError(
            "LoRA only goes on plain linear layers of the decoder, and this adapter is also on "
            + listed(f"{name} ({type(modules[name]).__name__})" for name in sorted(strangers))
        )
    if strangers:
        _leave_out(model, config, strangers, wanted)
    if isinstance(config.target_modules, str) and _expert_names(model):
        # PEFT would turn the expression into last names, for all layers.
        config.target_modules = sorted(wanted)
    return Targets(config, wanted, tuple(parameters))


def summary(names: Collection[str]) -> str:
    """Last names with their counts."""
    counts = Counter(_last(name) for name in names)
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


def _plain_linears(modules: Mapping[str, nn.Module], layers: Collection[str]) -> set[str]:
    starts = tuple(f"{layer}." for layer in layers)
    return {name for name in modules if name.startswith(starts) and _is_plain_linear(modules[name])}


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


def _matched(modules: Mapping[str, nn.Module], config: LoraConfig) -> set[str]:
    """PEFT's rule: a string is a regular expression for the whole path, a list holds paths or their ends."""
    return {name for name in modules if name and check_target_module_exists(config, name)}


def _all_linear(model: PreTrainedModel, plain: Collection[str], config: LoraConfig) -> list[str]:
    """Last names of the decoder's plain linear layers that PEFT adapts as such, without excluded ones."""
    everything = copy.copy(config)
    everything.target_modules = ".*"
    names = sorted({_last(name) for name in plain if check_target_module_exists(everything, name)})
    taken = [name for name in names if name in _expert_names(model)]
    if taken:
        logger.warning(
            "all-linear leaves out %s: in this architecture PEFT takes these names for parameters of the "
            "experts, which target_parameters is for. So its dense and shared MLPs get no adapter either",
            ", ".join(taken),
        )
    unsupported = [name for name in names if not _supported(model, config, name)]
    if unsupported:
        logger.warning(
            "all-linear leaves out %s: PEFT does not support it in this architecture", ", ".join(unsupported)
        )
    left = [name for name in names if name not in taken + unsupported]
    if not left:
        raise ValueError(
            f"all-linear finds no linear layer to adapt in the decoder layers of {type(model).__name__} "
            f"(exclude_modules={config.exclude_modules})"
        )
    return left


def _supported(model: PreTrainedModel, config: LoraConfig, name: str) -> bool:
    try:
        _check_lora_target_modules_mamba(config, model, name)
    except ValueError:
        return False
    return True


def _expert_names(model: PreTrainedModel) -> Collection[str]:
    """Last names of modules that PEFT rewrites into expert (or router) parameters of this architecture."""
    kind = model.config.model_type
    if get_checkpoint_conversion_mapping(kind) is None:
        return ()
    return _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(kind, ""), {}).keys()


def _refuse_experts(model: PreTrainedModel, config: LoraConfig) -> None:
    taken = _expert_names(model)
    targets = config.target_modules
    if isinstance(targets, str):
        matched = _matched(dict(model.named_modules()), config)
        named = sorted({_last(name) for name in matched} & set(taken))
        left = ""
    else:
        named = sorted(target for target in targets or () if _last(target) in taken)
        left = f"; left are {sorted(set(targets or ()) - set(named))}"
    if named:
        raise ValueError(
            f"target_modules name {named}: in models of type {model.config.model_type!r} PEFT takes these "
            f"for expert parameters. Leave them out of target_modules{left}; to train experts, name their "
            "parameters in target_parameters."
        )


def _require_matches(
    model: PreTrainedModel, config: LoraConfig, plain: Collection[str], wanted: Collection[str]
) -> None:
    """Every name in a list, or the regular expression, has to match something."""
    targets = config.target_modules
    if isinstance(targets, str):
        unmatched = [] if wanted else [targets]
    else:
        ends = {name[start:] for name in wanted for start in _starts(name)}
        unmatched = sorted(set(targets or ()) - ends)
    if unmatched:
        limits = {n: getattr(config, n) for n in ("exclude_modules", "layers_to_transform", "layers_pattern")}
        within = "".join(f", {name}={value}" for name, value in limits.items() if value is not None)
        raise ValueError(
            f"target_modules {unmatched}{within} match no linear layer in the decoder layers of "
            f"{type(model).__name__}; its linear layers are called {sorted({_last(name) for name in plain})}"
        )


def _starts(name: str) -> list[int]:
    return [0] + [match.end() for match in re.finditer(r"\.", name)]


def _leave_out(
    model: PreTrainedModel, config: LoraConfig, strangers: set[str], wanted: Collection[str]
) -> None:
    """Exclude what else the targets match; say so, and loudly where a regular expression asked for it."""
    by_pattern = isinstance(config.target_modules, str)
    head = next((n for n in strangers if model.get_submodule(n) is model.get_output_embeddings()), None)
    if by_pattern and head is not None:
        raise ValueError(
            f"target_modules {config.target_modules!r} also match the output projection {head!r}, which "
            f"cannot be adapted: LoRA goes on linear layers of the decoder. Narrow it, or give "
            f"exclude_modules=[{head!r}]"
        )
    config.exclude_modules = _excluding(config.exclude_modules, strangers, wanted)
    level = logging.WARNING if by_pattern else logging.INFO
    logger.log(level, "LoRA leaves out %s: not plain linear layers of the decoder", summary(strangers))


def _excluding(
    existing: str | Collection[str] | None, names: Collection[str], wanted: Collection[str]
) -> str:
    """One regular expression for what was excluded before and `names`, but none of `wanted`.

    Layer numbers are folded, where no wanted module has such a name in another layer.
    """
    patterns = set()
    for name in names:
        folded = re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))
        unsafe = any(re.fullmatch(folded, other) for other in wanted)
        patterns.add(re.escape(name) if unsafe else folded)
    if isinstance(existing, str):
        patterns.add(existing)
    else:
        patterns |= {rf"(?:.*\.)?{re.escape(name)}" for name in existing or ()}
    return "|".join(f"(?:{pattern})" for pattern in sorted(patterns))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
