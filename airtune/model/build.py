"""The Python door: a transformers model whose layers stream.

    model = airtune.load(path, lora=LoraConfig(...))     # a PeftModel around a transformers model
    model(**batch).loss.backward()                       # ordinary gradients on the adapters
    model.generate(...)

Checkpoint headers -> model on meta -> a plan for every tensor and for the adapter -> `assembly`. All that can
be wrong with the request is found here, before a weight is read.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from airtune.model.adapter import plan_adapter
from airtune.model.assembly import Planned, Way, assemble
from airtune.model.experts import find_experts
from airtune.model.layers import find_layers
from airtune.model.recording import register_containers
from airtune.model.request import (
    check_adapter,
    check_dtype,
    check_micro_batch_size,
    choose_attention,
    choose_place,
)
from airtune.model.skeleton import build_skeleton
from airtune.weights.access import choose_access
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.layout import plan_weights
from airtune.weights.packed.decode import COMPUTE_DTYPES
from airtune.weights.packed.schemes import take_scheme


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What is made may be trained, also where inference mode is on. And laying out a large model makes
    millions of objects that stay: looking for garbage among them again and again takes a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        if collects:
            gc.enable()


@_undisturbed()
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
            keeps layers there, and once it holds all of them, graphs of layers, which backward then need
            not compute again. None for 90 % of what is free.
        host_memory: bytes of host memory for weights: on an accelerator, layers that are read from disk
            once, and experts; on the CPU, layers at all, and then their graphs. None for what streaming
            needs, and on an accelerator for the experts of one layer where half of what is free holds them.
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
    scheme = take_scheme(model)
    register_containers()
    layers = find_layers(model)
    plans = plan_weights(model, checkpoint, scheme)
    folder = None if adapter is None else Path(adapter)
    groups = find_experts(model, list(layers), plans)
    stacks = [name for group in groups for name in group.stacks]
    tuning = plan_adapter(model, layers, stacks, lora, folder, trainable=adapter_trainable)
    if tuning is not None and revision is not None:
        tuning.targets.config.revision = revision  # else the saved adapter sends its loaders to `main`
    found = Planned(model, layers, plans, groups, tuning)
    access = choose_access(checkpoint, on_cpu=place.on_cpu, requested=file_access)
    how = Way(place, access, limits_host=host_memory is not None, poison=poison)
    return assemble(found, how, micro_batch_size=micro_batch_size)


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of the dtypes that can be computed in, the one that most bytes of the checkpoint are stored in."""
    nbytes: Counter[torch.dtype] = Counter()
    for stored in checkpoint.values():
        if stored.dtype in COMPUTE_DTYPES:
            nbytes[stored.dtype] += stored.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else torch.float32
