"""Rows of a table that lies in files are its rows, and nothing but them is touched."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from airtune.weights import tables
from airtune.weights.checkpoint import Checkpoint, StoredTensor
from airtune.weights.file_map import FileMap
from airtune.weights.header import read_header
from airtune.weights.lazy import LazyTensor
from airtune.weights.pieces import Piece
from airtune.weights.plans import Conversion, TensorPlan
from airtune.weights.tables import Table, can_be_table
from tests.sim import Simulator
from tests.sparse import write_sparse

SHARDS = [[9], [4, 5], [1, 6, 0, 2], [3, 3, 3]]  # rows
IDS = [torch.tensor(ids) for ids in (3, [0], [], [8, 8, 0], [[4, 3], [5, 0], [8, 1]], [[[0, 8, 4, 4]]])]
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


def plan_of(shards: list[StoredTensor], dtype: torch.dtype) -> TensorPlan:
    """A table that is stored in these tensors, one after another."""
    pieces, into = [], 0
    for stored in shards:
        pieces.append(Piece(stored, 0, stored.nbytes, into))
        into += stored.nbytes
    shape = (sum(stored.shape[0] for stored in shards), *shards[0].shape[1:])
    conversion = Conversion("table", tuple((f"shard_{i}", "shard_*", s) for i, s in enumerate(shards)), None)
    return TensorPlan("table", dtype, shape, conversion, "table", tuple(pieces[::-1]))


def table_of(plan: TensorPlan) -> Table:
    return Table.of(plan, FileMap(), FileMap(scattered=True))


def stored_table(
    folder: Path, rows: list[int], stored: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Table]:
    """A table of 9 rows as it should be, and one over its shards, which lie in two files."""
    whole = torch.randn(sum(rows), 5, generator=torch.Generator().manual_seed(1)).to(stored)
    parts = {f"shard_{i}": part.clone() for i, part in enumerate(whole.split(rows))}
    names = list(parts)
    for file, own in (("model-a.safetensors", names[::2]), ("model-b.safetensors", names[1::2])):
        if own:
            save_file({"before": torch.zeros(1), **{name: parts[name] for name in own}}, folder / file)
    where = {
        name: read_header(file)[name]
        for file in folder.iterdir()
        for name in read_header(file)
        if name in parts
    }
    return whole.to(dtype), table_of(plan_of([where[name] for name in names], dtype))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("rows", SHARDS, ids=str)
def test_lookups(tmp_path: Path, rows: list[int], pair: tuple[torch.dtype, torch.dtype]) -> None:
    whole, table = stored_table(tmp_path, rows, *pair)
    lazy = LazyTensor(table)
    for ids in IDS:
        ids = ids.long()
        for dtype in (torch.int64, torch.int32):
            assert torch.equal(F.embedding(ids.to(dtype), lazy, padding_idx=0), F.embedding(ids, whole))
        assert torch.equal(lazy[ids], whole[ids])
        assert torch.equal(lazy[ids - 9], whole[ids])
    assert torch.equal(lazy.index_select(0, IDS[3]), whole[IDS[3]])
    with torch.inference_mode():
        assert torch.equal(F.embedding(IDS[4], lazy), whole[IDS[4]])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_is_no_list_of_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    whole, table = stored_table(tmp_path, [4, 5], torch.bfloat16, torch.float32)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 1], dtype=dtype)
    assert torch.equal(LazyTensor(table)[mask], whole[mask])


@pytest.mark.parametrize("rows", SHARDS, ids=str)
def test_rows_in_a_row(tmp_path: Path, rows: list[int]) -> None:
    whole, table = stored_table(tmp_path, rows, torch.bfloat16, torch.float32)
    lazy = LazyTensor(table)
    for part in (
        slice(0, 9),
        slice(None),
        slice(3, 5),
        slice(4),
        slice(-2, None),
        slice(0, 9, 2),
        slice(5, 5),
    ):
        assert torch.equal(lazy[part] + 0, whole[part])
    assert torch.equal(lazy[7] + 0, whole[7]) and torch.equal(lazy[-1] + 0, whole[-1])
    assert torch.equal(lazy[2:8][IDS[3] % 6], whole[2:8][IDS[3] % 6])
    assert torch.equal(lazy.T @ whole, whole.T @ whole)


def test_a_table_on_an_accelerator_is_on_the_host(sim: Simulator, tmp_path: Path) -> None:
    whole, table = stored_table(tmp_path, [4, 5], torch.bfloat16, torch.float32)
    before = torch.accelerator.memory_allocated()
    rows = F.embedding(IDS[4].to("sim"), LazyTensor(table))
    assert rows.device.type == "sim" and torch.equal(rows.cpu(), whole[IDS[4]])
    assert LazyTensor(table).device.type == "cpu"
    del rows
    assert torch.accelerator.memory_allocated() == before


@pytest.mark.parametrize("ids", [[9], [0, 12], [-1, 3]])
def test_no_such_row(tmp_path: Path, ids: list[int]) -> None:
    _, table = stored_table(tmp_path, [4, 5], torch.float32, torch.float32)
    with pytest.raises(IndexError, match=r"table has rows 0 to 8, and .* were looked up"):
        F.embedding(torch.tensor(ids), LazyTensor(table))


def test_rows_are_not_written_to(tmp_path: Path) -> None:
    _, table = stored_table(tmp_path, [4, 5], torch.float32, torch.float32)
    with pytest.raises(RuntimeError, match="would write to a streamed weight"):
        F.embedding(torch.tensor([1]), LazyTensor(table), max_norm=0.1)


def test_all_rows_at_once_need_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, table = stored_table(tmp_path, [4, 5], torch.bfloat16, torch.float32)
    monkeypatch.setattr(tables, "available_memory_nbytes", lambda: 100)
    with pytest.raises(
        ValueError, match=r"9 rows of table at once, 180 bytes, and 100 bytes of memory are available"
    ):
        LazyTensor(table) * 2
    assert len(LazyTensor(table)[:5] * 2) == 5


def test_rows_that_are_cut_or_not_aligned(tmp_path: Path) -> None:
    stored = StoredTensor(tmp_path / "x", 8, 40, torch.float32, (2, 5))
    assert can_be_table(plan_of([stored, stored], torch.float32))
    odd = StoredTensor(tmp_path / "x", 6, 40, torch.float32, (2, 5))
    assert not can_be_table(plan_of([odd], torch.float32))
    cut = plan_of([stored], torch.float32)
    halves = (Piece(stored, 0, 12, 0), Piece(stored, 12, 28, 12))
    assert not can_be_table(TensorPlan("table", cut.dtype, cut.shape, cut.conversion, "table", halves))


def test_a_table_of_20_gb(tmp_path: Path) -> None:
    """Larger than memory may be, in one file: it is there at once, and of a lookup only its pages come in."""
    rows, width = 4_000_000, 640
    shapes = {f"shard_{i}": (torch.bfloat16, (rows, width)) for i in range(4)}
    write_sparse(tmp_path / "model.safetensors", shapes)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.nbytes > 20e9
    started, before = time.perf_counter(), resident_nbytes()
    plan = plan_of([checkpoint[name] for name in shapes], torch.float32)
    table = table_of(plan)
    ids = torch.randint(0, 4 * rows, (4096,), generator=torch.Generator().manual_seed(0))
    assert table.rows(ids).shape == (4096, width)
    assert time.perf_counter() - started < 5  # 0.1 s by itself
    # Each row may lie in two pages; those next to them are not read. The result and its copies are 31 MB.
    assert resident_nbytes() - before < 4096 * 2 * mmap.PAGESIZE + 40e6
    assert pages_in_memory(checkpoint["shard_1"]) < 2 * 4096
    table.release()
    assert resident_nbytes() - before < 40e6


def test_rows_one_at_a_time(tmp_path: Path) -> None:
    """As while tokens are generated: the kernel does not read around each of them either."""
    write_sparse(tmp_path / "model.safetensors", {"shard_0": (torch.bfloat16, (4_000_000, 640))})
    stored = Checkpoint.open(tmp_path)["shard_0"]
    table = table_of(plan_of([stored], torch.bfloat16))
    for number in torch.randint(0, 4_000_000, (64,), generator=torch.Generator().manual_seed(0)):
        table.rows(number)
    assert 64 <= pages_in_memory(stored) <= 2 * 64


def resident_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def pages_in_memory(stored: StoredTensor) -> int:
    """Pages of the file, among those of the tensor, that were read."""
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    tensor = FileMap().tensor(stored)
    address = tensor.data_ptr()
    begin = address - address % mmap.PAGESIZE
    count = -(-(address + stored.nbytes - begin) // mmap.PAGESIZE)
    present = ctypes.create_string_buffer(count)
    assert libc.mincore(begin, count * mmap.PAGESIZE, present) == 0
    return present.raw[:count].count(1)
