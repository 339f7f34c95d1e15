"""Where answers stand, in templates that write a turn differently because of the turns around it."""

from __future__ import annotations

from typing import Any

import pytest

from airtune.run.data.chat import ChatRenderer
from airtune.run.data.forms import Conversation
from airtune.run.data.messages import Message
from tests.chat_templates import (
    CLOSED_TWICE,
    ENDS_DIFFER,
    HEADERS,
    INSTRUCTIONS,
    JOINS,
    MODEL_TURNS,
    MORE_SPECIAL_TOKENS,
    PROMPTED_REASONING,
    REASONING,
    TOOLS,
    TOOLS_MARKED,
)
from tests.tiny_tokenizer import CHATML_MARKED, PROMPTED_THINKING, THINKING, tiny_tokenizer

TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {}},
}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(content: str = "", **more: object) -> Message:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    return answer(content, tool_calls=[{"type": "function", "function": function}], **more)


def result(content: str) -> Message:
    return {"role": "tool", "content": content, "name": "weather"}


THREE = [user("a"), answer(" one "), user("b"), answer("two"), user("c"), answer("three")]
CALLS = [user("Rome?"), call(), result("sun"), answer("Sunny."), user("thanks"), answer("ok")]
CALLED = '\n<tool_call>weather {"city": "Rome"}</tool_call><|im_end|>'


def learned(template: str, messages: list[Message], learn_on: str = "assistant", **more: Any) -> list[str]:
    tools = [TOOL] if any("tool_calls" in message for message in messages) else None
    tokenizer = tiny_tokenizer(more_special_tokens=MORE_SPECIAL_TOKENS)
    rendered = ChatRenderer(tokenizer, template).learn(Conversation(messages, tools, **more), learn_on)
    return [rendered.text[start:end] for start, end in rendered.learned]


@pytest.mark.parametrize(
    ("template", "spans"),
    [
        (HEADERS, ["one<|eot|>", "two<|eot|>", "three<|eot|>"]),
        (INSTRUCTIONS, ["  one </s>", " two</s>", " three</s>"]),
        (MODEL_TURNS, ["one</turn>", "two</turn>", "three</turn>"]),
        (THINKING, [" one <|im_end|>", "two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"]),
        (REASONING, [" one <|im_end|>", "two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"]),
        (PROMPTED_REASONING, [" one <|im_end|>", "two<|im_end|>", "\n</think>\n\nthree<|im_end|>"]),
        (CLOSED_TWICE, [" one <|end|>", "two<|end|>", "three<|end|>\n<|im_end|>"]),
    ],
)
def test_every_answer_is_found(template: str, spans: list[str]) -> None:
    assert learned(template, THREE) == spans
    assert learned(template, THREE, "last_assistant") == spans[-1:]


@pytest.mark.parametrize("template", [THINKING, REASONING, PROMPTED_REASONING])
@pytest.mark.parametrize(
    "contents", [("yes", "yes", "yes", "yes"), ("", "", "", ""), ("<think>", "<", "\n", "<|")]
)
def test_hidden_thoughts_do_not_depend_on_what_was_said(template: str, contents: tuple[str, ...]) -> None:
    ask, first, again, last = contents
    spans = learned(template, [user(ask), answer(first), user(again), answer(last)])
    assert spans[0] == f"{first}<|im_end|>"
    assert spans[1].endswith(f"</think>\n\n{last}<|im_end|>")


