"""Sample questions are written as the rows are, end with their turn, and are cut in plain sight."""

from __future__ import annotations

import pytest
from peft import LoraConfig, PeftModel
from transformers import PreTrainedTokenizerBase

from airtune import load
from airtune.run.generation import generate_batch
from airtune.run.samples import Samples, write_samples
from tests.tiny_chat import CONTEXT, make_model
from tests.tiny_tokenizer import tiny_tokenizer

TEXTS = ["Say yes.", "What is the capital of Italy?"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = load(make_model(tmp_path_factory.mktemp("base")), lora=lora, device="cpu")
    assert isinstance(model, PeftModel)
    return model


def samples(tokenizer: PreTrainedTokenizerBase, *, chats: bool = True, max_new_tokens: int = 5) -> Samples:
    return write_samples(tokenizer, TEXTS, chats=chats, chat_template=None, max_new_tokens=max_new_tokens)


def test_texts_are_written_as_the_rows_are(tokenizer: PreTrainedTokenizerBase) -> None:
    chat, plain = samples(tokenizer), samples(tokenizer, chats=False)
    assert tokenizer.decode(chat.ids[0]) == "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_ids_to_tokens(chat.turn_end_ids) == ["<|im_end|>"]
    assert tokenizer.decode(plain.ids[0]) == "Say yes." and plain.turn_end_ids == []


def test_the_end_of_a_turn_ends_an_answer_and_a_cut_is_shown(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked = samples(tokenizer)
    alone = [generate_batch(model, tokenizer, [ids], max_new_tokens=5, do_sample=False) for ids in asked.ids]
    said = [answer.text.strip() for (answer,) in alone]
    assert all(answer.finish == "length" for (answer,) in alone)
    assert asked.answers(model, tokenizer) == [f"{text}…" for text in said]

    end = alone[0][0].ids[3]  # as if the template ended a turn with this token
    ended = Samples(asked.texts, asked.ids[:1], [end], max_new_tokens=5)
    first = alone[0][0].ids.index(end)
    assert ended.answers(model, tokenizer) == [
        tokenizer.decode(alone[0][0].ids[:first], skip_special_tokens=True).strip()
    ]


def test_an_answer_without_room_is_refused_before_training(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    samples(tokenizer).check(model)
    with pytest.raises(ValueError, match=f"sample_prompts, 'Say yes.': .* context ends at {CONTEXT}"):
        samples(tokenizer, max_new_tokens=CONTEXT).check(model)
