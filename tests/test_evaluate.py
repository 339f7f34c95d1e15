"""`python -m airtune.evaluate`: from a command line to results.json, a line for each row, and a table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from airtune.evaluate import main
from tests.tiny_chat import make_adapter, make_model
from tests.tiny_tokenizer import SENTENCES, write_jsonl

QUESTIONS = {
    "Who are you?": "I am a lamp.",
    "What is your name?": "My name is Juniper.",
    "What is the capital of Italy?": "Rome.",
    "Say yes.": "yes",
    "Say no.": "no",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model `base`, an `adapter` for it, conversations `chat.jsonl` and a row in
    `long.jsonl` that is longer than the model's context.
    """
    home = tmp_path_factory.mktemp("home")
    make_adapter(make_model(home / "base"), home / "adapter")
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in QUESTIONS.items()
    ]
    write_jsonl(home, *({"messages": messages} for messages in turns), name="chat.jsonl")
    write_jsonl(home, {"text": "Say yes."}, {"text": "yes " * 300}, name="long.jsonl")
    return home


def words(home: Path, output: Path, *more: str) -> list[str]:
    fixed = [f"output_dir={output}", f"model.path={home / 'base'}", "data.cache=false", "model.dtype=float32"]
    return [*fixed, *more]


def asked(home: Path, *more: str) -> list[str]:
    return [f"data.eval={home / 'chat.jsonl'}", *more]


def results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    return found


