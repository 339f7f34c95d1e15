"""Progress inside a step: one of a 27B model on a small machine takes minutes, and silence looks like a hang.

The stream calls an observer at each layer's visit. On a terminal one line is rewritten in place, at most
ten times a second; elsewhere (a log file, a cluster) a plain line is logged after some seconds of silence:

    step 3/100  backward  layer 41/64  ETA 3:12:07  352 tokens/s  read 2.31 GB/s  stall 12%

Tokens per second are those of the last whole step; reading speed and the share of time spent waiting for
weights are of this step so far. The ETA of the first step assumes that all its visits take equally long;
later ones know how long a step takes, until theirs takes longer.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from airtune.run.console import CLEAR_LINE

if TYPE_CHECKING:
    from airtune.model.stream import Visit

logger = logging.getLogger(__name__)

_TERMINAL_INTERVAL_S = 0.1


class Progress(TrainerCallback):
    """Tells where a run is. Give `visit` to the stream's observers and the object to the Trainer's callbacks.

    Args:
        out: where a terminal may be; its `isatty()` decides between one rewritten line and log lines.
        counters: the stream's cumulative `bytes_read` and `stall_s`.
        interval_s: seconds without a log line after which one is written where there is no terminal.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        counters: Callable[[], Mapping[str, float]] | None = None,
        interval_s: float = 10.0,
    ) -> None:
        self._out = out
        self._read = counters or dict
        self._on_terminal = out.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._on_terminal else interval_s
        self._shown_s = time.perf_counter()
        self._label = "generating"
        self._passes = 1  # forward and backward passes of one step
        self._steps_left = 0
        self._step_s: float | None = None
        self._tokens_per_s: float | None = None
        self._begin(self._shown_s)

    def visit(self, visit: Visit) -> None:
        """A layer is about to be visited."""
        self._visits += 1
        now_s = time.perf_counter()
        if now_s - self._shown_s < self._interval_s:
            return
        self._shown_s = now_s
        line = self._line(visit, now_s - self._begun_s)
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(CLEAR_LINE + line[:width])
            self._out.flush()
        else:
            logger.info("%s", line)

    def begin(self, label: str) -> None:
        """The visits from here on are for what `label` says."""
        self._label = label
        self._begin(time.perf_counter())

    def _line(self, visit: Visit, elapsed_s: float) -> str:
        parts = [self._label, visit.direction, f"layer {visit.index + 1}/{visit.count}"]
        if self._steps_left:
            parts.append(f"ETA {duration(self._eta_s(visit.count, elapsed_s))}")
        if self._tokens_per_s is not None:
            parts.append(f"{self._tokens_per_s:.0f} tokens/s")
        counters = self._read()
        if elapsed_s > 0 and "bytes_read" in counters:
            read_nbytes = counters["bytes_read"] - self._before.get("bytes_read", 0)
            parts.append(f"read {read_nbytes / elapsed_s / 1e9:.2f} GB/s")
        if elapsed_s > 0 and "stall_s" in counters:
            stall_s = counters["stall_s"] - self._before.get("stall_s", 0)
            parts.append(f"stall {100 * min(stall_s / elapsed_s, 1):.0f}%")
        return "  ".join(parts)

    def _eta_s(self, layers: int, elapsed_s: float) -> float:
        step_s = self._step_s
        if step_s is None or elapsed_s > step_s:  # longer than the last: that says nothing of its end
            step_s = elapsed_s / min(self._visits / (2 * layers * self._passes), 1)
        return max(step_s - elapsed_s, 0) + (self._steps_left - 1) * step_s

    def _begin(self, now_s: float) -> None:
        self._begun_s = now_s
        self._before = dict(self._read())
        self._visits = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._label = "evaluating"
        self._passes = args.gradient_accumulation_steps
        self._begin(time.perf_counter())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._label = f"step {state.global_step + 1}/{state.max_steps}"
        self._steps_left = state.max_steps - state.global_step
        self._begin(time.perf_counter())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now_s = time.perf_counter()
        self._step_s = now_s - self._begun_s
        self._steps_left = 0
        self._label = f"evaluating after step {state.global_step}"  # visits between two steps are evaluations
        self._begin(now_s)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        logs = logs or {}
        if not self._on_terminal:
            self._shown_s = time.perf_counter()  # this is a line too: progress fills silences only
        self._tokens_per_s = logs.get("tokens_per_s", self._tokens_per_s)
        position = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            logger.info("%s  eval_loss %.4f", position, logs["eval_loss"])
        elif "loss" in logs:
            logger.info(
                "%s  loss %.4f  grad_norm %.3g  lr %.2e  %.2f s  %.0f tokens/s",
                position,
                logs["loss"],
                logs.get("grad_norm", float("nan")),
                logs.get("learning_rate", float("nan")),
                logs.get("step_s", float("nan")),
                logs.get("tokens_per_s", float("nan")),
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._label = "generating"
        self.clear()

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._on_terminal:
            self._out.write(CLEAR_LINE)
            self._out.flush()


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:12:07`."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
