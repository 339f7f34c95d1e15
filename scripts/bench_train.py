#!/usr/bin/env python
"""Training steps on the CPU: streamed by airtune against resident in memory, step by step in turn.

    python scripts/bench_train.py                              a random 0.7B model, 256 to 2048 tokens a step
    python scripts/bench_train.py --checkpoint DIR --tokens 4096 --seq 512 --json result.json

Both train the same checkpoint with the same LoRA adapter (fp32, all linear layers of the decoder) by AdamW
on the same batches. The resident one is transformers + PEFT with gradient checkpointing, which is what a
careful user runs when memory is short: it computes every layer twice forward and once backward. So does
airtune, but for layers whose graphs fit where it may keep them (`--host-memory`). PEFT also multiplies by the
adapter in fp32, where airtune does so in bf16 beside bf16 weights. The resident model takes the whole batch
at once; airtune takes `--micro-batch-size` rows at a time.

Read the ratios: each is between two steps that followed one another, and their median is shown. Losses are
compared too, so that nothing is fast by being wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from _bench import Contender, Figures, Peak, checkpoint, mb, serve, table, write_json

KINDS = ("airtune", "resident")
# bf16 losses near log(vocabulary) are multiples of 1/32; two honest runs differ by less than this.
LOSS_TOLERANCE = 0.02


@dataclass
class Run:
    """The timed steps of one contender at one size."""

    peak: Peak = field(default_factory=Peak)
    steps: list[Figures] = field(default_factory=list)

    def add(self, step: Figures, peak: Peak) -> None:
        self.steps.append(step)
        self.peak = self.peak.or_larger(peak.anonymous, peak.total)

    def median(self, name: str) -> float:
        return median(step[name] for step in self.steps)


def contend(kind: str, asked: argparse.Namespace) -> None:
    """The contender's side: load, then train one step for each request."""
    import torch
    from _bench import random_batch, resident_model, streamed_model, trained

    counters: Callable[[], Mapping[str, float]]
    if kind == "airtune":
        import airtune

        model = streamed_model(
            asked.checkpoint,
            asked.rank,
            device="cpu",
            micro_batch_size=asked.micro_batch_size,
            host_memory=asked.host_memory,
        )
        counters = airtune.stream_of(model).counters
    else:
        model = resident_model(asked.checkpoint, asked.rank)
        counters = dict
    optimizer = torch.optim.AdamW(trained(model), lr=1e-4)

    def step(request: Mapping[str, int]) -> Figures:
        batch = random_batch(model, request["rows"], request["length"], request["seed"])
        before, cpu_s, started = counters(), time.process_time(), time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s, after = time.perf_counter() - started, counters()
        moved = {name: after.get(name, 0) - before.get(name, 0) for name in ("bytes_read", "stall_s")}
        return {"step_s": step_s, "cpu_s": time.process_time() - cpu_s, "loss": loss.item(), **moved}

    serve({"trained": sum(parameter.numel() for parameter in trained(model))}, step)


def compare(
    contenders: Mapping[str, Contender], rows: int, length: int, asked: argparse.Namespace
) -> dict[str, Run]:
    """Let the contenders take turns at one size."""
    runs = {kind: Run() for kind in contenders}
    for seed in range(asked.warmup + asked.steps):
        for kind, contender in contenders.items():
            figures, peak = contender.ask(rows=rows, length=length, seed=seed)
            sys.stderr.write(f"{rows} x {length} {kind}: {figures['step_s']:.2f} s\n")
            if seed >= asked.warmup:
                runs[kind].add(figures, peak)
    check_losses(runs)
    return runs


def check_losses(runs: Mapping[str, Run]) -> None:
    for one, other in zip(runs["airtune"].steps, runs["resident"].steps, strict=True):
        if not abs(one["loss"] - other["loss"]) <= LOSS_TOLERANCE * abs(other["loss"]):
            sys.exit(f"bench_train: the losses differ: airtune {one['loss']}, resident {other['loss']}")


def ratios(runs: Mapping[str, Run], name: str) -> list[float]:
    """airtune / resident, of neighbours in time."""
    pairs = zip(runs["airtune"].steps, runs["resident"].steps, strict=True)
    return [one[name] / other[name] for one, other in pairs]


def lines(tokens: int, runs: Mapping[str, Run]) -> Sequence[dict[str, str]]:
    """One line of the table for each contender."""
    ratio = {"airtune": f"{median(ratios(runs, 'step_s')):.3f}", "resident": "1"}
    return [
        {
            "tokens/step": str(tokens),
            "": kind,
            "s/step": f"{run.median('step_s'):.2f}",
            "ratio": ratio[kind],
            "tokens/s": f"{tokens / run.median('step_s'):.1f}",
            "CPU s/step": f"{run.median('cpu_s'):.1f}",
            "anonymous MB": mb(run.peak.anonymous),
            "total MB": mb(run.peak.total),
            "read MB/step": mb(run.median("bytes_read")),
            "stall": f"{run.median('stall_s') / run.median('step_s'):.1%}",
        }
        for kind, run in runs.items()
    ]


def measure(folder: Path, asked: argparse.Namespace) -> None:
    command = [sys.executable, "-W", "ignore::FutureWarning", __file__, "--checkpoint", str(folder)]
    command += ["--rank", str(asked.rank), "--micro-batch-size", str(asked.micro_batch_size)]
    command += ["--host-memory", asked.host_memory] if asked.host_memory else []
    command += ["--contender"]
    shown: list[dict[str, str]] = []
    kept: dict[int, dict[str, object]] = {}
    with ExitStack() as ending:
        contenders: dict[str, Contender] = {}
        for kind in KINDS:
            contenders[kind] = Contender([*command, kind], asked.threads)
            ending.callback(contenders[kind].close)
        if len({contender.ready["trained"] for contender in contenders.values()}) > 1:
            sys.exit("bench_train: the contenders train different numbers of parameters")
        for tokens in asked.tokens:
            length = min(asked.seq, tokens)
            runs = compare(contenders, max(1, tokens // length), length, asked)
            shown += lines(tokens, runs)
            kept[tokens] = {"ratio": ratios(runs, "step_s"), **{k: asdict(run) for k, run in runs.items()}}
    sys.stdout.write(table(shown))
    write_json(asked.json, {"options": {k: str(v) for k, v in vars(asked).items()}, "sizes": kept})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Training steps: airtune against a resident model.")
    parser.add_argument("--checkpoint", type=Path, help="(default: a random one)")
    parser.add_argument("--kind", default="qwen3_5", help="of the random model (default: %(default)s)")
    parser.add_argument("--params", default="0.7B", help="of the random model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 2048], help="of a step")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="rows at once (default: %(default)s)")
    parser.add_argument("--host-memory", help="airtune's, such as 4GB (default: as little as it needs)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed, of each size (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--contender", choices=KINDS, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.contender:
        contend(asked.contender, asked)
        return
    with checkpoint(asked.checkpoint, "--kind", asked.kind, "--params", asked.params) as folder:
        measure(folder, asked)


if __name__ == "__main__":
    main()
