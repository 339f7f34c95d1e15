"""A tokenizer and a streamed model, out of the keys of the groups model and stream."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from peft import LoraConfig, PeftModel
from peft.utils import CONFIG_NAME
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from airtune.model.build import load

logger = logging.getLogger(__name__)


def load_tokenizer(
    path: str, revision: str | None = None, *, trust_remote_code: bool, key: str = "model.path"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub id. ValueError, which names `key`, when there is none."""
    is_folder = os.path.isdir(path)
    if os.path.isabs(path) and not is_folder:
        raise ValueError(f"{key}: there is no folder {path}")
    try:
        if not is_folder:
            _reach(path, revision)
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, HTTPError) as error:  # which often names no file, and never the key
        what = "its tokenizer cannot be loaded"
        if not is_folder:
            what = f"there is no such folder in {os.getcwd()}, nor can it be had from the hub"
        raise ValueError(f"{key}={path}: {what}: {error}") from error


def find_adapter(folder: str | None) -> None:
    """ValueError when there is no adapter in `folder`: said before data is read, which may take hours."""
    if folder is not None and not os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        raise ValueError(
            f"adapter.path: there is no {CONFIG_NAME} in {folder}; what a run leaves is in its folder adapter"
        )


def load_for_use(*, adapter: str | None, **keys: Any) -> PreTrainedModel | PeftModel:
    """A model that is used as it is: the base alone, or with the saved adapter in the folder `adapter`.

    Raises ValueError or OSError for what cannot be loaded.
    """
    logger.info("Loading %s%s", keys["path"], f" with the adapter in {adapter}" if adapter else "")
    return _load(adapter=adapter, **keys).eval()


def load_for_training(adapter: LoraConfig | str, *, seed: int, **keys: Any) -> PeftModel:
    """A model with an adapter to train: a fresh one, whose values `seed` decides, or a saved one.

    Raises ValueError or OSError for what cannot be loaded.
    """
    set_seed(seed)
    if isinstance(adapter, LoraConfig):
        model = _load(lora=adapter, **keys)
    else:
        model = _load(adapter=adapter, adapter_trainable=True, **keys)
    assert isinstance(model, PeftModel), "load() returns a PeftModel when it is given an adapter"
    return model


def _reach(repo_id: str, revision: str | None) -> None:
    """Fails at once where a repository is not in the cache and the hub does not answer.

    By themselves the libraries try again for most of a minute, also for a folder whose name was mistyped.
    """
    if isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str):
        return
    with suppress(HfHubHTTPError):  # an answer: what is to be made of it, the libraries know
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json", revision=revision))


def _load(
    *,
    path: str,
    dtype: str,
    attn_implementation: str,
    device_memory: str,
    host_memory: str,
    **options: Any,  # for `load` as they are
) -> PreTrainedModel | PeftModel:
    return load(
        path,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=_chosen(attn_implementation),
        device_memory=_chosen(device_memory),
        host_memory=_chosen(host_memory),
        **options,
    )


def _chosen(value: str) -> str | None:
    return None if value == "auto" else value
