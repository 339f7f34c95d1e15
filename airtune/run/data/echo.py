"""A conversation rendered once more, with a word of our own in each of its places.

A template that knows nothing of tools renders a conversation about tools without an error: the definitions,
the calls and the results are simply not there, and the model learns to answer out of nothing. Looking for the
contents in the text does not find this out: "yes" is in most texts, and results are often written escaped.
Words that are nowhere else do find it out:

    messages    in the place of each content, and of the name and the arguments of each call
    tools       in the place of each name

A word that is missing is an error that names its place. Reasoning is different, since templates rightly hide
that of earlier answers: only where none of it is written is that said, and as a warning (see `texts`).

The same words tell which answer a part belongs to that the template marks as generated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from airtune.run.data.forms import Conversation
from airtune.run.data.messages import REASONING, Message
from airtune.run.data.templates import ChatTemplate, Span, fresh_word


@dataclass(frozen=True, slots=True, eq=False)  # two words of one call are two places
class _Place:
    """Where a word stands. `answer`: the index of the message where that is an assistant's, else None."""

    name: str
    answer: int | None = None
    may_be_hidden: bool = False


class Echo:
    """The render of `dialogue` with words; `text` is its render without. ValueError as of the template."""

    def __init__(self, template: ChatTemplate, dialogue: Conversation, text: str) -> None:
        self._stem = fresh_word(text)
        self._places: list[_Place] = []
        messages = [self._worded(message, i) for i, message in enumerate(dialogue.messages)]
        tools = [self._worded_tool(tool) for tool in dialogue.tools or ()]
        rendered, self.marks = template.render_marked(messages, tools or None)
        found = re.finditer(rf"{self._stem}(\d+)e", rendered)
        self._words = [(match.start(), self._places[int(match[1])]) for match in found]  # in order

    def refuse_omissions(self) -> None:
        """ValueError that names the first place of the conversation which the template leaves out."""
        written = {place for _, place in self._words}
        for place in self._places:
            if place not in written and not place.may_be_hidden:
                raise ValueError(
                    f"the chat template leaves out {place.name}: set data.chat_template to one that writes "
                    "it, or take it out of the data"
                )

    @property
    def lacks_reasoning(self) -> bool:
        """Whether there is reasoning and none of it is written."""
        written = any(place.may_be_hidden for _, place in self._words)
        return not written and any(place.may_be_hidden for place in self._places)

    def owners_of_marks(self) -> list[int | None]:
        """For each of `marks` the index of the answer it is a part of; None where no word tells."""
        return [self._owner(mark) for mark in self.marks]

    def _owner(self, mark: Span) -> int | None:
        inside = [place.answer for at, place in self._words if mark[0] <= at < mark[1]]
        if inside:
            return inside[0] if len(set(inside)) == 1 else None
        # A part without a word closes the answer before it, or else opens the one after it.
        before = [place.answer for at, place in self._words if at < mark[0]][-1:]
        after = [place.answer for at, place in self._words if at >= mark[1]][:1]
        return next((answer for answer in before + after if answer is not None), None)

    def _word(self, name: str, answer: int | None = None, *, may_be_hidden: bool = False) -> str:
        self._places.append(_Place(name, answer, may_be_hidden))
        return f"{self._stem}{len(self._places) - 1}e"  # ends in a letter: no word is the start of another

    def _worded(self, message: Message, index: int) -> Message:
        changed, role = dict(message), message["role"]
        of_message, answer = f"of message {index} (role {role})", index if role == "assistant" else None
        calls = cast("list[dict[str, Any]]", message.get("tool_calls", []))
        if reasoning := [key for key in REASONING if key in message]:
            word = self._word(f"the reasoning {of_message}", answer, may_be_hidden=True)
            changed.update(dict.fromkeys(reasoning, word))
        if message["content"] or not calls:  # beside a call there is often no content
            changed["content"] = self._word(f"the content {of_message}", answer)
        if calls:
            name = f"the tool_calls {of_message}"
            changed["tool_calls"] = [self._worded_call(call, name, index) for call in calls]
        return changed

    def _worded_call(self, call: dict[str, Any], name: str, index: int) -> dict[str, Any]:
        function = call["function"]
        arguments = {"value": self._word(name, index)} if function["arguments"] else {}
        worded = {**function, "name": self._word(name, index), "arguments": arguments}
        return {**call, "function": worded}

    def _worded_tool(self, tool: dict[str, object]) -> dict[str, object]:
        function = cast("dict[str, object]", tool["function"])
        word = self._word(f"the definition of the tool {function.get('name')}")
        return {**tool, "function": {**function, "name": word}}
