"""Experts that are on the device while they are computed with.

A mixture-of-experts layer of a 671B model holds 256 experts of 44 MB, 11 GB, of which a token uses eight. So
a visit of the layer leaves its experts where they are, and each is brought when a kernel asks for it, in
forward, in the recompute and in backward. What is on the device is a window of a few of them: those in use,
and those that the router has chosen and that will run next.

    with window.hold(index) as tensors:      # the tensors of one expert, on the device

The order is known: a layer's own code runs the experts that were hit from the first to the last, and autograd
walks them back. So once the router has spoken (`announce`) the next ones are read while one computes, upwards
or downwards. An expert that nobody announced is read when it is asked for, and never before: what the router
did not choose is not read.

It gives up reuse between micro-batches beyond the window (on the device) and what may be kept (on the host).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

import torch

from airtune.weights.counters import Counters
from airtune.weights.expert_plans import ExpertGroup, ExpertImages
from airtune.weights.file_map import FileMap
from airtune.weights.image import view_stored
from airtune.weights.lazy import LazyTensor, WeightSource
from airtune.weights.plans import TensorPlan
from airtune.weights.reader import ByteReader
from airtune.weights.transport import Slot, Transport
from airtune.weights.workers import Task, Workers

# One expert computes and one is on its way.
LEAST_PLACES = 2
# Disks want several small requests at a time: experts of 1 MB are read four at once, of 9.8 MB three; one of
# 44 MB the reader splits among its own threads.
IN_FLIGHT_NBYTES = 32 * 2**20
_THREADS = 4


class ExpertWindow:
    """The experts that are on the device.

    Attributes:
        places: how many may be there at once.
        expert_nbytes: what the largest takes.

    Args:
        groups: at least one.
        counters: those of the layers: bytes and waiting are added to them.
        poison: fill a place with NaN bytes before its next expert comes.
    """

    def __init__(
        self,
        groups: Sequence[ExpertGroup],
        reader: ByteReader,
        files: FileMap,
        *,
        device: torch.device,
        counters: Counters,
        map_files: bool,
        poison: bool = False,
    ) -> None:
        self.device, self.places = device, LEAST_PLACES
        self._groups, self._files, self._counters = groups, files, counters
        self._images = ExpertImages(groups, map_files=map_files)
        # The experts of a group are alike.
        largest = [self._images[self._images.first(g)] for g in range(len(groups))]
        self._slot_nbytes = max(image.nbytes for image in largest)
        self.expert_nbytes = max(image.nbytes + image.mapped_nbytes for image in largest)
        self._transport = Transport(
            self._images,
            reader,
            files,
            device=device,
            cache_nbytes=0,
            poison=poison,
            evict=True,
            part_nbytes=self._slot_nbytes,
        )
        threads = max(1, min(_THREADS, IN_FLIGHT_NBYTES // max(1, self.expert_nbytes)))
        self._workers = Workers(threads, "airtune-experts", device)
        self._present: OrderedDict[int, Slot] = OrderedDict()  # the one used longest ago comes first
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._filling: dict[int, Task[tuple[int, int]]] = {}
        self._uses: WeakKeyDictionary[_Use, int] = WeakKeyDictionary()  # {use: expert}
        self._routes: dict[int, list[int]] = {}
        self._last: int | None = None
        # Hooks on adapters' gradients run in the device's own autograd thread; what they call comes here too.
        self._lock = threading.RLock()

    @property
    def count(self) -> int:
        """Experts of all groups."""
        return len(self._images)

    @property
    def layer_count(self) -> int:
        """Experts of one layer, in the layer that has most."""
        counts: Counter[int] = Counter()
        for group in self._groups:
            counts[group.layer] += group.count
        return max(counts.values())

    @property
    def layer_nbytes(self) -> int:
        """What the experts of one layer take on the host, in the layer where that is most."""
        nbytes: Counter[int] = Counter()
        for number, group in enumerate(self._groups):
            nbytes[group.layer] += group.count * self._images[self._images.first(number)].nbytes
        return max(nbytes.values())

    def keep(self, nbytes: int) -> None:
        """Let so much host memory hold experts that were read; the one used longest ago makes room.

        For accelerators, and before the first use.
        """
        self._transport.keep(nbytes)

    @property
    def held_nbytes(self) -> int:
        """Device memory of the places in use."""
        return self._slot_nbytes * len(self._present)

    def shrink(self) -> None:
        """Give back what is held beyond `places`, as far as nobody is using it."""
        with self._lock:
            for index in self._unused():
                if len(self._present) <= self.places:
                    return
                self._let_go(index)

    def tensors(self, group: int) -> dict[str, LazyTensor]:
        """{module tensor name: a tensor that is brought when it is used}, for the parameters of a group."""
        found = self._groups[group]
        first = self._images.first(group)
        if found.apart:
            likes = [_like(plan) for plan in found.apart[0].values()]
            return {
                name: LazyTensor(_OfExpert(self, first + e, name, like))
                for e, plans in enumerate(found.apart)
                for name, like in zip(plans, likes, strict=True)
            }
        return {name: LazyTensor(_Stack(self, first, name, plan)) for name, plan in found.stacks.items()}

    def announce(self, group: int, experts: Sequence[int]) -> None:
        """The group runs these experts next, in this order; backward then comes the other way."""
        first = self._images.first(group)
        route = [first + e for e in experts if 0 <= e < self._groups[group].count]
        with self._lock:
            self._routes[group] = route
            self._last = None
            self._read_ahead(route)

    def hold(self, index: int) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Inside, the expert's tensors are on the device, for what is queued on the current stream.

        Raises:
            CheckpointError, OSError: they cannot be read.
        """
        return _Use(self, index)

    def close(self) -> None:
        """Stop the background thread and give the places back."""
        self._workers.shutdown()
        self._present.clear()
        self._tensors.clear()
        self._transport.close()

    def _obtain(self, index: int) -> Slot:
        if index != self._last or index not in self._present:
            started = time.perf_counter()
            if index not in self._present:
                self._bring(index, keep=frozenset())
            self._wait_filled(index)
            self._present.move_to_end(index)
            self._counters.stall_s += time.perf_counter() - started
            coming, self._last = self._next_after(index), index
            self._read_ahead(coming)
        slot = self._present[index]
        slot.acquire()
        return slot

    def _next_after(self, index: int) -> list[int]:
        """The experts that follow on the route, in the direction in which it is walked."""
        route = self._routes.get(self._images.group_of(index), [])
        if index not in route:
            return []
        here = route.index(index)
        if self._last in route and route.index(self._last) > here:
            return route[:here][::-1]
        return route[here + 1 :]

    def _read_ahead(self, coming: Sequence[int]) -> None:
        soon = coming[: max(1, self.places - 1)]
        for index in soon:
            if index not in self._present and not self._bring(index, keep=frozenset(soon), only_if_room=True):
                return

    def _bring(self, index: int, *, keep: frozenset[int], only_if_room: bool = False) -> bool:
        """Start to fill a place with an expert; False when every place is needed."""
        with torch._C._InferenceMode(False):
            slot = self._free_slot(keep)
            if slot is None:
                if only_if_room:
                    return False
                slot = self._transport.slot(self._slot_nbytes)  # products of several experts at once
            image = self._images[index]
            mapped = {plan.name: view_stored(plan, self._files) for plan in image.mapped}
            self._tensors[index] = mapped | {r.plan.name: r.view(slot.buffer) for r in image.packed}
        self._filling[index] = self._workers.submit(self._transport.fill, index, slot)
        self._present[index] = slot
        self._counters.expert_loads += 1
        return True

    def _free_slot(self, keep: frozenset[int]) -> Slot | None:
        while len(self._present) >= self.places:
            victim = next((i for i in self._unused() if i not in keep), None)
            if victim is None:
                return None
            slot = self._let_go(victim)
            if len(self._present) < self.places:
                return slot
        return self._transport.slot(self._slot_nbytes)

    def _unused(self) -> list[int]:
        used = set(self._uses.values())
        return [index for index in self._present if index not in used]

    def _let_go(self, index: int) -> Slot:
        self._wait_filled(index)
        self._files.release(self._images[index].mapped_ranges())
        del self._tensors[index]
        return self._present.pop(index)

    def _wait_filled(self, index: int) -> None:
        if (filling := self._filling.get(index)) is not None:
            try:
                read, copied = filling.result()
            except BaseException:
                del self._present[index], self._tensors[index]  # they hold nothing: the next use reads again
                raise
            finally:
                del self._filling[index]
            self._counters.bytes_read += read
            self._counters.bytes_copied += copied


