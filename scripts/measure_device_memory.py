#!/usr/bin/env python
"""Where every byte of device memory goes in a training step of a large model, without a GPU.

    python scripts/measure_device_memory.py                       Qwen3.8-27B: 4 of its 64 layers, 512 tokens
    python scripts/measure_device_memory.py --places 2 --seq 1024 --json result.json
    python scripts/measure_device_memory.py --model qwen38_flash_next     a mixture of 512 experts a layer

The layers have the real shapes and compute on the simulated accelerator of the tests, whose memory is counted
to the byte and whose arithmetic the CPU does: some minutes a step. Peak memory does not depend on the depth
but for the adapter, of which 64 layers hold 16 times as much as 4 do; so the peak of the whole model is the
measured one with the adapter's part exchanged.

The checkpoint is a sparse file: large matrices and experts are holes (zeros), and what decides how tokens are
routed is random. The peak is taken apart by windows: from visit to visit of a layer, and in between the
output projection with its loss, and the optimizer. In each window what is there for longer (places for
weights and for experts, adapter, its gradients, optimizer, a kept graph) is known, and the rest are
activations.
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
from typing import TYPE_CHECKING, Any

# OpenMP reads it when torch loads; see `_bench.environment`.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
from _bench import random_batch, streamed_model, table, trained, write_json
from make_checkpoint import TOKEN_IDS
from plan_memory import laid_out
from transformers import PreTrainedConfig, Qwen3_5Config, Qwen4ExpConfig

from airtune.model.stream import Stream, Visit, stream_of
from tests.sim import Simulator, load_sim

if TYPE_CHECKING:
    from peft import PeftModel

TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2],
                "ple_embed_dim": 64, "ngram_vocab_size_base": 500, "make_ngram_vocab_size_divisible_by": 16,
                "split_ngram_parts": 4, "heads_per_ngram": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4}  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """A model's layers as they are, and as a toy's, around which a token image tower is put."""

    architecture: str
    config_class: type[PreTrainedConfig]
    layers: int
    real: dict[str, Any]
    tiny: dict[str, Any]

    def config(self, layers: int, *, tiny: bool) -> PreTrainedConfig:
        shapes = self.tiny if tiny else self.real
        vocab, hidden = shapes["vocab_size"], shapes["hidden_size"]
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
        config = self.config_class(
            text_config={**shapes, "num_hidden_layers": layers, "tie_word_embeddings": False, **TOKEN_IDS},
            vision_config={**vision, "out_hidden_size": hidden, "num_position_embeddings": 16},
            image_token_id=vocab - 1,
            video_token_id=vocab - 2,
            vision_start_token_id=vocab - 3,
            vision_end_token_id=vocab - 4,
        )
        config.architectures = [self.architecture]
        return config


# The tables are laid out by hand. fmt: off
MODELS = {
    # 0.77 GB a layer in bf16, three gated delta nets to one attention layer, a head of 248320 rows.
    "qwen38_27b": Shapes(
        "Qwen3_5ForConditionalGeneration",
        Qwen3_5Config,
        layers=64,
        tiny=TINY,
        real={
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    # 512 experts of 9.8 MB a layer, of which a token uses ten: 125B parameters, and 51B in an n-gram table of
    # 320 million rows. What is not published (heads of the delta net) is as transformers has it.
    "qwen38_flash_next": Shapes(
        "Qwen4ExpForConditionalGeneration",
        Qwen4ExpConfig,
        layers=48,
        tiny={**TINY, **TINY_EXPERTS},
        real={
            "vocab_size": 248320,
            "hidden_size": 2560,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "hc_count": 4,
            "hc_lowrank": 320,
            "ple_layer_ids": [2],
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
}
# fmt: on
USED_IDS = 4096  # of the vocabulary: only their embeddings are there
# Smaller tensors are random: routers, norms, whatever mixes streams. With zeros all tokens would go one way.
RANDOM_NUMEL = 4 * 2**20


def write_sparse(folder: Path, config: PreTrainedConfig) -> None:
    """A bf16 checkpoint that takes little room on disk: a header, small random tensors, and holes."""
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    header, end, small = {}, 0, []
    for name, tensor in laid_out(folder).state_dict().items():
        whole = tensor.dtype == torch.int64  # a computed buffer
        nbytes = tensor.numel() * (8 if whole else 2)
        kind = "I64" if whole else "BF16"
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
        if whole or name.endswith("embed_tokens.weight") or tensor.numel() <= RANDOM_NUMEL:
            small.append((end, tensor))
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for offset, tensor in small:
            file.seek(8 + len(text) + offset)
            file.write(_values(tensor, generator).contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What is stored of a small tensor: a computed one itself, else random bf16; of a table the used rows."""
    if not tensor.is_floating_point():
        return tensor
    rows = tensor.shape[:1] and (min(tensor.shape[0], USED_IDS),)
    return (0.05 * torch.randn((*rows, *tensor.shape[1:]), generator=generator)).bfloat16()


