"""Exact ids and labels: conversations, plain texts, rows of tokens, prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from airtune.run.data.encode import Encoder, encode_prompt
from airtune.run.data.forms import Tokens
from airtune.run.data.prepare import prepare
from airtune.run.data.prepared import PreparedData
from airtune.run.data.texts import Script
from tests.chat_templates import PROMPTED_REASONING, REASONING, TOOLS
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


@pytest.mark.parametrize(
    "template", [CHATML, CHATML_MARKED, WITH_BOS, LINES, THINKING, REASONING, PROMPTED_REASONING]
)
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


def test_rows_of_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    labelled = {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]}
    mixed = prepare(write_jsonl(tmp_path, labelled, {"input_ids": [9, 10], "labels": None}), tokenizer)
    assert mixed[0] == {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    assert mixed[1] == {"input_ids": [9, 10], "labels": [-100, 10]}


def test_rows_of_tokens_are_cut_and_counted_like_others(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": labels} for labels in ([5, 6, 7, 8], [-100, -100, 7, 8])]
    data = prepare(write_jsonl(tmp_path, *rows), tiny_tokenizer(), max_length=2, overlong="truncate")
    assert [data[i] for i in range(len(data))] == [{"input_ids": [5, 6], "labels": [-100, 6]}]
    assert data.summary.dropped == {"nothing to learn after the cut": 1}


def test_scripts_and_tokens_keep_their_order() -> None:
    tokenizer = tiny_tokenizer()
    script = Script("yes", [(0, 3)], plain=True)
    encoded = Encoder(tokenizer).encode([Tokens([5], None), script, Tokens([6, 7], [-100, 7]), script])
    yes = [*bare(tokenizer, "yes"), tokenizer.eos_token_id]
    assert [list(row.ids) for row in encoded] == [[5], yes, [6, 7], yes]
    assert [list(row.learned) for row in encoded][::2] == [[0], [0, 1]]
    assert Encoder(tokenizer).encode([]) == []


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


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_has_its_bos_once(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(WITH_BOS, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    assert encode_prompt(tokenizer, CHAT_ROW["messages"][:1]).count(bos) == 1
    assert encode_prompt(tokenizer, "hello").count(bos) == int(adds_bos)
    assert encode_prompt(tokenizer, "<|bos|>hello").count(bos) == 1


def test_a_prompt_without_tokens_is_refused() -> None:
    assert encode_prompt(tiny_tokenizer(adds_bos=True), "") == [0]
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(tiny_tokenizer(), "")


def test_a_prompt_with_tools_has_the_ids_of_a_row_with_tools(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(TOOLS)
    tools = [{"type": "function", "function": {"name": "lamp", "parameters": {}}}]
    row = prepare(write_jsonl(tmp_path, {**CHAT_ROW, "tools": tools}), tokenizer)[0]
    prompt = encode_prompt(tokenizer, CHAT_ROW["messages"][:1], tools=tools)
    assert "lamp" in tokenizer.decode(prompt)
    assert row["input_ids"][: len(prompt)] == prompt
    with pytest.raises(ValueError, match="leaves out the definition of the tool lamp"):
        encode_prompt(tiny_tokenizer(CHATML), CHAT_ROW["messages"][:1], tools=tools)
    with pytest.raises(ValueError, match="no place for tools"):
        encode_prompt(tokenizer, "hello", tools=tools)