class _Use(AbstractContextManager[dict[str, torch.Tensor]]):
    """Someone computes with an expert.

    No generator: one that an interrupt (Ctrl-C) left open is closed by the garbage collector, in any thread.
    In one that fills a place it would wait for the lock, and whoever has the lock waits for the place. A use
    that was left open counts until it is forgotten.
    """

    def __init__(self, window: ExpertWindow, index: int) -> None:
        self._window, self._index = window, index

    def __enter__(self) -> dict[str, torch.Tensor]:
        with self._window._lock:
            self._window._uses[self] = self._index
            self._slot = self._window._obtain(self._index)
            return self._window._tensors[self._index]

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is GeneratorExit:  # of a generator around it
            return
        self._slot.release()
        with self._window._lock:
            self._window._uses.pop(self, None)


class _OfExpert(WeightSource):
    """One tensor of one expert. `like`: see `WeightSource`."""

    def __init__(self, window: ExpertWindow, index: int, name: str, like: torch.Tensor) -> None:
        super().__init__(like, window.device)
        self._window, self._index, self._name = window, index, name

    @contextmanager
    def read(self) -> Iterator[torch.Tensor]:
        with self._window.hold(self._index) as tensors:
            yield tensors[self._name].view(self.like.shape)


class _Stack(WeightSource):
    """One tensor of all experts of a group, of which each can be brought alone."""

    def __init__(self, window: ExpertWindow, first: int, name: str, plan: TensorPlan) -> None:
        super().__init__(_like(plan), window.device)
        self._window, self._first, self._name = window, first, name
        self._like_part = self.like[0]
        self._parts: dict[int, _OfExpert] = {}

    def part(self, index: int) -> WeightSource:
        if index not in self._parts:
            self._parts[index] = _OfExpert(self._window, self._first + index, self._name, self._like_part)
        return self._parts[index]

    @contextmanager
    def read(self) -> Iterator[torch.Tensor]:
        """The whole stack, for code that computes with all experts at once: new memory of its full size."""
        whole = torch.empty(self.like.shape, dtype=self.like.dtype, device=self.device)
        for index, room in enumerate(whole):
            with self.part(index).read() as tensor:
                room.copy_(tensor)
        yield whole


def _like(plan: TensorPlan) -> torch.Tensor:
    return torch.empty(plan.shape, dtype=plan.dtype, device="meta")
