"""The parts of the command that generates: load what is to speak, answer what was given."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import set_seed

from airtune.run.generation import decoding_options, default_end_ids, guessing_options
from airtune.run.loading import load_for_use
from airtune.run.prompts import Prompt, PromptWriter, answers_file
from airtune.run.speaker import Speaker

logger = logging.getLogger(__name__)

_GUESSES = ("assistant_model", "prompt_lookup_num_tokens")


def load_speaker(
    writer: PromptWriter, *, adapter: str | None, seed: int, decoding: Mapping[str, Any], **loading: Any
) -> Speaker:
    """A loaded model that answers on standard output.

    seed: of sampling. decoding: the keys of the group generation. loading: those of model and stream.
    Raises ValueError or OSError for what cannot be loaded.
    """
    tokenizer = writer.tokenizer
    options = decoding_options(decoding)
    max_new_tokens, stop = options.pop("max_new_tokens", None), options.pop("stop")
    if assistant := options.pop("assistant_model", None):
        trusted = loading["trust_remote_code"]
        options |= guessing_options(tokenizer, assistant, trust_remote_code=trusted)
    model = load_for_use(adapter=adapter, **loading)
    end_ids = default_end_ids(model, tokenizer, writer.turn_end_ids())
    logger.info(
        "Prompts are %s", "written by the chat template" if writer.chats else "gone on with as they are"
    )
    set_seed(seed)
    return Speaker(model, tokenizer, sys.stdout, sys.stderr, end_ids, max_new_tokens, stop, options)


def answer_prompts(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    *,
    output: str | None,
    batch_size: int,
) -> None:
    """Answer all prompts, `batch_size` at once; into the file `output` if it is given, else as text.

    Raises ValueError when a prompt has no room in the model's context, or transformers refuses the options.
    """
    for prompt, ids in zip(prompts, encoded, strict=True):
        try:
            speaker.check(ids)
        except ValueError as error:
            raise ValueError(f"{prompt.where}: {error}") from error
    count, rows = len(prompts), _rows_at_once(speaker, len(prompts), batch_size)
    as_text = output is None or count == 1
    with answers_file(output) as write:
        for first in range(0, count, rows):
            batch = encoded[first : first + rows]
            alone = as_text and len(batch) == 1  # then it is written as it comes
            title = f"{first + len(batch)} of {count} answers"
            answers = [] if alone else speaker.say_all(batch, title)
            for i, (prompt, ids) in enumerate(zip(prompts[first : first + rows], batch, strict=True)):
                if as_text and count > 1:
                    speaker.out.write(f"> {_shown(prompt)}\n")
                if alone:
                    answers = [speaker.say(ids)]
                elif as_text:
                    speaker.out.write(f"{answers[i].text}\n")
                if as_text and count > 1:
                    speaker.out.write("\n")
                write(
                    {
                        "prompt": prompt.content,
                        "answer": answers[i].text,
                        "finish": answers[i].finish,
                        "prompt_tokens": len(ids),
                        "tokens": len(answers[i].ids),
                    }
                )


def _rows_at_once(speaker: Speaker, count: int, batch_size: int) -> int:
    if any(name in speaker.options for name in _GUESSES):
        if min(count, batch_size) > 1:
            logger.info("One prompt at a time: tokens are guessed for single rows only")
        return 1
    if min(count, batch_size) > 1 and speaker.tokenizer.pad_token_id is None:
        logger.info("The tokenizer has no pad token: shorter prompts are filled up with another, and masked")
    return batch_size


def _shown(prompt: Prompt) -> str:
    """What stands above an answer: the text, or the last turn."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].get("content"))
