"""A chat template as a function from a conversation to a text.

Templates agree on little but the names `messages`, `tools` and `add_generation_prompt`. What one of them
expects of a message, another fails on or, worse, writes as nonsense without a word:

    content      a string; or a list of parts, and then a string is read letter by letter and comes out empty
    arguments    of a call, an object; or JSON text, and then an object comes out in Python's notation
    developer    a role of its own; or unknown, and what it says belongs under `system`, its older name

No table of models would know them all, so each question is put to the template itself, once, by rendering a
word of our own and looking for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from airtune.run.data.messages import Message

Span = tuple[int, int]  # characters [start, end) of a text
Tools = list[dict[str, object]]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A template is a program: what it trips over comes as its own errors or as Python's.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


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
class ChatTemplate:
    """A tokenizer's way of writing conversations. `source` is Jinja (see `resolve_template`)."""

    tokenizer: PreTrainedTokenizerBase
    source: str

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template says itself, with `{% generation %}`, which parts a model writes."""
        return _GENERATION.search(self.source) is not None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple({*self.tokenizer.all_special_tokens, *added})

    def ends_turn(self, text: str) -> bool:
        """Whether `text` ends with a special token, but for white space: so a turn's end can be learned."""
        return text.rstrip().endswith(self.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one text. ValueError when the template refuses it."""
        if not messages:
            raise ValueError("an answer that opens a conversation answers nothing: put a turn before it")
        spoken = [self._spoken(message) for message in messages]
        return self._render(spoken, tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> tuple[str, list[Span]]:
        """The conversation, and the spans that the template marks as generated (none if it has no marks)."""
        spoken = [self._spoken(message) for message in messages]
        return self._render(spoken, tools, with_marks=self.has_marks)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
        with_marks: bool = False,
    ) -> tuple[str, list[Span]]:
        # The function under tokenizer.apply_chat_template: it also gives spans, and copies each message only
        # once, which halves the time of a long conversation.
        try:
            rendered = render_jinja_template(
                conversations=[list(messages)],
                tools=cast("list[Any]", tools),
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=with_marks,
                **self._variables,
            )
        except _REFUSALS as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        # Upstream's annotation says str; it is one text and, with marks, one list of spans a conversation.
        texts, spans = cast("tuple[list[str], list[list[Span]]]", rendered)
        return texts[0], [(start, end) for start, end in spans[0]] if with_marks else []

    @cached_property
    def _variables(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map}

    def _spoken(self, message: Message) -> Message:
        """`message` in the words of this template."""
        content, calls = message.get("content"), message.get("tool_calls")
        spoken = dict(message)
        if message["role"] == "developer" and "developer" not in self.source:
            spoken["role"] = "system"
        if isinstance(content, str) and self._wants_parts:
            spoken["content"] = [{"type": "text", "text": content}] if content else []
        if isinstance(calls, list) and self._wants_json_arguments:
            spoken["tool_calls"] = [_with_json_arguments(call) for call in calls]
        return spoken

    @cached_property
    def _wants_parts(self) -> bool:
        word = fresh_word(self.source)
        as_string: Message = {"role": "user", "content": word}
        as_parts: Message = {"role": "user", "content": [{"type": "text", "text": word}]}
        return word not in self._try(as_string) and word in self._try(as_parts)

    @cached_property
    def _wants_json_arguments(self) -> bool:
        word = fresh_word(self.source)
        ask: Message = {"role": "user", "content": word}
        call = {"id": "call00001", "type": "function", "function": {"name": word, "arguments": {word: word}}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        with_object = self._try(ask, answer)
        if with_object and repr({word: word}) not in with_object:
            return False
        answer["tool_calls"] = [_with_json_arguments(call)]
        return json.dumps({word: word}) in self._try(ask, answer)

    def _try(self, *messages: Message) -> str:
        """The render, or "" where the template refuses."""
        try:
            return self._render(messages)[0]
        except ValueError:
            return ""


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def fresh_word(*texts: str) -> str:
    """A word that is in none of `texts`, and that no template has a reason to escape, trim or change."""
    words = (f"zq{number}qz" for number in count())
    return next(word for word in words if not any(word in text for text in texts))
