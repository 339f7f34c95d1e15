"""Command line + `conf/*.yaml` + recipe -> one `Config` of plain values, or one clear message.

Hydra composes: groups, recipes and its value syntax are its own. Three of its habits are kept out. It needs
`+` to set a key that the defaults do not list, which a W&B sweep cannot write: here every `group.key=value`
is handed on as "set or add", and `checks` says afterwards what is unknown. It makes working directories and
log files: the compose interface does neither. And it lets a misspelt or misplaced recipe pass: recipes are
looked up first, and one that composed into a key named `recipe` is refused.

Relative paths mean the directory in which the command was typed. From a checkout and from an installed
wheel, `${airtune:recipes}` is the folder of the recipes and `${airtune:cache}` that of small downloads
(AIRTUNE_CACHE).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from airtune.checks import from_mapping, none_texts, refused_trainer_keys, unknown
from airtune.config import Config, ConfigError, contradictions
from airtune.sizes import parse_bytes

_PACKAGE = Path(__file__).resolve().parent


def conf_folder() -> Path:
    """The folder of `train.yaml`: inside the package when installed, beside it in a checkout."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def cache_folder() -> Path:
    """Where small downloads live: AIRTUNE_CACHE, or `~/.cache/airtune`."""
    return Path(os.environ.get("AIRTUNE_CACHE") or "~/.cache/airtune").expanduser().absolute()


