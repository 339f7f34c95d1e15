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
thread; the background thread only carries them out. Visits of several threads take turns at deciding.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from airtune.weights.counters import Counters
from airtune.weights.file_map import FileMap
from airtune.weights.image import LayerImage, view_stored
from airtune.weights.reader import ByteReader
from airtune.weights.schedule import Direction, Route, Stop
from airtune.weights.transport import Slot, Transport
from airtune.weights.workers import Task, Workers


@dataclass(frozen=True)
class Binding:
    """A module's place for one tensor: bound before any adapter wraps the module, so names never need
    translating.
    """

    owner: nn.Module
    leaf: str
    placeholder: torch.Tensor

    @classmethod
    def find(cls, modules: Mapping[str, nn.Module], name: str) -> Binding:
        path, _, leaf = name.rpartition(".")
        owner = modules[path]
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
    """A streamed layer: its image, and {name: parameter} of those that are not in the image, because each is
    brought when it is used (experts, tables).
    """

    image: LayerImage
    lazy: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Residency:
    """The streamed layers of a model.

    Attributes:
        places: layers that may be on the device at once: 1, or 2 to overlap reading with compute, or more
            to keep some.
        layer_nbytes: what the largest layer takes.

    Args:
        model: on meta where it is streamed.
        layers: in the order that a forward pass visits them.
        device: where layers compute.
        counters: to add to.
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
        counters: Counters,
        cache_nbytes: int = 0,
        poison: bool = False,
    ) -> None:
        self.device, self.places = device, 2
        self.counters = counters
        self._images = [layer.image for layer in layers]
        # Of experts there are hundreds of thousands; and a module may be known by two names.
        modules = dict(model.named_modules(remove_duplicate=False))
        self._bindings = [[Binding.find(modules, name) for name in image.names()] for image in self._images]
        self._lazy = [
            [(Binding.find(modules, name), tensor) for name, tensor in layer.lazy.items()] for layer in layers
        ]
        for index in range(len(layers)):
            self._take_off(index)
        self._mapped = [[view_stored(plan, files) for plan in image.mapped] for image in self._images]
        self._files = files
        self._route = Route(len(layers))
        self._slot_nbytes = max(image.nbytes for image in self._images)
        self.layer_nbytes = max(image.nbytes + image.mapped_nbytes for image in self._images)
        self._present: dict[int, Slot] = {}
        self._transport = Transport(
            self._images, reader, files, device=device, cache_nbytes=cache_nbytes, poison=poison
        )
        self._worker = Workers(1, "airtune-weights", device)
        self._filling: dict[int, Task[tuple[int, int]]] = {}
        self._fills = itertools.count(1)
        # Autograd may start on another graph while a layer's backward is under way: visits can be nested. And
        # what hooks on adapters' gradients call runs in the device's own autograd thread, beside a visit.
        self._visits: WeakKeyDictionary[_Visit, int] = WeakKeyDictionary()  # {visit: layer}
        self._lock = threading.RLock()  # for what a visit changes here; never held while a layer computes
        self._closed = False

    def visit(self, index: int, direction: Direction) -> AbstractContextManager[int]:
        """Inside, the parameters of layer `index` are on the device.

        Yields a token: as long as later visits yield an equal one, the weights were never moved or
            overwritten.

        Raises:
            CheckpointError, OSError: the weights can no longer be read.
            RuntimeError: after `close`.
        """
        return _Visit(self, Stop(index, direction))

    @property
    def count(self) -> int:
        return len(self._images)

    @property
    def only_mapped(self) -> bool:
        """Whether layers are nothing but views of the mapped file: those that wait take no memory of ours."""
        return self._slot_nbytes == 0

    @property
    def held_nbytes(self) -> int:
        """Device memory of the slots in use."""
        return self._slot_nbytes * len(self._present)

    def shrink(self) -> None:
        """Give back what is held beyond `places`, as far as no visit is using it."""
        with self._lock:
            while len(self._present) > self.places:
                droppable = self._unvisited()
                if not droppable:
                    return
                self._let_go(self._route.last_needed(droppable))

    def close(self) -> None:
        """Stop the background thread and give the slots back."""
        self._closed = True
        self._worker.shutdown()
        self._present.clear()
        self._transport.close()

    def _enter(self, visit: _Visit, stop: Stop) -> tuple[Slot, float]:
        """The slot of the layer, whose parameters are in their places; and the seconds waited for weights so
        far.
        """
        started = time.perf_counter()
        with self._lock:
            if self._closed:
                raise RuntimeError("the stream of this model is closed: its layers have no weights any more")
            self._route.arrive(stop)
            self.counters.visits += 1
            self._visits[visit] = stop.index
            slot = self._obtain(stop.index)
            self.counters.stall_s += time.perf_counter() - started
            self._read_ahead(stop.index)
            self._put(stop.index, slot)
            return slot, self.counters.stall_s

    def _leave(self, visit: _Visit, index: int) -> None:
        with self._lock:
            self._visits.pop(visit, None)
            if index not in self._visits.values():
                self._take_off(index)

    def _unvisited(self) -> list[int]:
        visited = set(self._visits.values())
        return [index for index in self._present if index not in visited]

    def _put(self, index: int, slot: Slot) -> None:
        for binding, tensor in zip(self._bindings[index], slot.views[index], strict=True):
            binding.put(tensor)
        for binding, tensor in self._lazy[index]:
            binding.put(tensor)

    def _take_off(self, index: int) -> None:
        for binding in (*self._bindings[index], *(lazy for lazy, _ in self._lazy[index])):
            binding.put(binding.placeholder)

    def _obtain(self, index: int) -> Slot:
        """The slot that holds the layer, filled, and ordered before what the current stream does next."""
        if index in self._present:
            self.counters.cache_hits += 1
        else:
            droppable = self._unvisited()
            full = len(self._present) >= self.places
            # A visit inside a visit may find every place taken: then, for once, there is one more.
            self._bring(index, drop=self._route.last_needed(droppable) if full and droppable else None)
        self._wait_filled(index)
        slot = self._present[index]
        slot.acquire()
        return slot

    def _wait_filled(self, index: int) -> None:
        if (filling := self._filling.get(index)) is not None:
            try:
                read, copied = filling.result()
            except BaseException:
                del self._present[index]  # what it holds is nothing: the next visit reads again
                raise
            finally:
                del self._filling[index]
            self.counters.bytes_read += read
            self.counters.bytes_copied += copied

    def _read_ahead(self, current: int) -> None:
        self.shrink()
        if len(self._present) > self.places:
            return
        self._refresh()
        if len(self._present) == len(self._images):
            return
        if len(self._present) < self.places:
            # Two on their way: the disk need not wait for the next visit once it is done with one.
            while len(self._present) < self.places and len(self._filling) < 2:
                absent = [i for i in range(len(self._images)) if i not in self._present]
                coming = self._route.first_needed(absent)
                if coming is None:
                    return
                self._bring(coming, drop=None)
            return
        choice = self._route.replace(self._present, current)
        if choice is not None and choice[1] in self._unvisited():
            self._bring(choice[0], drop=choice[1])

    def _refresh(self) -> None:
        """Of a mapped layer that stays the kernel may have taken pages back: when the layer comes next they
        are read again, beside the computation and not page by page in the middle of it.
        """
        coming = next(self._route.ahead()).index
        if coming in self._present and coming not in self._filling:
            image = self._images[coming]
            if self._files.lacks(image.mapped_ranges()):
                self._filling[coming] = self._worker.submit(self._populate, image)

    def _populate(self, image: LayerImage) -> tuple[int, int]:
        self._files.populate(image.mapped_ranges())
        return image.mapped_nbytes, 0

    def _let_go(self, index: int) -> Slot:
        """The slot of a layer that is not needed now. Mapped pages are given back by the worker, before it
        brings others: unmapping takes almost as long as mapping does.
        """
        self._wait_filled(index)
        if self._images[index].mapped:
            self._worker.submit(self._files.release, self._images[index].mapped_ranges())
        return self._present.pop(index)

    def _bring(self, index: int, drop: int | None) -> None:
        """Give `index` a slot (that of `drop`, if it is not None) and start to fill it."""
        # Tensors made in inference mode could not take part in a training step later.
        with torch._C._InferenceMode(False):
            slot = self._transport.slot(self._slot_nbytes) if drop is None else self._let_go(drop)
            # Views of the mapped file stay where they are while their layer is away.
            slot.fill = next(self._fills) if self._images[index].nbytes else 0
            if index not in slot.views:
                image, bindings = self._images[index], self._bindings[index]
                tensors = self._mapped[index] + [region.view(slot.buffer) for region in image.packed]
                slot.views[index] = [binding.wrap(t) for binding, t in zip(bindings, tensors, strict=True)]
        self._filling[index] = self._worker.submit(self._transport.fill, index, slot)
        self._present[index] = slot


class _Visit(AbstractContextManager[int]):
    """A class and no generator, for the reason that the experts' `_Use` has."""

    def __init__(self, residency: Residency, stop: Stop) -> None:
        self._residency, self._stop = residency, stop

    def __enter__(self) -> int:
        try:
            self._slot, self._stalled_s = self._residency._enter(self, self._stop)
        except BaseException:
            self._residency._leave(self, self._stop.index)
            raise
        self._entered = time.perf_counter()
        return self._slot.fill

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is GeneratorExit:  # of a generator around it
            return
        try:
            self._slot.release()  # also after an error: what was queued until then still reads the slot
            counters = self._residency.counters
            waited_s = counters.stall_s - self._stalled_s  # for experts
            counters.compute_s += time.perf_counter() - self._entered - waited_s
        finally:
            self._residency._leave(self, self._stop.index)
