"""Code that a repository brings along: losses, gradients and tokens are as in memory, if it is trusted."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import generic
from transformers.utils.output_capturing import OutputRecorder

import airtune
from airtune import generate, train
from airtune.autograd.row_split import MicroBatchError
from airtune.model.remote_code import moved_names, remote_class
from airtune.model.skeleton import _LargeOnMeta
from airtune.weights.checkpoint import CheckpointError
from tests import remote_code, zoo
from tests.packed import MXFP4, PACKED
from tests.remote_code import LAYERS
from tests.sim import Simulator
from tests.tiny_tokenizer import tiny_tokenizer
from tests.twins import adapter, gradients, ragged_batch, relative_error

# PEFT asks transformers for a name that is to go.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXPERT = f"{LAYERS}.2.block_sparse_moe.experts.3"


def lora(folder: Path) -> LoraConfig:
    """On every linear layer of the decoder: also in the experts, and in what mixes earlier hidden states."""
    linear = [n for n, m in remote_code.skeleton(folder).named_modules() if type(m) is nn.Linear]
    targets = [name for name in linear if name.startswith(LAYERS)]
    return LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)


def resident(folder: Path) -> PeftModel:
    base, config = remote_code.in_memory(folder), lora(folder)
    torch.manual_seed(0)
    return cast(PeftModel, get_peft_model(base, config))


def streamed(folder: Path, device: str = "cpu", **options: Any) -> PeftModel:
    config = lora(folder)
    torch.manual_seed(0)
    options = {"dtype": torch.float32, "trust_remote_code": True, "poison": device != "cpu", **options}
    return cast(PeftModel, airtune.load(folder, lora=config, device=device, **options))


def step(model: PeftModel, rows: int = 4) -> tuple[float, dict[str, Tensor]]:
    model.train()
    loss = model(**ragged_batch(rows)).loss
    loss.backward()
    grads = {name: grad.cpu().clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    return loss.item(), grads


def tokens_without_cache(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """Greedy, each token from the whole text."""
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize(
    ("device", "residuals", "micro_batch_size"),
    [
        ("cpu", "list", None),
        ("cpu", "list", 1),
        ("sim", "list", 3),
        ("cpu", "stack", None),
        ("sim", "stack", None),
    ],
)
def test_same_as_in_memory(
    sim: Simulator, tmp_path: Path, device: str, residuals: str, micro_batch_size: int | None
) -> None:
    folder = remote_code.make(tmp_path, residuals=residuals)
    twin, model = resident(folder), streamed(folder, device, micro_batch_size=micro_batch_size)
    for _ in range(2):
        (loss, wanted), (got, grads) = step(twin), step(model)
        assert got == pytest.approx(loss, rel=1e-6)
        assert relative_error(grads, wanted) < 1e-5
    # Two layers are between what the first one makes and who reads it at last.
    first = [grad.norm() for name, grad in grads.items() if ".layers.0." in name and ".o_proj." in name]
    assert first and all(norm > 0 for norm in first)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = zoo.random_ids(2, 8)
    made = model.eval().generate(input_ids=prompt, **options)
    assert torch.equal(made, tokens_without_cache(twin, prompt, 6))


def test_a_stack_cannot_be_split_by_rows(tmp_path: Path) -> None:
    model = streamed(remote_code.make(tmp_path, residuals="stack"), micro_batch_size=1)
    with pytest.raises(MicroBatchError, match=r"layers\.\d cannot be run in micro-batches"):
        step(model)


def test_images(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path)
    batch = {**ragged_batch(2), "pixel_values": torch.randn(2, 3, 12)}
    with torch.no_grad():
        want = resident(folder).eval()(**batch).loss.item()
        assert streamed(folder).eval()(**batch).loss.item() == pytest.approx(want, rel=1e-6)


def test_attention_is_chosen_for_the_parts(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path)
    model = streamed(folder, attn_implementation="eager")
    assert model.config.text_config._attn_implementation == "eager"
    assert relative_error(step(model)[1], step(streamed(folder))[1]) < 1e-5


def test_it_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path)
    for name in ("configuration_latent.py", "modeling_latent.py"):
        (folder / name).write_text("raise AssertionError('it ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        airtune.load(folder, device="cpu")
    with pytest.raises(AssertionError, match="it ran"):
        airtune.load(folder, device="cpu", trust_remote_code=True)


def test_nothing_is_drawn_for_weights_that_are_not_there(tmp_path: Path) -> None:
    """On meta it has no effect, and for hundreds of thousands of matrices it would take minutes."""
    folder = remote_code.make(tmp_path)
    code = folder / "modeling_latent.py"
    code.write_text(code.read_text().replace("module.weight.data.normal_(", "raise AssertionError("))
    airtune.load(folder, device="cpu", trust_remote_code=True)


def test_matrices_are_born_on_meta_and_what_code_may_fill_is_not() -> None:
    with _LargeOnMeta(2**24):
        assert nn.Linear(64, 64).weight.is_meta
        assert not torch.empty(64, 64).is_meta


def test_only_the_chosen_experts_are_read(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path)
    tensors = remote_code.read(folder)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[[1, 6]] = 100.0
    remote_code.write(folder, tensors)
    model = streamed(folder)
    window = airtune.stream_of(model)._window
    assert window is not None
    seen, bring = set(), window._bring

    def noted(index: int, **options: Any) -> bool:
        seen.add(index)
        return bring(index, **options)

    window._bring = noted  # type: ignore[method-assign]
    step(model)
    model.eval().generate(input_ids=zoo.random_ids(1, 4), max_new_tokens=3, pad_token_id=0)
    assert seen == {8 * layer + expert for layer in range(3) for expert in (1, 6)}
    assert airtune.stream_of(model).counters()["expert_loads"] <= 3 * 2 * (2 + 3)


def test_an_expert_without_a_tensor(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path)
    remote_code.write(
        folder, {n: t for n, t in remote_code.read(folder).items() if n != f"{EXPERT}.w2.weight"}
    )
    with pytest.raises(CheckpointError, match=rf"without a source in the checkpoint: {EXPERT}\.w2\.weight;?"):
        streamed(folder)


def test_a_saved_adapter(tmp_path: Path) -> None:
    folder = remote_code.make(tmp_path / "model")
    model = streamed(folder)
    model.save_pretrained(str(tmp_path / "adapter"))
    options: dict[str, Any] = {"device": "cpu", "trust_remote_code": True, "adapter_trainable": True}
    again = cast(PeftModel, airtune.load(folder, adapter=tmp_path / "adapter", **options))
    assert relative_error(step(again)[1], step(model)[1]) < 1e-6


# Experts in 4 bits


def with_packed_experts(folder: Path, dense: Path) -> None:
    """Pack the experts of the checkpoint in `folder`, and write what they stand for to `dense`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    pack, settings = PACKED["mxfp4"].pack, PACKED["mxfp4"].settings
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**MXFP4))
    decompress = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized").decompress
    packed, plain = {}, {}
    for name, tensor in remote_code.read(folder).items():
        if ".experts." not in name:
            packed[name] = plain[name] = tensor
            continue
        stored = {key: part for key, part in pack(name, tensor).items() if not key.endswith("input_scale")}
        packed |= stored
        parts = {key.rpartition(".")[2]: part.clone() for key, part in stored.items()}
        plain[name] = decompress(parts, scheme)["weight"].to(tensor.dtype)
    remote_code.write(folder, packed)
    ignored = [r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\..*", r"re:.*latent$", r"re:.*proj$"]
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {**settings, "ignore": ["lm_head", *ignored]}
    (folder / "config.json").write_text(json.dumps(config))
    remote_code.write(dense, plain)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with packed experts, and one with what they decode to."""
    folder, dense = remote_code.make(tmp_path / "packed"), remote_code.make(tmp_path / "dense")
    with_packed_experts(folder, dense)
    stored = remote_code.read(folder)
    assert (
        stored[f"{EXPERT}.w2.weight_packed"].dtype == stored[f"{EXPERT}.w2.weight_scale"].dtype == torch.uint8
    )
    return folder, dense


@pytest.mark.parametrize(("device", "micro_batch_size"), [("cpu", None), ("sim", 3)])
def test_packed_experts(
    sim: Simulator, packed: tuple[Path, Path], device: str, micro_batch_size: int | None
) -> None:
    twin, model = resident(packed[1]), streamed(packed[0], device, micro_batch_size=micro_batch_size)
    for _ in range(2):
        (loss, wanted), (got, grads) = step(twin), step(model)
        assert got == pytest.approx(loss, rel=1e-6)
        assert relative_error(grads, wanted) < 1e-5
    prompt = zoo.random_ids(2, 8)
    made = model.eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(made[:, :12], tokens_without_cache(twin, prompt, 4)[:, : made.shape[1]])


def test_packed_experts_are_read_packed(packed: tuple[Path, Path]) -> None:
    sizes = []
    for folder in packed:
        window = airtune.stream_of(streamed(folder))._window
        assert window is not None
        sizes.append(window.expert_nbytes)
    # 17 bytes for 32 values, each tensor at a 64-byte boundary, against 128.
    assert sizes[0] < 0.2 * sizes[1]


def test_packed_experts_are_planned_by_their_kind(
    packed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands of matrices are of a few kinds; to try each on meta would take hours."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    tried, decompress = [], compressor.decompress

    def noted(*args: Any) -> Any:
        tried.append(args)
        return decompress(*args)

    monkeypatch.setattr(compressor, "decompress", noted)
    airtune.load(packed[0], device="cpu", trust_remote_code=True)
    assert len(tried) == 1


def test_a_packed_expert_without_its_scale(packed: tuple[Path, Path]) -> None:
    folder, missing = packed[0], f"{EXPERT}.w1.weight_scale"
    remote_code.write(folder, {n: t for n, t in remote_code.read(folder).items() if n != missing})
    with pytest.raises(CheckpointError, match=missing):
        streamed(folder)


# Names of an older transformers


def test_names_that_moved_are_there_while_code_is_imported() -> None:
    before = dict(vars(generic))
    assert "OutputRecorder" not in before
    with moved_names():
        assert vars(generic)["OutputRecorder"] is OutputRecorder
        assert generic.check_model_inputs is before["check_model_inputs"]
    with pytest.raises(RuntimeError, match="in the code"), moved_names():
        raise RuntimeError("in the code")
    assert vars(generic) == before


def test_a_decorator_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In both its spellings, and it records what it used to."""
    folder = remote_code.make(tmp_path)
    monkeypatch.delattr(generic, "check_model_inputs")
    with torch.no_grad():
        for number, spelling in enumerate(("@check_model_inputs", "@check_model_inputs()")):
            code = (
                (folder / "modeling_latent.py")
                .read_text()
                .replace("@check_model_inputs()", "@check_model_inputs")
            )
            (folder / f"modeling_{number}.py").write_text(code.replace("@check_model_inputs", spelling))
            made = remote_class(f"modeling_{number}.LatentTextModel", folder)
            text = made(remote_code.skeleton(folder).config.text_config).eval()
            outputs = text(zoo.random_ids(1, 4), output_router_logits=True)
            assert len(cast(Any, outputs).router_logits) == 3
    assert "check_model_inputs" not in vars(generic)


def test_a_cache_under_its_older_name(tmp_path: Path) -> None:
    """transformers hands it over as `cache`; a forward with **kwargs would drop that."""
    folder = remote_code.make(tmp_path)
    model = remote_code.in_memory(folder).eval()
    parameters = list(inspect.signature(type(model).forward).parameters)
    assert parameters[-2:] == ["cache", "kwargs"] and "past_key_values" in parameters
    ids = zoo.random_ids(1, 6)
    with torch.no_grad():
        first = model(input_ids=ids[:, :4], use_cache=True)
        last = model(input_ids=ids[:, 4:], cache=first.cache).logits
    torch.testing.assert_close(last, model(input_ids=ids).logits[:, 4:].detach(), rtol=1e-4, atol=1e-5)


def test_adapters_are_in_all_experts(tmp_path: Path) -> None:
    names = [name for name in adapter(streamed(remote_code.make(tmp_path))) if ".experts." in name]
    assert len(names) == 3 * 8 * 3 * 2


# The commands


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with such a model as `base`, with a tokenizer, and conversations."""
    monkeypatch.setattr("airtune.run.console.set_up_logging", lambda: None)
    tokenizer = tiny_tokenizer()
    remote_code.make(tmp_path / "base", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "base")
    turns = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a lamp."}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return tmp_path


def words(home: Path) -> list[str]:
    settings = {
        "output_dir": home / "run",
        "model.path": home / "base",
        "data.train": home / "chat.jsonl",
        "adapter.r": 2,
        "stream.micro_batch_size": 2,
        "trainer.per_device_train_batch_size": 4,
        "trainer.max_steps": 2,
    }
    return [f"{name}={value}" for name, value in settings.items()]


def test_the_command_trains_it_and_speaks_with_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trusted = "model.trust_remote_code=true"
    assert train.main([*words(home), trusted]) == 0
    tensors = load_file(home / "run" / "adapter" / "adapter_model.safetensors")
    assert any(".block_sparse_moe." in name for name in tensors)
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    capsys.readouterr()
    asked = [f"model.path={home / 'base'}", f"adapter={home / 'run' / 'adapter'}", "prompt=Who are you?"]
    assert generate.main([*asked, trusted, "generation.max_new_tokens=3"]) == 0
    assert capsys.readouterr().out


def test_the_command_refuses_it_by_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(words(home)) == 1
    said = capsys.readouterr()
    assert "trust_remote_code" in said.err + said.out and "Traceback" not in said.err
