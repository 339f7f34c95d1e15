"""Layers that are on the device while they are visited.

    with residency.visit(index, "forward"):     # the layer's parameters are real
        layer(hidden)                           # outside, they are placeholders on the meta device

A few equal places (slots) hold what was read; with two of them layer i+1 is read and copied while layer i computes, and with
more, whole layers stay. Weights are frozen, so nothing is ever written back: a slot is simply given to the next layer.

On an accelerator a layer travels file -> pinned host buffer -> slot, by a background thread and a copy stream. Two events per
slot keep the order: compute waits until the copy into the slot is done (`ready`), and the next copy into it waits until the
last kernel that read it is done (`free`). On the CPU the file is mapped and a slot holds only what had to be converted.

All decisions (what to read ahead, what to drop) are `schedule.Route`'s and are taken by the visiting thread; the background
thread only carries them out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from airtune.weights.image import LayerImage, view_stored
from airtune.weights.layout import TensorPlan
from airtune.weights.reader import ByteReader, FileMap
from airtune.weights.schedule import Direction, Route, Stop


@dataclass
class Counters:
    """What moved, since the start. `stall_s` is the time that visits waited for weights."""

    bytes_read: int = 0
    bytes_copied: int = 0
    stall_s: float = 0.0
    compute_s: float = 0.0
    visits: int = 0
    cache_hits: int = 0


@dataclass(frozen=True)
class Binding:
    """A module's place for one tensor: bound before any adapter wraps the module, so names never need translating."""

    owner: nn.Module
    leaf: str
    placeholder: torch.Tensor

    @classmethod
    def find(cls, model: nn.Module, name: str) -> Binding:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._parameters:
            parameter = owner._parameters[leaf]
            assert parameter is not None and parameter.is_meta
            return cls(owner, leaf, parameter)
        buffer = owner._buffers[leaf]
        assert buffer is not None
        return cls(owner, leaf, buffer.to("meta"))

    def put(self, tensor: torch.Tensor) -> None:
        kind = self.owner._parameters if isinstance(self.placeholder, nn.Parameter) else self.owner._buffers
        kind[self.leaf] = tensor  # type: ignore[assignment]

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(tensor, requires_grad=False) if isinstance(self.placeholder, nn.Parameter) else tensor


@dataclass(frozen=True)
class Layer:
    """A streamed layer: its image, and its tensors' plans under the names that the model has for them."""

    image: LayerImage
    plans: Mapping[str, TensorPlan]

    def names(self) -> list[str]:
        """In the image's order: mapped, then packed."""
        by_plan = {id(plan): name for name, plan in self.plans.items()}
        image = self.image
        return [by_plan[id(plan)] for plan in (*image.mapped, *(region.plan for region in image.packed))]


