"""Say how good a model is: `python -m airtune.evaluate model.path=PATH [adapter=FOLDER] data.eval=FILE`.

`--help` shows every key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from airtune.compose import cache_folder, from_command_line
from airtune.config import EvaluateConfig


def evaluate(config: EvaluateConfig) -> None:
    """Ask what is asked, and leave the results in the output folder. JobError when it cannot be done."""
    from airtune.run import assessing
    from airtune.run.console import explained
    from airtune.run.loading import find_adapter, load_for_use, load_tokenizer
    from airtune.run.results import refuse_existing

    model, folder, options = config.model, Path(config.output_dir), asdict(config.eval)
    side = "base" if config.adapter.path is None else "adapter"
    with explained():
        refuse_existing(folder)
        find_adapter(config.adapter.path)
        tokenizer = load_tokenizer(model.path, model.revision, trust_remote_code=model.trust_remote_code)
        asked = assessing.read_asked(
            tokenizer, cache_folder=cache_folder(), seed=config.seed, options=options, **asdict(config.data)
        )
        loaded = load_for_use(adapter=config.adapter.path, **asdict(model), **asdict(config.stream))
        assessment = assessing.Assessment(
            loaded, tokenizer, side=side, chat_template=config.data.chat_template, options=options
        )
        found = assessment.run(asked, folder, model=model.path, adapter=config.adapter.path)
    assessing.log_results(found, side, config=asdict(config), folder=folder, **asdict(config.tracking))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (see `run.console`)."""
    config = from_command_line(argv, EvaluateConfig)
    from airtune.run.console import exit_code, set_up_logging

    set_up_logging()
    return exit_code(
        lambda: evaluate(config), if_stopped=lambda: "Results are written at the end: start again."
    )


if __name__ == "__main__":
    sys.exit(main())
