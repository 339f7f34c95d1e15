"""PEFT's adapters on placeholders are PEFT's adapters: the same numbers in the same places, or a refusal."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import airtune
from airtune.model import assembly, build
from airtune.model.adapter_targets import _excluding
from airtune.model.layers import find_layers
from tests import zoo
from tests.twins import adapter, gradients, ragged_batch, relative_error

ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make("llama", tmp_path_factory.mktemp("llama"))


def lora(**options: Any) -> LoraConfig:
    given: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    return LoraConfig(**given | options)


def resident(name: str, folder: Path, config: LoraConfig) -> PeftModel:
    base = zoo.model_class(name).from_pretrained(folder)
    base.set_experts_implementation("eager")
    torch.manual_seed(0)
    return cast(PeftModel, get_peft_model(base, config))


def streamed(folder: Path, config: LoraConfig, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    return cast(PeftModel, airtune.load(folder, lora=config, device="cpu", **options))


def adapted(model: nn.Module) -> set[str]:
    return {n.removeprefix("base_model.model.") for n, m in model.named_modules() if isinstance(m, LoraLayer)}


def one_step(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model.train()
    torch.manual_seed(1)
    model(**batch).loss.backward()
    return gradients(model)


# --- PEFT's own numbers -------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "PEFT's default": {},
    "random B": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "rsLoRA": {"use_rslora": True, "init_lora_weights": False},
    "dropout": {"lora_dropout": 0.25, "init_lora_weights": False},
    "rank pattern": {
        "rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.down_proj": 6},
        "init_lora_weights": False,
    },
    "alpha pattern": {"alpha_pattern": {"down_proj": 32}, "init_lora_weights": False},
    "some layers": {"layers_to_transform": [1, 3], "init_lora_weights": False},
    "one layer": {"layers_to_transform": 2, "layers_pattern": "layers", "init_lora_weights": False},
    "regular expression": {
        "target_modules": r".*layers\.[02]\.self_attn\.[qv]_proj",
        "init_lora_weights": False,
    },
    "all but a tower": {
        "target_modules": "all-linear",
        "exclude_modules": ["lm_head"],
        "init_lora_weights": False,
    },
    "all but some": {"exclude_modules": r".*\.[13]\..*", "init_lora_weights": False},
    "full names": {"target_modules": ["model.layers.2.mlp.up_proj"], "init_lora_weights": False},
    "bias of B": {"lora_bias": True, "target_modules": ["q_proj"], "init_lora_weights": False},
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_random_state_and_gradients_are_those_of_a_resident_model(folder: Path, variant: str) -> None:
    model = streamed(folder, lora(**VARIANTS[variant]))
    ours = torch.get_rng_state()
    twin = resident("llama", folder, lora(**VARIANTS[variant]))
    assert torch.equal(ours, torch.get_rng_state())
    mine, theirs = adapter(model), adapter(twin)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in mine.items())
    assert {p.dtype for p in mine.values()} == {torch.float32}
    assert relative_error(one_step(model, ragged_batch()), one_step(twin, ragged_batch())) < 1e-5


def test_a_bf16_base_has_the_adapter_of_a_resident_bf16_base(tmp_path: Path) -> None:
    zoo.make("llama", tmp_path, dtype=torch.bfloat16)
    base = zoo.model_class("llama").from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = streamed(tmp_path, lora(init_lora_weights=False))
    torch.manual_seed(0)
    twin = get_peft_model(base, lora(init_lora_weights=False))
    theirs = adapter(twin)
    assert {p.dtype for p in theirs.values()} == {torch.float32}
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in adapter(model).items())


def test_loading_without_an_adapter_draws_nothing(folder: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    airtune.load(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


# --- all linear layers of every kind of decoder -------------------------------------------------------------

# PEFT takes names that were once modules of single experts for parameters of the fused ones.
REWRITTEN = ("qwen3_moe_mixed", "deepseek_v3")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_all_linear(tmp_path: Path, name: str) -> None:
    zoo.make(name, tmp_path)
    options: dict[str, Any] = {"init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    batch = ragged_batch(2, 16)
    model = streamed(tmp_path, lora(target_modules="all-linear", **options))
    base = cast(PreTrainedModel, model.get_base_model())
    targets = adapted(model)
    assert all(target.startswith(f"{zoo.ZOO[name].layers}.") for target in targets)
    assert all(any(t.startswith(f"{layer}.") for t in targets) for layer in find_layers(base)), (
        "in every layer"
    )

    twin = resident(name, tmp_path, lora(target_modules=sorted(targets), **options))
    assert adapted(twin) == targets
    assert all(torch.equal(p, adapter(twin)[n]) for n, p in adapter(model).items())
    assert relative_error(one_step(model, batch), one_step(twin, batch)) < (1e-4 if "qwen4" in name else 2e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT speaks of what it does to experts
@pytest.mark.parametrize("name", [n for n in zoo.NAMES if n not in (*REWRITTEN, "mixtral", "mamba2")])
def test_all_linear_is_what_peft_means_by_it_inside_the_decoder(tmp_path: Path, name: str) -> None:
    """mamba2: PEFT refuses it whole, for one projection. mixtral: PEFT adds routers and expert parameters."""
    zoo.make(name, tmp_path)
    ours, theirs = (
        adapted(load(lora(target_modules="all-linear", fan_in_fan_out=name == "gpt2")))
        for load in (
            lambda config: streamed(tmp_path, config),
            lambda config: resident(name, tmp_path, config),
        )
    )
    assert ours == {target for target in theirs if target.startswith(f"{zoo.ZOO[name].layers}.")}


@pytest.mark.parametrize("name", REWRITTEN)
def test_all_linear_leaves_out_names_of_experts_and_says_so_once(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = streamed(zoo.make(name, tmp_path), lora(target_modules="all-linear"))
    assert not {target.rpartition(".")[2] for target in adapted(model)} & {*zoo.TAKEN_FOR_EXPERTS}
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "leaves out down_proj, gate_proj, up_proj:" in said and "dense and shared MLPs get no" in said


@pytest.mark.parametrize("name", REWRITTEN)
@pytest.mark.parametrize(
    ("targets", "left"),
    [
        (["o_proj", "gate_proj", "up_proj", "down_proj"], r"; left are \['o_proj'\];"),
        ([r"model.layers.1.mlp.gate_proj", "o_proj"], r"; left are \['o_proj'\];"),
        (r".*\.mlp\..*gate_proj", ";"),
    ],
    ids=["names", "a path", "regular expression"],
)
def test_names_of_experts_are_refused_in_the_users_words(
    tmp_path: Path, name: str, targets: str | list[str], left: str
) -> None:
    zoo.make(name, tmp_path, dtype=torch.bfloat16)
    if name == "deepseek_v3" and isinstance(targets, list):
        targets = [target.replace("layers.1", "layers.0") for target in targets]  # its dense layer
    says = rf"gate_proj'.*expert parameters\. .* target_modules{left}"
    with pytest.raises(ValueError, match=says) as error:
        streamed(tmp_path, lora(target_modules=targets))
    assert "gate_up_proj" not in str(error.value)


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_regular_expression_keeps_its_layers_where_peft_makes_names_of_it(
    tmp_path: Path, name: str
) -> None:
    model = streamed(zoo.make(name, tmp_path), lora(target_modules=r".*\.2\..*o_proj"))
    assert adapted(model) == {"model.layers.2.self_attn.o_proj"}


def test_what_peft_cannot_adapt_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = streamed(zoo.make("mamba2", tmp_path), lora(target_modules="all-linear"))
    assert {name.rpartition(".")[2] for name in adapted(model)} == {"in_proj"}
    assert "all-linear leaves out out_proj" in caplog.text


def test_a_regular_expression_stays_inside_the_decoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Image towers stay resident and are no part of training on text."""
    caplog.set_level(logging.INFO, logger="airtune")
    model = streamed(zoo.make("qwen3_5__vl", tmp_path), lora(target_modules=r".*(q_proj|linear_fc1)"))
    assert {name.rpartition(".")[2] for name in adapted(model)} == {"q_proj"}
    assert "LoRA leaves out linear_fc1 x" in caplog.text


