"""Fine-tune a model: `python -m airtune.train +recipe=NAME [key=value ...]`; `--help` shows every key."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from airtune.compose import cache_folder, from_command_line, resolved_yaml
from airtune.config import TrainConfig
from airtune.trainer_keys import check_trainer_keys

logger = logging.getLogger("airtune.train")  # run as a command, the module's own name is __main__


def train(config: TrainConfig) -> None:
    """One run. JobError when it cannot be done; nothing is written before the data and the model stand."""
    from airtune.run import job
    from airtune.run.arguments import training_arguments, training_fields
    from airtune.run.checkpoints import open_run_folder
    from airtune.run.console import explained
    from airtune.run.loading import find_adapter, load_for_training, load_tokenizer
    from airtune.run.samples import write_samples

    output_dir, model = Path(config.output_dir), config.model
    with explained(code=2):
        check_trainer_keys(config.trainer, training_fields())
        args = training_arguments(config.trainer, output_dir=output_dir, seed=config.seed)
    with explained():
        checkpoint = open_run_folder(output_dir, resume=config.resume)
        job.find_data(config.data.train, config.data.eval)
        find_adapter(config.adapter.path)
        tokenizer = load_tokenizer(model.path, model.revision, trust_remote_code=model.trust_remote_code)
        rows, eval_rows = job.read_data(
            tokenizer, cache_folder=cache_folder(), seed=config.seed, **asdict(config.data)
        )
        tracking = config.tracking
        samples = write_samples(
            tokenizer,
            tracking.sample_prompts,
            chats=rows.summary.chat,
            chat_template=config.data.chat_template,
            max_new_tokens=tracking.sample_max_new_tokens,
        )
        adapter = job.choose_adapter(**asdict(config.adapter))
        streamed = load_for_training(adapter, seed=config.seed, **asdict(model), **asdict(config.stream))
        job.check_rows(streamed, args, rows, eval_rows)
        samples.check(streamed)
    job.run_training(
        streamed,
        tokenizer,
        args,
        rows=rows,
        eval_rows=eval_rows,
        checkpoint=checkpoint,
        config=asdict(config),
        config_yaml=resolved_yaml(config),
        samples=samples,
        wandb=tracking.wandb,
        project=tracking.project,
        run_name=tracking.run_name,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (see `run.console`)."""
    config = from_command_line(argv, TrainConfig)  # before the libraries' seconds: typos are said at once
    from airtune.run.console import exit_code, set_up_logging

    set_up_logging()
    logger.info("Training into %s", config.output_dir)
    return exit_code(lambda: train(config), if_stopped=lambda: _hint(Path(config.output_dir)))


def _hint(output_dir: Path) -> str:
    """What to do about a run that was stopped from outside, perhaps while the libraries were loaded."""
    if "airtune.run.job" not in sys.modules:
        return "Nothing has been written: start again."
    from airtune.run.checkpoints import resume_hint

    return resume_hint(output_dir)


if __name__ == "__main__":
    sys.exit(main())
