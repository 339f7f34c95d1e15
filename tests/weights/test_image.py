"""Images: where tensors lie in a layer's buffer, what is a view of the file instead, what filling writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from airtune.model.skeleton import build_skeleton
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.file_map import FileMap
from airtune.weights.image import (
    Filling,
    LayerImage,
    can_be_mapped,
    is_one_view,
    load_tensor,
    view_stored,
)
from airtune.weights.layout import plan_weights
from airtune.weights.lazy import LazyTensor
from airtune.weights.packed.schemes import take_scheme
from airtune.weights.pieces import Piece
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.reader import ByteReader
from tests import packed, zoo

GARBAGE = 171
SHAPES = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 4), "e": (2, 1, 9), "f": (33, 31)}


def plan(
    name: str,
    stored: Checkpoint,
    dtype: torch.dtype,
    *,
    rows: slice | None = None,
    shape: tuple[int, ...] = (),
) -> TensorPlan:
    """A plain copy of the stored tensor of that name, or of some of its rows, as `dtype`."""
    source = stored[name]
    shape = shape or source.shape
    row_nbytes = source.nbytes // source.shape[0] if rows else 0
    first, last = (rows.start * row_nbytes, rows.stop * row_nbytes) if rows else (0, source.nbytes)
    conversion = Conversion(name, ((name, name, source),), None)
    return TensorPlan(name, dtype, shape, conversion, name, (Piece(source, first, last - first, 0),))


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


def fill(image: LayerImage, *, spare: int = 0) -> torch.Tensor:
    buffer = torch.full((image.nbytes + spare,), GARBAGE, dtype=torch.uint8)
    with ByteReader(threads=2) as reader:
        image.fill(buffer, reader, FileMap())
    return buffer


def assert_holds(image: LayerImage, buffer: torch.Tensor, wanted: Mapping[str, torch.Tensor]) -> None:
    assert {region.plan.name for region in image.packed} == wanted.keys()
    for region in image.packed:
        got, want = region.view(buffer), wanted[region.plan.name]
        assert got.dtype == want.dtype and torch.equal(got, want), region.plan.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_filling_writes_every_tensor_and_nothing_else(
    saved: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = Checkpoint.open(tmp_path)
    image = LayerImage.of([plan(name, stored, dtype) for name in SHAPES], map_files=False)
    buffer = fill(image, spare=100)
    assert_holds(image, buffer, {name: tensor.to(dtype) for name, tensor in saved.items()})
    written = torch.zeros(len(buffer), dtype=torch.bool)
    for region in image.packed:
        written[region.offset : region.offset + region.plan.nbytes] = True
    assert buffer[~written].eq(GARBAGE).all()


def test_sizes_are_those_of_the_file_and_of_the_buffer(
    saved: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = Checkpoint.open(tmp_path)
    plans = [plan(name, stored, torch.bfloat16 if name in "af" else torch.float32) for name in "acef"]
    sizes = {name: math.prod(SHAPES[name]) for name in "acef"}
    mapped = LayerImage.of(plans, map_files=True)
    assert mapped.mapped_nbytes == 4 * (sizes["c"] + sizes["e"])
    assert mapped.read_nbytes == 4 * (sizes["a"] + sizes["f"])
    packed = LayerImage.of(plans, map_files=False)
    assert (packed.mapped_nbytes, packed.read_nbytes) == (0, 4 * sum(sizes.values()))


def test_only_what_the_file_holds_as_it_is_computed_with_is_mapped(
    saved: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = Checkpoint.open(tmp_path)
    plans = [
        plan("a", stored, torch.float32),
        plan("f", stored, torch.bfloat16),
        plan("d", stored, torch.float32),
    ]
    image = LayerImage.of(plans, map_files=True)
    assert [p.name for p in image.mapped] == ["a"]
    assert [region.plan.name for region in image.packed] == ["f", "d"], "a cast, and nothing at all"
    assert image.mapped_ranges() == [stored["a"]]
    files = FileMap()
    view = view_stored(image.mapped[0], files)
    assert view.data_ptr() == files.tensor(stored["a"]).data_ptr() and torch.equal(view, saved["a"])
    assert LayerImage.of(plans, map_files=False).mapped == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_rows_of_a_stored_tensor(
    saved: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    rows = plan("f", Checkpoint.open(tmp_path), dtype, rows=slice(4, 9), shape=(5, 31))
    assert is_one_view(rows) and can_be_mapped(rows) == (dtype == torch.float32)
    assert torch.equal(view_stored(rows, FileMap()), saved["f"][4:9])
    with ByteReader(threads=1) as reader:
        assert torch.equal(load_tensor(rows, reader, FileMap()), saved["f"][4:9].to(dtype))


def test_a_tensor_that_is_not_aligned_in_the_file_is_read(tmp_path: Path) -> None:
    """Old writers did not pad their headers."""
    values = torch.randn(6)
    header = b'{"w":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}'
    header += b" " * (-(len(header) + 8) % 8 + 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    unaligned = plan("w", Checkpoint.open(tmp_path), torch.float32)
    assert unaligned.conversion.sources[0][2].offset % 4 and not is_one_view(unaligned)
    image = LayerImage.of([unaligned], map_files=True)
    assert image.mapped == ()
    assert_holds(image, fill(image), {"w": values})


# In parts


def splits(nbytes: int, step: int) -> Iterable[tuple[int, int]]:
    return ((start, min(start + step, nbytes)) for start in range(0, nbytes, step))


@pytest.mark.parametrize("step", [64, 128, 448, 4096, 2**20])
@pytest.mark.parametrize("name", ["mixtral", "kimi_k25", "gpt_oss"])
def test_parts_make_the_whole(tmp_path: Path, name: str, step: int) -> None:
    """A buffer of one part, reused: reads, casts, stacked experts, converted tensors across borders."""
    folder = zoo.make(name, tmp_path, torch.bfloat16)
    model = build_skeleton(
        folder, dtype=None, stored_dtype=torch.bfloat16, attn_implementation=None, trust_remote_code=False
    )
    plans = plan_weights(model, Checkpoint.open(folder))
    some = [p for n, p in plans.items() if ".layers.1." in n or ".layers.0.attn" in n]
    # Converted ones in two dtypes; and as fp32, so that pieces are cast.
    image = LayerImage.of(
        [
            TensorPlan(p.name, torch.float32, p.shape, p.conversion, p.output, p.pieces) if i % 2 else p
            for i, p in enumerate(some)
        ],
        map_files=False,
    )
    assert {region.plan.lands for region in image.packed} == {True, False}
    whole, joined = fill(image), torch.full((image.nbytes,), GARBAGE, dtype=torch.uint8)
    host = torch.empty(step, dtype=torch.uint8)
    with ByteReader(threads=2) as reader:
        filling = Filling(image, reader, FileMap())
        for start, stop in splits(image.nbytes, step):
            host.fill_(GARBAGE)
            filling.write(host, start, stop)
            joined[start:stop] = host[: stop - start]
    assert torch.equal(joined, whole)


def test_a_conversion_with_several_results_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.make("kimi_k25", tmp_path)
    model = build_skeleton(
        folder, dtype=None, stored_dtype=torch.float32, attn_implementation=None, trust_remote_code=False
    )
    converted = [p for p in plan_weights(model, Checkpoint.open(folder)).values() if p.pieces is None]
    calls: list[str] = []
    convert = Conversion.convert

    def counted(self: Conversion, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append(self.target)
        return convert(self, tensors)

    monkeypatch.setattr(Conversion, "convert", counted)
    image = LayerImage.of(converted, map_files=True)
    with ByteReader(threads=1) as reader:
        filling = Filling(image, reader, FileMap())
        filling.write(torch.empty(image.nbytes, dtype=torch.uint8), 0, image.nbytes)
    assert not any(filling._converted.values()), "a result is kept until its turn, and no longer"
    assert sorted(calls) == sorted({p.conversion.target for p in converted}) and len(calls) < len(converted)
    sources = {key: stored for p in converted for key, _, stored in p.conversion.sources}
    assert image.read_nbytes == sum(stored.nbytes for stored in sources.values())


# Packed tensors


def packed_layer(tmp_path: Path) -> list[TensorPlan]:
    folder = packed.make("fp8 experts", tmp_path)
    model = build_skeleton(
        folder, dtype=None, stored_dtype=torch.float32, attn_implementation=None, trust_remote_code=False
    )
    plans = plan_weights(model, Checkpoint.open(folder), take_scheme(model))
    return [plan for name, plan in plans.items() if ".layers.1." in name]


def decoded(plans: Iterable[TensorPlan]) -> dict[str, torch.Tensor]:
    with ByteReader(threads=1) as reader:
        return {plan.name: load_tensor(plan, reader, FileMap()) for plan in plans}


def real(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel gets."""
    return tensor + 0


