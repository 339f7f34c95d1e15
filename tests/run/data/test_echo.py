"""What a template leaves out is found out, and named."""

from __future__ import annotations

from typing import Any

import pytest

from airtune.run.data.chat import ChatRenderer
from airtune.run.data.forms import Conversation
from airtune.run.data.messages import Message
from tests.chat_templates import INSTRUCTIONS, REASONING, TOOLS, TOOLS_IN_NAME_ONLY, TOOLS_MARKED
from tests.tiny_tokenizer import CHATML, CHATML_MARKED, DROPS_SYSTEM, tiny_tokenizer

SYSTEM: Message = {"role": "system", "content": "one"}
ASK: Message = {"role": "user", "content": "one"}
ANSWER: Message = {"role": "assistant", "content": "one"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "one", "arguments": {"one": "one"}}}],
}
RESULT: Message = {"role": "tool", "content": "one"}
TOOL: dict[str, object] = {"type": "function", "function": {"name": "one", "parameters": {}}}


def learn(template: str, *messages: Message, tools: Any = None) -> bool:
    dialogue = Conversation(list(messages), tools)
    return ChatRenderer(tiny_tokenizer(), template).learn(dialogue, "assistant").unreasoned


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, INSTRUCTIONS])
def test_tools_that_a_template_does_not_know_are_missed_though_their_name_is_in_the_text(
    template: str,
) -> None:
    with pytest.raises(
        ValueError, match=r"leaves out the definition of the tool one: set data\.chat_template"
    ):
        learn(template, ASK, ANSWER, tools=[TOOL])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, TOOLS_IN_NAME_ONLY])
def test_calls_that_a_template_does_not_know_are_missed(template: str) -> None:
    with pytest.raises(ValueError, match=r"leaves out the tool_calls of message 1 \(role assistant\)"):
        learn(template, ASK, CALL)


def test_arguments_alone_are_missed_too() -> None:
    nameless = TOOLS.replace("call.function.arguments | tojson", "''")
    with pytest.raises(ValueError, match="leaves out the tool_calls of message 1"):
        learn(nameless, ASK, CALL)


@pytest.mark.parametrize("role", ["system", "tool", "user", "assistant"])
def test_turns_that_a_template_drops_are_missed_though_their_words_are_in_the_text(role: str) -> None:
    drops = DROPS_SYSTEM.replace("'system'", f"'{role}'")
    messages = [SYSTEM, ASK, ANSWER, RESULT, ANSWER]
    index = next(i for i, message in enumerate(messages) if message["role"] == role)
    with pytest.raises(ValueError, match=rf"leaves out the content of message {index} \(role {role}\)"):
        learn(drops, *messages)


def test_a_content_beside_calls_is_missed() -> None:
    either = TOOLS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    learn(either, ASK, CALL, tools=[TOOL])
    with pytest.raises(ValueError, match="leaves out the content of message 1"):
        learn(either, ASK, CALL | {"content": "one"}, tools=[TOOL])


@pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED, REASONING])
def test_a_template_that_writes_everything_passes(template: str) -> None:
    assert not learn(
        template, SYSTEM, ASK, CALL, RESULT, CALL | {"content": "one"}, RESULT, ANSWER, tools=[TOOL]
    )


def test_contents_written_another_way_are_no_omission() -> None:
    escaped = TOOLS.replace(
        "{{ m.content }}", "{{ (m.content | tojson) if m.role == 'tool' else m.content | trim }}"
    )
    learn(escaped, ASK, CALL, RESULT | {"content": '{"a": "b"}\n'}, ANSWER | {"content": " x "}, tools=[TOOL])


def test_reasoning_may_be_hidden_in_earlier_answers_but_not_everywhere() -> None:
    thoughtful = ANSWER | {"reasoning_content": "two"}
    assert learn(CHATML, ASK, thoughtful)
    assert learn(REASONING, ASK, thoughtful, ASK, ANSWER)  # hidden, and the last answer has none
    assert not learn(REASONING, ASK, thoughtful, ASK, thoughtful)
    assert not learn(CHATML, ASK, ANSWER)


def test_a_prompt_is_checked_like_a_row() -> None:
    renderer = ChatRenderer(tiny_tokenizer(), CHATML)
    assert renderer.prompt(Conversation([ASK])).endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="leaves out the definition of the tool one"):
        renderer.prompt(Conversation([ASK], [TOOL]))
