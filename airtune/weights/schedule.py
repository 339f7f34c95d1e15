"""Which layer is visited next, what to read ahead for it, and what to let go.

A training step visits layers in a fixed order: 0 1 2 ... L-1, then L-1 ... 2 1 0, then the next step again
from 0. A forward pass alone goes 0 ... L-1, 0 ... L-1. Some models visit a layer twice or skip one. So the
order is not assumed but learned: the visit that followed the last two visits the last time follows them
again. Before anything was learned, forward counts up and backward counts down.

Knowing what comes, the weights to let go are those needed last (Belady's rule, optimal for a known order).
With P places for L layers a training step then reads 2L - 2P layers: at each of its two turns it finds all
places filled with what comes next.

Pure logic: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Stop:
    """One visit on the route: a layer's index and the direction of the pass."""

    index: int
    direction: Direction


class Route:
    """The order of visits over `count` layers, as far as it is known."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._follows: dict[tuple[Stop | None, Stop], Stop] = {}
        self._before_last: Stop | None = None
        self._last: Stop | None = None

    def arrive(self, stop: Stop) -> None:
        """Note that `stop` is visited now."""
        if self._last is not None:
            self._follows[self._before_last, self._last] = stop
        self._before_last, self._last = self._last, stop

    def ahead(self) -> Iterator[Stop]:
        """The expected visits after the current one, soonest first; at most one round over everything
        known.
        """
        before, last = self._before_last, self._last
        for _ in range(2 * self.count + len(self._follows)):
            if last is None:
                return
            following = self._follows.get((before, last)) or self._neighbour(last)
            yield following
            before, last = last, following

    def _neighbour(self, stop: Stop) -> Stop:
        """Without experience: up in forward, down in backward, turning at the ends."""
        if stop.direction == "forward":
            return (
                Stop(stop.index + 1, "forward")
                if stop.index + 1 < self.count
                else Stop(stop.index, "backward")
            )
        return Stop(stop.index - 1, "backward") if stop.index > 0 else Stop(0, "forward")

    def first_needed(self, absent: Collection[int]) -> int | None:
        """Of the layers that are `absent`, the one that is visited first."""
        return next((stop.index for stop in self.ahead() if stop.index in absent), None)

    def last_needed(self, present: Collection[int]) -> int:
        """Of the layers that are `present`, the one that is visited last, or never: the one to let go."""
        seen: dict[int, None] = {}
        for stop in self.ahead():
            if stop.index in present:
                seen.setdefault(stop.index)
                if len(seen) == len(present):
                    break
        never = [index for index in present if index not in seen]
        return never[0] if never else next(reversed(seen))

    def replace(self, present: Collection[int], current: int) -> tuple[int, int] | None:
        """(layer to read ahead, layer to let go for it), or None when it is too early.

        The layer that goes is the one that would go if the read waited until the last moment, so that no read
        is made that could be saved; but it goes as soon as it is not visited before that moment any more, so
        that the disk does not wait.
        """
        future = list(self.ahead())
        due = next((k for k, stop in enumerate(future) if stop.index not in present), None)
        if due is None:
            return None
        before = {current, *(stop.index for stop in future[:due])}
        visited_then = future[due - 1].index if due else current
        again = {future[k].index: k for k in range(len(future) - 1, due, -1)}
        drop = max(
            (index for index in present if index != visited_then),
            key=lambda index: (again.get(index, len(future)), index not in before),
            default=None,
        )
        return None if drop is None or drop in before else (future[due].index, drop)
