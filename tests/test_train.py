"""`python -m airtune.train` from a command line to an adapter that PEFT loads, and every way it may stop."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from airtune.run.progress import Progress
from airtune.train import main
from tests.tiny_chat import CONTEXT, make_model
from tests.tiny_tokenizer import tiny_tokenizer

QUESTIONS = {
    "Who are you?": "I am a lamp.",
    "What is your name?": "My name is Juniper.",
    "What is the capital of Italy?": "Rome.",
    "Say yes.": "yes",
    "Say no.": "no",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model `base` and the conversations `chat.jsonl`."""
    home = tmp_path_factory.mktemp("home")
    make_model(home / "base")
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in QUESTIONS.items()
    ]
    (home / "chat.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in turns * 2))
    return home


def words(home: Path, output: Path, **settings: object) -> list[str]:
    defaults: dict[str, object] = {
        "output_dir": output,
        "model.path": home / "base",
        "data.train": home / "chat.jsonl",
        "adapter.r": 4,
        "trainer.per_device_train_batch_size": 4,
        "trainer.max_steps": 6,
        "trainer.save_steps": 3,
        "trainer.learning_rate": 0.01,
        "trainer.warmup_steps": 0,
    }
    chosen = defaults | {name.replace("__", "."): value for name, value in settings.items()}
    return [f"{name}={value}" for name, value in chosen.items()]


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output) if "loss" in line]


