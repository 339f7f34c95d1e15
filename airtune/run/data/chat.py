"""Conversations as one text, and which characters of it are learned.

A chat template is a program. It may add a system turn of its own, trim contents, show the reasoning of the
last answer and hide that of earlier ones, or join two turns under one header. Any text built beside it (turn
by turn, or by searching for the answer) is a different text from the one that the model sees when it is used.
So a conversation is rendered once, whole, and that render is the truth; where its answers stand in it is
found by more renders (see `spans`), and that all of it is there by one with other words (see `echo`): two
renders for the text, and mostly two for each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from airtune.run.data.echo import Echo
from airtune.run.data.forms import Conversation
from airtune.run.data.spans import AnswerFinder, answers_of
from airtune.run.data.templates import ChatTemplate, Span


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the spans of it that are learned, in order.

    endless: an answer ends without a special token, so its end is not learned. unreasoned: the conversation
    has reasoning, and the text shows none of it.
    """

    text: str
    learned: list[Span]
    endless: bool = False
    unreasoned: bool = False


class ChatRenderer:
    """Renders conversations with one template (Jinja source, see `resolve_template`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.template = ChatTemplate(tokenizer, source)

    def prompt(self, dialogue: Conversation) -> str:
        """The text after which the model is to answer. ValueError when the template leaves something out."""
        text = self.template.render(dialogue.messages, dialogue.tools, add_generation_prompt=True)
        Echo(self.template, dialogue, text).refuse_omissions()
        return text

    def learn(self, dialogue: Conversation, learn_on: str) -> Rendered:
        """The whole conversation as text, and what is learned of it.

        learn_on: "assistant" (every answer), "last_assistant", or "all" (the whole text). Answers among the
        first `dialogue.given` messages are never learned, but for "all"; one that the row itself does not
        want learned (`dialogue.learned`) never is. No answer, no spans. ValueError when the template leaves
        something out, or does not let the spans be known.
        """
        text, marks = self.template.render_marked(dialogue.messages, dialogue.tools)
        echo = Echo(self.template, dialogue, text)
        echo.refuse_omissions()
        finder = AnswerFinder(self.template, dialogue, text, marks, echo)
        if learn_on == "all":
            learned, endless = _rest(finder.spans(_unwanted(dialogue)), len(text)), False
        else:
            answers = finder.spans(_wanted(dialogue, learn_on))
            learned = [(start, end) for spans in answers for start, end in spans if start < end]
            endless = not all(self.template.ends_turn(text[: spans[-1][1]]) for spans in answers)
        return Rendered(text, learned, endless, echo.lacks_reasoning)


def _wanted(dialogue: Conversation, learn_on: str) -> list[int]:
    answers = [i for i in answers_of(dialogue) if i >= dialogue.given]
    if learn_on == "last_assistant":
        answers = answers[-1:]
    return [i for i in answers if dialogue.learned is None or dialogue.learned[i]]


def _unwanted(dialogue: Conversation) -> list[int]:
    """The turns that not even `learn_on=all` learns."""
    unwanted = [i for i, learned in enumerate(dialogue.learned or ()) if not learned]
    for i in unwanted:
        if (role := dialogue.messages[i]["role"]) != "assistant":
            raise ValueError(
                f"message {i} (role {role}) has the weight 0, but with learn_on=all only answers can be left "
                "out: use learn_on=assistant, or take the weight away"
            )
    return unwanted


def _rest(answers: Sequence[list[Span]], length: int) -> list[Span]:
    """What `answers` leave over of a text."""
    edges = [0, *(edge for spans in answers for span in spans for edge in span), length]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(start, end) for start, end in gaps if start < end]
