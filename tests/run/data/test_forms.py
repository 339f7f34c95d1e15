"""The forms of rows, and what each holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airtune.run.data.forms import (
    FORMS,
    Content,
    Continuation,
    Conversation,
    PlainText,
    Tokens,
    canonical,
    detect,
)
from airtune.run.data.records import Row

USER: dict[str, object] = {"role": "user", "content": "q"}
ANSWER: dict[str, object] = {"role": "assistant", "content": "a"}
CALL = {"name": "add", "arguments": {"x": 1, "y": None}}
WRAPPED_CALL = {"type": "function", "function": CALL}
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
WRAPPED_TOOL = {"type": "function", "function": TOOL}


def content_of(fields: dict[str, Any], form: str | None = None) -> Content:
    return canonical(Row("rows.jsonl:1", fields), form or detect(fields))


def conversation_of(fields: dict[str, Any], form: str | None = None) -> Conversation:
    content = content_of(fields, form)
    assert isinstance(content, Conversation)
    return content


def message_of(**message: object) -> dict[str, object]:
    """The message in one shape, after a question."""
    return conversation_of({"messages": [USER, message]}).messages[1]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"messages": [USER], "prompt": "kept for reference"}, "messages"),
        ({"conversations": [], "id": 1}, "sharegpt"),
        ({"instruction": "", "input": None, "output": ""}, "alpaca"),
        ({"prompt": "", "completion": "", "text": None}, "prompt_completion"),
        ({"text": "", "messages": None, "label": 1}, "text"),
        ({"input_ids": [1], "attention_mask": [1]}, "tokens"),
        ({"text": 0}, "text"),
        ({"text": False, "label": True}, "text"),
    ],
)
def test_the_form_is_what_fields_have_values(fields: dict[str, Any], form: str) -> None:
    assert detect(fields) == form


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {},
            "no known form: an empty object. Expected messages, or conversations, or instruction and output",
        ),
        ({"text": None, "q": 1}, r"no known form: the fields text \(null\), q"),
        ({"text": "", "messages": []}, "could be any of messages, text: set data.format"),
        ({"prompt": "", "chosen": "", "rejected": ""}, "a better and a worse answer.*data.format=preference"),
        (
            {"messages": [USER, ANSWER], "label": False},
            r"rated \(label boolean false\).*data.format=messages",
        ),
        ({"prompt": "", "completion": "", "label": True}, "data.format=prompt_completion"),
    ],
)
def test_forms_that_are_not_guessed(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        detect(fields)


def test_messages_with_tools_and_calls_as_openai_writes_them() -> None:
    call = {"id": "c1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    fields = {
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": None},
        ],
        "tools": [WRAPPED_TOOL],
    }
    content = conversation_of(fields)
    assert content.messages == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q!"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **WRAPPED_CALL}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
    ]
    assert (content.tools, content.given, content.learned) == ([WRAPPED_TOOL], 0, None)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [WRAPPED_CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"x": 1, "y": null}'}},
        {"role": "function_call", "content": json.dumps(CALL)},
        {"role": "function_call", "content": CALL},
        {"from": "tool_call", "value": json.dumps([CALL])},
    ],
)
def test_calls_come_in_one_shape(message: dict[str, object]) -> None:
    assert message_of(**message) == {"role": "assistant", "content": "", "tool_calls": [WRAPPED_CALL]}


@pytest.mark.parametrize(("arguments", "objects"), [("", {}), (None, {}), ("{}", {}), ('{"a": 0}', {"a": 0})])
def test_arguments_are_objects(arguments: object, objects: object) -> None:
    message = message_of(role="assistant", tool_calls=[{"name": "f", "arguments": arguments}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": objects}}]


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [WRAPPED_TOOL],
        json.dumps([TOOL]),
        [{"type": "function", **TOOL}],
        [{"function": TOOL}],
    ],
)
def test_tools_come_in_one_shape(tools: object) -> None:
    assert conversation_of({"messages": [USER], "tools": tools}).tools == [WRAPPED_TOOL]
    assert conversation_of({"messages": [USER], "tools": None, "functions": tools}).tools == [WRAPPED_TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools: object) -> None:
    assert conversation_of({"messages": [USER], "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("0", "0"),
        ({"temperature": 0}, '{"temperature": 0}'),
        ([1, "ü"], '[1, "ü"]'),
        (0, "0"),
        (False, "false"),
    ],
)
def test_results_of_tools_are_texts(content: object, text: str) -> None:
    assert message_of(role="observation", content=content) == {"role": "tool", "content": text}


def test_weights_of_messages() -> None:
    question = {**USER, "weight": None}
    assert conversation_of({"messages": [question, ANSWER]}).learned is None
    messages = [question, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1.0}]
    content = conversation_of({"messages": messages, "system": "s"})
    assert content.learned == (True, True, False, True, True)
    assert content.messages[2] == ANSWER
    with pytest.raises(ValueError, match=r"messages\[1\] has the weight number 0.5, expected 0"):
        content_of({"messages": [USER, {**ANSWER, "weight": 0.5}]})


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hi", r"messages\[1\] must be an object with role and content, got string"),
        (
            {"role": "user", "content": None},
            r"messages\[1\] \(role user\) must have a string as content, got null",
        ),
        ({"role": "assistant"}, "a string, or calls of tools, as content, got null"),
        ({"role": "user", "content": 0}, "got number 0"),
        ({"role": "user", "content": False}, "got boolean false"),
        ({"role": "narrator", "content": ""}, 'has the role string "narrator", expected one of system'),
        ({"content": ""}, "has the role null"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part 0 is of type image_url: only text"),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "must have a string as text, got null",
        ),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "has calls of tools, but its role is user"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "arguments is a string that is",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]},
            "must be an object, or one",
        ),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "must name a function"),
        ({"role": "function_call", "content": "f(1)"}, r"messages\[1\] is a string that is no JSON"),
        ({"role": "function_call", "content": "[]"}, "calls nothing"),
        ({"role": "assistant", "content": "", "thinking": ["r"]}, "thinking must be a string"),
    ],
)
def test_messages_that_are_refused(message: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        content_of({"messages": [USER, message]})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"messages": []}, "messages must be a list of messages with at least one"),
        ({"messages": 0}, "messages must be a list, got number 0"),
        ({"messages": "[{'role': 'user'}]"}, "messages is a string that is no JSON"),
        ({"messages": "[" * 100_000}, r"is no JSON \(nested too deep\)"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, r"is no JSON \(a lone surrogate"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, r"tools\[0\] must define a function"),
        ({"messages": [{"role": "system", "content": ""}], "system": "s"}, "system is given twice"),
        ({"messages": [USER], "system": 0}, "system must be a string, got number 0"),
        ({"messages": [USER], "images": ["a.png"]}, "the row has images: only text"),
    ],
)
def test_conversations_that_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        content_of(fields)


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("observation", "tool"),
        ("function_response", "tool"),
    ],
)
def test_sharegpt_roles(said: str, role: str) -> None:
    fields = {"conversations": [{"from": said, "value": "v"}]}
    assert conversation_of(fields).messages == [{"role": role, "content": "v"}]


def test_sharegpt_rows_with_system_and_tools() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "0"},
        {"from": "gpt", "value": ""},
    ]
    content = conversation_of({"conversations": turns, "system": "s", "tools": json.dumps([TOOL])})
    assert [message["role"] for message in content.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in content.messages] == ["s", "q", "", "0", ""]
    assert content.tools == [WRAPPED_TOOL]
    assert (
        conversation_of({"conversations": json.dumps(turns), "system": ""}).messages == content.messages[1:]
    )


@pytest.mark.parametrize(
    ("about", "question"), [("i", "do\n\ni"), ("", "do"), (None, "do"), ("0", "do\n\n0")]
)
def test_alpaca_inputs(about: str | None, question: str) -> None:
    content = conversation_of({"instruction": "do", "input": about, "output": ""})
    assert content.messages == [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]


def test_alpaca_with_history_and_system() -> None:
    fields = {
        "instruction": "",
        "input": "i",
        "output": "o",
        "system": "s",
        "history": [["q", "a"], ["", ""]],
    }
    content = conversation_of(fields)
    assert [message["content"] for message in content.messages] == ["s", "q", "a", "", "", "i", "o"]
    assert [message["role"] for message in content.messages[:3]] == ["system", "user", "assistant"]
    with pytest.raises(ValueError, match=r"history\[0\] must be a list of two strings, got list"):
        content_of({**fields, "history": [["q"]]})
    with pytest.raises(ValueError, match="output must be a string, got number 0"):
        content_of({**fields, "output": 0})


def test_prompt_and_completion() -> None:
    assert content_of({"prompt": "", "completion": "0"}) == Continuation("", "0")
    content = conversation_of({"prompt": [USER], "completion": [{**ANSWER, "weight": 1}], "system": "s"})
    assert (content.given, content.learned) == (2, (True, True, True))
    assert content.messages[1:] == [USER, ANSWER]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": [USER], "completion": "a"}, "both be strings or both be lists"),
        ({"prompt": "q", "completion": 0}, "completion must be a string, got number 0"),
        ({"prompt": "q", "completion": "a", "system": "s"}, "system has no place beside strings"),
        ({"prompt": "q", "completion": "a", "tools": [TOOL]}, "tools has no place beside strings"),
    ],
)
def test_prompts_that_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        content_of(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": []},
        {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER]},
        {"prompt": "q", "chosen": ANSWER, "rejected": ""},
        {"chosen": [USER, ANSWER], "rejected": [USER]},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {},
        },
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    ],
)
def test_preferences_are_read_when_they_are_asked_for(fields: dict[str, Any]) -> None:
    assert conversation_of(fields, "preference") == Conversation([USER, ANSWER], given=1)


def test_preferences_of_strings_and_of_nothing() -> None:
    fields = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert content_of(fields, "preference") == Continuation("q", "a")
    with pytest.raises(ValueError, match="chosen answers something: expected it in prompt"):
        content_of({"chosen": [ANSWER], "rejected": [ANSWER]}, "preference")
    with pytest.raises(ValueError, match="chosen must end with the answer"):
        content_of({"chosen": [USER], "rejected": [USER]}, "preference")


def test_texts() -> None:
    assert content_of({"text": ""}) == PlainText("")
    for value, said in ((0, "number 0"), (False, "boolean false"), ([], "list")):
        with pytest.raises(ValueError, match=f"text must be a string, got {said}"):
            content_of({"text": value})


def test_tokens() -> None:
    assert content_of({"input_ids": [0, 7]}) == Tokens([0, 7], None)
    assert content_of({"input_ids": "[0, 7]", "labels": "[-100, 7]"}) == Tokens([0, 7], [-100, 7])
    padded = {"input_ids": [9, 0, 7, 9], "labels": [-100, -100, 7, -100], "attention_mask": [0, 1, 1, 0]}
    assert content_of(padded) == Tokens([0, 7], [-100, 7])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"input_ids": []}, "at least one id"),
        ({"input_ids": [1, -1]}, r"input_ids\[1\] is -1, expected 0 or more"),
        ({"input_ids": [True]}, r"input_ids\[0\] must be an integer, got boolean true"),
        ({"input_ids": [1.0]}, r"input_ids\[0\] must be an integer, got number 1.0"),
        ({"input_ids": [[1]]}, r"input_ids\[0\] must be an integer, got list"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values, but input_ids has 2"),
        ({"input_ids": [1], "labels": [-1]}, r"labels\[0\] is -1, expected 0 or more, or -100"),
        ({"input_ids": [1], "attention_mask": [1, 0]}, "attention_mask has 2 values"),
        ({"input_ids": [1, 1], "attention_mask": [1, 2]}, "numbers several texts in one row"),
    ],
)
def test_tokens_that_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        content_of(fields)


@pytest.mark.parametrize("value", [0, False, 1.5, {}, [None], [[]], [{}], [{"role": []}]])
@pytest.mark.parametrize("form", FORMS)
def test_no_form_takes_a_wrong_value(form: str, value: object) -> None:
    with pytest.raises(ValueError):
        content_of(dict.fromkeys(FORMS[form], value), form)
