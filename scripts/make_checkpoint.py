#!/usr/bin/env python
"""Write a checkpoint of random weights, of any size, for measuring speed and memory without a download.

    python scripts/make_checkpoint.py /big/disk/llama-8b --kind llama --params 8B
    python scripts/make_checkpoint.py /tmp/wide --kind qwen3_5 --params 5B --hidden 5120

The model is laid out on the meta device, then drawn and written shard by shard: a 70B checkpoint (140 GB in
bf16) takes no more memory than one shard and a block of random numbers. Matrices are N(0, 0.02). Norms,
biases and decays are what transformers starts them at, with noise: no tensor is constant, so a weight that
is not loaded shows. A tensor depends on the seed and its name alone, not on the shard size.

What it gives up: the model says nothing sensible, and its loss is about log(vocabulary).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import log
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
MATRIX_STD, VECTOR_STD = 0.02, 0.1
DRAWN_AT_ONCE = 1 << 24  # 64 MB of random numbers in fp32
HIDDEN_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
HIDDEN_PER_LAYER = 48  # width over depth of the shapes that are chosen; models in use have 30-130
SPECIAL = ("<pad>", "<bos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALLEST_VOCAB = 264  # 256 bytes, SPECIAL, and four markers of images
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}


def llama(hidden: int, layers: int, vocab: int) -> PreTrainedConfig:
    """Grouped-query attention and a gated MLP in every layer."""
    return _LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        **_heads(hidden, 128),
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        **TOKEN_IDS,
    )


def qwen3_5(hidden: int, layers: int, vocab: int) -> PreTrainedConfig:
    """Three gated delta nets to one attention layer, inside an image-text model with a token vision tower."""
    linear_dim = min(128, hidden // 4)
    heads = _heads(hidden, 256)
    rotary_pairs = heads["head_dim"] // 8  # a quarter of the head turns, in pairs
    text = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        **heads,
        "linear_num_key_heads": hidden // linear_dim,
        "linear_num_value_heads": 2 * hidden // linear_dim,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [rotary_pairs - 2 * (rotary_pairs // 3), rotary_pairs // 3, rotary_pairs // 3],
        },
        **TOKEN_IDS,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
    vision |= {"out_hidden_size": hidden, "num_position_embeddings": 16}
    return _Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_id=vocab - 1,
        video_token_id=vocab - 2,
        vision_start_token_id=vocab - 3,
        vision_end_token_id=vocab - 4,
        tie_word_embeddings=False,
    )


def _heads(hidden: int, head_dim: int) -> dict[str, int]:
    head_dim = min(head_dim, hidden // 4)
    heads = hidden // head_dim
    return {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}


# Called with more arguments than their signatures name.
_LlamaConfig: Callable[..., PreTrainedConfig] = transformers.LlamaConfig
_Qwen3_5Config: Callable[..., PreTrainedConfig] = transformers.Qwen3_5Config
KINDS: Mapping[str, Callable[[int, int, int], PreTrainedConfig]] = {"llama": llama, "qwen3_5": qwen3_5}
PERIOD = {"llama": 1, "qwen3_5": 4}  # the layer types repeat after so many layers


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config`, on the meta device."""
    assert config.architectures
    with torch.device("meta"):
        model: PreTrainedModel = getattr(transformers, config.architectures[0])(config)
    return model


def choose_config(kind: str, parameters: int, vocab: int, hidden: int | None = None) -> PreTrainedConfig:
    """The config with about so many parameters: of the width asked for, or of a usual width for its depth.

    Raises ValueError if the vocabulary is too small for the tokenizer, or one period of layers is too large.
    """
    if vocab < SMALLEST_VOCAB or (hidden or 64) % 64:
        raise ValueError(
            f"need a vocabulary of {SMALLEST_VOCAB} or more and a hidden size that is a multiple of 64, "
            f"got {vocab} and {hidden}"
        )
    build, period = KINDS[kind], PERIOD[kind]
    shapes: list[tuple[float, int, int]] = []
    for width in [hidden] if hidden else HIDDEN_SIZES:
        one, two = (_count(build(width, n * period, vocab)) for n in (1, 2))
        more_periods = round((parameters - one) / (two - one))
        if more_periods >= 0:
            layers = (1 + more_periods) * period
            size_error = abs(log((one + more_periods * (two - one)) / parameters))
            shapes.append((4 * size_error + abs(log(width / layers / HIDDEN_PER_LAYER)), width, layers))
    if not shapes:
        raise ValueError(
            f"no {kind} with vocabulary {vocab} and hidden size {hidden or HIDDEN_SIZES[0]} or more has so "
            f"few parameters as {parameters:,}: ask for more, or for a smaller --vocab or --hidden"
        )
    _, width, layers = min(shapes)
    return build(width, layers, vocab)