@dataclass
class Window:
    """The device's memory between two marks, in bytes.

    Attributes:
        places: for layers, and for experts.
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
        window = self._stream._window
        return self._stream._residency.held_nbytes + (0 if window is None else window.held_nbytes)

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


def train_step(sim: Simulator, model: PeftModel, rows: int, length: int) -> list[Window]:
    optimizer = start_optimizer(model)
    ledger = Ledger(sim, model, optimizer)
    with marks(model, ledger):
        batch = random_batch(model, rows, length, seed=0)
        batch = {
            name: tensor % USED_IDS if tensor.dtype == torch.int64 else tensor
            for name, tensor in batch.items()
        }
        loss = model(**batch, use_cache=False).loss
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


def at_depth(window: Window, layer_state: int, depth: int) -> int:
    """The peak of this window in a model of `depth` layers, whose adapter has `layer_state` bytes a layer.

    It is there four times: itself, its gradient, two moments. During a layer's backward its own gradients are
    part of the window's work.
    """
    copies = {"optimizer": 4 * depth, "backward": 4 * depth - 1}
    kind = window.name.partition(",")[0]
    return window.peak - window.state + copies.get(kind, 3 * depth) * layer_state


def report(windows: Sequence[Window], state: int, layers: int, depth: int) -> str:
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
            f"peak of {depth} layers": f"{at_depth(window, layer_state, depth) / 1e6:.1f}",
        }
        for window in largest(windows)
    ]
    most = max(windows, key=lambda window: at_depth(window, layer_state, depth))
    whole = 4 * layer_state * depth
    least = at_depth(most, layer_state, depth) - whole
    return table(rows) + (
        f"adapter, gradients and optimizer of {depth} layers: {whole / 1e6:.1f} MB\n"
        f"largest peak of {depth} layers: {at_depth(most, layer_state, depth) / 1e6:.1f} MB ({most.name}); "
        f"besides that state {least / 1e6:.1f} MB\n"
    )


def measure(sim: Simulator, folder: Path, asked: argparse.Namespace) -> None:
    shapes = MODELS[asked.model]
    write_sparse(folder, shapes.config(asked.layers, tiny=asked.tiny))
    model = streamed_model(folder, asked.rank, device="sim", micro_batch_size=asked.micro_batch_size)
    stream = stream_of(model)
    stream.places.hold(asked.places)
    state = _nbytes(trained(model))
    sys.stdout.write(
        f"{asked.layers} layers of at most {stream._residency.layer_nbytes / 1e6:.1f} MB, "
        f"adapter of rank {asked.rank}: {state // 4 // asked.layers:,} parameters a layer\n"
    )
    if stream._window is not None:
        sys.stdout.write(
            f"experts of {stream._window.expert_nbytes / 1e6:.1f} MB, {stream._window.places} at a time\n"
        )
    windows = train_step(sim, model, asked.rows, asked.seq)
    sys.stdout.write(report(windows, state, asked.layers, shapes.layers))
    counters = stream.counters()
    sys.stdout.write(f"copied to the device in the step: {counters['bytes_copied'] / 1e9:.1f} GB\n")
    if loads := counters["expert_loads"]:
        sys.stdout.write(
            f"experts brought in the step: {loads / asked.layers:.0f} a layer, both directions\n"
        )
    write_json(
        asked.json,
        {
            "options": {k: str(v) for k, v in vars(asked).items()},
            "windows": [asdict(window) | {"work": window.work} for window in windows],
        },
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Device memory of a training step, on a simulated device.")
    parser.add_argument("--model", choices=MODELS, default="qwen38_27b", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4 (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="rows at once (default: %(default)s)")
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
