"""Which folder a run may start in, and which checkpoint it may go on from.

A machine that is taken away at hour nine leaves whatever it was writing. Checkpoints are renamed into place
when they are complete, so what has the name is whole, unless a disk filled up, a copy was cut or an old
checkpoint was half deleted. So each is looked at again before it is trusted: every file that resuming
needs, each whole by its own format. Newest first; what is skipped is said.
"""

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airtune.durable import alone_in
from airtune.model.adapter_io import AdapterError, read_adapter

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_TORCH_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def open_run_folder(output_dir: Path, *, resume: bool) -> Path | None:
    """The checkpoint to go on from, or None for a new run. Creates and deletes nothing.

    Raises ValueError when a new run would mix with what is there, or when there is nothing to resume.
    """
    if resume:
        return newest_checkpoint(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"output_dir {output_dir} is a file; choose another")
    names = sorted(path.name for path in output_dir.iterdir()) if output_dir.exists() else []
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(
            f"output_dir {output_dir} is not empty (it holds {shown}): choose another output_dir, add "
            "resume=true to go on from its last checkpoint, or delete it"
        )
    return None


@contextmanager
def held(output_dir: Path, *, resume: bool) -> Iterator[None]:
    """The run's folder, created if need be, is this run's alone: two would write over one another.

    ValueError when another process has it, or has had it since `open_run_folder` looked.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with alone_in(output_dir):
        if not resume:
            open_run_folder(output_dir, resume=False)
        yield


def newest_checkpoint(output_dir: Path) -> Path:
    """The complete checkpoint with the most steps. Warns about each newer one that is not complete."""
    for folder in _by_step(output_dir):
        fault = incomplete(folder)
        if fault is None:
            return folder
        logger.warning("Skipping %s: %s", folder, fault)
    raise ValueError(
        f"resume=true, but {output_dir} holds no complete checkpoint: start again in a new output_dir. "
        "trainer.save_steps sets how often one is written"
    )


def incomplete(folder: Path) -> str | None:
    """What a checkpoint lacks for a resume that equals a run without a stop; None if it is complete."""
    try:
        read_adapter(folder)
    except AdapterError as error:
        return str(error)
    for name in _TORCH_FILES:
        if not zipfile.is_zipfile(folder / name):  # as torch.save writes it, its directory at the end
            return f"{name} is missing or cut"
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"trainer_state.json cannot be read ({error})"
    if state.get("global_step") != _step(folder):
        return f"trainer_state.json is of step {state.get('global_step')}"
    return None


def resume_hint(output_dir: Path) -> str:
    """What to do about a run that was stopped from outside."""
    if not output_dir.is_dir():
        return "Nothing has been written: start again."
    complete = [folder.name for folder in _by_step(output_dir) if incomplete(folder) is None]
    if complete:
        return f"{complete[0]} in {output_dir} is complete: add resume=true to the same command to go on."
    return f"{output_dir} holds no checkpoint yet (trainer.save_steps): delete it and start again."


def remove_partial(output_dir: Path) -> None:
    """Delete what an interrupted save left. Only for the run that owns the folder."""
    for path in [*output_dir.glob(".*.partial"), *output_dir.glob(".*.previous")]:
        logger.warning("Removing %s, left by an interrupted save", path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _by_step(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        raise ValueError(f"resume=true, but there is no folder {output_dir}")
    named = [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None, f"{folder} is not named checkpoint-N"
    return int(match[1])
