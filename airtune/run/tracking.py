"""What a run leaves to be read: metrics.jsonl always, Weights & Biases when asked, a picture of the loss.

One file is the truth: a line for each logged step and evaluation, flushed as it is written. Everything else
may fail (no network, no disk for a picture) and then says so once and stays away; a run of hours is not
lost to its own log. A resumed run cuts the file back to its checkpoint, so that the lines read as if
nothing had happened.

A step's line, beside the Trainer's loss, grad_norm, learning_rate and epoch:

    tokens, supervised_tokens      without padding; sums over the steps since the last line
    step_s, tokens_per_s           seconds of one step, from fetching its rows to its optimizer step
    bytes_read, stall_s, ...       growth of the stream's counters within those steps; `peak_...` as they are
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import rewrite_logs

from airtune.durable import write_whole
from airtune.run.results import finite

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

# Of W&B, whose own is 90 s for a server that does not answer, and for ever at the end. What is not uploaded
# by then stays in the folder wandb, for `wandb sync`.
_PATIENCE_S: dict[str, Any] = {"init_timeout": 20, "finish_timeout": 60}


class StepMeter(TrainerCallback):
    """Tokens, seconds and counters of the steps since the last log line."""

    def __init__(self, counters: Callable[[], Mapping[str, float]] | None = None) -> None:
        self._read = counters or dict
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._tokens = 0
        self._supervised_tokens = 0
        self._growth: defaultdict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        """A step begins: its rows are about to be fetched."""
        self._begun_s = time.perf_counter()
        self._before = dict(self._read())

    def count(self, *, tokens: int, supervised_tokens: int) -> None:
        self._tokens += tokens
        self._supervised_tokens += supervised_tokens

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._steps += 1
        self._seconds += time.perf_counter() - self._begun_s
        for name, value in self._read().items():
            if name.startswith("peak_"):
                self._peaks[name] = value
            else:
                self._growth[name] += value - self._before.get(name, 0)

    def take(self) -> dict[str, float]:
        """The line's values; counting starts anew."""
        taken = {
            "tokens": self._tokens,
            "supervised_tokens": self._supervised_tokens,
            "step_s": self._seconds / max(self._steps, 1),
            "tokens_per_s": self._tokens / self._seconds if self._seconds else 0.0,
            **self._growth,
            **self._peaks,
        }
        self._reset()
        return taken


class MetricsFile(TrainerCallback):
    """Appends every log of the Trainer to a file of JSON lines. What is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._good_nbytes = 0  # what is on disk in whole lines
        self._unwritten: list[bytes] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Keep the lines up to the step that the run goes on from: the steps after it are run again."""
        old = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = b"".join(line for line in old if _step_of(line) <= state.global_step)
        self._good_nbytes = len(kept)
        self._unwritten = []
        write_whole(self.path, kept)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        line = {"step": state.global_step} | {name: finite(value) for name, value in (logs or {}).items()}
        self._unwritten.append(json.dumps(line).encode() + b"\n")
        self._write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._write()

    def _write(self) -> None:
        """All lines that are not on disk yet. What a full disk refuses is tried again with the next line."""
        lines = b"".join(self._unwritten)
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._good_nbytes)  # a write that failed may have left half a line
                file.seek(self._good_nbytes)
                file.write(lines)
        except OSError as error:
            logger.warning("%s: %d lines wait to be written (%s)", self.path, len(self._unwritten), error)
            return
        self._good_nbytes += len(lines)
        self._unwritten = []


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class WandbTracker(TrainerCallback):
    """Sends the log to Weights & Biases: `train/...` and `eval/...` over `train/global_step`.

    Account, server, mode and timeouts come from the environment (WANDB_API_KEY, WANDB_MODE=offline,
    WANDB_RUN_ID with WANDB_RESUME to go on with a run). A run that is already open, as in a sweep, is used.
    """

    def __init__(
        self, *, project: str, run_name: str | None, config: Mapping[str, object], folder: Path
    ) -> None:
        self._project = project
        self._run_name = run_name
        self._config = dict(config)
        self._folder = folder
        self._run: Run | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._attempt(self._open)

    def _open(self) -> None:
        import wandb

        patience = {name: s for name, s in _PATIENCE_S.items() if f"WANDB_{name.upper()}" not in os.environ}
        # The console is not captured: progress inside a step rewrites its line several times a second.
        self._run = wandb.run or wandb.init(
            project=self._project,
            name=self._run_name,
            config=self._config,
            dir=self._folder,
            settings=wandb.Settings(console="off", **patience),
        )
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        run = self._run
        if run is not None:
            values = rewrite_logs(dict(logs or {})) | {"train/global_step": state.global_step}
            self._attempt(lambda: run.log(values))

    def results(self, values: Mapping[str, float]) -> None:
        """A run of its own for numbers that belong to no step."""
        self._attempt(self._open)
        run = self._run
        if run is not None:
            self._attempt(lambda: run.log(dict(values)))
        self.finish()

    def finish(self, *, failed: bool = False) -> None:
        """Upload what is left and close the run."""
        run = self._run
        if run is not None:
            self._attempt(lambda: run.finish(exit_code=int(failed)))
        self._run = None

    def _attempt(self, action: Callable[[], object]) -> None:
        from wandb import Error
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

        # Its service, the network or the disk is gone; or it does not like a name or a value.
        lost = (Error, HandleAbandonedError, MailboxClosedError, OSError, RuntimeError, ValueError, TypeError)
        try:
            action()
        except lost as error:
            self._run = None
            logger.warning("No more logging to W&B (%s: %s); the run goes on", type(error).__name__, error)


def plot_losses(lines: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw training and evaluation loss over steps. Without matplotlib, or room on disk, only says so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("No %s: matplotlib is not installed (pip install 'airtune[plots]')", path.name)
        return
    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    for name, style in [("loss", "-"), ("eval_loss", "o-")]:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    axes.set(xlabel="step", ylabel="loss per token")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        logger.warning("No %s: %s", path.name, error)


def _step_of(line: bytes) -> float:
    """The step of a metrics line; infinite for one that was cut."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
