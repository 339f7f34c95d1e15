"""The parts of a training run, from plain values to a saved adapter, for the entry point to put in order.

The order is what makes a failure cheap: nothing is written before the data is tokenised and the model stands,
so a run that cannot start leaves no folder behind. The run's folder then holds

    config.yaml      every value of the configuration, and how many rows that made
    metrics.jsonl    a line for each step and evaluation
    checkpoint-N/    what `resume=true` goes on from
    adapter/         the result, in PEFT's format
    loss.png         its picture
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from transformers import PreTrainedTokenizerBase, TrainingArguments

from airtune.durable import write_whole
from airtune.model.adapter_io import AdapterError, load_adapter
from airtune.model.stream import MicroBatchError, stream_of
from airtune.run.checkpoints import held, remove_partial
from airtune.run.console import JobError, explained
from airtune.run.data.collate import Collator
from airtune.run.data.files import Sources, find_files
from airtune.run.data.prepare import prepare
from airtune.run.data.prepared import PreparedData
from airtune.run.generation import refuse_beyond_context
from airtune.run.progress import Progress
from airtune.run.report import report
from airtune.run.samples import Samples
from airtune.run.tracking import MetricsFile, WandbTracker, plot_losses, read_metrics
from airtune.run.trainer import NothingLeft, StreamedTrainer, TrainingError

logger = logging.getLogger(__name__)


def find_data(train: Sources, eval: Sources | None) -> None:
    """ValueError when a data file is missing: before a tokenizer is opened, for which a hub may be asked."""
    find_files(train)
    if eval:
        find_files(eval)


def read_data(tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[PreparedData, PreparedData | None]:
    """`prepare_data`, with the account of the rows in the log."""
    rows, eval_rows = prepare_data(tokenizer, **options)
    logger.info("training data\n%s", rows.summary)
    if eval_rows is not None:
        logger.info("evaluation data\n%s", eval_rows.summary)
    return rows, eval_rows


def prepare_data(
    tokenizer: PreTrainedTokenizerBase,
    *,
    train: Sources,
    eval: Sources | None,
    cache: bool,
    cache_folder: Path,
    **reading: Any,
) -> tuple[PreparedData, PreparedData | None]:
    """Training and evaluation rows, read with the same options (those of `prepare`).

    cache: whether prepared rows are kept for later runs, in `cache_folder`.
    """
    folder = cache_folder / "prepared" if cache else None
    rows = prepare(train, tokenizer, cache_folder=folder, **reading)
    return rows, prepare(eval, tokenizer, cache_folder=folder, **reading) if eval else None


def choose_adapter(
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | str,
    target_parameters: Sequence[str],
    rslora: bool,
    path: str | None,
) -> LoraConfig | str:
    """The folder of an adapter to go on with if there is one, else how to make a fresh one."""
    if path is not None:
        logger.info("Going on with the adapter in %s: rank, alpha and target modules are its own", path)
        return path
    return LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        target_parameters=list(target_parameters) or None,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )


def check_rows(
    model: PeftModel, args: TrainingArguments, rows: PreparedData, eval_rows: PreparedData | None
) -> None:
    """ValueError when rows are longer than the model's context, or the step that holds the longest of them
    does not fit into host memory.
    """
    for some in filter(None, (rows, eval_rows)):
        refuse_beyond_context(model, some)
    batch_rows = min(len(rows), args.per_device_train_batch_size)
    nbytes = stream_of(model).check_room(batch_rows, int(rows.lengths().max()))
    if nbytes >= 1e8:
        logger.info("Hidden states of the largest step take %.1f GB of host memory", nbytes / 1e9)


def run_training(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    args: TrainingArguments,
    *,
    rows: PreparedData,
    eval_rows: PreparedData | None,
    checkpoint: Path | None,
    config: Mapping[str, object],
    config_yaml: str,
    samples: Samples,
    wandb: bool,
    project: str,
    run_name: str | None,
) -> None:
    """Train, save and report; `checkpoint` is where to go on from. JobError when the run cannot go on.

    `config` is what W&B shows, `config_yaml` what the run's folder keeps. `samples` are answered before and
    after.
    """
    output_dir = Path(args.output_dir or "")
    stream = stream_of(model)
    progress = Progress(sys.stderr, counters=stream.counters)
    stream.observers.append(progress.visit)
    tracker = (
        WandbTracker(project=project, run_name=run_name, config=config, folder=output_dir) if wandb else None
    )

    def show_answers(when: str) -> None:
        answers = samples.answers(model, tokenizer)
        progress.clear()
        for text, said in zip(samples.texts, answers, strict=True):
            sys.stdout.write(f"[{when} training] {text}\n    {said}\n")
        sys.stdout.flush()

    with _claimed(output_dir, model, checkpoint, config_yaml + _amounts(rows, eval_rows)):
        trainer = StreamedTrainer(
            model,
            args,
            train_dataset=rows,
            data_collator=Collator.of(tokenizer),
            eval_dataset=eval_rows,
            callbacks=[progress, MetricsFile(output_dir / "metrics.jsonl"), *([tracker] if tracker else [])],
            counters=stream.counters,
        )
        if checkpoint is None:  # a fresh adapter adds zero: this is the base model
            show_answers("before")
        failed = True
        try:
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            except NothingLeft:
                if (output_dir / "adapter").exists():
                    raise
                logger.info("Only the adapter was left to write")  # a full disk, or a stop, just before
            trainer.save_model()
            failed = False
        except (TrainingError, AdapterError, MicroBatchError) as error:
            raise JobError(str(error)) from error
        finally:
            progress.clear()
            if tracker:
                tracker.finish(failed=failed)
        show_answers("after")
        lines = read_metrics(output_dir / "metrics.jsonl")
        plot_losses(lines, output_dir / "loss.png")
        sys.stdout.write(report(lines, model, output_dir / "adapter"))


@contextmanager
def _claimed(output_dir: Path, model: PeftModel, checkpoint: Path | None, config_yaml: str) -> Iterator[None]:
    """The run's folder is ours, clean and with the configuration; the model is as at `checkpoint`."""
    with ExitStack() as hold:
        with explained():
            if checkpoint is not None:  # one that does not fit must not leave its configuration in the folder
                load_adapter(model, checkpoint)
                logger.info("Going on from %s", checkpoint)
            hold.enter_context(held(output_dir, resume=checkpoint is not None))
            if checkpoint is not None:
                remove_partial(output_dir)
                _say_what_changed(output_dir / "config.yaml", config_yaml)
            write_whole(output_dir / "config.yaml", config_yaml)
        yield


def _amounts(rows: PreparedData, eval_rows: PreparedData | None) -> str:
    """As comments. A run that goes on with other rows would see some of them twice and others never."""
    named = [("training", rows)] + ([("evaluation", eval_rows)] if eval_rows else [])
    return "".join(f"# {name}: {len(r)} rows, {r.summary.total_tokens} tokens\n" for name, r in named)


def _say_what_changed(path: Path, config_yaml: str) -> None:
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    changes = [
        line
        for line in difflib.unified_diff(old, config_yaml.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].split(":")[0] != "resume"
    ]
    if changes:
        logger.warning("The configuration is not the one the run began with:\n%s", "\n".join(changes))
