"""Which template is used, and what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from airtune.run.data.messages import Message
from airtune.run.data.templates import ChatTemplate, fresh_word, resolve_template
from tests.chat_templates import HEADERS, PARTS, TOOLS, TOOLS_OF_STRINGS
from tests.tiny_tokenizer import (
    CHATML,
    CHATML_MARKED,
    LINES,
    RAISES_ON_SYSTEM,
    THINKING,
    WITH_BOS,
    tiny_tokenizer,
)

ASK: Message = {"role": "user", "content": "one"}
ANSWER: Message = {"role": "assistant", "content": "two"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Roma è"}}}],
}


def render(source: str, *messages: Message) -> str:
    return ChatTemplate(tiny_tokenizer(), source).render(messages)


def test_a_template_is_source_or_a_file_or_a_name(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    assert resolve_template(tokenizer, None) == CHATML
    assert resolve_template(tokenizer, LINES) == LINES
    file = tmp_path / "lines.jinja"
    file.write_text(LINES, encoding="utf-8")
    assert resolve_template(tokenizer, str(file)) == LINES
    tokenizer.chat_template = {"default": CHATML, "short": LINES}
    assert resolve_template(tokenizer, None) == CHATML
    assert resolve_template(tokenizer, "short") == LINES
    with pytest.raises(ValueError, match="neither Jinja source, nor a file, nor a template's name"):
        resolve_template(tokenizer, "missing.jinja")


def test_without_a_template_the_error_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"no chat template.*set data\.chat_template"):
        resolve_template(tiny_tokenizer(chat_template=None), None)


@pytest.mark.parametrize("source", [CHATML, CHATML_MARKED, WITH_BOS, THINKING, LINES, HEADERS, TOOLS])
@pytest.mark.parametrize("prompted", [False, True])
def test_the_render_is_the_tokenizers_own(source: str, prompted: bool) -> None:
    tokenizer = tiny_tokenizer(source)
    messages = cast("list[dict[str, str]]", [ASK, CALL])  # as upstream's annotation has it
    own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    assert ChatTemplate(tokenizer, source).render([ASK, CALL], add_generation_prompt=prompted) == own


def test_a_template_that_reads_parts_gets_parts() -> None:
    assert render(PARTS, ASK, ANSWER) == render(CHATML, ASK, ANSWER)
    assert render(PARTS, {"role": "user", "content": ""}) == "<|im_start|>user\n<|im_end|>\n"


def test_arguments_are_an_object_or_json_as_the_template_wants_them() -> None:
    assert '{"city": "Roma è"}' in render(TOOLS, ASK, CALL)
    assert render(TOOLS_OF_STRINGS, ASK, CALL) == render(TOOLS, ASK, CALL)
    # Python's notation is nothing that a model should learn.
    plainly = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments")
    assert render(plainly, ASK, CALL) == render(TOOLS, ASK, CALL)


def test_a_developer_speaks_as_the_system_where_the_template_does_not_know_the_role() -> None:
    developer: Message = {"role": "developer", "content": "Be kind."}
    assert render(CHATML, developer, ASK).startswith("<|im_start|>system\nBe kind.")
    assert render("{# developer #}" + CHATML, developer, ASK).startswith("<|im_start|>developer\nBe kind.")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (RAISES_ON_SYSTEM, "System role not supported"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{% for %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' | dictsort }}", "has no attribute 'items'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    ],
)
def test_what_a_template_trips_over_is_said(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template refuses the conversation: .*{reason}"):
        render(source, {"role": "system", "content": "Be kind."})


def test_a_fresh_word_is_in_no_text() -> None:
    word = fresh_word("")
    assert fresh_word(f"a {word} b") != word
