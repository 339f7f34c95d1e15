"""Command line + `conf/*.yaml` + recipe -> the configuration of one command, or one clear message.

Hydra composes: groups, recipes and its value syntax are its own. Three of its habits are kept out. It needs
`+` to set a key that the defaults do not list, which a W&B sweep cannot write: here every `group.key=value`
is handed on as "set or add", and `checks` says afterwards what is unknown. It makes working directories and
log files: the compose interface does neither. And it lets a misspelt or misplaced recipe pass: recipes are
looked up first, and one that composed into a key named `recipe` is refused.

Prose (`prompt=What's two, plus two?`) does not go through Hydra, whose syntax would want most of it quoted. A
group with a single key is set by its name: `adapter=FOLDER` is `adapter.path=FOLDER` where a command has no
more to say about adapters. From a checkout and from an installed wheel, `${airtune:recipes}` is the folder of
the recipes and `${airtune:cache}` that of small downloads (AIRTUNE_CACHE).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from airtune.checks import (
    ConfigError,
    contradictions,
    from_mapping,
    none_texts,
    unknown,
)
from airtune.config import COMMANDS, TrainConfig
from airtune.foreign_keys import without_foreign
from airtune.groups import Keys
from airtune.kinds import bad_texts, prose_keys, with_absolute_paths
from airtune.trainer_keys import refused_trainer_keys

C = TypeVar("C", bound=Keys)
_PACKAGE = Path(__file__).resolve().parent


def conf_folder() -> Path:
    """The folder of `train.yaml`: inside the package when installed, beside it in a checkout."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def cache_folder() -> Path:
    """Where small downloads live: AIRTUNE_CACHE, or `~/.cache/airtune`."""
    return Path(os.environ.get("AIRTUNE_CACHE") or "~/.cache/airtune").expanduser().absolute()


def compose(argv: Sequence[str], schema: type[C], config_dir: str | None = None) -> C:
    """The configuration that `argv` asks for.

    Args:
        argv: `key=value` words in Hydra's syntax and `+recipe=NAME`, without the program's name.
        schema: of the command, one of `config.COMMANDS`; its defaults are `conf/COMMAND.yaml`.
        config_dir: a further folder of groups, searched too: `recipe/mine.yaml` in it is `+recipe=mine`.

    Returns:
        Checked plain dataclasses; paths are absolute, hub ids as they were.

    Raises:
        ConfigError: with one line for each mistake.
    """
    command = command_of(schema)
    folders = [conf_folder()] + ([_existing_folder(config_dir)] if config_dir else [])
    prose, rest = _split_prose(argv, prose_keys(schema))
    words = [hydra for word in rest for hydra in _hydra_words(word, schema, folders)]
    if config_dir:
        words.append(f"hydra.searchpath=[{_quoted(str(folders[1]))}]")
    mapping, lines = without_foreign(_composed(words, command), command, typed=map(_key, words))
    _raise_any(lines + none_texts(mapping))
    config = from_mapping(schema, mapping | prose).completed()
    lines = refused_trainer_keys(config.trainer) if isinstance(config, TrainConfig) else []
    _raise_any(lines + contradictions(config) + bad_texts(config))
    return with_absolute_paths(config)


def from_command_line(argv: Sequence[str] | None, schema: type[C]) -> C:
    """`compose` for an entry point: shows `--help`, takes `--config-dir DIR`, and says what is wrong.

    Raises:
        SystemExit: 0 after `--help`; 2 after a message on stderr, without a traceback; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        from airtune.usage import help_text

        sys.stdout.write(help_text(command_of(schema)))
        raise SystemExit(0)
    try:
        config_dir = _take_option(words, "--config-dir")
        return compose(words, schema, config_dir)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def command_of(schema: type[Keys]) -> str:
    """The name of the command whose keys are `schema`."""
    return next(name for name, known in COMMANDS.items() if known is schema)


def resolved_yaml(config: TrainConfig) -> str:
    """The whole configuration as YAML, for the run's folder. `compose` refuses the keys that hold secrets."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=110)