def test_reasoning_is_learned_where_it_is_shown() -> None:
    messages = [
        user("a"),
        answer("one", reasoning_content="x"),
        user("b"),
        answer("two", reasoning_content="y"),
    ]
    assert learned(REASONING, messages) == ["one<|im_end|>", "<think>\ny\n</think>\n\ntwo<|im_end|>"]
    assert learned(PROMPTED_REASONING, messages) == ["one<|im_end|>", "y\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED])
def test_calls_are_learned_and_results_are_not(template: str) -> None:
    assert learned(template, CALLS) == [CALLED, "Sunny.<|im_end|>", "ok<|im_end|>"]
    assert learned(template, [*CALLS[:1], call("Let me see."), *CALLS[2:4]]) == [
        "Let me see." + CALLED,
        "Sunny.<|im_end|>",
    ]


def test_calls_are_found_where_thoughts_are_hidden_again() -> None:
    ending = "<think>\n\n</think>\n\nok<|im_end|>"
    assert learned(REASONING, CALLS) == [CALLED, "Sunny.<|im_end|>", ending]
    # While no later question hides it, the thought of the call is shown.
    thought = [
        user("Rome?"),
        call(reasoning_content="x"),
        result("sun"),
        answer("Sunny.", reasoning_content="y"),
    ]
    assert learned(REASONING, thought) == [
        "<think>\nx\n</think>\n\n" + CALLED,
        "<think>\ny\n</think>\n\nSunny.<|im_end|>",
    ]
    assert learned(REASONING, [*thought, user("thanks"), answer("ok")]) == [
        CALLED,
        "Sunny.<|im_end|>",
        ending,
    ]


def test_a_call_is_found_by_its_arguments_where_the_content_is_written_elsewhere() -> None:
    # Contents follow the results, and a call with a hidden thought has nothing before it but a header.
    after = REASONING.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    strict = "{% if messages[1] and not messages[1].tool_calls %}{{ raise_exception('x') }}{% endif %}"
    messages = [user("Rome?"), call(reasoning_content="x"), *CALLS[2:]]
    assert learned(strict + after, messages)[0] == CALLED


def test_answers_in_a_row_that_share_a_header_are_refused() -> None:
    assert learned(JOINS, THREE) == [" one <|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    with pytest.raises(ValueError, match=r"message 1 .*cannot be known"):
        learned(JOINS, [user("a"), answer("one"), answer("two")])


def test_an_end_token_that_only_the_last_answer_has_is_learned_there_and_refused_elsewhere() -> None:
    assert learned(ENDS_DIFFER, THREE, "last_assistant") == ["three<|eot|>"]
    with pytest.raises(ValueError, match=r"it has .*<\|im_end\|>.* where the answer has .*<\|eot\|>"):
        learned(ENDS_DIFFER, THREE)


def test_a_generation_prompt_that_is_not_in_the_render_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"it has .*one.* where the prompt has .*<think>.*\{% generation %\} marks"
    ):
        learned(PROMPTED_THINKING, [user("a"), answer("one")], "last_assistant")


def test_marks_that_do_not_fit_the_answers_are_refused() -> None:
    only_last = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ValueError, match="marks 1 parts as generated in a conversation with 3"):
        learned(only_last, THREE)
    never = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(ValueError, match="marks 0 parts"):
        learned(never, THREE)
    together = "{% generation %}" + CHATML_MARKED.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    with pytest.raises(ValueError, match="do not tell all turns apart"):
        learned(together + "{% endgeneration %}", THREE)
    everybody = CHATML_MARKED.replace("m.role == 'assistant'", "m.role != 'system'")
    with pytest.raises(ValueError, match="marks 6 parts"):
        learned(everybody, THREE)


def test_several_marks_of_one_answer_stay_together() -> None:
    # The thought and the content apart, the end token apart, and one more token after the last turn.
    start, end, thought = "{% generation %}", "{% endgeneration %}", "{{ m.reasoning_content }}"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{{% if m.reasoning_content %}}{start}<think>{thought}</think>{end} {{% endif %}}"
        f"{start}{{{{ m.content }}}}{end}{start}<|im_end|>{end}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        f"{{% if not add_generation_prompt %}}{start}<|eot|>{end}{{% endif %}}"
    )
    messages = [user("a"), answer("one", reasoning_content="x"), user("b"), answer("two")]
    first, second = ["<think>x</think>", "one", "<|im_end|>"], ["two", "<|im_end|>", "<|eot|>"]
    assert learned(template, messages) == first + second
    assert learned(template, messages, "last_assistant") == second
    assert learned(template, messages, learned=(True, True, True, False)) == first


def test_an_end_token_right_behind_a_mark_is_learned_with_it() -> None:
    outside = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert learned(outside, THREE) == [" one <|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    # A token that opens the next turn is none of this one.
    without = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}").replace(
        "{{ '\n' }}", ""
    )
    assert learned(without, THREE) == [" one ", "two", "three"]
