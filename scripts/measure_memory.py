#!/usr/bin/env python
"""Train on a checkpoint and watch the memory of the process: its peak must stay below the checkpoint's size.

    python scripts/measure_memory.py                  a random model of 0.6B, 1.2 GB in a temporary folder
    python scripts/measure_memory.py --params 1.5B --steps 5

The training runs in a process of its own, on the CPU, through `airtune.load`: LoRA on all linear layers,
AdamW, a few steps. This process looks at it from outside, in /proc/PID/status: RssAnon is memory that it
allocated, RssFile are pages of files that it has mapped (on the CPU streamed weights are such pages, and so
are the libraries). The largest sum seen is the peak, unless VmHWM, the kernel's own record, is larger yet.

Most of the peak of a small model is Python, torch and transformers themselves: the line "libraries" is the
process before it loads anything. Exit code 1 if the peak is not below the checkpoint's size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _bench import Memory, checkpoint, environment

INTERVAL_S = 0.01


def train(folder: Path, steps: int, rows: int, tokens: int) -> None:
    """What is watched: trains, and prints the memory of the libraries and the losses as one line of JSON."""
    import torch
    from peft import LoraConfig

    import airtune

    load = airtune.load  # its name is loaded lazily, with transformers: part of the libraries
    libraries = Memory.of(Path("/proc/self/status").read_text())
    assert libraries is not None
    lora = LoraConfig(r=8, target_modules="all-linear")
    model = load(folder, lora=lora, device="cpu", micro_batch_size=1)
    model.train()
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=1e-3)
    ids_BS = torch.randint(0, model.config.get_text_config().vocab_size, (rows, tokens))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sys.stdout.write(json.dumps({"libraries_nbytes": libraries.total, "losses": losses}) + "\n")


def watch(process: subprocess.Popen[str]) -> Memory:
    """The largest memory of a process until it ends."""
    status = Path(f"/proc/{process.pid}/status")
    peak = Memory()
    while process.poll() is None:
        seen = Memory.of(status.read_text())
        if seen is not None:
            larger = max(peak, seen, key=lambda memory: memory.total)
            peak = Memory(larger.anonymous, larger.file, max(peak.record, seen.record))
        time.sleep(INTERVAL_S)
    return peak


def measure(folder: Path, steps: int, rows: int, tokens: int) -> bool:
    """Train on the checkpoint in `folder`, print what was seen; whether the peak is below its size."""
    checkpoint_nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # PEFT asks every model for a property that transformers renamed: no news to whoever reads the figures.
    command = [sys.executable, "-W", "ignore::FutureWarning", __file__, "--watched", str(folder)]
    command += ["--steps", str(steps), "--rows", str(rows), "--tokens", str(tokens)]
    env = environment(os.cpu_count() or 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        peak = watch(process)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        sys.exit(f"measure_memory: the training ended with exit code {process.returncode}")
    result = json.loads(said.splitlines()[-1])
    peak_nbytes = max(peak.total, peak.record)
    facts = [
        ("checkpoint", _gb(checkpoint_nbytes)),
        ("peak", f"{_gb(peak_nbytes)}   {_gb(peak.anonymous)} anonymous, {_gb(peak.file)} of files"),
        ("libraries", f"{_gb(result['libraries_nbytes'])}   of the peak"),
        ("ratio", f"{peak_nbytes / checkpoint_nbytes:.3f}      peak / checkpoint"),
        ("losses", ", ".join(f"{loss:.3f}" for loss in result["losses"])),
    ]
    sys.stdout.write("".join(f"{name:12}{value}\n" for name, value in facts))
    return peak_nbytes < checkpoint_nbytes


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train on a checkpoint; watch the peak of the process's memory."
    )
    parser.add_argument(
        "--params", default="0.6B", help="of the random model, about so many (default: %(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint to use instead of a random one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    shape = (asked.steps, asked.rows, asked.tokens)
    if asked.watched:
        train(asked.watched, *shape)
        return 0
    with checkpoint(asked.checkpoint, "--params", asked.params) as folder:
        below = measure(folder, *shape)
    if not below:
        sys.stderr.write("The peak is not below the checkpoint's size.\n")
    return 0 if below else 1


if __name__ == "__main__":
    sys.exit(main())
