"""`airtune.load` returns transformers' own model: it does what transformers, PEFT and torch do with it."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import airtune
from airtune.model import assembly
from airtune.model.head_weights import StreamedHead
from airtune.model.skeleton import _belongs
from airtune.weights.checkpoint import Checkpoint
from airtune.weights.reader import ByteReader
from airtune.weights.residency import Residency
from tests import zoo
from tests.twins import adapter, gradients, ragged_batch, relative_error

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make("llama", tmp_path_factory.mktemp("llama"))


def lora(**options: Any) -> LoraConfig:
    given: dict[str, Any] = {
        "r": 2,
        "target_modules": TARGETS,
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**given | options)


def resident(folder: Path, config: LoraConfig | None = None, **options: Any) -> Any:
    base = LlamaForCausalLM.from_pretrained(folder, **options)
    if config is None:
        return base
    torch.manual_seed(0)
    return get_peft_model(base, config)


def streamed(folder: Path, config: LoraConfig | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return airtune.load(folder, lora=config, device="cpu", **options)


# --- what comes back ----------------------------------------------------------------------------------------


def test_it_is_transformers_own_model(folder: Path) -> None:
    model = streamed(folder)
    assert type(model) is LlamaForCausalLM
    assert model.device == torch.device("cpu") and model.dtype == torch.float32 and not model.training
    assert model.name_or_path == str(folder)
    assert not any(p.requires_grad for p in model.parameters())
    assert airtune.stream_of(model).device == torch.device("cpu")
    assert [n for n, _ in model.named_modules()] == [n for n, _ in resident(folder).named_modules()]


def test_weights_of_layers_are_placeholders_and_all_others_are_there(folder: Path) -> None:
    model, twin = streamed(folder).state_dict(), resident(folder).state_dict()
    assert model.keys() == twin.keys()
    for name, tensor in model.items():
        assert (tensor.shape, tensor.dtype) == (twin[name].shape, twin[name].dtype), name
        assert tensor.is_meta == (".layers." in name or name == "lm_head.weight"), name
        assert tensor.is_meta or torch.equal(tensor, twin[name]), name


def test_an_adapter_makes_it_a_peft_model(folder: Path) -> None:
    model = streamed(folder, lora())
    assert isinstance(model, PeftModel) and type(model.get_base_model()) is LlamaForCausalLM
    assert model.device == torch.device("cpu")
    assert airtune.stream_of(model) is airtune.stream_of(model.get_base_model())
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(adapter(model)) == set(adapter(resident(folder, lora())))
    assert all(not p.is_meta and p.dtype == torch.float32 for p in adapter(model).values())


def test_the_callers_config_is_not_changed(folder: Path) -> None:
    config = lora(target_modules="all-linear")
    before = config.to_dict()
    streamed(folder, config)
    assert config.to_dict() == before


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_dtype_is_the_checkpoints_own_or_the_one_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None
) -> None:
    zoo.make("llama", tmp_path, dtype=stored)
    model, twin = streamed(tmp_path, lora(), dtype=asked), resident(tmp_path, lora(), dtype=asked or stored)
    assert model.dtype == twin.dtype == (asked or stored)
    assert {p.dtype for p in adapter(model).values()} == {torch.float32}
    ids_BS = zoo.random_ids()
    with torch.no_grad():
        got, want = model(input_ids=ids_BS).logits, twin(input_ids=ids_BS).logits
    assert got.dtype == want.dtype == (asked or stored)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("nameless", ["dtype", "both"])
def test_dtype_of_a_config_that_names_none_is_that_of_the_files(tmp_path: Path, nameless: str) -> None:
    zoo.make("llama", tmp_path, dtype=torch.bfloat16)
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert streamed(tmp_path).dtype == torch.bfloat16


def test_generation_settings_come_along(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    GenerationConfig(max_new_tokens=3, eos_token_id=[2, 7]).save_pretrained(copy)
    model = streamed(copy)
    assert model.generation_config.max_new_tokens == 3 and model.generation_config.eos_token_id == [2, 7]
    assert model.generate(zoo.random_ids(1, 5), pad_token_id=0).shape[1] <= 8


# --- use ----------------------------------------------------------------------------------------------------


def test_logits_without_an_adapter(folder: Path) -> None:
    batch = ragged_batch()
    with torch.no_grad():
        got, want = streamed(folder)(**batch), resident(folder)(**batch)
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.loss, want.loss)


def test_a_plain_loop_learns_what_the_resident_twin_learns(folder: Path) -> None:
    batch, parameters = ragged_batch(), []
    for model in (streamed(folder, lora()), resident(folder, lora())):
        model.train()
        optimizer = torch.optim.SGD(adapter(model).values(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        parameters.append(adapter(model))
    assert relative_error(*parameters) < 1e-5


def test_a_loss_of_ones_own_on_the_logits(folder: Path) -> None:
    batch = {k: v for k, v in ragged_batch().items() if k != "labels"}
    grads = []
    for model in (streamed(folder, lora(), micro_batch_size=3), resident(folder, lora())):
        model(**batch).logits.pow(2).mean().backward()
        grads.append(gradients(model))
    assert relative_error(*grads) < 1e-5


@pytest.mark.parametrize("sampled", [False, True])
def test_generates_through_the_adapter(folder: Path, sampled: bool) -> None:
    texts = []
    for model in (streamed(folder, lora()), resident(folder, lora())):
        torch.manual_seed(2)
        ids = zoo.random_ids(2, 6)
        texts.append(
            model.eval().generate(input_ids=ids, do_sample=sampled, max_new_tokens=5, pad_token_id=0)
        )
    assert torch.equal(*texts)


def test_the_adapter_can_be_switched_off_for_a_while(folder: Path) -> None:
    """A reference model for preference losses costs no second base."""
    model, batch = streamed(folder, lora()), ragged_batch()
    with torch.no_grad(), model.disable_adapter():
        got = model(**batch).logits
    torch.testing.assert_close(got, resident(folder)(**batch).logits)


def test_two_models_of_one_checkpoint_do_not_mix(folder: Path) -> None:
    first, second, batch = (
        streamed(folder, lora()),
        streamed(folder, lora(target_modules=["v_proj"])),
        ragged_batch(),
    )
    losses = [model(**batch).loss for model in (first, second)]
    for loss in losses:
        loss.backward()
    for model, targets in ((first, TARGETS), (second, ["v_proj"])):
        twin = resident(folder, lora(target_modules=targets))
        twin(**batch).loss.backward()
        assert relative_error(gradients(model), gradients(twin)) < 1e-5


# --- adapters in folders ------------------------------------------------------------------------------------


def trained(model: PeftModel, steps: int = 1) -> PeftModel:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**ragged_batch()).loss.backward()
        optimizer.step()
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, model(input_ids=zoo.random_ids()).logits)


def test_peft_loads_the_saved_adapter_without_a_warning_and_answers_the_same(
    folder: Path, tmp_path: Path
) -> None:
    model = trained(streamed(folder, lora(init_lora_weights=True)))
    model.save_pretrained(str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PEFT asks every model for the name that transformers renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        twin = PeftModel.from_pretrained(resident(folder), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(twin), logits(resident(folder)), atol=1e-2), "the adapter does something"


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that PEFT trained and saved on a resident model."""
    path = tmp_path_factory.mktemp("adapter")
    trained(resident(folder, lora())).save_pretrained(str(path))
    return path


