#!/usr/bin/env python
"""How much of the reading hides behind the computing, when the disk is as slow as one likes.

    python scripts/bench_overlap.py                               a random 0.12B model on the CPU
    python scripts/bench_overlap.py --ratios 1 --rows 8 --json result.json
    python scripts/bench_overlap.py --places 2 5 8                one in five layers stays, one in three

A step can take no less than the larger of the time that its bytes need and the time that its layers compute.
Here the disk is made: the reader delivers n bytes after n / rate seconds, asleep in between, so that the CPU
computes meanwhile. Steps without and with the brake take turns. The one without says how long the layers
compute (its own time less what it waited for weights), and from its bytes comes the rate at which reading
every layer twice, as a step does that keeps none, takes 0.5, 1 or 2 times as long as that.

Near 1 no schedule reaches the larger of the two. The forward pass reads as many bytes as the backward pass
and computes half as long or less, so that it waits for the disk while the backward pass leaves the disk
idle; and what is read then has nowhere to be but in a place that holds a layer which is needed sooner. With
all layers alike, and the backward pass twice the forward pass, that is IO / 2 + compute * 2 / 3, or 1.17 of
either where they are equal. More places help in the one way that is left, by reading less: what stays is
needed first at the next turn. The last column is the least that P places allow, by this account:

    a layer is read as soon as the one that was there P layers before has been computed with and the read
    before it is done; at the two turns of a step the P layers that come next are there
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

    def floor_s(self, layer_s: float, places: int) -> float:
        """The least time of a step in which each layer takes `layer_s` to read into one of `places`."""
        count = len(self.visits) // 2
        done_s: list[float] = []  # when each visit ends
        now_s = read_s = 0.0
        for visit, window_s in enumerate(self.windows_s):
            if visit % count >= places:  # it is not one of those that were there at the turn
                read_s = max(read_s, done_s[visit - places]) + layer_s
                now_s = max(now_s, read_s)
            now_s += window_s
            done_s.append(now_s)
        return now_s + self.compute_s - sum(self.windows_s)


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
    """A step with the brake, and the one without it that came before.

    Args:
        rate: of the brake, in bytes a second.
        places: layers that are in memory at once.
    """

    free: Step
    braked: Step
    rate: float
    places: int

    @property
    def read_s(self) -> float:
        return self.braked.bytes_read / self.rate

    @property
    def over_larger(self) -> float:
        return self.braked.step_s / max(self.read_s, self.free.compute_s)

    @property
    def over_floor(self) -> float:
        layers_read = len(self.free.visits) - 2 * self.places
        return self.braked.step_s / self.free.floor_s(self.read_s / layers_read, self.places)


def measure(trainer: Trainer, ratio: float, places: int, steps: int) -> list[Pair]:
    """Pairs of steps, with reading everything twice `ratio` times as long as computing."""
    pairs = []
    for _ in range(steps):
        free = trainer.step(None)
        visits = len(free.visits)
        twice_nbytes = free.bytes_read * visits / (visits - 2 * places)
        rate = twice_nbytes / (ratio * free.compute_s)
        pairs.append(Pair(free, trainer.step(rate), rate, places))
        sys.stderr.write(f"{ratio}, {places} places: {pairs[-1].over_larger:.3f}\n")
    return pairs


def line(ratio: float, places: int, pairs: Sequence[Pair]) -> dict[str, str]:
    """A line of the table: medians over the pairs."""

    def middle(values: Sequence[float], form: str) -> str:
        return format(median(values), form)

    return {
        "IO:compute": str(ratio),
        "places": str(places),
        "GB/s": middle([pair.rate / 1e9 for pair in pairs], ".3f"),
        "IO s": middle([pair.read_s for pair in pairs], ".2f"),
        "compute s": middle([pair.free.compute_s for pair in pairs], ".2f"),
        "step s": middle([pair.braked.step_s for pair in pairs], ".2f"),
        "stall": middle([pair.braked.stall_s / pair.braked.step_s for pair in pairs], ".1%"),
        "step / max(IO, compute)": middle([pair.over_larger for pair in pairs], ".3f"),
        "step / floor": middle([pair.over_floor for pair in pairs], ".3f"),
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
    stream = stream_of(model)
    trainer = Trainer(model, stream, asked.rows, asked.seq)
    measured = {}
    for places in asked.places:
        for _ in range(2):  # the order of the visits is known then, and the places are full
            trainer.step(None)
            stream.places.hold(places)  # a limit on memory would do the same
        for ratio in asked.ratios:
            measured[ratio, places] = measure(trainer, ratio, places, asked.steps)
    sys.stdout.write(table([line(*setting, pairs) for setting, pairs in measured.items()]))
    kept = [
        {"ratio": ratio, "pairs": [asdict(pair) for pair in pairs]} for (ratio, _), pairs in measured.items()
    ]
    write_json(asked.json, {"options": {k: str(v) for k, v in vars(asked).items()}, "measured": kept})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Step time against the larger of reading and computing.")
    parser.add_argument("--checkpoint", type=Path, help="(default: a random one)")
    parser.add_argument("--kind", default="qwen3_5", help="of the random model (default: %(default)s)")
    parser.add_argument("--params", default="0.12B", help="of the random model (default: %(default)s)")
    parser.add_argument("--hidden", default="512", help="of the random model (default: %(default)s)")
    parser.add_argument("--vocab", default="2048", help="of the random model (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="IO:compute")
    parser.add_argument("--places", type=int, nargs="+", default=[2], help="for layers (default: 2)")
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
