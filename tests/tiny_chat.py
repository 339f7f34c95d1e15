"""A tiny chat model on disk, and adapters for it that change what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_tokenizer import tiny_tokenizer

CONTEXT = 256  # tokens


def make_model(folder: Path, *, seed: int = 0, layers: int = 3, **tokenizer_options: Any) -> Path:
    """A random Llama with the tiny tokenizer. Its weights are large enough for texts that vary."""
    tokenizer = tiny_tokenizer(**tokenizer_options)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.2,
            max_position_embeddings=CONTEXT,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path) -> Path:
    """A LoRA adapter whose update is not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
        model.save_pretrained(str(folder))
    return folder
