"""How many layers, and experts, may be where they compute while a pass runs.

A budget is for everything that a run has on the device, and of that only the weights are known beforehand.
The rest, activations and a growing cache of keys and values, is measured: the first pass of its size runs on
the fewest places, its peak is noted, and from then on what the budget leaves becomes places.

Training and forward-only work are measured apart. Training repeats one kind of step. Forward-only work does
not: a prompt of 4,000 tokens needs a thousand times the activations of the token that follows it, and every
token leaves keys and values behind (Qwen3-8B: 147 kB). So a pass with more tokens than any before is
measured anew, and before each pass what is on the device by then is counted.

Layers that are nothing but views of a mapped file take no memory that the kernel could not take back. Unless
the user limits them, as many as memory holds stay mapped while tokens are generated, where each token would
map all of them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from airtune.model.head_weights import StreamedHead
from airtune.weights.budget import SlotBudget
from airtune.weights.experts import ExpertWindow
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.residency import Residency

logger = logging.getLogger(__name__)

# Others want memory too.
_SHARE_OF_AVAILABLE = 0.9


class Places:
    """Sets `residency.places`, `window.places` and whether the head stays mapped.

    Attributes:
        head: the streamed head, once there is one.
        give_back: called after each pass, if there is something to give back: pages of mapped tables that the
            pass touched, for which a limit leaves no room.
    """

    def __init__(self, residency: Residency, window: ExpertWindow | None, budget: SlotBudget) -> None:
        self.head: StreamedHead | None = None
        self.give_back: Callable[[], None] | None = None
        self._residency, self._window, self._budget = residency, window, budget
        self._fewest = residency.places = budget.first()
        self._fewest_experts = 0 if window is None else window.places
        self._on_cpu = residency.device.type == "cpu"
        self._measures = not self._on_cpu and _has_statistics(residency.device)
        self._settled = False
        # On the CPU the budget is for weights alone, and nothing is measured.
        self._working_nbytes = budget.window_nbytes if self._on_cpu else 0
        self._peak_nbytes = 0
        self._generating_nbytes = 0
        self._largest_pass = 0
        self._tokens = 0

    def begin(self, *, generates: bool, tokens: int) -> None:
        """A pass over `tokens` tokens begins; `generates` if it wants neither gradients nor a loss."""
        self._tokens = tokens if generates else 0
        mapped = self._budget.nbytes is None and self._residency.only_mapped
        if self.head is not None and self._on_cpu:
            self.head.stays = generates and mapped
        if mapped:
            self._keep_mapped(generates)
        elif generates:
            self._for_generating()
        elif not self._settled and self._residency.has_run_backward and (self._on_cpu or self._measures):
            self._settled = True
            self._take(self._working_nbytes)

    def after_visit(self) -> None:
        """Note the peak of a visit that is over, while its kind of pass is being measured."""
        if not self._measures:
            return
        if self._tokens > self._largest_pass:
            self._generating_nbytes = max(self._generating_nbytes, self._beside(self._peak()))
        elif not self._tokens and not self._settled:
            self._working_nbytes = max(self._working_nbytes, self._beside(self._peak()))

    def end(self) -> None:
        """The pass is over."""
        self._largest_pass = max(self._largest_pass, self._tokens)
        self._tokens = 0
        if self.give_back is not None:
            self.give_back()

    def peak_nbytes(self) -> int:
        """The most that was ever allocated on the accelerator."""
        return max(self._peak_nbytes, self._peak()) if self._measures else 0

    def _keep_mapped(self, generates: bool) -> None:
        room_nbytes = int(_SHARE_OF_AVAILABLE * available_memory_nbytes()) if generates else 0
        self._residency.places = self._budget.mapped(room_nbytes)
        if self._window is not None:
            room_nbytes -= self._residency.places * self._residency.layer_nbytes
            held = min(self._window.count, room_nbytes // self._window.expert_nbytes)
            self._window.places = max(self._fewest_experts, held)

    def _for_generating(self) -> None:
        if self._on_cpu:
            self._take(self._working_nbytes)
        elif not self._measures:
            return
        elif self._tokens > self._largest_pass:
            self._back_to_the_fewest()
            self._peak_nbytes = self.peak_nbytes()
            torch.accelerator.reset_peak_memory_stats(self._residency.device)
            self._generating_nbytes = 0
        else:
            now = torch.accelerator.memory_allocated(self._residency.device)
            self._take(max(self._generating_nbytes, self._beside(now)))

    def _back_to_the_fewest(self) -> None:
        if self.head is not None:
            self.head.stays = False
        self._residency.places = self._fewest
        self._residency.shrink()
        if self._window is not None:
            self._window.places = self._fewest_experts
            self._window.shrink()

    def _take(self, working_nbytes: int) -> None:
        """Everything that the budget leaves when a pass takes `working_nbytes` besides weights."""
        self._residency.places = self._budget.settled(working_nbytes)
        spare_nbytes = self._budget.spare(working_nbytes)
        if self.head is not None and not self._on_cpu:
            self.head.stays = spare_nbytes >= self.head.nbytes
            spare_nbytes -= self.head.nbytes if self.head.stays else 0
        if self._window is not None:
            self._window.places = self._fewest_experts + spare_nbytes // max(1, self._window.expert_nbytes)

    def _beside(self, allocated_nbytes: int) -> int:
        """What is not held by places; the fewest experts count as working memory."""
        experts_nbytes = 0
        if self._window is not None:
            fewest_nbytes = self._fewest_experts * self._window.expert_nbytes
            experts_nbytes = max(0, self._window.held_nbytes - fewest_nbytes)
        head_nbytes = 0 if self.head is None else self.head.held_nbytes
        return allocated_nbytes - self._residency.held_nbytes - experts_nbytes - head_nbytes

    def _peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._residency.device)


def _has_statistics(device: torch.device) -> bool:
    """Whether the accelerator tells what is allocated on it. Without that nothing can be measured, and layers
    stay on the fewest places.
    """
    try:
        torch.accelerator.max_memory_allocated(device)
    except RuntimeError:
        logger.info("%s does not tell what is allocated on it: no more layers stay there than must", device)
        return False
    return True