def test_a_packed_tensor_lies_in_the_image_as_in_the_file(tmp_path: Path) -> None:
    plans = packed_layer(tmp_path)
    image, wanted = LayerImage.of(plans, map_files=False), decoded(plans)
    buffer = fill(image)
    for region in image.packed:
        view = region.view(buffer)
        assert isinstance(view, LazyTensor) == region.plan.packed
        assert torch.equal(real(view), wanted[region.plan.name])
        assert view.dtype == wanted[region.plan.name].dtype
    sources = {s.offset: s for plan in plans for _, s in plan.conversion.travels()}
    assert image.read_nbytes == sum(source.nbytes for source in sources.values())
    dense = sum(tensor.nbytes for tensor in wanted.values())
    assert image.read_nbytes <= image.nbytes < image.read_nbytes + 64 * len(sources) < dense / 2


def test_regions_are_aligned_and_apart(tmp_path: Path) -> None:
    plans = packed_layer(tmp_path)
    image = LayerImage.of(plans, map_files=False)
    places = [(p.offset, p.offset + p.tensor.nbytes) for region in image.packed for p in region.parts]
    assert len(places) > len(image.packed)
    places += [(r.offset, r.offset + r.nbytes) for r in image.packed if not r.plan.packed]
    places.sort()
    assert all(start % 64 == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert places[-1][1] <= image.nbytes


@pytest.mark.parametrize("step", [64, 448, 2**20])
def test_parts_of_packed_tensors_make_the_whole(tmp_path: Path, step: int) -> None:
    plans = packed_layer(tmp_path)
    image = LayerImage.of(plans, map_files=False)
    whole, joined = fill(image), torch.full((image.nbytes,), GARBAGE, dtype=torch.uint8)
    with ByteReader(threads=2) as reader:
        filling = Filling(image, reader, FileMap())
        for start, stop in splits(image.nbytes, step):
            filling.write(joined[start:stop], start, stop)
    assert torch.equal(joined, whole)


def test_a_packed_tensor_is_mapped_as_it_is_stored(tmp_path: Path) -> None:
    plans = packed_layer(tmp_path)
    image, files = LayerImage.of(plans, map_files=True), FileMap()
    assert image.packed == () and image.nbytes == 0
    sources = {s.offset: s for plan in plans for _, s in plan.conversion.travels()}
    assert sorted(s.offset for s in image.mapped_ranges()) == sorted(sources)
    assert image.mapped_nbytes == sum(source.nbytes for source in sources.values())
    wanted = decoded(plans)
    assert all(torch.equal(real(view_stored(p, files)), wanted[p.name]) for p in image.mapped)


def test_what_is_decoded_is_what_the_bytes_are_then(tmp_path: Path) -> None:
    """Nothing is kept: the place may hold another layer the next time."""
    plans = packed_layer(tmp_path)
    image = LayerImage.of([plan for plan in plans if plan.packed][:1], map_files=False)
    buffer = fill(image)
    view = image.packed[0].view(buffer)
    assert real(view).abs().sum() > 0
    buffer.zero_()
    assert real(view).abs().sum() == 0


def test_an_image_of_nothing() -> None:
    image = LayerImage.of([], map_files=False)
    assert (image.nbytes, image.read_nbytes, image.mapped_nbytes) == (0, 0, 0)
    assert len(fill(image)) == 0