def recipe_names() -> list[str]:
    """The names that `+recipe=` knows."""
    return _options("recipe", [conf_folder()])


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


def _raise_any(lines: Sequence[str]) -> None:
    if lines:
        raise ConfigError("\n".join(lines))


def _split_prose(argv: Sequence[str], keys: set[str]) -> tuple[dict[str, object], list[str]]:
    """(the values of the words that set prose, the other words)."""
    prose: dict[str, object] = {}
    rest = []
    for word in argv:
        key, equals, text = word.lstrip("+").partition("=")
        if equals and key in keys:
            prose[key] = None if text == "null" else text
        else:
            rest.append(word)
    return prose, rest


def _key(hydra_word: str) -> str:
    return hydra_word.lstrip("+").partition("=")[0]


def _hydra_words(word: str, schema: type[Keys], folders: Sequence[Path]) -> list[str]:
    """One word of the command line as Hydra shall read it."""
    word, override = _parsed(word)
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{word!r}: keys cannot be removed; set {key}=null")
    if override.is_sweep_override():
        raise ConfigError(f"{word!r} asks for several runs; for a list of values write {key}=[a,b]")
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{word!r}: Hydra's own settings are fixed; nothing under hydra. can be set")
    if only := _only_key(schema, key):
        return [f"++{key}.{only}={word.partition('=')[2]}"]
    if key == "recipe" or (conf_folder() / key).is_dir():
        _check_option(key, override.value(), folders)
        return [f"+{word.lstrip('+')}" if key == "recipe" else word.lstrip("+")]
    value = override.value()
    if isinstance(value, dict) and len(value) < _pairs(word, value):  # of two weights Hydra takes the last
        raise ConfigError(f"{word!r} names one key twice")
    # A mapping given for a key replaces what a recipe has there; Hydra by itself would mix the two.
    clear = [f"++{key}=null"] if isinstance(value, dict) and "." in key else []
    return [*clear, f"++{word.lstrip('+')}"]


def _pairs(word: str, mapping: dict[str, Any]) -> int:
    """How many a mapping of numbers is written with; of others the colons do not tell."""
    numbers = all(isinstance(item, int | float) for item in mapping.values())
    return len(re.findall(r"(?<!\\):", word)) if numbers else 0


def _only_key(schema: type[Keys], group: str) -> str | None:
    """The key of a group that has no other."""
    hint = get_type_hints(schema).get(group)
    names = [field.name for field in fields(hint)] if is_dataclass(hint) else []
    return names[0] if len(names) == 1 else None


def _parsed(word: str) -> tuple[str, Override]:
    """(the word as Hydra can read it, what Hydra reads)."""
    if word.startswith("-"):
        raise ConfigError(f"unknown option {word!r}; settings are written key=value (see --help)")
    key, equals, value = word.partition("=")
    if (not equals or not key.lstrip("+")) and not word.startswith("~"):
        raise ConfigError(f"expected key=value, got {word!r}")
    # Text that Hydra's syntax has no room for (~/x, a=b.jsonl, it's) is taken as it stands.
    quoted = [] if value.startswith(("[", "{", "'", '"')) else [f"{key}={_quoted(value)}"]
    for tried in [word, *quoted]:
        try:
            return tried, OverridesParser.create().parse_override(tried)
        except HydraException as error:
            reason = str(error).splitlines()[0]
    raise ConfigError(
        f"cannot read {word!r} ({reason}); in a list quote each text, {key}=['a=b','c'], and write a mapping "
        "that has such texts in a recipe"
    )


def _check_option(group: str, value: object, folders: Sequence[Path]) -> None:
    """Every option asked of `group` must be a file: `+recipe=x` for an unknown x could become a plain key."""
    known = _options(group, folders)
    hint = "" if group == "recipe" else f"; for one of its keys write {group}.KEY=... (see --help)"
    for name in value if isinstance(value, list) else [value]:
        if name not in known:
            raise ConfigError(unknown(str(name), known, group) + hint)


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
    """As Hydra reads it back: a backslash means something only where a quote follows."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"
