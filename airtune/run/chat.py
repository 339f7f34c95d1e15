"""Conversations as one text, and which characters of it are learned.

A chat template is a program. It may add a system turn of its own, trim contents, show the reasoning of the
last answer and hide that of earlier ones, or join two turns under one header. Any text built beside it (turn
by turn, or by searching for the answer) is a different text from the one that the model sees when it is used.
So a conversation is rendered once, whole, and that render is the truth; what follows only finds spans of
characters in it.

Where the template marks its answers with `{% generation %}`, the marks are the spans. Where it does not, let
R be the render of the whole conversation m, and for an answer m[k]

    prompt  P = render(m[:k], add_generation_prompt=True)     what the model is given when it is to answer
    through T = render(m[:k+1])                               the same with the answer

If R starts with P and with T, the answer is R[len(P):len(T)]: exactly what the model has to produce after its
prompt, so the role header is not learned and the token that ends the turn is. When R does not start with them
(the template writes this turn differently because of later ones) the span cannot be known, and that is an
error rather than a guess. The last answer needs P alone, so `last_assistant` works with many templates for
which `assistant` cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from airtune.run.rows import describe

Message = Mapping[str, object]  # role, content, and what else the template reads
Span = tuple[int, int]  # characters [start, end) of a text

ROLES = ("system", "user", "assistant")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def checked_messages(value: object, name: str) -> list[Message]:
    """`value` as messages, without their null fields. ValueError says which message of `name` is wrong.

    Turns of tools are refused: a template that does not know them would leave them out without a word.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of messages with at least one, got {describe(value)}")
    return [_checked_message(message, f"{name}[{i}]") for i, message in enumerate(value)]


def _checked_message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be an object with role and content, got {describe(message)}")
    role, content = message.get("role"), message.get("content")
    for field in ("tool_calls", "function_call"):
        if message.get(field) not in (None, []):
            raise ValueError(f"{name} has {field}: calls of tools are not supported in training data")
    if role not in ROLES:
        raise ValueError(f"{name} has the role {describe(role)}, expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{name} (role {role}) must have a string as content, got {describe(content)}")
    return {key: value for key, value in message.items() if value is not None}


def resolve_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    """The source of the template to use.

    `chat_template` is Jinja source, the path of a file with it, the name of one of the tokenizer's templates,
    or None for the tokenizer's own.
    """
    own = tokenizer.chat_template
    if chat_template is None:
        if own is None:
            raise ValueError(
                "the tokenizer has no chat template, so conversations cannot be rendered: set "
                "data.chat_template to a Jinja template (or a file with one), or give rows with prompt and "
                "completion strings"
            )
        return tokenizer.get_chat_template()
    if "{" in chat_template:
        return chat_template
    if isinstance(own, dict) and chat_template in own:
        return str(own[chat_template])
    file = Path(chat_template).expanduser()
    if file.is_file():
        return file.read_text(encoding="utf-8")
    raise ValueError(
        f"chat_template {chat_template!r} is neither Jinja source, nor a file, nor a template's name"
    )


@dataclass(frozen=True)
class ChatRenderer:
    """A tokenizer's way of writing conversations. `template` is Jinja source (see `resolve_template`)."""

    tokenizer: PreTrainedTokenizerBase
    template: str

    @cached_property
    def has_marks(self) -> bool:
        return _GENERATION.search(self.template) is not None

    @cached_property
    def _variables(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map}

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple({*self.tokenizer.all_special_tokens, *added})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as one text. ValueError when the template refuses it."""
        if not messages:
            raise ValueError("an answer that opens a conversation answers nothing: put a turn before it")
        return self._render(messages, add_generation_prompt=add_generation_prompt)[0]

    def learn(self, messages: Sequence[Message], learn_on: str, *, first: int = 0) -> tuple[str, list[Span]]:
        """The whole conversation as text, and the spans of it that are learned.

        learn_on: "assistant" (every answer), "last_assistant", or "all" (the whole text). Answers before
        message number `first` are never learned, but for "all". The spans are empty when there is no answer.
        ValueError when the template does not let the spans be known.
        """
        text, marks = self._render(messages, with_marks=self.has_marks)
        self._refuse_lost_turns(messages, text)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in answers if i >= first]
        if learn_on == "last_assistant":
            wanted = wanted[-1:]
        if learn_on == "all":
            return text, [(0, len(text))]
        if not wanted:
            return text, []
        if self.has_marks:
            return text, _choose_marks(marks, answers, wanted)
        return text, [self._find(text, messages, i) for i in wanted]

    def ends_turns(self, text: str, spans: Sequence[Span]) -> bool:
        """Whether every span ends with a special token: only then is the end of an answer learned."""
        return all(text[:end].rstrip().endswith(self.special_tokens) for _, end in spans)

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, with_marks: bool = False
    ) -> tuple[str, list[Span]]:
        # The function under tokenizer.apply_chat_template: it also gives spans, and copies each message only
        # once, which halves the time of a long conversation.
        try:
            rendered = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=with_marks,
                **self._variables,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        # Upstream's annotation says str; it is one text and, with marks, one list of spans a conversation.
        texts, spans = cast("tuple[list[str], list[list[Span]]]", rendered)
        return texts[0], [(start, end) for start, end in spans[0] if start < end] if with_marks else []

    def _refuse_lost_turns(self, messages: Sequence[Message], text: str) -> None:
        # Answers are left out of this check: templates rightly drop the reasoning of earlier ones.
        for i, message in enumerate(messages):
            content = message["content"]
            assert isinstance(content, str)
            if message["role"] != "assistant" and content.strip() not in text:
                raise ValueError(
                    f"the chat template leaves out the content of message {i} (role {message['role']}): "
                    "set data.chat_template to one that writes it, or take the message out of the data"
                )

    def _find(self, text: str, messages: Sequence[Message], i: int) -> Span:
        prompt = self.render(messages[:i], add_generation_prompt=True)
        through = self.render(messages[: i + 1]) if i + 1 < len(messages) else text
        if not text.startswith(prompt) or not text.startswith(through) or len(prompt) > len(through):
            raise ValueError(
                f"the chat template writes message {i} (role assistant) in one way in the whole "
                "conversation, in another as the answer to the turns before it, so which part is learned "
                "cannot be known. Use learn_on=last_assistant (if this is not the last answer), "
                "learn_on=all, or a data.chat_template with {% generation %} marks"
            )
        # Line ends between the turn's end token and the next header are never generated, so they are not
        # learned; where a template ends its turns with them instead of a token, they are.
        end = len(through.rstrip())
        closed = end > len(prompt) and through[:end].endswith(self.special_tokens)
        return len(prompt), end if closed else len(through)


def _choose_marks(marks: list[Span], answers: list[int], wanted: list[int]) -> list[Span]:
    if len(wanted) == len(answers) <= len(marks):
        return marks
    if len(marks) == len(answers):  # one mark an answer, and what is wanted are the last answers
        return marks[-len(wanted) :]
    raise ValueError(
        f"the chat template marks {len(marks)} parts as generated in a conversation with {len(answers)} "
        f"assistant turns, so the {len(wanted)} wanted ones are not to be found: set another "
        "data.chat_template or data.learn_on"
    )
