"""metrics.jsonl is complete whatever else fails, and a step that takes minutes says where it is."""

from __future__ import annotations

import builtins
import io
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from airtune.model.stream import Visit
from airtune.run import progress as progress_module
from airtune.run.progress import Progress, duration
from airtune.run.tracking import MetricsFile, StepMeter, WandbTracker, plot_losses, read_metrics


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")


def state(step: int, max_steps: int = 10) -> TrainerState:
    return TrainerState(global_step=step, max_steps=max_steps)


CONTROL = TrainerControl()


# --- metrics.jsonl --------------------------------------------------------------------------------


def test_lines_are_on_disk_as_soon_as_they_are_logged(tmp_path: Path, args: TrainingArguments):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_train_begin(args, state(0), CONTROL)
    metrics.on_log(args, state(1), CONTROL, logs={"loss": 2.0, "grad_norm": float("inf")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0, "grad_norm": null}\n'
    metrics.on_log(args, state(1), CONTROL, logs={"eval_loss": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 1, "eval_loss": 3.0}


def test_resume_cuts_back_to_the_checkpoint_and_drops_a_cut_line(tmp_path: Path, args: TrainingArguments):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}, "loss": 1.0}}\n' for i in range(1, 6)) + '{"step": 6, "lo')
    metrics = MetricsFile(path)
    metrics.on_train_begin(args, state(3), CONTROL)
    metrics.on_log(args, state(4), CONTROL, logs={"loss": 0.5})
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    assert read_metrics(path)[3]["loss"] == 0.5


class HalfWritten(io.BytesIO):
    """A file on a full disk: half of what is written arrives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, data) -> int:
        with builtins.open(self.path, "ab") as file:
            file.write(bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    def seek(self, *position: int) -> int:
        return 0

    def truncate(self, size: int | None = None) -> int:
        return 0


def test_a_full_disk_loses_no_line(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.on_train_begin(args, state(0), CONTROL)
    metrics.on_log(args, state(1), CONTROL, logs={"loss": 3.0})
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda self, mode: HalfWritten(self))
        metrics.on_log(args, state(2), CONTROL, logs={"loss": 2.0})
        metrics.on_log(args, state(3), CONTROL, logs={"loss": 1.0})
    assert "2 lines wait to be written ([Errno 28] No space left on device)" in caplog.text
    metrics.on_train_end(args, state(3), CONTROL)
    assert [line["loss"] for line in read_metrics(path)] == [3.0, 2.0, 1.0]


# --- the meter ------------------------------------------------------------------------------------


def test_counters_grow_per_step_and_evaluation_between_steps_does_not_count(
    args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
):
    counters = {"bytes_read": 100.0, "peak_device_bytes": 5.0}
    clock = iter([10.0, 12.0, 50.0, 53.0])
    monkeypatch.setattr("airtune.run.tracking.time.perf_counter", lambda: next(clock))
    meter = StepMeter(lambda: counters)

    meter.begin()
    meter.count(tokens=30, supervised_tokens=7)
    counters["bytes_read"] += 40
    counters["peak_device_bytes"] = 9.0
    meter.on_step_end(args, state(1), CONTROL)
    counters["bytes_read"] += 1000  # an evaluation
    meter.begin()
    meter.count(tokens=10, supervised_tokens=3)
    counters["bytes_read"] += 60
    meter.on_step_end(args, state(2), CONTROL)

    assert meter.take() == {
        "tokens": 40,
        "supervised_tokens": 10,
        "step_s": 2.5,
        "tokens_per_s": 8.0,
        "bytes_read": 100.0,
        "peak_device_bytes": 9.0,
    }
    assert meter.take() == {"tokens": 0, "supervised_tokens": 0, "step_s": 0.0, "tokens_per_s": 0.0}


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def visits(progress: Progress, direction, count: int = 4) -> None:
    order = range(count) if direction == "forward" else reversed(range(count))
    for index in order:
        progress.visit(Visit(direction, index, count))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: clock.now)
    return clock


def test_a_terminal_shows_one_line_that_says_where_the_step_is(
    args: TrainingArguments, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    out, counters = Terminal(), {"bytes_read": 0.0, "stall_s": 0.0}
    progress = Progress(out, counters=lambda: counters)
    progress.on_train_begin(args, state(2), CONTROL)
    progress.on_step_begin(args, state(2), CONTROL)
    clock.now += 2.0
    counters |= {"bytes_read": 5e9, "stall_s": 0.5}
    progress.visit(Visit("forward", 0, 4))
    # The first visit of eight after 2 s: 16 s a step, and eight steps are left.
    assert out.getvalue() == "\r\x1b[Kstep 3/10  forward  layer 1/4  ETA 2:06  read 2.50 GB/s  stall 25%"

    progress.visit(Visit("forward", 1, 4))  # at once: not shown
    assert out.getvalue().count("layer") == 1
    clock.now += 6.0
    progress.on_step_end(args, state(3), CONTROL)
    progress.on_log(args, state(3), CONTROL, logs={"loss": 1.0, "tokens_per_s": 352.4})
    progress.on_step_begin(args, state(3), CONTROL)
    clock.now += 2.0
    progress.visit(Visit("backward", 2, 4))
    shown = out.getvalue().split("\r\x1b[K")[-1]
    # A step takes 8 s, 2 of them are over, six more steps follow.
    assert shown == "step 4/10  backward  layer 3/4  ETA 0:54  352 tokens/s  read 0.00 GB/s  stall 0%"
    monkeypatch.setenv("COLUMNS", "40")  # a narrow terminal: the line must not wrap
    clock.now += 1.0
    progress.visit(Visit("backward", 1, 4))
    assert out.getvalue().split("\r\x1b[K")[-1] == "step 4/10  backward  layer 2/4  ETA 0:5"
    clock.now += 9.0  # longer than the last step, and after 3 of 8 visits: 32 s a step
    progress.visit(Visit("backward", 0, 4))
    assert out.getvalue().split("\r\x1b[K")[-1] == "step 4/10  backward  layer 1/4  ETA 3:3"
    progress.on_train_end(args, state(10), CONTROL)
    assert out.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_a_line_is_logged_every_few_seconds(
    args: TrainingArguments, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    out = io.StringIO()
    progress = Progress(out, interval_s=10)
    progress.on_train_begin(args, state(0), CONTROL)
    progress.on_step_begin(args, state(0), CONTROL)
    for index in range(4):
        clock.now += 4.0
        progress.visit(Visit("forward", index, 4))
    assert [record.message for record in caplog.records] == ["step 1/10  forward  layer 3/4  ETA 5:08"]
    assert out.getvalue() == ""


def test_visits_between_steps_are_evaluations_and_after_training_generation(
    args: TrainingArguments, clock: SimpleNamespace
):
    out = Terminal()
    progress = Progress(out)
    for event, label in [
        (lambda: None, "generating"),
        (lambda: progress.on_train_begin(args, state(0), CONTROL), "evaluating"),
        (lambda: progress.on_step_begin(args, state(0), CONTROL), "step 1/10"),
        (lambda: progress.on_step_end(args, state(1), CONTROL), "evaluating after step 1"),
        (lambda: progress.on_train_end(args, state(10), CONTROL), "generating"),
    ]:
        event()
        clock.now += 1
        progress.visit(Visit("forward", 0, 4))
        assert out.getvalue().split("\r\x1b[K")[-1].startswith(f"{label}  forward  layer 1/4"), label


def test_steps_and_evaluations_are_logged(args: TrainingArguments, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    progress = Progress(io.StringIO())
    progress.on_log(args, state(2), CONTROL, logs={"loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-4})
    progress.on_log(args, state(2), CONTROL, logs={"eval_loss": 1.25})
    assert "step 2/10  loss 1.5000  grad_norm 0.25  lr 1.00e-04" in caplog.text
    assert "step 2/10  eval_loss 1.2500" in caplog.text


def test_durations():
    assert [duration(s) for s in (6.6, 754, 11527)] == ["0:07", "12:34", "3:12:07"]


# --- Weights & Biases -----------------------------------------------------------------------------


def tracker(folder: Path) -> WandbTracker:
    return WandbTracker(project="airtune-test", run_name="tiny", config={"adapter": {"r": 3}}, folder=folder)


def test_wandb_writes_an_offline_run_with_train_and_eval_values(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ours = tracker(tmp_path)
    ours.on_train_begin(args, state(0), CONTROL)
    run = wandb.run
    assert run is not None and run.name == "tiny" and run.config["adapter"] == {"r": 3}
    ours.on_log(args, state(1), CONTROL, logs={"loss": 2.0, "tokens_per_s": 5.0})
    ours.on_log(args, state(1), CONTROL, logs={"eval_loss": 3.0})
    summary = dict(run.summary)
    ours.finish()
    assert summary["train/loss"] == 2.0 and summary["eval/loss"] == 3.0 and summary["train/global_step"] == 1
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert wandb.run is None


def test_numbers_that_belong_to_no_step_are_a_run_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker(tmp_path).results({"eval/loss": 2.0})
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")) and wandb.run is None


def test_wandb_uses_a_run_that_is_already_open(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    opened = wandb.init(project="sweep", dir=tmp_path, settings=wandb.Settings(console="off", silent=True))
    ours = tracker(tmp_path)
    ours.on_train_begin(args, state(0), CONTROL)
    assert wandb.run is opened
    ours.finish()


def failing(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_wandb_that_cannot_start_never_kills_the_run(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import wandb

    monkeypatch.setattr(wandb, "init", failing(wandb.errors.CommError("no network")))
    ours = tracker(tmp_path)
    ours.on_train_begin(args, state(0), CONTROL)
    ours.on_log(args, state(1), CONTROL, logs={"loss": 2.0})
    ours.finish()
    assert "No more logging to W&B (CommError: no network); the run goes on" in caplog.text


def test_wandb_does_not_hold_a_run_for_long(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
):
    given: dict[str, Any] = {}
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "7")
    run = SimpleNamespace(define_metric=lambda *a, **k: None)
    monkeypatch.setattr("wandb.init", lambda **options: given.update(options) or run)
    tracker(tmp_path).on_train_begin(args, state(0), CONTROL)
    asked = given["settings"].model_dump(exclude_unset=True)
    assert asked["init_timeout"] == 20 and "finish_timeout" not in asked  # W&B reads the environment itself


def test_wandb_that_breaks_later_is_said_once(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = SimpleNamespace(log=failing(BrokenPipeError("service gone")), define_metric=lambda *a, **k: None)
    monkeypatch.setattr("wandb.init", lambda **options: run)
    ours = tracker(tmp_path)
    ours.on_train_begin(args, state(0), CONTROL)
    for step in (1, 2):
        ours.on_log(args, state(step), CONTROL, logs={"loss": 2.0})
    ours.finish()
    assert caplog.text.count("service gone") == 1


@pytest.mark.parametrize("fails", ["init", "log"])
def test_results_survive_a_wandb_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
):
    broken = failing(BrokenPipeError("service gone"))
    run = SimpleNamespace(log=broken, define_metric=lambda *a, **k: None)
    monkeypatch.setattr("wandb.init", broken if fails == "init" else lambda **options: run)
    tracker(tmp_path).results({"eval/loss": 2.0})
    assert caplog.text.count("service gone") == 1


# --- the picture ----------------------------------------------------------------------------------

LINES: list[Mapping[str, float]] = [
    {"step": 1, "loss": 2.0},
    {"step": 2, "loss": 1.5},
    {"step": 2, "eval_loss": 1.7},
    {"step": 2, "train_runtime": 3.0},
]


def test_the_loss_curve_is_drawn(tmp_path: Path):
    plot_losses(LINES, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_losses([], tmp_path / "empty.png")


def test_no_matplotlib_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot_losses(LINES, tmp_path / "loss.png")
    assert [r.message for r in caplog.records] == [
        "No loss.png: matplotlib is not installed (pip install 'airtune[plots]')"
    ]


def test_no_disk_for_the_picture_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    plot_losses(LINES, tmp_path / "missing" / "loss.png")
    assert "No loss.png: [Errno 2]" in caplog.text


def test_lines_are_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    assert read_metrics(path) == [json.loads('{"step": 1, "loss": 2.0}')]