def test_a_saved_adapter_runs_frozen(folder: Path, saved: Path) -> None:
    model = airtune.load(folder, adapter=saved, device="cpu")
    twin = PeftModel.from_pretrained(resident(folder), str(saved))
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model(**ragged_batch()).loss.requires_grad


def test_a_saved_adapter_trains_on_as_the_resident_one_does(folder: Path, saved: Path) -> None:
    model = airtune.load(folder, adapter=str(saved), adapter_trainable=True, device="cpu")
    twin = PeftModel.from_pretrained(resident(folder), str(saved), is_trainable=True)
    assert relative_error(adapter(model), adapter(twin)) == 0
    assert isinstance(model, PeftModel)
    trained(model, 3), trained(twin, 3)
    assert relative_error(adapter(model), adapter(twin)) < 1e-4  # Adam divides by small numbers


# --- where it comes from, how it attends --------------------------------------------------------------------


def test_a_hub_id_goes_through_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []
    here = Checkpoint.open(folder)

    def open_hub(path: str, *, revision: str | None, include_code: bool) -> Checkpoint:
        opened.append((path, revision, include_code))
        return here

    monkeypatch.setattr(Checkpoint, "open", open_hub)
    model = airtune.load("someone/a-model", lora=lora(), revision="v2", device="cpu")
    assert opened == [("someone/a-model", "v2", False)]
    assert isinstance(model, PeftModel) and model.get_base_model().name_or_path == "someone/a-model"
    config = model.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("someone/a-model", "v2")


