"""A loaded model that speaks: text on one stream as it comes, how fast it came on the other.

With weights on a disk a token can take seconds, and the first one, for which the whole prompt is read, much
longer. So until text appears the line that tells where a pass is stands on the terminal, then it gives way to
the text. What is said at the end tells tokens per second, and how much of the time went into waiting for
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from airtune.model.stream import stream_of
from airtune.run.generation import (
    Answer,
    Model,
    first_stop,
    generate_batch,
    room_for_answers,
    searches_beams,
)
from airtune.run.progress import Progress


class Interrupted(StoppingCriteria):
    """Ends the answer when `now` is set."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.full((input_ids.shape[0],), self.now, dtype=torch.bool, device=input_ids.device)


@dataclass
class Speaker:
    """A model with the options that it answers by.

    out, err: where the text goes, and what is said about it. options: see `generate_batch`.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    out: TextIO
    err: TextIO
    end_ids: Sequence[int] | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, ids: Sequence[int]) -> None:
        """ValueError when a prompt and its answer do not fit into the model's context."""
        room_for_answers(self.model, [len(ids)], self.max_new_tokens)

    def say(self, ids: Sequence[int], interrupted: Interrupted | None = None) -> Answer:
        """Answer one prompt, writing the text as it comes. `interrupted` may end it early."""
        watch = _Watch(self, silent_with_text=self.out.isatty())
        text = _AnswerText(self.tokenizer, self.out, self.stop, on_first_token=watch.first_token)
        streamer = None if searches_beams(self.model, self.options) else text
        (answer,) = self._generate([ids], watch, streamer=streamer, interrupted=interrupted)
        if interrupted is not None and interrupted.now:
            answer = replace(answer, finish="interrupted")
        self.out.write("\n" if streamer else f"{answer.text}\n")
        self.out.flush()
        self.err.write(f"[{watch.account([answer])}, finish: {answer.finish}]\n")
        return answer

    def say_all(self, prompts: Sequence[Sequence[int]], title: str) -> list[Answer]:
        """Answer several prompts in one batch, writing nothing but how fast it went, under `title`."""
        watch = _Watch(self, silent_with_text=False)
        answers = self._generate(prompts, watch)
        self.err.write(f"[{title}: {watch.account(answers)}]\n")
        return answers

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        watch: _Watch,
        streamer: BaseStreamer | None = None,
        interrupted: Interrupted | None = None,
    ) -> list[Answer]:
        with watch:
            return generate_batch(
                self.model,
                self.tokenizer,
                prompts,
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
                end_ids=self.end_ids,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([interrupted] if interrupted else []),
                **self.options,
            )


class _Watch:
    """Time and counters of one call of generate, and progress on the terminal while it lasts.

    silent_with_text: progress ends with the first token, whose text needs the same terminal.
    """

    def __init__(self, speaker: Speaker, *, silent_with_text: bool) -> None:
        self._stream = stream_of(speaker.model)
        self._progress = Progress(speaker.err, counters=self._stream.counters)
        self._silent_with_text = silent_with_text and speaker.err.isatty()
        self._first_s: float | None = None

    def __enter__(self) -> None:
        self._stalled_s = self._stream.counters()["stall_s"]
        self._begun_s = time.perf_counter()
        self._stream.observers.append(self._progress.visit)

    def __exit__(self, *error: object) -> None:
        self._hide_progress()
        self._total_s = time.perf_counter() - self._begun_s
        self._stall_s = self._stream.counters()["stall_s"] - self._stalled_s

    def first_token(self) -> None:
        self._first_s = time.perf_counter() - self._begun_s
        if self._silent_with_text:
            self._hide_progress()

    def _hide_progress(self) -> None:
        if self._progress.visit in self._stream.observers:
            self._stream.observers.remove(self._progress.visit)
            self._progress.clear()

    def account(self, answers: Sequence[Answer]) -> str:
        """`31 tokens in 4.2 s, first after 0.60 s, then 8.3 tokens/s, 12% of the time waiting for weights`"""
        tokens = sum(len(answer.ids) for answer in answers)
        parts = [f"{tokens} tokens in {self._total_s:.1f} s"]
        if self._first_s is not None and tokens > 1:
            rate = (tokens - 1) / max(self._total_s - self._first_s, 1e-9)
            parts += [f"first after {self._first_s:.2f} s", f"then {rate:.1f} tokens/s"]
        else:
            parts.append(f"{tokens / self._total_s:.1f} tokens/s")
        stalled = min(self._stall_s / self._total_s, 1)
        parts.append(f"{stalled:.0%} of the time waiting for weights")
        return ", ".join(parts)


class _AnswerText(BaseStreamer):
    """Writes an answer as it grows, up to the first stop text.

    A token's text is not its own: a space is dropped where a text begins, and a character may be several
    tokens. So what a token adds is looked up behind the tokens that were written last.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        out: TextIO,
        stop: Sequence[str],
        on_first_token: Callable[[], None],
    ) -> None:
        self._tokenizer, self._out, self._stop = tokenizer, out, stop
        self._on_first_token = on_first_token
        self._ids: list[int] = []
        self._begin = self._end = 0  # the tokens between the two were written last
        self._held = ""
        self._prompt_seen = self._stopped = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self._ids:
            self._on_first_token()
        self._ids += value.flatten().tolist()
        self._grow(at_end=False)

    def end(self) -> None:
        self._grow(at_end=True)

    def _grow(self, *, at_end: bool) -> None:
        written, text = self._text(self._ids[self._begin : self._end]), self._text(self._ids[self._begin :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not at_end:
            return  # a character that lacks some of its bytes
        self._begin, self._end = self._end, len(self._ids)
        self._write(text[len(written) :], at_end=at_end)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _write(self, text: str, *, at_end: bool) -> None:
        if self._stopped:
            return
        self._held += text
        place = first_stop(self._held, self._stop)
        self._stopped = place >= 0
        ready = place if self._stopped else len(self._held)
        if not (self._stopped or at_end):
            ready -= _started(self._held, self._stop)
        self._out.write(self._held[:ready])
        self._out.flush()
        self._held = self._held[ready:]


def _started(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the start of a stop text."""
    lengths = (n for word in stop for n in range(1, len(word)) if text.endswith(word[:n]))
    return max(lengths, default=0)
