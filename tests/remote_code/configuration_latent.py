"""Config of the model in `modeling_latent.py`. It travels with a checkpoint, as such code does."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class LatentTextConfig(PreTrainedConfig):
    model_type = "latent_text"

    def __init__(
        self,
        vocab_size: int = 384,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        moe_latent_size: int = 32,
        moe_intermediate_size: int = 32,
        residual_block_size: int = 2,
        residuals: str = "list",
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.intermediate_size, self.num_hidden_layers = intermediate_size, num_hidden_layers
        self.num_attention_heads, self.num_experts = num_attention_heads, num_experts
        self.num_experts_per_tok, self.moe_latent_size = num_experts_per_tok, moe_latent_size
        self.moe_intermediate_size, self.residual_block_size = moe_intermediate_size, residual_block_size
        self.residuals = residuals
        super().__init__(**kwargs)


class LatentVisionConfig(PreTrainedConfig):
    model_type = "latent_vision"

    def __init__(self, hidden_size: int = 16, num_hidden_layers: int = 2, **kwargs: Any) -> None:
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        super().__init__(**kwargs)


class LatentConfig(PreTrainedConfig):
    """The two parts are made by hand: transformers does not learn of them, and hands nothing down to them."""

    model_type = "latent"

    def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any) -> None:
        text, vision = text_config or {}, vision_config or {}
        self.text_config = LatentTextConfig(**text) if isinstance(text, dict) else text
        self.vision_config = LatentVisionConfig(**vision) if isinstance(vision, dict) else vision
        super().__init__(**kwargs)
