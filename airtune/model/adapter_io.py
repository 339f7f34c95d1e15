"""Adapters on disk: written whole or not at all, and read back before anyone is told they exist.

An adapter of a 27B model is some 300 MB, the base it changes is 54 GB, and hours lie between them. Everything
that goes wrong with the 300 MB is silent later: a wrong prefix or a lost `lora_B` loads everywhere with a
warning and does nothing, a NaN loads and answers nothing. So a save is a small transaction:

    write into .NAME.partial  ->  reopen, compare with the model bit for bit  ->  fsync  ->  rename to NAME

It costs a second pass over the adapter's bytes and gives up saving into a folder that holds other things:
the folder is replaced, not merged. Names are PEFT's own, as `get_peft_model_state_dict` spells them; base
weights, which are placeholders in a streamed model, are never looked at.

Shape legend: R rank, I inputs, O outputs: `lora_A` is [R, I], `lora_B` is [O, R].
"""

import copy
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from airtune.durable import sync

logger = logging.getLogger(__name__)

# Of what `airtune.load` lets through, what llama.cpp's converter ignores and vLLM honours in part.
_BEYOND_PLAIN = ("use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "target_parameters")


class AdapterError(ValueError):
    """An adapter that must not be saved, or a saved one that must not be loaded."""


def save_adapter(model: PeftModel, folder: Path, *, trained: bool) -> None:
    """Write the active adapter to `folder` in PEFT's format, verified, replacing what was there.

    `trained` says that optimizer steps were taken: every `lora_B` starts at zero, and when all are still
    zero no gradient has arrived. Raises AdapterError, and leaves `folder` as it was, when a tensor is not
    finite, when `trained` and all `lora_B` are zero, or when the file does not read back equal.
    """
    _warn_beyond_plain(_config(model))
    with atomic_folder(folder) as partial:
        write_adapter(model, partial, trained=trained)


def write_adapter(model: PeftModel, folder: Path, *, trained: bool) -> None:
    """Write and verify the adapter's two files in an existing folder, for a caller that makes it atomic."""
    tensors = adapter_tensors(model)
    _check_tensors(tensors, trained=trained)
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    save_file(on_host, weights, metadata={"format": "pt"})
    _saved_config(model).save_pretrained(str(folder))
    # safetensors makes a file for its owner alone; a server that runs as another user must read it too.
    weights.chmod((folder / CONFIG_NAME).stat().st_mode)
    _check_equal(read_adapter(folder), on_host, folder)


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Put the tensors saved in `folder` into the model's active adapter, in place.

    In place, so that an optimizer that already holds the parameters goes on holding them. Raises AdapterError
    when keys or shapes differ: a partial load would train on from a half-initialised adapter.
    """
    saved = read_adapter(folder)
    tensors = adapter_tensors(model)
    check_fits(saved, _shapes(tensors), folder)
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(saved[key])
    check_loaded(model, saved, folder)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of `folder/adapter_model.safetensors` on the CPU.

    Raises AdapterError if the file is cut or absent, or if a tensor is not finite.
    """
    path = folder / SAFETENSORS_WEIGHTS_NAME
    if not (folder / CONFIG_NAME).is_file() or not path.is_file():
        raise AdapterError(f"{folder} is no adapter: it lacks {CONFIG_NAME} or {SAFETENSORS_WEIGHTS_NAME}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise AdapterError(f"{path} is not a complete safetensors file ({error})") from error
    broken = _not_finite(tensors)
    if broken:
        raise AdapterError(
            f"{path}: {len(broken)} of {len(tensors)} tensors are not finite (first: {broken[0]})"
        )
    return tensors


def check_fits(saved: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Raise AdapterError unless what was `saved` in `folder` is the tensors named and shaped so."""
    missing, unknown = sorted(shapes.keys() - saved.keys()), sorted(saved.keys() - shapes.keys())
    if missing or unknown:
        raise AdapterError(
            f"{folder} does not fit this model: {len(missing)} adapter tensors of the model are not in it "
            f"(first: {missing[:1]}), {len(unknown)} of its own are not in the model (first: {unknown[:1]}). "
            "Load it with the rank and target modules it was trained with"
        )
    for key, shape in shapes.items():
        if list(saved[key].shape) != list(shape):
            raise AdapterError(
                f"{folder} does not fit this model: {key} is {list(saved[key].shape)}, not {list(shape)}: "
                "another rank, or another base model?"
            )


def check_loaded(model: PeftModel, saved: Mapping[str, Tensor], folder: Path) -> None:
    """Raise AdapterError unless the model's active adapter is what was `saved` in `folder`."""
    loaded = {key: tensor.detach().cpu() for key, tensor in adapter_tensors(model).items()}
    _check_equal(saved, loaded, folder)


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The active adapter's tensors, named as PEFT saves them; they share memory with the parameters."""
    # Embedding layers are base weights: a streamed model holds placeholders in their place.
    tensors = get_peft_model_state_dict(model, adapter_name=_name(model), save_embedding_layers=False)
    if not tensors:
        raise AdapterError("the model has no adapter tensors: no module was matched by target_modules")
    return dict(tensors)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `target` when the block ends well, and vanishes when it does not.

    Until the rename it is called `.NAME.partial`, beside `target`. An older `target` is moved aside
    first and deleted last: after a power cut between the two renames it is still there as `.NAME.previous`.
    """
    partial = target.with_name(f".{target.name}.partial")
    previous = target.with_name(f".{target.name}.previous")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _check_tensors(tensors: Mapping[str, Tensor], *, trained: bool) -> None:
    broken = _not_finite(tensors)
    if broken:
        raise AdapterError(
            f"{len(broken)} of {len(tensors)} adapter tensors are not finite (first: {broken[0]}): "
            "not saved. Go back to the last checkpoint and lower the learning rate"
        )
    lora_b = [key for key in tensors if "lora_B" in key]
    idle = [key for key in lora_b if not bool(tensors[key].any())]
    if trained and lora_b and len(idle) == len(lora_b):
        raise AdapterError(
            f"all {len(lora_b)} lora_B tensors are still zero after training: the adapter would do nothing. "
            "No gradient reached it, or the learning rate was 0 at every step"
        )
    if trained and idle:
        logger.warning("%d of %d lora_B tensors are still zero (first: %s)", len(idle), len(lora_b), idle[0])


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[int]]:
    return {key: tensor.shape for key, tensor in tensors.items()}


def _check_equal(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path) -> None:
    check_fits(saved, _shapes(expected), folder)
    for key, tensor in expected.items():
        if not torch.equal(saved[key].to(tensor.dtype), tensor):
            raise AdapterError(f"{folder}: {key} does not read back as it was written: check the disk")


def _warn_beyond_plain(config: LoraConfig) -> None:
    if beyond := [field for field in _BEYOND_PLAIN if getattr(config, field)]:
        logger.warning(
            "This adapter uses %s. PEFT loads it as it is; llama.cpp's converter ignores these and vLLM "
            "honours only some. For those, merge it into the base, or train with one r and one alpha only",
            ", ".join(beyond),
        )


def _saved_config(model: PeftModel) -> LoraConfig:
    config = copy.copy(_config(model))
    config.inference_mode = True
    if not config.base_model_name_or_path:
        config.base_model_name_or_path = str(model.get_base_model().name_or_path)
    if not config.base_model_name_or_path:
        raise AdapterError("the adapter names no base model: set base_model_name_or_path in its LoraConfig")
    return config


def _config(model: PeftModel) -> LoraConfig:
    config = model.peft_config[_name(model)]
    if not isinstance(config, LoraConfig):
        raise AdapterError(f"expected a LoRA adapter, got {type(config).__name__}")
    return config


def _name(model: PeftModel) -> str:
    active = model.active_adapter
    if not isinstance(active, str):
        raise AdapterError(f"expected one active adapter, got {active}")
    return active


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)
