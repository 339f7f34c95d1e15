"""Rows to scripts: modes, refusals and notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from airtune.run.data.forms import Continuation, Conversation, PlainText, Tokens
from airtune.run.data.messages import Message
from airtune.run.data.prepare import prepare
from airtune.run.data.texts import LEARN_ON, Script, ScriptWriter
from tests.tiny_tokenizer import CHAT_ROW, CHATML, LINES, PROMPTED_THINKING, tiny_tokenizer, write_jsonl

ASK: Message = {"role": "user", "content": "Say yes."}
ANSWER: Message = {"role": "assistant", "content": "yes"}


def written(form: str, content: object, learn_on: str = "assistant") -> list[str]:
    """What is learned of the script."""
    assert isinstance(content, Conversation | Continuation | PlainText)
    script = ScriptWriter(tiny_tokenizer(), form, learn_on).write(content, "rows.jsonl:7")
    assert isinstance(script, Script)
    assert script.plain is not isinstance(content, Conversation)
    return [script.text[start:end] for start, end in script.learned]


@pytest.mark.parametrize("learn_on", ["assistant", "last_assistant", "completion"])
def test_a_completion_is_learned_and_its_prompt_is_not(learn_on: str) -> None:
    assert written("prompt_completion", Continuation("2+2=", "4"), learn_on) == ["4"]
    given = Conversation([ASK, ANSWER, ASK, ANSWER], given=3)
    assert written("prompt_completion", given, learn_on) == ["yes<|im_end|>"]


def test_learning_on_all_learns_everything() -> None:
    assert written("prompt_completion", Continuation("2+2=", "4"), "all") == ["2+2=4"]
    assert written("text", PlainText("2+2=4"), "all") == written("text", PlainText("2+2=4")) == ["2+2=4"]
    [everything] = written("messages", Conversation([ASK, ANSWER]), "all")
    assert everything.startswith("<|im_start|>user")


def test_the_completion_of_an_alpaca_row_is_its_output() -> None:
    with_history = Conversation([ASK, {"role": "assistant", "content": "no"}, ASK, ANSWER])
    assert written("alpaca", with_history) == ["no<|im_end|>", "yes<|im_end|>"]
    assert written("alpaca", with_history, "completion") == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("form", "learn_on"),
    [
        ("messages", "completion"),
        ("sharegpt", "completion"),
        ("text", "last_assistant"),
        ("text", "completion"),
        ("tokens", "last_assistant"),
        ("tokens", "completion"),
        ("messages", "user"),
    ],
)
def test_a_mode_that_the_form_cannot_honour_is_refused(form: str, learn_on: str) -> None:
    with pytest.raises(ValueError, match=f"learn_on is '{learn_on}', but rows of the form {form} can do"):
        ScriptWriter(tiny_tokenizer(), form, learn_on)


@pytest.mark.parametrize("form", LEARN_ON)
def test_conversations_need_a_template_and_plain_texts_do_not(form: str) -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    if form in ("messages", "sharegpt", "alpaca"):
        with pytest.raises(ValueError, match=r"set data\.chat_template"):
            ScriptWriter(tokenizer, form, "assistant")
    else:
        writer = ScriptWriter(tokenizer, form, "assistant")
        assert writer.write(PlainText("x"), "rows.jsonl:7") == Script("x", [(0, 1)], plain=True)
        with pytest.raises(ValueError, match=r"rows.jsonl:7: .*set data\.chat_template"):
            writer.write(Conversation([ASK, ANSWER]), "rows.jsonl:7")


def test_a_template_that_cannot_honour_the_mode_names_the_row() -> None:
    writer = ScriptWriter(tiny_tokenizer(PROMPTED_THINKING), "messages", "assistant")
    with pytest.raises(ValueError, match=r"rows\.jsonl:7: the chat template writes message 1"):
        writer.write(Conversation([ASK, ANSWER]), "rows.jsonl:7")


def test_what_is_not_taught_is_noted_with_the_first_place() -> None:
    writer = ScriptWriter(tiny_tokenizer(), "messages", "assistant", LINES)
    writer.write(Conversation([ASK]), "rows.jsonl:6")
    assert writer.notes() == []
    for where, name in (("rows.jsonl:7", "reasoning_content"), ("rows.jsonl:8", "thinking")):
        writer.write(Conversation([ASK, ANSWER | {name: "hm"}]), where)
    endless, unreasoned = writer.notes()
    assert "in 2 conversations (first at rows.jsonl:7)" in endless and "does not learn to stop" in endless
    assert "in 2 conversations (first at rows.jsonl:7)" in unreasoned and "the reasoning" in unreasoned


def test_notes_reach_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(write_jsonl(tmp_path, CHAT_ROW), tiny_tokenizer(), chat_template=LINES)
    assert "does not learn to stop" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "learn_on", "complaint"),
    [
        (Tokens([5, 379], None), "assistant", "id 1 is 379, but the tokenizer has the ids 0 to 378"),
        (Tokens([5, 6], [-100, 5]), "assistant", "label 1 is 5, expected 6 .* or -100"),
        (Tokens([5, 6], [6, -100]), "assistant", "label 0 is 6, expected 5"),  # shifted already
        (Tokens([5, 6], [5, 6]), "all", "labels say what is learned"),
    ],
)
def test_tokens_that_cannot_be_meant_are_refused(tokens: Tokens, learn_on: str, complaint: str) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    assert max(tokenizer.get_vocab().values()) == 378
    with pytest.raises(ValueError, match=f"rows.jsonl:7: {complaint}"):
        ScriptWriter(tokenizer, "tokens", learn_on).write(tokens, "rows.jsonl:7")


def test_tokens_pass_through() -> None:
    tokens = Tokens([5, 6], [-100, 6])
    assert ScriptWriter(tiny_tokenizer(), "tokens", "assistant").write(tokens, "rows.jsonl:7") is tokens
    unlabelled = Tokens([5, 6], None)
    assert ScriptWriter(tiny_tokenizer(), "tokens", "all").write(unlabelled, "rows.jsonl:7") is unlabelled