def lines(output: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def resident(home: Path, *, adapter: bool) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    base = LlamaForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    return (PeftModel.from_pretrained(base, home / "adapter") if adapter else base).eval(), tokenizer


def naive_loss(home: Path, *, adapter: bool) -> list[tuple[int, float]]:
    """(tokens, summed NLL) of each answer, its end token with it."""
    model, tokenizer = resident(home, adapter=adapter)
    found = []
    for question, answer in QUESTIONS.items():
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        start = len(tokenizer(prompt)["input_ids"])
        ids_1S = tokenizer(f"{prompt}{answer}<|im_end|>", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits_SV = model(input_ids=ids_1S).logits[0]
        nll = F.cross_entropy(logits_SV[start - 1 : -1], ids_1S[0, start:], reduction="sum").item()
        found.append((ids_1S.shape[1] - start, nll))
    return found


def test_loss_of_both_sides_in_one_pass(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "eval"
    compared = [f"adapter={home / 'adapter'}", "eval.compare=true", "stream.micro_batch_size=2"]
    assert main(words(home, output, *asked(home), *compared)) == 0
    found = results(output)
    for side in ("adapter", "base"):
        naive = naive_loss(home, adapter=side == "adapter")
        tokens, loss = sum(n for n, _ in naive), sum(nll for _, nll in naive) / sum(n for n, _ in naive)
        numbers = found["loss"][side]
        assert (numbers["rows"], numbers["tokens"]) == (5, tokens)
        assert numbers["loss"] == pytest.approx(loss, rel=1e-4)
        assert numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
        for line, (count, nll) in zip(lines(output, "rows.jsonl"), naive, strict=True):
            assert line["tokens"] == count and line[side]["nll"] == pytest.approx(nll, rel=1e-4)
            assert line[side]["loss"] == pytest.approx(nll / count, rel=1e-4)
    assert found["adapter"] == str(home / "adapter") and found["model"] == str(home / "base")
    assert found["cost"]["visits"] == 3 and found["cost"]["bytes_read"] > 0
    assert [line["row"] for line in lines(output, "rows.jsonl")] == [
        f"{home / 'chat.jsonl'}:{number}" for number in range(1, 6)
    ]
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["adapter", "base"]
    assert f"{found['loss']['base']['perplexity']:.4f}" in shown
    assert {path.name for path in output.iterdir()} == {"results.json", "rows.jsonl"}


def test_answers_are_generated_and_scored(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval"
    chosen = ["eval.scores=[exact_match,rouge_l,regex]", "eval.pattern='\\w+'", "eval.max_new_tokens=5"]
    chosen += [f"adapter={home / 'adapter'}", "eval.compare=true", "eval.limit=4", "eval.batch_size=3"]
    assert main(words(home, output, *asked(home, *chosen))) == 0
    answered = lines(output, "answers.jsonl")
    assert [line["expected"] for line in answered] == list(QUESTIONS.values())[:4]
    for side in ("adapter", "base"):
        model, tokenizer = resident(home, adapter=side == "adapter")
        for line, question in zip(answered, QUESTIONS, strict=False):
            prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer(prompt, return_tensors="pt")
            out_1S = model.generate(**ids, max_new_tokens=5, do_sample=False)
            said = tokenizer.decode(out_1S[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            assert line[side]["answer"] == said
            assert {"exact_match", "rouge_l", "regex"} < line[side].keys()
        numbers = results(output)["answers"][side]
        assert numbers["answers"] == 4
        assert numbers["rouge_l"] == pytest.approx(sum(line[side]["rouge_l"] for line in answered) / 4)
    assert results(output)["loss"]["base"]["rows"] == 5  # the limit is for what is generated


def test_tasks_of_the_harness(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path, *({"question": q, "choices": ["yes", "no"], "answer": 1} for q in SENTENCES))
    (tmp_path / "tiny_choice.yaml").write_text(
        yaml.safe_dump({
            "task": "tiny_choice", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
        })
    )  # fmt: skip
    chosen = ["eval.tasks=tiny_choice", f"eval.task_folder={tmp_path}", "eval.limit=3"]
    chosen += [f"adapter={home / 'adapter'}", "eval.compare=true"]
    assert main(words(home, tmp_path / "eval", *chosen)) == 0
    found = results(tmp_path / "eval")["tasks"]
    assert found.keys() == {"adapter", "base"} and 0 <= found["base"]["tiny_choice"]["acc"] <= 1
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {"results.json"}


def test_a_training_recipe_is_evaluated(home: Path, tmp_path: Path) -> None:
    """What it says about training is left out, and its adapter's rank with it."""
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\n"
        f"output_dir: {tmp_path / 'run'}\nmodel:\n  path: {home / 'base'}\nadapter:\n  r: 8\n"
        f"data:\n  train: nowhere.jsonl\n  eval: {home / 'chat.jsonl'}\n  max_length: 64\n"
        "trainer:\n  max_steps: 3\ntracking:\n  sample_prompts: ['Who are you?']\n"
    )
    assert main(["+recipe=mine", "--config-dir", str(tmp_path / "conf"), "data.cache=false"]) == 0
    assert results(tmp_path / "run")["loss"].keys() == {"base"}


def test_results_go_to_wandb(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []

    class Run:
        def define_metric(self, *args: object, **kwargs: object) -> None: ...

        def log(self, values: dict[str, float]) -> None:
            logged.append(values)

        def finish(self, exit_code: int) -> None:
            logged.append({"exit code": exit_code})

    monkeypatch.setattr("wandb.init", lambda **options: Run())
    compared = [f"adapter={home / 'adapter'}", "eval.compare=true", "tracking.wandb=true"]
    assert main(words(home, tmp_path / "eval", *asked(home, *compared))) == 0
    found = results(tmp_path / "eval")["loss"]
    assert logged[0]["eval/loss"] == found["adapter"]["loss"]
    assert logged[0]["eval/base/perplexity"] == found["base"]["perplexity"]
    assert logged[1:] == [{"exit code": 0}]


def test_rows_that_do_not_count_are_said(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "airtune")
    long = [f"data.eval={home / 'long.jsonl'}", "data.max_length=256"]
    assert main(words(home, tmp_path / "eval", *long)) == 0
    assert results(tmp_path / "eval")["loss"]["base"]["rows"] == 1
    assert "dropped, longer than max_length             1  first at " in caplog.text


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.eval=nowhere.jsonl"], "no file is called"),
        (["model.path=/nowhere/model"], "model.path: there is no folder /nowhere/model"),
        (["adapter=/nowhere/adapter"], "/nowhere/adapter"),
        (["eval.scores=regex", "eval.pattern='('"], "is no regular expression"),
        (["eval.scores=rouge_l", "eval.max_new_tokens=1000"], "the model's context ends at 256"),
        (["data.max_length=3"], "no row is left"),
        (["data.eval={home}/long.jsonl"], "long.jsonl:2 has 302 tokens, and the model's context ends at 256"),
        (["output_dir=/dev/null/run"], "/dev/null/run"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert (
        main(words(home, tmp_path / "eval", *asked(home), *(text.format(home=home) for text in given))) == 1
    )
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data.eval: expected files, or some eval.tasks"),
        (["eval.tasks=arc_easy", "eval.scores=rouge_l"], "data.eval: expected files with answers"),
        (["data.eval=a.jsonl", "eval.compare=true"], "adapter.path: expected a folder to eval.compare"),
        (
            ["data.eval=a.jsonl", "eval.scores=bleu"],
            "eval.scores: expected some of exact_match, regex, rouge_l",
        ),
        (["data.eval=a.jsonl", "eval.scores=regex"], "eval.pattern: expected a regular expression"),
        (["data.eval=a.jsonl", "eval.batch_tokens=0"], "eval.batch_tokens: expected 1 or more"),
        (["data.eval=a.jsonl", "trainer.max_steps=3"], "trainer.max_steps: evaluate has no such key"),
    ],
)
def test_contradictions_are_said_before_anything_is_loaded(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words(home, tmp_path / "eval", *given))
    assert stopped.value.code == 2 and message in capsys.readouterr().err
