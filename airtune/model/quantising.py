"""A packed copy of a model: which of its weights are packed, and the store that holds it.

Packed is what streaming pays for: the matrices of the linear layers inside the decoder layers, and every
expert's. In a model of billions of parameters that is all but a few percent of the bytes. The rest stays:

    embeddings, output projection      looked up, or sampled from: an error there is an error in every token
    norms, biases, convolutions, ...   small
    routers and gates beside experts   small, and a wrong choice is no small error
    matrices > 16 times as long as wide    a row for each head or state: decays and gates
    what the authors keep in float32   for a reason
    image and audio towers             not streamed

It is decided by what a module is on the meta model, never by a name. transformers loads the copy of a dense
model too: what is not packed is on the list that it goes by. For experts it knows no such form.

It gives up calibration: weights are rounded one by one, without looking at activations.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from airtune.model.experts import find_experts
from airtune.model.layers import find_layers
from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.expert_plans import ExpertGroup
from airtune.weights.header import StoredTensor
from airtune.weights.layout import plan_weights
from airtune.weights.packed.packing import PACKINGS
from airtune.weights.packed.schemes import take_scheme
from airtune.weights.packed.shards import Weight, plan_shards
from airtune.weights.packed.store import PackedStore
from airtune.weights.plans import TensorPlan

logger = logging.getLogger(__name__)

SHARD_NBYTES = 4 * 10**9
_LONGEST = 16  # times longer than wide
# In this dtype a model shows which of its weights its authors keep in float32.
_DTYPE = torch.float16
# What bitsandbytes packs.
_SOURCE_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_KERNELS = frozenset({"cuda", "xpu"})


@dataclass(frozen=True)
class Quantised:
    """What came of it, in bytes."""

    source_nbytes: int
    packed_nbytes: int  # of the source, those that were packed
    nbytes: int

    @property
    def share(self) -> float:
        """Of the source's bytes, the part that was packed."""
        return self.packed_nbytes / self.source_nbytes


