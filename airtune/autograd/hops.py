"""Activations on their way between the host, where they wait, and the device, where a layer computes.

While micro-batch i computes, i+1 is on its way up and i-1 on its way down, each on a stream of its own. The
host runs far ahead of the device, so it would queue every micro-batch's upload at once and their memory with
it; therefore an upload starts only when the micro-batch before the previous one is done and its results are
home, and the device holds two micro-batches of activations however many there are. When the device is the CPU
nothing moves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


class Hops:
    """The two directions, for one visit of a layer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stays = device.type == "cpu"
        self._running: deque[torch.Event] = deque()
        if not self._stays:
            self._up, self._down = _streams(device)

    def send(self, leaves: Sequence[Any]) -> list[Any]:
        """Start moving the tensors among `leaves` to the device; `arrive` must come before they are used."""
        if self._stays:
            return list(leaves)
        if len(self._running) > 1:
            self._running.popleft().synchronize()
        with self._up, torch._C._InferenceMode(False):  # a copy tells whether it was written to
            return [self._lift(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device, non_blocking=True)

    def arrive(self, leaves: Sequence[Any]) -> None:
        """Let the current stream wait for everything that was sent, and own it."""
        if self._stays:
            return
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(self._up.record_event())
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                _own(leaf, current, made_on=self._up)

    def computed(self) -> None:
        """Mark the end of a micro-batch: its work on the current stream, and the way home of its results."""
        if not self._stays:
            self._down.wait_event(torch.accelerator.current_stream(self._device).record_event())
            self._running.append(self._down.record_event())

    def bring(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a result into host memory; it is there after `finish`."""
        if self._stays or into.device.type != "cpu":
            into.copy_(tensor)
            return
        current = torch.accelerator.current_stream(self._device)
        self._down.wait_event(current.record_event())
        _own(tensor, self._down, made_on=current)  # before the copy: an error between the two would free it
        with self._down:
            into.copy_(tensor, non_blocking=True)

    def home(self, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
        """A result at home, as it is if it is there already; there after `finish`."""
        if tensor.device == home:
            return tensor
        into = self.host_like(tensor.shape, tensor.dtype, home)
        self.bring(tensor, into)
        return into

    def host_like(self, shape: Sequence[int], dtype: torch.dtype, home: torch.device) -> torch.Tensor:
        """Memory at home for a result: pinned when the device is another one, so that copies can run
        beside compute.
        """
        pinned = not self._stays and home.type == "cpu" and can_pin()
        return torch.empty(shape, dtype=dtype, device=home, pin_memory=pinned)

    def finish(self) -> None:
        """Wait until every result is on the host."""
        if not self._stays:
            self._down.synchronize()


def _own(tensor: torch.Tensor, stream: torch.Stream, *, made_on: torch.Stream) -> None:
    """Memory of `tensor` is not reused before `stream` is done with it. A device with a single stream needs
    no record of that, and may not know any (mps).
    """
    if stream != made_on:
        tensor.record_stream(stream)


def settle(device: torch.device) -> None:
    """Wait until the device's autograd thread is done with what backward passes left to it.

    A backward pass that fails (Ctrl-C) returns at once, while that thread may be adding a gradient to its
    parameter: after a `zero_grad` meanwhile it would be counted in the next step. Gradients are added before
    anything else that waits there, so whatever passes through comes after them; from a thread of its own, as
    what is begun within a backward pass comes before.
    """
    # A hook may run a backward pass in that thread itself, which then has no other one to wait for.
    if device.type == "cpu" or threading.current_thread() is not threading.main_thread():
        return
    leaf = torch.empty(0, device=device, requires_grad=True)
    with torch.enable_grad(), ThreadPoolExecutor(1) as another:
        another.submit(torch.autograd.grad, leaf.clone(), leaf, torch.empty_like(leaf))


@cache
def can_pin() -> bool:
    """Whether host memory can be pinned for the accelerator; not where it shares the host's (mps)."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


_STREAMS: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}


def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """One stream a direction and device: memory that the allocator keeps for a stream is then reused from
    visit to visit.
    """
    if device not in _STREAMS:
        _STREAMS[device] = (torch.Stream(device=device), torch.Stream(device=device))
    return _STREAMS[device]
