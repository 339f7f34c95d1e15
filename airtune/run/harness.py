"""EleutherAI's lm-evaluation-harness on a streamed model.

Its own class for transformers models would run on a streamed one, and badly: it takes requests in batches of
a fixed size, and makes the logits of every position, of which it needs a few. Here the harness's requests,
which come all of one kind at a time, share passes over the weights as rows of a data set do (see
`evaluation`), and only the tokens asked about meet the output projection. What the numbers depend on is as
there: how texts become ids, where a long context is cut (on the left), what stands before a text without
one (BOS, else EOS), so that a result can be set beside published ones.

A multiple-choice question asks for several continuations of one context. Continuations that need the same
input (the letters A to D do) share one row.

The harness is an extra (`pip install 'airtune[eval]'`) and is imported where it is used.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from airtune.model.scoring import Wanted, score_tokens
from airtune.run.data.collate import Collator
from airtune.run.evaluation import batches_by_tokens

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

Ids = list[int]
Tell = Callable[[str], None]
Generate = Callable[..., list[str]]  # prompts as ids -> texts; with options of `generation.generate_batch`

_MAX_NEW_TOKENS = 256  # of a task that does not say, as in the harness


def open_tasks(names: Sequence[str], folder: str | None) -> TaskManager:
    """The harness's tasks, and those of `folder`. ValueError when one of `names` is not among them, or when
    the harness is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            "tasks need the lm-evaluation-harness, which is not installed: pip install 'airtune[eval]'"
        ) from error
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own  # the harness's own are thousands of files, and reading them takes seconds
    manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "a folder with your own is eval.task_folder"
            raise ValueError(f"the lm-evaluation-harness has no task {name!r}; {hint}")
    return manager


def run_tasks(
    lm: LM,
    manager: TaskManager,
    names: Sequence[str],
    *,
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
) -> dict[str, dict[str, float]]:
    """task -> metric -> value, with standard errors, as the harness reports them.

    num_fewshot: None for each task's own. limit: documents of each task; None for all.
    """
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        lm,
        tasks=list(names),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        log_samples=False,
    )
    assert found is not None, "there is one process"
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """`acc,none` is acc, `exact_match,strict` is exact_match (strict); what is no number is left out."""
    named: dict[str, float] = {}
    for key, value in metrics.items():
        name, _, filter_name = key.partition(",")
        if isinstance(value, int | float):
            named[name if filter_name in ("", "none") else f"{name} ({filter_name})"] = float(value)
    return named


def continuation_scores(
    model: nn.Module,
    collate: Collator,
    requests: Sequence[tuple[Ids, Ids]],
    *,
    max_length: int,
    batch_tokens: int,
    tell: Tell,
) -> list[tuple[float, bool]]:
    """For each (context, continuation): the continuation's log-probability, and whether greedy decoding would
    have said it. What is longer than the model's `max_length` loses its start.

    Raises ValueError for an empty context, or a continuation that is empty or longer than `max_length`.
    """
    asked_of: dict[tuple[int, ...], list[int]] = {}  # an input, and the requests that need it
    for number, (context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"request {number} has a context of {len(context)} tokens and a continuation of "
                f"{len(continuation)}; expected at least 1 of each, and at most {max_length} to predict"
            )
        ids = tuple((context + continuation)[-(max_length + 1) : -1])
        asked_of.setdefault(ids, []).append(number)
    inputs = list(asked_of)
    batches = batches_by_tokens([len(ids) for ids in inputs], batch_tokens)
    answers: dict[int, tuple[float, bool]] = {}
    for batch_number, indices in enumerate(batches, start=1):
        tell(f"log-likelihoods, batch {batch_number}/{len(batches)}")
        batch = collate([{"input_ids": inputs[i], "labels": inputs[i]} for i in indices])
        asked = [(row, number) for row, i in enumerate(indices) for number in asked_of[inputs[i]]]
        continuations = [requests[number][1] for _, number in asked]
        wanted = [
            (row, len(inputs[indices[row]]) - len(continuation) + 1 + k, token)
            for (row, _), continuation in zip(asked, continuations, strict=True)
            for k, token in enumerate(continuation)
        ]
        scores = score_tokens(model, batch, Wanted(*torch.tensor(wanted).unbind(1)))
        lengths = [len(continuation) for continuation in continuations]
        parts = zip(asked, scores.log_prob.split(lengths), scores.is_top.split(lengths), strict=True)
        for (_, number), log_prob_K, is_top_K in parts:
            answers[number] = log_prob_K.sum().item(), bool(is_top_K.all())
    return [answers[number] for number in range(len(requests))]