def quantise(
    path: str | Path,
    *,
    scheme: str,
    output_dir: str | Path,
    revision: str | None = None,
    trust_remote_code: bool = False,
    shard_nbytes: int = SHARD_NBYTES,
) -> Quantised:
    """Write a packed copy of a model, weight by weight; called again after an interruption, goes on.

    Args:
        path: a folder with safetensors files and config.json, or the id of a repository on the Hub.
        scheme: "nf4" or "int8".
        output_dir: a folder that is new, empty, or was begun by the same call.

    Raises:
        ValueError: (CheckpointError among others) it cannot be done; the message says why.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "packing weights needs bitsandbytes, which is not installed. Install airtune[quantized]."
        )
    source = Checkpoint.open(path, revision=revision, include_code=trust_remote_code)
    model = build_skeleton(
        source.folder,
        dtype=_DTYPE,
        stored_dtype=_DTYPE,
        attn_implementation="eager",  # nothing is computed
        trust_remote_code=trust_remote_code,
    )
    config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    if any("quantization_config" in part for part in (config, config.get("text_config", {}))):
        raise ValueError(f"{path}: its weights are packed already. Give the model's unquantised checkpoint.")
    plans = plan_weights(model, source)
    weights = _weights(model, source, plans, scheme)
    packed_nbytes = sum(weight.stored.nbytes for weight in weights if weight.packed)
    if not packed_nbytes:
        raise ValueError(f"{path}: {type(model).__name__} has no weight that {scheme} could pack.")
    settings = _settings(model, plans, weights, config, scheme)
    _check_readable(model, settings, path)
    config |= settings
    store = PackedStore(source, scheme, plan_shards(weights, scheme, shard_nbytes), config)
    done = Quantised(source.nbytes, packed_nbytes, store.nbytes)
    logger.info(
        "%.1f GB in, of which %.1f %% are packed; %.1f GB out",
        done.source_nbytes / 1e9,
        100 * done.share,
        done.nbytes / 1e9,
    )
    store.write(Path(output_dir), _device())
    return done


def _check_readable(model: PreTrainedModel, settings: Mapping[str, object], path: str | Path) -> None:
    """ValueError if transformers would give a packed copy other modules than the checkpoint was written for.

    `model` has those modules afterwards, and is of no more use.
    """
    before = set(model.state_dict())
    model.config.update(dict(settings))
    take_scheme(model)
    if lost := sorted(before - set(model.state_dict())):
        raise ValueError(
            f"{path}: transformers gives {type(model).__name__} other modules when its weights are packed "
            f"({lost[0]} and {len(lost) - 1} more have no place there). Use the checkpoint as it is"
        )


def _weights(
    model: PreTrainedModel, source: Checkpoint, plans: Mapping[str, TensorPlan], scheme: str
) -> list[Weight]:
    """Every tensor of the source, in the order of its files."""
    turned = {
        plans[name].conversion.sources[0][0]
        for name, module in _linears(model, plans)
        if isinstance(module, Conv1D)
    }
    packed = _keys_to_pack(plans, set(_streamed_matrices(model, plans)), turned, scheme)
    ordered = sorted(source.items(), key=lambda item: (item[1].file, item[1].offset))
    return [Weight(key, stored, key in packed, key in turned) for key, stored in ordered]


def _streamed_matrices(model: PreTrainedModel, plans: Mapping[str, TensorPlan]) -> Iterator[str]:
    """Names of the parameters that are to be packed."""
    layers = find_layers(model)
    groups = find_experts(model, list(layers), plans)
    of_experts = {name for group in groups for name in group.names()}
    yield from (name for name in of_experts if plans[name].dtype == _DTYPE and len(plans[name].shape) == 3)
    for name, _ in _linears(model, plans):
        if not name.startswith(tuple(f"{path}." for path in layers)) or plans[name].dtype != _DTYPE:
            continue
        short, long = sorted(plans[name].shape)
        routes = any(_routes(name, short, group) for group in groups)
        if name in of_experts or (long <= _LONGEST * short and not routes):
            yield name


def _linears(model: PreTrainedModel, plans: Mapping[str, TensorPlan]) -> Iterator[tuple[str, nn.Module]]:
    """(name of the weight, module) of all linear layers."""
    for path, module in model.named_modules():
        # No subclasses: they may be routers, or groups of matrices. It is also what transformers replaces.
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and f"{path}.weight" in plans:
            yield f"{path}.weight", module


def _routes(name: str, width: int, group: ExpertGroup) -> bool:
    """Whether a linear layer stands beside experts and has no more outputs than there are of them."""
    block = group.path.rpartition(".")[0]
    return width <= group.count and name.startswith(f"{block}.") and not name.startswith(f"{group.path}.")


def _keys_to_pack(
    plans: Mapping[str, TensorPlan], names: set[str], turned: set[str], scheme: str
) -> set[str]:
    """The checkpoint keys that make these parameters and nothing else. A conversion is packed whole or not
    at all.
    """
    kept = {key for n, plan in plans.items() if n not in names for key, _, _ in plan.conversion.sources}
    packed: set[str] = set()
    for name in names:
        sources = plans[name].conversion.sources
        if _can_be_read_back(plans[name]) and all(
            key not in kept and _can_be_packed(s, key in turned, scheme) for key, _, s in sources
        ):
            packed |= {key for key, _, _ in sources}
    return packed


def _can_be_read_back(plan: TensorPlan) -> bool:
    """Whether transformers' rules for the model find what lies beside a packed weight.

    They have one target where they have several sources, and parts of a stack go by its parameter's name.
    """
    converter, leaf = plan.conversion.converter, plan.name.rpartition(".")[2]
    if converter is not None and len(converter.target_patterns) > 1:
        return False
    one_by_one = converter is not None and all(len(s.shape) == 2 for _, _, s in plan.conversion.sources)
    return one_by_one or all(key.rpartition(".")[2] == leaf for key, _, _ in plan.conversion.sources)


def _can_be_packed(stored: StoredTensor, turned: bool, scheme: str) -> bool:
    shape = stored.shape[::-1] if turned else stored.shape
    return len(shape) in (2, 3) and stored.dtype in _SOURCE_DTYPES and PACKINGS[scheme].takes(shape)


def _settings(
    model: PreTrainedModel,
    plans: Mapping[str, TensorPlan],
    weights: list[Weight],
    config: Mapping[str, dict[str, object]],
    scheme: str,
) -> dict[str, object]:
    """What config.json has to say about packed weights, for transformers and for us."""
    packed = {weight.key: weight.stored.dtype for weight in weights if weight.packed}
    dtype = next(iter(packed.values()))
    skipped = _skipped(
        {
            name.removesuffix(".weight"): plans[name].conversion.sources[0][0] in packed
            for name, _ in _linears(model, plans)
        }
    )
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    settings = BitsAndBytesConfig(
        **(four if scheme == "nf4" else {"load_in_8bit": True}), llm_int8_skip_modules=skipped
    ).to_dict()
    # Nothing else tells any more what the model computes in: scales are float32.
    named = [
        part.get(key) for part in (config, config.get("text_config", {})) for key in ("dtype", "torch_dtype")
    ]
    return {"quantization_config": settings} | (
        {} if any(named) else {"dtype": str(dtype).removeprefix("torch.")}
    )


def _skipped(linears: Mapping[str, bool]) -> list[str]:
    """Of {path of a linear layer: whether it is packed}, the outermost modules that hold none that is."""
    holds_packed = {outer for path, packed in linears.items() if packed for outer in _outwards(path)}
    outermost = [
        next(outer for outer in _outwards(path) if outer not in holds_packed)
        for path, packed in linears.items()
        if not packed
    ]
    return list(dict.fromkeys(outermost))


def _outwards(path: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _device() -> torch.device:
    """Where bitsandbytes packs fastest."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in _KERNELS else torch.device("cpu")
