"""The Python door: a transformers model whose layers stream.

    model = airtune.load(path, lora=LoraConfig(...))     # a PeftModel around a transformers model
    model(**batch).loss.backward()                       # ordinary gradients on the adapters
    model.generate(...)

Checkpoint headers -> model on meta -> plan for every tensor -> small parts real -> adapters -> layers
streamed -> head streamed. Everything that can be wrong with the request is found here, before a weight is
read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from airtune.model.adapter import add_adapter, load_adapter
from airtune.model.head import stream_head
from airtune.model.head_weights import StreamedHead, head_weights
from airtune.model.layers import find_layers
from airtune.model.recording import register_containers
from airtune.model.skeleton import build_skeleton
from airtune.model.stream import Stream, Visit
from airtune.sizes import parse_bytes
from airtune.weights.access import choose_access
from airtune.weights.budget import SlotBudget
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.file_map import FileMap
from airtune.weights.image import LayerImage, load_tensor
from airtune.weights.layout import plan_weights
from airtune.weights.reader import ByteReader
from airtune.weights.residency import Layer, Residency

# Memory for the logits of the loss at a time. 64 MB hold 256 tokens of a 65536-row vocabulary in fp32; more
# would not make the two matrix products faster, and less splits them into slivers.
LOSS_BLOCK_NBYTES = 64 * 2**20
# An adapter's element on the device: itself, its gradient and Adam's two moments, in fp32.
_TRAINED_NBYTES = 4 * 4

logger = logging.getLogger(__name__)


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
            keeps layers there. None for two layers at a time.
        host_memory: bytes of host memory for weights: on an accelerator, layers that are read from disk
            once; on the CPU, how many layers may be in memory. None for what streaming needs.
        file_access: "mapped" (on the CPU: weights are used where the file is mapped), "buffered" (read
            through the page cache), "direct" (past it); "auto" measures when the checkpoint is larger than
            memory.
        attn_implementation: None for sdpa, or eager where the architecture has none.
        trust_remote_code: run modelling code that the repository brings.
        revision: of a Hub repository.
        poison: fill released memory with NaN, to find use after release.

    Raises:
        ValueError: (CheckpointError among others) the request cannot be met; the message says why and what
            to do.
    """
    if lora is not None and adapter is not None:
        raise ValueError(
            "got both lora and adapter: give lora for a fresh adapter, or adapter to use a saved one"
        )
    target = _device(device)
    checkpoint = Checkpoint.open(path, revision=revision, include_code=trust_remote_code)
    model = build_skeleton(
        checkpoint.folder,
        dtype=dtype,
        stored_dtype=_main_dtype(checkpoint),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    model.name_or_path = model.config._name_or_path = str(path)
    register_containers()
    layers = find_layers(model)
    plans = plan_weights(model, checkpoint)
    grouped = [{n: p for n, p in plans.items() if n.startswith(f"{layer}.")} for layer in layers]
    on_cpu = target.type == "cpu"
    access = choose_access(checkpoint, on_cpu=on_cpu, requested=file_access)
    reader, files = ByteReader(direct=access == "direct"), FileMap()
    residency = Residency(
        model,
        [Layer(LayerImage.of(group.values(), map_files=access == "mapped"), group) for group in grouped],
        reader,
        files,
        device=target,
        cache_nbytes=0 if target.type == "cpu" or host_memory is None else parse_bytes(host_memory),
        poison=poison,
    )
    head = _streamable_head(model)
    streamed = {name for group in grouped for name in group}
    for name, plan in plans.items():
        if name not in streamed and name != head:
            _set_tensor(model, name, load_tensor(plan, reader, files, model))
    model.tie_weights()
    wrapped = _with_adapter(model, list(layers), lora, adapter, adapter_trainable)
    trained_numel = 0
    for module in layers.values():
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(target)
                trained_numel += parameter.numel() if parameter.requires_grad else 0
    memory = _memory(target, device_memory, host_memory)
    fixed_nbytes = 0 if target.type == "cpu" else trained_numel * _TRAINED_NBYTES
    budget = SlotBudget(len(layers), residency.layer_nbytes, memory, fixed_nbytes)
    stream = Stream(model, layers, residency, budget)
    stream.micro_batch_size = micro_batch_size
    stream.on_close(reader.close)
    if head is not None:
        weights = head_weights(model, plans[head], target, reader, files)
        stream.observers.append(_before_head(weights))
        stream.on_close(weights.close)
        stream.on_close(stream_head(model, weights, block_bytes=LOSS_BLOCK_NBYTES))
    return wrapped


def _before_head(head: StreamedHead) -> Callable[[Visit], None]:
    """While the last layer computes, the head's first rows are read."""

    def observe(visit: Visit) -> None:
        if visit.direction == "forward" and visit.index == visit.count - 1:
            head.announce()

    return observe


def _with_adapter(
    model: PreTrainedModel,
    layers: list[str],
    lora: LoraConfig | None,
    adapter: str | Path | None,
    trainable: bool,
) -> PreTrainedModel | PeftModel:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if lora is not None:
        return add_adapter(model, layers, lora)
    if adapter is not None:
        return load_adapter(model, Path(adapter), trainable=trainable)
    return model


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point dtype that most bytes of the checkpoint are stored in."""
    nbytes: Counter[torch.dtype] = Counter()
    for stored in checkpoint.values():
        if stored.dtype.is_floating_point:
            nbytes[stored.dtype] += stored.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else torch.float32


def _device(device: str | torch.device) -> torch.device:
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def _memory(
    device: torch.device, device_memory: str | int | None, host_memory: str | int | None
) -> int | None:
    """Bytes for weights where the layers compute; None when the user leaves it open."""
    given = host_memory if device.type == "cpu" else device_memory
    if device.type == "cpu" and device_memory is not None:
        logger.info("the layers compute on the CPU: device_memory is not used, host_memory is")
    return None if given is None else parse_bytes(given)


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
