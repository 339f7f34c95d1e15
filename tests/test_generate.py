"""`python -m airtune.generate`: from a command line, a pipe, a file or a terminal to text."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

from airtune.generate import main
from tests.tiny_chat import make_adapter, make_model
from tests.tiny_tokenizer import write_jsonl

QUESTION = "What's two, plus {two}?"  # nothing that Hydra would read as a text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model `base` and an `adapter` for it."""
    home = tmp_path_factory.mktemp("home")
    make_adapter(make_model(home / "base"), home / "adapter")
    return home


def words(home: Path, *more: str) -> list[str]:
    fixed = [f"model.path={home / 'base'}", "generation.max_new_tokens=6", "generation.do_sample=false"]
    return [*fixed, *more]


def expected(home: Path, question: str, *, adapter: bool = False) -> str:
    """What transformers and PEFT make of it."""
    model = LlamaForCausalLM.from_pretrained(home / "base")
    if adapter:
        model = PeftModel.from_pretrained(model, home / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


def test_a_prompt_is_answered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, f"prompt={QUESTION}")) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{expected(home, QUESTION)}\n"
    assert "tokens/s" in shown.err and "waiting for weights, finish: " in shown.err


def test_an_adapter_is_used(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(home, f"prompt={QUESTION}", f"adapter={home / 'adapter'}")) == 0
    said = capsys.readouterr().out
    assert said == f"{expected(home, QUESTION, adapter=True)}\n" != f"{expected(home, QUESTION)}\n"


QUESTIONS = ["Who are you?", "Say", "What is the capital of Italy?"]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_prompts_of_a_file_are_answered_into_a_file(
    home: Path, tmp_path: Path, batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_jsonl(tmp_path, *({"prompt": text} for text in QUESTIONS))
    output = tmp_path / "answers.jsonl"
    assert main(words(home, f"prompts={prompts}", f"output={output}", f"batch_size={batch_size}")) == 0
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == QUESTIONS
    assert [line["answer"] for line in lines] == [expected(home, text) for text in QUESTIONS]
    assert all(line.keys() == {"prompt", "answer", "finish", "prompt_tokens", "tokens"} for line in lines)
    assert all(line["finish"] in ("eos", "length") and 1 <= line["tokens"] <= 6 for line in lines)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("answers: ") == -(-len(QUESTIONS) // batch_size)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_prompts_of_a_file_are_answered_as_text(
    home: Path, tmp_path: Path, batch_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_jsonl(tmp_path, *({"messages": [{"role": "user", "content": q}]} for q in QUESTIONS))
    assert main(words(home, f"prompts={prompts}", f"batch_size={batch_size}")) == 0
    text = "".join(f"> {question}\n{expected(home, question)}\n\n" for question in QUESTIONS)
    assert capsys.readouterr().out == text


def test_guessed_tokens_are_for_single_rows(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "airtune")
    prompts = write_jsonl(tmp_path, *({"prompt": text} for text in QUESTIONS))
    assert main(words(home, f"prompts={prompts}", "generation.prompt_lookup_num_tokens=2")) == 0
    assert "One prompt at a time" in caplog.text
    assert expected(home, QUESTIONS[1]) in capsys.readouterr().out


def test_a_missing_pad_token_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "airtune")
    make_model(tmp_path / "base", pad_token=None)
    prompts = write_jsonl(tmp_path, *({"prompt": text} for text in QUESTIONS))
    assert main(words(tmp_path, f"prompts={prompts}")) == 0
    assert "has no pad token" in caplog.text
    shown = capsys.readouterr().out
    for question in QUESTIONS:
        assert f"> {question}\n{expected(tmp_path, question)}\n" in shown


def test_a_recipe_for_training_generates_too(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        f"# @package _global_\noutput_dir: out\nmodel: {{path: {home / 'base'}}}\nadapter: {{r: 4}}\n"
        "data: {train: '???'}\ntrainer: {max_steps: 3}\n"
    )
    recipe = ["+recipe=mine", "--config-dir", str(tmp_path)]
    assert main([*recipe, *words(home)[1:], f"prompt={QUESTION}"]) == 0
    assert capsys.readouterr().out == f"{expected(home, QUESTION)}\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["prompt=a", "generation.max_new_tokens=999"], "the model's context ends at 256: ask for"),
        ([f"prompt={'yes ' * 300}"], "prompt: the prompt has"),
        (["prompt=a", "adapter=/nowhere/adapter"], "/nowhere/adapter"),
        (["prompt=a", "generation.assistant_model=/nowhere"], "assistant_model: there is no folder /nowhere"),
        (["prompt=a", "data.chat_template=nothing"], "chat_template 'nothing' is neither"),
        (["prompt=a", "output=/nowhere/out.jsonl"], "output=/nowhere/out.jsonl: expected a file"),
        (["prompts=/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["prompt=a", "model.path=/nowhere/model"], "model.path: there is no folder /nowhere/model"),
        (["prompt=a", f"model.path={Path(__file__).parent}"], "tests: its tokenizer cannot be loaded: "),
    ],
)
def test_a_mistake_is_one_message(
    home: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(words(home, *more)) == 1
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


def test_a_mistyped_key_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["promt=a"])
    assert caught.value.code == 2
    assert "did you mean 'prompt'?" in capsys.readouterr().err


def test_a_conversation_on_a_terminal(home: Path) -> None:
    """A process of its own on a real terminal: two turns, Ctrl-C at the prompt, and out."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "airtune.generate", *words(home)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        seen = read_until(ours, "> ")
        os.write(ours, b"Say yes.\n")
        seen += read_until(ours, "]\r\n> ")
        seen += read_until(ours, "ends an answer.\r\n> ", lambda: process.send_signal(signal.SIGINT))
        os.write(ours, b"Say no.\n")
        seen += read_until(ours, "]\r\n> ")
        os.write(ours, b"/exit\n")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert seen.count("finish: ") == 2 and seen.count("Ctrl-C ends an answer") >= 2
    assert expected(home, "Say yes.").splitlines()[0] in seen and "Traceback" not in seen


def read_until(terminal: int, text: str, poke: Callable[[], None] = lambda: None) -> str:
    """What appears on the terminal, up to `text`. `poke` is called until something appears.

    Once would not do: a signal between the writing of a prompt and the wait for a key waits for the key too.
    """
    seen, deadline = b"", time.monotonic() + 120
    while not seen.decode(errors="replace").endswith(text):
        if not seen:
            poke()
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096)
        assert time.monotonic() < deadline, f"waited for {text!r}, got {seen.decode(errors='replace')!r}"
    return seen.decode(errors="replace")
