"""How many layers, experts and graphs may be where layers compute while a pass runs.

A budget is for everything that a run has on the device, and of that only the weights are known beforehand.
The rest, activations and a growing cache of keys and values, is measured: a pass with more tokens than any
before runs on the fewest places, its peak is noted, and from then on what the budget leaves becomes places.

Passes that train and passes that do not are measured apart: the same tokens take a multiple with gradients,
a prompt of 4,000 tokens a thousand times the activations of the token that follows it, and every token
leaves keys and values behind (Qwen3-8B: 147 kB). What was on the device when a pass began counts too.

What is left goes where it saves the most. In training each micro-batch walks up and down all experts of a
layer, so the first places are for those: one more expert is a copy less at each turn of each micro-batch in
every layer, where as many bytes of a whole layer save two copies a step. A token that is generated uses a few
experts of each layer, and other ones each time: then layers come first.

Once every layer has a place, the next memory is for graphs: a layer whose graph was kept in forward is not
computed a second time in backward. With all of them kept, a step of 256 tokens took 0.66 of the time of a
model in memory that recomputes, where it took 0.91 (`scripts/bench_train.py`). What graphs take is counted
while passes are measured, without keeping them. Where layers have to be brought they come first: what is
saved of the computing would be spent waiting for them.

Layers that are nothing but views of a mapped file take no memory that the kernel could not take back. Unless
the user limits them, as many as memory holds stay mapped while tokens are generated, where each token would
map all of them again. In training their graphs may then take as much memory as the layers that are there at
once do: of 256 tokens in layers of 41 MB they take 19 to 56 MB each, of 2,048 none fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from airtune.model.head_weights import StreamedHead
from airtune.weights.budget import WORKING_MARGIN, SlotBudget
from airtune.weights.experts import ExpertWindow
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.residency import Residency
from airtune.weights.schedule import Direction

logger = logging.getLogger(__name__)

# Others want memory too.
_SHARE_OF_AVAILABLE = 0.9


@dataclass
class _Measured:
    """What passes of one kind took at most, besides weights in places.

    Args:
        tokens: the most that a pass had at once.
        graph_nbytes: what the graph of one micro-batch takes in each layer, once that was counted.
        whole: a pass with so many tokens was seen to its end, which in training is a backward pass: there
            may be several forward passes before one.
    """

    tokens: int = 0
    nbytes: int = 0
    graph_nbytes: Sequence[int] = ()
    whole: bool = False


class Places:
    """Sets `residency.places`, `window.places` and whether the head stays mapped.

    Attributes:
        graphs: the layers whose graphs are kept for backward in this pass.
        head: the streamed head, once there is one.
        give_back: called after each pass, if there is something to give back: pages of mapped tables that the
            pass touched, for which a limit leaves no room.
    """

    def __init__(self, residency: Residency, window: ExpertWindow | None, budget: SlotBudget) -> None:
        self.graphs: frozenset[int] = frozenset()
        self.head: StreamedHead | None = None
        self.give_back: Callable[[], None] | None = None
        self._residency, self._window, self._budget = residency, window, budget
        self._fewest = residency.places = budget.first()
        self._fewest_experts = 0 if window is None else window.places
        self._on_cpu = residency.device.type == "cpu"
        self._can_measure = not self._on_cpu and _has_statistics(residency.device)
        self._training, self._other = _Measured(), _Measured()
        self._measuring: _Measured | None = None
        self._waiting = 0  # forward passes that train, since the last backward visit
        self._peak_nbytes = 0
        self._micro_batches = 1
        self._held = False

    def hold(self, layers: int) -> None:
        """From now on so many layers, whatever a budget leaves: for measurements, and tests of the order."""
        self._held = True
        self._residency.places = layers
        self._residency.shrink()

    @property
    def counts_graphs(self) -> bool:
        """Whether `end` wants to know what graphs of this pass would take."""
        return self._measuring is self._training

    def begin(self, *, trains: bool, generates: bool, tokens: int, micro_batches: int) -> None:
        """A pass begins.

        Args:
            generates: it wants neither gradients nor a loss.
            tokens: that are in a layer at once, in one of the micro-batches.
        """
        mapped = self._budget.nbytes is None and self._residency.only_mapped
        if self.head is not None and self._on_cpu:
            self.head.stays = generates and mapped
        # Of the layer that backward visits first there is a graph at the peak anyway, if it is just one.
        self.graphs = frozenset([self._residency.count - 1] if micro_batches == 1 else [])
        self._micro_batches = micro_batches
        if self._held or not (self._on_cpu or self._can_measure):
            return
        self._note_peak()  # an optimizer's step comes after the last visit
        kind = self._training if trains else self._other
        self._waiting += trains
        if tokens > kind.tokens:
            kind.tokens, kind.nbytes, kind.whole = tokens, 0, False
        self._measuring = None if kind.whole else kind
        if self._measuring is not None:
            kind.graph_nbytes = ()
        if mapped:
            self._keep_mapped(generates)
            self._keep_graphs(kind, self._residency.places * self._residency.layer_nbytes)
        elif self._on_cpu:  # the budget is for weights and graphs, and there is nothing to measure
            self._take(self._budget.window_nbytes, kind)
        elif self._measuring is not None:
            self._back_to_the_fewest()
            self._peak_nbytes = self.peak_nbytes()
            torch.accelerator.reset_peak_memory_stats(self._residency.device)
        else:
            now_nbytes = self._beside(_in_use_nbytes(self._residency.device, "current"))
            self._take(max(kind.nbytes, now_nbytes), kind)

    def after_visit(self, direction: Direction) -> None:
        """A visit is over: note its peak, while its kind of pass is being measured."""
        self._note_peak()
        if direction == "backward":
            self._waiting, self._training.whole = 0, True

    def end(self, graph_nbytes: Sequence[int]) -> None:
        """The pass is over, but for its backward pass.

        Args:
            graph_nbytes: what the graph of one micro-batch would take in each layer; 0 if it is not known.
        """
        if self.counts_graphs:
            # A layer that was not called, or whose graph was kept, is taken for one of the largest.
            most = max(graph_nbytes, default=0)
            self._training.graph_nbytes = [nbytes or most for nbytes in graph_nbytes]
        if self._measuring is self._other:
            self._note_peak()
            self._measuring, self._other.whole = None, True
        if self.give_back is not None:
            self.give_back()

    def peak_nbytes(self) -> int:
        """The most that was ever in use on the accelerator."""
        return max(self._peak_nbytes, self._peak()) if self._can_measure else 0

    def _note_peak(self) -> None:
        if self._measuring is not None and self._can_measure:
            self._measuring.nbytes = max(self._measuring.nbytes, self._beside(self._peak()))

    def _keep_mapped(self, generates: bool) -> None:
        room_nbytes = int(_SHARE_OF_AVAILABLE * available_memory_nbytes()) if generates else 0
        self._residency.places = self._budget.mapped(room_nbytes)
        if self._window is not None:
            room_nbytes -= self._residency.places * self._residency.layer_nbytes
            held = min(self._window.count, room_nbytes // self._window.expert_nbytes)
            self._window.places = max(self._fewest_experts, held)

    def _back_to_the_fewest(self) -> None:
        if self.head is not None:
            self.head.stays = False
        self._set(self._fewest, self._fewest_experts)

    def _keep_graphs(self, kind: _Measured, room_nbytes: int) -> int:
        """Keep the graphs that fit, the last layers' first: backward is done with them before it needs memory
        for another. None for a second forward pass before backward: the first one's are still there. Returns
        what they take.
        """
        taken_nbytes = 0
        if self._waiting > 1:
            return 0
        for layer, one_nbytes in reversed(list(enumerate(kind.graph_nbytes))):
            nbytes = one_nbytes * self._micro_batches
            if layer not in self.graphs and taken_nbytes + nbytes <= room_nbytes:
                self.graphs |= {layer}
                taken_nbytes += nbytes
        return taken_nbytes

    def _take(self, working_nbytes: int, kind: _Measured) -> None:
        """Everything that the budget leaves when a pass takes `working_nbytes` besides weights."""
        left_nbytes = self._budget.left(working_nbytes)
        experts, expert_nbytes = 0, 1
        if self._window is not None:
            expert_nbytes = max(1, self._window.expert_nbytes)
            if kind is self._training:
                beyond_nbytes = left_nbytes - self._fewest * self._residency.layer_nbytes
                most = max(0, self._window.layer_count - self._fewest_experts)
                experts = max(0, min(most, beyond_nbytes // expert_nbytes))
                left_nbytes -= experts * expert_nbytes
        layers = self._budget.settled(left_nbytes)
        left_nbytes = max(0, left_nbytes - self._residency.count * self._residency.layer_nbytes)
        if self.head is not None and not self._on_cpu:
            self.head.stays = left_nbytes >= self.head.nbytes
            left_nbytes -= self.head.nbytes if self.head.stays else 0
        left_nbytes -= int(WORKING_MARGIN * self._keep_graphs(kind, int(left_nbytes / WORKING_MARGIN)))
        self._set(layers, self._fewest_experts + experts + left_nbytes // expert_nbytes)

    def _set(self, layers: int, experts: int) -> None:
        self._residency.places = layers
        self._residency.shrink()
        if self._window is not None:
            self._window.places = experts
            self._window.shrink()

    def _beside(self, allocated_nbytes: int) -> int:
        """What is not held by places; the fewest experts count as working memory."""
        experts_nbytes = 0
        if self._window is not None:
            fewest_nbytes = self._fewest_experts * self._window.expert_nbytes
            experts_nbytes = max(0, self._window.held_nbytes - fewest_nbytes)
        head_nbytes = 0 if self.head is None else self.head.held_nbytes
        return allocated_nbytes - self._residency.held_nbytes - experts_nbytes - head_nbytes

    def _peak(self) -> int:
        return _in_use_nbytes(self._residency.device, "peak")


def _in_use_nbytes(device: torch.device, when: Literal["current", "peak"]) -> int:
    """What is allocated on the device, and what was freed while another stream has yet to be done with it."""
    nbytes: int = torch.accelerator.memory_stats(device)[f"active_bytes.all.{when}"]
    return nbytes


def _has_statistics(device: torch.device) -> bool:
    """Whether the accelerator tells what is in use on it. Without that nothing can be measured, and layers
    stay on the fewest places.
    """
    torch.empty(1, device=device)  # an allocator that nobody has asked for memory yet tells nothing
    try:
        _in_use_nbytes(device, "current")
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, KeyError):
        logger.info("%s does not tell what is in use on it: no more layers stay there than must", device)
        return False
    return True
