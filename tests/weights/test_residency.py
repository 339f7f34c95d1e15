"""Residency: inside a visit the parameters are the checkpoint's, outside they are placeholders, in any order.

Small modules of three tensors stand for layers: a matrix, a vector and a buffer, each layer of another size.
Stored in bf16 and computed in fp32 they go through slots; stored in fp32 they are views of the file.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from airtune.weights import transport
from airtune.weights.checkpoint import Checkpoint, CheckpointError, StoredTensor
from airtune.weights.counters import Counters
from airtune.weights.file_map import FileMap, FileRange
from airtune.weights.image import LayerImage
from airtune.weights.pieces import Piece
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteReader
from airtune.weights.residency import Layer, Residency
from airtune.weights.schedule import Direction
from tests.sim import Simulator

COUNT = 5


class Block(nn.Module):
    """A layer on meta."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(width, width, device="meta"), requires_grad=False)
        self.vector = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.register_buffer("state", torch.zeros(3))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self._parameters, **self._buffers}  # type: ignore[dict-item]


def plain(name: str, stored: StoredTensor, dtype: torch.dtype) -> TensorPlan:
    conversion = Conversion(name, ((name, name, stored),), None)
    return TensorPlan(name, dtype, stored.shape, conversion, name, (Piece(stored, 0, stored.nbytes, 0),))


class Streamed:
    """A residency over blocks, and what the checkpoint holds for them."""

    def __init__(
        self,
        folder: Path,
        *,
        stored: torch.dtype = torch.bfloat16,
        places: int = 2,
        count: int = COUNT,
        width: int = 5,
        device: str = "cpu",
        map_files: bool = True,
        files: FileMap | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.stored = stored
        self.layers = [Block(width + i) for i in range(count)]
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(self.layers)
        generator = torch.Generator().manual_seed(seed)
        state = {
            name: torch.randn(tensor.shape, generator=generator).to(stored)
            for name, tensor in self.model.state_dict().items()
        }
        folder.mkdir(exist_ok=True)
        self.file = folder / "model.safetensors"
        save_file(state, self.file)
        self.wanted = {name: tensor.float() for name, tensor in state.items()}
        checkpoint = Checkpoint.open(folder)
        self.reader = ByteReader(threads=2)
        self.residency = Residency(
            cast(PreTrainedModel, self.model),
            [_layer(checkpoint, f"layers.{i}.", map_files and device == "cpu") for i in range(count)],
            self.reader,
            files or FileMap(),
            counters=Counters(),
            device=torch.device(device),
            **options,
        )
        self.residency.places = places

    def right(self, index: int) -> bool:
        return all(
            tensor.dtype == torch.float32 and torch.equal(tensor.cpu(), self.wanted[f"layers.{index}.{leaf}"])
            for leaf, tensor in self.layers[index].tensors().items()
        )

    def absent(self, indices: Iterable[int] | None = None) -> bool:
        layers = self.layers if indices is None else [self.layers[i] for i in indices]
        return all(tensor.is_meta for layer in layers for tensor in layer.tensors().values())

    def visit(self, *indices: int, direction: Direction = "forward") -> None:
        for index in indices:
            with self.residency.visit(index, direction):
                assert self.right(index), index

    def step(self) -> None:
        self.visit(*range(len(self.layers)))
        self.visit(*reversed(range(len(self.layers))), direction="backward")

    def layer_nbytes(self, index: int) -> int:
        """As stored."""
        return self.stored.itemsize * sum(tensor.numel() for tensor in self.layers[index].tensors().values())

    def close(self) -> None:
        self.residency.close()
        self.reader.close()


def _layer(checkpoint: Checkpoint, prefix: str, map_files: bool) -> Layer:
    plans = [plain(n, s, torch.float32) for n, s in checkpoint.items() if n.startswith(prefix)]
    return Layer(LayerImage.of(plans, map_files=map_files))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Streamed]]:
    made: list[Streamed] = []

    def one(**options: Any) -> Streamed:
        made.append(Streamed(tmp_path / str(len(made)), **options))
        return made[-1]

    yield one
    for streamed in made:
        if streamed.residency.device.type != "cpu":
            idle(streamed)
            torch.accelerator.synchronize()
        streamed.close()


