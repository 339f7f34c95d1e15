"""Modelling code that a repository brings along, and that was written for an older transformers.

It is imported only when the user trusts it, and runs as it is. Two things that it may not know are put right,
because models that no class of transformers covers depend on them:

* It imports `OutputRecorder` and `check_model_inputs` from `transformers.utils.generic`, and they have moved.
  While such code is imported, and no longer, that module has those of the two that it lacks.
* It calls the cache `past_key_values`, and `generate` now says `cache`. A forward that also takes `**kwargs`
  would drop it without a word, and generate each token from the one before it alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

from transformers import Cache, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import generic
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from airtune.model.generation import like

_Forward = Callable[..., Any]


def remote_class(reference: str, folder: Path) -> type[PreTrainedModel]:
    """The model class that `auto_map` refers to, by `reference`, in the code in `folder`. Runs that code."""
    with moved_names():
        found = get_class_from_dynamic_module(reference, folder)
    return _with_cache(cast(type[PreTrainedModel], found))


@contextmanager
def moved_names() -> Iterator[None]:
    """Inside, code that imports what has moved out of `transformers.utils.generic` finds it there."""
    absent = {name: value for name, value in _MOVED.items() if name not in vars(generic)}
    vars(generic).update(absent)
    try:
        yield
    finally:
        for name in absent:
            delattr(generic, name)


def _check_model_inputs(forward: _Forward | None = None, **options: bool) -> _Forward:
    """What the decorator of that name did, in its two spellings (with parentheses and without)."""

    def decorate(forward: _Forward) -> _Forward:
        return cast(_Forward, merge_with_config_defaults(capture_outputs(forward, **options)))

    return decorate if forward is None else decorate(forward)


_MOVED = {"OutputRecorder": OutputRecorder, "check_model_inputs": _check_model_inputs}


def _with_cache(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`model_class`, or one that is like it and takes its cache as `cache` too.

    Older yet is code whose caches are tuples. It could not use what `generate` makes, and is not given it:
    each token is then computed from the whole text.
    """
    if not _knows_caches(model_class):
        return model_class
    renamed = {
        name: _taking_cache(method)
        for name in ("forward", "prepare_inputs_for_generation")
        if (method := getattr(model_class, name, None)) is not None and _is_older(method)
    }
    return like(model_class, **renamed) if renamed else model_class


def _knows_caches(model_class: type[PreTrainedModel]) -> bool:
    """Whether the code names a class of caches."""
    names = vars(sys.modules[model_class.__module__]).values()
    return any(isinstance(value, type) and issubclass(value, Cache) for value in names)


def _is_older(method: _Forward) -> bool:
    names = inspect.signature(method).parameters
    return "past_key_values" in names and "cache" not in names


def _taking_cache(method: _Forward) -> _Forward:
    signature = inspect.signature(method)

    @wraps(method)
    def renamed(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            kwargs["past_key_values"] = cache
        return method(*args, **kwargs)

    added = inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None)
    names = list(signature.parameters.values())
    ends = names[-1].kind is inspect.Parameter.VAR_KEYWORD
    names.insert(len(names) - 1 if ends else len(names), added)
    vars(renamed)["__signature__"] = signature.replace(parameters=names)
    return renamed
