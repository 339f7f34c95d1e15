"""From plans to a model whose layers stream.

The parts are joined in the order in which they need one another: what brings experts, then what brings
layers, which hold them; then, as the budget is known by now and may be too small, what stays in memory, the
adapter, the stream that replaces the layers' forwards, and the head. Each leaves on a stack the way to take
it off again, which is what closing the stream does, and what happens at once when a later part fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from airtune.model.adapter import AdapterPlan
from airtune.model.experts import hear_routers
from airtune.model.generation import honest_device
from airtune.model.head import stream_head
from airtune.model.head_weights import StreamedHead, head_weights
from airtune.model.refusals import refuse_what_needs_weights
from airtune.model.request import Place
from airtune.model.stream import Stream, Visit
from airtune.model.tables import Tables
from airtune.weights.access import FileAccess
from airtune.weights.budget import SlotBudget
from airtune.weights.counters import Counters
from airtune.weights.expert_plans import ExpertGroup
from airtune.weights.experts import LEAST_PLACES, ExpertWindow
from airtune.weights.file_map import FileMap
from airtune.weights.image import LayerImage, can_be_mapped, load_tensor
from airtune.weights.matrix import CHUNK_NBYTES, MAPPED_CHUNK_NBYTES
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.plans import TensorPlan
from airtune.weights.reader import ByteReader
from airtune.weights.residency import Layer, Residency

logger = logging.getLogger(__name__)

# Memory for the logits of the loss at a time. 64 MB hold 256 tokens of a 65536-row vocabulary in fp32; more
# would not make the two matrix products faster, and less splits them into slivers.
LOSS_BLOCK_NBYTES = 64 * 2**20
# Experts on the device at a time. One computes while others come: 256 MiB are 14 experts of 17.5 MB (a 2.8T
# model in 4 bits) or 5 of 44 MB (a 671B model in 8 bits).
WINDOW_NBYTES = 256 * 2**20
# An adapter's element on the device: itself, its gradient and Adam's two moments, in fp32.
_TRAINED_NBYTES = 4 * 4


@dataclass(frozen=True)
class Planned:
    """A model on meta, and what was found out about it.

    Args:
        layers: {path: layer} of those that stream.
        plans: {module tensor name: how it is made}.
        groups: the experts in the layers.
        tuning: the adapter, if there is to be one.
    """

    model: PreTrainedModel
    layers: Mapping[str, nn.Module]
    plans: Mapping[str, TensorPlan]
    groups: Sequence[ExpertGroup]
    tuning: AdapterPlan | None


@dataclass(frozen=True)
class Way:
    """Where to, and by which way, the weights come.

    Args:
        limits_host: the user gave a limit for host memory.
        poison: fill released memory with NaN.
    """

    place: Place
    access: FileAccess
    limits_host: bool
    poison: bool

    @property
    def map_files(self) -> bool:
        return self.access == "mapped" and not self.poison


@dataclass(frozen=True)
class _Means:
    """What weights are brought with, and counted by."""

    reader: ByteReader
    files: FileMap
    counters: Counters


def assemble(found: Planned, way: Way, *, micro_batch_size: int | None) -> PreTrainedModel | PeftModel:
    """The streamed model, with its adapter around it.

    Raises:
        ValueError: the memory given does not hold a layer; weights or the adapter cannot be read.
    """
    model, place = found.model, way.place
    with ExitStack() as cleanup:
        reader = cleanup.enter_context(ByteReader(direct=way.access == "direct"))
        means = _Means(reader, FileMap(), Counters())
        tables = Tables(model, found.layers, found.plans, means.files)
        apart = {name for group in found.groups for name in group.names()} | tables.names()
        images = _layer_images(found.layers, found.plans, without=apart, map_files=way.map_files)
        window, residency = _bringers(found, way, means, images, tables, cleanup)
        head = _streamable_head(model)
        elsewhere = apart | {name for image in images for name in image.names()} | {head}
        resident = {name: plan for name, plan in found.plans.items() if name not in elsewhere}
        rows_nbytes = _rows_nbytes(found.plans.get(head or ""), resident.values()) if place.on_cpu else 0
        budget = _budget(place, residency, window, len(found.layers), found.tuning, rows_nbytes)
        _load_resident(model, resident, tables, means)
        wrapped = model if found.tuning is None else found.tuning.attach(model)
        _move_what_stays(found.layers, place.device)
        stream = Stream(model, found.layers, residency, window, budget)
        stream.micro_batch_size = micro_batch_size
        if way.limits_host:
            mapped = LayerImage.of(filter(can_be_mapped, resident.values()), map_files=True)
            stream.places.give_back = partial(_give_back, means.files, mapped, tables)
        if head is not None:
            weights = head_weights(model, found.plans[head], place.device, means.reader, means.files)
            _stream_head(model, weights, stream, cleanup)
        cleanup.callback(honest_device(model))
        cleanup.callback(refuse_what_needs_weights(model, wrapped))
        stream.on_close(cleanup.pop_all().close)
    return wrapped


def _bringers(
    found: Planned,
    way: Way,
    means: _Means,
    images: Sequence[LayerImage],
    tables: Tables,
    cleanup: ExitStack,
) -> tuple[ExpertWindow | None, Residency]:
    """What brings experts (if there are any), and what brings layers.

    Host memory is for the experts of one layer first: forward, recompute and backward of each micro-batch ask
    for them, and a layer is asked for twice. What is left is for layers, and what is left then, for experts.
    """
    place, window, experts_nbytes, cache_nbytes = way.place, None, 0, way.place.cache_nbytes or 0
    if found.groups:
        window = ExpertWindow(
            found.groups,
            means.reader,
            means.files,
            device=place.device,
            counters=means.counters,
            map_files=way.map_files,
            poison=way.poison,
        )
        cleanup.callback(window.close)
        window.places = _window_places(window, place)
        cleanup.callback(hear_routers(found.model, found.groups, window.announce))
        if place.cache_nbytes is None and not place.on_cpu:
            cache_nbytes = _room_for_experts(window)
        # Fewer would be gone again when their turn comes.
        experts_nbytes = window.layer_nbytes if window.layer_nbytes <= cache_nbytes else 0
    layers_nbytes = min(cache_nbytes - experts_nbytes, sum(image.nbytes for image in images))
    if window is not None:
        window.keep(cache_nbytes - layers_nbytes)
    residency = Residency(
        found.model,
        _with_lazy(images, found.groups, window, tables),
        means.reader,
        means.files,
        device=place.device,
        counters=means.counters,
        cache_nbytes=layers_nbytes,
        poison=way.poison,
    )
    cleanup.callback(residency.close)
    return window, residency


def _room_for_experts(window: ExpertWindow) -> int:
    """Host memory for experts where the user leaves it open: one layer's, if half of what is free holds them.

    Without it a checkpoint that is larger than memory is read from the disk three times for each micro-batch,
    and with it twice a step.
    """
    if window.layer_nbytes <= available_memory_nbytes() // 2:
        return window.layer_nbytes
    logger.info(
        "half of the memory that is free does not hold the experts of one layer (%.1f GB): they are read in "
        "forward, in the recompute and in backward of each micro-batch; set stream.host_memory to hold them, "
        "or make stream.micro_batch_size larger",
        window.layer_nbytes / 1e9,
    )
    return 0


def _load_resident(
    model: PreTrainedModel, resident: Mapping[str, TensorPlan], tables: Tables, means: _Means
) -> None:
    """What is in no layer: read or mapped, or a table that stays in its file."""
    for name, plan in resident.items():
        _set_tensor(model, name, load_tensor(plan, means.reader, means.files))
    for name, table in tables.outside.items():
        _set_tensor(model, name, table)
    model.tie_weights()


def _stream_head(model: PreTrainedModel, weights: StreamedHead, stream: Stream, cleanup: ExitStack) -> None:
    cleanup.callback(weights.close)
    stream.places.head = weights
    stream.observers.append(_before_head(weights))
    # On the CPU chunks of the head are half as large, and so is what as many tokens make of one.
    block_nbytes = LOSS_BLOCK_NBYTES // (2 if weights.device.type == "cpu" else 1)
    cleanup.callback(stream_head(model, weights, block_bytes=block_nbytes))


def _layer_images(
    layers: Collection[str], plans: Mapping[str, TensorPlan], *, without: Collection[str], map_files: bool
) -> list[LayerImage]:
    """Of each layer, without what is brought apart from it."""
    own = [plan for name, plan in plans.items() if name not in without]
    groups = [[plan for plan in own if plan.name.startswith(f"{path}.")] for path in layers]
    return [LayerImage.of(group, map_files=map_files) for group in groups]


def _with_lazy(
    images: Sequence[LayerImage],
    groups: Sequence[ExpertGroup],
    window: ExpertWindow | None,
    tables: Tables,
) -> list[Layer]:
    lazy: list[dict[str, torch.Tensor]] = [{**inside} for inside in tables.inside.values()]
    for number, group in enumerate(groups):
        assert window is not None
        lazy[group.layer] |= window.tensors(number)
    return [Layer(*pair) for pair in zip(images, lazy, strict=True)]


def _give_back(files: FileMap, mapped: LayerImage, tables: Tables) -> None:
    files.release(mapped.mapped_ranges())
    tables.release()


def _window_places(window: ExpertWindow, place: Place) -> int:
    """How many experts may be on the device at once, before it is known what the budget leaves."""
    nbytes = WINDOW_NBYTES if place.nbytes is None else min(WINDOW_NBYTES, place.nbytes // 8)
    return max(LEAST_PLACES, nbytes // max(1, window.expert_nbytes))


def _budget(
    place: Place,
    residency: Residency,
    window: ExpertWindow | None,
    count: int,
    tuning: AdapterPlan | None,
    rows_nbytes: int,
) -> SlotBudget:
    """Raises ValueError if the user's limit does not hold a single layer."""
    fixed_nbytes = 0 if place.on_cpu or tuning is None else tuning.trained_numel * _TRAINED_NBYTES
    experts_nbytes = 0 if window is None else window.places * window.expert_nbytes
    budget = SlotBudget(
        count, residency.layer_nbytes, place.nbytes, fixed_nbytes, experts_nbytes, rows_nbytes
    )
    budget.first()
    return budget


