"""Which characters of a conversation are learned, template by template."""

from __future__ import annotations

from pathlib import Path

import pytest

from airtune.run.chat import ChatRenderer, Message, checked_messages, resolve_template
from airtune.run.encode import encode_prompt
from tests.tiny_tokenizer import (
    CHATML,
    CHATML_MARKED,
    DROPS_SYSTEM,
    LINES,
    PROMPTED_THINKING,
    RAISES_ON_SYSTEM,
    THINKING,
    WITH_BOS,
    tiny_tokenizer,
)


def turns(*contents: str) -> list[Message]:
    """User and assistant in turn."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


TWO_ANSWERS = turns("one", "two", "three", "four")


def learned(template: str, messages: list[Message], learn_on: str = "assistant", first: int = 0) -> list[str]:
    text, spans = ChatRenderer(tiny_tokenizer(), template).learn(messages, learn_on, first=first)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, WITH_BOS])
def test_answers_are_learned_with_their_end_token_and_without_their_header(template: str) -> None:
    assert learned(template, TWO_ANSWERS) == ["two<|im_end|>", "four<|im_end|>"]
    assert learned(template, TWO_ANSWERS, "last_assistant") == ["four<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_all_is_the_whole_render(template: str) -> None:
    assert learned(template, turns("a", "b"), "all") == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    ]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_the_answer_is_found_by_role_and_not_by_its_words(template: str) -> None:
    messages = turns("yes", "yes", "assistant\nyes<|im_end|>", "yes")
    text, spans = ChatRenderer(tiny_tokenizer(), template).learn(messages, "last_assistant")
    assert [text[a:b] for a, b in spans] == ["yes<|im_end|>"]
    assert spans[0][0] == text.rindex("assistant\n") + len("assistant\n")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_turn_after_the_last_answer_is_not_learned(template: str) -> None:
    assert learned(template, turns("one", "two", "three"), "last_assistant") == ["two<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answers_before_first_are_not_learned(template: str) -> None:
    assert learned(template, TWO_ANSWERS, first=3) == ["four<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("content", ["", "0", "false", "null"])
def test_contents_that_look_like_nothing_are_contents(template: str, content: str) -> None:
    assert learned(template, turns(content, content)) == [f"{content}<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, WITH_BOS, THINKING, LINES])
@pytest.mark.parametrize("prompted", [False, True])
def test_the_render_is_the_tokenizers_own(template: str, prompted: bool) -> None:
    tokenizer = tiny_tokenizer(template)
    messages = [{key: str(value) for key, value in message.items()} for message in TWO_ANSWERS]
    own = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    assert ChatRenderer(tokenizer, template).render(TWO_ANSWERS, add_generation_prompt=prompted) == own


def test_an_answer_in_two_turns_is_two_answers() -> None:
    messages = [*turns("one", "two"), {"role": "assistant", "content": "three"}]
    assert learned(CHATML, messages) == ["two<|im_end|>", "three<|im_end|>"]


def test_no_answer_learns_nothing() -> None:
    assert learned(CHATML, turns("one")) == []


def test_history_dependent_template_learns_the_last_answer_and_refuses_the_others() -> None:
    assert learned(THINKING, TWO_ANSWERS, "last_assistant") == ["<think>\n\n</think>\n\nfour<|im_end|>"]
    assert learned(THINKING, turns("one", "two")) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]
    with pytest.raises(ValueError, match=r"message 1 .*learn_on=last_assistant"):
        learned(THINKING, TWO_ANSWERS)


def test_a_generation_prompt_that_is_not_in_the_render_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\{% generation %\} marks"):
        learned(PROMPTED_THINKING, turns("one", "two"), "last_assistant")


def test_without_an_end_token_the_line_end_is_learned_and_it_is_noticed() -> None:
    renderer = ChatRenderer(tiny_tokenizer(), LINES)
    text, spans = renderer.learn(turns("one", "two"), "assistant")
    assert [text[a:b] for a, b in spans] == [" two\n"]
    assert not renderer.ends_turns(text, spans)
    assert ChatRenderer(tiny_tokenizer(), CHATML).ends_turns(*_learn_chatml())


def _learn_chatml() -> tuple[str, list[tuple[int, int]]]:
    return ChatRenderer(tiny_tokenizer(), CHATML).learn(TWO_ANSWERS, "assistant")


def test_marks_that_do_not_fit_the_answers_are_refused() -> None:
    only_last = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ValueError, match="marks 1 parts as generated in a conversation with 2"):
        learned(only_last, TWO_ANSWERS)
    never = CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(ValueError, match="marks 0 parts"):
        learned(never, turns("one", "two"))


def test_a_turn_that_the_template_leaves_out_is_refused() -> None:
    system: Message = {"role": "system", "content": "You are kind."}
    assert learned(DROPS_SYSTEM, turns("one", "two")) == ["two<|im_end|>"]
    with pytest.raises(ValueError, match=r"leaves out the content of message 0 \(role system\)"):
        learned(DROPS_SYSTEM, [system, *turns("one", "two")])
    with pytest.raises(ValueError, match="refuses the conversation: System role not supported"):
        learned(RAISES_ON_SYSTEM, [system, *turns("one", "two")])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_system_turns_are_rendered(template: str) -> None:
    system: Message = {"role": "system", "content": "You are kind."}
    text, _ = ChatRenderer(tiny_tokenizer(), template).learn([system, *turns("one", "two")], "assistant")
    assert text.startswith("<|im_start|>system\nYou are kind.<|im_end|>")


def test_a_conversation_that_opens_with_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="opens a conversation"):
        learned(CHATML, [{"role": "assistant", "content": "one"}])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "list of messages with at least one, got null"),
        ([], "got list"),
        ("hello", 'got string "hello"'),
        ([0], r"messages\[0\] must be an object with role and content, got number 0"),
        ([{"role": "user"}], "string as content, got null"),
        ([{"role": "user", "content": 0}], "string as content, got number 0"),
        ([{"role": "user", "content": False}], "string as content, got boolean false"),
        ([{"content": "x"}], "has the role null"),
        ([{"role": "tool", "content": "x"}], 'has the role string "tool"'),
        (
            [{"role": "user", "content": "x"}, {"role": "ASSISTANT", "content": "x"}],
            r"messages\[1\] has the role",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "has tool_calls: calls of tools"),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "has function_call"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        checked_messages(value, "messages")


def test_null_fields_of_a_message_are_absent() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": None, "name": None}
    assert checked_messages([message], "messages") == [{"role": "assistant", "content": ""}]


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


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_has_its_bos_once(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(WITH_BOS, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    assert encode_prompt(tokenizer, turns("hello")).count(bos) == 1
    assert encode_prompt(tokenizer, "hello").count(bos) == int(adds_bos)
    assert encode_prompt(tokenizer, "<|bos|>hello").count(bos) == 1


def test_a_prompt_without_tokens_is_refused() -> None:
    assert encode_prompt(tiny_tokenizer(adds_bos=True), "") == [0]
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(tiny_tokenizer(), "")