@pytest.mark.parametrize("asked", [None, "auto", "sdpa", "eager"])
def test_attention_is_the_same_in_every_part(tmp_path: Path, asked: str | None) -> None:
    zoo.make("qwen3_5__vl", tmp_path)
    model = cast(PreTrainedModel, airtune.load(tmp_path, device="cpu", attn_implementation=asked))
    configs = [model.config, model.config.text_config, model.config.vision_config]
    assert [config._attn_implementation for config in configs] == [
        "eager" if asked == "eager" else "sdpa"
    ] * 3


def test_attention_without_sdpa_is_eager(tmp_path: Path) -> None:
    """Attention sinks have no sdpa kernel."""
    model = cast(PreTrainedModel, airtune.load(zoo.make("gpt_oss", tmp_path), device="cpu"))
    assert model.config._attn_implementation == "eager"


# --- requests that cannot be met ----------------------------------------------------------------------------


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(assembly, "load_tensor", refuse)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": lora(), "adapter": "somewhere"}, "got both lora and adapter"),
        ({"attn_implementation": "quick"}, r'attn_implementation="quick"'),
        ({"attn_implementation": "flash_attention_2"}, "'flash_attention_2' needs a package|flash_attn"),
        ({"attn_implementation": 2}, r"attn_implementation must be .* got 2 \(int\)"),
        ({"dtype": torch.int8}, "torch.int8"),
        ({"dtype": "bf16"}, r"one of torch\.bfloat16, .* got 'bf16' \(str\)"),
        ({"device": "gpu"}, r'"auto" or one of \[\'cpu\'.* got \'gpu\''),
        ({"device": "meta"}, "got 'meta'"),
        ({"device": 0}, r"got 0 \(int\)"),
        ({"lora": {"r": 4}}, r"must be a peft\.LoraConfig.* \(dict\)"),
        ({"lora": IA3Config()}, r"must be a peft\.LoraConfig.* \(IA3Config\)"),
        ({"adapter": 3}, r"folder of a saved adapter, got 3 \(int\)"),
        ({"adapter": "nowhere"}, "there is no folder nowhere"),
        ({"lora": lora(use_dora=True)}, "uses use_dora"),
        ({"lora": lora(target_modules=["wq"])}, "match no linear layer"),
        ({"file_access": "quick"}, "got file_access='quick'"),
        ({"host_memory": "lots"}, "'lots' is not a size"),
        ({"host_memory": -1}, "must be positive"),
        ({"host_memory": 1000}, r"limited to 1,000 bytes"),
        ({"device_memory": "much"}, "'much' is not a size"),
        *(
            ({"micro_batch_size": rows}, "micro_batch_size must be at least 1 row")
            for rows in (0, -1, "2", 1.5, True)
        ),
    ],
    ids=str,
)
def test_a_wrong_argument(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        airtune.load(folder, **{"device": "cpu"} | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(folder: Path) -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"'cpu'.* on this machine, got .*cuda"):
            airtune.load(folder, device=device)


@pytest.mark.parametrize("broken", ["stream_head", "Stream", "refuse_what_needs_weights"])
def test_threads_and_files_end_when_loading_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("half-way")

    def open_files() -> set[str]:
        gc.collect()  # a mapping ends with the last tensor that looks into it
        links = Path("/proc/self/fd").iterdir()
        return {str(link.readlink()) for link in links if link.is_symlink()} & {*map(str, folder.iterdir())}

    before, open_before = set(threading.enumerate()), open_files()
    monkeypatch.setattr(assembly, broken, refuse)
    with pytest.raises(RuntimeError, match="half-way"):
        airtune.load(folder, lora=lora(), device="cpu", file_access="buffered")
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("airtune")]
    assert open_files() <= open_before


