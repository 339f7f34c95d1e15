"""Let a model write: `python -m airtune.generate model.path=PATH prompt=TEXT`; see `--help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from airtune.compose import from_command_line
from airtune.config import GenerateConfig
from airtune.durable import partial_of


def generate(config: GenerateConfig) -> None:
    """Answer what is asked, or hold a conversation. JobError when it cannot be done."""
    from airtune.run import prompts
    from airtune.run.answering import answer_prompts, load_speaker
    from airtune.run.chat_loop import converse
    from airtune.run.console import explained
    from airtune.run.loading import find_adapter, load_tokenizer

    model = config.model
    with explained():  # all of it: what transformers thinks of the options is said when it generates
        given = prompts.given_prompts(config.prompt, config.prompts, sys.stdin)
        prompts.check_output(config.output, config.prompts, interactive=given is None)
        find_adapter(config.adapter.path)
        tokenizer = load_tokenizer(model.path, model.revision, trust_remote_code=model.trust_remote_code)
        writer = prompts.PromptWriter(
            tokenizer, chat=config.chat, system=config.system, chat_template=config.data.chat_template
        )
        encoded = [writer.encode(prompt) for prompt in given or []]
        speaker = load_speaker(
            writer,
            adapter=config.adapter.path,
            seed=config.seed,
            decoding=asdict(config.generation),
            **asdict(model),
            **asdict(config.stream),
        )
        if given is None:
            converse(speaker, writer)
        else:
            rows = config.batch_size
            answer_prompts(speaker, given, encoded, output=config.output, batch_size=rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (see `run.console`)."""
    config = from_command_line(argv, GenerateConfig)
    from airtune.run.console import exit_code, set_up_logging

    set_up_logging()
    return exit_code(lambda: generate(config), if_stopped=lambda: what_is_left(config.output))


def what_is_left(output: str | None) -> str:
    """Where the answers are that a stopped run had written."""
    if output is None or not partial_of(Path(output)).exists():
        return "Nothing was written."
    return f"The answers so far are in {partial_of(Path(output))}."


if __name__ == "__main__":
    sys.exit(main())
