"""What the measurements share: contenders that are processes of their own, the models they train, tables.

Times on a shared machine drift by more than the differences that one wants to see. So contenders take turns,
one training step each, and a ratio is taken between neighbours in time; whoever waits for its turn is asleep
on a pipe. Memory is looked at from outside, in /proc, where no allocator can hide any. smaps_rollup is the
exact sum and takes the kernel tens of milliseconds, so it is read rarely, and the cheap counters of `status`
often; the larger of the two is the peak.

Nothing here imports torch until a model is asked for: the process that watches stays small.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

SCRIPTS = Path(__file__).resolve().parent
sys.path.append(str(SCRIPTS.parent))  # for airtune and tests, from a checkout that is not installed
_STATUS_EVERY_S, _ROLLUP_EVERY_S = 0.02, 1.0

Figures = dict[str, float]


@contextmanager
def checkpoint(given: Path | None, *options: str) -> Iterator[Path]:
    """The checkpoint that was given, or one of random weights that is there for the time of the block.

    Args:
        options: for make_checkpoint.py.
    """
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="airtune-bench-") as folder:
        subprocess.run([sys.executable, str(SCRIPTS / "make_checkpoint.py"), folder, *options], check=True)
        yield Path(folder)


def environment(threads: int) -> dict[str, str]:
    """For processes that compute. Threads that spin while they wait for work take the core from those that
    have some: on a shared machine small triangular solves then take 20-200 times as long.
    """
    path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
    }


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process, in bytes."""

    anonymous: int = 0
    file: int = 0
    record: int = 0  # the largest sum so far, as the kernel kept it

    @property
    def total(self) -> int:
        return self.anonymous + self.file

    @classmethod
    def of(cls, status: str) -> Memory | None:
        """From the text of /proc/PID/status; None once the process has given its memory back."""
        kb = {
            name: int(value.split()[0])
            for name, _, value in (line.partition(":") for line in status.splitlines())
            if name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")
        }
        if "VmHWM" not in kb:
            return None
        return cls((kb["RssAnon"] + kb["RssShmem"]) * 1024, kb["RssFile"] * 1024, kb["VmHWM"] * 1024)


@dataclass(frozen=True)
class Peak:
    """The most memory that a process was seen to hold, in bytes; the two maxima may be of different times."""

    anonymous: int = 0
    total: int = 0

    def or_larger(self, anonymous: int, total: int) -> Peak:
        return Peak(max(self.anonymous, anonymous), max(self.total, total))


class Contender:
    """A process that answers one line of JSON for each that it is sent (see `serve`).

    Attributes:
        ready: its first answer, before any request.
    """

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(threads), bufsize=0
        )
        self._rolled_up = 0.0
        self.ready = self._answer()[0]

    def ask(self, **request: int) -> tuple[Figures, Peak]:
        """The answer to a request, and the peak of the process's memory until it came.

        Raises:
            RuntimeError: the process ended instead; it said why on stderr.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._answer()

    def close(self) -> int:
        """End the process; returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # there are no more requests
        code = self._process.wait()
        self._process.stdout.close()
        return code

    def _answer(self) -> tuple[Figures, Peak]:
        assert self._process.stdout is not None
        peak = Peak()
        while True:
            ready, _, _ = select.select([self._process.stdout], [], [], _STATUS_EVERY_S)
            peak = self._look(peak)
            if ready:
                break
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with exit code {self.close()}")
        return json.loads(line), peak

    def _look(self, peak: Peak) -> Peak:
        folder = Path(f"/proc/{self._process.pid}")
        seen = Memory.of((folder / "status").read_text())
        if seen is None:  # it has ended
            return peak
        peak = peak.or_larger(seen.anonymous, seen.total)
        if time.monotonic() - self._rolled_up > _ROLLUP_EVERY_S:
            kb = dict(re.findall(r"^(\w+): +(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE))
            peak = peak.or_larger(int(kb["Anonymous"]) * 1024, int(kb["Rss"]) * 1024)
            self._rolled_up = time.monotonic()
        return peak


def serve(ready: Figures, answer: Callable[[Mapping[str, int]], Figures]) -> None:
    """The contender's side: say `ready`, then `answer` every request until there are no more.

    What libraries print goes to stderr, so that it is not taken for an answer.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        out.write(json.dumps(ready) + "\n")
        out.flush()
        for line in sys.stdin:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()


def streamed_model(folder: Path, rank: int, **options: object) -> PeftModel:
    """The model of `folder` through `airtune.load`, with a LoRA adapter on all linear layers."""
    import torch

    import airtune

    torch.manual_seed(0)
    load = cast("Callable[..., PeftModel]", airtune.load)
    return load(folder, lora=_lora(rank, "all-linear"), **options).train()


def resident_model(
    folder: Path, rank: int, device: str = "cpu", dtype: torch.dtype | None = None
) -> PeftModel:
    """The same model and adapter, to the bit, with all weights in memory, and gradient checkpointing."""
    import torch
    import transformers
    from peft import PeftModel, get_peft_model

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    base: PreTrainedModel = getattr(transformers, architecture).from_pretrained(
        folder, dtype=dtype or "auto", attn_implementation="sdpa"
    )
    base.to(device)  # type: ignore[arg-type]
    base.activation_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(0)
    wrapped = get_peft_model(base, _lora(rank, _linear_paths(base)))
    assert isinstance(wrapped, PeftModel)
    return wrapped.train()


def _lora(rank: int, targets: str | list[str]) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)


def _linear_paths(model: PreTrainedModel) -> list[str]:
    """Paths of the linear layers inside the decoder layers: not those of image towers, nor the head."""
    from torch import nn

    from airtune.model.layers import find_layers

    return [
        f"{layer}.{name}"
        for layer, decoder_layer in find_layers(model).items()
        for name, module in decoder_layer.named_modules()
        if type(module) is nn.Linear
    ]


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def random_batch(model: PeftModel, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Ids [rows, length] that are their own labels. Special ids are usually the last ones: none of those."""
    import torch

    vocab_size: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, vocab_size // 2, (rows, length), generator=generator)
    return {"input_ids": ids_BS, "labels": ids_BS}


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with equal keys, as lines of right-aligned columns under these keys."""
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    lines = [dict(zip(names, names, strict=True)), *rows]
    return "".join(
        "  ".join(line[name].rjust(width) for name, width in zip(names, widths, strict=True)) + "\n"
        for line in lines
    )


def write_json(path: Path | None, results: object) -> None:
    """Keep `results` in `path`, where one is given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        sys.stdout.write(f"written to {path}\n")


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"
