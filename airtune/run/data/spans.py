"""Where an answer stands in the render of its conversation.

Let m be the messages, R their render, and m[k] an answer. Where the template marks its answers with
`{% generation %}`, the marks are the spans (and words in the contents tell which mark is whose, see `echo`).
Where it does not, take

    prompt  P = render(m[:k], add_generation_prompt=True)     what the model is given when it is to answer
    through T = render(m[:k+1])                               the same with the answer

If R starts with P and with T, the answer is R[len(P):len(T)]: exactly what the model has to produce after its
prompt, so the role header is not learned and the token that ends the turn is.

R does not start with them where the template writes a turn differently because of later ones: a thought that
is hidden again, an end token that only the last turn has. Then the answer is found by what changes with it.
Put a word that occurs nowhere else into the message, and let W be the render of the whole conversation with
the word, and V that of the turns up to it:

    V = P + shown + word + closing                 what follows the word, to the end, is how this turn closes
    W = ... + header + [shown] + word + closing + ...      header: what P adds to render(m[:k])

All that R and W have before the answer and after it must be equal, and then the answer is what R has between.
An earlier turn may do without `shown`, and without the thought that the header of a prompt opens; the answer
then starts at its content. When any of this does not hold the span cannot be known, and that is an error
rather than a guess. The last answer needs P alone, so `last_assistant` works with templates for which
`assistant` cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from airtune.run.data.echo import Echo
from airtune.run.data.forms import Conversation
from airtune.run.data.messages import Message
from airtune.run.data.templates import ChatTemplate, Span, fresh_word


def answers_of(dialogue: Conversation) -> list[int]:
    """Which messages are answers."""
    return [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]


@dataclass(frozen=True, slots=True)
class AnswerFinder:
    """Finds the answers of `dialogue` in its render `text`, in which the template marked `marks`."""

    template: ChatTemplate
    dialogue: Conversation
    text: str
    marks: list[Span]
    echo: Echo

    def spans(self, answers: Sequence[int]) -> list[list[Span]]:
        """For each of `answers` (indices of messages) its spans: one, or the marks that its turn has."""
        if answers and self.template.has_marks:
            marks = self._marks_by_answer()
            return [marks[i] for i in answers]
        return [[self._find(i)] for i in answers]

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.template.render(
            messages, self.dialogue.tools, add_generation_prompt=add_generation_prompt
        )

    def _marks_by_answer(self) -> dict[int, list[Span]]:
        answers, owners = answers_of(self.dialogue), self.echo.owners_of_marks()
        if set(owners) != set(answers) or len(owners) != len(self.marks):
            raise ValueError(
                f"the chat template marks {len(self.marks)} parts as generated in a conversation with "
                f"{len(answers)} assistant turns, and they do not tell all turns apart: set another "
                "data.chat_template or data.learn_on"
            )
        owned = list(zip(owners, self.marks, strict=True))
        return {i: self._with_end_token(i, [mark for owner, mark in owned if owner == i]) for i in answers}

    def _with_end_token(self, i: int, marks: list[Span]) -> list[Span]:
        """`marks`, the last of them with the end token of the turn where that is directly behind it."""
        start, end = marks[-1]
        if self.template.ends_turn(self.text[:end]):
            return marks
        following = [token for token in self.template.special_tokens if self.text.startswith(token, end)]
        token = max(following, key=len, default="")
        # One that opens the next turn is not there when this turn is the last.
        closes = token and self._render(self.dialogue.messages[: i + 1]).rstrip().endswith(token)
        return [*marks[:-1], (start, end + len(token))] if closes else marks

    def _find(self, i: int) -> Span:
        messages, text = self.dialogue.messages, self.text
        prompt = self._render(messages[:i], add_generation_prompt=True)
        through = self._render(messages[: i + 1]) if i + 1 < len(messages) else text
        if text.startswith(prompt) and text.startswith(through) and len(prompt) <= len(through):
            return len(prompt), len(prompt) + self._closed(through[len(prompt) :])
        if i + 1 < len(messages):
            word = fresh_word(text)
            for stand_in in _stand_ins(messages[i], word):
                if (span := self._find_by_change(i, prompt, stand_in, word)) is not None:
                    return span
        raise ValueError(
            f"the chat template writes message {i} (role assistant) in one way in the whole conversation, in "
            f"another as the answer to the turns before it ({_difference(text, prompt, through)}), so which "
            "part is learned cannot be known. Use learn_on=last_assistant (if this is not the last answer), "
            "learn_on=all, or a data.chat_template with {% generation %} marks"
        )

    def _closed(self, ending: str) -> int:
        """How much of `ending`, the end of a turn, is learned.

        Line ends between the turn's end token and the next header are never generated, so they are not
        learned; where a template ends its turns with them instead of a token, they are.
        """
        return len(ending.rstrip() if self.template.ends_turn(ending) else ending)

    def _find_by_change(self, i: int, prompt: str, stand_in: Message, word: str) -> Span | None:
        messages, text = self.dialogue.messages, self.text
        try:
            through = self._render([*messages[:i], stand_in])
            whole = self._render([*messages[:i], stand_in, *messages[i + 1 :]])
        except ValueError:  # the template wants more of this turn than the word
            return None
        if through.count(word) != 1 or whole.count(word) != 1:
            return None
        as_last, in_whole = through.split(word), whole.split(word)
        start = self._start(messages[:i], prompt, as_last[0], in_whole[0])
        closing = self._closing(as_last[1], in_whole[1], is_plain="tool_calls" not in stand_in)
        if start is None or closing is None:
            return None
        end = len(text) - len(in_whole[1]) + closing
        is_same = text[:start] == whole[:start] and text[max(end, 0) :] == in_whole[1][closing:]
        return (start, end) if start <= end and is_same else None

    def _start(self, before: list[Message], prompt: str, as_last: str, in_whole: str) -> int | None:
        """Where the answer starts, in renders that are cut off at its word."""
        if not as_last.startswith(prompt):  # not even as the last turn does it continue its prompt
            return None
        if self.text.startswith(prompt):
            return len(prompt)
        rendered_before = self._render(before)
        if not prompt.startswith(rendered_before):
            return None
        header, shown = prompt[len(rendered_before) :], as_last[len(prompt) :]
        if in_whole.endswith(header + shown):
            return len(in_whole) - len(shown)
        headers = (header[:size] for size in range(len(header), 0, -1))  # shorter by a thought it opens
        is_there = any(in_whole.endswith(header) and header.strip() for header in headers)
        return len(in_whole) if is_there else None

    def _closing(self, as_last: str, in_whole: str, *, is_plain: bool) -> int | None:
        """How much of `in_whole`, what follows the word, still belongs to its turn.

        That is all that follows it where the turn is the last (`as_last`). Some templates end the whole text
        with one more token: of a plain answer, which is over with its word, what both have is enough, up to
        the last end token.
        """
        closed = self._closed(as_last)
        if in_whole.startswith(as_last[:closed]):
            return closed
        same = _same_start(as_last, in_whole) if is_plain else ""
        ends = [same.rfind(token) + len(token) for token in self.template.special_tokens if token in same]
        return max(ends, default=None)


def _stand_ins(message: Message, word: str) -> Iterator[Message]:
    """The message with a word in it: for its content, as a plain answer, and in its call."""
    yield {**message, "content": word}
    yield {"role": message["role"], "content": word}
    if calls := cast("list[dict[str, Any]]", message.get("tool_calls")):
        function = {**calls[0]["function"], "arguments": {"value": word}}
        call = {**calls[0], "function": function}
        yield {"role": message["role"], "content": message["content"], "tool_calls": [call, *calls[1:]]}


def _difference(text: str, prompt: str, through: str) -> str:
    name, other = ("answer", through) if text.startswith(prompt) else ("prompt", prompt)
    at = max(len(_same_start(text, other)) - 10, 0)  # with what is still the same, to tell the place
    return f"it has {text[at : at + 40]!r} where the {name} has {other[at : at + 40]!r}"


def _same_start(one: str, other: str) -> str:
    size = min(len(one), len(other))
    return one[: next((i for i in range(size) if one[i] != other[i]), size)]
