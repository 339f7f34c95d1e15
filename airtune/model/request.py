"""The arguments of `airtune.load`, checked for what they are before anything is opened.

What is wrong with them is a ValueError that says what was got and what was expected: a device that is not
there would otherwise be found minutes later, by the first layer that is copied to it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftType

from airtune.sizes import parse_bytes
from airtune.weights.packed.decode import COMPUTE_DTYPES

logger = logging.getLogger(__name__)

# The rest is for what the allocator cannot use in one piece, and for others on the same device.
_FREE_SHARE = 0.9


@dataclass(frozen=True)
class Place:
    """Where layers compute, and the memory that they may take.

    Attributes:
        nbytes: for weights where the layers compute; None when the user leaves it open.
        cache_nbytes: of host memory, for layers and experts on their way to an accelerator; None when the
            user leaves it open.
    """

    device: torch.device
    nbytes: int | None
    cache_nbytes: int | None

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


def choose_place(
    device: str | torch.device, device_memory: str | int | None, host_memory: str | int | None
) -> Place:
    """Where to compute, from `load`'s arguments of these names.

    Raises:
        ValueError: there is no such device, or a size is none.
    """
    chosen = _device(device)
    device_nbytes, host_nbytes = (
        None if size is None else parse_bytes(size) for size in (device_memory, host_memory)
    )
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)  # streams are used from this thread too (weights.workers)
        free_nbytes = _free_nbytes(chosen) if device_nbytes is None else device_nbytes
        return Place(chosen, free_nbytes, host_nbytes)
    if device_memory is not None:
        logger.info("the layers compute on the CPU: device_memory is not used, host_memory is")
    return Place(chosen, host_nbytes, 0)


def _free_nbytes(device: torch.device) -> int | None:
    """Most of what is free on an accelerator; None where it does not tell."""
    try:
        free_nbytes, _ = torch.accelerator.get_memory_info(device)
    except RuntimeError:  # also NotImplementedError
        logger.info("%s does not tell how much memory is free: two layers are kept on it at a time", device)
        return None
    return int(free_nbytes * _FREE_SHARE)


def check_adapter(lora: object, adapter: object) -> None:
    """Raises ValueError unless `lora` is a LoraConfig, or `adapter` is a path, or neither is given."""
    if lora is not None and adapter is not None:
        raise ValueError(
            "got both lora and adapter: give lora for a fresh adapter, or adapter to use a saved one"
        )
    if lora is not None and not (isinstance(lora, LoraConfig) and lora.peft_type == PeftType.LORA):
        raise ValueError(
            f"lora must be a peft.LoraConfig, such as peft.LoraConfig(r=16, target_modules='all-linear'); "
            f"got {_described(lora)}. A saved adapter's folder is given as adapter="
        )
    if adapter is not None and not isinstance(adapter, str | Path):
        raise ValueError(f"adapter must be the folder of a saved adapter, got {_described(adapter)}")


def check_dtype(dtype: object) -> None:
    """Raises ValueError unless `dtype` is None or one that layers can compute in."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(sorted(map(str, COMPUTE_DTYPES)))}, or None for the "
            f"checkpoint's own; got {_described(dtype)}"
        )


def check_micro_batch_size(rows: object) -> None:
    """Raises ValueError unless `rows` is None or a whole number of at least 1."""
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise ValueError(
            "micro_batch_size must be at least 1 row (a whole number), or None for the whole batch; "
            f"got {_described(rows)}"
        )


def choose_attention(implementation: object) -> str | None:
    """The name to give to transformers; None for the best that is always there.

    Raises:
        ValueError: not a name.
    """
    if implementation is None or implementation == "auto":
        return None
    if not isinstance(implementation, str):
        raise ValueError(
            f'attn_implementation must be "auto", "sdpa", "eager" or another name that transformers knows; '
            f"got {_described(implementation)}"
        )
    return implementation


def _device(asked: str | torch.device) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(asked, str) and asked == "auto":
        return torch.device("cpu") if found is None else _indexed(found)
    count = 0 if found is None else torch.accelerator.device_count()
    there = ["cpu"] + ([found.type] if found else []) + [f"{found.type}:{i}" for i in range(count) if found]
    try:
        device = torch.device(asked) if isinstance(asked, str | torch.device) else None
    except RuntimeError:
        device = None  # torch's message lists thirty kinds that are not here
    if device is None or str(device) not in [*there, "cpu:0"]:
        raise ValueError(f'device must be "auto" or one of {there} on this machine, got {_described(asked)}')
    return device if device.type == "cpu" else _indexed(device)


def _indexed(device: torch.device) -> torch.device:
    """The device with its index, which is the current one's where none was given: other threads have another
    current device.
    """
    index: int | None = device.index
    return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)


def _described(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
