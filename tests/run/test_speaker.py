"""Text that appears while it is made, and what is said about it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import airtune
from airtune.run.speaker import Interrupted, Speaker, _AnswerText
from tests.tiny_chat import make_model
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ACCOUNT = r"first after \d+\.\d\d s, then \d+\.\d tokens/s, \d+% of the time waiting for weights"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = airtune.load(make_model(tmp_path_factory.mktemp("base")))
    yield model
    airtune.stream_of(model).close()


def speaker(model: Any, **options: Any) -> Speaker:
    chosen: dict[str, Any] = {"end_ids": [], "max_new_tokens": 8, "options": {"do_sample": False}}
    streams = {"out": io.StringIO(), "err": io.StringIO()}
    return Speaker(model, TOKENIZER, **(streams | chosen | options))


def written(stream: Any) -> str:
    return str(stream.getvalue())


IDS = TOKENIZER("Who are you?")["input_ids"]


def test_what_is_streamed_is_the_answer(model: Any) -> None:
    talk = speaker(model)
    answer = talk.say(IDS)
    assert len(answer.ids) == 8
    assert written(talk.out) == f"{answer.text}\n"
    assert re.fullmatch(rf"\[8 tokens in \d+\.\d s, {ACCOUNT}, finish: length\]\n", written(talk.err))
    assert airtune.stream_of(model).observers == speaker_free(model)


def speaker_free(model: Any) -> list[object]:
    """The observers that `load` itself has put there."""
    return [seen for seen in airtune.stream_of(model).observers if "Progress" not in repr(seen)]


def test_text_appears_before_the_end(model: Any) -> None:
    talk = speaker(model, max_new_tokens=30)
    seen: list[str] = []

    class Watching(Interrupted):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            seen.append(written(talk.out))
            return super().__call__(input_ids, scores)

    talk.say(IDS, Watching())
    assert len(set(seen)) > 5
    assert all(written(talk.out).startswith(text) for text in seen)


def test_an_answer_can_be_interrupted(model: Any) -> None:
    talk = speaker(model)

    class After3(Interrupted):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            self.now = input_ids.shape[1] >= len(IDS) + 3
            return super().__call__(input_ids, scores)

    answer = talk.say(IDS, After3())
    assert (len(answer.ids), answer.finish) == (3, "interrupted")
    assert written(talk.err).endswith("finish: interrupted]\n")


def test_beams_are_written_when_they_are_chosen(model: Any) -> None:
    talk = speaker(model, options={"num_beams": 2, "do_sample": False})
    answer = talk.say(IDS)
    assert written(talk.out) == f"{answer.text}\n"
    assert "tokens/s" in written(talk.err) and "first after" not in written(talk.err)


def test_a_batch_writes_no_text(model: Any) -> None:
    talk = speaker(model)
    assert len(talk.say_all([IDS, IDS[:2]], "2 of 5 answers")) == 2
    assert written(talk.out) == ""
    assert re.match(r"\[2 of 5 answers: 16 tokens in \d+\.\d s, \d+\.\d tokens/s, ", written(talk.err))


def test_on_a_terminal_progress_gives_way_to_text(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airtune.run.progress._TERMINAL_INTERVAL_S", 0.0)
    both = Terminal()
    speaker(model, out=both, err=both).say(IDS)
    before, _, after = both.getvalue().rpartition("\r\x1b[K")
    assert "generating  forward  layer 1/3" in before
    assert "layer" not in after and "finish: length" in after
    # The text in a file: then the terminal can tell where every pass is.
    err = Terminal()
    speaker(model, err=err).say(IDS)
    assert err.getvalue().count("layer 1/3") == 8


# --- the text as it grows ---------------------------------------------------------------------------------


def streamed(text: str, stop: Sequence[str] = (), tokenizer: Any = TOKENIZER) -> list[str]:
    """What is on the stream after each token of `text`, and at the end."""
    out = io.StringIO()
    answer = _AnswerText(tokenizer, out, stop, on_first_token=lambda: None)
    answer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    states = []
    for token in tokenizer(text)["input_ids"]:
        answer.put(torch.tensor([token]))
        states.append(out.getvalue())
    answer.end()
    return [*states, out.getvalue()]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A token for each character or byte; a text loses the space that it begins with."""
    characters = [*"▁def return\n()🙂", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, sentencepiece_like()], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize(
    "text", ["The capital of Italy is Rome.", "two\nlines, ünïcode 日本", "", "🙂 ok", "def f():\n    return"]
)
def test_nothing_is_lost_or_changed(text: str, tokenizer: Any) -> None:
    states = streamed(text, tokenizer=tokenizer)
    assert states[-1] == text
    assert all(text.startswith(state) for state in states)


def test_special_tokens_are_not_shown() -> None:
    assert streamed("yes<|im_end|>")[-1] == "yes"


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["Italy"], "The capital of "),
        (["ital of It"], "The cap"),
        (["Rome.", "is R"], "The capital of Italy "),
        (["Rome!"], "The capital of Italy is Rome."),  # it looked like the stop text for a while
        (["T"], ""),
    ],
)
def test_a_stop_text_is_never_shown(stop: list[str], shown: str) -> None:
    states = streamed("The capital of Italy is Rome.", stop)
    assert states[-1] == shown
    assert all(shown.startswith(state) for state in states)