@pytest.mark.parametrize("targets", [r".*(q_proj|lm_head)", ".*"])
def test_a_regular_expression_that_also_means_the_head(folder: Path, targets: str) -> None:
    with pytest.raises(ValueError, match=r"match the output projection 'lm_head'.*exclude_modules="):
        streamed(folder, lora(target_modules=targets))


def test_all_linear_without_what_is_excluded(folder: Path) -> None:
    model = streamed(folder, lora(target_modules="all-linear", exclude_modules=["o_proj"]))
    assert {name.rpartition(".")[2] for name in adapted(model)} == ALL_LINEAR - {"o_proj"}


def test_a_stranger_in_one_layer_excludes_nothing_in_another() -> None:
    """Layers need not be alike: what routes in one may be a plain projection in the next."""
    strangers = {"layers.0.gate", "tower.0.gate", "tower.12.gate", "layers.1.head[x]"}
    pattern = _excluding(["o_proj"], strangers, {"layers.1.gate"})
    assert all(re.fullmatch(pattern, name) for name in (*strangers, "tower.7.gate", "layers.3.o_proj"))
    assert not any(re.fullmatch(pattern, name) for name in ("layers.1.gate", "layers.10.gate", "no_proj"))


def test_what_peft_adapts_is_compared_with_what_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_less(model: nn.Module, config: LoraConfig) -> object:
        config.target_modules = ["q_proj"]
        return get_peft_model(cast(PreTrainedModel, model), config)

    monkeypatch.setattr("airtune.model.adapter.get_peft_model", one_less)
    message = r"4 modules are missing \(first: \['model\.layers\.0\.mlp\.down_proj'\]\) and 0 are too many"
    with pytest.raises(ValueError, match=message):
        streamed(folder, lora())


