from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from airtune.weights import access
from airtune.weights.access import ColdSpeeds, choose_access, decide, measure_cold
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.reader import ByteRange, NoDirectIO

GB = 10**9


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file({"a": torch.zeros(1000)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(500_000)}, tmp_path / "model-00002-of-00002.safetensors")
    return Checkpoint.open(tmp_path)


def must_not_measure() -> ColdSpeeds:
    raise AssertionError("measured, although there is nothing to decide")


@pytest.mark.parametrize(("on_cpu", "expected"), [(True, "mapped"), (False, "buffered")])
@pytest.mark.parametrize("available_nbytes", [54 * GB, 300 * GB])
def test_what_fits_in_memory_is_left_to_the_page_cache(
    on_cpu: bool, expected: str, available_nbytes: int
) -> None:
    chosen = decide(
        on_cpu=on_cpu,
        checkpoint_nbytes=54 * GB,
        available_nbytes=available_nbytes,
        measure=must_not_measure,
    )
    assert chosen == expected


@pytest.mark.parametrize(
    ("on_cpu", "available_gb", "buffered", "direct", "expected"),
    [
        # Much larger than memory: the faster one, where mapping has an advantage of 10 %.
        (False, 1, 2.0, 2.1, "direct"),
        (False, 1, 2.0, 1.9, "buffered"),
        (True, 1, 2.0, 2.1, "mapped"),
        (True, 1, 2.0, 2.3, "direct"),
        (True, 1, 2.0, 1.9, "mapped"),
        # Half of it stays in memory: buffered reads are then twice as fast as the disk.
        (False, 500, 2.0, 3.9, "buffered"),
        (False, 500, 2.0, 4.1, "direct"),
        (True, 500, 2.0, 4.3, "mapped"),
        (True, 500, 2.0, 4.5, "direct"),
        # Nearly all of it does.
        (False, 999, 0.1, 7.0, "buffered"),
    ],
)
def test_what_does_not_fit_is_decided_by_speed(
    on_cpu: bool, available_gb: int, buffered: float, direct: float, expected: str
) -> None:
    chosen = decide(
        on_cpu=on_cpu,
        checkpoint_nbytes=1000 * GB,
        available_nbytes=available_gb * GB,
        measure=lambda: ColdSpeeds(buffered * GB, direct * GB),
    )
    assert chosen == expected


def test_both_speeds_are_in_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="airtune"):
        decide(
            on_cpu=False,
            checkpoint_nbytes=80 * GB,
            available_nbytes=20 * GB,
            measure=lambda: ColdSpeeds(1.5 * GB, 2.5 * GB),
        )
    assert caplog.messages == [
        "checkpoint of 80.0 GB, 20.0 GB of memory available: the disk gives 1.50 GB/s buffered (2.00 with "
        "what the page cache will keep) and 2.50 GB/s direct, so weights are read direct"
    ]


@pytest.mark.parametrize(("on_cpu", "expected"), [(True, "mapped"), (False, "buffered")])
def test_where_direct_reads_are_refused_the_log_says_so(
    caplog: pytest.LogCaptureFixture, on_cpu: bool, expected: str
) -> None:
    def refused() -> ColdSpeeds:
        raise NoDirectIO("the file system does not want to")

    with caplog.at_level(logging.INFO, logger="airtune"):
        chosen = decide(on_cpu=on_cpu, checkpoint_nbytes=80 * GB, available_nbytes=20 * GB, measure=refused)
    assert chosen == expected
    (line,) = caplog.messages
    assert f"read {expected}, because direct reads are not possible: the file system does not want" in line


@pytest.mark.parametrize("on_cpu", [True, False])
def test_auto_asks_for_memory_and_measures_the_files(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    asked: list[Sequence[Path]] = []

    def measured(files: Sequence[Path]) -> ColdSpeeds:
        asked.append(files)
        return ColdSpeeds(1.0, 100.0)

    monkeypatch.setattr(access, "measure_cold", measured)
    assert choose_access(checkpoint, on_cpu=on_cpu) == ("mapped" if on_cpu else "buffered")
    assert asked == []
    monkeypatch.setattr(access, "available_memory_nbytes", lambda: 1000)
    assert choose_access(checkpoint, on_cpu=on_cpu) == "direct"
    assert asked == [checkpoint.files]


def test_what_is_asked_for_is_taken(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "measure_cold", must_not_measure)
    monkeypatch.setattr(access, "available_memory_nbytes", lambda: 1000)
    monkeypatch.setattr(access, "require_direct", lambda files: None)
    assert choose_access(checkpoint, on_cpu=True, requested="mapped") == "mapped"
    for on_cpu in (True, False):
        assert choose_access(checkpoint, on_cpu=on_cpu, requested="buffered") == "buffered"
        assert choose_access(checkpoint, on_cpu=on_cpu, requested="direct") == "direct"


def test_nothing_is_mapped_for_an_accelerator(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r'file_access="mapped" is for .* CPU.*Use "auto", "buffered"'):
        choose_access(checkpoint, on_cpu=False, requested="mapped")


def test_unknown_access(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"got file_access='mmap', expected \"auto\" or one of .*'direct'"):
        choose_access(checkpoint, on_cpu=True, requested="mmap")


def test_direct_reads_that_are_refused_are_an_error_at_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ValueError, match="direct I/O"):
        choose_access(checkpoint, on_cpu=True, requested="direct")


def test_trials_read_the_largest_file_in_places_that_do_not_overlap(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[tuple[ByteRange, bool]] = []

    def speed(place: ByteRange, buffer: torch.Tensor, *, direct: bool) -> float:
        trials.append((place, direct))
        return 100.0 * direct + len(trials)

    monkeypatch.setattr(access, "require_direct", lambda files: None)
    monkeypatch.setattr(access, "_speed", speed)
    assert measure_cold(checkpoint.files) == ColdSpeeds(buffered=3.0, direct=104.0)  # the better of two each
    assert [direct for _, direct in trials] == [False, True, False, True]
    assert {place.file for place, _ in trials} == {checkpoint.files[1]}
    ends = [0] + [place.offset + place.nbytes for place, _ in trials]
    assert all(
        place.offset >= end and place.nbytes > 400_000 for (place, _), end in zip(trials, ends, strict=False)
    )
    assert ends[-1] <= checkpoint.files[1].stat().st_size


def test_measures_real_reads(checkpoint: Checkpoint) -> None:
    try:
        speeds = measure_cold(checkpoint.files)
    except NoDirectIO as refusal:
        pytest.skip(str(refusal))
    assert speeds.buffered > 0 and speeds.direct > 0