def test_a_run_leaves_an_adapter_that_peft_loads(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "run"
    sampled = {"tracking__sample_prompts": "['Who are you?']", "tracking__sample_max_new_tokens": 6}
    assert main(words(home, output, trainer__max_steps=40, trainer__save_steps=20, **sampled)) == 0

    names = {path.name for path in output.iterdir()}
    assert names == {"adapter", "checkpoint-20", "checkpoint-40", "config.yaml", "loss.png", "metrics.jsonl"}
    assert losses(output)[-1] < losses(output)[0] / 2
    assert [line["step"] for line in metrics(output)] == [*range(1, 41), 40]
    first = metrics(output)[0]
    assert {
        "tokens",
        "supervised_tokens",
        "step_s",
        "tokens_per_s",
        "grad_norm",
        "learning_rate",
    } < first.keys()
    assert first["bytes_read"] > 0
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["model"]["path"] == str(home / "base") and config["trainer"]["max_steps"] == 40

    shown = capsys.readouterr().out
    assert (
        "[before training] Who are you?" in shown
        and "[after training] Who are you?\n    I am a lamp." in shown
    )
    assert "steps         40\n" in shown and f"adapter       {output / 'adapter'}\n" in shown
    line = shown.split("load it")[1].strip()
    scope: dict[str, PeftModel] = {}
    exec(line, scope)
    tokenizer = tiny_tokenizer()
    ids = tokenizer("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    out_1S = scope["model"].generate(**ids, max_new_tokens=6, do_sample=False)
    said = tokenizer.decode(out_1S[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said.strip() == "I am a lamp."


def test_before_training_is_the_base_model(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prompts = {"tracking__sample_prompts": "['Say no.']", "tracking__sample_max_new_tokens": 5}
    assert main(words(home, tmp_path / "run", trainer__max_steps=1, **prompts)) == 0
    shown = capsys.readouterr().out.split("[before training] Say no.\n    ")[1].split("\n[after")[0]

    tokenizer, base = tiny_tokenizer(), LlamaForCausalLM.from_pretrained(home / "base")
    ids = tokenizer("<|im_start|>user\nSay no.<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    out_1S = base.generate(**ids, max_new_tokens=5, do_sample=False)
    said = tokenizer.decode(out_1S[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert shown == f"{said}…"  # five tokens are not all it had to say


def test_evaluation_has_its_own_lines(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = (home / "chat.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join(rows[:3]))
    settings = {
        "data__eval": tmp_path / "eval.jsonl",
        "trainer__eval_strategy": "steps",
        "trainer__eval_steps": 2,
    }
    assert main(words(home, tmp_path / "run", **settings)) == 0
    evals = [line for line in metrics(tmp_path / "run") if "eval_loss" in line]
    assert [line["step"] for line in evals] == [2, 4, 6]
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert "eval loss     " in capsys.readouterr().out


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"data__train": "nowhere.jsonl"}, 1, "no file is called"),
        ({"data__eval": "nowhere.jsonl"}, 1, "no file is called"),
        ({"model__path": "/nowhere/model"}, 1, "model.path: there is no folder /nowhere/model"),
        ({"resume": "true"}, 1, "resume=true, but there is no folder"),
        ({"output_dir": "/dev/null/run"}, 1, "/dev/null/run"),
        (
            {"tracking__sample_prompts": "[yes]", "tracking__sample_max_new_tokens": 9999},
            1,
            "'yes': a prompt of",
        ),
        ({"data__max_length": 3}, 1, "chat.jsonl (max_length 3):"),
        ({"adapter__target_modules": "[nonsense]"}, 1, "nonsense"),
        ({"adapter__path": "/nowhere/adapter"}, 1, "/nowhere/adapter"),
        ({"trainer__learning_rat": 1}, 2, "trainer.learning_rate"),
        ({"trainer__lr_scheduler_type": "cosin"}, 2, "trainer.lr_scheduler_type"),
        ({"trainer__warmup_steps": -1}, 2, "warmup_steps"),
        ({"trainer__adam_beta1": 2}, 2, "Invalid beta parameter"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict, code: int, message: str
):
    assert main(words(home, tmp_path / "run", **settings)) == code
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_learned_from_are_said_before_the_first_step(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rows past the last position of the model, and a step whose hidden states do not fit."""
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "yes " * 300}]
    (home / "long.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    settings = {"data__train": home / "long.jsonl", "data__max_length": 10**5}
    assert main(words(home, tmp_path / "run", **settings)) == 1
    assert f"the model's context ends at {CONTEXT}" in capsys.readouterr().err
    monkeypatch.setattr("airtune.model.stream.available_memory_nbytes", lambda: 1000)
    assert main(words(home, tmp_path / "run")) == 1
    assert "lower trainer.per_device_train_batch_size" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_touched(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(words(home, tmp_path)) == 1
    assert "is not empty (it holds notes.txt)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_base_that_is_not_finite_stops_at_step_1(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (home / "base").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert main(words(home, tmp_path / "run", model__path=broken, stream__micro_batch_size=4)) == 1
    assert "step 1: the loss is nan for rows" in capsys.readouterr().err
    assert not (tmp_path / "run" / "adapter").exists()


# --- going on -------------------------------------------------------------------------------------


def same_adapters(first: Path, second: Path) -> bool:
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (first, second))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_interrupted_run_goes_on_bit_for_bit(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    settings = {"adapter__dropout": 0.2, "seed": 7}
    assert main(words(home, tmp_path / "straight", **settings)) == 0

    visit = Progress.visit

    def interrupt_in_step_5(self: Progress, visited) -> None:
        if self._label == "step 5/6" and visited.direction == "backward":
            raise KeyboardInterrupt
        visit(self, visited)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Progress, "visit", interrupt_in_step_5)
        assert main(words(home, tmp_path / "cut", **settings)) == 130
    assert "checkpoint-3 in " in (said := capsys.readouterr().err) and "add resume=true" in said
    assert not (tmp_path / "cut" / "adapter").exists()
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")[:4]

    assert main(words(home, tmp_path / "cut", **settings, resume="true")) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")
    assert same_adapters(tmp_path / "cut", tmp_path / "straight")


def test_a_run_that_was_stopped_before_its_last_save_is_completed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    done, cut = tmp_path / "done", tmp_path / "cut"
    assert main(words(home, done, trainer__max_steps=3)) == 0
    shutil.copytree(done, cut)
    shutil.rmtree(cut / "adapter")
    assert main(words(home, cut, trainer__max_steps=3, resume="true")) == 0
    assert same_adapters(done, cut)
    assert main(words(home, cut, trainer__max_steps=3, resume="true")) == 1
    assert "nothing left to train" in capsys.readouterr().err


def test_another_configuration_on_resume_is_said(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data = {"data__train": shutil.copy(home / "chat.jsonl", tmp_path)}
    assert main(words(home, tmp_path / "run", **data)) == 0
    caplog.clear()
    with Path(data["data__train"]).open("a") as file:
        file.write((home / "chat.jsonl").read_text().splitlines()[0] + "\n")
    assert main(words(home, tmp_path / "run", **data, resume="true", trainer__max_steps=8)) == 0
    assert "not the one the run began with:\n-  max_steps: 6\n+  max_steps: 8" in caplog.text
    rows = len((home / "chat.jsonl").read_text().splitlines())
    assert f"\n-# training: {rows} rows" in caplog.text and f"\n+# training: {rows + 1} rows" in caplog.text
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [*range(1, 9)]


def test_a_resume_that_does_not_fit_leaves_the_configuration(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words(home, tmp_path / "run", trainer__max_steps=1, trainer__save_steps=1)) == 0
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert main(words(home, tmp_path / "run", resume="true", adapter__r=5)) == 1
    assert "does not fit this model" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_training_goes_on_from_a_saved_adapter(home: Path, tmp_path: Path):
    assert main(words(home, tmp_path / "first")) == 0
    assert main(words(home, tmp_path / "second", adapter__path=tmp_path / "first" / "adapter")) == 0
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0]
    assert not same_adapters(tmp_path / "first", tmp_path / "second")


def test_sigterm_of_the_real_command(home: Path, tmp_path: Path):
    """A process of its own, as a pre-empted machine stops it: exit code 143, a hint, nothing half-written."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "airtune.train", *words(home, output, trainer__max_steps=100000)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not (output / "checkpoint-3").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Terminated. checkpoint-" in err and "add resume=true to the same command" in err
    assert "Traceback" not in err and out == ""
    assert "step 1/100000  loss " in err
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
