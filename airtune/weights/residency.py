"""Layers that are on the device while they are visited.

    with residency.visit(index, "forward"):     # the layer's parameters are real
        layer(hidden)                           # outside, they are placeholders on the meta device

A few equal places (slots) hold what was read; with two of them layer i+1 is read and copied while layer i
computes, and with more, whole layers stay. Weights are frozen, so nothing is ever written back: a slot is
simply given to the next layer.

On the CPU the file is mapped and a slot holds only what had to be converted. On an accelerator a layer
travels through `Transport`, by a background thread and a copy stream. Two events per slot keep the order:
compute waits until the copy into the slot is done (`ready`), and the next copy into it waits until the last
kernel that read it is done (`free`).

All decisions (what to read ahead, what to drop) are `schedule.Route`'s and are taken by the visiting
thread; the background thread only carries them out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from airtune.weights.file_map import FileMap
from airtune.weights.image import LayerImage, view_stored
from airtune.weights.layout import TensorPlan
from airtune.weights.reader import ByteReader
from airtune.weights.schedule import Direction, Route, Stop
from airtune.weights.transport import Slot, Transport


@dataclass
class Counters:
    """What moved, since the start.

    Attributes:
        bytes_read: from the checkpoint's files, mapped pages included.
        bytes_copied: from the host to the device.
        stall_s: time that visits waited for weights.
        compute_s: time inside visits.
        visits: how many there were; `cache_hits` of them found their layer there, or on its way.
    """

    bytes_read: int = 0
    bytes_copied: int = 0
    stall_s: float = 0.0
    compute_s: float = 0.0
    visits: int = 0
    cache_hits: int = 0


@dataclass(frozen=True)
class Binding:
    """A module's place for one tensor: bound before any adapter wraps the module, so names never need
    translating.
    """

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
        return (
            nn.Parameter(tensor, requires_grad=False)
            if isinstance(self.placeholder, nn.Parameter)
            else tensor
        )


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


class Residency:
    """The streamed layers of a model.

    Attributes:
        places: layers that may be on the device at once: 1, or 2 to overlap reading with compute, or more
            to keep some.
        layer_nbytes: what the largest layer takes.
        has_run_backward: whether any layer was visited backward yet.

    Args:
        model: on meta where it is streamed; transformers' converters ask it for shapes.
        layers: in the order that a forward pass visits them.
        device: where layers compute.
        cache_nbytes: host memory for layers that are then read from disk once; for accelerators.
        poison: fill a slot with NaN bytes before its next layer comes, to find readers that are too late.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[Layer],
        reader: ByteReader,
        files: FileMap,
        *,
        device: torch.device,
        cache_nbytes: int = 0,
        poison: bool = False,
    ) -> None:
        self.device, self.places = device, 2
        self.has_run_backward = False
        self.counters = Counters()
        self._images = [layer.image for layer in layers]
        self._bindings = [[Binding.find(model, name) for name in layer.names()] for layer in layers]
        for bindings in self._bindings:
            for binding in bindings:
                binding.put(binding.placeholder)
        self._mapped = [[view_stored(plan, files) for plan in image.mapped] for image in self._images]
        self._files = files
        self._route = Route(len(layers))
        self._slot_nbytes = max(image.nbytes for image in self._images)
        self.layer_nbytes = max(image.nbytes + image.mapped_nbytes for image in self._images)
        self._present: dict[int, Slot] = {}
        self._transport = Transport(
            self._images, reader, files, model, device=device, cache_nbytes=cache_nbytes, poison=poison
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="airtune-weights")
        self._filling: dict[int, Future[tuple[int, int]]] = {}
        # Autograd may start on another graph while a layer's backward is under way: visits can be nested.
        self._active: Counter[int] = Counter()
        self._closed = False

    @contextmanager
    def visit(self, index: int, direction: Direction) -> Iterator[object]:
        """Inside, the parameters of layer `index` are on the device.

        Yields a token: as long as later visits yield an equal one, the weights were never moved or
            overwritten.

        Raises:
            CheckpointError, OSError: the weights can no longer be read.
            RuntimeError: after `close`.
        """
        if self._closed:
            raise RuntimeError("the stream of this model is closed: its layers have no weights any more")
        self._route.arrive(Stop(index, direction))
        self.has_run_backward |= direction == "backward"
        self.counters.visits += 1
        started = time.perf_counter()
        self._active[index] += 1
        try:
            slot = self._obtain(index)
            entered = time.perf_counter()
            self.counters.stall_s += entered - started
            self._read_ahead(index)
            for binding, tensor in zip(self._bindings[index], slot.views[index], strict=True):
                binding.put(tensor)
            try:
                yield (id(slot), slot.fills)
            finally:
                slot.release()  # also after an error: what was queued until then still reads the slot
                self.counters.compute_s += time.perf_counter() - entered
        finally:
            self._active[index] -= 1
            if not self._active[index]:
                for binding in self._bindings[index]:
                    binding.put(binding.placeholder)

    @property
    def only_mapped(self) -> bool:
        """Whether layers are nothing but views of the mapped file: those that wait take no memory of ours."""
        return self._slot_nbytes == 0

    @property
    def held_nbytes(self) -> int:
        """Device memory of the slots in use."""
        return self._slot_nbytes * len(self._present)

    def close(self) -> None:
        """Stop the background thread and give the slots back."""
        self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._present.clear()
        self._transport.close()

    def _obtain(self, index: int) -> Slot:
        """The slot that holds the layer, filled, and ordered before what the current stream does next."""
        if index in self._present:
            self.counters.cache_hits += 1
        else:
            droppable = [i for i in self._present if not self._active[i]]
            full = len(self._present) >= self.places
            # A visit inside a visit may find every place taken: then, for once, there is one more.
            self._bring(index, drop=self._route.last_needed(droppable) if full and droppable else None)
        self._wait_filled(index)
        slot = self._present[index]
        slot.acquire()
        return slot

    def _wait_filled(self, index: int) -> None:
        if (filling := self._filling.pop(index, None)) is not None:
            try:
                read, copied = filling.result()
            except BaseException:
                del self._present[index]  # what it holds is nothing: the next visit reads again
                raise
            self.counters.bytes_read += read
            self.counters.bytes_copied += copied

    def _read_ahead(self, current: int) -> None:
        while len(self._present) > self.places:
            droppable = [i for i in self._present if not self._active[i]]
            if not droppable:
                return
            self._take(self._route.last_needed(droppable))
        if len(self._present) < self.places:
            absent = [i for i in range(len(self._images)) if i not in self._present]
            coming = self._route.first_needed(absent)
            if coming is not None:
                self._bring(coming, drop=None)
            return
        choice = self._route.replace(self._present, current)
        if choice is not None and not self._active[choice[1]]:
            self._bring(choice[0], drop=choice[1])

    def _take(self, index: int) -> Slot:
        """The slot of a layer that is not needed now."""
        self._wait_filled(index)
        self._files.release(self._images[index].mapped_ranges())
        return self._present.pop(index)

    def _bring(self, index: int, drop: int | None) -> None:
        """Give `index` a slot (that of `drop`, if it is not None) and start to fill it."""
        # Tensors made in inference mode could not take part in a training step later.
        with torch.inference_mode(False):
            slot = self._transport.slot(self._slot_nbytes) if drop is None else self._take(drop)
            self._present[index] = slot
            slot.fills += 1
            if index not in slot.views:
                image, bindings = self._images[index], self._bindings[index]
                tensors = self._mapped[index] + [region.view(slot.buffer) for region in image.packed]
                slot.views[index] = [binding.wrap(t) for binding, t in zip(bindings, tensors, strict=True)]
        self._filling[index] = self._worker.submit(self._transport.fill, index, slot)