def test_a_model_that_is_loaded_in_inference_mode_can_be_trained(folder: Path) -> None:
    with torch.inference_mode():
        model = streamed(folder, lora())
    model(**ragged_batch(2)).loss.backward()
    assert all(grad.any() for name, grad in gradients(model).items() if "lora_B" in name)


def test_garbage_is_collected_again_when_loading_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights"):
        airtune.load(tmp_path, device="cpu")
    assert gc.isenabled()


def test_what_reads_is_closed_after_what_asks_for_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for kind in (ByteReader, Residency, StreamedHead):
        close = kind.close

        def noted(self: Any, close: Any = close, name: str = kind.__name__) -> None:
            closed.append(name)
            close(self)

        monkeypatch.setattr(kind, "close", noted)
    model = streamed(folder, file_access="buffered")
    closed.clear()  # trial readers
    airtune.stream_of(model).close()
    assert closed[:3] == ["StreamedHead", "Residency", "ByteReader"]


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **values)


REMOTE = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_config, "model_type"),
        (with_config(model_type="of-tomorrow"), "of-tomorrow"),
        (with_config(architectures=None), r"expected one name under 'architectures', got \[\]"),
        (with_config(architectures=["A", "B"]), r"expected one name under 'architectures', got \['A', 'B'\]"),
        (with_config(architectures=["NewForCausalLM"]), "has no NewForCausalLM. A newer transformers may"),
        (with_config(architectures=["NewForCausalLM"], auto_map=REMOTE), "set trust_remote_code=True"),
        (with_config(is_encoder_decoder=True), "is an encoder-decoder; only decoders are streamed"),
        (with_config(architectures=["LlamaModel"]), "LlamaModel, which has no output projection"),
        (with_config(architectures=["Trainer"]), "Trainer, which is no model class"),
        (with_config(architectures=["LlamaConfig"]), "LlamaConfig, which is no model class"),
        (with_config(architectures=["GPT2LMHeadModel"]), "which is no model of type 'llama'"),
        (with_config(num_hidden_layers=6), r"without a source in the checkpoint: model\.layers\.4\."),
        (with_config(num_hidden_layers=3), r"no place for: model\.layers\.3\."),
    ],
    ids=[
        "no config", "unknown type", "no architecture", "two architectures", "unknown architecture",
        "remote code", "encoder-decoder", "no head", "no model", "a config", "another family",
        "too few layers", "too many layers",
    ],
)  # fmt: skip
def test_a_wrong_checkpoint(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    with pytest.raises(ValueError, match=message):
        airtune.load(copy, lora=lora(), device="cpu")


def test_a_base_class_of_a_tied_model(tmp_path: Path) -> None:
    """Every tensor has a place in it."""
    zoo.make("llama_tied", tmp_path)
    edit_config(tmp_path, architectures=["LlamaModel"])
    with pytest.raises(ValueError, match="LlamaModel, which has no output projection"):
        airtune.load(tmp_path, device="cpu")


def test_a_text_decoder_of_a_composite_type_and_a_borrowed_class_belong() -> None:
    from transformers import Exaone4Config, LlamaConfig, MllamaConfig, MllamaForCausalLM

    assert _belongs(MllamaForCausalLM, MllamaConfig()) and _belongs(LlamaForCausalLM, LlamaConfig())
    assert not _belongs(LlamaForCausalLM, Exaone4Config())


# --- what would go wrong in silence -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model: model.merge_adapter(), r"merge_adapter .* streamed.*resident model: PeftModel"),
        (lambda model: model.merge_and_unload(), r"merge_and_unload .* streamed.*resident model: PeftModel"),
        (lambda model: model.add_adapter("two", lora()), r"add_adapter .* airtune\.load"),
        (lambda model: model.get_base_model().add_adapter(lora()), r"add_adapter .* airtune\.load"),
        (copy.deepcopy, "would have no weights"),
        (lambda model: model.gradient_checkpointing_enable(), "recomputes each layer"),
        (lambda model: model.activation_checkpointing_enable(), "recomputes each layer"),
        (lambda model: model.get_base_model().model.gradient_checkpointing_enable(), "recomputes each layer"),
        (lambda model: model.get_base_model().save_pretrained("nowhere"), "Save the adapter"),
        (lambda model: model.resize_token_embeddings(8), "on a resident model"),
        (lambda model: model.to("meta"), "moved or cast"),
        (lambda model: model.get_base_model().half(), "moved or cast"),
        (lambda model: model.get_base_model().model.to_empty(device="cpu"), "moved or cast"),
    ],
    ids=[
        "merge",
        "merge and unload",
        "second",
        "second, bare",
        "copy",
        "checkpointing",
        "by its new name",
        "inside",
        "saving the base",
        "more tokens",
        "elsewhere",
        "another dtype",
        "without values",
    ],
)
def test_what_a_streamed_model_cannot_do_it_refuses(
    folder: Path, act: Callable[[Any], object], message: str
) -> None:
    model = streamed(folder, lora())
    want = logits(model)
    with pytest.raises(ValueError, match=message):
        act(model)
    assert torch.equal(logits(model), want)


