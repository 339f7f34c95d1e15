"""One recipe for several commands: what it says to another command is no mistake in this one.

A recipe names a model, its data, an adapter's rank, the trainer's options and what to sample. Training needs
all of it, generating a part. So a key of a recipe that this command does not have is left out if another
command has it, and is a mistake if none has. On the command line nothing is left out: who types
`trainer.max_steps=3` wants something to come of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import get_type_hints

from airtune.checks import unknown
from airtune.config import COMMANDS
from airtune.groups import Keys

# Name -> the keys of a group; None for a value, also for `trainer`, whose keys are not ours.
Tree = dict[str, "Tree | None"]


def without_foreign(
    mapping: Mapping[str, object], command: str, typed: Iterable[str]
) -> tuple[dict[str, object], list[str]]:
    """(`mapping` without the keys that other commands have and `command` has not, a line for each mistake).

    Args:
        mapping: the composed configuration.
        command: a name in `COMMANDS`.
        typed: the keys that stand on the command line.
    """
    everything: Tree = {}
    for schema in COMMANDS.values():
        _merge(everything, _tree(schema))
    lines = _typed_in_vain(_tree(COMMANDS[command]), command, typed)
    return _own(mapping, _tree(COMMANDS[command]), everything, lines), lines


def _own(
    mapping: Mapping[str, object], own: Tree, everything: Tree, lines: list[str], prefix: str = ""
) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in mapping.items():
        group, known = own.get(key), everything.get(key)
        if isinstance(value, Mapping) and known is not None and group is not None:
            kept[key] = _own(value, group, known, lines, f"{prefix}{key}.")
        elif key in own or key not in everything:  # a key that no command has is told later
            kept[key] = value
        elif isinstance(value, Mapping) and known is not None:
            lines += [unknown(name, known, prefix=f"{prefix}{key}.") for name in value if name not in known]
    return kept


def _typed_in_vain(own: Tree, command: str, typed: Iterable[str]) -> list[str]:
    lines = []
    for key in typed:
        owners = [name for name, schema in COMMANDS.items() if _has(_tree(schema), key)]
        if owners and not _has(own, key):
            lines.append(f"{key}: {command} has no such key, it is one of {', '.join(owners)}; leave it out")
    return lines


def _has(tree: Tree, key: str) -> bool:
    """Whether `key` is in `tree`, or below one of its values."""
    name, _, rest = key.partition(".")
    inner = tree.get(name)
    return name in tree and (not rest or inner is None or _has(inner, rest))


def _tree(schema: type) -> Tree:
    hints = get_type_hints(schema)
    return {name: _tree(hint) if _is_group(hint) else None for name, hint in hints.items()}


def _is_group(hint: object) -> bool:
    return isinstance(hint, type) and is_dataclass(hint) and issubclass(hint, Keys)


def _merge(into: Tree, tree: Tree) -> None:
    for name, inner in tree.items():
        known = into.setdefault(name, {} if inner is not None else None)
        if inner is not None and known is not None:
            _merge(known, inner)