def compose(argv: Sequence[str], config_name: str = "train", config_dir: str | None = None) -> Config:
    """The configuration that `argv` asks for.

    Args:
        argv: `key=value` words in Hydra's syntax and `+recipe=NAME`, without the program's name.
        config_name: the file of defaults in `conf/`.
        config_dir: a further folder of groups, searched too: `recipe/mine.yaml` in it is `+recipe=mine`.

    Returns:
        Checked plain dataclasses; paths are absolute, hub ids as they were.

    Raises:
        ConfigError: with one line for each mistake.
    """
    folders = [conf_folder()] + ([_existing_folder(config_dir)] if config_dir else [])
    words = [_hydra_word(word, folders) for word in argv]
    if config_dir:
        words.append(f"hydra.searchpath=[{_quoted(str(folders[1]))}]")
    mapping = _composed(words, config_name)
    lines = none_texts(mapping)
    if lines:
        raise ConfigError("\n".join(lines))
    config = _with_absolute_paths(_with_evaluation(from_mapping(Config, mapping)))
    lines = refused_trainer_keys(config.trainer) + contradictions(config) + _bad_sizes(config)
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def from_command_line(argv: Sequence[str] | None = None, config_name: str = "train") -> Config:
    """`compose` for an entry point: shows `--help`, takes `--config-dir DIR`, and says what is wrong.

    Raises:
        SystemExit: 0 after `--help`; 2 after a message on stderr, without a traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        sys.stdout.write(help_text(config_name))
        raise SystemExit(0)
    try:
        config_dir = _take_option(words, "--config-dir")
        return compose(words, config_name, config_dir)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML, for the run's folder. `compose` refuses the keys that hold secrets."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=110)


def recipe_names(folders: Sequence[Path] | None = None) -> list[str]:
    """The names that `+recipe=` knows."""
    return _options("recipe", folders or [conf_folder()])


def help_text(config_name: str = "train") -> str:
    """How to call the entry point, the recipes, and every key with its default and comment."""
    folder = conf_folder()
    groups = sorted(path.name for path in folder.iterdir() if (path / "default.yaml").is_file())
    parts = [
        f"python -m airtune.{config_name} +recipe=NAME [key=value ...] [--config-dir DIR]\n",
        "recipes: " + ", ".join(recipe_names()),
        "your own: DIR/recipe/NAME.yaml, first line `# @package _global_`\n",
        (folder / f"{config_name}.yaml").read_text(encoding="utf-8"),
    ]
    for group in groups:
        text = (folder / group / "default.yaml").read_text(encoding="utf-8")
        parts.append(f"{group}:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    return "\n".join(parts)


def _composed(words: list[str], config_name: str) -> dict[str, object]:
    OmegaConf.register_new_resolver("airtune", _own_folder, replace=True)
    try:
        with initialize_config_dir(config_dir=str(conf_folder()), version_base="1.3"):
            composed = hydra_compose(config_name, overrides=words)
        _refuse_nested_recipe(composed)
        mapping = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines() if "object_type=" not in line)
        raise ConfigError(f"the configuration does not compose: {reason}") from error
    assert isinstance(mapping, dict), "a composed configuration is a mapping"
    return {str(key): value for key, value in mapping.items()}


def _refuse_nested_recipe(composed: DictConfig) -> None:
    if "recipe" in composed:
        raise ConfigError(
            "a recipe must open with the line `# @package _global_`; without it its keys land under "
            f"`recipe.` and change nothing: {', '.join(map(str, composed['recipe']))}"
        )


def _own_folder(name: str) -> str:
    folders = {"recipes": (conf_folder() / "recipe").resolve(), "cache": cache_folder()}
    if name not in folders:
        raise ConfigError(unknown(name, folders, "folder in ${airtune:...}"))
    return str(folders[name])


def _hydra_word(word: str, folders: Sequence[Path]) -> str:
    """One word of the command line as Hydra shall read it."""
    override = _parsed(word)
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{word!r}: keys cannot be removed; set {key}=null")
    if override.is_sweep_override():
        raise ConfigError(f"{word!r} asks for several runs; for a list of values write {key}=[a,b]")
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{word!r}: Hydra's own settings are fixed; nothing under hydra. can be set")
    if key == "recipe" or (conf_folder() / key).is_dir():
        _check_option(key, override.value(), folders)
        return f"+{word.lstrip('+')}" if key == "recipe" else word.lstrip("+")
    return f"++{word.lstrip('+')}"


def _parsed(word: str) -> Override:
    if word.startswith("-"):
        raise ConfigError(f"unknown option {word!r}; settings are written key=value (see --help)")
    if "=" not in word and not word.startswith("~"):
        raise ConfigError(f"expected key=value, got {word!r}")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        key, _, value = word.partition("=")
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"cannot read {word!r} ({reason}); quote the value inside the shell's quotes: \"{key}='{value}'\""
        ) from None


def _check_option(group: str, value: object, folders: Sequence[Path]) -> None:
    """Every option asked of `group` must be a file: `+recipe=x` for an unknown x could become a plain key."""
    known = _options(group, folders)
    for name in value if isinstance(value, list) else [value]:
        if name not in known:
            raise ConfigError(unknown(str(name), known, group))


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    roots = [folder / group for folder in folders]
    files = [(root, path) for root in roots for path in root.rglob("*.yaml")]
    return sorted({path.relative_to(root).with_suffix("").as_posix() for root, path in files})


def _take_option(words: list[str], name: str) -> str | None:
    """Remove `name VALUE` or `name=VALUE` from `words` and return VALUE; None if it is not there."""
    for index, word in enumerate(words):
        if word.startswith(f"{name}="):
            return words.pop(index).partition("=")[2]
        if word == name:
            if index + 1 == len(words):
                raise ConfigError(f"{name} needs a folder")
            del words[index]
            return words.pop(index)
    return None


def _existing_folder(path: str) -> Path:
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir: no such folder: {folder}")
    return folder


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_evaluation(config: Config) -> Config:
    """Evaluate once an epoch where there is something to evaluate on and nothing else was asked."""
    asked = config.trainer.get("eval_strategy", "epoch" if config.data.eval else "no")
    return replace(config, trainer=config.trainer | {"eval_strategy": asked})


def _bad_sizes(config: Config) -> list[str]:
    """A line for each size that is none; a bare number would be bytes, and likely means gigabytes."""
    lines = []
    for key in ("device_memory", "host_memory"):
        size = getattr(config.stream, key)
        try:
            if size.isdigit():
                raise ValueError(f"{size} has no unit; write {size}GB or {size}MiB")
            if size != "auto":
                parse_bytes(size)
        except ValueError as error:
            lines.append(f"stream.{key}: {error}")
    return lines


def _with_absolute_paths(config: Config) -> Config:
    model, adapter, data = config.model, config.adapter, config.data
    return replace(
        config,
        output_dir=_absolute(config.output_dir),
        model=replace(model, path=_folder_or_hub_id(model.path)),
        adapter=replace(adapter, path=adapter.path and _folder_or_hub_id(adapter.path)),
        data=replace(
            data,
            train=[_absolute(file) for file in data.train],
            eval=data.eval and [_absolute(file) for file in data.eval],
            chat_template=data.chat_template and _file_or_text(data.chat_template),
        ),
    )


def _absolute(path: str) -> str:
    """`path` from the current directory; an empty one stays empty, and is refused later by its key."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _file_or_text(template: str) -> str:
    """A chat template is a file, a name the tokenizer knows, or Jinja itself, whose braces no path has."""
    return template if "{" in template or not Path(template).is_file() else _absolute(template)


_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def _folder_or_hub_id(path: str) -> str:
    """A local folder wins where both could be meant; what cannot be a hub id is a path."""
    return path if _HUB_ID.fullmatch(path) and not Path(path).exists() else _absolute(path)