def test_the_librarys_own_trainer_trains_it_as_a_resident_one(folder: Path, tmp_path: Path) -> None:
    """It moves every model to its device, which is the CPU."""
    rows = [{"input_ids": ids, "labels": ids} for ids in zoo.random_ids(4, 6).tolist()]
    models = [streamed(folder, lora()), resident(folder, lora())]
    for model in models:
        options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True}
        Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows).train()
    assert relative_error(*map(adapter, models)) < 1e-4  # Adam divides by small numbers


def test_a_second_saved_adapter_is_refused_and_its_own_reloads(folder: Path, saved: Path) -> None:
    model = streamed(folder, lora())
    with pytest.raises(ValueError, match="add_adapter cannot be used"):
        model.load_adapter(str(saved), "two")
    model.load_adapter(str(saved), "default")
    torch.testing.assert_close(logits(model), logits(airtune.load(folder, adapter=saved, device="cpu")))


def test_unloading_leaves_the_streamed_base(folder: Path) -> None:
    base = streamed(folder, lora()).unload()
    torch.testing.assert_close(logits(base), logits(resident(folder)))


def test_a_refused_request_can_be_corrected(folder: Path) -> None:
    with pytest.raises(ValueError, match="match no linear layer"):
        streamed(folder, lora(target_modules=["nonsense"]))
    streamed(folder, lora(), micro_batch_size=2)(**ragged_batch()).loss.backward()


def test_a_folder_without_an_adapter(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path, folder):
        with pytest.raises(ValueError, match=r"has no adapter_config\.json; expected a folder that PEFT"):
            airtune.load(folder, adapter=path, device="cpu")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"did you mean .*/adapter\?"):
        airtune.load(folder, adapter=tmp_path, device="cpu")
