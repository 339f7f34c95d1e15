"""One dialogue in every form that rows come in: the same ids and labels, the same start for generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data.encode import encode_prompt
from airtune.run.data.prepare import prepare
from tests.chat_templates import (
    CLOSED_TWICE,
    HEADERS,
    INSTRUCTIONS,
    MODEL_TURNS,
    MORE_SPECIAL_TOKENS,
    PARTS,
    PROMPTED_REASONING,
    REASONING,
    TOOLS,
    TOOLS_MARKED,
    TOOLS_OF_STRINGS,
)
from tests.tiny_tokenizer import CHATML, CHATML_MARKED, LINES, THINKING, WITH_BOS, tiny_tokenizer, write_jsonl

QUESTION, ANSWER = "Who are you?", "I am a lamp."
ASK: dict[str, Any] = {"role": "user", "content": QUESTION}
SAY: dict[str, Any] = {"role": "assistant", "content": ANSWER}
PARTS_OF_ASK = [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]

ONE_EXCHANGE: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASK, SAY]},
    "messages in parts": {"messages": [ASK | {"content": PARTS_OF_ASK}, SAY]},
    "messages with nulls": {
        "messages": [ASK | {"name": None, "tool_calls": None}, SAY | {"weight": 1}],
        "tools": None,
    },
    "prompt and completion": {"prompt": [ASK], "completion": [SAY]},
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "preference": {"prompt": QUESTION, "chosen": [SAY], "rejected": [SAY | {"content": "No."}]},
}

CALL = {"name": "weather", "arguments": {"city": "Rome"}}
TOOL = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}}
AS_STRING = CALL | {"arguments": json.dumps(CALL["arguments"])}
CALLING: dict[str, Any] = {"role": "assistant", "content": None}
RESULT, SUNNY = {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "It is sunny."}
AN_EXCHANGE_WITH_TOOLS: dict[str, dict[str, Any]] = {
    "arguments as an object": {
        "messages": [ASK, CALLING | {"tool_calls": [{"type": "function", "function": CALL}]}, RESULT, SUNNY],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "arguments as a string": {
        "messages": [
            ASK,
            CALLING | {"tool_calls": [{"type": "function", "function": AS_STRING}]},
            RESULT,
            SUNNY,
        ],
        "tools": [TOOL],
    },
    "a function call": {
        "messages": [ASK, CALLING | {"function_call": AS_STRING}, RESULT | {"role": "function"}, SUNNY],
        "functions": [TOOL],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": QUESTION},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "It is sunny."},
        ],
        "tools": json.dumps([TOOL]),
    },
    "prompt and completion": {
        "prompt": [ASK],
        "completion": [CALLING | {"tool_calls": [{"type": "function", "function": CALL}]}, RESULT, SUNNY],
        "tools": [TOOL],
    },
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(template, adds_bos=True, more_special_tokens=MORE_SPECIAL_TOKENS)


def encoded(folder: Path, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    format = "preference" if "chosen" in row else "auto"
    return prepare(write_jsonl(folder, row), tokenizer, format=format)[0]


@pytest.mark.parametrize(
    "template",
    [
        *(CHATML, CHATML_MARKED, WITH_BOS, LINES, PARTS, HEADERS, INSTRUCTIONS, MODEL_TURNS, CLOSED_TWICE),
        *(THINKING, REASONING, PROMPTED_REASONING),
    ],
)
def test_one_exchange_is_the_same_in_every_form(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(template)
    rows = {name: encoded(tmp_path, row, tokenizer) for name, row in ONE_EXCHANGE.items()}
    ids, labels = rows["messages"]["input_ids"], rows["messages"]["labels"]
    assert rows == dict.fromkeys(rows, rows["messages"])
    # What has these ids and labels already goes through unchanged.
    assert encoded(tmp_path, {"input_ids": ids, "labels": labels}, tokenizer) == rows["messages"]
    # Generation starts where learning does.
    prompt = encode_prompt(tokenizer, [ASK])
    assert ids[: len(prompt)] == prompt
    assert [label != -100 for label in labels[: len(prompt) + 1]] == [False] * len(prompt) + [True]


@pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED, TOOLS_OF_STRINGS, REASONING, PROMPTED_REASONING])
def test_an_exchange_with_tools_is_the_same_in_every_form(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(template)
    rows = {name: encoded(tmp_path, row, tokenizer) for name, row in AN_EXCHANGE_WITH_TOOLS.items()}
    assert rows == dict.fromkeys(rows, rows["sharegpt"])
    text = tokenizer.decode([label for label in rows["sharegpt"]["labels"] if label != -100])
    assert '<tool_call>weather {"city": "Rome"}</tool_call>' in text and "It is sunny." in text
    assert "sun<" not in text and "Tells it." not in text
    prompt = encode_prompt(tokenizer, [ASK], tools=[TOOL])
    assert rows["sharegpt"]["input_ids"][: len(prompt)] == prompt


def test_a_dialogue_written_out_by_hand_has_the_ids_of_the_rendered_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    rendered = prepare(write_jsonl(tmp_path, ONE_EXCHANGE["messages"]), tokenizer)[0]
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    by_hand = {
        "prompt": f"<|bos|><|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        "completion": f"{ANSWER}<|im_end|>",
    }
    row = prepare(write_jsonl(tmp_path, by_hand), tokenizer)[0]
    # A plain text opens with the BOS that the tokenizer adds; this template writes none, and a line end more.
    assert row["input_ids"][1:] + line_end == rendered["input_ids"]
    assert row["labels"][1:] + [-100] * len(line_end) == rendered["labels"]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": [ASK, SAY], "tools": [TOOL]}, "leaves out the definition of the tool weather"),
        (AN_EXCHANGE_WITH_TOOLS["sharegpt"] | {"tools": None}, r"leaves out the tool_calls of message 1"),
        ({"messages": [ASK, CALLING]}, "must have a string, or calls"),
    ],
)
def test_what_would_be_lost_is_refused_with_its_place(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{complaint}"):
        prepare(write_jsonl(tmp_path, row), tokenizer_of(CHATML))
