"""Look at training data as a model sees it: `python -m airtune.inspect_data +recipe=NAME [key=value ...]`.

Reads and tokenises as training does, with the tokenizer alone: no weight is opened, nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from airtune.compose import cache_folder, from_command_line
from airtune.config import InspectConfig


def inspect_data(config: InspectConfig) -> None:
    """Print what became of the rows, their lengths and some samples. JobError when they cannot be used."""
    from airtune.run import job
    from airtune.run.console import explained
    from airtune.run.data.inspection import inspection, marks_for, show
    from airtune.run.loading import load_tokenizer

    model = config.model
    with explained():
        job.find_data(config.data.train, config.data.eval)
        tokenizer = load_tokenizer(model.path, model.revision, trust_remote_code=model.trust_remote_code)
        rows, eval_rows = job.prepare_data(
            tokenizer, cache_folder=cache_folder(), seed=config.seed, **asdict(config.data)
        )
    for name, data in [("training data", rows), ("evaluation data", eval_rows)]:
        if data is not None:
            marks = marks_for(sys.stdout)
            show(sys.stdout, inspection(data, tokenizer, name=name, samples=config.samples, marks=marks))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (see `run.console`)."""
    config = from_command_line(argv, InspectConfig)
    from airtune.run.console import exit_code, set_up_logging

    set_up_logging()
    return exit_code(lambda: inspect_data(config), if_stopped=lambda: "Nothing was changed.")


if __name__ == "__main__":
    sys.exit(main())
