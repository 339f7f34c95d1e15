#!/usr/bin/env python
"""How much of the reading hides behind the computing, when the disk is as slow as one likes.

    python scripts/bench_overlap.py                               a random 0.12B model on the CPU
    python scripts/bench_overlap.py --ratios 1 --rows 8 --json result.json

A step can take no less than the larger of the time that its bytes need and the time that its layers compute.
Here the disk is made: the reader delivers n bytes after n / rate seconds, asleep in between, so that the CPU
computes meanwhile. Steps without and with the brake take turns. The one without says how long the layers
compute (its own time less what it waited for weights), and from its bytes comes the rate at which reading
takes 0.5, 1 or 2 times as long.

The last column is a second floor, beneath which two places for layers cannot go: only one layer is read
while one computes, so the forward pass, half the work of the backward pass for the same bytes, waits for the
disk while the backward pass leaves it idle, and at the two turns of a step nothing is left to read:

    sum over visits of max(compute of the visit, reading of the layer after it)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

# OpenMP reads it when torch loads; see `_bench.environment`.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
from _bench import checkpoint, random_batch, streamed_model, table, trained, write_json

from airtune.model import assembly
from airtune.model.stream import stream_of
from airtune.weights.reader import ByteRange, ByteReader

if TYPE_CHECKING:
    from peft import PeftModel

    from airtune.model.stream import Stream, Visit

PLACES = 2


class SlowReader(ByteReader):
    """A reader for which `nbytes` take `nbytes / rate` seconds, or as long as they do where that is more.

    Attributes:
        rate: bytes a second, of all readers; None without a limit.
    """

    rate: float | None = None

    def read_into(self, ranges: Sequence[ByteRange], buffer: torch.Tensor | memoryview) -> None:
        due_s = time.perf_counter()
        if self.rate is not None:
            due_s += sum(piece.nbytes for piece in ranges) / self.rate
        super().read_into(ranges, buffer)
        if (left_s := due_s - time.perf_counter()) > 0:
            time.sleep(left_s)


@dataclass
class Step:
    """One training step, seen from outside."""

    step_s: float = 0.0
    stall_s: float = 0.0
    bytes_read: float = 0.0
    visits: list[tuple[str, int]] = field(default_factory=list)
    windows_s: list[float] = field(default_factory=list)  # from visit to visit, waits for weights left out

    @property
    def compute_s(self) -> float:
        return self.step_s - self.stall_s

    def floor_s(self, layer_s: float) -> float:
        """The least time of a step in which each layer takes `layer_s` to read, with two places."""
        count = 1 + max(index for _, index in self.visits)
        floor = self.compute_s - sum(self.windows_s)
        for (_, index), window_s in zip(self.visits, self.windows_s, strict=True):
            reads = 0 < index < count - 1  # at the turns, both layers that come next are there
            floor += max(window_s, layer_s) if reads else window_s
        return floor


class Trainer:
    """Trains a streamed model step by step and takes the times."""

    def __init__(self, model: PeftModel, stream: Stream, rows: int, length: int) -> None:
        self._model, self._stream = model, stream
        self._batch = random_batch(model, rows, length, seed=0)
        self._optimizer = torch.optim.AdamW(trained(model), lr=1e-4)
        self._marks: list[tuple[str, int, float, float]] = []
        stream.observers.append(self._mark)

    def step(self, rate: float | None) -> Step:
        """A step at a reading rate in bytes a second."""
        SlowReader.rate = rate
        self._marks.clear()
        before, started = self._stream.counters(), time.perf_counter()
        self._model(**self._batch, use_cache=False).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        ended, after = time.perf_counter(), self._stream.counters()
        done = Step(
            ended - started,
            after["stall_s"] - before["stall_s"],
            after["bytes_read"] - before["bytes_read"],
        )
        ends = [*self._marks[1:], ("", 0, ended, after["stall_s"])]
        for (direction, index, begin_s, stalled_s), (_, _, end_s, stalled_then_s) in zip(
            self._marks, ends, strict=True
        ):
            done.visits.append((direction, index))
            done.windows_s.append(end_s - begin_s - (stalled_then_s - stalled_s))
        return done

    def _mark(self, visit: Visit) -> None:
        stalled_s = self._stream.counters()["stall_s"]
        self._marks.append((visit.direction, visit.index, time.perf_counter(), stalled_s))


@dataclass(frozen=True)
class Pair:
    """A step with the brake, and the one without it that came before."""

    free: Step
    braked: Step
    rate: float

    @property
    def read_s(self) -> float:
        return self.braked.bytes_read / self.rate

    @property
    def over_larger(self) -> float:
        return self.braked.step_s / max(self.read_s, self.free.compute_s)

    @property
    def over_floor(self) -> float:
        layers_read = sum(0 < index < len(self.free.visits) // 2 - 1 for _, index in self.free.visits)
        return self.braked.step_s / self.free.floor_s(self.read_s / layers_read)


def measure(trainer: Trainer, ratio: float, steps: int) -> list[Pair]:
    """Pairs of steps, with reading `ratio` times as long as computing."""
    pairs = []
    for _ in range(steps):
        free = trainer.step(None)
        rate = free.bytes_read / (ratio * free.compute_s)
        pairs.append(Pair(free, trainer.step(rate), rate))
        sys.stderr.write(f"{ratio}: {pairs[-1].over_larger:.3f}\n")
    return pairs


def line(ratio: float, pairs: Sequence[Pair]) -> dict[str, str]:
    """A line of the table: medians over the pairs."""

    def middle(values: Sequence[float], form: str) -> str:
        return format(median(values), form)

    return {
        "IO:compute": str(ratio),
        "GB/s": middle([pair.rate / 1e9 for pair in pairs], ".3f"),
        "IO s": middle([pair.read_s for pair in pairs], ".2f"),
        "compute s": middle([pair.free.compute_s for pair in pairs], ".2f"),
        "step s": middle([pair.braked.step_s for pair in pairs], ".2f"),
        "stall": middle([pair.braked.stall_s / pair.braked.step_s for pair in pairs], ".1%"),
        "step / max(IO, compute)": middle([pair.over_larger for pair in pairs], ".3f"),
        "step / floor of two places": middle([pair.over_floor for pair in pairs], ".3f"),
    }


def load(folder: Path, asked: argparse.Namespace) -> Any:
    with mock.patch.object(assembly, "ByteReader", SlowReader):
        return streamed_model(
            folder,
            asked.rank,
            device="cpu",
            micro_batch_size=asked.micro_batch_size,
            file_access="buffered",
        )


def run(folder: Path, asked: argparse.Namespace) -> None:
    model = load(folder, asked)
    trainer = Trainer(model, stream_of(model), asked.rows, asked.seq)
    for _ in range(2):  # the order of the visits is known then
        trainer.step(None)
    measured = {ratio: measure(trainer, ratio, asked.steps) for ratio in asked.ratios}
    sys.stdout.write(table([line(ratio, pairs) for ratio, pairs in measured.items()]))
    kept = {ratio: [asdict(pair) for pair in pairs] for ratio, pairs in measured.items()}
    write_json(asked.json, {"options": {k: str(v) for k, v in vars(asked).items()}, "ratios": kept})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Step time against the larger of reading and computing.")
    parser.add_argument("--checkpoint", type=Path, help="(default: a random one)")
    parser.add_argument("--kind", default="qwen3_5", help="of the random model (default: %(default)s)")
    parser.add_argument("--params", default="0.12B", help="of the random model (default: %(default)s)")
    parser.add_argument("--hidden", default="512", help="of the random model (default: %(default)s)")
    parser.add_argument("--vocab", default="2048", help="of the random model (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="IO:compute")
    parser.add_argument("--rows", type=int, default=2, help="of a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="rows at once (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args(argv)
    torch.set_num_threads(asked.threads)
    options = (
        "--kind",
        asked.kind,
        "--params",
        asked.params,
        "--vocab",
        asked.vocab,
        "--hidden",
        asked.hidden,
    )
    with checkpoint(asked.checkpoint, *options) as folder:
        run(folder, asked)


if __name__ == "__main__":
    main()
