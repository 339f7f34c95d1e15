"""What a user may hand over that is no model, or half of one: one message, and nothing is written.

Each case goes through both doors: `airtune.load` raises a ValueError, and `python -m airtune.train` says the
same on the terminal and leaves no folder behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import airtune
from airtune.train import main
from tests.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model `base` in three shards, an `adapter` for it, and `chat.jsonl`."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(home / "base")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(home / "base", max_shard_size="40KB")
    get_peft_model(model, lora()).save_pretrained(str(home / "adapter"))
    turns = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]
    (home / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return home


def lora(**options: Any) -> LoraConfig:
    given: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**given | options)


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) >= 3
    return found


def train(home: Path, output: Path, base: Path, **settings: object) -> int:
    words: dict[str, object] = {
        "output_dir": output,
        "model.path": base,
        "data.train": home / "chat.jsonl",
        "trainer.max_steps": 1,
        "trainer.per_device_train_batch_size": 2,
    }
    words |= {name.replace("__", "."): value for name, value in settings.items()}
    return main([f"{name}={value}" for name, value in words.items()])


# --- broken checkpoints -------------------------------------------------------------------------------------


def cut_a_shard(base: Path) -> None:
    shard = shards(base)[1]
    shard.write_bytes(shard.read_bytes()[:-1000])


def empty_a_shard(base: Path) -> None:
    shards(base)[1].write_bytes(b"")


def lose_a_shard(base: Path) -> None:
    shards(base)[1].unlink()


def lose_the_end_of_a_header(base: Path) -> None:
    shard = shards(base)[1]
    shard.write_bytes(shard.read_bytes()[:100])


def put_an_error_page_in_place_of_a_shard(base: Path) -> None:
    shards(base)[1].write_text("<!DOCTYPE html><html><body>429 Too Many Requests</body></html>")


def put_a_pointer_in_place_of_a_shard(base: Path) -> None:
    """What `git clone` leaves without git-lfs."""
    shards(base)[1].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def lose_a_tensor(base: Path) -> None:
    shard = shards(base)[1]
    tensors = load_file(shard)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, shard, metadata={"format": "pt"})


def lose_a_tensor_everywhere(base: Path) -> None:
    """From the index too: only the model knows that it should be there."""
    lose_a_tensor(base)
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    held = {name for shard in shards(base) for name in load_file(shard)}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name in held}
    path.write_text(json.dumps(index))


def grow_a_tensor(base: Path) -> None:
    shard = shards(base)[1]
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name] = torch.zeros(tensors[name].shape[0] + 1, *tensors[name].shape[1:])
    save_file(tensors, shard, metadata={"format": "pt"})


def take_another_models_config(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))


def break_the_config(base: Path) -> None:
    (base / "config.json").write_text('{"model_type": "llama",')


def keep_only_pickles(base: Path) -> None:
    for shard in shards(base):
        shard.unlink()
    (base / "model.safetensors.index.json").unlink()
    torch.save({}, base / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_a_shard, "model-00002-of-"),
        (empty_a_shard, "model-00002-of-"),
        (lose_a_shard, r"1 of \d shards are missing.*model-00002-of-"),
        (lose_the_end_of_a_header, "model-00002-of-"),
        (put_an_error_page_in_place_of_a_shard, "model-00002-of-"),
        (put_a_pointer_in_place_of_a_shard, "model-00002-of-.*[Ll][Ff][Ss]"),
        (lose_a_tensor, "tensors are not in the file the index gives"),
        (lose_a_tensor_everywhere, "does not fit LlamaForCausalLM: .*without a source"),
        (grow_a_tensor, "does not fit LlamaForCausalLM"),
        (
            take_another_models_config,
            r"does not fit LlamaForCausalLM: .*without a source.* model\.layers\.3\.",
        ),
        (break_the_config, r"config\.json: is not JSON"),
        (keep_only_pickles, "PyTorch pickle only, which cannot be streamed"),
    ],
    ids=lambda value: value.__name__.replace("_", " ") if callable(value) else "",
)
def test_a_broken_checkpoint(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    base = shutil.copytree(home / "base", tmp_path / "base")
    spoil(base)
    with pytest.raises(ValueError, match=message):
        airtune.load(base, lora=lora(), device="cpu")
    assert train(home, tmp_path / "run", base) == 1
    shown = capsys.readouterr()
    assert str(base) in shown.err or "LlamaForCausalLM" in shown.err
    assert "Traceback" not in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


# --- folders of another kind --------------------------------------------------------------------------------


def test_an_adapter_where_the_model_should_be(home: Path) -> None:
    with pytest.raises(ValueError, match=r"holds an adapter .* and no model weights; its base is .*base"):
        airtune.load(home / "adapter", device="cpu")


def test_a_folder_of_data_where_the_model_should_be(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "chat.jsonl", tmp_path)
    with pytest.raises(ValueError, match=r"no weights among chat\.jsonl"):
        airtune.load(tmp_path, device="cpu")


def test_a_file_where_the_folder_should_be(home: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file, expected a checkpoint's folder\. Give .*base"):
        airtune.load(shards(home / "base")[0], device="cpu")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        airtune.load(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("where", ["base/config.json", "nowhere"])
def test_the_command_says_where_it_looked(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    assert train(home, tmp_path / "run", home / where) == 1
    shown = capsys.readouterr()
    assert str(home / where) in shown.err and "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_the_model_where_the_adapter_should_be(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"base has no adapter_config\.json"):
        airtune.load(home / "base", adapter=home / "base", device="cpu")
    assert train(home, tmp_path / "run", home / "base", adapter__path=home / "base") == 1
    shown = capsys.readouterr()
    assert str(home / "base") in shown.err and "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_does_not_fit(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = shutil.copytree(home / "adapter", tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file({name.removeprefix("base_model."): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="adapter does not fit this model"):
        airtune.load(home / "base", adapter=adapter, device="cpu")
    assert train(home, tmp_path / "run", home / "base", adapter__path=adapter) == 1
    shown = capsys.readouterr()
    assert f"{adapter} does not fit this model" in shown.err and "Traceback" not in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


# --- names of layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["wq"], ["q_proj", "wq"], ["lm_head"], ["embed_tokens"]], ids=str)
def test_targets_that_are_not_there(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], targets: list[str]
) -> None:
    message = r"match no linear layer .* called \['down_proj', 'gate_proj', .*'v_proj'\]"
    with pytest.raises(ValueError, match=message):
        airtune.load(home / "base", lora=lora(target_modules=targets), device="cpu")
    settings = {"adapter__target_modules": f"[{','.join(targets)}]"}
    assert train(home, tmp_path / "run", home / "base", **settings) == 1
    shown = capsys.readouterr()
    assert f"'{targets[-1]}'" in shown.err and "'down_proj'" in shown.err and "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []
