"""Tiny random checkpoints, one per way in which a decoder can be unlike the others.

A streaming bug is seldom loud: a tensor that is never loaded, a gradient that is lost on a side road, a layer
that is recomputed with the wrong dropout mask all leave a plausible loss. Each model here is the smallest
(0.2-0.9 M parameters, built in a tenth of a second) that shows one such road, and is chosen for that alone:

    llama, llama_tied   plain; output projection tied to the embedding, so that no such tensor is in the file
    gpt2                Conv1D instead of Linear, learned positions, dropout on by default
    gemma2              soft caps on attention and logits, sliding and full attention in turn
    gemma4_text         keys and values handed from layer to layer in a dict, an embedding for every layer
    doge                a learned attention bias: SDPA chooses another kernel when it needs a gradient
    dory                layers called twice in one forward
    zamba               weights shared between layers, state-space layers, some tensors kept in float32
    mixtral             experts; an auxiliary loss made from router logits that hooks record in the layers
    qwen3_moe_mixed     expert layers and a dense layer in one stack
    deepseek_v3         low-rank attention, expert groups, shared experts, routers kept in float32
    gpt_oss             experts stored packed (3-D) and with biases, attention sinks
    kimi_k25            one stored tensor becomes several parameters; an image-text model around the decoder
    kimi_linear         linear attention with convolutions
    mamba2              no attention at all, and projections that PEFT refuses
    qwen3_5__vl         linear and full attention, image-text
    qwen4_exp__vl       several residual streams, an n-gram table stored in shards, experts, shared top-k
    qwen3_vl_moe        stacks of experts that are turned where their shape is not the module's
    mllama              a cross-attention layer that a text-only forward skips

None of them needs more inputs than ids, mask and labels.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 384
FIRST_SPECIAL_ID = 376  # ids from here on mark images and the like: random text stays below

Config = Mapping[str, object]


@dataclass(frozen=True)
class Tiny:
    """A model class, the path of its decoder layers, its config, and the projections PEFT cannot adapt."""

    class_name: str
    layers: str
    config: Config
    refuses_lora: tuple[str, ...] = ()


# In models that once had a module for each expert, PEFT takes these names for parameters of the fused ones.
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

# The tables are laid out by hand: one paragraph a model.
# fmt: off
SMALL: Config = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4,
                 "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE: Config = {**SMALL, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 256}
WINDOW: Config = {"head_dim": 16, "sliding_window": 8}
EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET: Config = {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT: Config = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                  "v_head_dim": 16}
DEEPSEEK: Config = {**BASE, **LATENT, "q_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 8,
                    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
TOWER: Config = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
QWEN_TOWER: Config = {**TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
                      "num_position_embeddings": 16}
KIMI_TOWER: Config = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "pos_emb_height": 4, "pos_emb_width": 4}
MARKERS: Config = {"image_token_id": 383, "video_token_id": 382,
                   "vision_start_token_id": 381, "vision_end_token_id": 380}

ZOO: Mapping[str, Tiny] = {
    "llama": Tiny("LlamaForCausalLM", "model.layers", BASE),

    "llama_tied": Tiny("LlamaForCausalLM", "model.layers", {**BASE, "tie_word_embeddings": True}),

    "gpt2": Tiny("GPT2LMHeadModel", "transformer.h", {
        "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),

    "gemma2": Tiny("Gemma2ForCausalLM", "model.layers", {**BASE, **WINDOW, "query_pre_attn_scalar": 16}),

    "gemma4_text": Tiny("Gemma4ForCausalLM", "model.layers", {
        **BASE, **WINDOW, "global_head_dim": 32, "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16, "final_logit_softcapping": 30.0}),

    "doge": Tiny("DogeForCausalLM", "model.layers", {**BASE, "keep_window_size": 8}),

    "dory": Tiny("DoryForCausalLM", "model.layers", {
        **BASE, **WINDOW, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
        "n_recurrent_loops": 2}),

    "zamba": Tiny("ZambaForCausalLM", "model.layers", {
        **BASE, "num_key_value_heads": 4, "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
        "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}),

    "mixtral": Tiny("MixtralForCausalLM", "model.layers", {
        **BASE, "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True,
        "router_aux_loss_coef": 0.1}),

    "qwen3_moe_mixed": Tiny("Qwen3MoeForCausalLM", "model.layers", {
        **BASE, **EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "decoder_sparse_step": 1},
        refuses_lora=TAKEN_FOR_EXPERTS),

    "deepseek_v3": Tiny("DeepseekV3ForCausalLM", "model.layers", DEEPSEEK, refuses_lora=TAKEN_FOR_EXPERTS),

    "gpt_oss": Tiny("GptOssForCausalLM", "model.layers", {
        **BASE, **WINDOW, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),

    "kimi_k25": Tiny("Kimi_K25ForConditionalGeneration", "model.language_model.layers", {
        **MARKERS, "text_config": {**DEEPSEEK, "model_type": "deepseek_v3"}, "vision_config": KIMI_TOWER,
        "projection_hidden_size": 64}),

    "kimi_linear": Tiny("KimiLinearForCausalLM", "model.layers", {
        **BASE, **LATENT, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "linear_head_dim": 16,
        "linear_num_heads": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32}),

    "mamba2": Tiny("Mamba2ForCausalLM", "backbone.layers", {
        **SMALL, "num_heads": 8, "head_dim": 16, "state_size": 8, "chunk_size": 8},
        refuses_lora=("out_proj",)),

    "qwen3_5__vl": Tiny("Qwen3_5ForConditionalGeneration", "model.language_model.layers", {
        **MARKERS, "text_config": {**BASE, **DELTA_NET, "head_dim": 16}, "vision_config": QWEN_TOWER}),

    "qwen4_exp__vl": Tiny("Qwen4ExpForConditionalGeneration", "model.language_model.layers", {
        **MARKERS, "vision_config": QWEN_TOWER, "text_config": {
            **BASE, **EXPERTS, **DELTA_NET, "head_dim": 16, "shared_expert_intermediate_size": 32,
            "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 64,
            "ngram_vocab_size_base": 500, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 4,
            "heads_per_ngram": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 16, "indexer_compress_ratio": 4}}),

    "qwen3_vl_moe": Tiny("Qwen3VLMoeForConditionalGeneration", "model.language_model.layers", {
        **MARKERS, "vision_config": QWEN_TOWER, "text_config": {**BASE, **EXPERTS, "head_dim": 16}}),

    "mllama": Tiny("MllamaForCausalLM", "model.layers", {**BASE, "cross_attention_layers": [3]}),
}
# fmt: on
NAMES: tuple[str, ...] = tuple(ZOO)


def from_config(name: str, seed: int = 0) -> PreTrainedModel:
    """The model called `name` as transformers begins it, in float32."""
    cls = model_class(name)
    config_class = cast(type, cls.config_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast(PreTrainedModel, cls._from_config(config_class(**ZOO[name].config), dtype=torch.float32))


def model_class(name: str) -> type[PreTrainedModel]:
    """The transformers class of the model called `name`."""
    return cast(type[PreTrainedModel], getattr(transformers, ZOO[name].class_name))


def make(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, shard_size: str = "400KB"
) -> Path:
    """Write the checkpoint called `name` into `folder`, in shards of at most `shard_size`; returns `folder`.

    Every floating-point tensor is stored in `dtype`, also those that a loaded model keeps in float32. What
    this process has made before is copied, which takes a tenth of the time.
    """
    key = (repr(ZOO[name]), dtype, seed, shard_size)
    if key not in _MADE:
        _MADE[key] = TemporaryDirectory(prefix="airtune-zoo-")
        write(name, Path(_MADE[key].name), dtype, seed, shard_size)
    shutil.copytree(_MADE[key].name, folder, dirs_exist_ok=True)
    return folder


_MADE: dict[tuple[object, ...], TemporaryDirectory[str]] = {}


def write(name: str, folder: Path, dtype: torch.dtype, seed: int, shard_size: str) -> Path:
    """`make` from the beginning."""
    model = from_config(name, seed)
    randomise(model, torch.Generator().manual_seed(seed + zlib.crc32(name.encode())))
    model.tie_weights()
    model.to(dtype=dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Leave no stored tensor constant: a norm left at one would hide that its weight was never read."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2 or tensor.numel() < 64:
            tensor.add_(0.1 * noise)  # norms, biases, decays: around what the model starts them at
        else:
            tensor.copy_((0.2 if "embed" in name else 0.12) * noise)


def random_ids(batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    """Random text, `ids_BS`, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, FIRST_SPECIAL_ID, (batch, length), generator=generator)


@cache
def lora_targets(name: str) -> tuple[str, ...]:
    """Full names of the projections in the decoder layers of a model that PEFT can put LoRA on.

    Plain `nn.Linear` and `Conv1D` only: subclasses such as routers may return tuples.
    """
    tiny = ZOO[name]
    return tuple(
        f"{tiny.layers}.{path}"
        for path, module in from_config(name).get_submodule(tiny.layers).named_modules()
        if type(module) in (nn.Linear, Conv1D) and path.rsplit(".", 1)[-1] not in tiny.refuses_lora
    )
