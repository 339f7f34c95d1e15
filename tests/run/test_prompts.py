"""Prompts from a command line, a pipe or a file, as the ids that the model was trained on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from airtune.generate import what_is_left
from airtune.run.prompts import (
    Prompt,
    PromptWriter,
    answers_file,
    check_output,
    given_prompts,
    read_prompts,
)
from tests.tiny_tokenizer import CHATML, LINES, RAISES_ON_SYSTEM, WITH_BOS, tiny_tokenizer, write_jsonl

USER = {"role": "user", "content": "Say yes."}
YES = {"role": "assistant", "content": "yes"}


class Pipe(io.StringIO):
    pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text(writer: PromptWriter, content: str | list[dict[str, object]]) -> str:
    return str(writer.tokenizer.decode(writer.encode(Prompt(content))))


# --- writing ------------------------------------------------------------------------------------------------


def test_where_there_is_a_template_a_text_is_a_turn() -> None:
    asked = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    assert text(PromptWriter(tiny_tokenizer()), "Say yes.") == asked
    assert text(PromptWriter(tiny_tokenizer(None), chat_template=CHATML), "Say yes.") == asked
    assert text(PromptWriter(tiny_tokenizer()), [USER]) == asked


def test_without_one_it_is_gone_on_with() -> None:
    assert text(PromptWriter(tiny_tokenizer(None)), "Say yes.") == "Say yes."
    assert text(PromptWriter(tiny_tokenizer(), chat=False), "Say yes.") == "Say yes."


def test_bos_comes_once() -> None:
    assert text(PromptWriter(tiny_tokenizer(None, adds_bos=True)), "Say").count("<|bos|>") == 1
    assert text(PromptWriter(tiny_tokenizer(WITH_BOS, adds_bos=True)), "Say").count("<|bos|>") == 1


def test_a_system_turn_opens_every_conversation_without_one() -> None:
    writer = PromptWriter(tiny_tokenizer(), system="You are kind.")
    assert text(writer, "Say yes.").startswith(
        "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user"
    )
    own = [{"role": "system", "content": "Say no."}, USER]
    assert "kind" not in text(writer, own)


@pytest.mark.parametrize(
    ("template", "options", "content", "complaint"),
    [
        (None, {"chat": True}, "a", "the tokenizer has no chat template"),
        (None, {"system": "b"}, "a", "system needs a chat template"),
        (None, {}, [USER], "here: a conversation needs a chat template"),
        (RAISES_ON_SYSTEM, {"system": "b"}, "a", "here: the chat template refuses the conversation"),
        (CHATML, {}, [{"role": "wizard", "content": "b"}], "here: .*wizard"),
        (None, {}, "", "here: the prompt has no tokens"),
    ],
)
def test_what_cannot_be_written_is_refused(
    template: str | None, options: dict[str, object], content: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        PromptWriter(tiny_tokenizer(template), **options).encode(Prompt(content, "here"))


def test_the_token_that_ends_a_turn_ends_an_answer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|bos|>"  # as in a base model whose chat template ends turns with another token
    assert PromptWriter(tokenizer).turn_end_ids() == tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    assert PromptWriter(tiny_tokenizer(LINES)).turn_end_ids() == []
    assert PromptWriter(tiny_tokenizer(None)).turn_end_ids() == []


# --- reading ------------------------------------------------------------------------------------------------


def test_what_is_given_is_taken_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    file = str(tmp_path / "p.txt")
    assert given_prompts("two", None, Pipe("three")) == [Prompt("two")]
    assert given_prompts(None, file, Pipe("three")) == [Prompt("one", f"{file}:1")]
    assert given_prompts(None, None, Pipe("three\nfour\n")) == [Prompt("three\nfour", "standard input")]
    assert given_prompts(None, None, Terminal()) is None
    with pytest.raises(ValueError, match="nothing to answer: give prompt=TEXT"):
        given_prompts(None, None, Pipe(" \n"))


def test_a_pipe_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="standard input is not UTF-8"):
        given_prompts(None, None, io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8"))


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffone\r\n\n two \u2028 three\n".encode())
    assert [prompt.content for prompt in read_prompts(str(file))] == ["one", " two \u2028 three"]


def test_rows_of_training_data_are_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "airtune")
    rows = [
        {"messages": [USER, YES]},
        {"messages": [USER, YES, USER]},
        {"prompt": "Say no.", "completion": "no"},
        {"prompt": [USER], "completion": [YES]},
        {"text": "Once"},
        {"conversations": [{"from": "human", "value": "Say yes."}, {"from": "gpt", "value": "yes"}]},
        {"instruction": "Say", "input": "", "output": "yes"},
    ]
    contents = [prompt.content for prompt in read_prompts(write_jsonl(tmp_path, *rows))]
    said = [{"role": "user", "content": "Say"}]
    assert contents == [[USER], [USER, YES, USER], "Say no.", [USER], "Once", [USER], said]
    assert "In 3 of 7 prompts the answer at the end is left out" in caplog.text


def test_fields_beside_the_messages_count_as_in_training(tmp_path: Path) -> None:
    """A system turn that is a field of the row would be lost without a word, and an image too."""
    system = {"role": "system", "content": "You are kind."}
    rows = [{"system": "You are kind.", **row} for row in ({"messages": [USER]}, {"prompt": "Say yes."})]
    assert [p.content for p in read_prompts(write_jsonl(tmp_path, *rows))] == [[system, USER]] * 2
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the row has images"):
        read_prompts(write_jsonl(tmp_path, {"messages": [USER], "images": ["a.png"]}))


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    (prompt,) = read_prompts(write_jsonl(tmp_path, {"messages": [USER], "tools": tools}))
    tokenizer = tiny_tokenizer(template)
    assert tokenizer.decode(PromptWriter(tokenizer).encode(prompt)).startswith("lookup<|im_start|>")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"question": "a"},
            r"rows.jsonl:1: expected prompt, messages, conversations, .* got question",
        ),
        ({}, r"rows.jsonl:1: expected prompt, .* or text; got no field"),
        ({"messages": [YES]}, r"rows.jsonl:1: nothing but answers"),
        ({"messages": "Say"}, r"rows.jsonl:1: messages"),
        ({"prompt": 3}, r"rows.jsonl:1: prompt"),
        ([1], r"rows.jsonl:1: expected a JSON object"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_prompts(write_jsonl(tmp_path, row))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"p\.txt: no prompt in it"):
        read_prompts(str(tmp_path / "p.txt"))
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        read_prompts(str(tmp_path / "nowhere.txt"))


# --- the answers' file --------------------------------------------------------------------------------------


def test_the_file_appears_when_all_is_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    with answers_file(str(output)) as write:
        write({"answer": "ünïcode"})
        assert output.read_text() == "old"
    assert output.read_text(encoding="utf-8") == '{"answer": "ünïcode"}\n'
    assert list(tmp_path.iterdir()) == [output]
    assert what_is_left(str(output)) == "Nothing was written."


def test_a_stopped_run_says_where_its_answers_are(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def stopped() -> None:
        with answers_file(str(output)) as write:
            write({"answer": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not output.exists()
    partial = tmp_path / ".out.jsonl.partial"
    assert json.loads(partial.read_text()) == {"answer": 1}
    assert str(partial) in what_is_left(str(output))


def test_no_file_is_no_trouble() -> None:
    with answers_file(None) as write:
        write({})
    assert what_is_left(None) == "Nothing was written."


@pytest.mark.parametrize(
    ("place", "interactive", "complaint"),
    [
        (lambda here: here, False, "expected a file in a folder that exists"),
        (lambda here: here / "no" / "out.jsonl", False, "expected a file in a folder that exists"),
        (lambda here: here / "out.jsonl", True, "output is for answers to prompt or prompts"),
        (lambda here: here / "." / "asked.txt", False, "the answers would replace the prompts"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_early(
    tmp_path: Path, place: Callable[[Path], Path], interactive: bool, complaint: str
) -> None:
    asked = tmp_path / "asked.txt"
    asked.write_text("Who?\n")
    with pytest.raises(ValueError, match=complaint):
        check_output(str(place(tmp_path)), str(asked), interactive=interactive)
    check_output(str(tmp_path / "out.jsonl"), str(asked), interactive=False)
    check_output(None, None, interactive=True)
