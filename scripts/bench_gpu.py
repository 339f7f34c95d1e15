#!/usr/bin/env python
"""One short run on a machine with a GPU: is it right, does it fit, does it overlap, how fast is it.

    python scripts/bench_gpu.py --json result.json                a 7B-shaped random model, under 4 minutes
    python scripts/bench_gpu.py --device cpu --tiny               the same script on a toy, to try it

Four tables, each on one accelerator:

    correct   loss and every LoRA gradient of a step, against the same model resident on the device: in fp32
              where nothing but the order of sums may differ, and in bf16, whose rounding is shown beside it
              as the distance of the resident model in bf16 from itself in fp32
    memory    the allocator's peak against places for layers + adapter state + what is left (the working set),
              at several batch sizes: the working set must not grow with the batch. Then with a budget, which
              the peak must not pass
    overlap   a step against the larger of its copies alone and its compute alone. Copies alone: visits to all
              layers that compute nothing. Compute alone: a budget in which all layers stay on the device
    speed     tokens per second by tokens per step, from files in the page cache, from host memory, and with
              all layers on the device

Making the checkpoint must not take longer than measuring with it: all its matrices are pieces of one block
of random numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _bench import random_batch, resident_model, streamed_model, table, trained, write_json
from make_checkpoint import MATRIX_STD, initialise_vectors, llama, on_meta
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from airtune.model.stream import Stream, stream_of

if TYPE_CHECKING:
    from peft import PeftModel

Row = dict[str, str]
RANK = 16
STATE_NBYTES = 4 * 4  # of a trained parameter in fp32: itself, its gradient, two moments
# A place for every layer, whatever the device has: the run that copies nothing.
EVERYTHING = "1TB"


@dataclass(frozen=True)
class Sizes:
    """What is run; `layers` of the large model, and of a small one that also runs in fp32."""

    hidden: int
    vocab: int
    layers: int
    small_layers: int
    length: int  # tokens of a row
    rows: tuple[int, ...]  # of a step
    steps: int
    micro_batch_size: int = 1


LARGE = Sizes(hidden=4096, vocab=32768, layers=32, small_layers=4, length=1024, rows=(1, 4, 16), steps=3)
TINY = Sizes(hidden=64, vocab=512, layers=4, small_layers=2, length=16, rows=(1, 4), steps=2)


def write_pieces(folder: Path, config: PreTrainedConfig, device: torch.device) -> None:
    """A bf16 checkpoint, one file a layer, whose matrices begin at different places of one random block."""
    model = on_meta(config)
    initialise_vectors(model)
    tensors = model.state_dict()
    largest = max(tensor.numel() for tensor in tensors.values())
    block = torch.randn(largest + 4096 * len(tensors), device=device).mul_(MATRIX_STD).bfloat16().cpu()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        piece = block[4096 * number :][: tensor.numel()].view(tensor.shape)
        value = piece.clone() if tensor.is_meta else tensor.bfloat16()
        shards.setdefault(".".join(name.split(".")[:3]), {})[name] = value
    files = {key: f"{key}.safetensors" for key in shards}
    for key, shard in shards.items():
        save_file(shard, folder / files[key], metadata={"format": "pt"})
    weight_map = {name: files[key] for key, shard in shards.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)


class Bench:
    """The measurements, on one device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.on_host = device.type == "cpu"

    def synchronize(self) -> None:
        if not self.on_host:
            torch.accelerator.synchronize(self.device)

    def reset_peak(self) -> None:
        gc.collect()
        if not self.on_host:
            self.synchronize()
            torch.accelerator.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return 0 if self.on_host else torch.accelerator.max_memory_allocated(self.device)

    @contextmanager
    def streamed(
        self, folder: Path, places: int | None, **options: Any
    ) -> Iterator[tuple[PeftModel, Stream]]:
        """`places`: for layers; None for what a budget among the options leaves."""
        size = self.sizes.micro_batch_size
        model = streamed_model(folder, RANK, device=self.device, micro_batch_size=size, **options)
        stream = stream_of(model)
        if places is not None:
            stream.places.hold(places)
        try:
            yield model, stream
        finally:
            stream.close()
            del model, stream
            gc.collect()

    def train(self, model: PeftModel, rows: int, steps: int) -> list[float]:
        """Seconds of each step."""
        optimizer = torch.optim.AdamW(trained(model), lr=1e-4)
        times = []
        for seed in range(steps):
            batch = random_batch(model, rows, self.sizes.length, seed)
            self.synchronize()
            started = time.perf_counter()
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return times

    def correct(self, folder: Path) -> list[Row]:
        truth = self._gradients_resident(folder, torch.float32)
        rows = []
        for dtype in (torch.float32, torch.bfloat16):
            resident = truth if dtype == torch.float32 else self._gradients_resident(folder, dtype)
            with self.streamed(folder, 2, dtype=dtype) as (model, _):
                streamed = self._gradients(model, "cpu")
            rows.append(
                {
                    "correct": str(dtype).removeprefix("torch."),
                    "loss": f"{streamed[0]:.5f}",
                    "resident loss": f"{resident[0]:.5f}",
                    "worst gradient": f"{worst(streamed[1], resident[1]):.2e}",
                    "from fp32": f"{worst(streamed[1], truth[1]):.2e}",
                    "resident from fp32": f"{worst(resident[1], truth[1]):.2e}",
                }
            )
        return rows

    def _gradients_resident(self, folder: Path, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
        found = self._gradients(resident_model(folder, RANK, str(self.device), dtype), self.device)
        gc.collect()
        return found

    def _gradients(self, model: PeftModel, home: torch.device | str) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss, and all gradients, of a step in which both halves of the adapter matter."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
        batch = random_batch(model, 2, self.sizes.length, seed=0)
        loss = model(**{k: v.to(home) for k, v in batch.items()}, use_cache=False).loss
        loss.backward()
        found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        return loss.item(), found

    def memory(self, folder: Path) -> list[Row]:
        rows, largest = [], 0
        with self.streamed(folder, 2) as (model, stream):
            for batch_rows in self.sizes.rows:
                self.reset_peak()
                self.train(model, batch_rows, 2)
                largest = max(largest, self.peak())
                rows.append(self._memory_row("two places", batch_rows, model, stream))
        if self.on_host:
            return rows
        budget = largest * 3 // 2
        with self.streamed(folder, None, device_memory=budget) as (model, stream):
            self.reset_peak()
            self.train(model, self.sizes.rows[-1], 3)
            rows.append(self._memory_row(f"{budget / 1e6:.0f} MB", self.sizes.rows[-1], model, stream))
        return rows

    def _memory_row(self, budget: str, rows: int, model: PeftModel, stream: Stream) -> Row:
        places = 0 if self.on_host else stream._residency.held_nbytes
        state = 0 if self.on_host else STATE_NBYTES * sum(p.numel() for p in trained(model))
        return {
            "memory": budget,
            "tokens/step": str(rows * self.sizes.length),
            "peak MB": f"{self.peak() / 1e6:.0f}",
            "places MB": f"{places / 1e6:.0f}",
            "adapter state MB": f"{state / 1e6:.0f}",
            "working set MB": f"{(self.peak() - places - state) / 1e6:.0f}",
        }

    def overlap_and_speed(self, folder: Path) -> tuple[list[Row], list[Row]]:
        """Every batch size from files, from host memory, and with all layers on the device."""
        steps: dict[str, dict[int, float]] = {}
        copies: dict[str, float] = {}
        ram = {} if self.on_host else {"host_memory": EVERYTHING}
        everything = {"host_memory" if self.on_host else "device_memory": EVERYTHING}
        for name, places, options in (
            ("from files", 2, {}),
            ("from host memory", 2, ram),
            ("all on the device", None, everything),
        ):
            with self.streamed(folder, places, **options) as (model, stream):
                self.train(model, self.sizes.rows[0], 2)  # caches fill, and the order of visits is learned
                if places is not None:
                    copies[name] = min(self.visit_all(stream, self.sizes.layers) for _ in range(2))
                steps[name] = {
                    rows: min(self.train(model, rows, self.sizes.steps)) for rows in self.sizes.rows
                }
        overlap = [
            self._overlap_row(name, rows, copies[name], steps["all on the device"][rows], steps[name][rows])
            for name in copies
            for rows in self.sizes.rows
        ]
        return overlap, [self._speed_row(rows, steps) for rows in self.sizes.rows]

    def visit_all(self, stream: Stream, count: int) -> float:
        """Seconds of the copies of a step: all layers visited, forward and backward, and nothing computed."""
        self.synchronize()
        started = time.perf_counter()
        for index in range(count):
            with stream.visit(index, "forward"):
                pass
        for index in reversed(range(count)):
            with stream.visit(index, "backward"):
                pass
        self.synchronize()
        return time.perf_counter() - started

    def _overlap_row(self, name: str, rows: int, copy_s: float, compute_s: float, step_s: float) -> Row:
        return {
            "overlap": name,
            "tokens/step": str(rows * self.sizes.length),
            "copies s": f"{copy_s:.3f}",
            "compute s": f"{compute_s:.3f}",
            "step s": f"{step_s:.3f}",
            "step / max": f"{step_s / max(copy_s, compute_s):.3f}",
        }

    def _speed_row(self, rows: int, steps: Mapping[str, Mapping[int, float]]) -> Row:
        tokens = rows * self.sizes.length
        return {
            "tokens/s, tokens/step": str(tokens),
            **{name: f"{tokens / times[rows]:.0f}" for name, times in steps.items()},
        }


def worst(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """The largest |got - want| / |want| of all tensors."""
    if got.keys() != want.keys():
        sys.exit(f"bench_gpu: gradients of different parameters: {sorted(got.keys() ^ want.keys())[:4]}")
    return max(((got[n] - w).norm() / w.norm()).item() for n, w in want.items())


def run(bench: Bench, folder: Path) -> dict[str, list[Row]]:
    """All tables, printed as they come."""
    sizes, tables = bench.sizes, {}
    started = time.perf_counter()

    def show(name: str, rows: list[Row]) -> None:
        tables[name] = rows
        sys.stdout.write(f"{table(rows)}  ({time.perf_counter() - started:.0f} s)\n")
        sys.stdout.flush()

    small, large = folder / "small", folder / "large"
    for path, layers in ((small, sizes.small_layers), (large, sizes.layers)):
        path.mkdir()
        write_pieces(path, llama(sizes.hidden, layers, sizes.vocab), bench.device)
    sys.stdout.write(f"checkpoints written ({time.perf_counter() - started:.0f} s)\n")
    show("correct", bench.correct(small))
    show("memory", bench.memory(large))
    overlap, speed = bench.overlap_and_speed(large)
    show("overlap", overlap)
    show("speed", speed)
    return tables


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Correctness, memory, overlap and speed on an accelerator.")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a toy's sizes, to try the script")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints go for the time of the run (15 GB)"
    )
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args(argv)
    bench = Bench(torch.device(asked.device), TINY if asked.tiny else LARGE)
    with tempfile.TemporaryDirectory(prefix="airtune-bench-", dir=asked.folder) as folder:
        write_json(asked.json, run(bench, Path(folder)))


if __name__ == "__main__":
    main()