def rolling_windows(ids: Ids, prefix_id: int, max_length: int) -> list[tuple[Ids, Ids]]:
    """(context, continuation) pairs that predict each of `ids` once, at most `max_length` at a time.

    The first window predicts its tokens after `prefix_id` alone. The others see as many of the tokens before
    as fit, so the last one, which predicts the rest, sees most.
    """
    windows = [([prefix_id], ids[:max_length])] if ids else []
    for start in range(max_length, len(ids), max_length):
        end = min(start + max_length, len(ids))
        windows.append((ids[end - max_length - 1 : start], ids[start:end]))
    return windows


@dataclass(eq=False, repr=False)
class _Requests:
    """What the harness asks of a model, answered. Only types and names are the harness's."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    generate: Generate
    batch_tokens: int
    max_length: int
    template: str | None  # of chats; None for the tokenizer's own
    tell: Tell

    def __post_init__(self) -> None:
        super().__init__()  # the harness's, which takes nothing

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos_id = self.tokenizer.bos_token_id
        return self.eot_token_id if bos_id is None else int(bos_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: object) -> Ids:
        if add_special_tokens is None:  # a text that is written with its BOS gets no second one
            add_special_tokens = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, Ids, Ids]], **ignored: object
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], **ignored: object) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        windows = [rolling_windows(ids, self.prefix_token_id, self.max_length) for ids in texts]
        scores = iter(self._scores([pair for text in windows for pair in text]))
        return [math.fsum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Instance], **ignored: object) -> list[str]:
        answers: dict[int, str] = {}
        alike: dict[str, list[int]] = {}  # requests that may share a batch, by what they ask of it
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            texts = self._generate([requests[n].args[0] for n in numbers], requests[numbers[0]].args[1])
            answers |= zip(numbers, texts, strict=True)
        return [answers[number] for number in range(len(requests))]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        rendered = self.tokenizer.apply_chat_template(
            chat_history,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(rendered)

    def _generate(self, contexts: Sequence[str], asked: Mapping[str, Any]) -> list[str]:
        from lm_eval.models.utils import (
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )

        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), _MAX_NEW_TOKENS))
        stop = handle_stop_sequences(options.pop("until"), eos=self.tokenizer.decode([self.eot_token_id]))
        max_new_tokens = options.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"a task generates {max_new_tokens} tokens, and the model sees {self.max_length} at once"
            )
        if not options["do_sample"]:
            options.pop("temperature", None)  # 0, for which transformers has another word
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        texts = self.generate(
            prompts, max_new_tokens=max_new_tokens, stop=[text for text in stop if text], **options
        )
        return [postprocess_generated_text(text, stop, None) for text in texts]

    def _scores(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        return continuation_scores(
            self.model,
            Collator.of(self.tokenizer),
            pairs,
            max_length=self.max_length,
            batch_tokens=self.batch_tokens,
            tell=self.tell,
        )


def harness_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    generate: Generate,
    *,
    batch_tokens: int,
    max_length: int,
    chat_template: str | None = None,
    tell: Tell = lambda line: None,
) -> LM:
    """`model` as the harness wants it. `max_length`: tokens that it can see at once."""
    from lm_eval.api.model import TemplateLM

    class StreamedLM(_Requests, TemplateLM):
        def loglikelihood(
            self, requests: list[Instance], disable_tqdm: bool = True
        ) -> list[tuple[float, bool]]:
            found: list[tuple[float, bool]] = TemplateLM.loglikelihood(self, requests, disable_tqdm=True)
            return found

    return StreamedLM(model, tokenizer, generate, batch_tokens, max_length, chat_template, tell)
