"""The parts of the command that generates: load what is to speak, answer what was given."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import set_seed

from airtune.run.generation import Answer, decoding_options, default_end_ids, guessing_options
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
    logger.info("Loading %s%s", loading["path"], f" with the adapter in {adapter}" if adapter else "")
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
    speaker.check(encoded)
    rows = _rows_at_once(speaker, len(prompts), batch_size)
    as_text = output is None or len(prompts) == 1
    with answers_file(output) as write:
        for first in range(0, len(prompts), rows):
            batch = slice(first, first + rows)
            for prompt, ids, answer in zip(
                prompts[batch],
                encoded[batch],
                _answers(speaker, prompts[batch], encoded[batch], numbered=len(prompts) > 1, as_text=as_text),
                strict=True,
            ):
                write(_line(prompt, ids, answer))


def _answers(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    encoded: Sequence[Sequence[int]],
    *,
    numbered: bool,
    as_text: bool,
) -> Iterator[Answer]:
    """The answers of one batch; one that is alone is written as it comes."""
    alone = len(encoded) == 1 and as_text
    answers = [] if alone else speaker.say_all(encoded)
    for number, prompt in enumerate(prompts):
        if numbered and as_text:
            speaker.out.write(f"> {_shown(prompt)}\n")
        if alone:
            answers = [speaker.say(encoded[0])]
        elif as_text:
            speaker.out.write(f"{answers[number].text}\n")
        if numbered and as_text:
            speaker.out.write("\n")
        yield answers[number]


def _rows_at_once(speaker: Speaker, count: int, batch_size: int) -> int:
    if any(name in speaker.options for name in _GUESSES):
        if min(count, batch_size) > 1:
            logger.info("One prompt at a time: tokens are guessed for single rows only")
        return 1
    if min(count, batch_size) > 1 and speaker.tokenizer.pad_token_id is None:
        logger.info("The tokenizer has no pad token: shorter prompts are filled up with another, and masked")
    return batch_size


def _line(prompt: Prompt, ids: Sequence[int], answer: Answer) -> dict[str, object]:
    return {
        "prompt": prompt.content,
        "answer": answer.text,
        "finish": answer.finish,
        "prompt_tokens": len(ids),
        "tokens": len(answer.ids),
    }


def _shown(prompt: Prompt) -> str:
    """What stands above an answer: the text, or the last turn."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].get("content"))
