#!/usr/bin/env python
"""Where every byte of device memory goes in a training step of a 27B model, without a GPU.

    python scripts/measure_device_memory.py                       4 of the 64 layers, 512 tokens, one place
    python scripts/measure_device_memory.py --places 2 --seq 1024 --json result.json

The layers have the real shapes (hidden 5120, MLP 17408, three gated delta nets to one attention layer, 0.77
GB each in bf16; an untied output projection of 248320 rows) and compute on the simulated accelerator of the
tests, whose memory is counted to the byte and whose arithmetic the CPU does: some minutes a step. Peak memory
does not depend on the depth but for the adapter, of which 64 layers hold 16 times as much as 4 do; so the
peak of the whole model is the measured one with the adapter's part exchanged.

Weights are zeros in a sparse file. The peak is taken apart by windows: from visit to visit of a layer, and
in between the output projection with its loss, and the optimizer. In each window what is there for longer
(places for weights, adapter, its gradients, optimizer, a kept graph) is known, and the rest are activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# OpenMP reads it when torch loads; see `_bench.environment`.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
from _bench import random_batch, streamed_model, table, trained, write_json
from make_checkpoint import TOKEN_IDS, on_meta
from transformers import PreTrainedConfig, Qwen3_5Config

from airtune.model.stream import Stream, Visit, stream_of
from tests.sim import Simulator, load_sim

if TYPE_CHECKING:
    from peft import PeftModel

REAL_LAYERS = 64
REAL = {"vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip


def config_of(shapes: dict[str, int], layers: int) -> PreTrainedConfig:
    """The image-text model around such a decoder, with a token image tower."""
    vocab, hidden = shapes["vocab_size"], shapes["hidden_size"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
    config = Qwen3_5Config(
        text_config={**shapes, "num_hidden_layers": layers, "tie_word_embeddings": False, **TOKEN_IDS},
        vision_config={**vision, "out_hidden_size": hidden, "num_position_embeddings": 16},
        image_token_id=vocab - 1,
        video_token_id=vocab - 2,
        vision_start_token_id=vocab - 3,
        vision_end_token_id=vocab - 4,
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def write_zeros(folder: Path, config: PreTrainedConfig) -> None:
    """A bf16 checkpoint that takes no room on disk: a header, and a hole where the tensors are."""
    header, end = {}, 0
    for name, tensor in on_meta(config).state_dict().items():
        nbytes = tensor.numel() * torch.bfloat16.itemsize
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)


@dataclass
class Window:
    """The device's memory between two marks, in bytes.

    Attributes:
        kept: what was there from the start besides: the graph of the last layer's forward, which is its work
            in its own windows.
        work: what came and went.
    """

    name: str
    peak: int
    places: int
    adapter: int
    gradients: int
    optimizer: int
    kept: int

    @property
    def work(self) -> int:
        return self.peak - self.places - self.adapter - self.gradients - self.optimizer - self.kept

    @property
    def state(self) -> int:
        return self.adapter + self.gradients + self.optimizer


class Ledger:
    """Marks begin and end windows; the state is what it is at the beginning, new gradients are work."""

    def __init__(self, sim: Simulator, model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
        self.windows: list[Window] = []
        self._sim, self._stream, self._optimizer = sim, stream_of(model), optimizer
        self._trained = trained(model)
        self._base = sim.now() - self._places() - sum(self._state())
        self._open: str | None = None

    def mark(self, name: str) -> None:
        """End the window and begin one called `name`."""
        gc.collect()
        self.end()
        places, state, now = self._places(), self._state(), self._sim.now()
        self._open, self._at_start = name, (state, max(0, now - places - sum(state) - self._base))
        self._sim.reset_peak()

    def end(self) -> None:
        if self._open is not None:
            state, kept = self._at_start
            kept = 0 if self._open.startswith("backward") else kept
            self.windows.append(Window(self._open, self._sim.peak(), self._places(), *state, kept))
        self._open = None

    def _places(self) -> int:
        return self._stream._residency.held_nbytes

    def _state(self) -> tuple[int, int, int]:
        """Bytes on the device of adapters, their gradients, and the optimizer."""
        optimizer = [t for s in self._optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return _nbytes(self._trained), _nbytes(gradients), _nbytes(optimizer)


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors if t.device.type == "sim")


@contextmanager
def marks(model: PeftModel, ledger: Ledger) -> Iterator[None]:
    """Windows begin with each visit, and with the end of the decoder, where the output projection begins."""
    stream: Stream = stream_of(model)
    kinds = model.config.get_text_config().layer_types

    def visit(seen: Visit) -> None:
        sys.stderr.write(f"{time.perf_counter():.0f} s: {seen.direction} {seen.index}\n")
        ledger.mark(f"{seen.direction}, {kinds[seen.index].replace('_', ' ')}")

    base = model.get_base_model()
    hook = base.get_decoder().register_forward_hook(lambda *_: ledger.mark("output projection and loss"))  # type: ignore[operator, union-attr]
    stream.observers.append(visit)
    try:
        yield
    finally:
        stream.observers.remove(visit)
        hook.remove()


def start_optimizer(model: PeftModel) -> torch.optim.Optimizer:
    """AdamW with its moments there already, as from the second step on.

    Without `foreach`, which would make another copy of the adapter: so does the fused one of an accelerator,
    which the simulated device lacks.
    """
    optimizer = torch.optim.AdamW(trained(model), lr=0.0, foreach=False)
    for parameter in trained(model):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def train_step(sim: Simulator, model: PeftModel, length: int) -> list[Window]:
    optimizer = start_optimizer(model)
    ledger = Ledger(sim, model, optimizer)
    with marks(model, ledger):
        loss = model(**random_batch(model, 1, length, seed=0), use_cache=False).loss
        loss.backward()
        ledger.mark("optimizer")
    optimizer.step()
    ledger.end()
    optimizer.zero_grad()
    return ledger.windows


def largest(windows: Sequence[Window]) -> list[Window]:
    """Of each kind of window the one with the largest peak, in order."""
    by_name: dict[str, Window] = {}
    for window in windows:
        if window.name not in by_name or window.peak > by_name[window.name].peak:
            by_name[window.name] = window
    return list(by_name.values())


def at_depth(window: Window, layer_state: int) -> int:
    """The peak of this window in the model of 64 layers, whose adapter has `layer_state` bytes a layer.

    It is there four times: itself, its gradient, two moments. During a layer's backward its own gradients are
    part of the window's work.
    """
    copies = {"optimizer": 4 * REAL_LAYERS, "backward": 4 * REAL_LAYERS - 1}
    kind = window.name.partition(",")[0]
    return window.peak - window.state + copies.get(kind, 3 * REAL_LAYERS) * layer_state


def report(windows: Sequence[Window], state: int, layers: int) -> str:
    layer_state = state // layers
    rows = [
        {
            "MB": window.name,
            "peak": f"{window.peak / 1e6:.1f}",
            "places": f"{window.places / 1e6:.1f}",
            "adapter": f"{window.adapter / 1e6:.1f}",
            "gradients": f"{window.gradients / 1e6:.1f}",
            "optimizer": f"{window.optimizer / 1e6:.1f}",
            "kept graph": f"{window.kept / 1e6:.1f}",
            "work": f"{window.work / 1e6:.1f}",
            f"peak of {REAL_LAYERS} layers": f"{at_depth(window, layer_state) / 1e6:.1f}",
        }
        for window in largest(windows)
    ]
    most = max(windows, key=lambda window: at_depth(window, layer_state))
    whole = 4 * layer_state * REAL_LAYERS
    least = at_depth(most, layer_state) - whole
    return table(rows) + (
        f"adapter, gradients and optimizer of {REAL_LAYERS} layers: {whole / 1e6:.1f} MB\n"
        f"largest peak of {REAL_LAYERS} layers: {at_depth(most, layer_state) / 1e6:.1f} MB ({most.name}); "
        f"besides that state {least / 1e6:.1f} MB\n"
    )


def measure(sim: Simulator, folder: Path, asked: argparse.Namespace) -> None:
    shapes = TINY if asked.tiny else REAL
    config = config_of(shapes, asked.layers)
    write_zeros(folder, config)
    model = streamed_model(folder, asked.rank, device="sim", micro_batch_size=1)
    stream = stream_of(model)
    stream._residency.places = asked.places
    state = _nbytes(trained(model))
    sys.stdout.write(
        f"{asked.layers} layers of at most {stream._residency.layer_nbytes / 1e6:.1f} MB, "
        f"adapter of rank {asked.rank}: {state // 4 // asked.layers:,} parameters a layer\n"
    )
    windows = train_step(sim, model, asked.seq)
    sys.stdout.write(report(windows, state, asked.layers))
    write_json(
        asked.json,
        {
            "options": {k: str(v) for k, v in vars(asked).items()},
            "windows": [asdict(window) | {"work": window.work} for window in windows],
        },
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Device memory of a training step, on a simulated device.")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4 (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of the row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    parser.add_argument("--places", type=int, default=1, help="for layers (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a toy's shapes, to try the script")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args(argv)
    sim = load_sim()
    with sim.visible(), tempfile.TemporaryDirectory(prefix="airtune-bench-") as folder:
        sim.set_cap(None)
        measure(sim, Path(folder), asked)


if __name__ == "__main__":
    main()
