"""The same ids and labels as TRL's `SFTTrainer`, where both support the case.

`trl_expected.json` holds what TRL made of the cases below, and the versions it was made with. To record it
anew, run this in the root of the repository, in an environment with TRL:

    import json
    from importlib.metadata import version
    from pathlib import Path
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer
    from tests.run.data.test_trl import CASES, EXPECTED, tokenizer_of

    examples = {}
    for name, case in CASES.items():
        tokenizer = tokenizer_of(case)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
        args = SFTConfig("unused", report_to=[], use_cpu=True, bf16=False, **case.trl_options)
        rows = Dataset.from_list([case.row])
        example = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train_dataset[0]
        examples[name] = {key: example[key] for key in ("input_ids", "labels")}
    made_with = {name: version(name) for name in ("trl", "transformers", "tokenizers")}
    Path(EXPECTED).write_text(json.dumps({"made_with": made_with, "examples": examples}) + "\n")

The ids are equal in all cases. The labels differ in two ways, both on purpose:

* TRL labels position 0 where everything is learned. Nothing predicts that token, so its label has no effect
  on the loss; it is not counted here as learned.
* TRL learns all that follows a prompt in a conversation of prompt and completion: the line end that this
  template writes after the end token as well, which is never generated, and turns of tools and users. Here a
  completion of messages is learned like any conversation, answer by answer (`line_end_too`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data.prepare import prepare
from tests.chat_templates import REASONING, TOOLS, TOOLS_MARKED
from tests.tiny_tokenizer import CHATML, CHATML_MARKED, WITH_BOS, tiny_tokenizer, write_jsonl

EXPECTED = Path(__file__).with_name("trl_expected.json")

ASK, ANSWER = {"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}
AGAIN, LAST = {"role": "user", "content": "Say no. "}, {"role": "assistant", "content": " no\n"}
SYSTEM = {"role": "system", "content": "You are kind."}
TOOL = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "The capital of a country.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "capital", "arguments": {"country": "Italy"}}}],
}
RESULT = {"role": "tool", "name": "capital", "content": '{"capital": "Rome"}'}
ITALY = {"role": "user", "content": "What is the capital of Italy?"}
ROME = {"role": "assistant", "content": "The capital of Italy is Rome."}


@dataclass(frozen=True)
class Case:
    row: dict[str, Any]
    learn_on: str = "assistant"
    template: str = CHATML
    adds_bos: bool = False
    trl_options: dict[str, Any] = field(default_factory=dict)
    line_end_too: bool = False


MARKED = {"assistant_only_loss": True}
CASES = {
    "prompt and completion": Case({"prompt": "Who are you?", "completion": " I am a lamp."}),
    "prompt and completion, BOS": Case(
        {"prompt": "Who are you?", "completion": " A\u0301 lamp"}, adds_bos=True
    ),
    "prompt and completion, all": Case(
        {"prompt": "Who are you?", "completion": " I am"}, "all", trl_options={"completion_only_loss": False}
    ),
    "text": Case({"text": "The answer is yes."}, adds_bos=True),
    "text with its EOS": Case({"text": "The answer is yes.<|im_end|>"}),
    "messages": Case(
        {"messages": [SYSTEM, ASK, ANSWER, AGAIN, LAST]}, template=CHATML_MARKED, trl_options=MARKED
    ),
    "messages, all": Case({"messages": [ASK, ANSWER, AGAIN, LAST]}, "all", WITH_BOS, adds_bos=True),
    "messages, reasoning, all": Case(
        {"messages": [ASK, ANSWER, AGAIN, LAST | {"reasoning_content": "one two"}]}, "all", REASONING
    ),
    "prompt and completion of messages": Case(
        {"prompt": [SYSTEM, ASK, ANSWER, AGAIN], "completion": [LAST]}, line_end_too=True
    ),
    "prompt and completion of messages, tools": Case(
        {"prompt": [ITALY, CALL, RESULT], "completion": [ROME], "tools": [TOOL]},
        template=TOOLS,
        line_end_too=True,
    ),
    "tools": Case(
        {"messages": [ITALY, CALL, RESULT, ROME], "tools": [TOOL]}, template=TOOLS_MARKED, trl_options=MARKED
    ),
    "a completion that is marked": Case(
        {"prompt": [ASK, ANSWER, AGAIN], "completion": [LAST]}, template=CHATML_MARKED, trl_options=MARKED
    ),
}


def tokenizer_of(case: Case) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(case.template, adds_bos=case.adds_bos)


@pytest.mark.parametrize("name", CASES)
def test_ids_and_labels_are_those_of_trl(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tokenizer = tokenizer_of(case)
    row = prepare(write_jsonl(tmp_path, case.row), tokenizer, learn_on=case.learn_on)[0]
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))["examples"][name]
    labels = [-100, *expected["labels"][1:]]
    if case.line_end_too:
        line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
        assert labels[-len(line_end) :] == line_end
        labels[-len(line_end) :] = [-100] * len(line_end)
    assert row == {"input_ids": expected["input_ids"], "labels": labels}
