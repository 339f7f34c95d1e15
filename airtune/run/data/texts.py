"""Rows to scripts: one text each, and which characters of it are learned.

This is where the forms of rows (see `forms`) become one thing, so that all after it is the same for all:

    form                          learned with learn_on="assistant"                 other values of learn_on
    messages, sharegpt            every assistant turn with its end token,          last_assistant, all
                                  not its header
    alpaca                        the output, and the answers of its history        completion (the output),
                                                                                    last_assistant, all
    prompt_completion,            the completion, or the assistant turns of its     completion (the same),
    preference                    messages                                          last_assistant, all
    text                          everything                                        all (the same)
    tokens                        what the labels say; without labels everything    all (only without labels)

A value that a form cannot honour is refused, never replaced by another. Rows of tokens have no text, and pass
through as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from airtune.run.data.chat import ChatRenderer
from airtune.run.data.forms import (
    CONVERSATIONS,
    IGNORED_LABEL,
    Continuation,
    Conversation,
    PlainText,
    Tokens,
)
from airtune.run.data.templates import Span, resolve_template

_ANSWERS = ("assistant", "last_assistant", "all")
_COMPLETIONS = ("assistant", "last_assistant", "completion", "all")
LEARN_ON: Mapping[str, tuple[str, ...]] = {
    "messages": _ANSWERS,
    "sharegpt": _ANSWERS,
    "prompt_completion": _COMPLETIONS,
    "alpaca": _COMPLETIONS,
    "preference": _COMPLETIONS,
    "text": ("assistant", "all"),  # "assistant" is what the option says when nobody set it
    "tokens": ("assistant", "all"),
}
_ENDLESS = "ends an answer without a special token: from those the model does not learn to stop"
_UNREASONED = "writes none of the reasoning: it is not learned"


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
        self._untaught: dict[str, tuple[int, str]] = {}  # what: in how many conversations, where the first is
        if form in CONVERSATIONS:
            _ = self.renderer  # that there is no template is no fault of the first row

    def write(self, content: Conversation | Continuation | PlainText | Tokens, where: str) -> Script | Tokens:
        """The script of the row read at `where` (file:line). ValueError names that place and the reason."""
        try:
            match content:
                case Conversation():
                    return self._write_chat(content, where)
                case Continuation(prompt, completion):
                    start = 0 if self.learn_on == "all" else len(prompt)
                    return Script(prompt + completion, [(start, len(prompt) + len(completion))], plain=True)
                case PlainText(text):
                    return Script(text, [(0, len(text))], plain=True)
                case Tokens():
                    self._check_tokens(content)
                    return content
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def notes(self) -> list[str]:
        """What the rows written so far will not teach, in sentences for the log."""
        return [
            f"in {count} conversations (first at {where}) the chat template {what}"
            for what, (count, where) in self._untaught.items()
        ]

    def _write_chat(self, dialogue: Conversation, where: str) -> Script:
        learn_on = self.learn_on
        if learn_on == "completion":
            learn_on = "last_assistant" if self.form == "alpaca" else "assistant"
        rendered = self.renderer.learn(dialogue, learn_on)
        for what, is_so in ((_ENDLESS, rendered.endless), (_UNREASONED, rendered.unreasoned)):
            if is_so:
                count, first = self._untaught.get(what, (0, where))
                self._untaught[what] = (count + 1, first)
        return Script(rendered.text, rendered.learned, plain=False)

    def _check_tokens(self, tokens: Tokens) -> None:
        size, labels = self._vocabulary_size, tokens.labels
        for i, id in enumerate(tokens.ids):
            if id >= size:
                raise ValueError(f"id {i} is {id}, but the tokenizer has the ids 0 to {size - 1}")
        if labels is None:
            return
        if self.learn_on == "all":
            raise ValueError("labels say what is learned, so learn_on=all cannot: take one of them away")
        for i, (id, label) in enumerate(zip(tokens.ids, labels, strict=True)):
            if label not in (id, IGNORED_LABEL):
                raise ValueError(
                    f"label {i} is {label}, expected {id} (the id at its own place: the shift comes later) "
                    "or -100 (not learned)"
                )

    @cached_property
    def _vocabulary_size(self) -> int:
        return max(self.tokenizer.get_vocab().values()) + 1  # ids may have gaps

    @cached_property
    def renderer(self) -> ChatRenderer:
        template = resolve_template(self.tokenizer, self.chat_template)
        return ChatRenderer(self.tokenizer, template)
