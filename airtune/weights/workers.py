"""Threads that bring weights to a device.

A thread that never chose a card is on card 0. Using a stream of another card from there goes back to card 0
afterwards, and CUDA then opens a context on it: half a gigabyte, on a card that may be full.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def workers(threads: int, name: str, device: torch.device) -> ThreadPoolExecutor:
    """A pool of threads whose current device is `device`, where that is an accelerator with an index."""
    if device.type == "cpu" or device.index is None:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)
    return ThreadPoolExecutor(
        threads, thread_name_prefix=name, initializer=torch.accelerator.set_device_index, initargs=(device,)
    )
