"""What the command line may say, and the one clear line that it gets back when it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from airtune.checks import ConfigError
from airtune.compose import compose, from_command_line, resolved_yaml
from airtune.config import COMMANDS, GenerateConfig, TrainConfig
from airtune.groups import Keys
from airtune.trainer_keys import check_trainer_keys

NEEDED = ["output_dir=out", "model.path=org/name", "data.train=a.jsonl"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trainer_fields() -> dict[str, object]:
    from airtune.run.arguments import training_fields

    return training_fields()


def made(*words: str) -> TrainConfig:
    return compose([*NEEDED, *words], TrainConfig)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(*words)
    return str(caught.value)


def test_values_reach_their_keys() -> None:
    config = made("adapter.r=4", "adapter.dropout=0", "model.dtype=float32", "stream.device_memory=1.5 GiB")
    assert (config.adapter.r, config.model.dtype) == (4, "float32")
    assert isinstance(config.adapter.dropout, float)
    assert config.stream.device_memory == "1.5 GiB"


def test_every_key_of_the_schema_has_a_default_or_is_required() -> None:
    with pytest.raises(ConfigError, match=r"^missing: output_dir, model\.path, data\.train \(") as caught:
        compose([], TrainConfig)
    assert "\n" not in str(caught.value)


def test_every_key_can_be_set_without_a_plus() -> None:
    """W&B sweeps write `key=value` and nothing else."""
    config = made(
        "trainer.warmup_steps=3", "trainer.lr_scheduler_kwargs.num_cycles=2", "seed=7", "resume=true"
    )
    assert config.trainer["warmup_steps"] == 3
    assert config.trainer["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert (config.seed, config.resume) == (7, True)


def test_a_plus_does_no_harm() -> None:
    assert made("+adapter.r=3").adapter.r == made("++adapter.r=3").adapter.r == 3


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("adapter.rr=3", "unknown key 'adapter.rr'; did you mean 'adapter.r'?"),
        ("+adapter.rr=3", "unknown key 'adapter.rr'; did you mean 'adapter.r'?"),
        ("+sede=3", "unknown key 'sede'; did you mean 'seed'?"),
        ("optimizer.lr=3", "unknown key 'optimizer'; known: adapter, data,"),
        ("adapter.r=x", "adapter.r: expected a whole number, got 'x'"),
        ("adapter.r=1.5", "adapter.r: expected a whole number, got 1.5"),
        ("adapter.r=true", "adapter.r: expected a whole number, got True"),
        ("resume=1", "resume: expected true or false, got 1"),
        (
            "model.dtype=bf16",
            "model.dtype: expected one of auto, bfloat16, float16, float32, got 'bf16'; did you",
        ),
        ("model.path=null", "model.path: expected text, got None"),
        ("model.path.x=1", "model.path: expected text, got {'x': 1}"),
        (
            "data.train=[a,3]",
            "data.train: expected a list of text or a mapping from text to a number, got ['a', 3]",
        ),
        ("data.train={a: x}", "data.train: expected a list of text or a mapping from text to a number, got"),
        ("data.train={a: 0}", "data.train: expected one file or more, with weights above 0 if any, got {"),
        ("data.format=chatml", "data.format: expected one of auto, messages,"),
        (
            "model.revision=None",
            "model.revision: got the text 'None'; for no value write model.revision=null",
        ),
        ("trainer.max_grad_norm=None", "trainer.max_grad_norm: got the text 'None'"),
        ("data.eval=[b.jsonl,None]", "data.eval: got the text 'None'"),
        ("adapter.r=0", "adapter.r: expected a rank of 1 or more, got 0"),
        ("adapter.alpha=-1", "adapter.alpha: expected more than 0, got -1"),
        ("adapter.dropout=1", "adapter.dropout: expected 0 <= dropout < 1, got 1.0"),
        ("adapter.target_modules=[]", "adapter.target_modules: expected module names, got []"),
        ("data.train=[]", "data.train: expected one file or more, with weights above 0 if any, got []"),
        ("data.max_length=1", "data.max_length: expected 2 tokens or more, got 1"),
        ("output_dir=", "output_dir: expected a file or a folder, got ''"),
        ("adapter.path=", "adapter.path: expected a file or a folder, got ''"),
        ("data.train={a: 1, ./a: 2}", "data.train: 'a' and './a' are the same file: name it once"),
        ("data.train={a: 1, a: 2}", "'data.train={a: 1, a: 2}' names one key twice"),
        ("data.train={a: inf}", "data.train: expected one file or more, with weights above 0 if any, got {"),
        ("seed=-1", "seed: expected a seed from 0 to 4294967295, got -1"),
        ("stream.micro_batch_size=0", "stream.micro_batch_size: expected 1 or more, got 0"),
        ("stream.device_memory=4", "stream.device_memory: 4 has no unit; write 4GB or 4MiB"),
        ("stream.host_memory=4 apples", "stream.host_memory: '4 apples' is not a size"),
        (
            "trainer.per_device_train_batch_size=0",
            "trainer.per_device_train_batch_size: expected more than 0, got 0",
        ),
        ("trainer.learning_rate=-1", "trainer.learning_rate: expected more than 0, got -1"),
        ("trainer.max_steps=0", "trainer.max_steps: expected more than 0, got 0"),
        ("trainer.num_train_epochs=0", "trainer.num_train_epochs: expected more than 0, got 0"),
        (
            "trainer.metric_for_best_model=accuracy",
            "trainer.metric_for_best_model: expected loss, which is what evaluation computes, got 'accuracy'",
        ),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'trainer.learning_rate'?"),
        (
            "trainer.eval_strategy=steps",
            "data.eval: expected files (trainer.eval_strategy is 'steps'; or set that to no), got None",
        ),
        ("trainer.bf16=true", "trainer.bf16 cannot be used with streaming: set model.dtype"),
        (
            "trainer.gradient_checkpointing=true",
            "trainer.gradient_checkpointing cannot be used with streaming",
        ),
        ("data.packing=true", "data.packing cannot be used with streaming: rows would see one another"),
        ("trainer.packing=true", "trainer.packing cannot be used with streaming: rows would see one another"),
        ("trainer.seed=1", "trainer.seed: set seed instead"),
        ("trainer.hub_token=abc", "trainer.hub_token: set the environment variable HF_TOKEN"),
        ("+recipe=quickstart", "unknown recipe 'quickstart'; did you mean 'quickstart_sft'?"),
        ("+recipe=zzz", "unknown recipe 'zzz'; known: deepseek_v3_sft, gpt_oss_120b_sft,"),
        ("adapter=big", "unknown adapter 'big'; known: default"),
        ("data.eval=a,b", "asks for several runs; for a list of values write data.eval=[a,b]"),
        ("model=/x", "unknown model '/x'; known: default, source; for one of its keys write model.KEY=..."),
        ("data.eval=[a=b]", "cannot read 'data.eval=[a=b]' (no viable alternative"),
        ("~data.eval", "keys cannot be removed; set data.eval=null"),
        ("hydra.job.chdir=true", "nothing under hydra. can be set"),
        ("--multirun", "unknown option '--multirun'"),
        ("resume", "expected key=value, got 'resume'"),
        ("=5", "expected key=value, got '=5'"),
        ("model.path=${airtune:cahce}", "unknown folder in ${airtune:...} 'cahce'; did you mean 'cache'?"),
        (
            "model.path=${nowhere}",
            "the configuration does not compose: Interpolation key 'nowhere' not found",
        ),
    ],
)
def test_a_mistake_gets_one_line_that_names_it(word: str, line: str) -> None:
    message = refusal(word)
    assert line in message
    assert "\n" not in message


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["adapter.r=x", "tracking.wanbd=true", "output_dir=out"], TrainConfig)
    assert len(str(caught.value).splitlines()) == 3


def test_switching_off_what_is_refused_is_allowed() -> None:
    made("trainer.gradient_checkpointing=false", "trainer.deepspeed=null", "trainer.bf16=false")


def test_evaluation_is_on_where_there_is_something_to_evaluate_on() -> None:
    assert made().trainer["eval_strategy"] == "no"
    assert made("data.eval=b.jsonl").trainer["eval_strategy"] == "epoch"
    assert made("data.eval=b.jsonl", "trainer.eval_strategy=steps").trainer["eval_strategy"] == "steps"
    made("trainer.eval_strategy=false")  # a bare no in YAML: no files are missing, its type is checked later


def test_relative_paths_mean_the_directory_of_the_command(here: Path) -> None:
    (here / "adapter").mkdir()
    (here / "chat.jinja").write_text("{{ messages }}")
    config = made(
        "data.train=[a.jsonl,chats/*.jsonl,/abs/b.jsonl]", "data.eval=~/e.jsonl", "adapter.path=adapter"
    )
    assert config.output_dir == str(here / "out")
    assert config.data.train == [str(here / "a.jsonl"), str(here / "chats/*.jsonl"), "/abs/b.jsonl"]
    assert config.data.eval == [str(Path.home() / "e.jsonl")]
    assert config.adapter.path == str(here / "adapter")
    assert made(r"data.train={a.jsonl: 2, hf\:org/set: 0.5}").data.train == {
        str(here / "a.jsonl"): 2,
        "hf:org/set": 0.5,
    }
    assert made("data.eval='hf:org/set:part/test'").data.eval == ["hf:org/set:part/test"]
    assert made("data.chat_template=chat.jinja").data.chat_template == str(here / "chat.jinja")
    assert made("data.chat_template=chatml").data.chat_template == "chatml"


def test_a_hub_id_stays_and_a_local_folder_wins(here: Path) -> None:
    assert made().model.path == "org/name"
    assert made("model.path=./models/x").model.path == str(here / "models/x")
    assert made("model.path=models/family/x").model.path == str(here / "models/family/x")
    (here / "org" / "name").mkdir(parents=True)
    assert made().model.path == str(here / "org" / "name")


@pytest.mark.parametrize("name", ["it's.jsonl", "a=b (1).jsonl", "é.jsonl", "a\\b\\'c~\\"])
def test_text_that_hydra_cannot_read_is_taken_as_it_stands(here: Path, name: str) -> None:
    assert made(f"data.train={name}").data.train == [str(here / name)]


def test_numbers_are_fine_where_text_is_expected() -> None:
    assert made("tracking.run_name=7").tracking.run_name == "7"


def own_recipe(folder: Path, text: str) -> list[str]:
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text(text)
    return ["+recipe=mine", "--config-dir", str(folder)]


def test_recipes_of_ones_own_and_the_command_line_above_them(here: Path) -> None:
    folder = here / "my confs"
    folder.mkdir()
    words = own_recipe(folder, "# @package _global_\nseed: 3\nadapter: {r: 5, alpha: 6}\n")
    config = from_command_line([*NEEDED, *words, "adapter.r=7"], TrainConfig)
    assert (config.seed, config.adapter.r, config.adapter.alpha) == (3, 7, 6)


def test_a_mapping_replaces_the_one_of_a_recipe(here: Path) -> None:
    words = own_recipe(here, "# @package _global_\ndata: {train: {/a: 1, /b: 2}}\ntrainer: {max_steps: 3}\n")
    config = from_command_line(["output_dir=o", "model.path=m", *words, "data.train={/c: 3}"], TrainConfig)
    assert config.data.train == {"/c": 3}


def test_a_recipe_without_its_package_line_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line([*NEEDED, *own_recipe(here, "seed: 3\n")], TrainConfig)
    assert "must open with the line `# @package _global_`" in capsys.readouterr().err


def test_a_recipe_with_a_mistake_names_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line(
            [*NEEDED, *own_recipe(here, "# @package _global_\nadapter: {rank: 3}\n")], TrainConfig
        )
    known = (
        "adapter.alpha, adapter.dropout, adapter.path, adapter.r, adapter.rslora, adapter.target_modules, "
        "adapter.target_parameters"
    )
    assert capsys.readouterr().err == f"unknown key 'adapter.rank'; known: {known}\n"


def test_a_recipe_that_is_no_yaml_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line([*NEEDED, *own_recipe(here, "# @package _global_\nadapter: {r: 3\n")], TrainConfig)
    assert "does not compose" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config-dir"], ["--config-dir=nowhere"], ["adapter.rr=1"], []])
def test_user_errors_exit_with_2_and_no_traceback(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        from_command_line(words, TrainConfig)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_key_and_recipe(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        from_command_line(["no.such=key", "--help"], COMMANDS[command])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"airtune.{command} [+recipe=NAME]" in text and "quickstart_sft" in text
    for name, hint in get_type_hints(COMMANDS[command]).items():
        group = re.search(rf"^{name}:(.*\n(?: .*\n)*)", text, re.MULTILINE)
        assert group, name
        for key in get_type_hints(hint) if isinstance(hint, type) and issubclass(hint, Keys) else []:
            assert re.search(rf"^  {key}: .*#|^  {key}:", group[1], re.MULTILINE), f"{name}.{key}"


def test_the_saved_text_composes_into_the_same_configuration(here: Path) -> None:
    config = made("data.eval=b.jsonl", "tracking.sample_prompts=['Qué?']", "trainer.learning_rate=1e-5")
    text = resolved_yaml(config)
    assert "Qué?" in text
    assert yaml.safe_load(text)["trainer"]["learning_rate"] == 1e-5
    words = own_recipe(here, f"# @package _global_\n{text}")
    assert from_command_line(words, TrainConfig) == config


def test_trainer_defaults_are_fields_of_the_trainer(trainer_fields: dict[str, object]) -> None:
    check_trainer_keys(made().trainer, trainer_fields)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("learning_rat", 1e-4, "unknown key 'trainer.learning_rat'; did you mean 'trainer.learning_rate'?"),
        ("zzz", 1, "unknown key 'trainer.zzz'; no known one is close to it"),
        ("learning_rate", "fast", "trainer.learning_rate: expected a number, got 'fast'"),
        ("max_steps", 1.5, "trainer.max_steps: expected a whole number, got 1.5"),
        ("logging_first_step", 1, "trainer.logging_first_step: expected true or false, got 1"),
        ("lr_scheduler_type", "cosin", "got 'cosin'; did you mean 'cosine'?"),
        ("save_strategy", False, 'YAML reads a bare no as false, write "no"'),
        ("label_names", "x", "trainer.label_names: expected a list of text or null, got 'x'"),
        (
            "fsdp",
            "full_shard",
            "trainer.fsdp cannot be used with streaming: layers are streamed, not sharded",
        ),
    ],
)
def test_trainer_mistakes(trainer_fields: dict[str, object], key: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainer_keys({key: value}, trainer_fields)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 1),
        ("optim", "adamw_torch"),
        ("save_strategy", "best"),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("label_names", ["labels"]),
        ("eval_steps", None),
        ("trackio_static_space_id", False),
        ("include_num_input_tokens_seen", "all"),
        ("debug", ""),
    ],
)
def test_trainer_values_that_are_right(trainer_fields: dict[str, object], key: str, value: object) -> None:
    check_trainer_keys({key: value}, trainer_fields)


# --- several commands ---------------------------------------------------------------------------------------


def generation(*words: str) -> GenerateConfig:
    return compose(["model.path=org/name", *words], GenerateConfig)


def generation_refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        generation(*words)
    return str(caught.value)


def test_the_groups_are_shared() -> None:
    config = generation("stream.device_memory=4GB", "model.dtype=float32", "generation.stop=[a,b]")
    assert (config.stream.device_memory, config.model.dtype) == ("4GB", "float32")
    assert config.generation.stop == ["a", "b"]


def test_a_group_with_one_key_is_set_by_its_name(here: Path) -> None:
    (here / "runs" / "adapter").mkdir(parents=True)
    assert generation("adapter=runs/adapter").adapter.path == str(here / "runs" / "adapter")
    assert generation("adapter.path=/x/y", "adapter=/x/z").adapter.path == "/x/z"
    assert generation("adapter=null").adapter.path is None


@pytest.mark.parametrize(
    "text",
    [
        "What's two, plus two?",
        "a=b",
        "[x](y) {z} ${HOME} \\ 'quoted' \"twice\"",
        "two\nlines",
        "7",
        "~",
        " x ",
    ],
)
def test_prose_is_taken_as_it_stands(text: str) -> None:
    assert generation(f"prompt={text}", f"+system={text}").prompt == text
    assert generation(f"system={text}").system == text


def test_prose_may_be_null() -> None:
    assert generation("prompt=null").prompt is None


def test_a_recipe_serves_several_commands(here: Path) -> None:
    text = (
        "# @package _global_\noutput_dir: out\nmodel: {path: org/name, dtype: float32}\n"
        "adapter: {r: 5}\ndata: {train: '???', chat_template: chatml}\ntrainer: {max_steps: 3}\n"
        "tracking: {wandb: true}\nprompt: Who?\ngeneration: {top_k: 5}\n"
    )
    words = own_recipe(here, text)
    generate = from_command_line(words, GenerateConfig)
    assert (generate.model.dtype, generate.data.chat_template, generate.adapter.path) == (
        "float32",
        "chatml",
        None,
    )
    assert (generate.prompt, generate.generation.top_k) == ("Who?", 5)
    train = from_command_line([*words, "data.train=a.jsonl"], TrainConfig)
    assert (train.adapter.r, train.trainer["max_steps"], train.tracking.wandb) == (5, 3, True)


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("tracking: {wanbd: true}", "unknown key 'tracking.wanbd'; did you mean 'tracking.wandb'?"),
        ("data: {trian: a}", "unknown key 'data.trian'; known: data.chat_template"),
        ("adapter: {rank: 3}", "unknown key 'adapter.rank'; known: adapter.path"),
        ("sede: 3", "unknown key 'sede'; did you mean 'seed'?"),
        ("optimizer: {lr: 3}", "unknown key 'optimizer'; known:"),
    ],
)
def test_a_recipe_with_a_mistake_names_it_to_every_command(
    here: Path, capsys: pytest.CaptureFixture[str], recipe: str, line: str
) -> None:
    words = own_recipe(here, f"# @package _global_\n{recipe}\n")
    with pytest.raises(SystemExit):
        from_command_line(["model.path=org/name", *words], GenerateConfig)
    message = capsys.readouterr().err
    assert line in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("trainer.max_steps=3", "trainer.max_steps: generate has no such key, it is one of train"),
        ("adapter.r=3", "adapter.r: generate has no such key, it is one of train"),
        ("output_dir=x", "output_dir: generate has no such key, it is one of train"),
        ("adapter.rr=3", "unknown key 'adapter.rr'; known: adapter.path"),
        ("prompt=", "prompt: expected some text for the model to go on from, got ''"),
        ("chat=yes", "chat: expected true or false or one of auto, got 'yes'"),
        ("generation.temperature=0", "for greedy decoding write do_sample=false), got 0.0"),
        ("generation.top_p=1.5", "generation.top_p: expected null, or 0 < top_p <= 1, got 1.5"),
        ("generation.max_new_tokens=0", "generation.max_new_tokens: expected null, or 1 or more, got 0"),
        ("generation.stop=['']", "generation.stop: expected texts that are not empty, got ['']"),
        ("batch_size=0", "batch_size: expected 1 or more, got 0"),
        ("stream.host_memory=4", "stream.host_memory: 4 has no unit"),
    ],
)
def test_a_mistake_in_generating_gets_one_line_that_names_it(word: str, line: str) -> None:
    message = generation_refusal(word)
    assert line in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["prompt=a", "prompts=b"], "prompts"),
        (["system=a", "chat=false"], "system"),
        (["generation.do_sample=false", "generation.temperature=0.5"], "generation.do_sample"),
        (["generation.num_beams=2", "generation.prompt_lookup_num_tokens=3"], "generation.num_beams"),
        (
            ["generation.assistant_model=org/x", "generation.prompt_lookup_num_tokens=3"],
            "generation.assistant_model",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], key: str) -> None:
    assert generation_refusal(*words).startswith(f"{key}: expected ")