FORMS = pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["slots", "views of the file"])


# Inside and outside


@FORMS
@pytest.mark.parametrize("places", [1, 2, 3, COUNT, COUNT + 1])
def test_right_inside_and_placeholders_outside(
    make: Callable[..., Streamed], stored: torch.dtype, places: int
) -> None:
    streamed = make(stored=stored, places=places)
    assert streamed.absent()
    placeholders = [dict(layer.tensors()) for layer in streamed.layers]
    directions: list[Direction] = ["forward", "backward", "forward", "forward"]
    for direction in directions:
        order = range(COUNT) if direction == "forward" else reversed(range(COUNT))
        for index in order:
            with streamed.residency.visit(index, direction):
                assert streamed.right(index)
                assert streamed.absent(i for i in range(COUNT) if i != index)
                matrix = streamed.layers[index].matrix
                assert isinstance(matrix, nn.Parameter) and not matrix.requires_grad
            for layer, before in zip(streamed.layers, placeholders, strict=True):
                assert all(layer.tensors()[leaf] is tensor for leaf, tensor in before.items())
    assert [name for name, _ in streamed.model.named_parameters()][:2] == [
        "layers.0.matrix",
        "layers.0.vector",
    ]


@FORMS
def test_an_exception_inside_a_visit_leaves_placeholders(
    make: Callable[..., Streamed], stored: torch.dtype
) -> None:
    streamed = make(stored=stored)
    with pytest.raises(KeyError, match="of the layer"), streamed.residency.visit(2, "forward"):
        raise KeyError("of the layer")
    assert streamed.absent()
    streamed.step()


@FORMS
def test_gradients_flow_through_a_visited_layer(make: Callable[..., Streamed], stored: torch.dtype) -> None:
    streamed = make(stored=stored)
    hidden = torch.randn(2, 6, requires_grad=True)
    with streamed.residency.visit(1, "backward"):
        (hidden @ streamed.layers[1].matrix).sum().backward()
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, streamed.wanted["layers.1.matrix"].sum(1).expand(2, 6))


def test_two_models_at_once(make: Callable[..., Streamed]) -> None:
    one, other = make(seed=1), make(seed=2, places=3, stored=torch.float32)
    for index in [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]:
        with one.residency.visit(index, "forward"), other.residency.visit(COUNT - 1 - index, "backward"):
            assert one.right(index) and other.right(COUNT - 1 - index)
    one.close()
    other.step()


# Counting


@FORMS
@pytest.mark.parametrize("places", [1, 2, 3, COUNT])
def test_a_step_reads_exactly_what_was_not_kept(
    make: Callable[..., Streamed], stored: torch.dtype, places: int
) -> None:
    streamed = make(stored=stored, places=places)
    counters = streamed.residency.counters
    streamed.step()
    streamed.step()
    whole = sum(streamed.layer_nbytes(i) for i in range(COUNT))
    kept = sum(streamed.layer_nbytes(i) for i in range(places))
    kept += sum(streamed.layer_nbytes(COUNT - 1 - i) for i in range(places))
    if places > 1:  # a read is counted when it is waited for: let the last one of the step before be over
        streamed.visit(0)
        streamed.visit(*range(1, COUNT))
        streamed.visit(*reversed(range(COUNT)), direction="backward")
    before, visits = counters.bytes_read, counters.visits
    for _ in range(3):
        streamed.step()
    assert counters.bytes_read - before == 3 * (2 * whole - kept)
    assert counters.visits - visits == 3 * 2 * COUNT
    assert counters.bytes_copied == 0, "nothing travels when the device is the CPU"


