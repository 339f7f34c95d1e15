"""Exact ids and labels: conversations, then plain texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data import PreparedData, prepare
from airtune.run.encode import encode_prompt
from tests.tiny_tokenizer import (
    CHAT_ROW,
    CHATML,
    CHATML_MARKED,
    LINES,
    THINKING,
    WITH_BOS,
    tiny_tokenizer,
    write_jsonl,
)


def bare(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def pieces(tokenizer: PreTrainedTokenizerFast, data: PreparedData, index: int = 0) -> tuple[str, str]:
    """The context and the learned part of a row, as text."""
    row = data[index]
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (-100, id) for id, label in pairs)
    context, learned = [i for i, label in pairs if label == -100], [i for i, label in pairs if label != -100]
    return str(tokenizer.decode(context)), str(tokenizer.decode(learned))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_exact_ids_and_labels_of_a_conversation(tmp_path: Path, template: str, trim_offsets: bool) -> None:
    tokenizer = tiny_tokenizer(template, trim_offsets=trim_offsets)
    row = prepare(write_jsonl(tmp_path, CHAT_ROW), tokenizer)[0]
    head = bare(tokenizer, "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n")
    answer, line_end = bare(tokenizer, "yes<|im_end|>"), bare(tokenizer, "\n")
    assert row["input_ids"] == head + answer + line_end
    assert row["labels"] == [-100] * len(head) + answer + [-100] * len(line_end)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, WITH_BOS, LINES, THINKING])
def test_generation_starts_from_the_ids_that_training_learned_to_continue(
    tmp_path: Path, template: str
) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=True)
    row = prepare(write_jsonl(tmp_path, CHAT_ROW), tokenizer)[0]
    prompt = encode_prompt(tokenizer, CHAT_ROW["messages"][:1])
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["labels"][: len(prompt) + 1] == [-100] * len(prompt) + [row["input_ids"][len(prompt)]]


def test_a_rendered_bos_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(WITH_BOS, adds_bos=True)
    row = prepare(write_jsonl(tmp_path, CHAT_ROW), tokenizer)[0]
    assert row["input_ids"][0] == tokenizer.bos_token_id
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1


def test_completion_messages_are_learned_and_answers_in_the_prompt_are_not(tmp_path: Path) -> None:
    ask, answer = CHAT_ROW["messages"]
    row = {"prompt": [ask, answer, ask], "completion": [{"role": "assistant", "content": "no"}]}
    for learn_on in ("assistant", "completion", "last_assistant"):
        tokenizer = tiny_tokenizer()
        data = prepare(write_jsonl(tmp_path, row), tokenizer, learn_on=learn_on)
        assert pieces(tokenizer, data)[1] == "no<|im_end|>"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({**CHAT_ROW, "tools": [{}]}, "rows.jsonl:1: the row has tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"rows.jsonl:1: messages\[0\] has the role"),
        (
            {"prompt": "x", "completion": CHAT_ROW["messages"]},
            "rows.jsonl:1: prompt and completion must both be",
        ),
        ({"prompt": 0, "completion": "x"}, "rows.jsonl:1: prompt must be a string, got number 0"),
        (
            {"prompt": "x", "completion": False},
            "rows.jsonl:1: completion must be a string, got boolean false",
        ),
    ],
)
def test_rows_that_would_lose_something_are_refused(tmp_path: Path, row: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        prepare(write_jsonl(tmp_path, row), tiny_tokenizer())


def test_no_tools_are_no_reason_to_complain(tmp_path: Path) -> None:
    assert (
        len(
            prepare(
                write_jsonl(tmp_path, {**CHAT_ROW, "tools": None}, {**CHAT_ROW, "tools": []}),
                tiny_tokenizer(),
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("row", "learn_on"),
    [(CHAT_ROW, "completion"), ({"text": "x"}, "last_assistant"), ({"text": "x"}, "completion")],
)
def test_a_mode_that_the_form_cannot_honour_is_refused(tmp_path: Path, row: object, learn_on: str) -> None:
    with pytest.raises(ValueError, match=f"learn_on is '{learn_on}', but rows of the form"):
        prepare(write_jsonl(tmp_path, row), tiny_tokenizer(), learn_on=learn_on)


def test_a_template_that_cannot_honour_the_mode_names_the_row(tmp_path: Path) -> None:
    twice = {"messages": CHAT_ROW["messages"] * 2}
    with pytest.raises(ValueError, match=r"rows.jsonl:2: the chat template writes message 1"):
        prepare(write_jsonl(tmp_path, CHAT_ROW, twice), tiny_tokenizer(THINKING))


def test_answers_without_an_end_token_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(write_jsonl(tmp_path, CHAT_ROW), tiny_tokenizer(), chat_template=LINES)
    assert "in 1 conversations (first at" in caplog.text
    assert "does not learn to stop" in caplog.text


def test_conversations_need_a_template_and_plain_texts_do_not(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    assert len(prepare(write_jsonl(tmp_path, {"prompt": "a", "completion": "b"}), tokenizer)) == 1
    with pytest.raises(ValueError, match=r"set data\.chat_template"):
        prepare(write_jsonl(tmp_path, CHAT_ROW), tokenizer)


@pytest.mark.parametrize("value", [0, False, ["x"], {"a": 1}])
def test_text_that_is_no_string_is_refused(tmp_path: Path, value: object) -> None:
    path = write_jsonl(tmp_path, {"text": "x"}, {"text": value})
    with pytest.raises(ValueError, match=r"rows.jsonl:2: text must be a string, got"):
        prepare(path, tiny_tokenizer())


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_exact_ids_and_labels_of_prompt_and_completion(
    tmp_path: Path, adds_bos: bool, trim_offsets: bool
) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos, trim_offsets=trim_offsets)
    row = prepare(write_jsonl(tmp_path, {"prompt": "Say", "completion": "  yes \n"}), tokenizer)[0]
    head, answer = encode_prompt(tokenizer, "Say"), bare(tokenizer, "  yes \n")
    assert row["input_ids"] == [*head, *answer, tokenizer.eos_token_id]
    assert row["labels"] == [*[-100] * len(head), *answer, tokenizer.eos_token_id]
    assert row["input_ids"].count(tokenizer.bos_token_id) == int(adds_bos)


@pytest.mark.parametrize("text", ["yes no", "", "0", "\U0001f600 na\u00efve", " \n", "<|bos|>yes"])
def test_all_of_a_text_is_learned_with_one_eos(tmp_path: Path, text: str) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    row = prepare(write_jsonl(tmp_path, {"text": text}), tokenizer)[0]
    assert row["input_ids"] == [0, *bare(tokenizer, text.removeprefix("<|bos|>")), tokenizer.eos_token_id]
    assert row["labels"] == [-100, *row["input_ids"][1:]]


def test_an_eos_that_is_already_there_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = prepare(write_jsonl(tmp_path, {"prompt": "Say", "completion": " yes<|im_end|>"}), tokenizer)[0]
    assert row["input_ids"].count(tokenizer.eos_token_id) == 1
    assert row["labels"][-1] == tokenizer.eos_token_id
    # one that ends the prompt is not the completion's
    row = prepare(write_jsonl(tmp_path, {"prompt": "Say<|im_end|>", "completion": ""}), tokenizer)[0]
    assert row["labels"] == [-100] * (len(row["labels"]) - 1) + [tokenizer.eos_token_id]
    assert row["input_ids"].count(tokenizer.eos_token_id) == 2


def test_a_token_across_the_border_is_learned_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, {"prompt": "is ", "completion": "yes"}), tokenizer)
    assert pieces(tokenizer, data) == ("is", " yes<|im_end|>")
    assert "in 1 rows one token holds the end of the prompt" in caplog.text


def test_tokens_of_one_character_stay_together(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(write_jsonl(tmp_path, {"prompt": "\U0001f600", "completion": "\U0001f600"}), tokenizer)
    face = bare(tokenizer, "\U0001f600")
    assert len(face) > 1
    assert data[0]["labels"] == [*[-100] * len(face), *face, tokenizer.eos_token_id]


def test_learning_on_all_learns_the_prompt_too(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    row = prepare(write_jsonl(tmp_path, {"prompt": "Say", "completion": " yes"}), tokenizer, learn_on="all")[
        0
    ]
    assert row["labels"] == [-100, *row["input_ids"][1:]]


def test_plain_texts_need_an_eos(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS token"):
        prepare(write_jsonl(tmp_path, {"text": "x"}), tokenizer)