def _rows_nbytes(head: TensorPlan | None, resident: Collection[TensorPlan]) -> int:
    """Mapped rows that are in memory at once: two chunks of the head, and what a pass touches of the tables.

    A row that is looked up brings 64 kB of its neighbours along, so a chunk holds what 512 tokens touch.
    """
    tables_nbytes = sum(plan.nbytes for plan in resident if can_be_mapped(plan))
    return min(head.nbytes if head else 0, 2 * MAPPED_CHUNK_NBYTES) + min(tables_nbytes, CHUNK_NBYTES)


def _move_what_stays(layers: Mapping[str, nn.Module], device: torch.device) -> None:
    """Adapters, and buffers that are in no checkpoint, go where their layers compute."""
    for layer in layers.values():
        for parameter in layer.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for module in layer.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)


def _before_head(head: StreamedHead) -> Callable[[Visit], None]:
    """While the last layer computes, the head's first rows are read."""

    def observe(visit: Visit) -> None:
        if visit.direction == "forward" and visit.index == visit.count - 1:
            head.announce()

    return observe


def _streamable_head(model: PreTrainedModel) -> str | None:
    """Name of the output projection's weight, if the head is a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    path = next(name for name, module in model.named_modules() if module is head)
    return f"{path}.weight"


def _set_tensor(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