def test_times_are_counted(make: Callable[..., Streamed]) -> None:
    streamed = make()
    with streamed.residency.visit(0, "forward"):
        time.sleep(0.02)
    assert streamed.residency.counters.compute_s >= 0.02
    assert 0 < streamed.residency.counters.stall_s < 5


def test_one_place_holds_one_layer(make: Callable[..., Streamed]) -> None:
    streamed = make(places=1)
    streamed.step()
    assert streamed.residency.held_nbytes <= streamed.residency.layer_nbytes


@pytest.mark.parametrize("places", [2, 3, COUNT])
def test_no_more_is_held_than_there_are_places(make: Callable[..., Streamed], places: int) -> None:
    streamed = make(places=places)
    for _ in range(3):
        streamed.step()
    assert streamed.residency.held_nbytes <= places * streamed.residency.layer_nbytes


# Tokens


def test_a_token_holds_as_long_as_the_weights_are_in_place(make: Callable[..., Streamed]) -> None:
    streamed = make(places=2)
    residency = streamed.residency
    with residency.visit(3, "forward") as first:
        pass
    with residency.visit(3, "backward") as again:
        assert again == first
    streamed.visit(0, 1, 2)
    with residency.visit(3, "backward") as later:
        assert later != first


def test_equal_tokens_mean_untouched_weights(make: Callable[..., Streamed]) -> None:
    streamed, choice = make(places=3), random.Random(0)
    kept: dict[object, tuple[int, torch.Tensor]] = {}
    for _ in range(300):
        index = choice.randrange(COUNT)
        with streamed.residency.visit(index, "forward") as token:
            if token in kept:
                assert kept[token][0] == index and torch.equal(kept[token][1], streamed.layers[index].matrix)
            kept[token] = (index, streamed.layers[index].matrix)


# The background thread


