"""The window of experts: what is read, when, and what makes room."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from airtune.weights.checkpoint import Checkpoint
from airtune.weights.counters import Counters
from airtune.weights.expert_plans import ExpertGroup
from airtune.weights.experts import ExpertWindow
from airtune.weights.file_map import FileMap
from airtune.weights.header import CheckpointError
from airtune.weights.pieces import Piece
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteReader
from tests.sim import Simulator

EXPERTS, OUT, IN = 8, 4, 4  # 64 bytes each, which is how images are aligned
NBYTES = OUT * IN * 4


class Bench:
    """Two groups of eight experts, stored as stacks, and a window of `places` over them."""

    def __init__(self, folder: Path, *, places: int = 2, device: str = "cpu", **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.stacks = {
            f"layers.{i}.experts.w": torch.randn(EXPERTS, OUT, IN, generator=generator) for i in range(2)
        }
        folder.mkdir(exist_ok=True)
        self.file = folder / "model.safetensors"
        save_file(self.stacks, self.file)
        stored = Checkpoint.open(folder)
        groups = [
            ExpertGroup(i, f"layers.{i}.experts", {name: _as_stored(name, stored)})
            for i, name in enumerate(self.stacks)
        ]
        self.counters = Counters()
        self.reader = ByteReader(threads=2)
        self.window = ExpertWindow(
            groups,
            self.reader,
            FileMap(),
            device=torch.device(device),
            counters=self.counters,
            map_files=False,
            **options,
        )
        self.window.places = places

    def use(self, *experts: int, group: int = 0) -> None:
        for expert in experts:
            with self.window.hold(group * EXPERTS + expert) as tensors:
                (tensor,) = tensors.values()
                want = self.stacks[f"layers.{group}.experts.w"][expert]
                assert torch.equal(tensor.cpu().view(OUT, IN), want), expert

    def there(self) -> set[int]:
        return set(self.window._present)

    def close(self) -> None:
        self.window.close()
        self.reader.close()


def _as_stored(name: str, checkpoint: Checkpoint) -> TensorPlan:
    stored = checkpoint[name]
    conversion = Conversion(name, ((name, name, stored),), None)
    pieces = (Piece(stored, 0, stored.nbytes, 0),)
    return TensorPlan(name, torch.float32, stored.shape, conversion, name, pieces)


@pytest.fixture
def open_bench(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def opened(**options: Any) -> Bench:
            bench = Bench(tmp_path / "checkpoint", **options)
            stack.callback(bench.close)
            return bench

        yield opened


def test_what_was_announced_is_read_ahead_and_nothing_else(open_bench: Any) -> None:
    bench = open_bench(places=3)
    bench.window.announce(0, [1, 4, 6, 7])
    assert bench.there() == {1, 4}
    bench.use(1)
    assert bench.there() == {1, 4, 6}
    bench.use(4, 6, 7)
    assert bench.counters.expert_loads == 4
    assert bench.counters.bytes_read == 4 * NBYTES


def test_the_way_back_is_read_ahead_too(open_bench: Any) -> None:
    bench = open_bench(places=2)
    bench.window.announce(0, [0, 2, 3, 5])
    bench.use(0, 2, 3, 5)
    bench.use(5)
    assert bench.counters.expert_loads == 4, "the last one is still there"
    bench.use(3)
    assert bench.there() == {3, 2}
    bench.use(2, 0)
    assert bench.counters.expert_loads == 4 + 2


def test_an_expert_that_nobody_announced_is_read_when_it_is_asked_for(open_bench: Any) -> None:
    bench = open_bench(places=2)
    bench.use(3, group=1)
    assert bench.there() == {EXPERTS + 3}
    bench.use(6, 3, group=1)
    assert bench.counters.expert_loads == 2


def test_several_at_once_take_more_places_for_once(open_bench: Any) -> None:
    bench = open_bench(places=2)
    with ExitStack() as held:
        for expert in range(4):
            held.enter_context(bench.window.hold(expert))
        assert bench.there() == {0, 1, 2, 3}
    bench.use(5)
    assert len(bench.there()) <= 2


def test_a_smaller_window_gives_places_back(open_bench: Any) -> None:
    bench = open_bench(places=6)
    bench.use(0, 1, 2, 3)
    bench.window.places = 2
    bench.window.shrink()
    assert bench.there() == {2, 3}
    bench.use(3, 0)


def test_the_last_one_may_have_been_given_back(open_bench: Any) -> None:
    bench = open_bench(places=2)
    bench.use(0)
    bench.window.places = 0
    bench.window.shrink()
    bench.window.places = 2
    bench.use(0)


def test_a_use_that_was_left_open_is_forgotten_in_any_thread(open_bench: Any) -> None:
    bench = open_bench(places=2)
    (stack,) = bench.window.tensors(0).values()
    left_open = [stack._source.part(3).read()]
    left_open[0].__enter__()
    with bench.window._lock:
        other = threading.Thread(target=left_open.clear, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), "it waits for the lock"
    bench.use(0, 1, 2)
    assert bench.there() == {1, 2}


def test_an_interrupt_leaves_everything_as_it_was(open_bench: Any) -> None:
    """As any function is about to begin, which is where Python takes notice of Ctrl-C; the error is kept for
    a while, as notebooks do, and with it whatever was open.
    """
    bench, at, count, kept = open_bench(places=2), 0, 0, list[BaseException]()

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        # Not in what is closed or called when it is forgotten: there the interrupt has nobody to go to.
        closed = frame.f_code.co_flags & CO_GENERATOR
        count += not closed and "weakref" not in frame.f_code.co_filename
        if count == at:
            raise KeyboardInterrupt

    while count == at:
        at, count = at + 1, 0
        torch.set_grad_enabled(False)
        try:
            sys.settrace(trace)
            bench.window.hold((at + 4) % EXPERTS).__enter__()
        except KeyboardInterrupt as interrupt:
            kept.append(interrupt)
        finally:
            sys.settrace(None)
            torch.set_grad_enabled(True)
        kept.clear()
        assert torch.is_grad_enabled()
        bench.use((at + 1) % EXPERTS, (at + 2) % EXPERTS)


def test_a_file_that_was_cut_short_is_said_when_the_expert_is_needed(open_bench: Any) -> None:
    bench = open_bench()
    os.truncate(bench.file, bench.file.stat().st_size - NBYTES)
    bench.use(0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*changed after it was opened"):
        bench.use(7, group=1)
    bench.use(1)


@pytest.mark.parametrize("places", [2, 3, 16])
def test_on_an_accelerator(sim: Simulator, open_bench: Any, places: int) -> None:
    bench = open_bench(places=places, device="sim", poison=True)
    for _ in range(2):
        for group in (0, 1):
            bench.window.announce(group, range(EXPERTS))
            bench.use(*range(EXPERTS), group=group)
            bench.use(*reversed(range(EXPERTS)), group=group)
    assert bench.window.held_nbytes <= places * bench.window.expert_nbytes
    assert bench.counters.bytes_copied == bench.counters.expert_loads * NBYTES


def test_the_cache_keeps_what_was_used_last(sim: Simulator, open_bench: Any) -> None:
    bench = open_bench(device="sim")
    bench.window.keep(3 * NBYTES)
    bench.use(0, 1, 2, 3)
    read = bench.counters.bytes_read
    bench.window.places = 0
    bench.window.shrink()
    bench.window.places = 2
    bench.use(3, 2, 1)
    assert bench.counters.bytes_read == read
    bench.use(0)
    assert bench.counters.bytes_read == read + NBYTES