class _Slot:
    """Room for one layer on the device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.ready: torch.Event | None = None
        self.free: torch.Event | None = None
        self.filling: Future[None] | None = None
        self.fills = 0
        self.views: dict[int, list[torch.Tensor]] = {}


class Residency:
    """The streamed layers of a model.

    Args:
        model: on meta where it is streamed; transformers' converters ask it for shapes.
        layers: in the order that a forward pass visits them.
        device: where layers compute.
        places: layers that may be on the device at once (at least 1; 2 to overlap reading with compute).
        poison: fill a slot with NaN bytes when its layer is dropped, to find readers that come too late.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[Layer],
        reader: ByteReader,
        files: FileMap,
        *,
        device: torch.device,
        places: int = 2,
        poison: bool = False,
    ) -> None:
        self.device, self.places, self.poison = device, places, poison
        self.counters = Counters()
        self._on_host = device.type == "cpu"
        self._images = [layer.image for layer in layers]
        self._bindings = [[Binding.find(model, name) for name in layer.names()] for layer in layers]
        for bindings in self._bindings:
            for binding in bindings:
                binding.put(binding.placeholder)
        self._mapped = [[view_stored(plan, files) for plan in image.mapped] for image in self._images]
        self._model, self._reader, self._files = model, reader, files
        self._route = Route(len(layers))
        self._slot_nbytes = max((image.nbytes for image in self._images), default=0)
        self._present: dict[int, _Slot] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="airtune-weights")
        self._copy_stream = None if self._on_host else torch.Stream(device=device)
        self._staging = [] if self._on_host else [_Staging(self._slot_nbytes) for _ in range(2)]

    @contextmanager
    def visit(self, index: int, direction: Direction) -> Iterator[object]:
        """Inside, the parameters of layer `index` are on the device.

        Yields a token: as long as later visits yield an equal one, the weights were never moved or overwritten.

        Raises:
            CheckpointError, OSError: the weights can no longer be read.
        """
        self._route.arrive(Stop(index, direction))
        self.counters.visits += 1
        started = time.perf_counter()
        slot = self._obtain(index)
        entered = time.perf_counter()
        self.counters.stall_s += entered - started
        self._read_ahead(index)
        for binding, tensor in zip(self._bindings[index], slot.views[index], strict=True):
            binding.put(tensor)
        try:
            yield (id(slot), slot.fills)
        finally:
            for binding in self._bindings[index]:
                binding.put(binding.placeholder)
            if not self._on_host:
                slot.free = torch.accelerator.current_stream(self.device).record_event()
            self.counters.compute_s += time.perf_counter() - entered

    def close(self) -> None:
        """Stop the background thread and give the slots back."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._present.clear()
        self._staging.clear()

    def _obtain(self, index: int) -> _Slot:
        """The slot that holds the layer, filled, and ordered before what the current stream does next."""
        if index in self._present:
            self.counters.cache_hits += 1
        else:
            self._bring(index, drop=None if len(self._present) < self.places else self._route.last_needed(self._present))
        slot = self._present[index]
        if slot.filling is not None:
            slot.filling.result()
            slot.filling = None
        if slot.ready is not None:
            torch.accelerator.current_stream(self.device).wait_event(slot.ready)
        return slot

    def _read_ahead(self, current: int) -> None:
        if len(self._present) < self.places:
            absent = [i for i in range(len(self._images)) if i not in self._present]
            coming = self._route.first_needed(absent)
            if coming is not None:
                self._bring(coming, drop=None)
        elif (choice := self._route.replace(self._present, current)) is not None:
            self._bring(choice[0], drop=choice[1])

    def _bring(self, index: int, drop: int | None) -> None:
        """Give `index` a slot (that of `drop`, if it is not None) and start to fill it."""
        slot = _Slot(self._slot_nbytes, self.device) if drop is None else self._present.pop(drop)
        if drop is not None:
            self._files.release(self._images[drop].mapped_ranges())
        self._present[index] = slot
        slot.fills += 1
        if index not in slot.views:
            image, bindings = self._images[index], self._bindings[index]
            tensors = self._mapped[index] + [region.view(slot.buffer) for region in image.packed]
            slot.views[index] = [binding.wrap(t) for binding, t in zip(bindings, tensors, strict=True)]
        self.counters.bytes_read += self._images[index].read_nbytes + self._images[index].mapped_nbytes
        slot.filling = self._worker.submit(self._fill, index, slot, drop is not None)

    def _fill(self, index: int, slot: _Slot, reused: bool) -> None:
        """In the background thread: file -> slot."""
        image = self._images[index]
        self._files.advise_will_need(image.mapped_ranges())
        if self._copy_stream is None:
            if self.poison and reused:
                slot.buffer.fill_(255)
            image.fill(slot.buffer, self._reader, self._files, self._model)
            return
        staging = self._staging.pop(0)
        self._staging.append(staging)
        host = staging.wait()
        image.fill(host, self._reader, self._files, self._model)
        with self._copy_stream:
            if slot.free is not None:
                self._copy_stream.wait_event(slot.free)
            if self.poison and reused:
                slot.buffer.fill_(255)
            slot.buffer[: image.nbytes].copy_(host[: image.nbytes], non_blocking=True)
            slot.ready = staging.copied = self._copy_stream.record_event()
        self.counters.bytes_copied += image.nbytes


class _Staging:
    """A pinned host buffer that layers pass through on their way to the device."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.copied: torch.Event | None = None

    def wait(self) -> torch.Tensor:
        """The buffer, once the copy out of it is done."""
        if self.copied is not None:
            self.copied.synchronize()
        return self._buffer
