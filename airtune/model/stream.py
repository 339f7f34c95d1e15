"""The handle of a streamed model: its layers' forwards are ours until `close`.

No wrapper modules: only `forward` on each decoder-layer instance is replaced, so that parameter names,
PEFT's keys and transformers' own code stay what they are. transformers drives everything; this only says,
for each call of a layer, how many rows the batch has and whether a cache may reach it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from airtune.autograd.row_split import MicroBatchError, Variant
from airtune.autograd.streamed_layer import Direction, GraphSize, StreamedLayer
from airtune.model.places import Places
from airtune.model.recording import TransformersRecording
from airtune.model.request import check_micro_batch_size
from airtune.weights.budget import SlotBudget
from airtune.weights.experts import ExpertWindow
from airtune.weights.memory import available_memory_nbytes
from airtune.weights.residency import Residency

__all__ = ["MicroBatchError", "Stream", "Visit", "stream_of"]


@dataclass(frozen=True)
class Visit:
    """The start of a visit: layer `index` of `count` (from 0), in the forward or the backward pass."""

    direction: Direction
    index: int
    count: int


@dataclass(frozen=True)
class _Pass:
    """A forward pass of the whole model: rows of its batch, and whether adapters are trained by it."""

    rows: int | None
    trains: bool
    micro_batches: int = 1


class Stream:
    """What `airtune.load` leaves on a model; `airtune.stream_of(model)` finds it.

    Attributes:
        observers: called with a `Visit` at the start of every layer visit.
        micro_batch_size: rows that go through a layer at once; None for the whole batch.
        places: how many layers and experts may be on the device at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        residency: Residency,
        window: ExpertWindow | None,
        budget: SlotBudget,
    ) -> None:
        self.observers: list[Callable[[Visit], None]] = []
        self._model, self._residency, self._window = model, residency, window
        self.places = Places(residency, window, budget)
        self._passes: list[_Pass] = []  # one in another, where something calls the model from within it
        self._signature = inspect.signature(type(model).forward)
        self._takes_use_cache = any(
            name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD
            for name, parameter in self._signature.parameters.items()
        )
        self._undo: list[Callable[[], None]] = []
        recording = TransformersRecording()
        self._layers = [
            StreamedLayer(module, path, module.forward, _LayerWeights(self, i), recording)
            for i, (path, module) in enumerate(layers.items())
        ]
        for layer in self._layers:
            layer.module.forward = _Forward(self, layer)  # type: ignore[method-assign]
        self._hooks = [
            model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            model.register_forward_hook(self._leave_model, always_call=True),
        ]
        _STREAMS[model] = weakref.ref(self)

    @property
    def micro_batch_size(self) -> int | None:
        return self._layers[0].micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int | None) -> None:
        check_micro_batch_size(rows)
        for layer in self._layers:
            layer.micro_batch_size = rows

    @property
    def device(self) -> torch.device:
        """Where the layers compute; the model itself says cpu, which is where its inputs and outputs live."""
        return self._residency.device

    def counters(self) -> dict[str, float]:
        """Totals since `load`: bytes_read, bytes_copied, stall_s, compute_s, visits, cache_hits,
        expert_loads; and peak_device_bytes.
        """
        counted: dict[str, float] = asdict(self._residency.counters)
        if self.device.type != "cpu":
            counted["peak_device_bytes"] = self.places.peak_nbytes()
        return counted

    def check_room(self, rows: int, length: int) -> int:
        """Bytes of host memory in which the hidden states of a training step wait for backward: one for each
        layer; more where layers hand on more than that.

        Args:
            rows, length: of the largest step; the length in tokens.

        Raises:
            ValueError: it is not there.
        """
        width: int = self._model.config.get_text_config().hidden_size
        one_nbytes = rows * length * width * self._model.dtype.itemsize
        if self.device.type != "cpu":
            one_nbytes = 1 << (one_nbytes - 1).bit_length()  # pinned memory comes in powers of two
        nbytes = one_nbytes * len(self._layers)
        if nbytes > (available_nbytes := available_memory_nbytes()):
            raise ValueError(
                f"a step of {rows} rows of {length} tokens leaves {nbytes / 1e9:.1f} GB of hidden states in "
                f"host memory until backward, and {available_nbytes / 1e9:.1f} GB are available: lower "
                "trainer.per_device_train_batch_size or data.max_length"
            )
        return nbytes

    @contextmanager
    def rows_run_otherwise(
        self, start: int, inside: Callable[[nn.Module], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Within, rows of a batch from `start` on run through each layer inside `inside(layer)`, in the same
        visit as the rows before them.

        For forward passes without gradients, and if `start` is not 0 without a cache; else, or where the
        batch of a layer cannot be split, the pass raises MicroBatchError.
        """
        for layer in self._layers:
            layer.variant = Variant(start, partial(inside, layer.module))
        try:
            yield
        finally:
            for layer in self._layers:
                layer.variant = None

    def on_close(self, undo: Callable[[], None]) -> None:
        """Have `close` call `undo`, before what was registered earlier."""
        self._undo.append(undo)

    def close(self) -> None:
        """Take everything of ours off the model. Its layers are then without weights: reload it with
        transformers.
        """
        if _STREAMS.pop(self._model, None) is None:
            return
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            del layer.module.forward
        while self._undo:
            self._undo.pop()()

    def run_layer(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a layer, in place of its forward."""
        current = self._passes[-1] if self._passes else _Pass(rows=None, trains=self._trains())
        if current.trains and torch.is_grad_enabled():
            # The recompute would append to a cache a second time: right loss, wrong gradients.
            args = tuple(_without_cache(a) for a in args)
            kwargs = {k: _without_cache(v) for k, v in kwargs.items()}
            if "use_cache" in kwargs:
                kwargs["use_cache"] = False
        return layer(args, kwargs, current.rows)

    @contextmanager
    def visit(self, index: int, direction: Direction) -> Iterator[object]:
        for observer in self.observers:
            observer(Visit(direction, index, len(self._layers)))
        with self._residency.visit(index, direction) as held:
            yield held
        self.places.after_visit(direction)

    def _enter_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._passes.append(_Pass(rows=None, trains=False))  # first of all: it is taken off in any case
        given = self._signature.bind_partial(model, *args, **kwargs).arguments
        given = {**given.get("kwargs", {}), **given}
        batch = given.get("input_ids")
        batch = given.get("inputs_embeds") if batch is None else batch
        trains = self._trains()
        generates = not trains and given.get("labels") is None
        caches = [value for value in given.values() if isinstance(value, Cache)]
        whole = generates and given.get("use_cache") is not False
        rows = None if whole else self.micro_batch_size
        tokens = _tokens_at_once(given.get("input_ids"), batch, rows)
        batch_size = len(batch) if isinstance(batch, torch.Tensor) else None
        micro_batches = -(-batch_size // rows) if batch_size and rows else 1
        self._passes[-1] = _Pass(batch_size, trains, micro_batches)
        self.places.begin(trains=trains, generates=generates, tokens=tokens, micro_batches=micro_batches)
        for i, layer in enumerate(self._layers):
            layer.keep_graph = i in self.places.graphs
            layer.graph_size = GraphSize() if self.places.counts_graphs else None
        # Some models keep their state on themselves rather than in a cache object; and whoever wants a loss
        # wants no cache, which would keep the batch from being split.
        wants_loss = given.get("labels") is not None and not caches
        if self._takes_use_cache and (trains or (wants_loss and "use_cache" not in given)):
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    def _trains(self) -> bool:
        """Whether gradients are wanted now. Only adapters can have any."""
        if not torch.is_grad_enabled():
            return False
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if any(parameter.is_meta for parameter in trainable):
            raise ValueError(
                "weights of the base model require gradients, but they are streamed and stay frozen; set "
                "requires_grad on adapters only. An adapter is put on by airtune.load(..., lora=...) or "
                "(..., adapter=folder); PEFT cannot wrap what it returns"
            )
        return bool(trainable)

    def _leave_model(self, model: nn.Module, args: Any, output: Any) -> None:
        micro_batches = self._passes.pop().micro_batches
        self.places.end(
            [
                0 if layer.graph_size is None else layer.graph_size.nbytes // micro_batches
                for layer in self._layers
            ]
        )


def _tokens_at_once(ids_BS: object, embedded_BSD: object, rows: int | None) -> int:
    """Tokens of the first `rows` rows of a batch, given as ids or as embeddings."""
    if isinstance(ids_BS, torch.Tensor):
        return ids_BS[:rows].numel()
    return embedded_BSD[:rows, ..., 0].numel() if isinstance(embedded_BSD, torch.Tensor) else 0


def _without_cache(value: Any) -> Any:
    """None for a cache that is empty.

    Raises:
        ValueError: it is not: leaving it out would change the result.
    """
    if not isinstance(value, Cache):
        return value
    if value.get_seq_length() > 0:
        raise ValueError(
            "a filled KV cache was given while gradients are on; the layers of a streamed model are "
            "recomputed and cannot use it. Call the model under torch.no_grad(), or give all tokens at once"
        )
    return None


class _Forward:
    """Stands where a layer's `forward` was."""

    def __init__(self, stream: Stream, layer: StreamedLayer) -> None:
        self._stream, self._layer = stream, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stream.run_layer(self._layer, args, kwargs)


class _LayerWeights:
    """One layer's side of the residency, as the autograd room wants it."""

    def __init__(self, stream: Stream, index: int) -> None:
        self._stream, self._index = stream, index

    @property
    def device(self) -> torch.device:
        return self._stream.device

    def visit(self, direction: Direction) -> Any:
        return self._stream.visit(self._index, direction)


# The model keeps its stream alive (by its hooks); a strong reference from here would keep both for ever.
_STREAMS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Stream]] = weakref.WeakKeyDictionary()


def stream_of(model: nn.Module) -> Stream:
    """The stream of a model that `airtune.load` returned, also through a PeftModel around it.

    Raises:
        ValueError: the model is not streamed (any more).
    """
    for module in model.modules():
        if (reference := _STREAMS.get(module)) is not None and (stream := reference()) is not None:
            return stream
    raise ValueError(f"this {type(model).__name__} is not streamed; get one from airtune.load")
