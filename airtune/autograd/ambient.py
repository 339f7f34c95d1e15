"""What a computation depends on besides its inputs: random state and autocast.

A layer is computed twice, once forward and once to get its gradients. Dropout that draws another mask the
second time leaves the loss exactly as it was and makes every gradient wrong, so both are captured before
the first run and restored around the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ambient:
    """A snapshot; take it with `Ambient.capture(device)`, enter it with `with snapshot.restored():`."""

    device: torch.device
    cpu_state: torch.Tensor
    device_state: torch.Tensor | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def capture(cls, device: torch.device) -> Ambient:
        """Snapshot the CPU's and `device`'s random state, and the autocast settings of both."""
        on_cpu = device.type == "cpu"
        kinds = ("cpu",) if on_cpu else ("cpu", device.type)
        return cls(
            device,
            torch.get_rng_state(),
            None if on_cpu else torch.get_device_module(device).get_rng_state(device),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, draws and casts are those that followed the snapshot; afterwards, the caller's own state
        is back.
        """
        with ExitStack() as stack:
            stack.enter_context(kept_rng(self.device))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            torch.set_rng_state(self.cpu_state)
            if self.device_state is not None:
                torch.get_device_module(self.device).set_rng_state(self.device_state, self.device)
            yield


@contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the random state afterwards is as it was before."""
    on_cpu = device.type == "cpu"
    cpu_state = torch.get_rng_state()
    device_state = None if on_cpu else torch.get_device_module(device).get_rng_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.get_device_module(device).set_rng_state(device_state, device)
