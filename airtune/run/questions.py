"""Rows with an expected answer, what the model answers to them, and how well that agrees.

    {"messages": [..., answer]}           asked: the turns before the last answer   expected: its content
    {"prompt": ..., "completion": ...}    asked: the prompt                         expected: the completion

The prompt is written as in training and in the command that generates (see `encode`). Every new token is a
pass over all weights, so questions are answered in batches, and with the adapter and without it in the same
batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from airtune.model.scoring import without_adapter
from airtune.run.data.encode import encode_prompt
from airtune.run.data.files import Sources
from airtune.run.data.forms import Content, Continuation, Conversation, canonical
from airtune.run.data.messages import Message
from airtune.run.data.rows import open_rows
from airtune.run.generation import Model, default_end_ids, generate_batch
from airtune.run.prompts import PromptWriter
from airtune.run.scores import Score

logger = logging.getLogger(__name__)

NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True)
class Question:
    """`where` it comes from, its prompt as ids, and the answer that is expected."""

    where: str
    ids: list[int]
    expected: str


@dataclass(frozen=True)
class Questions:
    """turn_end_ids: see `PromptWriter`."""

    all: list[Question]
    turn_end_ids: list[int]


def read_questions(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: str,
    bad_rows: str,
    chat_template: str | None,
    seed: int = 0,
    limit: int | None = None,
) -> Questions:
    """The first `limit` rows of `sources` (see `open_rows`) that have an answer, as questions.

    A row without one is a bad row. Raises ValueError with file and line for a bad row, unless they are
    skipped, and for forms that have no answers.
    """
    rows = open_rows(sources, format=format, bad_rows=bad_rows, seed=seed)
    if rows.form in ("text", "tokens"):
        raise ValueError(
            f"rows of the form {rows.form} have no answer to compare with: scores of answers need "
            "messages, or prompt and completion"
        )

    found, chats = [], False
    for row in rows:
        try:
            content = canonical(row, rows.form)
            found.append(_question(row.where, content, tokenizer, chat_template))
        except ValueError as error:
            rows.refuse(row.where, NO_ANSWER, str(error))
            continue
        chats |= isinstance(content, Conversation)
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"no row has an answer to compare with; the first: {rows.first_skipped[NO_ANSWER]}")
    for kind, count in rows.skipped.items():
        logger.warning("%d rows are skipped, %s: %s", count, kind, rows.first_skipped[kind])
    writer = PromptWriter(tokenizer, chat=chats, chat_template=chat_template)
    return Questions(found, writer.turn_end_ids())


def _question(
    where: str, content: Content, tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> Question:
    if isinstance(content, Continuation):
        return Question(where, encode_prompt(tokenizer, content.prompt, chat_template), content.completion)
    assert isinstance(content, Conversation), "other forms are refused before"
    last = _last_answer(content.messages)
    ids = encode_prompt(tokenizer, content.messages[:last], chat_template, content.tools)
    return Question(where, ids, str(content.messages[last]["content"]))


def _last_answer(messages: Sequence[Message]) -> int:
    for i in reversed(range(len(messages))):
        if messages[i]["role"] == "assistant" and messages[i]["content"]:
            return i
    raise ValueError("no turn of the assistant has a text, so there is no answer to compare with")


def answer_questions(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    *,
    batch_size: int,
    max_new_tokens: int,
    compare: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[str], list[str] | None]:
    """What the model says to each question, greedily, `batch_size` questions at a time; and if `compare`, in
    the same passes over the weights, what it says with the adapter off.
    """
    prompts = [question.ids for question in questions.all]
    said = continuations(
        model,
        tokenizer,
        prompts,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        end_ids=default_end_ids(model, tokenizer, questions.turn_end_ids),
        compare=compare,
        tell=tell,
    )
    return said[: len(prompts)], said[len(prompts) :] if compare else None


def continuations(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    compare: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> list[str]:
    """What the model says after each prompt; `compare` adds to the list what it says with the adapter off.

    Prompts of about one length share a batch, the longest first. options: of `generate_batch`; greedy unless
    they say otherwise.
    """
    options = {"do_sample": False} | options

    def say(batch: Sequence[Sequence[int]]) -> list[str]:
        return [answer.text for answer in generate_batch(model, tokenizer, batch, **options)]

    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    said: dict[int, str] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        tell(f"answering {first + 1} to {first + len(chosen)} of {len(order)}")
        batch = [prompts[i] for i in chosen]
        texts = _say_both(model, batch, say) if compare else say(batch)
        places = [*chosen, *(len(prompts) + i for i in chosen if compare)]
        said |= zip(places, texts, strict=True)
    return [said[i] for i in sorted(said)]


def _say_both(
    model: Model, batch: Sequence[Sequence[int]], say: Callable[[Sequence[Sequence[int]]], list[str]]
) -> list[str]:
    """The texts with the adapter, then those without it."""
    try:
        with _adapter_on_rows(model, len(batch), of=2 * len(batch)):
            return say([*batch, *batch])
    except _FoldedRows as error:
        logger.info("With and without the adapter are answered one after the other: %s", error)
    on = say(batch)
    with without_adapter(model):
        return on + say(batch)


class _FoldedRows(Exception):
    """An adapted layer is not given one row of its input for each row of the batch."""


@contextmanager
def _adapter_on_rows(model: Model, rows: int, of: int) -> Iterator[None]:
    """Inside, the adapter of `model` works on the first `rows` rows of a batch of `of`, not on the others.

    PEFT's linear layers can do this, and go by the leading axis of their input. Where that holds something
    else (experts are given the tokens of all rows, and those of one expert may by chance be as many as there
    are rows) it raises _FoldedRows. PEFT's own way in, an argument of `generate`, does not look, and leaves
    its hooks on the model after an error.
    """

    def choose(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        if isinstance(module, ParamWrapper) or args[0].dim() < 3 or len(args[0]) != of:
            raise _FoldedRows(f"a {type(module).__name__} is given {list(args[0].shape)} for {of} rows")
        (active,) = cast(BaseTunerLayer, module).active_adapters
        return args, {**kwargs, "adapter_names": [active] * rows + ["__base__"] * (of - rows)}

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                hook = cast(nn.Module, module).register_forward_pre_hook(choose, with_kwargs=True)
                hooks.callback(hook.remove)
        yield


def score_answers(
    answers: Sequence[str], questions: Questions, scores: Mapping[str, Score]
) -> list[dict[str, float]]:
    """Each answer's scores, by name."""
    return [
        {name: score(said, question.expected) for name, score in scores.items()}
        for said, question in zip(answers, questions.all, strict=True)
    ]
