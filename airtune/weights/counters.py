"""What moved between disk, host and device, and what was waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the start.

    Attributes:
        bytes_read: from the checkpoint's files, mapped pages included.
        bytes_copied: from the host to the device.
        stall_s: time that visits waited for weights.
        compute_s: time inside visits, without waiting for experts.
        visits: how many there were; `cache_hits` of them found their layer there, or on its way.
        expert_loads: how often an expert was brought; one that is still there is not brought again.
    """

    bytes_read: int = 0
    bytes_copied: int = 0
    stall_s: float = 0.0
    compute_s: float = 0.0
    visits: int = 0
    cache_hits: int = 0
    expert_loads: int = 0