class GatedFiles(FileMap):
    """Lets a test hold fills back: each begins with read-ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.begun = 0

    def populate(self, ranges: Iterable[FileRange]) -> None:
        self.begun += 1
        assert self.open.wait(20)
        super().populate(ranges)


def idle(streamed: Streamed) -> None:
    """Wait until the background thread has nothing left to do."""
    streamed.residency._worker.submit(lambda: None).result()


@pytest.mark.parametrize("places", [2, 3])
def test_the_layer_that_is_visited_is_never_refilled(make: Callable[..., Streamed], places: int) -> None:
    """With the read-ahead of every visit over before its end: 2,000 visits in any order, tiny layers."""
    streamed, choice = make(places=places, width=2), random.Random(places)
    for _ in range(1000):
        index = choice.randrange(COUNT)
        with streamed.residency.visit(index, choice.choice(["forward", "backward"])):
            assert streamed.right(index)
            idle(streamed)
            assert streamed.right(index)


@FORMS
def test_any_order_without_waiting(make: Callable[..., Streamed], stored: torch.dtype) -> None:
    streamed, choice = make(stored=stored, places=3, width=30), random.Random(0)
    for _ in range(1000):
        index = choice.randrange(COUNT)
        with streamed.residency.visit(index, choice.choice(["forward", "backward"])):
            assert streamed.right(index)
        assert streamed.absent([index])


def test_the_next_layer_is_read_while_this_one_is_visited(make: Callable[..., Streamed]) -> None:
    files = GatedFiles()
    streamed = make(files=files)
    streamed.visit(0)
    idle(streamed)
    files.open.clear()
    before = files.begun
    with streamed.residency.visit(1, "forward"):
        deadline = time.monotonic() + 10
        while files.begun == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert files.begun > before, "2 is being read, and the visit of 1 has not waited for it"
        assert streamed.right(1)
    files.open.set()
    streamed.visit(2)


def test_a_visit_waits_for_its_weights(make: Callable[..., Streamed]) -> None:
    files = GatedFiles()
    streamed = make(files=files)
    files.open.clear()
    threading.Timer(0.1, files.open.set).start()
    streamed.visit(0)
    assert streamed.residency.counters.stall_s > 0.05


def test_close_ends_the_thread(make: Callable[..., Streamed]) -> None:
    before = set(threading.enumerate())
    streamed = make()
    streamed.step()
    assert set(threading.enumerate()) - before
    streamed.close()
    assert not set(threading.enumerate()) - before
    streamed.close()  # once more does no harm


def test_a_residency_that_is_forgotten_ends_its_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    streamed = Streamed(tmp_path)
    streamed.step()
    streamed.reader.close()
    gone = weakref.ref(streamed.residency)
    del streamed
    gc.collect()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None and not set(threading.enumerate()) - before


# Files that change


def test_a_file_that_is_gone_before_it_is_opened_is_an_error_in_the_visit(
    make: Callable[..., Streamed],
) -> None:
    streamed = make()
    streamed.file.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
            streamed.visit(0)
        assert streamed.absent()


def test_a_file_that_is_removed_later_is_read_as_it_was(make: Callable[..., Streamed]) -> None:
    streamed = make()
    streamed.step()
    streamed.file.unlink()
    streamed.step()


def test_a_file_that_shrank_is_an_error_in_the_visit_and_it_recovers(make: Callable[..., Streamed]) -> None:
    streamed = make(stored=torch.float32, map_files=False)
    whole = streamed.file.read_bytes()
    os.truncate(streamed.file, len(whole) // 2)
    with pytest.raises(CheckpointError, match="the file changed after it was opened"):
        streamed.step()
    assert streamed.absent()
    with open(streamed.file, "r+b") as file:
        file.write(whole)
    streamed.step()


# Poison


def test_poison_fills_what_the_next_layer_does_not(make: Callable[..., Streamed]) -> None:
    """Layers grow, so that the slot of a later one has bytes that an earlier one leaves alone."""
    streamed = make(stored=torch.float32, map_files=False, poison=True, places=1)
    streamed.step()
    with streamed.residency.visit(COUNT - 1, "forward"):
        matrix = streamed.layers[COUNT - 1].matrix
        last = streamed.wanted[f"layers.{COUNT - 1}.matrix"]
        assert torch.equal(matrix, last)
    streamed.visit(0)
    late = matrix.flatten()
    assert late[-1].isnan() and not torch.equal(late, last.flatten())


@pytest.mark.parametrize("places", [1, 2, 3])
def test_poison_harms_nobody_in_time(make: Callable[..., Streamed], places: int) -> None:
    streamed = make(poison=True, places=places)
    for _ in range(3):
        streamed.step()


# The mapped file


def resident_file_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile in /proc/self/status")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_layer_that_is_dropped_gives_its_memory_back(make: Callable[..., Streamed]) -> None:
    streamed = make(stored=torch.float32, width=1500, count=6)
    layer_nbytes = streamed.residency.layer_nbytes
    assert layer_nbytes > 8 * 2**20
    before, most = resident_file_nbytes(), 0
    for index in [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]:
        streamed.visit(index)
        most = max(most, resident_file_nbytes() - before)
    assert layer_nbytes < 1.1 * most < 1.1 * 2.2 * layer_nbytes


def test_a_write_to_a_mapped_parameter_never_reaches_the_file(make: Callable[..., Streamed]) -> None:
    streamed = make(stored=torch.float32, width=64)
    before = streamed.file.read_bytes()
    with streamed.residency.visit(0, "forward"):
        streamed.layers[0].matrix.data.zero_()
    streamed.visit(1, 2, 3)
    assert streamed.file.read_bytes() == before


# On an accelerator


@pytest.mark.parametrize(("part_nbytes", "cache_nbytes"), [(64, 0), (256, 700), (2**20, 10**6)])
@pytest.mark.parametrize("places", [1, 2, 3, COUNT])
def test_kernels_see_the_right_weights_on_an_accelerator(
    sim: Simulator,
    make: Callable[..., Streamed],
    monkeypatch: pytest.MonkeyPatch,
    places: int,
    part_nbytes: int,
    cache_nbytes: int,
) -> None:
    """Nothing is awaited until the end: a copy too early or too late is a wrong product, or a race."""
    monkeypatch.setattr(transport, "PART_NBYTES", part_nbytes)
    streamed = make(device="sim", places=places, cache_nbytes=cache_nbytes, poison=True)
    choice, products = random.Random(places), []
    for _ in range(40):
        index = choice.randrange(COUNT)
        with streamed.residency.visit(index, "forward"):
            products.append((index, streamed.layers[index].matrix @ streamed.layers[index].matrix))
        assert streamed.absent([index])
    for index, product in products:
        wanted = streamed.wanted[f"layers.{index}.matrix"]
        assert torch.equal(product.cpu(), wanted @ wanted)


def test_host_memory_keeps_layers_until_it_is_full(sim: Simulator, make: Callable[..., Streamed]) -> None:
    stored = make(device="sim", places=1)
    images = [image.nbytes for image in stored.residency._images]
    streamed = make(device="sim", places=1, cache_nbytes=images[0] + images[1])
    streamed.visit(*range(COUNT))
    counters = streamed.residency.counters
    before, copied = counters.bytes_read, counters.bytes_copied
    streamed.visit(*range(COUNT))
    assert counters.bytes_read - before == sum(streamed.layer_nbytes(i) for i in range(2, COUNT))
    assert counters.bytes_copied - copied == sum(images)


def test_device_memory_is_the_places_and_no_more(sim: Simulator, make: Callable[..., Streamed]) -> None:
    gc.collect()
    start = sim.now()
    streamed = make(device="sim", places=3)
    sim.reset_peak()
    for _ in range(3):
        streamed.step()
    assert sim.peak() - start == streamed.residency.held_nbytes == 3 * streamed.residency.layer_nbytes


@pytest.mark.parametrize("inner", [(2,), (1, 0), (3, 4)])
def test_a_visit_inside_a_visit(make: Callable[..., Streamed], inner: tuple[int, ...]) -> None:
    streamed = make(places=2)
    with streamed.residency.visit(2, "backward"):
        for index in inner:
            streamed.visit(index, direction="backward")
            streamed.residency._worker.submit(lambda: None).result()
        assert streamed.right(2)


def test_a_visit_that_an_interrupt_left_open_is_forgotten_in_any_thread(
    make: Callable[..., Streamed],
) -> None:
    residency = make(places=1).residency

    @contextmanager
    def around() -> Iterator[None]:
        with residency.visit(0, "forward"):
            yield

    left_open = [around()]
    left_open[0].__enter__()
    with residency._lock:
        other = threading.Thread(target=left_open.clear, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), "it waits for the lock"
    with residency.visit(1, "forward"):
        assert set(residency._present) == {1}


def test_a_visit_after_close_is_refused_every_time(make: Callable[..., Streamed]) -> None:
    streamed = make()
    streamed.step()
    streamed.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            streamed.visit(0)


def test_closing_waits_for_copies_in_flight(sim: Simulator, tmp_path: Path) -> None:
    for attempt in range(20):
        streamed = Streamed(tmp_path / str(attempt), device="sim")
        streamed.visit(0)  # the copy of 1 is under way
        streamed.close()
        del streamed
        gc.collect()


def test_training_after_a_visit_in_inference_mode(make: Callable[..., Streamed]) -> None:
    streamed = make()
    with torch.inference_mode():
        streamed.visit(0, 1)
    hidden = torch.randn(2, 5, requires_grad=True)
    with streamed.residency.visit(0, "forward"):
        (hidden @ streamed.layers[0].matrix).sum().backward()


def test_fewer_places_give_memory_back(make: Callable[..., Streamed]) -> None:
    streamed = make(places=4)
    streamed.step()
    streamed.residency.places = 2
    streamed.step()
    assert streamed.residency.held_nbytes <= 2 * streamed.residency.layer_nbytes
