"""Finding a layer's experts, and hearing what its router chose.

Experts are found by how they are held, not by what they are called. Stacked: a module outside torch's own
whose parameters are all stacks [E, ...], at least one of matrices. Apart: a `ModuleList` of modules of one
class with equal parameters. Fewer than `LEAST_EXPERTS` are heads, directions or shared experts, and stay with
their layer; so does a stack whose conversion mixes experts.

Nothing of a model's own code is replaced. It indexes its stack, or calls its modules, and gets weights that
are brought when they are computed with (`weights.lazy`). All that is added is a look at what goes in: the
integers among the arguments of stacked experts, or among the outputs of a router beside a list of experts,
are the router's choice, and what was chosen can be read before its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from airtune.weights.expert_plans import ExpertGroup, can_be_cut
from airtune.weights.plans import TensorPlan

# Fewer are hardly ever routed between.
LEAST_EXPERTS = 4


def find_experts(
    model: PreTrainedModel, layers: Sequence[str], plans: Mapping[str, TensorPlan]
) -> list[ExpertGroup]:
    """The groups of experts in the layers (paths), in their order."""
    found = []
    for index, path in enumerate(layers):
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            group = _stacked(index, name, module, plans) or _apart(index, name, module, plans)
            if group is not None:
                found.append(group)
    return found


def hear_routers(
    model: PreTrainedModel, groups: Sequence[ExpertGroup], announce: Callable[[int, list[int]], None]
) -> Callable[[], None]:
    """Have `announce(group index, experts)` called when a router has chosen; returns the way to undo it."""
    hooks = [hook for number, group in enumerate(groups) for hook in _listen(model, group, number, announce)]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _stacked(layer: int, path: str, module: nn.Module, plans: Mapping[str, TensorPlan]) -> ExpertGroup | None:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if type(module).__module__.startswith("torch.") or not any(p.dim() >= 3 for p in own.values()):
        return None
    counts = [p.shape[0] if p.dim() >= 2 else 1 for p in own.values()]
    # A model may stack more of one matrix than of another (experts that compute nothing have no second one).
    if max(counts) < LEAST_EXPERTS or 2 * min(counts) <= max(counts):
        return None
    stacks = {f"{path}.{name}": plans.get(f"{path}.{name}") for name in own}
    known = {name: plan for name, plan in stacks.items() if plan is not None}
    if len(known) < len(stacks) or not all(can_be_cut(plan) for plan in known.values()):
        return None
    return ExpertGroup(layer, path, known)


def _apart(layer: int, path: str, module: nn.Module, plans: Mapping[str, TensorPlan]) -> ExpertGroup | None:
    if not isinstance(module, nn.ModuleList) or len(module) < LEAST_EXPERTS:
        return None
    shapes = [[(name, tuple(p.shape)) for name, p in expert.named_parameters()] for expert in module]
    if not shapes[0] or any(other != shapes[0] for other in shapes) or len({type(e) for e in module}) > 1:
        return None
    apart = [
        {name: plans[name] for name in (f"{path}.{e}.{leaf}" for leaf, _ in shapes[0]) if name in plans}
        for e in range(len(module))
    ]
    return ExpertGroup(layer, path, {}, apart) if all(apart) else None


def _listen(
    model: PreTrainedModel, group: ExpertGroup, number: int, announce: Callable[[int, list[int]], None]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def hear(values: Any) -> None:
        chosen = _chosen(values, group.count)
        if chosen is not None:
            announce(number, chosen)

    if group.stacks:
        experts = model.get_submodule(group.path)
        yield experts.register_forward_pre_hook(
            lambda module, args, kwargs: hear((args, kwargs)), with_kwargs=True
        )
        return
    parent, _, own_name = group.path.rpartition(".")
    for name, sibling in model.get_submodule(parent).named_children():
        if name != own_name:
            yield sibling.register_forward_hook(lambda module, args, output: hear(output))


def _chosen(values: Any, count: int) -> list[int] | None:
    """The experts in the first tensor of integers among `values`, in ascending order; None without one."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.numel():
            return [e for e in leaf.unique().tolist() if 0 <= e < count]
    return None
