"""Rows to scripts: one text each, and which characters of it are learned.

This is where the three forms of rows (see `rows`) become one thing, so that everything after it is the same
for all:

    form                learned with learn_on="assistant"                           other values of learn_on
    messages            every assistant turn with its end token, not its header     last_assistant, all
    prompt_completion   the completion, or the assistant turns of its messages      completion (the same),
                                                                                    last_assistant, all
    text                everything                                                  all (the same)

A value that a form cannot honour is refused, never replaced by another.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from airtune.run.chat import ChatRenderer, Message, Span, checked_messages, resolve_template
from airtune.run.rows import Row, describe

logger = logging.getLogger(__name__)

LEARN_ON = {
    "messages": ("assistant", "last_assistant", "all"),
    "prompt_completion": ("assistant", "last_assistant", "completion", "all"),
    "text": ("assistant", "all"),  # "assistant" is what the option says when nobody set it
}


@dataclass(frozen=True, slots=True)
class Script:
    """A text with the spans of its characters that are learned, in order.

    `plain`: no chat template wrote it, so what opens and closes a text has yet to be added.
    """

    text: str
    learned: list[Span]
    plain: bool


class ScriptWriter:
    """Writes the rows of one form. `chat_template` as in `resolve_template`; only conversations need one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, form: str, learn_on: str, chat_template: str | None = None
    ) -> None:
        if learn_on not in LEARN_ON[form]:
            raise ValueError(
                f"learn_on is {learn_on!r}, but rows of the form {form} can do: {', '.join(LEARN_ON[form])}"
            )
        self.tokenizer = tokenizer
        self.form = form
        self.learn_on = learn_on
        self.chat_template = chat_template
        self.endless: list[str] = []  # file:line of conversations in which an answer has no end token
        self._renderer: ChatRenderer | None = None

    def write(self, row: Row) -> Script:
        """The script of one row. ValueError names file, line and reason."""
        try:
            return self._write(row)
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from error

    def report(self) -> None:
        """Says in the log what the rows written so far will not teach."""
        if self.endless:
            logger.warning(
                "in %d conversations (first at %s) the chat template ends an answer without a special token: "
                "from those the model does not learn to stop",
                len(self.endless),
                self.endless[0],
            )

    def _write(self, row: Row) -> Script:
        if self.form == "messages":
            return self._write_chat(row, [], checked_messages(row.fields["messages"], "messages"))
        if self.form == "text":
            text = _string(row, "text")
            return Script(text, [(0, len(text))], plain=True)
        prompt, completion = row.fields["prompt"], row.fields["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            prompt, completion = (
                checked_messages(prompt, "prompt"),
                checked_messages(completion, "completion"),
            )
            return self._write_chat(row, prompt, completion)
        if isinstance(prompt, list) or isinstance(completion, list):
            raise ValueError("prompt and completion must both be strings or both be lists of messages")
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        start = 0 if self.learn_on == "all" else len(prompt)
        return Script(prompt + completion, [(start, len(prompt) + len(completion))], plain=True)

    def _write_chat(self, row: Row, given: list[Message], answered: list[Message]) -> Script:
        if row.fields.get("tools") not in (None, []):
            raise ValueError("the row has tools: definitions of tools are not supported in training data")
        learn_on = "assistant" if self.learn_on == "completion" else self.learn_on
        text, spans = self.renderer.learn(given + answered, learn_on, first=len(given))
        if learn_on != "all" and not self.renderer.ends_turns(text, spans):
            self.endless.append(row.where)
        return Script(text, spans, plain=False)

    @property
    def renderer(self) -> ChatRenderer:
        if self._renderer is None:  # made for the first conversation: plain texts need no template
            template = resolve_template(self.tokenizer, self.chat_template)
            self._renderer = ChatRenderer(self.tokenizer, template)
        return self._renderer


def _string(row: Row, name: str) -> str:
    value = row.fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {describe(value)}")
    return value
