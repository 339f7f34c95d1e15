"""The Python door: a transformers model whose layers stream.

    model = airtune.load(path, lora=LoraConfig(...))     # a PeftModel around a transformers model
    model(**batch).loss.backward()                       # ordinary gradients on the adapters
    model.generate(...)

Checkpoint headers -> model on meta -> plan for every tensor -> small parts real -> adapters -> layers
streamed -> head streamed. Everything that can be wrong with the request is found here, before a weight is
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from airtune.model.adapter import AdapterPlan, plan_adapter
from airtune.model.head import stream_head
from airtune.model.head_weights import StreamedHead, head_weights
from airtune.model.layers import find_layers
from airtune.model.recording import register_containers
from airtune.model.refusals import refuse_what_needs_weights
from airtune.model.request import (
    Place,
    check_adapter,
    check_dtype,
    check_micro_batch_size,
    choose_attention,
    choose_place,
)
from airtune.model.skeleton import build_skeleton
from airtune.model.stream import Stream, Visit
from airtune.weights.access import choose_access
from airtune.weights.budget import SlotBudget
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.file_map import FileMap
from airtune.weights.image import LayerImage, load_tensor
from airtune.weights.layout import TensorPlan, plan_weights
from airtune.weights.reader import ByteReader
from airtune.weights.residency import Layer, Residency

# Memory for the logits of the loss at a time. 64 MB hold 256 tokens of a 65536-row vocabulary in fp32; more
# would not make the two matrix products faster, and less splits them into slivers.
LOSS_BLOCK_NBYTES = 64 * 2**20
# An adapter's element on the device: itself, its gradient and Adam's two moments, in fp32.
_TRAINED_NBYTES = 4 * 4


def load(
    path: str | Path,
    lora: LoraConfig | None = None,
    adapter: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    micro_batch_size: int | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    *,
    file_access: str = "auto",
    adapter_trainable: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    poison: bool = False,
) -> PreTrainedModel | PeftModel:
    """A streamed transformers model; a PeftModel around it when `lora` or `adapter` is given.

    Args:
        path: a folder with safetensors files and config.json, or the id of a repository on the Hub.
        lora: a fresh adapter, in fp32, initialised as PEFT does from the current random state.
        adapter: a folder that holds a saved PEFT adapter; frozen unless `adapter_trainable`.
        device: where the layers compute; "auto" is the accelerator if there is one. The model itself stays
            on the CPU: inputs and outputs live there, and so does `model.device`.
        dtype: compute dtype of the base; None for the checkpoint's own.
        micro_batch_size: rows that go through a layer at once; None for the whole batch.
        device_memory: bytes to use on an accelerator, such as "4GB"; what the first step leaves of them
            keeps layers there. None for 90 % of what is free.
        host_memory: bytes of host memory for weights: on an accelerator, layers that are read from disk
            once; on the CPU, how many layers may be in memory. None for what streaming needs.
        file_access: "mapped" (on the CPU: weights are used where the file is mapped), "buffered" (read
            through the page cache), "direct" (past it); "auto" measures when the checkpoint is larger than
            memory.
        attn_implementation: None (or "auto") for sdpa, or eager where the architecture has none.
        trust_remote_code: run modelling code that the repository brings.
        revision: of a Hub repository.
        poison: fill released memory with NaN, to find use after release.

    Raises:
        ValueError: (CheckpointError among others) the request cannot be met; the message says why and what
            to do.
    """
    place = choose_place(device, device_memory, host_memory)
    check_micro_batch_size(micro_batch_size)
    check_dtype(dtype)
    check_adapter(lora, adapter)
    attention = choose_attention(attn_implementation)
    checkpoint = Checkpoint.open(path, revision=revision, include_code=trust_remote_code)
    model = build_skeleton(
        checkpoint.folder,
        dtype=dtype,
        stored_dtype=_main_dtype(checkpoint),
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )
    model.name_or_path = model.config._name_or_path = str(path)
    model.requires_grad_(False)
    register_containers()
    layers = find_layers(model)
    plans = plan_weights(model, checkpoint)
    folder = None if adapter is None else Path(adapter)
    tuning = plan_adapter(model, layers, lora, folder, trainable=adapter_trainable)
    access = choose_access(checkpoint, on_cpu=place.on_cpu, requested=file_access)
    with ExitStack() as cleanup:
        files, reader = FileMap(), cleanup.enter_context(ByteReader(direct=access == "direct"))
        streamed = _streamed_layers(layers, plans, map_files=access == "mapped" and not poison)
        residency = Residency(
            model,
            streamed,
            reader,
            files,
            device=place.device,
            cache_nbytes=place.cache_nbytes,
            poison=poison,
        )
        cleanup.callback(residency.close)
        budget = _budget(place, residency, len(layers), tuning)
        head = _streamable_head(model)
        elsewhere = {name for layer in streamed for name in layer.plans} | {head}
        for name, plan in plans.items():
            if name not in elsewhere:
                _set_tensor(model, name, load_tensor(plan, reader, files, model))
        model.tie_weights()
        wrapped = model if tuning is None else tuning.attach(model)
        _move_what_stays(layers, place.device)
        stream = Stream(model, layers, residency, budget)
        stream.micro_batch_size = micro_batch_size
        if head is not None:
            weights = head_weights(model, plans[head], place.device, reader, files)
            cleanup.callback(weights.close)
            stream.observers.append(_before_head(weights))
            cleanup.callback(stream_head(model, weights, block_bytes=LOSS_BLOCK_NBYTES))
        cleanup.callback(refuse_what_needs_weights(model, wrapped))
        stream.on_close(cleanup.pop_all().close)
    return wrapped


def _streamed_layers(
    layers: Collection[str], plans: Mapping[str, TensorPlan], *, map_files: bool
) -> list[Layer]:
    groups = [{name: plan for name, plan in plans.items() if name.startswith(f"{path}.")} for path in layers]
    return [Layer(LayerImage.of(group.values(), map_files=map_files), group) for group in groups]


def _budget(place: Place, residency: Residency, count: int, tuning: AdapterPlan | None) -> SlotBudget:
    """Raises ValueError if the user's limit does not hold a single layer."""
    fixed_nbytes = 0 if place.on_cpu or tuning is None else tuning.trained_numel * _TRAINED_NBYTES
    budget = SlotBudget(count, residency.layer_nbytes, place.nbytes, fixed_nbytes)
    budget.first()
    return budget


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


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point dtype that most bytes of the checkpoint are stored in."""
    nbytes: Counter[torch.dtype] = Counter()
    for stored in checkpoint.values():
        if stored.dtype.is_floating_point:
            nbytes[stored.dtype] += stored.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else torch.float32


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
