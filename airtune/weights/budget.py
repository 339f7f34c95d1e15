"""How many layers may be on the device, from the bytes that the user gives.

    budget >= slots + working memory

One slot holds the largest layer. Working memory (adapters with their gradients and optimizer, activations
of a micro-batch, the loss) is not guessed from a config: the first step runs on one slot or two, its peak
is measured, and what the budget leaves then becomes further slots, in which layers stay. Two slots overlap
reading with compute; one works and does not.

Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

# The measured peak of one step may be passed by a longer row in the next one.
WORKING_MARGIN = 1.1


@dataclass(frozen=True)
class SlotBudget:
    """Slots for `count` layers of at most `slot_nbytes`, within `nbytes` of device memory (None: not
    limited, two slots).

    Args:
        fixed_nbytes: what is on the device besides slots however small the batch is: adapters in fp32 with
            their gradient and two moments.
        experts_nbytes: for experts that are on the device at once, beside the layers' slots.
        rows_nbytes: for rows of the output projection and of tables that are in memory at once, on the CPU.
    """

    count: int
    slot_nbytes: int
    nbytes: int | None
    fixed_nbytes: int = 0
    experts_nbytes: int = 0
    rows_nbytes: int = 0

    @property
    def window_nbytes(self) -> int:
        """Weights that pass through beside the layers' slots."""
        return self.experts_nbytes + self.rows_nbytes

    def first(self) -> int:
        """Slots for the first step.

        Raises:
            ValueError: not even one fits.
        """
        if self.nbytes is None or self.slot_nbytes == 0:
            return min(2, self.count)
        beside = self.fixed_nbytes + self.window_nbytes
        least = self.slot_nbytes + beside
        if self.nbytes < least:
            raise ValueError(
                f"memory for weights is limited to {self.nbytes:,} bytes and at least {least:,} are needed: "
                f"{self.slot_nbytes:,} for the largest layer, {self.fixed_nbytes:,} for adapters and "
                f"their optimizer, {self.experts_nbytes:,} for experts and {self.rows_nbytes:,} for rows of "
                "the tables at both ends; raise the limit"
            )
        # A second slot only where a third would fit as well: the work of the step is not known yet.
        return min(2 if self.nbytes >= beside + 3 * self.slot_nbytes else 1, self.count)

    def left(self, working_nbytes: int) -> int:
        """What slots may take once a pass was seen to take `working_nbytes` besides them; at least one."""
        if self.nbytes is None:
            return self.first() * self.slot_nbytes
        # The first step's peak comes before Adam's moments are there: half of what is fixed.
        left = self.nbytes - int(working_nbytes * WORKING_MARGIN) - self.fixed_nbytes // 2
        return max(self.slot_nbytes, left)

    def settled(self, nbytes: int) -> int:
        """Slots in `nbytes` of memory for them; at least one."""
        if self.slot_nbytes == 0:
            return self.count
        return max(1, min(self.count, nbytes // self.slot_nbytes))

    def mapped(self, room_nbytes: int) -> int:
        """Layers that may stay mapped in `room_nbytes` of memory; no fewer than in the first step."""
        if self.slot_nbytes == 0:
            return self.count
        return max(self.first(), self.settled(room_nbytes))
