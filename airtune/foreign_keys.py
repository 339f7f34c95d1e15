"""One recipe for several commands: what it says to another command is no mistake in this one.

A recipe names a model, its data, an adapter's rank, the trainer's options and what to sample. Training needs
all of it, generating a part. So a key of a recipe that this command does not have is left out if another
command has it, and is a mistake if none has. On the command line nothing is left out: who types
`trainer.max_steps=3` wants something to come of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_type_hints

from airtune.checks import unknown
from airtune.config import COMMANDS
from airtune.groups import Keys


def without_foreign(
    mapping: Mapping[str, object], command: str, typed: Iterable[str]
) -> tuple[dict[str, object], list[str]]:
    """(`mapping` without the keys that other commands have and `command` has not, a line for each mistake).

    Args:
        mapping: the composed configuration.
        command: a name in `COMMANDS`.
        typed: the keys that stand on the command line.
    """
    keys = {name: set(_paths(schema)) for name, schema in COMMANDS.items()}
    lines = []
    for key in typed:
        owners = [name for name, paths in keys.items() if any(_leads(key, path) for path in paths)]
        if owners and command not in owners:
            lines.append(f"{key}: {command} has no such key, it is one of {', '.join(owners)}; leave it out")
    return _kept(mapping, keys[command], set().union(*keys.values()), lines), lines


def _kept(
    mapping: Mapping[str, object], own: set[str], known: set[str], lines: list[str], prefix: str = ""
) -> dict[str, object]:
    """What is own, and what is unknown to every command, which is told later (in a foreign group: here)."""
    kept: dict[str, object] = {}
    for key, value in mapping.items():
        path = prefix + key
        group = [name.removeprefix(f"{path}.") for name in known if name.startswith(f"{path}.")]
        ours = path in own or any(name.startswith(f"{path}.") for name in own)
        if ours and group and isinstance(value, Mapping):
            kept[key] = _kept(value, own, known, lines, f"{path}.")
        elif ours or (path not in known and not group):
            kept[key] = value
        elif isinstance(value, Mapping) and group:
            lines += [unknown(name, group, prefix=f"{path}.") for name in value if name not in group]
    return kept


def _leads(key: str, path: str) -> bool:
    """Whether one of the two is, or is inside, the other."""
    return f"{key}.".startswith(f"{path}.") or f"{path}.".startswith(f"{key}.")


def _paths(schema: type[Keys], prefix: str = "") -> Iterator[str]:
    """The full names of values; `trainer`, whose keys are not ours, is one."""
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and issubclass(hint, Keys):
            yield from _paths(hint, f"{prefix}{name}.")
        else:
            yield prefix + name
