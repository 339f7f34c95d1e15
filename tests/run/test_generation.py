"""Answers in batches: the tokens that transformers makes alone, and what ended each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

import airtune
from airtune.run.generation import (
    context_limit,
    decoding_options,
    default_end_ids,
    first_stop,
    generate_batch,
    guessing_options,
    room_for_answers,
)
from tests import zoo
from tests.tiny_chat import CONTEXT, make_model
from tests.tiny_tokenizer import tiny_tokenizer

TEXTS = ["Who are you?", "What is the capital of Italy? The capital of", "Say"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base: Path) -> Iterator[Any]:
    model = airtune.load(base)
    yield model
    airtune.stream_of(model).close()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def greedy(model: PreTrainedModel, ids: list[int], count: int = 12) -> list[int]:
    """What transformers makes of one prompt, without an end."""
    out = model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, len(ids) :].tolist()


def test_rows_of_a_batch_are_answered_as_if_alone(
    base: Path, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    """Padded on the left, with pad == eos; compared with a model in memory, one prompt at a time."""
    resident = LlamaForCausalLM.from_pretrained(base)
    answers = generate_batch(model, tokenizer, prompts, max_new_tokens=12, end_ids=[], do_sample=False)
    assert [answer.ids for answer in answers] == [greedy(resident, ids) for ids in prompts]
    assert [answer.text for answer in answers] == [
        tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers
    ]
    assert {answer.finish for answer in answers} == {"length"}


def test_an_end_token_ends_its_row_alone(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    said = [greedy(model, ids) for ids in prompts]
    end = next(token for token in said[0][2:] if token not in said[1] and said[0].index(token) >= 2)
    answers = generate_batch(model, tokenizer, prompts[:2], max_new_tokens=12, end_ids=[end], do_sample=False)
    cut = said[0].index(end)
    assert (answers[0].finish, answers[0].ids) == ("eos", said[0][: cut + 1])
    assert answers[0].text == tokenizer.decode(said[0][:cut], skip_special_tokens=True)
    assert (answers[1].finish, answers[1].ids) == ("length", said[1])


@pytest.mark.parametrize(
    "end_ids", [[], None]
)  # with an end token finished rows are padded, without they run on
def test_a_stop_text_ends_its_row_alone(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], end_ids: list[int] | None
) -> None:
    said = [greedy(model, ids) for ids in prompts[:2]]
    texts = [tokenizer.decode(ids) for ids in said]
    stop = next(
        texts[0][i : i + 2] for i in range(2, len(texts[0]) - 1) if texts[0][i : i + 2] not in texts[1]
    )
    answers = generate_batch(
        model,
        tokenizer,
        prompts[:2],
        max_new_tokens=12,
        stop=["never", stop],
        end_ids=end_ids,
        do_sample=False,
    )
    assert (answers[0].finish, answers[0].text) == ("stop", texts[0][: texts[0].index(stop)])
    assert (answers[1].finish, answers[1].ids) == ("length", said[1])
    assert answers[0].ids == said[0][: len(answers[0].ids)] or end_ids == []


def test_a_stop_text_that_begins_in_the_prompt_is_no_lack_of_room(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    begun = {ids: tokenizer.decode(greedy(model, [ids], 1)) for ids in range(40, 60)}
    ids, first = next((ids, text) for ids, text in begun.items() if text.isascii() and text)
    stop = [tokenizer.decode([ids]) + first]
    (answer,) = generate_batch(model, tokenizer, [[ids]], max_new_tokens=12, stop=stop, do_sample=False)
    assert (answer.finish, answer.text) == ("stop", first)


def test_the_tokenizers_own_end_token_counts_too(base: Path) -> None:
    """A base model that was tuned on chats ends turns with a token that generation_config does not know."""
    model, tokenizer = airtune.load(base), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[7, 8])
    assert default_end_ids(model, tokenizer) == [7, 8, tokenizer.eos_token_id]
    model.generation_config = GenerationConfig()
    assert default_end_ids(model, tokenizer) == [tokenizer.eos_token_id]


def test_without_a_pad_token_another_is_masked(model: Any, prompts: list[list[int]]) -> None:
    padded, bare = tiny_tokenizer(), tiny_tokenizer(pad_token=None)
    options: dict[str, Any] = {"max_new_tokens": 8, "end_ids": [], "do_sample": False}
    with_pad = generate_batch(model, padded, prompts, **options)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        assert generate_batch(model, bare, prompts, **options) == with_pad
    finally:
        model.generation_config = own


# --- length -----------------------------------------------------------------------------------------------


def test_without_a_length_it_goes_on_to_the_limit(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [5] * (CONTEXT - 40)  # transformers' own default would be 20 tokens
    (answer,) = generate_batch(model, tokenizer, [ids], end_ids=[], do_sample=False)
    assert (len(answer.ids), answer.finish) == (40, "length")


def test_beyond_the_limit_is_an_error(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    assert context_limit(model) == CONTEXT
    assert room_for_answers(model, [6, 3], CONTEXT - 6) == CONTEXT - 6
    with pytest.raises(
        ValueError, match=r"a prompt of 6 tokens and max_new_tokens=251 make 257.* 250 or fewer"
    ):
        generate_batch(model, tokenizer, [[5] * 6, [5]], max_new_tokens=CONTEXT - 5)
    with pytest.raises(ValueError, match=f"the prompt has {CONTEXT} tokens, and the model's context ends at"):
        generate_batch(model, tokenizer, [[5] * CONTEXT])


def test_a_model_without_a_limit_wants_a_length(tmp_path: Path) -> None:
    model = airtune.load(zoo.make("mamba2", tmp_path))
    assert context_limit(model) is None
    assert room_for_answers(model, [10**6], 7) == 7
    with pytest.raises(ValueError, match=r"states no limit .* set generation\.max_new_tokens"):
        room_for_answers(model, [1], None)


# --- options ----------------------------------------------------------------------------------------------


def test_only_what_is_chosen_is_an_option() -> None:
    nothing = {"do_sample": None, "temperature": None, "top_p": None, "num_beams": None}
    assert decoding_options(nothing) == {}
    assert decoding_options({**nothing, "do_sample": False}) == {"do_sample": False}
    assert decoding_options({**nothing, "top_p": 0.9}) == {"top_p": 0.9, "do_sample": True}


def test_sampling_depends_on_the_seed_alone(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    def sample(seed: int) -> list[list[int]]:
        set_seed(seed)
        options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8}
        return [answer.ids for answer in generate_batch(model, tokenizer, prompts, end_ids=[], **options)]

    assert sample(3) == sample(3) != sample(4)


def test_beams(base: Path, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]) -> None:
    resident = LlamaForCausalLM.from_pretrained(base)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    answers = generate_batch(model, tokenizer, prompts, end_ids=[], **options)
    for ids, answer in zip(prompts, answers, strict=True):
        out = resident.generate(input_ids=torch.tensor([ids]), eos_token_id=None, **options)
        assert answer.ids == out[0, len(ids) :].tolist()


def test_guessing_tokens_changes_nothing(
    base: Path, model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], tmp_path: Path
) -> None:
    said = greedy(model, prompts[1])
    options: dict[str, Any] = {"max_new_tokens": 12, "end_ids": [], "do_sample": False}
    by_lookup = generate_batch(model, tokenizer, prompts[1:2], prompt_lookup_num_tokens=3, **options)
    assert by_lookup[0].ids == said
    small = make_model(tmp_path / "same", seed=1, layers=1)
    guessing = guessing_options(tokenizer, str(small), trust_remote_code=False)
    assert guessing.keys() == {"assistant_model"}
    assert generate_batch(model, tokenizer, prompts[1:2], **guessing, **options)[0].ids == said


def test_a_guessing_model_may_have_another_tokenizer(tmp_path: Path) -> None:
    small = make_model(tmp_path, pad_token="<|bos|>")
    other = tiny_tokenizer()
    other.add_tokens(["<|more|>"])
    assert guessing_options(other, str(small), trust_remote_code=False).keys() == {
        "assistant_model",
        "assistant_tokenizer",
    }


def test_the_model_is_left_in_its_mode(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    model.train()
    generate_batch(model, tokenizer, prompts[:1], max_new_tokens=2)
    assert model.training
    model.eval()
    generate_batch(model, tokenizer, prompts[:1], max_new_tokens=2)
    assert not model.training


@pytest.mark.parametrize(("text", "place"), [("one two", 4), ("two one", 0), ("none", -1), ("", -1)])
def test_the_first_of_the_stop_texts_counts(text: str, place: int) -> None:
    assert first_stop(text, ["two", "tw", "x"]) == place
    assert first_stop(text, []) == -1