def _count(config: PreTrainedConfig) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


@torch.no_grad()
def initialise_vectors(model: PreTrainedModel) -> None:
    """Make real, as the model starts them, the parameters of modules that hold vectors only."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.dim() < 2 for parameter in own):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)


def draw(name: str, tensor: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """The random values of a tensor: around its own values where it has any, else around zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it heeds 32 bits only
    if not tensor.is_meta:
        return tensor.float().add(VECTOR_STD * torch.randn(tensor.shape, generator=generator)).to(dtype)
    drawn = torch.empty(tensor.numel(), dtype=dtype)
    for block in drawn.split(DRAWN_AT_ONCE):
        block.copy_(MATRIX_STD * torch.randn(block.shape, generator=generator))
    return drawn.view(tensor.shape)


def plan_shards(tensors: Mapping[str, Tensor], itemsize: int, shard_nbytes: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `shard_nbytes`; a larger tensor is a group of its own."""
    group: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        if group and nbytes + tensor.numel() * itemsize > shard_nbytes:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += tensor.numel() * itemsize
    yield group


def write(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, shard_nbytes: int, seed: int = 0
) -> int:
    """Write the checkpoint into the new or empty `folder`; returns the number of parameters.

    Raises ValueError if `folder` holds anything. The config comes last: a folder without one is unfinished.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    model = on_meta(config)
    initialise_vectors(model)
    tensors = model.state_dict()
    shards = list(plan_shards(tensors, dtype.itemsize, shard_nbytes))
    total_nbytes = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    weight_map: dict[str, str] = {}
    with tqdm(total=total_nbytes, unit="B", unit_scale=True, desc=folder.name) as bar:
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            shard = {name: draw(name, tensors[name], dtype, seed) for name in names}
            save_file(shard, folder / file, metadata={"format": "pt"})
            bar.update(sum(tensor.nbytes for tensor in shard.values()))
            shard.clear()  # before the next one is drawn
            weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    byte_tokenizer().save_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)
    return sum(tensor.numel() for tensor in tensors.values())


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and the special ones of a chat template: any text becomes ids below 260."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[3],
        chat_template=CHAT_TEMPLATE,
    )


def number(text: str) -> int:
    """`0.6B` -> 600_000_000, `400MB` -> 400_000_000, `12` -> 12."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGBT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a number such as 400MB or 0.6B, got {text!r}")
    return round(float(match[1]) * UNITS[match[2].upper()])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of random weights.")
    parser.add_argument("out", type=Path, help="a new or empty folder")
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--params", type=number, default=number("0.6B"), help="about so many, such as 0.6B")
    parser.add_argument(
        "--hidden", type=int, help="hidden size, a multiple of 64 (default: what suits --params)"
    )
    parser.add_argument("--vocab", type=int, default=32768, help=f"vocabulary, {SMALLEST_VOCAB} or more")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--shard-size", type=number, default=number("400MB"), help="bytes a file, such as 400MB"
    )
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    try:
        config = choose_config(asked.kind, asked.params, asked.vocab, asked.hidden)
        parameters = write(asked.out, config, DTYPES[asked.dtype], asked.shard_size, asked.seed)
    except ValueError as error:
        parser.error(str(error))
    text = config.get_text_config()
    shape = f"{text.num_hidden_layers} layers of hidden size {text.hidden_size}, vocabulary {text.vocab_size}"
    sys.stdout.write(f"{asked.out}: {asked.kind}, {parameters:,} parameters in {asked.dtype}, {shape}\n")


if __name__ == "__main__":
    main()
