"""A conversation: what is kept between answers, what the commands do, and what Ctrl-C ends."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import airtune
from airtune.model.stream import Visit
from airtune.run.chat_loop import converse
from airtune.run.prompts import PromptWriter
from airtune.run.speaker import Speaker
from tests.tiny_chat import make_model
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = airtune.load(make_model(tmp_path_factory.mktemp("base")))
    yield model
    airtune.stream_of(model).close()


Line = str | type[BaseException]


class Talk:
    """A conversation with scripted lines; `asked` are the texts that the model was given."""

    def __init__(self, model: Any, *lines: Line, template: bool = True, **options: Any) -> None:
        self.lines, self.asked = [*lines, EOFError], list[str]()
        tokenizer = tiny_tokenizer() if template else tiny_tokenizer(None)
        writer = PromptWriter(tokenizer, **options)
        self.speaker = Speaker(
            model,
            tokenizer,
            io.StringIO(),
            io.StringIO(),
            end_ids=[],
            max_new_tokens=4,
            options={"do_sample": False},
        )
        say = self.speaker.say

        def noted(ids: list[int], *rest: Any) -> Any:
            self.asked.append(tokenizer.decode(ids))
            return say(ids, *rest)

        self.speaker.say = noted  # type: ignore[method-assign, assignment]
        converse(self.speaker, writer, read=self.read)

    def read(self, shown: str) -> str:
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    @property
    def err(self) -> str:
        return self.speaker.err.getvalue()  # type: ignore[attr-defined, no-any-return]

    @property
    def out(self) -> str:
        return self.speaker.out.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_conversation_is_kept_and_reset(model: Any) -> None:
    talk = Talk(model, "Say yes.", "  ", "Say no.", "/reset", "Who?", "/exit", "never")
    first, second, third = talk.asked
    assert first == "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    answer = talk.out.splitlines()[0]
    assert second.startswith(f"{first}{answer}")
    assert second.endswith("<|im_start|>user\nSay no.<|im_end|>\n<|im_start|>assistant\n")
    assert third == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert talk.lines == ["never", EOFError]


def test_the_system_turn_stays(model: Any) -> None:
    talk = Talk(model, "Say yes.", "/reset", "Say no.", system="You are kind.")
    assert all(text.startswith("<|im_start|>system\nYou are kind.") for text in talk.asked)


def test_without_a_template_every_text_is_by_itself(model: Any) -> None:
    talk = Talk(model, "Say", "Who", template=False)
    assert talk.asked == ["Say", "Who"]
    assert "There is no chat template" in talk.err


def test_what_has_no_room_is_said_and_forgotten(model: Any) -> None:
    talk = Talk(model, "yes " * 300, "Say no.")
    assert "the model's context ends at 256" in talk.err and "/reset begins" in talk.err
    assert talk.asked == ["<|im_start|>user\nSay no.<|im_end|>\n<|im_start|>assistant\n"]


def test_ctrl_c_at_the_prompt_only_tells_how_to_leave(model: Any) -> None:
    talk = Talk(model, KeyboardInterrupt, "Say yes.")
    assert talk.err.count("/exit or Ctrl-D leaves") == 2
    assert len(talk.asked) == 1


@pytest.fixture
def at_visit(model: Any) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Does something in the middle of a pass: at the visit with this number."""
    observers = airtune.stream_of(model).observers
    before = list(observers)

    def at(number: int, action: Callable[[], None]) -> None:
        visits = iter(range(1, 10**6))

        def observe(visit: Visit) -> None:
            if next(visits) == number:
                action()

        observers.append(observe)

    yield at
    observers[:] = before


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_answer_and_not_the_program(model: Any, at_visit: Any) -> None:
    at_visit(5, interrupt)  # in the second of three layers, while the second token is made
    talk = Talk(model, "Say yes.", "Say no.")
    assert len(talk.asked) == 2
    assert "[2 tokens in " in talk.err and "finish: interrupted]" in talk.err
    assert "[4 tokens in " in talk.err and "finish: length]" in talk.err
    half = talk.out.splitlines()[0]
    assert talk.asked[1].startswith(f"{talk.asked[0]}{half}<|im_end|>")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_leaves(model: Any, at_visit: Any) -> None:
    at_visit(5, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        Talk(model, "Say yes.")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(Talk(model, "Say no.").asked) == 1  # nothing is broken by it
