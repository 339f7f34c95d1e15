"""`--help`: how to call a command, the recipes, and every key with its default and its comment.

The files of defaults are shown as they are: they are written to be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from airtune.compose import conf_folder, recipe_names


def help_text(command: str) -> str:
    """How to call `command`, with all that may be set."""
    root = conf_folder() / f"{command}.yaml"
    parts = [
        f"python -m airtune.{command} [+recipe=NAME] [key=value ...] [--config-dir DIR]\n",
        "recipes: " + ", ".join(recipe_names()),
        "your own: DIR/recipe/NAME.yaml, first line `# @package _global_`\n",
        root.read_text(encoding="utf-8"),
    ]
    for group, option in _groups(root):
        text = (conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8")
        parts.append(f"{group}:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    return "\n".join(parts)


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """The groups of a command with their default options, as its file of defaults lists them."""
    for entry in yaml.safe_load(root.read_text(encoding="utf-8"))["defaults"]:
        if isinstance(entry, dict):
            yield from entry.items()
