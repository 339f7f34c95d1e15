"""Rows with an answer become questions; answers with and without the adapter are those of resident models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import airtune
from airtune.run.questions import Questions, answer_questions, continuations, read_questions, score_answers
from airtune.run.scores import chosen_scores
from tests import twins, zoo
from tests.tiny_chat import make_adapter, make_model
from tests.tiny_tokenizer import tiny_tokenizer, write_jsonl

READING = {"format": "auto", "bad_rows": "error", "chat_template": None}
TURNS = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": "Say yes."},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Say no."},
    {"role": "assistant", "content": "no"},
]


def prompts(tokenizer: PreTrainedTokenizerBase, questions: Questions) -> list[str]:
    return [tokenizer.decode(question.ids) for question in questions.all]


def test_a_conversation_asks_for_its_last_answer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    after = [*TURNS, {"role": "user", "content": "hello"}]
    file = write_jsonl(tmp_path, {"messages": TURNS}, {"messages": after}, {"messages": TURNS[:3]})
    questions = read_questions(file, tokenizer, **READING)
    assert [question.expected for question in questions.all] == ["no", "no", "yes"]
    assert [question.where for question in questions.all] == [f"{file}:{line}" for line in (1, 2, 3)]
    first, second, third = prompts(tokenizer, questions)
    assert (
        first == second and first.endswith("Say no.<|im_end|>\n<|im_start|>assistant\n") and "yes<" in first
    )
    assert third.endswith("Say yes.<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(questions.turn_end_ids) == ["<|im_end|>"]


def test_a_prompt_asks_for_its_completion(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    file = write_jsonl(
        tmp_path, *({"prompt": f"{n} plus", "completion": f" {n}"} for n in ("one", "two", "six"))
    )
    questions = read_questions(file, tokenizer, limit=2, **READING)
    assert prompts(tokenizer, questions) == ["<|bos|>one plus", "<|bos|>two plus"]
    assert [question.expected for question in questions.all] == [" one", " two"]
    assert questions.turn_end_ids == []


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "hello"}], {}, "rows of the form text have no answer"),
        (
            [{"messages": TURNS}, {"messages": TURNS[:2]}],
            {},
            r"rows.jsonl:2: no turn of the assistant has a text",
        ),
        ([{"messages": TURNS[:2]}], {"bad_rows": "skip"}, "no row has an answer .*rows.jsonl:1: no turn"),
    ],
)
def test_rows_without_an_answer_are_bad(tmp_path: Path, rows: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(write_jsonl(tmp_path, *rows), tiny_tokenizer(), **(READING | options))


def test_bad_rows_are_skipped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_jsonl(tmp_path, {"messages": TURNS}, {"messages": TURNS[:2]})
    questions = read_questions(file, tiny_tokenizer(), **(READING | {"bad_rows": "skip"}))
    assert len(questions.all) == 1 and "1 rows are skipped, no answer" in caplog.text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_adapter(make_model(home / "base"), home / "adapter")
    return home


@pytest.fixture
def model(home: Path) -> Iterator[PeftModel]:
    model = airtune.load(home / "base", adapter=home / "adapter", device="cpu", file_access="buffered")
    assert isinstance(model, PeftModel)
    yield model.eval()
    airtune.stream_of(model).close()


def expected(model: PeftModel | LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=5, do_sample=False)
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_both_sides_answer_as_resident_models_do(
    home: Path, model: PeftModel, tmp_path: Path, batch_size: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    rows = [{"messages": TURNS[:k]} for k in (3, 5)] + [{"messages": [*TURNS[1:3]]}]
    questions = read_questions(write_jsonl(tmp_path, *rows), tokenizer, **READING)
    on, off = answer_questions(
        model, tokenizer, questions, batch_size=batch_size, max_new_tokens=5, compare=True
    )
    base = LlamaForCausalLM.from_pretrained(home / "base")
    assert off == [expected(base, tokenizer, question.ids) for question in questions.all]
    adapted = PeftModel.from_pretrained(base, home / "adapter")
    assert on == [expected(adapted, tokenizer, question.ids) for question in questions.all]
    assert on != off


def test_both_sides_share_the_passes(home: Path, model: PeftModel) -> None:
    tokenizer, stream, told = AutoTokenizer.from_pretrained(home / "base"), airtune.stream_of(model), []

    def visits(compare: bool) -> float:
        before = stream.counters()["visits"]
        prompts = [[5, 6, 7], [8, 9]]
        continuations(
            model, tokenizer, prompts, batch_size=2, compare=compare, tell=told.append,
            max_new_tokens=4, end_ids=[],
        )  # fmt: skip
        return stream.counters()["visits"] - before

    assert visits(compare=True) == visits(compare=False) > 0
    assert told == ["answering 1 to 2 of 2"] * 2


def test_layers_that_fold_rows_answer_one_side_after_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared experts are given the tokens of all rows on one axis: PEFT could not tell the rows apart."""
    folder, tokenizer = zoo.make("qwen4_exp__vl", tmp_path), tiny_tokenizer()
    model, resident = (
        twins.streamed("qwen4_exp__vl", folder).eval(),
        twins.resident("qwen4_exp__vl", folder).eval(),
    )
    prompts = [[5, 6, 7], [8, 9, 10]]
    options = {"batch_size": 2, "max_new_tokens": 3, "end_ids": []}
    with caplog.at_level(logging.INFO):
        said = continuations(model, tokenizer, prompts, compare=True, **options)
    assert "answered one after the other" in caplog.text
    on = continuations(resident, tokenizer, prompts, **options)
    with resident.disable_adapter():
        assert said == [*on, *continuations(resident, tokenizer, prompts, **options)]
    airtune.stream_of(model).close()


def test_every_answer_has_every_score(tmp_path: Path) -> None:
    file = write_jsonl(
        tmp_path, {"prompt": "a", "completion": "one two"}, {"prompt": "b", "completion": "no"}
    )
    questions = read_questions(file, tiny_tokenizer(), **READING)
    scores = chosen_scores(["exact_match", "rouge_l"], ignore_space=True, pattern=None)
    assert score_answers(["one  two", "yes"], questions, scores) == [
        {"exact_match": 1.0, "rouge_l": 1.0},
        {"exact_match": 0.0, "rouge_l": 0.0},
    ]
