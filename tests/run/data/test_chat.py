"""What is learned of a conversation: by role, by mode, by weight."""

from __future__ import annotations

import pytest

from airtune.run.data.chat import ChatRenderer
from airtune.run.data.forms import Conversation
from airtune.run.data.messages import Message
from tests.tiny_tokenizer import CHATML, CHATML_MARKED, LINES, WITH_BOS, tiny_tokenizer


def turns(*contents: str) -> list[Message]:
    """User and assistant in turn."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


TWO_ANSWERS = turns("one", "two", "three", "four")


def learned(
    template: str,
    messages: list[Message],
    learn_on: str = "assistant",
    given: int = 0,
    weights: tuple[bool, ...] | None = None,
) -> list[str]:
    dialogue = Conversation(messages, given=given, learned=weights)
    rendered = ChatRenderer(tiny_tokenizer(), template).learn(dialogue, learn_on)
    return [rendered.text[start:end] for start, end in rendered.learned]


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
    rendered = ChatRenderer(tiny_tokenizer(), template).learn(Conversation(messages), "last_assistant")
    [(start, end)] = rendered.learned
    assert rendered.text[start:end] == "yes<|im_end|>"
    assert start == rendered.text.rindex("assistant\n") + len("assistant\n")


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_turn_after_the_last_answer_is_not_learned(template: str) -> None:
    assert learned(template, turns("one", "two", "three"), "last_assistant") == ["two<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answers_that_are_given_are_not_learned(template: str) -> None:
    assert learned(template, TWO_ANSWERS, given=3) == ["four<|im_end|>"]
    assert learned(template, TWO_ANSWERS, given=4) == []


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answers_of_weight_0_are_not_learned(template: str) -> None:
    first, second = (True, False, True, True), (True, True, True, False)
    assert learned(template, TWO_ANSWERS, weights=first) == ["four<|im_end|>"]
    assert learned(template, TWO_ANSWERS, weights=second) == ["two<|im_end|>"]
    assert learned(template, TWO_ANSWERS, "last_assistant", weights=first) == ["four<|im_end|>"]
    assert learned(template, TWO_ANSWERS, "last_assistant", weights=second) == []


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_all_leaves_answers_of_weight_0_out_and_can_do_so_for_answers_alone(template: str) -> None:
    assert learned(template, TWO_ANSWERS, "all", weights=(True, False, True, True)) == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n",
    ]
    with pytest.raises(ValueError, match=r"message 2 \(role user\) has the weight 0"):
        learned(template, TWO_ANSWERS, "all", weights=(True, True, False, True))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("content", ["", "0", "false", "null"])
def test_contents_that_look_like_nothing_are_contents(template: str, content: str) -> None:
    assert learned(template, turns(content, content)) == [f"{content}<|im_end|>"]


def test_an_answer_in_two_turns_is_two_answers() -> None:
    messages: list[Message] = [*turns("one", "two"), {"role": "assistant", "content": "three"}]
    assert learned(CHATML, messages) == ["two<|im_end|>", "three<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_no_answer_learns_nothing(template: str) -> None:
    assert learned(template, turns("one")) == []


def test_without_an_end_token_the_line_end_is_learned_and_it_is_noticed() -> None:
    rendered = ChatRenderer(tiny_tokenizer(), LINES).learn(Conversation(turns("one", "two")), "assistant")
    assert [rendered.text[a:b] for a, b in rendered.learned] == [" two\n"]
    assert rendered.endless
    assert not ChatRenderer(tiny_tokenizer(), CHATML).learn(Conversation(TWO_ANSWERS), "assistant").endless


def test_a_conversation_that_opens_with_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="opens a conversation"):
        learned(CHATML, [{"role": "assistant", "content": "one"}])
