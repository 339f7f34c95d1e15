"""What a model is to go on from: texts and conversations, from the command line, a pipe or a file.

A prompt has to reach the model as the rows did that it was trained on. Where there is a chat template a text
is a user's turn, written by the code that writes training rows; without one the model goes on with the text.

A file of prompts is a text a line (.txt), or rows with `prompt` (a text, or messages), `text`, or a
conversation, in any kind of file that training data may come in. So the rows that a model was trained on are
prompts too: an answer at the end of a conversation is left out, as it is what is asked for.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from transformers import PreTrainedTokenizerBase

from airtune.durable import partial_of, put
from airtune.run.data.encode import encode_prompt
from airtune.run.data.files import find_files
from airtune.run.data.forms import CONVERSATIONS, FORMS, Conversation, canonical, conversation, has_form
from airtune.run.data.messages import Message, checked_messages
from airtune.run.data.readers import read
from airtune.run.data.records import BadRow, Row
from airtune.run.data.templates import ChatTemplate, fresh_word, resolve_template

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation, the place it is from, and the tools that it may call."""

    content: str | list[Message]
    where: str = "prompt"
    tools: object = None


class PromptWriter:
    """Writes prompts as ids.

    Args:
        chat: whether texts are turns of a conversation; "auto" if there is a template.
        system: a turn that opens every conversation without one.
        chat_template: see `resolve_template`; None for the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool | Literal["auto"] = "auto",
        system: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        has_template = tokenizer.chat_template is not None or chat_template is not None
        self.chats = has_template if chat == "auto" else chat
        self.tokenizer, self.system, self.chat_template = tokenizer, system, chat_template
        if self.chats:
            self._template = ChatTemplate(tokenizer, resolve_template(tokenizer, chat_template))
        elif system is not None:
            raise ValueError(
                "system needs a chat template, and the tokenizer has none: set data.chat_template"
            )

    def messages(self, content: str | Sequence[Message]) -> list[Message]:
        """`content` as a conversation, opened by the system turn."""
        turns: list[Message] = (
            [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        )
        if self.system is None or any(turn["role"] in ("system", "developer") for turn in turns):
            return turns
        return [{"role": "system", "content": self.system}, *turns]

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids after which the model is to answer. ValueError names the prompt's place."""
        try:
            if self.chats:
                return encode_prompt(
                    self.tokenizer, self.messages(prompt.content), self.chat_template, prompt.tools
                )
            if isinstance(prompt.content, str):
                return encode_prompt(self.tokenizer, prompt.content)
            raise ValueError(
                "a conversation needs a chat template: leave out chat=false, set data.chat_template"
            )
        except ValueError as error:
            raise ValueError(f"{prompt.where}: {error}") from error

    def turn_end_ids(self) -> list[int]:
        """The special token with which the template ends an answer: often not the tokenizer's end token."""
        if not self.chats:
            return []
        word = fresh_word(self._template.source)
        text = self._template.render(
            [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
        )
        rest = text.rpartition(word)[2].lstrip()
        closing = [token for token in self._template.special_tokens if rest.startswith(token)]
        return [self.tokenizer.get_vocab()[max(closing, key=len)]] if closing else []


def given_prompts(prompt: str | None, file: str | None, stdin: TextIO) -> list[Prompt] | None:
    """The prompts that were given: one, those of a file, or what comes in by a pipe.

    None when there is none and `stdin` is a terminal. ValueError names what is wrong with them.
    """
    if prompt is not None:
        return [Prompt(prompt)]
    if file is not None:
        return read_prompts(file)
    if stdin.isatty():
        return None
    try:
        text = stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError("nothing to answer: give prompt=TEXT or prompts=FILE, or a text on standard input")
    return [Prompt(text.removesuffix("\n"), "standard input")]


def read_prompts(file: str) -> list[Prompt]:
    """The prompts of a file, in order. ValueError with file and line for what is none."""
    prompts, shortened = [], 0
    for row in (row for source in find_files([file]) for row in read(source)):
        if isinstance(row, BadRow):
            raise ValueError(f"{row.where}: {row.reason}")
        try:
            prompt, is_shorter = _prompt(row)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error
        prompts.append(prompt)
        shortened += is_shorter
    if not prompts:
        raise ValueError(f"{file}: no prompt in it")
    if shortened:
        logger.info("In %d of %d prompts the answer at the end is left out", shortened, len(prompts))
    return prompts


def _prompt(row: Row) -> tuple[Prompt, bool]:
    """What a row asks, and whether an answer at its end was left out."""
    text = row.fields.get("text") if row.fields.get("prompt") is None else row.fields["prompt"]
    dialogue = _dialogue(row)
    if dialogue is None and isinstance(text, str):
        return Prompt(text, row.where, row.fields.get("tools")), False
    if dialogue is None:
        conversations = ", ".join(" and ".join(FORMS[form]) for form in CONVERSATIONS)
        named = ", ".join(row.fields) or "no field"
        raise ValueError(f"expected prompt, {conversations}, or text; got {named}")
    turns = list(dialogue.messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise ValueError("nothing but answers, and no turn to answer")
    return Prompt(turns, row.where, dialogue.tools), len(turns) < len(dialogue.messages)


def _dialogue(row: Row) -> Conversation | None:
    """The conversation of a row, as training would read it; None where it has none."""
    fields, prompt = row.fields, row.fields.get("prompt")
    if isinstance(prompt, str):  # a text; but with a system turn of its own it is the turn after that
        turns: list[Message] = [{"role": "user", "content": prompt}]
        return conversation(fields, turns) if fields.get("system") else None
    if prompt is not None:
        return conversation(fields, checked_messages(prompt, "prompt")[0])
    form = next((form for form in CONVERSATIONS if has_form(fields, form)), None)
    if form is None:
        return None
    dialogue = canonical(row, form)
    assert isinstance(dialogue, Conversation), form
    return dialogue


def check_output(output: str | None, prompts: str | None, *, interactive: bool) -> None:
    """ValueError when it cannot be written, or is what was just read: said before a model is loaded."""
    if output is None:
        return
    if interactive:
        raise ValueError("output is for answers to prompt or prompts, and neither is given")
    if Path(output).is_dir() or not Path(output).parent.is_dir():
        raise ValueError(f"output={output}: expected a file in a folder that exists")
    asked = [] if prompts is None else [os.path.realpath(file.name) for file in find_files([prompts])]
    if os.path.realpath(output) in asked:
        raise ValueError(f"output={output}: the answers would replace the prompts; choose another file")


@contextmanager
def answers_file(output: str | None) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """A function that writes a line of JSON; the file appears when all are written, or is not touched."""
    if output is None:
        yield lambda line: None
        return
    partial = partial_of(Path(output))
    with partial.open("w", encoding="utf-8", newline="\n") as stream:

        def write(line: Mapping[str, object]) -> None:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            stream.flush()

        yield write
    put(partial, Path(output))