def test_what_was_adapted_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="airtune")
    streamed(folder, lora())
    assert "LoRA on 8 places: down_proj x4, q_proj x4; 2,560 parameters" in caplog.text


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 3], [1, 4]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_the_base_weights_is_refused_by_name(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"this LoRA config uses {named}.*needs base weights"):
        streamed(folder, lora(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": "*["}, r"target_modules '\*\[' is no regular expression"),
        ({"exclude_modules": "(?i)o_proj"}, r"exclude_modules .* is no regular expression"),
        ({"rank_pattern": {"q_proj(": 3}}, r"rank_pattern .* is no regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "at least 1, got 0"),
        ({"r": 0}, "at least 1, got 0"),
        ({"r": "4"}, "at least 1, got '4'"),
        ({"lora_dropout": 1.5}, "less than 1, got 1.5"),
        ({"target_modules": [3]}, "target_modules must be names"),
    ],
    ids=str,
)
def test_a_value_that_peft_trips_over(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        streamed(folder, lora(**options))


@pytest.mark.parametrize(
    ("targets", "unmatched"),
    [
        (["lm_head"], r"\['lm_head'\]"),
        (["q_proj", "lm_head"], r"\['lm_head'\]"),
        (["embed_tokens"], r"\['embed_tokens'\]"),
        (["q_proj", "wq", "c_attn"], r"\['c_attn', 'wq'\]"),
        (["layers.7.self_attn.q_proj"], r"\['layers\.7\.self_attn\.q_proj'\]"),
        (["input_layernorm"], r"\['input_layernorm'\]"),
        (["self_attn"], r"\['self_attn'\]"),
        (".*c_attn", r"\['\.\*c_attn'\]"),
        ("q_proj", r"\['q_proj'\]"),  # a string is a regular expression for the whole name
    ],
    ids=str,
)
def test_a_target_that_matches_nothing_is_named_beside_the_known_ones(
    folder: Path, targets: str | list[str], unmatched: str
) -> None:
    known = ", ".join(f"'{name}'" for name in sorted(ALL_LINEAR))
    with pytest.raises(
        ValueError, match=rf"target_modules {unmatched} match no linear layer .* called \[{known}\]"
    ):
        streamed(folder, lora(target_modules=targets))


def test_targets_must_be_given(folder: Path) -> None:
    """PEFT would choose some by the model's name."""
    with pytest.raises(ValueError, match="target_modules is not set"):
        streamed(folder, lora(target_modules=None))


def test_a_layer_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"layers_to_transform.*\[9\]"):
        streamed(folder, lora(layers_to_transform=[9]))


def test_a_failed_adapter_leaves_no_stand_in_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PreTrainedModel] = []
    build_skeleton = build.build_skeleton

    def remember(*args: Any, **kwargs: Any) -> PreTrainedModel:
        seen.append(build_skeleton(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(build, "build_skeleton", remember)
    with pytest.raises(ValueError, match="match no linear layer"):
        streamed(folder, lora(target_modules=["nonsense"]))
    layers = find_layers(seen[0])
    assert all(p.is_meta for layer in layers.values() for p in layer.parameters())


# --- saved adapters -----------------------------------------------------------------------------------------


def saved(folder: Path, where: Path, config: Any) -> Path:
    get_peft_model(zoo.model_class("llama").from_pretrained(folder), config).save_pretrained(str(where))
    return where


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lora(use_dora=True), "uses use_dora"),
        (lora(modules_to_save=["lm_head"]), "uses modules_to_save"),
        (lora(bias="all"), "uses bias"),
        (lora(target_modules=["embed_tokens", "q_proj"]), "only goes on plain linear layers.*Embedding"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3 adapter; only LoRA"),
    ],
    ids=["DoRA", "modules_to_save", "bias", "embedding", "IA3"],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_a_saved_adapter_of_another_kind_is_refused(
    folder: Path, tmp_path: Path, config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        airtune.load(folder, adapter=saved(folder, tmp_path / "adapter", config), device="cpu")


def test_a_saved_adapter_keeps_its_settings(folder: Path, tmp_path: Path) -> None:
    config = lora(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        lora_dropout=0.1,
        rank_pattern={"q_proj": 4},
        init_lora_weights=False,
    )
    path = saved(folder, tmp_path / "adapter", config)
    model = airtune.load(folder, adapter=path, adapter_trainable=True, device="cpu")
    twin = PeftModel.from_pretrained(
        zoo.model_class("llama").from_pretrained(folder), str(path), is_trainable=True
    )
    assert relative_error(adapter(model), adapter(twin)) == 0
    assert relative_error(one_step(model, ragged_batch()), one_step(twin, ragged_batch())) < 1e-5


def test_an_adapter_of_another_base_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shapes fit where one is the instructed twin of the other."""
    path = saved(folder, tmp_path / "adapter", lora())
    edit_config(base_model_name_or_path="someone/llama-instruct")(path)
    airtune.load(folder, adapter=path, device="cpu")
    assert f"was trained on someone/llama-instruct; here it is on {folder}" in caplog.text


def edit_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        save_file({k: v.clone() for k, v in change(load_file(file)).items()}, file)

    return edit


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def cut_the_file(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            edit_tensors(lambda held: {k.removeprefix("base_model.model."): v for k, v in held.items()}),
            r"16 adapter tensors of the model are not in it \(first: \['base_model.*16 of its own",
        ),
        (
            edit_tensors(lambda held: {k: v for k, v in held.items() if "layers.2.self" not in k}),
            "2 adapter tensors of the model are not in it",
        ),
        (
            edit_tensors(lambda held: held | {k.replace("s.1.", "s.9."): v for k, v in held.items()}),
            "4 of its own are not in the model",
        ),
        (edit_tensors(lambda held: {k: v * float("nan") for k, v in held.items()}), "16 tensors are not fin"),
        (edit_config(r=4), r"lora_A.weight is \[2, \d+\], not \[4, \d+\]: another rank"),
        (edit_config(target_modules=["lm_head", "q_proj"]), r"is also on lm_head \(Linear\)"),
        (edit_config(target_modules=["w1"]), r"\['w1'\].* match nothing in this model|'w1'"),
        (edit_config(of_tomorrow=True), "uses of_tomorrow, which this version of PEFT does not know"),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "names no peft_type"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "is not JSON"),
        (cut_the_file, "not a complete safetensors file"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "is no adapter: it lacks"),
    ],
    ids=[
        "wrong prefix", "missing", "extra layers", "NaN", "another rank", "on the head", "other targets",
        "newer PEFT", "empty config", "broken config", "cut", "no file",
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_before_a_weight_is_read(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    path = saved(folder, tmp_path / "adapter", lora())
    spoil(path)
    monkeypatch.setattr(assembly, "load_tensor", None)
    with pytest.raises(ValueError, match=message):
        airtune.load(folder, adapter=path, device="cpu")


@pytest.mark.parametrize("name", ["gpt2", "zamba", "qwen3_moe_mixed", "kimi_k25", "qwen4_exp__vl"])
def test_what_was_saved_here_is_loaded_here(tmp_path: Path, name: str) -> None:
    base = zoo.make(name, tmp_path / "base")
    options: dict[str, Any] = {"init_lora_weights": False, "fan_in_fan_out": name == "gpt2"}
    first = streamed(base, lora(target_modules="all-linear", **options))
    first.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    second = airtune.load(base, adapter=tmp_path / "adapter", device="cpu")
    assert relative_error(adapter(second), adapter(first)) == 0
