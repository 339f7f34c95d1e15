"""One run of a layer, with everything that enters and leaves it made explicit.

A layer takes and returns more than one tensor: up to five positional arguments, tuples, dicts of masks. Some
also speak through side doors: they write keys and values into a dict that later layers read, or hooks inside
them append router logits to lists that an auxiliary loss is computed from. A side door that a recomputing
Function does not know about keeps the loss exactly right and loses the gradient. So a run is flattened: a
list of leaves in, a list of tensors out, and a `Layout` that says how to put what came out back where the
caller expects it: return value, changed containers, recorded values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Lists = dict[str, Any]  # {name: list that hooks append to}; entries that are no lists pass through


class Recording(Protocol):
    """The lists that hooks inside a layer append to (transformers collects router logits so)."""

    def current(self) -> Lists | None: ...

    def replaced(self, lists: Lists | None) -> AbstractContextManager[None]: ...


class NoRecording:
    """For layers without such hooks."""

    def current(self) -> Lists | None:
        return None

    @contextmanager
    def replaced(self, lists: Lists | None) -> Iterator[None]:
        yield


@dataclass(frozen=True)
class _Input:
    """A leaf that is the input of this index, handed through."""

    index: int


@dataclass(frozen=True)
class _Made:
    """A leaf that is the new tensor of this index."""

    index: int


@dataclass(frozen=True)
class _Constant:
    value: object


@dataclass(frozen=True)
class Layout:
    """Where the leaves of a run belong: a tree of (return value, changed containers, recorded values)."""

    spec: TreeSpec
    leaves: tuple[_Input | _Made | _Constant, ...]

    def constants(self) -> list[object]:
        """What the run returned beside tensors."""
        return [ref.value for ref in self.leaves if isinstance(ref, _Constant)]

    def rebuild(
        self, made: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[Any, dict[int, Any], list]:
        """(return value, {position of a container argument: its new content}, [(list name, value)])."""

        def leaf(ref: _Input | _Made | _Constant) -> Any:
            match ref:
                case _Input(index):
                    return inputs[index]
                case _Made(index):
                    return made[index]
                case _Constant(value):
                    return value

        return tree_unflatten([leaf(ref) for ref in self.leaves], self.spec)


def blank(lists: Lists | None) -> Lists | None:
    """Lists of the same lengths with nothing in them: hooks look at the length, never at what others
    recorded.
    """
    if lists is None:
        return None
    return {key: [None] * len(value) if isinstance(value, list) else value for key, value in lists.items()}


def run_layer(
    forward: Callable[..., Any],
    leaves: Sequence[Any],
    spec: TreeSpec,
    recording: Recording,
    lists: Lists | None,
) -> tuple[list[torch.Tensor], Layout]:
    """Call `forward(*args, **kwargs)` on the flattened arguments; returns the new tensors and where they
    belong.

    Containers among the arguments are fresh copies, so the caller's own stay untouched until `apply_changes`.
    """
    args, kwargs = tree_unflatten(list(leaves), spec)
    containers = _containers(args, kwargs)
    before = [tree_flatten(container) for container in containers]
    fresh = blank(lists)
    with recording.replaced(fresh):
        output = forward(*args, **kwargs)
    changed = {i: c for i, (c, old) in enumerate(zip(containers, before, strict=True)) if _differs(c, old)}
    recorded = [
        (key, value)
        for key, values in (fresh or {}).items()
        if isinstance(values, list)
        for value in values[len((lists or {})[key]) :]
    ]
    flat, out_spec = tree_flatten((output, changed, recorded))
    inputs = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    made: list[torch.Tensor] = []
    refs: list[_Input | _Made | _Constant] = []
    for leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            refs.append(_Constant(leaf))
        elif id(leaf) in inputs:
            refs.append(_Input(inputs[id(leaf)]))
        else:
            refs.append(_Made(len(made)))
            made.append(leaf)
    return made, Layout(out_spec, tuple(refs))


def apply_changes(
    args: Sequence[Any], kwargs: dict[str, Any], changed: dict[int, Any], recorded: list, lists: Lists | None
) -> None:
    """Write what a run changed into the caller's own containers and recording lists."""
    for i, new in changed.items():
        container = _containers(args, kwargs)[i]
        if isinstance(container, list):
            container[:] = new
        else:
            container.clear()
            container.update(new)
    for key, value in recorded:
        assert lists is not None
        lists[key].append(value)


def _containers(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The outermost mutable containers among the arguments, also inside tuples."""
    found: list[Any] = []
    waiting = [*reversed(kwargs.values()), *reversed(args)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, MutableMapping)):
            found.append(value)
        elif isinstance(value, tuple):
            waiting.extend(reversed(value))
    return found


def _differs(container: Any, before: tuple[list[Any], TreeSpec]) -> bool:
    leaves, spec = tree_flatten(container)
    return spec != before[1] or any(new is not old for new, old in zip(leaves, before[0], strict=True))
