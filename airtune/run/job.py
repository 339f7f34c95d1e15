"""The parts of a training run, from plain values to a saved adapter, for the entry point to put in order.

The order is what makes a failure cheap: nothing is written before the data is tokenised and the model stands,
so a run that cannot start leaves no folder behind. The run's folder then holds

    config.yaml      every value of the configuration
    metrics.jsonl    a line for each step and evaluation
    checkpoint-N/    what `resume=true` goes on from
    adapter/         the result, in PEFT's format
    loss.png         its picture
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments, set_seed

from airtune.model.adapter_io import AdapterError
from airtune.model.build import load
from airtune.model.stream import MicroBatchError, stream_of
from airtune.run.checkpoints import remove_partial
from airtune.run.collate import Collator
from airtune.run.console import JobError
from airtune.run.data import PreparedData, prepare
from airtune.run.encode import encode_prompt
from airtune.run.progress import Progress
from airtune.run.report import answer, report
from airtune.run.rows import find_files
from airtune.run.tracking import MetricsFile, WandbTracker, plot_losses, read_metrics
from airtune.run.trainer import StreamedTrainer, TrainingError, refuse_unsupported

logger = logging.getLogger(__name__)


def training_fields() -> dict[str, Any]:
    """Name -> type of every field of TrainingArguments that may be given."""
    hints = get_type_hints(TrainingArguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


def training_arguments(options: Mapping[str, Any], *, output_dir: Path, seed: int) -> TrainingArguments:
    """`options` as TrainingArguments, with what a streamed run needs. ValueError when they contradict."""
    ours: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "use_cpu": True,  # the model stays on the CPU, also where its layers visit an accelerator
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # such a loss stops the run, and must never be averaged away
    }
    if {"save_steps", "save_strategy"}.isdisjoint(options):
        ours["save_strategy"] = "no"
    args = TrainingArguments(**{**options, **ours})
    refuse_unsupported(args)
    return args


def find_data(train: Sequence[str], eval: Sequence[str] | None) -> None:
    """ValueError when a data file is missing: before a tokenizer is opened, for which a hub may be asked."""
    find_files(train)
    if eval:
        find_files(eval)


def load_tokenizer(path: str, revision: str | None, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub id. ValueError or OSError when there is none."""
    if os.path.isabs(path) and not os.path.isdir(path):
        raise ValueError(f"model.path: there is no folder {path}")
    return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)


def read_data(
    tokenizer: PreTrainedTokenizerBase,
    *,
    train: Sequence[str],
    eval: Sequence[str] | None,
    **reading: Any,
) -> tuple[PreparedData, PreparedData | None]:
    """Training and evaluation rows, read with the same options (those of `prepare`)."""
    rows = prepare(train, tokenizer, **reading)
    return rows, prepare(eval, tokenizer, **reading) if eval else None


def encode_samples(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rows: PreparedData, chat_template: str | None
) -> list[list[int]]:
    """Ids of prompts, written as the training rows are: as a user's turn where they are conversations."""
    chat = rows.summary.form == "messages"
    prompts = [[{"role": "user", "content": text}] if chat else text for text in texts]
    return [encode_prompt(tokenizer, prompt, chat_template) for prompt in prompts]


def choose_adapter(
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | str,
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
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )


def load_model(
    adapter: LoraConfig | str, *, path: str, seed: int, dtype: str, attn_implementation: str, **options: Any
) -> PeftModel:
    """A streamed model with an adapter to train: a fresh one, whose values `seed` decides, or a saved one.

    "auto" leaves a choice to `airtune.load`, which takes the further `options` and raises ValueError for what
    it cannot load.
    """
    set_seed(seed)
    chosen = {name: value for name, value in options.items() if value != "auto" or name == "device"}
    if attn_implementation != "auto":
        chosen["attn_implementation"] = attn_implementation
    if isinstance(adapter, LoraConfig):
        chosen["lora"] = adapter
    else:
        chosen |= {"adapter": adapter, "adapter_trainable": True}
    model = load(path, dtype=None if dtype == "auto" else getattr(torch, dtype), **chosen)
    assert isinstance(model, PeftModel), "load() returns a PeftModel when it is given an adapter"
    return model


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
    sample_ids: Sequence[Sequence[int]],
    wandb: bool,
    project: str,
    run_name: str | None,
    sample_prompts: Sequence[str],
    sample_max_new_tokens: int,
) -> None:
    """Train, save and report; `checkpoint` is where to go on from. JobError when the run cannot go on.

    `config` is what W&B shows, `config_yaml` what the run's folder keeps. `sample_prompts` are answered
    before and after; `sample_ids` are their ids.
    """
    output_dir = Path(args.output_dir or "")
    _claim(output_dir, config_yaml, resuming=checkpoint is not None)
    stream = stream_of(model)
    progress = Progress(sys.stderr, counters=stream.counters)
    stream.observers.append(progress.visit)
    tracker = (
        WandbTracker(project=project, run_name=run_name, config=config, folder=output_dir) if wandb else None
    )
    trainer = StreamedTrainer(
        model,
        args,
        train_dataset=rows,
        data_collator=Collator.of(tokenizer),
        eval_dataset=eval_rows,
        callbacks=[progress, MetricsFile(output_dir / "metrics.jsonl"), *([tracker] if tracker else [])],
        counters=stream.counters,
    )

    def show_answers(when: str) -> None:
        for text, ids in zip(sample_prompts, sample_ids, strict=True):
            said = answer(model, tokenizer, ids, max_new_tokens=sample_max_new_tokens)
            progress.clear()
            sys.stdout.write(f"[{when} training] {text}\n    {said}\n")
            sys.stdout.flush()

    if checkpoint is None:  # a fresh adapter adds zero: this is the base model
        show_answers("before")
    failed = True
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
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


def _claim(output_dir: Path, config_yaml: str, *, resuming: bool) -> None:
    """Make the run's folder ours: create it, clean it, write the configuration."""
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / "config.yaml"
    if resuming:
        remove_partial(output_dir)
        _say_what_changed(path, config_yaml)
    path.write_text(config_yaml, encoding="utf-8")


def _say_what_changed(path: Path, config_yaml: str) -> None:
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    changes = [
        line
        for line in difflib.unified_diff(old, config_yaml.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].split(":")[0] != "resume"
    ]
    if changes:
        logger.warning("The configuration is not the one the run began with:\n%s", "\n".join(changes))
