"""The parts of the command that evaluates: what is asked is read, then asked, then written down.

Everything that can be wrong with the questions (files, forms, names of tasks, patterns) is found before a
model is loaded, and what does not fit into its context before the first pass.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from airtune.model.scoring import without_adapter
from airtune.model.stream import stream_of
from airtune.run.data.collate import Collator
from airtune.run.data.files import Sources
from airtune.run.data.prepare import prepare
from airtune.run.data.prepared import PreparedData
from airtune.run.evaluation import RowScore, score_rows, totals
from airtune.run.generation import Model, context_limit, refuse_beyond_context, room_for_answers
from airtune.run.harness import harness_model, open_tasks, run_tasks
from airtune.run.progress import Progress
from airtune.run.questions import (
    Questions,
    answer_questions,
    continuations,
    read_questions,
    score_answers,
)
from airtune.run.results import ANSWERS, RESULTS, ROWS, by_name, make_folder, table, write_json, write_lines
from airtune.run.scores import Score, chosen_scores
from airtune.run.tracking import WandbTracker

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 2048  # tokens, of a model that states no limit, as in the harness

Sides = dict[str, dict[str, Any]]  # "adapter" and "base", or one of them -> what was found


@dataclass(frozen=True)
class Asked:
    """What is asked, each part if it is; the keys of the group eval say how."""

    rows: PreparedData | None
    questions: Questions | None
    scores: Mapping[str, Score]
    tasks: TaskManager | None


def read_asked(
    tokenizer: PreTrainedTokenizerBase,
    *,
    eval: Sources | None,
    cache: bool,
    cache_folder: Path,
    seed: int,
    options: Mapping[str, Any],
    **reading: Any,
) -> Asked:
    """eval, cache and `reading`: the keys of the group data; `options`: those of the group eval.

    Raises ValueError for what cannot be read, or is not there.
    """
    scores = chosen_scores(
        options["scores"], ignore_space=options["ignore_space"], pattern=options["pattern"]
    )
    tasks = open_tasks(options["tasks"], options["task_folder"]) if options["tasks"] else None
    rows, questions = None, None
    if eval:
        folder = cache_folder / "prepared" if cache else None
        rows = prepare(eval, tokenizer, seed=seed, cache_folder=folder, **reading)
        logger.info("evaluation data\n%s", rows.summary)
    if eval and scores:
        chosen = {name: reading[name] for name in ("format", "bad_rows", "chat_template")}
        questions = read_questions(eval, tokenizer, seed=seed, limit=options["limit"], **chosen)
    return Asked(rows, questions, scores, tasks)


class Assessment:
    """Puts what is asked to a loaded model.

    Args:
        side: what the model is as it is, "adapter" or "base".
        options: the keys of the group eval. With `compare` everything is asked of the base too.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        *,
        side: str,
        chat_template: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._side, self._chat_template, self._compare = side, chat_template, bool(options["compare"])
        self._stream = stream_of(model)
        self._progress = Progress(sys.stderr, counters=self._stream.counters)
        self._stream.observers.append(self._progress.visit)

    def run(self, asked: Asked, folder: Path, **named: object) -> dict[str, Any]:
        """The results (see `results`), which are written into `folder`; `named` is put before them.

        Raises ValueError when a row or a question is longer than the model's context, OSError when nothing
        can be written there.
        """
        if asked.rows is not None:
            refuse_beyond_context(self._model, asked.rows)
        if asked.questions is not None:
            lengths = [len(question.ids) for question in asked.questions.all]
            room_for_answers(self._model, lengths, self._options["max_new_tokens"])
        make_folder(folder)
        before, started_s = self._stream.counters(), time.perf_counter()
        found: dict[str, Sides] = {}
        if asked.rows is not None:
            found["loss"] = self._loss(asked.rows, folder / ROWS)
        if asked.questions is not None:
            found["answers"] = self._answers(asked.questions, asked.scores, folder / ANSWERS)
        if asked.tasks is not None:
            found["tasks"] = self._tasks(asked.tasks)
        self._progress.clear()
        after = self._stream.counters()
        cost = {name: after[name] - before[name] for name in ("bytes_read", "stall_s", "visits")}
        cost["seconds"] = time.perf_counter() - started_s
        results = {**named, **found, "cost": cost}
        write_json(folder / RESULTS, results)
        sys.stdout.write(table(by_name(found)))
        return found

    def _sides(self, model: Any, base: Any) -> list[tuple[str, Any]]:
        """What was found of the model and of its base, where that was asked, by their names."""
        return [(self._side, model), ("base", base)] if self._compare else [(self._side, model)]

    def _loss(self, rows: PreparedData, path: Path) -> Sides:
        scores = score_rows(
            self._model,
            rows,
            Collator.of(self._tokenizer),
            batch_tokens=self._options["batch_tokens"],
            compare=self._compare,
            tell=self._progress.begin,
        )
        sides = self._sides(scores.model, scores.base)
        lines = [{"row": rows.where(i), "tokens": scores.model[i].tokens} for i in range(len(rows))]
        write_lines(path, [line | _losses(sides, i) for i, line in enumerate(lines)])
        return {side: totals(found) for side, found in sides}

    def _answers(self, questions: Questions, scores: Mapping[str, Score], path: Path) -> Sides:
        model, base = answer_questions(
            self._model,
            self._tokenizer,
            questions,
            batch_size=self._options["batch_size"],
            max_new_tokens=self._options["max_new_tokens"],
            compare=self._compare,
            tell=self._progress.begin,
        )
        sides = [
            (side, said, score_answers(said, questions, scores)) for side, said in self._sides(model, base)
        ]
        lines = [{"row": question.where, "expected": question.expected} for question in questions.all]
        write_lines(
            path,
            [
                line | {side: {"answer": said[i], **scored[i]} for side, said, scored in sides}
                for i, line in enumerate(lines)
            ],
        )
        return {side: {"answers": len(scored), **_means(scored)} for side, _, scored in sides}

    def _tasks(self, manager: TaskManager) -> Sides:
        options, tell = self._options, self._progress.begin
        generate = partial(
            continuations, self._model, self._tokenizer, batch_size=options["batch_size"], tell=tell
        )
        lm = harness_model(
            self._model,
            self._tokenizer,
            generate,
            batch_tokens=options["batch_tokens"],
            max_length=context_limit(self._model) or _DEFAULT_CONTEXT,
            chat_template=self._chat_template,
            tell=tell,
        )
        chosen = {name: options[name] for name in ("num_fewshot", "limit", "apply_chat_template")}
        run: Callable[[], dict[str, Any]] = partial(run_tasks, lm, manager, options["tasks"], **chosen)
        found = {self._side: run()}
        if self._compare:
            with without_adapter(self._model):
                found["base"] = run()
        return found


def log_results(
    found: Mapping[str, Sides],
    side: str,
    *,
    config: Mapping[str, object],
    folder: Path,
    wandb: bool,
    project: str,
    run_name: str | None,
) -> None:
    """To W&B if it is asked for: the numbers of `side` as eval/NAME, those of the base beside it as
    eval/base/NAME.
    """
    if not wandb:
        return
    values = {}
    for name, numbers in by_name(found).items():
        for other, number in numbers.items():
            prefix = "eval/" if other == side else f"eval/{other}/"
            values[prefix + name.replace(" ", "/", 1)] = number
    WandbTracker(project=project, run_name=run_name, config=config, folder=folder).results(values)


def _losses(sides: Sequence[tuple[str, Sequence[RowScore]]], row: int) -> dict[str, object]:
    return {side: {"nll": scores[row].nll, "loss": scores[row].loss} for side, scores in sides}


def _means(scored: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(scores[name] for scores in scored) / len(scored) for name in scored[0]}
