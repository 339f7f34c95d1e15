"""Which way a checkpoint's bytes come into host memory: mapped, through the page cache, or past it.

A checkpoint that fits in memory is read from the disk once. From then on the page cache serves it at 5 GB/s
and more, or (CPU) it is computed on where the cache holds it. Nothing is better.

A larger one comes from the disk twice in each step, and what the cache adds then is uncertain. It reads ahead
between our reads, and it keeps a part: visits turn round at the last layer and at the first, so of C bytes of
checkpoint about M are still in M bytes of memory when they are asked for again. But every byte is copied, and
as much is evicted as is read, which takes longer than a fast disk does. What is faster depends on disk, file
system, kernel and (virtual) machine, so both are tried for a second or so, and buffered reads are credited
with what the cache will keep:

    expected speed of buffered reads = speed from the disk / (1 - M / C)

It gives up certainty: four places of one file are read, and a shared disk is faster or slower an hour later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from airtune.weights.checkpoint import Checkpoint
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.reader import ByteRange, ByteReader, NoDirectIO

FileAccess = Literal["mapped", "buffered", "direct"]

logger = logging.getLogger(__name__)

# Each way is tried twice and the better speed counts: the first may be slow for a reason that passes, such as
# a virtual machine's memory that the host has yet to find (measured: 0.3 GB/s, then 2.2 for good).
_TRIALS = 2
_TRIAL_NBYTES = 128 * 2**20
# Mapped weights need no copy and no buffers: on the CPU, direct reads are worth both if they are this much
# faster.
_WORTH_A_COPY = 1.1


@dataclass(frozen=True)
class ColdSpeeds:
    """Bytes per second of reads that the page cache knows nothing about."""

    buffered: float
    direct: float


def choose_access(checkpoint: Checkpoint, *, on_cpu: bool, requested: str = "auto") -> FileAccess:
    """How to read the weights of `checkpoint`.

    Args:
        on_cpu: the layers compute on the CPU, so weights can be used where they are mapped.
        requested: the answer, or "auto" to decide by the memory that is available and, when the checkpoint is
            larger, by measuring.

    Raises:
        ValueError: `requested` is not known, or is not possible here (NoDirectIO for direct reads).
    """
    if requested == "auto":
        return decide(
            on_cpu=on_cpu,
            checkpoint_nbytes=checkpoint.nbytes,
            available_nbytes=available_memory_nbytes(),
            measure=lambda: measure_cold(checkpoint.files),
        )
    if requested not in get_args(FileAccess):
        raise ValueError(f'got file_access={requested!r}, expected "auto" or one of {get_args(FileAccess)}')
    if requested == "mapped" and not on_cpu:
        raise ValueError(
            'file_access="mapped" is for layers that compute on the CPU; what goes to an accelerator is '
            'read, not mapped. Use "auto", "buffered" or "direct".'
        )
    if requested == "direct":
        require_direct(checkpoint.files)
    return cast(FileAccess, requested)


def decide(
    *, on_cpu: bool, checkpoint_nbytes: int, available_nbytes: int, measure: Callable[[], ColdSpeeds]
) -> FileAccess:
    """The choice by numbers. `measure` is called only if the checkpoint is larger than the memory available;
    it may raise NoDirectIO.
    """
    cached: FileAccess = "mapped" if on_cpu else "buffered"
    if checkpoint_nbytes <= available_nbytes:
        return cached
    sizes = (
        f"checkpoint of {checkpoint_nbytes / 1e9:.1f} GB, {available_nbytes / 1e9:.1f} GB of memory available"
    )
    try:
        speeds = measure()
    except NoDirectIO as refusal:
        logger.info(
            "%s: weights are read %s, because direct reads are not possible: %s", sizes, cached, refusal
        )
        return cached
    # Page faults of a mapping are served by the page cache, so buffered reads stand for it.
    expected = speeds.buffered / (1 - available_nbytes / checkpoint_nbytes)
    enough = expected * (_WORTH_A_COPY if on_cpu else 1.0)
    chosen: FileAccess = "direct" if speeds.direct > enough else cached
    logger.info(
        "%s: the disk gives %.2f GB/s buffered (%.2f with what the page cache will keep) and %.2f GB/s "
        "direct, so weights are read %s",
        sizes,
        speeds.buffered / 1e9,
        expected / 1e9,
        speeds.direct / 1e9,
        chosen,
    )
    return chosen


def measure_cold(files: Sequence[Path]) -> ColdSpeeds:
    """Read from the largest file, buffered and direct in turn, each time in another place.

    Raises:
        NoDirectIO: one of the files cannot be read directly.
    """
    require_direct(files)
    file = max(files, key=lambda file: file.stat().st_size)
    distance = file.stat().st_size // (2 * _TRIALS)
    nbytes = min(_TRIAL_NBYTES, distance)
    buffer = torch.empty(nbytes, dtype=torch.uint8).fill_(0)  # in memory now, not page by page in a trial
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for trial in range(2 * _TRIALS):
        direct = trial % 2 == 1
        speeds[direct].append(_speed(ByteRange(file, trial * distance, nbytes, 0), buffer, direct=direct))
    return ColdSpeeds(buffered=max(speeds[False]), direct=max(speeds[True]))


def require_direct(files: Sequence[Path]) -> None:
    """Read a byte of each file directly, so that a refusal comes now and not at the first layer.

    Raises:
        NoDirectIO: direct reads are not possible, on this system or for the file that it names.
    """
    with ByteReader(threads=1, direct=True) as reader:
        ranges = [ByteRange(file, 0, 1, place) for place, file in enumerate(files)]
        reader.read_into(ranges, torch.empty(len(files), dtype=torch.uint8))


def _speed(place: ByteRange, buffer: torch.Tensor, *, direct: bool) -> float:
    """Bytes per second."""
    _drop_from_page_cache(place)
    with ByteReader(direct=direct) as reader:
        reader.read_into([place], buffer)
    # Also afterwards: the next trial's pages are then these again.
    _drop_from_page_cache(place)
    return reader.bytes_read / reader.read_s


def _drop_from_page_cache(place: ByteRange) -> None:
    descriptor = os.open(place.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, place.offset, place.nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
